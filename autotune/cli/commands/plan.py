"""`autotune plan`: estimate, without the card, whether a training fits, its speed and its cost."""

from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli.answers import print_answer
from autotune.cli.options import Evidence, Gpu, Html, Json
from autotune.cli.study_options import PLANNED, spec_of, with_study_options
from autotune.cli.terminal import print_answer_json, print_note, print_table
from autotune.core.errors import NothingFits, UsageError
from autotune.problem.gpu_counts import NETWORKS, split_count
from autotune.problem.study_spec import StudySpec
from autotune.study.storage.location import EVIDENCE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autotune.catalog import DeviceSpec
    from autotune.prediction.observed_speed import Observation
    from autotune.report.answer import Answer

ANY_MODEL = "demo-3m"  # a placeholder in the spec of a plan that tries many models


@with_study_options("model", *PLANNED)
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
    **options: Any,
) -> None:
    """Print the plan of the study that these options describe, for one GPU or for several counts.

    Without a model, print the models of each size that the GPU can train.

    Raises:
        UsageError: an option is unknown or impossible, or two options contradict each other.
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
        plan_card(spec, evidence=evidence, html=html, as_json=json_)
        return
    if html is not None:
        raise UsageError(
            "--html works only for the plan of a card, without a model",
            remedy="`autotune compare --out FILE.html`",
        )

    spec = spec_of(options | {"gpu": gpu})
    if spec.gpus not in (None, 1):  # the spec file sets several GPUs
        gpu_options |= {
            name: getattr(spec, name) for name in ("gpus", "within") if gpu_options[name] is None
        }
    if split_count(spec.gpu)[0] is None and all(value is None for value in gpu_options.values()):
        plan(spec, evidence=evidence, as_json=json_)
    else:
        plan_several(spec, gpu_options, evidence=evidence, as_json=json_)


def plan(spec: StudySpec, *, evidence: Path, as_json: bool = False) -> None:
    """Print a plan, or estimates of the configurations that the spec names.

    Raises:
        UsageError: a part of the spec is unknown or impossible, or no formula covers the training.
        NothingFits: no configuration of the space is certain to fit.
    """
    from autotune.planning.device_estimate import planned_device
    from autotune.planning.observations import known_observations
    from autotune.planning.plan import plan as make_plan
    from autotune.problem.search_space import ways_to_fit
    from autotune.report.values.plan import LITTLE_KNOWN

    device = planned_device(spec.gpu)
    observations = known_observations(evidence, print_note)
    if spec.configs:
        plan_named_configs(spec, device, observations, as_json=as_json)
        return

    result = make_plan(spec, device=device, observations=observations, say=print_note, counted=True)
    if as_json:
        print_answer_json(result)
    else:
        from autotune.cli.plan_text import print_plan

        print_plan(result)

    if result.best is None and result.reason not in LITTLE_KNOWN:
        raise NothingFits(
            f"nothing in the search space surely fits {device.name}",
            remedy=f"{ways_to_fit(result.leanest)}; `autotune compare` finds a GPU for it",
        )


def plan_named_configs(
    spec: StudySpec, device: "DeviceSpec", observations: "Sequence[Observation]", *, as_json: bool
) -> None:
    """Print estimates of the configurations that the spec names, next to their published results.

    Raises UsageError for an impossible configuration.
    """
    from autotune.core.objective import Objective
    from autotune.planning.device_estimate import accuracy_text
    from autotune.planning.named_estimates import estimate_named_configs
    from autotune.prediction.transfer import calibrated_parts
    from autotune.problem.setup import calibration_of
    from autotune.report.describe import estimate_basis
    from autotune.study.named_configs import COLUMNS, SourcedResult, agreement

    results = estimate_named_configs(
        spec, device=device, observations=observations, say=print_note, counted=True
    )
    if as_json:
        print_answer_json([SourcedResult(result=result, source=spec.source) for result in results])
        return

    calibrated = calibrated_parts(calibration_of(spec, device), device)
    accuracy = accuracy_text(objective=Objective(spec.objective))
    print(f"{device.label}. {estimate_basis(accuracy, calibrated)}.")
    print_table(None, dict(COLUMNS), [result.cells() for result in results])
    if agreement_text := agreement(results):
        print(agreement_text)
    if spec.source:
        print(f"Published: {spec.source}")


def plan_card(spec: StudySpec, *, evidence: Path, html: Path | None, as_json: bool = False) -> None:
    """Print the models of each size that the spec's card can train; the spec's model is ignored.

    Raises:
        UsageError: an option is impossible, or the card is unknown.
        NothingFits: no model is certain to fit.
        StorageError: `html` cannot be written.
    """
    from autotune.planning.device_estimate import planned_device
    from autotune.planning.observations import known_observations
    from autotune.planning.trainable import trainable
    from autotune.problem.run_cost import FITS

    def answer(today: date) -> "Answer":
        from autotune.report.answer import trainable_answer

        return trainable_answer(result, today)

    device = planned_device(spec.gpu)
    result = trainable(
        spec, device, observations=known_observations(evidence, print_note), say=print_note
    )

    if as_json:
        print_answer_json(result)
    print_answer(answer, html=html, silent=as_json)

    if not any(entry.state == FITS for entry in result.entries):
        raise NothingFits(
            f"nothing surely fits {device.name}",
            remedy="use shorter samples: --tokens-per-example 512",
        )


def plan_several(
    spec: StudySpec, query: dict[str, Any], *, evidence: Path, as_json: bool = False
) -> None:
    """Print a plan for several GPU counts; `query` has the arguments of `plan_spec`.

    Raises:
        UsageError: a part of the spec, a GPU count or the deadline is impossible, or no formula
            covers the model.
        NothingFits: no strategy is certain to fit with any of the GPU counts, or to end within the
            deadline.
    """
    from autotune.planning.observations import known_observations
    from autotune.planning.several_gpus import plan_spec
    from autotune.problem.run_cost import FITS
    from autotune.problem.search_space import ways_to_fit

    gpus = query["gpus"]
    within = query["within"]
    observations = known_observations(evidence, print_note)
    result = plan_spec(spec, **query, observations=observations, say=print_note)
    task = result.task

    if as_json:
        print_answer_json(result)
    else:
        from autotune.cli.gpus_text import print_gpu_plan

        print_gpu_plan(result)

    if not any(row.state == FITS for row in result.rows):
        leanest = task.space.config(task.space.leanest())
        raise NothingFits(
            f"nothing in the search space surely fits {gpus or spec.gpu} x {task.device.name}",
            remedy=f"plan for more GPUs, {ways_to_fit(leanest)}",
        )

    if within is not None and result.cheapest_within is None:
        raise NothingFits(
            f"no plan is known to end within {within}",
            remedy="allow more time, or plan for more GPUs",
        )
