"""The other tools' part of `estimators.py`: ask each estimator for the memory of each training.

It runs in a process of its own and imports nothing of autotune. Each function below calls a tool's
own interface, with the nearest settings that the tool has. Models come from a folder with a
config.json, because there is no network: where a tool asks the Hub, it gets this file, and the
number of parameters that the Hub would name. A tool that refuses a training raises an error, and
its estimate is then unknown.
"""

import contextlib
import importlib.util
import io
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

GIB = 2**30
STUDIO = "studio/backend/utils/hardware/vram_estimation.py"  # in the package unsloth


def fitcheck(row: dict[str, Any], folder: Path) -> float:
    """fitcheck-llm: `fitcheck.estimate`."""
    from fitcheck import TrainingConfig, config_parser, estimate, fetch_model_config, get_gpu

    config = row["config"]
    config_parser.hf_hub_download = lambda **_: str(folder / "config.json")
    config_parser._reported_param_count = lambda *_: row["params"]
    training = TrainingConfig(
        precision="bf16",
        quantization=config["quantization"],
        double_quant=config["double_quant"],
        optimizer="adam8bit" if is_8bit(config) else "adamw",
        batch_size=config["micro_batch_size"],
        seq_len=config["seq_len"],
        lora_rank=config["lora_rank"],
        lora_targets=row["targets"],
        grad_checkpoint=config["checkpointing"] == "full",
        flash_attn=config["attention"] != "eager",
        grad_accum_steps=row["accumulation"],
    )
    gpu = get_gpu(vram_mib=round(row["gpu_gib"] * 1024))
    return estimate(fetch_model_config(row["model"]), training, gpu).total_mib / 1024


def fitscout(row: dict[str, Any], folder: Path) -> float:
    """fitscout: `estimate_memory`. It knows neither the targets of adapters nor the attention."""
    from fitscout.memory.estimator import estimate_memory

    config = row["config"]
    return estimate_memory(
        _fitscout_profile(str(folder)),
        method=method(config),
        micro_batch=config["micro_batch_size"],
        seq_len=config["seq_len"],
        grad_ckpt=config["checkpointing"] == "full",
        opt_8bit=is_8bit(config),
        lora_rank=config["lora_rank"] or 16,
    ).total_gb


@cache
def _fitscout_profile(folder: str) -> Any:
    from fitscout import inspect_model

    return inspect_model(folder)


def canifinetune(row: dict[str, Any], folder: Path) -> float:
    """canifinetune: `estimate`, without the safety margin that it reports separately."""
    from canifinetune.estimator.memory import EstimateRequest, estimate

    config = row["config"]
    request = EstimateRequest(
        model_id=str(folder),
        method=method(config),
        seq_len=config["seq_len"],
        micro_batch_size=config["micro_batch_size"],
        gradient_accumulation_steps=row["accumulation"],
        base_dtype="bf16",
        quantization="nf4_double_quant" if config["double_quant"] else "nf4",
        lora_rank=config["lora_rank"] or 16,
        lora_target_scope="all_linear" if len(row["targets"]) > 4 else "attention",
        optimizer="adamw_8bit" if is_8bit(config) else "adamw_torch",
        gradient_checkpointing=config["checkpointing"] == "full",
        attention_implementation=config["attention"],
        gpu_vram_gb=row["gpu_gib"],
        use_network=False,
    )
    memory = estimate(request).memory
    return memory.total_estimated_gb - memory.safety_margin_gb


def accelerate(row: dict[str, Any], folder: Path) -> float:
    """Accelerate's estimate-memory: training with Adam in mixed precision. No LoRA."""
    if row["config"]["method"] != "full":
        raise ValueError("it estimates full fine-tuning only")
    return max(_accelerate_sizes(str(folder)).values()) / GIB


