"""What `lora_targets` and `modules_to_save` name are modules of real models, and are what is
trained.
"""

import re
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from peft import LoraConfig, OFTConfig, PeftConfig, get_peft_model
from torch import nn
from transformers.initialization import no_init_weights
from transformers.pytorch_utils import Conv1D

from autotune.catalog import list_models
from autotune.core.lora_targets import saved_modules, target_modules
from autotune.core.train_config import TrainConfig
from autotune.probe.model_settings import model_settings
from autotune.probe.model_shape import truncate
from autotune.probe.resident import ResidentModel, attach
from autotune.trainer.model_builder import config_of, decoder_layers, from_config, trainable_model
from autotune.trainer.settings import ModelSettings

pytestmark = [
    pytest.mark.probe,
    # PEFT 0.21 asks it
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

MODELS = {model.text_type: model.config for model in list_models()}  # one of each type
ATTENTION = re.compile(
    r"(^|\.)(self_attn|cross_attn|attn|attention|self_attention|mixer(?=\.[qkvo]_proj))\.(?!(.*\.)?indexer\.)"
)
TIMM = pytest.mark.skipif(
    find_spec("timm") is None, reason="the vision tower of Gemma 3n is a model of timm"
)
TYPES = [pytest.param(name, marks=TIMM) if name == "gemma3n_text" else name for name in MODELS]
DEPTH = 8  # of hybrids one layer in four or more has attention


def plain(config: Any) -> ModelSettings:
    """Settings of a model in bf16 that is not trained."""
    return model_settings(TrainConfig(precision="bf16_pure", attention="eager"), config.model_type)


def linear_layers(model: dict[str, Any]) -> set[str]:
    """Where the linear layers of a model's first layers are, inside a layer."""
    config = config_of(model)
    truncate(config, min(DEPTH, config.get_text_config().num_hidden_layers))
    with torch.device("meta"), no_init_weights():
        layers = decoder_layers(from_config(config, plain(config)))
    modules = (named for layer in layers for named in layer.named_modules())
    linear = {path: module for path, module in modules if isinstance(module, nn.Linear | Conv1D)}
    # no adapter fits
    return {path for path, module in linear.items() if "Grouped" not in type(module).__name__}


def matched(names: list[str], paths: set[str]) -> set[str]:
    """The paths that PEFT would match."""
    return {path for path in paths for name in names if path == name or path.endswith(f".{name}")}


@pytest.mark.parametrize("model_type", TYPES)
def test_the_names_are_those_of_all_linear_layers_of_attention(model_type: str) -> None:
    linear = linear_layers(MODELS[model_type])
    of_attention = {path for path in linear if ATTENTION.search(path)}
    attention, q_v = (target_modules(model_type, targets) or [] for targets in ("attention", "q_v"))
    assert matched(attention, linear) == of_attention and bool(attention) is bool(of_attention)
    chosen = matched(q_v, linear)
    assert chosen <= of_attention and bool(chosen) is bool(of_attention)
    assert not any(path.endswith(("o_proj", "k_proj", "dense")) for path in chosen)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")  # PEFT, for Conv1D
def test_adapters_are_where_the_configuration_has_them() -> None:
    config = config_of(MODELS["gpt2"])
    for targets, paths in (
        ("q_v", {"c_attn"}),
        ("attention", {"c_attn", "c_proj"}),
        ("mlp.c_fc", {"c_fc"}),
    ):
        with torch.device("meta"), no_init_weights():
            built = from_config(config, plain(config))
        model = trainable_model(
            built, model_settings(TrainConfig(lora_targets=targets), "gpt2"), torch.device("meta")
        )
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert {re.search(r"(\w+)\.lora_[AB]", name)[1] for name in trained} == paths  # type: ignore[index]


@pytest.mark.parametrize("model_type", TYPES)
def test_embedding_and_head_have_these_names(model_type: str) -> None:
    config = config_of(MODELS[model_type])
    truncate(config, min(DEPTH, config.get_text_config().num_hidden_layers))
    with torch.device("meta"), no_init_weights():
        model = from_config(config, plain(config))
    names = {module: path.rpartition(".")[2] for path, module in model.named_modules()}
    ends = [names[model.get_input_embeddings()], names[model.get_output_embeddings()]]
    assert ends == saved_modules(model_type, "embedding_and_head")


@pytest.mark.parametrize("saved", ["none", "embedding", "head", "embedding_and_head"])
def test_what_is_trained_whole_is_a_copy(saved: str) -> None:
    """Its original stays in the base, which a warm worker keeps for the next probe."""
    sizes = {
        "vocab_size": 64,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    config = config_of(
        MODELS["llama"] | sizes | {"num_key_value_heads": 2, "tie_word_embeddings": False}
    )
    with no_init_weights():
        base = from_config(config, plain(config)).requires_grad_(False)
    before = {path: id(module) for path, module in base.named_modules()}
    resident = ResidentModel(family=(), base=base, model_gib=0.0)
    attach(resident, TrainConfig(), torch.device("cpu"), 0)  # adapters that another probe left
    adapted = attach(resident, TrainConfig(modules_to_save=saved), torch.device("cpu"), 0)
    whole = {
        name: p for name, p in adapted.named_parameters() if p.requires_grad and "lora_" not in name
    }
    wanted = saved_modules("llama", saved) or []
    assert {name.split(".")[-4] for name in whole} == set(wanted)
    assert all(
        parameter.dtype == torch.bfloat16 and parameter.numel() == 64 * 16
        for parameter in whole.values()
    )
    attach(resident, TrainConfig(lora_rank=4), torch.device("cpu"), 0)
    attach(resident, TrainConfig(method="full"), torch.device("cpu"), 0)
    resident.peft_model.unload()
    assert {path: id(module) for path, module in base.named_modules()} == before


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT, of tied weights and of Conv1D
def test_a_module_that_is_not_there_is_refused() -> None:
    settings = replace(model_settings(TrainConfig(), "gpt2"), modules_to_save=["embed_tokens"])
    config = config_of(MODELS["gpt2"])
    with torch.device("meta"), no_init_weights():
        base = from_config(config, plain(config))
    with pytest.raises(
        ValueError, match="modules_to_save: GPT2LMHeadModel has no module embed_tokens"
    ):
        trainable_model(base, settings, torch.device("meta"))


def saved_and_trained(adapters: PeftConfig) -> tuple[int, int]:
    """The bytes that a forward pass of a tiny Llama saves in mixed precision, and how many
    parameters are trained.
    """
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}
    config = config_of(MODELS["llama"] | sizes | heads)
    model = get_peft_model(from_config(config, plain(config)), adapters)
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.ones(2, 64, dtype=torch.long)).logits.sum()
    loss.backward()
    return sum(saved.values()), sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_oft_needs_more_than_lora_of_an_eighth_of_its_block() -> None:
    """As `check` counts the OFT of LLaMA-Factory."""
    layers = {"target_modules": "all-linear"}
    oft = saved_and_trained(OFTConfig(oft_block_size=32, module_dropout=0.0, **layers))
    lora = saved_and_trained(LoraConfig(r=4, **layers))
    assert oft[0] > lora[0] and oft[1] > lora[1]
