"""`autotune explain` and `autotune verify`: probe a study's winner again, record the result and print it."""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.options import Json, Storage, StudyName
from autotune.cli.stop import stop_on_signals
from autotune.cli.terminal import print_json, print_note
from autotune.core.errors import Cancelled, EnvironmentProblem, Interrupted, NothingFits, UsageError, VerificationFailed
from autotune.core.process import StopToken
from autotune.study.storage.location import make_writable

if TYPE_CHECKING:
    from autotune.study.summary import Recipe, Verification


def explain(study: StudyName = None, storage: Storage = None, json_: Json = False) -> None:
    """Explain a study's winner on the device that probed it, and record the result with the study.

    Raises:
        UsageError: no such study.
        NothingFits: the study has no winner, or no baseline to compare it with.
        EnvironmentProblem: another device than the study's, or the winner fails this time.
        Interrupted: stopped by a signal; finished probes are stored.
    """
    from autotune.api import load_study
    from autotune.core.serialization import to_data
    from autotune.report import describe
    from autotune.study import session
    from autotune.study.progress import TextProgress

    result = load_study(study, storage)
    recipe = result.recipe
    if recipe.baseline is None:
        raise NothingFits(
            f"study {result.summary.study!r} has no baseline that succeeded", remedy="continue it with `autotune run`"
        )
    device = session.require_device(result.task.measured_on or result.task.device, "explain it there")
    make_writable(result.out)
    with stop_on_signals() as stop:
        try:
            progress = TextProgress(print_note)
            gpus = result.task.probing_gpus
            with session.Session(result.url, result.out, device, num_gpus=gpus, stop=stop, progress=progress) as opened:
                ablation = session.explain(opened, result.record, recipe.config, recipe.baseline.config)
        except Cancelled:
            raise _stopped(stop, "stopped; finished probes are stored") from None
    result.reload().report()
    if json_:
        print_json(to_data(ablation))
    else:
        print("\n".join(describe.ablation(ablation) or ["the winner is the baseline itself"]))
    if stop():
        raise _stopped(stop, "stopped; not every knob was probed")


def verify(
    study: StudyName = None,
    format_: Annotated[
        str | None, typer.Option("--format", help="What to run: train (train.py) or trl (TRL's file). [as probed]")
    ] = None,
    soak: Annotated[
        bool, typer.Option("--soak", help="Mix the longest possible rows with short ones; memory must not grow.")
    ] = False,
    micro_steps: Annotated[int, typer.Option(help="Micro batches to run, at least.")] = 200,
    tolerance: Annotated[float, typer.Option(help="Share by which it may be slower or larger than promised.")] = 0.05,
    storage: Storage = None,
    json_: Json = False,
) -> None:
    """Verify a study's winner on the device that measured it, and record the result with the study.

    Raises:
        UsageError: no such study, or nothing of its winner was measured here.
        NothingFits: the study has no winner.
        EnvironmentProblem: another device than the study's, or no TRL.
        StorageError: no room for weights that TRL could read.
        VerificationFailed: it is slower or larger than promised, beyond the tolerance, or its memory grows.
    """
    from autotune.api import load_study
    from autotune.export.run.verify import FORMATS
    from autotune.export.run.verify import verify as run_and_compare
    from autotune.report import describe
    from autotune.study.session import amend_record

    if not 1 <= micro_steps <= 10**6 or not 0 < tolerance < 100:
        raise UsageError("--micro-steps is a positive number, --tolerance a share such as 0.05", remedy="see --help")
    if format_ not in (None, *FORMATS):
        raise UsageError(f"--format cannot be {format_!r}", remedy=f"one of {', '.join(FORMATS)}")
    result = load_study(study, storage)
    recipe = result.recipe
    require_measured_here(recipe, format_)
    make_writable(result.out)
    with stop_on_signals() as stop:
        try:
            verification = run_and_compare(
                recipe,
                result.out,
                form=format_,
                soak=soak,
                micro_steps=micro_steps,
                tolerance=tolerance,
                say=print_note,
                should_stop=stop,
            )
        except Cancelled:
            raise _stopped(stop, "stopped; nothing was verified") from None
    amend_record(result.url, result.record, verification=verification)
    result.reload().report()
    _print_verification(verification, as_json=json_)
    if reason := describe.failed_verification(verification):
        raise VerificationFailed(
            reason,
            remedy=f"read {result.out / 'logs' / 'verify.log'}; something else may be using the device "
            "(`autotune doctor`)",
        )


def _print_verification(verification: "Verification", *, as_json: bool) -> None:
    from autotune.core.serialization import to_data
    from autotune.report import describe

    if as_json:
        derived = ("tokens_per_s", "speed_error", "memory_error", "holds", "better")
        print_json(to_data(verification) | {name: getattr(verification, name) for name in derived})
    else:
        print("\n".join(describe.verification(verification)))


def require_measured_here(recipe: "Recipe", form: str | None = None) -> None:
    """Raises UsageError or EnvironmentProblem if this machine cannot compare the recipe with reality."""
    from autotune.core.probe_types import Evidence
    from autotune.export.run.verify import probed_format
    from autotune.study.session import require_device

    if recipe.winner.evidence is not Evidence.MEASURED:
        remedy = f"run the study on {recipe.device.name} itself"
        if recipe.winner.evidence is Evidence.EXTRAPOLATED:  # here, from a few layers
            remedy = "continue the study with a larger --budget, so that the whole model is measured"
        raise UsageError(
            f"the winner's speed is {recipe.winner.evidence}, not measured: there is no promise to hold", remedy=remedy
        )
    if (form or probed_format(recipe)) == "trl" and find_spec("trl") is None:
        raise EnvironmentProblem("TRL is not installed", remedy="pip install trl")
    require_device(recipe.device, "verify it there", recipe.config.num_gpus)


def _stopped(stop: StopToken, text: str) -> Interrupted:
    return Interrupted(text, exit_code=128 + (stop.signal or 2))
