"""Step times by formula: within their range of what was measured on an H200, and ordered as they
must be.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.catalog import resolve_model
from autotune.catalog.model_sizes import Sizes
from autotune.core.objective import Objective
from autotune.core.probe_types import DryCount, KernelTimes
from autotune.core.train_config import TrainConfig
from autotune.core.units import GIB
from autotune.prediction.memory_formula import kept_bytes
from autotune.prediction.step_time import (
    BY_POSITION,
    COUNTED_ERROR,
    DEVICE_ERROR,
    FLASH,
    FLEX,
    INDEXED,
    MEASURED_HOST,
    MOVED_SHARE,
    NOT_ALIGNED,
    OFFLOADED,
    OFFLOADED_ERROR,
    OPERATION_US,
    STRIDED,
    THICK,
    THIN_SHARE,
    UNKNOWN_HOST,
    WIDE_BACKWARD,
    WIDE_FORWARD,
    Host,
    StepTimeEstimate,
    counted_step_time,
    divide_step_time,
    estimate_step_time,
)
from autotune.prediction.transfer import USUAL_SHARE, interval
from autotune.problem.speed_transfer import SpeedTransfer
from tests.helpers.factories import measurement

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
LARGE = {"micro_batch_size": 4, "seq_len": 2048}
TOGETHER = LARGE | {
    "precision": "bf16_pure",
    "checkpointing": "none",
    "compile": "per_layer",
    "loss": "chunked",
}


def reported(model: str = "mistral-7b", **knobs: Any) -> StepTimeEstimate:
    found = estimate_step_time(resolve_model(model), TrainConfig(**knobs))
    assert found is not None
    return found


def test_the_rest_of_a_step_may_take_longer_by_another_factor() -> None:
    step = reported()
    longer = step.longer(2.0, rest=3.0)
    assert longer.micro_s == pytest.approx(2 * step.micro_s)
    assert longer.rest_s == pytest.approx(3 * step.rest_s) and step.rest_s > 0
    assert step.longer(2.0).rest_s == step.rest_s


@pytest.mark.parametrize(
    ("model", "knobs", "tokens_per_s"),
    [
        ("mistral-7b", LARGE, 8048),
        ("mistral-7b", LARGE | {"checkpointing": "none"}, 11503),
        ("mistral-7b", LARGE | {"compile": "per_layer"}, 11681),
        ("mistral-7b", LARGE | {"kernels": "liger"}, 9512),
        ("mistral-7b", TOGETHER, 17028),
        ("mistral-7b", TOGETHER | {"micro_batch_size": 1}, 15536),
        ("mistral-7b", TOGETHER | {"quantization": "fp8"}, 21615),
    ],
    ids=str,
)
def test_speeds_that_were_measured_lie_in_the_range(
    model: str, knobs: dict[str, Any], tokens_per_s: float
) -> None:
    found = reported(model, **knobs)
    low, high = interval(found.micro_s, found.error)
    assert low <= TrainConfig(**knobs).tokens / tokens_per_s <= high


def test_small_micro_batches_wait_for_the_host() -> None:
    assert reported(micro_batch_size=1, seq_len=128).error > reported(**LARGE).error


@pytest.mark.parametrize(
    ("slow", "fast"),
    [
        ({"checkpointing": "full"}, {"checkpointing": "none"}),
        ({"compile": "none"}, {"compile": "per_layer"}),
        ({"quantization": "nf4", "precision": "bf16_pure"}, {"precision": "bf16_pure"}),
        ({"kernels": "torch"}, {"kernels": "liger"}),
        ({"seq_len": 4096}, {"seq_len": 2048}),
    ],
    ids=str,
)
def test_what_takes_longer(slow: dict[str, Any], fast: dict[str, Any]) -> None:
    assert reported(**LARGE | slow).micro_s > reported(**LARGE | fast).micro_s


def test_an_optimizer_step_takes_longer_where_all_is_trained() -> None:
    assert reported(method="full").rest_s > 20 * reported().rest_s


@pytest.mark.parametrize(
    "knobs", [{"quantization": "int8"}, {"quantization": "fp8"}, {"dora": True}], ids=str
)
def test_what_nobody_timed_is_unknown(knobs: dict[str, Any]) -> None:
    assert estimate_step_time(resolve_model("mistral-7b"), TrainConfig(**LARGE | knobs)) is None
    assert estimate_step_time(resolve_model("gpt2"), TrainConfig()) is None


OTHER = SpeedTransfer(products=0.5, bytes=0.4, error=0.2)


def test_another_card_changes_the_times_of_the_device_and_not_that_of_the_host() -> None:
    here = reported(**LARGE)
    there = here.convert(OTHER)
    assert (there.products_s, there.bytes_s, there.rest_s) == pytest.approx(
        (2 * here.products_s, 2.5 * here.bytes_s, 2.5 * here.rest_s)
    )
    assert here.device_s / there.device_s == pytest.approx(OTHER.ratio(here.products_share))
    assert there.host_s == here.host_s and there.host_share < here.host_share
    small = reported(micro_batch_size=1, seq_len=64)
    assert small.host_share > 0.99 and small.convert(OTHER).micro_s == pytest.approx(
        small.micro_s, rel=0.01
    )


def test_compiled_layers_and_long_rows_are_more_of_products() -> None:
    plain, compiled, long = (
        reported(**LARGE),
        reported(**TOGETHER),
        reported(**LARGE | {"seq_len": 32768}),
    )
    assert 0.4 < plain.products_share < 0.7 < compiled.products_share < 1
    assert long.products_share > plain.products_share


def test_the_error_is_that_of_the_part_that_sets_the_pace() -> None:
    large = reported(**LARGE).convert(OTHER)
    assert large.error == pytest.approx(math.hypot(DEVICE_ERROR, 0.2), rel=0.01)
    assert reported(micro_batch_size=1, seq_len=64).convert(OTHER).error == pytest.approx(
        MEASURED_HOST.error, rel=0.01
    )


@pytest.mark.parametrize("host_share", [None, 0.3, 0.9, 1.2])
def test_a_measured_time_has_the_parts_that_the_formula_gives_it(host_share: float | None) -> None:
    formula = reported(**LARGE)
    divided = divide_step_time(measurement(0.5, rest_s=(0.1,), host_share=host_share), formula)
    assert divided.micro_s == pytest.approx(0.5, rel=0.01) and divided.rest_s == 0.1
    assert divided.host_s == pytest.approx(0.5 * min(host_share or 0.0, 0.99))
    assert divided.products_share == pytest.approx(formula.products_share)
    assert divide_step_time(measurement(0.5), None).products_share == USUAL_SHARE
    # What the card sets is known but for the projection, and what the host sets is another host's
    # there.
    error = divided.convert(OTHER).error
    assert error == pytest.approx(0.2) if host_share is None else 0.2 < error < UNKNOWN_HOST.error


# Of a micro batch of 0.5 s in which the card was busy for 0.4 s, with 0.05 s of copies beside the
# products.
PROFILE = KernelTimes(
    products_s=0.2, fp8_s=0.05, attention_s=0.1, bytes_s=0.1, busy_s=0.4, micro_s=0.5, num_kernels=9
)


def test_a_profile_divides_a_measured_time_whatever_the_formula_says() -> None:
    divided = divide_step_time(
        measurement(0.5, rest_s=(0.1,), host_share=0.99, kernels=PROFILE), reported(**LARGE)
    )
    # 0.4 s of 0.45 s: what ran at the same time counts once.
    parts = (divided.products_s, divided.attention_s, divided.fp8_s, divided.bytes_s)
    assert parts == pytest.approx([part * 0.4 / 0.45 for part in (0.2, 0.1, 0.05, 0.1)])
    assert (
        divided.device_s == pytest.approx(0.4)
        and divided.micro_s == pytest.approx(0.5)
        and divided.rest_s == 0.1
    )
    assert divided.host_s == pytest.approx(
        (0.5**4 - 0.4**4) ** 0.25
    ) and divided.host_share == pytest.approx(1 - 0.8**4)
    # A whole model takes 1 s: the shares are those of the profile.
    longer = divide_step_time(measurement(1.0, kernels=PROFILE), None)
    assert longer.device_s == pytest.approx(0.8) and longer.micro_s == pytest.approx(1.0)
    # A card that is hotter in the profile than before is busy for longer than the micro batch took.
    busy = divide_step_time(measurement(0.5, kernels=replace(PROFILE, busy_s=0.52)), None)
    assert busy.device_s == pytest.approx(0.5) and busy.host_s == 0.0


def test_a_profile_is_projected_by_what_the_card_does() -> None:
    divided = divide_step_time(measurement(0.5, kernels=PROFILE), None)
    transfer = SpeedTransfer(products=0.5, bytes=0.4, error=0.2, fp8=2.0, profiled_error=0.05)
    there = divided.convert(transfer)
    assert there.products_s == pytest.approx(
        2 * divided.products_s
    ) and there.fp8_s == pytest.approx(divided.fp8_s / 2)
    assert there.bytes_s == pytest.approx(2.5 * divided.bytes_s) and there.host_s == divided.host_s
    assert (there.device_error, there.host_error) == (0.05, UNKNOWN_HOST.error)
    # Cards without 8 bits have no such products; without a profile the error is that of the
    # formula.
    assert (
        divided.convert(OTHER).fp8_s == pytest.approx(2 * divided.fp8_s)
        and divided.convert(OTHER).device_error == 0.2
    )
    assert replace(divided, profiled=False).convert(transfer).device_error == 0.2


def test_hosts_that_were_calibrated_are_projected_too() -> None:
    divided = divide_step_time(measurement(0.5, kernels=PROFILE), None)
    there = divided.convert(replace(OTHER, host=0.8))
    assert (
        there.host_s == pytest.approx(divided.host_s / 0.8)
        and there.host_error == MEASURED_HOST.error
    )


def test_a_host_that_is_not_known_is_uncertain() -> None:
    assert (Host(scale=1.0, error=0.25), Host(scale=0.6, error=0.5)) == (
        MEASURED_HOST,
        UNKNOWN_HOST,
    )
    config = TrainConfig(micro_batch_size=1, seq_len=64)
    known, unknown = (
        estimate_step_time(resolve_model("mistral-7b"), config, host)
        for host in (MEASURED_HOST, UNKNOWN_HOST)
    )
    assert known is not None and unknown is not None and known.device_s == unknown.device_s
    assert unknown.host_s == pytest.approx(UNKNOWN_HOST.scale * known.host_s)
    low, high = interval(unknown.micro_s, unknown.error)
    assert low < 0.6 * unknown.micro_s and high > known.micro_s


# Mistral-7B by its config: 32 layers of 4,096, 8 of 32 heads for keys and values, 14,336 inside,
# 32,768 tokens.
LAYERS, QUERIES, VOCAB = 32, 4096, 32_768
LINEAR = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
EMBEDDING, ADAPTERS = 32_768 * 4096, 41_943_040  # of rank 16
ADAPTED = ADAPTERS // LAYERS // 16  # the inputs and outputs of a layer's matrices
# what products reach on an H200, and what its memory moves
RATE, BANDWIDTH = 0.67 * 989.4e12, 4800e9


@pytest.mark.parametrize(
    ("knobs", "per_linear", "of_adapters", "passes", "moved"),
    [
        # Of each weight: forward and the gradient of the input, and the forward pass again.
        ({"checkpointing": "none"}, 4, 6, 2, 10.8),
        ({"checkpointing": "full"}, 6, 8, 3, 10.8),
        ({"checkpointing": "none", "precision": "bf16_pure"}, 4, 6, 2, 9.8),
        ({"checkpointing": "none", "kernels": "liger"}, 4, 6, 2, 7.3),
        ({"checkpointing": "none", "compile": "per_layer"}, 4, 6, 2, 4.0),
        ({"checkpointing": "none", "method": "full"}, 6, 0, 2, 0.45 * 10.8),
        ({"checkpointing": "full", "method": "full"}, 8, 0, 3, 0.45 * 10.8),
    ],
    ids=str,
)
def test_the_device_by_hand(
    knobs: dict[str, Any], per_linear: int, of_adapters: int, passes: int, moved: float
) -> None:
    config, sizes = TrainConfig(**LARGE | knobs), Sizes.of(resolve_model("mistral-7b"))
    found, tokens = reported(**LARGE | knobs), 4 * 2048
    assert sizes is not None
    of_embedding = 6 if "method" in knobs else 4
    operations = per_linear * LINEAR + of_embedding * EMBEDDING
    assert found.products_s == pytest.approx(tokens * operations / RATE)
    attention = 6 * 2048 * QUERIES * LAYERS * (1 + (passes - 2) / 3)
    assert found.attention_s == pytest.approx(tokens * attention / (0.35 * 989.4e12))
    ends = of_adapters * LAYERS * ADAPTED / THIN_SHARE
    per_token = moved * LAYERS * kept_bytes(sizes, config) * passes + 58.0 * VOCAB + ends
    # Weights are cast to 16 bits, gradients to 32 bits, and gradients are summed.
    of_weights = 24 * sizes.params / MOVED_SHARE if "method" in knobs else 0.0
    assert found.bytes_s == pytest.approx((tokens * per_token + of_weights) / BANDWIDTH)
    assert found.side == pytest.approx(math.cbrt(tokens * LINEAR / LAYERS / 7))


def test_joined_adapters_move_fewer_bytes() -> None:
    knobs = LARGE | {"compile": "per_layer", "checkpointing": "none"}
    apart, joined = (reported(**knobs | {"lora_kernels": one}) for one in ("peft", "joined"))
    assert joined.bytes_s < 0.7 * apart.bytes_s and joined.products_s == apart.products_s


def test_a_trained_head_sums_its_gradient_after_each_chunk_of_the_loss() -> None:
    """Of 8,192 tokens there are 8 chunks; in 16 bits, a sum reads two gradients and writes one."""
    full = LARGE | {"method": "full", "precision": "bf16_pure"}
    whole, chunked = (reported(**full | {"loss": loss}) for loss in ("full", "chunked"))
    assert chunked.bytes_s - whole.bytes_s == pytest.approx(
        8 * 6 * EMBEDDING / MOVED_SHARE / BANDWIDTH
    )


def test_capped_logits_move_more_bytes() -> None:
    """Gemma 2 divides, bounds and multiplies each logit, in 16 bits, and again for the gradient."""
    capped = resolve_model("gemma-2-2b")
    plain = replace(capped, config=capped.config | {"final_logit_softcapping": None})
    config = TrainConfig(attention="eager", **LARGE)
    with_cap, without = (estimate_step_time(one, config) for one in (capped, plain))
    assert with_cap is not None and without is not None
    logits = 4 * 2048 * 256_000
    assert with_cap.bytes_s - without.bytes_s == pytest.approx(26 / 0.665 * logits / BANDWIDTH)


def test_a_mask_costs_a_faster_kernel() -> None:
    packed = {"packing": True, "packed_attention": "mask"}
    assert reported(**LARGE | packed).attention_s == pytest.approx(
        2.7 * reported(**LARGE).attention_s
    )


@pytest.mark.parametrize(
    ("knobs", "layer_ms"),
    [
        ({"checkpointing": "none"}, 6.0),
        ({"checkpointing": "full"}, 6.0 * 1.7),
        ({"checkpointing": "every_3"}, 6.0 * (1 + 0.7 * 11 / 32)),  # the first of each three layers
        ({"checkpointing": "none", "compile": "per_layer"}, 3.5),
        ({"checkpointing": "none", "method": "full"}, 2.5),
        ({"checkpointing": "none", "quantization": "nf4"}, 8.0),
        ({"checkpointing": "full", "quantization": "nf4"}, 8.0 * 1.7),
    ],
    ids=str,
)
def test_the_host_by_hand(knobs: dict[str, Any], layer_ms: float) -> None:
    config = TrainConfig(**LARGE | knobs)
    found = estimate_step_time(resolve_model("mistral-7b"), config, Host(scale=0.5, error=0.4))
    assert (
        found is not None
        and found.host_s == pytest.approx(0.5 * 32 * layer_ms / 1000)
        and found.host_error == 0.4
    )


def test_a_base_of_4_bits_is_unpacked_for_every_product() -> None:
    """Half a byte with its scale is read and two bytes are written, as often as there are products
    of it: forward, backward, and forward again.
    """
    for checkpointing, compile in (("none", "none"), ("full", "none"), ("full", "per_layer")):
        knobs = LARGE | {
            "checkpointing": checkpointing,
            "precision": "bf16_pure",
            "compile": compile,
        }
        passes = 3 if checkpointing == "full" else 2
        plain, packed = reported(**knobs), reported(**knobs | {"quantization": "nf4"})
        assert packed.products_s == plain.products_s
        assert packed.bytes_s - plain.bytes_s == pytest.approx(
            2.56 / 0.665 * LINEAR * passes / BANDWIDTH
        )


def test_products_in_8_bits_take_less_time() -> None:
    knobs = LARGE | {"compile": "per_layer"}
    assert reported(**knobs).products_s == pytest.approx(
        1.6 * reported(**knobs, quantization="fp8").products_s
    )


def test_the_optimizer_by_hand() -> None:
    """Clipping and AdamW in fp32: of 41.9 million adapters gradients thrice, weights and two
    moments twice.
    """
    bytes_moved = ADAPTERS * 4 * (3 + 2 + 2 * 2)
    assert reported(**LARGE).rest_s == pytest.approx(bytes_moved / BANDWIDTH, rel=1e-3)


def test_device_and_host_that_need_the_same_time_slow_each_other_down() -> None:
    level = StepTimeEstimate(
        products_s=3.0, bytes_s=1.0, host_s=4.0, rest_s=0.0, device_error=0.1, host_error=0.5
    )
    assert (level.device_s, level.products_share, level.host_share) == (4.0, 0.75, 0.5)
    assert level.micro_s == pytest.approx(4 * 2**0.25) and level.error == pytest.approx(0.3)
    assert replace(level, host_s=0.0).micro_s == 4.0 and replace(level, host_s=0.0).error == 0.1
    # Half of the host's time is a sixteenth in the fourth power.
    assert replace(level, host_s=2.0).host_share == pytest.approx(1 / 17)
    there = level.convert(SpeedTransfer(products=3.0, bytes=0.5, error=0.24))
    assert (there.products_s, there.bytes_s, there.host_s) == (1.0, 2.0, 4.0)
    assert there.device_error == pytest.approx(0.26) and there.host_error == 0.5


def test_without_times_between_micro_batches_nothing_is_left_of_a_step() -> None:
    divided = divide_step_time(measurement(0.5, rest_s=()), None)
    assert (
        divided.rest_s == 0.0
        and divided.device_error == 0.0
        and divided.host_error == UNKNOWN_HOST.error
    )
    assert divide_step_time(measurement(0.5, rest_s=(0.1, 0.2, 0.9)), None).rest_s == 0.2
    assert divide_step_time(
        measurement(0.5, micro_step_s=(0.1, 0.2, 0.9)), None
    ).micro_s == pytest.approx(0.2)


@pytest.mark.parametrize(("method", "weights_gib"), [("lora", 1.0), ("full", 8.0)])
def test_counted_work_by_hand(method: str, weights_gib: float) -> None:
    """An H200: all products together run at 662.9 TFLOP/s, and its memory at 4.8 TB/s."""
    count = DryCount(
        model_gib=8.0,
        adapters_gib=1.0,
        gradients_gib=2.0,
        optimizer_gib=4.0,
        segment_peak_gib={"forward": 9.0},
        peak_allocated_gib=9.0,
        trainable_params=1,
        total_params=2,
        flops={
            "mm": 6 * 10**14,
            "mm unaligned": 3 * 10**13,
            "_flash_attention": 2 * 10**14,
            "_efficient_attention": 10**14,
            "_efficient_attention wide": 2 * 10**13,
            "_efficient_attention_backward wide": 10**13,
            "flex_attention_backward": 4 * 10**13,
        },
        moved_bytes={
            "product": 10**15,
            "thin product": 3 * 10**11,
            "other": 7 * 10**11,
            "strided": 2 * 10**11,
            "indexed": 10**11,
        },
        operations=10_000,
    )
    found = counted_step_time(TrainConfig(method=method), count, Host(scale=0.5, error=0.4))
    assert found is not None
    assert found.products_s == pytest.approx((600 / THICK + 30 * NOT_ALIGNED) / 662.9, rel=1e-4)
    without_flash = BY_POSITION * 100 + WIDE_FORWARD * 20 + WIDE_BACKWARD * 10 + FLEX * 40
    # A causal mask hides half of the pairs, which only flash attention's count includes.
    assert count.attention_flops == 2 * 10**14 / 2 + 10**14 + 3 * 10**13 + 4 * 10**13
    assert found.attention_s == pytest.approx((without_flash + FLASH * 200) / 662.9, rel=1e-4)
    for knobs in ({"padding": "max_length"}, {"attention": "sdpa_cudnn"}):  # cuDNN attends
        quicker = counted_step_time(TrainConfig(method=method, **knobs), count)  # type: ignore[arg-type]
        assert quicker is not None and quicker.attention_s == pytest.approx(
            (without_flash + 200) / 662.9, rel=1e-4
        )
    weighed = 0.7 + STRIDED * 0.2 + INDEXED * 0.1
    assert found.bytes_s == pytest.approx((weighed / MOVED_SHARE + 0.3 / THIN_SHARE) / 4.8)
    assert found.host_s == pytest.approx(10_000 * OPERATION_US * 1e-6 * 0.5)
    assert found.rest_s == pytest.approx((5 * weights_gib + 2 * 4) * GIB / 4.8e12)
    assert (found.device_error, found.host_error) == (COUNTED_ERROR, 0.4)
    # its memory alone was counted
    assert counted_step_time(TrainConfig(), replace(count, flops={})) is None
    # at another rate
    for knobs in ({"precision": "fp32"}, {"quantization": "int8"}, {"quantization": "fp8"}):
        assert counted_step_time(TrainConfig(**knobs), count) is None
    assert (
        counted_step_time(
            TrainConfig(), replace(count, flops=count.flops | {"grouped_mm_fallback": 1})
        )
        is None
    )


def test_offloading_takes_as_much_longer_as_was_measured() -> None:
    """Four configurations on an H200; the copies take the device's time, not the host's."""
    rows = json.loads((RESULTS / "reference_levers.json").read_text())["rows"]
    speeds: dict[tuple[str, str], float] = {}
    for row in rows:
        if row.get("outcome") == "ok":
            speeds[row["model"], row["config"]] = row["tokens_per_s"]
    ratios = [
        speeds[model, config.replace("ckpt-offload", "ckpt-full")] / speed
        for (model, config), speed in speeds.items()
        if "ckpt-offload" in config
    ]
    assert len(ratios) == 4
    assert all(abs(math.log(ratio / OFFLOADED)) < OFFLOADED_ERROR for ratio in ratios)

    on_gpu = estimate_step_time(resolve_model("mistral-7b"), TrainConfig(**LARGE))
    assert on_gpu is not None
    offloading = on_gpu.with_offloading()
    assert offloading.device_s == pytest.approx(OFFLOADED * on_gpu.device_s)
    assert (offloading.host_s, offloading.rest_s) == (on_gpu.host_s, on_gpu.rest_s)
    assert offloading.device_error == math.hypot(on_gpu.device_error, OFFLOADED_ERROR)


def test_each_forward_pass_without_gradients_takes_its_share() -> None:
    """DPO's untrained model computes once, KTO's twice, and the trained one once more: on device
    and host.
    """
    model, config = resolve_model("mistral-7b"), TrainConfig(**LARGE)
    times = {
        one: estimate_step_time(
            model, replace(config, micro_batch_size=8 // one.rows_per_example), objective=one
        )
        for one in Objective
    }
    found = {one: time for one, time in times.items() if time is not None}
    assert len(found) == len(times)
    host = {one: time.host_s / 32 * 1000 for one, time in found.items()}
    # of passes without adapters and with
    plain, bare, again = host[Objective.CLASSIFICATION], 0.7 * 2.5, 0.7 * 6.0
    assert host[Objective.REWARD] == pytest.approx(plain)
    assert host[Objective.DPO] - plain == pytest.approx(bare)
    assert host[Objective.KTO] - plain == pytest.approx(2 * bare + again)
    products = {one: time.products_s for one, time in found.items()}
    assert (
        products[Objective.REWARD] == products[Objective.CLASSIFICATION] < products[Objective.SFT]
    )
    # 6 of a micro batch whose layers are recomputed become 8, and 12 (of both heads a little more).
    assert 1.3 < products[Objective.DPO] / products[Objective.REWARD] < 1.4
    assert 1.4 < products[Objective.KTO] / products[Objective.DPO] < 1.6
    assert all(
        found[one].device_error > found[Objective.SFT].device_error for one in list(Objective)[1:]
    )
