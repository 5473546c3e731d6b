"""Real CPU workers on a tiny model: memory that runs out, repeats and is given back; secrets."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.core.errors import EnvironmentProblem
from autotune.core.probe_types import Outcome, Phase, ProbeRequest, Rung
from autotune.probe.supervisor import WorkerProber, check_worker
from autotune.study.evaluator import truncate_request
from tests.helpers.probing import LARGE, MODEL, WIDE, measured, pid_of, request

pytestmark = pytest.mark.probe

TOO_LARGE: dict[str, Any] = LARGE | {"micro_batch_size": 128}


@pytest.fixture(scope="module")
def prober(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProber]:
    """One warm worker, which serves every test that does not kill it."""
    with WorkerProber("cpu", tmp_path_factory.mktemp("logs")) as started:
        yield started


def test_a_probe_comes_through(prober: WorkerProber) -> None:
    log = prober.logs / "trial-0001.log"
    result = prober.probe(request(), log)
    assert (result.outcome, result.reason, result.log) == (Outcome.OK, None, "trial-0001.log")
    assert log.is_file()
    measured = result.measurement
    assert measured is not None
    assert len(measured.step_s) == 1 and measured.step_s[0] > 0
    assert {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER} <= measured.phase_peak_gib.keys()
    assert 0 < measured.peak_reserved_gib < measured.limit_gib < 4.0 * 0.95
    # Rank 16 on the seven matrices of two layers, whose sides add up to 1,024 a layer.
    assert measured.trainable_params == 16 * 1024 * 2
    assert measured.loss_first == pytest.approx(5.545, abs=0.05)  # ln 256
    assert result.request_digest == request().digest
    assert {"load", "first_step", "steady", "total"} <= result.seconds.keys()
    with_dora = prober.probe(request(dora=True, rslora=True), log)
    dora = with_dora.measurement  # a magnitude for each of 512 outputs a layer
    assert with_dora.warm and dora is not None and dora.trainable_params == (16 * 1024 + 512) * 2


def test_the_limit_stays_while_the_worker_grows(prober: WorkerProber) -> None:
    """What a worker keeps of earlier probes is nobody else's: all
    trials of a study have one limit.
    """
    small, long = {"optimizer": "adafactor"}, {"seq_len": 256, "precision": "bf16_mixed"}
    found = [measured(prober, request(**knobs)) for knobs in ({}, small, long, small | long, {})]
    assert len({(one.limit_gib, one.context_gib) for one in found}) == 1
    assert found[0].context_gib == prober.context_gib
    assert found[0].limit_gib == pytest.approx(4.0 * 0.95 - prober.context_gib)


def test_confirming_evaluates_and_saves_too(prober: WorkerProber) -> None:
    result = prober.probe(
        replace(request(rung=Rung.CONFIRM), evaluate=True), prober.logs / "confirm.log"
    )
    assert result.outcome is Outcome.OK and result.rung is Rung.CONFIRM
    assert {"evaluate", "save"} <= result.seconds.keys()
    measured = result.measurement
    assert measured is not None and Phase.EVALUATE in measured.phase_peak_gib
    assert measured.evaluation_s is not None and measured.evaluation_s > 0
    assert measured.checkpoint_s is not None and measured.checkpoint_s > 0
    plain = prober.probe(request(), prober.logs / "plain.log").measurement
    assert plain is not None and (plain.evaluation_s, plain.checkpoint_s) == (None, None)


def test_a_checkpoint_of_all_weights_is_not_tried(prober: WorkerProber) -> None:
    whole = replace(request(rung=Rung.CONFIRM, method="full"), evaluate=True)
    measured = prober.probe(whole, prober.logs / "whole.log").measurement
    assert (
        measured is not None and measured.evaluation_s is not None and measured.checkpoint_s is None
    )


@pytest.mark.real_processes  # a forked worker starts when the server forks, which may come later
def test_the_first_whole_model_says_how_long_its_worker_took_to_start(tmp_path: Path) -> None:
    whole = request()
    with WorkerProber("cpu", tmp_path) as started:
        before = time.monotonic()
        few = started.probe(truncate_request(whole, 1), tmp_path / "log")
        waited = time.monotonic() - before
        first, second = (started.probe(whole, tmp_path / "log") for _ in range(2))
    assert few.outcome is Outcome.OK and "start" not in few.seconds
    assert first.seconds["start"] == pytest.approx(waited - few.seconds["total"], rel=0.5)
    assert "start" not in second.seconds


def peak(prober: WorkerProber, asked: ProbeRequest) -> float:
    result = prober.probe(asked, prober.logs / "peak.log")
    assert result.outcome is Outcome.OK, result.reason
    assert result.measurement is not None
    return result.measurement.peak_reserved_gib


def test_peaks_repeat_and_memory_that_ran_out_leaves_nothing_behind(prober: WorkerProber) -> None:
    before = peak(prober, request(**LARGE))
    starts = prober.starts

    result = prober.probe(request(memory_gib=1.0, **TOO_LARGE), prober.logs / "oom.log")
    assert result.outcome is Outcome.OOM
    assert result.phase in (Phase.FORWARD, Phase.BACKWARD)
    assert result.oom is not None
    assert result.oom.margin > 0
    assert result.oom.limit_gib < 0.95
    assert sum(result.oom.terms_gib.values()) == pytest.approx(result.oom.allocated_gib)
    assert result.oom.allocated_gib + (result.oom.requested_gib or 0) == pytest.approx(
        result.oom.limit_gib, rel=0.25
    )

    after = peak(prober, request(**LARGE))
    assert prober.starts == starts  # the same process, not a new one
    assert after == pytest.approx(before, rel=0.01)
    half = peak(prober, request(**(LARGE | {"micro_batch_size": 16})))
    assert half == pytest.approx(after / 2, rel=0.2)


@pytest.mark.parametrize(
    "knobs",
    [
        {"optimizer": "adamw_8bit"},
        {"quantization": "nf4"},
        {"quantization": "nf4", "double_quant": True, "optimizer": "adamw_8bit"},
        {"quantization": "int8"},
        {"optimizer": "adafactor"},
        {"attention": "eager", "checkpointing": "every_2"},
        {"method": "full", "precision": "bf16_pure"},
    ],
    ids=str,
)
def test_a_cpu_runs_what_the_space_offers(prober: WorkerProber, knobs: dict[str, Any]) -> None:
    starts = prober.starts
    result = prober.probe(request(**knobs), prober.logs / "knobs.log")
    assert result.outcome is Outcome.OK, result.reason
    assert result.notes == () and prober.starts == starts
    assert result.measurement is not None
    plain = 4 * 82_560  # bytes of the model's parameters in fp32
    assert (result.measurement.model_gib * 2**30 < 0.9 * plain) is (
        "quantization" in knobs or knobs.get("precision") == "bf16_pure"
    )


def test_an_error_in_the_model_is_a_crash_with_its_reason(prober: WorkerProber) -> None:
    broken = prober.probe(
        request(model=MODEL | {"model_type": "no-such-model"}), prober.logs / "broken.log"
    )
    starts = prober.starts
    assert broken.outcome is Outcome.CRASH and broken.phase is Phase.LOAD
    assert "no-such-model" in (broken.reason or "")
    assert "Traceback" in (prober.logs / "broken.log").read_text()
    assert prober.probe(request(), prober.logs / "after.log").outcome is Outcome.OK
    assert prober.starts == starts + 1  # what an error leaves behind does not meet the next probe


CONFIGS: dict[str, dict[str, Any]] = {
    "lora": {"lora_rank": 8},
    "dora": {"lora_rank": 64, "dora": True, "precision": "bf16_mixed"},
    "in backward": {"method": "full", "optimizer_in_backward": True},
    "checkpointing": {"checkpointing": "full"},
}


@pytest.fixture(scope="module")
def both_orders(
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[str, tuple[float, float, float]]]:
    """Each configuration's first loss, last loss and peak, from two fresh workers that saw them in
    opposite orders.
    """
    found = []
    for names in (list(CONFIGS), list(reversed(CONFIGS))):
        with WorkerProber("cpu", tmp_path_factory.mktemp("logs")) as fresh:
            seen = {}
            for name in names:
                # A probe takes fewer steps if its first step is long. Losses are of steps that are
                # short even on a busy machine.
                short = {"micro_batch_size": 1, "seq_len": 16} | CONFIGS[name]
                result = fresh.probe(request(model=WIDE, **short), fresh.logs / f"{name}.log")
                assert result.outcome is Outcome.OK, result.reason
                assert result.measurement is not None
                measured = result.measurement
                # bf16 takes six times as long here
                large = LARGE | CONFIGS[name] | {"precision": "fp32"}
                peak_gib = peak(fresh, request(**large))
                seen[name] = (measured.loss_first, measured.loss_last, peak_gib)
            assert fresh.starts == 1
            found.append(seen)
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_a_warm_worker_answers_as_a_fresh_one(
    both_orders: list[dict[str, tuple[float, float, float]]], name: str
) -> None:
    """The first of each order met a fresh process, and is the last of the other: nothing of the
    others is left.
    """
    (first, last, peak), (other_first, other_last, other_peak) = (
        order[name] for order in both_orders
    )
    assert (first, last) == pytest.approx((other_first, other_last), rel=1e-6)
    assert first != last
    assert peak == pytest.approx(other_peak, rel=0.01)


def test_recomputing_needs_less_memory(
    both_orders: list[dict[str, tuple[float, float, float]]],
) -> None:
    for order in both_orders:
        assert order["checkpointing"][2] < 0.8 * order["lora"][2]


SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "canary-aws",
    "PGPASSWORD": "canary-pg",
    "HF_TOKEN": "canary-hf",
    "HUGGING_FACE_HUB_TOKEN": "canary-hub",
    "AUTOTUNE_STORAGE": "postgresql+psycopg://me:canary-storage@host/db",
    "WANDB_API_KEY": "canary-wandb",
    "CUDA_SECRET": "canary-cuda",
    "TORCH_HUB_TOKEN": "canary-torch",
    "SOMETHING_ELSE": "canary-else",
}


@pytest.mark.real_processes
def test_no_secret_reaches_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_HOME", "/somewhere")
    with WorkerProber("cpu", tmp_path) as prober:
        prober.launch()
        while not (environment := Path(f"/proc/{pid_of(prober)}/environ").read_bytes()):
            time.sleep(0.01)  # the kernel shows none for a moment after the new program has begun
    assert b"canary" not in environment
    names = {entry.partition(b"=")[0].decode() for entry in environment.split(b"\0") if entry}
    assert not names & set(SECRETS)
    assert {"PATH", "HF_HOME", "HF_HUB_OFFLINE"} <= names


@pytest.mark.real_processes
def test_a_worker_that_cannot_start_is_a_problem_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "transformers.py").write_text("raise ImportError('transformers is broken here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with WorkerProber("cpu", tmp_path / "logs") as prober:
        with pytest.raises(EnvironmentProblem, match="transformers is broken here") as caught:
            prober.probe(request(), tmp_path / "logs" / "trial.log")
        assert caught.value.exit_code == 3
        assert "doctor" in (caught.value.remedy or "")
        assert prober._process is None
    with pytest.raises(EnvironmentProblem, match="transformers is broken here"):
        check_worker("cpu")


def test_a_machine_is_checked_by_training_a_tiny_model() -> None:
    fingerprint, nf4_problem = check_worker("cpu")
    assert fingerprint.packages["torch"] and nf4_problem is None
