"""The memory gate: predictions on a machine that follows the model exactly, and what is refused
without a probe.
"""

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from autotune.core.probe_types import Measurement, Phase
from autotune.core.train_config import TrainConfig
from autotune.prediction.memory_predictor import (
    KnownOom,
    MemoryEstimate,
    MemoryPredictor,
    _compute_knobs,
    _temporary_gib,
    needs_at_least,
    refused_by,
)
from autotune.trainer.settings import chunk_tokens
from tests.helpers.factories import measurement, oom_detail

OFFERED = 130.0
CONTEXT = 0.5
PARAMS = 7.0  # GiB of a byte for each parameter
BYTES_OF_STATE = {"adamw_torch_fused": 8, "adamw_8bit": 2, "paged_adamw_8bit": 0, "lion_8bit": 1}
KEPT = {"none": 1.0, "every_2": 0.55, "full": 0.1}

GRID = [
    TrainConfig(
        micro_batch_size=size,
        seq_len=seq_len,
        lora_rank=rank,
        checkpointing=checkpointing,
        optimizer=optimizer,
    )
    for size, seq_len, rank, checkpointing, optimizer in itertools.product(
        (1, 4, 16),
        (512, 2048),
        (8, 64),
        ("none", "every_2", "full"),
        ("adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit"),
    )
]


def machine(config: TrainConfig, micro_steps: int = 2) -> Measurement:
    """A 7B model on a card: what stays, and in each segment so much beside it and so much a token
    (GiB).

    Gradients are there all the time where two micro batches add up to one; else they come with the
    backward pass.
    """
    full = config.method == "full"
    trained = PARAMS if full else 0.005 * (config.lora_rank or 0)
    weights = PARAMS * {"none": 4 if full else 2, "int8": 1, "nf4": 0.5}[config.quantization]
    adapters, gradients = (0.0 if full else 4 * trained), 4 * trained
    state = BYTES_OF_STATE[config.optimizer] * trained
    kept = KEPT[config.checkpointing] * config.tokens / 1024
    scores = 0.02 * config.seq_len / 1024 if config.attention == "eager" else 0.0
    held = weights + adapters + gradients + state
    late = gradients if micro_steps == 1 else 0.0
    segments = {
        "forward": held - late + 0.02 + (1.8 + scores) * kept,
        "backward": held - late + 0.05 + (1.8 + scores) * kept + 0.5 * config.tokens / 1024,
        "backward_layers": held + 0.1 + 0.3 * config.tokens / 1024,
        "optimizer": held + 0.3,
    }
    peak = max(segments.values())
    managed = 2 * trained if config.optimizer == "paged_adamw_8bit" else 0.0
    return measurement(
        micro_steps=micro_steps,
        segment_peak_gib=segments,
        phase_peak_gib={
            Phase.FORWARD: segments["forward"],
            Phase.BACKWARD: max(segments["backward"], segments["backward_layers"]),
            Phase.OPTIMIZER: segments["optimizer"],
        },
        model_gib=weights,
        adapters_gib=adapters,
        gradients_gib=gradients,
        optimizer_gib=state,
        peak_allocated_gib=peak,
        peak_reserved_gib=1.01 * peak,
        context_gib=CONTEXT,
        managed_gib=managed,
        limit_gib=OFFERED - CONTEXT - managed,
    )


def need(config: TrainConfig, micro_steps: int = 2) -> float:
    return machine(config, micro_steps).peak_reserved_gib


def learned(
    configs: Iterable[TrainConfig],
    micro_steps: int = 2,
    of: Callable[[TrainConfig, int], Measurement] = machine,
) -> MemoryPredictor:
    model = MemoryPredictor()
    for config in configs:
        model.learn(config, of(config, micro_steps))
    return model


def reported(model: MemoryPredictor, config: TrainConfig, micro_steps: int = 2) -> MemoryEstimate:
    estimate = model.predict(config, micro_steps, OFFERED)
    assert estimate is not None
    return estimate


