"""Builds a worker's base model and adapters, and restores them for reuse by later probes."""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedModel

from autotune.core.memory_budget import memory_limit_gib
from autotune.core.objective import Objective
from autotune.core.parallelism import BUILT_AS_SHARDS
from autotune.core.probe_types import ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.probe.accounting import parameter_gib, tensor_gib
from autotune.probe.model_settings import model_settings
from autotune.probe.model_shape import truncate
from autotune.trainer.float8_training import train_in_16_bits
from autotune.trainer.grouped_lora import restore_experts
from autotune.trainer.joined_lora import JoinedLayers
from autotune.trainer.lean_trainer import run_layers_eagerly
from autotune.trainer.model_builder import (
    build,
    config_of,
    decoder_layers,
    load,
    outline,
    stop_checkpointing,
    trainable_model,
)
from autotune.trainer.settings import UNSHARDED_SHARE

CONTEXT_GIB = 0.9  # approximate memory of a process's CUDA context


@dataclass(slots=True)
class ResidentModel:
    """A base model on the device, and adapters that the next probe with the same settings reuses.

    The model can serve requests with the same `family` (`family_of`) and the same number of layers.
    `model_gib` is the size of the base's weights and buffers. `base_gib` is the device memory that
    building the base took. `joined` is set only during a probe that computes adapters and base in
    joint matrix products (`trainer.joined_lora`).
    """

    family: tuple[Any, ...]
    base: PreTrainedModel
    model_gib: float
    base_gib: float = 0.0
    peft_model: PeftModel | None = None
    adapters_key: tuple[Any, ...] = ()
    joined: JoinedLayers | None = None

    def cached_gib(self) -> float:
        """The GiB of device memory that the model takes between probes."""
        return self.base_gib + self.adapters_gib()

    def adapters_gib(self) -> float:
        """The size of the adapters' weights."""
        if self.peft_model is None:
            return 0.0
        return sum(
            tensor_gib(parameter)
            for parameter in self.peft_model.parameters()
            if parameter.requires_grad
        )


def family_of(request: ProbeRequest) -> tuple[Any, ...]:
    """The properties that requests must have in common to share a base model.

    Requests that share a base must also have the same number of layers. Full fine-tuning changes
    the base, so the worker never reuses a base after full fine-tuning.
    """
    config = request.config
    return (
        repr(sorted(request.model.items(), key=str)),
        request.weights,
        # TRL's Trainers change the adapters and the model's config, so other Trainers do not reuse
        # the base.
        request.trainer,
        request.objective.num_labels,
        config.base_dtype,
        config.quantization,
        config.double_quant,
        config.kbit_preparation,
        config.quantize_experts,
        config.attention_implementation,
    )


def build_resident(request: ProbeRequest, device: torch.device) -> ResidentModel:
    """The base model for a request, on the device, without adapters and gradients.

    Real weights are loaded only for a model with all its layers, because a truncated model is as
    fast with random weights. If the model must be sharded because it exceeds the memory limit, the
    base is built without memory for its matrices, and each rank fills its shards with random
    weights later (`shard_outline`).
    """
    settings = model_settings(request.config, request.text_type, request.objective, request.vision)
    # Set the seed, so that the weights do not depend on earlier work of this process.
    torch.manual_seed(request.seed)
    config = config_of(request.model)
    if request.depth is not None:
        truncate(config, request.depth)

    base = None
    if request.parallelism.strategy in BUILT_AS_SHARDS:
        # All ranks must make the same decision, so the limit depends only on the request.
        limit_gib = memory_limit_gib(request.memory_gib, request.headroom, taken_gib=CONTEXT_GIB)
        base = outline(config, settings, device, UNSHARDED_SHARE * limit_gib)

    if base is None and request.weights is not None and request.depth is None:
        base = load(request.weights, settings, device, config)
    elif base is None:
        base = build(config, settings, device)
    return ResidentModel(family=family_of(request), base=base, model_gib=parameter_gib(base))


