"""What a device could do at best for a profiled micro batch,
and what a run needs of its machine.
"""

import json
from dataclasses import replace
from typing import Any

import pytest

from autotune.catalog import resolve_device
from autotune.core.json_view import json_data
from autotune.core.machine import num_cores
from autotune.core.micro_profile import KernelClass, MicroBatchProfile, Part, ProfiledWork, Stage
from autotune.core.probe_types import DeviceRates, DryCount
from autotune.core.train_config import TrainConfig
from autotune.planning.micro_batch import bounds, host_needs
from autotune.report.json_forms import form_of
from autotune.report.micro_batch import HIDDEN, profile_answer
from autotune.report.values.profile import HostNeed, ProfileReport
from tests.helpers import factories

H100 = resolve_device("h100")
RATES = DeviceRates(
    products={"bf16": {1024: 300.0, 8192: 600.0}}, copy_gb_s=2000.0, link_gb_s=50.0, launch_us=5.0
)
COUNT = DryCount(
    model_gib=1.0,
    adapters_gib=0.1,
    gradients_gib=0.1,
    optimizer_gib=0.1,
    segment_peak_gib={"forward": 2.0},
    peak_allocated_gib=2.0,
    trainable_params=1,
    total_params=1,
    flops={
        "mm": 3 * 10**13,
        "addmm": 3 * 10**13,
        "_scaled_dot_product_flash_attention": 12 * 10**12,
    },
    moved_bytes={"product": 10**9, "thin product": 10**9, "other": 3 * 10**10, "strided": 10**10},
)


def work(
    kind: KernelClass, seconds: float, part: Part | None = Part.MLP, stage: Stage = Stage.FORWARD
) -> ProfiledWork:
    return ProfiledWork(part=part, stage=stage, kind=kind, seconds=seconds, count=1)


PROFILE = replace(
    factories.PROFILE,
    work=(
        work(KernelClass.PRODUCTS, 0.12),
        work(KernelClass.ATTENTION, 0.02, Part.ATTENTION),
        work(KernelClass.FUSED, 0.03, None),
        work(KernelClass.COPIES, 0.02, Part.HEAD, Stage.BACKWARD),
        work(KernelClass.OPTIMIZER, 0.01, Part.OPTIMIZER, Stage.OPTIMIZER),
    ),
    longest=(),
)


def report(**changes: Any) -> ProfileReport:
    values: dict[str, Any] = {
        "study": "one",
        "device": H100,
        "config": TrainConfig(),
        "accumulation": 8,
        "profile": PROFILE,
        "bounds": bounds(PROFILE, COUNT, RATES, TrainConfig()),
        "needs": tuple(needs()),
        "trace": "trace.json.gz",
    }
    return ProfileReport(**values | changes)


def needs(
    profile: MicroBatchProfile = PROFILE, count: DryCount | None = COUNT, **knobs: Any
) -> list[HostNeed]:
    measured: dict[str, Any] = {
        "count": count,
        "calibration": None,
        "disk_mb_s": 900.0,
        "tokenised_per_s": None,
    }
    return list(host_needs(profile, TrainConfig(**knobs), H100, examples_per_s=20.0, **measured))


def test_what_is_lost_is_the_time_beyond_the_best() -> None:
    products, attention, moved = bounds(PROFILE, COUNT, RATES, TrainConfig())
    # By the quickest products that were measured; of attention the mask hides half.
    assert (products.seconds, products.flops, products.best_s) == (0.12, 6e13, pytest.approx(0.1))
    assert products.lost_s == pytest.approx(0.02)
    assert (attention.seconds, attention.best_s) == (0.02, pytest.approx(0.01))
    assert (moved.seconds, moved.moved_bytes, moved.best_s) == (0.05, 4e10, pytest.approx(0.02))
    assert report().idle_s == pytest.approx(0.01)
    # Thin products take the time of their bytes; a count of causal attention is not halved again.
    thin = replace(
        COUNT,
        flops={"mm": 1, "efficient_attention": 6 * 10**12},
        moved_bytes={"thin product": 10**12},
    )
    products, attention, _ = bounds(PROFILE, thin, RATES, TrainConfig())
    assert products.best_s == pytest.approx(0.5) and products.lost_s == 0.0
    assert attention.best_s == pytest.approx(0.01)


@pytest.mark.parametrize(
    "knobs", [{"precision": "fp32"}, {"quantization": "fp8", "compile": "per_layer"}]
)
def test_without_a_measured_rate_there_is_no_best(knobs: dict[str, Any]) -> None:
    products, attention, moved = bounds(PROFILE, COUNT, RATES, TrainConfig(**knobs))
    assert (products.best_s, products.lost_s, attention.best_s) == (None, None, None)
    assert moved.best_s == pytest.approx(0.02)


