"""The worker describes a model within bounds, whatever its
config asks for, and gives models back.
"""

import builtins
import gc
import json
import os
import resource
import signal
import socket
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler

from autotune.catalog import resolve_model
from autotune.core.probe_types import (
    DeviceRates,
    Fingerprint,
    OomDetail,
    Outcome,
    Phase,
    ProbeRequest,
    RankAddress,
    Rung,
)
from autotune.core.serialization import to_data
from autotune.core.train_config import TrainConfig
from autotune.probe import channel, device_rates, harness, health, model_shape, resident, worker
from autotune.probe import meters as meter_module
from autotune.probe.harness import BadLoss
from autotune.probe.tiny_probe import tiny_request
from autotune.probe.turns import HELD
from tests.helpers.factories import FINGERPRINT, PROFILE, measurement, result


@pytest.mark.parametrize("size", ["num_labels", "num_hidden_layers"])
def test_a_config_of_impossible_size_does_not_take_the_memory_of_the_machine(
    size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "DESCRIBED_GIB", 0.015625)
    small = resolve_model("demo-3m").config
    limits, sent = resource.getrlimit(resource.RLIMIT_DATA), list[dict[str, Any]]()
    worker._describe(small | {size: 2**31 - 1}, lambda **message: sent.append(message))
    assert sent == [
        {
            "event": "broken",
            "reason": "building the model takes more than 0.015625 GiB, even without weights",
        }
    ]
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
        assert gc.get_freeze_count()  # what is left need not be looked through again
        made._drop([4])
        assert not made._residents
    finally:
        gc.unfreeze()


REQUEST = ProbeRequest(config=TrainConfig(), model={}, memory_gib=10.0, headroom=0.1)


class Meter:
    """A device on which `allocated` GiB are in use, and of which
    it may be said that it lost some.
    """

    torch_device = "cpu"
    capability: str | None = None

    def __init__(self, allocated: float = 0.0, returned: bool = True) -> None:
        self.allocated = allocated
        self.returned = returned
        self.aside_gib = 0.0
        self.said: list[Any] = []  # what was called, with its arguments

    def allocated_gib(self) -> float:
        return self.allocated

    def memory_gib(self) -> float:
        return 24.0

    def fingerprint(self) -> Fingerprint:
        return replace(FINGERPRINT, compute_capability=self.capability)

    def peak_gib(self) -> tuple[float, float]:
        return 8.0, 9.0

    def has_returned(self, baseline_gib: float) -> bool:
        self.said.append(("has_returned", baseline_gib))
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
    made.meter, made._empty_gib, made._limit_gib, made._served = meter, 0.0, 7.0, 0
    made._residents = {
        None if name == "whole" else int(name[5:]): base for name, base in residents.items()
    }
    made.log, made._scratch, made._send = None, None, lambda **message: None
    return made


@pytest.fixture(autouse=True)
def _thaw() -> Iterator[None]:
    """A worker that has dropped its models freezes what is left."""
    yield
    gc.unfreeze()


def test_each_phase_takes_until_the_next_and_one_that_comes_back_is_added_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel.time, "perf_counter", lambda: 20.0)
    entered = [("total", 1.0), ("load", 2.0), ("steady", 5.0), ("load", 9.0), ("cleanup", 16.0)]
    assert channel.phase_seconds(entered) == {
        "load": 10.0,
        "steady": 4.0,
        "cleanup": 4.0,
        "total": 19.0,
    }


def probing(limit_gib: float) -> Any:
    """A probe in its backward pass."""
    return SimpleNamespace(
        recorder=SimpleNamespace(phase=Phase.BACKWARD),
        memory_terms=lambda: {"weights": 4.0, "activations": 1.0},
        limit_gib=limit_gib,
    )


def test_where_memory_ran_out_the_parts_the_limit_and_the_phase_are_told() -> None:
    error = torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
    fields = worker_on(Meter())._failure(error, probing(6.5))
    assert (fields["outcome"], fields["phase"]) == (Outcome.OOM, Phase.BACKWARD)
    assert fields["reason"] == "out of memory in backward"
    oom = fields["oom"]
    assert (oom.allocated_gib, oom.reserved_gib, oom.requested_gib, oom.limit_gib) == (
        8.0,
        9.0,
        2.0,
        6.5,
    )
    assert oom.terms_gib == {"weights": 4.0, "activations": 4.0}
    # Before the probe has set a limit, that of the load holds.
    assert worker_on(Meter())._failure(error, probing(0.0))["oom"].limit_gib == 7.0


