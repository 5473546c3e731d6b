"""Other objectives than the next token, from the command line to the exported run.

Times on a CPU are not checked.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.core.objective import Objective
from autotune.core.train_config import TrainConfig
from autotune.export.formats import export_all
from autotune.problem.workload import Workload
from tests.helpers.next_commands import next_commands, run_printed
from tests.probe.test_train_script import _save_demo
from tests.unit.export.test_script import demo, run, write

pytestmark = pytest.mark.probe
PINS = {
    "micro_batch_size": 2,
    "seq_len": 32,
    "lora_rank": 16,
    "precision": "fp32",
    "checkpointing": "none",
}
PINS |= {
    "optimizer": "adamw_torch_fused",
    "attention": "sdpa",
    "compile": "none",
    "quantization": "none",
}
ROWS: dict[str, dict[str, Any]] = {
    "dpo": {"prompt": "one two", "chosen": " three four", "rejected": " five"},
    "kto": {"prompt": "one two", "completion": " three four", "label": True},
    "reward": {"chosen": "one two three", "rejected": "four"},
    "classification": {"text": "one two three", "label": "wanted"},
}
# The printed commands that are run. Those of the three objectives of TRL differ only in a name.
ALL = ("train", "verify", "explain")
RUN = {"dpo": ["train"], "kto": ["verify"], "reward": ["verify"], "classification": ALL}


@pytest.mark.parametrize("objective", ROWS)
def test_a_study_is_exported_and_its_export_runs(objective: str, tmp_path: Path) -> None:
    form = "train.py" if objective == "classification" else f"trl_{objective}.yaml"
    if form != "train.py":
        pytest.importorskip("trl")
    others = [ROWS[objective] | {"label": "not"}] if objective == "classification" else []
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [ROWS[objective], *others] * 16)
    )
    line = [
        "run",
        "--model",
        "demo-3m",
        "--gpu",
        "cpu",
        "--objective",
        objective,
        "--trials",
        "1",
        "--global-batch",
        "4",
    ]
    line += ["--dataset", "rows.jsonl", "--out", "out"]
    line += [f"--set={knob}={one}" for knob, one in PINS.items()]
    ended = subprocess.run(
        [sys.executable, "-m", "autotune", *line],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert ended.returncode == 0, ended.stderr
    exported = sorted(path.name for path in (tmp_path / "out" / "export").iterdir())
    assert form in exported and ("train.py" in exported) is (form == "train.py")

    commands = dict(zip(ALL, next_commands(ended.stdout), strict=True))
    for verb in RUN[objective]:
        run_printed(commands[verb], tmp_path)
    if "verify" in RUN[objective]:
        summary = json.loads((tmp_path / "out" / "summary.json").read_text())
        found = summary["verification"]
        assert found["file"] == form and found["probed"] and found["seconds_per_step"], found


def test_train_py_learns_to_tell_texts_apart(tmp_path: Path) -> None:
    """Which of two words a text ends with, after a few steps."""
    weights = _save_demo(tmp_path / "weights")
    config = TrainConfig(
        micro_batch_size=4,
        seq_len=16,
        precision="fp32",
        optimizer="adamw_torch",
        checkpointing="none",
    )
    made = demo(config)
    workload = Workload(examples=256, epochs=2, global_batch=8, objective=Objective.CLASSIFICATION)
    made = replace(made, model=replace(made.model, weights=str(weights)), workload=workload)
    directory = write(export_all(made, ["train"]), tmp_path / "out")
    settings = json.loads((directory / "train_config.json").read_text())
    (directory / "train_config.json").write_text(json.dumps(settings | {"learning_rate": 5e-3}))
    rows = [{"text": f"a {word}", "label": f"ends with {word}"} for word in ("b", "c")] * 144
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    done = run(
        directory, "--dataset", "rows.jsonl", "--held-out", "32", "16", "--output-dir", "trained"
    )
    assert done.returncode == 0, done.stderr[-2000:]
    before, after = json.loads(done.stdout.strip().splitlines()[-1])["held_out_loss"]
    assert before == pytest.approx(0.69, abs=0.3) and after < 0.1
    assert (tmp_path / "trained" / "adapter_model.safetensors").exists()
