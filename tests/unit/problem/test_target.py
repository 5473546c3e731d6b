"""The device that is tuned for: that of this machine, or another that its GPU probes for under a
cap.
"""

from dataclasses import replace

import pytest

from autotune.catalog import resolve_device
from autotune.core import nvml
from autotune.core.errors import EnvironmentProblem, UsageError
from autotune.core.machine import processor_name
from autotune.core.nvml import GpuInfo, GpuProcess
from autotune.core.probe_types import Evidence
from autotune.core.serialization import from_data, to_data
from autotune.planning.device_estimate import corrected_by_observations
from autotune.planning.observations import published_observations
from autotune.prediction.projection import with_transfer
from autotune.prediction.transfer import interval, speed_transfer
from autotune.problem.calibration import HERE, kept_path, write_calibration
from autotune.problem.setup import calibration_of, set_up
from autotune.problem.study_spec import StudySpec
from autotune.problem.target import Target, _lack, device_cap_gib, find_target, kept_calibration
from autotune.problem.task import BASELINE
from autotune.study.selection import Selection
from tests.helpers.factories import FINGERPRINT, add_measured, calibration, measurement
from tests.helpers.sessions import record_of, subject_of

CPU, H200, A10, T4 = map(resolve_device, ("cpu", "h200", "a10", "t4"))


def card(
    index: int = 0, name: str = "NVIDIA H200", memory_gib: float = 140.4, uuid: str = "GPU-0"
) -> GpuInfo:
    return GpuInfo(
        index=index,
        uuid=uuid,
        name=name,
        memory_gib=memory_gib,
        used_gib=0.5,
        compute_capability="9.0",
        driver="580",
        processes=(),
    )


