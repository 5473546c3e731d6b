"""Measures this machine for the formulas: device rates, host speed, and one short training.

This module runs in the parent process. The worker measures the device's rates. Probes of a few
layers measure the speed of the host and of a short training. A calibration takes about 30 s.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from autotune.catalog import DeviceSpec, resolve_device, resolve_model
from autotune.core.errors import EnvironmentProblem
from autotune.core.machine import disk_mb_s, host_memory_gib, num_cores, processor_name
from autotune.core.memory_budget import HEADROOM, memory_limit_gib
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

# A layer of this narrow model launches as many kernels as a layer of Llama or Mistral. Each kernel
# has so little arithmetic that any device finishes the kernel before the host issues the next one.
NARROW: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 12,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
NARROW_DEPTHS = (2, 10)
# The seconds of timed steps in a probe of the model NARROW. On a shared host, only the shortest of
# many step times is reliable.
NARROW_TIMED_S = 2.0
# The model for the short training. The formula of step time was fitted to measurements of this
# model and others, and a few layers of this model fit into any card's memory.
TRAINED = "mistral-7b"
TRAINED_DEPTHS = (2, 6)
ROWS = (1, 2, 4, 8, 16)  # micro batch sizes to try, in rows of 1,024 tokens
# The device's time for a step must exceed the host's time by this factor. Otherwise the measured
# step time would be the host's time, not the device's.
DEVICE_LEADS = 2.0

Say = Callable[[str], None]


def calibrate(
    target: Target, *, say: Say, should_stop: Callable[[], bool] = lambda: False
) -> Calibration:
    """Measure this machine's device and processors.

    `say` receives a line of progress for each step.

    Raises EnvironmentProblem and TooManyFailures if no worker can probe here, and Cancelled if
    `should_stop` returns True.
    """
    if held_gib := target.held_by_others_gib:
        say(
            f"warning: other processes hold {fmt_gib(held_gib)} of the GPU's memory and may slow"
            " the GPU down"
        )

    say(f"{target.device.name}: starting a worker")
    kind = "cpu" if target.card is None else "cuda"

    with scratch_directory() as folder:
        with WorkerProber(kind, Path(folder), should_stop=should_stop) as prober:
            made = calibrate_worker(prober, target, say=say)

        if kind == "cpu" or (number := len(visible())) < 2:
            return made
        say(f"measuring data rates between {number} GPUs")
        try:
            with RankPool(kind, number, Path(folder), should_stop=should_stop) as pool:
                return replace(made, collectives=pool.collectives())
        # If the data rates between GPUs cannot be measured, the measurements of one GPU stay valid.
        except EnvironmentProblem as problem:
            say(f"warning: {problem}")
            return made


def calibrate_worker(prober: WorkerProber, target: Target, *, say: Say) -> Calibration:
    """Measure this machine with a running worker."""
    device, fingerprint = target.device, prober.fingerprint

    say("measuring the disk")
    disk = disk_mb_s(Path.cwd())
    probes = LayerProbes(prober, device, target.memory_cap_gib(prober.memory_gib), prober.logs)

    say("measuring matrix products, copies and the link to the host")
    rates = prober.rates()

    say("measuring the host's time to issue a layer's kernels")
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
    # The formula of step time does not cover CPUs, so there is no short training.
    if device.kind == "cpu":
        return made
    say("timing a short training")
    return replace(made, reference=probes.reference(made))


class LayerProbes:
    """Probes a few layers of the models NARROW and TRAINED.

    The memory limit is `memory_gib`, and the logs go to `logs`.
    """

    def __init__(
        self, prober: WorkerProber, device: DeviceSpec, memory_gib: float, logs: Path
    ) -> None:
        self._prober = prober
        self._device = device
        self._memory_gib = memory_gib
        self._logs = logs
        self._precision = device.usual_precision

    def layer_ms(self) -> float:
        """The host's milliseconds to issue the kernels of one layer, from probes of two depths.

        Raises EnvironmentProblem.
        """
        config = TrainConfig(micro_batch_size=1, seq_len=16, precision=self._precision)
        times = []
        for depth in NARROW_DEPTHS:
            result = self._probe(NARROW, config, depth, NARROW_TIMED_S)
            if result.measurement is None:
                raise EnvironmentProblem(
                    f"a probe failed: {result.reason}",
                    remedy="`autotune doctor` checks this machine",
                )
            # On a CPU, the time to issue an operation includes its computation.
            times.append(result.measurement.host_micro_s or min(result.measurement.micro_step_s))

        # Other load on the host may distort `slope`, the time per layer from two probes. So `slope`
        # is clamped to between 50 and 100 % of the deeper probe's time per layer.
        few, many = NARROW_DEPTHS
        low, high = times
        slope = (high - low) / (many - few)
        return 1000 * min(max(slope, 0.5 * high / many), high / many)

    def reference(self, calibration: Calibration) -> float | None:
        """The measured speed of a short training, divided by its predicted speed.

        The formula of step time predicts the speed from the calibrated rates.

        The result is None if no formula covers the card, or the training does not fit or is
        CPU-bound.
        """
        training = self._training(calibration)
        if training is None:
            return None
        config, expected = training

        model = resolve_model(TRAINED)
        found = []
        for depth in TRAINED_DEPTHS:
            measured = self._probe(model.config, config, depth).measurement
            if measured is None:
                return None
            found.append((depth, measured))

        whole = extrapolate(found, model.num_layers).measurement
        if whole.host_bound:
            return None
        return expected.device_s / divide_step_time(whole, expected).device_s

    def _training(self, calibration: Calibration) -> tuple[TrainConfig, StepTimeEstimate] | None:
        """The configuration of the short training, and its predicted step time.

        The configuration has the smallest micro batch with which the training is GPU-bound or, if
        there is none, the largest micro batch that fits.
        """
        model = resolve_model(TRAINED)
        reference = resolve_device(REFERENCE)
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

            expected = by_formula.convert(transfer)
            chosen = config, expected
            if expected.device_s > DEVICE_LEADS * expected.host_s:
                break
        return chosen

    def _fits(self, config: TrainConfig) -> bool:
        """Whether the memory formula predicts that the deeper of the two truncated models fits."""
        model = resolve_model(TRAINED)
        layers = replace(
            model, config=model.config | {"num_hidden_layers": TRAINED_DEPTHS[-1]}, params=None
        )
        need = memory_breakdown(layers, config)
        limit_gib = memory_limit_gib(self._memory_gib, HEADROOM, taken_gib=CONTEXT_GIB)
        return need is not None and need.peak_reserved_gib < limit_gib

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
