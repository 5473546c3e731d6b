"""`autotune plan`: estimate, without the card, whether a training fits, its speed and its cost."""

import shlex
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli.answers import print_answer
from autotune.cli.commands.notes import estimate_notes
from autotune.cli.options import Details, Evidence, Gpu, Html, Json
from autotune.cli.study_options import PLANNED, spec_of, with_study_options
from autotune.cli.terminal import (
    print_answer_json,
    print_lines,
    print_table,
    print_text,
)
from autotune.core.errors import NothingFits, UsageError
from autotune.core.objective import Objective
from autotune.core.text import split_count
from autotune.problem.gpu_counts import NETWORKS
from autotune.problem.study_spec import ROLLOUTS, StudySpec
from autotune.study.storage.location import EVIDENCE

if TYPE_CHECKING:
    from autotune.catalog import DeviceSpec
    from autotune.report.answer import Answer
    from autotune.study.named_configs import ConfigResult

ANY_MODEL = "demo-3m"  # a placeholder in the spec of a plan that tries many models
DETAILED_COLUMNS = ("configuration", "published")  # columns that only --details shows


@with_study_options("model", *PLANNED, "expert_parallel", *ROLLOUTS)
def plan_command(
    gpu: Gpu = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBERS",
            help="Numbers of GPUs of one host to plan for, as 1,2,4,8 (or --gpu 8xh100).",
        ),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBERS", help="Numbers of hosts to plan for, as 1,2,4; each has --gpus GPUs."
        ),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(help=f"Link between hosts: GB/s out of a host, or {', '.join(NETWORKS)}."),
    ] = None,
    within: Annotated[
        str | None,
        typer.Option(
            help="With --gpus: print the cheapest plan that ends within this time, such as 6h."
        ),
    ] = None,
    evidence: Evidence = EVIDENCE,
    html: Html = None,
    json_: Json = False,
    details: Details = False,
    **options: Any,
) -> None:
    """Print the plan of the study that these options describe, for one or several numbers of GPUs.

    Without a model, print the models of each size that the GPU can train.

    Raises:
        UsageError: an option has an unknown or invalid value, or two options contradict each other.
    """
    gpu_options: dict[str, Any] = {
        "gpus": gpus,
        "nodes": nodes,
        "network": network,
        "within": within,
    }

    # If only a card is given, plan a model of each size.
    names_study = any(options[name] for name in ("model", "spec", "space", "dataset"))
    if not names_study and not any(gpu_options.values()) and gpu:
        spec = spec_of(options | {"gpu": gpu, "model": ANY_MODEL})
        plan_card(spec, evidence=evidence, html=html, as_json=json_, details=details)
        return
    if html is not None:
        raise UsageError(
            "--html works only for the plan of a GPU, without a model",
            remedy="`autotune compare --out FILE.html`",
        )

    spec = spec_of(options | {"gpu": gpu})
    if Objective(spec.objective).generates:
        plan_grpo(spec, gpu_options, as_json=json_, details=details)
        return
    if spec.gpus not in (None, 1):  # the spec file sets several GPUs
        gpu_options |= {
            name: getattr(spec, name) for name in ("gpus", "within") if gpu_options[name] is None
        }
    if split_count(spec.gpu)[0] is None and all(value is None for value in gpu_options.values()):
        plan(spec, evidence=evidence, as_json=json_, details=details)
    else:
        plan_several(spec, gpu_options, evidence=evidence, as_json=json_, details=details)


