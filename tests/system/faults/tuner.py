"""A whole session with a `ReplayProber` in its own process, which kills itself at one of its steps.

The arguments are URL, OUT and STEP. `STEPS` holds for each step the object, the name of its
function, and the number of the call after which the process is killed. Each probe is a line of
LAUNCHED, with its digest and its rung.
"""

import json
import os
import resource
import signal
import sys
from functools import wraps
from pathlib import Path
from typing import Any

from autotune.core.probe_types import ProbeRequest, ProbeResult
from autotune.report import study_directory
from autotune.study.evaluator import Evaluator
from autotune.study.optimizer import Optimizer
from autotune.study.storage.probe_store import ProbeStore
from tests.helpers.replay import ReplayProber, machine
from tests.helpers.sessions import BASELINE, by_tokens, starter

TOTAL = 9
LAUNCHED = "launched.jsonl"
STEPS: dict[str, tuple[Any, str, int]] = {  # in the order in which one study comes to them
    "proposed a trial": (Optimizer, "ask", 3),
    "checked the memory of a trial": (Evaluator, "_gate", 2),
    "probed a trial": (ReplayProber, "probe", 2),
    "stored a result": (ProbeStore, "add", 2),
    "recorded a trial": (Optimizer, "tell", 2),
    "confirmed a finalist": (Evaluator, "confirm", 1),
    "written part of the export": (study_directory, "write_atomic", 6),
}


def arm(holder: Any, name: str, at: int) -> None:
    """Send SIGKILL to this process after the `at`-th call of the function."""
    function, calls = getattr(holder, name), [0]

    @wraps(function)
    def armed(*arguments: Any, **options: Any) -> Any:
        answer = function(*arguments, **options)
        calls[0] += 1
        if calls[0] == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    setattr(holder, name, armed)


def note_launches(file: Path) -> None:
    """Write down what is probed, before it is."""
    probe = ReplayProber.probe

    def noted(self: ReplayProber, request: ProbeRequest, log: Path) -> ProbeResult:
        with file.open("a") as lines:
            lines.write(json.dumps([request.digest, request.rung.value]) + "\n")
        return probe(self, request, log)

    setattr(ReplayProber, "probe", noted)  # noqa: B010


def main(url: str, out: Path, step: str) -> None:
    note_launches(out / LAUNCHED)
    if step in STEPS:
        arm(*STEPS[step])
    elif step:  # a limit on the size of files
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(step), int(step)))
    opened: list[Any] = []
    session = starter(url, out / "logs", opened)(
        machine(limit_gib=2.6, rate=by_tokens), begin=[BASELINE], trials=TOTAL
    )
    session.study.run()
    session.study.confirm()
    study_directory.write_study(out, session.summary())
    print(len(session.study.trials.rows))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
