"""What a probe says of its memory where it runs out of it, and which losses it does not believe."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.core.probe_types import Phase, ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.probe.harness import BadLoss, Probe
from autotune.probe.runtime.chunked_loss import CHUNK_TOKENS

GIB = 2**30


@pytest.mark.parametrize(
    ("knobs", "phase", "allocated_gib", "tokens", "bytes"),
    [
        ({}, Phase.BACKWARD, 0.0, 4096, 6),
        ({"precision": "fp32"}, Phase.BACKWARD, 0.0, 4096, 8),
        ({"loss": "chunked"}, Phase.BACKWARD, 0.0, CHUNK_TOKENS, 6),
        ({"loss": "chunked", "micro_batch_size": 1, "seq_len": 128}, Phase.BACKWARD, 0.0, 128, 6),
        ({}, Phase.FORWARD, 90.0, 4096, 6),
        ({}, Phase.FORWARD, 1.2, 0, 0),  # there is no room for them beside the model
        ({}, Phase.OPTIMIZER, 90.0, 0, 0),
    ],
    ids=str,
)
def test_logits_are_there_from_the_end_of_the_forward_pass_on(
    knobs: dict[str, Any], phase: Phase, allocated_gib: float, tokens: int, bytes: int
) -> None:
    config = TrainConfig(**{"micro_batch_size": 4, "seq_len": 1024} | knobs)
    probe: Any = SimpleNamespace(
        request=ProbeRequest(config=config, model={}, memory_gib=80.0),
        recorder=SimpleNamespace(phase=phase),
        base=SimpleNamespace(config=SimpleNamespace(vocab_size=32_000)),
        meter=SimpleNamespace(allocated_gib=lambda: allocated_gib),
        resident=SimpleNamespace(model_gib=1.0),
    )
    assert Probe._logits_gib(probe) == pytest.approx(tokens * 32_000 * bytes / GIB)


@pytest.mark.parametrize(("losses", "bad"), [((2.5, 1.0), False), ((2.5, 0.0), True), ((float("nan"), 2.5), True)])
def test_a_loss_of_exactly_nothing_is_as_bad_as_one_that_is_no_number(losses: tuple[float, ...], bad: bool) -> None:
    """Such as of a model whose layers return zeros."""
    idle = SimpleNamespace(train=lambda: None)
    probe: Any = object.__new__(Probe)
    probe.request, probe.scratch = SimpleNamespace(evaluate=False), None
    probe.meter = SimpleNamespace(reset_peak=idle.train, synchronize=idle.train, return_freed=lambda resident_gib: None)
    probe.recorder = SimpleNamespace(
        begin=lambda phase: None,
        weigh=idle.train,
        check_steady=idle.train,
        losses=[torch.tensor(one) for one in losses],
    )
    for name, value in {"_prepare": None, "_make_trainer": idle, "_state_gib": 0.0, "_measurement": "measured"}.items():
        setattr(probe, name, lambda *_, value=value: value)
    if bad:
        with pytest.raises(BadLoss):
            probe.run()
    else:
        assert probe.run() == "measured"
