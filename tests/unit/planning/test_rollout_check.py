"""Files of GRPO runs: what is read, when the engine is refused, and which changes are proposed."""

import json
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.core.errors import UsageError
from autotune.core.objective import Objective
from autotune.core.probe_types import Phase
from autotune.core.rollout_types import COLOCATED, SERVER, TRANSFORMERS
from autotune.planning import foreign_rollouts
from autotune.planning.foreign_arguments import read_script
from autotune.planning.foreign_config import parse, read_file
from autotune.planning.foreign_sharding import strategy_of
from autotune.planning.foreign_swift import swift_as_trl, trl_as_swift
from autotune.planning.run_check import check
from autotune.problem.rollouts import Rollouts
from autotune.report.values.check import CheckReport, ForeignConfig

TRL: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen3-4B",
    "dataset_name": "org/prompts",
    "reward_funcs": "a_reward",
    "dtype": "bfloat16",
    "use_peft": True,
    "lora_r": 16,
    "lora_target_modules": "all-linear",
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "max_completion_length": 1024,
    "use_vllm": True,
    "vllm_max_model_length": 1536,
}
SWIFT = """
# a comment with 'one quotation mark
NNODES=1 NPROC_PER_NODE=1 \\
CUDA_VISIBLE_DEVICES=0 swift rlhf \\
    --rlhf_type grpo --model Qwen/Qwen2.5-7B-Instruct \\
    --use_vllm true --vllm_mode colocate --vllm_gpu_memory_utilization 0.5 \\
    --vllm_max_model_len 3072 --train_type lora --lora_rank 8 \\
    --system $PROMPT --dataset org/name#1000 --max_length 2048 --max_completion_length 1024 \\
    --per_device_train_batch_size 4 --gradient_accumulation_steps 4 --num_generations 8 \\
    --sleep_level 1 --offload_model true --move_model_batches 16 --learning_rate 1e-5
"""


def rollouts_of(run: ForeignConfig) -> Rollouts:
    assert run.objective is Objective.GRPO and run.rollouts is not None
    return run.rollouts


def read(**changes: Any) -> ForeignConfig:
    values = {key: value for key, value in (TRL | changes).items() if value is not None}
    return parse(values, "trl")


def checked(folder: Path, gpu: str, options: dict[str, Any] | None = None, **changes: Any) -> Any:
    file = folder / "run.yaml"
    values = {key: value for key, value in (TRL | changes).items() if value is not None}
    file.write_text(yaml.safe_dump(values))
    return check(file, {"gpu": gpu} | (options or {}))


def test_a_file_of_trl() -> None:
    found = rollouts_of(read(beta=0.04, num_iterations=2, vllm_enable_sleep_mode=True))
    assert (found.prompt_tokens, found.completion_tokens, found.longest) == (512, 1024, 1536)
    assert (found.sequences, found.num_generations, found.has_reference) == (32, 8, True)
    assert found.engine.kind == COLOCATED and found.engine.sleeps and found.engine.share == 0.3
    assert read().config.seq_len == 1536 and read().config.padding == "masked"
    assert rollouts_of(read(use_vllm=None)).engine.kind == TRANSFORMERS
    assert rollouts_of(read(vllm_mode="server")).engine.kind == SERVER
    assert rollouts_of(read(steps_per_generation=8)).sequences == 64
    assert rollouts_of(read(generation_batch_size=16)).sequences == 16


def test_the_defaults_are_those_of_trl() -> None:
    trl = pytest.importorskip("trl")
    defaults = {item.name: item.default for item in fields(trl.GRPOConfig)}
    assert defaults["num_generations"] == foreign_rollouts.GENERATIONS
    assert defaults["max_completion_length"] == foreign_rollouts.COMPLETION_TOKENS
    assert defaults["vllm_gpu_memory_utilization"] == foreign_rollouts.SHARE
    assert (defaults["beta"], defaults["num_iterations"], defaults["vllm_mode"]) == (
        0.0,
        1,
        "colocate",
    )
    assert not defaults["use_vllm"] and not defaults["vllm_enable_sleep_mode"]
    older = set(foreign_rollouts.table("older_rollouts"))
    assert older.isdisjoint(defaults)


def test_a_pass_for_log_probabilities_is_left_out_if_trl_leaves_it_out() -> None:
    plain = {"use_vllm": None, "vllm_max_model_length": None}
    assert not rollouts_of(read(**plain)).scores
    assert rollouts_of(read(**plain, beta=0.1)).scores
    assert rollouts_of(read(**plain, num_iterations=2)).scores
    assert rollouts_of(read()).scores
    assert not rollouts_of(read(vllm_importance_sampling_correction=False)).scores


