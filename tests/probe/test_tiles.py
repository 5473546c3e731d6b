"""Layers over tiles of tokens, and checkpoints that wait in the host's memory: the same gradients,
and less memory.
"""

import gc
from typing import Any

import pytest
import torch
from torch import nn

from autotune.core.probe_types import ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.dry.counting import dry_probe
from autotune.probe.model_settings import model_settings
from autotune.trainer import host_checkpoints, tiles
from autotune.trainer.chunked_loss import chunked_loss
from autotune.trainer.host_checkpoints import HostCheckpoints
from autotune.trainer.model_builder import (
    build,
    compute_in_tiles,
    config_of,
    set_checkpointing,
    trainable_model,
)
from tests.helpers.factories import TINY

pytestmark = [
    pytest.mark.probe,
    # PEFT 0.21 asks it
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
CPU = torch.device("cpu")
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LENGTH, TILE = 29, 8  # the last tile is not full


def gradients(
    family: str, monkeypatch: pytest.MonkeyPatch, **knobs: Any
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss, and the gradient of each trained weight, of a tiny model with adapters that change
    something.
    """
    monkeypatch.setattr(tiles, "TILE_TOKENS", TILE)
    model_type = "llama" if family == "bias" else family
    shape = TINY | TOKENS | {"model_type": model_type, "num_hidden_layers": 3, "hidden_size": 64}
    shape |= {"attention_bias": True, "mlp_bias": True} if family == "bias" else {}
    values = {
        "precision": "fp32",
        "micro_batch_size": 2,
        "seq_len": LENGTH,
        "loss": "chunked",
    } | knobs
    config = TrainConfig(**values)
    settings = model_settings(config, model_type)
    torch.manual_seed(0)
    base = build(config_of(shape), settings, CPU)
    set_checkpointing(base, settings)
    model = trainable_model(base, settings, CPU)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in trained.values():
            weight.normal_(0.0, 0.1)
    if settings.tiled:
        compute_in_tiles(base)
    tokens = torch.randint(0, base.config.vocab_size, (2, LENGTH))
    loss_of = None if family == "gemma2" else chunked_loss(base)  # its logits are capped
    with torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bf16_mixed"):
        outputs = model.train()(input_ids=tokens, labels=tokens if loss_of is None else None)
    loss = outputs.loss if loss_of is None else loss_of(outputs, tokens)
    loss.backward()
    return float(loss.detach()), {
        name: weight.grad for name, weight in trained.items() if weight.grad is not None
    }


CASES = [
    *[
        (family, {"lora_rank": 4})
        for family in ("llama", "bias", "qwen2", "qwen3", "gemma2", "phi3")
    ],
    *[
        ("llama", more)
        for more in (
            {"method": "full"},
            {"checkpointing": "offload"},
            {"lora_rank": 4, "dora": True},
        )
    ],
    ("qwen3", {"method": "full", "checkpointing": "offload"}),
    ("llama", {"quantization": "nf4", "checkpointing": "offload"}),
    ("llama", {"checkpointing": "every_2", "lora_targets": "q_v"}),
]


@pytest.mark.parametrize(("family", "knobs"), CASES, ids=str)
def test_tiles_have_the_loss_and_the_gradients_of_whole_rows(
    family: str, knobs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if family == "gemma2":
        knobs = knobs | {"attention": "eager"}
    expected_loss, expected = gradients(family, monkeypatch, **knobs)
    loss, found = gradients(family, monkeypatch, tiling="tokens", **knobs)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert found.keys() == expected.keys() and len(found) > 10
    # Gemma 2 normalises the outputs of its projections, so parts of their gradients cancel, and the
    # rounding of the parts stays. It depends on the CPU's kernels.
    tolerance = 1e-4 if family == "gemma2" else 1e-5
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(
            found[name], gradient, rtol=1e-5, atol=tolerance * float(gradient.abs().max())
        )


def test_tiles_under_autocast_differ_by_rounding_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    expected_loss, expected = gradients("llama", monkeypatch, precision="bf16_mixed", lora_rank=4)
    loss, found = gradients(
        "llama", monkeypatch, precision="bf16_mixed", lora_rank=4, tiling="tokens"
    )
    assert loss == pytest.approx(expected_loss, rel=1e-2)
    for name, gradient in expected.items():
        assert found[name].dtype is gradient.dtype is torch.float32
        assert (found[name] - gradient).norm() < 0.05 * gradient.norm(), name


def test_no_module_sees_more_than_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, and twice in the backward pass: the layer is computed again, and then each tile of
    it.
    """
    seen: list[tuple[int, bool]] = []
    linear = nn.functional.linear

    def watched(inputs: torch.Tensor, weight: torch.Tensor, *others: Any) -> torch.Tensor:
        if weight.shape[0] != TINY["vocab_size"]:
            seen.append((inputs.shape[1], torch.is_grad_enabled()))
        return linear(inputs, weight, *others)

    monkeypatch.setattr(nn.functional, "linear", watched)
    gradients("llama", monkeypatch, lora_rank=4, tiling="tokens")
    assert {length for length, _ in seen} == {TILE, LENGTH % TILE}
    layers, products, each = 3, 7 * 3, -(-LENGTH // TILE)
    assert len(seen) == 3 * layers * products * each
    assert sum(enabled for _, enabled in seen) == layers * products * each


def test_dropout_and_unusual_layers_are_refused() -> None:
    layer = nn.Module()
    with pytest.raises(ValueError, match="no self_attn and mlp"):
        tiles.tile_layers(nn.Module(), [layer])
    layer.self_attn, layer.mlp = nn.Module(), nn.Module()
    layer.mlp.down_proj, layer.dropped = nn.Linear(2, 2), nn.Dropout(0.1)
    with pytest.raises(ValueError, match="dropout"):
        tiles.tile_layers(nn.Module(), [layer])
    assert TrainConfig(tiling="tokens").tiling == "tokens"
    for knobs in (
        {"lora_dropout": 0.1},
        {"compile": "per_layer"},
        {"checkpointing": "none"},
        {"num_gpus": 2},
    ):
        assert TrainConfig(tiling="tokens", **knobs).tiling == "none", knobs


def peaks(length: int, **knobs: Any) -> dict[str, float]:
    """Bytes that a step of a wide small model of 8 heads and 2 key heads is counted to hold, by
    segment.
    """
    model = (
        TINY
        | TOKENS
        | {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 256, "head_dim": 32}
    )
    model |= {"intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
    values = {
        "lora_rank": 4,
        "micro_batch_size": 1,
        "seq_len": length,
        "loss": "chunked",
        "padding": "max_length",
    }
    config = TrainConfig(**(values | {"checkpointing": "offload"} | knobs))
    count = dry_probe(ProbeRequest(config=config, model=model, memory_gib=1.0, micro_steps=1))
    return {name: peak * 2**30 for name, peak in count.segment_peak_gib.items()}


def test_a_token_takes_twelve_tensors_of_the_hidden_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the peak, in the backward pass of attention (docs/longest.md names them), and no more for
    more layers.
    """
    monkeypatch.setattr(host_checkpoints, "PREFETCHED_BYTES", 0)
    monkeypatch.setattr(tiles, "TILE_TOKENS", 256)
    more = 512
    tiled, whole = (
        [peaks(length, tiling=tiling)["backward_layers"] for length in (4096, 4096 + more)]
        for tiling in ("tokens", "none")
    )
    sums = 4 * 8 * 2  # of each head and token in 32 bits, of the forward and of the backward pass
    positions, tokens = 2 * 2 * 32, 2 * 8  # cosines and sines of a head; token ids and labels
    assert (tiled[1] - tiled[0]) / more == 12 * 2 * 256 + sums + positions + tokens
    assert (whole[1] - whole[0]) / more > 2 * 12 * 2 * 256


def test_blocks_are_used_again_and_given_back() -> None:
    kept = HostCheckpoints()

    def step(backward: bool) -> None:
        made = torch.ones(4, 4, requires_grad=True)
        with kept.saving():
            loss = (made.exp() ** 2).sum()
        if backward:
            loss.backward()
            assert torch.allclose(made.grad, 2 * made.detach().exp() ** 2)
            with pytest.raises(RuntimeError):
                loss.backward()

    step(backward=True)
    held = kept.held_bytes
    assert held >= 64
    for backward in (True, False, True):
        step(backward)
        gc.collect()
    assert kept.held_bytes == held


def test_a_tensor_comes_back_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are of one size; what is not a multiple of it has a last part that is not full."""
    monkeypatch.setattr(host_checkpoints, "BLOCK_BYTES", 64)
    kept, values = HostCheckpoints(), torch.randn(5, 7, dtype=torch.float64)
    expected = values.clone()
    first, second, last = (kept._store(one) for one in (values, values.t(), torch.ones(1)))
    assert kept.held_bytes == 2 * 5 * 64 + 4 and len(first.blocks or ()) == 5
    assert first.device_tensor is None is second.device_tensor and last.device_tensor is not None
    values.zero_()
    assert (
        kept._restore(last) == 1 and first.device_tensor is None is not second.device_tensor
    )  # it comes before it is needed
    assert torch.equal(kept._restore(second), expected.t()) and torch.equal(
        kept._restore(first), expected
    )
    with pytest.raises(RuntimeError, match="a second backward pass is impossible"):
        kept._restore(first)


def test_an_empty_tensor_has_nothing_to_copy() -> None:
    """torch before 2.13 saves one on the CPU beside a layer's inputs.

    The wait for the one before must go on.
    """
    kept = HostCheckpoints()
    leaving, empty = kept._store(torch.ones(2)), kept._store(torch.empty(0, requires_grad=True))
    assert isinstance(empty, torch.Tensor) and kept._restore(empty) is empty
    assert kept._last is leaving and leaving.device_tensor is not None and kept.held_bytes == 8


def test_inputs_of_many_lengths_share_their_blocks() -> None:
    """Each of 1 to 100 values of 4 bytes: blocks of 4, 8, 16 and so on up to 512 bytes."""
    kept = HostCheckpoints()
    for length in range(1, 101):
        assert kept._restore(kept._store(torch.ones(length))).sum() == length
    assert kept.held_bytes == sum(4 << power for power in range(8))
