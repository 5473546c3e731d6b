"""Compare probes in the warm worker with probes in fresh processes: their measurements and their
seconds.

One warm worker runs a sequence. Each configuration follows a probe that could affect it: an OOM,
another rank, a compiled probe, full fine-tuning, an nf4 base. A fresh process then measures each
configuration again, with the same code. The benchmark compares step times and peaks of allocated
memory. The first probe of the worker is not warm and is not compared. A compilation takes the same
time in both processes. The compiled rows therefore count for the errors, and the ratio of their
wall times is reported separately (`wall_ratio_compiled`).
"""

import argparse
import statistics
import time
from typing import Any

from bench import Mode, finish, run_program, scratch, table, use_empty_compile_cache

from autotune.catalog import resolve_model
from autotune.core.probe_types import Outcome, ProbeRequest, ProbeResult
from autotune.core.train_config import TrainConfig
from autotune.probe.supervisor import WorkerProber
from autotune.problem.performance import step_time_s

# Six sequences keep an H200 busy for much longer than the host needs to launch the operations, so
# that the load of the host does not matter. With two sequences it does: one or the other process
# was up to a third slower.
LORA = {"micro_batch_size": 6, "seq_len": 1024, "checkpointing": "none"}
NF4 = {"quantization": "nf4", "micro_batch_size": 6, "seq_len": 1024, "checkpointing": "full"}
FULL = {"method": "full", "micro_batch_size": 3, "seq_len": 1024, "checkpointing": "full"}
FIRST = ("nothing", NF4 | {"optimizer": "adamw_8bit"})
OOM = ("nothing", {"micro_batch_size": 32, "seq_len": 4096, "checkpointing": "none"})
# (preceding probe, configuration). An entry that follows "nothing" only prepares the next one.
SEQUENCE: list[tuple[str, dict[str, Any]]] = [
    FIRST,
    ("a fresh worker's nf4 base", LORA),
    OOM,
    ("an OOM", LORA),
    ("another rank", LORA | {"lora_rank": 64}),
    ("another rank", LORA),
    ("an eager probe", LORA | {"compile": "per_layer", "precision": "bf16_pure"}),
    ("a compiled probe", LORA | {"precision": "bf16_pure"}),
    ("pure bf16", LORA | {"checkpointing": "every_2"}),
    ("checkpointing", LORA),
    ("LoRA", FULL),
    ("full fine-tuning", LORA),
    ("LoRA", NF4),
    ("an nf4 base", LORA),
    ("an eager probe", LORA | {"compile": "per_layer"}),
    OOM,
    ("an OOM after a compiled probe", LORA | {"optimizer": "paged_adamw_8bit"}),
    ("an 8-bit optimizer", LORA | {"checkpointing": "full"}),
]
COLUMNS = [
    "config",
    "after",
    "time_error",
    "peak_error",
    "reserved_error",
    "warm_wall_s",
    "cold_wall_s",
]


def compare(before: str, result: ProbeResult, cold: ProbeResult) -> dict[str, Any]:
    """Return a row with a probe of the warm worker and the same probe in a fresh process."""
    assert result.measurement is not None and cold.measurement is not None, (
        result.reason,
        cold.reason,
    )
    step, cold_step = step_time_s(result.measurement, 4), step_time_s(cold.measurement, 4)
    peak, cold_peak = result.measurement.peak_allocated_gib, cold.measurement.peak_allocated_gib
    return {
        "config": result.config.label(),
        "after": before,
        "warm_step_s": step,
        "cold_step_s": cold_step,
        "time_error": step / cold_step - 1,
        "warm_peak_gib": peak,
        "cold_peak_gib": cold_peak,
        "peak_error": peak / cold_peak - 1,
        "reserved_error": result.measurement.peak_reserved_gib / cold.measurement.peak_reserved_gib
        - 1,
        "warm_micro_s": result.measurement.micro_step_s,
        "cold_micro_s": cold.measurement.micro_step_s,
        "host_micro_s": (result.measurement.host_micro_s, cold.measurement.host_micro_s),
        "warm_seconds": result.seconds,
        "cold_seconds": cold.seconds,
    }


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    def wall_ratio(compiled: bool) -> float:
        counted = [row for row in rows if row["config"].endswith("compiled") is compiled]
        return sum(row["warm_wall_s"] for row in counted) / sum(
            row["cold_wall_s"] for row in counted
        )

    return {
        "configs": len(rows),
        "time_error_max": max(abs(row["time_error"]) for row in rows),
        "time_error_median": statistics.median(abs(row["time_error"]) for row in rows),
        "peak_error_max": max(abs(row["peak_error"]) for row in rows),
        "reserved_error_max": max(abs(row["reserved_error"]) for row in rows),
        "wall_ratio": wall_ratio(False),
        "wall_ratio_compiled": wall_ratio(True),
    }


def run(args: argparse.Namespace) -> None:
    """Run the sequence in one warm worker, and then each configuration in a fresh process."""
    model = resolve_model(args.model)
    compared = [index for index, (before, _) in enumerate(SEQUENCE) if before != "nothing"][
        : args.configs
    ]
    sequence = SEQUENCE[: compared[-1] + 1]
    logs = scratch()

    def probe(prober: WorkerProber, settings: dict[str, Any]) -> tuple[ProbeResult, float]:
        """Probe steps of one micro batch, as short as with truncated models, because the process
        start counts.
        """
        request = ProbeRequest(
            config=TrainConfig(**settings),
            model=model.config,
            memory_gib=args.memory_gib,
            micro_steps=1,
            min_timed_s=0.7,
        )
        start = time.monotonic()
        result = prober.probe(request, logs / "probe.log")
        return result, time.monotonic() - start

    warm: list[tuple[ProbeResult, float]] = []
    use_empty_compile_cache()
    with WorkerProber("cuda", logs) as prober:
        start = time.monotonic()
        fingerprint = prober.fingerprint
        first_start = time.monotonic() - start
        for _, settings in sequence:
            warm.append(probe(prober, settings))
            print(
                f"warm  {warm[-1][0].config.label():<70} {warm[-1][0].outcome} {warm[-1][1]:.1f} s",
                flush=True,
            )
            for note in warm[-1][0].notes:
                print(f"      {note}")
        replaced = prober.starts - 1

    rows = []
    for (before, settings), (result, wall) in zip(sequence, warm, strict=True):
        if before == "nothing":
            assert (result.outcome is Outcome.OOM) is (settings == OOM[1])
            continue
        use_empty_compile_cache()
        start = time.monotonic()
        with WorkerProber("cuda", logs) as prober:
            cold, _ = probe(prober, settings)
        # until exit, because the next process needs the memory of the GPU
        cold_wall = time.monotonic() - start
        rows.append(compare(before, result, cold) | {"warm_wall_s": wall, "cold_wall_s": cold_wall})
        table(rows[-1:], COLUMNS)

    cold_s = sum(row["cold_wall_s"] for row in rows if not row["config"].endswith("compiled"))
    with_start = summarize(rows)["wall_ratio"] + first_start / cold_s
    finish(
        args,
        fingerprint,
        rows,
        COLUMNS,
        workers_replaced=replaced,
        wall_ratio_with_the_first_start=with_start,
    )


MODES = {
    "": Mode(
        run=run,
        result="warm_vs_cold",
        summarize=summarize,
        options={
            "--model": "mistral-7b",
            "--memory-gib": 135.0,
            "--configs": {
                "default": len(SEQUENCE),
                "help": "compare only this many configurations",
            },
        },
    )
}


if __name__ == "__main__":
    run_program(MODES, __doc__)
