"""The worker describes a model within bounds, whatever its config asks for, and gives models back."""

import gc
import os
import resource
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.catalog import resolve_model
from autotune.core.probe_types import DeviceRates, OomDetail, Outcome, Phase, ProbeRequest, Rung
from autotune.core.serialization import to_data
from autotune.core.train_config import TrainConfig
from autotune.probe import device_rates, harness, resident, worker
from autotune.probe.harness import BadLoss
from tests.helpers.factories import measurement


@pytest.mark.parametrize("size", ["num_labels", "num_hidden_layers"])
def test_a_config_of_impossible_size_does_not_take_the_memory_of_the_machine(
    size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "DESCRIBED_GIB", 0.25)
    small = resolve_model("demo-3m").config
    limits, sent = resource.getrlimit(resource.RLIMIT_DATA), list[dict[str, Any]]()
    worker._describe(small | {size: 2**31 - 1}, lambda **message: sent.append(message))
    assert sent == [{"event": "broken", "reason": "without weights it takes more than 0.25 GiB"}]
    assert resource.getrlimit(resource.RLIMIT_DATA) == limits


class Model:
    """A model that refers to itself, of 1 GiB."""

    def __init__(self) -> None:
        self.itself = self

    def cached_gib(self) -> float:
        return 1.0


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_model_is_given_back_even_where_what_is_frozen_refers_to_it(is_frozen: bool) -> None:
    model = Model()
    alive = weakref.ref(model)
    if is_frozen:
        gc.freeze()
    made = worker.Worker.__new__(worker.Worker)
    meter: Any = SimpleNamespace(allocated_gib=lambda: 1.0 if alive() else 0.0, release=gc.collect)
    made.meter, made._residents = meter, {2: model, 4: Model()}
    del model
    try:
        made._drop([2, None])
        assert alive() is None and list(made._residents) == [4]
        frozen = gc.get_freeze_count()
        made._drop([4])
        assert not made._residents and gc.get_freeze_count() > frozen  # no model is left that could not be collected
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(("memory_gib", "left_gib", "is_kept"), [(24, 0.4, True), (24, 0.6, False), (140, 1.3, True)])
def test_a_worker_is_replaced_for_what_paged_optimizers_left_of_its_device(
    memory_gib: float, left_gib: float, is_kept: bool
) -> None:
    made = worker.Worker.__new__(worker.Worker)
    gone: Any = SimpleNamespace(uncap=gc.collect, release=gc.collect, returned_to=lambda gib: True)
    gone.memory_gib = lambda: memory_gib
    made.meter, made._residents, made._lost_gib, made._empty_gib = gone, {}, left_gib, 0.0
    fields: dict[str, Any] = {"outcome": Outcome.OK}
    request = ProbeRequest(config=TrainConfig(), model={}, memory_gib=memory_gib)
    assert made._restore(request, fields) is is_kept
    said = f"the worker is replaced, since paged optimizers left {left_gib} GiB behind"
    assert fields.get("notes") == (None if is_kept else (said,))


REQUEST = ProbeRequest(config=TrainConfig(), model={}, memory_gib=10.0, headroom=0.1)


class Meter:
    """A device on which `allocated` GiB are in use, and of which it may be said that it lost some."""

    torch_device = "cpu"

    def __init__(self, allocated: float = 0.0, returned: bool = True) -> None:
        self.allocated = allocated
        self.returned = returned
        self.aside_gib = 0.0
        self.said: list[Any] = []  # what was called, with its arguments

    def allocated_gib(self) -> float:
        return self.allocated

    def memory_gib(self) -> float:
        return 24.0

    def peak_gib(self) -> tuple[float, float]:
        return 8.0, 9.0

    def returned_to(self, baseline_gib: float) -> bool:
        self.said.append(("returned_to", baseline_gib))
        return self.returned

    def cap(self, *values: float) -> float:
        self.said.append(("cap", *values))
        return 8.5

    def rebase(self, resident_gib: float) -> None:
        self.said.append(("rebase", resident_gib))

    def uncap(self) -> None:
        self.said.append("uncap")

    def release(self) -> None:
        self.said.append("release")

    def settle(self) -> None:
        self.said.append("settle")

    def synchronize(self) -> None: ...


