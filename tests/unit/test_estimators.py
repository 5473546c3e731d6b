"""The comparison of estimators: its size, and what README and docs/claims.md say of it."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_benchmarks import RESULTS, program

ROOT = Path(__file__).parents[2]
SUMMARY = RESULTS["estimators"]["summary"]
ROWS = RESULTS["estimators"]["rows"]
README_NAMES = {"unsloth": "Unsloth Studio's formula"}


def words(path: str) -> str:
    return " ".join((ROOT / path).read_text(encoding="utf-8").split())


def test_it_compares_enough_tools_on_enough_trainings() -> None:
    assert SUMMARY["others"] >= 5 and SUMMARY["rows"] >= 100 and SUMMARY["models"] >= 10
    assert {row["source"].partition(",")[0] for row in ROWS} == {"ours", "public"}
    assert all(SUMMARY["versions"].values())


@pytest.mark.parametrize("tool", SUMMARY["tools"])
def test_the_pages_say_what_was_found(tool: str) -> None:
    unseen, every = SUMMARY["unseen"][tool], SUMMARY["tools"][tool]
    cells = [
        f"{unseen['rows']}",
        f"{100 * unseen['median']:.1f} %",
        f"{100 * unseen['worst']:+.0f} %",
        f"{100 * unseen['worst_low']:+.0f} %",
        f"{100 * unseen['too_low']:.0f} %",
        f"{100 * every['median']:.1f} %",
    ]
    lines = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith(f"| {tool} | "))
    assert line.split(" | ")[2:] == [*cells[:-1], f"{cells[-1]} |"]

    name = README_NAMES.get(tool, tool)
    said = f"{name} was {cells[1]} off" if tool == "autotune" else f"{name} {cells[1]}"
    assert said in words("README.md")


def test_the_readme_says_how_many_trainings_are_compared() -> None:
    assert f"of {SUMMARY['unseen_rows']} measured trainings that no constant" in words("README.md")
    assert SUMMARY["unseen_rows"] == sum(row["source"] != "ours, fitted" for row in ROWS)


def test_autotunes_underestimates_are_of_published_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = program("estimators", monkeypatch)
    low = [row for row in ROWS if (found.error(row, "autotune") or 0.0) < found.TOO_LOW]
    assert low and all(row["source"].startswith("public") for row in low)
    missing = {row["model"] for row in ROWS if row["estimates"]["autotune"] is None}
    assert missing == {"Mixtral-8x7B-v0.1"}


def test_the_tools_get_the_settings_of_each_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a tool is asked: a model's config, adapters by name, and the memory of the GPU."""
    found = program("estimators", monkeypatch)
    asked: list[dict[str, Any]] = [row["asked"] for row in found.published_rows()]
    assert len(asked) == SUMMARY["public_rows"]
    for one in asked:
        assert one["model_config"]["num_hidden_layers"] and one["gpu_gib"] > 10
        assert one["targets"] and set(one["targets"]) <= set(found.LINEAR)


def test_a_refusal_is_no_estimate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tools = program("estimators_tool", monkeypatch)
    row = {"config": {"method": "lora"}}
    assert tools.ask("accelerate", row, tmp_path) == {
        "refused": "ValueError: it estimates full fine-tuning only"
    }