def test_memory_that_ran_out_before_there_was_a_probe_held_weights(
    capsys: pytest.CaptureFixture[str],
) -> None:
    try:
        raise MemoryError
    except MemoryError as error:
        fields = worker_on(Meter(5.0))._failure(error, None)
    assert (fields["outcome"], fields["phase"]) == (Outcome.OOM, Phase.LOAD)
    assert "MemoryError" in capsys.readouterr().err  # which is the trial's log
    assert fields["oom"].terms_gib == {"weights": 8.0} and fields["oom"].limit_gib == 7.0


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (BadLoss("the loss went nan\nand more"), Outcome.NUMERICS, "the loss went nan"),
        (
            ValueError("\n no such attention\nbut others"),
            Outcome.CRASH,
            "ValueError: no such attention",
        ),
        (KeyError(), Outcome.CRASH, "KeyError: KeyError"),
        (ValueError("x" * 400), Outcome.CRASH, "ValueError: " + "x" * 300),
    ],
    ids=["loss", "lines", "silent", "long"],
)
def test_another_failure_is_named_by_its_first_line(
    error: Exception, outcome: Outcome, reason: str
) -> None:
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
    asked = [("has_returned", 3.5 if is_kept else 0.5)] if succeeded else []
    assert [said for said in made.meter.said if said[0] == "has_returned"] == asked
    assert made.meter.said.index("uncap") < len(made.meter.said) - 1 - made.meter.said[::-1].index(
        "release"
    )


def test_what_an_earlier_probe_left_is_frozen_and_collected_where_memory_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    collector = SimpleNamespace(
        freeze=lambda: done.append("freeze"), unfreeze=lambda: done.append("thaw")
    )
    monkeypatch.setattr(worker, "gc", collector)
    collector.isenabled = lambda: True
    made = worker_on(meter := Meter(3.5), whole=Base(3.0))
    assert made._restore(REQUEST, {"outcome": Outcome.OK}) and done == ["freeze"]
    meter.has_returned = lambda baseline_gib: "thaw" in done  # type: ignore[method-assign]
    fields: dict[str, Any] = {"outcome": Outcome.OK}
    assert (
        made._restore(REQUEST, fields)
        and done == ["freeze", "thaw", "freeze"]
        and "notes" not in fields
    )
    meter.has_returned = lambda baseline_gib: False  # type: ignore[method-assign]
    assert (
        not made._restore(REQUEST, fields) and done[3:] == ["thaw", "freeze"] and "notes" in fields
    )
    del done[3:]
    collector.isenabled = lambda: False  # as the worker starts
    assert made._restore(REQUEST, {"outcome": Outcome.OK}) and done == ["freeze", "thaw", "freeze"]


def test_memory_that_is_not_returned_is_named() -> None:
    made = worker_on(Meter(allocated=3.75, returned=False), whole=Base(3.0))
    made._empty_gib = 0.5
    fields: dict[str, Any] = {"outcome": Outcome.OK}
    assert not made._restore(REQUEST, fields)
    assert fields["notes"] == (
        "the worker is replaced, because it did not return all memory (+256 MiB)",
    )
    crashed: dict[str, Any] = {"outcome": Outcome.CRASH}
    assert not made._restore(REQUEST, crashed) and "notes" not in crashed  # it is replaced anyway


def ran_out(allocated_gib: float) -> dict[str, Any]:
    detail = OomDetail(
        phase=Phase.FORWARD,
        requested_gib=1.0,
        allocated_gib=allocated_gib,
        reserved_gib=1.0,
        limit_gib=10.0,
    )
    return {
        "outcome": Outcome.OOM,
        "phase": Phase.FORWARD,
        "reason": "out of memory in forward",
        "oom": detail,
    }


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
    assert (result.outcome, is_reusable) == (
        answers[tries - 1][0]["outcome"],
        answers[tries - 1][1],
    )
    assert list(made._residents) == ([None, 2, 4] if tries == 1 else [2])
    assert (result.depth, result.rung) == (2, Rung.SHALLOW) and "total" in result.seconds


