"""Compare the phases of GRPO that were measured apart with TRL's real run, and the fastest layout
with TRL's defaults.

Both sides get one folder with random bf16 weights and a small tokenizer. Completions end by chance,
with the same probability at each token, at the latest after `--longest` tokens.
"""

import argparse
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import TINY_MODEL, Failed, Mode, Rows, finish, run_program, table

from autotune.api.rollouts import PACKED
from autotune.catalog import ModelSpec, resolve_model
from autotune.core.probe_types import Outcome, Phase, ProbeResult
from autotune.core.rollout_types import SERVER, Engine
from autotune.core.serialization import from_data, to_data
from autotune.core.train_config import TrainConfig
from autotune.export.rollout_run import RolloutRun, compare
from autotune.export.rollouts import engine_arguments, lora_arguments, trl_arguments
from autotune.export.run.rollouts import run_trl, write_model
from autotune.prediction.rollout_step import RolloutStep
from autotune.probe.supervisor import ENGINE, WorkerProber
from autotune.problem.length_distribution import Lengths
from autotune.problem.rollouts import Rollouts
from autotune.study.rollout_search import (
    FITS,
    MeasuredLayout,
    PairLayout,
    RolloutSearch,
    two_gpus,
)
from autotune.study.rollout_task import SHARE, RolloutTask, engine_kind

MEAN, LONGEST, PROMPT = 600, 2048, 256  # tokens
PROMPTS, GENERATIONS = 8, 8
STEPS = 8
METHODS = ("lora", "full")
COLUMNS = ["stage", "method", "layout", "state", "step_s", "peak_gib", "seconds"]
TIMEOUT_S = 420
PORT = 8421  # of TRL's vLLM server
SERVER_VARIABLES = {"HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}


class Bench:
    """The facts of a call: the model, the workload and the rows."""

    def __init__(self, args: argparse.Namespace, method: str) -> None:
        self.args = args
        self.method = method
        self.on_cpu = args.device == "cpu"
        small = replace(resolve_model(args.model), config=TINY_MODEL, params=None)
        self.model: ModelSpec = small if self.on_cpu else resolve_model(args.model)
        longest, mean = (24, 12) if self.on_cpu else (args.longest, MEAN)
        prompt = 8 if self.on_cpu else PROMPT
        sequences = 8 if self.on_cpu else PROMPTS * GENERATIONS
        generations = 4 if self.on_cpu else GENERATIONS
        self.mean = mean
        self.rollouts = Rollouts(
            prompt_tokens=prompt,
            completion_tokens=longest,
            mean_tokens=float(prompt + mean),
            sequences=sequences,
            num_generations=generations,
            engine=Engine(kind=engine_kind(args.device), max_tokens=prompt + longest),
        )

    def task(self, card_gib: float) -> RolloutTask:
        """The task of a search on a card."""
        return RolloutTask(
            model=self.model,
            device=self.args.device,
            card_gib=card_gib,
            rollouts=self.rollouts,
            prompts=Lengths.constant(self.rollouts.prompt_tokens),
            completions=(
                Lengths.constant(self.rollouts.completion_tokens)
                if self.args.constant
                else geometric(self.mean)
            ),
        )

    @property
    def facts(self) -> dict[str, Any]:
        """What the rows of this model and workload have in common."""
        args = self.args
        lengths = f"{'all' if args.constant else 'at most'} {args.longest}"
        return {"method": self.method, "model": args.model, "completions": lengths}

    @property
    def config(self) -> TrainConfig:
        """The training at which the search begins."""
        lora = {"method": "lora", "lora_rank": 16, "precision": "bf16_mixed"}
        full = {"method": "full", "lora_rank": None, "precision": "bf16_pure"}
        knobs = (full if self.method == "full" else lora) | {"allocator": "expandable"}
        return TrainConfig(**(knobs | ({"precision": "fp32"} if self.on_cpu else PACKED)))

    @property
    def choices(self) -> dict[str, list[Any]]:
        """The values of the knobs that the search may change."""
        sizes = [2, 4] if self.on_cpu else self.args.micro_batches
        return {"micro_batch_size": sizes, "checkpointing": ["none", "full"]}


def geometric(mean: float) -> Lengths:
    """Lengths of completions that end at each token with the same probability."""
    rate = math.log(1 - 1 / mean)
    return Lengths.of(
        (max(1, math.ceil(math.log(1 - (index + 0.5) / 1000) / rate)) for index in range(1000)),
        "given",
    )


def run(args: argparse.Namespace) -> None:
    """Measure the stages of each method that no earlier row has.

    `engine` measures vLLM, `training` measures layouts of the training and composes their steps,
    `trl` runs TRL's trainer with the best layout, and `defaults` with TRL's defaults. `colocated`
    and `apart` run it on two GPUs, and are measured only if `--stages` names them. The run of
    `trl` has eight steps; in three of them every completion has the largest length. `phase_error`
    compares the largest peak of each phase, and `step_error` the median time of the other steps,
    without the first. An error is the prediction divided by the measurement, minus 1.

    On a CPU it makes a trial run with a tiny model and transformers' generation.
    """
    rows, began = Rows.of(args), time.monotonic()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="autotune-bench-"))
    folder.mkdir(parents=True, exist_ok=True)
    for method in args.methods:
        bench = Bench(args, method)
        for name in STAGES:
            late = time.monotonic() - began > args.seconds
            facts = {"stage": name} | bench.facts
            if late or name not in args.stages or rows.has(**facts, done=True):
                continue
            try:
                measure(rows, facts, bench, folder)
            except Failed as error:
                print(f"{name} of {method}: {error}", flush=True)
    finish(args, rows.fingerprint, rows.plain, COLUMNS)


