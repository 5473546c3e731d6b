"""Measure this machine for the formulas: rates of its device, the pace of its host, and one short training.

The parent's side: the worker measures the device, and everything else is probes of a few layers. It takes about 30 s.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from autotune.catalog import DeviceSpec, resolve_device, resolve_model
from autotune.core.errors import EnvironmentProblem
from autotune.core.machine import disk_mb_s, host_memory_gib, num_cores, processor_name
from autotune.core.nvml import visible
from autotune.core.probe_types import ProbeRequest, ProbeResult, Rung
from autotune.core.scratch import scratch_directory
from autotune.core.train_config import TrainConfig
from autotune.core.units import fmt_gib
from autotune.prediction.depth_extrapolation import extrapolate
from autotune.prediction.memory_formula import CONTEXT_GIB, memory_breakdown
from autotune.prediction.step_time import (
    StepTimeEstimate,
    divide_step_time,
    estimate_step_time,
    host_of,
)
from autotune.prediction.transfer import REFERENCE, speed_transfer
from autotune.probe.rank_pool import RankPool
from autotune.probe.supervisor import WorkerProber
from autotune.problem.calibration import Calibration
from autotune.problem.target import Target

HEADROOM = 0.05
# A layer of this model has as many kernels as one of Llama's or Mistral's, and so little arithmetic in each that any
# device has done it before the host has issued the next.
NARROW: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 12,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
NARROW_DEPTHS, NARROW_TIMED_S = (
    (2, 10),
    2.0,
)  # long, since the shortest of many counts on a host that others share
# The model of the short training: the formula of step time was fitted on it, and a few of its layers fit any card.
TRAINED, TRAINED_DEPTHS = "mistral-7b", (2, 6)
ROWS = (1, 2, 4, 8, 16)  # of 1,024 tokens
DEVICE_LEADS = (
    2.0  # times as long as the host the device should need, so that the device's time is seen
)

Say = Callable[[str], None]


def calibrate(
    target: Target, *, say: Say, should_stop: Callable[[], bool] = lambda: False
) -> Calibration:
    """Measure the device of this machine and its host. `say` gets a line for each part.

    Raises EnvironmentProblem and TooManyFailures where no worker can probe here, and Cancelled if `should_stop`.
    """
    if held_gib := target.held_by_others_gib:
        say(f"warning: other processes hold {fmt_gib(held_gib)} of the GPU, and may slow it down")
    say(f"{target.device.name}: a worker starts")
    kind = "cpu" if target.card is None else "cuda"
    with scratch_directory() as folder:
        with WorkerProber(kind, Path(folder), should_stop=should_stop) as prober:
            made = calibrate_by(prober, target, say=say)
        if kind == "cpu" or (number := len(visible())) < 2:
            return made
        say(f"what {number} GPUs send each other")
        try:
            with RankPool(kind, number, Path(folder), should_stop=should_stop) as pool:
                return replace(made, collectives=pool.collectives())
        except EnvironmentProblem as problem:  # what was measured of one of them stands
            say(f"warning: {problem}")
            return made


def calibrate_by(prober: WorkerProber, target: Target, *, say: Say) -> Calibration:
    """The same by a worker that there is."""
    device, fingerprint = target.device, prober.fingerprint
    say("disk")
    disk = disk_mb_s(Path.cwd())
    probes = LayerProbes(prober, device, target.memory_cap_gib(prober.memory_gib), prober.logs)
    say("products of matrices, copies, the link")
    rates = prober.rates()
    say("the host's time to issue a layer")
    made = Calibration(
        device=device.name,
        fingerprint=fingerprint,
        rates=rates,
        layer_ms=probes.layer_ms(),
        reference=None,
        processor=processor_name(),
        cores=num_cores(),
        memory_gib=host_memory_gib(),
        disk_mb_s=disk,
        day=date.today(),
    )
    if device.kind == "cpu":  # no formula knows it
        return made
    say("a short training")
    return replace(made, reference=probes.reference(made))


class LayerProbes:
    """The probes of a few layers of two models, in `memory_gib` of a device; their output goes to a file in `logs`."""

    def __init__(
        self, prober: WorkerProber, device: DeviceSpec, memory_gib: float, logs: Path
    ) -> None:
        self._prober = prober
        self._device = device
        self._memory_gib = memory_gib
        self._logs = logs
        self._precision = device.usual_precision

    def layer_ms(self) -> float:
        """Milliseconds of the host for a layer, from the line through two depths. Raises EnvironmentProblem."""
        config = TrainConfig(micro_batch_size=1, seq_len=16, precision=self._precision)
        times = []
        for depth in NARROW_DEPTHS:
            result = self._probe(NARROW, config, depth, NARROW_TIMED_S)
            if result.measurement is None:
                raise EnvironmentProblem(
                    f"a probe failed: {result.reason}",
                    remedy="`autotune doctor` checks this machine",
                )
            # On a CPU issuing is computing.
            times.append(result.measurement.host_micro_s or min(result.measurement.micro_step_s))
        (few, many), (low, high) = NARROW_DEPTHS, times
        # A disturbed probe may give any line; a layer takes some of the time of those that were probed.
        slope = (high - low) / (many - few)
        return 1000 * min(max(slope, 0.5 * high / many), high / many)

    def reference(self, calibration: Calibration) -> float | None:
        """The speed of a short training over what the formula expects of the calibrated rates.

        None where no formula knows the card, where the training does not fit, or where the host sets its pace.
        """
        training = self._training(calibration)
        if training is None:
            return None
        config, expected = training
        model, found = resolve_model(TRAINED), []
        for depth in TRAINED_DEPTHS:
            measured = self._probe(model.config, config, depth).measurement
            if measured is None:
                return None
            found.append((depth, measured))
        whole = extrapolate(found, model.num_layers).measurement
        return (
            None
            if whole.host_bound
            else expected.device_s / divide_step_time(whole, expected).device_s
        )

    def _training(self, calibration: Calibration) -> tuple[TrainConfig, StepTimeEstimate] | None:
        """The fewest rows with which the device sets the pace, else the most that fit; and their expected time."""
        model, reference = resolve_model(TRAINED), resolve_device(REFERENCE)
        chosen = None
        for rows in ROWS:
            config = TrainConfig(micro_batch_size=rows, precision=self._precision)
            by_formula = estimate_step_time(model, config, host_of(calibration))
            if by_formula is None or not self._fits(config):
                break
            transfer = speed_transfer(
                reference, self._device, calibration=calibration, side=by_formula.side
            )
            if transfer is None:
                break
            expected = by_formula.on(transfer)
            chosen = config, expected
            if expected.device_s > DEVICE_LEADS * expected.host_s:
                break
        return chosen

    def _fits(self, config: TrainConfig) -> bool:
        """Whether the deeper of the truncated models trains in the memory."""
        model = resolve_model(TRAINED)
        layers = replace(
            model, config=model.config | {"num_hidden_layers": TRAINED_DEPTHS[-1]}, params=None
        )
        need = memory_breakdown(layers, config)
        return (
            need is not None
            and need.peak_reserved_gib < (1 - HEADROOM) * self._memory_gib - CONTEXT_GIB
        )

    def _probe(
        self, model: dict[str, Any], config: TrainConfig, depth: int, timed_s: float = 1.0
    ) -> ProbeResult:
        request = ProbeRequest(
            config=config,
            model=model,
            device=self._device.kind,
            memory_gib=self._memory_gib,
            headroom=HEADROOM,
            micro_steps=2,
            rung=Rung.SHALLOW,
            depth=depth,
            min_timed_s=timed_s,
            flash=self._device.has_flash,
        )
        return self._prober.probe(request, self._logs / "probe.log")