def test_what_others_hold_is_read_whenever_this_process_has_the_device_again(
    tmp_path: Path,
) -> None:
    made, held = worker_on(Meter()), list[float]()
    made.shared, compiling = tmp_path, CallbackArgs(CallbackTrigger.DYNAMO, "0/0")

    def attempt(request: ProbeRequest, entered: Any) -> Any:
        held.append(made.meter.others_gib)
        callback_handler.run_start_callbacks(compiling)
        (tmp_path / f"17{HELD}").write_text("1.5")  # another builds a model meanwhile
        callback_handler.run_end_callbacks(compiling)
        held.append(made.meter.others_gib)
        return {"outcome": Outcome.OK}, True

    made._attempt = attempt
    made.serve(replace(REQUEST, config=replace(REQUEST.config, compile="per_layer")))
    assert held == [0.0, 1.5]
    made.shared, made._attempt = None, lambda request, entered: ({"outcome": Outcome.OK}, True)
    made.serve(REQUEST)
    assert made.meter.others_gib == 0.0


def test_the_first_probe_of_a_worker_is_not_warm() -> None:
    made = worker_on(Meter())
    made._attempt = lambda request, entered: ({"outcome": Outcome.OK}, True)
    served = [made.serve(REQUEST)[0] for _ in range(3)]
    assert [one.warm for one in served] == [False, True, True]
    assert all(len(one.started_at or "") == len("2026-11-24T07:30:15.125+00:00") for one in served)


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


def test_a_base_model_is_built_once_under_the_limit_and_others_wait_aside(
    built: list[ProbeRequest],
) -> None:
    made = worker_on(meter := Meter(0.25), depth2=Base(1.0, {}), depth4=Base(1.5, {}))
    meters.append(meter)
    whole = made._resident_for(REQUEST)
    assert whole.base_gib == 2.0 and built == [REQUEST] and list(made._residents) == [2, 4, None]
    assert meter.aside_gib == 2.5 and made._limit_gib == 8.5
    assert meter.said == [("rebase", 0.0), ("cap", 10.0, 0.1, 0.0)]
    meter.said.clear()
    assert made._resident_for(REQUEST) is whole and built == [REQUEST]
    assert meter.said == [("rebase", 2.0)] and meter.aside_gib == 2.5
    made._resident_for(replace(REQUEST, depth=4))
    assert meter.aside_gib == 1.0 + 2.0


def test_models_of_another_family_make_room(built: list[ProbeRequest]) -> None:
    made = worker_on(
        meter := Meter(), whole=Base(2.0, {}), depth2=Base(1.0, {"model_type": "llama"})
    )
    meters.append(meter)
    made._resident_for(replace(REQUEST, model={"model_type": "llama"}))
    assert list(made._residents) == [2, None] and len(built) == 1 and meter.aside_gib == 1.0


def test_a_base_that_full_fine_tuning_changes_is_built_anew(built: list[ProbeRequest]) -> None:
    first = Base(2.0, {})
    made = worker_on(meter := Meter(), whole=first, depth2=Base(1.0, {}))
    meters.append(meter)
    full = replace(REQUEST, config=TrainConfig(method="full"))
    assert (
        made._resident_for(full) is not first
        and built == [full]
        and list(made._residents) == [2, None]
    )


