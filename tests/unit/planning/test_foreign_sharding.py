"""Files of other tools that share out a training among GPUs: what they name, and what `check` makes
of it.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.catalog import resolve_model
from autotune.catalog.model_sizes import Sizes
from autotune.core.errors import UsageError
from autotune.core.parallelism import Parallelism
from autotune.planning.foreign_config import read_file
from autotune.planning.foreign_sharding import settings_of, shard_run, strategy_of
from autotune.planning.run_check import check
from autotune.planning.run_estimate import memory_bounds
from autotune.prediction.memory_formula import NF4_STATISTICS
from autotune.prediction.sharded_memory import MAX_LIVE, ShardingSettings, rank_breakdown
from autotune.problem.run_cost import FITS, OOM, TIGHT
from autotune.report.values.check import ForeignConfig

FULL = {
    "base_model": "meta-llama/Llama-3.1-8B",
    "datasets": [{"path": "data.jsonl", "type": "alpaca"}],
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "sequence_len": 1024,
    "optimizer": "adamw_torch_fused",
    "bf16": True,
    "gradient_checkpointing": True,
    "num_epochs": 1,
}
LORA = FULL | {"adapter": "lora", "lora_r": 16, "lora_alpha": 32, "lora_target_linear": True}
FSDP = {"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True}}
BF16 = {"bf16": True}
LASTING = ("weights", "adapters", "gradients", "optimizer")
SHARDED = (
    "Sharding and offloading of the model are not counted: each GPU is assumed to hold the whole"
    " model."
)


@pytest.mark.parametrize(
    ("values", "strategy"),
    [
        ({}, None),
        ({"deepspeed": "deepspeed_configs/zero3_bf16_cpuoffload_params.json"}, "zero3"),
        ({"deepspeed": "examples/deepspeed/ds_z2_config.json"}, "zero2"),
        ({"deepspeed": "ds_z0_config.json"}, "ddp"),
        ({"deepspeed": "zero12.json"}, None),
        ({"deepspeed": "ds.json"}, None),
        ({"deepspeed": {"zero_optimization": {"stage": 1}}}, "zero1"),
        ({"deepspeed": {"train_batch_size": "auto"}}, None),
        ({"deepspeed": {"zero_optimization": {"stage": 2.0}}}, "zero2"),
        ({"deepspeed": {"zero_optimization": {"stage": "3"}}}, "zero3"),
        ({"deepspeed": {"zero_optimization": {"stage": 7}}}, None),
        ({"deepspeed": {"zero_optimization": 3}, "deepspeed_file": "ds_z3_config.json"}, "zero3"),
        ({"accelerate_config": "fsdp2"}, "fsdp2"),
        ({"accelerate_config": "zero3"}, "zero3"),
        ({"accelerate_config": "multi_gpu"}, None),
        ({"fsdp": ["full_shard", "auto_wrap"]}, "fsdp2"),
        ({"fsdp": "no_shard"}, "ddp"),
        ({"fsdp": "shard_grad_op auto_wrap"}, "fsdp2_keep"),
        ({"fsdp_config": {"fsdp_sharding_strategy": "NO_SHARD"}}, "ddp"),
        ({"fsdp_config": {"fsdp_sharding_strategy": 2}}, "fsdp2_keep"),
        ({"fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}}, "fsdp2"),
        ({"fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2"}}, "fsdp2_keep"),
        # FSDP 2 does not read the strategy of FSDP 1
        ({"fsdp_config": {"fsdp_version": 2, "fsdp_sharding_strategy": "NO_SHARD"}}, "fsdp2"),
        (FSDP, "fsdp2"),
        ({"fsdp_version": 2, "fsdp_config": {"fsdp_reshard_after_forward": False}}, "fsdp2_keep"),
        ({"fsdp": [], "fsdp_config": {}}, None),
    ],
    ids=str,
)
def test_the_strategy_that_a_file_names(values: dict[str, Any], strategy: str | None) -> None:
    assert strategy_of(values) == strategy


def read(folder: Path, values: dict[str, Any]) -> ForeignConfig:
    file = folder / "run.yml"
    file.write_text(yaml.safe_dump(values))
    return read_file(file)


def notes_of(
    folder: Path, values: dict[str, Any], gpus: int | None = 8
) -> tuple[ForeignConfig, str]:
    run = shard_run(read(folder, values), resolve_model("llama-3.1-8b"), gpus)
    return run, " ".join(run.notes)


def test_shards_of_a_file_are_those_of_its_gpus(tmp_path: Path) -> None:
    run, notes = notes_of(tmp_path, FULL | FSDP)
    assert (run.num_gpus, run.config.num_gpus, run.config.sharding) == (8, 8, "fsdp2")
    # its weights are in bf16, and what FSDP2 trains in fp32
    assert run.config.precision == "bf16_mixed"
    assert SHARDED not in notes and "FSDP 1" not in notes
    run, older = notes_of(
        tmp_path,
        FULL | {"fsdp": ["full_shard", "offload"], "fsdp_config": {"offload_params": True}},
    )
    assert "the estimate is for FSDP2, which needs a little less" in older
    assert run.uncounted is None and run.config.offload and settings_of(run).fsdp_1


def test_deepspeeds_own_file_is_read_where_it_is(tmp_path: Path) -> None:
    """Its stage, and what it gathers and sends at once: numbers that people also write as 5e8."""
    zero = {"stage": 3, "stage3_max_live_parameters": "4e8", "reduce_bucket_size": 5e8}
    (tmp_path / "ds").mkdir()
    (tmp_path / "ds" / "own.json").write_text(
        json.dumps({"zero_optimization": zero, "bf16": {"enabled": "auto"}})
    )
    run, notes = notes_of(tmp_path, LORA | {"deepspeed": "ds/own.json"})
    assert run.config.sharding == "zero3" and SHARDED not in notes
    assert settings_of(run) == ShardingSettings(
        shards_statistics=False, live=4 * 10**8, bucket=5 * 10**8
    )
    by_default, _ = notes_of(tmp_path, LORA | {"deepspeed": "elsewhere/zero3.json"})
    assert by_default.config.sharding == "zero3"
    assert settings_of(by_default) == ShardingSettings(shards_statistics=False, live=MAX_LIVE)
    needs = [memory_bounds(resolve_model("llama-3.1-8b"), one) for one in (run, by_default)]
    least = [bounds.least.peak_gib for bounds in needs if bounds is not None]
    assert least[1] - least[0] == pytest.approx(
        (2 * (10**9 - 4 * 10**8) - 2 * (5e8 - 4096**2)) / 2**30, rel=1e-6
    )
    for strange in (
        {"stage": 3, "stage3_max_live_parameters": "auto"},
        {"stage": 3, "reduce_bucket_size": [1]},
    ):
        (tmp_path / "ds" / "own.json").write_text(json.dumps({"zero_optimization": strange}))
        assert settings_of(read(tmp_path, LORA | {"deepspeed": "ds/own.json"})).live == MAX_LIVE
    stage = json.dumps({"zero_optimization": {"stage": 2}}, indent="\t")
    (tmp_path / "ds" / "own.json").write_text(stage)
    assert read(tmp_path, LORA | {"deepspeed": "ds/own.json"}).values["deepspeed"] == json.loads(
        stage
    )
    (tmp_path / "ds" / "own.json").write_text('{"zero_optimization": {}}')
    unknown, _ = notes_of(tmp_path, LORA | {"deepspeed": "ds/own.json"})
    assert unknown.uncounted is not None and unknown.uncounted.shared == frozenset(LASTING)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"train_micro_batch_size_per_gpu": 64}, "train_micro_batch_size_per_gpu: 64, but the run"),
        ({"gradient_accumulation_steps": 64}, "gradient_accumulation_steps: 64, but the run says"),
        ({"fp16": {"enabled": True}}, "enables fp16, but the run trains in bf16_mixed"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "enables fp16, but the run"),
    ],
)
def test_deepspeeds_file_must_not_contradict_the_run(
    tmp_path: Path, settings: dict[str, Any], problem: str
) -> None:
    file = tmp_path / "own.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}} | settings))
    with pytest.raises(UsageError, match=problem) as refused:
        read(tmp_path, LORA | {"deepspeed": "own.json"})
    assert refused.value.remedy == 'write "auto" in the DeepSpeed file'


@pytest.mark.parametrize(
    ("dtype", "keys", "enabled"),
    [("bfloat16", {"fp16": True}, "fp16"), ("float16", {}, "bf16"), ("float16", BF16, "bf16")],
)
def test_the_key_counts_if_the_weights_have_another_16_bit_format(
    tmp_path: Path, dtype: str, keys: dict[str, Any], enabled: str
) -> None:
    """transformers compares DeepSpeed's file with the key of the run, not with the weights."""
    (tmp_path / "own.json").write_text(json.dumps({enabled: {"enabled": True}}))
    sft = {"model_name_or_path": "meta-llama/Llama-3.1-8B", "use_peft": True, "dtype": dtype}
    read(tmp_path, sft | keys | {"dataset_name": "org/data", "deepspeed": "own.json"})


