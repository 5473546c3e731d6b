"""Faults on purpose, to see what becomes of a study: AUTOTUNE_INJECT=FAULT[@PHASE][:TRIAL],... with commas between.

FAULT is one of FAULTS. PHASE is load, first_step (where none is named), steady, evaluate or save. TRIAL is the number
of the one trial that is struck, else every probe is. Without the variable nothing here does anything.
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
    THROTTLE: lambda: None,  # the parent, which reads the sensors, reads that the card was hot
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
    """What strikes the probe that writes this log, at the start of each phase; None where nothing is asked for."""
    asked = [(phase, FAULTS[fault]) for fault, phase in _asked(log)]

    def strike(phase: Phase) -> None:
        for when, fault in asked:
            if phase is when:
                fault()

    return strike if asked else None


def throttles(log: str) -> bool:
    """Whether the card is to seem slowed down by heat to the probe that writes this log."""
    return any(fault == THROTTLE for fault, _ in _asked(log))


def _asked(log: str) -> list[tuple[str, Phase]]:
    """The faults for the probe that writes this log, and the phase in which each strikes."""
    asked = []
    for one in filter(None, os.environ.get(VARIABLE, "").split(",")):
        match = re.fullmatch(r"([a-z-]+)(?:@([a-z_]+))?(?::([0-9]+))?", one)
        if match is None or match[1] not in FAULTS:
            raise ValueError(f"{VARIABLE}: {one!r} is not FAULT[@PHASE][:TRIAL] with one of {', '.join(FAULTS)}")
        if match[3] is None or Path(log).name.startswith(f"trial-{int(match[3]):04d}"):
            asked.append((match[1], Phase(match[2] or Phase.FIRST_STEP)))
    return asked
