"""Train the longest rows: Llama-3.1-8B, QLoRA of rank 32 on all linear layers, on 80 GB and on 24
GB.

    python benchmarks/longest.py                  # an H100 with 80 GB and 110 GiB of host memory
    python benchmarks/longest.py --marks 24gb     # one of the two

Each row is one real step of the whole model. 24 GB is the memory of an RTX 4090, as a cap on the
local GPU. First two layers with 65,536 tokens show which attention kernel is faster and fits.
cuDNN's kernel may need more memory on longer rows, and `--attention sdpa` leaves it out. If a
length does not fit, the program tries one that is 3 % shorter, once. Attention takes most of the
time, because it grows with the square of the length: a step of 344,064 tokens has 1.4e17 FLOPs of
attention, so the whole benchmark takes minutes.
"""

import argparse
import time
from dataclasses import asdict, replace
from typing import Any

from bench import Mode, load, run_program, save, worker

from autotune.catalog import resolve_model
from autotune.core.machine import host_memory_gib
from autotune.core.memory_budget import memory_limit_gib
from autotune.core.probe_types import Outcome, ProbeResult
from autotune.core.train_config import TrainConfig
from autotune.planning.longest import HOST_SHARE, STEP, Longest, to_attempt
from autotune.prediction.memory_formula import CONTEXT_GIB, memory_breakdown
from autotune.probe.supervisor import WorkerProber
from autotune.problem.target import Target, find_target

CARDS = {"24gb": "rtx-4090", "80gb": "auto"}
CAPS_GIB = {"24gb": (20.0, 25.0), "80gb": (75.0, 85.0)}  # that belong to a mark
KERNELS = ("sdpa", "sdpa_cudnn")  # torch's flash attention, as rows have any length, and cuDNN's
TRIED_AT, FEW = 65_536, 2
HEADROOM = 0.01  # the share of this memory that stays free
# of the limit: whole models need more than two layers and a line say, up to the allocator's last
# blocks
ROOM = 0.93


class Marks:
    """The benchmark in progress. It saves each result at once."""

    def __init__(self, prober: WorkerProber, args: argparse.Namespace) -> None:
        self.prober, self.args = prober, args
        self.rows: list[dict[str, Any]] = load(args.rows) if args.rows else []

    def run(
        self, asked: Longest, config: TrainConfig, cap_gib: float, depth: int | None = None
    ) -> ProbeResult:
        """Probe this configuration and keep the result as a row."""
        began = time.monotonic()
        request = asked.request(config, cap_gib, depth=depth)
        result = self.prober.probe(request, self.prober.logs / "longest.log")
        attempt = to_attempt(result)
        about = {
            "attention": config.attention,
            "cap_gib": cap_gib,
            "host_gib": asked.host_gib(config),
        }
        wall_s = time.monotonic() - began
        self.rows.append(asdict(attempt) | about | {"reason": result.reason, "wall_s": wall_s})
        print(self.rows[-1], flush=True)
        save(self.args, self.prober.fingerprint, self.rows)
        return result

    def mark(self, target: Target, tokens: int) -> None:
        """Run one real step with rows of this length, or 3 %
        shorter, in the memory of the target.
        """
        cap_gib = target.memory_cap_gib(self.prober.memory_gib)
        limit_gib = memory_limit_gib(cap_gib, HEADROOM, taken_gib=CONTEXT_GIB)
        asked = Longest(
            model=resolve_model("llama-3.1-8b"),
            device=target.device,
            limit_gib=limit_gib,
            headroom=HEADROOM,
            rank=32,
        )
        asked = replace(asked, host_limit_gib=HOST_SHARE * host_memory_gib())
        tokens = min(tokens, asked.bounds("qlora")["host memory"] // STEP * STEP)
        config = asked.config("qlora", tokens)
        config = replace(
            config, attention=self.args.attention or self.kernel(asked, config, cap_gib)
        )
        for length in (tokens, int(tokens * 0.97) // STEP * STEP):
            attempt = to_attempt(self.run(asked, replace(config, seq_len=length), cap_gib))
            if attempt.outcome == Outcome.OK.value:
                return

    def kernel(self, asked: Longest, config: TrainConfig, cap_gib: float) -> str:
        """Return the faster attention kernel that fits, judged by two layers and shorter rows."""
        whole = memory_breakdown(
            asked.model, replace(config, checkpointing="full", tiling="none"), 1
        )
        assert whole is not None
        lasting_gib = whole.lasting_gib
        seconds: dict[str, float] = {}
        for kernel in KERNELS:
            found = self.run(
                asked, replace(config, attention=kernel, seq_len=TRIED_AT), cap_gib, depth=FEW
            )
            if (measured := found.measurement) is None:
                continue
            of_row = (
                measured.peak_reserved_gib
                - measured.model_gib
                - measured.adapters_gib
                - measured.optimizer_gib
            )
            if lasting_gib + of_row * config.seq_len / TRIED_AT <= ROOM * asked.limit_gib:
                seconds[kernel] = measured.kind_s[-1][1]
        return min(seconds, key=lambda kernel: seconds[kernel], default=KERNELS[0])


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the longest row of the whole model that was trained in the memory of each GPU, and its
    step time.
    """
    found: dict[str, Any] = {}
    for name, (least, most) in CAPS_GIB.items():
        trained = [
            row for row in rows if row["depth"] is None and row["outcome"] == Outcome.OK.value
        ]
        here = [row for row in trained if least <= row["cap_gib"] <= most]
        longest = max(here, key=lambda row: row["tokens"], default={})
        found |= {
            f"{key}_{name}": longest.get(key)
            for key in ("tokens", "step_s", "need_gib", "host_gib")
        }
    return found


def run(args: argparse.Namespace) -> None:
    """Try the longest rows by real steps."""
    tokens = {"24gb": args.tokens_24gb, "80gb": args.tokens_80gb}
    with worker("cuda") as prober:
        marks = Marks(prober, args)
        for name in args.marks:
            marks.mark(find_target(CARDS[name]), tokens[name])
        print(summarize(marks.rows))


MODES = {
    "": Mode(
        run=run,
        result="longest",
        summarize=summarize,
        options={
            "--marks": {"nargs": "+", "choices": list(CARDS), "default": list(CARDS)},
            "--tokens-24gb": 139264,
            "--tokens-80gb": 344064,
            "--attention": {"choices": KERNELS, "help": "[the faster one that fits]"},
            "--rows": None,
        },
    )
}


if __name__ == "__main__":
    run_program(MODES, __doc__)
