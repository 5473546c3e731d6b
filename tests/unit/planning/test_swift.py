"""Runs of ms-swift other than GRPO: supervised, more pre-training, preferences, reward models."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.catalog import resolve_model
from autotune.core.errors import UsageError
from autotune.core.objective import Objective
from autotune.core.probe_types import Phase
from autotune.planning.fixes import fixes_of
from autotune.planning.foreign_config import adapt_to_model, read_file
from autotune.planning.foreign_sharding import strategy_of
from autotune.planning.run_check import check
from autotune.report.values.check import ForeignConfig

LORA = """
nproc=2
PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' NPROC_PER_NODE=$nproc CUDA_VISIBLE_DEVICES=0,1 \\
swift sft \\
    --model Qwen/Qwen2.5-7B-Instruct \\
    --tuner_type lora \\
    --dataset 'org/zh#500' 'org/en#500' \\
    --split_dataset_ratio 0.01 \\
    --num_train_epochs 1 \\
    --lora_rank 16 \\
    --target_modules all-linear \\
    --gradient_accumulation_steps $(expr 16 / $nproc) \\
    --eval_steps 50 \\
    --max_length 2048 \\
    --dataloader_num_workers 4 \\
    --deepspeed zero2
"""
PLAIN: dict[str, Any] = {"model": "Qwen/Qwen3-8B", "tuner_type": "lora", "max_length": 1024}


def of_script(tmp_path: Path, text: str) -> ForeignConfig:
    script = tmp_path / "train.sh"
    script.write_text(text)
    return read_file(script)


def of_keys(tmp_path: Path, **changes: Any) -> ForeignConfig:
    file = tmp_path / "swift.yaml"
    file.write_text(yaml.safe_dump(PLAIN | changes))
    return read_file(file)


def test_a_script_for_lora_on_two_gpus(tmp_path: Path) -> None:
    run = of_script(tmp_path, LORA)
    config = run.config
    assert (run.tool, run.objective, run.num_gpus) == ("ms-swift", Objective.SFT, 2)
    assert run.accumulation == 8 and run.epochs == 1
    assert (config.method, config.lora_rank, config.lora_targets) == ("lora", 16, "all-linear")
    assert (config.micro_batch_size, config.seq_len, config.lora_dropout) == (1, 2048, 0.05)
    assert (config.precision, config.checkpointing, config.loss) == ("bf16_mixed", "full", "full")
    assert strategy_of(run.values) == "zero2" and not run.ignored
    assert run.evaluation is not None and run.evaluation.rows == 1
    assert "ms-swift computes the logits of a whole micro batch at once." in run.notes
    report = check(tmp_path / "train.sh", {"gpu": "a100-80gb", "model": "qwen2.5-7b"})
    assert report.checked.state == "fits"


def test_full_fine_tuning_keeps_all_weights_in_bf16(tmp_path: Path) -> None:
    run = of_keys(tmp_path, tuner_type="full", torch_dtype="bfloat16")
    assert (run.config.method, run.config.precision) == ("full", "bf16_pure")
    assert run.accumulation == 16  # ms-swift aims at 16 examples in each step
    half = of_keys(tmp_path, torch_dtype="float16")
    assert half.config.precision == "fp16_mixed"


def test_four_bits_are_quantised_twice_by_default(tmp_path: Path) -> None:
    config = of_keys(tmp_path, quant_method="bnb", quant_bits=4).config
    assert (config.quantization, config.double_quant) == ("nf4", True)
    once = of_keys(tmp_path, quant_bits=4, bnb_4bit_use_double_quant=False).config
    assert not once.double_quant
    assert of_keys(tmp_path).config.quantization == "none"


def test_a_run_evaluates_only_if_it_has_examples_for_it(tmp_path: Path) -> None:
    assert of_keys(tmp_path).evaluation is None
    assert of_keys(tmp_path, eval_strategy="steps").evaluation is None
    assert of_keys(tmp_path, split_dataset_ratio=0.01, eval_strategy="no").evaluation is None
    found = of_keys(tmp_path, val_dataset="org/held-out", per_device_eval_batch_size=4).evaluation
    assert found is not None and found.rows == 4


@pytest.mark.parametrize(
    ("changes", "loss"),
    [
        ({}, "chunked"),
        ({"loss_scale": "last_round+ignore_empty_think"}, "chunked"),
        ({"loss_scale": "last_round+hermes"}, "full"),
        ({"enable_dft_loss": True}, "full"),
        ({"use_liger_kernel": False}, "full"),
    ],
    ids=str,
)
def test_the_loss_of_liger_holds_no_logits_unless_tokens_have_weights(
    changes: dict[str, Any], loss: str, tmp_path: Path
) -> None:
    run = of_keys(tmp_path, **({"use_liger_kernel": True, "split_dataset_ratio": 0.1} | changes))
    assert run.config.loss == loss
    assert run.evaluation is not None and run.evaluation.loss == "full"


def test_an_evaluation_has_logits_of_some_tokens_up_to_all(tmp_path: Path) -> None:
    """In training, Liger's loss holds none."""
    run = {"use_liger_kernel": True, "max_length": 8192, "split_dataset_ratio": 0.1}
    of_keys(tmp_path, **run, eval_strategy="no")
    alone = check(tmp_path / "swift.yaml", {"gpu": "h100", "model": "qwen3-8b"}).checked.bounds
    of_keys(tmp_path, **run)
    both = check(tmp_path / "swift.yaml", {"gpu": "h100", "model": "qwen3-8b"})
    assert both.checked.bounds.least == alone.least
    assert both.checked.bounds.reported.phase is Phase.EVALUATE
    assert any("the logits of all tokens that count in the loss" in note for note in both.notes)


