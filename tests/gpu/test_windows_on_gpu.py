"""The windows of a vision tower on a GPU: one kernel computes what transformers computes one window
after another.
"""

from typing import Any

import pytest
import torch

from autotune.trainer import varlen

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def test_all_windows_at_once_are_those_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the sizes of Qwen2.5-VL's tower, in bf16, whose results
    keep 8 bits: values and gradients.
    """
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("FlashAttention needs compute capability 8.0")
    torch.manual_seed(0)
    lengths = [64] * 100 + [48] * 8 + [16] * 4
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    shape = (1, 16, sum(lengths), 80)
    inputs = [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    how: dict[str, Any] = {"scaling": 80**-0.5, "cu_seq_lens_q": ends, "max_length_q": 64}
    assert varlen._supports_flash(inputs[0])

    def computed() -> tuple[torch.Tensor, ...]:
        attended, _ = varlen.attend_windows(None, *inputs, None, **how)
        return attended, *torch.autograd.grad(attended.float().square().sum(), inputs)

    found = computed()
    monkeypatch.setattr(varlen, "_supports_flash", lambda query: False)
    for one, other in zip(found, computed(), strict=True):
        torch.testing.assert_close(
            one, other, atol=0.01 * float(other.detach().abs().max()), rtol=0.02
        )
