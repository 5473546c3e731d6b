"""Builds the model that is trained: base weights (real or random, quantised), adapters, checkpointing.

Speed and memory depend on shapes, not on values. Random weights are drawn from a normal distribution: memory that is
merely allocated may hold NaN.
"""

import copy
import itertools
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import find_adapter_config_file

from .float8 import Float8Linear, multiply_in_fp8
from .images import TOWERS, VISION_PATHS
from .patches import attend_windows_at_once, offload_checkpoints, register_attentions
from .settings import ModelSettings
from .tiles import tile_layers

QuantizedLinear = Callable[[tuple[int, int, bool], ModelSettings], nn.Module]


def config_of(shape: dict[str, Any]) -> Any:
    """The transformers config of a config.json with this content."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(shape), encoding="utf-8")
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    config.name_or_path = ""
    return config


def load(source: str, settings: ModelSettings, device: torch.device, config: Any = None) -> PreTrainedModel:
    """The base with real weights, frozen. `source` is a Hub name or a directory; `config` takes the place of its own.

    Only safetensors are read, and no code of the repository is run. Raises ValueError for a base with adapters beside
    it: transformers would load them too, and the new ones would be trained on top of them.
    """
    if find_adapter_config_file(source) is not None:
        raise ValueError(f"{source} has adapters (adapter_config.json): merge them into the weights, or move them away")
    register_attentions()
    if settings.num_labels is not None:
        config = config or AutoConfig.from_pretrained(source, trust_remote_code=False)
        _set_labels(config, settings.num_labels)
    arguments: dict[str, Any] = {} if config is None else {"config": config}
    kind = _class_of(settings, config or AutoConfig.from_pretrained(source, trust_remote_code=False))
    if (quantization := settings.bitsandbytes_arguments()) is not None:
        arguments["quantization_config"] = BitsAndBytesConfig(**quantization)
    in_fp8 = settings.quantization == "fp8"
    model: PreTrainedModel = kind.from_pretrained(
        source,
        dtype=base_dtype(settings),
        attn_implementation=settings.attention,
        device_map=None if in_fp8 else {"": device},  # without one weights stay in their files until they are cast
        use_safetensors=True,
        trust_remote_code=False,
        **arguments,
    )
    if in_fp8:
        multiply_in_fp8(model, device)
    return _finish(model, settings)


def load_in_first_rank(source: str, settings: ModelSettings) -> PreTrainedModel:
    """`load` into the host's memory by the first rank; the others get the same model without its values.

    accelerate sends them their shards (`sharing_arguments`). Without these variables transformers would load it in all.
    """
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    return load(source, settings, torch.device("cpu"))


def outline(config: Any, settings: ModelSettings, device: torch.device, room_gib: float) -> PreTrainedModel | None:
    """The base for a transformers config whose matrices have no memory yet: it is to be sharded, then `materialize`d.

    None where all of it fits into `room_gib` of the device before it is sharded, with fp32 masters if it is trained.
    So is it where the head is the embedding, since what is shared would not stay so, and for a bitsandbytes base.
    """
    if settings.bitsandbytes_arguments() is not None:
        return None
    register_attentions()
    with torch.device(device), no_init_weights(), _matrices_on_meta():
        model = from_config(config, settings)
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    element_bytes = base_dtype(settings).itemsize if settings.lora_rank is not None else 4
    size = element_bytes * sum(parameter.numel() for parameter in model.parameters())
    if is_tied or size <= room_gib * 2**30:
        return None
    _fill(model)
    return _finish(model, settings)


def is_outline(model: nn.Module) -> bool:
    """Whether some of its matrices have no memory yet."""
    return any(parameter.is_meta for parameter in model.parameters())


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give memory and random values to the matrices that have none; of sharded ones, to the shard of this rank."""
    tensors = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
    known = {name: tensor.detach() for name, tensor in tensors.items() if not tensor.is_meta}
    model.to_empty(device=device)
    with torch.no_grad():
        for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
            if name in known:
                tensor.copy_(known[name])
                continue
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if ".lora_B." in name:  # adapters change nothing at first
                local.zero_()
            else:
                local.normal_(0.0, 0.02)


def build(
    config: Any, settings: ModelSettings, device: torch.device, quantized_linear: QuantizedLinear | None = None
) -> PreTrainedModel:
    """The base with random weights for a transformers config, frozen.

    `quantized_linear` makes a quantised layer of (in, out, bias), where bitsandbytes is not to.
    """
    register_attentions()
    in_few_bits = settings.quantization != "none"
    with torch.device(device), no_init_weights(), _linear_layers_on_meta() if in_few_bits else nullcontext():
        model = from_config(config, settings)
    if settings.quantization == "fp8":
        multiply_in_fp8(model, device)
    elif in_few_bits:
        _quantize(model, settings, device, quantized_linear or _copies_of_one(device))
    _fill(model)
    return _finish(model, settings)


