"""On the meta device, autocast and attention are those of CUDA."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.integrations.moe
import transformers.masking_utils
import transformers.utils.generic
from torch.fx.experimental import _config as data_dependence
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from autotune.dry.meta_device import FP32, FP32_OUTPUT, LOWER, PROMOTE, simulate_cuda
from autotune.dry.storage_counter import StorageCounter
from autotune.trainer.host_checkpoints import HostCheckpoints

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
    with simulate_cuda(packed=False, padded=False):
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
    weight, inputs = (
        torch.ones(64, 64, device=META, requires_grad=True),
        torch.ones(64, 64, device=META),
    )
    each = 64 * 64 * 2
    with (
        simulate_cuda(packed=False, padded=False),
        torch.no_grad(),
        StorageCounter(META) as counter,
    ):
        with torch.autocast("meta", torch.bfloat16):
            for _ in range(2):
                functional.linear(inputs, weight)
            assert counter.live == each  # the weight's cast; those of inputs are freed
        assert counter.live == 0


def test_a_model_may_switch_autocast_off() -> None:
    """As the norm of Nemotron does, which then takes 16 bits; transformers leaves the meta device
    alone by itself.
    """
    from transformers.utils.generic import maybe_autocast

    with simulate_cuda(packed=False, padded=False), torch.autocast("meta", torch.bfloat16):
        inputs = torch.ones(4, 64, device=META, dtype=torch.bfloat16)
        assert functional.layer_norm(inputs, (64,)).dtype is torch.float32
        with maybe_autocast(device_type="meta", enabled=False):
            assert functional.layer_norm(inputs, (64,)).dtype is torch.bfloat16
        assert functional.layer_norm(inputs, (64,)).dtype is torch.float32


def test_gradients_go_back_through_casts() -> None:
    weight = torch.ones(64, 64, device=META, requires_grad=True)
    with simulate_cuda(packed=False, padded=False):
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
    with simulate_cuda(packed=False, padded=False), StorageCounter(META) as counter:
        out = functional.scaled_dot_product_attention(
            queries, keys, keys, attn_mask=visible, enable_gqa=True
        )
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


def calls_of(
    *arguments: Any, **keywords: Any
) -> tuple[torch.Tensor, list[tuple[str, tuple[Any, ...], dict[str, Any]]]]:
    """The output of attention, and the operators of CUDA's kernels that it called."""
    called: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self,
            func: Any,
            types: Any,
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Any:
            called.append((func.overloadpacket.__name__, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    with Watch():
        out = functional.scaled_dot_product_attention(*arguments, **keywords)
    return out, called


def heads(
    number: int, size: int, dtype: torch.dtype = torch.bfloat16, length: int = 16
) -> torch.Tensor:
    return torch.empty(2, number, length, size, dtype=dtype, device=META)


FLASH, EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"


@pytest.mark.parametrize(
    ("size", "value_size", "dtype", "kernel"),
    [
        (64, 64, torch.bfloat16, FLASH),
        (256, 256, torch.float16, FLASH),
        (264, 264, torch.bfloat16, EFFICIENT),  # larger than the flash kernel's largest head
        (64, 32, torch.bfloat16, EFFICIENT),
        (64, 64, torch.float32, EFFICIENT),
    ],
)
@pytest.mark.parametrize(("dropout", "causal", "scale"), [(0.0, False, None), (0.25, True, 0.5)])
def test_the_kernel_is_that_of_cuda(
    size: int,
    value_size: int,
    dtype: torch.dtype,
    kernel: str,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> None:
    """Flash attention takes few key heads; for the other kernel they are repeated for each query
    head.
    """
    query, key, value = heads(4, size, dtype), heads(2, size, dtype), heads(2, value_size, dtype)
    with simulate_cuda(packed=False, padded=False):
        out, called = calls_of(query, key, value, None, dropout, causal, scale, enable_gqa=True)
    name, args, kwargs = called[-1]
    assert name == kernel and kwargs.get("scale") == scale
    assert out.shape == (2, 4, 16, value_size) and out.dtype is dtype
    if kernel == FLASH:
        assert [tensor.shape[1] for tensor in args[:3]] == [4, 2, 2] and args[3:] == (
            dropout,
            causal,
        )[: len(args) - 3]
        assert len(called) == 1
    else:
        assert [tensor.shape for tensor in args[:3]] == [
            (2, 4, 16, size),
            (2, 4, 16, size),
            (2, 4, 16, value_size),
        ]
        assert (
            args[3] is None
            and args[4] is False
            and tuple(args[5:]) == (dropout, causal)[: len(args) - 5]
        )
    with simulate_cuda(packed=False, padded=False):
        _, plain = calls_of(query, query, query)
        # no dropout, not causal, as torch's own defaults
        assert plain[-1][1][3:] in ((), (None, False))


@pytest.mark.parametrize(("size", "padded"), [(60, 64), (57, 64), (1, 8), (63, 64)])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_the_flash_kernel_takes_heads_of_a_multiple_of_eight(
    size: int, padded: int, scale: float | None
) -> None:
    """Zeros fill them up; the scale stays that of the real size, and the output has it again."""
    with simulate_cuda(packed=False, padded=False):
        out, called = calls_of(
            heads(4, size), heads(2, size), heads(2, size), scale=scale, enable_gqa=True
        )
        (kernel,) = [one for one in called if one[0] == FLASH]
    assert [tensor.shape[-1] for tensor in kernel[1][:3]] == [padded] * 3
    assert kernel[2]["scale"] == (size**-0.5 if scale is None else scale)
    assert out.shape == (2, 4, 16, size)


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_a_mask_becomes_a_bias_of_each_head(needs: tuple[bool, bool]) -> None:
    """The kernel keeps sums of rows where gradients will be wanted.

    Keys are longer than queries.
    """
    query, key = heads(4, 64), heads(4, 64, length=24)
    query.requires_grad_(needs[0])
    key.requires_grad_(needs[1])
    visible = torch.ones(2, 1, 16, 24, dtype=torch.bool, device=META)
    with simulate_cuda(packed=False, padded=False):
        for mask in (visible, torch.zeros(1, 1, 16, 24, dtype=torch.bfloat16, device=META)):
            out, called = calls_of(query, key, key, mask, enable_gqa=False)
            (kernel,) = [one for one in called if one[0] == EFFICIENT]
            assert kernel[1][3].shape == (2, 4, 16, 24) and kernel[1][3].dtype is torch.bfloat16
            assert kernel[1][4] is any(needs) and out.shape == (2, 4, 16, 64)
            names = [one[0] for one in called]
            assert ("masked_fill_" in names) is ("logical_not" in names) is (mask is visible)
            fills = [one[1][2] for one in called if one[0] == "masked_fill_"]
            assert fills == [float("-inf")] * (mask is visible)


def test_attention_under_autocast_is_in_16_bits() -> None:
    query = heads(2, 64, torch.float32)
    with simulate_cuda(packed=False, padded=False):
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("meta", dtype):
                out, called = calls_of(query, query, query)
            assert out.dtype is dtype and called[-1][0] == FLASH
        assert functional.scaled_dot_product_attention(query, query, query).dtype is torch.float32


def test_everything_is_as_before_once_it_ends() -> None:
    """After an error too. Nothing is replaced before it begins."""
    owners: list[tuple[Any, str]] = [
        *[
            (torch, name)
            for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled")
        ],
        *[
            (torch, "set_autocast_dtype"),
            (torch, "clear_autocast_cache"),
            (torch.amp, "is_autocast_available"),
        ],
        *[
            (torch.amp.autocast_mode, "is_autocast_available"),
            (functional, "scaled_dot_product_attention"),
        ],
        *[(transformers.utils.generic, "nullcontext")],
        *[(transformers.masking_utils, "find_packed_sequence_indices")],
        *[(transformers.integrations.moe, "_can_use_grouped_mm")],
        *[(PreTrainedModel, "warn_if_padding_and_no_attention_mask")],
        *[(data_dependence, "meta_nonzero_assume_all_nonzero")],
    ]
    before = [getattr(owner, name) for owner, name in owners]

    @simulate_cuda(packed=True, padded=False)
    def fail() -> None:
        inside = [getattr(owner, name) for owner, name in owners]
        assert all(new is not old for new, old in zip(inside, before, strict=True))
        assert torch.ones(7, device=META).nonzero().shape == (7, 1)
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    after = [getattr(owner, name) for owner, name in owners]
    assert all(new is old for new, old in zip(after, before, strict=True))
    # The key that casts is off again.
    torch.set_autocast_enabled("privateuseone", True)
    try:
        assert (
            torch.ones(2, 2, device=META) @ torch.ones(2, 2, device=META)
        ).dtype is torch.float32
    finally:
        torch.set_autocast_enabled("privateuseone", False)


def test_packed_rows_are_told_apart_by_their_positions() -> None:
    """By hand: examples of 3, 2 and 1 tokens, and of 2 and 4.

    Rows of one example each are not looked at.
    """
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3]])
    with simulate_cuda(packed=True, padded=False):
        found = transformers.masking_utils.find_packed_sequence_indices(positions)
    assert found.tolist() == [[0, 0, 0, 1, 1, 2], [0, 0, 1, 1, 1, 1]]
    with simulate_cuda(packed=False, padded=False):
        assert transformers.masking_utils.find_packed_sequence_indices(positions) is None