def test_deepspeeds_file_may_repeat_what_the_run_says(tmp_path: Path) -> None:
    run = read(tmp_path, LORA)
    same = {
        "train_micro_batch_size_per_gpu": run.config.micro_batch_size,
        "gradient_accumulation_steps": run.accumulation,
        "bf16": {"enabled": True},
        "fp16": {"enabled": "auto"},
        "train_batch_size": "auto",
    }
    (tmp_path / "own.json").write_text(json.dumps({"zero_optimization": {"stage": 2}} | same))
    both = read(tmp_path, LORA | {"deepspeed": "own.json"})
    assert both.config == run.config and strategy_of(both.values) == "zero2"


@pytest.mark.parametrize(
    ("zero", "offloaded"),
    [
        ({"offload_optimizer": {"device": "none"}, "offload_param": {"device": "none"}}, ""),
        ({"offload_optimizer": {"device": "cpu"}}, "state"),
        ({"offload_param": {"device": "nvme"}}, "weights"),
        ({"cpu_offload": True}, "state"),
        ({}, ""),
    ],
)
def test_offloading_is_what_deepspeeds_file_says(
    tmp_path: Path, zero: dict[str, Any], offloaded: str
) -> None:
    """What is offloaded takes no memory of the GPU, and the rest as much as without."""
    model = resolve_model("llama-3.1-8b")
    held = []
    for settings in ({}, zero):
        (tmp_path / "own.json").write_text(
            json.dumps({"zero_optimization": {"stage": 3} | settings})
        )
        run, _ = notes_of(tmp_path, LORA | {"deepspeed": "own.json"})
        assert run.uncounted is None
        bounds = memory_bounds(model, run)
        assert bounds is not None and bounds.most == bounds.least
        held.append(bounds.least)
    whole, found = held
    assert (found.weights == 0) is (offloaded == "weights") and whole.weights > 1
    assert (found.optimizer == 0) is (offloaded == "state") and whole.optimizer > 0
    assert (found.host > 0) is bool(offloaded)


