"""Compare the GPU time that searches need to measure a configuration within 2 % of the best.

`replay` runs each search on the table that `search_table` measured, with many seeds. Each trial costs the time that was
measured for it:

- ours: the product's own study, with one start of the worker, shallow and full probes;
- ours_climbing: the same without proposals from the formulas, whose constants were partly fitted on this table;
- optuna_cold: TPE with its defaults; each trial in its own process; out of memory counts as FAIL;
- optuna_warm: the same TPE with one warm worker and a cache of its own results, which leaves the search itself;
- random: as optuna_cold, with random proposals;
- doubling: the defaults of a guide, with the batch size doubled until it no longer fits.

A search that does not reach the goal counts with the longest budget. `live` runs ours and optuna_cold on a real GPU,
one after the other. `replay` adds the live times to its result, with the times that it charges for the same searches.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import optuna
from common import command, now, save
from search_table import SPACE, TABLE, WORKLOAD, Charges, Table, request_of

from autotune.catalog import find_price, resolve_device, resolve_model
from autotune.core.files import write_atomic
from autotune.core.probe_types import Evidence, ModelShape, Outcome, ProbeRequest, ProbeResult
from autotune.core.serialization import from_data, to_data
from autotune.core.train_config import TrainConfig
from autotune.probe.supervisor import WorkerProber
from autotune.problem.constraints import Floors
from autotune.problem.performance import tokens_per_s
from autotune.problem.task import Task
from autotune.study.distributed import SharedTrials
from autotune.study.evaluator import Evaluator
from autotune.study.loop import Study
from autotune.study.optimizer import Optimizer, distribution
from autotune.study.storage.probe_store import ProbeStore
from autotune.study.storage.study_record import Limits
from autotune.study.summary import TrialRecord

WITHIN = 0.02
LONGEST_S = 3600.0
MAX_TRIALS = 1000  # a known configuration costs a warm search nothing, so that time alone would not end it
LIVE_RUN = TABLE.with_name("search_live_h200.json")
GUIDE = TrainConfig(micro_batch_size=1, seq_len=512, checkpointing="full")  # also bf16, rank 16, AdamW, not compiled


class TableProber:
    """A prober that answers from the table and adds up the measured seconds of each answer."""

    def __init__(self, table: Table) -> None:
        self._table, self.fingerprint = table, table.fingerprint
        self._compiled = set[TrainConfig]()  # code that this process has compiled
        self._charges = Charges(table)
        self.seconds = float(table.about["start_s"])

    def describe(self, model: dict[str, Any]) -> ModelShape | None:
        shape: ModelShape = from_data(ModelShape, self._table.about["shape"])
        return shape

    def _depths(self, config: TrainConfig) -> list[int]:
        return [depth for other, depth in self._table.results if other == config and depth is not None]

    def probe(self, request: ProbeRequest, log: Path) -> ProbeResult:
        result = self._table.results[(request.config, request.depth)]
        self.seconds += result.seconds["total"]
        if request.config.compile != "none":
            first = request.depth is not None and request.depth == min(self._depths(request.config))
            if first or request.config not in self._compiled:
                # When the table was measured, this probe or an earlier one compiled. Replace the measured seconds by
                # those of this search.
                measured = result.seconds.get("first_step", 0.0) if first else 0.0
                self.seconds += self._charges.compiling(request.config) - measured
            self._compiled.add(request.config)
        return replace(result, request_digest=request.digest, rung=request.rung)


def ours(table: Table, seed: int, goal: float, prober: TableProber | None = None) -> float:
    """Return the seconds until the product's own study has measured a configuration that reaches the goal."""
    prober = prober or TableProber(table)
    model = resolve_model("mistral-7b")
    device = resolve_device("h200")
    task = Task(
        study="replay",
        model=model,
        device=device,
        price=find_price(device.name),
        workload=WORKLOAD,
        floors=Floors(),
        space=SPACE,
    )
    reached: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/replay.db"
        store = ProbeStore(url)
        search = Optimizer.create(url, "replay", SPACE, seed=seed)
        evaluator = Evaluator(
            prober,
            store,
            study="replay",
            logs=Path(folder),
            request=lambda config: request_of(config, model.config, table.about["memory_gib"]),
            model=model.digest,
            shape=prober.describe(model.config),
        )

        def on_trial(row: TrialRecord) -> None:
            measured = row.outcome is Outcome.OK and row.evidence is Evidence.MEASURED
            if measured and (row.tokens_per_second or 0.0) >= goal and not reached:
                reached.append(prober.seconds)

        trials = SharedTrials(
            task=task,
            optimizer=search,
            evaluator=evaluator,
            limits=Limits(budget_s=LONGEST_S, patience=10_000),
            started=0.0,
            should_stop=lambda: bool(reached),
            clock=lambda: prober.seconds,
            on_trial=on_trial,
        )
        trials.begin([task.baselines[0]])
        Study(trials).run()
        search.close()
        store.close()
    return reached[0] if reached else LONGEST_S


