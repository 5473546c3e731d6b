"""torchtune.yaml: components and arguments that torchtune has, every knob or its name in the head, hostile names."""

from dataclasses import replace
from typing import Any

import pytest
import yaml

from autotune.catalog import list_models, resolve_model
from autotune.core.files import load_data
from autotune.core.train_config import TrainConfig
from autotune.export import keys, torchtune
from autotune.export.formats import USUAL
from autotune.study.summary import Recipe
from autotune.trainer.settings import ALLOCATORS
from tests.unit.export.test_tool_file_axolotl import HOSTILE, KEYS, each_config, named, recipe

OPTIMIZERS = next(row.torchtune["optimizer"] for row in keys.sections()["schedule"] if row.of == "optimizer")


LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
LLAMA3_ROPE |= {"original_max_position_embeddings": 8192}


def exported(made: Recipe) -> tuple[str, dict[str, Any]]:
    files = torchtune.export(made)
    assert list(files) == ["torchtune.yaml"]
    return files["torchtune.yaml"], yaml.safe_load(files["torchtune.yaml"])


def check_keys(data: dict[str, Any], method: str) -> None:
    """As torchtune would: what its recipe needs is there, and each component has such arguments."""
    known = {name: set(names.split()) for name, names in KEYS["torchtune"].items()}
    assert known[f"{method}_required"] <= set(data) <= known["keys"]
    for part in data.values():
        if isinstance(part, dict) and "_component_" in part:
            assert set(part) - {"_component_"} <= known[part["_component_"]], part["_component_"]


OF_ATTENTION = ["q_proj", "k_proj", "v_proj", "output_proj"]
TARGETS = {"all-linear": (OF_ATTENTION, True), "attention": (OF_ATTENTION, False), "q_v": (["q_proj", "v_proj"], False)}


@each_config
def test_every_component_and_argument_is_known_to_torchtune(config: TrainConfig) -> None:
    assert KEYS["torchtune"]["source"].startswith(
        f"torchtune=={load_data('autotune.export', 'tools')['torchtune']['version']} "
    )
    check_keys(exported(recipe(config))[1], config.method)


@each_config
@pytest.mark.parametrize("name", ["mistral-7b", "phi-3-mini"])
def test_every_knob_is_said_or_named(config: TrainConfig, name: str) -> None:
    made = recipe(config, model=resolve_model(name))
    text, data = exported(made)
    model, packed = data["model"], data["dataset"]["packed"]
    lora = config.method == "lora"
    by_rank = config.lora_rank and config.lora_alpha and config.lora_alpha / config.lora_rank
    scale = by_rank and config.lora_rank and by_rank * (config.lora_rank**0.5 if config.rslora else 1)
    base = {"fp32": "fp32", "bf16_pure": "bf16"}
    attention = "flex_attention" if packed else "sdpa"
    said = {
        "method": ("lora_rank" in model) is lora and (f"tune run {config.method}_finetune_single_device " in text),
        "micro_batch_size": data["batch_size"] == config.micro_batch_size,
        "seq_len": data["tokenizer"]["max_seq_len"] == model["max_seq_len"] == config.seq_len,
        "lora_rank": model.get("lora_rank") == config.lora_rank,
        "lora_targets": TARGETS.get(config.lora_targets)
        == (model.get("lora_attn_modules"), model.get("apply_lora_to_mlp")),
        "modules_to_save": config.modules_to_save == "none",
        "optimizer": data["optimizer"].items() >= OPTIMIZERS[config.optimizer].items(),
        "optimizer_in_backward": data.get("optimizer_in_bwd", False) is config.optimizer_in_backward,
        "precision": data["dtype"] == base.get(config.precision),
        "quantization": model.get("quantize_base", False) is (config.quantization == "nf4")
        and config.quantization in ("nf4", "none"),
        "double_quant": config.double_quant or config.quantization != "nf4",
        "kbit_preparation": not config.kbit_preparation,
        "checkpointing": data["enable_activation_checkpointing"] is (config.checkpointing != "none")
        and data["enable_activation_offloading"] is config.offloads
        and (config.checkpoint_every or 1) == 1,
        "attention": config.attention == attention,
        "compile": data["compile"] is (config.compile == "per_layer") and (packed or config.compile == "none"),
        "loss": data["loss"]["_component_"] == "torch.nn.CrossEntropyLoss" and config.loss == "full",
        "kernels": config.kernels == "torch",
        "loader_workers": config.loader_workers == 0,
        "allocator": ALLOCATORS[config.allocator] in text,
        "packing": packed is config.packing,
        "packed_attention": config.packed_attention == "mask",
        "padding": config.padding == "longest",
        "group_by_length": not config.group_by_length,
        "dora": model.get("use_dora", False) is config.dora,
        "lora_dropout": model.get("lora_dropout") == (config.lora_dropout if config.method == "lora" else None),
        "rslora": not lora or model["lora_alpha"] / model["lora_rank"] == pytest.approx(scale),
        "tiling": config.tiling == "none",
        "cuda_graphs": config.cuda_graphs == "none",
        "lora_kernels": config.lora_kernels == "peft",
        "num_gpus": config.num_gpus == 1,
    }
    unsaid = {knob for knob in config.as_dict() if not said[knob]}
    assert unsaid == named(keys.inexpressible("torchtune", made))
    assert all(f"# not expressed: {item}\n" in text for item in keys.inexpressible("torchtune", made))
    assert data["batch_size"] * data["gradient_accumulation_steps"] == 32
    assert data["epochs"] == made.workload.epochs


