"""What a few layers predict of all: exact where depth is a line, segment by segment, and honest
about the rest.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from autotune.core.probe_types import (
    DryCount,
    Evidence,
    KernelTimes,
    Measurement,
    ModelShape,
    Phase,
)
from autotune.core.train_config import TrainConfig
from autotune.prediction.depth_extrapolation import (
    DEVICE_BOUND,
    HOST_BOUND,
    SEEN,
    UNKNOWN_HOST,
    DepthPredictor,
    Extrapolation,
    _error,
    _time,
    count_at_depth,
    depths,
    extrapolate,
)
from tests.helpers.factories import measurement, result

LAYERS = 32

# Which depths are probed


def shape(num_layers: int = LAYERS, prefix: int = 0, period: int | None = 1) -> ModelShape:
    return ModelShape(num_layers=num_layers, prefix=prefix, period=period)


@pytest.mark.parametrize(
    ("model", "every", "pair"),
    [
        (shape(), None, (2, 8)),
        (shape(), 1, (2, 8)),
        (shape(), 2, (2, 8)),
        (shape(), 4, (4, 8)),
        # each third layer of an alternating pattern repeats after six
        (shape(period=2), 3, (8, 14)),
        (shape(34, period=6), None, (10, 16)),
        (replace(shape(36), sees_images=True), None, (2, 18)),
        (shape(80), None, (2, 12)),
        (shape(126), None, (2, 16)),
        (shape(12), None, (2, 6)),
        (shape(6), None, (2, 3)),
    ],
)
def test_the_two_depths(model: ModelShape, every: int | None, pair: tuple[int, int]) -> None:
    assert depths(model, every) == pair


@pytest.mark.parametrize(
    ("num_layers", "pair"), [(32, (4, 8)), (80, (4, 12)), (12, (4, 6)), (6, None)]
)
def test_of_a_model_in_shards_no_fewer_than_four_layers_are_probed(
    num_layers: int, pair: tuple[int, int] | None
) -> None:
    assert depths(shape(num_layers), None, sharded=True) == pair


@pytest.mark.parametrize(
    ("model", "every"),
    [
        (shape(period=None), None),
        (shape(1), None),
        (shape(4), None),
        (shape(5), None),
        (shape(9, period=2), None),
        (shape(14, period=6), None),
        (shape(26, period=6), None),  # the fewest layers that have every kind are too many
        (shape(12), 8),
        (shape(32), 16),
    ],
)
def test_a_model_of_too_few_layers_is_not_truncated(model: ModelShape, every: int | None) -> None:
    assert depths(model, every) is None


MODELS = [
    shape(num_layers, prefix, period)
    for num_layers in range(1, 97)
    for prefix in (0, 1, 3)
    for period in (1, 2, 6)
    if num_layers - prefix >= 2 * period
]


@pytest.mark.parametrize("every", [None, 1, 2, 3, 4])
def test_whole_periods_are_left_out_of_either_depth(every: int | None) -> None:
    pairs = [(model, depths(model, every)) for model in MODELS]
    assert sum(pair is not None for _, pair in pairs) > len(pairs) / 3
    for model, pair in pairs:
        if pair is None:
            continue
        shallow, wide = pair
        assert 2 <= shallow < wide, model
        assert min(model.num_layers / 4, 12) <= wide <= model.num_layers / 2, model
        assert model.period is not None
        for depth in pair:
            assert (model.num_layers - depth) % model.period == 0, model
            assert (model.num_layers - depth) % (every or 1) == 0, model


def test_the_shallow_probe_has_a_layer_that_repeats() -> None:
    """Recomputing one may take more than any layer of the prefix: no line leads there from none of
    them.
    """
    for model in MODELS:
        pair = depths(model, 1)
        assert pair is None or pair[0] > model.prefix, model


# What two depths predict


def affine(
    depth: int, *, segments: Mapping[str, tuple[float, float]] | None = None, **changes: Any
) -> Measurement:
    """A measurement of so many layers of a model in which everything is a line in depth: (at 0
    layers, a layer).
    """
    segments = segments or {"forward": (3.0, 0.5), "backward": (6.0, 0.5), "optimizer": (1.0, 0.6)}
    peaks = {name: start + slope * depth for name, (start, slope) in segments.items()}
    micro, rest = 0.04 + 0.01 * depth, 0.002 + 0.001 * depth
    peak = max(peaks.values())
    phases = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
    values: dict[str, Any] = {
        "micro_steps": 2,
        "micro_step_s": (micro,) * 3,
        "rest_s": (rest,) * 3,
        "step_s": (2 * micro + rest,) * 3,
        "phase_s": {Phase.FORWARD: 0.3 * micro, Phase.BACKWARD: 0.7 * micro, Phase.OPTIMIZER: rest},
        "segment_peak_gib": peaks,
        "phase_peak_gib": {
            phase: max(peak for name, peak in peaks.items() if name.startswith(phase))
            for phase in phases
        },
        "host_micro_s": 0.5 * micro,
        "model_gib": 0.5 + 0.4 * depth,
        "adapters_gib": 0.005 * depth,
        "gradients_gib": 0.005 * depth,
        "optimizer_gib": 0.01 * depth,
        "peak_allocated_gib": peak,
        "peak_reserved_gib": peak + 0.1 + 0.01 * depth,
        "context_gib": 0.5,
        "managed_gib": 0.125 * depth,
        "limit_gib": 132.0 - 0.125 * depth,
        "trainable_params": 1_000_000 * depth,
        "total_params": 262_000_000 + 218_000_000 * depth,
    }
    return measurement(**(values | changes))


def predicted(
    low: Measurement, high: Measurement, shallow: int = 2, wide: int = 8
) -> Extrapolation:
    return extrapolate([(shallow, low), (wide, high)], LAYERS)


EXACT = (
    *(
        "model_gib",
        "adapters_gib",
        "gradients_gib",
        "optimizer_gib",
        "managed_gib",
        "limit_gib",
        "context_gib",
    ),
    *(
        "peak_allocated_gib",
        "peak_reserved_gib",
        "segment_peak_gib",
        "phase_peak_gib",
        "phase_s",
        "host_micro_s",
    ),
    *("trainable_params", "total_params", "micro_steps", "step_s"),
)


@pytest.mark.parametrize(("shallow", "wide"), [(2, 8), (4, 8), (2, 3), (8, 16)])
def test_lines_are_recovered_exactly(shallow: int, wide: int) -> None:
    whole = affine(LAYERS)
    reported = predicted(affine(shallow), affine(wide), shallow, wide).measurement
    for name in EXACT:
        assert getattr(reported, name) == pytest.approx(getattr(whole, name)), name
    assert reported.micro_step_s == pytest.approx(whole.micro_step_s[:1])
    assert reported.rest_s == pytest.approx(whole.rest_s[:1])
    assert reported.telemetry is None  # nobody read the card's power with all layers


def test_a_step_of_one_micro_batch_has_no_rest() -> None:
    def single(depth: int) -> Measurement:
        micro = 0.04 + 0.01 * depth
        return affine(
            depth, micro_steps=1, micro_step_s=(micro,) * 3, rest_s=(), step_s=(micro,) * 3
        )

    reported = predicted(single(2), single(8)).measurement
    assert reported.rest_s == ()
    assert reported.step_s == pytest.approx(single(LAYERS).step_s)


# Full fine-tuning, all layers recomputed: the logits are above the rest of few layers, and below
# the optimizer of many.
FULL_FINE_TUNING = {
    "forward": (2.0, 0.7),
    "backward": (20.0, 0.7),
    "backward_layers": (3.0, 1.2),
    "backward_inputs": (2.5, 1.3),
    "optimizer": (2.0, 1.6),
}


def test_the_peak_moves_from_the_logits_to_the_optimizer_as_depth_grows() -> None:
    low, high, whole = (affine(depth, segments=FULL_FINE_TUNING) for depth in (2, 8, LAYERS))
    for probe in (low, high):
        assert (
            max(probe.segment_peak_gib, key=lambda name: probe.segment_peak_gib[name]) == "backward"
        )
    reported = predicted(low, high).measurement
    assert reported.segment_peak_gib == pytest.approx(whole.segment_peak_gib)
    assert (
        max(reported.segment_peak_gib, key=lambda name: reported.segment_peak_gib[name])
        == "optimizer"
    )
    # the highest of its parts
    assert reported.phase_peak_gib[Phase.BACKWARD] == pytest.approx(2.5 + 1.3 * LAYERS)
    assert reported.peak_allocated_gib == pytest.approx(whole.peak_allocated_gib)
    assert reported.peak_reserved_gib == pytest.approx(whole.peak_reserved_gib)

    one_line = low.peak_allocated_gib + (high.peak_allocated_gib - low.peak_allocated_gib) * (
        LAYERS - 2
    ) / (8 - 2)
    assert abs(one_line / whole.peak_allocated_gib - 1) > 0.05


def test_the_peak_may_move_within_the_backward_pass() -> None:
    """The phase's own peak is its highest part, and no line through what was highest at either
    depth.
    """
    inside = {
        "forward": (2.0, 0.5),
        "backward": (12.0, 0.5),
        "backward_layers": (1.0, 1.0),
        "optimizer": (1.0, 0.4),
    }
    reported = predicted(affine(2, segments=inside), affine(8, segments=inside)).measurement
    assert reported.phase_peak_gib[Phase.BACKWARD] == pytest.approx(1.0 + LAYERS)
    assert reported.peak_allocated_gib == pytest.approx(1.0 + LAYERS)


def test_what_the_timed_steps_held_beyond_the_first_is_kept() -> None:
    plain, extra = affine(8), 0.25
    grown = replace(
        plain,
        peak_allocated_gib=plain.peak_allocated_gib + extra,
        peak_reserved_gib=plain.peak_reserved_gib + extra,
    )
    reported = predicted(affine(2), grown).measurement
    assert reported.peak_allocated_gib == pytest.approx(affine(LAYERS).peak_allocated_gib + extra)


def test_a_segment_that_only_one_depth_has_has_no_line() -> None:
    low, high = affine(2), affine(8)
    lacking = replace(low, segment_peak_gib={"forward": low.segment_peak_gib["forward"]})
    for pair in ((lacking, high), (low, replace(high, segment_peak_gib={"forward": 7.0}))):
        assert set(
            extrapolate([(2, pair[0]), (8, pair[1])], LAYERS).measurement.segment_peak_gib
        ) == {"forward"}


def test_reserved_memory_is_never_below_allocated() -> None:
    shrinking = replace(affine(8), peak_reserved_gib=affine(8).peak_allocated_gib)
    reported = predicted(affine(2), shrinking).measurement
    assert reported.peak_reserved_gib >= reported.peak_allocated_gib


# Times


def test_a_host_that_needs_longer_than_the_device_decides() -> None:
    """With few layers it hides behind the head's arithmetic: 30 ms a layer come to light on all of
    them.
    """
    low, high = (affine(depth, host_micro_s=0.01 + 0.03 * depth) for depth in (2, 8))
    low, high = replace(low, micro_step_s=(0.3,) * 3), replace(high, micro_step_s=(0.33,) * 3)
    reported = predicted(low, high)
    assert reported.measurement.host_bound
    assert reported.measurement.micro_step_s == pytest.approx((0.01 + 0.03 * LAYERS,))
    step = statistics.median(reported.measurement.step_s)
    assert step == pytest.approx(
        2 * reported.measurement.micro_step_s[0] + reported.measurement.rest_s[0]
    )
    assert reported.time_error == pytest.approx(HOST_BOUND)


def test_a_host_that_was_the_bottleneck_already_is_one_of_the_whole_model() -> None:
    low, high = (affine(depth, host_micro_s=0.96 * (0.04 + 0.01 * depth)) for depth in (2, 8))
    reported = predicted(low, high)
    assert reported.measurement.host_bound
    assert reported.measurement.micro_step_s == pytest.approx(affine(LAYERS).micro_step_s[:1])


def test_a_host_that_waits_for_a_full_queue_is_not_taken_for_a_slow_one() -> None:
    """Eight layers fill the queue: issuing them takes as long as they do.

    Two do not, and tell what a layer costs.
    """
    reported = predicted(affine(2, host_micro_s=0.01), affine(8, host_micro_s=0.118))
    assert reported.measurement.host_micro_s == pytest.approx(0.01 * LAYERS / 2)
    assert reported.measurement.micro_step_s == pytest.approx(affine(LAYERS).micro_step_s[:1])
    assert not reported.measurement.host_bound


def test_a_host_that_is_quick_enough_changes_nothing() -> None:
    reported = predicted(affine(2), affine(8))
    assert not reported.measurement.host_bound
    assert reported.time_error == pytest.approx(DEVICE_BOUND)


@pytest.mark.parametrize(
    ("share", "unseen"), [(0.3, 0.02), (0.5, 0.02), (0.65, 0.085), (0.81, 0.15), (1.0, 0.15)]
)
def test_the_less_the_host_is_hidden_the_more_error_is_allowed(share: float, unseen: float) -> None:
    """Other work on a shared machine's host shows where it is the bottleneck, and nearly is."""
    low, high = (affine(depth, host_micro_s=share * (0.04 + 0.01 * depth)) for depth in (2, 8))
    reported = predicted(low, high)
    assert reported.unseen == pytest.approx(unseen, abs=0.001)
    assert reported.measurement.host_bound is (share >= 0.8)
    assert reported.time_error >= reported.unseen


