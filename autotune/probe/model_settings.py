"""Translates a TrainConfig into the settings of the model builder, for probes and the export."""

from autotune.core.lora_targets import saved_modules, target_modules
from autotune.core.objective import Objective
from autotune.core.train_config import TrainConfig
from autotune.trainer.settings import ModelSettings


def model_settings(
    config: TrainConfig,
    model_type: str,
    objective: Objective = Objective.SFT,
    vision: str = "frozen",
) -> ModelSettings:
    """The values that `trainer.model_builder` needs for a model of this transformers type."""
    return ModelSettings(
        base_dtype=config.base_dtype,
        attention=config.attention_implementation,
        quantization=config.quantization,
        double_quant=config.double_quant,
        kbit_preparation=config.kbit_preparation,
        lora_rank=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_targets=target_modules(model_type, config.lora_targets),
        modules_to_save=saved_modules(model_type, config.modules_to_save),
        dora=config.dora,
        rslora=config.rslora,
        lora_dropout=config.lora_dropout,
        adapters_in_fp32=config.precision != "bf16_pure",
        checkpoint_every=config.checkpoint_every,
        offload=config.offloads,
        activation_budget=config.activation_budget,
        tiled=config.tiling == "tokens",
        joined=config.lora_kernels == "joined",
        grouped=config.lora_kernels == "grouped",
        fp8_products=config.fp8_products,
        quantize_experts=config.quantize_experts,
        num_labels=objective.num_labels,
        vision=vision,
    )
