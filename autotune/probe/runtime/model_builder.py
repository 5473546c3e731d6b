"""Builds the model of a probe: from its config with random weights on the device, adapters on and off, quantised base.

Speed and memory depend on shapes, so weights are read only where the user has them. Random ones are drawn from a normal
distribution: empty memory may hold NaN.
"""

import copy
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from autotune.core.probe_types import ModelShape, ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.prediction.depth_extrapolation import repetition
from autotune.probe.accounting import parameter_gib, tensor_gib
from autotune.probe.runtime.chunked_loss import has_plain_head
from autotune.probe.runtime.patches import multiply_in_fp8, offload_checkpoints, register_cudnn_attention

# What Liger's kernels stand in for, where `clean` and `names_of` take them out again. Others go into dictionaries of
# transformers, or into torch itself.
UNDONE = {"rope", "rms_norm", "swiglu", "geglu", "cross_entropy", "fused_linear_cross_entropy", "model"}


@dataclass(slots=True)
class ResidentModel:
    """A base model on the device, and the adapters on it, which stay for the next probe that wants the same.

    `family` and `depth` say which requests it can serve.
    """

    family: tuple[Any, ...]
    depth: int | None
    base: PreTrainedModel
    model_gib: float  # weights and buffers of the base alone
    base_gib: float = 0.0  # what the base took of the device's memory
    adapted: PeftModel | None = None
    adapted_for: tuple[Any, ...] = ()

    def held_gib(self) -> float:
        """What is taken between probes."""
        return self.base_gib + self.adapters_gib()

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


def family_of(request: ProbeRequest) -> tuple[Any, ...]:
    """Requests of one family and depth can share a base model. Full fine-tuning changes it, and never shares."""
    config = request.config
    return (
        repr(sorted(request.model.items(), key=str)),
        request.weights,
        request.trainer,  # TRL changes adapters and configs
        base_dtype(config),
        config.quantization,
        config.double_quant,
        config.attention,
    )