def alike(config: TrainConfig, **changes: int | str) -> list[TrainConfig]:
    """The grid's configurations that compute as this one does, at the given values."""
    return [
        one
        for one in GRID
        if one.checkpointing == config.checkpointing
        and all(getattr(one, name) == value for name, value in changes.items())
    ]


# The law, in whatever order it is learned


@pytest.mark.parametrize("seed", range(6))
def test_the_need_is_always_between_the_bounds(seed: int) -> None:
    """After each of 30 configurations in any order, for every one of the grid that anything can be
    reported of.
    """
    model, reported_of = MemoryPredictor(), 0
    for config in random.Random(seed).sample(GRID, 30):
        model.learn(config, machine(config))
        for other in GRID:
            estimate = model.predict(other, 2, OFFERED)
            if estimate is not None:
                reported_of += 1
                assert estimate.low_gib * 0.999 <= need(other) <= estimate.high_gib * 1.001, (
                    config,
                    other,
                )
                assert estimate.low_gib <= estimate.gib <= estimate.high_gib
    assert reported_of > len(GRID) * 20


@pytest.mark.parametrize("seed", range(6))
def test_from_two_numbers_of_tokens_on_it_is_exact(seed: int) -> None:
    shuffled = random.Random(seed)
    for checkpointing in KEPT:
        for optimizer in ("adamw_torch_fused", "adamw_8bit"):
            grid = [
                one
                for one in GRID
                if (one.checkpointing, one.optimizer) == (checkpointing, optimizer)
            ]
            basis = shuffled.sample(grid, 2)
            while basis[0].tokens == basis[1].tokens:
                basis = shuffled.sample(grid, 2)
            model = learned(basis)
            for config in grid:
                assert reported(model, config).gib == pytest.approx(need(config), rel=0.01), (
                    basis,
                    config,
                )
                assert reported(model, config).basis == 2


