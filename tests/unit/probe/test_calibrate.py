"""Calibrating: the pace of a host from two depths, and a short training against what the formula
expects of it.
"""

from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.api import calibrate
from autotune.catalog import resolve_device, resolve_model
from autotune.core import nvml
from autotune.core.errors import EnvironmentProblem, UsageError
from autotune.core.nvml import GpuInfo
from autotune.core.probe_types import CollectiveRates, Outcome, ProbeRequest, ProbeResult, Rung
from autotune.core.train_config import TrainConfig
from autotune.prediction.step_time import estimate_step_time, host_of
from autotune.prediction.transfer import REFERENCE, speed_transfer
from autotune.probe import calibrate as module
from autotune.probe.calibrate import NARROW, ROWS, TRAINED, TRAINED_DEPTHS, LayerProbes
from tests.helpers.factories import FINGERPRINT, calibration, measurement, result
from tests.helpers.replay import ReplayProber

A10, T4, H200, CPU = map(resolve_device, ("a10", "t4", "h200", "cpu"))


def probes(
    answers: Any, device: Any = A10, memory_gib: float = 22.0
) -> tuple[LayerProbes, ReplayProber]:
    prober = ReplayProber(answers)
    return LayerProbes(prober, device, memory_gib, Path("logs")), prober  # type: ignore[arg-type]


def host(layer_ms: float, rest_ms: float = 5.0, **changes: Any) -> Any:
    """A host that needs so long for a layer, and for what is beside the layers."""

    def answer(request: ProbeRequest) -> ProbeResult:
        host_s = (layer_ms * (request.depth or 0) + rest_ms) / 1000
        return result(
            request.config, measurement=measurement(host_s, **{"host_micro_s": host_s} | changes)
        )

    return answer


@pytest.mark.parametrize("changes", [{}, {"host_micro_s": None}], ids=["GPU", "CPU"])
def test_the_time_of_a_layer_is_the_slope_between_two_depths(changes: dict[str, Any]) -> None:
    asked, prober = probes(host(7.5, **changes))
    assert asked.layer_ms() == pytest.approx(7.5)
    assert [request.model for request in prober.requests] == [NARROW, NARROW]
    assert all(
        request.config.checkpointing == "full" and request.config.compile == "none"
        for request in prober.requests
    )


def test_on_a_cpu_the_shortest_micro_batch_counts() -> None:
    def answer(request: ProbeRequest) -> ProbeResult:
        micro_s = 0.0075 * (request.depth or 0)
        timed = measurement(micro_step_s=(3 * micro_s, micro_s, 2 * micro_s), host_micro_s=None)
        return result(request.config, measurement=timed)

    assert probes(answer)[0].layer_ms() == pytest.approx(7.5)


def test_a_disturbed_host_gives_no_impossible_time() -> None:
    """All that is timed is the ten layers, in 50 ms: a layer takes more than half of a tenth of it,
    and no more.
    """
    for first_s in (0.2, 0.0001):
        times = iter([first_s, 0.05])

        def answer(request: ProbeRequest, times: Any = times) -> ProbeResult:
            return result(request.config, measurement=measurement(host_micro_s=next(times)))

        assert 2.5 <= probes(answer)[0].layer_ms() <= 5.0


def test_a_host_on_which_no_layer_trains_is_a_problem_of_the_machine() -> None:
    crashed = lambda request: result(request.config, Outcome.CRASH, reason="it broke")  # noqa: E731
    with pytest.raises(EnvironmentProblem, match="a probe failed: it broke"):
        probes(crashed)[0].layer_ms()


def card(device: Any, times: float, **changes: Any) -> Any:
    """A card that trains so many times as fast as its calibration leads to expect, and whose host
    hides behind it.
    """
    made = calibration(device.name, reference=None, layer_ms=0.1)
    model = resolve_model(TRAINED)

    def answer(request: ProbeRequest) -> ProbeResult:
        assert request.model == model.config
        depth = replace(model, config=model.config | {"num_hidden_layers": request.depth})
        by_formula = estimate_step_time(depth, request.config, host_of(made))
        assert by_formula is not None
        to_card = speed_transfer(
            resolve_device(REFERENCE), device, calibration=made, side=by_formula.side
        )
        assert to_card is not None
        seconds = by_formula.convert(to_card).device_s / times
        return result(
            request.config, measurement=measurement(seconds, **{"host_micro_s": 0.001} | changes)
        )

    return made, answer


