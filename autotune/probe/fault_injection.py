"""Faults on purpose, which test how a study deals with them: AUTOTUNE_INJECT=FAULT[@PHASE][:TRIAL], comma-separated.

FAULT is one of FAULTS. PHASE is load, first_step (the default), steady, evaluate or save. TRIAL is the number of the
one trial to disturb; by default every probe is. Without the variable nothing happens.
"""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

from autotune.core.probe_types import Phase

VARIABLE = "AUTOTUNE_INJECT"
SLOW_S = 5.0
THROTTLE = "throttle"


def _oom() -> None:
    import torch

    raise torch.OutOfMemoryError("injected: out of memory. Tried to allocate 2.00 GiB")


def _host_oom() -> None:
    raise MemoryError("injected: the host's memory ran out")


def _nan() -> None:
    from autotune.probe.harness import BadLoss

    raise BadLoss("injected: the loss went nan")


def _crash() -> None:
    raise RuntimeError("injected: CUDA error: an illegal memory access was encountered")


def _ecc() -> None:
    raise RuntimeError("injected: CUDA error: uncorrectable ECC error encountered")


def _hang() -> None:
    while True:
        time.sleep(1)


def _signal(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


FAULTS: dict[str, Callable[[], None]] = {
    "oom": _oom,
    "host-oom": _host_oom,
    "nan": _nan,
    "crash": _crash,
    "ecc": _ecc,
    THROTTLE: lambda: None,  # it acts in the parent, whose sensors then report a hot card
    "slow": lambda: time.sleep(SLOW_S),
    "hang": _hang,
    "exit": lambda: os._exit(3),
    "sigstop": _signal(signal.SIGSTOP),
    "sigkill": _signal(signal.SIGKILL),
    "sigsegv": _signal(signal.SIGSEGV),
    "sigabrt": _signal(signal.SIGABRT),
    "sigbus": _signal(signal.SIGBUS),
}


def injected(log: str) -> Callable[[Phase], None] | None:
    """What to call at the start of each phase of the probe that writes this log; None without faults for it."""
    requested = [(phase, FAULTS[fault]) for fault, phase in _requested(log)]

    def strike(phase: Phase) -> None:
        for fault_phase, fault in requested:
            if phase is fault_phase:
                fault()

    return strike if requested else None


def throttles(log: str) -> bool:
    """Whether the sensors are to report heat during the probe that writes this log."""
    return any(fault == THROTTLE for fault, _ in _requested(log))


def _requested(log: str) -> list[tuple[str, Phase]]:
    """The faults for the probe that writes this log, each with its phase."""
    requested = []
    for entry in filter(None, os.environ.get(VARIABLE, "").split(",")):
        match = re.fullmatch(r"([a-z-]+)(?:@([a-z_]+))?(?::([0-9]+))?", entry)
        if match is None or match[1] not in FAULTS:
            raise ValueError(f"{VARIABLE}: {entry!r} is not FAULT[@PHASE][:TRIAL] with one of {', '.join(FAULTS)}")
        if match[3] is None or Path(log).name.startswith(f"trial-{int(match[3]):04d}"):
            requested.append((match[1], Phase(match[2] or Phase.FIRST_STEP)))
    return requested
