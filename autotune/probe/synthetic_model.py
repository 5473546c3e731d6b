"""Writes a model with random weights, a tokenizer and random rows for another tool to train.

`python -m autotune.probe.synthetic_model FILE.json` makes `model/` and `data/` in the current
directory. In the file, `model` has the keyword arguments of a transformers config, and `device` is
the device that makes the weights. `rows` is the number of training rows. `lengths` lists the rows'
lengths in tokens; a list shorter than `rows` is repeated. `held_out` lists the lengths of the rows
in the test split. With an `objective` other than next-token training (`sft`), a row is a text of
random letters, and each letter is one token. The last part of a row, a fraction of `trained_share`,
is the answer. For GRPO, a row is a prompt, and the padding token, which ends completions, has the
logit 0.
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


def tokenizer(size: int | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer with the padding token that TRL requires, and one token for each letter.

    With `size`, further tokens bring the number of tokens to `size`, so that every id that a model
    generates has a text.

    A model's own tokenizer class, which splits a text into words first, may load this tokenizer's
    files. The tokens stay the same: each text is a single word, and without BPE merges each letter
    is a token.
    """
    letters = {letter: index for index, letter in enumerate(string.ascii_letters, start=1)}
    more = {f"<{index}>": index for index in range(1 + len(letters), size or 0)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(BPE({PAD: 0} | letters | more, [])),
        pad_token=PAD,
        eos_token=PAD,
    )


def main() -> None:
    """Write the model and the data; the weights are bf16, as in published models."""
    gc.freeze()  # otherwise, garbage collection at exit would take as long as all other work
    wanted = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.manual_seed(0)
    random.seed(0)

    settings = model_settings(
        TrainConfig(precision="bf16_pure", attention="eager"), wanted["model"]["model_type"]
    )
    model = build(config_of(wanted["model"]), settings, torch.device(wanted["device"]))
    objective = Objective(wanted.get("objective", Objective.SFT))
    if objective.generates:
        model.get_output_embeddings().weight.data[0] = 0
    model.save_pretrained("model")

    vocab_size = model.config.get_text_config().vocab_size
    make: Callable[[int, int], dict[str, Any]] = partial(_tokens, vocab_size)
    if objective.generates:
        make = _prompts
    elif objective is not Objective.SFT:
        make = partial(_texts, objective, wanted["trained_share"])
    tokenizer(vocab_size if objective.generates else None).save_pretrained("model")

    Path("data").mkdir()
    lengths = list(itertools.islice(itertools.cycle(wanted["lengths"]), wanted["rows"]))
    if objective is Objective.KTO:  # TRL does not shuffle these rows, so they are shuffled here
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


def _prompts(index: int, length: int) -> dict[str, Any]:
    """A prompt of `length` letters."""
    return {"prompt": "".join(random.choices(string.ascii_letters, k=length))}  # noqa: S311


def _texts(objective: Objective, trained_share: float, index: int, length: int) -> dict[str, Any]:
    """An example of `length` tokens. TRL adds the last of these tokens, which ends the text."""

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
