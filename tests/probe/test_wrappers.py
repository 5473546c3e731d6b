"""Text on models that ship with a tower for images or sound: the tower is loaded, frozen and never
run.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from autotune.catalog import resolve_model
from autotune.core.train_config import TrainConfig
from autotune.core.units import GIB
from autotune.dry.counting import dry_probe
from autotune.export.formats import export_all
from autotune.probe.model_settings import model_settings
from autotune.probe.supervisor import WorkerProber
from autotune.trainer.model_builder import build, config_of, trainable_model
from tests.helpers.probing import measured, request
from tests.helpers.seeing import seeing
from tests.unit.export.test_script import demo, run, write

pytestmark = [
    pytest.mark.probe,
    # PEFT reads the old name
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    # PEFT, of a mixture's experts without adapters
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern:RuntimeWarning"),
]
CPU = torch.device("cpu")
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
TEXT |= {"vocab_size": 512, "head_dim": 32, "max_position_embeddings": 512, "num_hidden_layers": 4}
TOWER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5]}
PIXTRAL = TOWER | {"model_type": "pixtral", "head_dim": 32, "image_size": 56, "patch_size": 14}
LINEAR = {
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}
WRAPPERS: dict[str, dict[str, Any]] = {
    # transformers has no class for its text alone
    "mistral3": {"text_config": TEXT | {"model_type": "mistral"}, "vision_config": PIXTRAL},
    # its class for text is the wrapper, which requires the type of each token
    "gemma3": seeing("gemma3", 4),
    # its class for text leaves the tower out
    "qwen3_5": {
        "text_config": TEXT | LINEAR | {"model_type": "qwen3_5_text"},
        "vision_config": {
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 64,
        },
    },
    "voxtral": {  # reads sound
        "text_config": TEXT | {"model_type": "llama"},
        "audio_config": TOWER | {"num_mel_bins": 8, "max_source_positions": 16},
    },
    # a mixture whose towers have linear layers named 0, as is the first decoder layer
    "qwen3_omni_moe_thinker": {
        "text_config": TEXT
        | {"model_type": "qwen3_omni_moe_text", "num_experts": 4, "moe_intermediate_size": 32}
        | {"num_experts_per_tok": 2, "rope_parameters": MROPE},
        "vision_config": {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2}
        | {"out_hidden_size": 64, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        "audio_config": {"d_model": 64, "encoder_layers": 1, "encoder_attention_heads": 2}
        | {"encoder_ffn_dim": 128, "output_dim": 64, "downsample_hidden_size": 16}
        | {"num_mel_bins": 8, "max_source_positions": 16},
    },
}
# The last two of four layers use the keys and values of earlier layers, and each layer has an
# embedding of its own.
SHARING = TEXT | {
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 512,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
SHARED: dict[str, dict[str, Any]] = {
    "gemma4_text": SHARING,
    "gemma3n_text": SHARING
    | {
        "laurel_rank": 8,
        "intermediate_size": [128] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
}


def config_for(name: str) -> dict[str, Any]:
    return {"model_type": name} | WRAPPERS[name]


@pytest.mark.parametrize("name", WRAPPERS)
def test_adapters_are_on_the_language_model_alone(name: str) -> None:
    for knobs in ({}, {"method": "full"}):
        settings = model_settings(
            TrainConfig(precision="fp32", attention="eager", **knobs), "mistral"
        )
        with torch.device("meta"):
            base = build(config_of(config_for(name)), settings, torch.device("meta"))
        model = trainable_model(base, settings, torch.device("meta"))
        trained = [path for path, one in model.named_parameters() if one.requires_grad]
        assert trained and not any(
            tower in path
            for path in trained
            for tower in ("vision", "visual", "audio_tower", "projector")
        )


def test_a_tower_without_sdpa_computes_its_attention_eagerly() -> None:
    """The audio tower of Gemma 4 has eager attention only."""
    from transformers import Gemma4AudioConfig, Gemma4Config, Gemma4TextConfig

    config = Gemma4Config(
        text_config=Gemma4TextConfig(num_hidden_layers=2), audio_config=Gemma4AudioConfig()
    )
    settings = model_settings(TrainConfig(precision="bf16_pure", attention="sdpa"), "gemma4_text")
    base = build(config, settings, torch.device("meta"))
    assert base.config.audio_config._attn_implementation == "eager"
    assert base.config.get_text_config()._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", WRAPPERS)
def test_text_is_probed_as_on_a_model_of_text(prober: WorkerProber, name: str) -> None:
    shape = prober.describe(config_for(name))
    assert shape is not None and shape.num_layers == 4
    asked = request(model=config_for(name))
    probed = measured(prober, asked)
    assert probed.losses and all(loss < 8 for loss in probed.losses)
    counted = dry_probe(asked)
    # a GPU allocates 512 bytes at least
    assert counted.model_gib == pytest.approx(probed.model_gib, rel=0.02)


@pytest.mark.parametrize("name", SHARED)
def test_shared_keys_and_embeddings_of_layers_are_counted_once(name: str) -> None:
    """The count is that of the parameters and buffers, in allocations of 512 bytes at least."""
    model = {"model_type": name} | SHARED[name]
    counted = dry_probe(request(model=model, loss="full"))  # in fp32
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config_of(model))
    tensors = (*built.parameters(), *built.buffers())
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    assert counted.model_gib * GIB == sum(math.ceil(size / 512) * 512 for size in sizes)


def test_the_exported_script_trains_a_wrappers_checkpoint_on_text(tmp_path: Path) -> None:
    """PEFT loads the adapters onto the same checkpoint, and the held-out loss falls."""
    from peft import PeftModel
    from safetensors.torch import load_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast

    weights = tmp_path / "weights"
    settings = model_settings(TrainConfig(precision="fp32", attention="eager"), "mistral")
    build(config_of(config_for("mistral3")), settings, CPU).save_pretrained(weights)
    words = Tokenizer(models.WordLevel({"</s>": 0, "a": 1, "b": 2, "c": 3, "?": 4}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="</s>", pad_token="</s>"
    ).save_pretrained(weights)

    config = TrainConfig(
        micro_batch_size=2, seq_len=16, precision="fp32", optimizer="adamw_torch", lora_rank=8
    )
    made = replace(demo(config), model=resolve_model(str(weights)))
    directory = write(export_all(made, ["train"]), tmp_path / "out")
    (tmp_path / "rows.jsonl").write_text('{"text": "a b c a b c a b c"}\n' * 40)
    done = run(
        directory, "--dataset", "rows.jsonl", "--held-out", "8", "16", "--output-dir", "trained"
    )
    assert done.returncode == 0, done.stderr[-2000:]
    before, after = json.loads(done.stdout.strip().splitlines()[-1])["held_out_loss"]
    assert after < before

    base = AutoModelForImageTextToText.from_pretrained(weights)
    loaded = PeftModel.from_pretrained(base, tmp_path / "trained")
    saved = load_file(tmp_path / "trained" / "adapter_model.safetensors")
    active = {
        path.replace(".default", ""): one
        for path, one in loaded.named_parameters()
        if "lora_" in path
    }
    assert saved.keys() == active.keys()
    assert all(torch.equal(saved[path], active[path]) for path in saved)
