"""Random weights in a directory, with a tokenizer of one word, and rows of random tokens: for another tool's command.

`python -m autotune.probe.runtime.synthetic_model FILE.json` makes `model/` and `data/` in the current directory. The
file says what: `model`, the keyword arguments of a transformers config; `device`; `rows`, how many to train on;
`lengths`, theirs in turn; `held_out`, the lengths of those in the test split.
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

from autotune.core.probe_types import ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.probe.runtime.model_builder import build

PAD = "<pad>"


def tokenizer() -> PreTrainedTokenizerFast:
    """Of one word: it is asked for what it pads with."""
    words = Tokenizer(WordLevel({PAD: 0}, unk_token=PAD))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=PAD, eos_token=PAD)


def main() -> None:
    """The weights are bf16, as published ones are: whoever loads them casts."""
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    config = TrainConfig(precision="bf16_pure", attention="eager")
    request = ProbeRequest(config=config, model=asked["model"], device=asked["device"], memory_gib=0.0)
    model = build(request, torch.device(asked["device"])).base
    model.save_pretrained("model")
    tokenizer().save_pretrained("model")
    Path("data").mkdir()
    vocab_size = model.config.get_text_config().vocab_size
    _write("train", itertools.islice(itertools.cycle(asked["lengths"]), asked["rows"]), vocab_size)
    _write("test", asked["held_out"], vocab_size)
    print(json.dumps({"rows": asked["rows"]}))


def _write(split: str, lengths: Iterable[int], vocab_size: int) -> None:
    with open(f"data/{split}.jsonl", "w", encoding="utf-8") as file:
        for length in lengths:
            file.write(json.dumps({"input_ids": torch.randint(vocab_size, (length,)).tolist()}) + "\n")


if __name__ == "__main__":
    main()