def test_stage_2_holds_buckets_of_deepspeeds_default_size(tmp_path: Path) -> None:
    """Two of them if they are sent while others are filled."""
    for overlap, buckets in ((False, 1), (True, 2)):
        zero = {"stage": 2, "overlap_comm": overlap}
        (tmp_path / "own.json").write_text(json.dumps({"zero_optimization": zero}))
        run, _ = notes_of(tmp_path, LORA | {"deepspeed": "own.json"})
        assert settings_of(run).bucket == buckets * 5 * 10**8
    shipped, _ = notes_of(tmp_path, LORA | {"deepspeed": "deepspeed_configs/zero2.json"})
    assert settings_of(shipped).bucket == 5 * 10**8


def test_without_a_number_of_gpus_nothing_is_shared_out(tmp_path: Path) -> None:
    for gpus in (None, 1, 11):
        run, notes = notes_of(tmp_path, FULL | FSDP, gpus)
        assert run.config.num_gpus == 1 and (SHARDED in notes) is (gpus != 11)
    assert run.uncounted is not None and run.uncounted.causes == (
        "the sharding of the model over 11 GPUs by FSDP (no formula covers 11 GPUs)",
    )
    plain, _ = notes_of(tmp_path, LORA, 4)
    assert (plain.config.num_gpus, plain.config.sharding) == (4, "ddp")
    alone, _ = notes_of(tmp_path, LORA, None)
    assert (alone.num_gpus, alone.config.num_gpus) == (None, 1)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (FULL | {"optimizer": "adamw_bnb_8bit"} | FSDP, "has no code for sharded tensors"),
        (LORA | {"fp16": True, "bf16": False} | FSDP, "fp16_mixed is untested under fsdp2"),
    ],
    ids=["8bit", "fp16"],
)
def test_what_no_formula_shares_out_stays_whole(
    tmp_path: Path, values: dict[str, Any], reason: str
) -> None:
    run, notes = notes_of(tmp_path, values)
    assert (run.num_gpus, run.config.num_gpus) == (8, 1) and SHARDED not in notes
    assert run.uncounted is not None and run.uncounted.shared == frozenset(LASTING)
    assert reason in run.uncounted.causes[0]


