"""What CUDA graphs of micro batches need of the host, which is the same without a GPU."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, masking_utils

from autotune.trainer import chunked_loss as chunks
from autotune.trainer.graphs import MOST_SHAPES, MicroBatchGraphs, is_capturing, skip_masks

SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def test_gradients_stay_in_the_same_buffers_and_begin_at_zero() -> None:
    layer = nn.Linear(3, 2)
    graphs = MicroBatchGraphs(lambda batch: layer(batch["rows"]).sum(), layer.parameters())
    rows = torch.randn(4, 3)
    graphs._offer_buffers()
    addresses = [parameter.grad.data_ptr() for parameter in layer.parameters()]
    for _ in range(2):  # two micro batches of a step add up
        layer(rows).sum().backward()
        graphs._offer_buffers()
    assert torch.allclose(layer.weight.grad, 2 * rows.sum(0).expand(2, -1))
    layer.zero_grad()  # as the Trainer does, which lets go of them
    assert layer.weight.grad is None
    graphs._offer_buffers()
    assert [parameter.grad.data_ptr() for parameter in layer.parameters()] == addresses
    assert not layer.weight.grad.any() and not layer.bias.grad.any()


def test_a_fifth_shape_is_refused() -> None:
    graphs = MicroBatchGraphs(lambda batch: pytest.fail("it must not run"), [])
    graphs._graphs = {number: (None, {}, torch.zeros(())) for number in range(MOST_SHAPES)}
    with pytest.raises(
        ValueError, match="micro batches have more than 4 shapes, and each shape needs a CUDA graph"
    ):
        graphs.run({"input_ids": torch.zeros(1, 8)})


def test_transformers_makes_no_mask_for_rows_that_are_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under capture it would: it cannot look at the positions, and takes rows for packed ones."""
    shape = LlamaConfig(**SHAPE, vocab_size=64, use_cache=False, attn_implementation="sdpa")
    model = LlamaForCausalLM(shape)
    seen: list[Any] = []
    attend = nn.functional.scaled_dot_product_attention

    def watched(*args: Any, attn_mask: Any = None, **options: Any) -> Any:
        seen.append(attn_mask)
        return attend(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(masking_utils, "is_tracing", lambda *_: True)
    find = masking_utils.find_packed_sequence_indices
    model(input_ids=torch.zeros(1, 8, dtype=torch.long))
    with skip_masks():
        model(input_ids=torch.zeros(1, 8, dtype=torch.long))
    assert seen[0] is not None and seen[1] is None
    assert masking_utils.find_packed_sequence_indices is find and masking_utils.is_tracing()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_layers_are_not_compiled_again_where_a_capture_would_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second micro batch runs as a capture does: transformers takes it for a traced one.

    Before 5.23, transformers made no causal mask only outside of a capture.
    """
    shape = LlamaConfig(**SHAPE | {"num_hidden_layers": 2}, vocab_size=64, use_cache=False)
    model = LlamaForCausalLM(shape)
    compile_layers_for_test(model)
    capturing = False
    ignore = masking_utils._ignore_causal_mask_sdpa
    monkeypatch.setattr(masking_utils, "is_tracing", lambda *_: capturing)
    monkeypatch.setattr(
        masking_utils,
        "_ignore_causal_mask_sdpa",
        lambda *args, **given: not masking_utils.is_tracing() and ignore(*args, **given),
    )

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        return loss.detach()

    def capture(batch: dict[str, torch.Tensor]) -> Any:
        nonlocal capturing
        capturing = True
        try:
            return None, batch, step(batch)
        finally:
            capturing = False

    graphs = MicroBatchGraphs(step, model.parameters())
    monkeypatch.setattr(graphs, "_capture", capture)
    graphs.run({"input_ids": torch.zeros(1, 8, dtype=torch.long)})
    ((_, _, loss),) = graphs._graphs.values()
    assert loss.isfinite()

    # what the capture would be without this
    with (
        torch.compiler.set_stance("fail_on_recompile"),
        pytest.raises(Exception, match="recompile"),
    ):
        capture({"input_ids": torch.zeros(1, 8, dtype=torch.long)})
    torch._dynamo.reset()


def compile_layers_for_test(model: LlamaForCausalLM) -> None:
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", dynamic=False)
    model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: output.requires_grad_(True)
    )


def test_nothing_is_captured_without_a_gpu() -> None:
    assert is_capturing() is False


@pytest.mark.parametrize(("used", "captures"), [(False, True), (True, False), (True, True)])
def test_a_gpu_that_is_not_used_yet_is_not_asked_whether_it_captures(
    used: bool, captures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    assert is_capturing() is (used and captures)


def test_the_loss_in_chunks_is_the_same_without_reading_how_many_tokens_are_predicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head, hidden = nn.Linear(8, 32, bias=False), torch.randn(20, 8)
    targets = torch.randint(0, 32, (20,))
    targets[::3] = chunks.IGNORED
    found = []
    for capturing in (False, True):
        monkeypatch.setattr(chunks, "is_capturing", lambda capturing=capturing: capturing)
        leaf = hidden.clone().requires_grad_(True)
        loss = chunks._ChunkedCrossEntropy.apply(head, leaf, targets)
        loss.backward()
        found.append((loss.detach(), leaf.grad))
    assert len(chunks._target_positions(targets)) == 20
    assert chunks._target_positions(targets.to("meta")).is_meta  # on the device of the tokens
    expected = cross_entropy(head(hidden), targets, reduction="sum").detach()
    for loss, gradient in found:
        assert torch.allclose(loss, expected) and torch.allclose(gradient, found[0][1], atol=1e-6)
    assert not found[1][1][::3].any()
