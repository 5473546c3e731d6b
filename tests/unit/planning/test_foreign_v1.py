"""Files of LLaMA-Factory's v1: their keys, defaults and changes, and what is refused."""

from pathlib import Path

import pytest

from autotune.catalog import resolve_model
from autotune.core.errors import UsageError
from autotune.planning.foreign_config import parse, read_file
from autotune.planning.foreign_sharding import shard_run, strategy_of
from autotune.planning.foreign_v1 import V1
from autotune.planning.run_check import check
from autotune.report.values.check import ForeignConfig

BASE = "model: Qwen/Qwen3-0.6B\nmodel_class: llm\ntrain_dataset: data/v1_sft_demo.yaml\n"
LORA = f"{BASE}peft_config: {{name: lora}}\n"


@pytest.fixture
def read(tmp_path):
    def run(text: str, objective: str | None = None) -> ForeignConfig:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return read_file(path, objective)

    return run


def test_defaults_of_full_training(read):
    run = read(f"{BASE}dist_config: {{name: fsdp2}}\n")
    assert (run.format, run.model, run.dataset) == (V1, "Qwen/Qwen3-0.6B", "data/v1_sft_demo.yaml")
    assert run.config.label() == "full 1x2048 bf16_mixed ckpt-full adamw_torch loader-8"
    assert (run.accumulation, run.epochs, run.max_steps) == (1, 3, None)
    assert strategy_of(run.values) == "fsdp2"
    assert (
        "LLaMA-Factory's command, not the file, names the objective: sft is counted." in run.notes
    )


@pytest.mark.parametrize(
    ("line", "precision"),
    [
        ("", "fp32"),  # bf16 needs sharding
        ("dist_config: {name: fsdp2}\n", "bf16_mixed"),
        ("dist_config: {name: fsdp2}\nbf16: false\n", "fp32"),
    ],
)
def test_precision_of_full_training(read, line, precision):
    assert read(BASE + line).config.precision == precision


def test_adapters_and_a_quantised_base(read):
    defaults = read(LORA).config
    assert defaults.label() == (
        "lora r8 1x2048 bf16_mixed ckpt-full adamw_torch loader-8 dropout-0.05"
    )
    run = read(
        f"{BASE}peft_config: {{name: lora, r: 16, lora_dropout: 0, use_dora: true,"
        " target_modules: [q_proj, v_proj]}\nquant_config: {name: bnb, quantization_bit: 8}\n"
        "micro_batch_size: 4\n"
        "global_batch_size: 8\nenable_activation_checkpointing: false\nflash_attn: eager\n"
    )
    config = run.config
    assert (config.lora_rank, config.lora_dropout, config.dora) == (16, 0, True)
    assert (config.lora_targets, config.quantization) == ("q_proj,v_proj", "int8")
    assert (config.micro_batch_size, run.accumulation) == (4, 2)
    assert (config.checkpointing, config.attention) == ("none", "eager")
    # Without a number of bits, bnb has four, and auto does not quantise.
    assert read(f"{LORA}quant_config: {{name: bnb}}\n").config.quantization == "nf4"
    assert read(f"{LORA}quant_config: {{name: auto}}\n").config.quantization == "none"


def test_ligers_kernels_keep_the_logits(read):
    config = read(f"{BASE}kernel_config: {{name: 'auto, liger_kernel'}}\n").config
    assert (config.kernels, config.loss) == ("liger", "full")
    older = parse(
        {"model_name_or_path": "m", "do_train": True, "enable_liger_kernel": True}, "llamafactory"
    )
    assert older.config.loss == "chunked"


@pytest.mark.parametrize(
    ("strategy", "packing"),
    [("normal", False), ("padding_free", False), ("dynamic_batching", True)],
)
def test_batching(read, strategy, packing):
    assert read(f"{BASE}batching_strategy: {strategy}\n").config.packing is packing


def test_deepspeed_is_read_beside_the_file(read, tmp_path):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    run = read(f"{BASE}dist_config: {{name: deepspeed, config_file: ds.json}}\n")
    assert strategy_of(run.values) == "zero2"
    assert shard_run(run, resolve_model("qwen3-0.6b"), 2).config.sharding == "zero2"
    absent = read(f"{BASE}dist_config: {{name: deepspeed, config_file: z3.json}}\n")
    assert "The file 'z3.json' was found neither" in " ".join(absent.notes)
    assert strategy_of(absent.values) == "zero3"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "pref_loss: simpo\n",
            "pref_loss: the trainers of LLaMA-Factory's v1 for another objective",
        ),
        ("peft_config: {name: prompt}\n", "peft_config: lora or freeze is supported, not 'prompt'"),
        ("dist_config: {name: ddp}\n", "dist_config: fsdp2 or deepspeed or fsdpturbo is supported"),
        ("flash_attn: fa2\n", "flash_attn: one of eager, sdpa, flash_attention_2 is needed"),
        ("per_device_train_batch_size: 1\n", "LLaMA-Factory's v1 has no such key"),
        ("quant_config: {name: bnb}\n", "a quantised base can only be trained with adapters"),
        ("micro_batch_size: 0\n", "micro_batch_size: a number from 1"),
    ],
)
def test_refused(read, line, message):
    with pytest.raises(UsageError, match=message):
        read(BASE.replace("model_class: llm\n", "kernel_config: null\n") + line)


def test_other_objectives_are_refused(read):
    assert not any("names the objective" in note for note in read(LORA, "sft").notes)
    with pytest.raises(UsageError, match="another objective than sft are not supported"):
        read(LORA, "dpo")
    with pytest.raises(UsageError, match="model_class: the trainers"):
        read(LORA.replace("llm", "cls"))


def test_an_export_is_no_training(read):
    with pytest.raises(UsageError, match="merges or exports a trained model"):
        read("model: m\npeft_config: {name: lora, export_dir: out}\n")


def test_freezing_and_muon_need_less(tmp_path):
    text = f"{BASE}dist_config: {{name: fsdp2}}\n"
    path = tmp_path / "run.yaml"
    bounds = []
    for more in ("", "peft_config: {name: freeze}\n", "optim_config: {name: muon}\n"):
        path.write_text(text + more)
        bounds.append(check(path, {"gpu": "h100"}).checked.bounds.bounds_gib)
    (least, most), frozen, muon = bounds
    assert least == most == frozen[1] == muon[1]
    assert frozen[0] < muon[0] < least


def test_changes_have_the_keys_of_v1(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        f"{BASE.replace('0.6B', '4B')}dist_config: {{name: fsdp2}}\nmicro_batch_size: 16\n"
        "enable_activation_checkpointing: false\n"
    )
    report = check(Path(path), {"gpu": "h100"})
    edits = [fixed.edits for fixed, _ in report.fixes]
    assert {"enable_activation_checkpointing": True} in edits
    assert {"peft_config": {"name": "lora"}} in edits
    keys = {key for each in edits for key in each}
    assert keys <= {
        "enable_activation_checkpointing", "peft_config", "quant_config", "micro_batch_size",
        "global_batch_size", "cutoff_len",
    }  # fmt: skip
    # The rows of a step stay the same, so that the global batch is that of the file.
    resized = [each for each in edits if "micro_batch_size" in each]
    assert resized and all(each["global_batch_size"] == 16 for each in resized)
