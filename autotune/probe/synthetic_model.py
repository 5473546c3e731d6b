"""A directory of random weights with a tokenizer, and rows of random tokens, for another tool's command.

`python -m autotune.probe.synthetic_model FILE.json` makes `model/` and `data/` in the current directory. The file has
`model`, the keyword arguments of a transformers config; `device`; `rows`, the number of rows to train on; `lengths`,
their lengths in turn; `held_out`, the lengths of the rows in the test split. With an `objective` other than the next
token rows are of letters, a token each, and `trained_share` is the share of a row that is an answer.
"""

import gc
import itertools
import json
import random
import string
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from autotune.core.objective import Objective
from autotune.core.train_config import TrainConfig
from autotune.probe.model_settings import model_settings
from autotune.trainer.model_builder import build, config_of

PAD = "<pad>"


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that knows its padding token, for which TRL asks, and letters, a token each.

    A model's own class may read its files, and split a text as it always does. It does not split within a word, and of
    letters that nothing merges each stays a token.
    """
    letters = {letter: index for index, letter in enumerate(string.ascii_letters, start=1)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(BPE({PAD: 0} | letters, [])), pad_token=PAD, eos_token=PAD
    )


def main() -> None:
    """Write the model and the data. The weights are bf16, as published ones are."""
    gc.freeze()  # at its end Python would walk the libraries' objects for as long as all the rest takes
    wanted = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.manual_seed(0)
    random.seed(0)
    settings = model_settings(
        TrainConfig(precision="bf16_pure", attention="eager"), wanted["model"]["model_type"]
    )
    model = build(config_of(wanted["model"]), settings, torch.device(wanted["device"]))
    model.save_pretrained("model")
    vocab_size = model.config.get_text_config().vocab_size
    make: Callable[[int, int], dict[str, Any]] = partial(_tokens, vocab_size)
    objective = Objective(wanted.get("objective", Objective.SFT))
    if objective is not Objective.SFT:
        make = partial(_texts, objective, wanted["trained_share"])
    tokenizer().save_pretrained("model")
    Path("data").mkdir()
    lengths = list(itertools.islice(itertools.cycle(wanted["lengths"]), wanted["rows"]))
    if objective is Objective.KTO:  # whose rows are trained on in their order
        random.Random(0).shuffle(lengths)  # noqa: S311
    _write("train", lengths, make)
    _write("test", wanted["held_out"], make)
    print(json.dumps({"rows": wanted["rows"]}))


def _write(split: str, lengths: Iterable[int], make: Callable[[int, int], dict[str, Any]]) -> None:
    with open(f"data/{split}.jsonl", "w", encoding="utf-8") as file:
        file.writelines(
            json.dumps(make(index, length)) + "\n" for index, length in enumerate(lengths)
        )


def _tokens(vocab_size: int, index: int, length: int) -> dict[str, Any]:
    return {"input_ids": torch.randint(vocab_size, (length,)).tolist()}


def _texts(objective: Objective, trained_share: float, index: int, length: int) -> dict[str, Any]:
    """An example of so many tokens, the last of which TRL adds: the end of the text."""

    def text(number: int) -> str:
        return "".join(random.choices(string.ascii_letters, k=number))  # noqa: S311

    if objective is Objective.REWARD:
        return {"chosen": text(length - 1), "rejected": text(length - 1)}
    read = min(max(1, round(length * (1 - trained_share))), max(length - 2, 1))
    answer = max(length - read - 1, 1)
    if objective is Objective.DPO:
        return {"prompt": text(read), "chosen": text(answer), "rejected": text(answer)}
    return {"prompt": text(read), "completion": text(answer), "label": index % 2 == 0}


if __name__ == "__main__":
    main()
