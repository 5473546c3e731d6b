"""The search for the fastest layout of a GRPO run, with a card that is computed."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from autotune.catalog import resolve_model
from autotune.core.probe_types import (
    Measurement,
    OomDetail,
    Outcome,
    Phase,
    ProbeRequest,
    ProbeResult,
)
from autotune.core.rollout_types import COLOCATED, TRANSFORMERS, Engine, EngineMeasurement
from autotune.core.train_config import TrainConfig
from autotune.probe.schedule import Schedule
from autotune.problem.length_distribution import Lengths
from autotune.problem.rollouts import Rollouts
from autotune.study.rollout_search import (
    FITS,
    TOO_LONG,
    MeasuredLayout,
    RolloutSearch,
    TwoGpus,
    two_gpus,
)
from autotune.study.rollout_task import RolloutTask

CARD_GIB = 80.0
ROLLOUTS = Rollouts(
    prompt_tokens=256,
    completion_tokens=2048,
    mean_tokens=856.0,
    sequences=64,
    num_generations=8,
    engine=Engine(kind=COLOCATED, max_tokens=2304),
)
ENGINE = EngineMeasurement(
    engine="vllm 0.23.0",
    start_s={"total": 90.0},
    generate_s=(10.0,),
    tokens=38_400,
    cached_tokens=60_000,
    transfer_s=(0.5,),
    sleep_s=(0.5,),
    wake_s=(0.5,),
    peak_gib={"rollout": 24.0},
    awake_gib=(24.0,),
    asleep_gib=(1.0,),
    weights_gib=8.0,
)
CHOICES = {"micro_batch_size": [2, 4, 8, 16], "checkpointing": ["none", "full"]}


@dataclass
class Card:
    """A trainer whose memory grows with the tokens of a micro batch, by GiB for each 1,000."""

    per_thousand: dict[str, float] = field(default_factory=lambda: {"none": 5.0, "full": 1.0})
    seen: list[ProbeRequest] = field(default_factory=list)

    def probe(self, request: ProbeRequest, log: Path) -> ProbeResult:
        self.seen.append(request)
        config = request.config
        kinds = request.micro_batches
        thousands = config.micro_batch_size * max(kind.length for kind in kinds) / 1000
        update_gib = 9 + self.per_thousand[config.checkpointing] * thousands
        limit_gib = request.memory_gib * (1 - request.headroom)
        result = ProbeResult(
            request_digest="", config=config, rung=request.rung, outcome=Outcome.OOM
        )
        if update_gib + 1 > limit_gib:
            detail = OomDetail(
                phase=Phase.BACKWARD,
                requested_gib=1.0,
                allocated_gib=update_gib,
                reserved_gib=update_gib,
                limit_gib=limit_gib,
            )
            return replace(result, phase=Phase.BACKWARD, oom=detail, reason="out of memory")
        rows = config.micro_batch_size
        micro_s = 0.2 + rows * (0.30 if config.checkpointing == "none" else 0.40)
        return replace(
            result,
            outcome=Outcome.OK,
            measurement=measured(micro_s, update_gib, request.longest.length),
        )


def measured(micro_s: float, update_gib: float, row_length: int) -> Measurement:
    return Measurement(
        step_s=(2 * micro_s,),
        micro_step_s=(micro_s, micro_s),
        rest_s=(0.0,),
        micro_steps=2,
        phase_s={Phase.LOG_PROBS: 0.2},
        phase_peak_gib={},
        model_gib=8.0,
        adapters_gib=0.5,
        gradients_gib=0.2,
        optimizer_gib=0.3,
        peak_allocated_gib=update_gib,
        peak_reserved_gib=update_gib,
        limit_gib=70.0,
        context_gib=1.0,
        loss_first=0.1,
        loss_last=0.1,
        trainable_params=1,
        total_params=2,
        row_length=row_length,
        phase_reserved_gib={
            Phase.ROLLOUT: 9.0,
            Phase.LOG_PROBS: 10.0,
            Phase.BACKWARD: update_gib,
        },
        between_gib=(9.0, 9.0),
        merge_s=0.1,
    )


def task(completions: Lengths | None = None, **changes: Any) -> RolloutTask:
    found = RolloutTask(
        model=resolve_model("qwen3-4b"),
        device="cuda",
        card_gib=CARD_GIB,
        rollouts=ROLLOUTS,
        prompts=Lengths.constant(256),
        completions=completions or Lengths.constant(2048),
    )
    return replace(found, **changes)


def run(card: Card, engine: EngineMeasurement = ENGINE, **changes: Any) -> list[MeasuredLayout]:
    search = RolloutSearch(task(**changes), engine, 0.3, card, Path("logs"))
    return list(search.run(TrainConfig(), CHOICES))


def test_the_fastest_layout_that_fits_is_confirmed_with_ten_alternations() -> None:
    """Beside an awake engine, 51 of 76 GiB remain: without recomputation, that is four rows."""
    card = Card(per_thousand={"none": 4.0, "full": 1.0})
    layouts = run(card)
    best = layouts[-1]
    assert best.state == FITS
    assert (best.config.micro_batch_size, best.config.checkpointing) == (4, "none")
    assert not best.sleeps
    assert best.score == max(layout.score for layout in layouts)
    assert card.seen[-1].min_timed_micros == 20
    assert not card.seen[-1].generation.engine.sleeps  # type: ignore[union-attr]


def test_an_engine_sleeps_if_only_then_the_faster_training_fits() -> None:
    """Awake, the engine leaves room only for recomputation, which costs more than sleep."""
    best = run(Card(per_thousand={"none": 13.0, "full": 5.0}))[-1]
    assert (best.sleeps, best.config.checkpointing) == (True, "none")


def test_learning_knobs_stay_as_they_are() -> None:
    card = Card()
    run(card, updates=2)
    for request in card.seen:
        assert request.generation is not None
        assert len(request.generation.completions) == 64
        assert request.config.lora_rank == TrainConfig().lora_rank
    assert task(updates=2).accumulation(TrainConfig(micro_batch_size=4)) == 8


def test_a_layout_that_fits_only_usual_lengths_says_where_it_breaks() -> None:
    """The longest of 64 usual completions has 600 tokens, and 2,048 are possible."""
    layouts = run(
        Card(per_thousand={"none": 20.0, "full": 20.0}), completions=Lengths.constant(600)
    )
    long = next(layout for layout in layouts if layout.state == TOO_LONG and layout.sleeps)
    assert long.phase is Phase.BACKWARD
    assert long.breaks_at is not None
    tokens = (256 + long.breaks_at) * long.config.micro_batch_size
    assert 1 + 1 + 9 + 20 * tokens / 1000 == pytest.approx(76.0, abs=1.5)
    assert long.prompts_per_s is None


def test_an_awake_engine_breaks_at_shorter_completions_than_one_that_sleeps() -> None:
    """Its generation has the largest peak of the step, beside the memory of the update."""
    awake = replace(ENGINE, awake_gib=(20.0,), peak_gib={"rollout": 21.0})
    card = Card(per_thousand={"none": 10.0, "full": 90.0})
    layouts = run(card, awake, completions=Lengths.constant(600))
    four = [one for one in layouts if one.config.micro_batch_size == 4]
    breaks = {one.sleeps: one.breaks_at for one in four if one.state == TOO_LONG}
    for sleeps, engine_gib in ((False, 21), (True, 1)):
        tokens = 4 * (256 + (breaks[sleeps] or 0))
        assert 1 + engine_gib + 9 + 10 * tokens / 1000 == pytest.approx(76.0, abs=0.1)


def test_what_never_fits_names_its_phase() -> None:
    layouts = run(Card(per_thousand={"none": 90.0, "full": 90.0}))
    assert {layout.state for layout in layouts} == {Outcome.OOM}
    assert {layout.phase for layout in layouts} == {Phase.BACKWARD}
    assert not any(layout.score for layout in layouts)


def test_a_model_that_generates_itself_never_sleeps() -> None:
    own = replace(
        ENGINE, transfer_s=(), sleep_s=(), wake_s=(), asleep_gib=(), peak_gib={"rollout": 3.0}
    )
    layouts = run(Card(), replace(own, awake_gib=(3.0,)))
    assert not any(layout.sleeps for layout in layouts)


def test_the_share_holds_all_usual_completions() -> None:
    """The weights of 7.5 GiB and 64 sequences of 2,304 tokens with 144 KiB each are 28 GiB."""
    share = task().share(TrainConfig())
    assert share is not None
    assert 0.3 < share <= 0.45
    assert task(card_gib=9.0).share(TrainConfig()) is None
    small = replace(ROLLOUTS, engine=Engine(kind=TRANSFORMERS))
    assert task(rollouts=small).share(TrainConfig()) == 0.0


def test_requests_hold_the_usual_and_the_longest_rows() -> None:
    usual = task(Lengths.constant(600))
    config = TrainConfig(micro_batch_size=4)
    request = usual.training_request(config, sleeps=True, engine_gib=19.0)
    assert [kind.length for kind in request.micro_batches] == [856, 2304]
    assert [kind.share for kind in request.micro_batches] == [1.0, 0.0]
    assert request.memory_gib * 0.95 == pytest.approx(CARD_GIB * 0.95 - 19)
    engine = usual.engine_request(config, 0.4)
    assert engine.generation is not None
    assert engine.generation.engine == Engine(share=0.4, sleeps=True, max_tokens=2304)
    assert engine.digest != request.digest


def test_packed_rows_have_the_mean_length_of_a_generation() -> None:
    """The longest rows are measured too, but only for their memory."""
    lengths = Lengths.of(range(100, 1124), "given")
    config = TrainConfig(micro_batch_size=4, packing=True, packed_attention="varlen")
    *usual, longest = task(lengths).training_request(config, sleeps=True).micro_batches
    rows = [row for kind in usual for (row,) in kind.rows]
    assert (len(usual), len(rows)) == (8, 32)
    assert sum(rows) / len(rows) == pytest.approx(256 + 612, abs=2)
    assert min(rows) < 400 < 1300 < max(rows)
    assert len({sum(row for (row,) in kind.rows) for kind in usual}) > 4
    assert sum(kind.share for kind in usual) == pytest.approx(1.0)
    assert (longest.rows, longest.share) == (((2304,),) * 4, 0.0)


def test_the_longest_micro_batch_has_only_rows_of_the_largest_length() -> None:
    """A usual micro batch may have one such row, but fewer tokens."""
    config = TrainConfig(micro_batch_size=4, packing=True, packed_attention="varlen")
    request = task(Lengths.of(range(100, 4000), "given")).training_request(config, sleeps=True)
    *usual, longest = request.micro_batches
    assert any(kind.length == longest.length for kind in usual)
    assert request.longest == longest
    assert Schedule.plan(request).lead[-1] == (len(usual), len(usual))


def test_large_micro_batches_come_first_and_small_ones_have_no_recomputation() -> None:
    card = Card(per_thousand={"none": 4.0, "full": 1.0})
    run(card)
    tried = [(one.config.micro_batch_size, one.config.checkpointing) for one in card.seen[:-1]]
    without, recomputed = [16, 8, 4, 2], [16, 8]  # four rows fit without recomputation
    assert tried == [
        *((size, "none") for size in without),
        *((size, "full") for size in recomputed),
    ]


def test_a_smaller_micro_batch_tells_where_a_larger_one_breaks() -> None:
    """Sixteen rows fit with 856 tokens, and 2,304 are possible. No probe measures this."""
    card = Card(per_thousand={"none": 4.0, "full": 90.0})
    layouts = run(card, completions=Lengths.constant(600))
    sixteen = [one for one in layouts if one.config.micro_batch_size == 16]
    awake, asleep = (one for one in sixteen if one.config.checkpointing == "none")
    assert (awake.state, asleep.state) == (Outcome.OOM, TOO_LONG)
    assert asleep.breaks_at is not None
    assert 1 + 1 + 9 + 4 * 16 * (256 + asleep.breaks_at) / 1000 == pytest.approx(76.0, abs=0.1)
    assert len([one for one in card.seen if one.config == asleep.config]) == 1


def test_packed_rows_break_at_the_length_that_needs_the_whole_card() -> None:
    config = TrainConfig(packing=True, packed_attention="varlen")
    card = Card({"none": 40.0, "full": 6.0})
    search = RolloutSearch(task(Lengths.constant(600)), ENGINE, 0.3, card, Path("logs"))
    choices = {"micro_batch_size": [4], "checkpointing": ["full"]}
    layouts = list(search.run(config, choices))
    padded = list(replace(search, trained=[]).run(TrainConfig(), choices))
    assert [one.breaks_at for one in layouts] == [one.breaks_at for one in padded]


def searched(engine: EngineMeasurement, **changes: Any) -> RolloutSearch:
    search = RolloutSearch(task(**changes), engine, 0.3, Card({"none": 4.0, "full": 1.0}), Path())
    assert list(search.run(TrainConfig(), CHOICES))
    return search


def test_two_gpus_that_share_all_work_beat_a_gpu_that_waits() -> None:
    """Half of the completions take 8 of 10 s; the update is half as long."""
    found = two_gpus(searched(replace(ENGINE, half_s=8.0)))
    assert found.colocated is not None
    assert found.apart is not None
    assert found.faster == "colocated"
    alone = max(layout.score for layout in run(Card({"none": 4.0, "full": 1.0})))
    assert alone < found.colocated.step.prompts_per_s < 2 * alone


def test_a_gpu_for_the_engine_alone_wins_if_sleep_takes_long() -> None:
    """Awake, the engine leaves no room for the training."""
    slow = replace(ENGINE, half_s=10.0, awake_gib=(70.0,), peak_gib={"rollout": 70.0})
    slow = replace(slow, sleep_s=(100.0,))
    assert two_gpus(searched(slow)).faster == "apart"


def test_the_exchange_between_two_gpus_takes_time() -> None:
    search = searched(replace(ENGINE, half_s=8.0))
    free, slow = two_gpus(search), two_gpus(search, link_gb_s=1.0)
    for one, other in ((slow.apart, free.apart), (slow.colocated, free.colocated)):
        assert one is not None
        assert other is not None
        assert one.step.prompts_per_s < other.step.prompts_per_s


def test_without_a_layout_of_two_gpus_none_is_faster() -> None:
    assert TwoGpus(colocated=None, apart=None).faster is None
    own = replace(ENGINE, transfer_s=(), sleep_s=(), wake_s=(), asleep_gib=())
    same = replace(ROLLOUTS, engine=Engine(kind=TRANSFORMERS))
    found = two_gpus(searched(own, rollouts=same))
    assert found == TwoGpus(colocated=None, apart=None)
