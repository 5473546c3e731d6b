"""TRL's GRPOTrainer for probes: it trains on given completions, and no engine generates them.

Scoring, padding, probabilities and update are TRL's own code. The trainer believes that vLLM has
generated the completions, so that it computes their probabilities once more, as in a run with vLLM.
"""

from typing import Any

import torch
from datasets import Dataset
from torch import nn
from torch.utils.data import SequentialSampler
from trl import GRPOConfig, GRPOTrainer

from autotune.core.probe_types import Phase
from autotune.probe.synthetic_model import tokenizer
from autotune.trainer.packed_completions import PackedCompletions
from autotune.trainer.rows import IGNORED

BETA = 0.04  # any weight above 0 makes TRL compute the untrained model's probabilities
LOG_PROB = -1.0  # the logarithm of each token's probability that the engine would have reported


class RolloutPhases:
    """A mixin for GRPOTrainers that reports generation and probabilities to a recorder."""

    recorder: Any
    returns_memory = False  # whether the allocator returns unused memory before each generation

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self.recorder.begin_rollout(returns_memory=self.returns_memory)
        outputs = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        self.recorder.enter(Phase.FORWARD)
        return outputs

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            self.recorder.enter(Phase.LOG_PROBS)
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)  # type: ignore[misc]


class GivenCompletions:
    """A mixin that replaces the generation by completions from the training rows."""

    examples: dict[str, tuple[list[int], list[int]]]  # the prompt and the completion by row name

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> SequentialSampler:
        dataset: Any = self.train_dataset  # type: ignore[attr-defined]
        return SequentialSampler(dataset)

    def _tokenize_prompts(self, prompts: list[str]) -> tuple[list[list[int]], None, dict[str, Any]]:
        self._names = prompts
        return [self.examples[name][0] for name in prompts], None, {}

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        made = [self.examples[name][1] for name in self._names]
        return made, [[LOG_PROB] * len(completion) for completion in made]


def completion_lengths(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that needs no time: the number of tokens."""
    return [float(len(ids)) for ids in completion_ids]


def rollout_trainer(
    mixin: type,
    model: nn.Module,
    settings: dict[str, Any],
    rows: list[dict[str, torch.Tensor]],
    *,
    with_engine: bool,
    sleeps: bool,
    reference: bool = False,
    packed: bool = False,
) -> Any:
    """TRL's GRPOTrainer on these rows, which are already in the order of training.

    A row is a prompt, whose tokens have no labels, and its completion. `with_engine` says whether
    the run has an engine: TRL then computes the completions' probabilities before the update.
    `sleeps` says whether the allocator returns memory for the engine. With `reference`, the
    adapters are switched off for another computation of the probabilities. `packed` joins the rows
    of a micro batch without padding.
    """
    micro = settings["per_device_train_batch_size"]
    steps = settings["gradient_accumulation_steps"]
    together = micro * steps
    different = {id(row): row for row in rows}
    names = {key: str(place) for place, key in enumerate(different)}
    examples = {names[key]: _example(row) for key, row in different.items()}

    # TRL's loader yields a whole generation for each micro batch, and uses only the first.
    order = [names[id(row)] for row in rows]
    groups = [order[begin : begin + together] for begin in range(0, len(order), together)]
    prompts = [name for group in groups for _ in range(steps) for name in group]

    config = GRPOConfig(
        **settings,
        num_generations=together,
        steps_per_generation=steps,
        beta=BETA if reference else 0.0,
        max_completion_length=max(len(completion) for _, completion in examples.values()),
    )
    packs = (PackedCompletions,) if packed else ()
    bases = (GivenCompletions, RolloutPhases, mixin, *packs, GRPOTrainer)
    kind = type("RolloutProbeTrainer", bases, {})
    trainer = kind(
        model=model,
        args=config,
        reward_funcs=completion_lengths,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer(model.config.get_text_config().vocab_size),
    )
    trainer.examples = examples
    trainer.returns_memory = sleeps
    trainer.use_vllm = with_engine
    return trainer


def _example(row: dict[str, torch.Tensor]) -> tuple[list[int], list[int]]:
    """The prompt and the completion of a row, without padding. Both have at least one token."""
    labelled = (row["labels"] != IGNORED).nonzero()
    ids = row["input_ids"][: 1 + int(labelled[-1])].tolist()
    start = min(max(1, int(labelled[0])), len(ids) - 1)
    return ids[:start], ids[start:]
