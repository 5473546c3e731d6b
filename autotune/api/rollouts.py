"""Searches for the fastest layout of a GRPO run: the steps of `run --objective grpo`.

The phases are measured on this machine's GPU, and stored in the database at once. A search that was
stopped continues with the stored results.
"""

import json
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from autotune.core.errors import EnvironmentProblem, UsageError
from autotune.core.files import write_atomic
from autotune.core.json_view import json_data
from autotune.core.probe_types import ProbeRequest, ProbeResult
from autotune.core.process import StopToken
from autotune.core.rollout_types import TRANSFORMERS, EngineMeasurement
from autotune.core.train_config import TrainConfig
from autotune.core.units import parse_duration
from autotune.export.rollout_run import (
    LONGEST_STEPS,
    STEPS,
    RolloutRun,
    RolloutVerification,
    compare,
)
from autotune.export.rollouts import export_layout, lora_arguments, trl_arguments
from autotune.export.run.process import scratch_folder
from autotune.export.run.rollouts import run_trl, write_model
from autotune.planning.rollout_plan import RolloutSetup, rollout_setup
from autotune.probe.supervisor import ENGINE, WorkerProber
from autotune.problem.constraints import no_packed_completions
from autotune.problem.study_spec import StudySpec
from autotune.problem.target import find_target
from autotune.report.answer import page
from autotune.report.rollout_page import page_answer
from autotune.report.values.rollouts import RolloutStudy
from autotune.study.rollout_search import MeasuredLayout, RolloutSearch, two_gpus
from autotune.study.rollout_task import SHARE, RolloutTask, engine_kind
from autotune.study.storage.location import make_writable, storage_url, study_directory
from autotune.study.storage.probe_store import ProbeStore

RESULT, PAGE = "grpo.json", "grpo.html"
# Knobs without an argument of TRL's trainer for GRPO have the value that TRL uses.
OF_TRL: dict[str, Any] = {
    "compile": "none",
    "kernels": "torch",
    "loss": "full",
    "lora_kernels": "peft",
    "packing": False,
    "packed_attention": "mask",
    "padding": "longest",
    "group_by_length": False,
    "cuda_graphs": "none",
    "tiling": "none",
    "allocator": "expandable",
}
# Packed completions need vLLM: a model with varlen attention cannot generate.
PACKED: dict[str, Any] = {"packing": True, "packed_attention": "varlen", "attention": "sdpa"}
SEARCHED = ("micro_batch_size", "checkpointing", "precision", "optimizer")


@dataclass(slots=True)
class StoredProber:
    """A prober that stores each result at once, and never measures a request twice."""

    prober: WorkerProber
    store: ProbeStore
    study: str

    def probe(self, request: ProbeRequest, log: Path) -> ProbeResult:
        """The stored result of the request, or the result of a new probe."""
        fingerprint = self.prober.fingerprint
        known = self.store.find(request.digest, fingerprint.digest, [request.rung])
        if known is not None:
            return known
        result = self.prober.probe(request, log)
        self.store.add(self.study, None, result, fingerprint)
        return result


