"""Speed, memory and losses of autotune's choice beside what other tools reach with their own best
configuration.

All train the same weights (random, in the shape of a model) with LoRA of the same rank on all
linear layers, on the same rows, in bf16 with AdamW, with as many rows in an optimizer step. Each of
the others has the same sweep of its micro batch, of its kinds of recomputation and, where it offers
it, of compiled layers (`side_by_side_tool.py`). Ours comes twice: the best of the same three knobs,
and the winner of a study of all; both are trained by the exported script. Each tool has a process
and a folder of packages (`--sites`) of its own, beside those that autotune needs:

    into() { python -m pip install --no-deps --upgrade --target "sites/$1" "${@:2}"; }
    into unsloth unsloth==2026.10.9 unsloth_zoo==2026.10.9 trl==1.15.0 datasets==4.8.5
    msgspec==0.22.0 into unsloth cut_cross_entropy==25.1.1 into liger liger_kernel==0.8.5 into
    axolotl axolotl==0.21.0 addict==2.4.0 liger_kernel==0.8.5 into llamafactory llamafactory==0.9.5
    trl==0.24.0 omegaconf==2.4.0 liger_kernel==0.8.5 into torchtune torchtune==0.6.1 torchao==0.15.0
    torchdata==0.11.0 omegaconf==2.4.0

    python benchmarks/side_by_side.py --sites sites --check   # does every tool train here? A tiny
    model, all at once python benchmarks/side_by_side.py --sites sites --seconds 480 --rows
    earlier.jsonl
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import TINY_MODEL, Mode, Rows, finish, now, run_program, run_study, scratch, table

from autotune.catalog import resolve_model
from autotune.core.train_config import LORA_ALPHA, TrainConfig
from autotune.problem.target import find_target

CHILD = Path(__file__).parent / "side_by_side_tool.py"
OTHERS = {
    "unsloth": "unsloth",
    "trl": "TRL",
    "liger": "transformers with Liger's kernels",
    "llamafactory": "LLaMA-Factory",
    "axolotl": "Axolotl's kernels in the Trainer",
    "torchtune": "torchtune",
}
EQUAL, STUDY = "ours, the same sweep", "ours, a study's winner"
# What the others do not sweep either. What is left is the micro batch, recomputation and compiled
# layers.
PINS = {
    "precision": "bf16_mixed",
    "optimizer": "adamw_torch_fused",
    "attention": "sdpa",
    "loss": "chunked",
}
PINS |= {"packing": "false", "padding": "max_length"}  # all rows have the same length
RATE = 2e-4
COLUMNS = [
    "tool",
    "config",
    "outcome",
    "tokens_per_s",
    "mfu",
    "peak_reserved_gib",
    "first_loss",
    "last_loss",
    "reason",
]
ENOUGH_S = 60.0  # no tool is begun with less time than this


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is trained, in rows and tokens; small where the tools are only tried."""

    rank: int = 16
    seq_len: int = 2048
    step_rows: int = 8
    steps: int = 5
    micro_batches: tuple[int, ...] = (2, 4, 8)
    budgets: tuple[str, str] = ("90s", "2m")  # of the two studies
    trials: int = 100


TINY = Sizes(
    seq_len=256, step_rows=4, steps=3, micro_batches=(2,), budgets=("90s", "90s"), trials=2
)


