"""Exporters: every knob arrives, names that bite do not, TRL accepts the YAML, and train.py trains
what was probed.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.catalog import resolve_device, resolve_model
from autotune.core.errors import UsageError
from autotune.core.train_config import TrainConfig
from autotune.export import keys, script
from autotune.export.formats import FORMATS, USUAL, export_all
from autotune.planning.foreign_config import adapt_to_model, read_file
from autotune.problem.length_distribution import Lengths
from autotune.problem.run_options import RunOptions
from autotune.problem.workload import Workload
from autotune.study.summary import Recipe
from autotune.trainer.settings import ALLOCATORS, ModelSettings, RunSettings
from tests.helpers.factories import summary
from tests.helpers.hostile import NAMES

CONFIGS = [
    TrainConfig(method="full", compile="per_layer", fp8_products="rowwise"),
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
        quantization="int8", precision="fp16_mixed", micro_batch_size=4, optimizer="lion_8bit"
    ),
    TrainConfig(
        method="full", optimizer="adafactor", precision="bf16_pure", attention="flash_attention_2"
    ),
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
    TrainConfig(loader_workers=2, kernels="liger"),
    TrainConfig(quantization="fp8", attention="sdpa_cudnn", checkpointing="offload"),
    TrainConfig(packing=True, packed_attention="varlen"),
    TrainConfig(padding="max_length", group_by_length=True),
    TrainConfig(padding="masked"),
    TrainConfig(allocator="fixed"),
    TrainConfig(lora_targets="attention"),
    TrainConfig(lora_targets="q_v"),
    TrainConfig(lora_targets="k_proj,up_proj"),
    TrainConfig(modules_to_save="embedding"),
    TrainConfig(modules_to_save="head"),
    TrainConfig(modules_to_save="embedding_and_head", quantization="nf4", kbit_preparation=True),
    TrainConfig(
        method="full", micro_batch_size=32, precision="bf16_pure", optimizer_in_backward=True
    ),
]
TARGETS = {  # of a Llama
    "all-linear": ["all-linear"],
    "attention": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "q_v": ["q_proj", "v_proj"],
    "k_proj,up_proj": ["k_proj", "up_proj"],
}
SAVED = {
    None: None,
    "none": None,
    "embedding": ["embed_tokens"],
    "head": ["lm_head"],
    "embedding_and_head": ["embed_tokens", "lm_head"],
}
each_config = pytest.mark.parametrize("config", CONFIGS, ids=TrainConfig.label)

HOSTILE = NAMES[0]


def recipe(config: TrainConfig, *, transformers: str = "5.23.0", **changes: Any) -> Recipe:
    base = summary().recipe
    assert base is not None
    packages = {**base.fingerprint.packages, "transformers": transformers}
    winner, fingerprint = (
        replace(base.winner, config=config),
        replace(base.fingerprint, packages=packages),
    )
    return replace(base, **{"winner": winner, "fingerprint": fingerprint, **changes})


def demo(config: TrainConfig) -> Recipe:
    """Two micro batches a step, of a model that a CPU trains in seconds."""
    workload = Workload(
        examples=16, lengths=Lengths.constant(32), global_batch=2 * config.micro_batch_size
    )
    return recipe(config, model=resolve_model("demo-3m"), workload=workload)


def write(files: dict[str, str], directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    for name, text in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text, encoding="utf-8")
    return directory


def run(directory: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """launch.sh with this interpreter, from another directory, without network."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(directory),
        "PYTHON": sys.executable,
        "HF_HUB_OFFLINE": "1",
    }
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment |= {"OMP_WAIT_POLICY": "passive", "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {
        name: value for name, value in os.environ.items() if name.startswith("TORCHINDUCTOR_")
    }
    return subprocess.run(
        ["bash", str(directory / "launch.sh"), *arguments],
        cwd=directory.parent,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )


