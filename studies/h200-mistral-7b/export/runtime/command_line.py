# -*- coding: utf-8 -*-
"""The command line of train.py.

torch and transformers are imported after the options are checked, so that a wrong option is
reported at once.
"""

import argparse
import functools
import gc
import importlib.util
import os
import shutil
import sys
from pathlib import Path

from . import ranks
from .cache_folders import compile_caches
from .reading import is_on_hub
from .settings import Options, RunSettings, prepare_environment

DEFAULT_OUTPUT = "out"
TRACKERS = ("none", "wandb", "mlflow", "tensorboard", "trackio")


def start(folder: Path) -> None:
    """Train with the train_config.json in `folder`, in one process for each GPU."""
    settings = RunSettings.read(folder / "train_config.json")
    options = parse_options(settings)
    if settings.num_gpus > 1:
        if "LOCAL_RANK" not in os.environ:
            sys.exit(ranks.run(settings.num_gpus))
        ranks.begin_rank()
    prepare_environment(settings)
    try:
        os.environ.update(compile_caches(os.environ))
    except PermissionError as error:
        sys.exit(f"train.py: error: {error}")

    # The imported libraries create a million objects. Garbage collection among these objects would
    # take a fifth of the import time.
    gc.disable()
    from .train import main

    gc.freeze()
    gc.enable()

    train = functools.partial(main, settings, options, folder / "model_config.json")
    if settings.num_gpus > 1:
        ranks.end_at_once(train)
    train()


def parse_options(settings: RunSettings, arguments: list[str] | None = None) -> Options:
    """Parse a command line, by default the command line of this process.

    An invalid option ends the process with code 2.
    """
    parser = _parser(settings)
    given = parser.parse_args(arguments)
    _add_study_dataset(given, settings)
    has_weights = given.model != settings.model or settings.has_published_weights
    if given.dataset and not has_weights:
        parser.error(
            "this model has no published weights: name another model with --model,"
            " or leave --dataset out"
        )
    if given.random_weights == bool(given.dataset) and has_weights:
        parser.error(
            "give either --dataset PATH to train, or --random-weights to measure only the speed"
        )
    if given.split and not given.dataset:
        parser.error("--split selects a part of --dataset: give --dataset as well")
    if given.lengths and not Path(given.lengths).is_file():
        parser.error(f"there is no file {given.lengths}")
    if given.dataset and not (Path(given.dataset).exists() or is_on_hub(Path(given.dataset))):
        parser.error(f"there is no file {given.dataset}")

    saves = bool(given.output_dir) and (bool(given.dataset) or given.output_dir != DEFAULT_OUTPUT)
    checkpoint = last_checkpoint(given.output_dir) if saves else None
    if checkpoint and not given.resume:
        parser.error(
            f"{checkpoint} exists: continue it with --resume, or give another --output-dir"
        )
    # The checkpoint has reached --max-steps already. Without this check, the Trainer would still
    # take one more step.
    if checkpoint and 0 < given.max_steps <= (step := checkpoint_step(checkpoint)):
        parser.error(
            f"{checkpoint} has been trained for {step} steps: give a larger --max-steps,"
            " or leave --max-steps out"
        )

    if given.dataset and saves and given.max_steps < 1:
        free = free_gib(given.output_dir)
        if settings.checkpoints_gib is not None and settings.checkpoints_gib > free:
            parser.error(
                f"the checkpoints take up to {settings.checkpoints_gib:.3g} GiB, and"
                f" {given.output_dir} has {free:.3g} GiB free: free disk space, or give another"
                " --output-dir"
            )

    # A run on random data, which only measures the speed, uses a tracker only with --report-to.
    report_to = given.report_to or (settings.report_to if given.dataset else "none")
    if report_to != "none" and importlib.util.find_spec(report_to) is None:
        parser.error(
            f"reporting to {report_to} needs its package: pip install {report_to},"
            " or turn reporting off with --report-to none"
        )

    if reason := ask_obstacle(settings, given):
        parser.error(f"--ask needs {reason}")

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
        ask=given.ask,
    )


def _add_study_dataset(given: argparse.Namespace, settings: RunSettings) -> None:
    """Set the study's dataset, if the user gave neither a dataset nor --random-weights."""
    if given.dataset is None and settings.dataset is not None and not given.random_weights:
        given.dataset = settings.dataset
        given.split = given.split or settings.split


def ask_obstacle(settings: RunSettings, given: argparse.Namespace) -> str | None:
    """Return which condition of --ask is not met, or None if all are met or --ask is not given."""
    if given.ask is None:
        return None
    if given.dataset is None:
        return "--dataset, because only a run on a dataset has real weights"
    if settings.num_gpus > 1:
        return "a run on one GPU"
    if settings.objective != "sft" or settings.images:
        return "the objective sft without images"
    if settings.model_settings.attention == "varlen":  # varlen works only for packed rows
        return "an attention other than varlen"
    return None


def _parser(settings: RunSettings) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train.py",
        description="Fine-tune with exactly the configuration in train_config.json.",
    )
    add = parser.add_argument
    add(
        "--model",
        default=settings.model,
        metavar="NAME_OR_DIR",
        help="Hub name or directory of weights",
    )
    add(
        "--dataset",
        metavar="PATH",
        help="a file (.jsonl, .json, .parquet, .csv, .arrow), a folder of such files,"
        " a dataset saved by the library datasets, or org/name[:config] on the Hub"
        + (" [the study's, in train_config.json]" if settings.dataset else ""),
    )
    add("--split", metavar="NAME", help="the part of --dataset to train on [train, if it exists]")
    add(
        "--random-weights",
        action="store_true",
        help="train random weights on random tokens, to measure the speed",
    )
    add("--lengths", metavar="FILE", help="lengths of the random examples, one on each line")
    add("--max-steps", type=int, default=-1, metavar="N", help="stop after N optimizer steps")
    add(
        "--held-out",
        nargs=2,
        type=int,
        default=(0, 0),
        metavar=("N", "TOKENS"),
        help="hold out the last N examples, truncated to TOKENS, and print their loss before and"
        " after the training",
    )
    add(
        "--output-dir",
        default=DEFAULT_OUTPUT,
        help="directory for checkpoints and the result; '' saves neither",
    )
    add("--resume", action="store_true", help="continue from the last checkpoint in --output-dir")
    add(
        "--report-to",
        choices=TRACKERS,
        help="tracker of a run on a dataset [from train_config.json]",
    )
    add(
        "--ask",
        metavar="PROMPT",
        help="answer this prompt before and after the training, and print both answers",
    )
    add("--progress", metavar="FILE", help="append a line of JSON to this file after each step")
    return parser


def free_gib(folder: str) -> float:
    """Return the free GiB of the disk that holds `folder`. The folder may not exist yet."""
    parents = (Path(folder).absolute(), *Path(folder).absolute().parents)
    return shutil.disk_usage(next(path for path in parents if path.exists())).free / 2**30


def last_checkpoint(folder: str) -> str | None:
    """Return the last complete checkpoint in `folder`, or None.

    An interrupted checkpoint has no trainer_state.json yet.
    """
    complete = [str(path.parent) for path in Path(folder).glob("checkpoint-*/trainer_state.json")]
    return max(complete, key=checkpoint_step, default=None)


def checkpoint_step(checkpoint: str) -> int:
    """Return the number of the optimizer step, which is part of a checkpoint's name."""
    return int(checkpoint.rpartition("-")[2])
