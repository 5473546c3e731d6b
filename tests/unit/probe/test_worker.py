"""The worker describes a model within bounds, whatever its config asks for, and gives models back."""

import gc
import resource
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.catalog import resolve_model
from autotune.core.probe_types import Outcome, ProbeRequest
from autotune.core.train_config import TrainConfig
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


class Model:
    """A model that refers to itself, of 1 GiB."""

    def __init__(self) -> None:
        self.itself = self

    def cached_gib(self) -> float:
        return 1.0


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_model_is_given_back_even_where_what_is_frozen_refers_to_it(is_frozen: bool) -> None:
    model = Model()
    alive = weakref.ref(model)
    if is_frozen:
        gc.freeze()
    made = worker.Worker.__new__(worker.Worker)
    meter: Any = SimpleNamespace(allocated_gib=lambda: 1.0 if alive() else 0.0, release=gc.collect)
    made.meter, made._residents = meter, {2: model, 4: Model()}
    del model
    try:
        made._drop([2, None])
        assert alive() is None and list(made._residents) == [4]
        frozen = gc.get_freeze_count()
        made._drop([4])
        assert not made._residents and gc.get_freeze_count() > frozen  # no model is left that could not be collected
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(("memory_gib", "left_gib", "is_kept"), [(24, 0.4, True), (24, 0.6, False), (140, 1.3, True)])
def test_a_worker_is_replaced_for_what_paged_optimizers_left_of_its_device(
    memory_gib: float, left_gib: float, is_kept: bool
) -> None:
    made = worker.Worker.__new__(worker.Worker)
    gone: Any = SimpleNamespace(uncap=gc.collect, release=gc.collect, returned_to=lambda gib: True)
    gone.memory_gib = lambda: memory_gib
    made.meter, made._residents, made._lost_gib, made._empty_gib = gone, {}, left_gib, 0.0
    fields: dict[str, Any] = {"outcome": Outcome.OK}
    request = ProbeRequest(config=TrainConfig(), model={}, memory_gib=memory_gib)
    assert made._restore(request, fields) is is_kept
    said = f"the worker is replaced, since paged optimizers left {left_gib} GiB behind"
    assert fields.get("notes") == (None if is_kept else (said,))
