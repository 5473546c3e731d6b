# -*- coding: utf-8 -*-
"""Builds the model to train: its base weights (real or random), adapters and checkpointing.

Speed and memory depend on shapes, not on values. Random weights come from a normal distribution,
because uninitialised memory may hold NaN.
"""

import copy
import inspect
import itertools
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import find_adapter_config_file

from .float8 import Float8Linear, multiply_in_fp8
from .float8_training import train_in_fp8
from .grouped_lora import adapted_experts, group_experts
from .joined_lora import JoinedLayers
from .packed_experts import (
    PROJECTIONS,
    compute_packed,
    pack_random_experts,
    pack_while_loading,
    unpacked_shapes,
)
from .patches import (
    attend_windows_at_once,
    offload_checkpoints,
    register_attentions,
    separate_examples,
)
from .settings import DEQUANTISED, ModelSettings, quantization_of
from .sharded_nf4 import fill, fill_shard, is_sharded_4_bit, local_part
from .tiles import tile_layers

QuantizedLinear = Callable[[tuple[int, int, bool], ModelSettings], nn.Module]


def config_of(shape: dict[str, Any]) -> Any:
    """Return the transformers config for the content of a config.json."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(shape), encoding="utf-8")
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    config.name_or_path = ""
    return config


def load(
    source: str, settings: ModelSettings, device: torch.device, config: Any = None
) -> PreTrainedModel:
    """Load the base with its real weights, and freeze them.

    `source` is a Hub name or a directory, and `config` replaces its config. Only safetensors are
    read, and code in the repository does not run. Raises ValueError if `source` also has adapters:
    transformers would load these adapters too, and new adapters would be trained on top of them.
    """
    if find_adapter_config_file(source) is not None:
        raise ValueError(
            f"{source} has adapters (adapter_config.json): merge them into the weights,"
            " or move them away"
        )

    register_attentions()
    arguments: dict[str, Any] = {} if config is None else {"config": config}
    config = config or AutoConfig.from_pretrained(source, trust_remote_code=False)
    if settings.num_labels is not None:
        _set_labels(config, settings.num_labels)
        arguments["config"] = config

    quantization = settings.bitsandbytes_arguments()
    if quantized := quantization_of(PreTrainedConfig.get_config_dict(source)[0]):
        # The config must say how the files are quantised, because transformers reads the format
        # only there.
        config.quantization_config = _trainable(quantized, source, settings)
        arguments["config"] = config
    elif quantization is not None:
        arguments["quantization_config"] = BitsAndBytesConfig(**quantization)

    in_fp8 = settings.quantization == "fp8"
    packs = settings.quantize_experts
    with pack_while_loading(double_quant=settings.double_quant) if packs else nullcontext():
        model: PreTrainedModel = _model_class(settings, config).from_pretrained(
            source,
            dtype=base_dtype(settings),
            attn_implementation=_attention(settings, config),
            # For fp8, there is no device map, so that weights stay in their files until they are
            # cast.
            device_map=None if in_fp8 else {"": device},
            use_safetensors=True,
            trust_remote_code=False,
            **arguments,
        )
    if in_fp8:
        multiply_in_fp8(model, device)
    if packs:
        compute_packed(model)
    return _finish(model, settings)


def _trainable(quantized: dict[str, Any], source: str, settings: ModelSettings) -> dict[str, Any]:
    """Return the quantization_config that lets transformers train this quantised checkpoint.

    Raises ValueError if bitsandbytes would have to quantise a checkpoint that is quantised already.
    """
    method = quantized.get("quant_method")
    if method not in DEQUANTISED:
        return quantized
    if settings.bitsandbytes_arguments() is not None:
        raise ValueError(
            f"{source} is stored in {method}, which bitsandbytes cannot quantise again:"
            " set quantization to none, or pass a checkpoint that is stored in 16 bits"
        )
    return quantized | {"dequantize": True}


def load_in_first_rank(
    source: str, settings: ModelSettings, *, shards_by_fsdp: bool
) -> PreTrainedModel:
    """Load the base into host memory in the first rank, and without values in other ranks.

    accelerate (see `sharing_arguments`) or `zero_shards` sends the other ranks their shards.
    transformers reads the two environment variables that are set here; without them, it would load
    the model in all ranks. They stay set only if FSDP shards the model.
    """
    variables = dict.fromkeys(("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"), "true")
    os.environ |= variables
    base = load(source, settings, torch.device("cpu"))
    for name in () if shards_by_fsdp else variables:
        del os.environ[name]
    return base


def outline(
    config: Any, settings: ModelSettings, device: torch.device, room_gib: float
) -> PreTrainedModel | None:
    """Build the base without memory for its matrices.

    The caller shards the base, then calls `materialize`. Returns None if the unsharded base fits
    into `room_gib` of the device (in fp32 if the base itself is trained). Returns None if the head
    and the embedding share one weight, because sharding would make two separate weights of it.
    Returns None for an 8-bit base.
    """
    if settings.quantization == "int8" or settings.quantize_experts:
        return None
    register_attentions()
    with torch.device(device), no_init_weights(), _matrices_on_meta():
        model = from_config(config, settings)

    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    if settings.quantization == "nf4":
        _quantize(model, settings, torch.device("meta"), _outlined_linear)
    element_bytes = base_dtype(settings).itemsize if settings.lora_rank is not None else 4
    size = sum(
        parameter.numel() * (0.5 if is_packed_shape(parameter) else element_bytes)
        for parameter in model.parameters()
    )
    if is_tied or size <= room_gib * 2**30:
        return None
    _fill(model)
    return _finish(model, settings)


def is_packed_shape(parameter: nn.Parameter) -> bool:
    """Return whether a parameter will be packed in 4 bits, but still has its unpacked shape."""
    return type(parameter).__name__ == "Params4bit"


def _outlined_linear(shape: tuple[int, int, bool], settings: ModelSettings) -> nn.Module:
    """Return a 4-bit layer whose weight has no memory."""
    import bitsandbytes as bnb

    fan_in, fan_out, bias = shape
    layer: nn.Module = bnb.nn.Linear4bit(
        fan_in,
        fan_out,
        bias,
        compute_dtype=base_dtype(settings),
        compress_statistics=settings.double_quant,
        quant_type="nf4",
        device="meta",
    )
    return layer


def is_outline(model: nn.Module) -> bool:
    """Return whether some matrices of the model have no memory yet."""
    return any(parameter.is_meta for parameter in model.parameters())


def materialize(model: nn.Module, device: torch.device) -> None:
    """Allocate the matrices without memory, or this rank's shards of them, with random values."""
    tensors = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
    known = {name: tensor.detach() for name, tensor in tensors.items() if not tensor.is_meta}
    model.to_empty(device=device)

    with torch.no_grad():
        for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
            if name in known:
                tensor.copy_(known[name])
                continue
            local, start = local_part(tensor)
            layer = model.get_submodule(name.rpartition(".")[0])
            # LoRA's matrix B is zero in new adapters, so that new adapters do not change the
            # model's output.
            if ".lora_B." in name or name.endswith("bias"):
                local.zero_()
            elif is_sharded_4_bit(layer):
                fill_shard(layer, local, start)
            else:
                fill(local)


