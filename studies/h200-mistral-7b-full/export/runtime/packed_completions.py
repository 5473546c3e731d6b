# -*- coding: utf-8 -*-
"""Scores the completions of TRL's GRPOTrainer without their padding.

TRL pads all completions of a generation to the longest of them, and the model computes the padding
too. This module joins the rows of a micro batch into one row without padding, and attention stays
within each of them (`varlen`). It needs a model with `attn_implementation="varlen"`, TRL 1.16, and
an engine: a model with this attention cannot generate.
"""

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from . import varlen

NO_LABEL = -100  # TRL computes no probability for a token with this label
AttentionInterface.register(varlen.VARLEN, varlen.attend)


class PackedCompletions:
    """A mixin for TRL's GRPOTrainer. Losses and gradients are those of padded rows."""

    accelerator: Any

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **of_images: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return what TRL's method returns, which computes `batch_size` rows at once.

        Rows are sequences x tokens. Log-probabilities and entropies are sequences x
        `logits_to_keep`, and 0 at padding. Raises ValueError for rows with images.
        """
        if any(value is not None for value in of_images.values()):
            raise ValueError("completions with images are not packed: choose another attention")
        rows = batch_size or len(input_ids)
        parts = [
            self._score(model, ids, mask.bool(), logits_to_keep, compute_aux_loss)
            for ids, mask in zip(input_ids.split(rows), attention_mask.split(rows), strict=True)
        ]
        logps, entropies, aux_losses = zip(*parts, strict=True)
        return (
            torch.cat(logps),
            torch.cat(entropies) if compute_entropy else None,
            torch.stack(aux_losses).mean() if compute_aux_loss else None,
        )

    def _score(
        self, model: Any, ids: torch.Tensor, kept: torch.Tensor, completion: int, aux_loss: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        labels = ids.masked_fill(~kept, NO_LABEL)
        labels[:, :-completion] = NO_LABEL
        positions = kept.cumsum(1) - 1
        packed = {"input_ids": ids[kept][None], "position_ids": positions[kept][None]}
        packed = varlen.add_segments(packed)
        packed["segments"] = packed["segments"].to(ids.device)
        more = {"output_router_logits": True} if aux_loss else {}
        with self.accelerator.autocast():
            outputs = model(**packed, **more, labels=labels[kept][None], fused_lm_head=True)

        def padded(values: torch.Tensor) -> torch.Tensor:
            """Return the values of the completions' tokens. The first token of all has no value."""
            of_tokens = nn.functional.pad(values, (1, 0))
            return values.new_zeros(kept.shape).masked_scatter(kept, of_tokens)[:, -completion:]

        # TRL asks the untrained model for no entropy.
        entropy = None if outputs.entropy is None else padded(outputs.entropy)
        return padded(outputs.log_probs), entropy, outputs.aux_loss


def trainer_class(kind: type, arguments: dict[str, Any]) -> type:
    """Return `kind`, or a version that packs completions if the arguments choose varlen attention.

    `kind` is TRL's GRPOTrainer or a subclass, and `arguments` are those of its GRPOConfig.
    """
    chosen = (arguments.get("model_init_kwargs") or {}).get("attn_implementation")
    if chosen != varlen.VARLEN:
        return kind
    return type(f"Packed{kind.__name__}", (PackedCompletions, kind), {})