@pytest.mark.parametrize(
    ("version", "holds"), [("1.9.2", True), ("1.16.0", False), ("1.17.0.dev0", False), (None, None)]
)
def test_the_installed_version_says_whether_logits_are_whole(
    version: str | None, holds: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", installed)
    run = read()
    assert rollouts_of(run).whole_logits is holds
    assert any("TRL is not installed here" in note for note in run.notes) is (version is None)
    assert rollouts_of(read(use_liger_kernel=True)).whole_logits is False


def test_a_key_of_an_older_version_brings_its_defaults() -> None:
    run = read(max_prompt_length=256, max_completion_length=None)
    found = rollouts_of(run)
    assert (found.prompt_tokens, found.completion_tokens) == (256, 256)
    assert found.has_reference and found.whole_logits and found.engine.kind == SERVER
    assert run.config.checkpointing == "none"
    assert any(note.startswith("max_prompt_length is a key of older") for note in run.notes)


def test_a_file_of_axolotl() -> None:
    values = {
        "base_model": "Qwen/Qwen2.5-1.5B",
        "rl": "grpo",
        "trl": {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": 0.4,
            "num_generations": 4,
            "max_completion_length": 256,
            "reward_funcs": ["rewards.a"],
        },
        "adapter": "lora",
        "lora_r": 16,
        "lora_target_linear": True,
        "sequence_len": 1024,
        "micro_batch_size": 4,
    }
    found = rollouts_of(parse(values, "axolotl"))
    assert (found.num_generations, found.completion_tokens) == (4, 256)
    assert found.engine.share == 0.4 and found.whole_logits is True
    values["trl"] |= {"vllm_server_host": "0.0.0.0"}
    del values["trl"]["vllm_mode"]
    assert rollouts_of(parse(values, "axolotl")).engine.kind == SERVER


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_generations": 1}, "num_generations: GRPO compares the completions"),
        ({"num_generations": 5}, "num_generations: a generation has 32 completions"),
        (
            {"generation_batch_size": 32, "steps_per_generation": 4},
            "generation_batch_size: TRL does not take steps_per_generation too",
        ),
        ({"vllm_mode": "split"}, "vllm_mode: colocate or server is needed"),
        ({"packing": True}, "packing: sequences of grpo are not packed"),
    ],
)
def test_what_trl_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read(**changes)


def test_each_phase_is_answered_and_the_worst_decides(tmp_path: Path) -> None:
    report: CheckReport = checked(tmp_path, "h100")
    assert report.checked.state == "fits"
    assert list(report.phases) == [Phase.ROLLOUT, Phase.LOG_PROBS, Phase.BACKWARD]
    peak = max(bounds.bounds_gib[1] or 0 for bounds in report.phases.values())
    assert report.checked.estimate.need_gib == pytest.approx(peak)
    assert report.checked.duration is None and report.faster is None
    assert any("512 tokens are assumed" in note for note in report.notes)
    longer = checked(tmp_path, "h100", {"tokens_per_example": 300})
    assert longer.checked.run.config.seq_len == 1324
    assert not any("tokens are assumed" in note for note in longer.notes)


def test_vllm_refuses_a_share_that_holds_no_sequence(tmp_path: Path) -> None:
    """Without a length, vLLM wants room for the model's whole context of 40,960 tokens."""
    with pytest.raises(UsageError, match="vLLM refuses to start") as caught:
        checked(tmp_path, "rtx-4090", vllm_max_model_length=None)
    assert caught.value.remedy == (
        "write vllm_max_model_length: 1536 and vllm_gpu_memory_utilization: 0.45"
    )
    with pytest.raises(UsageError, match=r"50,000 tokens are more than .* 40,960") as caught:
        checked(tmp_path, "h100", vllm_max_model_length=50_000)
    assert caught.value.remedy == "write vllm_max_model_length: 40960"
    cut = checked(tmp_path, "h100", vllm_max_model_length=1000)
    assert cut.checked.run.config.seq_len == 1000
    assert any("vLLM stops a sequence at 1,000 tokens" in note for note in cut.notes)
    assert checked(tmp_path, "h100", vllm_max_model_length=None).checked.state == "fits"


def test_changes_are_in_the_tools_keys(tmp_path: Path) -> None:
    report = checked(tmp_path, "a100-40gb", vllm_gpu_memory_utilization=0.7)
    assert report.checked.state == "out of memory"
    alone = [list(changed.edits) for changed, _ in report.fixes]
    assert ["vllm_gpu_memory_utilization"] in alone and ["vllm_enable_sleep_mode"] in alone
    assert ["max_completion_length"] in alone
    assert ["per_device_train_batch_size", "gradient_accumulation_steps"] in alone
    assert report.fix is not None and report.fix.state == "fits"
    edited = {"vllm_gpu_memory_utilization": 0.7} | report.fix.edits
    smaller = checked(tmp_path, "a100-40gb", **edited)
    assert smaller.checked.state == "fits"
    assert smaller.checked.estimate.need_gib == pytest.approx(report.fix.estimate.need_gib)