def run_rollouts(
    spec: StudySpec,
    *,
    say: Callable[[str], None] = lambda text: None,
    stop: StopToken | None = None,
) -> RolloutStudy:
    """Search for the fastest layout of the GRPO run that `spec` describes, and write its files.

    The search ends with the budget, after the probe that is then running and after another probe
    that confirms the best layout. `say` receives a line for each step.

    Raises:
        UsageError: the spec has an unknown name, or an option without effect for GRPO.
        EnvironmentProblem: this machine lacks the GPU, or its engine does not start.
        StorageError: the directory or the database cannot be written.
    """
    stop = stop or StopToken()
    deadline = time.monotonic() + _budget_s(spec)
    setup, device = _prepare(spec, say)
    name = spec.study or f"{setup.task.study}-grpo"
    out = study_directory(spec.out, name).absolute()
    make_writable(out)
    logs = out / "logs"
    store = ProbeStore(storage_url(spec.storage), outbox=out / "outbox.jsonl")

    config, choices = training_choices(setup, engine_kind(device))
    with WorkerProber(device, logs, should_stop=stop, module=ENGINE) as prober:
        task = rollout_task(setup, device, prober.memory_gib, spec.headroom)
        share = task.share(config) or SHARE
        engine = _measure_engine(task, config, share, StoredProber(prober, store, name), logs, say)

    layouts: list[MeasuredLayout] = []
    with WorkerProber(device, logs, should_stop=stop) as prober:
        search = RolloutSearch(task, engine, share, StoredProber(prober, store, name), logs, say)
        for layout in search.run(config, choices):
            layouts.append(layout)
            if stop():
                break
            if time.monotonic() > deadline:
                best = max(layouts, key=lambda layout: layout.score)
                layouts += [search.confirm(best)] if best.score else []
                break

    study = _study(setup, search, layouts)
    if spec.verify and study.best is not None and not stop():
        say("running TRL's trainer with the best layout")
        study = replace(study, verification=_verify(study, study.best, task, out, stop))
    _write(out, study)
    return study


def _prepare(spec: StudySpec, say: Callable[[str], None]) -> tuple[RolloutSetup, str]:
    """Read the run that `spec` describes, and find the device that measures it: "cuda" or "cpu"."""
    target = find_target(spec.gpu)
    if target.measured_on is not None:
        raise UsageError(
            f"a GRPO run is measured only on its own GPU, not on {target.measured_on.name} for "
            f"{target.device.name}",
            remedy="leave --gpu out",
        )
    setup = rollout_setup(spec, target.device, say)
    _refuse_reference(setup)
    return setup, "cuda" if target.card else "cpu"


def _measure_engine(
    task: RolloutTask,
    config: TrainConfig,
    share: float,
    prober: StoredProber,
    logs: Path,
    say: Callable[[str], None],
) -> EngineMeasurement:
    """Measure the engine. Raises EnvironmentProblem if it fails."""
    if task.rollouts.engine.kind == TRANSFORMERS:
        say("vLLM is not installed: transformers generates, which is slower")
    else:
        say(f"measuring vLLM with {share:.0%} of the GPU")
    log = logs / "engine.log"
    result = prober.probe(task.engine_request(config, share), log)
    if result.engine is None:
        where = f" in {result.phase}" if result.phase else ""
        raise EnvironmentProblem(f"the engine failed{where}: {result.reason}", remedy=f"see {log}")
    return result.engine


def _refuse_reference(setup: RolloutSetup) -> None:
    """Raise UsageError if the run has a second model, which no probe holds."""
    if setup.beta and setup.task.space.choices("method") == ("full",):
        raise UsageError(
            "full fine-tuning with a beta above 0 holds the untrained model too, which no probe "
            "does",
            remedy="leave --beta out, or estimate with `autotune plan --objective grpo`",
        )


def rollout_task(setup: RolloutSetup, device: str, card_gib: float, headroom: float) -> RolloutTask:
    """The task of a search, with the engine that this machine has.

    `card_gib` is the memory that the device reports, and `headroom` the share that stays free.
    """
    limit_gib = min(setup.limit_gib, card_gib * (1 - headroom))
    kind = engine_kind(device)
    rollouts = setup.rollouts
    engine = replace(rollouts.engine, kind=kind)
    return RolloutTask(
        model=setup.task.model,
        device=device,
        card_gib=card_gib,
        headroom=1 - limit_gib / card_gib,
        rollouts=replace(rollouts, engine=engine),
        prompts=setup.task.workload.lengths,
        completions=setup.completions,
        updates=setup.updates,
        iterations=setup.iterations,
    )


