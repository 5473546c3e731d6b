"""A probe of a tiny model, by which a worker loads its libraries, and by which a machine is checked."""

from autotune.core.probe_types import ProbeRequest
from autotune.core.train_config import TrainConfig


def tiny_request(
    device: str, memory_gib: float, *, bf16: bool, quantization: str = "none"
) -> ProbeRequest:
    """A small probe, yet large enough that libraries set up the buffers they use for matrices of real size.

    On a GPU it computes in `bf16`, or in fp16 where the GPU has none: such a one has no flash attention either.
    """
    precision = "fp32" if device == "cpu" else "bf16_mixed" if bf16 else "fp16_mixed"
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
