"""Predict the speed of one card from probes on another, for the same configurations on both.

`measure` runs on a card: it calibrates the card and its host, then probes a few layers of three models, and writes each
row at once to a file that a further call can continue. `compare` needs no GPU.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import Rows, table

from autotune.catalog import resolve_model
from autotune.core.probe_types import Measurement, Outcome, ProbeRequest, Rung
from autotune.core.serialization import from_data, to_data
from autotune.core.text import dashed
from autotune.core.train_config import TrainConfig
from autotune.probe.calibrate import calibrate_by
from autotune.probe.supervisor import WorkerProber
from autotune.problem.length_distribution import Lengths
from autotune.problem.target import find_target
from autotune.problem.workload import Workload

# Each model with the layers that are probed: enough that they, not the head, take most of the time.
MODELS = {"llama-3.2-1b": 8, "qwen2.5-1.5b": 8, "mistral-7b": 4}
MEMORY_GIB = 70.0  # of any card
TIMED_S = 0.5
LENGTHS = Lengths.described(mean=400, p99=1600)  # of rows that are packed, or padded to the longest of a micro batch
PURE = {"precision": "bf16_pure"}
FULL = {"method": "full", "lora_rank": None} | PURE
NF4 = {"quantization": "nf4"}
PLAIN, AGAIN = {"checkpointing": "none"}, {"checkpointing": "full"}
COMPILED = {"compile": "per_layer"} | PURE
LARGE = {"micro_batch_size": 8, "seq_len": 2048, "loss": "chunked"} | AGAIN


def shape(rows: int, seq_len: int) -> dict[str, int]:
    return {"micro_batch_size": rows, "seq_len": seq_len}


# Those that share a base model stand together. Each compiled shape takes seconds, so that these come last.
SETTINGS: list[dict[str, Any]] = [
    shape(1, 256) | PLAIN,
    shape(1, 1024) | PLAIN,
    shape(4, 1024) | PLAIN,
    shape(4, 1024) | PLAIN | PURE,
    shape(2, 2048) | AGAIN,
    shape(4, 2048) | PLAIN | {"packing": True},
    shape(4, 2048) | PLAIN | {"padding": "longest"},
    LARGE,
    shape(1, 256) | PLAIN | NF4,
    shape(4, 1024) | PLAIN | NF4,
    LARGE | NF4,
    shape(1, 256) | PLAIN | FULL,
    shape(1, 1024) | PLAIN | FULL,
    shape(4, 1024) | PLAIN | FULL,
    LARGE | FULL,
]
COMPILED_SETTINGS: list[dict[str, Any]] = [shape(1, 512) | PLAIN | COMPILED, LARGE | COMPILED]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One configuration of a model of which `depth` layers are probed. `again` names a repetition, in words."""

    model: str
    depth: int
    config: TrainConfig
    again: str | None = None

    @property
    def key(self) -> dict[str, Any]:
        return {"model": self.model, "config": self.config.label(), "again": self.again}

    def request(self, device: str, memory_gib: float) -> ProbeRequest:
        uneven = self.config.packing or self.config.padding == "longest"
        lengths = LENGTHS if uneven else Lengths.constant(self.config.seq_len)
        return ProbeRequest(
            config=self.config,
            model=resolve_model(self.model).config,
            device=device,
            memory_gib=memory_gib,
            rung=Rung.SHALLOW,
            depth=self.depth,
            min_timed_s=TIMED_S,
            min_timed_micros=3,
            micro_batches=Workload(lengths=lengths).micro_batches(self.config),
            profile=self.again is None,
        )