class Base:
    """A base model that takes so many GiB between probes."""

    def __init__(self, gib: float, family: Any = None) -> None:
        self.gib = gib
        self.family = family

    def cached_gib(self) -> float:
        return self.gib


def worker_on(meter: Meter, **residents: Base) -> Any:
    """A worker on this device, which holds base models: `whole`, and `depth2` or another depth."""
    made: Any = worker.Worker.__new__(worker.Worker)
    made.meter, made._empty_gib, made._lost_gib, made._limit_gib, made._served = meter, 0.0, 0.0, 7.0, 0
    made._residents = {None if name == "whole" else int(name[5:]): base for name, base in residents.items()}
    made.log, made._scratch, made._send = None, None, lambda **message: None
    return made


@pytest.fixture(autouse=True)
def _thaw() -> Iterator[None]:
    """A worker that has dropped its models freezes what is left."""
    yield
    gc.unfreeze()


def test_each_phase_takes_until_the_next_and_one_that_comes_back_is_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.time, "perf_counter", lambda: 20.0)
    entered = [("total", 1.0), ("load", 2.0), ("steady", 5.0), ("load", 9.0), ("cleanup", 16.0)]
    assert worker._seconds(entered) == {"load": 10.0, "steady": 4.0, "cleanup": 4.0, "total": 19.0}


def probing(limit_gib: float) -> Any:
    """A probe in its backward pass."""
    return SimpleNamespace(
        recorder=SimpleNamespace(phase=Phase.BACKWARD),
        allocated_by=lambda: {"weights": 4.0, "activations": 1.0},
        limit_gib=limit_gib,
    )


def test_where_memory_ran_out_the_parts_the_limit_and_the_phase_are_told() -> None:
    error = torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
    fields = worker_on(Meter())._failure(error, probing(6.5))
    assert (fields["outcome"], fields["phase"]) == (Outcome.OOM, Phase.BACKWARD)
    assert fields["reason"] == "out of memory in backward"
    oom = fields["oom"]
    assert (oom.allocated_gib, oom.reserved_gib, oom.requested_gib, oom.limit_gib) == (8.0, 9.0, 2.0, 6.5)
    assert oom.terms_gib == {"weights": 4.0, "activations": 4.0}
    # Before the probe has set a limit, that of the load holds.
    assert worker_on(Meter())._failure(error, probing(0.0))["oom"].limit_gib == 7.0


def test_memory_that_ran_out_before_there_was_a_probe_held_weights() -> None:
    fields = worker_on(Meter(5.0))._failure(MemoryError(), None)
    assert (fields["outcome"], fields["phase"]) == (Outcome.OOM, Phase.LOAD)
    assert fields["oom"].terms_gib == {"weights": 8.0} and fields["oom"].limit_gib == 7.0


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (BadLoss("the loss went nan\nand more"), Outcome.NUMERICS, "the loss went nan"),
        (ValueError("\n no such attention\nbut others"), Outcome.CRASH, "ValueError: no such attention"),
        (KeyError(), Outcome.CRASH, "KeyError: KeyError"),
        (ValueError("x" * 400), Outcome.CRASH, "ValueError: " + "x" * 300),
    ],
    ids=["loss", "lines", "silent", "long"],
)
def test_another_failure_is_named_by_its_first_line(error: Exception, outcome: Outcome, reason: str) -> None:
    fields = worker_on(Meter())._failure(error, probing(6.5))
    assert fields == {"outcome": outcome, "phase": Phase.BACKWARD, "reason": reason}
    assert worker_on(Meter())._failure(error, None)["phase"] is Phase.LOAD