@pytest.mark.parametrize("known", [512, 4096, 32768])
def test_one_number_of_tokens_bounds_the_need_on_either_side(known: int) -> None:
    """By what all of it would be if it were a line through nothing, and if it were always there."""
    for config in GRID:
        basis = replace(config, micro_batch_size=known // 512, seq_len=512)
        estimate = reported(learned([basis]), config)
        assert estimate.low_gib * 0.999 <= need(config) <= estimate.high_gib * 1.001
        largest = max(need(basis), need(config))
        # no bound by saying nothing
        assert estimate.high_gib <= largest * max(1.0, config.tokens / known) * 1.001
        assert estimate.basis == 1


@pytest.mark.parametrize(
    ("known", "size", "likely", "error"),
    [
        # on a line of a GiB a row, which adds 2 GiB beyond its last point
        ({1: 2, 2: 3}, 4, 5, 0.02 * 2),
        ({4: 5, 8: 9}, 1, 2, 0.02 * 3),
        ({1: 2, 4: 5}, 2, 3, 0),
        (
            {1: 2, 2: 5, 3: 4},
            6,
            5 / 3 + 6,
            4 / 3 + 0.02 * 3,
        ),  # by least squares: the middle point is 4/3 above the line
        ({1: 1, 2: 4, 3: 1}, 6, 2, 2),
    ],
    ids=str,
)
def test_a_line_errs_by_its_largest_distance_and_by_2_percent_of_what_it_adds(
    known: dict[int, float], size: int, likely: float, error: float
) -> None:
    def rows(config: TrainConfig, micro_steps: int) -> Measurement:
        peak = 10.0 + known[config.micro_batch_size]
        nothing = dict.fromkeys(("adapters_gib", "gradients_gib", "optimizer_gib"), 0.0)
        peaks = {
            "peak_allocated_gib": peak,
            "peak_reserved_gib": peak,
            "segment_peak_gib": {"forward": peak},
        }
        return measurement(micro_steps=micro_steps, model_gib=10.0, **nothing, **peaks)

    found = reported(
        learned([TrainConfig(micro_batch_size=each) for each in known], of=rows),
        TrainConfig(micro_batch_size=size),
    )
    assert (found.low_gib, found.gib, found.high_gib) == pytest.approx(
        (10 + likely - error, 10 + likely, 10 + likely + error), abs=1e-9
    )


def test_nothing_that_fits_is_reported_to_be_too_large() -> None:
    """Whatever is learned first and last, of whichever way to compute."""
    for first, last in itertools.product(GRID[::5], GRID[::7]):
        model = learned([first, last])
        for config in GRID[::3]:
            estimate = model.predict(config, 2, OFFERED)
            assert estimate is None or estimate.low_gib <= 1.03 * need(config), (
                first,
                last,
                config,
            )


@pytest.mark.parametrize("method", ["lora", "full"])
def test_nothing_that_fits_is_refused_where_gradients_come_late(method: str) -> None:
    """A whole batch at once: in the forward pass, and at the logits, there are no gradients yet."""
    configs = [
        TrainConfig(
            method=method, micro_batch_size=size, seq_len=seq_len, checkpointing=checkpointing
        )
        for size, seq_len, checkpointing in itertools.product((1, 4, 16), (512, 1024, 2048), KEPT)
    ]
    for basis, config in itertools.product(configs, configs):
        estimate = learned([basis], micro_steps=1).predict(config, 1, OFFERED)
        assert estimate is None or estimate.low_gib <= 1.03 * need(config, 1), (basis, config)


@pytest.mark.parametrize("seed", range(3))
def test_noise_in_what_was_measured_hardly_moves_it(seed: int) -> None:
    drawn = random.Random(seed)

    def unsteady(config: TrainConfig, micro_steps: int) -> Measurement:
        exact, factor = machine(config, micro_steps), drawn.uniform(0.997, 1.003)
        return replace(
            exact,
            segment_peak_gib={name: peak * factor for name, peak in exact.segment_peak_gib.items()},
            peak_allocated_gib=exact.peak_allocated_gib * factor,
            peak_reserved_gib=exact.peak_reserved_gib * factor,
        )

    model = learned(drawn.sample(GRID, 40), of=unsteady)
    for config in GRID:
        estimate = reported(model, config)
        assert estimate.gib == pytest.approx(need(config), rel=0.02)
        assert estimate.low_gib <= 1.02 * need(config)


# What one configuration says of another

ONE = TrainConfig(micro_batch_size=4, seq_len=1024, lora_rank=16, checkpointing="none")


def test_what_was_measured_is_reported_as_it_was() -> None:
    estimate = reported(learned([ONE]), ONE)
    assert (estimate.low_gib, estimate.gib, estimate.high_gib) == pytest.approx((need(ONE),) * 3)


def test_the_rank_is_known_from_another_rank() -> None:
    model = learned([ONE])
    for rank in (1, 8, 64, 256):
        config = replace(ONE, lora_rank=rank)
        assert reported(model, config).gib == pytest.approx(need(config), rel=1e-6)


def test_an_optimizer_is_known_from_any_way_to_compute() -> None:
    """Its state is the same with every layer recomputed; what is kept of a token is not."""
    other = replace(ONE, optimizer="adamw_8bit", checkpointing="full", micro_batch_size=1)
    wanted = replace(ONE, optimizer="adamw_8bit")
    assert learned([ONE]).predict(wanted, 2, OFFERED) is None
    assert reported(learned([ONE, other]), wanted).gib == pytest.approx(need(wanted), rel=1e-6)


@pytest.mark.parametrize(
    "unknown",
    [
        {"optimizer": "lion_8bit"},
        {"method": "full"},
        {"precision": "bf16_pure"},
        {"quantization": "nf4"},
        {"quantization": "nf4", "double_quant": True},
        {"attention": "flash_attention_2"},
        {"compile": "per_layer"},
        {"loss": "chunked"},
        {"checkpointing": "full"},
        {"checkpointing": "every_2"},
    ],
    ids=str,
)
def test_what_nothing_was_learned_of_is_not_reported(unknown: dict[str, str]) -> None:
    model = learned([ONE, replace(ONE, micro_batch_size=8)])
    assert model.predict(replace(ONE, **unknown), 2, OFFERED) is None


def test_nothing_is_reported_before_anything_is_learned() -> None:
    assert MemoryPredictor().predict(ONE, 2, OFFERED) is None


def test_a_single_micro_batch_is_reported_from_two_where_only_adapters_are_trained() -> None:
    whole = TrainConfig(method="full", micro_batch_size=1, checkpointing="full")
    # its gradients are as large as its weights
    assert learned([whole]).predict(whole, 1, OFFERED) is None
    estimate, truth = reported(learned([ONE]), ONE, 1), need(ONE, 1)
    assert truth - 0.5 < estimate.low_gib <= truth and not estimate.bounded
    assert learned([ONE], micro_steps=1).predict(ONE, 2, OFFERED) is None
    assert reported(learned([ONE], micro_steps=4), ONE, 2).gib == pytest.approx(need(ONE))


@pytest.mark.parametrize("rank", [16, 64])
@pytest.mark.parametrize("tokens", [(256, 2048), (512, 1536)])
def test_points_of_both_kinds_are_not_put_on_one_line(rank: int, tokens: tuple[int, int]) -> None:
    """A line through what a single micro batch needs and what two need is steeper than either."""
    model, few = (
        MemoryPredictor(),
        replace(ONE, micro_batch_size=8, lora_rank=rank, checkpointing="full"),
    )
    for (length, steps), size in zip(zip(tokens, (1, 2), strict=True), (8, 4), strict=True):
        config = replace(few, micro_batch_size=size, seq_len=length)
        model.learn(config, machine(config, steps))
    for steps in (1, 2):
        large = replace(few, micro_batch_size=4, seq_len=8192)
        assert reported(model, large, steps).low_gib <= need(large, steps)


def test_the_optimizer_of_full_fine_tuning_is_its_own_way() -> None:
    whole = TrainConfig(method="full", micro_batch_size=1, checkpointing="full")
    model = learned([whole])
    assert model.predict(replace(whole, optimizer="adamw_8bit"), 2, OFFERED) is None
    assert reported(model, replace(whole, micro_batch_size=2)).low_gib <= need(
        replace(whole, micro_batch_size=2)
    )


@pytest.mark.parametrize(
    "knobs",
    [
        *({"attention": name} for name in ("sdpa", "flash_attention_2", "flex_attention")),
        {"packing": True, "packed_attention": "varlen"},  # without a mask of each row
    ],
    ids=str,
)
def test_tokens_count_and_not_how_rows_part_them(knobs: dict[str, Any]) -> None:
    basis = replace(ONE, **knobs)
    other = replace(basis, micro_batch_size=2, seq_len=2048)
    assert reported(learned([basis]), other).gib == pytest.approx(need(other), rel=1e-6)


def test_a_mask_of_packed_rows_is_known_at_its_own_length_alone() -> None:
    packed = replace(ONE, packing=True)
    for known in (packed, replace(packed, packed_attention="varlen")):
        assert (
            learned([known]).predict(replace(packed, micro_batch_size=2, seq_len=2048), 2, OFFERED)
            is None
        )


def test_eager_attention_is_known_at_its_own_length_alone() -> None:
    """It keeps the scores of a row against itself, which are no line in tokens."""
    basis = [replace(ONE, attention="eager", micro_batch_size=size) for size in (2, 4)]
    model = learned(basis)
    assert model.predict(replace(basis[0], seq_len=2048), 2, OFFERED) is None
    larger = replace(basis[0], micro_batch_size=16)
    assert reported(model, larger).gib == pytest.approx(need(larger), rel=0.01)


def test_what_was_learned_last_of_a_configuration_counts() -> None:
    model = learned([ONE])
    grown = machine(ONE)
    segments = {name: peak + 1.0 for name, peak in grown.segment_peak_gib.items()}
    model.learn(ONE, replace(grown, segment_peak_gib=segments))
    estimate = reported(model, ONE)
    assert estimate.basis == 1 and estimate.gib > need(ONE) + 0.9


def test_phases_do_where_there_are_no_segments() -> None:
    model = learned(
        [ONE], of=lambda config, steps: replace(machine(config, steps), segment_peak_gib={})
    )
    assert reported(model, ONE).gib == pytest.approx(need(ONE))


# What it must fit into


def test_the_limit_is_what_is_offered_less_the_context() -> None:
    estimate = reported(learned([ONE]), ONE)
    assert estimate.limit_gib == pytest.approx(OFFERED - CONTEXT)
    assert estimate.gib / estimate.limit_gib == pytest.approx(need(ONE) / (OFFERED - CONTEXT))
    small = learned([ONE]).predict(ONE, 2, 20.0)
    assert small is not None and small.limit_gib == pytest.approx(20.0 - CONTEXT)
    assert small.gib == estimate.gib


def test_managed_memory_is_taken_off_the_limit_by_rank() -> None:
    """Paged state is proportional to the rank, and only those that page it have less."""
    paged = replace(ONE, optimizer="paged_adamw_8bit")
    model = learned([ONE, paged])
    for rank in (16, 64):
        config = replace(paged, lora_rank=rank)
        assert reported(model, config).limit_gib == pytest.approx(machine(config).limit_gib)
    assert reported(model, ONE).limit_gib == pytest.approx(OFFERED - CONTEXT)


def test_the_smallest_context_is_believed() -> None:
    """Refusing is for good: a context that was larger once does not lower the limit."""
    model = learned([ONE])
    large = replace(ONE, micro_batch_size=8)
    model.learn(large, replace(machine(large), context_gib=2.0))
    assert reported(model, ONE).limit_gib == pytest.approx(OFFERED - CONTEXT)


def test_the_head_of_a_loss_in_chunks_grows_no_further() -> None:
    """A line through 512 and 1,024 tokens would predict too many logits at 4,096 tokens."""

    def needs(config: TrainConfig) -> Measurement:
        peak = 16.0 + config.tokens / 1024 * 0.2 + chunk_tokens(config.tokens) / 1024 * 3.0
        return measurement(
            segment_peak_gib={"backward": peak},
            peak_allocated_gib=peak,
            peak_reserved_gib=peak,
            model_gib=16.0,
        )

    model, config = MemoryPredictor(), TrainConfig(seq_len=256, loss="chunked")
    for size in (2, 4):
        small = replace(config, micro_batch_size=size)
        model.learn(small, needs(small))
    large = replace(config, micro_batch_size=16)
    estimate, truth = model.predict(large, 2, 22.0), needs(large).peak_reserved_gib
    assert estimate is None or estimate.low_gib <= truth


# --- what is refused without a probe

BASE = TrainConfig(
    micro_batch_size=8, seq_len=1024, lora_rank=16, checkpointing="every_2", optimizer="adamw_8bit"
)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"micro_batch_size": 16},
        {"seq_len": 1025},
        {"lora_rank": 17},
        {"checkpointing": "none"},
        {"checkpointing": "every_3"},  # recomputes fewer layers
        {"optimizer": "adamw_torch"},
        {"optimizer": "adamw_torch_fused"},
        {"micro_batch_size": 32, "seq_len": 4096, "lora_rank": 64, "checkpointing": "none"},
    ],
)
def test_larger_in_every_knob(change):
    assert needs_at_least(replace(BASE, **change), BASE)


