"""Files of TRL, Axolotl and LLaMA-Factory: what they ask for, their defaults and traps, and what is
refused.
"""

import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.catalog import resolve_model
from autotune.core.errors import UsageError
from autotune.core.files import MAX_BYTES, load_data
from autotune.core.objective import Objective
from autotune.core.probe_types import ModelShape
from autotune.core.train_config import TrainConfig
from autotune.export import tool_file
from autotune.planning import foreign_config
from autotune.planning.foreign_config import adapt_to_model, parse, read_file
from autotune.planning.foreign_sharding import strategy_of
from autotune.report.values.check import FP32_BASE, ForeignConfig
from tests.helpers.factories import summary

TRL = "model_name_or_path: org/m\ndataset_name: org/d\n"
AXOLOTL = "base_model: org/m\nmicro_batch_size: 2\n"
FACTORY = "model_name_or_path: org/m\nstage: sft\ndo_train: true\n"
LORA = {
    "trl": f"{TRL}use_peft: true\n",
    "axolotl": f"{AXOLOTL}adapter: lora\nlora_r: 16\n",
    "llamafactory": FACTORY,
}
SHARDED = (
    "Sharding and offloading of the model are not counted: each GPU is assumed to hold the whole"
    " model."
)
ABSENT = (
    "The file {!r} was found neither beside this file nor in the current directory: the tool's"
    " defaults are assumed."
)
CROSSED = (
    "Packed examples attend to one another in this run, but the estimate keeps them apart, which"
    " may be slower."
)
FUSED = "The cross-entropy, which is fused with the head, is counted as autotune's loss in chunks."
IMAGES = (
    "Images, video and sound are not counted, nor the parts of the model that read them: the run"
    " needs more memory than"
    " estimated."
)
CHUNKS = (
    "The loss is counted in chunks, as TRL computes it since 1.7; older versions hold all logits."
)
KERNELS = (
    "Axolotl's fused LoRA kernels, which are on by default, are not counted: the run needs less"
    " time and memory than estimated."
)
BF16 = "With bf16, Axolotl also loads the weights in bf16: the run is counted as bf16_pure."
ELSEWHERE = "Adapters are counted on every linear layer, but the file names "
PEFT = (
    "The file names no target modules, so PEFT chooses them: the estimate assumes queries and"
    " values, its usual choice."
)


@pytest.fixture
def read(tmp_path):
    def run(text: str | bytes) -> ForeignConfig:
        path = tmp_path / "run.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_file(path)

    return run


@pytest.fixture
def failure(read, tmp_path):
    def run(text: str | bytes) -> str:
        with pytest.raises(UsageError) as caught:
            read(text)
        assert caught.value.remedy
        assert str(caught.value).isprintable()
        return str(caught.value).replace(str(tmp_path / "run.yaml"), "FILE")

    return run


def with_lines(text: str, lines: str) -> str:
    """`lines` is one key with its value, or a mapping of them; they take the place of those in
    `text`.
    """
    return yaml.safe_dump(yaml.safe_load(text) | yaml.safe_load(lines))


# --- what the projects themselves publish, reduced to the keys that matter


def test_trl_example(read):
    """huggingface/trl, trl/skills/trl-training/SKILL.md: sft_config.yaml."""
    run = read(
        "model_name_or_path: Qwen/Qwen2.5-0.5B\ndataset_name: trl-lib/Capybara\n"
        "learning_rate: 2.0e-5\n"
        "num_train_epochs: 1\nper_device_train_batch_size: 8\ngradient_accumulation_steps: 2\n"
        "output_dir: ./sft_output\nuse_peft: true\nlora_r: 16\nlora_alpha: 16\nreport_to: trackio\n"
    )
    assert run.config == TrainConfig(
        lora_targets="q_v", lora_dropout=0.05, micro_batch_size=8, seq_len=1024, loss="chunked"
    )
    assert (run.format, run.model, run.dataset) == ("trl", "Qwen/Qwen2.5-0.5B", "trl-lib/Capybara")
    assert (run.accumulation, run.epochs, run.num_gpus, run.max_steps, run.max_examples) == (
        2,
        1.0,
        None,
        None,
        None,
    )
    assert run.notes == (FP32_BASE, CHUNKS, PEFT)


def test_axolotl_qlora_example(read):
    """axolotl-ai-cloud/axolotl, examples/llama-3/qlora.yml."""
    run = read(
        "base_model: NousResearch/Meta-Llama-3-8B\nload_in_8bit: false\nload_in_4bit: true\n"
        "datasets:\n  - path: aaditya/alpaca_subset_1\n    type: alpaca\nval_set_size: 0\n"
        "adapter: qlora\n"
        "lora_model_dir:\nsequence_len: 4096\nsample_packing: true\nlora_r: 32\nlora_alpha: 16\n"
        "lora_target_linear: true\ngradient_accumulation_steps: 4\nmicro_batch_size: 2\n"
        "num_epochs: 4\n"
        "optimizer: paged_adamw_32bit\nbf16: auto\ntf32: false\ngradient_checkpointing: true\n"
        "attn_implementation: flash_attention_2\nspecial_tokens:\n  pad_token: <|end_of_text|>\n"
    )
    label = (
        "lora r32 nf4-double 2x4096 bf16_mixed ckpt-full adamw_torch flash_attention_2"
        " packed loader-2"
    )
    assert (run.config.label(), run.format, run.model) == (
        label,
        "axolotl",
        "NousResearch/Meta-Llama-3-8B",
    )
    assert (run.accumulation, run.epochs, run.dataset) == (4, 4.0, "aaditya/alpaca_subset_1")
    assert run.notes == (KERNELS, "The optimizer 'paged_adamw_32bit' is counted as adamw_torch.")


@pytest.mark.parametrize(
    ("optimizer", "pure", "said"),
    [
        ("ademamix", False, "its state is larger than that of adamw_torch."),
        ("paged_adamw_32bit", True, "its state is larger than that of adamw_torch for weights"),
        ("paged_adamw_32bit", False, None),
        ("lion_32bit", True, "optimizer lion is not counted: the run needs less memory"),
        ("lomo", True, "optimizer lomo is not counted: the run needs less memory"),
        ("paged_lion_8bit", True, None),
        ("adamw_torch", True, None),
    ],
)
def test_other_optimizers_have_their_state(optimizer: str, pure: bool, said: str | None) -> None:
    keys = {"model_name_or_path": "m", "do_train": True, "finetuning_type": "full"}
    run = parse(keys | {"optim": optimizer, "pure_bf16": pure, "bf16": not pure}, "llamafactory")
    about = [note for note in run.notes if "state is larger" in note or "less memory" in note]
    assert said in about[0] if said else not about
    assert run.needs_more is (said is not None and "larger" in said)


@pytest.mark.parametrize(
    ("keys", "label", "said"),
    [
        ({"max_seq_length": 512}, "full 8x512 bf16_mixed ckpt-none adamw_torch_fused", True),
        ({"max_seq_length": 512, "gradient_checkpointing": True}, "full 8x512 bf16_mixed", True),
        ({"max_length": 512}, "full 8x512 bf16_mixed ckpt-full adamw_torch_fused chunked", False),
        ({"max_seq_length": 512, "Unsloth": True}, "full 8x512 bf16_mixed ckpt-full", False),
        ({"max_seq_length": 512, "ms-swift": True}, "full 8x512 bf16_mixed", False),
    ],
)
def test_the_length_of_older_versions_of_trl_has_their_defaults(
    keys: dict[str, Any], label: str, said: bool
) -> None:
    """TRL 0.19 has the key, and neither recomputes by default nor computes the loss in chunks."""
    run = parse({"model_name_or_path": "m"} | keys, "trl")
    assert run.config.label().startswith(label)
    assert (run.config.loss == "full") is (said or "ms-swift" in keys)
    assert any("a key of TRL before 0.20" in note for note in run.notes) is said


def test_a_key_of_trl_since_0_23_means_recomputation() -> None:
    keys = {"model_name_or_path": "m", "max_prompt_length": 512, "use_vllm": True}
    keys |= {"objective": "grpo"}
    older = parse(keys, "trl").config
    newer = parse(keys | {"vllm_enable_sleep_mode": True}, "trl").config
    assert (older.checkpointing, newer.checkpointing) == ("none", "full")


def test_axolotl_full_example(read):
    """axolotl-ai-cloud/axolotl, examples/llama-3/fft-8b-liger-fsdp.yaml."""
    run = read(
        "base_model: NousResearch/Meta-Llama-3.1-8B\nplugins:\n"
        "  - axolotl.integrations.liger.LigerPlugin\n"
        "liger_rope: true\nliger_rms_norm: true\nliger_glu_activation: true\n"
        "liger_fused_linear_cross_entropy: true\n"
        "datasets:\n  - path: mlabonne/FineTome-100k\n    split: train[:20%]\nsequence_len: 4096\n"
        "sample_packing: true\ngradient_accumulation_steps: 4\nmicro_batch_size: 2\nnum_epochs: 1\n"
        "bf16: auto\ngradient_checkpointing: true\nattn_implementation: flash_attention_2\n"
        "fsdp:\n  - full_shard\n  - auto_wrap\nfsdp_config:\n  fsdp_offload_params: true\n"
    )
    label = (
        "full 2x4096 bf16_pure ckpt-full adamw_torch_fused flash_attention_2 liger"
        " chunked-loss packed loader-2"
    )
    assert run.config.label() == label
    assert run.notes == (BF16, FUSED, SHARDED)  # once, of two keys


