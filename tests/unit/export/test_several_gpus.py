"""Files of a winner on several GPUs: each tool shares out the training as the measured script does,
or is refused.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.catalog import resolve_device
from autotune.core.errors import UsageError
from autotune.core.parallelism import FSDP2, ZERO
from autotune.core.train_config import TrainConfig
from autotune.export.formats import FORMATS, export_all, usual_formats
from autotune.planning.foreign_config import adapt_to_model, read_file
from autotune.planning.foreign_sharding import shard_run
from autotune.trainer.lean_trainer import sharing_arguments
from autotune.trainer.settings import deepspeed_settings
from tests.unit.export.test_script import recipe

STRATEGIES = ("ddp", "fsdp2", "fsdp2_keep", "zero1", "zero2", "zero3")
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def config(strategy: str, **knobs: Any) -> TrainConfig:
    return TrainConfig(
        **({"num_gpus": 4, "sharding": strategy, "optimizer": "adamw_torch"} | knobs)
    )


def launched(text: str, directory: Path) -> dict[str, str]:
    """The environment that `accelerate launch` gives to each process, and its arguments of
    torchrun.
    """
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    path = directory / "accelerate.yaml"
    path.write_text(text, encoding="utf-8")
    arguments = launch.launch_command_parser().parse_args(["--config_file", str(path), "script.py"])
    arguments, _, _ = launch._validate_launch_command(arguments)
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = "deepspeed_config_file,zero3_init_flag"
        _, environment = prepare_deepspeed_cmd_env(arguments)
    else:
        assert arguments.use_fsdp or arguments.multi_gpu  # what has the processes started
        environment = prepare_multi_gpu_env(arguments)
    return {name: str(value) for name, value in environment.items()} | {
        "nproc_per_node": arguments.nproc_per_node
    }


@each_strategy
def test_accelerate_shards_as_the_measured_script_does(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin
    from transformers import TrainingArguments

    files = export_all(recipe(config(strategy)), ["accelerate"])
    assert list(files) == ["accelerate.yaml", *(["deepspeed.json"] if strategy in ZERO else [])]
    environment = launched(files["accelerate.yaml"], tmp_path)
    assert str(environment["nproc_per_node"]) == "4"
    # DeepSpeed's file says
    assert environment["ACCELERATE_MIXED_PRECISION"] == ("no" if strategy in ZERO else "bf16")
    assert environment.get("ACCELERATE_USE_FSDP", "false") == str(strategy in FSDP2).lower()
    if strategy in ZERO:
        assert environment["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == "deepspeed.json"
        said = json.loads(files["deepspeed.json"])
        layer = said["zero_optimization"].get("stage3_prefetch_bucket_size", 1)
        assert said.pop("fp16") == {"enabled": False} and layer > 0
        assert said == deepspeed_settings(int(strategy[-1]), layer)
    if strategy not in FSDP2:
        return
    for name, value in environment.items():
        if "FSDP" in name:
            monkeypatch.setenv(name, value)
    theirs = FullyShardedDataParallelPlugin()
    measured = TrainingArguments(
        use_cpu=True, **sharing_arguments(config(strategy), [])
    ).fsdp_plugin_args
    ours = FullyShardedDataParallelPlugin(**measured)
    for setting in (
        "fsdp_version",
        "reshard_after_forward",
        "cpu_offload",
        "activation_checkpointing",
    ):
        assert getattr(theirs, setting) == getattr(ours, setting), setting
    assert theirs.reshard_after_forward is (strategy == "fsdp2")
    # of layers, which both find by the model's own names
    assert theirs.auto_wrap_policy is ours.auto_wrap_policy


@each_strategy
@pytest.mark.parametrize("tool", ["trl", "llamafactory"])
def test_tools_are_started_with_the_file_of_accelerate(tool: str, strategy: str) -> None:
    files = export_all(recipe(config(strategy)), [tool])
    text = files[{"trl": "trl_sft.yaml", "llamafactory": "llamafactory.yaml"}[tool]]
    assert yaml.safe_load(files["accelerate.yaml"])["num_processes"] == 4
    assert "CUDA_VISIBLE_DEVICES=0,1,2,3 " in text and "on 4 GPUs" in text
    command = {
        "trl": "trl sft --config trl_sft.yaml --accelerate_config accelerate.yaml",
        "llamafactory": "accelerate launch --config_file accelerate.yaml -m llamafactory.launcher"
        " llamafactory.yaml",
    }
    assert f"{command[tool]}\n" in text
    assert "On several GPUs, only train.py was measured" in text
    assert "not expressed: num_gpus" not in text and "not expressed: sharding" not in text
    data = yaml.safe_load(text)
    assert data.get("ddp_find_unused_parameters") is (False if strategy == "ddp" else None)
    assert data["gradient_accumulation_steps"] == 32 // (4 * data["per_device_train_batch_size"])
    assert not {"fsdp", "fsdp_config", "deepspeed"} & set(data)  # one file says it


def test_what_waits_waits_as_it_was_measured(tmp_path: Path) -> None:
    """Gradients as shards, and the model in the host's memory: for each tool by its keys or by
    accelerate's file.
    """
    from transformers import TrainingArguments

    made = recipe(config("fsdp2", sync_each_batch=True, offload=True))
    files = export_all(made, ["trl", "llamafactory", "axolotl", "train"])
    synced = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    for name in ("trl_sft.yaml", "llamafactory.yaml", "axolotl.yaml"):
        assert yaml.safe_load(files[name])["accelerator_config"] == synced, name
        assert (
            "not expressed: sync_each_batch" not in files[name]
            and "not expressed: offload" not in files[name]
        )
    assert yaml.safe_load(files["axolotl.yaml"])["fsdp_config"]["offload_params"] is True
    assert launched(files["accelerate.yaml"], tmp_path)["FSDP_OFFLOAD_PARAMS"] == "true"
    told = json.loads(files["train_config.json"])
    assert told["sync_each_batch"] is True and told["offload"] is True
    arguments = TrainingArguments(use_cpu=True, **sharing_arguments(made.config, []))
    assert arguments.accelerator_config.gradient_accumulation_kwargs == {"sync_each_batch": True}
    assert arguments.fsdp_plugin_args["cpu_offload"] is True
    plain = export_all(recipe(config("fsdp2")), ["trl", "axolotl"])
    assert all("accelerator_config" not in yaml.safe_load(text) for text in plain.values())


def test_copies_of_the_shards_are_made_as_they_were_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two copies on four GPUs: by accelerate's file, by Axolotl's keys and by train.py."""
    from accelerate import ParallelismConfig
    from transformers import TrainingArguments

    made = recipe(config("fsdp2", copies=2))
    files = export_all(made, ["trl", "llamafactory", "axolotl", "train"])
    for name in ("trl_sft.yaml", "llamafactory.yaml", "axolotl.yaml"):
        assert "not expressed: copies" not in files[name], name
    axolotl = yaml.safe_load(files["axolotl.yaml"])
    assert (axolotl["dp_replicate_size"], axolotl["dp_shard_size"]) == (2, 2)
    environment = launched(files["accelerate.yaml"], tmp_path)
    assert environment["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
    told = json.loads(files["train_config.json"])
    assert told["copies"] == 2
    ours = TrainingArguments(use_cpu=True, **sharing_arguments(made.config, [])).parallelism_config
    for name, value in environment.items():
        if name.startswith("PARALLELISM_CONFIG"):
            monkeypatch.setenv(name, value)
    for one in (ours, ParallelismConfig()):
        assert one is not None and (one.dp_replicate_size, one.dp_shard_size, one.total_size) == (
            2,
            2,
            4,
        )
    one_copy = export_all(recipe(config("fsdp2")), ["accelerate", "axolotl"])
    assert (
        "parallelism_config" not in one_copy["accelerate.yaml"]
        and "dp_shard_size" not in one_copy["axolotl.yaml"]
    )


def test_trl_finds_the_file_of_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("trl.cli.accelerate_config")
    text = export_all(recipe(config("fsdp2")), ["trl"])["trl_sft.yaml"]
    arguments = (
        next(line for line in text.splitlines() if " trl sft " in line)
        .partition("trl_sft.yaml ")[2]
        .split()
    )
    (tmp_path / "accelerate.yaml").touch()
    monkeypatch.chdir(tmp_path)
    assert module.resolve_accelerate_config_argument(arguments) == [
        "--config_file",
        "accelerate.yaml",
    ]


@each_strategy
def test_axolotl_has_keys_of_its_own_which_check_reads_back(strategy: str, tmp_path: Path) -> None:
    made = recipe(config(strategy))
    files = export_all(made, ["axolotl"])
    assert list(files) == ["axolotl.yaml", *(["deepspeed.json"] if strategy in ZERO else [])]
    data = yaml.safe_load(files["axolotl.yaml"])
    assert "axolotl train axolotl.yaml -- --num_processes 4\n" in files["axolotl.yaml"]
    if strategy not in FSDP2:
        assert data.get("ddp_find_unused_parameters", True) is (strategy in ZERO)
        assert data.get("deepspeed") == ("deepspeed.json" if strategy in ZERO else None)
        assert not {"fsdp_version", "fsdp_config"} & set(data)
    else:
        assert data["fsdp_version"] == 2 and data["fsdp_config"]["reshard_after_forward"] is (
            strategy == "fsdp2"
        )
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    run = shard_run(adapt_to_model(read_file(tmp_path / "axolotl.yaml"), made.model), made.model, 4)
    assert (run.config.num_gpus, run.config.sharding) == (4, strategy)
    assert run.config.precision == "bf16_mixed" and run.accumulation == made.accumulation


def test_arguments_of_a_script_of_ones_own_come_with_the_file_of_accelerate() -> None:
    files = export_all(recipe(config("ddp", quantization="nf4")), ["transformers"])
    assert json.loads(files["training_args.json"])["ddp_find_unused_parameters"] is False
    notes = files["transformers_notes.md"]
    assert 'device_map={"": arguments.device}' in notes  # of each process its own
    assert "accelerate launch --config_file accelerate.yaml your_script.py" in notes
    assert yaml.safe_load(files["accelerate.yaml"])["distributed_type"] == "MULTI_GPU"


def test_what_cannot_say_it_is_refused_with_the_reason() -> None:
    made = recipe(config("fsdp2"))
    assert usual_formats(made) == ["recipe", "trl", "train", "axolotl", "llamafactory"]
    on_cpu = replace(made, device=resolve_device("cpu"))
    assert usual_formats(on_cpu) == ["recipe", "train"]
    with pytest.raises(
        UsageError, match="trl is not written: accelerate starts a single process"
    ) as refused:
        export_all(on_cpu, ["trl"])
    assert refused.value.remedy == "take one of recipe, train, kubernetes, skypilot, slurm"
    one = replace(on_cpu, winner=replace(made.winner, config=TrainConfig()))
    assert set(export_all(one, FORMATS)) >= {"trl_sft.yaml", "deepspeed.json"}