def test_the_state_of_the_meta_device_is_that_of_cuda_and_others_keep_theirs() -> None:
    with simulate_cuda(packed=False, padded=False):
        assert torch.amp.is_autocast_available(
            "meta"
        ) and torch.amp.autocast_mode.is_autocast_available("meta")
        assert torch.amp.is_autocast_available("cpu") and not torch.amp.is_autocast_available(
            "vulkan"
        )
        with torch.autocast("meta", torch.float16):
            assert torch.is_autocast_enabled("meta") and torch.is_autocast_enabled("cuda")
            assert torch.is_autocast_enabled("privateuseone") and not torch.is_autocast_enabled(
                "cpu"
            )
            assert (
                torch.get_autocast_dtype("meta")
                is torch.get_autocast_dtype("cuda")
                is torch.float16
            )
            assert torch.get_autocast_dtype("privateuseone") is torch.float16
            assert torch.get_autocast_dtype("cpu") is torch.bfloat16
        assert not torch.is_autocast_enabled("meta") and not torch.is_autocast_enabled(
            "privateuseone"
        )
        with torch.autocast("cpu", torch.float16):
            assert torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda")


def test_the_grouped_product_of_experts_knows_bf16_alone() -> None:
    with simulate_cuda(packed=False, padded=False):
        can = transformers.integrations.moe._can_use_grouped_mm
        like = {
            dtype: torch.empty(1, dtype=dtype, device=META)
            for dtype in (torch.bfloat16, torch.float16)
        }
        half, other = like[torch.bfloat16], like[torch.float16]
        assert can(other, half, other) is True and can(half, other, half) is False