def test_axolotl_offload_example(read):
    """axolotl-ai-cloud/axolotl, examples/qwen3/32b-qlora.yaml."""
    run = read(
        "base_model: Qwen/Qwen3-32B\nplugins:\n  -"
        " axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin\n"
        "sequence_len: 2048\nload_in_4bit: true\nadapter: qlora\nlora_r: 16\nlora_target_modules:\n"
        "  - q_proj\n"
        "  - down_proj\nmicro_batch_size: 1\noptimizer: adamw_torch_4bit\n"
        "gradient_checkpointing: offload\n"
    )
    label = (
        "lora r16 nf4-double 1x2048 bf16_mixed ckpt-offload lion_8bit on-down_proj,q_proj"
        " chunked-loss loader-2"
    )
    assert run.config.label() == label
    assert (
        run.notes[0]
        == "Offloading is counted as activation checkpoints that are kept in the host's memory."
    )
    assert run.notes[1:3] == (KERNELS, FUSED)


def test_factory_lora_example(read):
    """hiyouga/LLaMA-Factory, examples/train_lora/qwen3_lora_sft.yaml."""
    run = read(
        "model_name_or_path: Qwen/Qwen3-4B-Instruct-2507\ntrust_remote_code: true\nstage: sft\n"
        "do_train: true\n"
        "finetuning_type: lora\nlora_rank: 8\nlora_target: all\ndataset: identity,alpaca_en_demo\n"
        "template: qwen3_nothink\ncutoff_len: 2048\nmax_samples: 1000\ndataloader_num_workers: 4\n"
        "per_device_train_batch_size: 1\ngradient_accumulation_steps: 8\nlearning_rate: 1.0e-4\n"
        "num_train_epochs: 3.0\nwarmup_ratio: 0.1\nbf16: true\nresume_from_checkpoint: null\n"
    )
    assert run.config.label() == "lora r8 1x2048 bf16_mixed ckpt-full adamw_torch_fused loader-4"
    assert (run.format, run.accumulation, run.epochs, run.notes) == ("llamafactory", 8, 3.0, ())
    # a thousand of each
    assert (run.dataset, run.max_examples) == ("identity,alpaca_en_demo", 2000)


def test_other_factory_examples(read):
    """Its examples/train_full/qwen3_full_sft, train_qlora/qwen3_lora_sft_otfq and
    extras/galore/llama3_full_sft.
    """
    run = read(
        f"{FACTORY}finetuning_type: full\ndeepspeed: examples/deepspeed/ds_z3_config.json\n"
        "bf16: true\n"
    )
    assert run.config.label() == "full 8x2048 bf16_mixed ckpt-full adamw_torch_fused"
    assert run.notes == (ABSENT.format("examples/deepspeed/ds_z3_config.json"), SHARDED)
    run = read(f"{FACTORY}quantization_bit: 4\nquantization_method: bnb\nbf16: true\n")
    assert (run.config.quantization, run.config.double_quant, run.notes) == ("nf4", True, ())
    run = read(
        f"{FACTORY}finetuning_type: full\nuse_galore: true\ngalore_rank: 128\npure_bf16: true\n"
    )
    assert run.config.precision == "bf16_pure"
    assert run.notes == ("use_galore is not counted: the run needs less memory than estimated.",)


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(
            precision="bf16_pure",
            checkpointing="every_3",
            attention="flex_attention",
            group_by_length=True,
        ),
        TrainConfig(compile="per_layer", padding="max_length"),
        TrainConfig(
            quantization="nf4",
            double_quant=True,
            checkpointing="none",
            optimizer="paged_adamw_8bit",
        ),
        TrainConfig(
            quantization="int8", precision="fp16_mixed", micro_batch_size=4, optimizer="lion_8bit"
        ),
        TrainConfig(
            method="full",
            optimizer="adafactor",
            precision="bf16_pure",
            attention="flash_attention_2",
        ),
        TrainConfig(
            method="full",
            precision="fp32",
            checkpointing="every_2",
            seq_len=4096,
            micro_batch_size=1,
        ),
        TrainConfig(
            quantization="nf4",
            packing=True,
            dora=True,
            rslora=True,
            lora_rank=64,
            checkpointing="offload",
        ),
        TrainConfig(loader_workers=2, kernels="liger", attention="eager"),
    ],
    ids=TrainConfig.label,
)
def test_what_autotune_exports_comes_back(config, read):
    recipe = summary().recipe
    fingerprint = replace(recipe.fingerprint, packages={"transformers": "5.23.0"})
    recipe = replace(recipe, winner=replace(recipe.winner, config=config), fingerprint=fingerprint)
    run = read(tool_file.export(recipe, "trl")["trl_sft.yaml"])
    assert run.config == replace(config, loss="chunked")
    assert (run.accumulation, run.epochs) == (recipe.accumulation, recipe.workload.epochs)
    assert FP32_BASE not in run.notes


# --- defaults, many keys at once, then one or a few that belong together


def test_defaults(read):
    runs = read(TRL), read("base_model: m\n"), read(f"{FACTORY}bf16: true\n")
    assert (
        runs[0].config.label() == "full 8x1024 bf16_mixed ckpt-full adamw_torch_fused chunked-loss"
    )
    assert runs[1].config.label() == "full 1x512 bf16_pure ckpt-none adamw_torch_fused loader-2"
    assert runs[2].config.label() == "lora r8 8x2048 bf16_mixed ckpt-full adamw_torch_fused"
    assert [(run.accumulation, run.epochs) for run in runs] == [(1, 3.0), (1, 1.0), (1, 3.0)]
    assert [run.notes for run in runs] == [(CHUNKS,), (BF16,), ()]
    assert {(run.config.padding, run.config.group_by_length) for run in runs} == {
        ("longest", False)
    }


@pytest.mark.parametrize(
    ("tool", "lines", "label"),
    [
        ("trl", "{load_in_4bit: 1, use_bnb_nested_quant: true, lora_r: '6.4e1', use_dora: true,"
         " use_rslora: yes, "
         "max_length: 1e3, packing: true, torch_compile: true, dataloader_num_workers: 3,"
         " optim: adamw_bnb_8bit}",
         "rsdora r64 nf4-double 8x1000 bf16_mixed ckpt-full adamw_8bit on-q_v compiled chunked-loss"
         " packed loader-4 "
         "dropout-0.05"),
        ("axolotl", "{load_in_8bit: 'True', lora_r: 8, peft_use_dora: 1, peft_use_rslora: on,"
         " flash_attention: true, "
         "torch_compile: auto, optimizer: ao_adamw_fp8, micro_batch_size: '4',"
         " gradient_checkpointing: 'true'}",
         "rsdora r8 int8 4x512 bf16_mixed ckpt-full adamw_8bit on-q_v compiled flash_attention_2"
         " loader-2"),
        ("llamafactory", "{quantization_bit: 8, pure_bf16: true, use_unsloth_gc: true, flash_attn:"
         " fa2, "
         "enable_liger_kernel: true, neat_packing: true, use_dora: true, optim: adafactor}",
         "dora r8 int8 8x2048 bf16_pure ckpt-offload adafactor flash_attention_2 liger chunked-loss"
         " packed"),
    ],
)  # fmt: skip
def test_many_keys(tool, lines, label, read):
    assert read(with_lines(LORA[tool], lines)).config.label() == label