def build(
    config: Any,
    settings: ModelSettings,
    device: torch.device,
    quantized_linear: QuantizedLinear | None = None,
) -> PreTrainedModel:
    """Build the base with random, frozen weights from a transformers config.

    `quantized_linear` makes a quantised layer from its shape: the numbers of inputs and outputs,
    and whether it has a bias. By default, bitsandbytes makes the layer.
    """
    register_attentions()
    is_quantized = settings.quantization != "none"
    with (
        torch.device(device),
        no_init_weights(),
        _linear_layers_on_meta() if is_quantized else nullcontext(),
        _matrices_on_meta(PROJECTIONS) if settings.quantize_experts else nullcontext(),
    ):
        model = from_config(config, settings)

    if settings.quantization == "fp8":
        multiply_in_fp8(model, device)
    elif is_quantized:
        _quantize(model, settings, device, quantized_linear or _cached_linear(device))
    if settings.quantize_experts:
        pack_random_experts(model, base_dtype(settings), device, double_quant=settings.double_quant)
    _fill(model)
    return _finish(model, settings)


def base_dtype(settings: ModelSettings) -> torch.dtype:
    """Return the dtype of the base weights."""
    dtype: torch.dtype = getattr(torch, settings.base_dtype)
    return dtype


def _set_labels(config: Any, num_labels: int) -> None:
    config.num_labels = num_labels
    if config.pad_token_id is None:
        # The classification head needs the padding token to find the last token before the padding.
        config.pad_token_id = 0