def test_nothing_is_known_of_the_host_of_a_cpu() -> None:
    reported = predicted(affine(2, host_micro_s=None), affine(8, host_micro_s=None))
    assert reported.measurement.host_micro_s is None and not reported.measurement.host_bound
    assert reported.time_error == pytest.approx(UNKNOWN_HOST)


def test_where_the_host_waits_within_a_micro_batch_the_line_goes_through_the_medians() -> None:
    """What disturbs the host takes as long at any depth.

    Here it lengthens a third of the micro batches of one.
    """
    low, high = (affine(depth, host_micro_s=None, host_waits=True) for depth in (2, 8))
    reported = predicted(replace(low, micro_step_s=(*low.micro_step_s[:2], 0.2)), high)
    assert not reported.shortest and reported.time_error > UNKNOWN_HOST
    assert reported.measurement.micro_step_s == pytest.approx(affine(LAYERS).micro_step_s[:1])


def noisy(depth: int, spread: float) -> Measurement:
    micro = 0.04 + 0.01 * depth
    return affine(depth, micro_step_s=(micro * (1 - spread), micro, micro * (1 + spread)))


def test_doubt_grows_with_the_spread() -> None:
    errors = [
        predicted(noisy(2, spread), noisy(8, spread)).time_error
        for spread in (0.0, 0.001, 0.01, 0.1)
    ]
    assert errors == sorted(errors) and errors[0] == pytest.approx(DEVICE_BOUND)
    assert errors[-1] > 3 * DEVICE_BOUND


