"""The probe by which a worker loads its libraries."""

import pytest

from autotune.core.probe_types import ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.probe.tiny_probe import tiny_request


@pytest.mark.parametrize(("device", "precision"), [("cpu", "fp32"), ("cuda", "bf16_mixed")])
def test_it_is_one_layer_of_matrices_of_real_size_in_the_precision_of_its_device(
    device: str, precision: str
) -> None:
    """Two rows of 256 tokens: buffers that libraries make for larger matrices would count as the
    first model's.
    """
    assert tiny_request(device, 8.0, bf16=True) == ProbeRequest(
        config=TrainConfig(micro_batch_size=2, seq_len=256, precision=precision),
        model={
            "model_type": "llama",
            "num_hidden_layers": 1,
            "vocab_size": 4096,
            "hidden_size": 192,
            "intermediate_size": 512,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
        },
        device=device,
        memory_gib=8.0,
        micro_steps=1,
        min_timed_s=0.0,
    )
    assert tiny_request(device, 8.0, bf16=True, quantization="nf4").config.quantization == "nf4"


def test_a_gpu_without_bf16_warms_up_in_fp16() -> None:
    assert tiny_request("cuda", 8.0, bf16=False).config.precision == "fp16_mixed"
