"""Finds how a model's layers repeat, to choose the numbers of layers for probes of few layers.

The model is built on torch's meta device, without memory for its weights.
"""

import inspect
import re
from typing import Any

import torch
import transformers
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    PreTrainedConfig,
)
from transformers.initialization import no_init_weights
from transformers.pytorch_utils import Conv1D

from autotune.core.images import sees_images
from autotune.core.layer_pattern import repetition
from autotune.core.probe_types import ModelShape
from autotune.core.train_config import TrainConfig
from autotune.probe.model_settings import model_settings
from autotune.trainer import tiles
from autotune.trainer.chunked_loss import has_plain_head
from autotune.trainer.grouped_lora import uses_interface
from autotune.trainer.model_builder import config_of, decoder_layers, from_config, trainable_model
from autotune.trainer.settings import is_expert_parameter

PYTHON_TEXT = re.compile(
    r"\b[A-Z]\w*(Error|Exception)\b|NoneType|not subscriptable|has no attribute"
    r"|positional arguments? but|unsupported operand"
)
SHAPE_ONLY = TrainConfig(precision="bf16_pure", attention="eager")
# The Liger kernels that `resident` can remove from a model. Other Liger kernels replace names in
# transformers or torch, which `resident` does not restore.
REVERSIBLE_KERNELS = {
    "rope",
    "rms_norm",
    "swiglu",
    "geglu",
    "cross_entropy",
    "fused_linear_cross_entropy",
    "model",
}


def describe(model: dict[str, Any]) -> ModelShape:
    """Describe a model, its layers and the features that it supports, from its transformers config.

    Raises ValueError if transformers has neither a causal language model of this type nor a model
    of text and images or sound.
    """
    config = config_of(model)
    # Iterating over a mapping would import all of transformers' models, which takes 1.5 seconds.
    mappings = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING)
    if not any(type(config) in mapping for mapping in mappings):
        raise ValueError(f"transformers has no causal language model of type {config.model_type}")

    built = _build(config)
    layers = decoder_layers(built)
    if len(layers) == config.get_text_config().num_hidden_layers:
        prefix, period = repetition(_kinds(layers, config.get_text_config()))
    else:  # num_hidden_layers does not set the number of layers
        prefix, period = len(layers), None

    named = [item for layer in layers for item in layer.named_modules()]
    linear_layers = {
        path: module for path, module in named if isinstance(module, nn.Linear | Conv1D)
    }
    experts = {
        f"{path}.{name}"
        for path, module in named
        if uses_interface(module)
        for name, _ in module.named_parameters(recurse=False)
        if is_expert_parameter(f"{path}.{name}")
    }
    linear = {
        id(module.weight) for module in built.modules() if isinstance(module, nn.Linear | Conv1D)
    }
    matrices = [
        parameter for layer in layers for parameter in layer.parameters() if parameter.ndim > 1
    ]
    num_parameters = sum(parameter.numel() for parameter in built.parameters())

    try:
        plain_head = has_plain_head(built)
    except Exception:  # some models' forward pass needs more arguments than this check passes
        plain_head = False
    wrapped: set[int] = set()
    no_adapters: str | None = None
    try:
        wrapped = _wrapped_parameters(built)
    except ValueError as error:
        no_adapters = str(error).partition(". ")[0]  # the first sentence of the error

    def share_outside(covered: set[int]) -> float:
        outside = sum(int(matrix.numel()) for matrix in matrices if id(matrix) not in covered)
        return outside / int(num_parameters)

    return ModelShape(
        num_layers=len(layers),
        prefix=prefix,
        period=period,
        unquantized=share_outside(linear),
        untrained=share_outside(linear | wrapped),
        parametrized=bool(wrapped),
        experts=tuple(sorted(experts)),
        plain_head=plain_head,
        liger=_liger_supports(config.get_text_config().model_type),
        sdpa=built._supports_sdpa,
        flex=built._supports_flex_attn,
        no_adapters=no_adapters,
        linear_layers=tuple(sorted(linear_layers)),
        has_labels=type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        sees_images=sees_images(model),
        tileable=all(map(tiles.is_plain, layers)),
    )