# tool, knob, and what the knob then is: lines of the file with a slash between
ONE_KEY = """
trl quantization int8: load_in_8bit: true
trl double_quant False: {load_in_4bit: true}
trl precision fp32: bf16: false
trl precision fp16_mixed: fp16: true / {bf16: false, dtype: float16}
trl precision bf16_mixed: dtype: bfloat16 / {dtype: bfloat16, bf16: true} / dtype: auto
trl precision bf16_pure: {bf16: false, dtype: bfloat16}
trl precision bf16_pure: {use_peft: false, dtype: bfloat16, bf16: true}
trl precision bf16_pure: {use_peft: false, model_init_kwargs: {dtype: torch.bfloat16}}
trl precision bf16_pure: {use_peft: no, dtype: auto}
trl checkpointing none: gradient_checkpointing: false / activation_checkpointing: false
trl checkpointing full: {gradient_checkpointing: false, activation_checkpointing: true}
trl checkpointing offload: activation_checkpointing_kwargs: {offload: true}
trl checkpointing offload: activation_offloading: true
trl attention sdpa: attn_implementation: flash_attention_3
trl attention flash_attention_2: model_init_kwargs: {attn_implementation: flash_attention_2}
trl compile per_layer: torch_compile_backend: inductor
trl loader_workers 8: dataloader_num_workers: 99
trl optimizer adamw_8bit: optim: adamw_bnb_8bit / optim: ademamix_8bit
trl optimizer lion_8bit: optim: paged_lion_8bit / optim: adamw_torch_4bit
trl optimizer adafactor: optim: sgd
trl optimizer adamw_torch: optim: lion_32bit / optim: adagrad
trl padding longest: pad_to_multiple_of: 64 / pad_to_multiple_of: 1023 / pad_to_multiple_of:
trl padding max_length: pad_to_multiple_of: 1024 / {pad_to_multiple_of: 600, max_length: 512}
trl padding bucket: {pad_to_multiple_of: 64, torch_compile: true}
trl group_by_length True: train_sampling_strategy: group_by_length / group_by_length: true
trl group_by_length False: train_sampling_strategy: random / group_by_length: false
axolotl padding longest: pad_to_sequence_len: false
axolotl padding longest: {pad_to_sequence_len: false, pad_to_multiple_of: 512}
axolotl padding longest: pad_to_multiple_of: 64 / pad_to_sequence_len:
axolotl padding max_length: pad_to_sequence_len: true / pad_to_sequence_len: 'yes'
axolotl padding max_length: pad_to_multiple_of: 512 / reward_model: true
axolotl padding masked: {reward_model: true, pad_to_sequence_len: false}
axolotl group_by_length True: group_by_length: true
axolotl precision fp32: bf16: / bf16: false
axolotl precision bf16_pure: bf16: full
axolotl precision fp16_mixed: {bf16: auto, fp16: true} / {bf16: false, fp16: true} / fp16: true
axolotl precision bf16_mixed: {bf16: true, fp16: true} / {bf16: false, bfloat16: true} / bf16: auto
axolotl method full: adapter: / adapter: ""
axolotl quantization none: load_in_4bit: true
axolotl double_quant False: {adapter: qlora, load_in_4bit: 1, \
bnb_config_kwargs: {bnb_4bit_use_double_quant: false}}
axolotl attention flex_attention: {sdp_attention: on, flex_attention: on}
axolotl attention sdpa: xformers_attention: true / sdp_attention: true
axolotl checkpointing offload: gradient_checkpointing: unsloth / {activation_offloading: legacy}
axolotl checkpointing full: fsdp_config: {activation_checkpointing: true}
axolotl checkpointing full: fsdp_config: {fsdp_activation_checkpointing: true}
axolotl compile none: torch_compile_backend: inductor
axolotl kernels torch: liger_rope: true
axolotl kernels liger: {plugins: [a.LigerPlugin], liger_swiglu: true}
axolotl loss full: liger_fused_linear_cross_entropy: true / chunked_cross_entropy: true
axolotl loss full: {plugins: [a.cut_cross_entropy.B], cut_cross_entropy: false}
llamafactory group_by_length True: train_sampling_strategy: group_by_length / group_by_length: true
llamafactory double_quant False: {quantization_bit: 4, double_quantization: false}
llamafactory precision fp16_mixed: fp16: true
llamafactory precision fp32: finetuning_type: full
llamafactory checkpointing none: disable_gradient_checkpointing: true
llamafactory checkpointing full: gradient_checkpointing: false
llamafactory attention eager: flash_attn: disabled
llamafactory attention sdpa: flash_attn: auto
llamafactory kernels liger: use_liger_kernel: true
llamafactory packing True: packing: true / stage: pt
llamafactory packing False: {stage: pt, packing: false}
""".strip().splitlines()


@pytest.mark.parametrize("case", ONE_KEY)
def test_one_key(case, read):
    what, _, files = case.partition(": ")
    tool, knob, value = what.split()
    for lines in files.split(" / "):
        assert str(getattr(read(with_lines(LORA[tool], lines)).config, knob)) == value, lines


def test_how_much_is_trained(read):
    run = read(
        f"{TRL}max_steps: 500\nnum_train_epochs: 3\nnum_processes: 8\ndatasets:\n- path: a\n"
        "- path: b/c\n"
    )
    assert (run.epochs, run.max_steps, run.num_gpus, run.dataset) == (None, 500, 8, "a,b/c")
    run = read(f"{TRL}max_steps: -1\nnum_train_epochs: '0.5'\n")
    assert (run.epochs, run.max_steps, run.num_gpus) == (0.5, None, None)
    run = read(
        "base_model: m\nbatch_size: 32\nmicro_batch_size: 4\nmax_steps:\n"
        "pretraining_dataset: org/web\n"
    )
    assert (run.accumulation, run.epochs, run.dataset) == (8, 1.0, "org/web")
    assert read(f"{AXOLOTL}dp_shard_size: 4\ntensor_parallel_size: 2\n").num_gpus == 8
    assert read(f"{FACTORY}max_samples: 100000000\ndataset: a\n").max_examples == 10**8


ONE_NOTE = {
    ("axolotl", "{bf16: false, float16: true}"): "With float16, Axolotl also loads the weights in"
     " fp16: the run needs less memory than estimated.",
    ("trl", "dtype: auto"): "dtype is auto: bfloat16 is assumed, the dtype of most checkpoints.",
    ("trl", "{use_peft: no, lora_r: 8}"): "Without use_peft: true, TRL trains all parameters,"
     " and ignores lora_*.",
    ("trl", "gradient_accumulation_steps: auto"): "gradient_accumulation_steps is auto: 1 is"
     " assumed.",
    ("trl", "attn_implementation: flash_attention_3"): "Attention by 'flash_attention_3' is counted"
     " as sdpa.",
    ("trl", "{packing: true, packing_strategy: wrapped}"): CROSSED,
    ("trl", "packing: true"): "TRL packs a micro batch into one sequence. Without flash attention,"
     " its mask needs more memory than estimated",
    ("trl", "accelerate_config: zero3"): SHARDED,
    ("trl", "lora_alpha: 1"): "lora_alpha 1 is far from twice the rank.",
    ("trl", "{lora_r: 20, lora_alpha: 4}"): "lora_alpha 4 is far from twice the rank.",
    ("trl", "gradient_checkpointing_kwargs: {selective: true}"): "selective is not counted: the run"
     " needs more memory",
    ("trl", "{gradient_checkpointing: no, activation_offloading: 1}"): "activation_offloading is"
     " not counted: ",
    ("trl", "torch_compile: true"): "torch_compile compiles the whole model, but the estimate"
     " compiles its layers one by one.",
    ("axolotl", "lora_modules_to_save: [lm_head, score]"): "lora_modules_to_save trains 'score'"
     " besides adapters",
    ("llamafactory", "additional_target: v_head,norm"): "additional_target trains 'norm, v_head'"
     " besides adapters",
    ("axolotl", "load_in_4bit: true"): "Axolotl quantises the base to 4 bits only with adapter:"
     " qlora, not with adapter: lora.",
    ("axolotl", "liger_rope: true"): "liger_* has no effect, because plugins does not list Liger's"
     " plugin.",
    ("axolotl", "tensor_parallel_size: 2"): SHARDED,
    ("axolotl", "fp8: true"): "fp8 is not counted: on a GPU that supports it, the run takes less"
     " time than estimated.",
    ("axolotl", "qat: {weight_dtype: int4}"): "qat is not counted: the run needs more memory and"
     " time than estimated.",
    ("axolotl", "processor_type: AutoProcessor"): IMAGES,
    ("llamafactory", "{image_max_pixels: 262144, video_max_pixels: 16384}"): IMAGES,
    ("axolotl", "use_scattermoe: true"): "use_scattermoe is not counted: with its kernels the run"
     " may need less time",
    ("axolotl", "peft: {loftq_config: {loftq_bits: 4}}"): "The time and memory that peft needs"
     " before and between the steps are not counted",
    ("axolotl", "relora: true"): "The time and memory that relora needs before and between the"
     " steps are not counted.",
    ("axolotl", "lora_model_dir: out"): "lora_model_dir loads adapters with their own rank and"
     " layers, but",
    ("axolotl", "model_config: {a: 1}"): "model_config changes the model's own configuration, which"
     " is not counted.",
    ("axolotl", "lisa_n_layers: 4"): "lisa_n_layers is not counted: the run needs less memory than"
     " estimated.",
    ("axolotl", "chunked_cross_entropy: true"): "chunked_cross_entropy is not counted: the run"
     " needs less memory",
    ("axolotl", "{plugins: [a.Liger], liger_cross_entropy: true}"): "liger_cross_entropy is not"
     " counted: the run ",
    ("axolotl", "device_map: auto"): SHARDED,
    ("axolotl", "expert_parallel_size: 2"): SHARDED,
    ("axolotl", "use_eaft: true"): "use_eaft computes the loss from all logits at once: the run"
     " needs more memory than",
    ("llamafactory", "use_dft_loss: true"): "use_dft_loss computes the loss from all logits at"
     " once: the run needs more",
    ("axolotl", "padding_free: true"): "padding_free joins sequences without padding, but the"
     " estimate pads them: the run takes less",
    ("llamafactory", "packing: true"): CROSSED,
    ("llamafactory", "enable_liger_kernel: true"): FUSED,
    ("llamafactory", "{quantization_bit: 4, quantization_method: hqq}"): "The base is quantised by"
     " 'hqq', but",
    ("llamafactory", "bf16: false"): "Without bf16, fp16 or pure_bf16, there is no autocast: the"
     " run may be slower than estimated.",
    ("llamafactory", 'lora_target: "q_proj,.*mlp.*"'): f"{ELSEWHERE}'.*mlp.*,q_proj'.",
}  # fmt: skip


@pytest.mark.parametrize(("tool", "lines"), ONE_NOTE)
def test_one_note(tool, lines, read):
    for text, noted in (
        (f"{LORA[tool]}bf16: true\n", False),
        (with_lines(LORA[tool], lines), True),
    ):
        assert any(note.startswith(ONE_NOTE[tool, lines]) for note in read(text).notes) is noted


def test_where_more_memory_is_needed_than_is_counted(read):
    assert [
        read(f"{AXOLOTL}{line}\n").needs_more
        for line in ("fp8: true", "lisa_n_layers: 4", "qat: {a: b}")
    ] == [
        False,
        False,
        True,
    ]


