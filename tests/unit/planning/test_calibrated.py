"""What a calibration changes in plans, comparisons and checks, and that each says so."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.catalog import resolve_device
from autotune.cli.commands import plan as command
from autotune.core import nvml
from autotune.core.errors import UsageError
from autotune.core.json_view import json_data
from autotune.core.machine import processor_name
from autotune.core.nvml import GpuInfo
from autotune.core.train_config import TrainConfig
from autotune.planning.compare import compare
from autotune.planning.device_estimate import device_limit_gib, planned_device
from autotune.planning.plan import plan_task, planned_setup
from autotune.planning.run_check import check
from autotune.prediction.estimate import Estimate, estimate
from autotune.problem.calibration import Calibration, kept_path, write_calibration
from autotune.problem.study_spec import NamedConfig, StudySpec
from autotune.problem.task import Task
from autotune.report.comparison import FORMATS, basis_sentence
from autotune.report.values.compared import card_row
from tests.helpers.factories import calibration

A10, H100, H200 = map(resolve_device, ("a10", "h100", "h200"))
HOST_BOUND = TrainConfig(micro_batch_size=1, seq_len=64, lora_rank=16)
DEVICE_BOUND = TrainConfig(micro_batch_size=8, seq_len=1024, lora_rank=16)
LABEL = "calibrated on this machine, 2026-11-22"


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Keeps a calibration as `autotune calibrate` does, on a machine with this card."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def keep(
        made: Calibration, *, card: str | None = "NVIDIA A10", memory_gib: float = 22.5
    ) -> None:
        write_calibration(made, kept_path(made.device))
        here = GpuInfo(
            index=0,
            uuid="GPU-0",
            name=card or "",
            memory_gib=memory_gib,
            used_gib=0.0,
            compute_capability="8.6",
            driver="580",
            processes=(),
        )
        monkeypatch.setattr(nvml, "list_gpus", lambda: [here] if card else [])

    return keep


@pytest.fixture
def file(tmp_path: Path) -> Callable[[Calibration], str]:
    def write(made: Calibration) -> str:
        write_calibration(made, tmp_path / "carried.json")
        return str(tmp_path / "carried.json")

    return write


def task(device: Any = A10, **spec: Any) -> Task:
    return planned_setup(
        StudySpec(**{"model": "mistral-7b", "gpu": device.name} | spec), device
    ).task


def estimated(case: Task, config: TrainConfig) -> Estimate:
    found = estimate(case, config, device_limit_gib(case.device, 0.05))
    assert found is not None and found.tokens_per_s and found.interval
    return found


def speed(case: Task, config: TrainConfig) -> float:
    return estimated(case, config).tokens_per_s or 0.0


def width(case: Task, config: TrainConfig) -> float:
    low, high = estimated(case, config).interval or (1.0, 1.0)
    return high / low


def test_a_slow_host_slows_small_micro_batches_and_hardly_large_ones(
    file: Callable[..., str],
) -> None:
    quick, slow = (
        task(calibration=file(calibration(layer_ms=layer_ms))) for layer_ms in (4.0, 40.0)
    )
    assert speed(quick, HOST_BOUND) > 3 * speed(slow, HOST_BOUND)
    assert speed(slow, DEVICE_BOUND) < speed(quick, DEVICE_BOUND) < 1.05 * speed(slow, DEVICE_BOUND)


def test_a_host_that_was_measured_is_more_certain(file: Callable[..., str]) -> None:
    made = calibration(layer_ms=20.0)
    assert width(task(calibration=file(made)), HOST_BOUND) < 0.7 * width(task(), HOST_BOUND)
    assert width(task(calibration=file(made)), DEVICE_BOUND) < width(task(), DEVICE_BOUND)


def test_the_card_counts_for_its_name_and_the_host_for_every_card(file: Callable[..., str]) -> None:
    slow = file(
        calibration("h100-sxm", products={"bf16": {1024: 30.0}}, copy_gb_s=300.0, layer_ms=40.0)
    )
    for config in (HOST_BOUND, DEVICE_BOUND):
        assert speed(task(H100, calibration=slow), config) < 0.6 * speed(task(H100), config)
    assert speed(task(H200, calibration=slow), HOST_BOUND) < 0.6 * speed(task(H200), HOST_BOUND)
    assert speed(task(H200, calibration=slow), DEVICE_BOUND) > 2 * speed(
        task(H100, calibration=slow), DEVICE_BOUND
    )
    assert (
        estimated(task(H200, calibration=slow), HOST_BOUND).calibrated
        == "host calibrated by carried.json, 2026-11-22"
    )


def test_what_was_kept_counts_where_that_card_is(kept: Callable[..., None]) -> None:
    mine = replace(calibration(), processor=processor_name())
    kept(mine)
    assert task().calibration == mine
    assert task(H100).calibration is None
    for elsewhere in ({"card": None}, {"card": "NVIDIA L4"}):
        kept(mine, **elsewhere)
        assert task().calibration is None


def test_what_was_kept_on_another_machine_or_is_broken_is_not_used(
    kept: Callable[..., None],
) -> None:
    said: list[str] = []

    def loaded() -> Calibration | None:
        return planned_setup(
            StudySpec(model="mistral-7b", gpu="a10"), A10, said.append
        ).task.calibration

    kept(calibration())
    assert (
        loaded() is None
        and "it was made on a machine with a processor (`autotune calibrate`" in said[-1]
    )
    kept_path("a10").write_text("{")
    assert loaded() is None and "is no calibration" in said[-1]


def test_a_file_is_preferred_to_what_was_kept(
    kept: Callable[..., None], file: Callable[..., str]
) -> None:
    kept(replace(calibration(), processor=processor_name()))
    found = task(calibration=file(calibration(layer_ms=33.0))).calibration
    assert found is not None and (found.layer_ms, found.place) == (33.0, "carried.json")
    with pytest.raises(UsageError, match="cannot read"):
        task(calibration="none.json")


def test_a_card_that_nobody_measured_is_no_guess_once_it_is_calibrated(
    file: Callable[..., str],
) -> None:
    t4, small = (
        resolve_device("t4"),
        TrainConfig(micro_batch_size=1, seq_len=512, precision="fp16_mixed"),
    )
    unknown, known = (
        estimated(task(t4, model="tinyllama", **options), small)
        for options in ({}, {"calibration": file(calibration("t4"))})
    )
    assert unknown.is_guess and not known.is_guess


def test_a_card_outside_the_catalogue_is_planned_by_its_rates(kept: Callable[..., None]) -> None:
    spec = StudySpec(model="tinyllama", gpu="auto")
    kept(
        replace(calibration("nvidia-test-gpu"), processor=processor_name()),
        card="NVIDIA Test GPU",
        memory_gib=16.0,
    )
    case = planned_setup(spec, planned_device("auto")).task
    assert case.device.name == "nvidia-test-gpu" and case.device.bandwidth_gb_s is None
    assert speed(case, DEVICE_BOUND) > 1000
    without = estimate(replace(case, calibration=None), DEVICE_BOUND, 14.0)
    assert without is not None and without.tokens_per_s is None


# What is printed


def test_a_plan_says_what_was_calibrated(
    kept: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    kept(replace(calibration(), processor=processor_name()))
    spec = StudySpec(model="mistral-7b", gpu="auto", pins={"seq_len": 512, "lora_rank": 16})
    command.plan(spec, evidence=Path("none"), details=True)
    text = capsys.readouterr().out
    assert (
        f"Estimated, GPU and host {LABEL}: memory by a formula" in text
        and "Nothing was measured" not in text
    )
    assert "tightened" not in text  # what others measured of the card is not needed
    assert f", GPU and host {LABEL})" in text
    named = replace(spec, pins={}, configs=(NamedConfig(name="one"),))
    command.plan(named, evidence=Path("none"), details=True)
    assert f"a10. Estimated, GPU and host {LABEL}: " in capsys.readouterr().out
    command.plan(spec, evidence=Path("none"), as_json=True)
    assert json.loads(capsys.readouterr().out)["calibrated"] == f"GPU and host {LABEL}"


def test_a_plan_without_a_calibration_has_none() -> None:
    assert (
        json_data(plan_task(task(pins={"seq_len": 512, "lora_rank": 16}), 20.0))["calibrated"]
        is None
    )


def test_a_comparison_says_it_of_each_card(file: Callable[..., str]) -> None:
    spec = StudySpec(
        model="mistral-7b",
        calibration=file(calibration()),
        pins={"seq_len": 512, "lora_rank": 16, "loss": "full"},
    )
    made = compare([spec], gpus=["a10,l4"])
    (group,) = made.groups
    by_file = "calibrated by carried.json, 2026-11-22"
    assert [card_row(group, card).calibrated for card in group.cards] == [
        f"GPU and host {by_file}",
        f"host {by_file}",
    ]
    assert basis_sentence(made).startswith("Estimated, calibrated as each GPU's evidence says: ")
    for form in ("markdown", "html"):
        page = FORMATS[form](made, calibration().day)
        assert (
            "Nothing was measured here" not in page and f"estimated, GPU and host {by_file}" in page
        )
    assert basis_sentence(compare([replace(spec, calibration=None)], gpus=["a10"])).startswith(
        "Nothing was measured"
    )


def test_a_check_takes_it_too(tmp_path: Path, file: Callable[..., str]) -> None:
    run = tmp_path / "run.yml"
    run.write_text(
        "model_name_or_path: Qwen/Qwen2.5-0.5B\nuse_peft: true\nper_device_train_batch_size: 1\n"
        "max_length: 128\n"
    )
    options = {"gpu": "a10", "tokens_per_example": 64}
    plain, slow = (
        check(run, options | more)
        for more in ({}, {"calibration": file(calibration(layer_ms=50.0, reference=None))})
    )
    assert (
        (plain.checked.estimate.tokens_per_s or 0)
        > 2 * (slow.checked.estimate.tokens_per_s or 0)
        > 0
    )
    assert json_data(plain)["calibrated"] is None
    assert json_data(slow)["calibrated"] == "GPU and host calibrated by carried.json, 2026-11-22"
