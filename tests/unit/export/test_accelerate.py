"""accelerate.yaml loads and launches what was probed, and deepspeed.json agrees with the Trainer's
arguments.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from autotune.catalog import resolve_device
from autotune.core.train_config import TrainConfig
from autotune.export import accelerate, transformers
from autotune.study.summary import Recipe
from tests.unit.export.test_script import CONFIGS, HOSTILE, each_config, recipe

MIXED = {"bf16_mixed": "bf16", "fp16_mixed": "fp16", "bf16_pure": "no", "fp32": "no"}

# Fields of deepspeed.runtime.zero.config.DeepSpeedZeroConfig and keys of runtime.config (DeepSpeed
# 0.19.8).
TOP = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
}
TOP |= {"bf16", "fp16", "zero_optimization", "zero_allow_untested_optimizer"}
ZERO = {"stage", "overlap_comm", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size"}


def written(made: Recipe, directory: Path) -> Path:
    path = directory / "accelerate.yaml"
    path.write_text(accelerate.export(made)["accelerate.yaml"], encoding="utf-8")
    return path


def launched(path: Path) -> dict[str, str]:
    """The environment that `accelerate launch` gives to a script."""
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    arguments = launch.launch_command_parser().parse_args(
        ["--config_file", str(path), "script.py", "a.json"]
    )
    arguments, _, _ = launch._validate_launch_command(arguments)
    command, environment = prepare_simple_launcher_cmd_env(arguments)
    assert command[1:] == ["script.py", "a.json"]
    assert isinstance(environment, dict)
    return environment


@each_config
def test_accelerate_launches_what_was_probed(config: TrainConfig, tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    path = written(recipe(config), tmp_path)
    loaded = load_config_from_file(str(path))  # refuses keys that it does not know
    assert (loaded.num_processes, loaded.num_machines) == (1, 1)
    assert loaded.mixed_precision == MIXED[config.precision]
    assert loaded.distributed_type.value == "NO"
    assert not loaded.fsdp_config
    environment = launched(path)
    compiled = config.compile == "per_layer"
    assert environment["ACCELERATE_MIXED_PRECISION"] == MIXED[config.precision]
    assert environment["ACCELERATE_DYNAMO_BACKEND"] == ("INDUCTOR" if compiled else "NO")
    assert environment["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] == str(compiled)
    assert environment["ACCELERATE_DYNAMO_USE_DYNAMIC"] == "False"
    assert environment["ACCELERATE_USE_CPU"] == "False"


def test_regional_compilation_reaches_the_trainer_only_by_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.utils import TorchDynamoPlugin

    config = next(config for config in CONFIGS if config.compile == "per_layer")
    for name, value in launched(written(recipe(config), tmp_path)).items():
        if name.startswith("ACCELERATE_DYNAMO"):
            monkeypatch.setenv(name, value)
    # as Trainer makes it for torch_compile
    plugin = TorchDynamoPlugin(backend="inductor", mode=None, dynamic=None)
    assert plugin.use_regional_compilation is True
    assert plugin.dynamic is False
    assert plugin.fullgraph is False


def test_the_head_says_what_holds(tmp_path: Path) -> None:
    made = recipe(TrainConfig(optimizer="adafactor"))
    text = accelerate.export(made)["accelerate.yaml"]
    assert f"Fingerprint {made.fingerprint.digest}" in text
    assert "Expect (measured)" in text and "Probed with transformers" in text
    assert "adafactor cannot factor its state" in text
    assert "computes in bf16 without autocast" in text
    cpu = accelerate.export(recipe(TrainConfig(), device=resolve_device("cpu")))["accelerate.yaml"]
    assert yaml.safe_load(cpu)["use_cpu"] is True


def filled(made: Recipe) -> dict[str, Any]:
    """deepspeed.json as the Trainer completes it.

    What disagrees with its arguments is an error there.
    """
    from accelerate.utils.deepspeed import HfDeepSpeedConfig
    from transformers import HfArgumentParser, TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    class WithoutDeepSpeed(HfTrainerDeepSpeedConfig, HfDeepSpeedConfig):  # type: ignore[misc]
        """The Trainer's own, which without DeepSpeed derives from object."""

        def __init__(self, values: dict[str, Any]) -> None:
            HfDeepSpeedConfig.__init__(self, values)
            self._dtype, self.mismatches = None, []

    said = json.loads(transformers.export(made)["training_args.json"])
    (arguments,) = HfArgumentParser(TrainingArguments).parse_dict(
        said | {"use_cpu": True, "bf16": False, "fp16": False}
    )
    # which a machine without GPU refuses
    arguments.bf16, arguments.fp16 = said["bf16"], said["fp16"]
    config = WithoutDeepSpeed(json.loads(accelerate.export(made)["deepspeed.json"]))
    config.trainer_config_process(arguments)
    config.trainer_config_finalize(
        arguments, SimpleNamespace(config=SimpleNamespace(hidden_size=64)), 100
    )
    values: dict[str, Any] = config.config
    return values


@each_config
@pytest.mark.filterwarnings("ignore::FutureWarning")  # the names before transformers 5.23
def test_deepspeed_agrees_with_the_trainer(config: TrainConfig) -> None:
    made = recipe(config)
    values = json.loads(accelerate.export(made)["deepspeed.json"])
    assert set(values) == TOP
    assert set(values["zero_optimization"]) == ZERO
    assert values["bf16"]["enabled"] is (config.precision == "bf16_mixed")
    assert values["fp16"]["enabled"] is (config.precision == "fp16_mixed")
    done = filled(made)
    assert "auto" not in json.dumps(done)
    assert done["zero_optimization"]["stage"] == 2
    assert done["train_micro_batch_size_per_gpu"] == config.micro_batch_size
    assert done["train_batch_size"] == config.micro_batch_size * made.accumulation
    assert done["gradient_clipping"] == 1.0


@pytest.mark.extra
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_takes_it(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    config = pytest.importorskip("deepspeed.runtime.config")

    made = recipe(TrainConfig(num_gpus=2, sharding=f"zero{stage}"))
    assert config.DeepSpeedConfig(filled(made)).zero_config.stage == stage
    assert (
        config.DeepSpeedConfig(filled(recipe(TrainConfig()))).zero_config.stage == 2
    )  # for one GPU, that may become several


def test_hostile_names_stay_in_the_head(tmp_path: Path) -> None:
    made = recipe(TrainConfig(), study=HOSTILE, trainer=HOSTILE)
    plain = recipe(TrainConfig())
    files, expected = accelerate.export(made), accelerate.export(plain)
    assert yaml.safe_load(files["accelerate.yaml"]) == yaml.safe_load(expected["accelerate.yaml"])
    assert files["deepspeed.json"] == expected["deepspeed.json"]
    launched(written(made, tmp_path))