def test_packed_rows_have_the_length_of_a_pack(tmp_path: Path) -> None:
    packed = {"packing": True, "attn_impl": "flash_attn"}
    assert of_keys(tmp_path, **packed).config.seq_len == 1024
    run = of_keys(tmp_path, **packed, packing_length=4096)
    assert (run.config.packing, run.config.seq_len) == (True, 4096)
    assert run.config.attention == "flash_attention_2"


@pytest.mark.parametrize(
    ("kind", "objective", "holds"),
    [("dpo", Objective.DPO, True), ("kto", Objective.KTO, True), ("rm", Objective.REWARD, False)],
)
def test_preferences_and_rewards(
    kind: str, objective: Objective, holds: bool, tmp_path: Path
) -> None:
    run = of_keys(tmp_path, rlhf_type=kind, beta=0.1, rpo_alpha=0.1)
    assert run.objective is objective and not run.ignored
    assert any("ms-swift computes the logits of all sequences" in one for one in run.notes) is holds
    assert run.whole_logits is holds and not run.needs_more


@pytest.mark.parametrize(("kind", "rows"), [("dpo", 2 * 2), ("kto", 2)])
def test_all_logits_of_a_comparison_are_the_upper_end(kind: str, rows: int, tmp_path: Path) -> None:
    """The vocabulary of Qwen3 has 151,936 words."""
    of_keys(tmp_path, rlhf_type=kind, per_device_train_batch_size=2)
    bounds = check(tmp_path / "swift.yaml", {"gpu": "h100", "model": "qwen3-8b"}).checked.bounds
    assert bounds.most is not None
    assert bounds.most.logits == pytest.approx(20 * rows * 1024 * 151_936 / 2**30)
    assert bounds.least.logits < bounds.most.logits / 4


def test_the_command_says_the_objective(tmp_path: Path) -> None:
    arguments = "--model Qwen/Qwen3-8B --max_length 512 --per_device_train_batch_size 2"
    assert of_script(tmp_path, f"swift pt {arguments}").objective is Objective.SFT
    assert of_script(tmp_path, f"swift rlhf {arguments}").objective is Objective.DPO
    program = f"torchrun --nproc_per_node 2 swift/cli/sft.py {arguments}"
    assert of_script(tmp_path, program).num_gpus == 2