def test_without_a_count_nothing_is_known_but_what_it_took() -> None:
    found = bounds(PROFILE, None, RATES, TrainConfig())
    assert [(one.seconds, one.best_s, one.lost_s, one.flops) for one in found] == [
        (0.12, None, None, None),
        (0.02, None, None, None),
        (pytest.approx(0.05), None, None, None),
    ]
    answer = profile_answer(report(bounds=found, uncounted="it has images"))
    assert "The best time of a micro batch is unknown: it has images." in answer.notes


def test_a_loader_in_the_same_process_must_be_ten_times_as_fast() -> None:
    here, workers = needs()[0], needs(loader_workers=2)[0]
    assert (here.needed, workers.needed) == (pytest.approx(200.0), pytest.approx(20.0))
    assert here.suffices and workers.suffices
    slow = replace(PROFILE, loader_rows_per_s=100.0)
    assert needs(slow)[0].suffices is False and needs(slow, loader_workers=2)[0].suffices
    by_part = {one.part: one for one in needs()}
    assert by_part["reading and tokenising"].suffices is None and by_part["disk"].suffices
    assert by_part["link to the GPU"].found is None
    assert "link to the GPU" not in {one.part for one in needs(replace(PROFILE, on_gpu=False))}


@pytest.mark.parametrize(
    ("knobs", "needed", "why"),
    [
        ({}, 1, "one for the training loop"),
        ({"compile": "per_layer"}, 2, "one for the training loop and the compiler"),
        (
            {"loader_workers": 2},
            2,
            "one for the training loop and the data loader's processes",
        ),
        (
            {"loader_workers": 2, "compile": "per_layer"},
            3,
            "one for the training loop, the data loader's processes and the compiler",
        ),
    ],
)
def test_only_what_works_needs_a_processor(knobs: dict[str, Any], needed: int, why: str) -> None:
    cores = next(one for one in needs(**knobs) if one.part == "cores")
    assert (cores.needed, cores.why) == (needed, why) and cores.found == num_cores()


def test_memory_and_disk_are_judged_by_the_studys_own_model() -> None:
    small = {one.part: one for one in needs()}
    # a model of one parameter, and PyTorch
    assert small["host memory"].needed == pytest.approx(2.0, abs=1e-6)
    # adapters and their state in a minute
    assert small["disk"].needed == pytest.approx(0.2 * 2**30 / 1e6 / 60)
    seven = replace(
        COUNT, total_params=7 * 2**30, adapters_gib=0.0, model_gib=28.0, optimizer_gib=56.0
    )
    large = {one.part: one for one in needs(count=seven)}
    assert large["host memory"].needed == pytest.approx(16.0)
    assert (
        large["disk"].needed == pytest.approx(84 * 2**30 / 1e6 / 60)
        and large["disk"].suffices is False
    )
    assert "14.0 GiB" in large["host memory"].why and "84.0 GiB" in large["disk"].why
    assert {"host memory", "disk"}.isdisjoint(one.part for one in needs(count=None))


def test_parts_with_equal_times_keep_their_order() -> None:
    """Text has another hash in each process, so a set of parts has another order."""
    parts = [*Part, None]
    for order in (parts, parts[::-1]):
        profile = replace(PROFILE, work=tuple(work(KernelClass.COPIES, 0.01, one) for one in order))
        table = profile_answer(report(profile=profile)).tables[1]
        assert [row[0] for row in table.rows] == [one or HIDDEN for one in order]


def test_the_report_as_data_and_as_tables() -> None:
    for made in (report(), report(profile=replace(PROFILE, on_gpu=False, loader_rows_per_s=None))):
        data = json_data(made)
        form_of("explain --profile").validate_json(json.dumps(data))
        assert data["of"] == ("kernels" if made.profile.on_gpu else "operators")
    answer = profile_answer(report())
    assert answer.found[1].startswith("Most of the time goes to: matrix products (63%), then ")
    text = "\n".join(answer.notes)
    assert (
        "10 ms (5%), it waits" in text
        and "once in 8 micro batches" in text
        and "Layers are compiled" in text
    )
    by_class, by_part, at_best, *_ = answer.tables
    assert by_class.rows[0] == ("matrix products", "120 ms", "63.2%", "1")
    assert ("unknown, in compiled layers", "30 ms", "–", "–", "30 ms", "15.8%") in by_part.rows
    assert at_best.rows[0] == ("matrix products", "120 ms", "100 ms", "20 ms", "10.0%", "60", "2")
    assert at_best.rows[-1][:5] == ("the GPU waits", "10 ms", "0 ms", "10 ms", "5.0%")
    (figure,) = answer.figures().values()
    assert sum(sum(bar["x"]) for bar in figure["data"]) == pytest.approx(1000 * (0.19 + 0.01))
    on_cpu = profile_answer(report(profile=replace(PROFILE, on_gpu=False)))
    assert "This is a CPU" in "\n".join(on_cpu.notes) and "operator" in on_cpu.tables[0].title