def test_the_rates_of_a_device_are_measured_without_models(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = DeviceRates(products={"fp32": {32: 1.0}}, copy_gb_s=2.0, link_gb_s=None, launch_us=3.0)
    made = worker_on(meter := Meter(0.5), whole=Base(2.0))
    monkeypatch.setattr(
        device_rates, "measure_rates", lambda meter: rates if not made._residents else None
    )
    sent: list[dict[str, Any]] = []
    worker._measure_rates(made.rates, lambda **message: sent.append(message))
    assert sent == [{"event": "rates", "rates": to_data(rates)}]
    assert meter.said[-2:] == ["release", "settle"] and made._empty_gib == 0.5


def test_a_device_that_cannot_be_measured_is_reported_in_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(meter: Any) -> None:
        raise RuntimeError("no\n  memory" + "!" * 400)

    monkeypatch.setattr(device_rates, "measure_rates", fail)
    sent: list[dict[str, Any]] = []
    worker._measure_rates(worker_on(Meter()).rates, lambda **message: sent.append(message))
    assert sent == [{"event": "broken", "reason": "RuntimeError: no memory" + "!" * 291}]


# PEFT asks with a name from before transformers 5.23
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_model_is_described_or_said_to_be_none() -> None:
    limits, sent = resource.getrlimit(resource.RLIMIT_DATA), list[dict[str, Any]]()
    small = resolve_model("demo-3m").config
    worker._describe(small, lambda **message: sent.append(message))
    worker._describe({"model_type": "vit"}, lambda **message: sent.append(message))
    described, broken = sent
    assert (
        described["event"] == "described"
        and described["shape"]["num_layers"] == small["num_hidden_layers"]
    )
    assert broken == {
        "event": "broken",
        "reason": "transformers has no causal language model of type vit",
    }
    assert resource.getrlimit(resource.RLIMIT_DATA) == limits


def test_output_goes_to_the_log_of_a_probe_behind_what_is_there(tmp_path: Path) -> None:
    log, kept = tmp_path / "trial.log", [os.dup(1), os.dup(2)]
    log.write_text("before\n")
    try:
        handles = len(os.listdir("/proc/self/fd"))
        channel.redirect_output(str(log))
        assert len(os.listdir("/proc/self/fd")) == handles
        os.write(1, b"out\n")
        os.write(2, b"err\n")
        channel.redirect_output(kept[0])
        os.fstat(kept[0])  # it is left open
        os.write(1, b"elsewhere\n")
    finally:
        for number, handle in enumerate(kept, 1):
            os.dup2(handle, number)
            os.close(handle)
    assert log.read_text() == "before\nout\nerr\n"


@pytest.mark.parametrize(
    ("retries", "retry_phase", "expected"),
    [
        (0, None, (Outcome.OK, None)),
        (2, Phase.BACKWARD, (Outcome.OOM, Phase.BACKWARD)),
        (1, None, (Outcome.OOM, Phase.STEADY)),
    ],
)
def test_a_try_tells_of_its_phases_and_of_memory_that_was_too_tight(
    monkeypatch: pytest.MonkeyPatch,
    retries: int,
    retry_phase: Phase | None,
    expected: tuple[Outcome, Phase | None],
) -> None:
    measured, closed, sent = (
        measurement(alloc_retries=retries),
        list[bool](),
        list[dict[str, Any]](),
    )
    made = worker_on(Meter())
    made._resident_for, made._send = lambda request: "base", lambda **message: sent.append(message)

    made.trace = "trace.json.gz"

    def probe(
        request: ProbeRequest, base: Any, meter: Any, emit: Any, scratch: Any, rank: Any, trace: Any
    ) -> Any:
        assert (request, base, meter, trace) == (REQUEST, "base", made.meter, "trace.json.gz")

        def run() -> Any:
            emit(Phase.FIRST_STEP)
            return measured

        recorder = SimpleNamespace(retry_phase=retry_phase)
        return SimpleNamespace(
            run=run, recorder=recorder, micro_profile=PROFILE, close=lambda: closed.append(True)
        )

    monkeypatch.setattr(harness, "Probe", probe)
    entered = [("total", 0.0)]
    fields, reusable = made._attempt(REQUEST, entered)
    assert made.micro_profile is PROFILE
    assert (fields["outcome"], fields.get("phase")) == expected and fields[
        "measurement"
    ] is measured
    assert ("oom" in fields) is ("reason" in fields) is (retries > 0)
    assert reusable and closed == [True]
    phases = ["load", "first_step", "cleanup"]
    assert sent == [{"event": "phase", "phase": phase} for phase in phases]
    assert [name for name, _ in entered] == ["total", *phases]


def test_a_try_that_fails_frees_the_cap_before_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    made = worker_on(meter := Meter())

    def fail(request: ProbeRequest) -> None:
        raise ValueError("no such model")

    made._resident_for = fail
    made._failure = lambda error, probe: {
        "outcome": Outcome.CRASH,
        "reason": str(error),
        "said": list(meter.said),
    }
    fields, reusable = made._attempt(REQUEST, [("total", 0.0)])
    assert fields["reason"] == "no such model" and fields["said"] == ["uncap"] and not reusable


def test_faults_strike_the_trial_that_is_running(monkeypatch: pytest.MonkeyPatch) -> None:
    struck: list[Any] = []
    monkeypatch.setattr(
        worker, "strike", lambda log, phase, rank: struck.append((log, phase, rank))
    )
    made = worker_on(Meter())
    made._resident_for = made._failure = lambda *_: {"outcome": Outcome.CRASH}  # it is no model
    made._attempt(REQUEST, [("total", 0.0)])
    assert not struck  # the worker's own first probe has no log
    made.log = "trial-0003.log"
    made._attempt(REQUEST, [("total", 0.0)])
    assert struck == [("trial-0003.log", Phase.LOAD, 0), ("trial-0003.log", Phase.CLEANUP, 0)]
    made.address = RankAddress(number=1, meeting="file")
    made._attempt(REQUEST, [("total", 0.0)])
    assert struck[2:] == [("trial-0003.log", phase, 1) for phase in (Phase.LOAD, Phase.CLEANUP)]


def test_a_config_of_impossible_size_is_described_under_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """8 GiB beyond what the process holds; the limit is lifted before anything is said, and
    afterwards.
    """
    limits: list[Any] = []
    held = SimpleNamespace(memory_info=lambda: SimpleNamespace(data=2**30))
    monkeypatch.setattr(worker.psutil, "Process", lambda: held)
    monkeypatch.setattr(worker.resource, "getrlimit", lambda which: (7, 9))
    monkeypatch.setattr(worker.resource, "setrlimit", lambda which, pair: limits.append(pair))
    errors = [
        MemoryError(),
        SystemError("no result"),
        RuntimeError("std::bad_alloc"),
        ValueError("a\n b" * 200),
        KeyError(),
    ]
    monkeypatch.setattr(worker.traceback, "print_exc", lambda: limits.append("printed"))
    for error in errors:

        def describe(model: Any, error: Exception = error) -> Any:
            raise error

        monkeypatch.setattr(model_shape, "describe", describe)
        worker._describe({}, lambda **message: limits.append(message))
    under, free = (9 * 2**30, 9), (7, 9)
    too_large = {
        "event": "broken",
        "reason": "building the model takes more than 8 GiB, even without weights",
    }
    long = {"event": "broken", "reason": ("a b" * 200)[:300]}
    silent = {"event": "broken", "reason": "KeyError"}
    assert limits == [
        *[under, free, too_large, free] * 3,
        *[under, free, "printed", long, free],
        *[under, free, "printed", silent, free],
    ]


def test_why_a_device_cannot_be_measured_is_in_the_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(meter: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(device_rates, "measure_rates", fail)
    worker._measure_rates(worker_on(Meter()).rates, lambda **message: None)
    assert "RuntimeError: no memory" in capsys.readouterr().err


def test_what_libraries_keep_of_a_measurement_of_rates_is_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        device_rates, "measure_rates", lambda meter: meter.said.append("measure") or "rates"
    )
    made = worker_on(meter := Meter(0.5))
    assert (
        made.rates() == "rates"
        and meter.said == ["measure", "release", "settle"]
        and made._empty_gib == 0.5
    )


@pytest.mark.parametrize(
    ("knobs", "imported"),
    [
        ({}, []),
        ({"quantization": "nf4"}, ["bitsandbytes"]),
        ({"quantization": "int8"}, ["bitsandbytes"]),
        ({"optimizer": "lion_8bit"}, ["bitsandbytes"]),
        ({"quantization": "fp8"}, []),
    ],
    ids=str,
)
def test_libraries_are_loaded_before_the_model_is_weighed(
    built: list[ProbeRequest],
    monkeypatch: pytest.MonkeyPatch,
    knobs: dict[str, Any],
    imported: list[str],
) -> None:
    loaded: list[str] = []
    load = builtins.__import__

    def watched(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "bitsandbytes":
            loaded.append(name)
            return None
        return load(name, *args, **kwargs)

    made = worker_on(meter := Meter())
    meters.append(meter)
    waited: list[int] = []
    meter.synchronize = lambda: waited.append(len(built))  # type: ignore[method-assign]
    monkeypatch.setattr(builtins, "__import__", watched)
    made._resident_for(replace(REQUEST, config=TrainConfig(**knobs)))
    monkeypatch.undo()
    assert loaded == imported and waited == [1]


@pytest.mark.parametrize(
    ("left_gib", "thawed"),
    [(0.0, False), (24 / 1024, False), (0.03, True)],
    ids=["none", "chance", "some"],
)
@pytest.mark.parametrize("others", [0, 1])
def test_what_is_frozen_is_collected_where_a_model_stays(
    monkeypatch: pytest.MonkeyPatch, left_gib: float, thawed: bool, others: int
) -> None:
    """2 GiB are the model's; whatever stays of it beyond chance may be referred to by what is
    frozen.
    """
    done: list[str] = []
    monkeypatch.setattr(
        worker,
        "gc",
        SimpleNamespace(freeze=lambda: done.append("freeze"), unfreeze=lambda: done.append("thaw")),
    )
    made = worker_on(
        meter := Meter(2.5), depth2=Base(2.0), **({"depth4": Base(0.25)} if others else {})
    )

    def release() -> None:
        done.append("release")
        meter.allocated = 0.5 + left_gib

    meter.release = release  # type: ignore[method-assign]
    made._drop([])
    assert done == []
    made._drop([2])
    assert done == ["release", *["thaw", "release"] * thawed, "freeze"]


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a worker does as it starts: the device is checked, and a tiny probe is run, whose result
    is `result`.
    """
    seen: dict[str, Any] = {
        "result": result(),
        "collecting": [],
        "checked": [],
        "meter": Meter(0.75),
    }
    monkeypatch.setattr(
        meter_module,
        "open_meter",
        lambda device: seen.setdefault("device", device) and seen["meter"],
    )
    monkeypatch.setattr(health, "check_products", seen["checked"].append)

    def serve(made: Any, request: ProbeRequest) -> Any:
        seen["collecting"].append(gc.isenabled())
        seen["frozen"] = gc.get_freeze_count()
        seen["before"] = (made._served, made._empty_gib, made._limit_gib, made.log)
        seen["request"], made._served, made._residents = request, 1, {None: Base(0.5)}
        return seen["result"], True

    monkeypatch.setattr(worker.Worker, "serve", serve)
    return seen


@pytest.mark.parametrize(("capability", "bf16"), [("7.5", False), ("8.0", True)])
def test_a_worker_starts_with_a_tiny_probe_of_which_nothing_is_kept(
    starting: dict[str, Any], capability: str, bf16: bool
) -> None:
    """What libraries hold from then on is context. Nothing is collected while they load."""
    starting["meter"].capability = capability
    frozen, sent = gc.get_freeze_count(), list[Any]()
    made = worker.Worker("cuda", sent.append, "scratch")
    assert starting["device"] == "cuda" and starting["checked"] == ["cpu"]
    assert starting["request"] == tiny_request("cuda", 24.0, bf16=bf16)
    assert starting["before"] == (0, 0.0, 24.0, None) and starting["collecting"] == [False]
    assert gc.isenabled() and starting["frozen"] > frozen
    assert (made._served, made._residents, made._empty_gib) == (0, {}, 0.75)
    assert (made._send, made._scratch) == (sent.append, "scratch")
    assert starting["meter"].said[-1] == "settle"


def test_a_worker_whose_tiny_probe_fails_does_not_start(starting: dict[str, Any]) -> None:
    starting["result"] = result(outcome=Outcome.CRASH, reason="no kernel")
    with pytest.raises(RuntimeError, match="a tiny warm-up probe failed: no kernel"):
        worker.Worker("cuda", lambda **_: None)
    gc.enable()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`main` in this process, on one end of a channel.

    The other end sends these messages and gets its answers.
    """
    seen: dict[str, Any] = {"logs": [], "made": []}
    monkeypatch.setattr(
        channel, "die_with_parent", lambda parent: seen.setdefault("parent", parent)
    )
    monkeypatch.setattr(
        channel,
        "take_group_along",
        lambda handle, scratch: seen.setdefault("group", (handle, scratch)),
    )
    monkeypatch.setattr(worker, "redirect_output", lambda target: seen["logs"].append(target))
    monkeypatch.setattr(
        worker, "_describe", lambda model, send: send(event="described", shape=model)
    )
    monkeypatch.setattr(
        worker, "_measure_rates", lambda measure, send: send(event="rates", rates=measure())
    )
    registered = lambda number, all_threads=False: seen.setdefault("stacks", (number, all_threads))  # noqa: E731
    monkeypatch.setattr(channel.faulthandler, "register", registered)
    monkeypatch.setattr(worker, "seconds_since_start", lambda: 9.5)
    monkeypatch.setattr(worker.os, "dup", {2: 77}.__getitem__)

    class Made:
        def __init__(self, device: str, send: Any, scratch: str) -> None:
            self.device = device
            seen["made"].append(self)
            seen["scratch"] = scratch
            send(event="phase", phase=Phase.LOAD)
            self.meter = SimpleNamespace(
                fingerprint=lambda: FINGERPRINT, memory_gib=lambda: 24.0, context_gib=lambda: 0.5
            )
            self.others_are_stuck = False

        def serve(self, request: ProbeRequest) -> Any:
            seen["served"], seen["log"], seen["trace"] = request, self.log, self.trace
            self.micro_profile = PROFILE if self.trace else None
            return result(request.config), False

        def rates(self) -> str:
            return self.device

        def collectives(self, address: RankAddress, num_ranks: int) -> str:
            return f"rank {address.number} of {num_ranks} at {address.meeting}"

    monkeypatch.setattr(worker, "Worker", Made)
    ours, theirs = socket.socketpair()

    def run(device: str, *messages: Any) -> tuple[dict[str, Any], list[Any]]:
        ours.sendall("".join(json.dumps(message) + "\n" for message in messages).encode())
        ours.shutdown(socket.SHUT_WR)
        handle = theirs.detach()
        monkeypatch.setattr(sys, "argv", ["worker", str(handle), device, "41", "scratch"])
        worker.main()
        assert seen["group"] == (handle, "scratch")
        # What was sent has arrived, since nobody closes the channel before `main` ends.
        lines = ours.recv(1 << 20).decode().splitlines()
        return seen, [json.loads(line) for line in lines]

    yield run
    ours.close()


# The channel is closed when `main` ends, which a process does not outlive.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_a_worker_measures_together_with_others(served: Any) -> None:
    _, answers = served("cpu", {"collectives": 4, "seat": {"number": 2, "meeting": "here"}})
    assert answers[3:] == [{"event": "rates", "rates": "rank 2 of 4 at here"}]


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_a_worker_answers_one_message_after_another(served: Any) -> None:
    data = to_data(replace(REQUEST, depth=2))
    seen, answers = served(
        "cpu", {"describe": {"a": 1}}, {"rates": True}, {"request": data, "log": "one.log"}
    )
    assert answers[:2] == [
        {"event": "phase", "phase": "start"},
        {"event": "phase", "phase": "load"},
    ]
    known = {"memory_gib": 24.0, "context_gib": 0.5, "seconds": 9.5}
    assert answers[2] == {"event": "ready", "fingerprint": to_data(FINGERPRINT)} | known
    assert answers[3:5] == [
        {"event": "described", "shape": {"a": 1}},
        {"event": "rates", "rates": "cpu"},
    ]
    assert answers[5:] == [
        {"event": "result", "result": to_data(result(REQUEST.config)), "reusable": False}
    ]
    assert seen["served"] == replace(REQUEST, depth=2) and seen["log"] == "one.log"
    assert seen["trace"] is None and seen["logs"] == ["one.log", 77]  # its own log again
    assert (seen["parent"], seen["scratch"], seen["stacks"]) == (
        41,
        "scratch",
        (signal.SIGUSR1, True),
    )


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.parametrize(
    ("error", "unhealthy"), [(ImportError("no torch"), False), (health.Miscalculated("bad"), True)]
)
def test_a_worker_that_cannot_start_says_why(
    served: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    unhealthy: bool,
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(worker, "Worker", fail)
    seen, answers = served("cpu", {"rates": True})
    reason = f"{type(error).__name__}: {error}"
    assert answers == [
        {"event": "phase", "phase": "start"},
        {"event": "broken", "reason": reason, "unhealthy": unhealthy},
    ]
    assert not seen["logs"] and reason in capsys.readouterr().err


def test_a_log_is_made_for_its_user_to_write_and_for_others_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was printed before goes to where it was printed to."""
    flushed: list[str] = []
    stream = lambda name: SimpleNamespace(flush=lambda: flushed.append(name))  # noqa: E731
    monkeypatch.setattr(channel.sys, "stdout", stream("out"))
    monkeypatch.setattr(channel.sys, "stderr", stream("err"))
    monkeypatch.setattr(worker.os, "dup2", lambda handle, number: flushed.append(str(number)))
    before = os.umask(0)
    try:
        channel.redirect_output(str(tmp_path / "log"))
    finally:
        os.umask(before)
    assert (
        flushed == ["out", "err", "1", "2"] and (tmp_path / "log").stat().st_mode & 0o777 == 0o644
    )


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_a_worker_adds_the_profile_that_was_asked_for(served: Any) -> None:
    data = to_data(REQUEST)
    seen, answers = served("cpu", {"request": data, "log": "one.log", "trace": "t.gz"})
    assert seen["trace"] == "t.gz" and answers[-1]["profile"] == to_data(PROFILE)