@pytest.mark.parametrize(
    ("name", "strategy", "offloads"),
    [("zero1", "zero1", False), ("zero3", "zero3", False), ("zero3_offload", "zero3", True)],
)
def test_names_of_settings_for_deepspeed(
    name: str, strategy: str, offloads: bool, tmp_path: Path
) -> None:
    run = of_keys(tmp_path, deepspeed=name, num_processes=4)
    assert strategy_of(run.values) == strategy
    settings = run.values["deepspeed"]["zero_optimization"]
    assert (settings.get("offload_param") == {"device": "cpu"}) is offloads


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rlhf_type": "orpo"}, "rlhf_type: of ms-swift, grpo, dpo, kto, rm are supported, not"),
        ({"task_type": "seq_cls"}, "task_type: 'seq_cls' is not supported"),
        ({"tuner_type": "adalora"}, "train_type: 'adalora' is not supported"),
        ({"quant_method": "hqq", "quant_bits": 4}, "quant_method: 'hqq' is not supported"),
        ({"sequence_parallel_size": 4}, "sequence_parallel_size: 4 is not supported"),
        ({"max_length": None}, "max_length: without a value, no sequence is truncated"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        of_keys(tmp_path, **changes)


def test_layers_on_several_gpus_one_after_another_are_refused(tmp_path: Path) -> None:
    text = LORA.replace("NPROC_PER_NODE=$nproc ", "")
    with pytest.raises(UsageError, match="more GPUs are visible than processes start"):
        of_script(tmp_path, text)


def test_changes_are_in_the_arguments_of_ms_swift(tmp_path: Path) -> None:
    run = of_keys(tmp_path, attn_impl="eager", max_length=2048)
    assert {"use_liger_kernel": True} in [edits for _, edits in fixes_of(run)]
    faster = check(tmp_path / "swift.yaml", {"gpu": "h100", "model": "qwen3-8b"}).faster
    assert faster is not None
    assert faster.edits["use_liger_kernel"] is True and faster.edits["attn_impl"] == "sdpa"


def test_a_script_in_a_folder_of_a_project_names_files_from_its_top(tmp_path: Path) -> None:
    folder = tmp_path / "examples" / "lora"
    folder.mkdir(parents=True)
    sharding = {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {"fsdp_version": 2}}
    (folder / "fsdp2.json").write_text(json.dumps(sharding))
    launcher = "CUDA_VISIBLE_DEVICES=0,1 accelerate launch --config_file examples/lora/fsdp2.json"
    arguments = "swift/cli/sft.py --model Qwen/Qwen3-8B --max_length 512"
    run = of_script(folder, f"{launcher} {arguments}")
    assert run.num_gpus == 2 and strategy_of(run.values) == "fsdp2"


def test_adapters_on_all_linear_layers_of_a_mixture_leave_out_its_experts(tmp_path: Path) -> None:
    """transformers 5 fuses them into a parameter. With TRL, the dropout would stop the run."""
    run = of_keys(tmp_path, model="Qwen/Qwen3-30B-A3B")
    adapted = adapt_to_model(run, resolve_model("qwen3-30b-a3b"))
    assert adapted.config.lora_dropout == 0.0


def test_arguments_that_are_not_counted_are_named(tmp_path: Path) -> None:
    changes = {"freeze_vit": False, "padding_free": True, "learning_rate": 1e-4, "system": "Hi."}
    assert of_keys(tmp_path, **changes).ignored == "not counted: freeze_vit, padding_free"


@pytest.mark.parametrize(
    "sum_", ["$(expr 64 / 4 / 2)", "$((2 + 2 * 3))", "$(( 16 - 8 ))", r"$(expr 2 \* 4)"]
)
def test_a_script_may_compute_with_whole_numbers(sum_: str, tmp_path: Path) -> None:
    run = of_script(tmp_path, LORA.replace("$(expr 16 / $nproc)", sum_))
    assert run.accumulation == 8


@pytest.mark.parametrize("sum_", ["$(expr 16 / 0)", "$((1 - 9))", "$(expr 4 +)", "$(nproc)"])
def test_what_cannot_be_computed_stays_unknown(sum_: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="gradient_accumulation_steps: the script is not executed"):
        of_script(tmp_path, LORA.replace("$(expr 16 / $nproc)", sum_))