def measure(rows: Rows, facts: dict[str, Any], bench: Bench, folder: Path) -> None:
    """Measure a stage, and store and print each of its rows at once."""
    start = time.monotonic()
    for row in STAGES[facts["stage"]](bench, rows, folder):
        rows.add(facts | row | {"seconds": time.monotonic() - start})
        table(rows.all[-1:], COLUMNS)
        sys.stdout.flush()
        start = time.monotonic()


# --- phases, measured apart


def engine(bench: Bench, rows: Rows, folder: Path) -> Iterator[dict[str, Any]]:
    """Measure the engine with the smallest share whose cache holds all completions."""
    with WorkerProber(bench.args.device, folder / "engine", module=ENGINE) as prober:
        task = bench.task(prober.memory_gib)
        config = bench.config
        share = task.share(config) or SHARE
        result = prober.probe(task.engine_request(config, share), folder / "engine" / "engine.log")
        fingerprint = to_data(prober.fingerprint)
    yield {
        "layout": f"share {share:g}",
        "state": result.outcome.value,
        "share": share,
        "card_gib": task.card_gib,
        "result": to_data(result),
        "log": None if result.outcome is Outcome.OK else tail(folder / "engine" / "engine.log"),
        "fingerprint": fingerprint,
        "done": result.outcome is Outcome.OK,
    }


def training(bench: Bench, rows: Rows, folder: Path) -> Iterator[dict[str, Any]]:
    """Search for the fastest layout. Ten alternations of the best one show fragmentation."""
    measured = one(rows, "engine", bench)
    found = from_data(ProbeResult, measured["result"]).engine
    assert found is not None
    logs = folder / "training"
    with WorkerProber(bench.args.device, logs) as prober:
        task = bench.task(measured["card_gib"])
        search = RolloutSearch(task, found, measured["share"], prober, logs)
        for layout in search.run(bench.config, bench.choices):
            row = layout_row(layout)
            yield row | {"done": False}
    found = two_gpus(search)
    pairs = {"colocated": found.colocated, "apart": found.apart}
    yield row | {
        "two_gpus": {name: pair and pair_row(pair) for name, pair in pairs.items()},
        "faster": found.faster,
        "done": layout.state == FITS,
    }


def pair_row(pair: PairLayout) -> dict[str, Any]:
    """The facts of a layout of two GPUs."""
    return {"config": pair.config.as_dict(), "sleeps": pair.sleeps, "step_s": pair.step.seconds}


def layout_row(layout: MeasuredLayout) -> dict[str, Any]:
    """A row of a measured layout."""
    step: RolloutStep | None = layout.step
    return {
        "layout": f"{layout.config.label()}, share {layout.share:g}" + layout.sleeps * ", sleeps",
        "state": layout.state,
        "phase": layout.phase,
        "breaks_at": layout.breaks_at,
        "reason": layout.reason,
        "between_gib": layout.between_gib,
        "config": layout.config.as_dict(),
        "share": layout.share,
        "sleeps": layout.sleeps,
        "step_s": step and step.seconds,
        "peak_gib": step and step.peak[1],
        "prompts_per_s": layout.prompts_per_s,
        "phase_s": step and {phase.value: value for phase, value in step.phase_s.items()},
        "phase_gib": step and {phase.value: value for phase, value in step.phase_gib.items()},
    }


# --- TRL's real run


