"""How many seconds of GPU until a configuration within 2 % of the best is found: ours against other searches.

`measure` probes every configuration of a space of Mistral-7B, in the product's own worker, and writes a line each: two
truncated depths and the whole model, with what each took (run again with the file it wrote, it goes on where it ended).
`replay` runs each search on that table, over many seeds; every trial is charged what it was measured to take:

- ours: the product's own study, one worker start, shallow and full probes;
- optuna_cold: TPE with its defaults; a process for every trial; out of memory is FAIL;
- random_cold: the same with random proposals;
- doubling: the defaults of a guide, the batch doubled until it no longer fits.

`live` runs ours and optuna_cold for real, one after the other on the same machine, and is held against the replay.
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
from pathlib import Path
from typing import Any

import optuna
from common import save

from autotune.catalog import find_price, resolve_device, resolve_model
from autotune.config import TrainConfig
from autotune.depth import depths
from autotune.judge import Subject
from autotune.ladder import Ladder
from autotune.objective import Floors, score
from autotune.probe.launcher import WorkerProber
from autotune.recipe import TrialRow
from autotune.result import Fingerprint, ModelShape, Outcome, ProbeRequest, ProbeResult, Rung, from_data, to_data
from autotune.search import Search, distribution
from autotune.space import Knob, SearchSpace
from autotune.store import ProbeStore
from autotune.study import Limits, Study
from autotune.workload import Workload

TABLE = Path(__file__).parent / "data" / "mistral_7b_h200.jsonl"
WITHIN = 0.02
LONGEST_S = 3600.0
SPACE = SearchSpace(
    name="search_efficiency",
    knobs=(
        Knob(name="quantization", values=("none", "nf4"), kind="learning"),
        Knob(name="precision", values=("bf16_mixed", "bf16_pure"), kind="learning"),
        Knob(name="attention", values=("sdpa", "eager")),
        Knob(name="checkpointing", values=("none", "every_2", "full")),
        Knob(name="compile", values=("none", "per_layer")),
        Knob(name="micro_batch_size", values=(1, 2, 4, 8, 16)),
        Knob(name="seq_len", values=(512,), kind="learning"),
        Knob(name="lora_rank", values=(16,), kind="learning"),
    ),
)
WORKLOAD = Workload(examples=10_000, tokens_per_example=512, tokens_assumed=False, global_batch=32)
GUIDE = TrainConfig(micro_batch_size=1, seq_len=512, checkpointing="full")  # bf16, rank 16, AdamW, nothing compiled


def request_of(config: TrainConfig, model: dict[str, Any], memory_gib: float, device: str = "cuda") -> ProbeRequest:
    return ProbeRequest(
        config=config,
        model=model,
        device=device,
        memory_gib=memory_gib,
        micro_steps=min(WORKLOAD.accumulation(config.micro_batch_size), 2),
    )


def shallow_of(whole: ProbeRequest, depth: int) -> ProbeRequest:
    """As the ladder asks for it."""
    return replace(whole, depth=depth, rung=Rung.SHALLOW, min_timed_s=0.5, min_timed_steps=3)


class Table:
    """What was measured: results by configuration and depth, and the circumstances."""

    def __init__(self, path: Path) -> None:
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
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
        found: Fingerprint = from_data(Fingerprint, self.about["fingerprint"])
        return found

    @property
    def configs(self) -> list[TrainConfig]:
        return [config for config, depth in self.results if depth is None]

    def value(self, config: TrainConfig) -> float | None:
        result = self.results[(config, None)]
        return score(result, WORKLOAD) if result.outcome is Outcome.OK else None

    def best(self) -> float:
        return max(value for config in self.configs if (value := self.value(config)) is not None)

    def cold_seconds(self, config: TrainConfig) -> float:
        """A process of its own: its start, the probe, and the compilation that the shallow probe had paid for."""
        whole = self.results[(config, None)].seconds.get("total", 0.0)
        first = [one for (other, depth), one in self.results.items() if other == config and depth is not None]
        compiling = max((one.seconds.get("first_step", 0.0) for one in first), default=0.0)
        return float(self.about["start_s"]) + whole + (compiling if config.compile != "none" else 0.0)


def measure(args: argparse.Namespace) -> None:
    """Every configuration of the space that the table lacks, until the time is up."""
    until = time.monotonic() + args.seconds
    model = resolve_model(args.model)
    out = args.out / TABLE.name
    table = Table(args.table)
    if args.table.exists() and args.table != out:
        out.write_text(args.table.read_text())
    logs = Path(tempfile.mkdtemp(prefix="autotune-bench-"))
    with WorkerProber(args.device, logs) as prober, out.open("a") as file:
        prober.fingerprint  # noqa: B018 (the files are in the page cache from here on)
        prober.close()
        start = time.monotonic()
        prober.launch()
        fingerprint = prober.fingerprint
        shape = prober.describe(model.config)
        if not table.about:
            about = {"start_s": time.monotonic() - start, "memory_gib": args.memory_gib, "shape": to_data(shape)}
            file.write(json.dumps({"fingerprint": to_data(fingerprint), **about}) + "\n")
        assert shape is not None
        missing = [config for config in map(SPACE.config, SPACE.enumerate()) if (config, None) not in table.results]
        # A few in a process of their own, to hold the charges for those against.
        sample = random.Random(1).sample(missing, len(missing))[: args.cold]
        for config in missing:
            if time.monotonic() > until:
                break
            whole = request_of(config, model.config, args.memory_gib, args.device)
            requests = [shallow_of(whole, depth) for depth in depths(shape, config.checkpoint_every) or ()] + [whole]
            found = []
            for request in requests:
                found.append(prober.probe(request, logs / "probe.log"))
            line = {"results": [_slim(to_data(result)) for result in found]}
            file.write(json.dumps(line) + "\n")
            file.flush()
            last = found[-1]
            print(f"{config.label():<70} {last.outcome} {sum(one.seconds['total'] for one in found):.1f} s", flush=True)
        prober.close()
        for config in sample:
            if time.monotonic() > until:
                break
            start = time.monotonic()
            with WorkerProber(args.device, logs) as fresh:
                fresh.probe(request_of(config, model.config, args.memory_gib, args.device), logs / "probe.log")
            file.write(json.dumps({"config": config.as_dict(), "cold_seconds": time.monotonic() - start}) + "\n")


def _slim(data: dict[str, Any]) -> dict[str, Any]:
    """Without what the table repeats on every line, times to the microsecond."""

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


class TableProber:
    """Answers from the table, and lets a clock run by what each answer took when it was measured."""

    def __init__(self, table: Table) -> None:
        self._table, self.fingerprint = table, table.fingerprint
        self.seconds = float(table.about["start_s"])

    def describe(self, model: dict[str, Any]) -> ModelShape | None:
        shape: ModelShape = from_data(ModelShape, self._table.about["shape"])
        return shape

    def probe(self, request: ProbeRequest, log: Path) -> ProbeResult:
        result = self._table.results[(request.config, request.depth)]
        self.seconds += result.seconds["total"]
        return replace(result, request_digest=request.digest, rung=request.rung)


def ours(table: Table, seed: int, goal: float, prober: TableProber | None = None) -> float:
    """Seconds until the product's own study has measured a configuration that is good enough."""
    prober = prober or TableProber(table)
    model = resolve_model("mistral-7b")
    device = resolve_device("h200")
    subject = Subject(
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
        search = Search.create(url, "replay", SPACE, seed=seed, facts={})
        ladder = Ladder(
            prober,
            store,
            study="replay",
            logs=Path(folder),
            request=lambda config: request_of(config, model.config, table.about["memory_gib"]),
            model=model.digest,
            shape=prober.describe(model.config),
        )

        def on_trial(row: TrialRow) -> None:
            if row.outcome is Outcome.OK and (row.tokens_per_second or 0.0) >= goal and not reached:
                reached.append(prober.seconds)

        study = Study(
            subject,
            search,
            ladder,
            Limits(budget_s=LONGEST_S, patience=10_000),
            0.0,
            on_trial=on_trial,
            should_stop=lambda: bool(reached),
            clock=lambda: prober.seconds,
        )
        study.begin([subject.baselines()[0]])
        study.run()
        search.close()
        store.close()
    return reached[0] if reached else LONGEST_S


def optuna_cold(table: Table, seed: int, goal: float) -> float:
    """Optuna as its tutorial has it: defaults, a process a trial, what ran out of memory has failed."""
    return _plain(table, goal, optuna.samplers.TPESampler(seed=seed))


def random_cold(table: Table, seed: int, goal: float) -> float:
    return _plain(table, goal, optuna.samplers.RandomSampler(seed=seed))


def _plain(table: Table, goal: float, sampler: optuna.samplers.BaseSampler) -> float:
    study = optuna.create_study(direction="maximize", sampler=sampler)
    seconds = 0.0
    while seconds < LONGEST_S:
        trial = study.ask({knob.name: distribution(knob) for knob in SPACE.knobs})
        config = SPACE.config(trial.params)
        seconds += table.cold_seconds(config)
        value = table.value(config)
        if value is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            continue
        study.tell(trial, value)
        if value >= goal:
            return seconds
    return LONGEST_S


def doubling(table: Table, seed: int, goal: float) -> float:
    """The largest batch of the guide's configuration: it knows no other knob."""
    seconds = 0.0
    for size in itertools.takewhile(lambda size: size <= 16, (2**power for power in range(10))):
        config = replace(GUIDE, micro_batch_size=size)
        seconds += table.cold_seconds(config)
        value = table.value(config)
        if value is None:
            break
        if value >= goal:
            return seconds
    return LONGEST_S


SEARCHES: dict[str, Callable[[Table, int, float], float]] = {
    "ours": ours,
    "optuna_cold": optuna_cold,
    "random": random_cold,
    "doubling": doubling,
}


def replay(args: argparse.Namespace) -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    table = Table(args.table)
    goal = table.best() * (1 - WITHIN)
    good = [config for config in table.configs if (table.value(config) or 0.0) >= goal]
    rows: list[dict[str, Any]] = []
    for seed in range(args.seeds):
        row = {"seed": seed} | {name: search(table, seed, goal) for name, search in SEARCHES.items()}
        rows.append(row)
        print(row, flush=True)
    median = {name: statistics.median(row[name] for row in rows) for name in SEARCHES}
    cold = [(table.cold_seconds(config), seconds) for config, seconds in table.cold.items()]
    summary = {
        **{f"{name}_seconds": seconds for name, seconds in median.items()},
        "ratio_to_optuna": median["optuna_cold"] / median["ours"],
        "seeds": args.seeds,
        "configs": len(table.configs),
        "configs_within_goal": len(good),
        "best": max(good, key=lambda config: table.value(config) or 0.0).label(),
        "best_tokens_per_second": table.best(),
        "censored_at_s": LONGEST_S,
        "censored": {name: sum(row[name] >= LONGEST_S for row in rows) for name in SEARCHES},
        "cold_charge_over_measured": statistics.median(charged / real for charged, real in cold) if cold else None,
    }
    save("search_efficiency", table.fingerprint, summary, rows, args.out)
    print(json.dumps(summary, indent=1))


def live(args: argparse.Namespace) -> None:
    """Ours and plain Optuna for real, until each has found a configuration that the table calls good enough."""
    table = Table(args.table)
    goal = table.best() * (1 - WITHIN)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    rows = [{"search": name, **run(args, table, goal)} for name, run in LIVE.items()]
    for row in rows:
        print(row)
    save("search_efficiency_live", table.fingerprint, {row["search"]: row["seconds"] for row in rows}, rows, args.out)


class LiveProber(TableProber):
    """The worker itself in the table's place, on the wall clock."""

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
    begin, charged, trials = time.monotonic(), 0.0, 0
    while time.monotonic() - begin < args.seconds:
        trials += 1
        trial = study.ask({knob.name: distribution(knob) for knob in SPACE.knobs})
        config = SPACE.config(trial.params)
        logs = Path(tempfile.mkdtemp(prefix="autotune-bench-"))
        with WorkerProber(args.device, logs) as prober:
            result = prober.probe(request_of(config, model.config, table.about["memory_gib"]), logs / "probe.log")
        charged += table.cold_seconds(config)
        value = score(result, WORKLOAD) if result.outcome is Outcome.OK else None
        if value is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            continue
        study.tell(trial, value)
        if value >= goal:
            break
    return {"seconds": time.monotonic() - begin, "charged_seconds": charged, "trials": trials}


LIVE = {"ours": live_ours, "optuna_cold": live_optuna}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "replay", "live"))
    parser.add_argument("--model", default="mistral-7b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--memory-gib", type=float, default=135.0)
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--seconds", type=float, default=540.0, help="measure, live: stop after so long")
    parser.add_argument("--cold", type=int, default=8, help="measure: configurations in a process of their own")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    {"measure": measure, "replay": replay, "live": live}[args.what](args)


if __name__ == "__main__":
    main()