def test_check_judges_each_gpu(tmp_path: Path) -> None:
    """Full fine-tuning of an 8B fits no A100 of 40 GB, and eight of them easily; two verdicts of
    one file.
    """
    file = tmp_path / "run.yml"
    file.write_text(yaml.safe_dump(FULL | FSDP))
    alone, shared = (check(file, {"gpu": "a100-40gb-sxm", "gpus": gpus}) for gpus in (None, 8))
    assert (alone.checked.state, shared.checked.state) == ("out of memory", "fits")
    config = shared.checked.run.config
    by_formula = rank_breakdown(shared.model, config, Parallelism.of(config))
    assert (
        by_formula is not None and shared.checked.estimate.need_gib == by_formula.peak_reserved_gib
    )
    notes = " ".join(shared.notes)
    assert "each of 8 GPUs of one host: the model shared out among the GPUs (FSDP2)." in notes
    assert shared.faster is None and shared.checked.estimate.tokens_per_s
    cost, price = shared.checked.estimate.cost, shared.price
    assert cost is not None and price is not None and cost.usd_per_hour == 8 * price.usd_per_hour


@pytest.mark.parametrize(
    "key", ["tensor_parallel_size", "context_parallel_size", "expert_parallel_size"]
)
def test_what_also_splits_layers_or_rows_is_a_range(tmp_path: Path, key: str) -> None:
    """The lower end also splits the activations. A key for shards alone changes nothing."""
    run, _ = notes_of(tmp_path, LORA | FSDP | {key: 2})
    assert run.uncounted is not None
    assert run.uncounted.shared == {*LASTING, "activations", "logits"}
    assert f"no formula covers {key}" in run.uncounted.causes[0]
    for plain in ({key: 1}, {"dp_shard_size": 8}):
        assert notes_of(tmp_path, LORA | FSDP | plain)[0].uncounted is None


def test_copies_of_the_shards_are_counted(tmp_path: Path) -> None:
    """Axolotl's key. Each GPU then holds a quarter, and not an eighth."""
    file = tmp_path / "run.yml"
    needs = []
    for said in ({}, {"dp_replicate_size": 2, "dp_shard_size": 4}):
        file.write_text(yaml.safe_dump(FULL | FSDP | said))
        report = check(file, {"gpu": "h200", "gpus": 8})
        needs.append(report.checked.estimate.need_gib)
    assert report.checked.run.config.copies == 2 and needs[1] > 1.3 * needs[0]


