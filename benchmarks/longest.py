"""The longest rows that really train: Llama-3.1-8B, QLoRA of rank 32 on all linear layers, on 80 GB and on 24 GB.

    python benchmarks/longest.py                  # an H100 with 80 GB and 110 GiB of host memory
    python benchmarks/longest.py --marks 24gb     # one of the two

Each row is one real step of the whole model. 24 GB are what an RTX 4090 offers, as a cap on the card that is here. Two
layers and 65,536 tokens show first which attention kernel is faster, and whether the row fits with it; cuDNN's may need
more on longer rows than these show, and `--attention sdpa` leaves it out. Where a length does not fit, one that is 3 %
shorter is tried, once. Attention takes most of the time, since it grows with the square
of the length: a step of 344,064 tokens has 1.4e17 FLOPs of it, so that the whole benchmark takes minutes.
"""

import argparse
import json
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from common import save

from autotune.catalog import resolve_model
from autotune.core.machine import host_memory_gib
from autotune.core.memory_budget import memory_limit_gib
from autotune.core.probe_types import Outcome, ProbeResult
from autotune.core.train_config import TrainConfig
from autotune.planning.longest import HEADROOM, HOST_SHARE, STEP, Longest, tried
from autotune.prediction.memory_formula import CONTEXT_GIB, memory_breakdown
from autotune.probe.supervisor import WorkerProber
from autotune.problem.target import Target, find_target

CARDS = {"24gb": "rtx-4090", "80gb": "auto"}
CAPS_GIB = {"24gb": (20.0, 25.0), "80gb": (75.0, 85.0)}  # that belong to a mark
KERNELS = ("sdpa", "sdpa_cudnn")  # torch's flash attention, as rows have any length, and cuDNN's
TRIED_AT, FEW = 65_536, 2
ROOM = 0.93  # of the limit: whole models need more than two layers and a line say, up to the allocator's last blocks


class Marks:
    """The benchmark in progress. Each result is written as it comes."""

    def __init__(self, prober: WorkerProber, out: Path | None, earlier: Path | None) -> None:
        self.prober, self.out = prober, out
        before = json.loads(earlier.read_text(encoding="utf-8")) if earlier else {"rows": []}
        self.rows: list[dict[str, Any]] = before["rows"]

    def run(self, asked: Longest, config: TrainConfig, cap_gib: float, depth: int | None = None) -> ProbeResult:
        """A probe of this configuration, kept as a row."""
        began = time.monotonic()
        request = asked.request(config, cap_gib, depth=depth)
        result = self.prober.probe(request, self.prober.logs / "longest.log")
        attempt = tried(result)
        about = {"attention": config.attention, "cap_gib": cap_gib, "host_gib": asked.host_gib(config)}
        wall_s = time.monotonic() - began
        self.rows.append(asdict(attempt) | about | {"reason": result.reason, "wall_s": wall_s})
        print(self.rows[-1], flush=True)
        self.write()
        return result

    def write(self) -> None:
        save("longest", self.prober.fingerprint, summarize(self.rows), self.rows, self.out)

    def mark(self, target: Target, tokens: int, attention: str | None) -> None:
        """One real step with rows of so many tokens, or 3 % fewer, under the memory of the target."""
        cap_gib = target.memory_cap_gib(self.prober.memory_gib)
        limit_gib = memory_limit_gib(cap_gib, HEADROOM, taken_gib=CONTEXT_GIB)
        asked = Longest(model=resolve_model("llama-3.1-8b"), device=target.device, limit_gib=limit_gib, rank=32)
        asked = replace(asked, host_limit_gib=HOST_SHARE * host_memory_gib())
        tokens = min(tokens, asked.bounds("qlora")["host memory"] // STEP * STEP)
        config = asked.config("qlora", tokens)
        config = replace(config, attention=attention or self.kernel(asked, config, cap_gib))
        for length in (tokens, int(tokens * 0.97) // STEP * STEP):
            attempt = tried(self.run(asked, replace(config, seq_len=length), cap_gib))
            if attempt.outcome == Outcome.OK.value:
                return

    def kernel(self, asked: Longest, config: TrainConfig, cap_gib: float) -> str:
        """The faster attention of those with which the row fits, by what two layers of a shorter one need."""
        whole = memory_breakdown(asked.model, replace(config, checkpointing="full", tiling="none"), 1)
        assert whole is not None
        lasting_gib = whole.lasting_gib
        seconds: dict[str, float] = {}
        for kernel in KERNELS:
            found = self.run(asked, replace(config, attention=kernel, seq_len=TRIED_AT), cap_gib, depth=FEW)
            if (measured := found.measurement) is None:
                continue
            of_row = measured.peak_reserved_gib - measured.model_gib - measured.adapters_gib - measured.optimizer_gib
            if lasting_gib + of_row * config.seq_len / TRIED_AT <= ROOM * asked.limit_gib:
                seconds[kernel] = measured.kind_s[-1][1]
        return min(seconds, key=lambda kernel: seconds[kernel], default=KERNELS[0])


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The longest row of the whole model that was trained under each card's memory, and what its step took."""
    found: dict[str, Any] = {}
    for name, (least, most) in CAPS_GIB.items():
        trained = [row for row in rows if row["depth"] is None and row["outcome"] == Outcome.OK.value]
        here = [row for row in trained if least <= row["cap_gib"] <= most]
        longest = max(here, key=lambda row: row["tokens"], default={})
        found |= {f"{key}_{name}": longest.get(key) for key in ("tokens", "step_s", "need_gib", "host_gib")}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--marks", nargs="+", choices=list(CARDS), default=list(CARDS))
    parser.add_argument("--tokens-24gb", type=int, default=139_264)
    parser.add_argument("--tokens-80gb", type=int, default=344_064)
    parser.add_argument("--attention", choices=KERNELS, help="by default the faster one that fits")
    parser.add_argument("--earlier", type=Path, help="longest.json of another mark on a machine of the same kind")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    tokens = {"24gb": args.tokens_24gb, "80gb": args.tokens_80gb}
    with tempfile.TemporaryDirectory() as logs, WorkerProber("cuda", Path(logs)) as prober:
        marks = Marks(prober, args.out, args.earlier)
        for name in args.marks:
            marks.mark(find_target(CARDS[name]), tokens[name], args.attention)
        print(summarize(marks.rows))


if __name__ == "__main__":
    main()