@pytest.mark.parametrize(
    "change",
    [
        {"micro_batch_size": 4},
        {"seq_len": 1023},
        {"lora_rank": 8},
        {"checkpointing": "full"},
        {"optimizer": "paged_adamw_8bit"},
        {"optimizer": "lion_8bit"},
        {"optimizer": "adafactor"},  # not in the order
        {"precision": "fp32"},
        {"quantization": "nf4"},
        {"attention": "eager"},
        {"packing": True},
        {"packing": True, "packed_attention": "varlen"},
        {"dora": True},
        {"compile": "per_layer"},
        {"loss": "chunked"},
        {"method": "full"},
        {"micro_batch_size": 32, "seq_len": 512},  # twice the tokens, but shorter rows
        {"micro_batch_size": 32, "checkpointing": "full"},
    ],
)
def test_not_comparable(change):
    assert not needs_at_least(replace(BASE, **change), BASE)


def test_optimizers_out_of_the_order_are_compared_with_themselves():
    small, large = (
        TrainConfig(optimizer="adafactor"),
        TrainConfig(optimizer="adafactor", micro_batch_size=16),
    )
    assert needs_at_least(large, small)
    assert not needs_at_least(large, replace(small, optimizer="lion_8bit"))
    full = TrainConfig(method="full", micro_batch_size=1)
    assert needs_at_least(replace(full, micro_batch_size=2), full)
    assert needs_at_least(TrainConfig(optimizer="adamw_torch"), TrainConfig())
    assert needs_at_least(TrainConfig(), TrainConfig(optimizer="adamw_torch"))