def add(rows: Rows, some: Iterable[dict[str, Any]]) -> None:
    for row in some:
        rows.add(row)
        table([row], COLUMNS)
        sys.stdout.flush()


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The best of each tool on the first card that it was measured on, and ours by the best of the
    others.

    A ratio compares one GPU, the first of ours. A tool without a measurement is not counted.
    """
    best = {
        name: speeds
        for name in (EQUAL, STUDY, *OTHERS)
        if (speeds := best_of(rows, name)) is not None
    }
    others = {name: best[name] for name in OTHERS if name in best}
    fastest = max(others.values(), default=None)
    cards = sorted({row["card"] for row in rows})

    def ratios(name: str) -> dict[str, float]:
        """Our speed over the best of the others, by card."""
        found = {}
        for card in cards:
            on_card = [row for row in rows if row["card"] == card]
            rivals = [speed for other in OTHERS if (speed := best_of(on_card, other))]
            if rivals and (ours := best_of(on_card, name)):
                found[card] = ours / max(rivals)
        return found

    return {
        "ours_tokens_per_s": best.get(EQUAL),
        "study_tokens_per_s": best.get(STUDY),
        "best_other": next((name for name, speed in others.items() if speed == fastest), None),
        "best_other_tokens_per_s": fastest,
        "ratio": next(iter(ratios(EQUAL).values()), None),
        "ratios": ratios(EQUAL),
        "study_ratio": next(iter(ratios(STUDY).values()), None),
        "others": len(others),
        "tokens_per_s": best,
        "not_measured": sorted({row["key"] for row in rows} - set(best)),
    }


def table_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the table in docs/other-trainers.md.

    It has the fastest configuration of each tool on each card in the same sweep, the fastest first.
    """
    measured = [row for row in rows if row.get("tokens_per_s") and row["key"] != STUDY]
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for row in sorted(measured, key=speed_of):
        best[row["key"], row["card"]] = row
    heads = ["tool", "its best", "card", "tokens/s", "peak reserved", "loss, first and last step"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in sorted(best.values(), key=speed_of, reverse=True):
        ours = row["key"] == EQUAL
        config = f"`{row['config']}`" if ours else row["config"]
        cells = [
            f"**{row['tool']}**" if ours else row["tool"],
            config,
            row["card"],
            f"{row['tokens_per_s']:,.0f}",
        ]
        cells += [
            f"{row['peak_reserved_gib']:.1f} GiB",
            f"{row['first_loss']:.2f}, {row['last_loss']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def speed_of(row: dict[str, Any]) -> float:
    return float(row["tokens_per_s"])


def best_of(rows: list[dict[str, Any]], name: str) -> float | None:
    """A tool's best speed, on the first card that it was measured on."""
    found = [row for row in rows if row["key"] == name and row.get("tokens_per_s")]
    first = min((row["card"] for row in found), default=None)
    return max((row["tokens_per_s"] for row in found if row["card"] == first), default=None)


class Bench:
    """The files that all tools train from, and a run of one tool."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._tiny = args.check or args.gpu == "cpu"
        self._sizes = TINY if self._tiny else Sizes()
        self._device = find_target(args.gpu).device
        self._work = (args.work or scratch()).absolute()
        self._work.mkdir(parents=True, exist_ok=True)
        self._shape = dict(resolve_model(args.model).config)
        if self._tiny:
            heads = {
                "hidden_size": 256,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 64,
            }
            self._shape |= (
                TINY_MODEL
                | heads
                | {"model_type": "mistral", "intermediate_size": 512, "vocab_size": 1024}
            )

    def write_model(self) -> None:
        """Write the weights, a tokenizer and the rows, unless an earlier call did."""
        if (self._work / "model" / "config.json").exists():
            return
        sizes = self._sizes
        given = {
            "shape": self._shape,
            "rows": sizes.step_rows,
            "seq_len": sizes.seq_len,
            "device": self._on,
        }
        _, log = self._child("model", given, self._work, limit=300.0)
        if not (self._work / "model" / "config.json").exists():
            raise SystemExit(f"the weights could not be written:\n{log}")

    def of_tool(self, name: str, until: float = float("inf")) -> list[dict[str, Any]]:
        """Return the rows of one tool, or a row with the reason of its failure."""
        beside: dict[str, Any] = {"key": name, "tool": OTHERS.get(name, name), "export": None}
        tool, described = name, {}
        if name in (EQUAL, STUDY):
            try:
                folder = scratch()
                summary = run_study(folder, *self._study(name))
            except SystemExit as error:
                return [beside | {"outcome": "failed", "reason": f"autotune {error}"[-200:]}]
            tool, beside["export"] = "ours", str(folder / "study" / "export")
            described = self._described(summary)
        limit = min(self._args.limit, until - time.monotonic())
        task = self._task(beside.pop("export"), limit - ENOUGH_S / 2)
        if described:
            task["micro_batches"] = [described["micro_batch"]]
        out = self._work / f"{name.replace(' ', '-')}.jsonl"
        out.unlink(missing_ok=True)
        reason, log = self._child(tool, task, out, limit)
        found = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        if reason:
            found.append({"config": None, "outcome": "failed", "reason": f"{reason}: {log[-600:]}"})
        measured = {"card": self._args.card or self._device.name, "date": now()}
        return [beside | row | described | {"mfu": self._mfu(row)} | measured for row in found]

    @property
    def _on(self) -> str:
        return "cpu" if self._device.kind == "cpu" else "cuda"

    def _task(self, export: str | None, seconds: float) -> dict[str, Any]:
        sizes = self._sizes
        return {
            "model": str(self._work / "model"),
            "rows": str(self._work / "rows.json"),
            "texts": str(self._work / "rows.jsonl"),
            "export": export,
            "device": self._on,
            "rank": sizes.rank,
            "alpha": LORA_ALPHA,
            "every_kind": self._tiny,
            "seq_len": sizes.seq_len,
            "steps": sizes.steps,
            "learning_rate": RATE,
            "micro_batches": self._args.micro_batches or list(sizes.micro_batches),
            "seconds": seconds,
        }

    def _study(self, name: str) -> list[str]:
        """The options of `autotune run`: the knobs that the others sweep too, or all."""
        sizes, tiny = self._sizes, self._tiny
        model = str(self._work / "model") if tiny else self._args.model
        options = [
            "--gpu",
            self._args.gpu,
            "--model",
            model,
            "--tokens-per-example",
            str(sizes.seq_len),
        ]
        options += ["--global-batch", str(sizes.step_rows), "--space", "lora", "--out", "study"]
        options += ["--budget", sizes.budgets[name == STUDY], "--trials", str(sizes.trials)]
        pins = {"seq_len": str(sizes.seq_len), "lora_rank": str(sizes.rank)} | (
            PINS if name == EQUAL else {}
        )
        return options + [
            option for knob, value in pins.items() for option in ("--set", f"{knob}={value}")
        ]

    def _described(self, summary: dict[str, Any]) -> dict[str, Any]:
        winner = summary["winner"]
        return {
            "config": TrainConfig(**winner["config"]).label(),
            "micro_batch": winner["config"]["micro_batch_size"],
            "study_tokens_per_s": winner["performance"]["tokens_per_second"],
            "study_peak_reserved_gib": winner["memory"]["peak_reserved_gib"],
            "fingerprint": {
                key: value for key, value in summary["fingerprint"].items() if key != "digest"
            },
        }

    def _mfu(self, row: dict[str, Any]) -> float | None:
        peak, speed = self._device.bf16_tflops, row.get("tokens_per_s")
        if self._tiny or not peak or not speed:
            return None
        flops = resolve_model(self._args.model).flops_per_token("lora", self._sizes.seq_len)
        return float(speed * flops / (peak * 1e12))

    def _child(
        self, tool: str, task: dict[str, Any], out: Path, limit: float
    ) -> tuple[str | None, str]:
        """Run a tool's part in a process and a folder of its own: why it did not end well, if so,
        and what it said.
        """
        folder = scratch()  # some tools write caches where they are started
        (folder / "task.json").write_text(json.dumps(task), encoding="utf-8")
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        if sites := self._args.sites:
            places = [
                str((sites / name).absolute())
                for name in (tool, "common")
                if (sites / name).is_dir()
            ]
            environment["PYTHONPATH"] = os.pathsep.join([*places, os.environ.get("PYTHONPATH", "")])
        log = folder / "log"
        with log.open("w") as file:
            try:
                code = subprocess.run(
                    [sys.executable, str(CHILD), tool, str(folder / "task.json"), str(out)],
                    cwd=folder,
                    env=environment,
                    check=False,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    timeout=limit,
                ).returncode
                reason = f"exit code {code}" if code else None
            except subprocess.TimeoutExpired:
                reason = f"stopped after {limit:.0f} s"
        said = log.read_text(errors="replace")
        if self._args.check and (reason or '"failed"' in said):
            print(f"--- {tool}: {reason or 'a configuration failed'}\n{said[-3000:]}", flush=True)
        return reason, said


def run(args: argparse.Namespace) -> None:
    """Run each tool that has no row yet."""
    until = time.monotonic() + args.seconds
    bench = Bench(args)
    rows = Rows.of(args)
    wanted = [one for name in args.only for one in ((EQUAL, STUDY) if name == "ours" else (name,))]
    missing = [name for name in wanted if not any(row["key"] == name for row in rows.all)]
    if missing and time.monotonic() + ENOUGH_S < until:
        bench.write_model()
    if args.check:
        with ThreadPoolExecutor() as pool:
            found = list(pool.map(bench.of_tool, missing))
        for some in found:
            add(rows, some)
    else:
        for name in missing:
            if time.monotonic() + ENOUGH_S < until:
                add(rows, bench.of_tool(name, until))
    finish(args, rows.fingerprint, rows.plain, COLUMNS)


MODES = {
    "": Mode(
        run=run,
        result="side_by_side",
        summarize=summarize,
        options={
            "--model": {
                "default": "mistral-7b",
                "help": "of Mistral's architecture, for torchtune's builder",
            },
            "--gpu": "auto",
            "--check": {"default": False, "help": "try every tool at once with a tiny model"},
            "--only": {
                "nargs": "*",
                "default": [EQUAL, STUDY, *OTHERS],
                "choices": ["ours", EQUAL, STUDY, *OTHERS],
            },
            "--sites": {
                "type": Path,
                "help": "a folder with a folder of packages for each tool, and `common`",
            },
            "--work": {"type": Path, "help": "keeps the weights between calls"},
            "--micro-batches": {"nargs": "*", "type": int},
            "--limit": {"default": 200.0, "help": "seconds of one tool"},
            "--rows": None,
            "--seconds": 3600.0,
            "--card": {"help": "name of the GPU if rows are of several of a kind: 'h100-sxm 2'"},
        },
    )
}


if __name__ == "__main__":
    run_program(MODES, __doc__)