def test_the_head_tells_what_to_expect_and_how_to_run() -> None:
    made = recipe(TrainConfig(precision="bf16_pure", quantization="nf4", double_quant=True))
    head = exported(made)[0].partition("\n\n")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    assert f"Fingerprint {made.fingerprint.digest}" in head and "Full run: 10,000 examples" in head
    one_gpu = "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    assert f"#   {one_gpu} tune run lora_finetune_single_device --config torchtune.yaml\n" in head
    assert "#   tune download mistralai/Mistral-7B-v0.3 --output-dir model\n" in head
    assert "The speed of torchtune was not measured" in head
    assert "not expressed" not in head and "INCOMPLETE" not in head
    assert "SFTTrainer" in exported(recipe(TrainConfig(), trainer="trl"))[0]
    assert "torchtune" not in USUAL


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("model", list_models(), ids=lambda model: model.short)
def test_a_model_has_a_builder_or_the_file_says_that_there_is_none(model: Any, method: str) -> None:
    text, data = exported(recipe(TrainConfig(method=method), model=model))
    check_keys(data, method)
    parts = (
        data["model"].get("_component_"),
        data["tokenizer"].get("_component_"),
        data["checkpointer"].get("model_type"),
    )
    unknown = {"gemma2", "qwen3", "qwen3_moe", "gpt2", "gpt_neox", "mixtral"}
    if torchtune.obstacle(recipe(TrainConfig(), model=model)):
        assert parts == (None, None, None) and "INCOMPLETE: torchtune 0.6.1 cannot make this model: " in text
    else:
        assert None not in parts and "INCOMPLETE" not in text and model.config["model_type"] not in unknown


def test_a_window_that_is_left_out_is_reported() -> None:
    model = resolve_model("mistral-7b-v0.1")  # with a window of 4,096
    texts = [exported(recipe(TrainConfig(seq_len=length), model=model))[0] for length in (4096, 8192)]
    assert ["sliding window is left out" in text for text in texts] == [False, True]
    assert not any("INCOMPLETE" in text for text in texts)


def test_a_window_that_the_model_does_not_use_is_none() -> None:
    model = resolve_model("qwen2.5-7b")
    for uses, said in ((False, False), (True, True)):
        shape = model.config | {"sliding_window": 256, "use_sliding_window": uses}
        text, _ = exported(recipe(TrainConfig(seq_len=512), model=replace(model, config=shape)))
        assert ("sliding window is left out" in text) is said