@pytest.mark.parametrize(
    ("knobs", "fields", "is_kept"),
    [
        ({}, {"outcome": Outcome.OK}, True),
        ({}, {"outcome": Outcome.OOM, "phase": Phase.BACKWARD}, True),
        ({}, {"outcome": Outcome.OOM, "phase": Phase.LOAD}, False),  # it may be incomplete
        ({}, {"outcome": Outcome.CRASH, "phase": Phase.BACKWARD}, False),
        ({"quantization": "int8"}, {"outcome": Outcome.OK}, False),
        ({"method": "full"}, {"outcome": Outcome.OK}, False),
    ],
    ids=str,
)
def test_a_base_model_is_kept_unless_it_was_changed(
    knobs: dict[str, Any], fields: dict[str, Any], is_kept: bool
) -> None:
    made = worker_on(Meter(), whole=Base(3.0), depth2=Base(1.0))
    made._empty_gib = 0.5
    reusable = made._restore(replace(REQUEST, config=TrainConfig(**knobs)), dict(fields))
    assert list(made._residents) == ([None, 2] if is_kept else [2])
    succeeded = fields["outcome"] is not Outcome.CRASH
    assert reusable is succeeded
    # What others take is not counted: they wait aside.
    asked = [("returned_to", 3.5 if is_kept else 0.5)] if succeeded else []
    assert [said for said in made.meter.said if said[0] == "returned_to"] == asked
    assert made.meter.said.index("uncap") < len(made.meter.said) - 1 - made.meter.said[::-1].index("release")


def test_memory_that_is_not_returned_is_named() -> None:
    made = worker_on(Meter(allocated=3.75, returned=False), whole=Base(3.0))
    made._empty_gib = 0.5
    fields: dict[str, Any] = {"outcome": Outcome.OK}
    assert not made._restore(REQUEST, fields)
    assert fields["notes"] == ("the worker is replaced, since it did not return all memory (+256 MiB)",)
    crashed: dict[str, Any] = {"outcome": Outcome.CRASH}
    assert not made._restore(REQUEST, crashed) and "notes" not in crashed  # it is replaced anyway


def ran_out(allocated_gib: float) -> dict[str, Any]:
    detail = OomDetail(
        phase=Phase.FORWARD, requested_gib=1.0, allocated_gib=allocated_gib, reserved_gib=1.0, limit_gib=10.0
    )
    return {"outcome": Outcome.OOM, "phase": Phase.FORWARD, "reason": "out of memory in forward", "oom": detail}


@pytest.mark.parametrize(
    ("allocated_gib", "aside_gib", "reusable", "tries"),
    [(9.0, 2.0, True, 2), (9.5, 2.0, True, 1), (9.0, 0.0, True, 1), (9.0, 2.0, False, 1)],
)
def test_where_waiting_models_may_have_taken_the_room_it_is_tried_without_them(
    allocated_gib: float, aside_gib: float, reusable: bool, tries: int
) -> None:
    made = worker_on(Meter(), whole=Base(3.0), depth2=Base(1.0), depth4=Base(1.0))
    made.meter.aside_gib = aside_gib
    answers = [(ran_out(allocated_gib), reusable), ({"outcome": Outcome.CRASH}, False)]
    attempts = iter(answers)
    made._attempt = lambda request, entered: next(attempts)
    result, is_reusable = made.serve(replace(REQUEST, depth=2, rung=Rung.SHALLOW))
    assert (result.outcome, is_reusable) == (answers[tries - 1][0]["outcome"], answers[tries - 1][1])
    assert list(made._residents) == ([None, 2, 4] if tries == 1 else [2])
    assert (result.depth, result.rung) == (2, Rung.SHALLOW) and "total" in result.seconds


def test_the_first_probe_of_a_worker_is_not_warm() -> None:
    made = worker_on(Meter())
    made._attempt = lambda request, entered: ({"outcome": Outcome.OK}, True)
    assert [made.serve(REQUEST)[0].warm for _ in range(3)] == [False, True, True]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[ProbeRequest]:
    """Base models are made of nothing and take 2 GiB. Collects what they were made for."""
    requests: list[ProbeRequest] = []
    monkeypatch.setattr(resident, "family_of", lambda request: request.model)

    def build(request: ProbeRequest, device: Any) -> Base:
        requests.append(request)
        meters[-1].allocated += 2.0
        return Base(2.0, request.model)

    monkeypatch.setattr(resident, "build_resident", build)
    return requests


