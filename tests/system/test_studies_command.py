"""`autotune list`, `resume` and `delete` with a real study on the CPU."""

import json
from pathlib import Path

import pytest

from autotune.study.storage.leases import Leases, Worker
from tests.system.test_end_to_end import autotune

pytestmark = pytest.mark.probe

TASK = (
    "--gpu",
    "cpu",
    "--model",
    "demo-3m",
    "--seq-len",
    "16",
    "--tokens-per-example",
    "16",
    "--global-batch",
    "4",
)
TASK += ("--study", "mine", "--trials", "1", "--set", "micro_batch_size=4", "--budget", "2m")


def test_a_study_is_listed_resumed_with_its_options_and_deleted(tmp_path: Path) -> None:
    assert json.loads(autotune(tmp_path, "list", "--json").out) == []
    begun = autotune(tmp_path, "run", *TASK, "--json")
    assert begun.code == 0, begun.err
    listed = json.loads(autotune(tmp_path, "list", "--json").out)
    assert [(one["study"], one["trials"], one["running"]) for one in listed] == [("mine", 1, False)]

    again = autotune(tmp_path, "resume", "mine", "--trials", "2", "--json")
    assert again.code == 0, again.err
    then, now = json.loads(begun.out), json.loads(again.out)
    assert (
        now["trials"]["total"] == 2
        and now["model"] == then["model"]
        and now["out_dir"] == then["out_dir"]
    )
    assert now["winner"]["config"]["micro_batch_size"] == 4

    asked = autotune(tmp_path, "delete", "mine")
    assert asked.code == 2 and "--yes" in asked.err
    url = f"sqlite:///{tmp_path}/runs/autotune.db"
    with Leases(url, "mine", Worker.this_process("cpu")).join():
        refused = autotune(tmp_path, "delete", "mine", "--yes")
        assert refused.code == 2 and "being worked on" in refused.err
    deleted = autotune(tmp_path, "delete", "mine", "--yes")
    assert deleted.code == 0 and (tmp_path / "runs" / "mine" / "summary.json").exists()
    assert json.loads(autotune(tmp_path, "list", "--json").out) == []
    assert autotune(tmp_path, "status", "mine").code == 2
