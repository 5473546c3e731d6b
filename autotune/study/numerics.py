"""Check whether a cheaper number format trains like the reference format.

The check compares the losses of the same micro batches in both formats. The check needs real
weights, because with random weights, the loss is about the logarithm of the vocabulary's size in
every format.
"""

import statistics
from dataclasses import replace

from autotune.core.probe_types import Measurement
from autotune.core.train_config import TrainConfig

# A format is unsound if its losses differ from the losses of the reference by more than this
# fraction on average. bf16 itself rounds a loss by up to 0.4 %.
BOUND = 0.02
REFERENCE = "bf16 under autocast (fp32 on devices without bf16) and 32-bit optimizer state"
FULL_STATE = {"adamw_8bit": "adamw_torch_fused", "paged_adamw_8bit": "adamw_torch_fused"}


def coarse_formats(config: TrainConfig) -> str:
    """Name the number formats that are coarser than the reference format, or return "" if none is.

    Example: 'fp16_mixed and adamw_8bit'.
    """
    doubtful = [config.precision] if config.precision in ("fp16_mixed", "bf16_pure") else []
    doubtful += ["fp8"] if config.multiplies_in_fp8 else []
    doubtful += [config.optimizer] if config.optimizer.endswith("8bit") else []
    return " and ".join(doubtful)


def reference_of(config: TrainConfig, *, bf16: bool) -> TrainConfig | None:
    """Return the configuration in the reference format, with the same batches and optimizer.

    The format is bf16 under autocast, or fp32 if the device has no bf16, with 32-bit optimizer
    state. Every layer is recomputed in the backward pass, so that the reference needs little
    memory. Returns None for an optimizer that exists only with 8-bit state. A reference with
    another optimizer would compare the optimizers and not the formats.
    """
    optimizer = FULL_STATE.get(config.optimizer, config.optimizer)
    if optimizer.endswith("8bit"):
        return None
    return replace(
        config,
        precision="bf16_mixed" if bf16 else "fp32",
        optimizer=optimizer,
        quantization="none" if config.quantization == "fp8" else config.quantization,
        fp8_products="none",
        checkpointing="full",
        compile="none",
        loss="full",
    )


def deviation(measurement: Measurement, reference: Measurement) -> float | None:
    """The mean relative difference between the losses of two probes.

    Only the micro batches that both probes ran are compared.

    The result is None if the probes have no micro batch in common.
    """
    shared = list(zip(measurement.losses, reference.losses, strict=False))
    return statistics.fmean(abs(loss / wanted - 1.0) for loss, wanted in shared) if shared else None
