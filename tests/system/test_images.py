"""A study of a model that takes images, from the command line to the exported run.

Times on a CPU are not checked.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.seeing import seeing
from tests.unit.problem.test_images import png

pytestmark = pytest.mark.probe
PINS = {
    "micro_batch_size": 2,
    "seq_len": 128,
    "precision": "fp32",
    "checkpointing": "none",
    "quantization": "none",
}


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "idefics3"])
def test_a_study_of_images_is_exported_and_its_export_runs(model_type: str, tmp_path: Path) -> None:
    """Rows of a dataset with images of two sizes; the tower is trained too."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(seeing(model_type, 4)))
    for name, size in {"a.png": (112, 112), "b.png": (224, 112)}.items():
        (tmp_path / name).write_bytes(png(*size))
    talk = [
        {"role": "user", "content": "<image>what is it?"},
        {"role": "assistant", "content": "a black square"},
    ]
    rows = [{"messages": talk, "images": [name]} for name in ("a.png", "b.png")] * 8
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def autotune(*arguments: str) -> str:
        command = [sys.executable, "-m", "autotune", *arguments]
        ended = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=400
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    line = [
        "run",
        "--model",
        "./model",
        "--gpu",
        "cpu",
        "--dataset",
        "rows.jsonl",
        "--set",
        "vision=trained",
    ]
    line += ["--trials", "1", "--global-batch", "4", "--out", "out", "--quiet"]
    autotune(*line, *(f"--set={knob}={one}" for knob, one in PINS.items()))
    exported = {path.name for path in (tmp_path / "out" / "export").iterdir()}
    assert {"train.py", "model_config.json"} <= exported and not {
        "trl_sft.yaml",
        "axolotl.yaml",
    } & exported
    settings = json.loads((tmp_path / "out" / "export" / "train_config.json").read_text())
    assert settings["model_settings"]["vision"] == "trained" and any(settings["images"])
    verification = json.loads(
        autotune("verify", "--micro-steps", "8", "--tolerance", "90", "--json")
    )
    assert (
        verification["file"] == "train.py"
        and verification["probed"]
        and verification["seconds_per_step"]
    )
