"""A probe of a tiny model, which loads a worker's libraries and checks a machine."""

from autotune.core.probe_types import ProbeRequest
from autotune.core.train_config import TrainConfig


def tiny_request(
    device: str, memory_gib: float, *, bf16: bool, quantization: str = "none"
) -> ProbeRequest:
    """Request a small probe, just large enough that libraries allocate their usual buffers.

    On a GPU, the probe computes in bf16 if `bf16` is true, otherwise in fp16. A GPU without bf16
    also lacks flash attention.
    """
    gpu_precision = "bf16_mixed" if bf16 else "fp16_mixed"
    precision = "fp32" if device == "cpu" else gpu_precision
    shape = {
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
    }

    return ProbeRequest(
        config=TrainConfig(
            micro_batch_size=2, seq_len=256, precision=precision, quantization=quantization
        ),
        model={"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 4096, **shape},
        device=device,
        memory_gib=memory_gib,
        micro_steps=1,
        min_timed_s=0.0,
        flash=bf16 or device == "cpu",
    )
