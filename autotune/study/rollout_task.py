"""The facts of a GRPO search on one card, and the requests to measure its phases."""

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

from autotune.catalog import ModelSpec
from autotune.core.memory_budget import memory_limit_gib
from autotune.core.objective import Objective
from autotune.core.probe_types import MicroBatch, ProbeRequest
from autotune.core.rollout_types import COLOCATED, TRANSFORMERS, Engine, Generation
from autotune.core.train_config import TrainConfig
from autotune.prediction.rollout_memory import needed_share
from autotune.problem.length_distribution import Lengths
from autotune.problem.rollouts import Rollouts

STEP = 0.05  # proposed shares are multiples of this number
HIGHEST_SHARE = 0.95
SHARE = 0.3  # TRL's default
PACKED_KINDS = 8  # micro batches of packed completions that stand for all of a generation


def engine_kind(device: str) -> str:
    """The engine that generates on this machine: vLLM if it is installed, else transformers."""
    return COLOCATED if device == "cuda" and find_spec("vllm") else TRANSFORMERS


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTask:
    """The facts of a search: the run and the card.

    Attributes:
        model: The model to train.
        device: "cuda" or "cpu".
        card_gib: The memory of the card.
        headroom: The share of this memory that must stay free.
        rollouts: The generation, with the kind of its engine.
        prompts: The lengths of the prompts.
        completions: The lengths of the completions, which are cut off at
            `rollouts.completion_tokens`.
        updates: The optimizer steps that use all completions of a generation once.
        iterations: How often each completion is used.
    """

    model: ModelSpec
    device: str
    card_gib: float
    headroom: float = 0.05
    rollouts: Rollouts
    prompts: Lengths
    completions: Lengths
    updates: int = 1
    iterations: int = 1

    @property
    def limit_gib(self) -> float:
        """The memory that a run may use, including the CUDA context."""
        return memory_limit_gib(self.card_gib, self.headroom)

    @property
    def rows_per_update(self) -> int:
        """The completions of an optimizer step."""
        return self.rollouts.sequences // self.updates

    @property
    def mean_length(self) -> int:
        """The mean tokens of a prompt with its completion."""
        return mean_length(self.generation(self.rollouts.engine))

    @property
    def num_prompts(self) -> int:
        """The prompts of a generation."""
        return self.rollouts.sequences // self.rollouts.num_generations

    def accumulation(self, config: TrainConfig) -> int:
        """The micro batches of an optimizer step."""
        return self.rows_per_update // config.micro_batch_size

    def generation(self, engine: Engine) -> Generation:
        """The generation of completions whose lengths represent all completions."""
        rollouts = self.rollouts
        return Generation(
            engine=replace(engine, max_tokens=rollouts.longest),
            prompts=tuple(self.prompts.sample(rollouts.sequences, rollouts.prompt_tokens)),
            completions=tuple(
                self.completions.sample(rollouts.sequences, rollouts.completion_tokens)
            ),
            has_reference=rollouts.has_reference,
        )

    def micro_batches(self, config: TrainConfig, generation: Generation) -> tuple[MicroBatch, ...]:
        """Usual micro batches, and one of the longest possible sequences, which is not timed.

        TRL pads all completions of a generation to its longest, so that one micro batch stands for
        all. Packed completions make micro batches of many lengths.
        """
        size, longest = config.micro_batch_size, self.rollouts.longest
        if config.packing:
            number = min(size * PACKED_KINDS, self.rows_per_update)
            rows = representatives(_totals(generation), number)
            random.Random(0).shuffle(rows)  # noqa: S311 - no secret
            shortest = min(rows)
        else:  # every row is computed as if it were the longest
            shortest = max(generation.prompts) + max(generation.completions)
            rows = [shortest] + [min(mean_length(generation), shortest)] * (size - 1)
        kinds = [_micro_batch(rows[begin : begin + size]) for begin in range(0, len(rows), size)]
        kinds = [replace(kind, share=1 / len(kinds)) for kind in kinds]
        if shortest < longest:
            kinds.append(_micro_batch([longest] * size))
        return tuple(kinds)

    def training_request(
        self,
        config: TrainConfig,
        *,
        sleeps: bool,
        engine_gib: float = 0.0,
    ) -> ProbeRequest:
        """The request to train on given completions, beside an engine that takes `engine_gib`."""
        generation = self.generation(Engine(kind=self.rollouts.engine.kind, sleeps=sleeps))
        kinds = self.micro_batches(config, generation)
        longest = self.rollouts.longest
        return ProbeRequest(
            config=replace(config, seq_len=longest),
            model=self.model.config,
            device=self.device,
            memory_gib=self.card_gib - engine_gib / (1 - self.headroom),
            headroom=self.headroom,
            # GRPO compares at least two completions.
            micro_steps=2 if config.micro_batch_size == 1 else min(2, self.accumulation(config)),
            trainer="trl",
            objective=Objective.GRPO,
            micro_batches=kinds,
            trained_share=(
                sum(generation.completions) / sum(_totals(generation))
                if config.packing
                else self.rollouts.completion_tokens / longest
            ),
            generation=generation,
        )

    def engine_request(self, config: TrainConfig, share: float) -> ProbeRequest:
        """The request to measure an engine that can sleep."""
        engine = Engine(kind=self.rollouts.engine.kind, share=share, sleeps=True)
        return ProbeRequest(
            config=replace(config, seq_len=self.rollouts.longest),
            model=self.model.config,
            device=self.device,
            memory_gib=self.card_gib,
            headroom=self.headroom,
            trainer="trl",
            objective=Objective.GRPO,
            generation=self.generation(engine),
        )

    def share(self, config: TrainConfig) -> float | None:
        """The smallest share whose cache surely holds all completions of a usual generation.

        None if no share holds one completion, or if the size of the weights is unknown. If no share
        holds all completions, some of them wait; the share is then the largest.
        """
        if self.rollouts.engine.kind != COLOCATED:
            return 0.0
        generation = self.generation(Engine())
        tokens = sum(generation.prompts + generation.completions)
        one, every = (
            needed_share(self.model, config, self.rollouts, self.card_gib, number)
            for number in (self.rollouts.longest, tokens)
        )
        if one is None or every is None or one > HIGHEST_SHARE:
            return None
        return min(round(STEP * math.ceil(max(one, every) / STEP), 2), HIGHEST_SHARE)


def _micro_batch(rows: Sequence[int]) -> MicroBatch:
    return MicroBatch(rows=tuple((row,) for row in rows), length=max(rows), share=0.0)


def _totals(generation: Generation) -> list[int]:
    """The tokens of each prompt with its completion."""
    return [sum(pair) for pair in zip(generation.prompts, generation.completions, strict=True)]


def mean_length(generation: Generation) -> int:
    """The mean tokens of a prompt with its completion."""
    return math.floor(statistics.fmean(_totals(generation)))


def representatives(lengths: Sequence[int], number: int) -> list[int]:
    """The means of `number` equal groups of the lengths: their mean is that of all lengths."""
    ordered = sorted(lengths)
    ends = [len(ordered) * index // number for index in range(number + 1)]
    return [round(statistics.fmean(ordered[begin:end])) for begin, end in itertools.pairwise(ends)]