@pytest.mark.parametrize("unit", [0.1, 10.0])
def test_doubt_is_a_share_of_a_step_however_long_that_takes(unit: float) -> None:
    def at(depth: int, scale: float) -> Measurement:
        made = noisy(depth, 0.05)
        rests = tuple(scale * rest for rest in (0.02, 0.03, 0.025))
        times = {
            name: tuple(scale * value for value in getattr(made, name))
            for name in ("step_s", "micro_step_s")
        }
        return replace(made, rest_s=rests, host_micro_s=None, **times)

    one, other = (predicted(at(2, scale), at(8, scale)) for scale in (1.0, unit))
    assert (other.noise, other.rest_noise) == pytest.approx(
        (one.noise, one.rest_noise)
    ) and one.rest_noise > 0


def test_doubt_grows_with_the_layers_that_were_left_out() -> None:
    probes = [(2, noisy(2, 0.05)), (8, noisy(8, 0.05))]
    errors = [extrapolate(probes, num_layers).time_error for num_layers in (16, 32, 64)]
    assert errors == sorted(set(errors))
    near, far = (
        predicted(noisy(2, 0.05), noisy(wide, 0.05), wide=wide).time_error for wide in (16, 4)
    )
    assert near < far


def test_a_single_timed_step_leaves_doubt() -> None:
    single = {
        depth: replace(affine(depth), micro_step_s=affine(depth).micro_step_s[:1])
        for depth in (2, 8)
    }
    assert predicted(single[2], single[8]).time_error > 1.5 * DEVICE_BOUND