@each_config
def test_recipe_yaml_holds_every_knob_and_what_it_rests_on(config: TrainConfig) -> None:
    data = yaml.safe_load(export_all(recipe(config), ["recipe"])["recipe.yaml"])
    assert data["config"] == config.as_dict()
    batch = data["workload"]["global_batch"]
    assert batch["sequences"] == batch["micro_batch_size"] * batch["accumulation"] == 32
    assert data["environment"] == {"PYTORCH_CUDA_ALLOC_CONF": ALLOCATORS[config.allocator]}
    assert data["fingerprint"]["packages"]["transformers"] == "5.23.0"
    assert data["model"]["config"]["model_type"] == "mistral"
    assert data["baseline"]["config"]
    assert data["cost"]["evidence"] == "measured"
    assert data["reason"]


@each_config
@pytest.mark.parametrize("transformers", ["5.17.0", "5.23.0", "6.0.0"])
def test_trl_yaml_says_every_knob_or_names_it(config: TrainConfig, transformers: str) -> None:
    made = recipe(config, transformers=transformers)
    text = export_all(made, ["trl"])["trl_sft.yaml"]
    data = yaml.safe_load(text)
    every = config.checkpoint_every
    kwargs = data.get("gradient_checkpointing_kwargs", {})
    said = {
        "method": data["use_peft"] is (config.method == "lora"),
        "micro_batch_size": data["per_device_train_batch_size"] == config.micro_batch_size,
        "seq_len": data["max_length"] == config.seq_len,
        "lora_rank": data.get("lora_r") == config.lora_rank
        and data.get("lora_alpha") == config.lora_alpha,
        "lora_targets": config.method == "full"
        or data["lora_target_modules"] == TARGETS[config.lora_targets],
        "modules_to_save": data.get("lora_modules_to_save") == SAVED[config.modules_to_save],
        "optimizer": data["optim"] == config.optimizer,
        "optimizer_in_backward": not config.optimizer_in_backward,
        "precision": data["dtype"] == config.base_dtype
        and data["bf16"] is (config.precision == "bf16_mixed")
        and data["fp16"] is (config.precision == "fp16_mixed"),
        "quantization": data.get("load_in_4bit", False) is (config.quantization == "nf4")
        and data.get("load_in_8bit", False) is (config.quantization == "int8")
        and config.quantization != "fp8",
        "double_quant": data.get("use_bnb_nested_quant", False) is config.double_quant,
        "kbit_preparation": not config.kbit_preparation,
        "checkpointing": data["gradient_checkpointing"] is (every is not None)
        and (every in (None, 1) or kwargs.get("every_n_layers") == every)
        and kwargs.get("offload", False) is config.offloads,
        "attention": data["attn_implementation"] == config.attention,
        "compile": data["torch_compile"] is False and config.compile == "none",
        "loss": config.loss == "chunked",
        "kernels": data.get("use_liger_kernel", False) is (config.kernels == "liger"),
        "loader_workers": data["dataloader_num_workers"] == config.loader_workers,
        "allocator": ALLOCATORS[config.allocator] in text,
        "packing": data["packing"] is False and not config.packing,
        "packed_attention": config.packed_attention == "mask",
        "padding": data.get("pad_to_multiple_of")
        == {"longest": None, "masked": None, "max_length": config.seq_len}.get(config.padding, 0),
        "group_by_length": data.get("train_sampling_strategy", "random")
        == ("group_by_length" if config.group_by_length else "random"),
        "dora": data.get("use_dora", False) is config.dora,
        "lora_dropout": data.get("lora_dropout")
        == (config.lora_dropout if config.method == "lora" else None),
        "rslora": data.get("use_rslora", False) is config.rslora,
        "num_gpus": config.num_gpus == 1,
    }
    named = {item.split()[0].rstrip(":") for item in keys.inexpressible_knobs("trl", made)}
    assert set(config.as_dict()) <= {knob for knob, is_said in said.items() if is_said} | named
    assert ("checkpointing" in named) is (
        transformers == "5.17.0" and ((every or 1) > 1 or config.offloads)
    )
    assert all(
        f"# not expressed: {item}\n" in text for item in keys.inexpressible_knobs("trl", made)
    )
    assert data["gradient_accumulation_steps"] == 32 // config.micro_batch_size
    assert isinstance(data["warmup_steps"], int)
    assert data["packing"] is config.packing and data.get("packing_strategy") == (
        "bfd" if config.packing else None
    )
    assert data["logging_nan_inf_filter"] is False
    assert isinstance(data["learning_rate"], float)
    assert "was not tuned" in text
    assert (
        f"PYTORCH_CUDA_ALLOC_CONF={ALLOCATORS[config.allocator]} trl sft --config trl_sft.yaml"
        in text
    )
    assert ("--dynamo_use_regional_compilation" in text) is (config.compile == "per_layer")


