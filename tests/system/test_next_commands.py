"""The commands that a run prints at its end work as they are printed, for a study of all weights.

The study comes from a spec, has a memory cap, and is in a database whose name has a space.
Commands of other kinds of studies are run beside these studies: after a kill in
`test_end_to_end.py`, where also nothing fits; of two workers in `test_worker_process.py`; of other
objectives in `test_objectives.py`; of a user's file in `test_demo.py`.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.next_commands import run_next, stranger

SPACE = """\
version: 1
knobs:
  method: full
  micro_batch_size: {values: [2, 4], kind: system}
  seq_len: 32
  precision: fp32
  checkpointing: none
"""
SPEC = """\
model: demo-3m
gpu: cpu
memory_gib: 0.6
examples: 400
global_batch: 4
trials: 2
space: space.yaml
study: capped
storage: sqlite:///my studies.db
"""


@pytest.mark.probe
def test_each_printed_command_works(tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text(SPACE)
    (tmp_path / "spec.yaml").write_text(SPEC)
    ended = subprocess.run(
        [sys.executable, "-m", "autotune", "run", "--spec", "spec.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
        env=stranger(),
    )
    assert ended.returncode == 0, ended.stderr
    outputs = run_next(ended.stdout, tmp_path)
    commands = [shlex.split(command) for command in outputs]
    assert [words[1] for words in commands] == ["train", "verify", "explain"]
    assert all({"--storage", "sqlite:///my studies.db", "capped"} <= {*words} for words in commands)

    verdict = list(outputs.values())[1].stdout
    assert re.match(r"The prediction (holds|does not hold): [\d,]+ tokens/s \(", verdict)