def test_a_loss_of_all_logits_replaces_a_fused_one(read):
    run = read(f"{FACTORY}enable_liger_kernel: true\nuse_dft_loss: true\nbf16: true\n")
    assert (run.config.loss, run.config.kernels, FUSED in run.notes) == ("full", "liger", False)


def test_new_words_train_embedding_and_head_in_llamafactory(read):
    """Unless the file says what else is trained."""
    assert read(f"{FACTORY}resize_vocab: true\n").config.modules_to_save == "embedding_and_head"
    assert read(f"{FACTORY}add_tokens: a,b\n").config.modules_to_save == "embedding_and_head"
    named = read(f"{FACTORY}resize_vocab: true\nadditional_target: lm_head\n")
    assert named.config.modules_to_save == "head"


@pytest.mark.parametrize(
    ("line", "targets"),
    [
        ("lora_target_modules: all-linear", "all-linear"),
        ("lora_target_modules: [v_proj, q_proj]", "q_proj,v_proj"),
        ("lora_target_modules: [up_proj, down_proj, q_proj]", "down_proj,q_proj,up_proj"),
        ("lora_target_modules: .*dense", "all-linear"),  # the names that match are not known
    ],
)
def test_where_the_adapters_are(line, targets, read):
    assert read(with_lines(LORA["trl"], line)).config.lora_targets == targets


@pytest.mark.parametrize("tool", ["trl", "axolotl"])
@pytest.mark.parametrize(
    ("modules", "parameters", "targets"),
    [
        (
            "q_proj, k_proj, v_proj, o_proj",
            "mlp.experts.gate_up_proj, experts.up_proj, experts.down_proj",
            "attention_experts",
        ),
        ("q_proj, o_proj", "experts.down_proj", "experts.down_proj,o_proj,q_proj"),
        ("q_proj, down_proj", "experts.down_proj", "down_proj,experts.down_proj,q_proj"),
        ("q_proj, o_proj", "7.mlp.experts.down_proj", "o_proj,q_proj"),  # of one layer
        ("q_proj, o_proj", "experts.down_proj, gate.weight", "o_proj,q_proj"),
    ],
)
def test_adapters_on_experts_are_read(tool, modules, parameters, targets, read):
    plain = read(LORA[tool])
    lines = (
        f"lora_target_linear: false\nlora_target_modules: [{modules}]\n"
        f"lora_target_parameters: [{parameters}]\nlora_dropout: 0.0"
    )
    if tool == "trl":
        lines = lines.partition("\n")[2]
    run = read(with_lines(LORA[tool], lines))
    counted = "experts" in targets
    assert any("lora_target_parameters" in note for note in run.notes) is not counted
    assert plain.needs_more is False and run.needs_more is not counted
    assert adapt_to_model(run, resolve_model("mixtral-8x7b")).config.lora_targets == targets


@pytest.mark.parametrize(
    ("lines", "packed", "notes"),
    [
        ("adapter: qlora\nload_in_4bit: true\nquantize_moe_experts: true", True, ["Axolotl keeps"]),
        ("adapter: qlora\nload_in_4bit: true\nquantize_moe_experts: false", False, []),
        ("load_in_8bit: true\nquantize_moe_experts: true", False, ["less memory than estimated"]),
    ],
)
def test_axolotls_experts_in_4_bits_are_read(lines, packed, notes, read):
    plain = read(with_lines(LORA["axolotl"], lines.rpartition("\n")[0]))
    run = read(with_lines(LORA["axolotl"], lines))
    assert run.config.quantize_experts is packed
    assert run.needs_more is packed and not plain.needs_more
    more = [note for note in run.notes if note not in plain.notes]
    assert len(more) == len(notes) and all(map(str.__contains__, more, notes))

    mixture = adapt_to_model(run, resolve_model("qwen3-30b-a3b"))
    dense = adapt_to_model(run, resolve_model("qwen3-8b"))
    assert mixture.config.quantize_experts is packed and not dense.config.quantize_experts
    assert not any("Axolotl keeps" in note for note in dense.notes)


def test_ligers_kernels_give_way_to_axolotls_experts_in_4_bits(read):
    """Both together cannot be counted, and the experts decide whether the run fits."""
    lines = "adapter: qlora\nload_in_4bit: true\nquantize_moe_experts: true\nliger_rope: true\n"
    run = read(with_lines(LORA["axolotl"], lines + "plugins: [axolotl.LigerPlugin]"))
    assert run.config.quantize_experts and run.config.kernels == "torch"
    assert any("Liger's kernels are not counted" in note for note in run.notes)

    mixture = adapt_to_model(run, resolve_model("qwen3-30b-a3b"))
    assert mixture.config.quantize_experts and mixture.notes == run.notes
    dense = adapt_to_model(run, resolve_model("qwen3-8b"))
    assert dense.config.kernels == "liger"
    assert not any("Liger's" in note or "Axolotl keeps" in note for note in dense.notes)


@pytest.mark.parametrize(
    ("tool", "line", "saved"),
    [
        ("trl", "lora_modules_to_save: [lm_head]", "head"),
        ("axolotl", "lora_modules_to_save: [embed_tokens, lm_head]", "embedding_and_head"),
        ("axolotl", "lora_modules_to_save: []", "none"),
        ("llamafactory", "additional_target: model.embed_tokens", "embedding"),
        ("llamafactory", "additional_target: embed_out,wte", "embedding_and_head"),
    ],
)
def test_what_is_trained_whole(tool, line, saved, read):
    """It is counted, so there is no note on it."""
    plain, found = read(LORA[tool]), read(with_lines(LORA[tool], line))
    assert (found.config.modules_to_save, found.notes) == (saved, plain.notes)


@pytest.mark.parametrize(
    ("model", "targets", "known", "absent"),
    [
        ("mistral-7b", "q_proj,v_proj", "q_v", ""),
        ("mistral-7b", "k_proj,o_proj,q_proj,v_proj", "attention", ""),
        (
            "mistral-7b",
            "down_proj,gate_proj,k_proj,lm_head,o_proj,q_proj,up_proj,v_proj",
            "all-linear",
            "",
        ),
        ("mistral-7b", "nope_proj,q_proj", "q_proj", "nope_proj"),
        ("mistral-7b", "mlp.up_proj,self_attn.q_proj", "mlp.up_proj,self_attn.q_proj", ""),
        ("phi-3-mini", "qkv_proj", "q_v", ""),
        ("phi-3-mini", "k_proj,o_proj,q_proj,v_proj", "o_proj", "k_proj, q_proj, v_proj"),
        ("phi-3-mini", "down_proj,gate_up_proj,o_proj,qkv_proj", "all-linear", ""),
        ("gpt2", "c_attn", "q_v", ""),
        ("gpt2", "c_attn,c_fc", "c_attn,c_fc", ""),
        (
            "mixtral-8x7b",
            "down_proj,gate_proj,k_proj,o_proj,q_proj,up_proj,v_proj",
            "all-linear",
            "",
        ),
        ("mistral-7b", "attention", "attention", ""),
    ],
)
def test_names_of_layers_are_those_of_the_model(model, targets, known, absent, read):
    run = read(LORA["trl"])
    # TRL would refuse an adapter on the head.
    named = replace(run, format="axolotl", config=replace(run.config, lora_targets=targets))
    found = adapt_to_model(named, resolve_model(model))
    assert found.config.lora_targets == known
    note = f"No linear layer of this model is named '{absent}': PEFT adds no adapter for it."
    assert found.notes == (*run.notes, *([note] if absent else []))


def test_without_a_table_of_sizes_the_built_model_names_its_layers(read, monkeypatch):
    """GLM-4 computes gate and up in one layer, so PEFT finds neither name."""
    usual = "down_proj,gate_proj,k_proj,o_proj,q_proj,up_proj,v_proj"
    run, glm = read(LORA["trl"]), resolve_model("zai-org/GLM-4-9B-0414")
    named = replace(run, format="axolotl", config=replace(run.config, lora_targets=usual))
    attention = [f"self_attn.{name}_proj" for name in "qkvo"]
    shape = ModelShape(
        num_layers=40,
        prefix=0,
        period=1,
        linear_layers=(*attention, "mlp.gate_up_proj", "mlp.down_proj"),
    )
    monkeypatch.setattr(foreign_config, "shape_of", lambda model: shape)
    found = adapt_to_model(named, glm)
    assert found.config.lora_targets == "down_proj,k_proj,o_proj,q_proj,v_proj"
    assert "named 'gate_proj, up_proj': PEFT adds no adapter" in found.notes[-1]

    monkeypatch.setattr(foreign_config, "shape_of", lambda model: None)  # without torch
    assert adapt_to_model(named, glm).config.lora_targets == "all-linear"


def test_all_linear_layers_are_refused_where_peft_takes_only_some(read):
    run, mamba = read(LORA["trl"]), resolve_model("mistralai/Mamba-Codestral-7B-v0.1")
    every = replace(run, config=replace(run.config, lora_targets="all-linear"))
    note = (
        "PEFT refuses adapters on some of this model's linear layers. The estimate has adapters"
        " only on in_proj: name these layers in the file."
    )
    assert adapt_to_model(every, mamba).notes[-1] == note
    named = adapt_to_model(replace(run, config=replace(run.config, lora_targets="in_proj")), mamba)
    assert named.config.lora_targets == "all-linear" and note not in named.notes