def test_what_is_kept_in_the_host_takes_no_memory_of_the_device() -> None:
    """But for the last one, which may still be on its way.

    What is needed again has its shape and its type.
    """
    made: list[torch.Tensor] = []

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(value)
            return value * 2

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            made.extend(ctx.saved_tensors)
            return gradients[0]

    weight = torch.empty(8, 64, dtype=torch.float64, device=META, requires_grad=True)
    with simulate_cuda(packed=False, padded=False), StorageCounter(META) as counter:
        kept, outputs = HostCheckpoints(), []
        for factor in (1, 2, 3):
            with kept.saving():
                inner = weight * factor
                outputs.append(Square.apply(inner))
                del inner
        assert counter.live == (3 + 1) * 4096  # the outputs, and the last input
        sum(outputs).sum().backward()
        assert kept.held_bytes == 0
    assert [(one.shape, one.dtype, one.device) for one in made] == [
        ((8, 64), torch.float64, META)
    ] * 3


def test_sums_under_autocast_have_32_bits_unless_a_type_is_named() -> None:
    """With and without dimensions, by position too; whole
    numbers and 64 bits stay what they are.
    """
    half, wide = (
        torch.ones(4, 4, device=META).bfloat16(),
        torch.ones(4, 4, device=META, dtype=torch.float64),
    )
    whole = torch.ones(4, 4, device=META, dtype=torch.int32)
    with simulate_cuda(packed=False, padded=False), torch.autocast("meta", torch.bfloat16):
        for made in (
            half.sum(),
            half.sum(0),
            half.sum((0, 1), True),
            half.prod(),
            half.prod(1),
            half.cumsum(0),
        ):
            assert made.dtype is torch.float32
        assert half.sum(0, keepdim=True).shape == (1, 4) and half.sum(1, True).shape == (4, 1)
        assert (
            functional.log_softmax(half, -1).dtype
            is functional.softmax(half, 0).dtype
            is torch.float32
        )
        assert torch.linalg.vector_norm(half).dtype is torch.float32
        assert torch.ops.aten.softmax.int(half, -1, torch.float16).dtype is torch.float16
        assert half.cumsum(0, dtype=torch.float16).dtype is torch.float16
        assert wide.sum().dtype is wide.softmax(-1).dtype is torch.float64
        assert whole.sum().dtype is whole.cumsum(0).dtype is torch.int64


