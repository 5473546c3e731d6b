"""The command line of train.py. torch and transformers are imported only once its options are known to be right."""

import argparse
import functools
import gc
import importlib.util
import os
import shutil
import sys
from pathlib import Path

from . import ranks
from .settings import Options, RunSettings, prepare_environment

DEFAULT_OUTPUT = "out"
TRACKERS = ("none", "wandb", "mlflow", "tensorboard", "trackio")


def start(folder: Path) -> None:
    """Run the command: train as train_config.json in `folder` says, on several GPUs by a process for each."""
    settings = RunSettings.read(folder / "train_config.json")
    options = parse_options(settings)
    if settings.num_gpus > 1:
        if "LOCAL_RANK" not in os.environ:
            sys.exit(ranks.run(settings.num_gpus))
        ranks.end_with_launcher()
    prepare_environment(settings)
    gc.disable()  # collections among the million objects of the libraries take a fifth of the time to load them
    from .train import main

    gc.freeze()
    gc.enable()
    train = functools.partial(main, settings, options, folder / "model_config.json")
    if settings.num_gpus > 1:
        ranks.end_after(train)
    train()


def parse_options(settings: RunSettings, arguments: list[str] | None = None) -> Options:
    """The options of a command line, by default of this process's. Ends the process with code 2 on a wrong one."""
    parser = _parser(settings.model)
    given = parser.parse_args(arguments)
    made_up = given.model == settings.model and not settings.has_published_weights
    if made_up and given.dataset:
        parser.error("this model has no published weights: name another with --model, or leave --dataset out")
    if given.random_weights == bool(given.dataset) and not made_up:
        parser.error("give either --dataset PATH to train, or --random-weights to measure the speed alone")
    if given.split and not given.dataset:
        parser.error("--split is a part of --dataset")
    if given.lengths and not Path(given.lengths).is_file():
        parser.error(f"there is no file {given.lengths}")
    if given.dataset and not Path(given.dataset).exists():
        parser.error(f"there is no file {given.dataset}")
    saves = bool(given.output_dir) and (bool(given.dataset) or given.output_dir != DEFAULT_OUTPUT)
    checkpoint = last_checkpoint(given.output_dir) if saves else None
    if checkpoint and not given.resume:
        parser.error(f"{checkpoint} exists: continue it with --resume, or give another --output-dir")
    if checkpoint and 0 < given.max_steps <= (step := step_of(checkpoint)):  # the Trainer would take one more step
        parser.error(f"{checkpoint} has been trained for {step} steps: give a larger --max-steps, or none")
    if given.dataset and saves and given.max_steps < 1:
        free = free_gib(given.output_dir)
        if settings.checkpoints_gib is not None and settings.checkpoints_gib > free:
            parser.error(
                f"the checkpoints take up to {settings.checkpoints_gib:.3g} GiB, and {free:.3g} GiB are free in"
                f" {given.output_dir}: free some, or give another --output-dir"
            )
    # A run that only measures the speed reports nowhere, unless it is asked to.
    report_to = given.report_to or (settings.report_to if given.dataset else "none")
    if report_to != "none" and importlib.util.find_spec(report_to) is None:
        parser.error(f"to report to {report_to}, pip install {report_to}; or report nowhere with --report-to none")
    held_out, held_out_tokens = given.held_out
    return Options(
        model=given.model,
        dataset=given.dataset,
        split=given.split,
        lengths=given.lengths,
        max_steps=given.max_steps,
        held_out=held_out,
        held_out_tokens=held_out_tokens,
        output_dir=given.output_dir,
        saves=saves,
        checkpoint=checkpoint,
        progress=given.progress,
        report_to=report_to,
    )


def _parser(model: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train.py", description="Fine-tune with exactly the configuration in train_config.json."
    )
    parser.add_argument("--model", default=model, metavar="NAME_OR_DIR", help="Hub name or directory of the weights")
    parser.add_argument(
        "--dataset",
        metavar="PATH",
        help="a file (.jsonl, .json, .parquet, .csv, .arrow), a folder of such files, or what datasets has saved",
    )
    parser.add_argument("--split", metavar="NAME", help="the part of --dataset to train on, by default train, if any")
    parser.add_argument(
        "--random-weights", action="store_true", help="train random weights on random tokens, to measure the speed"
    )
    parser.add_argument("--lengths", metavar="FILE", help="lengths of the random examples, one a line")
    parser.add_argument("--max-steps", type=int, default=-1, metavar="N", help="stop after N optimizer steps")
    parser.add_argument(
        "--held-out",
        nargs=2,
        type=int,
        default=(0, 0),
        metavar=("N", "TOKENS"),
        help="do not train on the last N examples, cut at TOKENS: print their loss before and after",
    )
    parser.add_argument(
        "--output-dir", default=DEFAULT_OUTPUT, help="directory for checkpoints and the result; '' saves nothing"
    )
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --output-dir")
    parser.add_argument("--report-to", choices=TRACKERS, help="tracker of a run on a dataset [of train_config.json]")
    parser.add_argument("--progress", metavar="FILE", help="append a line of JSON to this file after each step")
    return parser


def free_gib(folder: str) -> float:
    """What is free on the disk that `folder` is on, or will be."""
    parents = (Path(folder).absolute(), *Path(folder).absolute().parents)
    return shutil.disk_usage(next(path for path in parents if path.exists())).free / 2**30


def last_checkpoint(folder: str) -> str | None:
    """The last complete checkpoint in `folder`. One that was interrupted has no trainer_state.json yet."""
    complete = [str(path.parent) for path in Path(folder).glob("checkpoint-*/trainer_state.json")]
    return max(complete, key=step_of, default=None)


def step_of(checkpoint: str) -> int:
    """The optimizer step after which a checkpoint was saved, by its name."""
    return int(checkpoint.rpartition("-")[2])
