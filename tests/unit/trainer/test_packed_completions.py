"""Completions without padding have the probabilities and the gradients of padded completions."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("trl")

from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from autotune.trainer.model_builder import config_of
from autotune.trainer.packed_completions import PackedCompletions, trainer_class
from tests.helpers.probing import MODEL

ROWS = [[0, 0, 1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 0, 0, 0, 0, 0]]
COMPLETION = 6  # the tokens of the longest completion


def model(attention: str) -> Any:
    torch.manual_seed(0)
    shape = config_of(MODEL)
    made = AutoModelForCausalLM.from_config(shape, attn_implementation=attention)
    add_fused_lm_head(made, outputs=("log_probs", "entropy"))
    return made


class Packed(PackedCompletions, GRPOTrainer):  # type: ignore[misc]
    """TRL's trainer without anything that its constructor makes."""

    def __init__(self) -> None:
        self.accelerator = SimpleNamespace(autocast=nullcontext, is_main_process=False)


def scored(trainer: Any, attention: str, batch_size: int | None) -> tuple[torch.Tensor, ...]:
    """Log-probabilities, entropies and a gradient."""
    kind = Packed if attention == "varlen" else GRPOTrainer
    learner = model(attention)
    mask = torch.tensor(ROWS)
    ids = torch.randint(1, 64, mask.shape, generator=torch.Generator().manual_seed(1)) * mask
    logps, entropies, aux_loss = kind._get_per_token_logps_and_entropies(
        trainer, learner, ids, mask, COMPLETION, batch_size=batch_size, compute_entropy=True
    )
    assert aux_loss is None
    completions = mask[:, -COMPLETION:]
    weights = torch.arange(1.0, 1 + completions.numel()).view_as(completions)
    (logps * completions * weights).sum().backward()
    gradient = learner.model.embed_tokens.weight.grad
    return logps.detach() * completions, entropies.detach() * completions, gradient


@pytest.mark.parametrize("batch_size", [None, 2])
def test_packed_rows_are_scored_like_padded_rows(batch_size: int | None) -> None:
    trainer = Packed()
    padded = scored(trainer, "sdpa", batch_size)
    packed = scored(trainer, "varlen", batch_size)
    for ours, theirs in zip(packed, padded, strict=True):
        assert theirs.abs().max() > 0.01
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_images_are_not_packed() -> None:
    with pytest.raises(ValueError, match="images"):
        Packed()._get_per_token_logps_and_entropies(
            None, torch.ones(1, 2), torch.ones(1, 2), 1, pixel_values=torch.ones(1)
        )


def test_the_arguments_choose_the_trainer() -> None:
    packs = {"model_init_kwargs": {"attn_implementation": "varlen"}}
    assert issubclass(trainer_class(GRPOTrainer, packs), PackedCompletions)
    assert trainer_class(GRPOTrainer, {}) is GRPOTrainer
