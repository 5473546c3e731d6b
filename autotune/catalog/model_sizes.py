"""Computes the sizes of a model's layers and matrices, for families whose layers are known."""

import functools
from dataclasses import dataclass, replace
from typing import Any

from autotune.catalog.models import ModelSpec
from autotune.core.lora_targets import target_modules
from autotune.core.objective import Objective
from autotune.core.train_config import TrainConfig
from autotune.trainer.settings import DEQUANTISED, EXPERT_PARAMETERS

# The model families with a memory formula; `kept_factors.yaml` has a row for each.
FAMILIES = frozenset({"llama", "mistral", "qwen2", "gemma", "gemma2", "phi3", "qwen3"})


@dataclass(frozen=True, kw_only=True)  # without slots, because it caches properties
class Sizes:
    """The sizes of a model that determine its memory.

    `tied` means that the head uses the embedding's weights. `capped` means that the logits are
    soft-capped after the head. `params` counts all parameters. If a checkpoint stays quantised in
    training, `packed_bytes` is the size of its weight files, or 0 if the size is unknown.
    """

    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_heads: int
    head_dim: int
    vocab: int
    tied: bool
    capped: bool
    params: int = 0
    packed_bytes: int = 0

    @classmethod
    @functools.lru_cache(maxsize=256)
    def of(cls, model: ModelSpec) -> "Sizes | None":
        """Return the sizes of the model, or None for a family without a formula."""
        config: dict[str, Any] = model.config
        family = config["model_type"]
        heads = model.size("num_attention_heads")
        intermediate = model.size("intermediate_size")
        if family not in FAMILIES or heads is None or intermediate is None:
            return None

        sizes = cls(
            family=family,
            layers=model.num_layers,
            hidden=model.hidden_size,
            intermediate=intermediate,
            heads=heads,
            key_heads=model.size("num_key_value_heads") or heads,
            head_dim=model.size("head_dim") or model.hidden_size // heads,
            vocab=model.vocab_size,
            tied=bool(config.get("tie_word_embeddings", family.startswith("gemma"))),
            capped=family == "gemma2" and config.get("final_logit_softcapping", 30.0) is not None,
        )
        ends = sizes.embedding * (1 if sizes.tied else 2)
        files = model.checkpoint
        stays_packed = model.stored_as is not None and model.stored_as not in DEQUANTISED
        packed = files.stored if files and files.params and stays_packed else ()
        return replace(
            sizes,
            params=model.params or ends + sizes.linear_params,
            packed_bytes=sum(size for _, size in packed),
        )

    @property
    def queries(self) -> int:
        """The width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """The width of all key heads together."""
        return self.key_heads * self.head_dim

    @property
    def embedding(self) -> int:
        """The number of parameters of the embedding; an untied head has the same number."""
        return self.vocab * self.hidden

    @functools.cached_property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """The matrices of a layer: each name with the numbers of inputs and outputs."""
        hidden = self.hidden
        inner = self.intermediate
        queries = self.queries
        keys = self.keys
        out = {"o_proj": (queries, hidden)}
        down = {"down_proj": (inner, hidden)}

        # Phi-3 has one matrix for queries, keys and values, and one for the MLP's gate and up
        # projections.
        if self.family == "phi3":
            return (
                {"qkv_proj": (hidden, queries + 2 * keys)}
                | out
                | {"gate_up_proj": (hidden, 2 * inner)}
                | down
            )

        attention = {
            "q_proj": (hidden, queries),
            "k_proj": (hidden, keys),
            "v_proj": (hidden, keys),
        } | out
        return attention | {"gate_proj": (hidden, inner), "up_proj": (hidden, inner)} | down

    @functools.cached_property
    def linear_params(self) -> int:
        """The number of parameters in the matrices of all layers."""
        return self.layers * sum(fan_in * fan_out for fan_in, fan_out in self.matrices.values())

    def with_objective(self, objective: Objective) -> "Sizes":
        """Return the sizes of the same model with the head for an objective.

        If the objective trains on labels (such as classification), a head over the labels replaces
        the head over the vocabulary. The new head is negligibly small, and shares no weights with
        the embedding.
        """
        if objective.num_labels is None:
            return self
        head = 0 if self.tied else self.embedding
        return replace(self, tied=False, capped=False, params=self.params - head)

    def adapted(self, config: TrainConfig) -> frozenset[str]:
        """Return the names of the matrices of a layer that get adapters under `config`."""
        return frozenset() if config.method == "full" else self._selected(config.lora_targets)

    @functools.lru_cache(maxsize=256)  # noqa: B019 (a command has few Sizes)
    def _selected(self, lora_targets: str) -> frozenset[str]:
        """Return the names of the matrices of a layer that a value of `lora_targets` selects."""
        names = target_modules(self.family, lora_targets)
        # All families with these sizes are models without experts.
        return frozenset(self.matrices if names is None else {*names} - {*EXPERT_PARAMETERS})

    def adapter_params(self, config: TrainConfig) -> int:
        """Return the number of parameters of the adapters in all layers."""
        sides = sum(sum(self.matrices[name]) for name in self.adapted(config))
        return self.layers * (config.lora_rank or 0) * sides
