"""Walks of a value through the modules: what carries it, what counts as a return, and the document
that shows them.
"""

from dataclasses import dataclass
from importlib import util
from pathlib import Path

from autotune.core.probe_types import ProbeRequest
from autotune.core.train_config import TrainConfig

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "walks.py"
spec = util.spec_from_file_location("walks", PROGRAM)
assert spec is not None and spec.loader is not None
walks = util.module_from_spec(spec)
spec.loader.exec_module(walks)


@dataclass(frozen=True)
class Far:
    inside: object


def test_a_value_is_carried_by_its_holders_at_most_two_levels_deep() -> None:
    config = TrainConfig()
    request = ProbeRequest(config=config, model={}, memory_gib=1.0)
    for holder in (config, request, [request], {"micro_batch_size": 3}, "micro_batch_size: 3"):
        assert walks.carries(holder, walks.MICRO_BATCH)
    for other in (3, TrainConfig, {"seq_len": 3}, "seq_len", [], Far(Far(request))):
        assert not walks.carries(other, walks.MICRO_BATCH)
    assert not walks.carries(config, walks.PEAK)


def test_a_return_is_a_call_of_a_module_that_the_value_had_reached_before_the_caller() -> None:
    steps = walks.Steps()
    for caller, callee in [
        ("", "a"),
        ("a", "b"),
        ("b", "b"),
        ("b", "c"),
        ("c", "a"),
        ("c", "a"),
        ("a", "c"),
    ]:
        steps.add(caller, callee)
    assert steps.modules() == ["a", "b", "c"]
    assert steps.num_returns() == 1


def test_a_walk_is_cut_to_its_first_and_last_module() -> None:
    walk = walks.Walk(title="x", fields=frozenset(), text="x", start="b", end="d")
    steps = walks.Steps()
    for caller, callee in [("", "a"), ("a", "b"), ("b", "c"), ("c", "d"), ("d", "e")]:
        steps.add(caller, callee)
    assert walks.between(steps, walk).modules() == ["b", "c", "d"]


def test_the_document_shows_both_walks() -> None:
    text = walks.DOCUMENT.read_text(encoding="utf-8")
    shown = text.partition("<!-- walks -->")[2].partition("<!-- end of walks -->")[0]
    for walk in walks.WALKS:
        assert f"**{walk.title}**" in shown
        assert f"`{walk.start}`" in shown and f"`{walk.end}`" in shown
    modules = shown.split("`")[1::2]
    missing = [
        name
        for name in modules
        if not (walks.ROOT / "autotune" / f"{name.replace('.', '/')}.py").is_file()
    ]
    assert missing == []