def _model_class(settings: ModelSettings, config: Any) -> Any:
    if settings.num_labels is not None:
        return AutoModelForSequenceClassification
    # Some models of images or sound also have a class for text only, which is preferred.
    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForCausalLM if is_causal else AutoModelForMultimodalLM


def _attention(settings: ModelSettings, config: Any) -> str | dict[str, str]:
    """Return the attention implementation, or a dict with one for each part of the config.

    The result is a dict if a tower for images or sound does not support SDPA. This tower then uses
    eager attention.
    """
    parts = {name: getattr(config, name, None) for name in getattr(config, "sub_configs", ())}
    kinds = {name: MODEL_MAPPING.get(type(part), None) for name, part in parts.items()}
    lacking = [
        name
        for name, kind in kinds.items()
        if name != "text_config" and getattr(kind, "_supports_sdpa", True) is False
    ]
    if not lacking or not settings.attention.startswith("sdpa"):
        return settings.attention
    return dict.fromkeys(["", *parts], settings.attention) | dict.fromkeys(lacking, "eager")


def from_config(config: Any, settings: ModelSettings) -> PreTrainedModel:
    """Make a model on torch's default device, with tied weights that have no values yet."""
    if settings.num_labels is not None:
        _set_labels(config, settings.num_labels)
    model: PreTrainedModel = _model_class(settings, config).from_config(
        config, dtype=base_dtype(settings), attn_implementation=_attention(settings, config)
    )
    # Inside `no_init_weights`, transformers does not tie the weights itself, so a tied head would
    # have a separate weight.
    model.tie_weights()
    return model


def _finish(model: PreTrainedModel, settings: ModelSettings) -> PreTrainedModel:
    model.config.use_cache = False
    if settings.attention.startswith("sdpa"):
        attend_windows_at_once(model)
    separate_examples(model)
    _mark_text(model)
    model.requires_grad_(False)
    # This code does the same as PEFT's prepare_model_for_kbit_training, but does not switch on
    # checkpointing.
    if settings.kbit_preparation:
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.float()
    return model


def _mark_text(model: PreTrainedModel) -> None:
    """If the model requires the type of each token in training, mark all tokens as text."""
    names = ("token_type_ids", "mm_token_type_ids")
    required = [name for name in names if name in inspect.signature(model.forward).parameters]
    if not _towers(model) or not required:
        return

    def add_types(module: nn.Module, args: Any, given: dict[str, Any]) -> tuple[Any, Any]:
        ids = given.get("input_ids", args[0] if args else None)
        if ids is None:
            return args, given
        return args, dict.fromkeys(required, torch.zeros_like(ids)) | given

    model.register_forward_pre_hook(add_types, with_kwargs=True)


