"""Injects faults to test how a study handles them.

The environment variable AUTOTUNE_INJECT requests faults. The variable has the form
FAULT[@PHASE][:TRIAL][#RANK]; commas separate several faults. FAULT is a name in the constant
FAULTS. PHASE is load, first_step (the default), steady, evaluate, save or profile; in an engine for
GRPO it is load, rollout, sleep, wake or transfer. TRIAL is the
number of the only trial that gets the fault; by default every probe gets it. RANK is the only rank
that gets the fault in a probe on several GPUs; by default every rank gets it. Without the variable,
this module does nothing.
"""

import os
import re
import signal
import time
from pathlib import Path

from autotune.core.probe_types import Phase

VARIABLE = "AUTOTUNE_INJECT"
SLOW_S = 5.0
FOREVER_S = 1e6
THROTTLE = "throttle"

SIGNALS = {
    f"sig{name}": signal.Signals[f"SIG{name.upper()}"]
    for name in ("stop", "kill", "segv", "abrt", "bus")
}
CRASHES = {
    "crash": "CUDA error: an illegal memory access was encountered",
    "ecc": "CUDA error: uncorrectable ECC error encountered",
}
# THROTTLE has its effect in the parent process, whose sensors then report a hot card.
FAULTS = ("oom", "host-oom", "nan", *CRASHES, THROTTLE, "slow", "hang", "exit", *SIGNALS)


def _inject(fault: str) -> None:
    """Cause the fault in this process."""
    if fault in SIGNALS:
        os.kill(os.getpid(), SIGNALS[fault])
    elif fault in CRASHES:
        raise RuntimeError(f"injected: {CRASHES[fault]}")
    elif fault == "oom":
        import torch

        raise torch.OutOfMemoryError("injected: out of memory. Tried to allocate 2.00 GiB")
    elif fault == "host-oom":
        raise MemoryError("injected: the host's memory ran out")
    elif fault == "nan":
        from autotune.probe.harness import BadLoss

        raise BadLoss("injected: the loss went nan")
    elif fault == "slow":
        time.sleep(SLOW_S)
    elif fault == "hang":
        time.sleep(FOREVER_S)
    elif fault == "exit":
        os._exit(3)


def strike(log: str, phase: Phase, rank: int = 0) -> None:
    """Inject the faults requested for this phase and rank of the probe that writes `log`."""
    for fault, fault_phase in _requested(log, rank):
        if phase is fault_phase:
            _inject(fault)


def throttles(log: str) -> bool:
    """Whether the sensors should report heat during the probe that writes `log`."""
    return any(fault == THROTTLE for fault, _ in _requested(log))


def _requested(log: str, rank: int = 0) -> list[tuple[str, Phase]]:
    """The requested faults, with their phases, for a rank of the probe that writes `log`."""
    requested = []
    for entry in filter(None, os.environ.get(VARIABLE, "").split(",")):
        match = re.fullmatch(r"([a-z-]+)(?:@([a-z_]+))?(?::([0-9]+))?(?:#([0-9]+))?", entry)
        if match is None or match[1] not in FAULTS:
            raise ValueError(
                f"{VARIABLE}: {entry!r} is not FAULT[@PHASE][:TRIAL][#RANK] with one of "
                f"{', '.join(FAULTS)}"
            )

        matches = match[3] is None or Path(log).name.startswith(f"trial-{int(match[3]):04d}")
        if matches and match[4] in (None, str(rank)):
            requested.append((match[1], Phase(match[2] or Phase.FIRST_STEP)))
    return requested