def test_check_has_no_speed_where_no_link_is_known(tmp_path: Path) -> None:
    file = tmp_path / "run.yml"
    file.write_text(yaml.safe_dump(LORA | FSDP))
    own = "memory=24,bf16_tflops=165,bandwidth_gb_s=1008"
    report = check(file, {"gpu": own, "gpus": 2})
    assert report.checked.state == "fits" and report.checked.estimate.tokens_per_s is None


@pytest.mark.parametrize(("gpu", "by_rule"), [("rtx-4090", True), ("h100", False)])
def test_check_says_that_a_link_is_from_the_data_sheet(
    tmp_path: Path, gpu: str, by_rule: bool
) -> None:
    file = tmp_path / "run.yml"
    file.write_text(yaml.safe_dump(LORA | FSDP))
    report = check(file, {"gpu": gpu, "gpus": 2})
    assert report.checked.estimate.tokens_per_s is not None
    assert ("is from the data sheet, not measured" in report.how_sure) == by_rule


def test_a_fix_is_of_the_same_gpus(tmp_path: Path) -> None:
    file = tmp_path / "run.yml"
    file.write_text(
        yaml.safe_dump(FULL | FSDP | {"micro_batch_size": 16, "gradient_checkpointing": False})
    )
    report = check(file, {"gpu": "a100-80gb", "gpus": 8})
    assert report.checked.state == "out of memory" and report.fix is not None
    fixed = report.fix.run.config
    assert (fixed.num_gpus, fixed.sharding, report.fix.state) == (8, "fsdp2", "fits")
    assert Parallelism.of(fixed).refusal(fixed) is None


def test_gradients_that_wait_for_the_last_micro_batch_are_shared_out_by_a_fix(
    tmp_path: Path,
) -> None:
    """FSDP2 holds whole gradients of all weights until the last of eight micro batches."""
    file = tmp_path / "run.yml"
    own = {"accelerator_config": {"split_batches": False}}
    file.write_text(yaml.safe_dump(FULL | FSDP | own))
    report = check(file, {"gpu": "rtx-4090", "gpus": 8})
    assert report.checked.state == "out of memory" and report.fix is not None
    kwargs = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    assert report.fix.edits["accelerator_config"] == own["accelerator_config"] | kwargs
    assert report.fix.run.config.sync_each_batch
    waiting, shared = (one.bounds.reported.gradients for one in (report.checked, report.fix))
    assert waiting > 14.9 and shared < waiting / 3

    file.write_text(yaml.safe_dump(FULL | FSDP | {"accelerator_config": kwargs}))
    assert check(file, {"gpu": "rtx-4090", "gpus": 8}).checked.run.config.sync_each_batch
    file.write_text(yaml.safe_dump(FULL | FSDP | {"gradient_accumulation_steps": 1}))
    alone = check(file, {"gpu": "rtx-3090", "gpus": 8, "memory_gib": 12})
    assert all("accelerator_config" not in fixed.edits for fixed, _ in alone.fixes)


def test_a_need_without_a_formula_of_its_sharding_is_a_range(tmp_path: Path) -> None:
    """Only a lower end that does not fit means out of memory;
    the upper end keeps all on each GPU.
    """
    values = LORA | {"optimizer": "adamw_bnb_8bit", "micro_batch_size": 1} | FSDP
    path = tmp_path / "run.yml"
    path.write_text(yaml.safe_dump(values))
    alone, shared = (check(path, {"gpu": "rtx-4090", "gpus": gpus}) for gpus in (1, 8))
    least, most = shared.checked.bounds.least, shared.checked.bounds.most
    assert most is not None and most.peak_reserved_gib == alone.checked.estimate.need_gib
    assert least.weights == most.weights / 8 and least.optimizer == most.optimizer / 8
    assert least.reserved == 0 < most.reserved
    assert shared.checked.estimate.tokens_per_s is None  # its transfers take unknown time
    assert any(
        note.startswith("The memory need is a range, because no formula covers the sharding")
        for note in shared.notes
    )
    assert not any("each GPU holds the whole model" in note for note in shared.notes)


