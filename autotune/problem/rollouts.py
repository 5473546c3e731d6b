"""The rollouts of a GRPO run: the completions of a step, and the engine that generates them."""

from dataclasses import dataclass

COLOCATED, SERVER, TRANSFORMERS = "vllm", "vllm server", "transformers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The program that generates completions.

    Args:
        kind: COLOCATED (vLLM in the training process, on the same GPU), SERVER (vLLM on GPUs of its
            own) or TRANSFORMERS (the trained model generates, without an engine).
        share: the share of the GPU's memory that a colocated engine takes, vLLM's
            gpu_memory_utilization.
        sleeps: whether a colocated engine frees its weights and its cache while the model trains.
        max_tokens: the tokens at which a colocated engine stops a sequence of prompt and
            completion, or 0 if the engine has no limit, or none is known yet.
        num_gpus: the number of GPUs that share a colocated engine (tensor parallelism).
    """

    kind: str = COLOCATED
    share: float = 0.3
    sleeps: bool = False
    max_tokens: int = 0
    num_gpus: int = 1


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
