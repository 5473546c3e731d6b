"""Shared helpers of the benchmarks: result files, runs of the command line, and probes of whole models."""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from autotune.catalog import DeviceSpec, ModelSpec, resolve_model
from autotune.core.errors import AutotuneError
from autotune.core.files import write_atomic
from autotune.core.parallelism import ZERO
from autotune.core.probe_types import Fingerprint, Measurement, Outcome, ProbeRequest
from autotune.core.serialization import to_data
from autotune.core.train_config import TrainConfig
from autotune.prediction.depth_extrapolation import depths, extrapolate
from autotune.probe.rank_pool import RankPool
from autotune.probe.supervisor import WorkerProber
from autotune.problem.length_distribution import Lengths
from autotune.problem.performance import performance
from autotune.problem.workload import Workload
from autotune.study.evaluator import shortened

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def save(
    name: str, fingerprint: Fingerprint | None, summary: dict[str, Any], rows: list[dict[str, Any]], out: Path | None
) -> None:
    """Write <out or results>/<name>.json: schema_version, command, date, fingerprint, summary, rows."""
    data = {
        "schema_version": 1,
        "command": command(name),
        "date": now(),
        "fingerprint": fingerprint and to_data(fingerprint),
        "summary": summary,
        "rows": rows,
    }
    write_atomic((out or RESULTS) / f"{name}.json", json.dumps(data, indent=1) + "\n")


def compare_published(
    name: str,
    description: str | None,
    data: Path,
    compare: Callable[[dict[str, Any]], dict[str, Any]],
    summarize: Callable[[list[dict[str, Any]]], dict[str, Any]],
    columns: list[str],
) -> None:
    """The command line of a benchmark without a GPU: compare each published row of a file, print and save.

    `compare` adds what is predicted to a row, and `excluded`, the reason why nothing is, else None.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", type=Path, default=data, help="other published rows in the same form")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = [compare(row) for row in yaml.safe_load(args.data.read_text(encoding="utf-8"))["rows"]]
    table([row for row in rows if row["excluded"] is None], columns)
    save(name, None, summarize(rows), rows, args.out)
    print(summarize(rows))


def command(name: str) -> str:
    """The command line of this benchmark, without `--out`."""
    return shlex.join(["python", f"benchmarks/{name}.py", *_without_out(sys.argv[1:])])


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def use_empty_compile_cache() -> None:
    """Give the next process an empty Inductor cache on disk, so that each process compiles everything itself."""
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        os.environ[name] = tempfile.mkdtemp(prefix="autotune-cache-")


def run_python(arguments: list[str], folder: Path) -> str:
    """Run Python with these arguments and return its output. Raises SystemExit if it fails."""
    process = subprocess.run([sys.executable, *arguments], cwd=folder, check=False, stdout=subprocess.PIPE, text=True)
    if process.returncode:
        raise SystemExit(f"{shlex.join(arguments)} failed with exit code {process.returncode}")
    return process.stdout


def run_study(folder: Path, *options: str) -> dict[str, Any]:
    """Run `autotune run` with these options in this directory and return its summary."""
    summary: dict[str, Any] = json.loads(run_python(["-m", "autotune", "run", *options, "--json"], folder))
    return summary


def speed(
    prober: WorkerProber,
    model: ModelSpec,
    device: DeviceSpec,
    config: TrainConfig,
    memory_gib: float,
    workload: Workload | None = None,
) -> dict[str, Any]:
    """Probe the whole model with this configuration; without a workload, with 32 full rows for each optimizer step."""
    kinds = workload.micro_batches(config) if workload else ()
    workload = workload or Workload(examples=10_000, lengths=Lengths.constant(config.seq_len), global_batch=32)
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
    row: dict[str, Any] = {"model": model.short, "config": config.label(), "outcome": result.outcome.value}
    if result.outcome is not Outcome.OK or result.measurement is None:
        return row | {"reason": result.reason}
    flops = model.flops_per_token(config.method, config.seq_len)
    measured = performance(
        config, [result.measurement], workload, flops_per_token=flops, peak_tflops=device.bf16_tflops
    )
    return row | {
        "tokens_per_s": measured.tokens_per_second,
        "mfu": measured.mfu,
        "peak_allocated_gib": result.measurement.peak_allocated_gib,
        "peak_reserved_gib": result.measurement.peak_reserved_gib,
    }


class Rows:
    """Result rows that are written to <out>/<name>.jsonl at once, so that an interrupted benchmark loses none.

    `earlier` is the file of an earlier call on the same kind of machine. Its rows are taken over.
    """

    def __init__(self, name: str, out: Path | None, earlier: Path | None) -> None:
        lines = (earlier.read_text() if earlier else "").splitlines()
        self.all: list[dict[str, Any]] = [json.loads(line) for line in lines]
        folder = out or RESULTS
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{name}.jsonl"
        self._path.write_text("".join(json.dumps(row) + "\n" for row in self.all))

    def add(self, row: dict[str, Any]) -> None:
        self.all.append(row)
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def has(self, **values: Any) -> bool:
        """Whether some row has all these values."""
        return any(all(row.get(key) == value for key, value in values.items()) for row in self.all)


TINY_MODEL: dict[str, Any] = {  # for a CPU, where a benchmark is only tried
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 8,
    "vocab_size": 256,
}
RANKS = 2


class Failed(Exception):
    """A probe did not give a measurement. The message says why."""


def rank_parser(description: str | None) -> argparse.ArgumentParser:
    """The options of a benchmark on two real ranks."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: try it with a tiny model")
    parser.add_argument("--memory-gib", type=float, help="of a rank; by default all that its device has")
    parser.add_argument("--only", type=int, help="measure so many configurations only")
    parser.add_argument("--earlier", type=Path, help="a result of the same cards: measure only what it lacks")
    parser.add_argument("--out", type=Path, help="the folder of the result")
    return parser


