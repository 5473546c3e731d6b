"""Measure how quickly searches find the best configuration: a table of a whole space, replays on
it, and live runs.
"""

import argparse
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import optuna
from bench import (
    DATA,
    Mode,
    command,
    finish,
    now,
    run_program,
    scratch,
    use_empty_compile_cache,
    worker,
)

from autotune.catalog import find_price, resolve_device, resolve_model
from autotune.core.files import write_atomic
from autotune.core.probe_types import (
    Evidence,
    Fingerprint,
    ModelShape,
    Outcome,
    ProbeRequest,
    ProbeResult,
)
from autotune.core.serialization import from_data, to_data
from autotune.core.train_config import TrainConfig
from autotune.prediction.depth_extrapolation import depths
from autotune.probe.supervisor import WorkerProber
from autotune.problem.constraints import Floors
from autotune.problem.length_distribution import Lengths
from autotune.problem.performance import tokens_per_s
from autotune.problem.search_space import Knob, SearchSpace
from autotune.problem.task import Task
from autotune.problem.workload import Workload
from autotune.study.distributed import SharedTrials
from autotune.study.evaluator import Evaluator, truncate_request
from autotune.study.loop import Study
from autotune.study.optimizer import Optimizer, distribution
from autotune.study.storage.probe_store import ProbeStore
from autotune.study.storage.study_record import Limits
from autotune.study.summary import TrialRecord

# --- table

TABLE = DATA / "mistral_7b_h200.jsonl"
SPACE = SearchSpace(
    name="search_efficiency",
    knobs=(
        Knob(name="quantization", values=("none", "nf4")),
        Knob(name="precision", values=("bf16_mixed", "bf16_pure")),
        Knob(name="checkpointing", values=("none", "every_2", "full")),
        Knob(name="compile", values=("none", "per_layer")),
        Knob(name="micro_batch_size", values=(1, 2, 4, 8, 16)),
        Knob(name="optimizer", values=("adamw_torch_fused", "adamw_8bit")),
        Knob(name="seq_len", values=(512,)),
        Knob(name="lora_rank", values=(16,)),
    ),
)
OPTIMIZER = "adamw_torch_fused"
WORKLOAD = Workload(examples=10_000, lengths=Lengths.constant(512), global_batch=32)


def request_of(
    config: TrainConfig, model: dict[str, Any], memory_gib: float, device: str = "cuda"
) -> ProbeRequest:
    return ProbeRequest(
        config=config,
        model=model,
        device=device,
        memory_gib=memory_gib,
        micro_steps=WORKLOAD.run_shape(config).probe_micro_steps,
    )


