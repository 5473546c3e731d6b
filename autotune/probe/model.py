"""Builds the model of a probe: from its config with random weights on the device, adapters on and off, quantised base.

Speed and memory depend on shapes, so weights are read only where the user has them. Random ones are drawn from a normal
distribution: empty memory may hold NaN.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer

from autotune.config import TrainConfig
from autotune.probe.weigh import parameter_gib, tensor_gib
from autotune.result import ProbeRequest


@dataclass(slots=True)
class Resident:
    """A base model on the device, and the adapters a probe put on it. `key` says which requests it can serve."""

    key: tuple[Any, ...]
    base: PreTrainedModel
    model_gib: float  # weights and buffers of the base alone
    adapted: PeftModel | None = None

    def adapters_gib(self) -> float:
        if self.adapted is None:
            return 0.0
        return sum(tensor_gib(parameter) for parameter in self.adapted.parameters() if parameter.requires_grad)


def base_dtype(config: TrainConfig) -> torch.dtype:
    """Dtype of the base weights: full fine-tuning trains fp32 master weights unless it is pure bf16."""
    if config.precision == "bf16_pure" or (config.method == "lora" and config.precision == "bf16_mixed"):
        return torch.bfloat16
    if config.method == "lora" and config.precision == "fp16_mixed":
        return torch.float16
    return torch.float32


def resident_key(request: ProbeRequest) -> tuple[Any, ...]:
    """Requests with the same key can share one base model. Full fine-tuning changes it, and never shares."""
    config = request.config
    return (
        repr(sorted(request.model.items(), key=str)),
        request.weights,
        request.depth,
        base_dtype(config),
        config.quantization,
        config.double_quant,
        config.attention,
    )


def build(request: ProbeRequest, device: torch.device) -> Resident:
    """The base model on the device: no adapters, no gradients."""
    config, dtype = request.config, base_dtype(request.config)
    torch.manual_seed(request.seed)  # the same weights whatever this process did before
    kwargs = dict(request.model)
    model_config = AutoConfig.for_model(kwargs.pop("model_type"), **kwargs)
    model_config.use_cache = False
    if request.depth is not None:
        _truncate(model_config, request.depth)
    if request.weights is not None and request.depth is None:
        model = _load(request, model_config, dtype, device)
    elif config.quantization == "none":
        with torch.device(device), no_init_weights():
            model = _from_config(model_config, dtype, config.attention)
        _fill(model)
    else:
        with torch.device(device), no_init_weights(), _linears_on_meta():
            model = _from_config(model_config, dtype, config.attention)
        _quantize(model, config, dtype, device)
        _fill(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return Resident(key=resident_key(request), base=model, model_gib=parameter_gib(model))


def attach(resident: Resident, config: TrainConfig, device: torch.device) -> nn.Module:
    """What is trained: the base with LoRA adapters on every linear layer, or the base itself in full fine-tuning."""
    base = resident.base
    if config.method == "full":
        return base.requires_grad_(True)
    lora = LoraConfig(
        r=config.lora_rank or 1,
        lora_alpha=config.lora_alpha or 1,
        lora_dropout=0.0,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    with torch.device(device):
        resident.adapted = get_peft_model(base, lora, autocast_adapter_dtype=config.precision != "bf16_pure")
    return resident.adapted


def clean(resident: Resident) -> None:
    """Undo `attach` and what a Trainer leaves behind: checkpointing, hooks, compiled calls, a forward under autocast.

    Adapters are taken off, not kept for the next probe: accelerate marks what it prepared and would not set autocast up
    on it a second time. A benchmark showed it, as a probe 24 % slower than in a fresh process.
    """
    base = resident.base
    if resident.adapted is not None:
        resident.adapted.unload()
        resident.adapted = None
    set_checkpointing(base, None)
    if getattr(base, "_require_grads_hooks", None):
        base.disable_input_require_grads()
    for layer in decoder_layers(base):
        layer._compiled_call_impl = None
    for name in ("forward", "_original_forward", "_is_accelerate_prepared"):
        base.__dict__.pop(name, None)
    base.zero_grad(set_to_none=True)
    base.eval()


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, in order."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def set_checkpointing(base: PreTrainedModel, every: int | None) -> None:
    """Recompute each `every`-th decoder layer in the backward pass; None switches recomputation off."""
    if every is None:
        disable = getattr(base, "activation_checkpointing_disable", base.gradient_checkpointing_disable)
        disable()
        return
    settings = {"use_reentrant": False}
    if hasattr(base, "activation_checkpointing_enable"):  # transformers 5.23 and later
        base.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
    else:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
    for index, layer in enumerate(decoder_layers(base)):
        layer.gradient_checkpointing = index % every == 0


def _from_config(model_config: Any, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(model_config, dtype=dtype, attn_implementation=attention)
    return model


def _load(request: ProbeRequest, model_config: Any, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Real weights from a local directory; safetensors only, no remote code."""
    from transformers import BitsAndBytesConfig

    config = request.config
    quantized = None
    if config.quantization == "nf4":
        quantized = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_use_double_quant=config.double_quant,
        )
    elif config.quantization == "int8":
        quantized = BitsAndBytesConfig(load_in_8bit=True)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        request.weights,
        config=model_config,
        dtype=dtype,
        attn_implementation=config.attention,
        device_map={"": device},
        use_safetensors=True,
        trust_remote_code=False,
        **({} if quantized is None else {"quantization_config": quantized}),
    )
    return model