def plan(spec: StudySpec, *, evidence: Path, as_json: bool = False, details: bool = False) -> None:
    """Print a plan, or estimates of the configurations that the spec names.

    Raises:
        UsageError: a value in the spec is unknown or invalid, or no formula covers the training.
        NothingFits: no configuration of the space is certain to fit.
    """
    from autotune.planning.device_estimate import planned_device
    from autotune.planning.observations import known_observations
    from autotune.planning.plan import plan as make_plan
    from autotune.problem.search_space import ways_to_fit
    from autotune.report.values.plan import LITTLE_KNOWN

    device = planned_device(spec.gpu)
    if spec.configs:
        plan_named_configs(spec, device, evidence=evidence, as_json=as_json, details=details)
        return

    with estimate_notes() as say:
        observations = known_observations(evidence, say)
        result = make_plan(spec, device=device, observations=observations, say=say, counted=True)
        if as_json:
            print_answer_json(result)
        else:
            from autotune.cli.plan_text import print_plan

            print_plan(result, details=details)

    if result.best is None and result.reason not in LITTLE_KNOWN:
        ways = ways_to_fit(result.leanest)
        if result.change:
            ways = f"give {result.change.options}, or take a larger GPU or a smaller model"
        raise NothingFits(
            f"no configuration of the search space is certain to fit {device.name}",
            remedy=f"{ways}; `autotune compare --model {shlex.quote(str(spec.model))}`, with your "
            "other options, finds a GPU",
        )


def plan_grpo(
    spec: StudySpec, gpu_options: dict[str, Any], *, as_json: bool = False, details: bool = False
) -> None:
    """Print a plan for a GRPO run: the layout of training and vLLM, with the memory of each phase.

    Raises:
        UsageError: a value in the spec is unknown or invalid, the memory cannot be computed, or
            `gpu_options` or the spec name several GPUs.
        NothingFits: no layout is certain to fit.
    """
    from autotune.planning.rollout_plan import plan_rollouts

    counted, _ = split_count(spec.gpu)
    if counted is not None or any(value is not None for value in gpu_options.values()):
        raise UsageError(
            "a plan for grpo is for one GPU",
            remedy="name one GPU, and leave --gpus, --nodes, --network and --within out",
        )

    with estimate_notes() as say:
        result = plan_rollouts(spec, say=say)
        if as_json:
            print_answer_json(result)
        else:
            from autotune.cli.plan_text import print_rollout_plan

            print_rollout_plan(result, details=details)

    if result.best is None:
        larger = "take a larger GPU or a smaller model"
        raise NothingFits(
            f"no layout of the training and vLLM is certain to fit {result.task.device.name}",
            remedy=f"give {result.change}, or {larger}" if result.change else larger,
        )


def plan_named_configs(
    spec: StudySpec, device: "DeviceSpec", *, evidence: Path, as_json: bool, details: bool
) -> None:
    """Print estimates of the configurations that the spec names, next to their published results.

    Raises UsageError for an invalid configuration.
    """
    from autotune.planning.named_estimates import estimate_named_configs
    from autotune.planning.observations import known_observations
    from autotune.study.named_configs import SourcedResult

    with estimate_notes() as say:
        results = estimate_named_configs(
            spec,
            device=device,
            observations=known_observations(evidence, say),
            say=say,
            counted=True,
        )
        if as_json:
            print_answer_json(
                [SourcedResult(result=result, source=spec.source) for result in results]
            )
        else:
            _print_named_configs(spec, device, results, details=details)


def _print_named_configs(
    spec: StudySpec, device: "DeviceSpec", results: "list[ConfigResult]", *, details: bool
) -> None:
    """Print how many configurations fit, and a table; with `details`, also the configurations."""
    from autotune.planning.device_estimate import accuracy_text
    from autotune.prediction.transfer import calibrated_parts
    from autotune.problem.run_cost import FITS
    from autotune.problem.setup import calibration_of
    from autotune.report.describe import estimate_basis
    from autotune.study.named_configs import COLUMNS, COMPARED, agreement

    predicted = [result for result in results if not result.case.excluded]
    fitting = sum(result.verdict == FITS for result in predicted)
    print_text(
        f"{fitting} of {len(predicted)} configurations surely fit {device.label} (estimated)"
    )
    if agreement_text := agreement(results):
        print_text(agreement_text)
    if spec.source:
        print_text(f"Published: {spec.source}")

    hidden = ("published",) if details else DETAILED_COLUMNS
    columns = {name: side for name, side in COLUMNS.items() if name not in hidden}
    rows = [dict(zip(COLUMNS, result.cells(), strict=True)) for result in results]
    print_table(None, columns, [tuple(row[name] for name in columns) for row in rows])
    if details:
        print_table(
            None, dict(COMPARED), [row for result in results for row in result.comparison()]
        )
        calibrated = calibrated_parts(calibration_of(spec, device), device)
        accuracy = accuracy_text(objective=Objective(spec.objective))
        print_text(f"{device.label}. {estimate_basis(accuracy, calibrated)}.")
    else:
        print_text("--details shows the configurations, the published numbers and the accuracy.")


