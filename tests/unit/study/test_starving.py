"""A search never starves: however slow the probes of whole models are, most of the budget is for
candidates.
"""

import random
from functools import partial
from pathlib import Path

import pytest

from autotune.catalog import resolve_device
from autotune.core.probe_types import Outcome
from autotune.prediction.memory_formula import memory_breakdown
from autotune.problem.setup import adapt_to_layers, set_up
from autotune.problem.study_spec import StudySpec
from autotune.study.distributed import SharedTrials
from autotune.study.evaluator import Evaluator
from autotune.study.feasibility import find_feasible
from autotune.study.loop import Study
from autotune.study.optimizer import Optimizer
from autotune.study.storage.probe_store import ProbeStore
from autotune.study.storage.study_record import Limits
from tests.helpers.memory_study import keep_studies_in_memory
from tests.helpers.replay import ReplayProber
from tests.helpers.sessions import Session
from tests.helpers.slow_card import SlowCard


def long_tailed(folder: Path) -> str:
    """A file with the lengths of 1,000 examples: about 370 tokens on average, 4,096 at most."""
    draw, path = random.Random(1), folder / "lengths.txt"
    lengths = [min(4096, max(16, round(draw.lognormvariate(5.4, 1.0)))) for _ in range(999)]
    path.write_text("".join(f"{length}\n" for length in [*lengths, 4096]))
    return str(path)


def searched(
    tmp_path: Path, model: str, space: str, budget_s: float, layer_load_s: float
) -> tuple[Session, SlowCard]:
    """A study as `autotune run` leads it, on an H100 whose clock is that of its probes."""
    spec = StudySpec(model=model, space=space, lengths=long_tailed(tmp_path))
    setup = set_up(spec, resolve_device("h100"))
    card = SlowCard(setup.task, 74.0, layer_load_s)
    setup = adapt_to_layers(setup, card.shape)
    task, prober, url = (
        setup.task,
        ReplayProber(card, shape=card.shape),
        f"sqlite:///{tmp_path}/one.db",
    )
    store, optimizer = ProbeStore(url), Optimizer.create(url, task.study, task.space, seed=0)
    evaluator = Evaluator(
        prober,
        store,
        study=task.study,
        logs=tmp_path,
        request=lambda config: task.request(
            config, device="cuda", memory_gib=79.0, headroom=0.05, seed=0
        ),
        model=task.model_key,
        shape=card.shape,
        formula=partial(memory_breakdown, task.model),
    )
    said: list[str] = []
    tried = find_feasible(task, setup.reserve, evaluator, said.append).tried
    trials = SharedTrials(
        task=task,
        optimizer=optimizer,
        evaluator=evaluator,
        limits=Limits(budget_s=budget_s),
        started=0.0,
        say=said.append,
        clock=card.clock,
    )
    trials.begin(tried)
    study = Study(trials)
    study.run()
    study.confirm()
    optimizer.close()
    session = Session(
        study=study, prober=prober, search=optimizer, evaluator=evaluator, store=store, said=said
    )
    return session, card


@pytest.mark.parametrize(
    ("model", "space", "budget_s", "layer_load_s"),
    [("qwen2.5-1.5b", "full", 60.0, 0.02), ("llama-3.1-70b", "qlora", 210.0, 0.15)],
)
def test_many_candidates_are_judged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    space: str,
    budget_s: float,
    layer_load_s: float,
) -> None:
    keep_studies_in_memory(monkeypatch)
    session, card = searched(tmp_path, model, space, budget_s, layer_load_s)
    session.store.close()
    trials = session.study.trials
    judged = {row.config for row in trials.rows if row.outcome is not Outcome.REFUSED}
    assert len(judged) >= 13
    assert card.now <= budget_s
    finalist = trials.selection.finalists(1)[0]
    assert (
        trials.selection.record(finalist).confirmed
        and finalist.packing
        and finalist.compile == "per_layer"
    )
    of_baseline = sum(
        seconds for config, _, seconds in card.spent if config in trials.task.baselines
    )
    assert of_baseline <= budget_s / 5