def base_dtype(settings: ModelSettings) -> torch.dtype:
    """The dtype of the base weights."""
    dtype: torch.dtype = getattr(torch, settings.base_dtype)
    return dtype


def _set_labels(config: Any, num_labels: int) -> None:
    config.num_labels = num_labels
    if config.pad_token_id is None:
        config.pad_token_id = 0  # before which the head finds the last token of a row


def _class_of(settings: ModelSettings, config: Any) -> Any:
    if settings.num_labels is not None:
        return AutoModelForSequenceClassification
    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def from_config(config: Any, settings: ModelSettings) -> PreTrainedModel:
    """A model on the current default device, its weights not initialised but tied."""
    if settings.num_labels is not None:
        _set_labels(config, settings.num_labels)
    model: PreTrainedModel = _class_of(settings, config).from_config(
        config, dtype=base_dtype(settings), attn_implementation=settings.attention
    )
    model.tie_weights()  # `no_init_weights` leaves it out, and a head of its own would count twice
    return model


def _finish(model: PreTrainedModel, settings: ModelSettings) -> PreTrainedModel:
    model.config.use_cache = False
    if settings.attention.startswith("sdpa"):
        attend_windows_at_once(model)
    model.requires_grad_(False)
    if settings.kbit_preparation:  # peft's prepare_model_for_kbit_training, which also sets checkpointing
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.float()
    return model


def to_train(base: PreTrainedModel, settings: ModelSettings, device: torch.device) -> nn.Module:
    """The model to train: the base with new adapters on the linear layers that `settings` name, or the base itself.

    Raises ValueError where a module that is to be trained whole does not exist, since peft would go on without it.
    """
    arguments = settings.lora_arguments()
    frozen = settings.vision == "frozen" and bool(_towers(base))
    if arguments is None:
        base.requires_grad_(True)
        for name, parameter in base.named_parameters():
            if frozen and re.fullmatch(VISION_PATHS, name):
                parameter.requires_grad_(False)
        return base
    # Only now: PEFT loads bitsandbytes, and with it torch's compiler, which a base alone does not need.
    from peft import LoraConfig, get_peft_model
    from peft.utils import ModulesToSaveWrapper

    if frozen:
        arguments["exclude_modules"] = VISION_PATHS
    with torch.device(device):
        model: nn.Module = get_peft_model(
            base, LoraConfig(**arguments), autocast_adapter_dtype=settings.adapters_in_fp32
        )
    _unhook_towers(base)
    if settings.quantization == "fp8":
        # DDP would send the first rank's weights to all others, which have the same; and gloo knows no 8-bit floats.
        layers = [name for name, module in model.named_modules() if isinstance(module, Float8Linear)]
        kept = [f"{name}.{one}" for name in layers for one in ("kept", "scale")]
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, kept)
    if settings.num_labels is not None and settings.adapters_in_fp32:
        for module in model.modules():
            if isinstance(module, ModulesToSaveWrapper):  # a head over labels: PEFT copies it in the base's dtype
                module.modules_to_save.float()
    whole = [name for name, module in model.named_modules() if isinstance(module, ModulesToSaveWrapper)]
    for name in settings.modules_to_save or []:
        if not any(path.endswith(f".{name}") for path in whole):
            raise ValueError(f"{type(base).__name__} has no module {name} to train whole")
    return model