def test_names_that_no_layer_has_are_refused(read):
    run = read(LORA["trl"])
    named = replace(run, config=replace(run.config, lora_targets="c_attn,query_key_value"))
    with pytest.raises(
        UsageError, match="no linear layer of this model is named 'c_attn, query_key_value'"
    ):
        adapt_to_model(named, resolve_model("mistral-7b"))


def test_what_needs_no_note(read):
    for tool, note, line in (
        ("trl", FP32_BASE, "dtype: bfloat16"),
        ("trl", PEFT, "lora_target_modules: all-linear"),
        ("trl", PEFT, "lora_target_modules: [qkv_proj, o_proj, gate_up_proj, down_proj]"),
        ("axolotl", PEFT, "lora_target_linear: true"),
        *(
            ("axolotl", KERNELS, line)
            for line in ("load_in_8bit: 1", "trust_remote_code: 1", "lora_o_kernel: false")
        ),
    ):
        assert note in read(LORA[tool]).notes
        assert note not in read(with_lines(LORA[tool], line)).notes


# --- checkpoints in a quantised format


@pytest.mark.parametrize(
    ("model", "method", "quantization"),
    [
        ("TechxGenus/Meta-Llama-3-8B-Instruct-AWQ", "AWQ", "nf4"),
        ("TheBloke/Llama-2-7B-GPTQ", "GPTQ", "nf4"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", "GPTQ", "int8"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "GPTQ", "nf4"),
    ],
)
def test_a_checkpoint_of_gptq_or_awq_is_counted_as_bitsandbytes(model, method, quantization, read):
    run = read(FACTORY.replace("org/m", model))
    assert run.config.quantization == quantization
    assert f"The base is quantised by {method}, but the estimate assumes bitsandbytes." in run.notes
    with pytest.raises(UsageError, match="model_name_or_path: a quantised base can only"):
        read(f"{FACTORY.replace('org/m', model)}finetuning_type: full\n")


def test_a_base_that_axolotl_dequantises_has_16_bits(read):
    kept = "model_quantization_config: Mxfp4Config\nmodel_quantization_config_kwargs: "
    run = read(f"{LORA['axolotl']}{kept}{{dequantize: true}}\n")
    assert run == read(LORA["axolotl"])
    assert read(f"{LORA['axolotl']}gptq: true\n").config.quantization == "nf4"


def test_losses_of_their_own_read_all_logits(read):
    for text in (f"{FACTORY}use_asft_loss: true\n", f"{AXOLOTL}diffusion: {{eps: 0.1}}\n"):
        run = read(text)
        assert run.config.loss == "full" and run.needs_more
        assert "the run needs more memory and time than estimated" in " ".join(run.notes)


def test_freezing_trains_all_layers_at_most(read):
    run = read(f"{FACTORY}finetuning_type: freeze\nbf16: true\n")
    assert run.config.label().startswith("full 8x2048 bf16_mixed")
    assert run.values["freeze_trainable_layers"] == 2
    assert "freeze_trainable_layers is not counted: the run needs less memory" in " ".join(
        run.notes
    )
    assert any(note.startswith("finetuning_type is freeze") for note in run.notes)


def test_oft_is_at_least_a_small_lora(read):
    """LLaMA-Factory's examples/extras/oft; its keys for LoRA have no effect."""
    oft = f"{FACTORY}finetuning_type: oft\noft_target: q_proj,v_proj\nbf16: true\n"
    run = read(f"{oft}oft_block_size: 64\nlora_rank: 256\nlora_target: all\n")
    assert run.config.label().startswith("lora r8 8x2048 bf16_mixed")
    assert run.config.lora_targets == "q_proj,v_proj" and run.needs_more
    assert run.notes == (
        "OFT is counted as small adapters of LoRA, so the run needs more memory and takes more time"
        " than estimated.",
    )
    assert read(oft).config.lora_rank == 4
    assert read(f"{oft}oft_rank: 8\noft_block_size: 0\n").config.lora_rank == 1


# --- what is refused


QUANTISED = "a quantised base can only be trained with adapters"
REFUSED = {
    (
        "llamafactory",
        "stage: ppo",
    ): "'ppo' is none of the objectives dpo, kto, pt, rm, sft: it generates answers"
    " during training, which no probe does",
    (
        "llamafactory",
        "finetuning_type: vera",
    ): "lora, full, freeze or oft is supported, not 'vera'",
    ("llamafactory", "quantization_bit: 3"): "4 or 8 is supported, not 3",
    ("llamafactory", "do_train: false"): "is not true, so LLaMA-Factory trains nothing",
    (
        "axolotl",
        "rl: orpo",
    ): "'orpo' is none of the objectives dpo, grpo, ipo, kto: no probe trains for it",
    (
        "axolotl",
        "process_reward_model: true",
    ): "its objective is none of sft, dpo, kto, reward and grpo, and autotune cannot train for it",
    ("axolotl", "adapter: llama-adapter"): "lora, qlora or none is supported, not 'llama-adapter'",
    ("axolotl", "adapter: qlora"): "Axolotl refuses qlora without load_in_4bit: true",
    ("axolotl", "lora_r:"): "is missing, and has no default",
    (
        "axolotl",
        "model_quantization_config: Mxfp4Config",
    ): "a base that stays in this format is not supported",
    (
        "axolotl",
        "kd_trainer: true",
    ): "its objective is knowledge distillation, which is not supported",
    ("axolotl", "max_packed_sequence_len: 2048"): "Axolotl no longer accepts this key",
    ("llamafactory", "use_megatron_bridge: true"): "it is not supported",
    (
        "llamafactory",
        "sequence_parallel: true",
    ): "Megatron splits the model in its own way, which is not supported",
    (
        "trl",
        "beta: 0.1",
    ): "the file does not say if the objective is dpo, kto or another; only TRL's command says it",
    ("trl", "loss_type: orpo"): "no supported trainer of TRL has the loss 'orpo'",
    (
        "trl",
        "max_length: null",
    ): "without a value, no sequence is truncated, so the longest sequence is unknown",
    ("trl", "dtype: int8"): "auto, bfloat16, float16 or float32 is needed, not 'int8'",
    ("trl", "model_name_or_path:"): "is missing",
    ("trl", "num_train_epochs: 0"): "a number from 0.001 to 1,000,000,000,000,000 is needed, not 0",
    ("trl", "max_length: 1.5"): "a whole number is needed, not 1.5",
}
WRONG = {  # by what is needed
    "true or false": {
        "group_by_length": {"3": "3"},
        "packing": {"maybe": "'maybe'", "[1]": "[1]", "2": "2"},
        "'fp16'": {"{a: 1}": "{'a': 1}"},
    },
    "a name": {
        "optim": {"8": "8", "{a: b}": "{'a': 'b'}", '"\\e[31m"': "'\\x1b[31m'"},
        "dtype": {"[m]": "['m']"},
    },
    "names": {
        "datasets": {
            "3": "3",
            "[3]": "[3]",
            "[{path: [a]}]": "[{'path': ['a']}]",
            '["\\0"]': "['\\x00']",
        }
    },
    "keys with values": {
        "model_init_kwargs": {"text": "'text'"},
        "gradient_checkpointing_kwargs": {"[1]": "[1]"},
    },
    "a number from 1 to 16,777,216": {
        "max_length": {
            "-1": "-1",
            "0": "0",
            "true": "True",
            "[1]": "[1]",
            "{a: 1}": "{'a': 1}",
            ".nan": "nan",
        }
        | {".inf": "inf", "few": "'few'", "1e9": "'1e9'", "2024-01-02": "datetime.date(2024, 1, 2)"}
        | {f"0x{'f' * 5000}": "a number with thousands of digits"}
    },
}
REFUSED |= {
    ("trl", f"{key}: {value}"): f"{needed} is needed, not {shown}".replace(
        "s is needed", "s are needed"
    )
    for needed, keys in WRONG.items()
    for key, values in keys.items()
    for value, shown in values.items()
}


@pytest.mark.parametrize(("tool", "line"), REFUSED)
def test_what_is_refused(tool, line, failure):
    key = line.partition(":")[0].strip("'")
    kept = [old for old in LORA[tool].splitlines() if not old.startswith(f"{key}:")]
    reported = failure("\n".join([*kept, line, ""]))
    assert reported == f"FILE:{len(kept) + 1}: {key}: {REFUSED[tool, line]}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{AXOLOTL}load_in_8bit: true\n", f"FILE:3: load_in_8bit: {QUANTISED}"),
        (f"{TRL}load_in_4bit: true\n", f"FILE:3: load_in_4bit: {QUANTISED}"),
        (f"{FACTORY}finetuning_type: full\nquantization_bit: 4\n", "FILE:5: quantization_bit:"
         f" {QUANTISED}"),
        ("template: qwen\ndo_train: true\nexport_dir: out\n",
         "FILE: model_name_or_path: is missing"),
        ("template: qwen\nexport_dir: out\n", "FILE is a file that merges or exports a trained"
         " model: it describes no"),
        ("export_dir: out\nexport_quantization_bit: 4\n", "FILE is a file that quantises a trained"
         " model: it descr"),
        (f"{FACTORY}do_predict: true\n".replace("do_train: true\n", ""),
         "FILE is a file for inference with a trained"),
        ("compute_environment: LOCAL_MACHINE\nfsdp_config: {}\n",
         "FILE is accelerate's configuration, which says how"),
        ("zero_optimization: {stage: 3}\n", "FILE is a configuration of DeepSpeed, which says how"
         " GPUs share"),
        ("project_name: p\nsecrets: [HF_TOKEN]\n", "FILE is a configuration of the cloud, which"
         " says on which mach"),
        ("{base_model: m, sequence_len: no}", "FILE: sequence_len: a number from 1 to 16,777,216 is"
         " needed, not False"),
        ("", "FILE has no keys with values"),
        ("- base_model\n", "FILE has no keys with values"),
        ("model_name_or_path: m\n", "FILE: cannot tell which tool it is for: it has no key of a"
         " training, such as dataset_name, use_peft, max_length of trl; base_model,"
         " micro_batch_size, sequence_len of axolotl; stage, "),
        ("cutoff_len: 2048\nbase_model: m\n",
         "FILE: cannot tell which tool it is for: it has both base_model of axolotl; cutoff_len of"
         " llamafactory"),
        # LLaMA-Factory's examples/v1/train_lora/export_lora.yaml, and one that trains
        ("model: m\npeft_config:\n  name: lora\n  export_dir: out\n",
         "FILE: the format of LLaMA-Factory v1 is not supported"),
        ("model: m\nmodel_class: llm\ntrain_dataset: d\ncutoff_len: 2048\nmicro_batch_size: 1\n",
         "FILE: the format of LLaMA-Factory v1 is not supported"),
        ("base_model: !!python/object/apply:os.system [touch CANARY]\n", "FILE:1: not valid YAML:"
         " could not determine"),
        ("base_model: m\nsequence_len: !!bool maybe\n", "FILE: not valid YAML: a value does not"
         " match its YAML tag"),
        (f"base_model: m\nsequence_len: {'9' * 5000}\n", "FILE: not valid YAML: Exceeds the limit"),
        ("base_model: m\nbase_model: n\n", "FILE:2: not valid YAML: 'base_model' occurs twice"),
        ("base_model: m\n--- \nbase_model: n\n", "FILE:2: not valid YAML: but found another"
         " document"),
        ("a: &a [*a]\n", "FILE: not valid YAML: more than 10,000 values after its aliases are"
         " expanded"),
        ("a0: &a0 [x]\n"
         + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)),
         "FILE: not valid YAML: more than 10,000 values after its aliases are expanded"),
        ("[" * 100_000, "FILE: not valid YAML: nested too deeply"),
        (b"base_model: caf\xe9\n", "cannot read FILE: it is not UTF-8 text"),
        (b"base_model: \x00\n", "FILE:1: not valid YAML: special characters are not allowed"),
        ("#" * (MAX_BYTES + 1), "cannot read FILE: it has more than 1 MiB"),
    ],
)  # fmt: skip
def test_whole_files_are_refused(text, message, failure, tmp_path):
    assert failure(text).startswith(message)
    assert not (tmp_path / "CANARY").exists()


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (
        tmp_path,
        tmp_path / "absent",
        tmp_path / "pipe",
        Path("/dev/zero"),
        Path("a\0b"),
        Path("x" * 5000),
    ):
        with pytest.raises(UsageError, match="cannot read") as caught:
            read_file(path)
        assert caught.value.remedy