def trainable_model(
    base: PreTrainedModel, settings: ModelSettings, device: torch.device
) -> nn.Module:
    """Return the base with new adapters. If `settings` has no adapters, return the base itself.

    Raises ValueError if a module in `modules_to_save` does not exist, because peft would ignore the
    name.
    """
    arguments = settings.lora_arguments()
    towers = _towers(base)
    frozen = towers if settings.vision == "frozen" else {}
    if arguments is None:
        base.requires_grad_(True)
        for tower in frozen.values():
            tower.requires_grad_(False)
        if settings.fp8_products != "none":
            train_in_fp8(decoder_layers(base), settings.fp8_products)
        return base

    # PEFT imports bitsandbytes, which imports torch's compiler. A base without adapters needs none
    # of the three, so PEFT is imported only here.
    from peft import LoraConfig, get_peft_model
    from peft.utils import ModulesToSaveWrapper

    if towers:
        arguments["exclude_modules"] = _modules_without_adapters(base, frozen)
    with torch.device(device), unpacked_shapes(base):
        model: nn.Module = get_peft_model(
            base, LoraConfig(**arguments), autocast_adapter_dtype=settings.adapters_in_fp32
        )
    _unhook_towers(base)
    if settings.quantization == "fp8":
        _exclude_from_ddp(model)

    # PEFT's copy of a classification head has the dtype of the base, so it is converted to fp32
    # like the adapters.
    wrappers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, ModulesToSaveWrapper)
    }
    if settings.num_labels is not None and settings.adapters_in_fp32:
        for module in wrappers.values():
            module.modules_to_save.float()

    for name in settings.modules_to_save or []:
        if not any(path.endswith(f".{name}") for path in wrappers):
            raise ValueError(f"modules_to_save: {type(base).__name__} has no module {name}")
    return model


def _modules_without_adapters(base: PreTrainedModel, frozen: Iterable[str]) -> str:
    """Return a pattern that matches the paths of frozen towers and of whole decoder layers.

    If all linear layers of a mixture of experts get adapters, PEFT matches only the last part of
    each path. A linear layer in a tower's nn.Sequential may be named 0, like the first decoder
    layer, so PEFT would match that decoder layer too.
    """
    layers = set(map(id, decoder_layers(base)))
    lists = {
        path.rpartition(".")[0] for path, module in base.named_modules() if id(module) in layers
    }
    whole_layers = rf"({'|'.join(map(re.escape, sorted(lists)))})\.\d+"
    if not frozen:
        return whole_layers
    return rf"({'|'.join(map(re.escape, frozen))})(\..*)?|{whole_layers}"


def _exclude_from_ddp(model: nn.Module) -> None:
    """Stop DDP from sending 8-bit weights.

    DDP need not send these weights, because all ranks load the same weights. gloo cannot send 8-bit
    floats.
    """
    layers = [name for name, module in model.named_modules() if isinstance(module, Float8Linear)]
    weights = [f"{name}.{one}" for name in layers for one in ("weight_fp8", "scale")]
    ddp = nn.parallel.DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(model, weights)


def set_lora_kernels(base: PreTrainedModel, settings: ModelSettings) -> JoinedLayers | None:
    """Let the adapters compute as `settings` require, and return the joined layers, if any.

    JoinedLayers.undo and `restore_experts` undo the change. Adapters on experts in 4 bits are
    always computed by grouped matrix products, because PEFT cannot compute with packed weights.
    """
    if settings.grouped or (settings.quantize_experts and adapted_experts(base)):
        group_experts(base)
    return JoinedLayers(base, decoder_layers(base)) if settings.joined else None