def ours_climbing(table: Table, seed: int, goal: float) -> float:
    with patch("autotune.study.coordinate_search.formula_seeds", lambda *_: ()):
        return ours(table, seed, goal)


def optuna_cold(table: Table, seed: int, goal: float) -> float:
    """Run Optuna as in its tutorial: default settings, one process for each trial, out of memory is a failure."""
    return _search(table, goal, optuna.samplers.TPESampler(seed=seed), Charges(table).cold)


def optuna_warm(table: Table, seed: int, goal: float) -> float:
    """Run the same in one warm worker that measures nothing twice: only the search differs from ours."""
    prober, model, known = TableProber(table), resolve_model("mistral-7b").config, set[TrainConfig]()

    def charge(config: TrainConfig) -> float:
        before = prober.seconds
        if config not in known:
            prober.probe(request_of(config, model, table.about["memory_gib"]), Path())
        known.add(config)
        return prober.seconds - before

    return _search(table, goal, optuna.samplers.TPESampler(seed=seed), charge, prober.seconds)


def random_cold(table: Table, seed: int, goal: float) -> float:
    return _search(table, goal, optuna.samplers.RandomSampler(seed=seed), Charges(table).cold)


def _search(
    table: Table,
    goal: float,
    sampler: optuna.samplers.BaseSampler,
    charge: Callable[[TrainConfig], float],
    seconds: float = 0.0,
) -> float:
    study = optuna.create_study(direction="maximize", sampler=sampler)
    while seconds < LONGEST_S and len(study.trials) < MAX_TRIALS:
        trial = study.ask({knob.name: distribution(knob) for knob in SPACE.knobs})
        config = SPACE.config(trial.params)
        seconds += charge(config)
        value = table.value(config)
        if value is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            continue
        study.tell(trial, value)
        if value >= goal:
            return seconds
    return LONGEST_S


def doubling(table: Table, seed: int, goal: float) -> float:
    """Double the batch size of the guide's configuration until it no longer fits; no other knob changes."""
    charges, seconds = Charges(table), 0.0
    for size in itertools.takewhile(lambda size: size <= 16, (2**power for power in range(10))):
        config = replace(GUIDE, micro_batch_size=size)
        seconds += charges.cold(config)
        value = table.value(config)
        if value is None:
            break
        if value >= goal:
            return seconds
    return LONGEST_S


SEARCHES: dict[str, Callable[[Table, int, float], float]] = {
    "ours": ours,
    "ours_climbing": ours_climbing,
    "optuna_cold": optuna_cold,
    "optuna_warm": optuna_warm,
    "random": random_cold,
    "doubling": doubling,
}