def training_choices(setup: RolloutSetup, engine: str) -> tuple[TrainConfig, dict[str, list[Any]]]:
    """The training at which the search begins, and the values of the knobs that it may change.

    Completions are packed wherever that is possible: padding costs time and gains nothing.
    """
    space = setup.task.space
    packs = engine != TRANSFORMERS and not no_packed_completions(
        setup.task.model, setup.task.device
    )
    config = replace(setup.task.baselines[0], **OF_TRL | (PACKED if packs else {}))
    choices = {name: list(space.choices(name)) for name in SEARCHED}
    # Another 16-bit format than the engine's would widen the distance between both models.
    kind = config.precision.partition("_")[0]
    choices["precision"] = [one for one in choices["precision"] if one.startswith(kind)]
    return config, choices


def _study(
    setup: RolloutSetup, search: RolloutSearch, layouts: list[MeasuredLayout]
) -> RolloutStudy:
    task = search.task
    best = max(layouts, key=lambda layout: layout.score, default=None)
    if layouts and best is not None and layouts[-1].config == best.config:
        best = layouts[-1] if layouts[-1].score else best  # the confirmed measurement
    return RolloutStudy(
        task=setup.task,
        rollouts=task.rollouts,
        completions=setup.completions,
        limit_gib=task.limit_gib,
        updates=task.updates,
        iterations=task.iterations,
        beta=setup.beta,
        engine=search.engine,
        layouts=tuple(layouts),
        best=best if best is not None and best.score else None,
        two_gpus=two_gpus(search, setup.task.device.link_between(2)),
    )


def _verify(
    study: RolloutStudy, best: MeasuredLayout, task: RolloutTask, out: Path, stop: StopToken
) -> RolloutVerification:
    """Run TRL's trainer on random weights, and compare its phases with the best layout's.

    The completions of the run end by chance, with the mean length of the study's completions.
    """
    assert best.step is not None
    rollouts = study.rollouts
    lengths = task.generation(rollouts.engine)
    prompts = lengths.prompts * STEPS
    arguments, lora = _arguments(study, best)
    if task.device == "cpu":
        arguments |= {"use_cpu": True}
    with scratch_folder(out / "verify") as folder:
        problem = write_model(folder, task.model.config, task.device, prompts, should_stop=stop)
        if problem is not None:
            return compare(best.step, RolloutRun(steps=(), problem=problem))
        updates = task.updates * task.iterations
        run = run_trl(
            folder,
            arguments,
            lora,
            steps=STEPS * updates,
            longest_steps=() if updates > 1 else LONGEST_STEPS,
            updates=updates,
            mean_tokens=statistics.fmean(lengths.completions),
            should_stop=stop,
        )
        shutil.copy(folder / "trl.log", out / "logs" / "verify.log")
    return compare(best.step, run)


def _write(out: Path, study: RolloutStudy) -> None:
    """Write the result, and the files for TRL if a layout fits."""
    write_atomic(out / RESULT, json.dumps(json_data(study), indent=1) + "\n")
    write_atomic(out / PAGE, page(page_answer(study), date.today()))
    if study.best is None:
        return
    folder = out / "export"
    folder.mkdir(exist_ok=True)
    for name, text in _files(study, study.best).items():
        write_atomic(folder / name, text)


def _files(study: RolloutStudy, best: MeasuredLayout) -> dict[str, str]:
    """Return the files for TRL's training of the best layout, by name."""
    model = study.task.model
    return export_layout(model.weights or model.name, *_arguments(study, best))


def _arguments(
    study: RolloutStudy, best: MeasuredLayout
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The arguments of GRPOConfig and of LoraConfig for a layout."""
    engine = replace(study.rollouts.engine, share=best.share, sleeps=best.sleeps)
    numbers = {"updates": study.updates, "iterations": study.iterations}
    arguments = trl_arguments(best.config, study.rollouts, engine, beta=study.beta, **numbers)
    return arguments, lora_arguments(best.config, study.task.model.text_type)


def _budget_s(spec: StudySpec) -> float:
    try:
        return parse_duration(spec.budget)
    except ValueError as error:
        raise UsageError(f"--budget: {error}", remedy="for example --budget 15m") from None
