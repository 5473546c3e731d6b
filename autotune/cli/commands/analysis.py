"""`autotune explain` and `autotune verify`: probe a study's winner again, and record the result."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.answers import print_answer
from autotune.cli.options import Json, Storage, StudyName
from autotune.cli.stop import stop_on_signals
from autotune.cli.terminal import print_answer_json, print_json, print_note, print_text
from autotune.core.errors import (
    Cancelled,
    EnvironmentProblem,
    Interrupted,
    NothingFits,
    UsageError,
    VerificationFailed,
)
from autotune.core.files import write_atomic
from autotune.core.probe_types import Outcome
from autotune.core.process import StopToken
from autotune.core.text import study_command
from autotune.study.storage.location import make_writable

if TYPE_CHECKING:
    from autotune.api import StudyResult
    from autotune.core.micro_profile import MicroBatchProfile
    from autotune.core.probe_types import DeviceRates, ProbeRequest
    from autotune.core.train_config import TrainConfig
    from autotune.report.values.profile import ProfileReport
    from autotune.study.summary import Recipe, Verification


def explain(
    study: StudyName = None,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="Profile a micro batch instead: its time by kind of work, and its idle time.",
        ),
    ] = False,
    trial: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="With --profile: the configuration of this trial. [the winner's]"
        ),
    ] = None,
    storage: Storage = None,
    json_: Json = False,
) -> None:
    """Probe the effect of each of the winner's settings, and record the effects with the study.

    With `profile`, profile one micro batch instead. Both need the device that probed the study.

    Raises:
        UsageError: there is no such study or trial, `trial` is given without `profile`, or the
            configuration to profile uses several GPUs.
        NothingFits: the study has no winner, or no baseline to compare it with.
        EnvironmentProblem: this machine lacks the study's device, or the winner fails this time.
        Interrupted: stopped by a signal; finished probes are stored.
    """
    from autotune.api import load_study
    from autotune.core.serialization import to_data
    from autotune.report import describe
    from autotune.study import session
    from autotune.study.progress import TextProgress

    if trial is not None and not profile:
        raise UsageError("--trial needs --profile", remedy="add --profile")
    result = load_study(study, storage)
    if profile:
        _profile(result, _config_of(result, trial), as_json=json_)
        return

    recipe = result.recipe
    if recipe.baseline is None:
        raise NothingFits(
            f"study {result.summary.study!r} has no baseline that succeeded",
            remedy="continue it with `autotune run`",
        )

    device = session.require_device(
        result.task.measured_on or result.task.device, "explain it there"
    )
    make_writable(result.out)

    with stop_on_signals() as stop:
        try:
            progress = TextProgress(print_note)
            gpus = result.task.probing_gpus
            with session.Session(
                result.url, result.out, device, num_gpus=gpus, stop=stop, progress=progress
            ) as own_session:
                ablation = session.explain(
                    own_session, result.record, recipe.config, recipe.baseline.config
                )
        except Cancelled:
            raise _stopped(stop, "stopped; finished probes are stored") from None

    result.reload().report()
    if json_:
        print_json(to_data(ablation))
    else:
        for line in describe.ablation(ablation) or ["the winner is the baseline itself"]:
            print_text(line)

    if stop():
        raise _stopped(stop, "stopped; not every setting was probed")


def _config_of(result: "StudyResult", trial: int | None) -> "TrainConfig":
    """Return the configuration of a trial, or the winner's configuration if `trial` is None.

    Raises UsageError for an unknown or failed trial, and NothingFits without a winner.
    """
    if trial is None:
        return result.winner

    hint = "`trials.jsonl` in the study's directory lists the trials"
    row = next((one for one in result.summary.trials if one.number == trial), None)
    if row is None:
        raise UsageError(f"study {result.summary.study!r} has no trial {trial}", remedy=hint)
    if row.outcome not in (Outcome.OK, Outcome.SLOW):
        raise UsageError(
            f"trial {trial} ended with {row.outcome}", remedy=f"name a trial that fits: {hint}"
        )
    return row.config


def _profile(result: "StudyResult", config: "TrainConfig", *, as_json: bool) -> None:
    """Profile one micro batch of a configuration, print the report, and write the files."""
    from autotune.core.json_view import json_data
    from autotune.core.text import short_path
    from autotune.report.micro_batch import profile_answer
    from autotune.study import session
    from autotune.study.progress import TextProgress

    device = session.require_device(
        result.task.measured_on or result.task.device, "profile it there"
    )
    make_writable(result.out)
    trace = result.out / "profile_trace.json.gz"
    progress = TextProgress(print_note)

    with stop_on_signals() as stop:
        try:
            gpus = result.task.probing_gpus
            with session.Session(
                result.url, result.out, device, num_gpus=gpus, stop=stop, progress=progress
            ) as own_session:
                request, measured_profile, rates = session.profile(
                    own_session, result.record, config, trace
                )
        except Cancelled:
            raise _stopped(stop, "stopped before the profile was complete") from None

    report = _profile_report(result, request, measured_profile, rates, short_path(trace))
    write_atomic(result.out / "profile.json", json.dumps(json_data(report), indent=2) + "\n")
    if as_json:
        print_answer_json(report)
    print_answer(
        lambda today: profile_answer(report), html=result.out / "profile.html", silent=as_json
    )
    if not as_json:
        print(
            f"\nwritten: {short_path(result.out / 'profile.html')}, profile.json and {trace.name}"
        )


def _profile_report(
    result: "StudyResult",
    request: "ProbeRequest",
    profile: "MicroBatchProfile",
    rates: "DeviceRates",
    trace: str,
) -> "ProfileReport":
    """Return a profile's report, with the least possible times and the run's needs for the host."""
    from autotune.core.machine import disk_mb_s
    from autotune.planning.micro_batch import bounds, count_work, host_needs
    from autotune.problem.dataset import tokenised_per_s
    from autotune.report.values.profile import ProfileReport

    task = result.task
    config = request.config
    spec = result.record.spec
    print_note("counting the arithmetic and moved bytes of a micro batch")
    count_answer = count_work(request, profile)

    shape = task.workload.run_shape(config)
    tokenizer = spec.tokenizer or task.model.tokenizer
    tokenised = None
    if (
        spec.dataset is not None
        and tokenizer is not None
        and task.workload.objective.value == "sft"
    ):
        tokenised = tokenised_per_s(
            Path(spec.dataset), tokenizer, split=spec.split, loss_on=spec.loss_on
        )

    needs = host_needs(
        profile,
        config,
        task.measured_on or task.device,
        count=count_answer.count,
        calibration=task.calibration,
        disk_mb_s=disk_mb_s(result.out),
        examples_per_s=profile.rows * shape.examples_per_row / profile.micro_s,
        tokenised_per_s=tokenised,
    )

    return ProfileReport(
        study=result.summary.study,
        device=task.measured_on or task.device,
        config=config,
        accumulation=shape.accumulation,
        profile=profile,
        bounds=bounds(profile, count_answer.count, rates, config),
        needs=tuple(needs),
        trace=trace,
        uncounted=count_answer.refused,
    )


def verify(
    study: StudyName = None,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format", help="Export to run: train (train.py) or trl (TRL's file). [as probed]"
        ),
    ] = None,
    soak: Annotated[
        bool,
        typer.Option(
            "--soak",
            help="Train on the longest possible sequences among short ones; memory must not grow.",
        ),
    ] = False,
    micro_steps: Annotated[int, typer.Option(help="Run at least this many micro batches.")] = 200,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Accept up to this share more time or memory than predicted [0.05; on a CPU 0.1].",
            show_default=False,
        ),
    ] = None,
    storage: Storage = None,
    json_: Json = False,
) -> None:
    """Run the winner's export, compare it with the prediction, and record the result.

    The run needs the device that measured the winner.

    Raises:
        UsageError: there is no such study, an option has an invalid value, or the winner's speed
            is extrapolated, projected or disturbed instead of measured.
        NothingFits: the study has no winner.
        EnvironmentProblem: this machine lacks the study's device, or TRL is not installed.
        StorageError: the disk has no room for the weights that TRL reads.
        VerificationFailed: the run failed, its memory grows, or it is slower or needs more memory
            than predicted, by more than the tolerance.
    """
    from autotune.api import load_study
    from autotune.export.run.verify import FORMATS
    from autotune.export.run.verify import verify as run_and_compare
    from autotune.report import describe
    from autotune.study.session import amend_record

    if not 1 <= micro_steps <= 10**6 or (tolerance is not None and not 0 < tolerance < 100):
        raise UsageError(
            "--micro-steps must be a positive number, and --tolerance a share such as 0.05",
            remedy="see --help",
        )
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
            raise _stopped(stop, "stopped before the verification was complete") from None

    amend_record(result.url, result.record, verification=verification)
    result.reload().report()
    _print_verification(verification, as_json=json_)
    if reason := describe.failed_verification(verification):
        raise VerificationFailed(
            reason,
            remedy=f"read {result.out / 'logs' / 'verify.log'}; something else may be using the "
            "device (`autotune doctor`)",
        )


def _print_verification(verification: "Verification", *, as_json: bool) -> None:
    from autotune.report import describe

    if as_json:
        print_answer_json(verification)
    else:
        for line in (describe.verdict(verification), *describe.verification(verification)):
            print_text(line)


def require_measured_here(recipe: "Recipe", form: str | None = None) -> None:
    """Check that the recipe's speed was measured, and that this machine can measure it again.

    Raises UsageError or EnvironmentProblem if a check fails.
    """
    from autotune.core.probe_types import Evidence
    from autotune.export.run.verify import probed_format
    from autotune.study.session import require_device

    if recipe.winner.evidence is not Evidence.MEASURED:
        resume = f"`{study_command('resume', recipe.study)} --budget 10m`"
        remedies = {
            Evidence.EXTRAPOLATED: f"{resume} continues the study, to measure the whole model",
            Evidence.DISTURBED: f"stop the other work on this machine; then {resume} continues the "
            "study",
        }
        remedy = remedies.get(
            recipe.winner.evidence, f"run the study on {recipe.device.name} itself"
        )
        raise UsageError(
            f"the winner's speed is {recipe.winner.evidence}, not measured, so there is nothing "
            "to verify",
            remedy=remedy,
        )
    if (form or probed_format(recipe)) == "trl" and find_spec("trl") is None:
        raise EnvironmentProblem("TRL is not installed", remedy="pip install trl")
    require_device(recipe.device, "verify it there", recipe.config.num_gpus)


def _stopped(stop: StopToken, text: str) -> Interrupted:
    return Interrupted(text, exit_code=128 + (stop.signal or 2))