def find_head(model: PreTrainedModel) -> nn.Module | None:
    """Return the output head, which predicts tokens or labels, or None if there is none."""
    head: nn.Module | None = model.get_output_embeddings()
    linear = (module for module in model.children() if isinstance(module, nn.Linear))
    return head or next(linear, None)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of the language model in order, without vision towers."""
    inside = {id(module) for tower in _towers(model).values() for module in tower.modules()}
    layers = [
        module
        for module in model.modules()
        if isinstance(module, GradientCheckpointingLayer) and id(module) not in inside
    ]

    # Some models keep other towers inside the language model, or layers inside layers. In such a
    # model, return the list that has as many layers as the config says.
    base = _base_of(model)
    number = getattr(base.config.get_text_config(), "num_hidden_layers", None) if base else None
    if len(layers) != number:
        for module in model.modules():
            if isinstance(module, nn.ModuleList) and len(module) == number:
                repeated = list(module)
                if all(isinstance(one, GradientCheckpointingLayer) for one in repeated):
                    return repeated
    return layers


def _base_of(model: nn.Module) -> PreTrainedModel | None:
    """Return the first transformers model in `model`, which PEFT may wrap, or None."""
    found = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    return next(found, None)


def language_model(base: PreTrainedModel) -> nn.Module:
    """Return the decoder of the text, without the head and without towers for images or sound."""
    is_wrapper = base.config.get_text_config() is not base.config
    decoder: nn.Module = base.get_decoder() if is_wrapper else base.base_model
    return decoder


def _towers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the topmost modules outside the language model and the head, by path.

    These modules are towers for images and sound, and the projectors of the towers' features.
    """
    base = _base_of(model)
    if base is None or base.config.get_text_config() is base.config:
        return {}

    text = {id(language_model(base)), id(base.get_output_embeddings())}
    towers: dict[str, nn.Module] = {}

    def visit(path: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            inside = {id(one) for one in child.modules()}
            if not inside & text:
                towers[f"{path}{name}"] = child
            elif id(child) not in text:
                visit(f"{path}{name}.", child)

    visit("", base)
    return {path: tower for path, tower in towers.items() if any(True for _ in tower.parameters())}


def _unhook_towers(base: nn.Module) -> None:
    """Stop the inputs of vision towers from requiring gradients.

    If layers are recomputed, transformers and PEFT each make the patch embeddings require
    gradients, and a frozen tower would then have a backward pass. The recomputation here is
    non-reentrant, and does not need these gradients.
    """
    for tower in _towers(base).values():
        for module in tower.modules():
            module._forward_hooks.clear()


def require_input_gradients(base: PreTrainedModel) -> None:
    """Make the input of the first decoder layer require gradients, as in all other layers.

    Without these gradients, the first layer would be compiled separately. transformers' own method
    also affects the patches of images, so that a frozen tower would be differentiated.
    """
    hook = base.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: output.requires_grad_(True)
    )
    base._require_grads_hooks = [hook]


def set_checkpointing(base: PreTrainedModel, settings: ModelSettings) -> None:
    """Recompute decoder layers in the backward pass as `settings` require."""
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
    """Compute norms, projections and MLPs over tiles of tokens.

    Adapters and checkpointing must be present already. transformers and PEFT each make the output
    of the embedding require gradients, which would keep that output and its gradient for the whole
    step. The recomputation here is non-reentrant and does not need this gradient, so this function
    prevents it.
    """
    base.get_input_embeddings()._forward_hooks.clear()
    tile_layers(base, decoder_layers(base))


def stop_checkpointing(base: PreTrainedModel) -> None:
    """Stop the recomputation of layers in the backward pass."""
    disable = getattr(base, "activation_checkpointing_disable", base.gradient_checkpointing_disable)
    disable()


def _fill(model: nn.Module) -> None:
    """Fill matrices with random values, and biases and other vectors with zeros.

    The weights of norms keep the value 1. A random bias of a router (Ernie 4.5) would send all
    tokens to the same experts.
    """
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):  # `no_init_weights` skipped its initialisation
            module.reset_parameters()

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.is_meta or not parameter.is_floating_point():
                continue  # the parameter has no memory yet, or is quantised already
            layer = model.get_submodule(name.rpartition(".")[0])
            if isinstance(layer, Float8Linear) and parameter is layer.weight_fp8:
                layer.store(torch.empty_like(parameter, dtype=layer.dtype).normal_(0.0, 0.02))
            elif parameter.ndim > 1 and not name.endswith("bias"):
                parameter.normal_(0.0, 0.02)
            elif not name.endswith("weight"):
                parameter.zero_()