def test_the_whole_model_never_takes_less_than_its_part() -> None:
    """A disturbed shallow probe may have been the slower one: a line through the two leads to less
    than nothing.
    """
    slow = affine(2, micro_step_s=(0.5,) * 3, rest_s=(0.02,) * 3, host_micro_s=None)
    part = affine(8, micro_step_s=(0.1,) * 3, rest_s=(0.01,) * 3, host_micro_s=None)
    reported = predicted(slow, part)
    assert reported.measurement.micro_step_s[0] >= 0.1
    assert min(reported.measurement.step_s) >= 0.2


def test_a_correction_multiplies_times_and_nothing_else() -> None:
    plain = predicted(affine(2), affine(8))
    longer = plain.scale_times([1.1])
    for name in ("step_s", "micro_step_s"):
        ratios = [
            now / then
            for now, then in zip(
                getattr(longer.measurement, name), getattr(plain.measurement, name), strict=True
            )
        ]
        assert ratios == pytest.approx([1.1] * len(ratios)), name
    assert longer.measurement.phase_s[Phase.BACKWARD] == pytest.approx(
        1.1 * plain.measurement.phase_s[Phase.BACKWARD]
    )
    assert (longer.time_error, longer.measurement.host_bound) == (
        plain.time_error,
        plain.measurement.host_bound,
    )
    assert longer.measurement.peak_reserved_gib == plain.measurement.peak_reserved_gib
    assert longer.measurement.segment_peak_gib == plain.measurement.segment_peak_gib


def test_beside_a_whole_model_only_what_follows_its_micro_batches_is_in_doubt() -> None:
    plain = predicted(affine(2), affine(8))
    rest, steps = plain.measurement.rest_s[0], (0.5, 0.51, 0.49, 0.5)
    reported = plain.with_micro_batches_of(affine(LAYERS, micro_step_s=steps))
    assert reported.measurement.micro_step_s == (0.5,)
    assert reported.measurement.rest_s == (rest,)
    assert statistics.median(reported.measurement.step_s) == pytest.approx(1.0 + rest)
    sure = plain.with_micro_batches_of(affine(LAYERS, micro_step_s=(0.5,) * 4)).time_error
    assert sure == pytest.approx(math.hypot(SEEN, DEVICE_BOUND * rest / (1.0 + rest)))
    scattered = affine(8, rest_s=(0.001, 0.019, 0.01))  # what follows is in doubt as much as it was
    doubt = (
        predicted(affine(2), scattered)
        .with_micro_batches_of(affine(LAYERS, micro_step_s=(0.5,) * 4))
        .time_error
    )
    assert doubt > sure + 0.02
    assert (
        sure
        < reported.time_error
        < plain.with_micro_batches_of(affine(LAYERS, micro_step_s=(0.5,))).time_error
    )
    assert reported.measurement.segment_peak_gib == plain.measurement.segment_peak_gib