def test_the_first_that_ran_out_is_named():
    known_ooms: list[KnownOom] = []
    assert refused_by(known_ooms, BASE, 2) is None
    larger = replace(BASE, micro_batch_size=16)
    known_ooms.append(KnownOom(trial=3, config=larger, micro_steps=2, detail=oom_detail()))
    known_ooms.append(KnownOom(trial=None, config=BASE, micro_steps=2, detail=oom_detail()))
    assert refused_by(known_ooms, replace(BASE, micro_batch_size=32), 2).trial == 3
    known = refused_by(known_ooms, replace(BASE, micro_batch_size=15), 2)
    assert (known.trial, known.config, known.detail) == (None, BASE, oom_detail())
    assert refused_by(known_ooms, replace(BASE, micro_batch_size=7), 2) is None


def test_a_step_of_one_micro_batch_keeps_no_gradients_alive_and_is_not_refused_for_them():
    known_ooms: list[KnownOom] = []
    known_ooms.append(KnownOom(trial=3, config=BASE, micro_steps=2, detail=oom_detail()))
    whole_batch = replace(BASE, micro_batch_size=32)
    assert refused_by(known_ooms, whole_batch, 1) is None
    known_ooms.append(KnownOom(trial=4, config=BASE, micro_steps=1, detail=oom_detail()))
    assert refused_by(known_ooms, whole_batch, 1).trial == 4