def test_heads_of_no_size_of_their_own_are_no_obstacle() -> None:
    model = resolve_model("llama-3-8b")
    for head_dim in (None, 128):
        made = recipe(TrainConfig(), model=replace(model, config=model.config | {"head_dim": head_dim}))
        assert torchtune.obstacle(made) == ""


def test_the_components_of_families() -> None:
    def parts(name: str) -> tuple[str, ...]:
        _, data = exported(recipe(TrainConfig(), model=resolve_model(name)))
        model, tokenizer = (data[part]["_component_"].rpartition(".")[2] for part in ("model", "tokenizer"))
        return model, tokenizer, data["checkpointer"]["model_type"]

    assert parts("llama-2-7b") == ("lora_llama2", "llama2_tokenizer", "LLAMA2")
    assert parts("llama-3-8b") == ("lora_llama3", "llama3_tokenizer", "LLAMA3")
    assert parts("llama-3.1-8b") == ("lora_llama3_1", "llama3_tokenizer", "LLAMA3")
    assert parts("llama-3.2-1b") == ("lora_llama3_2", "llama3_tokenizer", "LLAMA3_2")
    assert parts("gemma-2b") == ("lora_gemma", "gemma_tokenizer", "GEMMA")
    assert parts("phi-3-mini") == ("lora_phi3", "phi3_mini_tokenizer", "PHI3_MINI")
    assert parts("phi-4") == ("lora_phi3", "phi4_tokenizer", "PHI4")
    assert parts("qwen2.5-7b") == ("lora_qwen2", "qwen2_5_tokenizer", "QWEN2")


@pytest.mark.parametrize(
    ("name", "component", "sizes"),
    [  # as their papers and cards give them: vocabulary, layers, heads, key heads, width, inner width, rope base
        ("llama-2-7b", "llama2.lora_llama2", (32000, 32, 32, 32, 4096, 11008, None)),
        ("mistral-7b", "mistral.lora_mistral", (32768, 32, 32, 8, 4096, 14336, 1e6)),
        ("llama-3.1-8b", "llama3_1.lora_llama3_1", (128256, 32, 32, 8, 4096, 14336, 5e5)),
        ("llama-3.2-1b", "llama3_2.lora_llama3_2", (128256, 16, 32, 8, 2048, 8192, 5e5)),
        ("qwen2.5-0.5b", "qwen2.lora_qwen2", (151936, 24, 14, 2, 896, 4864, 1e6)),
        ("gemma-2b", "gemma.lora_gemma", (256000, 18, 8, 1, 2048, 16384, 1e4)),
    ],
)
def test_the_sizes_of_a_model(name: str, component: str, sizes: tuple[float | None, ...]) -> None:
    model = exported(recipe(TrainConfig(seq_len=512), model=resolve_model(name)))[1]["model"]
    assert model["_component_"] == f"torchtune.models.{component}"
    names = ("vocab_size", "num_layers", "num_heads", "num_kv_heads", "embed_dim", "intermediate_dim", "rope_base")
    assert tuple(model.get(one) for one in names) == sizes and model["max_seq_len"] == 512
    assert model["norm_eps"] == (1e-6 if name.startswith(("qwen", "gemma")) else 1e-5)
    assert model.get("scale_factor") == {"llama-3.1-8b": 8, "llama-3.2-1b": 32}.get(name)
    assert model.get("tie_word_embeddings") is (True if name.startswith("qwen") else None)
    assert model.get("head_dim") == (256 if name.startswith("gemma") else None)


