"""How the layers of a model repeat, and what it can do, from its config alone."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from autotune.probe.model_shape import _kinds, _lists_by_layer, describe, truncate
from tests.helpers.factories import TINY

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT asks with a name from before transformers 5.23


def test_equal_layers_repeat_from_the_first_on() -> None:
    found = describe(TINY | {"model_type": "llama", "num_hidden_layers": 3})
    assert (found.num_layers, found.prefix, found.period) == (3, 0, 1)
    assert (found.unquantized, found.parametrized, found.no_adapters) == (pytest.approx(0), False, None)
    assert found.untrained == found.unquantized and found.plain_head and found.sdpa


def test_layers_that_alternate_repeat_in_pairs() -> None:
    """Attention within a window and to all that came before."""
    kinds = ["sliding_attention", "full_attention"] * 2
    found = describe(TINY | {"model_type": "qwen2", "num_hidden_layers": 4, "layer_types": kinds})
    assert (found.num_layers, found.prefix, found.period) == (4, 0, 2)


def test_what_is_no_language_model_is_refused() -> None:
    with pytest.raises(ValueError, match="no causal language model of type vit"):
        describe({"model_type": "vit"})


def test_lists_with_an_entry_for_each_layer_are_cut_with_the_layers() -> None:
    config = SimpleNamespace(num_hidden_layers=3, kinds=["a", "b", "c"], eos=[1, 2], name="abc", steps=(1, 2, 3))
    assert _lists_by_layer(config) == {"kinds": ["a", "b", "c"]}
    truncate(config, 2)
    assert config == SimpleNamespace(num_hidden_layers=2, kinds=["a", "b"], eos=[1, 2], name="abc", steps=(1, 2, 3))


def test_layers_differ_by_class_shapes_and_their_entries_but_not_by_their_numbers() -> None:
    layers: list[nn.Module] = [nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 3), nn.LayerNorm(2), nn.Linear(2, 2)]
    config: Any = SimpleNamespace(num_hidden_layers=5, kinds=["a", "a", "a", "a", "b"], numbers=[0, 1, 2, 3, 4])
    first, second, wide, norm, other = _kinds(layers, config)
    assert first == second and first not in (wide, norm, other)