def build(request: ProbeRequest, device: torch.device) -> ResidentModel:
    """The base model on the device: no adapters, no gradients."""
    config, dtype = request.config, base_dtype(request.config)
    register_cudnn_attention()
    torch.manual_seed(request.seed)  # the same weights whatever this process did before
    model_config = _config_of(request.model)
    if request.depth is not None:
        _truncate(model_config, request.depth)
    if request.weights is not None and request.depth is None:
        model = _load(request, model_config, dtype, device)
    elif config.quantization in ("none", "fp8"):
        with torch.device(device), no_init_weights():
            model = _from_config(model_config, dtype, config.attention)
        _fill(model)
    else:
        with torch.device(device), no_init_weights(), _linears_on_meta():
            model = _from_config(model_config, dtype, config.attention)
        _quantize(model, config, dtype, device)
        _fill(model)
    if config.quantization == "fp8":
        multiply_in_fp8(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return ResidentModel(family=family_of(request), depth=request.depth, base=model, model_gib=parameter_gib(model))


def attach(resident: ResidentModel, config: TrainConfig, device: torch.device, seed: int) -> nn.Module:
    """What is trained: the base with LoRA adapters on every linear layer, or the base itself in full fine-tuning.

    Adapters that are there already and fit are as good as new ones, and save a third of a second on a 7B model.
    """
    base = resident.base
    if config.method == "full":
        return base.requires_grad_(True)
    wanted = (config.lora_rank, config.lora_alpha, config.rslora, config.dora, config.precision == "bf16_pure")
    if resident.adapted is None or resident.adapted_for != wanted:
        _detach(resident)
        # DoRA's magnitudes are read off the weights: those that a probe has trained serve no other.
        resident.adapted, resident.adapted_for = _adapt(base, config, device), () if config.dora else wanted
    torch.manual_seed(seed)  # the same adapters whether they are new or not
    for module in resident.adapted.modules():
        if isinstance(module, LoraLayer):
            module.reset_lora_parameters("default", True)
    return resident.adapted


def _adapt(base: PreTrainedModel, config: TrainConfig, device: torch.device) -> PeftModel:
    lora = LoraConfig(
        r=config.lora_rank or 1,
        lora_alpha=config.lora_alpha or 1,
        lora_dropout=0.0,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        use_dora=config.dora,
        use_rslora=config.rslora,
    )
    with torch.device(device):
        adapted: PeftModel = get_peft_model(base, lora, autocast_adapter_dtype=config.precision != "bf16_pure")
    return adapted


def _detach(resident: ResidentModel) -> None:
    if resident.adapted is not None:
        resident.adapted.unload()
        resident.adapted = None


def clean(resident: ResidentModel) -> None:
    """Undo what a Trainer leaves behind: checkpointing, hooks, compiled calls, gradients, a forward under autocast.

    accelerate marks a model that it prepared and would not set autocast up on it a second time, which a benchmark once
    showed as a probe 24 % slower than in a fresh process: the mark goes too, from the base and from its adapters.
    """
    base = resident.base
    set_checkpointing(base, None)
    if getattr(base, "_require_grads_hooks", None):
        base.disable_input_require_grads()
    # With checkpointing transformers and PEFT each have the embedding's output require gradients, and only the last
    # hook is remembered: the other would go on into probes without checkpointing.
    base.get_input_embeddings()._forward_hooks.clear()
    for module in base.modules():  # a loss in chunks, autocast, TRL's loss and Liger's kernels stand in for methods
        for name in ("forward", "extra_repr", "_get_name"):
            module.__dict__.pop(name, None)
    for layer in decoder_layers(base):
        layer._compiled_call_impl = None
    for model in (base, resident.adapted):
        for name in ("forward", "_original_forward", "_is_accelerate_prepared"):
            if model is not None:
                model.__dict__.pop(name, None)
    base.zero_grad(set_to_none=True)
    base.eval()


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, in order."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def set_checkpointing(base: PreTrainedModel, every: int | None, offload: bool = False) -> None:
    """Recompute each `every`-th decoder layer in the backward pass; None switches recomputation off.

    With `offload` what a layer is recomputed from waits in the host's memory.
    """
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
        if offload:
            offload_checkpoints(layer)


def _from_config(model_config: Any, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(model_config, dtype=dtype, attn_implementation=attention)
    model.tie_weights()  # `no_init_weights` leaves it out, and a head of its own would count twice
    return model


def _load(request: ProbeRequest, model_config: Any, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Real weights from a local directory; safetensors only, no remote code."""
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


def _config_of(model: dict[str, Any]) -> Any:
    kwargs = dict(model)
    model_config = AutoConfig.for_model(kwargs.pop("model_type"), **kwargs)
    model_config.use_cache = False
    return model_config


def _layer_lists(model_config: Any) -> dict[str, list[Any]]:
    """What the config says layer by layer: attention types, mixture layers, layers without positions."""
    length = model_config.num_hidden_layers
    return {
        name: value for name, value in vars(model_config).items() if isinstance(value, list) and len(value) == length
    }


def _truncate(model_config: Any, depth: int) -> None:
    """Keep the first `depth` layers, and the first `depth` entries of what is said layer by layer."""
    lists = _layer_lists(model_config)
    model_config.num_hidden_layers = depth
    for name, values in lists.items():
        setattr(model_config, name, values[:depth])


def describe(model: dict[str, Any]) -> ModelShape:
    """How the layers repeat, and what adapters and quantisation do not reach. Takes no memory."""
    model_config = _config_of(model)
    with torch.device("meta"), no_init_weights():
        built = _from_config(model_config, torch.bfloat16, "eager")
    lists = _layer_lists(model_config).values()
    said = [values for values in lists if values != list(range(len(values)))]  # that one says which, not what
    kinds: list[Any] = []
    for index, layer in enumerate(decoder_layers(built)):
        shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
        kinds.append((type(layer).__name__, shapes, [str(values[index]) for values in said]))
    linear = {id(module.weight) for module in built.modules() if isinstance(module, nn.Linear | Conv1D)}
    matrices = [one for layer in decoder_layers(built) for one in layer.parameters() if one.ndim > 1]
    total = sum(parameter.numel() for parameter in built.parameters())
    try:
        plain_head = has_plain_head(built)
    except Exception:
        plain_head = False
    try:
        adapted: nn.Module = _adapt(built, TrainConfig(), torch.device("meta"))
    except ValueError:  # adapters on every linear layer are not for every family
        adapted = built
    wrappers = [module for module in adapted.modules() if isinstance(module, ParamWrapper)]
    wrapped = {id(getattr(wrapper.get_base_layer(), wrapper.parameter_name)) for wrapper in wrappers}
    prefix, period = repetition(kinds)
    return ModelShape(
        num_layers=len(kinds),
        prefix=prefix,
        period=period,
        unquantized=sum(one.numel() for one in matrices if id(one) not in linear) / total,
        untrained=sum(one.numel() for one in matrices if id(one) not in linear | wrapped) / total,
        parametrized=bool(wrapped),
        plain_head=plain_head,
        liger=_liger_knows(str(model["model_type"])),
    )


def _liger_knows(model_type: str) -> bool:
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError:  # of Triton too, without a GPU
        return False
    apply = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)
    return apply is not None and set(inspect.signature(apply).parameters) <= UNDONE


def names_of(base: PreTrainedModel) -> dict[str, Any]:
    """The names that the code of this model is made of, in which Liger puts its own."""
    return vars(sys.modules[type(base).__module__])


def _fill(model: nn.Module) -> None:
    """Random values for matrices; norm weights keep their ones, biases and other vectors are zeroed."""
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):  # torch's own initialisation was skipped: its memory is anybody's
            module.reset_parameters()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point():
                continue  # quantised already
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.02)
            elif not name.endswith("weight"):
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
            model.set_submodule(name, _copy(quantized[shape]))
    setattr(model, "is_loaded_in_4bit" if config.quantization == "nf4" else "is_loaded_in_8bit", True)


def _copy(layer: nn.Module) -> nn.Module:
    """Another layer like this one. A copied Linear4bit holds the statistics of its weight twice, 1/16 byte a weight."""
    copied = copy.deepcopy(layer)
    if hasattr(copied, "quant_state"):
        copied.quant_state = copied.weight.quant_state
        copied.weight.module = copied
    return copied


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