meters: list[Meter] = []  # that of the current test is the last


def test_a_base_model_is_built_once_under_the_limit_and_others_wait_aside(built: list[ProbeRequest]) -> None:
    made = worker_on(meter := Meter(0.25), depth2=Base(1.0, {}), depth4=Base(1.5, {}))
    meters.append(meter)
    made._lost_gib = 0.125
    whole = made._resident_for(REQUEST)
    assert whole.base_gib == 2.0 and built == [REQUEST] and list(made._residents) == [2, 4, None]
    assert meter.aside_gib == 2.5 and made._limit_gib == 8.5
    assert meter.said == [("rebase", 0.0), ("cap", 10.0, 0.1, 0.125)]
    meter.said.clear()
    assert made._resident_for(REQUEST) is whole and built == [REQUEST]
    assert meter.said == [("rebase", 2.0)] and meter.aside_gib == 2.5
    made._resident_for(replace(REQUEST, depth=4))
    assert meter.aside_gib == 1.0 + 2.0


def test_models_of_another_family_make_room(built: list[ProbeRequest]) -> None:
    made = worker_on(meter := Meter(), whole=Base(2.0, {}), depth2=Base(1.0, {"model_type": "llama"}))
    meters.append(meter)
    made._resident_for(replace(REQUEST, model={"model_type": "llama"}))
    assert list(made._residents) == [2, None] and len(built) == 1 and meter.aside_gib == 1.0


def test_a_base_that_full_fine_tuning_changes_is_built_anew(built: list[ProbeRequest]) -> None:
    first = Base(2.0, {})
    made = worker_on(meter := Meter(), whole=first, depth2=Base(1.0, {}))
    meters.append(meter)
    full = replace(REQUEST, config=TrainConfig(method="full"))
    assert made._resident_for(full) is not first and built == [full] and list(made._residents) == [2, None]


