"""Share the frame of all benchmarks: modes, result files, stored rows, runs of the command line,
and probes.
"""

import argparse
import inspect
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autotune.catalog import DeviceSpec, ModelSpec, resolve_model
from autotune.core.errors import AutotuneError
from autotune.core.files import load_yaml, write_atomic
from autotune.core.parallelism import ZERO
from autotune.core.probe_types import Fingerprint, Measurement, Outcome, ProbeRequest
from autotune.core.serialization import from_data, to_data
from autotune.core.train_config import TrainConfig
from autotune.prediction.depth_extrapolation import depths, extrapolate
from autotune.prediction.projection import run_tokens_per_s
from autotune.probe.rank_pool import RankPool
from autotune.probe.supervisor import WorkerProber
from autotune.problem.length_distribution import Lengths
from autotune.problem.performance import performance
from autotune.problem.task import Task
from autotune.problem.workload import Workload
from autotune.study.evaluator import truncate_request
from autotune.study.storage.probe_store import StoredProbe

ROOT = Path(__file__).parent.parent
DATA = ROOT / "benchmarks" / "data"
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT))  # for tests.helpers, which some benchmarks import after this module

# Options that several programs have. A mode adds its default.
SHARED_OPTIONS: dict[str, dict[str, Any]] = {
    "--gpu": {"help": "a GPU of the catalogue, auto, or cpu for a trial run"},
    "--model": {"help": "a model of the catalogue"},
    "--models": {"nargs": "*", "help": "models of the catalogue"},
    "--device": {"help": "cuda, or cpu for a trial run"},
    "--memory-gib": {"type": float, "help": "memory limit of a probe"},
    "--budget": {"help": "time budget of each study"},
    "--seconds": {"help": "start no measurement after this time; 0 measures nothing"},
    "--rows": {
        "type": Path,
        "metavar": "FILE",
        "help": "rows or result of an earlier call on the same machine: measure only the missing"
        " rows",
    },
    "--counted": {
        "type": Path,
        "metavar": "FILE",
        "help": "an earlier result: count only the rows that it lacks",
    },
    "--keep": {
        "type": Path,
        "metavar": "DIR",
        "help": "run in this folder and keep the studies in it",
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One mode of a benchmark program. The docstring of `run` is its help text.

    `result` names the result file that the mode writes. `summarize` computes the summary of that
    file from its rows. `options` maps each option to its default, or to the arguments of argparse's
    `add_argument`.
    """

    run: Callable[[argparse.Namespace], None]
    result: str | None = None
    summarize: Callable[[list[dict[str, Any]]], dict[str, Any]] = lambda rows: {}
    options: Mapping[str, Any] = field(default_factory=dict)


def run_program(modes: Mapping[str, Mode], description: str | None = None) -> None:
    """Run the mode that the command line names. A program with a single mode calls it ""."""
    look = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=look)
    parsers = {"": parser}
    if "" not in modes:
        commands = parser.add_subparsers(metavar="MODE", required=True)
        for name, mode in modes.items():
            text = (inspect.getdoc(mode.run) or "").replace("%", "%%")
            brief = text.partition("\n")[0]
            parsers[name] = commands.add_parser(
                name, help=brief, description=text, formatter_class=look
            )
    for name, mode in modes.items():
        _add_options(parsers[name], mode)
    args = parser.parse_args()
    args.mode.run(args)


def _add_options(parser: argparse.ArgumentParser, mode: Mode) -> None:
    parser.set_defaults(mode=mode)
    for name, value in mode.options.items():
        given = dict(value) if isinstance(value, dict) else {"default": value}
        known = SHARED_OPTIONS.get(name, {}) | given
        default = known.get("default")
        if default is False:
            known["action"] = "store_true"
        elif isinstance(default, int | float | Path):
            known.setdefault("type", type(default))
        parser.add_argument(name, **known)
    if mode.result is not None:
        parser.add_argument(
            "--out", type=Path, metavar="DIR", help="folder of the result [benchmarks/results]"
        )


def save(
    args: argparse.Namespace,
    fingerprint: Fingerprint | dict[str, Any] | None,
    rows: list[dict[str, Any]],
    /,
    **beside: Any,
) -> dict[str, Any]:
    """Write the result of a mode and return its summary. `beside` holds the keys that no row has.

    The file has: schema_version, command, date, fingerprint, summary, rows.
    """
    summary: dict[str, Any] = args.mode.summarize(rows) | beside
    if isinstance(fingerprint, dict):
        fingerprint = from_data(Fingerprint, fingerprint)
    data = {
        "schema_version": 1,
        "command": command(),
        "date": now(),
        "fingerprint": fingerprint and to_data(fingerprint),
        "summary": summary,
        "rows": rows,
    }
    write_atomic(
        (args.out or RESULTS) / f"{args.mode.result}.json", json.dumps(data, indent=1) + "\n"
    )
    return summary


def finish(
    args: argparse.Namespace,
    fingerprint: Fingerprint | dict[str, Any] | None,
    rows: list[dict[str, Any]],
    columns: Iterable[str] = (),
    /,
    **beside: Any,
) -> None:
    """Save the result of a mode, and print these columns of its rows and its summary."""
    summary = save(args, fingerprint, rows, **beside)
    if shown := list(columns):
        table(rows, shown)
    print(json.dumps(summary, indent=1))


def load(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a file: a result (.json), stored rows
    (.jsonl) or published cases (.yaml).
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".yaml":
        return load_yaml(text)["rows"]
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    return json.loads(text)["rows"]


def result_rows(name: str) -> list[dict[str, Any]]:
    """Read the rows of a stored result."""
    return load(RESULTS / f"{name}.json")


def command() -> str:
    """Return the command line of this program, without `--out`."""
    words = list(sys.argv[1:])
    if "--out" in words:
        place = words.index("--out")
        del words[place : place + 2]
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def scratch() -> Path:
    """Make a temporary folder."""
    return Path(tempfile.mkdtemp(prefix="autotune-bench-"))


def use_empty_compile_cache() -> None:
    """Give the next process an empty Inductor cache on disk, so
    that it compiles everything itself.
    """
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        os.environ[name] = tempfile.mkdtemp(prefix="autotune-cache-")


def run_python(arguments: list[str], folder: Path) -> str:
    """Run Python with these arguments and return its output. Raises SystemExit if it fails."""
    process = subprocess.run(
        [sys.executable, *arguments], cwd=folder, check=False, stdout=subprocess.PIPE, text=True
    )
    if process.returncode:
        raise SystemExit(f"{shlex.join(arguments)} failed with exit code {process.returncode}")
    return process.stdout


def run_study(folder: Path, *options: str) -> dict[str, Any]:
    """Run `autotune run` with these options in this folder and return its summary."""
    summary: dict[str, Any] = json.loads(
        run_python(["-m", "autotune", "run", *options, "--json"], folder)
    )
    return summary


def timed_trials(stored: list[StoredProbe], task: Task, began: float) -> list[dict[str, Any]]:
    """Return the second at which each trial of a study ended, its configuration and its speed.

    `began` is the time.time() at which the command began.
    """
    ends: dict[int | None, float] = {}
    trials: list[dict[str, Any]] = []
    for row in stored:
        result = row.result
        if result.started_at is not None and result.seconds:
            start = datetime.fromisoformat(result.started_at).timestamp() - began
            ends[row.trial] = start + result.seconds["total"]
        if row.trial is None or result.depth is not None or result.outcome is Outcome.REFUSED:
            continue
        # The first trial may be probed before the search begins.
        end = ends.get(row.trial, ends.get(None) if row.trial == 0 else None)
        has_speed = result.outcome in (Outcome.OK, Outcome.SLOW)
        trials.append(
            {
                "end_s": end,
                "config": result.config.label(),
                "tokens_per_s": run_tokens_per_s(task, result) if has_speed else None,
                "outcome": result.outcome,
            }
        )
    return [trial for trial in trials if trial["end_s"] is not None]


def fingerprint_of(study: dict[str, Any]) -> dict[str, Any]:
    """Return the fingerprint in the summary of a study, without its digest."""
    return {key: value for key, value in study["fingerprint"].items() if key != "digest"}


def run_exported(folder: Path, *options: str) -> dict[str, Any]:
    """Run the exported train.py of a study with random weights
    and return its last line of output.
    """
    script = ["out/export/train.py", "--random-weights", *options]
    done: dict[str, Any] = json.loads(run_python(script, folder).splitlines()[-1])
    return done


def set_options(pins: Mapping[str, Any]) -> list[str]:
    """Return the `--set` options of `autotune run` for these knobs."""
    words = {
        name: value if isinstance(value, str) else json.dumps(value) for name, value in pins.items()
    }
    return [word for name, value in words.items() for word in ("--set", f"{name}={value}")]


def worker(device: str) -> WorkerProber:
    """Start a warm worker with logs in a temporary folder."""
    return WorkerProber(device, scratch())


def device_of(spec: DeviceSpec) -> str:
    """Return the torch device of a GPU or CPU of the catalogue."""
    return "cpu" if spec.kind == "cpu" else "cuda"


def speed(
    prober: WorkerProber,
    model: ModelSpec,
    device: DeviceSpec,
    config: TrainConfig,
    memory_gib: float,
    workload: Workload | None = None,
) -> dict[str, Any]:
    """Probe the whole model. The default workload has 32 full rows in each optimizer step."""
    kinds = workload.micro_batches(config) if workload else ()
    workload = workload or Workload(
        examples=10_000, lengths=Lengths.constant(config.seq_len), global_batch=32
    )
    micro_steps = workload.run_shape(config).probe_micro_steps
    request = ProbeRequest(
        config=config,
        model=model.config,
        device=prober.device,
        memory_gib=memory_gib,
        micro_steps=micro_steps,
        micro_batches=kinds,
    )
    result = prober.probe(request, prober.logs / "probe.log")
    row: dict[str, Any] = {
        "model": model.short,
        "config": config.label(),
        "outcome": result.outcome.value,
    }
    if result.outcome is not Outcome.OK or result.measurement is None:
        return row | {"reason": result.reason}
    flops = model.flops_per_token(config.method, config.seq_len)
    found = performance(
        config,
        [result.measurement],
        workload,
        flops_per_token=flops,
        peak_tflops=device.bf16_tflops,
    )
    return row | {
        "tokens_per_s": found.tokens_per_second,
        "mfu": found.mfu,
        "peak_allocated_gib": result.measurement.peak_allocated_gib,
        "peak_reserved_gib": result.measurement.peak_reserved_gib,
    }


class Rows:
    """Append rows at once to a .jsonl file, so that an interrupted benchmark loses none.

    The file begins with the rows of `earlier`, the file of an earlier call on the same kind of
    machine.
    """

    def __init__(self, name: str, out: Path | None, earlier: Path | None) -> None:
        self.all: list[dict[str, Any]] = load(earlier) if earlier else []
        folder = out or RESULTS
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{name}.jsonl"
        self._path.write_text("".join(json.dumps(row) + "\n" for row in self.all))

    @classmethod
    def of(cls, args: argparse.Namespace) -> "Rows":
        """Open the rows of a mode. They continue the rows of `--rows`."""
        return cls(args.mode.result, args.out, args.rows)

    @property
    def fingerprint(self) -> dict[str, Any] | None:
        """The first fingerprint in the rows."""
        return next((row["fingerprint"] for row in self.all if row.get("fingerprint")), None)

    @property
    def plain(self) -> list[dict[str, Any]]:
        """The rows without their fingerprints."""
        return [
            {key: value for key, value in row.items() if key != "fingerprint"} for row in self.all
        ]

    def add(self, row: dict[str, Any]) -> None:
        self.all.append(row)
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def has(self, **values: Any) -> bool:
        """Whether some row has all these values."""
        return any(all(row.get(key) == value for key, value in values.items()) for row in self.all)


TINY_MODEL: dict[str, Any] = {  # for a trial run on a CPU
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 8,
    "vocab_size": 256,
}
STUDY_OPTIONS: dict[str, Any] = {  # of a benchmark that runs studies
    "--gpu": "auto",
    "--rows": None,
    "options": {
        "nargs": "*",
        "metavar": "-- OPTIONS",
        "help": "more options of `autotune run`",
    },
}
RANKS = 2
RANK_OPTIONS: dict[str, Any] = {  # of a benchmark on real ranks
    "--device": "cuda",
    "--memory-gib": {"help": "memory limit of a rank [all memory of its device]"},
    "--only": {"type": int, "metavar": "N", "help": "measure only the first N configurations"},
    "--rows": None,
}


class Failed(Exception):
    """A probe gave no measurement. The message says why."""


def rank_config(device: str, knobs: dict[str, Any]) -> TrainConfig:
    """Return a configuration with rows of 1,024 tokens, or a small one for a CPU."""
    if device == "cpu":
        # DeepSpeed's stages need bf16
        precision = "bf16_mixed" if knobs.get("sharding") in ZERO else "fp32"
        knobs = knobs | {"seq_len": 64, "precision": precision}
    return TrainConfig(**({"seq_len": 1024, "loss": "full"} | knobs))


def rank_model(device: str, name: str, layers: int | None = None) -> dict[str, Any]:
    """Return the config of a model; on a CPU, the config of a tiny model that has two depths as
    well.
    """
    model = (
        TINY_MODEL | {"num_hidden_layers": 16}
        if device == "cpu"
        else dict(resolve_model(name).config)
    )
    return model if layers is None else model | {"num_hidden_layers": layers}


def measured(pool: RankPool | WorkerProber, request: ProbeRequest) -> Measurement:
    """Probe and return the measurement. Raises Failed."""
    result = pool.probe(request, pool.logs / "probe.log")
    if result.outcome is not Outcome.OK or result.measurement is None:
        raise Failed(f"{result.outcome}: {result.reason}")
    return result.measurement


def predicted(pool: RankPool | WorkerProber, whole: ProbeRequest) -> tuple[Measurement, list[int]]:
    """Predict a whole model from two truncated depths.

    Return also the depths, the model's own last. Raises Failed.
    """
    shape = pool.describe(whole.model)
    pair = (
        depths(shape, whole.config.checkpoint_every, sharded=whole.parallelism.shards)
        if shape
        else None
    )
    if shape is None or pair is None:
        raise Failed("no two depths are known for this model")
    probes = [(depth, measured(pool, truncate_request(whole, depth))) for depth in pair]
    prediction = extrapolate(probes, shape.num_layers, shape.single_layers)
    return prediction.measurement, [*pair, shape.num_layers]


def collect(
    args: argparse.Namespace,
    pool: RankPool,
    wanted: list[Any],
    measure: Callable[[Any], dict[str, Any]],
) -> None:
    """Measure one configuration after another, and print and save each at once.

    A failure becomes a row too.
    """
    earlier = json.loads(args.rows.read_text()) if args.rows else {"rows": []}
    if args.rows and earlier["fingerprint"] != to_data(pool.fingerprint):
        raise SystemExit(f"{args.rows} was measured on another machine, or with other packages")
    known = {row["config"]: row for row in earlier["rows"]}

    rows: list[dict[str, Any]] = []
    for one in wanted[: args.only]:
        if str(one) in known:
            rows.append(known[str(one)])
            continue
        began = time.monotonic()
        try:
            row = measure(one)
        except (Failed, AutotuneError) as error:
            row = {"config": str(one), "failed": str(error)}
        rows.append(row | {"seconds": time.monotonic() - began})
        print(", ".join(f"{key} {_cell(value)}" for key, value in rows[-1].items()), flush=True)
        save(args, pool.fingerprint, rows)
    print(args.mode.summarize(rows))


def largest(rows: Iterable[dict[str, Any]], key: str) -> float | None:
    """Return the largest absolute value of a key, or None without a value."""
    return max((abs(row[key]) for row in rows if row.get(key) is not None), default=None)


def table(rows: list[dict[str, Any]], columns: list[str]) -> None:
    """Print rows as an aligned table."""
    cells = [columns] + [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    for row in cells:
        print(
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        )


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