def test_a_byte_order_mark_and_long_values(read, failure):
    assert read("\ufeffbase_model: m\r\nsequence_len: 64\r\n").config.seq_len == 64
    assert len(failure(f"{TRL}packing: {'x' * 10_000}\n")) < 200


def test_values_are_parsed_as_the_file_is_read(tmp_path):
    for tool, text in LORA.items():
        path = tmp_path / f"{tool}.yaml"
        path.write_text(text)
        run = read_file(path)
        assert parse(run.values, tool) == run
    with pytest.raises(UsageError, match=r"^model_name_or_path: is missing"):
        parse({}, "trl")


@pytest.mark.parametrize(
    ("max_steps", "epochs", "steps"),
    [("", 3.0, None), ("-1", 3.0, None), ("0", 3.0, None), ("1", None, 1)],
)
def test_steps_take_the_place_of_epochs_from_one_on(max_steps, epochs, steps, read):
    run = read(f"{TRL}max_steps: {max_steps}\n")
    assert (run.epochs, run.max_steps) == (epochs, steps)


@pytest.mark.parametrize(
    ("lines", "noted"),
    [
        ("16", False),
        ("32", False),
        ("33", True),
        ("4", False),
        ("3.9", True),
        ("64", False),
        ("64.1", True),
        ("64.1\nuse_rslora: true", False),
    ],
)
def test_an_alpha_from_a_quarter_of_the_rank_to_four_times_is_usual(lines, noted, read):
    """Of rank 16, in LLaMA-Factory's file without notes; the first three are of rank 256."""
    rank = 256 if lines in ("16", "32", "33") else 16
    run = read(f"{FACTORY}bf16: true\nlora_rank: {rank}\nlora_alpha: {lines}\n")
    assert bool(run.notes) is noted
    assert read(f"{FACTORY}bf16: true\nlora_rank: 1\nlora_alpha: 0.5\n").notes == ()


def test_attention_is_eager_where_transformers_has_no_other(read):
    run, gemma, mistral = (
        read(LORA["trl"]),
        resolve_model("gemma-2-9b"),
        resolve_model("mistral-7b"),
    )
    eager = adapt_to_model(run, gemma)
    assert eager.config == replace(run.config, attention="eager") and eager.model == run.model
    assert adapt_to_model(run, mistral) == run
    flash = read(f"{LORA['trl']}attn_implementation: flash_attention_2\n")
    assert adapt_to_model(flash, gemma) == flash


@pytest.mark.parametrize(
    ("text", "padding"),
    [
        (f"{TRL}max_length: 2\n", "longest"),
        (f"{TRL}max_length: 2\npad_to_multiple_of: 2\n", "max_length"),
        (f"{TRL}max_length: 3\npad_to_multiple_of: 2\n", "longest"),
    ],
)
def test_rows_are_filled_where_they_are_padded_to_a_multiple_as_long(text, padding, read):
    assert read(text).config.padding == padding


@pytest.mark.parametrize(
    ("lines", "precision"),
    [
        ("", "bf16_mixed"),  # of adapters, which are in fp32 beside a base as published
        ("finetuning_type: full\n", "fp32"),
        ("pure_bf16: true\nbf16: true\n", "bf16_pure"),
        ("bf16: true\n", "bf16_mixed"),
        ("finetuning_type: full\nfp16: true\n", "fp16_mixed"),
        ("finetuning_type: full\nuse_badam: true\n", "bf16_pure"),
    ],
)
def test_precision_without_autocast_is_that_of_what_is_trained(lines, precision, read):
    assert read(FACTORY + lines).config.precision == precision


def test_an_older_key_of_axolotl_has_the_rows_of_a_step(read):
    """Rows of a step over those of a micro batch, rounded down and one at least.

    Axolotl takes no accumulation too.
    """
    steps = {size: read(f"{AXOLOTL}batch_size: {size}\n").accumulation for size in (1, 2, 7, 8)}
    assert steps == {1: 1, 2: 1, 7: 3, 8: 4}
    with pytest.raises(
        UsageError, match="does not take both gradient_accumulation_steps and batch_size"
    ):
        read(f"{AXOLOTL}batch_size: 8\ngradient_accumulation_steps: 3\n")


def test_devices_are_multiplied_and_examples_counted_for_each_dataset(read):
    run = read(f"{FACTORY}num_processes: 2\ndp_replicate_size: 3\ntensor_parallel_size: 1\n")
    assert run.num_gpus == 6 and read(FACTORY).num_gpus is None
    assert read(f"{FACTORY}max_samples: 10\n").max_examples == 10  # without a dataset that is named
    assert read(f"{FACTORY}max_samples: 10\ndataset: a, b ,c\n").max_examples == 30
    assert read(f"{FACTORY}dataset: a, b ,c\n").max_examples is None
    several = read(f"{AXOLOTL}datasets:\n  - path: a\n  - b\n  - {{type: x}}\n")
    assert several.dataset == "a,b" and read(AXOLOTL).dataset is None


@pytest.mark.parametrize(
    ("line", "workers"),
    [("", 2), ("dataloader_num_workers: 0", 0), ("dataloader_pin_memory: false", 0)],
)
def test_axolotl_starts_a_worker_by_default(line, workers, read):
    assert read(f"{AXOLOTL}{line}\n").config.loader_workers == workers
    assert read(TRL).config.loader_workers == 0


@pytest.mark.parametrize(
    ("line", "workers"),
    [("0", 0), ("1", 2), ("2", 2), ("3", 4), ("4", 4), ("5", 8), ("8", 8), ("64", 8)],
)
def test_workers_of_a_loader_are_as_many_as_autotune_tries_or_the_next(line, workers, read):
    assert read(f"{TRL}dataloader_num_workers: {line}\n").config.loader_workers == workers


@pytest.mark.parametrize(
    ("value", "flag"),
    [
        *(
            (value, True)
            for value in ("true", "'True'", "yes", "'YES'", "on", "'1'", "1", "auto", "1.0")
        ),
        *((value, False) for value in ("false", "'no'", "off", "'0'", "0", "", "null", "0.0")),
    ],
)
def test_each_form_of_true_and_false(value, flag, read):
    assert read(f"{TRL}packing: {value}\n").config.packing is flag