@pytest.mark.parametrize("device", [A10, T4, H200], ids=lambda device: device.name)
@pytest.mark.parametrize("times", [1.0, 0.6])
def test_the_training_is_compared_with_what_is_expected(device: Any, times: float) -> None:
    made, answer = card(device, times)
    asked, prober = probes(answer, device)
    assert asked.reference(made) == pytest.approx(times, rel=0.01)
    assert [request.depth for request in prober.requests] == list(TRAINED_DEPTHS)
    assert len({request.config for request in prober.requests}) == 1


def test_there_are_as_many_rows_as_the_device_needs_to_set_the_pace() -> None:
    rows = []
    for layer_ms in (0.1, 20.0, 2000.0):
        made, answer = card(A10, 1.0)
        asked, prober = probes(answer, memory_gib=80.0)
        asked.reference(replace(made, layer_ms=layer_ms))
        rows.append(prober.configs[0].micro_batch_size)
    assert rows[0] == ROWS[0] < rows[1] < rows[2] == ROWS[-1]


def test_where_nothing_can_be_compared_there_is_no_number() -> None:
    made, answer = card(A10, 1.0)
    assert probes(answer, memory_gib=2.0)[0].reference(made) is None  # it does not fit
    # no formula knows it
    assert probes(answer, CPU)[0].reference(replace(made, device="cpu")) is None
    _, slow_host = card(A10, 1.0, host_micro_s=60.0)
    assert probes(slow_host)[0].reference(made) is None  # the host sets the pace
    no_memory = lambda request: result(request.config, Outcome.OOM)  # noqa: E731
    assert probes(no_memory)[0].reference(made) is None


