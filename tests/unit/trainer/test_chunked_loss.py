"""Cross-entropy in chunks of tokens: the same loss and gradients as of the whole, where the head
allows it.
"""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from autotune.trainer import chunked_loss
from autotune.trainer.settings import chunk_tokens
from tests.helpers.factories import TINY

SMALL = TINY | {"num_hidden_layers": 2}


def built(model: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    shape = dict(model)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(shape.pop("model_type"), **shape))


class Scaled(torch.nn.Module):
    """A model that scales its logits by what stands on its own device."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 4)
        self.base_model, self.config = self.model, None
        self.register_buffer("scales", torch.ones(4))

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(self, input_ids: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self.head(self.model(input_ids)[0]) * self.scales)


def test_tensors_are_made_on_the_device_of_the_model() -> None:
    """Where torch makes tensors by default is another place."""
    scaled, model = Scaled(), built(SMALL | {"model_type": "llama"})
    tokens = torch.randint(0, 128, (2, 9))
    with torch.device("meta"):
        assert not chunked_loss.has_plain_head(scaled)
        loss = chunked_loss.chunked_loss(model)
        assert loss(model(input_ids=tokens), tokens).device.type == "cpu"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_loss_and_gradients_are_those_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, tied: bool, frozen: bool
) -> None:
    # some 39 tokens to predict: two chunks and a rest
    monkeypatch.setattr(chunked_loss, "chunk_tokens", lambda tokens: 16)
    model = built(SMALL | {"model_type": "llama", "tie_word_embeddings": tied})
    model.get_output_embeddings().weight.requires_grad_(not frozen)
    tokens = torch.randint(0, 128, (2, 29))
    labels = tokens.masked_fill(torch.rand(tokens.shape) < 0.3, -100)

    def gradients() -> dict[str, Any]:
        return {
            name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None
        }

    expected = model(input_ids=tokens, labels=labels, num_items_in_batch=50).loss
    (3 * expected).backward()
    wanted = gradients()
    model.zero_grad()

    loss = chunked_loss.chunked_loss(model)
    found = loss(model(input_ids=tokens), labels, num_items_in_batch=50)
    (3 * found).backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    assert gradients().keys() == wanted.keys()
    for name, gradient in gradients().items():
        torch.testing.assert_close(gradient, wanted[name], msg=name)

    computed: list[int] = []
    monkeypatch.setattr(
        chunked_loss,
        "cross_entropy",
        lambda logits, *_, **__: computed.append(len(logits)) or 0 * logits.sum(),
    )
    loss(model(input_ids=tokens), labels)
    assert sum(computed) == (labels[:, 1:] != -100).sum()  # nothing else reaches the head
    monkeypatch.undo()

    with torch.no_grad():
        mean = loss(model(input_ids=tokens), labels)
    assert mean.item() == pytest.approx(
        expected.item() * 50 / (labels[:, 1:] != -100).sum().item(), rel=1e-6
    )


@pytest.mark.parametrize(
    ("model_type", "plain"),
    [
        ("llama", True),
        ("mixtral", True),
        ("qwen2", True),
        ("gpt2", True),
        ("gemma2", False),
        ("cohere", False),
        ("granite", False),
    ],
)
def test_a_head_whose_logits_are_changed_afterwards_is_found_out(
    model_type: str, plain: bool
) -> None:
    scaled = {"logits_scaling": 8.0} if model_type == "granite" else {}
    model = built(SMALL | scaled | {"model_type": model_type, "head_dim": 16})
    assert chunked_loss.has_plain_head(model) is plain
    assert "forward" not in vars(model.get_output_embeddings()) and "forward" not in vars(
        model.base_model
    )
    if not plain:
        with pytest.raises(ValueError, match="changes its logits"):
            chunked_loss.chunked_loss(model)


def test_what_a_router_adds_to_the_loss_is_not_left_out() -> None:
    assert not chunked_loss.has_plain_head(
        built(SMALL | {"model_type": "mixtral", "output_router_logits": True})
    )


@pytest.mark.parametrize(
    ("tokens", "chunk"),
    [(1, 1), (200, 200), (513, 512), (1024, 512), (1025, 1024), (65_536, 1024)],
)
def test_a_small_micro_batch_has_two_chunks(tokens: int, chunk: int) -> None:
    assert chunk_tokens(tokens) == chunk


def test_the_head_runs_in_the_precision_of_the_model_and_only_for_the_loss() -> None:
    """The loss is computed after autocast has ended."""
    model = built(SMALL | {"model_type": "llama"})
    tokens = torch.randint(0, 128, (2, 29))
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(input_ids=tokens, labels=tokens).loss
    loss = chunked_loss.chunked_loss(model)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(input_ids=tokens)
    assert outputs.logits.shape == (2, 29, 1)
    assert loss(outputs, tokens).item() == pytest.approx(expected.item(), rel=1e-6)
    assert loss(model(input_ids=tokens), tokens).item() != pytest.approx(expected.item(), rel=1e-6)


def test_only_the_hidden_states_of_the_last_call_wait_for_the_loss() -> None:
    """What is only evaluated without a loss must not stay in memory."""
    model = built(SMALL | {"model_type": "llama"})
    chunked_loss.chunked_loss(model)
    alive = []
    for _ in range(2):
        outputs = model(input_ids=torch.ones(1, 4, dtype=torch.long))
        alive.append(weakref.ref(outputs.logits._base))
        del outputs
    assert alive[0]() is None and alive[1]() is not None


def test_a_model_without_layers_of_its_own_has_no_plain_head() -> None:
    model: Any = Scaled()
    assert model.base_model is not model
    model.base_model = None
    object.__setattr__(model, "base_model", model)
    assert not chunked_loss.has_plain_head(model)


def test_in_fp16_gradients_are_as_near_as_those_of_the_usual_loss_where_it_is_scaled() -> None:
    """Those of a chunk are of sums, and scaled later.

    Unscaled, the usual loss loses a part of its own.
    """

    def gradients(dtype: torch.dtype | None, scale: float, *, chunked: bool) -> torch.Tensor:
        model = built(TINY | {"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 4096})
        loss = chunked_loss.chunked_loss(model) if chunked else None
        tokens, number = torch.randint(0, 4096, (2, 1024)), torch.tensor(2048)
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            outputs = model(
                input_ids=tokens, labels=None if chunked else tokens, num_items_in_batch=number
            )
        of_loss = outputs.loss if loss is None else loss(outputs, tokens, num_items_in_batch=number)
        (of_loss * scale).backward()
        return torch.cat([parameter.grad.flatten() / scale for parameter in model.parameters()])

    exact = gradients(None, 1.0, chunked=False)

    def error(scale: float, *, chunked: bool) -> float:
        return float(
            (gradients(torch.float16, scale, chunked=chunked) - exact).norm() / exact.norm()
        )

    assert error(2.0**16, chunked=True) == pytest.approx(error(2.0**16, chunked=False), rel=0.05)
    assert error(2.0**16, chunked=True) < 0.001 < error(1.0, chunked=False)