class Table:
    """The measured results by configuration and depth, and the properties of the machine."""

    def __init__(self, path: Path) -> None:
        lines = (
            [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        )
        self.about: dict[str, Any] = next((line for line in lines if "fingerprint" in line), {})
        self.results: dict[tuple[TrainConfig, int | None], ProbeResult] = {}
        self.cold: dict[TrainConfig, float] = {}
        for line in lines:
            if "results" in line:
                for data in line["results"]:
                    result = from_data(ProbeResult, data)
                    self.results[(result.config, result.depth)] = result
            elif "cold_seconds" in line:
                self.cold[TrainConfig(**line["config"])] = line["cold_seconds"]

    @property
    def fingerprint(self) -> Fingerprint:
        fingerprint: Fingerprint = from_data(Fingerprint, self.about["fingerprint"])
        return fingerprint

    @property
    def configs(self) -> list[TrainConfig]:
        return [config for config, depth in self.results if depth is None]

    def value(self, config: TrainConfig) -> float | None:
        result = self.results[(config, None)]
        return tokens_per_s(result, WORKLOAD) if result.outcome is Outcome.OK else None

    def best(self) -> float:
        return max(value for config in self.configs if (value := self.value(config)) is not None)

    @cached_property
    def compile_seconds(self) -> dict[TrainConfig, tuple[float, float]]:
        """Seconds of compilation for each compiled code: (with an empty cache, with the code in the
        cache on disk).

        They are the seconds of the first step on a few layers, which consist mostly of compilation.
        It was chance which of the configurations that share code compiled first.
        """
        first: dict[TrainConfig, list[float]] = {}
        depths_of: dict[TrainConfig, list[int]] = {}
        for config, depth in self.results:
            if depth is not None and config.compile != "none":
                depths_of.setdefault(config, []).append(depth)
        for config, measured_depths in depths_of.items():
            seconds = self.results[(config, min(measured_depths))].seconds.get("first_step", 0.0)
            first.setdefault(replace(config, optimizer=OPTIMIZER, checkpointing="none"), []).append(
                seconds
            )
        return {code: (max(seconds), min(seconds)) for code, seconds in first.items()}


class Charges:
    """Charge each probe of one search.

    Inductor's cache on disk starts empty and is shared by processes.
    """

    def __init__(self, table: Table) -> None:
        self._table, self._on_disk = table, set[TrainConfig]()

    def compiling(self, config: TrainConfig) -> float:
        """Seconds of compilation in a process that has not compiled this configuration yet."""
        if config.compile == "none":
            return 0.0
        empty_cache_s, cached_s = self._table.compile_seconds[
            replace(config, optimizer=OPTIMIZER, checkpointing="none")
        ]
        # Recomputed layers may have another backward pass, so that their code is not counted as
        # shared.
        code = replace(config, optimizer=OPTIMIZER)
        is_new = code not in self._on_disk
        self._on_disk.add(code)
        return empty_cache_s if is_new else cached_s

    def cold(self, config: TrainConfig) -> float:
        """Seconds in a fresh process: its start, the probe and the compilation."""
        whole = self._table.results[(config, None)].seconds.get("total", 0.0)
        return float(self._table.about["start_s"]) + whole + self.compiling(config)


def _slim(data: dict[str, Any]) -> dict[str, Any]:
    """Drop the fields that the table does not need, and round numbers to six decimals."""

    def rounded(value: Any) -> Any:
        if isinstance(value, float):
            return round(value, 6)
        if isinstance(value, list):
            return [rounded(item) for item in value]
        if isinstance(value, dict):
            return {key: rounded(item) for key, item in value.items() if item is not None}
        return value

    slim: dict[str, Any] = rounded(data)
    return {key: value for key, value in slim.items() if key not in ("log", "started_at", "notes")}


def run_measure(args: argparse.Namespace) -> None:
    """Measure every configuration of a search space for Mistral-7B, as the table that `replay`
    searches.

    Each line holds one configuration: probes at two truncated depths and of the whole model, by the
    product's own worker, with their seconds. A later call with the same file measures the missing
    configurations, until the time is over. A few configurations are also probed in a process of
    their own, to check the time that a replay charges for such probes.
    """
    until = time.monotonic() + args.seconds
    model = resolve_model(args.model)
    out = (args.out or TABLE.parent) / TABLE.name
    out.parent.mkdir(parents=True, exist_ok=True)
    table = Table(args.table)
    if args.table.exists() and args.table != out:
        out.write_text(args.table.read_text())
    logs = scratch()
    with WorkerProber(args.device, logs) as first:
        first.fingerprint  # noqa: B018 (loads the files into the page cache)

    with WorkerProber(args.device, logs) as prober, out.open("a") as file:
        start = time.monotonic()
        fingerprint = prober.fingerprint
        start_s = time.monotonic() - start
        shape = prober.describe(model.config)
        if table.about and fingerprint != table.fingerprint:
            differences = "; ".join(table.fingerprint.differences(fingerprint))
            raise SystemExit(f"the table was measured on a different machine: {differences}")
        if not table.about:
            about = {"start_s": start_s, "memory_gib": args.memory_gib, "shape": to_data(shape)}
            file.write(json.dumps({"fingerprint": to_data(fingerprint), **about}) + "\n")
        assert shape is not None

        missing = [
            config
            for config in map(SPACE.config, SPACE.enumerate())
            if (config, None) not in table.results
        ]
        sample = random.Random(1).sample(missing, len(missing))[: args.cold]
        for config in missing:
            if time.monotonic() > until:
                break
            whole = request_of(config, model.config, args.memory_gib, args.device)
            requests = [
                truncate_request(whole, depth)
                for depth in depths(shape, config.checkpoint_every) or ()
            ] + [whole]
            results = [prober.probe(request, logs / "probe.log") for request in requests]
            file.write(
                json.dumps({"results": [_slim(to_data(result)) for result in results]}) + "\n"
            )
            file.flush()
            seconds = sum(result.seconds["total"] for result in results)
            print(f"{config.label():<70} {results[-1].outcome} {seconds:.1f} s", flush=True)

        # A few again, each in a process of its own, to check the time that a replay charges.
        prober.close()
        for config in sample:
            if time.monotonic() > until:
                break
            use_empty_compile_cache()
            start = time.monotonic()
            with WorkerProber(args.device, logs) as fresh:
                fresh.probe(
                    request_of(config, model.config, args.memory_gib, args.device),
                    logs / "probe.log",
                )
            file.write(
                json.dumps({"config": config.as_dict(), "cold_seconds": time.monotonic() - start})
                + "\n"
            )


# --- replay

WITHIN = 0.02
LONGEST_S = 3600.0
# a known configuration costs a warm search nothing, so that time alone would not end it
MAX_TRIALS = 1000
LIVE_RUN = TABLE.with_name("search_live_h200.json")
# also bf16, rank 16, AdamW, not compiled
GUIDE = TrainConfig(micro_batch_size=1, seq_len=512, checkpointing="full")


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
        return [
            depth for other, depth in self._table.results if other == config and depth is not None
        ]

    def probe(self, request: ProbeRequest, log: Path) -> ProbeResult:
        result = self._table.results[(request.config, request.depth)]
        self.seconds += result.seconds["total"]
        if request.config.compile != "none":
            first = request.depth is not None and request.depth == min(self._depths(request.config))
            if first or request.config not in self._compiled:
                # When the table was measured, this probe or an earlier one compiled. Replace the
                # measured seconds by those of this search.
                measured = result.seconds.get("first_step", 0.0) if first else 0.0
                self.seconds += self._charges.compiling(request.config) - measured
            self._compiled.add(request.config)
        return replace(result, request_digest=request.digest, rung=request.rung)


def ours(table: Table, seed: int, goal: float, prober: TableProber | None = None) -> float:
    """Return the seconds until the product's own study has measured a configuration that reaches
    the goal.
    """
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
    """Run Optuna as in its tutorial: default settings, one process for each trial, out of memory is
    a failure.
    """
    return _search(table, goal, optuna.samplers.TPESampler(seed=seed), Charges(table).cold)


def optuna_warm(table: Table, seed: int, goal: float) -> float:
    """Run the same in one warm worker that measures nothing twice: only the search differs from
    ours.
    """
    prober, model, known = (
        TableProber(table),
        resolve_model("mistral-7b").config,
        set[TrainConfig](),
    )

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
    """Double the batch size of the guide's configuration until it no longer fits; no other knob
    changes.
    """
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


def summarize_replay(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over seeds, and their ratios to ours.

    `ratio_to_optuna` includes the cost of a process for each trial; `ratio_to_warm_tpe` compares
    the searches alone. `ours_distinct` counts the different results of ours: it is deterministic,
    so that all seeds are a single sample.
    """
    median = {name: statistics.median(row[name] for row in rows) for name in SEARCHES}
    quartiles = (
        statistics.quantiles([row["optuna_warm"] for row in rows], n=4) if len(rows) > 1 else []
    )
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


def run_live(args: argparse.Namespace) -> None:
    """Run our search and plain Optuna on a real GPU, one after the other, until each reaches the
    goal of the table.
    """
    table = Table(args.table)
    goal = table.best() * (1 - WITHIN)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    data: dict[str, Any] = {"command": command(), "date": now(), "rows": []}
    with worker(args.device) as prober:
        data["fingerprint"] = to_data(prober.fingerprint)
    for name, run in {"ours": live_ours, "optuna_cold": live_optuna}.items():
        data["rows"].append({"search": name, **run(args, table, goal)})
        print(data["rows"][-1], flush=True)
    write_atomic((args.out or LIVE_RUN.parent) / LIVE_RUN.name, json.dumps(data, indent=1) + "\n")


class LiveProber(TableProber):
    """A prober that uses the worker instead of the table, and the wall clock."""

    def __init__(self, table: Table, prober: WorkerProber) -> None:
        super().__init__(table)
        self._prober, self._begin, self.seconds = prober, time.monotonic(), 0.0

    def probe(self, request: ProbeRequest, log: Path) -> ProbeResult:
        result = self._prober.probe(request, log)
        self.seconds = time.monotonic() - self._begin
        return result


def live_ours(args: argparse.Namespace, table: Table, goal: float) -> dict[str, Any]:
    with worker(args.device) as prober:
        return {
            "seconds": ours(table, 0, goal, LiveProber(table, prober)),
            "replayed_seconds": ours(table, 0, goal),
        }


def live_optuna(args: argparse.Namespace, table: Table, goal: float) -> dict[str, Any]:
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    model = resolve_model("mistral-7b")
    charges, begin, charged_s, trials, reached = Charges(table), time.monotonic(), 0.0, 0, False
    while time.monotonic() - begin < args.seconds:
        trials += 1
        trial = study.ask({knob.name: distribution(knob) for knob in SPACE.knobs})
        config = SPACE.config(trial.params)
        with worker(args.device) as prober:
            request = request_of(config, model.config, table.about["memory_gib"])
            result = prober.probe(request, prober.logs / "probe.log")
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


def run_replay(args: argparse.Namespace) -> None:
    """Compare the GPU time that searches need to measure a configuration within 2 % of the best.

    Each search runs on the table that `measure` made, with many seeds. Each trial costs the time
    that was measured for it:

    - ours: the product's own study, with one start of the worker, shallow and full probes;
    - ours_climbing: the same without proposals from the formulas, whose constants were partly
    fitted on this table;
    - optuna_cold: TPE with its defaults; each trial in its own process; out of memory counts as
    FAIL;
    - optuna_warm: the same TPE with one warm worker and a cache of its own results, which leaves
    the search itself;
    - random: as optuna_cold, with random proposals;
    - doubling: the defaults of a guide, with the batch size doubled until it no longer fits.

    A search that does not reach the goal counts with the longest budget. The result includes the
    times of `live`, with the times that a replay charges for the same searches. No GPU is needed.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    table = Table(args.table)
    missing = [
        config.label()
        for config in map(SPACE.config, SPACE.enumerate())
        if (config, None) not in table.results
    ]
    if missing:
        raise SystemExit(
            f"the table lacks {len(missing)} configurations, the first: {missing[0]}; run `measure`"
            " again"
        )
    goal = table.best() * (1 - WITHIN)
    good = [config for config in table.configs if (table.value(config) or 0.0) >= goal]
    rows: list[dict[str, Any]] = []
    for seed in range(args.seeds):
        rows.append(
            {"seed": seed} | {name: search(table, seed, goal) for name, search in SEARCHES.items()}
        )
        print(rows[-1], flush=True)
    cold = [(Charges(table).cold(config), seconds) for config, seconds in table.cold.items()]
    finish(
        args,
        table.fingerprint,
        rows,
        configs=len(table.configs),
        configs_within_goal=len(good),
        best=max(good, key=lambda config: table.value(config) or 0.0).label(),
        best_tokens_per_second=table.best(),
        censored_at_s=LONGEST_S,
        live=json.loads(LIVE_RUN.read_text()) if LIVE_RUN.exists() else None,
        cold_charge_over_measured=statistics.median(charged / real for charged, real in cold)
        if cold
        else None,
    )


MODES = {
    "measure": Mode(
        run=run_measure,
        options={
            "--model": "mistral-7b",
            "--device": "cuda",
            "--memory-gib": 135.0,
            "--table": {"default": TABLE, "help": "the file of an earlier call"},
            "--seconds": 500.0,
            "--cold": {
                "default": 8,
                "help": "number of configurations to probe in a process of their own",
            },
            "--out": {"type": Path, "help": "folder of the table"},
        },
    ),
    "replay": Mode(
        run=run_replay,
        result="search_efficiency",
        summarize=summarize_replay,
        options={"--table": TABLE, "--seeds": 20},
    ),
    "live": Mode(
        run=run_live,
        options={
            "--device": "cuda",
            "--table": TABLE,
            "--seconds": {"default": 400.0, "help": "stop Optuna after this time"},
            "--out": {"type": Path, "help": "folder of the .json file"},
        },
    ),
}


if __name__ == "__main__":
    run_program(MODES, __doc__)