def _truncate(model_config: Any, depth: int) -> None:
    """Keep the first `depth` layers, and the layer pattern's first `depth` entries."""
    model_config.num_hidden_layers = depth
    for name in ("layer_types", "mlp_layer_types", "no_rope_layers"):
        if isinstance(getattr(model_config, name, None), list):
            setattr(model_config, name, getattr(model_config, name)[:depth])


def _fill(model: nn.Module) -> None:
    """Random values for matrices; norm weights keep their ones, biases are zeroed."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point():
                continue  # quantised already
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.02)
            elif name.endswith("bias"):
                parameter.zero_()


@contextmanager
def _linears_on_meta() -> Iterator[None]:
    """Linear layers made inside take no memory, so that a base too large for the card unquantised can be built."""
    original = nn.Linear.__init__

    def on_meta(self: nn.Linear, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **(kwargs | {"device": "meta"}))

    nn.Linear.__init__ = on_meta
    try:
        yield
    finally:
        nn.Linear.__init__ = original


def _quantize(model: PreTrainedModel, config: TrainConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Replace the linear layers. One of each shape is quantised and copied: 0.5 s instead of 41 on a 7B model."""
    head = model.get_output_embeddings()
    quantized: dict[tuple[int, int, bool], nn.Module] = {}
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear:
            continue
        if module is head:
            if module.weight.is_meta:
                module.to_empty(device=device)
            continue
        shape = (module.in_features, module.out_features, module.bias is not None)
        if shape not in quantized:
            quantized[shape] = _quantized_linear(shape, config, dtype, device)
            model.set_submodule(name, quantized[shape])
        else:
            model.set_submodule(name, copy.deepcopy(quantized[shape]))
    setattr(model, "is_loaded_in_4bit" if config.quantization == "nf4" else "is_loaded_in_8bit", True)


def _quantized_linear(
    shape: tuple[int, int, bool], config: TrainConfig, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    import bitsandbytes as bnb

    fan_in, fan_out, bias = shape
    weight = torch.empty(fan_out, fan_in, dtype=dtype, device="cpu" if device.type == "cpu" else device).normal_(
        0, 0.02
    )
    if config.quantization == "nf4":
        layer = bnb.nn.Linear4bit(
            fan_in,
            fan_out,
            bias,
            compute_dtype=dtype,
            compress_statistics=config.double_quant,
            quant_type="nf4",
            device="meta",
        )
        layer.weight = bnb.nn.Params4bit(
            weight.cpu(),
            requires_grad=False,
            compress_statistics=config.double_quant,
            quant_type="nf4",
            module=layer,
        )
    else:
        layer = bnb.nn.Linear8bitLt(fan_in, fan_out, bias, has_fp16_weights=False, threshold=6.0, device="meta")
        layer.weight = bnb.nn.Int8Params(weight.cpu(), requires_grad=False, has_fp16_weights=False)
    if bias:
        layer.bias = nn.Parameter(torch.zeros(fan_out, dtype=dtype, device=device), requires_grad=False)
    return layer.to(device)