def test_what_whole_models_took_tells_the_error_once_there_are_enough() -> None:
    plain = predicted(affine(2), affine(8))
    assert plain.scale_times([1.0, 1.002, 0.998, 1.0]).time_error == plain.time_error
    assert plain.scale_times([1.0, 1.002, 0.998, 1.0] * 2).time_error == pytest.approx(SEEN)
    # never more than is allowed unseen
    assert plain.scale_times([1.0, 1.1, 0.9, 1.2] * 2).time_error == plain.time_error
    noise = predicted(noisy(2, 0.01), noisy(8, 0.01))
    assert SEEN < noise.scale_times([1.0] * 8).time_error < noise.time_error


def test_the_mean_of_swinging_times_counts() -> None:
    """A card at its power limit swings: the whole model takes the mean, and no middle value."""
    swinging = {
        depth: affine(
            depth, micro_step_s=(0.9 * micro, 1.3 * micro, 0.8 * micro), host_micro_s=0.3 * micro
        )
        for depth, micro in ((2, 0.06), (8, 0.12))
    }
    assert predicted(swinging[2], swinging[8]).measurement.micro_step_s == pytest.approx(
        (0.04 + 0.01 * LAYERS,)
    )


def test_a_host_that_stumbled_is_not_extended() -> None:
    """Others on its machine slow it down at any depth alike, which a line through the means would
    multiply.
    """
    low = affine(2, host_micro_s=0.057, micro_step_s=(0.06, 0.06, 0.09))
    high = affine(8, host_micro_s=0.114, micro_step_s=(0.18, 0.17, 0.12))
    reported = predicted(low, high)
    assert reported.measurement.host_bound
    assert reported.measurement.micro_step_s == pytest.approx((0.04 + 0.01 * LAYERS,))
    assert reported.time_error > HOST_BOUND  # the stumbling itself is reported


@pytest.mark.parametrize("disturbed", [2, 8])
def test_a_step_whose_micro_batches_stood_apart_does_not_shorten_the_rest(disturbed: int) -> None:
    """What passes between two micro batches is taken from what is left of their step."""
    depths = {
        depth: affine(
            depth,
            host_micro_s=0.04 + 0.01 * depth,
            rest_s=(0.02, 0.02, 0.005 if depth == disturbed else 0.02),
        )
        for depth in (2, 8)
    }
    assert predicted(depths[2], depths[8]).measurement.rest_s == pytest.approx((0.02,))


@pytest.mark.parametrize("found", [(), (2,), (8, 8), (8, 2), (2, 4, 8)], ids=str)
def test_two_depths_are_needed_the_smaller_first(found: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"numbers of layers|unpack"):
        extrapolate([(depth, affine(depth)) for depth in found], LAYERS)


def test_the_host_sets_the_pace_of_the_kinds_that_are_shorter_than_what_it_needs() -> None:
    """Half of the micro batches take 0.1 s at 8 layers and 0.4 s at 32, half 0.3 s and 1.2 s; the
    host needs 0.5 s.
    """

    def at(num_layers: int, kinds: tuple[float, float]) -> Measurement:
        kind_s = tuple((0.5, seconds * num_layers / 8) for seconds in kinds)
        micro = sum(share * seconds for share, seconds in kind_s)
        own = {"micro_step_s": (micro,), "step_s": (2 * micro,), "rest_s": (0.0,), "kind_s": kind_s}
        return replace(measurement(), host_micro_s=0.5 * num_layers / 32, **own)

    predicted = extrapolate([(2, at(2, (0.1, 0.3))), (8, at(8, (0.1, 0.3)))], LAYERS).measurement
    assert predicted.micro_step_s[0] == pytest.approx((0.5 + 1.2) / 2)
    assert predicted.kind_s == ()


@pytest.mark.parametrize(
    ("of_low", "of_high", "of_whole"), [(0.8, 0.15, 0.15), (0.2, None, 0.2), (None, None, None)]
)
def test_plans_for_new_lengths_serve_all_layers(
    of_low: float | None, of_high: float | None, of_whole: float | None
) -> None:
    """Only the narrower model is asked for them now; earlier versions asked both, and the first was
    slower.
    """
    low, high = measurement(0.1, new_length_s=of_low), measurement(0.2, new_length_s=of_high)
    assert extrapolate([(2, low), (4, high)], 16).measurement.new_length_s == of_whole


