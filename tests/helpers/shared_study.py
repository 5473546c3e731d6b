"""A study of many short CPU trials, for tests in which several processes share it."""

from collections.abc import Iterator
from contextlib import closing, contextmanager

from autotune.study.optimizer import Optimizer
from autotune.study.storage.optuna_storage import read_record

SPACE = """\
version: 1
knobs:
  micro_batch_size: {values: [1, 2, 4], kind: system}
  seq_len: 16
  lora_rank: {values: [16, 32, 64], kind: learning}
  precision: fp32
  checkpointing: {values: [none, every_2, full], kind: system}
  optimizer: {values: [adamw_torch_fused, adamw_torch]}
"""
ARGUMENTS = (
    "--gpu",
    "cpu",
    "--model",
    "demo-3m",
    "--space",
    "space.yaml",
    "--global-batch",
    "4",
    "--examples",
    "100",
)
ARGUMENTS += ("--budget", "10m", "--memory-gib", "1", "--study", "one")


@contextmanager
def opened(url: str) -> Iterator[Optimizer]:
    """Open the study for reading."""
    record = read_record(url, "one")
    assert record is not None
    with closing(Optimizer.open(url, "one", record.task.space)) as search:
        yield search