# By hand


def test_a_bracket_of_temporary_memory_by_hand() -> None:
    """Two of 1 and 3 GiB at 100 tokens: in proportion to the tokens, or always there."""
    assert _temporary_gib([(100, 1.0), (100, 3.0)], 200) == (1.0, 4.0, 6.0)
    assert _temporary_gib([(100, 1.0), (100, 3.0)], 50) == (0.5, 1.0, 3.0)
    assert _temporary_gib([(100, 1.0), (100, 3.0), (100, 1.5)], 100) == (1.0, 1.5, 3.0)
    # What is less than nothing is no share of the tokens.
    assert _temporary_gib([(100, -1.0), (100, 3.0)], 200) == (-2.0, 1.0, 6.0)
    assert _temporary_gib([(100, 0.0)], 200) == (0.0, 0.0, 0.0)
    # Of several numbers of tokens those that are asked for are known themselves.
    assert _temporary_gib([(100, 1.0), (200, 9.0), (300, 2.0), (300, 4.0)], 300) == (2.0, 3.0, 4.0)
    assert _temporary_gib([(100, 0.0), (100, 2.0)], 200) == (0.0, 1.0, 4.0)


def test_a_line_that_falls_errs_upwards_too() -> None:
    low, likely, high = _temporary_gib([(100, 4.0), (200, 3.0)], 400)
    assert (low, likely, high) == pytest.approx((1.0 - 0.04, 1.0, 1.0 + 0.04))
    low, likely, high = _temporary_gib([(100, 4.0), (200, 1.0), (300, 4.0)], 250)
    assert likely == pytest.approx(3.0) and (likely - low, high - likely) == pytest.approx(
        (2.0, 2.0)
    )


def peaks(gib: float, **changes: Any) -> Measurement:
    """Of a model of 10 GiB, whose only segment has this peak."""
    nothing = dict.fromkeys(("adapters_gib", "gradients_gib", "optimizer_gib"), 0.0)
    same = {
        "peak_allocated_gib": gib,
        "peak_reserved_gib": gib,
        "segment_peak_gib": {"forward": gib},
    }
    return measurement(**{"model_gib": 10.0, **nothing, **same, "context_gib": 0.5} | changes)


