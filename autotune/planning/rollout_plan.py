"""Plans a GRPO run on one card: which layout of training and vLLM surely fits.

The plan has no speed: nothing predicts how long vLLM takes to generate completions. Among the
layouts that fit, the plan prefers those that are known to be faster.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from os.path import expanduser
from pathlib import Path

from autotune.catalog import DeviceSpec, ModelSpec
from autotune.core.errors import UsageError
from autotune.core.rollout_types import Engine
from autotune.core.train_config import TrainConfig
from autotune.planning.counted_memory import count, no_count
from autotune.planning.device_estimate import accuracy_text, limit_of, planned_device
from autotune.planning.observations import Say, ignore_message
from autotune.planning.plan import candidates
from autotune.planning.rollout_checks import STEP, rounded_share
from autotune.prediction.estimate import MemoryBounds, memory_of
from autotune.prediction.memory_formula import EVALUATES, unsupported
from autotune.prediction.rollout_memory import cached_tokens, largest, needed_share, phases
from autotune.problem.length_distribution import Lengths, read_lengths
from autotune.problem.rollouts import Rollouts
from autotune.problem.run_cost import FITS
from autotune.problem.setup import set_up
from autotune.problem.study_spec import StudySpec
from autotune.problem.task import Task
from autotune.report.values.rollouts import Layout, RolloutPlan

# The assumed workload
MEAN_COMPLETION, P99_COMPLETION = 600.0, 2000.0
PROMPT_TOKENS = 512
NUM_GENERATIONS, PROMPTS_PER_STEP = 8, 8
HIGHEST_SHARE = 0.95
LONGEST = 10_000_000  # tokens of a sequence, if the model's context is unknown
LEAST_COMPLETION = 64  # the shortest completion for which a layout is tried


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSetup:
    """The inputs of a plan or a search: the task, and the rollouts without an engine's share.

    `completions` are the lengths of all completions. The prompts are the task's examples. The
    optimizer takes `updates` steps on each generation, and `iterations` times as many in total.
    `beta` is the weight of the distance from the untrained model.
    """

    task: Task
    rollouts: Rollouts
    completions: Lengths
    limit_gib: float
    card_gib: float
    updates: int = 1
    iterations: int = 1
    beta: float = 0.0

    def layouts(self, config: TrainConfig) -> Iterator[Layout]:
        """Yield the layouts of a configuration, without and with sleep, each with its best share.

        The best share is the smallest whose cache holds all completions of a generation, or the
        largest that fits.
        """
        task = self.task
        micro_steps = min(2, task.workload.accumulation(config))
        trained = _memory(task, config, micro_steps)
        scored = _memory(task, config, EVALUATES)
        if trained is None or scored is None:
            return
        for sleeps in (False, True):
            found = []
            for share in self._shares(config):
                engine = replace(self.rollouts.engine, share=share, sleeps=sleeps)
                rollouts = replace(self.rollouts, engine=engine)
                found.append(self._layout(config, rollouts, trained, scored))
            fitting = [one for one in found if one.state == FITS]
            yield from fitting[-1:] or found[:1]

    def _shares(self, config: TrainConfig) -> list[float]:
        """Return the shares to try: from room for one completion to room for all of them."""
        one, every = (
            rounded_share(
                needed_share(self.task.model, config, self.rollouts, self.card_gib, tokens)
            )
            for tokens in (
                self.rollouts.longest,
                self.rollouts.sequences * (self.rollouts.mean_tokens or self.rollouts.longest),
            )
        )
        if one is None:
            return []
        most = max(one, every or HIGHEST_SHARE)
        return [round(one + STEP * step, 2) for step in range(round((most - one) / STEP) + 1)]

    def _layout(
        self,
        config: TrainConfig,
        rollouts: Rollouts,
        trained: MemoryBounds,
        scored: MemoryBounds,
    ) -> Layout:
        model = self.task.model
        found = phases(model, config, rollouts, self.card_gib, trained, scored)
        bounds = largest(found)
        cached = cached_tokens(model, config, rollouts, self.card_gib)
        return Layout(
            config=config,
            rollouts=rollouts,
            phases=found,
            bounds=bounds,
            state=bounds.state(self.limit_gib),
            cached_tokens=None if cached is None else cached[0],
        )

    def configs(self) -> list[TrainConfig]:
        """Return the configurations to try, with rows of the longest sequence.

        If no formula covers the model, counting the memory of a configuration takes seconds: then
        these are the baselines with the largest and with the smallest micro batch.
        """
        task = self.task
        tried = candidates(task.space)
        if unsupported(task.model, task.baselines[0]):
            tried = tuple(dict.fromkeys((task.baselines[0], task.baselines[-1])))
        padded = (
            replace(
                config,
                seq_len=self.rollouts.longest,
                padding="masked",
                packing=False,
                group_by_length=False,
            )
            for config in tried
        )
        return list(dict.fromkeys(padded))

    def all_layouts(self) -> list[Layout]:
        """Return the layouts of all configurations."""
        return [layout for config in self.configs() for layout in self.layouts(config)]

    def preference(self, layout: Layout) -> tuple[float, ...]:
        """Return a key by which the layout that is likely to be the fastest is the largest.

        Completions that wait for room in the cache cost the most, then a sleeping engine, then
        recomputed layers, then small micro batches.
        """
        wanted = self.rollouts.sequences * (self.rollouts.mean_tokens or self.rollouts.longest)
        at_once = min(1.0, (layout.cached_tokens or 0.0) / wanted)
        config = layout.config
        return (
            round(at_once, 1),
            config.lora_rank or 0,
            not layout.rollouts.engine.sleeps,
            config.checkpointing == "none",
            config.micro_batch_size,
        )


def plan_rollouts(
    spec: StudySpec, *, device: DeviceSpec | None = None, say: Say = ignore_message
) -> RolloutPlan:
    """Plan the GRPO run that this spec describes, on its GPU or on `device`.

    Raises UsageError if the spec has an unknown name or an invalid value, if vLLM cannot hold one
    completion on the card, or if the memory of the training cannot be computed.
    """
    device = device or planned_device(spec.gpu)
    limit_of(spec, device)  # refuses a CPU
    search = rollout_setup(spec, device, say)
    completions = search.completions
    layouts = search.all_layouts()
    if not layouts:
        raise UsageError(_no_layout(search), remedy="take a larger GPU, or --space qlora")

    fitting = [layout for layout in layouts if layout.state == FITS]
    best = max(fitting, key=search.preference, default=None)
    leanest = min(layouts, key=lambda layout: layout.need_gib)
    fits_up_to = None if best else _longest_completion(search, leanest)
    return RolloutPlan(
        task=search.task,
        completions=completions,
        limit_gib=search.limit_gib,
        best=best,
        leanest=leanest,
        fits_up_to=fits_up_to,
        change="" if best else _change(spec, search.task, fits_up_to),
        reason=_reason(search, best) if best else "",
        how_sure=accuracy_text(
            counted=leanest.bounds.reported.counted, objective=search.task.workload.objective
        ),
    )


def _refuse_options(spec: StudySpec) -> None:
    """Raise UsageError for options that a GRPO plan replaces by others."""
    instead = {
        "global_batch": "--prompts-per-step and --num-generations",
        "global_batch_tokens": "--prompts-per-step and --num-generations",
    }
    for name, others in instead.items():
        if getattr(spec, name) is not None:
            raise UsageError(f"{name} has no effect with grpo", remedy=f"give {others}")
    if "seq_len" in spec.pins:
        raise UsageError(
            "seq_len has no effect with grpo: a sequence is a prompt with its completion",
            remedy="give --max-completion",
        )
    if spec.numbers_of_gpus not in (None, (1,)):
        raise UsageError("a plan for grpo is for one GPU", remedy="leave --gpus out")


def _completions(spec: StudySpec) -> Lengths:
    """Return the lengths of the completions, which are assumed if the spec does not give them."""
    if spec.completions is not None:
        return read_lengths(Path(expanduser(spec.completions)))
    mean, p99 = spec.mean_completion, spec.p99_completion
    try:
        if mean is not None and p99 is not None:
            return Lengths.from_summary(mean, p99)
        assumed = Lengths.from_summary(MEAN_COMPLETION, P99_COMPLETION)
    except ValueError as error:
        raise UsageError(
            f"--mean-completion, --p99-completion: {error}",
            remedy="give --completions FILE instead",
        ) from None
    return replace(assumed, source="assumed")


def rollout_setup(spec: StudySpec, device: DeviceSpec, say: Say = ignore_message) -> RolloutSetup:
    """Read the GRPO run that a spec describes, on this device.

    Raises UsageError for an unknown name, an invalid value, and an option without effect.
    """
    _refuse_options(spec)
    completions = _completions(spec)
    generations = spec.num_generations or NUM_GENERATIONS
    total = generations * (spec.prompts_per_step or PROMPTS_PER_STEP)
    setup = set_up(replace(spec, global_batch=total), device, say, generates=True)
    prompts = setup.task.workload.lengths
    if prompts.source == "assumed":
        prompts = Lengths.constant(PROMPT_TOKENS, "assumed")
    longest = _max_completion(spec, completions, setup.task.model, prompts.longest)
    rollouts = Rollouts(
        prompt_tokens=prompts.longest,
        completion_tokens=longest,
        mean_tokens=prompts.mean + completions.tokens_within(longest) / completions.number,
        sequences=total * (spec.steps_per_generation or 1),
        num_generations=generations,
        has_reference=bool(spec.beta),
        engine=Engine(max_tokens=prompts.longest + longest),
    )
    # The memory of a CPU is its host's, which only a worker reports.
    limit_gib = math.inf if device.kind == "cpu" else limit_of(spec, device)
    return RolloutSetup(
        task=replace(setup.task, workload=replace(setup.task.workload, lengths=prompts)),
        rollouts=rollouts,
        completions=completions,
        limit_gib=limit_gib,
        card_gib=device.memory_gib or limit_gib,
        updates=spec.steps_per_generation or 1,
        iterations=spec.iterations or 1,
        beta=spec.beta or 0.0,
    )


def _max_completion(spec: StudySpec, completions: Lengths, model: ModelSpec, prompt: int) -> int:
    """Return the tokens at which completions are cut off, so that the context holds a sequence.

    Raises UsageError if the context does not hold the longest prompt with a completion that the
    user asked for.
    """
    usual = completions.longest if spec.completions else completions.quantile(0.99)
    room = (model.max_seq_len or LONGEST) - prompt
    if (spec.max_completion or 1) > room:
        raise UsageError(
            f"the longest prompt ({prompt:,} tokens) and a completion are longer than the context "
            f"of {model.short}",
            remedy=f"give --max-completion {room}" if room > 0 else "give shorter prompts",
        )
    return spec.max_completion or min(usual, room)


def _memory(task: Task, config: TrainConfig, micro_steps: int) -> MemoryBounds | None:
    need = memory_of(
        task.model, config, micro_steps, objective=task.workload.objective, count=count
    )
    return None if need is None else MemoryBounds(least=need, most=need)


def _reason(search: RolloutSetup, best: Layout) -> str:
    """Say how many completions the cache of the best layout holds at once."""
    rollouts = best.rollouts
    wanted = rollouts.mean_tokens or rollouts.longest
    at_once = min(rollouts.sequences, int((best.cached_tokens or 0.0) / wanted))
    held = "all" if at_once == rollouts.sequences else f"{at_once:,} of the"
    return (
        f"the cache of vLLM surely holds {held} {rollouts.sequences:,} completions of a generation "
        "at once, at their mean length"
    )


def _longest_completion(search: RolloutSetup, layout: Layout) -> int | None:
    """Return the longest completion with which a layout's configuration surely fits, or None."""
    least, most = 0, layout.rollouts.completion_tokens
    while most - least > LEAST_COMPLETION:
        tokens = (least + most) // 2
        if _fits_with(search, layout, tokens):
            least = tokens
        else:
            most = tokens
    return least or None


