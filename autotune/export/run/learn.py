"""Trains a study's winner briefly at several learning rates, on the user's own examples.

One process loads the weights once and runs all trainings, with the modules of the exported script.
`study.learning` chooses the learning rates and the number of steps.
"""

import json
import os
import select
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from autotune.core.child_environment import child_environment
from autotune.core.errors import AutotuneError, Cancelled, UsageError
from autotune.core.objective import Objective
from autotune.core.process import module_command
from autotune.core.text import study_command
from autotune.export import script
from autotune.export.header import warmup_steps_of
from autotune.export.run.process import last_error, scratch_folder, time_limit_s, write_files
from autotune.export.run.quality import measurement_obstacle, num_held_out, sample
from autotune.study import learning
from autotune.study.learning import Attempt, Compared, Learning
from autotune.study.summary import Candidate, Recipe

MAX_SHARE = 10.0  # the steps of the largest search, divided by the steps of the full run
SHARE = 0.1  # the same ratio for a search with default options
HELD_OUT = 256  # the largest number of held-out examples
WAIT_S = 0.2  # seconds between two checks for a stop request


def learn(
    recipe: Recipe,
    dataset: Path,
    out: Path,
    say: Callable[[str], None],
    should_stop: Callable[[], bool],
    *,
    split: str | None = None,
    share: float = SHARE,
    others: int = 0,
) -> Learning:
    """Find the learning rate of the winner in at most `share` of the full run's optimizer steps.

    After the search, `others` further candidates are trained at the learning rate that was found.
    They are the best candidates whose rank, length or number format differs from the winner's.
    `share` does not limit the steps of their trainings. No other process may use the device. `out`
    is the study's directory, which gets a log.

    Raises:
        UsageError: There are no weights or examples, or the full run is too short for a search.
        AutotuneError: A training failed.
        Cancelled: `should_stop` returned true.
    """
    rounds = _rounds(recipe, dataset, share)
    longest = rounds[-1][1]
    number = recipe.workload.lengths.number
    held_out = num_held_out(recipe.workload, HELD_OUT)
    num_trained = min(longest * recipe.workload.global_batch, number - held_out)

    with scratch_folder(out / ".learning") as scratch:
        examples = scratch / "examples.jsonl"
        write_files(scratch, {examples.name: sample(dataset, split, number, num_trained, held_out)})
        arguments = ["--dataset", str(examples), "--output-dir", "", "--report-to", "none"]
        arguments += ["--held-out", str(held_out), str(recipe.config.seq_len)]

        def learner(candidate: Candidate, name: str) -> Learner:
            folder = scratch / candidate.config.digest
            write_files(folder, script.export(replace(recipe, winner=candidate)))
            return Learner([str(folder), *arguments], out / "logs" / f"{name}.log", should_stop)

        with learner(recipe.winner, "learning") as process:
            attempts = _search(recipe, rounds, process, say)
        result = Learning(
            config=recipe.config,
            attempts=attempts,
            run_steps=recipe.winner.cost.num_steps,
            held_out=held_out,
            default=recipe.default_learning_rate,
        )

        compared = []
        for candidate in [cell for cell in recipe.cells if cell.config != recipe.config][:others]:
            say(f"for comparison: {candidate.config.label()}")
            limit_s = time_limit_s(longest, candidate.performance.step_time_s)
            with learner(candidate, f"learning-{candidate.config.digest}") as process:
                repeats = [
                    process.train(result.learning_rate, longest, seed, limit_s)
                    for seed in range(learning.SEEDS)
                ]
            compared.append(Compared(config=candidate.config, attempts=tuple(repeats)))
    return replace(result, others=tuple(compared))