def replay(args: argparse.Namespace) -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    table = Table(args.table)
    missing = [config.label() for config in map(SPACE.config, SPACE.enumerate()) if (config, None) not in table.results]
    if missing:
        raise SystemExit(f"the table lacks {len(missing)} configurations, the first: {missing[0]}; run `measure` again")
    goal = table.best() * (1 - WITHIN)
    good = [config for config in table.configs if (table.value(config) or 0.0) >= goal]
    rows: list[dict[str, Any]] = []
    for seed in range(args.seeds):
        row = {"seed": seed} | {name: search(table, seed, goal) for name, search in SEARCHES.items()}
        rows.append(row)
        print(row, flush=True)
    cold = [(Charges(table).cold(config), seconds) for config, seconds in table.cold.items()]
    summary = {
        **summarize(rows),
        "configs": len(table.configs),
        "configs_within_goal": len(good),
        "best": max(good, key=lambda config: table.value(config) or 0.0).label(),
        "best_tokens_per_second": table.best(),
        "censored_at_s": LONGEST_S,
        "live": json.loads(LIVE_RUN.read_text()) if LIVE_RUN.exists() else None,
        "cold_charge_over_measured": statistics.median(charged / real for charged, real in cold) if cold else None,
    }
    save("search_efficiency", table.fingerprint, summary, rows, args.out)
    print(json.dumps(summary, indent=1))


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over seeds, and their ratios to ours.

    `ratio_to_optuna` includes what a process for each trial costs; `ratio_to_warm_tpe` compares the searches alone.
    `ours_distinct` counts the different results of ours: it is deterministic, so that all seeds are a single sample.
    """
    median = {name: statistics.median(row[name] for row in rows) for name in SEARCHES}
    quartiles = statistics.quantiles([row["optuna_warm"] for row in rows], n=4) if len(rows) > 1 else []
    return {
        **{f"{name}_seconds": seconds for name, seconds in median.items()},
        "ratio_to_optuna": median["optuna_cold"] / median["ours"],
        "ratio_to_warm_tpe": median["optuna_warm"] / median["ours"],
        "ratio_to_warm_tpe_climbing": median["optuna_warm"] / median["ours_climbing"],
        "optuna_warm_quartiles": quartiles[::2],
        "seeds": len(rows),
        "ours_distinct": len({row["ours"] for row in rows}),
        "censored": {name: sum(row[name] >= LONGEST_S for row in rows) for name in SEARCHES},
    }


def live(args: argparse.Namespace) -> None:
    """Run our search and plain Optuna on a real GPU until each reaches the goal of the table."""
    table = Table(args.table)
    goal = table.best() * (1 - WITHIN)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    data: dict[str, Any] = {"command": command("search_efficiency"), "date": now(), "rows": []}
    with WorkerProber(args.device, Path(tempfile.mkdtemp(prefix="autotune-bench-"))) as worker:
        data["fingerprint"] = to_data(worker.fingerprint)
    for name, run in LIVE.items():
        data["rows"].append({"search": name, **run(args, table, goal)})
        print(data["rows"][-1], flush=True)
    write_atomic((args.out or LIVE_RUN.parent) / LIVE_RUN.name, json.dumps(data, indent=1) + "\n")


class LiveProber(TableProber):
    """A prober that uses the worker instead of the table, and the wall clock."""

    def __init__(self, table: Table, worker: WorkerProber) -> None:
        super().__init__(table)
        self._worker, self._begin, self.seconds = worker, time.monotonic(), 0.0

    def probe(self, request: ProbeRequest, log: Path) -> ProbeResult:
        result = self._worker.probe(request, log)
        self.seconds = time.monotonic() - self._begin
        return result


def live_ours(args: argparse.Namespace, table: Table, goal: float) -> dict[str, Any]:
    with WorkerProber(args.device, Path(tempfile.mkdtemp(prefix="autotune-bench-"))) as worker:
        return {"seconds": ours(table, 0, goal, LiveProber(table, worker)), "replayed_seconds": ours(table, 0, goal)}


def live_optuna(args: argparse.Namespace, table: Table, goal: float) -> dict[str, Any]:
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    model = resolve_model("mistral-7b")
    charges, begin, charged_s, trials, reached = Charges(table), time.monotonic(), 0.0, 0, False
    while time.monotonic() - begin < args.seconds:
        trials += 1
        trial = study.ask({knob.name: distribution(knob) for knob in SPACE.knobs})
        config = SPACE.config(trial.params)
        logs = Path(tempfile.mkdtemp(prefix="autotune-bench-"))
        with WorkerProber(args.device, logs) as prober:
            result = prober.probe(request_of(config, model.config, table.about["memory_gib"]), logs / "probe.log")
        charged_s += charges.cold(config)
        value = tokens_per_s(result, WORKLOAD) if result.outcome is Outcome.OK else None
        if value is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            continue
        study.tell(trial, value)
        if value >= goal:
            reached = True
            break
    seconds = time.monotonic() - begin
    return {"seconds": seconds, "charged_seconds": charged_s, "trials": trials, "reached": reached}


LIVE = {"ours": live_ours, "optuna_cold": live_optuna}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("replay", "live"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--seconds", type=float, default=400.0, help="live: stop Optuna after this time")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    {"replay": replay, "live": live}[args.what](args)


if __name__ == "__main__":
    main()