@cache
def _accelerate_sizes(folder: str) -> dict[str, int]:
    from accelerate.commands import estimate

    estimate.verify_on_hub = lambda *_: SimpleNamespace(library_name="transformers", config={})
    arguments = estimate.estimate_command_parser().parse_args([folder, "--dtypes", "float16"])
    ((_, _, _, training),) = estimate.gather_data(arguments)
    return training


def unsloth(row: dict[str, Any], folder: Path) -> float:
    """The formula of Unsloth Studio: `estimate_training_vram`."""
    from transformers import AutoConfig

    config, studio = row["config"], _studio()
    architecture = studio.extract_arch_config(AutoConfig.from_pretrained(folder))
    training = studio.TrainingVramConfig(
        training_method=method(config),
        batch_size=config["micro_batch_size"],
        max_seq_length=config["seq_len"],
        lora_rank=config["lora_rank"] or 16,
        target_modules=row["targets"],
        gradient_checkpointing="true" if config["checkpointing"] == "full" else "none",
        optimizer="adamw_8bit" if is_8bit(config) else "adamw_torch",
        load_in_4bit=config["quantization"] == "nf4",
        attention_implementation=config["attention"],
    )
    return studio.estimate_training_vram(architecture, training).total / GIB


@cache
def _studio() -> ModuleType:
    path = next(Path(folder) / STUDIO for folder in sys.path if (Path(folder) / STUDIO).is_file())
    spec = importlib.util.spec_from_file_location("vram_estimation", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def hf_vram_calc(row: dict[str, Any], folder: Path) -> float:
    """hf-vram-calc: its number for training or for LoRA; neither depends on the batch."""
    from hf_vram_calc.calculator import LlmodelMemoryResult

    config = row["config"]
    calculator, model, params = _calculator(str(folder))
    result = LlmodelMemoryResult(
        "int4" if config["quantization"] == "nf4" else "bf16",
        config["micro_batch_size"],
        config["seq_len"],
        config["lora_rank"] or 64,
    )
    result.calculate_all(model, params, calculator)
    return result.training_memory if config["method"] == "full" else result.lora_memory


@cache
def _calculator(folder: str) -> tuple[Any, Any, int]:
    from hf_vram_calc.calculator import ParameterCalculator, VRAMCalculator
    from hf_vram_calc.config import ConfigManager
    from hf_vram_calc.parser import ConfigParser

    model = ConfigParser.parse_config(folder, folder)
    params = ParameterCalculator.calculate_transformer_params(model)
    return VRAMCalculator(ConfigManager()), model, params


TOOLS: dict[str, Callable[[dict[str, Any], Path], float]] = {
    "fitcheck-llm": fitcheck,
    "fitscout": fitscout,
    "canifinetune": canifinetune,
    "accelerate": accelerate,
    "unsloth": unsloth,
    "hf-vram-calc": hf_vram_calc,
}


def method(config: dict[str, Any]) -> str:
    return "qlora" if config["quantization"] == "nf4" else config["method"]


def is_8bit(config: dict[str, Any]) -> bool:
    return "8bit" in config["optimizer"]


def ask(tool: str, row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a tool's GiB, or the reason why it has no estimate."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return {"gib": TOOLS[tool](row, folder)}
    except Exception as error:  # whatever a tool raises is its refusal
        return {"refused": f"{type(error).__name__}: {error}"[:200]}


def version_of(package: str) -> str | None:
    for folder in sys.path:
        for found in Path(folder).glob(f"{package.replace('-', '_')}-*.dist-info"):
            return found.name.removesuffix(".dist-info").rpartition("-")[2]
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main() -> None:
    """Read the trainings from stdin, and print the versions and the answers of all tools."""
    warnings.simplefilter("ignore")
    rows = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as scratch:
        answers = []
        for row in rows:
            folder = Path(scratch, row["model"].replace("/", "--"))
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text(json.dumps(row["model_config"]))
            answers.append({tool: ask(tool, row, folder) for tool in TOOLS})
    versions = {tool: version_of(tool) for tool in TOOLS}
    print(json.dumps({"versions": versions, "answers": answers}))


if __name__ == "__main__":
    main()
