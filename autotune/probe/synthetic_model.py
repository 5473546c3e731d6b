"""A directory of random weights with a tokenizer of one word, and rows of random tokens, for another tool's command.

`python -m autotune.probe.synthetic_model FILE.json` makes `model/` and `data/` in the current directory. The file has
`model`, the keyword arguments of a transformers config; `device`; `rows`, the number of rows to train on; `lengths`,
their lengths in turn; `held_out`, the lengths of the rows in the test split.
"""

import itertools
import json
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from autotune.core.train_config import TrainConfig
from autotune.probe.model_settings import model_settings
from autotune.probe.runtime.model_builder import build, config_of

PAD = "<pad>"


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that knows its padding token alone: TRL asks for that."""
    words = Tokenizer(WordLevel({PAD: 0}, unk_token=PAD))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=PAD, eos_token=PAD)


def main() -> None:
    """Write the model and the data. The weights are bf16, as published ones are."""
    wanted = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.manual_seed(0)
    settings = model_settings(TrainConfig(precision="bf16_pure", attention="eager"), wanted["model"]["model_type"])
    model = build(config_of(wanted["model"]), settings, torch.device(wanted["device"]))
    model.save_pretrained("model")
    tokenizer().save_pretrained("model")
    Path("data").mkdir()
    vocab_size = model.config.get_text_config().vocab_size
    _write("train", itertools.islice(itertools.cycle(wanted["lengths"]), wanted["rows"]), vocab_size)
    _write("test", wanted["held_out"], vocab_size)
    print(json.dumps({"rows": wanted["rows"]}))


def _write(split: str, lengths: Iterable[int], vocab_size: int) -> None:
    with open(f"data/{split}.jsonl", "w", encoding="utf-8") as file:
        for length in lengths:
            file.write(json.dumps({"input_ids": torch.randint(vocab_size, (length,)).tolist()}) + "\n")


if __name__ == "__main__":
    main()
