"""On the meta device, autocast and attention are those of CUDA."""

import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from autotune.probe.meta_device import FP32, FP32_OUTPUT, LOWER, PROMOTE, cuda_on_meta
from autotune.probe.storage_counter import StorageCounter

pytestmark = pytest.mark.probe

META = torch.device("meta")
# Of recurrent networks, images and losses of other tasks: no causal language model runs them.
LEFT_OUT = re.compile(r"_thnn|cell|upsample|nuclear|frobenius|margin|hinge|embedding_loss|poisson")


def listed(macro: str) -> set[str]:
    """The operators of a list in the header that CUDA's autocast is compiled from."""
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    body = re.search(rf"#define {macro}\(_\)(.*?)\n\n", header, re.DOTALL)
    assert body is not None
    return {name.replace(", ", ".") for name in re.findall(r"_\(([a-z_0-9A-Z, ]+)\)", body[1])}


@pytest.mark.parametrize(
    ("macro", "ours"),
    [
        ("AT_FORALL_LOWER_PRECISION_FP", LOWER),
        ("AT_FORALL_FP32", FP32),
        ("AT_FORALL_FP32_SET_OPT_DTYPE", FP32_OUTPUT),
        ("AT_FORALL_PROMOTE", PROMOTE),
    ],
)
def test_the_lists_are_those_of_cuda(macro: str, ours: list[str]) -> None:
    assert {name for name in listed(macro) if not LEFT_OUT.search(name)} == set(ours)


def test_autocast_casts_by_the_lists() -> None:
    with cuda_on_meta(packed=False):
        matrix = torch.ones(8, 8, device=META)
        half = matrix.bfloat16()
        with torch.autocast("meta", torch.bfloat16):
            assert torch.is_autocast_enabled()  # PEFT asks without naming a device
            assert (matrix @ matrix).dtype is torch.bfloat16
            assert torch.einsum("ab,bc->ac", matrix, matrix).dtype is torch.bfloat16
            assert half.exp().dtype is torch.float32
            assert half.softmax(-1).dtype is half.sum().dtype is torch.float32
            assert half.sum(dtype=torch.bfloat16).dtype is torch.bfloat16
            assert torch.addcmul(matrix, half, half).dtype is torch.float32
            assert (half + matrix).dtype is torch.float32  # in no list
            with torch.autocast("meta", enabled=False):
                assert (matrix @ matrix).dtype is torch.float32
        assert (matrix @ matrix).dtype is torch.float32
    assert not torch.is_autocast_enabled()
    with pytest.raises(RuntimeError):
        torch.autocast("meta", torch.bfloat16)


def test_casts_of_trained_parameters_are_kept_until_autocast_ends() -> None:
    weight, inputs = torch.ones(64, 64, device=META, requires_grad=True), torch.ones(64, 64, device=META)
    each = 64 * 64 * 2
    with cuda_on_meta(packed=False), torch.no_grad(), StorageCounter(META) as counter:
        with torch.autocast("meta", torch.bfloat16):
            for _ in range(2):
                functional.linear(inputs, weight)
            assert counter.live == each  # the weight's cast; those of inputs are freed
        assert counter.live == 0


def test_a_model_may_switch_autocast_off() -> None:
    """As the norm of Nemotron does, which then takes 16 bits; transformers leaves the meta device alone by itself."""
    from transformers.utils.generic import maybe_autocast

    with cuda_on_meta(packed=False), torch.autocast("meta", torch.bfloat16):
        inputs = torch.ones(4, 64, device=META, dtype=torch.bfloat16)
        assert functional.layer_norm(inputs, (64,)).dtype is torch.float32
        with maybe_autocast(device_type="meta", enabled=False):
            assert functional.layer_norm(inputs, (64,)).dtype is torch.bfloat16
        assert functional.layer_norm(inputs, (64,)).dtype is torch.float32


def test_gradients_go_back_through_casts() -> None:
    weight = torch.ones(64, 64, device=META, requires_grad=True)
    with cuda_on_meta(packed=False):
        with torch.autocast("meta", torch.bfloat16):
            loss = functional.linear(torch.ones(2, 64, device=META), weight).float().sum()
        loss.backward()
    assert weight.grad is not None and weight.grad.dtype is torch.float32


@pytest.mark.parametrize(
    ("dtype", "mask", "size"),
    [
        (torch.bfloat16, False, 64),
        (torch.bfloat16, False, 60),  # padded to a multiple of 8
        (torch.bfloat16, True, 64),
        (torch.float32, False, 64),
    ],
)
def test_attention_keeps_no_scores(dtype: torch.dtype, mask: bool, size: int) -> None:
    length, heads = 1024, 8
    queries = torch.ones(1, heads, length, size, dtype=dtype, device=META, requires_grad=True)
    keys = torch.ones(1, 4, length, size, dtype=dtype, device=META, requires_grad=True)
    visible = torch.ones(1, 1, length, length, dtype=torch.bool, device=META) if mask else None
    with cuda_on_meta(packed=False), StorageCounter(META) as counter:
        out = functional.scaled_dot_product_attention(queries, keys, keys, attn_mask=visible, enable_gqa=True)
        assert out.shape == queries.shape and out.dtype is dtype
        out.sum().backward()
    assert counter.take_peak() < heads * length * length * dtype.itemsize
    assert queries.grad is not None and keys.grad is not None and keys.grad.shape == keys.shape


def test_attention_of_few_key_heads_does_as_much_as_with_one_for_each_query_head() -> None:
    """torch's own formula took no fewer before 2.13."""
    query = torch.empty(2, 8, 16, 4, device="meta")
    key, value = (torch.empty(2, 2, 16, 4, device="meta") for _ in range(2))
    counter = StorageCounter(torch.device("meta"))
    with counter:
        torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)
    assert counter.flops == {"_scaled_dot_product_flash_attention": 2 * 2 * (2 * 8 * 16 * 16 * 4)}
