"""The model that is trained: random weights that are numbers, what is frozen, what is recomputed,
no foreign code.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autotune.core.train_config import TrainConfig
from autotune.probe.model_settings import model_settings
from autotune.trainer import model_builder, patches
from autotune.trainer.float8 import Float8Linear
from autotune.trainer.settings import ModelSettings
from tests.helpers.factories import TINY

# PEFT asks with a name from before transformers 5.23
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

LLAMA = TINY | {"model_type": "llama", "num_hidden_layers": 4}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "vocab_size": 128,
    "n_positions": 64,
}
CPU = torch.device("cpu")
CANARY = "open({path!r}, 'w')\n"


def settings(**knobs: Any) -> ModelSettings:
    return model_settings(TrainConfig(**({"precision": "fp32"} | knobs)), "llama")


def built(shape: dict[str, Any], **knobs: Any) -> Any:
    return model_builder.build(model_builder.config_of(shape), settings(**knobs), CPU)


@pytest.mark.parametrize(
    "shape", [LLAMA, LLAMA | {"tie_word_embeddings": True}, GPT2], ids=["llama", "tied", "gpt2"]
)
def test_random_weights_are_drawn_as_before_a_training(shape: dict[str, Any]) -> None:
    """Matrices as models begin with them, norms at one, biases at zero; nothing is to be trained
    yet.
    """
    model = built(shape)
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            assert (
                weight.std().item() == pytest.approx(0.02, rel=0.15)
                and abs(weight.mean().item()) < 0.005
            ), name
        else:
            assert torch.equal(weight, torch.full_like(weight, float(name.endswith("weight")))), (
                name
            )
        assert not weight.requires_grad and weight.dtype == torch.float32
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied is (shape.get("tie_word_embeddings", shape is GPT2))
    assert model.config.use_cache is False and model.config.name_or_path == ""


def test_the_base_has_the_asked_type_and_attention() -> None:
    model = built(LLAMA, precision="bf16_pure", attention="eager")
    assert model.dtype == torch.bfloat16 and model.config._attn_implementation == "eager"


def test_adapters_are_on_every_linear_layer_but_the_head() -> None:
    pure = {"precision": "bf16_pure", "lora_rank": 4}
    model = model_builder.trainable_model(built(LLAMA, **pure), settings(**pure), CPU)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    # A pair of matrices for q, k, v, o, gate, up and down of each layer: rank x (inputs + outputs).
    sides = [(32, 32), (32, 16), (32, 16), (32, 32), (32, 64), (32, 64), (64, 32)]
    assert sum(weight.numel() for weight in trained) == 4 * 4 * sum(map(sum, sides))
    assert {weight.dtype for weight in trained} == {torch.bfloat16}
    mixed = model_builder.trainable_model(
        built(LLAMA, precision="bf16_mixed"), settings(precision="bf16_mixed"), CPU
    )
    assert {weight.dtype for weight in mixed.parameters() if weight.requires_grad} == {
        torch.float32
    }
    full = model_builder.trainable_model(built(LLAMA, method="full"), settings(method="full"), CPU)
    assert all(weight.requires_grad for weight in full.parameters())


@pytest.mark.parametrize(
    ("checkpointing", "recomputed"),
    [
        ("none", [False, False, False, False]),
        ("full", [True, True, True, True]),
        ("every_2", [True, False, True, False]),
        ("every_3", [True, False, False, True]),
    ],
)
def test_which_layers_are_recomputed(checkpointing: str, recomputed: list[bool]) -> None:
    base = built(LLAMA)
    model_builder.set_checkpointing(base, settings(checkpointing="full"))
    model_builder.set_checkpointing(base, settings(checkpointing=checkpointing))
    layers = model_builder.decoder_layers(base)
    assert [layer.gradient_checkpointing for layer in layers] == recomputed
    for layer in layers if checkpointing != "none" else ():
        assert layer._gradient_checkpointing_func.keywords == {"use_reentrant": False}
    model_builder.stop_checkpointing(base)
    assert not any(layer.gradient_checkpointing for layer in layers)


@pytest.mark.parametrize("checkpointing", ["none", "full", "every_3", "offload"])
def test_recomputing_changes_no_gradient(checkpointing: str) -> None:
    torch.manual_seed(0)
    base = built(LLAMA).requires_grad_(True).train()
    rows = torch.arange(16).reshape(2, 8)

    def gradients() -> list[torch.Tensor]:
        base.zero_grad()
        base(input_ids=rows, labels=rows).loss.backward()
        return [weight.grad.clone() for weight in base.parameters()]

    expected = gradients()
    ran: list[bool] = []
    base.model.layers[0].mlp.register_forward_pre_hook(lambda *_: ran.append(True))
    model_builder.set_checkpointing(base, settings(checkpointing=checkpointing))
    assert all(torch.equal(*pair) for pair in zip(gradients(), expected, strict=True))
    assert len(ran) == (1 if checkpointing == "none" else 2)


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_a_quantized_base_keeps_head_and_vectors(quantization: str) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    shape = LLAMA | {"attention_bias": True, "hidden_size": 64}
    model = built(shape, quantization=quantization, precision="bf16_mixed")
    kind = bnb.nn.Linear4bit if quantization == "nf4" else bnb.nn.Linear8bitLt
    layers = [module for module in model.modules() if isinstance(module, kind)]
    assert len(layers) == 4 * 7 and not any(weight.is_meta for weight in model.parameters())
    assert len({layer.weight.data_ptr() for layer in layers}) == 4 * 7, (
        "no two layers share their weights"
    )
    assert type(model.lm_head) is nn.Linear and model.lm_head.weight.std().item() == pytest.approx(
        0.02, rel=0.15
    )
    assert (
        getattr(model, "is_loaded_in_4bit", False),
        getattr(model, "is_loaded_in_8bit", False),
    ) == (
        quantization == "nf4",
        quantization == "int8",
    )
    for layer in model.model.layers:
        bias = layer.self_attn.q_proj.bias
        assert bias.dtype == torch.bfloat16 and not bias.any() and not bias.requires_grad
    assert nn.Linear(2, 2).weight.device == CPU, "other layers are made as ever"
    if quantization == "nf4":
        for layer in layers:
            assert layer.quant_state is layer.weight.quant_state and layer.weight.module is layer
            assert layer.compute_dtype == torch.bfloat16 and layer.weight.quant_type == "nf4"
            assert layer.weight.quant_state.dtype == torch.bfloat16
            values = bnb.functional.dequantize_4bit(
                layer.weight.data, layer.weight.quant_state
            ).float()
            assert values.std().item() == pytest.approx(0.02, rel=0.2)
    else:
        assert {layer.state.threshold for layer in layers} == {6.0}
        assert not any(
            layer.state.has_fp16_weights or layer.weight.has_fp16_weights for layer in layers
        )


@pytest.mark.parametrize("double_quant", [True, False])
def test_the_statistics_of_nf4_are_quantized_on_request(double_quant: bool) -> None:
    pytest.importorskip("bitsandbytes")
    model = built(LLAMA, quantization="nf4", double_quant=double_quant)
    assert model.model.layers[0].mlp.up_proj.weight.quant_state.nested is double_quant


def test_fp8_is_for_layers_whose_sides_are_multiples_of_16_but_not_the_head() -> None:
    shape = LLAMA | {"intermediate_size": 72}
    model, plain = built(shape, quantization="fp8"), built(shape)
    converted = {
        name
        for name, module in model.model.layers[0].named_modules()
        if type(module) is Float8Linear
    }
    assert converted == {f"self_attn.{one}_proj" for one in "qkvo"}  # 72 is none
    assert type(model.lm_head) is nn.Linear and type(model.model.layers[0].mlp.up_proj) is nn.Linear
    assert not any(weight.is_meta or weight.requires_grad for weight in model.parameters())
    assert not plain.model.layers[0].mlp.up_proj.weight.is_meta


@pytest.mark.parametrize(
    "more", [{}, {"tie_word_embeddings": True}, {"attention_bias": True}], ids=str
)
def test_random_weights_are_the_same_in_8_bits(more: dict[str, Any]) -> None:
    """So that losses and gradients of both can be compared."""
    torch.manual_seed(0)
    plain = built(LLAMA | more)
    torch.manual_seed(0)
    model = built(LLAMA | more, quantization="fp8")
    for (name, expected), found in zip(plain.named_parameters(), model.parameters(), strict=True):
        if found.dtype is not torch.float8_e4m3fn:
            assert torch.equal(found, expected), name
        else:
            weight = model.get_submodule(name.removesuffix(".weight")).weight
            assert (weight - expected).norm() < 0.04 * expected.norm(), name


def test_real_weights_are_kept_in_8_bits_and_the_model_is_on_its_device(tmp_path: Path) -> None:
    saved = built(LLAMA, precision="bf16_pure")
    saved.save_pretrained(tmp_path)
    wanted = settings(precision="bf16_pure", quantization="fp8")
    model: Any = model_builder.load(str(tmp_path), wanted, CPU)
    found, expected = (one.model.layers[3].mlp.down_proj.weight for one in (model, saved))
    assert found.dtype == torch.bfloat16 and (found - expected).norm() < 0.04 * expected.norm()
    assert torch.equal(model.lm_head.weight, saved.lm_head.weight)
    # Trainer takes a model with such a map to be shared out among devices.
    assert getattr(model, "hf_device_map", None) is None and not any(
        one.requires_grad for one in model.parameters()
    )
    elsewhere = model_builder.load(str(tmp_path), wanted, torch.device("meta"))
    assert all(one.is_meta for one in (*elsewhere.parameters(), *elsewhere.buffers()))


@pytest.mark.parametrize("model_type", ["llama", "strange"])
def test_no_code_of_a_model_is_run_and_nobody_is_asked(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for a known family nor for one that only the code in the directory could build."""
    from transformers import AutoConfig

    monkeypatch.setattr("builtins.input", lambda *_: "y")
    built(LLAMA).save_pretrained(tmp_path)
    (tmp_path / "evil.py").write_text(CANARY.format(path=str(tmp_path / "CANARY")))
    code = {
        "AutoConfig": "evil.Config",
        "AutoModelForCausalLM": "evil.Model",
        "AutoTokenizer": ["evil.T", None],
    }
    config = json.loads((tmp_path / "config.json").read_text()) | {
        "model_type": model_type,
        "auto_map": code,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    if model_type == "llama":
        assert model_builder.load(str(tmp_path), settings(), CPU).config.model_type == "llama"
        assert model_builder.config_of(config).model_type == "llama"
    else:
        with pytest.raises(ValueError, match="trust_remote_code"):
            model_builder.load(str(tmp_path), settings(), CPU)
        with pytest.raises(ValueError, match="trust_remote_code"):
            model_builder.config_of(config)
        own = AutoConfig.for_model(**LLAMA)
        own.auto_map = code
        model_builder.load(str(tmp_path), settings(), CPU, config=own)
    assert not (tmp_path / "CANARY").exists()


def test_real_weights_are_loaded_frozen_and_as_asked(tmp_path: Path) -> None:
    saved = built(LLAMA, precision="bf16_pure")
    saved.save_pretrained(tmp_path)
    model = model_builder.load(
        str(tmp_path), settings(precision="bf16_pure", attention="eager"), CPU
    )
    assert all(
        torch.equal(one, other)
        for one, other in zip(model.parameters(), saved.parameters(), strict=True)
    )
    assert model.dtype == torch.bfloat16 and model.config._attn_implementation == "eager"
    assert not model.config.use_cache and not any(
        weight.requires_grad for weight in model.parameters()
    )
    other = model_builder.config_of(LLAMA | {"num_hidden_layers": 2})
    assert (
        len(
            model_builder.decoder_layers(
                model_builder.load(str(tmp_path), settings(), CPU, config=other)
            )
        )
        == 2
    )
    (tmp_path / "model.safetensors").unlink()
    torch.save(saved.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        model_builder.load(str(tmp_path), settings(), CPU)


def test_cudnn_attention_is_known_by_its_name() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    built(LLAMA, attention="sdpa_cudnn")
    assert (
        "sdpa_cudnn" in AttentionInterface() and AttentionMaskInterface()["sdpa_cudnn"] is sdpa_mask
    )


def test_adapters_beside_the_weights_are_not_trained_upon(tmp_path: Path) -> None:
    base = built(LLAMA)
    base.save_pretrained(tmp_path)
    adapted = model_builder.trainable_model(base, settings(lora_rank=4), CPU)
    adapted.save_pretrained(tmp_path / "adapters")
    for file in (tmp_path / "adapters").glob("adapter_*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ValueError, match=r"adapter_config\.json"):
        model_builder.load(str(tmp_path), settings(), CPU)


def test_what_is_offloaded_is_what_a_layer_is_recomputed_from() -> None:
    base = built(LLAMA)
    for checkpointing, offloaded in (("full", False), ("offload", True), ("every_2", False)):
        model_builder.set_checkpointing(base, settings(checkpointing=checkpointing))
        for layer in model_builder.decoder_layers(base):
            assert (
                layer._gradient_checkpointing_func.func is patches._checkpoint_on_host
            ) is offloaded


def test_older_transformers_recompute_by_another_name() -> None:
    asked: list[Any] = []

    class Older(nn.Module):
        def gradient_checkpointing_enable(self, **options: Any) -> None:
            asked.append(options)

        def gradient_checkpointing_disable(self) -> None:
            asked.append("disable")

    older: Any = Older()
    model_builder.set_checkpointing(older, settings(checkpointing="full"))
    model_builder.set_checkpointing(older, settings(checkpointing="none"))
    assert asked == [{"gradient_checkpointing_kwargs": {"use_reentrant": False}}, "disable"]


@pytest.mark.parametrize(
    ("knobs", "more"),
    [
        ({}, {}),
        (
            {"quantization": "nf4", "precision": "bf16_mixed"},
            {
                "quantization_config": (
                    "load_in_4bit",
                    "bnb_4bit_quant_type",
                    "bnb_4bit_use_double_quant",
                )
            },
        ),
    ],
    ids=str,
)
def test_weights_are_loaded_onto_the_device_and_from_safetensors_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, knobs: dict[str, Any], more: dict[str, Any]
) -> None:
    asked: list[Any] = []
    done: list[str] = []
    model: Any = nn.Module()
    model.config = SimpleNamespace(use_cache=True, model_type="llama")
    loader = SimpleNamespace(
        from_pretrained=lambda source, **how: asked.append((source, how)) or model
    )
    monkeypatch.setattr(model_builder, "AutoModelForCausalLM", loader)
    monkeypatch.setattr(model_builder, "BitsAndBytesConfig", lambda **arguments: arguments)
    monkeypatch.setattr(model_builder, "register_attentions", lambda: done.append("register"))
    device = torch.device("meta")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert model_builder.load(str(tmp_path), settings(**knobs), device) is model and done == [
        "register"
    ]
    ((source, how),) = asked
    assert source == str(tmp_path) and not model.config.use_cache
    assert set(how.pop("quantization_config", {})) >= set(more.get("quantization_config", ()))
    assert how == {
        "dtype": torch.bfloat16 if knobs else torch.float32,
        "attn_implementation": "sdpa",
        "device_map": {"": device},
        "use_safetensors": True,
        "trust_remote_code": False,
    }


def test_a_model_is_built_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(model_builder, "register_attentions", lambda: done.append("register"))
    model = model_builder.build(model_builder.config_of(LLAMA), settings(), torch.device("meta"))
    assert all(weight.is_meta for weight in model.parameters()) and done == ["register"]
    assert not model.config.use_cache
    adapted = model_builder.trainable_model(model, settings(lora_rank=2), torch.device("meta"))
    assert all(weight.is_meta for weight in adapted.parameters())


def test_values_of_every_kind_of_parameter() -> None:
    """Whatever was in the memory that they were given."""
    model = nn.Module()
    model.first, model.norm = nn.Linear(64, 64), nn.LayerNorm(4)
    model.packed = nn.Parameter(torch.full((4, 4), 7, dtype=torch.uint8), requires_grad=False)
    model.scale = nn.Module()
    model.scale.weight = nn.Parameter(torch.ones(3))
    with torch.no_grad():
        for parameter in (*model.first.parameters(), *model.norm.parameters()):
            parameter.fill_(9.0)
    model_builder._fill(model)
    assert (
        model.first.weight.std().item() == pytest.approx(0.02, rel=0.1)
        and not model.first.bias.any()
    )
    assert model.norm.weight.tolist() == [1.0] * 4 and not model.norm.bias.any()
    assert (model.packed == 7).all() and model.scale.weight.tolist() == [1.0] * 3


def test_linear_layers_take_no_memory_until_they_are_quantized() -> None:
    with model_builder._linear_layers_on_meta():
        assert (
            nn.Linear(2, 3, bias=False).weight.is_meta
            and nn.Linear(2, 3, device="cpu").weight.is_meta
        )
        assert not nn.Embedding(2, 3).weight.is_meta
    assert not nn.Linear(2, 3).weight.is_meta
    with pytest.raises(KeyError), model_builder._linear_layers_on_meta():
        raise KeyError
    assert not nn.Linear(2, 3).weight.is_meta


def test_what_is_quantized_is_drawn_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the type of the base: drawing seven billion values on the host would take long."""
    pytest.importorskip("bitsandbytes")
    asked: list[Any] = []
    empty = torch.empty

    def made(*shape: int, **how: Any) -> torch.Tensor:
        if shape == (6, 4):
            asked.append(how)
        return empty(*shape, **how)

    monkeypatch.setattr(torch, "empty", made)
    wanted = settings(quantization="nf4", precision="bf16_mixed")
    layer: Any = model_builder._quantized_linear((4, 6, True), wanted, CPU)
    assert {"dtype": torch.bfloat16, "device": CPU} in asked
    assert (
        layer.bias.dtype == torch.bfloat16
        and not layer.bias.requires_grad
        and layer.in_features == 4
    )