@pytest.mark.parametrize("value", ["", "null", "false", "''", "'false'", "[]", "{}"])
def test_what_is_empty_or_off_is_not_there(value, read):
    assert SHARDED not in read(f"{TRL}deepspeed: {value}\n").notes
    assert SHARDED in read(f"{TRL}deepspeed: ds.json\n").notes


def test_an_error_names_the_line_of_its_key_in_any_spelling(failure):
    for line in ("'packing' : maybe", '"packing": maybe', "packing: maybe"):
        assert (
            failure(f"{TRL}# packing: no\n{line}\n")
            == "FILE:4: packing: true or false is needed, not 'maybe'"
        )
    many = "1234567890" * 7
    assert failure(f"{TRL}packing: {many}x\n").endswith(f"not '{many[:56]}...")
    assert failure(f"{TRL}packing: {many[:58]}\n").endswith(f"not {many[:58]}")


@pytest.mark.parametrize(
    "key", ["max_length", "per_device_train_batch_size", "gradient_accumulation_steps", "lora_r"]
)
def test_counts_are_whole_numbers_up_to_the_most_that_is_tried(key, read, failure):
    assert read(f"{LORA['trl']}{key}: {2**24}\n") and read(f"{LORA['trl']}{key}: 1\n")
    for wrong in ("0", str(2**24 + 1), "1.5", "nan"):
        assert f"{key}: a " in failure(f"{LORA['trl']}{key}: {wrong}\n")


@pytest.mark.parametrize(
    ("lines", "checkpointing"),
    [
        ("", "full"),
        ("gradient_checkpointing: false", "none"),
        ("activation_checkpointing: false\ngradient_checkpointing: true", "none"),
        ("gradient_checkpointing_kwargs: {every_n_layers: 1}", "full"),
        ("gradient_checkpointing_kwargs: {every_n_layers: 3}", "every_3"),
        ("activation_checkpointing_kwargs: {every_n_layers: 9999}", "every_9999"),
        ("gradient_checkpointing_kwargs: {every_n_layers: 3, offload: true}", "offload"),
        ("activation_offloading: true\ngradient_checkpointing: false", "none"),
    ],
)
def test_what_trl_recomputes(lines, checkpointing, read, failure):
    assert read(f"{TRL}{lines}\n").config.checkpointing == checkpointing
    assert "every_n_layers: a number from 1 to 9,999" in failure(
        f"{TRL}gradient_checkpointing_kwargs: {{every_n_layers: 10000}}\n"
    )


@pytest.mark.parametrize(
    ("tool", "line", "assumed"),
    [
        ("trl", "max_steps: auto", -1),
        ("trl", "num_train_epochs: auto", 3),
        ("trl", "dataloader_num_workers: auto", 0),
        ("trl", "per_device_train_batch_size: auto", 8),
        ("trl", "max_length: auto", 1024),
        ("trl", "pad_to_multiple_of: auto", 1),
        ("trl", "num_processes: auto", 1),
        ("trl", "tensor_parallel_size: auto", 1),
        ("trl", "lora_r: auto", 16),
        ("trl", "lora_alpha: auto", 32),
        ("trl", "gradient_checkpointing_kwargs: {every_n_layers: auto}", 1),
        ("axolotl", "batch_size: auto", 2),
        ("llamafactory", "max_samples: auto", 0),
        ("llamafactory", "quantization_bit: auto", 16),
        ("llamafactory", "lora_rank: auto", 8),
    ],
)
def test_auto_is_what_the_tool_assumes_and_says_so_once(tool, line, assumed, read):
    """-1 steps and 0 examples are no limit; alpha is twice the rank."""
    key = line.rpartition("{")[2].partition(":")[0]
    assert [note for note in read(with_lines(LORA[tool], line)).notes if " is auto: " in note] == [
        f"{key} is auto: {assumed} is assumed."
    ]


@pytest.mark.parametrize(
    ("tool", "key", "least", "most"),
    [
        ("trl", "max_steps", "-1000000000000000", "1000000000000000"),
        ("trl", "num_train_epochs", "0.001", "1000000000000000"),
        ("trl", "dataloader_num_workers", "0", "16777216"),
        ("trl", "lora_alpha", "0", "16777216"),
        ("trl", "pad_to_multiple_of", "1", "16777216"),
        ("axolotl", "batch_size", "1", "16777216"),
        ("llamafactory", "max_samples", "1", "1000000000000000"),
    ],
)
def test_the_least_and_the_most_of_each_number_of_a_file(tool, key, least, most, read, failure):
    for value in (least, most):
        assert read(with_lines(LORA[tool], f"{key}: {value}"))
    below = "0.0009" if "." in least else str(int(least) - 1)
    for value in (below, str(int(most) + 1)):
        wrong = failure(with_lines(LORA[tool], f"{key}: {value}"))
        assert (
            f"{key}: a number from {float(least):g} to {int(most):,} is needed, not {value}"
            in wrong
        )


def test_what_llamafactory_trains_where_its_file_leaves_it_out(read):
    """Supervised, by LoRA of rank 8 without packing, quantised by bitsandbytes alone."""
    run = read(
        "model_name_or_path: m\ndo_train: true\ntemplate: qwen\nbf16: true\nquantization_bit: 8\n"
    )
    assert (run.config.method, run.config.lora_rank, run.config.packing) == ("lora", 8, False)
    assert (run.config.quantization, run.notes) == ("int8", ())


def test_keys_that_are_no_text_are_passed_over(read):
    run = read(
        "base_model: m\n3: 4\nnull: 5\nbnb_config_kwargs: {1: 2, bnb_4bit_use_double_quant:"
        " false}\n"
    )
    assert (
        list(run.values) == ["base_model", "bnb_config_kwargs"] and run.config.double_quant is False
    )


def test_sixty_characters_of_a_wrong_value_are_shown(failure):
    """With the quotes around it; of a longer one 57, and three points."""
    assert failure(f"{TRL}packing: {'x' * 58}\n").endswith(f"not '{'x' * 58}'")
    assert failure(f"{TRL}packing: {'x' * 59}\n").endswith(f"not '{'x' * 56}...")


@pytest.mark.parametrize(
    ("written", "share"),
    [("0.0", 0.0), ("0.001", 0.05), ("0.05", 0.05), ("0.08", 0.1), ("0.5", 0.1)],
)
def test_dropout_above_zero_stays_above_zero(read, written, share):
    run = read(
        "model_name_or_path: Qwen/Qwen2.5-0.5B\ndataset_name: a/b\nuse_peft: true\n"
        "lora_target_modules: all-linear\n"
        f"lora_dropout: {written}\n"
    )
    assert run.config.lora_dropout == share


# (tool, lines, objective, a part of its notes), of the tools' own examples
OTHERS: list[tuple[str, str, str, str]] = [
    ("trl", "loss_type: ipo", "dpo", ""),
    ("trl", "loss_type: [sigmoid, bco_pair, sft]", "dpo", ""),
    ("trl", "precompute_ref_log_probs: true", "dpo", "computed before training"),
    ("trl", "desirable_weight: 1.0", "kto", ""),
    ("trl", "center_rewards_coefficient: 0.01", "reward", ""),
    ("axolotl", "rl: ipo", "dpo", "Axolotl's TRL 1.8 computes the logits of all sequences at once"),
    ("axolotl", "rl: kto", "kto", "the upper end for all logits with their gradients"),
    ("axolotl", "reward_model: true", "reward", ""),
    (
        "axolotl",
        "rl: dpo\nrl_adapter_ref_model: true",
        "dpo",
        "with a separate reference model, the run needs more memory",
    ),
    (
        "llamafactory",
        "stage: dpo\npref_beta: 0.1\npref_loss: sigmoid",
        "dpo",
        "LLaMA-Factory computes the logits of all",
    ),
    ("llamafactory", "stage: kto", "kto", "LLaMA-Factory computes the logits of all"),
    ("llamafactory", "stage: rm", "reward", "keeps the head for the vocabulary"),
]


@pytest.mark.parametrize(("tool", "lines", "objective", "note"), OTHERS)
def test_a_file_for_another_objective_is_read(
    tool: str, lines: str, objective: str, note: str
) -> None:
    """All that trains it otherwise than today's TRL is in a note; a run of which nothing is left
    out has none.
    """
    values = yaml.safe_load(LORA[tool]) | yaml.safe_load(lines) | {"per_device_train_batch_size": 2}
    values = {
        key: value
        for key, value in values.items()
        if key not in ("packing", "sample_packing", "neat_packing")
    }
    run, plain = parse(values, tool), parse(values | dict.fromkeys(yaml.safe_load(lines)), tool)
    assert run.objective is Objective(objective) and plain.objective is Objective.SFT
    # Axolotl itself pads the rows of a reward model to sequence_len.
    padding = "max_length" if (tool, objective) == ("axolotl", "reward") else "masked"
    assert (run.config.padding, run.config.loss, run.config.packing) == (padding, "chunked", False)
    assert any(note in one for one in run.notes)
    assert run.whole_logits is (tool != "trl" and objective != "reward")
    left_out = "ref_model" in lines or (tool, objective) == ("llamafactory", "reward")
    assert run.needs_more is (left_out or plain.needs_more)


