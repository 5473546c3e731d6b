"""Switches of torch's that are set for a run.

What the levers do in models is tried in tests/probe.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from autotune.trainer import patches, varlen


@pytest.fixture
def _restored() -> Iterator[None]:
    cudnn, flash = torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()
    yield
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    torch.backends.cuda.enable_flash_sdp(flash)


@pytest.mark.usefixtures("_restored")
def test_cudnn_is_left_out_where_rows_may_have_any_length() -> None:
    for cudnn in (False, True, False):
        patches.choose_attention(cudnn=cudnn)
        assert torch.backends.cuda.cudnn_sdp_enabled() is cudnn
        assert torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.usefixtures("_restored")
def test_a_card_that_stands_in_for_an_old_one_attends_without_flash_and_cudnn() -> None:
    for flash in (False, True):
        patches.choose_attention(cudnn=True, flash=flash)
        assert torch.backends.cuda.cudnn_sdp_enabled() is flash
        assert torch.backends.cuda.flash_sdp_enabled() is flash


@pytest.mark.parametrize(
    ("head", "size"),
    [
        ({"head_dim": 24, "num_attention_heads": 2}, 24),
        ({"hidden_size": 64, "num_attention_heads": 4}, 16),
        ({"hidden_size": 64}, None),  # a state-space model
    ],
)
def test_masked_rows_of_each_alignment_are_attended_to_once(
    monkeypatch: pytest.MonkeyPatch, head: dict[str, int], size: int | None
) -> None:
    """Forward and backward, in the precision of training."""
    seen: list[tuple[int, int, torch.dtype]] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def attended(
        query: torch.Tensor, *others: torch.Tensor, attn_mask: torch.Tensor
    ) -> torch.Tensor:
        assert (
            attn_mask.shape[-2:] == (query.shape[-2],) * 2
            and not attn_mask[0, 0, 0, 1]
            and attn_mask[0, 0, 1, 0]
        )
        query.register_hook(
            lambda gradient: seen.append((query.shape[-2], query.shape[-1], gradient.dtype))
        )
        return attend(query, *others, attn_mask=attn_mask)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attended)
    config = SimpleNamespace(**head)
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config))
    patches.load_attention(model, torch.device("cpu"))
    lengths = (129, 130, 132, 136, 192, 256) if size else ()
    assert seen == [(length, size, torch.bfloat16) for length in lengths]


def test_attentions_have_names_and_that_of_packed_rows_no_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registered: list[Any] = []
    for kind in (AttentionInterface, AttentionMaskInterface):
        monkeypatch.setattr(kind, "register", lambda *asked: registered.append(asked))
    patches.register_attentions()
    own = [
        ("flex_attention", patches._attend_flexibly),
        ("varlen", varlen.attend),
        ("flash_windows", varlen.attend_windows),
    ]
    assert registered == [("sdpa_cudnn", patches._attend), ("sdpa_cudnn", sdpa_mask), *own]


def test_cudnns_attention_is_torchs_with_that_kernel_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[Any] = []
    monkeypatch.setattr(
        patches, "sdpa_kernel", lambda backend: chosen.append(backend) or nullcontext()
    )
    monkeypatch.setattr(patches, "sdpa_attention_forward", lambda *args, **kwargs: (args, kwargs))
    assert patches._attend("query", scaling=0.5) == (("query",), {"scaling": 0.5})
    assert chosen == [patches.SDPBackend.CUDNN_ATTENTION]
