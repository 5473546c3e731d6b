"""What benchmarks share: the shape of a result file, commands run as a person would, full-depth probes."""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autotune.catalog import DeviceSpec, ModelSpec
from autotune.core.files import write_atomic
from autotune.core.probe_types import Fingerprint, Outcome, ProbeRequest
from autotune.core.serialization import to_data
from autotune.core.train_config import TrainConfig
from autotune.probe.supervisor import WorkerProber
from autotune.problem.length_distribution import Lengths
from autotune.problem.performance import performance
from autotune.problem.workload import Workload

RESULTS = Path(__file__).parent / "results"


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


def command(name: str) -> str:
    """What this benchmark was called with, but for where it writes."""
    return shlex.join(["python", f"benchmarks/{name}.py", *_without_out(sys.argv[1:])])


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def own_cache() -> None:
    """Inductor's cache on disk starts empty for the next process, so that compilations are compared with their like."""
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        os.environ[name] = tempfile.mkdtemp(prefix="autotune-cache-")


def ran(command: list[str], folder: Path) -> str:
    """What Python printed for these arguments. Raises SystemExit where it fails."""
    done = subprocess.run([sys.executable, *command], cwd=folder, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)} ended with {done.returncode}")
    return done.stdout


def studied(folder: Path, *options: str) -> dict[str, Any]:
    """The summary of `autotune run` with these options, in that directory."""
    said: dict[str, Any] = json.loads(ran(["-m", "autotune", "run", *options, "--json"], folder))
    return said


def speed(
    prober: WorkerProber, model: ModelSpec, device: DeviceSpec, config: TrainConfig, memory_gib: float
) -> dict[str, Any]:
    """The whole model with this configuration, 32 full rows to an optimizer step."""
    workload = Workload(examples=10_000, lengths=Lengths.constant(config.seq_len), global_batch=32)
    micro_steps = workload.run_shape(config).probe_micro_steps
    request = ProbeRequest(
        config=config, model=model.config, device=prober.device, memory_gib=memory_gib, micro_steps=micro_steps
    )
    result = prober.probe(request, prober.logs / "probe.log")
    about: dict[str, Any] = {"model": model.short, "config": config.label(), "outcome": result.outcome.value}
    if result.outcome is not Outcome.OK or result.measurement is None:
        return about | {"reason": result.reason}
    flops = model.flops_per_token(config.method, config.seq_len)
    found = performance(config, [result.measurement], workload, flops_per_token=flops, peak_tflops=device.bf16_tflops)
    return about | {
        "tokens_per_s": found.tokens_per_second,
        "mfu": found.mfu,
        "peak_allocated_gib": result.measurement.peak_allocated_gib,
        "peak_reserved_gib": result.measurement.peak_reserved_gib,
    }


class Rows:
    """Rows kept as they come, a line each in <out>/<name>.jsonl: what was measured outlasts the call that measured it.

    With `earlier`, the file of an earlier call on the same kind of machine, it goes on where that ended.
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
        """Whether there is a row with these values."""
        return any(all(row.get(key) == value for key, value in values.items()) for row in self.all)


def table(rows: list[dict[str, Any]], columns: list[str]) -> None:
    """Print rows as an aligned table."""
    cells = [columns] + [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    for row in cells:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _without_out(arguments: list[str]) -> list[str]:
    place = arguments.index("--out") if "--out" in arguments else len(arguments)
    return arguments[:place] + arguments[place + 2 :]


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
