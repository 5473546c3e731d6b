"""The base model that a warm worker keeps between probes, and its adapters: built, reused and cleaned."""

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
from autotune.core.parallelism import FSDP2
from autotune.core.probe_types import ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.probe.accounting import parameter_gib, tensor_gib
from autotune.probe.model_settings import model_settings
from autotune.probe.model_shape import truncate
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

CONTEXT_GIB = 0.9  # about, of a process


@dataclass(slots=True)
class ResidentModel:
    """A base model on the device, and its adapters, which stay for the next probe that wants the same ones.

    `family` says which requests of its depth it can serve. `model_gib` is the size of the base's weights and buffers,
    `base_gib` what building it took of the device's memory. Layers are `joined` during a probe alone.
    """

    family: tuple[Any, ...]
    base: PreTrainedModel
    model_gib: float
    base_gib: float = 0.0
    adapted: PeftModel | None = None
    adapted_for: tuple[Any, ...] = ()
    joined: JoinedLayers | None = None

    def cached_gib(self) -> float:
        """The device memory taken between probes."""
        return self.base_gib + self.adapters_gib()

    def adapters_gib(self) -> float:
        """The size of the adapters' weights."""
        if self.adapted is None:
            return 0.0
        return sum(
            tensor_gib(parameter)
            for parameter in self.adapted.parameters()
            if parameter.requires_grad
        )


def family_of(request: ProbeRequest) -> tuple[Any, ...]:
    """What requests that share a base model have in common, besides the depth.

    Full fine-tuning changes the base, which is never shared then.
    """
    config = request.config
    return (
        repr(sorted(request.model.items(), key=str)),
        request.weights,
        request.trainer,  # TRL changes adapters and configs
        request.objective.num_labels,
        config.base_dtype,
        config.quantization,
        config.double_quant,
        config.kbit_preparation,
        config.attention_implementation,
    )


def build_resident(request: ProbeRequest, device: torch.device) -> ResidentModel:
    """The base model for a request, on the device, without adapters and gradients.

    Real weights are loaded for a whole model only: some of its layers are as fast with random ones. A model that is
    sharded since the limit does not hold it gets random ones too, as shards (`shard_outline`).
    """
    settings = model_settings(
        request.config, request.model["model_type"], request.objective, request.vision
    )
    torch.manual_seed(request.seed)  # the same weights whatever this process did before
    config = config_of(request.model)
    if request.depth is not None:
        truncate(config, request.depth)
    base = None
    if request.parallelism.strategy in FSDP2:
        # By what all ranks know alike: they must agree.
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

    Adapters of an earlier probe are reused where they fit, with new values: that saves a third of a second on a 7B.
    """
    settings = model_settings(config, resident.base.config.model_type, objective, vision)
    if config.method == "full":
        return trainable_model(resident.base, settings, device)
    scale, pure = (
        (config.lora_alpha, config.rslora, config.lora_dropout),
        config.precision == "bf16_pure",
    )
    wanted = (
        config.lora_rank,
        config.lora_targets,
        config.modules_to_save,
        *scale,
        config.dora,
        pure,
        vision,
    )
    if resident.adapted is None or resident.adapted_for != wanted:
        if resident.adapted is not None:
            _unload(resident.base, resident.adapted)
        resident.adapted = trainable_model(resident.base, settings, device)
        # DoRA's magnitudes are computed from the weights, and modules trained whole, as heads over labels, are copies
        # of the base's: what was trained cannot be reused.
        trained_whole = settings.modules_to_save or settings.num_labels is not None
        resident.adapted_for = () if config.dora or trained_whole else wanted
    torch.manual_seed(seed)  # the same adapters whether they are new or not
    for module in resident.adapted.modules():
        if isinstance(module, LoraLayer):
            module.reset_lora_parameters("default", True)
    return resident.adapted


def _unload(base: PreTrainedModel, adapted: PeftModel) -> None:
    """Take the adapters off the base. peft would leave the trained copies in it of what was trained whole."""
    originals = [
        (name, module.original_module)
        for name, module in base.named_modules()
        if isinstance(module, ModulesToSaveWrapper)
    ]
    adapted.unload()
    for name, module in originals:
        base.set_submodule(name, module)


def clean(resident: ResidentModel) -> None:
    """Undo what a Trainer leaves behind: checkpointing, hooks, compiled calls, gradients, a forward under autocast.

    accelerate marks a model that it prepared and would not set autocast up on it a second time, which a benchmark once
    showed as a probe 24 % slower than in a fresh process. The mark is removed too, from the base and its adapters.
    """
    base = resident.base
    if resident.adapted is not None and "ref" in resident.adapted.peft_config:
        resident.adapted.delete_adapter(
            "ref"
        )  # TRL failed before its copy of the adapters was removed
    stop_checkpointing(base)
    if getattr(base, "_require_grads_hooks", None):
        base.disable_input_require_grads()
    # With checkpointing transformers and PEFT each make the embedding's output require gradients, and only the last
    # hook is remembered: the other one would stay for probes without checkpointing.
    base.get_input_embeddings()._forward_hooks.clear()
    # A chunked loss, autocast, TRL's loss and Liger's kernels replace methods; checkpoints in the host's memory are
    # held by what recomputes a layer.
    for module in base.modules():
        for name in ("forward", "extra_repr", "_get_name", "_gradient_checkpointing_func"):
            module.__dict__.pop(name, None)
    run_layers_eagerly(decoder_layers(base))
    for model in (base, resident.adapted):
        for name in ("forward", "_original_forward", "_is_accelerate_prepared"):
            if model is not None:
                model.__dict__.pop(name, None)
    base.zero_grad()
    if resident.joined is not None:
        resident.joined.undo()
        resident.joined = None
    base.eval()


def module_names(base: PreTrainedModel) -> dict[str, Any]:
    """The global names of the model's Python module, which Liger replaces with its own."""
    return vars(sys.modules[type(base).__module__])