def test_offloaded_weights_and_state_leave_the_gpu(tmp_path: Path) -> None:
    """Full fine-tuning of an 8B in 24 GB: DeepSpeed keeps weights, gradients and state on the host,
    18 bytes of each parameter.
    """
    devices = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    (tmp_path / "own.json").write_text(json.dumps({"zero_optimization": {"stage": 3} | devices}))
    path = tmp_path / "run.yml"
    for gpus in (1, 2):
        path.write_text(yaml.safe_dump(FULL | {"deepspeed": "own.json"}))
        checked = check(path, {"gpu": "rtx-4090", "gpus": gpus}).checked
        memory = checked.bounds.least
        assert checked.state == FITS and checked.bounds.most == memory
        assert memory.weights == memory.optimizer == memory.gradients == 0
        assert memory.peak_reserved_gib < 8
        assert gpus * memory.host * 2**30 == pytest.approx(18 * 8.03e9, rel=0.01)
        low, high = checked.estimate.interval or (0.0, 0.0)
        assert 0 < 4 * low < high  # PCIe and the host are not known


def test_what_is_offloaded_stays_in_the_memory_that_gpu_and_host_share(tmp_path: Path) -> None:
    """A DGX Spark has 122 GiB for both; an 8B's 18 bytes of each parameter exceed them, a 1B's do
    not.
    """
    devices = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    (tmp_path / "own.json").write_text(json.dumps({"zero_optimization": {"stage": 3} | devices}))
    path = tmp_path / "run.yml"
    states = {}
    for model in ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B"):
        path.write_text(yaml.safe_dump(FULL | {"deepspeed": "own.json", "base_model": model}))
        apart, shared = (check(path, {"gpu": gpu}).checked for gpu in ("h100", "dgx-spark"))
        states[model[-2:]] = (apart.state, shared.state)
        host = apart.bounds.least.host
        for bound, times in ((shared.bounds.least, 1), (shared.bounds.reported, 2)):
            assert bound.host == 0 and bound.offloaded == pytest.approx(times * host)
            need_gib = apart.bounds.least.peak_reserved_gib + times * host
            assert bound.peak_reserved_gib == pytest.approx(need_gib) == sum(bound.terms().values())
        assert shared.estimate.memory == shared.bounds.reported
    assert states == {"8B": (FITS, OOM), "1B": (FITS, FITS)}


QLORA = LORA | {"adapter": "qlora", "load_in_4bit": True} | FSDP


@pytest.mark.parametrize(
    ("storage", "shards"), [(None, True), ("bfloat16", True), ("uint8", False)]
)
def test_4_bit_weights_are_sharded_if_they_are_stored_as_floats(
    tmp_path: Path, storage: str | None, shards: bool
) -> None:
    """Axolotl stores them in bf16 by default; the scales stay whole on each GPU."""
    kwargs = {} if storage is None else {"bnb_config_kwargs": {"bnb_4bit_quant_storage": storage}}
    run, notes = notes_of(tmp_path, QLORA | kwargs)
    bounds = memory_bounds(resolve_model("llama-3.1-8b"), run)
    assert bounds is not None and bounds.least == bounds.most
    sizes = Sizes.of(resolve_model("llama-3.1-8b"))
    assert sizes is not None
    packed, scales = 0.5 * sizes.linear_params, NF4_STATISTICS[True] * sizes.linear_params
    ends = 2 * (sizes.params - sizes.linear_params)
    held = scales + packed / (8 if shards else 1) + ends / 8
    assert bounds.least.weights * 2**30 == pytest.approx(held, rel=1e-3)
    assert ("Their scales stay whole" in notes) is shards
    assert ("Each GPU holds all 4-bit weights" in notes) is not shards