def _fits_with(search: RolloutSetup, layout: Layout, tokens: int) -> bool:
    """Return whether some layout of this configuration fits if completions end at `tokens`."""
    rollouts = replace(
        search.rollouts,
        completion_tokens=tokens,
        mean_tokens=None,
        engine=replace(search.rollouts.engine, max_tokens=search.rollouts.prompt_tokens + tokens),
    )
    shorter = replace(search, rollouts=rollouts)
    config = replace(layout.config, seq_len=rollouts.longest)
    return any(one.state == FITS for one in shorter.layouts(config))


def _change(spec: StudySpec, task: Task, fits_up_to: int | None) -> str:
    """Return the options of the first change that makes the run fit, or ""."""
    is_full = task.space.choices("method") == ("full",)
    for space in ("lora", "qlora") if is_full else ("qlora",):
        with suppress(UsageError):  # another option excludes this space
            changed = rollout_setup(replace(spec, space=space), task.device)
            if any(layout.state == FITS for layout in changed.all_layouts()):
                return f"--space {space}"
    return f"--max-completion {fits_up_to}" if fits_up_to else ""


def _no_layout(search: RolloutSetup) -> str:
    """Say why there is no layout: vLLM has no room, or the training's memory is unknown."""
    task = search.task
    config = search.configs()[0]
    if _memory(task, config, 2) is None:
        reason = no_count(task.model, config, 2, task.workload.objective)
        return f"the memory of the training is unknown: {reason}"
    return (
        f"vLLM cannot hold the weights and one completion of {task.model.short} on "
        f"{task.device.label}"
    )