def _build(config: Any) -> Any:
    """Build the model without memory for its weights.

    Raises ValueError, with a message for the user, if transformers cannot build a model from the
    config.
    """
    try:
        with torch.device("meta"), no_init_weights():
            return from_config(
                config, model_settings(SHAPE_ONLY, config.get_text_config().model_type)
            )
    except ImportError as error:
        needed = re.search(r"requires the (\S+) library", str(error))
        if needed is None:
            raise
        package = needed[1]
        reason = f"transformers needs {package} for a {config.model_type}: pip install {package}"
    except (MemoryError, SystemError):  # the config describes a model that is too large
        raise
    except Exception as error:  # an error in transformers' own code
        reason = (
            f"transformers {transformers.__version__} cannot build a {config.model_type} from this"
            f" config{cause(error, config)}"
        )
    raise ValueError(reason)


def cause(error: Exception, config: Any) -> str:
    """Return, in brackets, the cause of an error that transformers' code raised, or "".

    The cause is the error's text. If the text makes sense only to Python programmers, a missing
    value is the likely cause. The result then names the config's keys without a value.
    """
    text = " ".join(str(error).split())[:200]
    if not PYTHON_TEXT.search(text):
        return f" ({text})" if text else ""

    common = vars(PreTrainedConfig())
    parts = [] if config is None else [config, config.get_text_config()]
    unset = {
        key
        for part in parts
        for key, value in vars(part).items()
        if value is None and key not in common and "_token_" not in key
    }
    return f" (the config has no value for {' or '.join(sorted(unset))})" if unset else ""


def truncate(config: Any, depth: int) -> None:
    """Reduce a transformers config, and its lists with an entry for each layer, to `depth` layers.

    A vision tower is not truncated, because times and peaks are extrapolated only in the depth of
    the language model.
    """
    config = config.get_text_config()
    lists = _lists_by_layer(config)
    # The last `sharing` layers use the keys and values of earlier layers.
    if sharing := getattr(config, "num_kv_shared_layers", 0):
        config.num_kv_shared_layers = max(0, depth - (config.num_hidden_layers - sharing))
    config.num_hidden_layers = depth
    for name, values in lists.items():
        setattr(config, name, values[:depth])


def _lists_by_layer(config: Any) -> dict[str, list[Any]]:
    """The lists in a config that have one entry for each layer.

    Examples are lists of attention types, of MoE layers, and of layers without positional encoding.
    """
    length = config.num_hidden_layers
    return {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, list) and len(value) == length
    }


def _kinds(layers: list[nn.Module], config: Any) -> list[Any]:
    """Return for each layer the facts that distinguish it from layers of other kinds.

    These facts are the layer's class, the shapes of its parameters, and its entries in the config's
    lists.
    """
    indices = list(range(config.num_hidden_layers))
    lists = [values for values in _lists_by_layer(config).values() if values != indices]
    kinds = []
    for index, layer in enumerate(layers):
        shapes = tuple(
            (name, tuple(parameter.shape)) for name, parameter in layer.named_parameters()
        )
        kinds.append((type(layer).__name__, shapes, [str(values[index]) for values in lists]))
    return kinds


def _wrapped_parameters(built: nn.Module) -> set[int]:
    """The ids of parameters outside linear layers that PEFT adapts by wrapping them.

    Raises ValueError if PEFT cannot add adapters to all linear layers.
    """
    adapted = trainable_model(
        built,
        model_settings(TrainConfig(), built.config.get_text_config().model_type),
        torch.device("meta"),
    )
    for module in adapted.modules():
        base = module.get_base_layer() if isinstance(module, LoraLayer) else None
        if isinstance(base, nn.Linear) and not _returns_its_product(base):
            raise ValueError(
                f"PEFT cannot add adapters to {type(base).__name__}, which is not a plain linear"
                " layer"
            )
    wrappers = [module for module in adapted.modules() if isinstance(module, ParamWrapper)]
    return {id(getattr(wrapper.get_base_layer(), wrapper.parameter_name)) for wrapper in wrappers}


def _returns_its_product(layer: nn.Linear) -> bool:
    """Return whether the layer returns one tensor, to which PEFT adds the adapter's product.

    The routers of some mixtures of experts are linear layers that return several tensors.
    """
    if type(layer).forward is nn.Linear.forward:
        return True
    returned = layer(layer.weight.new_empty(1, layer.in_features))
    return isinstance(returned, torch.Tensor) and returned.shape == (1, layer.out_features)


def _liger_supports(model_type: str) -> bool:
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError:  # Liger is not installed, or lacks Triton, as on machines without a GPU
        return False
    apply = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)
    return apply is not None and set(inspect.signature(apply).parameters) <= REVERSIBLE_KERNELS
