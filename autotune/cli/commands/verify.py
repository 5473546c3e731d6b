"""`autotune verify`: runs what a study exported as a user would, and holds it against what the study said."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

from autotune.cli.commands.session import open_study
from autotune.core.errors import Cancelled, EnvironmentProblem, Interrupted, NothingFits, UsageError, VerificationFailed
from autotune.core.probe_types import Evidence
from autotune.core.serialization import to_data
from autotune.export.run.verify import FILES, usual, verify
from autotune.problem.target import find_target
from autotune.report import describe
from autotune.report.study_directory import write_study
from autotune.study.storage.location import storage_url
from autotune.study.summary import Recipe


def command(
    name: str | None,
    storage: str | None,
    *,
    form: str | None = None,
    soak: bool = False,
    micro_steps: int,
    tolerance: float,
    as_json: bool = False,
) -> None:
    """Verify a study's winner on the device that measured it; the result is kept with the study.

    Raises:
        UsageError: no such study, or a winner that nothing was measured of here.
        EnvironmentProblem: another device than the study's, or no TRL.
        StorageError: no room for weights that TRL could read.
        PromiseBroken: beyond the tolerance, or memory creeps.
    """
    from autotune.cli.stop import Stop
    from autotune.study.optimizer import Optimizer
    from autotune.study.storage.study_record import update_record

    if not 1 <= micro_steps <= 10**6 or not 0 < tolerance < 100:
        raise UsageError("--micro-steps is a positive number, --tolerance a share such as 0.05", remedy="see --help")
    if form not in (None, *FILES):
        raise UsageError(f"--format cannot be {form!r}", remedy=f"one of {', '.join(FILES)}")
    found = open_study(name, storage)
    recipe = found.summary.recipe
    if recipe is None:
        raise NothingFits(f"study {found.summary.study!r} has no winner", remedy="continue it with `autotune run`")
    check(recipe, form)
    (found.out / "logs").mkdir(parents=True, exist_ok=True)

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    with Stop().listening() as stop:
        try:
            done = verify(
                recipe,
                found.out,
                form=form,
                soak=soak,
                micro_steps=micro_steps,
                tolerance=tolerance,
                say=say,
                should_stop=stop,
            )
        except Cancelled:
            code = 128 + (stop.signal or 2)
            raise Interrupted("stopped; nothing was verified", exit_code=code) from None
    search = Optimizer.open(storage_url(storage), found.summary.study, found.task.space)
    update_record(search, verification=done)
    write_study(found.out, open_study(found.summary.study, storage).summary)
    if as_json:
        sys.stdout.write(json.dumps(to_data(done) | {"holds": done.holds}, indent=2) + "\n")
    else:
        print("\n".join(describe.verification(done)))
    if reason := describe.failed_verification(done):
        log = Path(found.out) / "logs" / "verify.log"
        raise VerificationFailed(
            reason,
            remedy=f"read {log}; something else may be using the device (`autotune doctor`)",
        )


def check(recipe: Recipe, form: str | None = None) -> None:
    """Whether this machine can hold the recipe against reality."""
    if recipe.winner.evidence is not Evidence.MEASURED:
        raise UsageError(
            f"the winner's speed is {recipe.winner.evidence}, not measured: there is no promise to hold",
            remedy=f"run the study on {recipe.device.name} itself",
        )
    if (form or usual(recipe)) == "trl" and find_spec("trl") is None:
        raise EnvironmentProblem("TRL is not installed", remedy="pip install trl")
    here = find_target("cpu" if recipe.device.kind == "cpu" else "auto").device
    if here.name != recipe.device.name:
        raise EnvironmentProblem(
            f"the study was measured on {recipe.device.name}, here is {here.name}", remedy="verify it there"
        )