def test_the_rates_of_a_device_are_measured_without_models(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = DeviceRates(products={"fp32": {32: 1.0}}, copy_gb_s=2.0, link_gb_s=None, launch_us=3.0)
    made = worker_on(meter := Meter(0.5), whole=Base(2.0))
    monkeypatch.setattr(device_rates, "measure_rates", lambda meter: rates if not made._residents else None)
    sent: list[dict[str, Any]] = []
    worker._measure_rates(made, lambda **message: sent.append(message))
    assert sent == [{"event": "rates", "rates": to_data(rates)}]
    assert meter.said[-2:] == ["release", "settle"] and made._empty_gib == 0.5


def test_a_device_that_cannot_be_measured_is_reported_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(meter: Any) -> None:
        raise RuntimeError("no\n  memory" + "!" * 400)

    monkeypatch.setattr(device_rates, "measure_rates", fail)
    sent: list[dict[str, Any]] = []
    worker._measure_rates(worker_on(Meter()), lambda **message: sent.append(message))
    assert sent == [{"event": "broken", "reason": "RuntimeError: no memory" + "!" * 291}]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT asks with a name from before transformers 5.23
def test_a_model_is_described_or_said_to_be_none() -> None:
    limits, sent = resource.getrlimit(resource.RLIMIT_DATA), list[dict[str, Any]]()
    small = resolve_model("demo-3m").config
    worker._describe(small, lambda **message: sent.append(message))
    worker._describe({"model_type": "vit"}, lambda **message: sent.append(message))
    described, broken = sent
    assert described["event"] == "described" and described["shape"]["num_layers"] == small["num_hidden_layers"]
    assert broken == {"event": "broken", "reason": "transformers has no causal language model of type vit"}
    assert resource.getrlimit(resource.RLIMIT_DATA) == limits


def test_output_goes_to_the_log_of_a_probe_behind_what_is_there(tmp_path: Path) -> None:
    log, kept = tmp_path / "trial.log", [os.dup(1), os.dup(2)]
    log.write_text("before\n")
    try:
        handles = len(os.listdir("/proc/self/fd"))
        worker._log_to(str(log))
        assert len(os.listdir("/proc/self/fd")) == handles
        os.write(1, b"out\n")
        os.write(2, b"err\n")
        worker._log_to(kept[0])
        os.fstat(kept[0])  # it is left open
        os.write(1, b"elsewhere\n")
    finally:
        for number, handle in enumerate(kept, 1):
            os.dup2(handle, number)
            os.close(handle)
    assert log.read_text() == "before\nout\nerr\n"


@pytest.mark.parametrize(
    ("retries", "retried_in", "expected"),
    [
        (0, None, (Outcome.OK, None)),
        (2, Phase.BACKWARD, (Outcome.OOM, Phase.BACKWARD)),
        (1, None, (Outcome.OOM, Phase.STEADY)),
    ],
)
def test_a_try_tells_of_its_phases_and_of_memory_that_was_too_tight(
    monkeypatch: pytest.MonkeyPatch, retries: int, retried_in: Phase | None, expected: tuple[Outcome, Phase | None]
) -> None:
    """A paged optimizer leaves 0.25 GiB behind, beside the 0.125 of an earlier probe."""
    measured, closed, sent = measurement(alloc_retries=retries), list[bool](), list[dict[str, Any]]()
    made = worker_on(Meter())
    made._resident_for, made._send, made._lost_gib = (
        lambda request: "base",
        lambda **message: sent.append(message),
        0.125,
    )

    def probe(request: ProbeRequest, base: Any, meter: Any, emit: Any, lost_gib: float, scratch: Any) -> Any:
        assert (request, base, meter, lost_gib) == (REQUEST, "base", made.meter, 0.125)

        def run() -> Any:
            emit(Phase.FIRST_STEP)
            return measured

        recorder = SimpleNamespace(retried_in=retried_in)
        return SimpleNamespace(run=run, recorder=recorder, managed_gib=0.25, close=lambda: closed.append(True))

    monkeypatch.setattr(harness, "Probe", probe)
    entered = [("total", 0.0)]
    fields, reusable = made._attempt(REQUEST, entered)
    assert (fields["outcome"], fields.get("phase")) == expected and fields["measurement"] is measured
    assert ("oom" in fields) is ("reason" in fields) is (retries > 0)
    assert reusable and closed == [True] and made._lost_gib == 0.375
    phases = ["load", "first_step", "cleanup"]
    assert sent == [{"event": "phase", "phase": phase} for phase in phases]
    assert [name for name, _ in entered] == ["total", *phases]


def test_a_try_that_fails_frees_the_cap_before_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    made = worker_on(meter := Meter())

    def fail(request: ProbeRequest) -> None:
        raise ValueError("no such model")

    made._resident_for = fail
    made._failure = lambda error, probe: {"outcome": Outcome.CRASH, "reason": str(error), "said": list(meter.said)}
    fields, reusable = made._attempt(REQUEST, [("total", 0.0)])
    assert fields["reason"] == "no such model" and fields["said"] == ["uncap"] and not reusable


def test_faults_strike_the_trial_that_is_running(monkeypatch: pytest.MonkeyPatch) -> None:
    struck: list[Any] = []
    monkeypatch.setattr(worker, "strike", lambda log, phase: struck.append((log, phase)))
    made = worker_on(Meter())
    made._resident_for = made._failure = lambda *_: {"outcome": Outcome.CRASH}  # it is no model
    made._attempt(REQUEST, [("total", 0.0)])
    assert not struck  # the worker's own first probe has no log
    made.log = "trial-0003.log"
    made._attempt(REQUEST, [("total", 0.0)])
    assert struck == [("trial-0003.log", Phase.LOAD), ("trial-0003.log", Phase.CLEANUP)]