def trl(bench: Bench, rows: Rows, folder: Path) -> Iterator[dict[str, Any]]:
    """Run TRL with the best layout, and compare its phases with the composed step."""
    best = one(rows, "training", bench)
    config = TrainConfig(**best["config"])
    engine = replace(bench.rollouts.engine, share=best["share"], sleeps=best["sleeps"])
    arguments = trl_arguments(config, bench.rollouts, engine)
    done = measure_trl(bench, folder, arguments)
    step = RolloutStep(
        phase_s={Phase(name): value for name, value in best["phase_s"].items()},
        phase_gib={Phase(name): value for name, value in best["phase_gib"].items()},
        prompts=PROMPTS,
    )
    found = compare(step, done)
    yield run_row(done) | {
        "layout": best["layout"],
        "predicted_step_s": best["step_s"],
        "predicted_phase_s": best["phase_s"],
        "predicted_phase_gib": best["phase_gib"],
        "phase_errors": found.phase_errors,
        "step_error": found.step_error,
        "done": done.problem is None,
    }


def defaults(bench: Bench, rows: Rows, folder: Path) -> Iterator[dict[str, Any]]:
    """Run TRL with its defaults, and the same generations, prompts and lengths."""
    rollouts, rows_each = bench.rollouts, 2 if bench.on_cpu else 8
    arguments = {
        "num_generations": rollouts.num_generations,
        "max_completion_length": rollouts.completion_tokens,
        "per_device_train_batch_size": rows_each,
        "gradient_accumulation_steps": rollouts.sequences // rows_each,
    } | engine_arguments(replace(rollouts.engine, share=SHARE, sleeps=False, max_tokens=0))
    done = measure_trl(bench, folder, arguments, longest_steps=(), steps=4, allocator="fixed")
    yield run_row(done) | {"layout": "TRL's defaults", "done": done.problem is None}


def colocated(bench: Bench, rows: Rows, folder: Path) -> Iterator[dict[str, Any]]:
    """Run TRL on two GPUs that each generate and train half of the completions."""
    training_row = one(rows, "training", bench)
    pair = training_row["two_gpus"]["colocated"]
    share, rollouts = training_row["share"], bench.rollouts
    engine = replace(rollouts.engine, share=share, sleeps=pair["sleeps"])
    half = replace(rollouts, sequences=rollouts.sequences // 2)
    arguments = trl_arguments(TrainConfig(**pair["config"]), half, engine)
    done = measure_trl(bench, folder, arguments, num_gpus=2)
    yield pair_of_runs(done, pair, "two GPUs, colocated")


def apart(bench: Bench, rows: Rows, folder: Path) -> Iterator[dict[str, Any]]:
    """Run TRL on a GPU that trains, and its vLLM server on another GPU.

    The server takes no other lengths than the largest: this needs `--constant`.
    """
    pair = one(rows, "training", bench)["two_gpus"]["apart"]
    if not bench.args.constant:
        raise Failed("the server generates only completions of the largest length: add --constant")
    arguments = trl_arguments(TrainConfig(**pair["config"]), bench.rollouts, Engine(kind=SERVER))
    arguments |= {"use_vllm": True, "vllm_mode": "server", "vllm_server_port": PORT}
    if problem := write_folder(bench, folder):
        raise Failed(problem)
    with server(bench, folder):
        done = measure_trl(bench, folder, arguments)
    yield pair_of_runs(done, pair, "two GPUs, apart")


@contextmanager
def server(bench: Bench, folder: Path) -> Iterator[None]:
    """Run TRL's vLLM server on the second GPU, and let other processes see the first."""
    command = [sys.executable, "-c", "from trl.cli import main; main()"]
    command += ["vllm-serve", "--model", "model"]
    command += ["--port", str(PORT), "--gpu_memory_utilization", "0.9"]
    command += ["--max_model_len", str(bench.rollouts.longest)]
    variables = os.environ | {"CUDA_VISIBLE_DEVICES": "1"} | SERVER_VARIABLES
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=variables, stdout=log, stderr=log, start_new_session=True
        )
        try:
            yield
        finally:
            del os.environ["CUDA_VISIBLE_DEVICES"]
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def pair_of_runs(done: RolloutRun, pair: dict[str, Any], layout: str) -> dict[str, Any]:
    """A row of TRL's run on two GPUs."""
    error = pair["step_s"] / done.step_s - 1 if done.step_s else None
    return run_row(done) | {
        "layout": layout,
        "predicted_step_s": pair["step_s"],
        "step_error": error,
        "done": done.problem is None,
    }


def write_folder(bench: Bench, folder: Path) -> str | None:
    """Write the model and the prompts once. Returns the reason of a failure, or None."""
    prompts = [bench.rollouts.prompt_tokens] * (64 * STEPS)
    return write_model(folder, bench.model.config, bench.args.device, prompts)


