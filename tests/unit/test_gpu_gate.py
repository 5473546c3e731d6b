"""The gate on a GPU: which differences of two commits it lets pass, and what it plants."""

import importlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu_gate")


def measured(name: str, old: list[float], new: list[float], gib: float = 1.0) -> list[Any]:
    """Rows of both sides, whose memory is 10 GiB, and `gib` times as much with the new commit."""
    sides = [("old", speed, 10.0) for speed in old] + [("new", speed, 10.0 * gib) for speed in new]
    return [
        {"name": name, "side": side, "speed": speed, "memory_gib": memory}
        for side, speed, memory in sides
    ]


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        (("probe", [100.0, 102.0], [101.0, 101.0]), "passes"),
        (("probe", [100.0, 100.0], [97.5, 97.5]), "passes"),
        (("probe", [100.0, 100.0], [96.0, 96.0]), "slower"),
        (("probe", [100.0, 100.0], [100.0, 100.0], 1.004), "passes"),
        (("probe", [100.0, 100.0], [100.0, 100.0], 1.01), "more memory"),
        (("probe", [100.0, 100.0], [100.0, 100.0], 0.9), "passes"),
        (("start", [2.0, 2.0], [1.9, 1.9]), "passes"),
        (("start", [2.0, 2.0], [1.7, 1.7]), "slower"),
        (("study", [100.0, 100.0], [96.0, 96.0]), "passes"),
        (("new probe", [], [100.0, 100.0]), "not compared"),
        (("probe", [100.0, 100.0], []), "fails"),
    ],
)
def test_a_loss_above_the_limit_does_not_pass(gate: Any, rows: Any, verdict: str) -> None:
    found = measured(*rows)
    assert gate.compare(found, rows[0])["verdict"] == verdict
    other = measured("other", [1.0, 1.0], [1.0, 1.0])
    summary = gate.summarize_gate(found + other)
    assert summary["passes"] is (verdict in ("passes", "not compared"))
    assert summary["lost"] == ([] if summary["passes"] else [f"{rows[0]}: {verdict}"])
    assert summary["not_compared"] == ([rows[0]] if verdict == "not compared" else [])


def test_nothing_measured_does_not_pass(gate: Any) -> None:
    assert not gate.summarize_gate([])["passes"]
    failed = [{"name": "probe", "side": side, "failed": "no GPU"} for side in ("old", "new")]
    assert not gate.summarize_gate(failed)["passes"]


@pytest.mark.parametrize("kind", ["slowdown", "memory"])
def test_what_is_planted_is_in_the_copy_alone(gate: Any, kind: str, tmp_path: Path) -> None:
    gate.check_out(str(ROOT), tmp_path / "new")
    path = tmp_path / "new" / "autotune" / "trainer" / "lean_trainer.py"
    plain = path.read_text()
    assert plain == (ROOT / "autotune" / "trainer" / "lean_trainer.py").read_text()
    gate.plant(tmp_path / "new", kind)
    assert path.read_text().startswith(plain) and len(path.read_text()) > len(plain)
    compile(path.read_text(), str(path), "exec")
