"""`autotune run`: run or continue a study, show its progress and print its result."""

import json
import sys
from functools import partial

from autotune.api import prepare_study, run_study
from autotune.cli.console import Display
from autotune.cli.stop import stop_on_signals
from autotune.problem.study_spec import StudySpec


def run(spec: StudySpec, *, as_json: bool = False, quiet: bool = False, events: bool = False) -> None:
    """Run or continue a study. Raises AutotuneError for everything a user can act on."""
    plan = prepare_study(spec, (lambda text: None) if quiet else partial(print, file=sys.stderr))
    with (
        stop_on_signals() as stop,
        Display(budget_s=plan.budget_s, quiet=quiet, events=events) as display,
    ):
        outcome = run_study(plan, progress=display, stop=stop)
        if as_json and outcome.data is not None:
            sys.stdout.write(json.dumps(outcome.data) + "\n")
        elif outcome.configs and not events:
            from autotune.cli.commands.catalogs import print_table
            from autotune.study.named_configs import COLUMNS

            print_table(None, dict(COLUMNS), [result.cells() for result in outcome.configs])
    if outcome.error is not None:
        raise outcome.error