def measure_trl(
    bench: Bench, folder: Path, arguments: dict[str, Any], **options: Any
) -> RolloutRun:
    """Run TRL's trainer on a model that is written once. Raises Failed if it cannot be written."""
    if problem := write_folder(bench, folder):
        raise Failed(problem)
    on_cpu = {"use_cpu": True, "bf16": False} if bench.on_cpu else {}
    lora = lora_arguments(bench.config, bench.model.text_type)
    mean = 0 if bench.args.constant else bench.mean
    done = run_trl(folder, arguments | on_cpu, lora, mean_tokens=mean, limit_s=TIMEOUT_S, **options)
    if done.problem:
        print(tail(folder / "trl.log", 60), flush=True)
    return done


def run_row(done: RolloutRun) -> dict[str, Any]:
    """A row of TRL's run."""
    return {
        "state": "failed" if done.problem else "ok",
        "out_of_memory": done.out_of_memory,
        "problem": done.problem,
        "steps": len(done.steps),
        "step_s": done.step_s,
        "phase_s": done.phase_s,
        "phase_gib": done.phase_gib,
        "peak_gib": max(done.phase_gib.values(), default=None),
        "start_s": done.start_s,
        "each_step": done.steps,
        "mean_tokens": [statistics.fmean(lengths) for lengths in done.lengths],
    }


def one(rows: Rows, stage: str, bench: Bench) -> dict[str, Any]:
    """The last row of a stage. Raises Failed if the stage was not measured."""
    facts = {"stage": stage} | bench.facts
    found = [row for row in rows.all if facts.items() <= row.items()]
    if not found or not found[-1].get("done"):
        raise Failed(f"the stage {stage} has no measurement")
    return found[-1]


def tail(log: Path, lines: int = 30) -> str:
    """The end of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The largest errors, and the speed of the best layouts divided by the defaults' speed."""

    def of_stage(stage: str) -> dict[tuple[str, ...], dict[str, Any]]:
        names = ("model", "method", "completions")
        return {tuple(row[name] for name in names): row for row in rows if row["stage"] == stage}

    runs, others = of_stage("trl"), of_stage("defaults")
    phase_errors = [
        abs(error) for row in runs.values() for error in row.get("phase_errors", {}).values()
    ]
    step_errors = [abs(row["step_error"]) for row in runs.values() if row.get("step_error")]
    over = {
        case: others[case]["step_s"] / row["step_s"]
        for case, row in runs.items()
        if case in others and row["step_s"] and others[case]["step_s"]
    }
    pairs = {row["stage"]: row["step_s"] for row in rows if row["stage"] in ("colocated", "apart")}
    predicted = [row["faster"] for row in rows if row.get("faster")]
    faster = (
        min(pairs, key=lambda name: pairs[name])
        if None not in pairs.values() and len(pairs) == 2
        else None
    )
    return {
        "layouts": sum(row["stage"] == "training" and not row["done"] for row in rows),
        "runs": len(runs),
        "phase_error_max": max(phase_errors, default=None),
        "step_error_max": max(step_errors, default=None),
        "over_defaults": min(over.values(), default=None),
        "ooms": sum(row["out_of_memory"] for row in runs.values()),
        "two_gpus_right": None if faster is None else faster == predicted[-1],
        "failed": sum(row["state"] == "failed" for row in (*runs.values(), *others.values())),
    }


STAGES = {
    "engine": engine,
    "training": training,
    "trl": trl,
    "defaults": defaults,
    "colocated": colocated,
    "apart": apart,
}
ON_ONE_GPU = ["engine", "training", "trl", "defaults"]
MODES = {
    "": Mode(
        run=run,
        result="rollouts",
        summarize=summarize,
        options={
            "--device": "cuda",
            "--model": "qwen3-4b",
            "--methods": {"nargs": "*", "default": list(METHODS)},
            "--stages": {"nargs": "*", "default": ON_ONE_GPU},
            "--micro-batches": {"nargs": "*", "type": int, "default": [2, 4, 8, 16, 32]},
            "--constant": {"default": False, "help": "every completion has the largest length"},
            "--longest": {"type": int, "default": LONGEST, "help": "tokens of a completion"},
            "--folder": {"type": Path, "help": "keep the model and the logs in this folder"},
            "--seconds": {
                "type": float,
                "default": 400.0,
                "help": "start no stage after this time",
            },
            "--rows": None,
        },
    )
}


if __name__ == "__main__":
    run_program(MODES, __doc__)