def rank_config(device: str, knobs: dict[str, Any]) -> TrainConfig:
    """A configuration with rows of 1,024 tokens; on a CPU a small one."""
    if device == "cpu":
        precision = "bf16_mixed" if knobs.get("sharding") in ZERO else "fp32"  # DeepSpeed's stages are for bf16
        knobs = knobs | {"seq_len": 64, "precision": precision}
    return TrainConfig(**({"seq_len": 1024, "loss": "full"} | knobs))


def measured(pool: RankPool, request: ProbeRequest) -> Measurement:
    """What a probe measured. Raises Failed."""
    result = pool.probe(request, pool.logs / "probe.log")
    if result.outcome is not Outcome.OK or result.measurement is None:
        raise Failed(f"{result.outcome}: {result.reason}")
    return result.measurement


def collect(
    name: str,
    args: argparse.Namespace,
    pool: RankPool,
    wanted: list[Any],
    measure: Callable[[Any], dict[str, Any]],
    summarize: Callable[[list[dict[str, Any]]], dict[str, Any]],
) -> None:
    """Measure one configuration after another; print and save each at once. One that fails is a row that says why."""
    earlier = json.loads(args.earlier.read_text()) if args.earlier else {"rows": []}
    if args.earlier and earlier["fingerprint"] != to_data(pool.fingerprint):
        raise SystemExit(f"{args.earlier} was measured elsewhere, or with other packages")
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
        save(name, pool.fingerprint, summarize(rows), rows, args.out)
    print(summarize(rows))


def rank_model(device: str, name: str) -> dict[str, Any]:
    """The config of a model; on a CPU of a tiny one that has as many depths."""
    return TINY_MODEL | {"num_hidden_layers": 16} if device == "cpu" else dict(resolve_model(name).config)


def predicted(pool: RankPool, whole: ProbeRequest) -> tuple[Measurement, list[int]]:
    """What two truncated depths say of a whole model, and the depths, the model's own last. Raises Failed."""
    shape = pool.describe(whole.model)
    pair = depths(shape, whole.config.checkpoint_every, sharded=whole.parallelism.shards) if shape else None
    if shape is None or pair is None:
        raise Failed("no two depths are known for this model")
    probes = [(depth, measured(pool, shortened(whole, depth))) for depth in pair]
    return extrapolate(probes, shape.num_layers).measurement, [*pair, shape.num_layers]


def largest(rows: list[dict[str, Any]], key: str) -> float | None:
    """The largest absolute value of a key; None where no row has one."""
    return max((abs(row[key]) for row in rows if row.get(key) is not None), default=None)


def table(rows: list[dict[str, Any]], columns: list[str]) -> None:
    """Print rows as an aligned table."""
    cells = [columns] + [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    for row in cells:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _without_out(arguments: list[str]) -> list[str]:
    index = arguments.index("--out") if "--out" in arguments else len(arguments)
    return arguments[:index] + arguments[index + 2 :]


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