@pytest.fixture
def cards(monkeypatch):
    """Sets the cards of this machine."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return lambda *found: monkeypatch.setattr(nvml, "list_gpus", lambda: list(found))


@pytest.mark.parametrize("name", ["cpu", "CPU", " cpu "])
def test_a_cpu_needs_no_gpu(cards, name):
    cards(card())
    assert find_target(name) == Target(device=CPU)


@pytest.mark.parametrize("name", ["auto", "Auto", "h200", "H200-SXM", "NVIDIA H200"])
def test_the_gpu_of_this_machine(cards, name):
    cards(card())
    assert find_target(name) == Target(device=H200, card=card())


def test_a_machine_without_a_gpu_is_an_environment_problem(cards):
    cards()
    with pytest.raises(
        EnvironmentProblem, match="an NVIDIA GPU was asked for, but there is no NVIDIA GPU here"
    ):
        find_target("auto")
    with pytest.raises(
        EnvironmentProblem, match=r"^h200-sxm was asked for, but there is no NVIDIA GPU"
    ) as caught:
        find_target("h200")
    assert "autotune plan --gpu h200-sxm" in caught.value.remedy and caught.value.exit_code == 3


def test_a_gpu_that_is_too_small_is_an_environment_problem(cards):
    cards(card(name="NVIDIA A10", memory_gib=22.5))
    with pytest.raises(EnvironmentProblem) as caught:
        find_target("h200")
    assert str(caught.value).startswith(
        "h200-sxm was asked for, but the GPU here is NVIDIA A10 (a10, 22.5 GiB), which"
    )
    assert "it would need 137.6 GiB" in str(caught.value)
    assert (
        caught.value.remedy.startswith("give --gpu a10 (or auto)")
        and "--shallow-only" in caught.value.remedy
    )


def test_an_unknown_name_is_an_error_on_every_machine(cards):
    cards()
    with pytest.raises(UsageError, match="unknown gpu 'a10x'; did you mean 'a10"):
        find_target("a10x")


@pytest.mark.parametrize(
    ("visible", "index"),
    [("1", 1), ("1,0", 1), (" 0 ", 0), ("GPU-b", 1), ("", None), ("-1", None), ("7", None)],
)
def test_only_the_visible_card_counts(cards, monkeypatch, visible, index):
    cards(card(0, uuid="GPU-a"), card(1, uuid="GPU-b"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if index is None:
        with pytest.raises(EnvironmentProblem):
            find_target("auto")
    else:
        assert find_target("auto").card.index == index


def test_a_gpu_outside_the_catalogue_has_no_guessed_rates(cards):
    cards(card(name="NVIDIA H999 (Super) 1TB", memory_gib=1000.0))
    device = find_target("auto").device
    assert (device.name, device.memory_gib, device.kind) == (
        "nvidia-h999-super-1tb",
        1000.0,
        "cuda",
    )
    assert (device.bf16_tflops, device.tdp_w, device.bandwidth_gb_s) == (None, None, None)
    assert (device.vendor, device.compute_capability, device.memory_source) == (
        "nvidia",
        "9.0",
        "NVML",
    )
    assert device.supports_bf16


# --- another card than the one here


@pytest.mark.parametrize("name", ["a10", "l4", "rtx-4090", "a100-80gb", "h100", "t4"])
def test_a_larger_card_stands_in_for_a_smaller_one(cards, name):
    cards(card())
    target, device = find_target(name), resolve_device(name)
    assert (target.device, target.measured_on, target.card) == (device, H200, card())
    task = with_transfer(
        set_up(StudySpec(model="mistral-7b"), target), StudySpec(model="mistral-7b")
    ).task
    assert task.carried == speed_transfer(H200, device) and task.carried.ratio(0.5) < 1
    assert 0.95 * device.memory_gib < target.cap_gib < device.memory_gib


WORDS = "memory=24,bf16_tflops=125,bandwidth_gb_s=600,tdp_w=150,compute_capability=8.6"


def test_a_gpu_stands_in_for_a_card_of_the_users_own(cards):
    cards(card())
    target = find_target(WORDS)
    assert (target.device, target.measured_on) == (resolve_device(WORDS), H200)
    assert target.cap_gib == target.device.usable_gib
    spec = StudySpec(model="mistral-7b", gpu=WORDS)
    setup = with_transfer(set_up(spec, target), spec)
    assert setup.task.carried is not None
    assert setup.task.study.startswith("card-24gb-by-h200-sxm") and setup.task.price is None
    cards()
    with pytest.raises(EnvironmentProblem) as caught:
        find_target(WORDS)
    assert f"autotune plan --gpu {WORDS}" in caught.value.remedy


def test_a_gpu_of_this_machine_may_have_a_row_of_the_users_own(cards, tmp_path):
    path = tmp_path / "it's mine.yaml"
    row = "memory: 40\nbf16_tflops: 100\nbandwidth_gb_s: 600\nnvml_names: [NVIDIA X1]\n"
    path.write_text(row)
    cards(card(name="nvidia x1", memory_gib=39.6))
    mine = resolve_device(str(path))
    assert find_target(str(path)) == Target(
        device=mine, card=card(name="nvidia x1", memory_gib=39.6)
    )
    cards(card(name="NVIDIA X1", memory_gib=20.0))  # another size of it
    with pytest.raises(EnvironmentProblem, match="it would need"):
        find_target(str(path))


def test_a_study_of_a_card_of_the_users_own_goes_on_with_the_same_data_sheet():
    own = replace(subject_of(), device=resolve_device(WORDS))
    assert from_data(type(own), to_data(own)) == own
    facts = [
        record_of(replace(own, device=resolve_device(gpu))).identity()
        for gpu in (WORDS, WORDS + ",arch=ada")
    ]
    assert facts[0] != facts[1] and facts[0]["device"] == facts[1]["device"]
    assert record_of(replace(own, device=A10)).identity()["data sheet"] is None


def test_the_card_itself_is_not_capped(cards):
    cards(card())
    assert find_target("h200").cap_gib is None and find_target("h200").measured_on is None


@pytest.mark.parametrize(
    ("here", "wanted", "why"),
    [
        ({"name": "NVIDIA A10", "memory_gib": 22.5}, "h100", "it would need 78"),
        ({"name": "NVIDIA H200"}, "mi300x", "amd has other kernels"),
        ({"name": "Tesla T4", "memory_gib": 15.0}, "rtx-4080", "it would need"),
        ({"name": "Tesla V100-SXM2-32GB", "memory_gib": 32.0}, "a10", "it has no bf16"),
        (
            {"name": "Quadro RTX 8000", "memory_gib": 48.0},
            "a10",
            "the speeds of one of the two are not known",
        ),
    ],
)
def test_a_gpu_that_cannot_stand_in_is_an_error_with_the_reason(cards, here, wanted, why):
    cards(card(**here))
    with pytest.raises(EnvironmentProblem, match=why) as caught:
        find_target(wanted)
    assert (
        caught.value.exit_code == 3
        and f"autotune plan --gpu {resolve_device(wanted).name}" in caught.value.remedy
    )


def emulated(name="a10"):
    device = resolve_device(name)
    return Target(device=device, card=card(), measured_on=H200)


def test_values_that_the_target_cannot_do_are_removed():
    spec = StudySpec(model="mistral-7b", allow_quantized=True)
    a10, t4 = set_up(spec, emulated()), set_up(replace(spec, space="lora"), emulated("t4"))
    assert "fp8" not in a10.task.space.knob("quantization").choices()
    assert t4.task.space.knob("precision").choices() == ("fp16_mixed",)
    assert a10.task.study == "a10-by-h200-sxm-mistral-7b-v0.3-default"
    assert (a10.task.device, a10.task.measured_on) == (A10, H200)
    assert a10.task.price.device == "a10"


def test_values_that_the_measuring_gpu_cannot_try_are_removed_too(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: object())
    l4, a100 = resolve_device("l4"), resolve_device("a100")
    target = Target(device=l4, card=card(), measured_on=a100)
    setup = set_up(StudySpec(model="mistral-7b", allow_quantized=True), target)
    assert "fp8" not in setup.task.space.knob("quantization").choices()
    assert any("a100-80gb-sxm cannot try it" in str(removal) for removal in setup.removals)


def test_speeds_are_projected_and_memory_is_measured():
    """The same measurement, for the card that made it and for the one it stands in for."""
    own = subject_of()
    other = replace(own, device=A10, measured_on=H200, carried=speed_transfer(H200, A10))
    found = {}
    for task in (own, other):
        selection = Selection(task)
        add_measured(selection, BASELINE, measurement())
        found[task.device.name] = selection.recipe(FINGERPRINT)
    here, there = found[own.device.name].winner, found["a10"].winner
    ratio = there.performance.tokens_per_second / here.performance.tokens_per_second
    # The power limit of an A10 bounds its products more than its memory bounds other operations.
    assert other.carried.products < ratio < other.carried.bytes
    assert there.cost.full_run_hours == pytest.approx(here.cost.full_run_hours / ratio)
    low, high = interval(1.0, other.carried.error)
    assert there.performance.spread[0] <= low - 1 and there.performance.spread[1] >= high - 1
    assert (there.evidence, there.cost.evidence, there.memory_evidence) == (
        Evidence.PROJECTED,
        Evidence.PROJECTED,
        Evidence.MEASURED,
    )
    assert {cost.evidence for cost in found["a10"].by_examples} == {Evidence.PROJECTED}
    assert (here.evidence, here.memory_evidence) == (Evidence.MEASURED, Evidence.MEASURED)
    assert there.measurement.peak_reserved_gib == here.measurement.peak_reserved_gib
    assert there.performance.mfu is None and there.cost.kwh is None
    assert any("probed on h200-sxm with its memory capped" in one for one in found["a10"].caveats)
    assert not any("probed on" in one for one in found[own.device.name].caveats)


def test_an_emulated_study_is_stored_and_is_not_continued_on_the_target_itself():
    other = replace(subject_of(), device=A10, measured_on=H200, carried=speed_transfer(H200, A10))
    assert from_data(type(other), to_data(other)) == other
    facts = [
        record_of(task).identity()
        for task in (other, replace(other, measured_on=None, carried=None))
    ]
    assert [one["measured on"] for one in facts] == ["h200-sxm", "a10"]


@pytest.mark.parametrize("calibrated", ["a10", "a100-80gb-sxm"])
def test_a_calibration_of_either_card_changes_the_projection(tmp_path, calibrated):
    """Of cards that reach a tenth of what their data sheets lead to expect: ten times less there,
    or more.
    """
    a100 = resolve_device("a100")
    target = Target(device=A10, card=card(), measured_on=a100)
    made = calibration(calibrated, products={"bf16": {1024: 8.0}}, copy_gb_s=50.0)
    write_calibration(made, tmp_path / "file.json")
    spec = StudySpec(model="mistral-7b", calibration=str(tmp_path / "file.json"))
    task = with_transfer(set_up(spec, target), spec).task
    ratio = task.carried.ratio(0.5) / speed_transfer(a100, A10).ratio(0.5)
    assert ratio < 0.3 if calibrated == "a10" else ratio > 3
    assert from_data(type(task), to_data(task)) == task
    selection = Selection(task)
    add_measured(selection, BASELINE, measurement())
    caveats = selection.recipe(FINGERPRINT).caveats
    assert any(
        f"from data sheets, {calibrated} calibrated by file.json, 2026-11-22 (" in one
        for one in caveats
    )


def test_the_host_of_the_target_is_projected_where_both_machines_were_calibrated(
    cards, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cards(card(name="NVIDIA A10", memory_gib=22.5))
    l4 = resolve_device("l4")
    target = Target(device=l4, card=card(name="NVIDIA A10"), measured_on=A10)
    write_calibration(calibration("l4", layer_ms=10.0), tmp_path / "l4.json")
    spec = StudySpec(model="mistral-7b", calibration=str(tmp_path / "l4.json"))
    # nothing is known of the host here
    assert with_transfer(set_up(spec, target), spec).task.carried.host is None
    kept_path(A10.name).parent.mkdir(parents=True, exist_ok=True)
    write_calibration(calibration(processor=processor_name(), layer_ms=8.0), kept_path(A10.name))
    task = with_transfer(set_up(spec, target), spec).task
    assert task.carried.host == pytest.approx(0.8)
    plain = StudySpec(model="mistral-7b")
    assert with_transfer(set_up(plain, target), plain).task.carried.host is None
    selection = Selection(task)
    add_measured(selection, BASELINE, measurement())
    caveats = selection.recipe(FINGERPRINT).caveats
    assert any(
        "host's work is 0.8 times as fast, because both hosts were calibrated" in one
        for one in caveats
    )
    # What others measured of the card says nothing of the host.
    seen = replace(published_observations()[0], device="l4")
    corrected = corrected_by_observations(task, [seen])
    assert corrected.carried.host == task.carried.host


def test_measurements_on_the_target_tighten_the_projection():
    spec = StudySpec(model="mistral-7b")
    task = with_transfer(set_up(spec, emulated()), spec).task
    tight = corrected_by_observations(task, published_observations())
    assert tight.carried.basis == 2 and tight.carried.error < task.carried.error
    assert replace(tight, carried=task.carried) == task
    own = replace(task, measured_on=None, carried=None)
    assert corrected_by_observations(own, published_observations()) == own


@pytest.mark.parametrize(
    ("target", "memory_gib", "offered"),
    [
        (Target(device=H200, card=card()), None, 139.8),
        (Target(device=H200, card=card()), 22.0, 22.0),
        (emulated(), None, round(22.488 * 0.98, 2)),
        (emulated(), 16.0, 16.0),
    ],
)
def test_the_budget_is_what_is_available_or_less(target, memory_gib, offered):
    assert target.memory_cap_gib(139.8, asked_gib=memory_gib) == pytest.approx(offered, abs=0.01)


def test_a_host_keeps_memory_for_its_other_work():
    assert Target(device=CPU).memory_cap_gib(10.0) == 8.0
    assert Target(device=CPU).memory_cap_gib(10.07) == 8.1  # in tenths


def test_a_budget_above_what_is_available_is_an_error():
    busy = replace(emulated(), card=replace(card(), used_gib=130.0))
    with pytest.raises(
        EnvironmentProblem, match=r"a10 has 22.0 GiB, but only 9.80 GiB are free here"
    ):
        busy.memory_cap_gib(139.8)
    with pytest.raises(UsageError, match=r"--memory-gib 30 is more than the available 22.0 GiB"):
        emulated().memory_cap_gib(139.8, asked_gib=30.0)
    shallow = emulated().memory_cap_gib(139.8, asked_gib=30.0, may_exceed=True)
    assert shallow == 30.0


def test_other_processes_are_named():
    others = (
        GpuProcess(pid=7, name="python", used_gib=3.0),
        GpuProcess(pid=8, name="Xorg", used_gib=0.1),
    )
    busy = Target(device=H200, card=replace(card(), used_gib=3.1, processes=others))
    assert busy.held_by_others_gib == 3.1
    assert busy.other_processes() == "python (pid 7, 3.00 GiB)"
    assert busy.memory_cap_gib(139.8) == pytest.approx(136.7)
    assert Target(device=H200, card=card()).held_by_others_gib == 0.0


def test_a_data_sheet_gives_a_cap_that_the_user_can_only_lessen() -> None:
    assert device_cap_gib(A10) == device_cap_gib(A10, 80.0) == A10.usable_gib
    assert device_cap_gib(A10, 8.0) == 8.0


def test_a_device_of_unknown_memory_needs_a_size() -> None:
    unknown = replace(A10, memory_gib=None)
    assert device_cap_gib(unknown, 8.0) == 8.0
    for device in (unknown, resolve_device("cpu")):
        with pytest.raises(UsageError, match=f"no plan can be made for {device.name}"):
            device_cap_gib(device)


def test_half_a_gib_that_others_hold_is_ignored() -> None:
    light = GpuProcess(pid=7, name=None, used_gib=0.5)
    at_limit = Target(device=H200, card=replace(card(), used_gib=0.5, processes=(light,)))
    assert (at_limit.held_by_others_gib, at_limit.other_processes()) == (0.0, "no process is named")
    unknown = (replace(light, used_gib=0.51), GpuProcess(pid=8, name="x", used_gib=None))
    above = Target(device=H200, card=replace(card(), used_gib=0.51, processes=unknown))
    assert above.held_by_others_gib == 0.51 and above.other_processes().startswith("? (pid 7, ")
    assert above.memory_cap_gib(100.0) == 99.49 and at_limit.memory_cap_gib(100.1234) == 100.12
    nothing = Target(device=CPU)
    assert (nothing.held_by_others_gib, nothing.other_processes(), nothing.cap_gib) == (
        0.0,
        "no process is named",
        None,
    )


def test_all_of_what_is_available_may_be_asked_for() -> None:
    target = Target(device=H200, card=card())
    assert target.memory_cap_gib(100.0, asked_gib=100.0) == 100.0
    with pytest.raises(UsageError, match=r"--memory-gib 100\.1 is more than"):
        target.memory_cap_gib(100.0, asked_gib=100.1)
    whole = replace(emulated(), card=replace(card(), used_gib=0.0))
    cap = round(whole.cap_gib or 0.0, 2)
    assert whole.memory_cap_gib(cap) == cap  # no more than the device that is tuned for has
    with pytest.raises(EnvironmentProblem):
        whole.memory_cap_gib(cap - 0.01)


def test_a_kept_calibration_is_used_on_the_machine_that_made_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said: list[str] = []
    assert kept_calibration(CPU, said.append) is None and not said  # there is none
    made = calibration("cpu", compute_capability=None, processor=processor_name())
    kept_path("cpu").parent.mkdir(parents=True, exist_ok=True)
    write_calibration(made, kept_path("cpu"))
    found = kept_calibration(CPU, said.append)
    assert found is not None and (found.place, found.layer_ms) == (HERE, made.layer_ms) and not said
    assert calibration_of(StudySpec(model="demo-3m"), CPU) == found
    write_calibration(replace(made, processor="another"), kept_path("cpu"))
    assert kept_calibration(CPU, said.append) is None and "on a machine with another" in said.pop()
    kept_path("cpu").write_text("{")
    assert kept_calibration(CPU, said.append) is None and "the file is not used" in said.pop()


def test_a_calibration_of_a_card_is_used_where_that_card_is(cards, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept_path(A10.name).parent.mkdir(parents=True, exist_ok=True)
    write_calibration(calibration(processor=processor_name()), kept_path(A10.name))
    found = []
    for here in ((), (card(),), (card(name="NVIDIA A10", memory_gib=22.5),)):
        cards(*here)
        found.append(kept_calibration(A10))
    assert found[:2] == [None, None] and found[2] is not None and found[2].device == A10.name


def test_a_card_can_stand_in_for_a_device_as_large_as_itself() -> None:
    usable = A10.usable_gib
    assert usable is not None
    assert _lack(A10, H200, card(memory_gib=usable)) is None
    assert "it would need" in (_lack(A10, H200, card(memory_gib=usable - 0.01)) or "")
    assert _lack(replace(A10, memory_gib=None), H200, card()) == "the memory of a10 is not known"
    assert _lack(A10, T4, card()) == "it has no bf16"
    assert _lack(T4, T4, card()) is None  # which nobody asks for


def test_a_gpu_that_cannot_stand_in_can_probe_a_few_layers(cards):
    cards(card(name="NVIDIA A10", memory_gib=22.5))
    with pytest.raises(EnvironmentProblem) as caught:
        find_target("h200")
    assert caught.value.remedy.endswith("--gpu a10 --memory-gib 140 --shallow-only")
    cards()
    with pytest.raises(EnvironmentProblem) as caught:
        find_target("auto")
    assert caught.value.remedy.startswith(
        "run on a machine that has one, or try the tool on the processor"
    )
