"""axolotl.yaml: keys that Axolotl has, every knob or its name in the head, and hostile names."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.catalog import resolve_model
from autotune.core.files import load_data
from autotune.core.knobs import KNOBS
from autotune.core.train_config import TrainConfig
from autotune.export import keys, tool_file
from autotune.planning.foreign_config import adapt_to_model, read_file
from autotune.study.summary import Recipe
from tests.helpers.factories import summary

# Each value of each knob, and what Axolotl and LLaMA-Factory treat in a way of its own.
CONFIGS = [
    TrainConfig(),
    TrainConfig(
        precision="bf16_pure",
        checkpointing="every_3",
        compile="per_layer",
        attention="flex_attention",
    ),
    TrainConfig(
        quantization="nf4", double_quant=True, checkpointing="none", optimizer="paged_adamw_8bit"
    ),
    TrainConfig(
        quantization="nf4",
        precision="bf16_pure",
        lora_rank=64,
        seq_len=1000,
        optimizer="adamw_8bit",
    ),
    TrainConfig(
        quantization="int8", precision="fp16_mixed", micro_batch_size=4, optimizer="lion_8bit"
    ),
    TrainConfig(quantization="int8", precision="fp32", loader_workers=8, attention="eager"),
    TrainConfig(quantization="int8", precision="bf16_pure"),
    TrainConfig(
        precision="fp32", checkpointing="none", optimizer="adamw_torch", micro_batch_size=32
    ),
    TrainConfig(method="full", checkpointing="none", compile="per_layer", micro_batch_size=2),
    *(
        TrainConfig(method="full", compile="per_layer", fp8_products=scales)
        for scales in ("tensorwise", "rowwise")
    ),
    TrainConfig(
        method="full", optimizer="adafactor", precision="bf16_pure", attention="flash_attention_2"
    ),
    TrainConfig(method="full", precision="bf16_pure", loss="chunked"),
    TrainConfig(method="full", precision="fp16_mixed", packing=True, micro_batch_size=4),
    TrainConfig(
        method="full", precision="fp32", checkpointing="every_2", seq_len=4096, micro_batch_size=1
    ),
    TrainConfig(
        quantization="nf4",
        compile="per_layer",
        packing=True,
        dora=True,
        rslora=True,
        loss="chunked",
    ),
    TrainConfig(packing=True, attention="flash_attention_2", micro_batch_size=2),
    TrainConfig(packing=True, attention="flex_attention", precision="fp16_mixed"),
    TrainConfig(packing=True, attention="eager", kernels="liger", loss="chunked"),
    TrainConfig(loader_workers=2, kernels="liger", dora=True),
    TrainConfig(quantization="fp8", attention="sdpa_cudnn", checkpointing="offload", rslora=True),
    TrainConfig(
        attention="sdpa_cudnn",
        packing=True,
        checkpointing="offload",
        quantization="nf4",
        loss="chunked",
    ),
    TrainConfig(tiling="tokens", checkpointing="offload", quantization="nf4", loss="chunked"),
    TrainConfig(cuda_graphs="micro_batch", checkpointing="none", padding="bucket"),
    TrainConfig(lora_kernels="joined", compile="per_layer", padding="bucket"),
    TrainConfig(lora_kernels="grouped", lora_targets="attention_experts"),
    TrainConfig(quantization="nf4", quantize_experts=True, lora_targets="attention"),
    TrainConfig(packing=True, packed_attention="varlen", micro_batch_size=4),
    TrainConfig(padding="max_length", seq_len=1000),
    TrainConfig(group_by_length=True),
    TrainConfig(padding="masked"),
    TrainConfig(allocator="fixed"),
    TrainConfig(lora_targets="attention"),
    TrainConfig(lora_targets="q_v"),
    TrainConfig(lora_dropout=0.05),
    TrainConfig(lora_dropout=0.1),
    TrainConfig(lora_targets="k_proj,up_proj"),
    TrainConfig(modules_to_save="embedding"),
    TrainConfig(modules_to_save="head"),
    TrainConfig(modules_to_save="embedding_and_head", quantization="nf4", kbit_preparation=True),
    TrainConfig(
        method="full", micro_batch_size=32, precision="bf16_pure", optimizer_in_backward=True
    ),
]
each_config = pytest.mark.parametrize("config", CONFIGS, ids=TrainConfig.label)
HOSTILE = [
    "- !!python/object/apply:os.system ['touch CANARY']\r\n"
    "$(touch CANARY) `touch CANARY` 'a' \"b\" \\ # é \u2028 \x85",
    "--config evil.yaml",
    "a\nadapter: lora\nbase_model: other",
    "yes",
    "{{ x }} %s @y *z &w !v | > ? -",
    " null ",
]
KEYS: dict[str, dict[str, str]] = yaml.safe_load(
    (Path(__file__).parents[2] / "helpers" / "export_keys.yaml").read_text(encoding="utf-8")
)


def recipe(config: TrainConfig, **changes: Any) -> Recipe:
    base = summary().recipe
    assert base is not None
    return replace(base, winner=replace(base.winner, config=config), **changes)


def exported(made: Recipe) -> tuple[str, dict[str, Any]]:
    files = tool_file.export(made, "axolotl")
    assert list(files) == ["axolotl.yaml"]
    return files["axolotl.yaml"], yaml.safe_load(files["axolotl.yaml"])


def named(items: list[str]) -> set[str]:
    """The knobs that lines of a head are about."""
    knobs = {re.match(r"\w+", item).group() for item in items}  # type: ignore[union-attr]
    assert knobs <= set(KNOBS)
    return knobs


@each_config
def test_every_key_and_value_is_known_to_axolotl(config: TrainConfig) -> None:
    _, data = exported(recipe(config))
    known = {name: set(names.split()) for name, names in KEYS["axolotl"].items()}
    about = load_data("autotune.export", "tools")["axolotl"]
    assert (
        KEYS["axolotl"]["source"]
        == f"axolotl=={about['version']}.0 transformers=={about['transformers']}"
    )
    assert set(data) <= known["keys"]
    assert set(data["datasets"][0]) <= known["dataset_keys"]
    assert data["optimizer"] in known["optimizers"]
    assert data["attn_implementation"] in known["attentions"]


def test_experts_in_4_bits_come_back_for_a_mixture(tmp_path: Path) -> None:
    config = TrainConfig(quantization="nf4", quantize_experts=True, lora_targets="attention")
    made = recipe(config, model=resolve_model("qwen3-30b-a3b"))
    text, data = exported(made)
    assert data["quantize_moe_experts"] is True
    (tmp_path / "axolotl.yaml").write_text(text, encoding="utf-8")
    run = adapt_to_model(read_file(tmp_path / "axolotl.yaml"), made.model)
    assert run.config.quantize_experts and "quantize_moe_experts" in KEYS["axolotl"]["keys"].split()
    assert not any("experts" in item for item in keys.inexpressible_knobs("axolotl", made))
    for tool in ("trl", "llamafactory"):
        (gap,) = (one for one in keys.inexpressible_knobs(tool, made) if "experts" in one)
        assert gap.startswith("quantize_experts: the tool leaves the experts in 16 bits")

    on_experts = replace(config, lora_targets="attention_experts", lora_kernels="grouped")
    gaps = keys.inexpressible_knobs("axolotl", recipe(on_experts, model=made.model))
    assert {gap.partition(":")[0] for gap in gaps if "experts" in gap} == {
        "lora_kernels grouped",
        "quantize_experts",
    }


@each_config
def test_what_is_exported_comes_back_but_for_what_the_head_names(
    config: TrainConfig, tmp_path: Path
) -> None:
    made = recipe(config)
    text, _ = exported(made)
    (tmp_path / "axolotl.yaml").write_text(text, encoding="utf-8")
    run = adapt_to_model(read_file(tmp_path / "axolotl.yaml"), made.model)
    changed = {knob for knob in KNOBS if getattr(run.config, knob) != getattr(config, knob)}
    # The command's environment says the one; the model, which has no experts, decides the other.
    changed -= {"allocator", "quantize_experts"}
    assert changed <= named(keys.inexpressible_knobs("axolotl", made))
    assert all(
        f"# not expressed: {item}\n" in text for item in keys.inexpressible_knobs("axolotl", made)
    )
    assert (run.format, run.model, run.dataset) == (
        "axolotl",
        "mistralai/Mistral-7B-v0.3",
        "your/dataset",
    )
    assert run.accumulation * run.config.micro_batch_size == 32
    assert run.epochs == made.workload.epochs
    assert not [
        note
        for note in run.notes
        if "LoRA kernels" in note or "lora_alpha" in note or "every linear" in note
    ]


@each_config
def test_what_axolotl_would_choose_by_itself_is_chosen(config: TrainConfig) -> None:
    text, data = exported(recipe(config))
    kernels = {data.get(f"lora_{part}_kernel") for part in ("mlp", "qkv", "o", "embedding")}
    assert kernels == ({False} if config.method == "lora" else {None})
    assert data["tf32"] is False and data["excess_length_strategy"] == "truncate"
    # Left out, it pads to multiples.
    filled = {"longest": False, "masked": False, "bucket": None, "max_length": True}[config.padding]
    assert data.get("pad_to_sequence_len") is filled
    multiple = data.get("pad_to_multiple_of", 64)
    # what rows are padded to
    assert filled is False or multiple * -(-config.seq_len // multiple) == config.seq_len
    assert data["dataloader_num_workers"] == config.loader_workers
    assert data.get("sdpa_varlen", False) is (config.packed_attention == "varlen")
    assert data.get("gradient_checkpointing_kwargs", {"use_reentrant": False}) == {
        "use_reentrant": False
    }
    assert data.get("lora_alpha") == config.lora_alpha
    assert data.get("peft_autocast_adapter_dtype", True) is (
        config.precision != "bf16_pure" or config.method == "full"
    )
    assert not data["fp16"] or not data["bf16"]
    assert isinstance(data["warmup_steps"], int) and isinstance(data["learning_rate"], float)
    assert ("--dynamo_use_regional_compilation" in text) is (config.compile == "per_layer")
    if "plugins" in data:
        assert data["liger_rope"] is data["liger_rms_norm"] is (config.kernels == "liger")
        assert data["liger_fused_linear_cross_entropy"] is (config.loss == "chunked")
    else:
        assert (config.kernels, config.loss) == ("torch", "full")


def test_the_head_tells_what_to_expect_and_how_to_run() -> None:
    made = recipe(TrainConfig(packing=True, quantization="nf4"))
    head = exported(made)[0].partition("\n\n")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    assert f"Fingerprint {made.fingerprint.digest}" in head and "Full run: 10,000 examples" in head
    one_gpu = (
        "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0"
        " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    )
    assert f"#   {one_gpu} axolotl train axolotl.yaml -- --num_processes 1\n" in head
    assert "transformers 5.16.1; the study used 5.17.0" in head
    assert "LoRA kernels" in head and "sdpa_varlen" in head
    assert "not expressed" not in head
    assert "SFTTrainer" in exported(recipe(TrainConfig(), trainer="trl"))[0]


def test_the_whole_of_one() -> None:
    text, data = exported(
        recipe(TrainConfig(quantization="nf4", double_quant=True, checkpointing="offload"))
    )
    assert data == {
        "base_model": "mistralai/Mistral-7B-v0.3",
        "attn_implementation": "sdpa",
        "load_in_4bit": True,
        "bnb_config_kwargs": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        "datasets": [{"path": "your/dataset", "type": "chat_template"}],
        "adapter": "qlora",
        "lora_r": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.0,
        "lora_target_linear": True,
        "peft_use_dora": False,
        "peft_use_rslora": False,
        "peft_autocast_adapter_dtype": True,
        "lora_mlp_kernel": False,
        "lora_qkv_kernel": False,
        "lora_o_kernel": False,
        "lora_embedding_kernel": False,
        "sequence_len": 1024,
        "excess_length_strategy": "truncate",
        "sample_packing": False,
        "pad_to_sequence_len": False,
        "group_by_length": False,
        "micro_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "dataloader_drop_last": True,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": True,
        "bf16": True,
        "fp16": False,
        "tf32": False,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "activation_offloading": "hidden_states",
        "optimizer": "adamw_torch_fused",
        "torch_compile": False,
        "learning_rate": 2e-4,
        "lr_scheduler": "cosine",
        "warmup_steps": 9,
        "num_epochs": 1,
        "max_grad_norm": 1.0,
        "weight_decay": 0.0,
        "logging_steps": 10,
        "include_tkps": False,
        "save_steps": 313,
        "save_total_limit": 2,
        "output_dir": "out",
    }
    assert "was not tuned" in text


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_stay_names(name: str) -> None:
    model = replace(resolve_model("demo-3m"), name=name)
    text, data = exported(recipe(TrainConfig(), model=model, study=name, trainer=name))
    assert data["base_model"] == name
    assert set(data) == set(exported(recipe(TrainConfig()))[1])
    assert "!!python" not in "".join(
        line for line in text.splitlines() if not line.startswith(("#", "base_model", " "))
    )


def test_a_directory_with_weights_is_the_model() -> None:
    model = replace(resolve_model("demo-3m"), weights="/weights/here")
    assert exported(recipe(TrainConfig(), model=model))[1]["base_model"] == "/weights/here"
    assert (
        "no published weights" in exported(recipe(TrainConfig(), model=resolve_model("demo-3m")))[0]
    )