def test_a_count_is_a_line_in_depth_for_each_segment():
    def count(layers: int) -> DryCount:
        return DryCount(
            model_gib=1.0 + layers,
            adapters_gib=0.1 * layers,
            gradients_gib=0.1 * layers,
            optimizer_gib=0.2 * layers,
            segment_peak_gib={"forward": 20.0 + layers, "optimizer": 2.0 + 3 * layers},
            peak_allocated_gib=max(20.0 + layers, 2.0 + 3 * layers),
            trainable_params=10 * layers,
            total_params=100 + 50 * layers,
            flops={"mm": 7 + 3 * layers},
            moved_bytes={"product": 5 * layers},
        )

    assert count_at_depth((2, count(2)), (4, count(4)), 32) == count(32)


def test_what_a_card_does_is_a_line_in_depth() -> None:
    """A layer has 3 ms of products, 1 ms of attention and 2 ms of bytes; the head has 10 ms of
    products, 4 of bytes.
    """

    def at(layers: int, host_s: float, **changes: Any) -> Measurement:
        seconds = {
            "products_s": 0.010 + 0.003 * layers,
            "fp8_s": 0.0,
            "attention_s": 0.001 * layers,
        }
        seconds |= {"bytes_s": 0.004 + 0.002 * layers, "busy_s": 0.014 + 0.006 * layers}
        kernels = KernelTimes(
            **seconds, micro_s=0.020 + 0.006 * layers, num_kernels=20 + 50 * layers
        )
        return replace(
            measurement(0.020 + 0.006 * layers), kernels=kernels, host_micro_s=host_s, **changes
        )

    found = extrapolate([(2, at(2, 0.002)), (8, at(8, 0.008))], LAYERS).measurement.kernels
    assert found is not None and found.num_kernels == 1620 and found.fp8_s == 0.0
    assert (found.products_s, found.attention_s, found.bytes_s) == pytest.approx(
        (0.106, 0.032, 0.068)
    )
    assert (found.busy_s, found.micro_s) == pytest.approx((0.206, 0.212))
    # The device waits for a host that needs 8 ms for each layer, which the head hides in a few.
    paced = extrapolate([(2, at(2, 0.016)), (8, at(8, 0.064))], LAYERS).measurement.kernels
    assert (
        paced is not None and paced.micro_s == pytest.approx(0.256) and paced.busy_s == found.busy_s
    )
    # Both must be profiled. A hotter card does not make the whole model do less than a part of it.
    assert (
        extrapolate(
            [(2, replace(at(2, 0.01), kernels=None)), (8, at(8, 0.01))], LAYERS
        ).measurement.kernels
        is None
    )
    assert (
        extrapolate(
            [(2, at(2, 0.01)), (8, replace(at(8, 0.01), kernels=None))], LAYERS
        ).measurement.kernels
        is None
    )
    slow = extrapolate(
        [(2, replace(at(2, 0.01), kernels=at(9, 0.01).kernels)), (8, at(8, 0.01))], LAYERS
    )
    assert slow.measurement.kernels == replace(at(8, 0.01).kernels or found, micro_s=0.068)


# By hand


@pytest.mark.parametrize(
    ("times", "error"), [((3.0,), 0.03), ((1.0, 1.2), 0.1), ((1.0, 2.0, 3.0), 1 / 3**0.5)]
)
def test_the_error_of_a_few_times_by_hand(times: tuple[float, ...], error: float) -> None:
    assert _error(times) == pytest.approx(error)


def test_a_time_beyond_both_depths_by_hand() -> None:
    """Means of 1.1 s and 2.2 s, with errors of 0.1 s and 0.2 s; three times as far from the first
    as the second is.
    """
    value, error = _time((1.0, 1.2), (2.0, 2.4), 3.0, 9.0, statistics.fmean)
    assert (value, error) == pytest.approx((4.4, math.hypot(2 * 0.1, 3 * 0.2)))
    assert _time((1.0, 1.2), (2.0, 2.4), 3.0, 9.0, min)[0] == pytest.approx(4.0)
    assert _time((5.0,), (2.0, 2.4), 3.0, 9.0, min)[0] == 2.0  # no less than the part of it took
    assert _time((1.0, 1.2), (2.0, 2.4), 3.0, 3.5, min)[0] == 3.5  # at most that much longer


def test_a_host_that_slows_down_between_the_probes_does_not_make_the_line_too_steep() -> None:
    """On an H200 whose host was busy, 4, 8 and all 32 layers took 0.067, 0.147 and 0.5 s."""
    probes = [(4, hosts_layers(0.067)), (8, hosts_layers(0.147))]
    found = extrapolate(probes, LAYERS).measurement
    assert found.micro_step_s == pytest.approx((8 * 0.067,))
    assert found.host_share == pytest.approx(1.0)
    # Without the three layers that occur once, the models have 1 and 29 layers.
    (seconds,) = extrapolate(probes, LAYERS, single_layers=3).measurement.micro_step_s
    assert seconds == pytest.approx(0.067 + 7 * 0.08)