def test_a_smaller_micro_batch_keeps_the_completions_of_a_generation(tmp_path: Path) -> None:
    report = checked(tmp_path, "a100-40gb", vllm_gpu_memory_utilization=0.7, steps_per_generation=4)
    batches = [one.edits for one, _ in report.fixes if "steps_per_generation" in one.edits]
    assert (
        batches
        and batches[0]["steps_per_generation"] * batches[0]["per_device_train_batch_size"] == 32
    )


def test_a_cache_that_is_too_small_for_all_completions_is_mentioned(tmp_path: Path) -> None:
    short = checked(tmp_path, "rtx-4090", vllm_gpu_memory_utilization=0.5, load_in_4bit=True)
    assert not any("cache of vLLM" in note for note in short.notes)
    short = checked(tmp_path, "rtx-4090", vllm_gpu_memory_utilization=0.5)
    assert any("may take 49,152: vLLM then generates them in turns" in one for one in short.notes)


def test_a_script_of_ms_swift(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(SWIFT)
    run = read_file(script)
    found = rollouts_of(run)
    assert run.tool == "ms-swift" and run.num_gpus == 1
    assert run.ignored == "not counted: move_model_batches"
    assert (found.prompt_tokens, found.completion_tokens, found.sequences) == (2048, 1024, 16)
    assert found.engine.sleeps and found.offloads == ("weights", "adapters")
    assert found.has_reference and found.whole_logits is True
    report = check(script, {"gpu": "rtx-4090"} | {"model": "qwen2.5-1.5b"})
    assert report.checked.run.tool == "ms-swift"
    keys = {key for changed, _ in report.fixes for key in changed.edits}
    assert keys <= {
        *("vllm_gpu_memory_utilization", "sleep_level", "quant_bits", "max_completion_length"),
        *("per_device_train_batch_size", "gradient_accumulation_steps", "optim"),
    }


@pytest.mark.parametrize(
    "argument", ["--zero_stage 1", "--use_fsdp", "--fsdp_offload_params true", "--use-deepspeed"]
)
def test_sharing_in_the_arguments_of_accelerate_is_refused(argument: str, tmp_path: Path) -> None:
    """It would win over the file, so that the answer would be of another run."""
    script = tmp_path / "run.sh"
    words = f"accelerate launch --num_processes 2 {argument} --config_file a.yaml -m trl grpo"
    script.write_text(f"{words} --model_name_or_path Qwen/Qwen3-4B\n")
    with pytest.raises(UsageError, match=r"argument --[-\w]+ is not read"):
        read_script(script)


def test_scripts_are_not_executed(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(SWIFT.replace("Qwen/Qwen2.5-7B-Instruct", "$MODEL"))
    with pytest.raises(UsageError, match="model: the script is not executed, so the value"):
        read_file(script)
    script.write_text("python train.py\n")
    with pytest.raises(UsageError, match=r"no command `swift sft`, .*`trl sft`, .* or `trl grpo`"):
        read_file(script)
    script.write_text("megatron rlhf --rlhf_type grpo\n")
    with pytest.raises(UsageError, match="Megatron splits the model in its own way"):
        read_file(script)
    script.write_text(
        "accelerate launch --num_processes 2 trl grpo --model_name_or_path Qwen/Qwen3-4B \\\n"
        "  --reward_funcs a b --num_generations=4 --dtype bfloat16\n"
    )
    run = read_file(script)
    assert rollouts_of(run).num_generations == 4 and run.num_gpus == 2
    assert run.values["reward_funcs"] == ["a", "b"] and run.tool == "trl"


@pytest.mark.parametrize(
    ("launcher", "gpus"),
    [
        ("accelerate launch --num_processes 2 --config_file accn.yaml -m", 2),
        ("accelerate launch --num_processes=4 --config_file=accn.yaml -m", 4),
        ("accelerate launch --config_file 'accn.yaml' \\\n  --num_processes \\\n  4 -m", 4),
        ("accelerate launch --config-file accn.yaml --num-processes 1 -m", 1),
        ("accelerate launch --config_file accn.yaml -m", 8),
        ("NPROC_PER_NODE=2 accelerate launch --config_file accn.yaml -m", 8),
        ("NNODES=2 accelerate launch --num_processes 4 -m", 4),
        ("torchrun --nnodes 2 --nproc-per-node 4 -m", 8),
        ("accelerate launch --num_processes $GPUS -m", None),
    ],
)
def test_the_command_line_of_a_launcher_is_preferred_to_the_file_of_accelerate(
    launcher: str, gpus: int | None, tmp_path: Path
) -> None:
    (tmp_path / "accn.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 8\n")
    script = tmp_path / "train.sh"
    script.write_text(f"{launcher} trl grpo --model_name_or_path m --reward_funcs a --bf16 true\n")
    assert read_file(script).num_gpus == gpus


def test_arguments_of_a_training_are_preferred_to_the_file_of_accelerate(tmp_path: Path) -> None:
    (tmp_path / "accn.yaml").write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config: {zero_stage: 3}\n"
    )
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    words = "trl grpo --model_name_or_path m --reward_funcs a"
    script = tmp_path / "train.sh"
    for own, strategy in (("", "zero3"), (" --deepspeed ds.json", "zero1")):
        script.write_text(f"accelerate launch --config_file accn.yaml -m {words}{own}\n")
        assert strategy_of(read_file(script).values) == strategy
    script.write_text(f"accelerate launch --config_file accn.yaml --num_processes $N -m {words}\n")
    with pytest.raises(UsageError, match=r"num_processes: .* the value of \$N is unknown"):
        read_file(script)
    config = tmp_path / "grpo.yaml"
    config.write_text(
        "model_name_or_path: m\nreward_funcs: [a]\naccelerate_config: accn.yaml\n"
        "learning_rate: 1.0e-5\nnum_processes: 2\nuse_vllm: true\n"
    )
    assert read_file(config).num_gpus == 2


@pytest.mark.parametrize("word", ["[a", "{a", "!!python/object:os", "2026-99-99", "[" * 3000])
def test_a_word_that_is_no_yaml_is_a_text(word: str, tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(SWIFT.replace("$PROMPT", f"'{word}'"))
    assert rollouts_of(read_file(script)).completion_tokens == 1024
    script.write_text(SWIFT.replace("Qwen/Qwen2.5-7B-Instruct", f"'{word}'"))
    assert read_file(script).model == word


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_type": ["lora"]}, "train_type: \\['lora'\\] is not supported"),
        ({"sleep_level": {"a": 1}}, "sleep_level: {'a': 1} is not supported"),
        ({"attn_impl": ["sdpa"]}, "attn_implementation: a name is needed"),
        ({"num_processes": 10**400}, "num_processes: a number from 1 to"),
        ({"rlhf_type": "ppo"}, "rlhf_type: of ms-swift, .* are supported, not 'ppo'"),
        ({"vllm_gpu_memory_utilization": 3}, "vllm_gpu_memory_utilization: a number from 0.01 to"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_odd_values_of_ms_swift_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "grpo.yaml"
    run = {"rlhf_type": "grpo", "model": "Qwen/Qwen3-4B", "use_vllm": True, "num_generations": 4}
    run |= {"vllm_mode": "colocate"} | changes
    file.write_text(yaml.safe_dump(run))
    with pytest.raises(UsageError, match=message):
        read_file(file)


def test_keys_of_ms_swift_and_back() -> None:
    full = {"rlhf_type": "grpo", "model": "m", "tuner_type": "full", "num_processes": 3}
    values, unread = swift_as_trl(full)
    assert values["gradient_accumulation_steps"] == 6  # 16 sequences, 3 in each micro batch
    assert not values["use_peft"] and "lora_r" not in values and not unread
    assert values["vllm_gpu_memory_utilization"] == 0.9 and values["beta"] == 0.04
    assert trl_as_swift({"vllm_enable_sleep_mode": True, "load_in_4bit": True}) == {
        "sleep_level": 1,
        "quant_bits": 4,
    }
    assert trl_as_swift({"dtype": "bfloat16"}) == {"torch_dtype": "bfloat16"}
    with pytest.raises(UsageError, match="train_type: 'galore' is not supported"):
        swift_as_trl({"rlhf_type": "grpo", "model": "m", "train_type": "galore"})


def test_several_gpus_shard_the_update(tmp_path: Path) -> None:
    alone = checked(tmp_path, "h100", vllm_mode="server")
    shared = checked(tmp_path, "h100", {"gpus": 2}, vllm_mode="server", accelerate_config="zero3")
    assert shared.checked.estimate.need_gib < alone.checked.estimate.need_gib - 1


def test_the_json_has_the_phases(tmp_path: Path) -> None:
    from autotune.core.json_view import json_data

    data = json.loads(json.dumps(json_data(checked(tmp_path, "h100"))))
    assert set(data["phases"]) == {"rollout", "log_probabilities", "backward"}
    assert data["phases"]["rollout"][0] < data["phases"]["rollout"][1]


def test_short_prompts_do_not_shorten_the_sequences_of_the_estimate(tmp_path: Path) -> None:
    """No prompt is longer than some 570 tokens, but a completion follows each."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "What is 2 + 2?"}\n' * 8)
    report = checked(tmp_path, "h100", {"dataset": str(tmp_path / "prompts.jsonl")})
    assert 1024 < report.checked.run.config.seq_len < 1536
    assert not any(note.startswith("Memory is estimated for") for note in report.notes)