def test_pairs_are_neither_packed_nor_single_answers_of_kto() -> None:
    values = yaml.safe_load(LORA["axolotl"]) | {"rl": "kto", "sample_packing": True}
    with pytest.raises(UsageError, match="sequences of kto are not packed"):
        parse(values, "axolotl")
    single = values | {"sample_packing": False, "micro_batch_size": 1}
    with pytest.raises(UsageError, match="TRL compares the answers within a micro batch"):
        parse(single, "axolotl")
    assert parse(single | {"rl": False}, "axolotl").objective is Objective.SFT
    alone = yaml.safe_load(LORA["trl"]) | {"packing": False, "per_device_train_batch_size": 1}
    assert parse(alone | {"loss_type": "apo_zero_unpaired"}, "trl").config.micro_batch_size == 1
    values = yaml.safe_load(LORA["llamafactory"]) | {"stage": "dpo", "pref_loss": "simpo"}
    with pytest.raises(UsageError, match="no probe trains for simpo"):
        parse(values, "llamafactory")


def test_an_unknown_loss_of_grpo_gets_the_known_ones() -> None:
    values = yaml.safe_load(LORA["trl"]) | {"loss_type": "foo"}
    with pytest.raises(UsageError) as caught:
        parse(values, "trl")
    assert "for sft, dpo, kto, grpo or reward" in (caught.value.remedy or "")
    with pytest.raises(UsageError, match="GRPO has no loss 'foo'") as caught:
        parse(values | {"num_generations": 4}, "trl")
    assert (caught.value.remedy or "").startswith("write one of grpo, bnpo, dr_grpo, dapo")


@pytest.mark.parametrize(
    ("command", "losses", "wrong"),
    [
        ("grpo", "foo", "foo"),
        ("grpo", "sigmoid", "sigmoid"),
        ("dpo", "sigmoid foo", "foo"),
        ("sft", "dapo", "dapo"),
        ("reward", "nll", "nll"),
        ("grpo", "dapo", None),
        ("dpo", "sigmoid ipo", None),
        ("reward", None, None),
    ],
)
def test_a_script_names_the_command_of_trl_and_its_losses(
    command: str, losses: str | None, wrong: str | None, tmp_path: Path
) -> None:
    """`--objective` says the same as the command."""
    script, file = tmp_path / "run.sh", tmp_path / "run.yaml"
    words = f"trl {command} --model_name_or_path m --use_peft true"
    script.write_text(words + (f" --loss_type {losses}" if losses else ""))
    loss = f"loss_type: [{losses.replace(' ', ', ')}]\n" if losses else ""
    file.write_text(f"model_name_or_path: m\nuse_peft: true\n{loss}")
    if wrong is None:
        found = read_file(script)
        assert found.objective == command and found.config == read_file(file, command).config
        return
    for path, objective in ((script, None), (file, command)):
        with pytest.raises(UsageError, match=f"{command.upper()} has no loss '{wrong}'"):
            read_file(path, objective)


def test_the_command_of_trl_says_what_its_file_may_not(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(LORA["trl"] + "beta: 0.1\n")
    assert read_file(file, "dpo").objective is Objective.DPO
    with pytest.raises(UsageError) as caught:
        read_file(file)
    assert caught.value.remedy == "give --objective dpo, kto or reward"
    for named in ("classification", "rloo", "foo"):
        with pytest.raises(UsageError, match=f"no command of TRL trains for '{named}'"):
            read_file(file, named)
    file.write_text(LORA["trl"] + "objective: foo\n")
    assert read_file(file).objective is Objective.SFT


# --- keys that the tool does not have, files beside the run's, and files of other tools


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            f"{FACTORY}lora_rnak: 128\n",
            "FILE:4: lora_rnak: LLaMA-Factory 0.9.5 has no such key, and refuses the file; did you"
            " mean 'lora_rank'",
        ),
        (
            f"{TRL}max_len: 16384\nlora_ranks: 128\n",
            "FILE:3: max_len: TRL 1.16 has no such key, and refuses the file; did you mean"
            " 'max_length'",
        ),
        (
            f"{FACTORY}pad_to_multiple_of: 4096\n",
            "FILE:4: pad_to_multiple_of: LLaMA-Factory 0.9.5 has no such key",
        ),
    ],
)
def test_a_key_that_the_tool_refuses_is_named_with_a_near_one(failure, text, message):
    assert failure(text).startswith(message)


def test_all_keys_that_the_tool_refuses_are_named(failure):
    assert "(also 'max_len'; did you mean 'max_length'" in failure(
        f"{TRL}lora_ranks: 128\nmax_len: 16384\n"
    )


def test_a_key_that_axolotl_ignores_is_named(read):
    run = read(f"{AXOLOTL}sample_packign: true\ndebug:\n")
    assert run.ignored.startswith(
        "ignored by Axolotl 0.19: 'sample_packign'; did you mean 'sample_packing'"
    )
    assert "debug" not in run.ignored and read(AXOLOTL).ignored == ""


def test_the_fields_of_the_installed_trl_are_known():
    trl = pytest.importorskip("trl")
    known = load_data("autotune.planning", "known_keys")["trl"]["keys"]
    for kind in (
        trl.SFTConfig,
        trl.DPOConfig,
        trl.RewardConfig,
        trl.ModelConfig,
        trl.ScriptArguments,
    ):
        assert not {field.name for field in fields(kind)} - set(known)


@pytest.mark.parametrize("key", ["new_special_tokens", "add_tokens", "add_special_tokens"])
def test_new_tokens_train_the_embeddings_under_each_name(read, key):
    assert read(f"{FACTORY}{key}: <a>,<b>\n").config.modules_to_save == "embedding_and_head"


def test_a_configuration_of_accelerate_beside_the_run_is_read(read, tmp_path):
    fsdp = {"distributed_type": "FSDP", "num_processes": 4, "fsdp_config": {"fsdp_version": 2}}
    (tmp_path / "fsdp.yaml").write_text(yaml.safe_dump(fsdp))
    run = read(f"{TRL}accelerate_config: fsdp.yaml\n")
    assert (run.num_gpus, strategy_of(run.values)) == (4, "fsdp2")
    zero = {
        "distributed_type": "DEEPSPEED",
        "num_processes": 2,
        "deepspeed_config": {"zero_stage": 2},
    }
    (tmp_path / "zero.yaml").write_text(yaml.safe_dump(zero))
    run = read(f"{TRL}accelerate_config: ./zero.yaml\n")
    assert (run.num_gpus, strategy_of(run.values)) == (2, "zero2")
    (tmp_path / "odd.yaml").write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config: text\nfsdp_config: []\n"
    )
    assert strategy_of(read(f"{TRL}accelerate_config: odd.yaml\n").values) is None
    assert strategy_of(read(f"{TRL}accelerate_config: zero3\n").values) == "zero3"


def test_a_file_that_a_run_names_and_that_is_absent_is_named(read):
    for text, name in (
        (f"{TRL}accelerate_config: a.yaml\n", "a.yaml"),
        (f"{FACTORY}deepspeed: ds.json\n", "ds.json"),
    ):
        assert ABSENT.format(name) in read(text).notes
    both = read(f"{TRL}accelerate_config: a.yaml\ndeepspeed: ds.json\n").notes
    assert {ABSENT.format("a.yaml"), ABSENT.format("ds.json")} <= set(both)


@pytest.mark.parametrize(
    ("text", "tool"),
    [
        (
            "model:\n  _component_: torchtune.models.phi3.lora_phi3_mini\nbatch_size: 2\n"
            "dtype: bf16\n",
            "torchtune",
        ),
        ("model_id_or_path: org/m\nsft_type: lora\nlora_rank: 8\n", "ms-swift 2"),
        ("task: llm-sft\nbase_model: org/m\nproject_name: p\nparams: {lr: 1}\n", "AutoTrain"),
        ("base_model: org/m\ninput_features: [1]\noutput_features: [1]\n", "Ludwig"),
        ("checkpoint_dir: m\nout_dir: o\nlora_r: 8\ntrain: {micro_batch_size: 1}\n", "LitGPT"),
    ],
)
def test_a_file_of_another_tool_is_called_by_its_name(failure, text, tool):
    assert failure(text) == f"FILE is a file of {tool}, which is not supported"


def test_a_damaged_file_that_a_run_names_is_named_with_its_line(failure, tmp_path):
    (tmp_path / "a.yaml").write_text("num_processes: [2,\n")
    assert "a.yaml:2: not valid YAML" in failure(f"{TRL}accelerate_config: a.yaml\n")
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3,}}')
    assert "ds.json: not valid JSON: " in failure(f"{FACTORY}deepspeed: ds.json\n")


def test_keys_that_fsdp_ignores_are_named(read):
    run = read(f"{AXOLOTL}fsdp_config: {{fsdp_ofload_params: true, offload_params: false}}\n")
    assert run.ignored.startswith("ignored in fsdp_config: 'fsdp_ofload_params'; did you mean 'off")
    assert read(f"{AXOLOTL}fsdp_config: {{fsdp_version: 2}}\n").ignored == ""


@pytest.mark.parametrize("targets", ["q_proj", "[q_proj]", "all_linear", "q_proj,v_proj"])
def test_a_single_target_of_trl_is_a_pattern_that_matches_nothing(failure, read, targets):
    text = f"{LORA['trl']}lora_target_modules: {targets}\n"
    assert "lora_target_modules: the run is refused at its start: TRL takes" in failure(text)
    assert read(f"{LORA['trl']}lora_target_modules: [q_proj, q_proj]\n").config.lora_targets
