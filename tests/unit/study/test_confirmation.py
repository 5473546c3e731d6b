"""How often the finalists are measured again, on recorded answers."""

from dataclasses import replace

import pytest

from autotune.core.probe_types import Outcome, ProbeRequest, ProbeResult, Rung
from autotune.core.train_config import TrainConfig
from tests.helpers.replay import machine
from tests.helpers.sessions import Start, by_tokens, whole


@pytest.mark.parametrize("failing", [1, 2])
def test_the_winner_was_measured_twice_and_has_saved_also_if_it_joined_late(start: Start, failing: int) -> None:
    """The favourite fails its first or its second confirmation, and the next best takes its place."""
    confirmed: list[ProbeRequest] = []

    def answer(request: ProbeRequest) -> ProbeResult:
        result = machine(rate=by_tokens)(request)
        if request.rung is Rung.CONFIRM:
            confirmed.append(request)
            favourite = [earlier for earlier in confirmed if earlier.config == confirmed[0].config]
            if request is favourite[-1] and len(favourite) == failing:
                return replace(result, outcome=Outcome.CRASH, measurement=None)
        return result

    session = whole(start, answer, trials=8, finalists=1)
    winner = session.winner()
    assert winner == TrainConfig(seq_len=256, micro_batch_size=4, checkpointing="none") != confirmed[0].config
    of_winner = [request for request in confirmed if request.config == winner]
    assert len(of_winner) == 2 and any(request.evaluate for request in of_winner)
    assert sum(request.config == confirmed[0].config for request in confirmed) == failing
