"""Measure every configuration of a search space for Mistral-7B, as the table on which `search_efficiency` replays.

Each line holds one configuration: probes at two truncated depths and of the whole model, by the product's own worker,
with their seconds. A later call with the same file continues it. A few configurations are also probed in a process of
their own, to check the time that a replay charges for such probes.
"""

import argparse
import json
import random
import tempfile
import time
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from common import use_empty_compile_cache

from autotune.catalog import resolve_model
from autotune.core.probe_types import Fingerprint, Outcome, ProbeRequest, ProbeResult
from autotune.core.serialization import from_data, to_data
from autotune.core.train_config import TrainConfig
from autotune.prediction.depth_extrapolation import depths
from autotune.probe.supervisor import WorkerProber
from autotune.problem.length_distribution import Lengths
from autotune.problem.performance import tokens_per_s
from autotune.problem.search_space import Knob, SearchSpace
from autotune.problem.workload import Workload
from autotune.study.evaluator import shortened

TABLE = Path(__file__).parent / "data" / "mistral_7b_h200.jsonl"
SPACE = SearchSpace(
    name="search_efficiency",
    knobs=(
        Knob(name="quantization", values=("none", "nf4")),
        Knob(name="precision", values=("bf16_mixed", "bf16_pure")),
        Knob(name="checkpointing", values=("none", "every_2", "full")),
        Knob(name="compile", values=("none", "per_layer")),
        Knob(name="micro_batch_size", values=(1, 2, 4, 8, 16)),
        Knob(name="optimizer", values=("adamw_torch_fused", "adamw_8bit")),
        Knob(name="seq_len", values=(512,)),
        Knob(name="lora_rank", values=(16,)),
    ),
)
OPTIMIZER = "adamw_torch_fused"
WORKLOAD = Workload(examples=10_000, lengths=Lengths.constant(512), global_batch=32)


def request_of(config: TrainConfig, model: dict[str, Any], memory_gib: float, device: str = "cuda") -> ProbeRequest:
    return ProbeRequest(
        config=config,
        model=model,
        device=device,
        memory_gib=memory_gib,
        micro_steps=WORKLOAD.run_shape(config).probe_micro_steps,
    )


class Table:
    """The measured results by configuration and depth, and the properties of the machine."""

    def __init__(self, path: Path) -> None:
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        self.about: dict[str, Any] = next((line for line in lines if "fingerprint" in line), {})
        self.results: dict[tuple[TrainConfig, int | None], ProbeResult] = {}
        self.cold: dict[TrainConfig, float] = {}
        for line in lines:
            if "results" in line:
                for data in line["results"]:
                    result = from_data(ProbeResult, data)
                    self.results[(result.config, result.depth)] = result
            elif "cold_seconds" in line:
                self.cold[TrainConfig(**line["config"])] = line["cold_seconds"]

    @property
    def fingerprint(self) -> Fingerprint:
        fingerprint: Fingerprint = from_data(Fingerprint, self.about["fingerprint"])
        return fingerprint

    @property
    def configs(self) -> list[TrainConfig]:
        return [config for config, depth in self.results if depth is None]

    def value(self, config: TrainConfig) -> float | None:
        result = self.results[(config, None)]
        return tokens_per_s(result, WORKLOAD) if result.outcome is Outcome.OK else None

    def best(self) -> float:
        return max(value for config in self.configs if (value := self.value(config)) is not None)

    @cached_property
    def compile_seconds(self) -> dict[TrainConfig, tuple[float, float]]:
        """Seconds of compilation for each compiled code: (with an empty cache, with the code in the cache on disk).

        They are the seconds of the first step on a few layers, which consist mostly of compilation. It was chance which
        of the configurations that share code compiled first.
        """
        first: dict[TrainConfig, list[float]] = {}
        depths_of: dict[TrainConfig, list[int]] = {}
        for config, depth in self.results:
            if depth is not None and config.compile != "none":
                depths_of.setdefault(config, []).append(depth)
        for config, measured_depths in depths_of.items():
            seconds = self.results[(config, min(measured_depths))].seconds.get("first_step", 0.0)
            first.setdefault(replace(config, optimizer=OPTIMIZER, checkpointing="none"), []).append(seconds)
        return {code: (max(seconds), min(seconds)) for code, seconds in first.items()}


