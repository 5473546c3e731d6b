"""What is likely to be tried next: it compiles, is new, and
follows from where the search stands.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.core.probe_types import ModelShape, ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.study.coordinate_search import next_move
from autotune.study.lookahead import Lookahead, code_key, likely_next, shallow_requests
from autotune.study.neighbours import compiled_variants
from tests.helpers.sessions import BASELINE, Session, space, starter, subject_of

SPACE = space(
    micro_batch_size=(1, 2, 4, 8),
    seq_len=(256,),
    lora_rank=(16, 32),
    checkpointing=("none", "full"),
    compile=("none", "per_layer"),
    loss=("full", "chunked"),
)
START = replace(BASELINE, checkpointing="full", lora_rank=16, loss="full", micro_batch_size=4)


class Ahead:
    """Records what is wanted; `taken` was claimed already."""

    def __init__(self, *taken: str) -> None:
        self.taken = set(taken)
        self.wanted: list[dict[str, ProbeRequest]] = []

    def claimed_keys(self) -> set[str]:
        return self.taken

    def compile_next(self, requests: dict[str, ProbeRequest]) -> None:
        self.wanted.append(requests)


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    opened: list[Any] = []
    made = starter(f"sqlite:///{tmp_path / 'autotune.db'}", tmp_path / "logs", opened)(
        task=subject_of(SPACE)
    )
    made.evaluator.shape = ModelShape(num_layers=8, prefix=0, period=1)
    yield made
    for one in opened:
        one.close()


def test_what_has_no_compiled_layers_has_no_compiled_variant() -> None:
    offloading = space(checkpointing=("full", "offload"), compile=("none", "per_layer"))
    offloaded, recomputed = (
        replace(START, checkpointing="offload"),
        replace(START, checkpointing="full"),
    )
    (found,) = compiled_variants(offloading, [offloaded, recomputed])
    assert (found.checkpointing, found.compile) == ("full", "per_layer")


def test_what_is_compiled_ahead_computes_its_adapters_the_fastest_way_that_the_space_has() -> None:
    both = space(compile=("none", "per_layer"), lora_kernels=("peft", "joined"))
    assert [config.lora_kernels for config in compiled_variants(both, [START])] == ["joined"]
    asked = space(compile=("none", "per_layer"), lora_kernels=("peft",))
    assert [config.lora_kernels for config in compiled_variants(asked, [START])] == ["peft"]


def test_a_climb_is_looked_ahead_of_from_both_outcomes_of_its_trial(session: Session) -> None:
    """An eager climb will compile what it reaches: its centre if the trial fails, the trial's own
    if not.
    """
    trying = replace(START, micro_batch_size=8)
    session.study.trials.moving = "micro_batch_size", START
    found = list(likely_next(session.study.trials, trying))
    assert found[:2] == [replace(START, compile="per_layer"), replace(trying, compile="per_layer")]
    assert {config.compile for config in found} == {"per_layer"}
    # Then the next moves of what will have been compiled, by the knob that is being turned first.
    assert found[2].micro_batch_size == 8 and found[2].checkpointing == "full"
    assert replace(START, compile="per_layer", checkpointing="none") in found
    moves = [
        next_move(SPACE, found[0], name, {})
        for name in ("micro_batch_size", "checkpointing", "loss")
    ]
    assert {SPACE.config(move) for move in moves if move} <= set(found)


def test_nothing_is_compiled_where_the_space_has_no_such_choice(session: Session) -> None:
    session.study.trials.task = subject_of(
        space(micro_batch_size=(1, 2), seq_len=(256,), lora_rank=(16,))
    )
    assert not list(likely_next(session.study.trials, BASELINE))
    assert compiled_variants(session.study.trials.task.space, [BASELINE]) == []


def test_what_is_known_or_claimed_or_has_equal_code_is_not_wanted_again(session: Session) -> None:
    trials, compiled = session.study.trials, replace(START, compile="per_layer")
    ahead = Ahead(code_key(replace(compiled, checkpointing="none")))
    Lookahead(trials, ahead).begin(compiled)  # type: ignore[arg-type]
    (wanted,) = ahead.wanted
    assert 0 < len(wanted) <= 8 and not wanted.keys() & {code_key(compiled), *ahead.taken}
    assert all(code_key(request.config) == key for key, request in wanted.items())
    assert {request.depth for request in wanted.values()} == {1}
    one = shallow_requests(session.evaluator, [compiled, replace(compiled, loss="chunked")])
    assert len(one) == 1  # the loss is outside the layers


def test_the_code_of_several_gpus_is_compiled_by_one_process(session: Session) -> None:
    shared = replace(START, compile="per_layer", num_gpus=2, sharding="ddp")
    (wanted,) = shallow_requests(session.evaluator, [shared]).values()
    assert wanted.config == shared and wanted.simulates_rank


@pytest.mark.parametrize(
    ("knobs", "equal"),
    [
        ({"loss": "chunked"}, True),
        ({"allocator": "fixed"}, True),
        ({"optimizer": "adamw_8bit"}, True),
        ({"micro_batch_size": 2}, False),
        ({"lora_rank": 32}, False),
        ({"checkpointing": "none"}, False),
        ({"precision": "bf16_pure"}, False),
    ],
)
def test_code_is_equal_where_the_layers_are(knobs: dict[str, Any], equal: bool) -> None:
    assert (code_key(replace(START, **knobs)) == code_key(START)) is equal


def test_a_request_has_as_few_layers_as_show_each_kind(session: Session) -> None:
    evaluator = session.evaluator
    every_second = TrainConfig(seq_len=256, checkpointing="every_2")
    evaluator.shape = ModelShape(num_layers=10, prefix=1, period=3)
    shallowest = evaluator.shallowest(BASELINE)
    assert shallowest is not None and shallowest.depth == 4
    more = evaluator.shallowest(every_second)
    assert more is not None and more.depth == 10  # six layers are a period, and three are left over
    evaluator.shape = ModelShape(num_layers=10, prefix=0, period=None)
    assert evaluator.shallowest(BASELINE) is None
    evaluator.shape = None
    assert evaluator.shallowest(BASELINE) is None


def test_before_a_climb_what_is_being_tried_comes_first(session: Session) -> None:
    """Seeds are tried then, and one of them is likely to lead."""
    session.study.trials.rows.clear()
    seed = replace(START, micro_batch_size=2, checkpointing="none")
    assert next(likely_next(session.study.trials, seed)) == replace(seed, compile="per_layer")
