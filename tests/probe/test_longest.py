"""The longest row, tried by real steps on this CPU."""

from dataclasses import replace

import pytest

from autotune.catalog import ModelSpec, resolve_device
from autotune.core.probe_types import Outcome, ProbeRequest, ProbeResult
from autotune.planning.longest import Longest, to_attempt, verify
from autotune.probe.supervisor import WorkerProber
from tests.helpers.factories import TINY

pytestmark = pytest.mark.probe
TOKENS = 5_120  # a tile and a part of one


def test_a_real_step_verifies_the_row(prober: WorkerProber) -> None:
    """Two layers, then all four: steps with a short row, and with the long one."""
    shape = TINY | {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "pad_token_id": 0,
        "bos_token_id": 1,
    }
    model = ModelSpec(name="tiny", config=shape | {"eos_token_id": 2})
    asked = Longest(
        model=model, device=resolve_device("h100"), limit_gib=4.0, most_tokens=TOKENS, rank=4
    )
    asked = replace(asked, knobs={"precision": "fp32"})
    found: list[ProbeResult] = []

    def probe(request: ProbeRequest) -> ProbeResult:
        found.append(
            prober.probe(replace(request, device="cpu", memory_gib=8.0), prober.logs / "probe.log")
        )
        return found[-1]

    predicted = asked.predict("lora")
    assert (predicted.tokens, predicted.limited_by) == (TOKENS, "what was asked for")
    row = verify(asked, predicted, probe, 8.0, timed_on="cpu")
    assert [(one.outcome, one.depth) for one in found] == [(Outcome.OK, 2), (Outcome.OK, None)], (
        found[-1].reason
    )
    assert row.tokens == TOKENS and row.evidence == "measured" and row.problem is None
    measured = found[-1].measurement
    assert measured is not None and all(loss > 0 for loss in measured.losses)
    short, long = (seconds for _, seconds in measured.kind_s)
    assert row.step_s == to_attempt(found[-1]).step_s == long > short
