"""Prepare a session of a study, and find invalid options before any GPU time is spent.

This module does not import torch.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.core.errors import UsageError
from autotune.core.files import document
from autotune.core.nvml import visible
from autotune.core.objective import Objective
from autotune.core.parallelism import Parallelism
from autotune.core.probe_types import World
from autotune.core.units import parse_duration
from autotune.prediction.projection import with_transfer
from autotune.problem.dataset import full_path
from autotune.problem.gpu_counts import counted_gpu
from autotune.problem.setup import Setup, refuse_untrainable, set_up
from autotune.problem.study_spec import StudySpec
from autotune.problem.target import Target, find_target
from autotune.problem.task import Task
from autotune.study.storage.location import make_writable, shared_url, storage_url, study_directory
from autotune.study.worker_group import further_cards, require_ray

# The seconds that are kept for writing the report and the export, at most this share of the budget.
ANSWER_S, ANSWER_SHARE = 1.5, 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPlan:
    """Everything that one session of a study needs: task, target, storage and time.

    `cards` has the GPU of each additional worker on this machine, or None for a worker on the CPU.
    `started` is the time.monotonic() at which the budget starts: the start of the command plus
    `preparation_s`, the time for the setup, which reads the dataset.
    """

    spec: StudySpec
    setup: Setup
    target: Target
    url: str
    out: Path
    cards: Sequence[int | str | None]
    budget_s: float
    started: float
    preparation_s: float

    @property
    def task(self) -> Task:
        """The task to tune."""
        return self.setup.task

    @property
    def study(self) -> str:
        """The study's name."""
        return self.setup.task.study

    @property
    def search_until(self) -> float:
        """The time.monotonic() at which the search ends, so that the budget covers the answer."""
        return self.started + self.budget_s - min(ANSWER_S, ANSWER_SHARE * self.budget_s)

    @property
    def device(self) -> str:
        """The device of the probes: "cpu" or "cuda"."""
        return "cpu" if self.target.card is None else "cuda"


def prepare_session(
    spec: StudySpec,
    say: Callable[[str], None] = lambda text: None,
    adjust: Callable[[Setup], Setup] = lambda setup: setup,
    *,
    began: float | None = None,
) -> SessionPlan:
    """Turn a spec into the plan of a session.

    `adjust` may refine and check the setup before any file is written. `began` is the
    time.monotonic() at which the command began, by default now.

    Raises:
        UsageError: options contradict each other, or name something that does not exist.
        EnvironmentProblem: the target is missing on this machine, or has too few GPUs.
        StorageError: the study's directory is not writable.
    """
    began = time.monotonic() if began is None else began
    try:
        budget_s = parse_duration(spec.budget)
    except ValueError as error:
        raise UsageError(f"--budget: {error}", remedy="for example --budget 15m") from None

    spec = _with_counted_gpu(spec)
    refuse_untrainable(spec)
    target = find_target(spec.gpu)
    _check_combination(spec, target)
    # If the spec lists configurations to probe, its pins (fixed knobs) are later applied to each
    # listed configuration.
    searched = replace(spec, pins={}) if spec.configs else spec
    setup_began = time.monotonic()
    setup = adjust(with_transfer(set_up(searched, target, say), spec))
    preparation_s = time.monotonic() - setup_began
    setup = _with_ranks(setup, spec, target, say)

    require_ray(spec.ray)
    shared = spec.workers > 1 or spec.ray is not None
    url = shared_url(spec.storage) if shared else storage_url(spec.storage)

    if spec.dataset is not None:  # later commands may have another working directory
        spec = replace(spec, dataset=full_path(spec.dataset))
    if spec.study is None:
        name = f"{setup.task.study}-suite" if spec.configs else _unused_name(setup.task.study, url)
        setup = replace(setup, task=replace(setup.task, study=name))

    cards = further_cards(spec.workers, cpu=target.card is None)
    out = study_directory(spec.out, setup.task.study).absolute()
    make_writable(out)
    return SessionPlan(
        spec=spec,
        setup=setup,
        target=target,
        url=url,
        out=out,
        cards=cards,
        budget_s=budget_s,
        started=began + preparation_s,
        preparation_s=preparation_s,
    )