def _rounds(recipe: Recipe, dataset: Path, share: float) -> list[tuple[int, int]]:
    """Return, for each round of the search, the number of learning rates and of training steps.

    Raises UsageError if a search is impossible.
    """
    if reason := measurement_obstacle(recipe.model, recipe.workload, str(dataset)):
        remedy = "run a study with --model DIR, a directory of weights"
        if recipe.model.weights is not None:
            train = study_command("train", recipe.study)
            remedy = f"`{train}` uses the usual rate, {recipe.default_learning_rate:.2g}"
        raise UsageError(f"learning is impossible: {reason}", remedy=remedy)

    if (
        recipe.config.num_gpus > 1
        or recipe.trainer != "transformers"
        or recipe.workload.objective is not Objective.SFT
    ):
        raise UsageError(
            "learning rates can be searched only on one GPU, with train.py,"
            " for supervised fine-tuning",
            remedy="tune for one GPU with transformers first",
        )

    run_steps = recipe.winner.cost.num_steps
    rounds = learning.rounds_of(int(share * run_steps))
    if rounds is None:
        least = learning.least_budget()
        enough = least / run_steps + 0.005
        remedy = f"allow a larger share of the full run's steps: --share {enough:.2f}"
        if enough > MAX_SHARE:
            remedy = f"keep the usual rate, {recipe.default_learning_rate:.2g}, for this short run"
        raise UsageError(
            f"{share:.0%} of {run_steps:,} steps are too few: the smallest search takes {least}"
            " steps",
            remedy=remedy,
        )
    return rounds


def _search(
    recipe: Recipe, rounds: list[tuple[int, int]], learner: "Learner", say: Callable[[str], None]
) -> tuple[Attempt, ...]:
    """Train the winner in all rounds of a search. Raises AutotuneError if all trainings diverge."""
    step_s = recipe.winner.performance.step_time_s
    done = 0
    total = learning.steps_of(rounds)

    def train(rate: float, steps: int, seed: int) -> Attempt:
        nonlocal done
        say(f"learning rate {rate:.2g}, {steps} steps; {done} of at most {total} steps are done")
        attempt = learner.train(rate, steps, seed, time_limit_s(steps, step_s))
        done += steps
        outcome = "diverged" if attempt.loss is None else f"held-out loss {attempt.loss:.4f}"
        say(f"learning rate {rate:.2g}: {outcome}")
        return attempt

    attempts = learning.search(recipe.default_learning_rate, rounds, train)
    if all(attempt.loss is None for attempt in attempts):
        raise AutotuneError(
            "every training diverged", remedy="read logs/learning.log, and look at the examples"
        )
    return attempts


class Learner:
    """The process that trains (`probe.learner`).

    The process is killed at the end of the `with` block, and also if the current process dies.
    """

    def __init__(self, arguments: list[str], log: Path, should_stop: Callable[[], bool]) -> None:
        """`arguments` are an exported folder and its script's options.

        A `with` statement starts the process.
        """
        self._arguments = arguments
        self._log = log
        self._should_stop = should_stop
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None

    def __enter__(self) -> "Learner":
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._output = self._log.open("wb")
        self._process = subprocess.Popen(
            [*module_command("autotune.probe.learner"), str(os.getpid()), *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            env=child_environment(os.environ, "cuda"),
            start_new_session=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        assert self._process is not None and self._output is not None
        self._process.kill()
        self._process.communicate()
        self._output.close()

    def train(self, rate: float, steps: int, seed: int, limit_s: float) -> Attempt:
        """Run one training. Raises Cancelled, or AutotuneError if the process ends or hangs."""
        began = time.monotonic()
        request = {
            "learning_rate": rate,
            "warmup_steps": warmup_steps_of(steps),
            "steps": steps,
            "seed": seed,
        }
        answer = self._ask(request, began + limit_s)

        return Attempt(
            learning_rate=rate,
            seed=seed,
            steps=steps,
            loss=answer["loss"],
            curve=tuple((int(step), float(loss)) for step, loss in answer["curve"]),
            seconds=time.monotonic() - began,
        )

    def _ask(self, request: dict[str, Any], until: float) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None

        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            while not select.select([process.stdout], [], [], WAIT_S)[0]:
                if self._should_stop():
                    raise Cancelled
                if time.monotonic() > until:
                    raise AutotuneError("a training hangs", remedy=f"read {self._log}")
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""

        if not line:
            process.wait()
            reason = last_error(self._log) or f"exit code {process.returncode}"
            raise AutotuneError(f"a training failed: {reason}", remedy=f"read {self._log}")
        return dict(json.loads(line))