@each_config
@pytest.mark.filterwarnings("ignore::FutureWarning")  # the names before 5.23, which 5.17 needs
def test_trl_accepts_the_yaml(config: TrainConfig, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    write(export_all(recipe(config), ["trl"]), tmp_path)
    parser = trl.TrlParser((trl.ScriptArguments, trl.SFTConfig, trl.ModelConfig))
    # A machine without GPU refuses bf16 and fp16: they are all that is overridden.
    cpu = ["--use_cpu", "true", "--bf16", "false", "--fp16", "false"]
    script, training, model = parser.parse_args_and_config(
        ["--config", str(tmp_path / "trl_sft.yaml"), *cpu]
    )
    assert script.dataset_name == "your/dataset"
    assert training.max_length == config.seq_len
    assert training.gradient_checkpointing is (config.checkpointing != "none")
    assert model.use_peft is (config.method == "lora")
    if (adapters := trl.get_peft_config(model)) is not None:
        names = TARGETS[config.lora_targets]
        assert adapters.target_modules == ("all-linear" if "all-linear" in names else set(names))
    assert (trl.get_quantization_config(model) is None) is (config.quantization in ("none", "fp8"))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_trl_takes_the_file_of_a_cpu_study_as_it_is(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    write(export_all(recipe(TrainConfig(), device=resolve_device("cpu")), ["trl"]), tmp_path)
    parser = trl.TrlParser((trl.ScriptArguments, trl.SFTConfig, trl.ModelConfig))
    _, training, _ = parser.parse_args_and_config(["--config", str(tmp_path / "trl_sft.yaml")])
    assert training.use_cpu and training.bf16 and training.device.type == "cpu"


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_trl_evaluates_what_it_holds_out(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    base = recipe(TrainConfig(), device=resolve_device("cpu"))
    options = RunOptions(eval_steps=7, report_to="tensorboard")
    made = replace(base, workload=replace(base.workload, eval_share=0.25), run_options=options)
    write(export_all(made, ["trl"]), tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' * 6)
    text = (tmp_path / "trl_sft.yaml").read_text()
    (tmp_path / "trl_sft.yaml").write_text(text.replace("your/dataset", str(tmp_path)))
    parser = trl.TrlParser(
        (trl.ScriptArguments, trl.SFTConfig, trl.ModelConfig, trl.DatasetMixtureConfig)
    )
    script_args, training, _, mixture = parser.parse_args_and_config(
        ["--config", str(tmp_path / "trl_sft.yaml")]
    )
    assert script_args.dataset_name is None and training.report_to == ["tensorboard"]
    assert (training.eval_strategy, training.eval_steps, training.run_name) == (
        "steps",
        7,
        made.study,
    )
    split = trl.get_dataset(mixture)
    assert {name: len(rows) for name, rows in split.items()} == {"train": 4, "test": 2}
    assert script_args.dataset_test_split == "test"


def test_trl_takes_a_single_module_for_a_pattern() -> None:
    """So its name stands there twice: of Phi 3 queries and values are in one matrix."""
    made = recipe(TrainConfig(lora_targets="q_v"), model=resolve_model("phi-3-mini"))
    data = yaml.safe_load(export_all(made, ["trl"])["trl_sft.yaml"])
    assert data["lora_target_modules"] == ["qkv_proj", "qkv_proj"]
    assert script.settings(made).model_settings.lora_targets == ["qkv_proj"]


def test_all_linear_layers_are_named_where_peft_refuses_some(tmp_path: Path) -> None:
    """What tools find by themselves would be refused; what is
    read back is the same configuration.
    """
    made = recipe(
        TrainConfig(attention="eager"), model=resolve_model("mistralai/Mamba-Codestral-7B-v0.1")
    )
    files = export_all(made, ["train", "trl", "axolotl", "llamafactory"])
    assert yaml.safe_load(files["trl_sft.yaml"])["lora_target_modules"] == ["in_proj", "in_proj"]
    axolotl = yaml.safe_load(files["axolotl.yaml"])
    assert (axolotl["lora_target_modules"], axolotl.get("lora_target_linear")) == (
        ["in_proj"],
        None,
    )
    assert yaml.safe_load(files["llamafactory.yaml"])["lora_target"] == "in_proj"
    assert json.loads(files["train_config.json"])["model_settings"]["lora_targets"] == ["in_proj"]
    for name in ("axolotl.yaml", "llamafactory.yaml"):
        (tmp_path / name).write_text(files[name])
        assert (
            adapt_to_model(read_file(tmp_path / name), made.model).config.lora_targets
            == "all-linear"
        )
        assert "adapters on every linear layer" not in files[name]


@each_config
def test_train_config_holds_every_knob(config: TrainConfig, tmp_path: Path) -> None:
    made = recipe(config)
    files = export_all(made, ["train"])
    (tmp_path / "train_config.json").write_text(files["train_config.json"])
    settings = RunSettings.read(tmp_path / "train_config.json")
    assert settings == script.settings(made)
    assert files["train_config.json"].isascii()
    knobs = (
        asdict(settings) | asdict(settings.model_settings) | {"checkpointing": config.checkpointing}
    )
    knobs |= {"lora_targets": config.lora_targets, "modules_to_save": config.modules_to_save}
    knobs |= {"attention": config.attention, "packed_attention": config.packed_attention}
    assert config.as_dict().items() <= knobs.items()
    assert settings.model_settings.attention == config.attention_implementation
    names = TARGETS[config.lora_targets]
    assert settings.model_settings.lora_targets == (None if names == ["all-linear"] else names)
    assert settings.model_settings.modules_to_save == SAVED[config.modules_to_save]
    assert settings.model_settings.checkpoint_every == config.checkpoint_every
    assert settings.model_settings.offload is config.offloads
    assert settings.accumulation * config.micro_batch_size == 32
    assert (settings.model_settings.bitsandbytes_arguments() is None) is (
        config.quantization in ("none", "fp8")
    )
    assert json.loads(files["model_config.json"]) == resolve_model("mistral-7b").config
    assert files["model_config.json"].startswith('{\n  "')  # to be read and edited


@pytest.mark.parametrize(
    ("padding", "grouped", "padded_lengths"),
    [
        ("longest", False, []),
        ("longest", True, []),
        ("bucket", False, [900, 1024]),  # longer rows than are known are padded too
        ("bucket", True, [300, 900, 1024]),
        ("max_length", False, [1024]),
    ],
)
def test_train_config_says_how_rows_are_padded(
    padding: str, grouped: bool, padded_lengths: list[int]
) -> None:
    workload = Workload(examples=64, lengths=Lengths.of([300, 900] * 32, "given"))
    config = TrainConfig(padding=padding, micro_batch_size=8, group_by_length=grouped)
    settings = script.settings(recipe(config, workload=workload))
    assert (settings.padding, settings.padded_lengths) == (padding, padded_lengths)
    assert settings.group_by_length is grouped
    packed = script.settings(
        recipe(TrainConfig(packing=True, group_by_length=grouped), workload=workload)
    )
    assert (packed.padded_lengths, packed.group_by_length, packed.dealt) == ([1024], False, False)
    dealt = script.settings(recipe(config, workload=replace(workload, dealt=True)))
    assert dealt.dealt is (padding != "max_length" and not grouped) and not settings.dealt


@pytest.mark.parametrize(("examples", "error"), [(10_000, 0.01), (200, 0.1)])
def test_random_rows_pad_as_the_run_does(examples: int, error: float) -> None:
    """The longest of each micro batch is as long as in the run, and the longest row of all is
    there.
    """
    lengths = Lengths.from_summary(400, 2000)
    config = TrainConfig(micro_batch_size=8, seq_len=8192)
    made = recipe(config, workload=Workload(examples=examples, lengths=lengths))
    sampled = script.settings(made).lengths
    same = Workload(examples=examples, lengths=Lengths.of(sampled[:examples], "given"))
    assert same.tokens_per_row(config) == pytest.approx(
        made.workload.tokens_per_row(config), rel=error
    )
    assert max(sampled[:examples]) == lengths.longest < 8192


def test_every_setting_is_used_by_the_script() -> None:
    text = "".join(script.runtime_files().values())
    names = {*RunSettings.__dataclass_fields__, *ModelSettings.__dataclass_fields__}
    unused = {name for name in names if not re.search(rf"(settings|self|config)\.{name}\b", text)}
    assert unused == {"about", "versions", "method"}  # for the reader


def test_the_script_is_the_code_that_the_probe_runs() -> None:
    files = export_all(recipe(TrainConfig()), ["train"])
    runtime = Path(script.__file__).parents[1] / "trainer"
    copied = {
        name.removeprefix("runtime/"): text
        for name, text in files.items()
        if name.startswith("runtime/")
    }
    assert copied == {
        path.name: script.ENCODING + path.read_text() for path in runtime.glob("*.py")
    }
    assert not any("autotune." in text for text in copied.values())


@pytest.mark.parametrize(("examples", "expected"), [(10_000, 10_000), (2, 4)])
def test_random_rows_are_as_many_as_the_examples_and_fill_a_micro_batch(
    examples: int, expected: int
) -> None:
    made = recipe(TrainConfig(micro_batch_size=4), workload=Workload(examples=examples))
    assert script.settings(made).examples == expected


def test_formats_are_chosen_by_name() -> None:
    made = recipe(TrainConfig())
    usual = {
        "recipe.yaml",
        "trl_sft.yaml",
        "train.py",
        "train_config.json",
        "launch.sh",
        "model_config.json",
    }
    usual |= set(script.runtime_files())
    usual |= {"axolotl.yaml", "llamafactory.yaml", "dataset_info.json"}
    asked = {
        "accelerate.yaml",
        "deepspeed.json",
        "training_args.json",
        "adapter_config.json",
        "transformers_notes.md",
    }
    assert set(export_all(made, USUAL)) == usual
    assert set(export_all(made, FORMATS)) == usual | asked | {
        "job.yaml",
        "sky.yaml",
        "train.sbatch",
    }
    assert set(export_all(made, ["trl"])) == {"trl_sft.yaml"}
    with pytest.raises(UsageError, match="unsloth"):
        export_all(made, ["unsloth"])
    with pytest.raises(UsageError, match="the format torchtune was removed") as removed:
        export_all(made, ["torchtune"])
    assert "0.1.0 was the last version" in str(removed.value)
    assert removed.value.remedy == "take trl, axolotl or llamafactory"


def test_a_published_model_needs_data_or_random_weights(tmp_path: Path) -> None:
    directory = write(export_all(recipe(TrainConfig()), ["train"]), tmp_path / "out")
    for arguments in ([], ["--dataset", "rows.jsonl", "--random-weights"]):
        done = run(directory, *arguments)
        assert done.returncode == 2
        assert "give either --dataset PATH to train, or --random-weights" in done.stderr
    directory = write(export_all(demo(TrainConfig()), ["train"]), tmp_path / "demo")
    done = run(directory, "--dataset", "rows.jsonl")
    assert done.returncode == 2
    assert "no published weights" in done.stderr


@pytest.mark.parametrize(("device", "visible"), [("cpu", ""), ("h200", "7")])
def test_the_script_of_a_cpu_study_sees_no_gpu(device: str, visible: str, tmp_path: Path) -> None:
    told = "import os\n\ndef main(*_):\n    print(os.environ['CUDA_VISIBLE_DEVICES'])\n"
    files = export_all(recipe(TrainConfig(), device=resolve_device(device)), ["train"]) | {
        "runtime/train.py": told
    }
    done = run(write(files, tmp_path / "out"), "--random-weights", CUDA_VISIBLE_DEVICES="7,1")
    assert (done.returncode, done.stdout) == (0, f"{visible}\n"), done.stderr


def test_a_script_for_several_gpus_starts_its_ranks_itself(tmp_path: Path) -> None:
    made = recipe(TrainConfig(num_gpus=2, sharding="fsdp2_keep"))
    files = export_all(made, ["train"])
    told = json.loads(files["train_config.json"])
    assert (told["num_gpus"], told["sharding"], told["accumulation"]) == (2, "fsdp2_keep", 2)
    done = run(
        write(export_all(demo(TrainConfig(num_gpus=2)), ["train"]), tmp_path / "out"),
        "--max-steps",
        "x",
    )
    # before there are ranks
    assert done.returncode == 2 and done.stderr.count("invalid int value: 'x'") == 1


@pytest.mark.parametrize(
    ("knobs", "limit_gib", "is_larger"),
    [
        # 3.1 G parameters of two bytes: 5.8 GiB, and the adapters
        ({"sharding": "fsdp2"}, 7.5, False),
        ({"sharding": "fsdp2"}, 6.0, True),
        ({"sharding": "fsdp2", "method": "full"}, 12.0, True),  # fp32 masters
        ({"sharding": "fsdp2", "method": "full"}, 14.0, False),
        ({"sharding": "zero3"}, 6.0, True),
        ({"sharding": "ddp"}, 6.0, False),  # each must hold all of it
        ({"sharding": "zero2"}, 6.0, False),
    ],
)
def test_a_model_larger_than_a_gpu_is_built_as_shards(
    knobs: dict[str, Any], limit_gib: float, is_larger: bool
) -> None:
    made = recipe(TrainConfig(num_gpus=2, **knobs))
    measured = replace(made.winner.measurement, total_params=3_100_000_000, limit_gib=limit_gib)
    made = replace(made, winner=replace(made.winner, measurement=measured))
    told = json.loads(export_all(made, ["train"])["train_config.json"])
    assert told["is_larger_than_gpu"] is is_larger


def test_a_script_for_several_gpus_is_not_run_on_one(tmp_path: Path) -> None:
    directory = write(export_all(demo(TrainConfig(num_gpus=2)), ["train"]), tmp_path / "out")
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment |= {"LOCAL_RANK": "0", "WORLD_SIZE": "1"}  # as torchrun sets them for one process
    command = [
        sys.executable,
        "train.py",
        "--random-weights",
        "--max-steps",
        "1",
        "--output-dir",
        "",
    ]
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "start without torchrun, or give torchrun --nproc-per-node=2" in done.stderr


def test_exporters_need_no_torch() -> None:
    code = (
        "import sys, autotune.export; sys.exit('torch' in sys.modules or 'transformers' in"
        " sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