def attach(
    resident: ResidentModel,
    config: TrainConfig,
    device: torch.device,
    seed: int,
    objective: Objective = Objective.SFT,
    vision: str = "frozen",
) -> nn.Module:
    """The model to train: the base with LoRA adapters, or the base itself in full fine-tuning.

    If an earlier probe's adapters have the same settings, they are reused with new initial values.
    This saves a third of a second on a 7B model.
    """
    settings = model_settings(
        config, resident.base.config.get_text_config().model_type, objective, vision
    )
    if config.method == "full":
        return trainable_model(resident.base, settings, device)

    scale = (config.lora_alpha, config.rslora, config.lora_dropout)
    pure = config.precision == "bf16_pure"
    wanted = (
        config.lora_rank,
        config.lora_targets,
        config.modules_to_save,
        *scale,
        config.dora,
        pure,
        vision,
    )

    if resident.peft_model is None or resident.adapters_key != wanted:
        if resident.peft_model is not None:
            _unload(resident.base, resident.peft_model)
        resident.peft_model = trainable_model(resident.base, settings, device)
        # DoRA computes its magnitudes from the base's weights. Modules that are trained in full,
        # such as classification heads, are copies of the base's modules. Neither DoRA adapters nor
        # trained copies can be reused in another probe.
        trained_whole = settings.modules_to_save or settings.num_labels is not None
        resident.adapters_key = () if config.dora or trained_whole else wanted

    torch.manual_seed(seed)  # so that new and reused adapters get the same values
    for module in resident.peft_model.modules():
        if isinstance(module, LoraLayer):
            module.reset_lora_parameters("default", True)
    return resident.peft_model


def _unload(base: PreTrainedModel, peft_model: PeftModel) -> None:
    """Remove the adapters, and restore the modules that PEFT replaced by trained copies."""
    originals = [
        (name, module.original_module)
        for name, module in base.named_modules()
        if isinstance(module, ModulesToSaveWrapper)
    ]
    peft_model.unload()
    for name, module in originals:
        base.set_submodule(name, module)


def clean(resident: ResidentModel) -> None:
    """Undo a Trainer's changes: checkpointing, hooks, compiled calls, gradients, replaced methods.

    accelerate marks a model that it has prepared, and would not set up autocast on a marked model
    again. In a benchmark, a probe of a marked model was 24 % slower than a probe in a fresh
    process. So this function also removes accelerate's mark from the base and its adapters.
    """
    base = resident.base
    peft_model = resident.peft_model
    if peft_model is not None and "ref" in peft_model.peft_config:
        # The last probe failed before it removed TRL's copy of the adapters ("ref").
        peft_model.delete_adapter("ref")
    stop_checkpointing(base)
    if getattr(base, "_require_grads_hooks", None):
        base.disable_input_require_grads()
    # With checkpointing, transformers and PEFT both make the embedding's output require gradients.
    # The model remembers only the last of these hooks, so the other hook would stay in probes
    # without checkpointing.
    base.get_input_embeddings()._forward_hooks.clear()

    # A chunked loss, autocast, TRL's loss and Liger's kernels replace methods.
    # `_gradient_checkpointing_func` is removed too, because it keeps the offloaded checkpoints in
    # host memory alive.
    for module in base.modules():
        for name in ("forward", "extra_repr", "_get_name", "_gradient_checkpointing_func"):
            module.__dict__.pop(name, None)
    run_layers_eagerly(decoder_layers(base))
    for model in (base, peft_model):
        for name in ("forward", "_original_forward", "_is_accelerate_prepared"):
            if model is not None:
                model.__dict__.pop(name, None)

    base.zero_grad()
    if resident.joined is not None:
        resident.joined.undo()
        resident.joined = None
    restore_experts(base)
    train_in_16_bits(base)
    base.eval()


def module_names(base: PreTrainedModel) -> dict[str, Any]:
    """The global names of the model's Python module; Liger replaces some by its kernels."""
    return vars(sys.modules[type(base).__module__])