def test_the_reserve_and_the_context_of_those_that_are_alike_by_hand() -> None:
    """The allocator held 1.0, 1.5 and 1.25 times what was allocated; one context was not shown."""
    model = MemoryPredictor()
    for rank, times, context in ((8, 1.0, None), (16, 1.5, 0.75), (32, 1.25, 0.5)):
        model.learn(
            replace(ONE, lora_rank=rank),
            peaks(12.0, peak_reserved_gib=12.0 * times, context_gib=context),
        )
    found = reported(model, ONE)
    assert (found.low_gib, found.gib, found.high_gib) == pytest.approx((12.0, 15.0, 18.0))
    assert (found.limit_gib, found.basis, found.bounded) == (OFFERED - 0.5, 3, True)
    pair, ranks = MemoryPredictor(), replace(ONE, num_gpus=2, sharding="fsdp2")
    pair.learn(ranks, peaks(12.0, peak_reserved_gib=18.0))
    found = reported(pair, ranks)  # the pools of side streams may be empty
    assert (found.low_gib, found.gib, found.high_gib) == pytest.approx((12.0, 18.0, 18.0))
    hidden = MemoryPredictor()
    hidden.learn(ONE, peaks(12.0, context_gib=None))
    assert reported(hidden, ONE).limit_gib == OFFERED


def test_the_nearest_rank_tells_what_stays_in_memory() -> None:
    """Adapters of rank 8 take 2 GiB here, and those of rank 64 another 40: rank 16 goes by the
    former.
    """
    model = MemoryPredictor()
    for rank, adapters in ((64, 40.0), (8, 2.0), (128, 80.0)):
        model.learn(
            replace(ONE, lora_rank=rank), peaks(10.0 + adapters + 1.0, adapters_gib=adapters)
        )
    assert reported(model, ONE).gib == pytest.approx(10.0 + 2 * 2.0 + 1.0)
    assert model._statics(replace(ONE, lora_rank=100), 2) == pytest.approx(10.0 + 80.0 * 100 / 128)
    assert model._statics(replace(ONE, quantization="nf4"), 2) is None
    assert model._statics(replace(ONE, optimizer="adamw_8bit"), 2) is None


def test_the_place_of_the_peak_is_that_of_the_likely_value() -> None:
    """From half of the tokens: the forward pass may need more, but the optimizer likely does."""
    segments = {"forward": 12.0, "backward_layers": 11.0, "optimizer": 10.5}
    model = MemoryPredictor()
    model.learn(ONE, peaks(12.0, segment_peak_gib=segments))
    assert reported(model, ONE).phase is Phase.FORWARD
    model.learn(ONE, peaks(12.0, segment_peak_gib=segments | {"backward_layers": 12.5}))
    assert reported(model, ONE).phase is Phase.BACKWARD
    line = MemoryPredictor()
    for size, forward, optimizer in ((4, 12.0, 13.0), (8, 13.0, 13.0)):
        config = replace(ONE, micro_batch_size=size)
        line.learn(
            config, peaks(13.0, segment_peak_gib={"forward": forward, "optimizer": optimizer})
        )
    assert reported(line, replace(ONE, micro_batch_size=6)).phase is Phase.OPTIMIZER
    assert reported(line, replace(ONE, micro_batch_size=12)).phase is Phase.FORWARD