def test_another_card_than_the_one_that_is_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    here = GpuInfo(
        index=0,
        uuid="GPU-0",
        name="NVIDIA H200",
        memory_gib=140.4,
        used_gib=0.0,
        compute_capability="9.0",
        driver="580",
        processes=(),
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(nvml, "list_gpus", lambda: [here])
    with pytest.raises(
        UsageError, match="a10 is not in this machine, which has h200-sxm"
    ) as caught:
        calibrate("a10")
    assert caught.value.remedy == "omit --gpu to calibrate the GPU of this machine"


def test_a_card_without_bf16_is_measured_in_fp16() -> None:
    asked, prober = probes(host(7.5), T4)
    asked.layer_ms()
    assert {config.precision for config in prober.configs} == {"fp16_mixed"}


def test_a_request_leaves_room_and_times_long_where_the_shortest_counts() -> None:
    asked, prober = probes(host(7.5))
    asked.layer_ms()
    for request in prober.requests:
        assert (request.memory_gib, request.headroom, request.device) == (22.0, 0.05, "cuda")
        assert (request.micro_steps, request.rung, request.min_timed_s) == (2, Rung.SHALLOW, 2.0)
        assert (request.config.micro_batch_size, request.config.seq_len) == (1, 16)
    assert [request.depth for request in prober.requests] == [2, 10]
    made, answer = card(A10, 1.0)
    asked, prober = probes(answer)
    asked.reference(made)
    assert {request.min_timed_s for request in prober.requests} == {1.0}


class Machine(ReplayProber):
    """A prober of a machine with 20 GiB, in place of the one that starts a worker."""

    fingerprint = FINGERPRINT
    memory_gib = 20.0

    def rates(self) -> Any:
        return calibration().rates

    def __enter__(self) -> "Machine":
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize("device", [A10, CPU], ids=lambda device: device.name)
@pytest.mark.parametrize("held_gib", [0.0, 1.5])
def test_a_calibration_is_what_was_measured_and_says_what_it_does(
    device: Any, held_gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a CPU no formula knows what a training should take."""
    is_gpu = device is A10
    started: list[Any] = []

    def start(kind: str, logs: Path, *, should_stop: Any) -> Machine:
        started.append((kind, should_stop))
        return Machine(host(7.5))

    monkeypatch.setattr(module, "WorkerProber", start)
    monkeypatch.setattr(module, "disk_mb_s", lambda folder: 321.0)
    monkeypatch.setattr(LayerProbes, "layer_ms", lambda probes: 0.1)
    monkeypatch.setattr(
        LayerProbes, "reference", lambda probes, made: made.layer_ms * probes._memory_gib
    )
    said: list[str] = []
    stop = lambda: False  # noqa: E731
    monkeypatch.setattr(module, "visible", lambda: [0])
    target: Any = SimpleNamespace(
        device=device,
        held_by_others_gib=held_gib,
        card=object() if is_gpu else None,
        memory_cap_gib=lambda memory_gib: memory_gib - 1.0,
    )
    found = module.calibrate(target, say=said.append, should_stop=stop)
    assert started == [("cuda" if is_gpu else "cpu", stop)]
    module.calibrate(target, say=lambda line: None)
    assert not started[1][1]()  # nobody stops it
    assert (found.device, found.fingerprint, found.rates) == (
        device.name,
        FINGERPRINT,
        calibration().rates,
    )
    assert (found.layer_ms, found.disk_mb_s, found.day) == (0.1, 321.0, date.today())
    assert found.reference == (pytest.approx(1.9) if is_gpu else None)
    warning = "warning: other processes hold 1.50 GiB of the GPU's memory and may slow the GPU down"
    warned = [warning] * (held_gib > 0)
    assert said == [
        *warned,
        f"{device.name}: starting a worker",
        "measuring the disk",
        "measuring matrix products, copies and the link to the host",
        "measuring the host's time to issue a layer's kernels",
        *["timing a short training"] * is_gpu,
    ]


@pytest.mark.parametrize(("num_gpus", "problem"), [(1, None), (4, None), (4, "one is busy")])
def test_several_gpus_are_measured_together(
    num_gpus: int, problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured of one of them stands where that fails."""
    rates = CollectiveRates(num_gpus=4, gather_gb_s=300.0, scatter_gb_s=290.0, reduce_gb_s=200.0)

    class Pool:
        def __init__(self, kind: str, number: int, logs: Path, **options: Any) -> None:
            assert (kind, number) == ("cuda", 4)

        def __enter__(self) -> "Pool":
            return self

        def __exit__(self, *_: object) -> None:
            """Nothing was opened."""

        def collectives(self) -> tuple[CollectiveRates, ...]:
            if problem:
                raise EnvironmentProblem(problem, remedy="wait")
            return (rates,)

    monkeypatch.setattr(module, "RankPool", Pool)
    monkeypatch.setattr(module, "WorkerProber", lambda *_, **options: Machine(host(7.5)))
    monkeypatch.setattr(module, "visible", lambda: list(range(num_gpus)))
    monkeypatch.setattr(module, "calibrate_worker", lambda prober, target, say: calibration())
    target: Any = SimpleNamespace(device=A10, held_by_others_gib=0.0, card=object())
    said: list[str] = []
    found = module.calibrate(target, say=said.append)
    assert found == replace(
        calibration(), collectives=(rates,) if num_gpus > 1 and not problem else ()
    )
    assert said[1:] == ["measuring data rates between 4 GPUs"] * (num_gpus > 1) + [
        "warning: one is busy"
    ] * bool(problem)


def test_what_is_probed_by_hand() -> None:
    """A layer has as many kernels as one of Llama's, and as little arithmetic as can be; rows are
    of 1,024 tokens.
    """
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {
        "num_hidden_layers": 12,
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": 256,
    }
    assert {"model_type": "llama"} | heads | sizes == NARROW
    assert (TRAINED, TRAINED_DEPTHS, ROWS) == ("mistral-7b", (2, 6), (1, 2, 4, 8, 16))


@pytest.mark.parametrize(("peak_gib", "fits"), [(17.0, True), (17.19, False), (17.5, False)])
def test_what_fits_leaves_the_headroom_and_the_context(
    monkeypatch: pytest.MonkeyPatch, peak_gib: float, fits: bool
) -> None:
    """Of 20 GiB 5 % stay free, and the context takes 0.81.

    Six of the model's layers are counted.
    """
    asked: list[Any] = []

    def needs(model: Any, config: Any) -> Any:
        asked.append((model.config["num_hidden_layers"], model.params))
        return SimpleNamespace(peak_reserved_gib=peak_gib)

    monkeypatch.setattr(module, "memory_breakdown", needs)
    monkeypatch.setattr(module, "CONTEXT_GIB", 1.81)
    made = LayerProbes(None, A10, 20.0, Path("logs"))  # type: ignore[arg-type]
    assert made._fits(TrainConfig()) is fits and asked == [(6, None)]
    monkeypatch.setattr(module, "memory_breakdown", lambda model, config: None)
    assert not made._fits(TrainConfig())