def head_of(model: PreTrainedModel) -> nn.Module | None:
    """What comes after the layers: the head over the vocabulary, or that over labels."""
    head: nn.Module | None = model.get_output_embeddings()
    return head or next((module for module in model.children() if isinstance(module, nn.Linear)), None)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of the language model, in order: none of a vision tower."""
    inside = {id(module) for tower in _towers(model) for module in tower.modules()}
    layers = (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
    return [layer for layer in layers if id(layer) not in inside]


def _towers(model: nn.Module) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if name.rpartition(".")[2] in TOWERS]


def _unhook_towers(base: nn.Module) -> None:
    """Let a vision tower's inputs be without gradients.

    transformers and PEFT each have the embeddings of patches require them too where layers are recomputed, so that a
    frozen tower would be differentiated. Recomputation without reentrance does not need it.
    """
    for tower in _towers(base):
        for module in tower.modules():
            module._forward_hooks.clear()


def require_input_gradients(base: PreTrainedModel) -> None:
    """Have the first decoder layer's input require gradients as all others' do, or it would be compiled apart.

    transformers' own method does so for the patches of images too, and a frozen tower would be differentiated.
    """
    hook = base.get_input_embeddings().register_forward_hook(lambda module, inputs, output: output.requires_grad_(True))
    base._require_grads_hooks = [hook]


def set_checkpointing(base: PreTrainedModel, settings: ModelSettings) -> None:
    """Have decoder layers recomputed in the backward pass as `settings` say."""
    every = settings.checkpoint_every
    if every is None:
        stop_checkpointing(base)
        return
    arguments = {"use_reentrant": False}
    if hasattr(base, "activation_checkpointing_enable"):  # transformers 5.23 and later
        base.activation_checkpointing_enable(activation_checkpointing_kwargs=arguments)
    else:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
    layers = decoder_layers(base)
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index % every == 0
    if settings.offload:
        offload_checkpoints(layers)
    _unhook_towers(base)


def compute_in_tiles(base: PreTrainedModel) -> None:
    """Have norms, projections and MLPs computed over tiles of tokens. Adapters and checkpointing must be there already.

    transformers and PEFT each have the embedding's output require gradients, which would keep it, and its gradient, for
    the whole step. Recomputation without reentrance does not need it.
    """
    base.get_input_embeddings()._forward_hooks.clear()
    tile_layers(base, decoder_layers(base))


def stop_checkpointing(base: PreTrainedModel) -> None:
    """Recompute nothing in the backward pass."""
    disable = getattr(base, "activation_checkpointing_disable", base.gradient_checkpointing_disable)
    disable()


def _fill(model: nn.Module) -> None:
    """Random values for matrices; norm weights keep their ones, biases and other vectors become zero."""
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):  # torch's own initialisation was skipped
            module.reset_parameters()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.is_meta or not parameter.is_floating_point():
                continue  # it has no memory yet, or is quantised already
            layer = model.get_submodule(name.rpartition(".")[0])
            if isinstance(layer, Float8Linear) and parameter is layer.kept:
                layer.keep(torch.empty_like(parameter, dtype=layer.dtype).normal_(0.0, 0.02))
            elif parameter.ndim > 1:
                parameter.normal_(0.0, 0.02)
            elif not name.endswith("weight"):
                parameter.zero_()


@contextmanager
def _matrices_on_meta() -> Iterator[None]:
    """Matrices registered inside lose their memory at once, vectors and buffers keep the values they are made with."""
    original = nn.Module.register_parameter

    def without_memory(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.ndim > 1:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        original(self, name, parameter)

    nn.Module.register_parameter = without_memory
    try:
        yield
    finally:
        nn.Module.register_parameter = original


@contextmanager
def _linear_layers_on_meta() -> Iterator[None]:
    """Linear layers created inside take no memory: the unquantised model may be too large for the device."""
    original = nn.Linear.__init__

    def on_meta(self: nn.Linear, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **(kwargs | {"device": "meta"}))

    nn.Linear.__init__ = on_meta
    try:
        yield
    finally:
        nn.Linear.__init__ = original


def _quantize(
    model: PreTrainedModel, settings: ModelSettings, device: torch.device, quantized_linear: QuantizedLinear
) -> None:
    """Replace the linear layers but the head."""
    head = head_of(model)
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear:
            continue
        if head is not None and module is head:
            if module.weight.is_meta:
                module.to_empty(device=device)
            continue
        shape = (module.in_features, module.out_features, module.bias is not None)
        model.set_submodule(name, quantized_linear(shape, settings))
    setattr(model, "is_loaded_in_4bit" if settings.quantization == "nf4" else "is_loaded_in_8bit", True)


def _copies_of_one(device: torch.device) -> QuantizedLinear:
    """One layer of each shape is quantised, the others are copies of it: 0.5 s instead of 41 on a 7B model."""
    quantized: dict[tuple[int, int, bool], nn.Module] = {}

    def make(shape: tuple[int, int, bool], settings: ModelSettings) -> nn.Module:
        if shape in quantized:
            return _copy(quantized[shape])
        quantized[shape] = _quantized_linear(shape, settings, device)
        return quantized[shape]

    return make


def _copy(layer: nn.Module) -> nn.Module:
    """Another layer with the same values. The weight and the layer share one copy of the weight's statistics."""
    copied = copy.deepcopy(layer)
    if hasattr(copied, "quant_state"):
        copied.quant_state = copied.weight.quant_state
        copied.weight.module = copied
    return copied


def _quantized_linear(shape: tuple[int, int, bool], settings: ModelSettings, device: torch.device) -> nn.Module:
    import bitsandbytes as bnb

    fan_in, fan_out, bias = shape
    dtype = base_dtype(settings)
    weight = torch.empty(fan_out, fan_in, dtype=dtype, device=device).normal_(0, 0.02).cpu()
    layer: nn.Module
    if settings.quantization == "nf4":
        statistics = {"compress_statistics": settings.double_quant, "quant_type": "nf4"}
        layer = bnb.nn.Linear4bit(fan_in, fan_out, bias, compute_dtype=dtype, device="meta", **statistics)
        layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, module=layer, **statistics)
    else:
        layer = bnb.nn.Linear8bitLt(fan_in, fan_out, bias, has_fp16_weights=False, threshold=6.0, device="meta")
        layer.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    if bias:
        layer.bias = nn.Parameter(torch.zeros(fan_out, dtype=dtype), requires_grad=False)
    return layer.to(device)