def test_a_paged_optimizer_is_bounded_once_its_state_is_known() -> None:
    paged = replace(ONE, optimizer="paged_adamw_8bit")
    few = replace(paged, checkpointing="full")
    model = MemoryPredictor()
    model.learn(ONE, peaks(12.0))
    model.learn(few, peaks(11.0, managed_gib=0.25))
    # its state is known from another way to compute, and not what of it is managed
    found = reported(model, paged)
    assert not found.bounded and found.limit_gib == OFFERED - 0.5
    model.learn(replace(paged, lora_rank=32), peaks(12.0, managed_gib=0.5))
    found = reported(model, paged)
    assert found.bounded and found.limit_gib == OFFERED - 0.5 - 0.25
    model.learn(replace(paged, lora_rank=8), peaks(12.0, managed_gib=0.25))
    assert reported(model, paged).limit_gib == OFFERED - 0.5 - 0.5  # the most that any of them had
    plain = MemoryPredictor()
    plain.learn(replace(ONE, checkpointing="full"), peaks(11.0))
    plain.learn(replace(ONE, optimizer="adamw_8bit"), peaks(12.0))
    assert reported(plain, ONE).bounded


def test_a_measurement_replaces_an_extrapolation_and_not_the_other_way_round() -> None:
    model = MemoryPredictor()
    for gib, error in ((11.0, 0.1), (12.0, 0.1), (13.0, 0.0), (14.0, 0.1), (15.0, 0.0)):
        model.learn(ONE, peaks(gib, time_error=error))
        expected = 11.0 if gib == 12.0 else 13.0 if gib == 14.0 else gib
        assert reported(model, ONE).gib == expected


def test_more_than_two_micro_batches_are_as_two() -> None:
    model = MemoryPredictor()
    model.learn(ONE, peaks(12.0, micro_steps=3))
    assert reported(model, ONE, 4).gib == 12.0 and reported(model, ONE, 2).bounded
    assert not reported(model, ONE, 1).bounded
    known = KnownOom(trial=1, config=ONE, micro_steps=4, detail=oom_detail())
    assert refused_by([known], ONE, 2) is known and refused_by([known], ONE, 1) is None
    assert MemoryEstimate(
        low_gib=1.0, gib=1.0, high_gib=1.0, limit_gib=1.0, phase=Phase.LOAD, basis=1
    ).bounded


def test_a_head_in_chunks_has_a_way_to_compute_of_its_own_up_to_1024_tokens() -> None:
    chunked = replace(ONE, loss="chunked", micro_batch_size=1)
    model = MemoryPredictor()
    model.learn(replace(chunked, seq_len=1025), peaks(12.0))
    assert reported(model, replace(chunked, seq_len=4096)).basis == 1
    assert model.predict(replace(chunked, seq_len=1024), 2, OFFERED) is None


def test_the_knobs_that_decide_how_many_bytes_a_token_takes() -> None:
    assert set(_compute_knobs()) == {
        *(
            "method",
            "precision",
            "quantization",
            "double_quant",
            "checkpointing",
            "attention",
            "compile",
            "loss",
        ),
        *(
            "kernels",
            "packing",
            "packed_attention",
            "dora",
            "lora_targets",
            "lora_dropout",
            "allocator",
            "num_gpus",
            "fp8_products",
        ),
        *("cuda_graphs", "lora_kernels", "sharding", "copies", "sync_each_batch", "offload"),
    }


def test_a_segment_that_may_need_more_but_likely_does_not_is_no_place_of_the_peak() -> None:
    """Of half of the tokens: what was measured as nothing once does not shrink with them, and
    likely is half of it.
    """
    others = [f"backward_{name}" for name in ("layers", "inputs", "head", "norm", "end")]
    model = MemoryPredictor()
    for rank, optimizer in ((8, 10.0), (32, 11.0)):
        segments = {"optimizer": optimizer} | dict.fromkeys(others, 10.8)
        model.learn(replace(ONE, lora_rank=rank), peaks(11.0, segment_peak_gib=segments))
    assert reported(model, replace(ONE, micro_batch_size=2)).phase is Phase.OPTIMIZER


def test_full_fine_tuning_with_another_optimizer_computes_in_another_way() -> None:
    model = MemoryPredictor()
    for optimizer, gib in (("adamw_8bit", 12.0), ("adamw_torch_fused", 19.0)):
        model.learn(TrainConfig(method="full", optimizer=optimizer, micro_batch_size=1), peaks(gib))
    found = reported(model, TrainConfig(method="full", optimizer="adamw_8bit", micro_batch_size=1))
    assert (found.basis, found.gib) == (1, 12.0)