def _with_counted_gpu(spec: StudySpec) -> StudySpec:
    """Move the number in a card's name, such as 8 in 8xh100, to the field `gpus`."""
    count, gpu = counted_gpu(spec.gpu, spec.gpus)
    return spec if count is None else replace(spec, gpu=gpu, gpus=count)


def _with_ranks(setup: Setup, spec: StudySpec, target: Target, say: Callable[[str], None]) -> Setup:
    """Let one GPU simulate one rank of a run on several GPUs, on request or if GPUs are missing.

    Raises UsageError if the interconnect bandwidth is unknown.
    """
    task = setup.task
    numbers = task.numbers_of_gpus
    gpus = numbers[-1]
    if spec.play_ranks and gpus == 1:
        raise UsageError(
            "play_ranks simulates one of several ranks, but this study is for one GPU",
            remedy="give a larger number of GPUs with --gpus",
        )

    here = gpus if target.card is None else len(visible())
    if gpus == 1 or (here >= gpus and not spec.play_ranks):
        return setup

    if spec.verify:
        raise UsageError(
            f"--verify runs the exported script on {gpus} GPUs, "
            f"but this machine has {here} and simulates a rank on one of them",
            remedy="omit --verify, and run `autotune verify` on a machine with the GPUs",
        )

    if any(
        task.link_gb_s(Parallelism.of(config)) is None
        for config in task.baselines
        if config.num_gpus > 1
    ):
        reason = f"the interconnect bandwidth of {task.device.label} is unknown"
        if task.device.is_alone:
            reason = f"a host has only one {task.device.label}"
        page = document("other-gpus.md")
        remedy = f"give --gpu a file that describes your GPU, including link or link_gb_s ({page})"
        if target.card is None:
            remedy = "on a CPU, omit play_ranks"
        raise UsageError(f"--gpus {gpus}: {reason}", remedy=remedy)

    if True in task.space.choices("offload"):
        raise UsageError(
            "one GPU cannot simulate a rank with offload to the host's memory: "
            "real steps took 2 to 5 times as long as simulated steps",
            remedy=f"run --gpus {gpus} on a machine with the GPUs, or omit offload; "
            "`autotune plan` estimates the memory",
        )

    played = " or ".join(str(number) for number in numbers if number > 1)
    say(f"one GPU simulates one of {played} ranks: memory is measured, speeds are projected")
    return replace(setup, task=replace(task, world=World.FAKE))


def _check_combination(spec: StudySpec, target: Target) -> None:
    """Raise UsageError for options that exclude each other."""
    if spec.quality and spec.shallow_only:
        raise UsageError(
            "--quality trains a whole model, and --shallow-only excludes that",
            remedy="omit one of them",
        )

    if spec.configs and (spec.quality or spec.shallow_only or spec.verify):
        raise UsageError(
            "named configurations (configs) are probed unchanged, and not trained or exported",
            remedy="omit --quality, --verify and --shallow-only",
        )

    if spec.verify and (spec.shallow_only or target.measured_on is not None):
        raise UsageError(
            "--verify runs the exported script on the target GPU itself",
            remedy="omit --verify, or --shallow-only",
        )

    if (spec.numbers_of_gpus or (1,)) != (1,) and (
        spec.workers > 1 or spec.ray is not None or spec.quality
    ):
        raise UsageError(
            "--gpus uses all GPUs for one training at a time",
            remedy="omit --workers, ray and --quality",
        )

    if spec.quality and spec.objective != Objective.SFT:
        raise UsageError(
            "--quality compares next-token losses, so it needs the objective sft",
            remedy="omit --quality, or --objective",
        )

    if spec.quality and spec.trained_by != "transformers":
        raise UsageError(
            "--quality trains with transformers' Trainer",
            remedy="omit --quality, or --trainer trl",
        )


def _unused_name(name: str, url: str) -> str:
    """Return a study name that is unused in this database: `name`, or `name` with a number."""
    from autotune.study.storage.optuna_storage import study_names

    taken = set(study_names(url))
    numbered = (f"{name}-{number}" for number in itertools.count(2))
    return next(
        candidate for candidate in itertools.chain([name], numbered) if candidate not in taken
    )
