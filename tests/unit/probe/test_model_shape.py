"""How the layers of a model repeat, and what it can do, from its config alone."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from autotune.probe import model_shape as module
from autotune.probe.model_shape import _kinds, _lists_by_layer, describe, truncate
from tests.helpers.factories import TINY

# PEFT asks with a name from before transformers 5.23
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def test_equal_layers_repeat_from_the_first_on() -> None:
    found = describe(TINY | {"model_type": "llama", "num_hidden_layers": 3})
    assert (found.num_layers, found.prefix, found.period) == (3, 0, 1)
    assert (found.unquantized, found.parametrized, found.no_adapters) == (
        pytest.approx(0),
        False,
        None,
    )
    assert found.untrained == found.unquantized and found.plain_head and found.sdpa


def test_layers_that_alternate_repeat_in_pairs() -> None:
    """Attention within a window and to all that came before."""
    kinds = ["sliding_attention", "full_attention"] * 2
    found = describe(TINY | {"model_type": "qwen2", "num_hidden_layers": 4, "layer_types": kinds})
    assert (found.num_layers, found.prefix, found.period) == (4, 0, 2)


def test_what_is_no_language_model_is_refused() -> None:
    with pytest.raises(ValueError, match="no causal language model of type vit"):
        describe({"model_type": "vit"})


class Config(SimpleNamespace):
    """Of a model of text alone."""

    def get_text_config(self) -> "Config":
        return self


def test_lists_with_an_entry_for_each_layer_are_cut_with_the_layers() -> None:
    config = Config(
        num_hidden_layers=3, kinds=["a", "b", "c"], eos=[1, 2], name="abc", steps=(1, 2, 3)
    )
    assert _lists_by_layer(config) == {"kinds": ["a", "b", "c"]}
    truncate(config, 2)
    assert config == Config(
        num_hidden_layers=2, kinds=["a", "b"], eos=[1, 2], name="abc", steps=(1, 2, 3)
    )


def test_layers_differ_by_class_shapes_and_their_entries_but_not_by_their_numbers() -> None:
    layers: list[nn.Module] = [
        nn.Linear(2, 2),
        nn.Linear(2, 2),
        nn.Linear(2, 3),
        nn.LayerNorm(2),
        nn.Linear(2, 2),
    ]
    config: Any = SimpleNamespace(
        num_hidden_layers=5, kinds=["a", "a", "a", "a", "b"], numbers=[0, 1, 2, 3, 4]
    )
    first, second, wide, norm, other = _kinds(layers, config)
    assert first == second and first not in (wide, norm, other)


MIXTURE = TINY | {
    "model_type": "mixtral",
    "num_hidden_layers": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


# PEFT's, of its own pattern
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
def test_the_experts_of_a_mixture_are_in_no_linear_layer_and_adapters_wrap_them() -> None:
    """By hand: of each expert three matrices of 32 by 64; attention, a router, two norms; both ends
    of 128 by 32.
    """
    experts = 2 * 4 * 3 * 32 * 64
    router, attention, norms = 2 * 4 * 32, 2 * (2 * 32 * 32 + 2 * 16 * 32), (2 * 2 + 1) * 32
    found = describe(MIXTURE)
    total = experts + router + attention + norms + 2 * 128 * 32
    # it has no MLP of its own
    assert found.parametrized and found.no_adapters is None and not found.tileable
    assert found.unquantized == pytest.approx((experts + router) / total)
    assert found.untrained == 0.0  # PEFT wraps the router too


def test_a_model_whose_head_cannot_be_tried_has_none_that_is_plain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(model: Any) -> bool:
        raise AttributeError("it wants positions")

    monkeypatch.setattr(module, "has_plain_head", fail)
    assert not describe(TINY | {"model_type": "llama", "num_hidden_layers": 1}).plain_head


def test_why_peft_refuses_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("Target modules are wrong. See the documentation. Or not.")

    monkeypatch.setattr(module, "trainable_model", refuse)
    found = describe(MIXTURE)
    assert found.no_adapters == "Target modules are wrong" and not found.parametrized
    assert found.untrained == found.unquantized > 0


FALCON = {
    "model_type": "falcon",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "ffn_hidden_size": 64,
}


class Router(nn.Linear):
    def forward(self, hidden: Any) -> Any:
        return super().forward(hidden), hidden


def test_adapters_need_a_layer_that_returns_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Falcon's linear layers have a forward of their own, and PEFT adapts them."""
    falcon = describe(FALCON)
    assert not falcon.no_adapters and falcon.linear_layers
    assert not module._returns_its_product(Router(4, 2, device="meta"))
    assert module._returns_its_product(nn.Linear(4, 2, device="meta"))
    monkeypatch.setattr(module, "_returns_its_product", lambda layer: False)
    assert describe(FALCON).no_adapters == (
        "PEFT cannot add adapters to FalconLinear, which is not a plain linear layer"
    )


def all_options(  # type: ignore[no-untyped-def]
    rope, rms_norm, swiglu, geglu, cross_entropy, fused_linear_cross_entropy, model
): ...


@pytest.mark.parametrize(
    ("model_type", "apply", "supported"),
    [
        ("known", lambda rope, rms_norm, swiglu: None, True),
        ("known", all_options, True),
        ("known", lambda rope, layer_norm: None, False),  # it could not be taken out again
        ("other", lambda rope: None, False),
    ],
)
def test_liger_has_kernels_that_can_be_taken_out_again(
    monkeypatch: pytest.MonkeyPatch, model_type: str, apply: Any, supported: bool
) -> None:
    patches = SimpleNamespace(MODEL_TYPE_TO_APPLY_LIGER_FN={"known": apply})
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", patches)  # type: ignore[arg-type]
    assert module._liger_supports(model_type) is supported


def test_without_liger_nothing_is_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, "liger_kernel.transformers.monkey_patch", raising=False)
    assert not module._liger_supports("llama")
