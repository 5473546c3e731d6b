"""The phases of GRPO in real processes on a CPU: an engine, and TRL's training on completions."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from autotune.core.objective import Objective
from autotune.core.probe_types import MicroBatch, Outcome, Phase, ProbeRequest
from autotune.core.rollout_types import COLOCATED, TRANSFORMERS, Engine, Generation
from autotune.core.train_config import TrainConfig
from autotune.probe.supervisor import ENGINE, WorkerProber

STAND_IN = Path(__file__).parents[1] / "helpers" / "vllm_stand_in"
MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "vocab_size": 256,
}
LENGTHS = (5, 9, 16, 24)


def request(engine: Engine, **changes: Any) -> ProbeRequest:
    """Four completions to prompts of 8 tokens, in micro batches of two."""
    generation = Generation(
        engine=engine, prompts=(8,) * 4, completions=LENGTHS, repeats=2, alternations=2
    )
    found = ProbeRequest(
        config=TrainConfig(micro_batch_size=2, seq_len=32, precision="fp32"),
        model=MODEL,
        device="cpu",
        memory_gib=8.0,
        trainer="trl",
        objective=Objective.GRPO,
        trained_share=0.75,
        generation=generation,
        micro_batches=(MicroBatch(rows=((32,), (20,)), length=32, share=1.0),),
    )
    return replace(found, **changes)


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerProber]:
    """Workers that measure engines. Their vLLM is the stand-in."""
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
    with WorkerProber("cpu", tmp_path, module=ENGINE) as prober:
        yield prober


def test_transformers_generates_if_it_is_the_engine(engines: WorkerProber, tmp_path: Path) -> None:
    result = engines.probe(request(Engine(kind=TRANSFORMERS)), tmp_path / "engine.log")
    assert result.outcome is Outcome.OK, result.reason
    found = result.engine
    assert found is not None
    assert found.engine.startswith("transformers ")
    assert "in one batch" in found.engine
    assert found.tokens == sum(LENGTHS)
    assert len(found.generate_s) == 2
    assert min(found.generate_s) > 0
    assert (found.transfer_s, found.sleep_s, found.asleep_gib) == ((), (), ())
    assert result.seconds["load"] > 0


def test_an_engine_that_sleeps_alternates_with_the_training(
    engines: WorkerProber, tmp_path: Path
) -> None:
    engine = Engine(kind=COLOCATED, share=0.5, sleeps=True, max_tokens=32)
    result = engines.probe(request(engine), tmp_path / "engine.log")
    assert result.outcome is Outcome.OK, result.reason
    found = result.engine
    assert found is not None
    assert found.engine == "vllm 0.0.0"
    assert found.start_s.keys() == {"import", "load", "profile", "graphs", "total"}
    assert found.cached_tokens == 4 * 16
    times = found.sleep_s, found.wake_s, found.transfer_s, found.asleep_gib
    assert [len(one) for one in times] == [2, 2, 2, 2]
    assert found.weights_gib > 0


def test_an_engine_that_never_sleeps_only_gets_new_weights(
    engines: WorkerProber, tmp_path: Path
) -> None:
    result = engines.probe(request(Engine(share=0.5, max_tokens=32)), tmp_path / "engine.log")
    found = result.engine
    assert found is not None
    assert (len(found.transfer_s), found.sleep_s, found.wake_s) == (2, (), ())


def test_an_engine_without_room_ran_out_of_memory_in_its_start(
    engines: WorkerProber, tmp_path: Path
) -> None:
    result = engines.probe(request(Engine(share=0.95, max_tokens=32)), tmp_path / "engine.log")
    assert (result.outcome, result.phase) == (Outcome.OOM, Phase.LOAD)
    assert result.oom is not None


def test_completions_that_are_cut_off_are_no_measurement(
    engines: WorkerProber, tmp_path: Path
) -> None:
    result = engines.probe(request(Engine(share=0.5, max_tokens=31)), tmp_path / "engine.log")
    assert (result.outcome, result.phase) == (Outcome.CRASH, Phase.ROLLOUT)
    assert "cut 1 of 4 completions off" in (result.reason or "")


def test_a_killed_engine_is_a_result_and_the_next_probe_works(
    engines: WorkerProber, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeping = request(Engine(share=0.5, sleeps=True, max_tokens=32))
    monkeypatch.setenv("AUTOTUNE_INJECT", "sigkill@transfer")
    result = engines.probe(sleeping, tmp_path / "engine.log")
    assert result.outcome is Outcome.CRASH
    assert "killed" in (result.reason or "")
    monkeypatch.delenv("AUTOTUNE_INJECT")
    assert engines.probe(sleeping, tmp_path / "engine.log").outcome is Outcome.OK


def test_an_engine_that_hangs_while_it_wakes_up_is_a_result(
    engines: WorkerProber, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autotune.probe import monitor

    sleeping = request(Engine(share=0.5, sleeps=True, max_tokens=32))
    monkeypatch.setenv("AUTOTUNE_INJECT", "hang@wake")
    monkeypatch.setitem(monitor.DEADLINES, Phase.WAKE, 0.3)
    result = engines.probe(sleeping, tmp_path / "engine.log")
    assert (result.outcome, result.phase) == (Outcome.TIMEOUT, Phase.WAKE)
    monkeypatch.delenv("AUTOTUNE_INJECT")
    assert engines.probe(sleeping, tmp_path / "engine.log").outcome is Outcome.OK


def test_trl_trains_on_given_completions(prober: WorkerProber, tmp_path: Path) -> None:
    """With an engine, TRL computes the probabilities of the completions before the update."""
    alone = prober.probe(request(Engine(kind=TRANSFORMERS)), tmp_path / "alone.log")
    beside = prober.probe(request(Engine(sleeps=True)), tmp_path / "beside.log")
    for result, computes in ((alone, False), (beside, True)):
        assert result.outcome is Outcome.OK, result.reason
        found = result.measurement
        assert found is not None
        assert found.phase_s[Phase.FORWARD] > 0
        assert (Phase.LOG_PROBS in found.phase_s) is computes
        assert (Phase.LOG_PROBS in found.phase_reserved_gib) is computes
        assert found.row_length == 32
        assert found.merge_s is not None
        assert len(found.between_gib) >= 3


def test_trl_trains_on_packed_completions(prober: WorkerProber, tmp_path: Path) -> None:
    packed = request(Engine(sleeps=True))
    config = replace(packed.config, packing=True, packed_attention="varlen")
    rows = MicroBatch(rows=((12,), (20,)), length=20, share=1.0)
    longest = MicroBatch(rows=((32,), (32,)), length=32, share=0.0)
    result = prober.probe(
        replace(packed, config=config, micro_batches=(rows, longest)), tmp_path / "packed.log"
    )
    assert result.outcome is Outcome.OK, result.reason
    found = result.measurement
    assert found is not None
    assert found.phase_s[Phase.LOG_PROBS] > 0
    assert found.row_length == 32


def test_a_training_without_room_names_its_phase(prober: WorkerProber, tmp_path: Path) -> None:
    large = request(Engine(sleeps=True), memory_gib=1.0)
    rows = MicroBatch(rows=((4096,),) * 2, length=4096, share=1.0)
    config = replace(large.config, seq_len=4096, attention="eager")
    result = prober.probe(
        replace(large, micro_batches=(rows,), config=config), tmp_path / "large.log"
    )
    assert result.outcome is Outcome.OOM
    assert result.phase in (Phase.LOG_PROBS, Phase.FORWARD, Phase.BACKWARD)
    usual = prober.probe(request(Engine(sleeps=True)), tmp_path / "usual.log")
    assert usual.outcome is Outcome.OK