class Charges:
    """Charge each probe of one search. Inductor's cache on disk starts empty and is shared by processes."""

    def __init__(self, table: Table) -> None:
        self._table, self._on_disk = table, set[TrainConfig]()

    def compiling(self, config: TrainConfig) -> float:
        """Seconds of compilation in a process that has not compiled this configuration yet."""
        if config.compile == "none":
            return 0.0
        empty_cache_s, cached_s = self._table.compile_seconds[
            replace(config, optimizer=OPTIMIZER, checkpointing="none")
        ]
        # Recomputed layers may have another backward pass, so that their code is not counted as shared.
        code = replace(config, optimizer=OPTIMIZER)
        is_new = code not in self._on_disk
        self._on_disk.add(code)
        return empty_cache_s if is_new else cached_s

    def cold(self, config: TrainConfig) -> float:
        """Seconds in a fresh process: its start, the probe and the compilation."""
        whole = self._table.results[(config, None)].seconds.get("total", 0.0)
        return float(self._table.about["start_s"]) + whole + self.compiling(config)


def measure(args: argparse.Namespace) -> None:
    """Measure every configuration of the space that the table lacks, until the time is over."""
    until = time.monotonic() + args.seconds
    model = resolve_model(args.model)
    out = (args.out or TABLE.parent) / TABLE.name
    out.parent.mkdir(parents=True, exist_ok=True)
    table = Table(args.table)
    if args.table.exists() and args.table != out:
        out.write_text(args.table.read_text())
    logs = Path(tempfile.mkdtemp(prefix="autotune-bench-"))
    with WorkerProber(args.device, logs) as first:
        first.fingerprint  # noqa: B018 (loads the files into the page cache)
    with WorkerProber(args.device, logs) as prober, out.open("a") as file:
        start = time.monotonic()
        fingerprint = prober.fingerprint
        start_s = time.monotonic() - start
        shape = prober.describe(model.config)
        if table.about and fingerprint != table.fingerprint:
            raise SystemExit(
                "the table was measured on a different machine: "
                + "; ".join(table.fingerprint.differences(fingerprint))
            )
        if not table.about:
            about = {"start_s": start_s, "memory_gib": args.memory_gib, "shape": to_data(shape)}
            file.write(json.dumps({"fingerprint": to_data(fingerprint), **about}) + "\n")
        assert shape is not None
        missing = [config for config in map(SPACE.config, SPACE.enumerate()) if (config, None) not in table.results]
        # Also measure a few in a process of their own, to check the time that a replay charges.
        sample = random.Random(1).sample(missing, len(missing))[: args.cold]
        for config in missing:
            if time.monotonic() > until:
                break
            whole = request_of(config, model.config, args.memory_gib, args.device)
            requests = [shortened(whole, depth) for depth in depths(shape, config.checkpoint_every) or ()] + [whole]
            results = []
            for request in requests:
                results.append(prober.probe(request, logs / "probe.log"))
            line = {"results": [_slim(to_data(result)) for result in results]}
            file.write(json.dumps(line) + "\n")
            file.flush()
            last = results[-1]
            print(
                f"{config.label():<70} {last.outcome} {sum(result.seconds['total'] for result in results):.1f} s",
                flush=True,
            )
        prober.close()
        for config in sample:
            if time.monotonic() > until:
                break
            use_empty_compile_cache()
            start = time.monotonic()
            with WorkerProber(args.device, logs) as fresh:
                fresh.probe(request_of(config, model.config, args.memory_gib, args.device), logs / "probe.log")
            file.write(json.dumps({"config": config.as_dict(), "cold_seconds": time.monotonic() - start}) + "\n")


def _slim(data: dict[str, Any]) -> dict[str, Any]:
    """Drop the fields that the table does not need, and round numbers to six decimals."""

    def rounded(value: Any) -> Any:
        if isinstance(value, float):
            return round(value, 6)
        if isinstance(value, list):
            return [rounded(item) for item in value]
        if isinstance(value, dict):
            return {key: rounded(item) for key, item in value.items() if item is not None}
        return value

    slim: dict[str, Any] = rounded(data)
    return {key: value for key, value in slim.items() if key not in ("log", "started_at", "notes")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mistral-7b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--memory-gib", type=float, default=135.0)
    parser.add_argument("--table", type=Path, default=TABLE, help="the file of an earlier call")
    parser.add_argument("--seconds", type=float, default=500.0, help="start no probe after this time")
    parser.add_argument(
        "--cold", type=int, default=8, help="number of configurations to probe in a process of their own"
    )
    parser.add_argument("--out", type=Path)
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
