"""The whole program from start to end. Read this file first.

    options   a command or a call makes a StudySpec                    cli/, problem/study_spec
    task      checks without a GPU: space, data, target, memory        study/preparation
    study     real probes, cheapest first, until the budget ends       study/session
    answer    the winner with its cost, its evidence and all tables    study/history, planning/
    renderer  terminal, report, JSON and exports read the answer       cli/, report/, export/

Commands that estimate without a study have the same shape: a spec, an estimate
(prediction/estimate), an answer, a renderer.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from autotune.api import steps
from autotune.api.steps import RunOutcome
from autotune.core.process import StopToken
from autotune.problem.study_spec import StudySpec
from autotune.study.preparation import SessionPlan
from autotune.study.progress import Progress, TextProgress


def main(
    spec: StudySpec,
    open_progress: Callable[[SessionPlan], AbstractContextManager[Progress]] | None = None,
    *,
    say: Callable[[str], None] = lambda text: None,
    stop: StopToken | None = None,
    began: float | None = None,
) -> RunOutcome:
    """Run or continue the study that `spec` describes, and render its answer.

    `say` receives a line for each step of the preparation. `open_progress` returns the display of
    the search; without it, the search is silent. The function closes everything that it opens. If
    an error occurs after the first probe, the files are still written, and the error becomes part
    of the outcome. The budget starts at `began`, a value of time.monotonic(), by default now.

    Raises:
        AutotuneError: the study could not begin.
    """
    stop = stop or StopToken()
    plan = steps.prepare(spec, say, began=began)
    display = open_progress(plan) if open_progress else nullcontext(TextProgress())

    outcome = RunOutcome(plan=plan)  # the result if a stop request ends the `with` block early
    with display as progress, steps.session(plan, progress, stop) as study:
        if spec.configs:
            outcome = steps.probe_named(study, plan)
        else:
            leader = steps.search(study, plan)
            answer = steps.render(leader)
            answer = steps.train_finalists(leader, answer)
            answer = steps.verify_export(leader, answer)
            outcome = steps.finish(leader, answer)

    return steps.with_interruption(outcome, stop)