def hosts_layers(seconds: float) -> Measurement:
    return affine(4, micro_step_s=(seconds,) * 3, rest_s=(), host_micro_s=seconds)


def test_micro_batches_of_a_whole_model_by_hand() -> None:
    """0.5 s are measured, with an error of 0.1 s; a rest of 0.2 s makes a step of 1.2 s, where 2 s
    were expected.
    """
    predicted = measurement(
        step_s=(2.0, 4.0, 1.0), micro_step_s=(0.9,), rest_s=(0.2,), micro_steps=2
    )
    plain = Extrapolation(measurement=predicted, unseen=0.02, rest_noise=0.1)
    made = plain.with_micro_batches_of(measurement(micro_step_s=(0.4, 0.6))).measurement
    assert made.micro_step_s == (0.5,) and made.step_s == pytest.approx((1.2, 2.4, 0.6))
    parts = (0.01, 2 * 2 * 0.1 / 1.2, 0.02 * 0.2 / 1.2, 0.1 * 2.0 / 1.2)
    assert made.time_error == pytest.approx(math.hypot(*parts))
    alone = replace(plain, measurement=replace(predicted, rest_s=(), micro_steps=1, step_s=(2.0,)))
    assert alone.with_micro_batches_of(measurement(micro_step_s=(0.4, 0.6))).measurement.step_s == (
        0.5,
    )


def test_what_an_extrapolation_leaves_out() -> None:
    plain = Extrapolation(measurement=measurement(time_error=0.25))
    assert (plain.shortest, plain.unseen, plain.noise, plain.rest_noise) == (
        False,
        DEVICE_BOUND,
        0.0,
        0.0,
    )
    assert plain.time_error == 0.25


def hosts(low: tuple[float, ...], high: tuple[float, ...], *host: float | None) -> Extrapolation:
    """Of 2 and 8 layers whose micro batches take these times, and their hosts these."""
    given = {"step_s": (9.0,), "rest_s": (0.0,)}
    pairs = zip((low, high), host, strict=True)
    return predicted(
        *(affine(2, micro_step_s=micro, host_micro_s=each, **given) for micro, each in pairs)
    )


def test_where_the_host_needs_more_than_half_the_shortest_time_counts() -> None:
    """The shortest make a line to 6 s at all layers, the means to 6.25 s; the host needs half of
    that, or more.
    """
    half, more = (hosts((1.0, 1.5), (2.0, 2.5), 0.5, high) for high in (1.0, 1.01))
    assert half.measurement.micro_step_s == pytest.approx((6.25,)) and not half.shortest
    assert more.measurement.micro_step_s == pytest.approx((6.0,)) and more.shortest
    on_cpu = hosts((1.0, 1.5), (2.0, 2.5), None, None)
    assert on_cpu.measurement.micro_step_s == pytest.approx((6.25,)) and not on_cpu.shortest
    assert on_cpu.unseen == UNKNOWN_HOST and on_cpu.measurement.host_share is None
    assert half.measurement.host_share == pytest.approx(0.5)


def test_the_errors_of_an_extrapolation_by_hand() -> None:
    """Five times as far as from 2 to 8 layers: errors of 0.1 s count four times, those of 8 layers
    five times.
    """
    few, many = (
        affine(2, micro_step_s=micro, rest_s=(0.1, 0.3), step_s=(9.0,), host_micro_s=None)
        for micro in ((1.0, 1.2), (2.0, 2.4))
    )
    found = predicted(few, many)
    of_micro, of_rest = math.hypot(4 * 0.1, 5 * 0.2), math.hypot(4 * 0.1, 5 * 0.1)
    assert found.noise == pytest.approx(2 * math.hypot(2 * of_micro, of_rest) / (2 * 6.6 + 0.2))
    assert found.rest_noise == pytest.approx(2 * of_rest / (2 * 6.6 + 0.2))
    assert found.time_error == pytest.approx(math.hypot(UNKNOWN_HOST, found.noise))


def test_twice_the_spread_of_whole_models_replaces_the_assumed_error() -> None:
    on_cpu = predicted(affine(2, host_micro_s=None), affine(8, host_micro_s=None))
    ratios = [0.98, 1.02] * 4
    assert on_cpu.scale_times(ratios).time_error == pytest.approx(2 * statistics.stdev(ratios))
    assert on_cpu.scale_times(ratios[:7]).time_error == UNKNOWN_HOST


@pytest.mark.parametrize("low", [(1.25, 1.5), (2.0, 3.0)])
def test_where_the_line_leads_to_nothing_the_host_is_taken_to_set_the_pace(
    low: tuple[float, ...],
) -> None:
    """To exactly nothing, and to less: the shortest time of the deeper model counts then."""
    found = hosts(low, (1.0, 1.5), 0.01, 0.01)
    assert found.shortest and found.unseen == pytest.approx(HOST_BOUND)
    assert (
        found.measurement.micro_step_s == pytest.approx((1.0,))
        and found.measurement.host_share == 1.0
    )


