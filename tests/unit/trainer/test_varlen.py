"""Attention of each packed example by itself: where examples end, what the kernels are asked for,
what is refused.
"""

from typing import Any

import pytest
import torch
from accelerate.utils import send_to_device

from autotune.trainer import varlen

# the positions of two rows: 3, 2 and 1; 6
EXAMPLES = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
ENDS = [0, 3, 5, 6, 12]


def segments() -> varlen.Segments:
    made: varlen.Segments = varlen.add_segments({"position_ids": EXAMPLES})["segments"]
    return made


def heads(number: int, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of two rows of 6 tokens, as transformers gives them."""
    return torch.randn(2, number, 6, 8, dtype=dtype, device=device)


def attend(*inputs: torch.Tensor, mask: torch.Tensor | None = None, **named: Any) -> torch.Tensor:
    return varlen.attend(None, *inputs, mask, **({"segments": segments()} | named))[0]


def test_segments_say_where_examples_end_in_a_shape_that_does_not_say_how_many() -> None:
    assert segments().ends.tolist() == ENDS + [12] * 8 and segments().ends.dtype is torch.int32
    assert segments().counts.tolist() == [4, 6]
    one = varlen.add_segments({"position_ids": torch.arange(12).view(1, 12)})["segments"]
    assert one.ends.shape == segments().ends.shape and one.ends.tolist() == [0] + [12] * 12
    assert one.counts.tolist() == [1, 12]


def test_rows_are_joined_with_their_segments() -> None:
    rows = [{"input_ids": row + 3, "position_ids": row} for row in EXAMPLES]
    joined = varlen.join_rows(rows)
    assert set(joined) == {"input_ids", "position_ids", "segments"}
    assert joined["position_ids"].equal(EXAMPLES) and joined["input_ids"].equal(EXAMPLES + 3)
    assert joined["segments"].ends.equal(segments().ends)


def test_what_the_host_reads_stays_on_the_host() -> None:
    moved = send_to_device({"segments": segments()}, torch.device("meta"), non_blocking=True)[
        "segments"
    ]
    assert moved.ends.is_meta and moved.counts.tolist() == [4, 6]


def test_pinned_memory_is_for_what_the_device_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 1)
    pinned = segments().pin_memory()
    assert pinned.ends.tolist()[:5] == [end + 1 for end in ENDS] and pinned.counts.tolist() == [
        4,
        6,
    ]


@pytest.mark.parametrize("window", [None, 1, 2, 3, 6])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_each_example_attends_to_itself_alone(key_heads: int, window: int | None) -> None:
    torch.manual_seed(0)
    inputs = [
        heads(number).double().float().requires_grad_() for number in (4, key_heads, key_heads)
    ]
    found = attend(*inputs, sliding_window=window, scaling=0.3)
    example = (EXAMPLES == 0).flatten().cumsum(0)
    places = torch.arange(12)
    before = places[:, None] - places
    seen = (example[:, None] == example) & (before >= 0) & (before < (window or 12))
    query, key, value = (one.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for one in inputs)
    key, value = (one.repeat_interleave(4 // key_heads, 1) for one in (key, value))
    alike = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, scale=0.3
    )
    expected = alike[0].transpose(0, 1).unflatten(0, (2, 6))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    outer = torch.randn_like(found)
    of_found, of_expected = (torch.autograd.grad(one, inputs, outer) for one in (found, expected))
    for one, other in zip(of_found, of_expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_the_scale_is_the_root_of_the_size_unless_another_is_given() -> None:
    inputs = [heads(2) for _ in range(3)]
    assert attend(*inputs).equal(attend(*inputs, scaling=8**-0.5))


def test_the_operators_keep_the_rules_of_torch() -> None:
    inputs = [heads(number).transpose(1, 2).flatten(0, 1).contiguous() for number in (4, 2, 2)]
    leaves = [one.requires_grad_() for one in inputs]
    torch.library.opcheck(
        varlen._attend, (*leaves, segments().ends, segments().counts, 0.3, -1, True)
    )


@pytest.mark.parametrize(("window", "causal"), [(-1, True), (3, True), (-1, False)])
def test_torchs_kernels_take_what_they_are_given(window: int, causal: bool) -> None:
    """By the checks and shapes of its meta kernels, in the order of its schemas: no GPU is needed
    to see them.
    """
    inputs = [
        torch.empty(12, number, 8, dtype=torch.bfloat16, device="meta") for number in (4, 2, 2)
    ]
    asked: list[dict[str, Any]] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if "flash" in func.name():
                names = [argument.name for argument in func._schema.arguments]
                asked.append(dict(zip(names, args, strict=False)) | kwargs)
            return func(*args, **kwargs)

    how = (segments().ends, segments().counts, 0.3, window, causal)
    with Watch():
        attended, sums = varlen._attend_on_gpu(*inputs, *how)
        gradients = varlen._differentiate_on_gpu(
            torch.empty_like(attended), *inputs, attended, sums, *how
        )
    for found, wanted in ((attended, inputs[0]), *zip(gradients, inputs, strict=True)):
        assert (found.shape, found.dtype) == (wanted.shape, torch.bfloat16)
    assert (sums.shape, sums.dtype) == ((4, 12), torch.float32)
    assert [one.shape for one in varlen._shapes(inputs[0])] == [attended.shape, sums.shape]
    forward, backward = asked
    for call in asked:
        assert call["cum_seq_q"].tolist() == call["cum_seq_k"].tolist() == ENDS
        assert call["cum_seq_q"].dtype is torch.int32 and call["cum_seq_q"].is_contiguous()
        assert (call["max_q"], call["max_k"], call["dropout_p"], call["is_causal"]) == (
            6,
            6,
            0.0,
            causal,
        )
        sides = call["window_size_left"], call["window_size_right"]
        assert (call["scale"], *sides) == (0.3, window, 0 if causal else -1)
        assert [
            call[name] is one for name, one in zip(("query", "key", "value"), inputs, strict=True)
        ] == [True] * 3
    assert forward["return_debug_mask"] is False
    assert backward["out"] is attended and backward["logsumexp"] is sums
    assert (backward["rng_state"].dtype, backward["rng_state"].shape) == (torch.uint64, (2,))


def test_all_windows_at_once_are_those_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [torch.randn(1, 4, 12, 8, requires_grad=True) for _ in range(3)]
    ends = torch.tensor(ENDS, dtype=torch.int32)
    how: dict[str, Any] = {
        "scaling": 0.3,
        "cu_seq_lens_q": ends,
        "max_length_q": 6,
        "cu_seq_lens_k": ends,
    }
    # on a CPU as transformers does it
    expected, _ = varlen.attend_windows(None, *inputs, None, **how)
    monkeypatch.setattr(varlen, "_supports_flash", lambda query: True)
    found, _ = varlen.attend_windows(None, *inputs, None, **how)
    assert found.shape == (1, 12, 4, 8)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    outer = torch.randn_like(found)
    of_found, of_expected = (torch.autograd.grad(one, inputs, outer) for one in (found, expected))
    for one, other in zip(of_found, of_expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_autocast_gives_the_kernel_its_16_bits() -> None:
    inputs = [heads(2).requires_grad_() for _ in range(3)]
    with torch.autocast("cpu", torch.bfloat16):
        found = attend(*inputs)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), attend(*inputs), atol=0.03, rtol=0.03)
    found.sum().backward()
    assert all(one.grad is not None and one.grad.dtype is torch.float32 for one in inputs)


@pytest.mark.parametrize(
    ("how", "refused"),
    [
        ({"segments": None}, "for packed sequences"),
        ({"mask": torch.ones(2, 1, 6, 6, dtype=torch.bool)}, "for packed sequences"),
        ({"dropout": 0.1}, "does not support dropout"),
        ({"softcap": 50.0}, "does not support softcap"),
        ({"s_aux": torch.zeros(2)}, "does not support s_aux"),
        ({"position_bias": torch.zeros(2)}, "does not support position_bias"),
    ],
    ids=str,
)
def test_what_is_more_than_a_causal_softmax_is_refused(how: dict[str, Any], refused: str) -> None:
    with pytest.raises(ValueError, match=refused):
        attend(*(heads(2) for _ in range(3)), **how)


def test_what_a_model_does_without_is_none() -> None:
    inputs = [heads(2) for _ in range(3)]
    assert attend(*inputs, softcap=None, output_attentions=False).equal(attend(*inputs))