def plan_card(
    spec: StudySpec,
    *,
    evidence: Path,
    html: Path | None,
    as_json: bool = False,
    details: bool = False,
) -> None:
    """Print the models of each size that the spec's card can train; the spec's model is ignored.

    Raises:
        UsageError: an option has an invalid value, or the card is unknown.
        NothingFits: no model is certain to fit.
        StorageError: `html` cannot be written.
    """
    from autotune.planning.device_estimate import planned_device
    from autotune.planning.observations import known_observations
    from autotune.planning.trainable import trainable
    from autotune.problem.run_cost import FITS
    from autotune.report.answers import card_answer

    def answer(today: date) -> "Answer":
        from autotune.report.answer import trainable_answer

        return trainable_answer(result, today)

    device = planned_device(spec.gpu)
    with estimate_notes() as say:
        result = trainable(spec, device, observations=known_observations(evidence, say), say=say)
        if as_json:
            print_answer_json(result)
        else:
            first = card_answer(result)
            print_text(first.answer)
            print_lines(first.lines())
        print_answer(answer, html=html, silent=as_json or not details)
        if not as_json and not details:
            print_text("--details shows every model with its verdict, speed and longest sequence.")

    if not any(entry.state == FITS for entry in result.entries):
        raise NothingFits(
            f"no model is certain to fit {device.name}",
            remedy="use shorter samples: --tokens-per-example 512",
        )


def plan_several(
    spec: StudySpec,
    query: dict[str, Any],
    *,
    evidence: Path,
    as_json: bool = False,
    details: bool = False,
) -> None:
    """Print a plan for several GPU counts; `query` has the arguments of `plan_spec`.

    Raises:
        UsageError: a value in the spec, a GPU count or the deadline is invalid, or no formula
            covers the model and this machine runs no dry probes.
        NothingFits: no strategy is certain to fit with any of the GPU counts, or to end within the
            deadline.
    """
    from autotune.planning.observations import known_observations
    from autotune.planning.several_gpus import plan_spec
    from autotune.problem.search_space import ways_to_fit

    within = query["within"]
    with estimate_notes() as say:
        result = plan_spec(spec, **query, observations=known_observations(evidence, say), say=say)
        if as_json:
            print_answer_json(result)
        else:
            from autotune.cli.gpus_text import print_gpu_plan

            print_gpu_plan(result, details=details)

    task = result.task
    numbers = " or ".join(map(str, sorted({row.num_gpus for row in result.choices})))
    if all(row.estimate is None for row in result.choices):
        raise NothingFits(
            f"no plan for {numbers} x {task.device.name} is possible: {result.choices[0].problem}",
            remedy="change the number of GPUs, or the setting that this error names",
        )
    if not result.fits:
        ways = ways_to_fit(task.space.config(task.space.leanest()))
        if result.change:
            ways = f"give {result.change.options}, or take a larger GPU or a smaller model"
        raise NothingFits(
            "no configuration of the search space is certain to fit "
            f"{numbers} x {task.device.name}",
            remedy=f"plan for more GPUs, {ways}",
        )

    if within is not None and result.cheapest_within is None:
        raise NothingFits(
            f"no plan is known to end within {within}",
            remedy="allow more time, or plan for more GPUs",
        )
