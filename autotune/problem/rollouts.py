"""The rollouts of a GRPO run: the completions of a step, and the engine that generates them."""

from dataclasses import dataclass

from autotune.core.rollout_types import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """The completions that a GPU generates at once, and what the run computes from them.

    Args:
        prompt_tokens: the tokens of the longest prompt.
        completion_tokens: the tokens at which a completion is cut off.
        mean_tokens: the mean tokens of a sequence, prompt and completion, or None if unknown.
        sequences: the number of completions that a GPU generates at once.
        num_generations: the number of completions to each prompt.
        has_reference: whether the loss compares the trained model with the untrained model.
        scores: whether the trained model computes the probabilities of the completions once more,
            before the update.
        offloads: the terms of MemoryBreakdown that are in the host's memory during a rollout.
        whole_logits: whether the trainer holds the logits of a whole micro batch, or None if its
            version is unknown. TRL 1.16 computes the probabilities in tiles instead.
    """

    prompt_tokens: int
    completion_tokens: int
    mean_tokens: float | None = None
    sequences: int
    num_generations: int
    has_reference: bool = False
    scores: bool = True
    whole_logits: bool | None = False
    offloads: tuple[str, ...] = ()
    engine: Engine

    @property
    def longest(self) -> int:
        """The tokens of the longest possible sequence."""
        total = self.prompt_tokens + self.completion_tokens
        return min(total, self.engine.max_tokens or total)
