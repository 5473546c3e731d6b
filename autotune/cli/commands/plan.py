"""`autotune plan`: what a card would hold, how fast it would train and what that would cost, without having one."""

from pathlib import Path
from typing import Any

from autotune.cli.options import Evidence, Gpu, Json
from autotune.cli.study_options import PLANNED, spec_of, with_study_options
from autotune.cli.terminal import print_json, print_note, print_table
from autotune.core.errors import NothingFits
from autotune.problem.study_spec import StudySpec
from autotune.study.storage.location import EVIDENCE


@with_study_options("model", *PLANNED)
def plan_command(gpu: Gpu = None, evidence: Evidence = EVIDENCE, json_: Json = False, **options: Any) -> None:
    """Print the plan of the study that these options describe."""
    plan(spec_of(options | {"gpu": gpu}), evidence=evidence, as_json=json_)


def plan(spec: StudySpec, *, evidence: Path, as_json: bool = False) -> None:
    """Print a plan, or estimates of the configurations that the spec names.

    Raises:
        UsageError: a part of the spec is unknown or impossible, or no formula covers it.
        NothingFits: no configuration of the space surely fits.
    """
    from autotune.planning.device_estimate import how_known, planned_device
    from autotune.planning.observations import known_observations
    from autotune.planning.plan import LITTLE_KNOWN, estimate_named_configs, plan_data
    from autotune.planning.plan import plan as make_plan
    from autotune.problem.search_space import ways_to_fit
    from autotune.problem.setup import calibration_of
    from autotune.study.named_configs import COLUMNS

    device, observations = planned_device(spec.gpu), known_observations(evidence, print_note)
    if spec.configs:
        results = estimate_named_configs(spec, device=device, observations=observations, say=print_note, counted=True)
        if as_json:
            print_json([result.data() for result in results])
        else:
            print(f"{device.label}. {how_known(calibration_of(spec, device), device)}.")
            print_table(None, dict(COLUMNS), [result.cells() for result in results])
        return
    made = make_plan(spec, device=device, observations=observations, say=print_note, counted=True)
    if as_json:
        print_json(plan_data(made))
    else:
        from autotune.cli.plan_text import print_plan

        print_plan(made)
    if made.best is None and made.reason not in LITTLE_KNOWN:
        raise NothingFits(
            f"nothing in the search space surely fits {device.name}",
            remedy=f"{ways_to_fit(made.leanest)}; `autotune compare` says which card holds it",
        )