def cases(models: dict[str, int], precision: str | None = None) -> Iterator[Case]:
    """All configurations, the cheapest first; before and after them one that is not profiled.

    The two show whether profiles disturb what is timed after them.
    """
    first = next(iter(models.items()))

    def case(model: str, depth: int, settings: dict[str, Any], again: str | None = None) -> Case:
        settings = {"padding": "max_length"} | settings | ({"precision": precision} if precision else {})
        return Case(model=model, depth=depth, config=TrainConfig(**settings), again=again)

    yield case(*first, SETTINGS[0], "before any profile")
    for chosen in (SETTINGS, COMPILED_SETTINGS):
        for model, depth in models.items():
            for settings in chosen:
                yield case(model, depth, settings)
    yield case(*first, SETTINGS[0], "after all profiles")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    phases = parser.add_subparsers(dest="phase", required=True)
    measuring = phases.add_parser("measure", help="probe on the card of this machine")
    measuring.add_argument("--gpu", default="auto")
    measuring.add_argument("--models", nargs="*", default=list(MODELS))
    measuring.add_argument("--memory-gib", type=float, default=MEMORY_GIB)
    measuring.add_argument("--rows", type=Path, help="the .jsonl file of an earlier call on this card to continue")
    measuring.add_argument("--seconds", type=float, default=270.0, help="start no probe after this time")
    measuring.add_argument("--out", type=Path, help="directory of the .jsonl file")
    args = parser.parse_args()
    measure(args)


def measure(args: argparse.Namespace) -> None:
    """Probe what the rows of earlier calls do not hold, and print a short table of all rows."""
    until = time.monotonic() + args.seconds
    target = find_target(args.gpu)
    on_cpu = target.card is None
    stored = Rows(f"transfer-{dashed(target.device.name)}", args.out, args.rows)
    logs = Path(tempfile.mkdtemp(prefix="autotune-bench-"))
    models = {name: MODELS.get(name, 2) for name in args.models}
    missing = [case for case in cases(models, "fp32" if on_cpu else None) if not stored.has(**case.key)]
    with WorkerProber("cpu" if on_cpu else "cuda", logs) as prober:
        if not any("calibration" in row for row in stored.all):
            calibration = calibrate_by(prober, target, say=print)
            stored.add({"calibration": to_data(calibration), "fingerprint": to_data(prober.fingerprint)})
        for case in missing:
            if time.monotonic() < until:
                row = probe(prober, case, args.memory_gib)
                stored.add(row)
                print(f"{row['seconds']:5.1f} s  {case.model} {case.config.label()}", flush=True)
    rows = [summarized(row) for row in stored.all if "config" in row]
    table(rows, ["model", "config", "seconds", "micro", "host", "busy", "products", "attention", "bytes", "failed"])
    print(f"{len(rows)} rows, {sum('failed' in row for row in rows)} failed")


def probe(prober: WorkerProber, case: Case, memory_gib: float) -> dict[str, Any]:
    """A case as a row: its measurement and the kernels of its profile, or why there is none."""
    log = prober.logs / "probe.log"
    log.unlink(missing_ok=True)
    result = prober.probe(case.request(prober.device, memory_gib), log)
    row = case.key | {
        "settings": case.config.as_dict(),
        "depth": case.depth,
        "seconds": result.seconds.get("total", 0.0),
        "phases": result.seconds,
    }
    if result.outcome is not Outcome.OK or result.measurement is None:
        return row | {"failed": f"{result.outcome}: {result.reason}"}
    kernels = [line for line in log.read_text(encoding="utf-8").splitlines() if " ms " in line]
    return row | {"measurement": to_data(result.measurement), "kernels": kernels, "notes": result.notes}


def summarized(row: dict[str, Any]) -> dict[str, Any]:
    """A row for the table; times in milliseconds."""
    if "failed" in row:
        return row
    found = from_data(Measurement, row["measurement"])
    kernels = found.kernels
    shown = {key: row[key] for key in ("model", "config", "seconds")}
    shown |= {"micro": 1000 * min(found.micro_step_s)}
    if found.host_micro_s is not None:
        shown |= {"host": 1000 * found.host_micro_s}
    if kernels is not None:
        seconds = {"busy": kernels.busy_s, "products": kernels.products_s + kernels.fp8_s}
        seconds |= {"attention": kernels.attention_s, "bytes": kernels.bytes_s}
        shown |= {name: 1000 * value for name, value in seconds.items()}
    return shown


if __name__ == "__main__":
    main()