def test_casts_are_of_floating_point_tensors_of_the_device_up_to_32_bits() -> None:
    """In lists and by name too.

    What is on the CPU, of 64 bits or of whole numbers stays what it is.
    """
    single = torch.ones(4, 4, device=META)
    half, wide = single.half(), single.double()
    with simulate_cuda(packed=False, padded=False), torch.autocast("meta", torch.float16):
        assert torch.linalg.multi_dot([single, half, single]).dtype is torch.float16
        assert (
            functional.linear(half, single, bias=torch.ones(4, device=META)).dtype is torch.float16
        )
        assert (wide @ wide).dtype is torch.float64
        assert half.rsqrt().dtype is torch.float32 and wide.exp().dtype is torch.float64
        assert functional.mse_loss(half, target=half).dtype is torch.float32
        assert torch.addcmul(half, half, half).dtype is torch.float16
        assert torch.addcmul(half, half, tensor2=single).dtype is torch.float32
        assert torch.dot(single[0], half[0]).dtype is torch.float32
        index = torch.zeros(4, 4, dtype=torch.long, device=META)
        assert half.scatter_add(0, index, single).dtype is torch.float32
        host = torch.ones(2, 2)
        assert (host @ host).dtype is torch.float32


def test_only_casts_of_trained_parameters_are_kept() -> None:
    """By hand: a weight of 64 x 64 has a cast of 8192 bytes.

    Frozen ones, results and views are cast each time.
    """
    inputs = torch.ones(64, 64, device=META, dtype=torch.bfloat16)
    trained = torch.ones(64, 64, device=META, requires_grad=True)
    frozen, result, view = (
        torch.ones(64, 64, device=META),
        trained * 1,
        torch.ones(2, 64, 64, device=META)[0],
    )
    view.requires_grad_()
    already = torch.ones(64, 64, device=META, dtype=torch.bfloat16, requires_grad=True)
    fp16 = torch.ones(64, 64, device=META, dtype=torch.float16, requires_grad=True)
    with (
        simulate_cuda(packed=False, padded=False),
        torch.no_grad(),
        StorageCounter(META) as counter,
    ):
        with torch.autocast("meta", torch.bfloat16):
            for other in (frozen, result, view, already, fp16):
                inputs @ other
                assert counter.live == 0
            inputs @ trained
            first = counter.live
            inputs @ trained
            trained @ trained
            assert (first, counter.live) == (8192, 8192)
            with torch.autocast("meta", enabled=False):
                pass
            assert counter.live == 8192  # only the outermost clears
            trained.exp()
            already.exp()
            assert counter.live == 8192  # casts to 32 bits are not kept
        assert counter.live == 0
        with torch.autocast("meta", torch.bfloat16, cache_enabled=False):
            inputs @ trained
            assert counter.live == 0
        with torch.autocast("meta", torch.bfloat16):
            inputs @ trained
            torch.clear_autocast_cache()
            assert counter.live == 0
    with StorageCounter(META) as counter:
        with simulate_cuda(packed=False, padded=False), torch.no_grad():
            torch.set_autocast_enabled("meta", True)
            torch.set_autocast_dtype("meta", torch.bfloat16)
            inputs @ trained
            assert counter.live == 8192
            torch.set_autocast_enabled("meta", False)
        assert counter.live == 0  # nothing is left behind


def test_dropout_keeps_a_mask_of_a_byte() -> None:
    inputs = torch.ones(64, 64, dtype=torch.bfloat16, device=META, requires_grad=True)
    with simulate_cuda(packed=False, padded=False), StorageCounter(META) as counter:
        for training, held in ((True, 64 * 64 * (2 + 1)), (False, 0)):
            dropped = functional.dropout(inputs, 0.1, training)
            assert counter.live == held
            del dropped