@contextmanager
def _matrices_on_meta(names: Sequence[str] = ()) -> Iterator[None]:
    """In this block, move each matrix to the meta device when a module registers it.

    With `names`, move only the parameters that have these names. Vectors and buffers keep their
    initial values.
    """
    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        is_moved = name in names if names else parameter is not None and parameter.ndim > 1
        if parameter is not None and is_moved:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        original(self, name, parameter)

    nn.Module.register_parameter = register
    try:
        yield
    finally:
        nn.Module.register_parameter = original


@contextmanager
def _linear_layers_on_meta() -> Iterator[None]:
    """In this block, create linear layers on the meta device, without memory.

    The unquantised model may be too large for the device.
    """
    original = nn.Linear.__init__

    def initialize(self: nn.Linear, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **(kwargs | {"device": "meta"}))

    nn.Linear.__init__ = initialize
    try:
        yield
    finally:
        nn.Linear.__init__ = original


def _quantize(
    model: PreTrainedModel,
    settings: ModelSettings,
    device: torch.device,
    quantized_linear: QuantizedLinear,
) -> None:
    """Replace all linear layers except the head with quantised layers."""
    head = find_head(model)
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear:
            continue

        if head is not None and module is head:
            if module.weight.is_meta:
                module.to_empty(device=device)
            continue

        shape = (module.in_features, module.out_features, module.bias is not None)
        model.set_submodule(name, quantized_linear(shape, settings))

    attribute = "is_loaded_in_4bit" if settings.quantization == "nf4" else "is_loaded_in_8bit"
    setattr(model, attribute, True)
    # transformers sets this attribute too. Without this attribute, Jamba multiplies by the packed
    # bytes of a weight.
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config._is_quantized = True


def _cached_linear(device: torch.device) -> QuantizedLinear:
    """Return a function that quantises only the first layer of each shape, and then copies it.

    For a 7B model, this takes 0.5 s; quantising each layer takes 41 s.
    """
    quantized: dict[tuple[int, int, bool], nn.Module] = {}

    def make(shape: tuple[int, int, bool], settings: ModelSettings) -> nn.Module:
        if shape in quantized:
            return _copy(quantized[shape])
        quantized[shape] = _quantized_linear(shape, settings, device)
        return quantized[shape]

    return make


def _copy(layer: nn.Module) -> nn.Module:
    """Return a copy of a quantised layer.

    The new layer and its weight share one quantisation state.
    """
    copied = copy.deepcopy(layer)
    if hasattr(copied, "quant_state"):
        copied.quant_state = copied.weight.quant_state
        copied.weight.module = copied
    return copied


def _quantized_linear(
    shape: tuple[int, int, bool], settings: ModelSettings, device: torch.device
) -> nn.Module:
    import bitsandbytes as bnb

    fan_in, fan_out, bias = shape
    dtype = base_dtype(settings)
    weight = torch.empty(fan_out, fan_in, dtype=dtype, device=device).normal_(0, 0.02).cpu()

    layer: nn.Module
    if settings.quantization == "nf4":
        statistics = {"compress_statistics": settings.double_quant, "quant_type": "nf4"}
        layer = bnb.nn.Linear4bit(
            fan_in, fan_out, bias, compute_dtype=dtype, device="meta", **statistics
        )
        layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, module=layer, **statistics)
    else:
        layer = bnb.nn.Linear8bitLt(
            fan_in, fan_out, bias, has_fp16_weights=False, threshold=6.0, device="meta"
        )
        layer.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)

    if bias:
        layer.bias = nn.Parameter(torch.zeros(fan_out, dtype=dtype), requires_grad=False)
    return layer.to(device)
