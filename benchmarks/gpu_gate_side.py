"""One commit's part of `gpu_gate.py`: measures with the package that PYTHONPATH names first.

Prints a line of JSON for each measurement. It imports no other benchmark but `exported`, because
`bench` would import the package beside it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from exported import RunFailed, run_export, run_settings, write_export

from autotune.catalog import resolve_model
from autotune.core.probe_types import Outcome, ProbeRequest
from autotune.core.serialization import to_data
from autotune.core.train_config import TrainConfig
from autotune.probe.supervisor import WorkerProber

STARTS = 5
TINY: dict[str, Any] = {  # for a trial run on a CPU
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "vocab_size": 256,
}
ONE = {"micro_batch_size": 4, "seq_len": 2048, "loss": "chunked", "padding": "max_length"}
KEPT = ONE | {"checkpointing": "none"}
COMPILED = KEPT | {"compile": "per_layer"}
# The name of each probe, its model, the number of layers, and its settings
PROBES: list[tuple[str, str, int, dict[str, Any]]] = [
    ("probe: recomputed", "mistral-7b", 8, ONE),
    ("probe: kept", "mistral-7b", 8, KEPT),
    ("probe: compiled", "mistral-7b", 8, COMPILED),
    ("probe: packed", "mistral-7b", 8, COMPILED | {"packing": True, "packed_attention": "varlen"}),
    ("probe: full", "mistral-7b", 4, COMPILED | {"method": "full"}),
    ("lever: joined adapters", "mistral-7b", 8, COMPILED | {"lora_kernels": "joined"}),
    ("lever: fp8 base", "mistral-7b", 8, COMPILED | {"quantization": "fp8"}),
    (
        "lever: CUDA graphs",
        "llama-3.2-1b",
        16,
        KEPT | {"micro_batch_size": 1, "seq_len": 512, "cuda_graphs": "micro_batch"},
    ),
    (
        "mixture",
        "qwen3-30b-a3b",
        4,
        ONE
        | {
            "micro_batch_size": 8,
            "seq_len": 1024,
            "lora_targets": "attention_experts",
            "lora_kernels": "grouped",
        },
    ),
]
EXPORTED = TrainConfig(**KEPT)
EXPORTED_MODEL, EXPORTED_STEPS, EXPORTED_LONGEST_S = "llama-3.2-1b", 40, 120.0
STUDY = ["--model", "llama-3.2-1b", "--tokens-per-example", "1024", "--budget", "45s"]


def measure_start() -> dict[str, Any]:
    """Time the start of a command, the shortest of several."""
    seconds = []
    for _ in range(STARTS):
        began = time.perf_counter()
        command = [sys.executable, "-m", "autotune", "gpus"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - began)
    return {"name": "start", "speed": 1 / min(seconds)}


def probe_all(device: str) -> Iterator[dict[str, Any]]:
    """Probe each configuration in one warm worker, and yield its speed and its memory."""
    with (
        tempfile.TemporaryDirectory() as folder,
        WorkerProber(device, Path(folder)) as prober,
    ):
        for name, model, layers, knobs in PROBES:
            try:
                config = TrainConfig(**knobs)
            except (TypeError, ValueError) as error:
                yield {"name": name, "failed": str(error)}
                continue
            shape = dict(resolve_model(model).config) | {"num_hidden_layers": layers}
            if device == "cpu":
                shape = TINY
                config = replace(config, micro_batch_size=2, seq_len=64, packed_attention="mask")
            request = ProbeRequest(
                config=config, model=shape, device=device, memory_gib=70.0, min_timed_micros=12
            )
            result = prober.probe(request, Path(folder) / "probe.log")
            found = result.measurement
            if result.outcome is not Outcome.OK or found is None:
                yield {"name": name, "failed": f"{result.outcome}: {result.reason}"}
                continue
            yield {
                "name": name,
                "speed": config.tokens / statistics.median(found.micro_step_s),
                "memory_gib": found.peak_allocated_gib,
                "fingerprint": to_data(prober.fingerprint),
            }


def measure_export(device: str) -> dict[str, Any]:
    """Run an exported script, and return its speed with the optimizer."""
    on_cpu = device == "cpu"
    shape = TINY if on_cpu else dict(resolve_model(EXPORTED_MODEL).config)
    config = replace(EXPORTED, seq_len=64) if on_cpu else EXPORTED
    lengths = [config.seq_len]
    settings = run_settings(config, shape["model_type"], lengths, EXPORTED_STEPS, on_cpu=on_cpu)
    with tempfile.TemporaryDirectory() as folder:
        write_export(Path(folder), settings, shape)
        try:
            found = run_export(Path(folder), EXPORTED_STEPS, EXPORTED_LONGEST_S)
        except (RunFailed, subprocess.TimeoutExpired) as error:
            return {"name": "exported run", "failed": str(error)}
    return {
        "name": "exported run",
        "speed": config.tokens / found["seconds_per_step"],
        "memory_gib": found["peak_reserved_gib"],
    }


def measure_study(device: str) -> dict[str, Any]:
    """Run a study of 45 seconds with empty caches, and return the speed of its winner."""
    task = STUDY
    if device == "cpu":
        task = ["--model", "demo-3m", "--tokens-per-example", "64", "--budget", "45s"]
        task += ["--trials", "3"]
    with tempfile.TemporaryDirectory() as folder:
        gpu = "cpu" if device == "cpu" else "auto"
        command = [sys.executable, "-m", "autotune", "run", "--gpu", gpu, *task]
        command += ["--study", "gate", "--out", "out", "--set", "fresh=true", "--json"]
        command += ["--storage", f"sqlite:///{folder}/autotune.db"]
        environment = os.environ | {
            name: f"{folder}/{name}" for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
        }
        done = subprocess.run(
            command, cwd=folder, env=environment, check=False, capture_output=True, text=True
        )
        if done.returncode:
            return {"name": "study", "failed": (done.stderr.strip().splitlines() or [""])[-1]}
        winner = json.loads(done.stdout)["winner"]
    return {
        "name": "study",
        "speed": winner["performance"]["tokens_per_second"],
        "config": TrainConfig(**winner["config"]).label(),
    }


def measure(parts: list[str], device: str) -> Iterator[dict[str, Any]]:
    """Yield the measurements of these parts, each with its seconds."""
    if "start" in parts:
        yield measure_start()
    if "probes" in parts:
        yield from probe_all(device)
    if "export" in parts:
        yield measure_export(device)
    if "study" in parts:
        yield measure_study(device)


def main() -> None:
    """Measure the parts that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("parts", nargs="+")
    args = parser.parse_args()
    began = time.monotonic()
    for row in measure(args.parts, args.device):
        seconds = time.monotonic() - began
        began = time.monotonic()
        print(json.dumps(row | {"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
