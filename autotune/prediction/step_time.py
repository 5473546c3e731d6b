"""How long a micro batch takes, by formula: products at the rate that large ones reach, everything else at memory's.

The constants are those of an H200, on which `benchmarks/depth_extrapolation.py` and the table of
`benchmarks/search_efficiency.py` were measured; for another card the result is carried across (`carry`). What the host
needs to issue the work is a floor of its own, and the least certain number here: hosts differ by two times.
"""

import math
from dataclasses import dataclass

from autotune.catalog import DeviceSpec, ModelSpec, resolve_device
from autotune.core.train_config import TrainConfig
from autotune.core.units import GIB
from autotune.prediction.memory_formula import Sizes, kept_bytes, memory_breakdown
from autotune.prediction.transfer import interval

REFERENCE = "h200-sxm"
RATE = 0.67  # of the dense peak, in products and in attention
FP8 = 1.36  # times that, where factors are rounded to 8 bits
# Bytes moved for each byte that a layer keeps, with what comes and goes; for each logit; for each byte of a 4-bit base.
EAGER, COMPILED = (10.5, 560.0, 8.5), (5.0, 260.0, 5.0)
FULL = 0.7  # of these where no adapters stand beside the layers
HOST_MS = {"eager": 6.0, "compiled": 3.5}  # of a layer and micro batch, with adapters
NF4_MS, FULL_MS = 2.0, 2.5
AGAIN = 0.7  # of it, where the layer is computed again
# Relative standard deviations of an estimated micro batch: where the device decides, where the host does.
DEVICE_ERROR, HOST_ERROR = 0.08, 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeEstimate:
    """Seconds on the reference card, of a micro batch, of what follows the last one of a step, and of what it is made.

    `error` is a standard deviation of the logarithm.
    """

    micro_s: float
    rest_s: float
    compute_s: float
    memory_s: float
    host_s: float
    error: float

    @property
    def interval(self) -> tuple[float, float]:
        """Seconds between which 80 % of the cases lie."""
        return interval(self.micro_s, self.error)

    @property
    def host_bound(self) -> bool:
        return self.host_s > self.compute_s + self.memory_s


def estimate_step_time(model: ModelSpec, config: TrainConfig, host_pace: float = 1.0) -> StepTimeEstimate | None:
    """On the reference card; None where `estimate.footprint` knows nothing either.

    `host_pace` times what is assumed that the host needs.
    """
    sizes = Sizes.of(model)
    if sizes is None or config.quantization == "int8" or config.precision == "fp32" or config.dora or config.offloads:
        return None
    if config.quantization == "fp8" and config.compile == "none":  # slower than bf16, and nobody's choice
        return None
    card: DeviceSpec = resolve_device(REFERENCE)
    full, compiled, tokens = config.method == "full", config.compile != "none", config.tokens
    again = 0.0 if config.checkpoint_every is None else math.ceil(sizes.layers / config.checkpoint_every) / sizes.layers
    # A multiply-add is two operations; forward, the gradient of the input, and in full fine-tuning that of the weight.
    products = (6 if full else 4) * (sizes.linear_params + sizes.embedding) + 2 * again * sizes.linear_params
    if not full:
        products += (6 + 2 * again) * sizes.adapter_params(config.lora_rank or 1)
    attention = 6 * config.seq_len * sizes.queries * sizes.layers * (1 + again / 3)
    of_kept, of_logits, of_base = COMPILED if compiled else EAGER
    moved = tokens * (of_kept * (FULL if full else 1.0) * sizes.layers * kept_bytes(sizes, config) * (2 + again))
    moved += tokens * of_logits * sizes.vocab
    if config.quantization == "nf4":  # unpacked for every product
        moved += of_base * sizes.linear_params * (2 + again)
    peak = (card.bf16_tflops or 0.0) * 1e12
    if config.quantization == "fp8":
        peak *= FP8
    compute = tokens * (products + attention) / (RATE * peak)
    memory = moved / ((card.bandwidth_gb_s or 0.0) * 1e9)
    issue_ms = FULL_MS if full else HOST_MS["compiled" if compiled else "eager"]
    issue_ms += NF4_MS if config.quantization == "nf4" else 0.0
    host = sizes.layers * issue_ms / 1000 * (1 + AGAIN * again) * host_pace
    device = compute + memory
    micro = (device**4 + host**4) ** 0.25  # the longer of the two, a little more where they are close
    share = host**4 / (device**4 + host**4)
    # Clipping reads the gradients; the optimizer reads and writes weights and state.
    trained = memory_breakdown(model, config)
    assert trained is not None
    weights = trained.weights if full else trained.adapters
    stepped = (3 * trained.gradients + 2 * weights + 2 * trained.optimizer) * GIB
    return StepTimeEstimate(
        micro_s=micro,
        rest_s=stepped / ((card.bandwidth_gb_s or math.nan) * 1e9),
        compute_s=compute,
        memory_s=memory,
        host_s=host,
        error=DEVICE_ERROR + (HOST_ERROR - DEVICE_ERROR) * share,
    )