def test_fsdp_1_shards_what_bitsandbytes_optimizes(tmp_path: Path) -> None:
    """Its parameters are plain tensors."""
    fsdp_1 = {"fsdp": ["full_shard", "auto_wrap"], "fsdp_config": {"offload_params": False}}
    run, _ = notes_of(tmp_path, LORA | {"optimizer": "adamw_bnb_8bit"} | fsdp_1)
    assert run.uncounted is None and run.config.sharding == "fsdp2"


@pytest.mark.parametrize(("optimizer", "can"), [("ao_adamw_8bit", True), ("adamw_8bit", False)])
def test_torchao_shards_what_bitsandbytes_cannot(optimizer: str, can: bool, tmp_path: Path) -> None:
    run, notes = notes_of(tmp_path, LORA | {"optimizer": optimizer} | FSDP)
    assert (run.uncounted is None) is can and run.config.optimizer == "adamw_8bit"
    assert (f"The optimizer '{optimizer}' is counted as adamw_8bit." in notes) is can


MIXTURE = {
    "model_name_or_path": "Qwen/Qwen3-30B-A3B",
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 8,
    "template": "qwen3",
    "cutoff_len": 3000,
    "per_device_train_batch_size": 1,
    "bf16": True,
    "deepspeed": "ds_z3_config.json",
}


def test_a_mixture_is_sharded_by_what_a_dry_probe_counts(tmp_path: Path) -> None:
    """57 GiB of weights on four GPUs. Versions of transformers differ in which layers
    LLaMA-Factory adapts, so the need is a range, but a narrow one.
    """
    path = tmp_path / "run.yml"
    path.write_text(yaml.safe_dump(MIXTURE))
    checked = check(path, {"gpu": "rtx-4090", "gpus": 4}).checked
    least, most = checked.bounds.bounds_gib
    assert checked.state == TIGHT and most is not None
    assert 20 < least < most < 27
    assert checked.bounds.least.weights == pytest.approx(56.9 / 4, rel=0.01)


def test_what_a_key_saves_at_best_is_the_lower_end(tmp_path: Path) -> None:
    run, notes = notes_of(tmp_path, FULL | {"unfrozen_parameters": ["lm_head"]}, None)
    assert run.uncounted is not None and run.uncounted.freed == {"gradients", "optimizer"}
    assert not run.uncounted.exchanges and "unfrozen_parameters is not counted" in notes


KTRANSFORMERS = {
    "model_name_or_path": "Qwen/Qwen3-30B-A3B",
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 8,
    "template": "qwen3",
    "cutoff_len": 512,
    "per_device_train_batch_size": 1,
    "bf16": True,
    "use_kt": True,
    "kt_cpu_activation": "retain",
    "kt_config": {"kt_backend": "AMXBF16"},
}


def test_ktransformers_keeps_the_experts_on_the_host_at_best(tmp_path: Path) -> None:
    """LLaMA-Factory's examples/ktransformers: the 57 GiB of a 30B mixture fit into 24 GB or not."""
    path = tmp_path / "run.yml"
    path.write_text(yaml.safe_dump(KTRANSFORMERS))
    checked = check(path, {"gpu": "rtx-4090"}).checked
    least, most = checked.bounds.bounds_gib
    assert checked.state == TIGHT and checked.estimate.tokens_per_s is None
    assert most is not None and least < 5 < 57 < most
    path.write_text(yaml.safe_dump({key: KTRANSFORMERS[key] for key in list(KTRANSFORMERS)[:-3]}))
    _, whole = check(path, {"gpu": "rtx-4090"}).checked.bounds.bounds_gib
    assert whole == pytest.approx(most)