@pytest.mark.parametrize(
    ("low", "high", "whole"),
    [(0.5, 0.75, 0.75), (0.75, 0.5, 0.75), (None, 0.5, None), (0.5, None, None)],
)
def test_the_larger_of_two_contexts_is_that_of_the_whole(
    low: float | None, high: float | None, whole: float | None
) -> None:
    assert (
        predicted(affine(2, context_gib=low), affine(8, context_gib=high)).measurement.context_gib
        == whole
    )


# A study's measurements

CONFIG = TrainConfig()


def learning(*depths: int, config: TrainConfig = CONFIG) -> DepthPredictor:
    made = DepthPredictor(shape())
    for depth in depths:
        made.learn(result(config, depth=depth), affine(depth))
    return made


def test_two_depths_of_a_configuration_predict_the_whole() -> None:
    assert learning().predict(CONFIG, 2) is None and learning(2).predict(CONFIG, 2) is None
    assert learning(2, 4, 8).predict(CONFIG, 2) is None  # nobody knows which two count
    assert learning(8, 2).predict(CONFIG, 2) == predicted(affine(2), affine(8))
    assert learning(8, 2).predict(CONFIG, 1) is None
    assert learning(8, 2).predict(replace(CONFIG, micro_batch_size=1), 2) is None
    unknown = DepthPredictor(None)
    for depth in (2, 8):
        unknown.learn(result(CONFIG, depth=depth), affine(depth))
    assert unknown.predict(CONFIG, 2) is None


def test_whole_models_correct_what_computes_as_they_do() -> None:
    """One takes 1.1 times what was predicted of it; another size computes alike, a compiled one
    does not.
    """
    other, compiled = replace(CONFIG, micro_batch_size=4), replace(CONFIG, compile="per_layer")
    made = learning(2, 8)
    plain = made.predict(CONFIG, 2)
    for config in (other, compiled):
        for depth in (2, 8):
            made.learn(result(config, depth=depth), affine(depth))
    assert plain is not None
    micro = plain.measurement.micro_step_s[0]
    made.learn(result(CONFIG), affine(LAYERS, micro_step_s=(9.9 * micro, 1.1 * micro, 0.1 * micro)))
    found = {
        name: made.predict(config, 2) for name, config in (("other", other), ("compiled", compiled))
    }
    assert found["compiled"] == plain
    corrected = found["other"]
    assert corrected is not None and corrected.measurement.micro_step_s == pytest.approx(
        (1.1 * micro,)
    )
    itself = made.predict(CONFIG, 2)
    assert itself is not None and itself.measurement.micro_step_s == pytest.approx((1.1 * micro,))


def test_a_whole_model_counts_for_another_optimizer_as_it_was_measured() -> None:
    made, other = learning(2, 8), replace(CONFIG, optimizer="adamw_8bit")
    for depth in (2, 8):
        made.learn(result(other, depth=depth), affine(depth))
    plain, whole = made.predict(other, 2), affine(LAYERS, micro_step_s=(0.7,) * 3)
    assert plain is not None
    made.learn(result(CONFIG), whole)
    ratio = 0.7 / plain.measurement.micro_step_s[0]
    assert made.predict(other, 2) == plain.scale_times([ratio]).with_micro_batches_of(whole)
    # Without a rest that was measured, only its ratio counts.
    made.learn(result(CONFIG), replace(whole, rest_s=()))
    assert made.predict(other, 2) == plain.scale_times([ratio])


def test_what_was_extrapolated_corrects_nothing() -> None:
    made = learning(2, 8)
    plain = made.predict(CONFIG, 2)
    made.learn(result(CONFIG, evidence=Evidence.EXTRAPOLATED), affine(LAYERS, micro_step_s=(9.0,)))
    assert made.predict(CONFIG, 2) == plain


def test_the_smaller_of_two_limits_holds_for_the_whole() -> None:
    """What is managed of the whole, 4 GiB, is taken from it."""
    for pair in ((affine(2), affine(8, limit_gib=120.0)), (affine(2, limit_gib=120.75), affine(8))):
        assert predicted(*pair).measurement.limit_gib == pytest.approx(121.0 - 4.0)


def test_a_host_that_was_timed_at_one_depth_alone_is_unknown() -> None:
    for pair in (
        (affine(2, host_micro_s=None), affine(8)),
        (affine(2), affine(8, host_micro_s=None)),
    ):
        assert (
            predicted(*pair).measurement.host_micro_s is None
            and predicted(*pair).unseen == UNKNOWN_HOST
        )
