"""The worker describes a model within bounds, whatever its config asks for."""

import resource
from typing import Any

import pytest

from autotune.catalog import resolve_model
from autotune.probe import worker


@pytest.mark.parametrize("size", ["num_labels", "num_hidden_layers"])
def test_a_config_of_impossible_size_does_not_take_the_memory_of_the_machine(
    size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "DESCRIBED_GIB", 0.25)
    small = resolve_model("demo-3m").config
    limits, sent = resource.getrlimit(resource.RLIMIT_DATA), list[dict[str, Any]]()
    worker._describe(small | {size: 2**31 - 1}, lambda **message: sent.append(message))
    assert sent == [{"event": "broken", "reason": "without weights it takes more than 0.25 GiB"}]
    assert resource.getrlimit(resource.RLIMIT_DATA) == limits