def test_a_shape_without_key_heads_has_one_for_each_head() -> None:
    llama = resolve_model("llama-2-7b")
    shape = {key: value for key, value in llama.config.items() if key != "num_key_value_heads"}
    model = exported(recipe(TrainConfig(), model=replace(llama, config=shape)))[1]["model"]
    assert model["num_heads"] == model["num_kv_heads"] == 32


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("mistral-7b", {"head_dim": 96}, "heads of a size of their own"),
        ("llama-2-7b", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rotary positions of its own"),
        ("llama-3-8b", {"rope_parameters": {}, "rope_scaling": {"type": "yarn"}}, "rotary positions of its own"),
        ("llama-3-8b", {"tie_word_embeddings": True}, "embeddings tied, or not, as here"),
        ("gemma-2b", {"tie_word_embeddings": False}, "embeddings tied, or not, as here"),
        ("llama-3-8b", {"attention_bias": True, "hidden_act": "gelu"}, "another activation, biases"),
        ("llama-3-8b", {"hidden_act": "gelu"}, "another activation"),
        ("llama-3-8b", {"mlp_bias": True}, "biases"),
        ("llama-2-7b", {"rope_parameters": {"rope_theta": 5e5}}, "rotary positions of its own"),
        (
            "llama-3-8b",
            {"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}},
            "rotary positions of its own",
        ),
        ("llama-3-8b", {"intermediate_size": None}, "its config leaves out sizes"),
        ("mistral-7b", {"rope_parameters": LLAMA3_ROPE}, "rotary positions of its own"),
        ("llama-3-8b", {"rope_parameters": LLAMA3_ROPE | {"rope_type": "yarn"}}, "rotary positions of its own"),
        ("llama-3-8b", {"rope_parameters": LLAMA3_ROPE | {"low_freq_factor": 2.0}}, "rotary positions of its own"),
    ],
)
def test_what_a_builder_would_make_otherwise_is_not_written(name: str, changes: dict[str, Any], why: str) -> None:
    model = resolve_model(name)
    made = recipe(TrainConfig(), model=replace(model, config=model.config | changes))
    assert torchtune.obstacle(made).removeprefix("no builder for ") == why
    assert "_component_" not in exported(made)[1]["model"]


@pytest.mark.parametrize("name", [*HOSTILE, "$(touch CANARY)/'x", "${oc.env:HOME}"])
def test_hostile_names_stay_names(name: str) -> None:
    plain = recipe(TrainConfig())
    weights = f"/models/{name}"
    text, data = exported(recipe(TrainConfig(), model=replace(plain.model, name=name, weights=weights), study=name))
    shape = dict(plain.model.config, model_type=name)
    unknown = exported(recipe(TrainConfig(), model=replace(plain.model, name=name, config=shape), trainer=name))[1]
    assert set(data) == set(unknown) == set(exported(plain)[1])
    assert data["checkpointer"]["checkpoint_dir"] == ("model" if "${" in name else weights)
    assert "${" not in str(data)  # OmegaConf would fill it in
    assert yaml.safe_load("\n".join(line for line in text.splitlines() if line.startswith("#"))) is None


def test_a_name_is_one_word_of_the_command() -> None:
    model = replace(resolve_model("mistral-7b"), name="a/b; touch CANARY 'c'")
    text, _ = exported(recipe(TrainConfig(), model=model))
    assert "\n#   tune download 'a/b; touch CANARY '\"'\"'c'\"'\"'' --output-dir model\n" in text


@pytest.mark.parametrize(("name", "ties"), [("gemma-2b", True), ("llama-3-8b", False), ("mistral-7b", False)])
def test_embeddings_are_tied_as_the_family_has_them_where_the_config_does_not_say(name: str, ties: bool) -> None:
    model = resolve_model(name)
    silent = {key: value for key, value in model.config.items() if key != "tie_word_embeddings"}
    said = [silent, silent | {"tie_word_embeddings": ties}, silent | {"tie_word_embeddings": not ties}]
    reasons = [torchtune.obstacle(recipe(TrainConfig(), model=replace(model, config=config))) for config in said]
    assert [bool(reason) for reason in reasons] == [False, False, True]
