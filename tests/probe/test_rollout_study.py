"""`autotune run --objective grpo` on a CPU: real phases, the answer, the files and the storage."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("trl")

from autotune.cli.app import app
from autotune.report.json_forms import form_of
from autotune.study.storage.location import storage_url
from autotune.study.storage.probe_store import ProbeStore, StoredProbe

SPACE = """
version: 1
description: a few trainings
knobs:
  method: lora
  micro_batch_size: {values: [2, 4]}
  seq_len: 256
  lora_rank: 8
  precision: fp32
  optimizer: adamw_torch_fused
  checkpointing: none
"""


def stored(database: str) -> list[StoredProbe]:
    """The results in the database."""
    return ProbeStore(storage_url(database)).probes_of_study("cpu-demo-3m-space-grpo")


# the Trainer's arguments have new names from transformers 5.23 on
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_fastest_layout_is_measured_stored_and_exported(tmp_path: Path) -> None:
    space = tmp_path / "space.yaml"
    space.write_text(SPACE)
    database = f"sqlite:///{tmp_path / 'studies.db'}"
    args = ["run", "--gpu", "cpu", "--model", "demo-3m", "--objective", "grpo"]
    args += ["--space", str(space), "--mean-completion", "10", "--p99-completion", "20"]
    args += ["--max-completion", "20", "--tokens-per-example", "8", "--num-generations", "4"]
    args += ["--prompts-per-step", "2", "--out", str(tmp_path / "out"), "--storage", database]

    done = CliRunner().invoke(app, [*args, "--json", "--verify"])
    assert done.exception is None, done.output
    form_of("run --objective grpo").validate_json(done.stdout)
    study = json.loads(done.stdout)
    assert study["best"]["fits"] == "fits"
    assert study["best"]["prompts_per_s"] > 0
    assert {"rollout", "update"} <= study["best"]["phase_s"].keys()
    assert study["engine"]["engine"].startswith("transformers ")
    assert study["workload"]["completions_at_once"] == 8
    assert study["two_gpus"]["colocated"]["prompts_per_s"] > 0
    assert study["two_gpus"]["faster"] == "colocated"
    assert study["two_gpus"]["apart"] is None  # transformers cannot generate on another GPU
    assert json.loads((tmp_path / "out" / "grpo.json").read_text()) == study

    shown = (tmp_path / "out" / "grpo.html").read_text()
    assert "GRPO of demo-3m" in shown
    assert "Peak of the GPU&#39;s memory" in shown
    verified = study["verification"]
    assert (verified["problem"], verified["steps"], verified["out_of_memory"]) == (None, 8, False)
    assert verified["step_s"] > 0
    assert verified["phase_errors"].keys() == {"rollout", "update"}  # on a CPU, nothing is scored

    compared = (
        r"TRL&#39;s run took [\d.]+ s for each of 8 steps, .* predicted, and [\d.]+ GiB, .* pre"
    )
    assert re.search(compared, shown)

    wanted = json.loads((tmp_path / "out" / "export" / "grpo_arguments.json").read_text())
    assert wanted["arguments"]["num_generations"] == 4
    assert wanted["lora"]["r"] == 8
    script = (tmp_path / "out" / "export" / "train_grpo.py").read_text()
    compile(script, "train_grpo.py", "exec")

    # The same command measures nothing again.
    rows = stored(database)
    assert len(rows) >= 4  # the engine, two trainings, and the confirmed one
    again = CliRunner().invoke(app, args)
    assert again.exception is None, again.output
    assert again.stdout.startswith("demo-3m trains ")
    assert stored(database) == rows


def test_no_layout_of_full_fine_tuning_has_an_untrained_model() -> None:
    args = ["run", "--gpu", "cpu", "--model", "demo-3m", "--objective", "grpo"]
    args += ["--tokens-per-example", "8", "--max-completion", "20"]
    error = CliRunner().invoke(app, [*args, "--space", "full", "--beta", "0.1"]).exception
    assert "the untrained model too" in str(error)
