"""Verification of predictions by exported runs, with real runs of train.py and of TRL."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.catalog import resolve_device, resolve_model
from autotune.cli.commands import analysis as command
from autotune.core.errors import Cancelled, EnvironmentProblem, StorageError, UsageError
from autotune.core.probe_types import Evidence
from autotune.core.serialization import from_data, to_data
from autotune.core.train_config import TrainConfig
from autotune.export.run.verify import straining_lengths, verify, with_result
from autotune.problem.length_distribution import Lengths
from autotune.problem.study_spec import StudySpec
from autotune.problem.workload import Workload
from autotune.report import describe
from autotune.report.html import render
from autotune.study.storage.probe_store import ProbeStore
from autotune.study.summary import Recipe, Verification, summary_data
from tests.helpers.factories import summary


def promise(**changes: Any) -> Verification:
    values: dict[str, Any] = {
        "config": TrainConfig(),
        "micro_steps": 200,
        "tolerance": 0.05,
        "promised_tokens_per_s": 1000.0,
        "promised_step_s": 2.0,
        "promised_gib": 20.0,
    }
    return Verification(**values | changes)


@pytest.mark.parametrize(
    ("measured", "worse"),
    [
        ({"seconds_per_step": 2.0, "peak_reserved_gib": 20.0}, None),
        ({"seconds_per_step": 2.08, "peak_reserved_gib": 20.9}, None),
        ({"seconds_per_step": 2.2, "peak_reserved_gib": 20.0}, "slower"),
        ({"seconds_per_step": 2.0, "peak_reserved_gib": 25.0}, "larger"),
        ({"seconds_per_step": 2.2, "peak_reserved_gib": 25.0}, "slower and larger"),
        ({"seconds_per_step": 2.2, "peak_reserved_gib": 15.0}, "slower"),
        ({"seconds_per_step": 2.0, "peak_reserved_gib": None}, None),  # a CPU reports no memory
        # other examples
        ({"seconds_per_step": 2.0, "peak_reserved_gib": 20.0, "tokens_per_second": 500.0}, None),
    ],
)
def test_what_is_slower_or_larger_beyond_the_tolerance_fails(
    measured: dict[str, Any], worse: str | None
) -> None:
    done = with_result(promise(), measured | {"steps": 3}, 3)
    assert done.reason is None and done.holds is (worse is None)
    assert describe.failed_verification(done) == (
        worse and f"the run is {worse} than predicted by over 5%"
    )


@pytest.mark.parametrize(
    ("measured", "better"),
    [
        ({"seconds_per_step": 1.8, "peak_reserved_gib": 20.0}, "faster"),
        ({"seconds_per_step": 2.0, "peak_reserved_gib": 18.0}, "smaller"),
        ({"seconds_per_step": 1.8, "peak_reserved_gib": 18.0}, "faster and smaller"),
        ({"seconds_per_step": 1.92, "peak_reserved_gib": 19.2}, None),
    ],
)
def test_a_run_that_is_better_than_promised_is_a_wrong_prediction_but_no_failure(
    measured: dict[str, Any], better: str | None
) -> None:
    done = with_result(promise(), measured | {"steps": 3}, 3)
    assert done.holds and describe.failed_verification(done) is None
    assert all("predict" in line for line in describe.verification(done))
    assert describe.verification(done)[2:] == (
        [f"a wrong prediction: the run is {better} than predicted by over 5%"] if better else []
    )
    page = render(replace(summary(), verification=done), "out")
    assert ("The prediction did not hold" in page) is (better is not None)


@pytest.mark.parametrize(
    ("promised", "result", "verdict"),
    [
        (
            {},
            {"seconds_per_step": 2.02, "peak_reserved_gib": 20.0},
            "The prediction holds: 990 tokens/s (1.0% slower than predicted), "
            "20.0 GiB (as predicted)",
        ),
        (
            {},
            {"seconds_per_step": 10.4},
            "The prediction does not hold: 192 tokens/s (5.2 times slower than predicted)",
        ),
        (
            {},
            {"seconds_per_step": 1.6},
            "The prediction does not hold: 1,250 tokens/s (20.0% faster than predicted)",
        ),
        ({"probed": False}, {"seconds_per_step": 4.0}, "The run succeeded: 500 tokens/s"),
        (
            {"soak": True},
            {"seconds_per_step": 4.0, "peaks_gib": [20.0, 20.0, 20.4, 20.5]},
            "The run failed: memory grows from 20.0 GiB in the second quarter of the steps to "
            "20.5 GiB in the last (+2.5%)",
        ),
        ({}, "OutOfMemoryError: no memory", "The exported run failed: OutOfMemoryError: no memory"),
    ],
)
def test_the_verdict_comes_first(promised: dict[str, Any], result: Any, verdict: str) -> None:
    measured = result if isinstance(result, str) else {"steps": 3} | result
    assert describe.verdict(with_result(promise(**promised), measured, 3)) == verdict


@pytest.mark.parametrize(
    ("result", "reported"),
    [
        ("OutOfMemoryError: CUDA out of memory", "CUDA out of memory"),
        ({"steps": 2, "seconds_per_step": 2.0}, "the run took 2 of 3 steps"),
        ({"steps": 3, "seconds_per_step": None}, "None s each"),
        ({"steps": 3, "seconds_per_step": float("nan")}, "nan s each"),
    ],
)
def test_a_failed_run_does_not_hold(result: Any, reported: str) -> None:
    done = with_result(promise(), result, 3)
    assert (
        not done.holds and reported in describe.verification(done)[0] and done.tokens_per_s is None
    )


def soaked(peaks: Any, **changes: Any) -> Verification:
    measured = {"steps": 3, "seconds_per_step": 4.0, "peak_reserved_gib": 20.0, "peaks_gib": peaks}
    return with_result(promise(soak=True, **changes), measured, 3)


@pytest.mark.parametrize(
    ("peaks", "creeps"),
    [
        ([20.0, 20.0, 20.0, 20.0], False),
        ([18.0, 20.0, 20.2, 20.3], False),  # the first quarter is warm-up; growth of 1.5 %
        ([20.0, 20.0, 20.4, 20.5], True),
        ([21.0, 20.0, 20.0, 20.5], True),
        ([0.5, 0.5, 0.5, 0.58], False),  # 16 % of a negligible amount
        (None, False),
    ],
)
def test_growing_memory_fails_the_verification(peaks: Any, creeps: bool) -> None:
    """With or without a probe of the file, and at any speed."""
    for probed in (True, False):
        done = soaked(peaks, probed=probed)
        assert done.holds is not creeps
    if creeps:
        reason = describe.failed_verification(done)
        assert (
            "from 20.0 GiB in the second quarter of the steps to 20.5 GiB in the last (+2.5%)"
            in (reason or "")
        )
        assert reason in describe.verification(done)
    else:
        assert (
            "is unknown if" if peaks is None else "memory does not grow"
        ) in describe.verification(done)[-1]


def test_a_soak_may_use_less_memory_than_predicted_but_not_more() -> None:
    assert soaked(None, promised_gib=25.0).holds
    assert not soaked(None, promised_gib=18.0).holds
    assert soaked(None, promised_gib=18.0, probed=False).holds


def test_an_unprobed_file_fails_only_if_its_run_fails() -> None:
    other = promise(file="trl_sft.yaml", probed=False)
    done = with_result(other, {"steps": 3, "seconds_per_step": 3.0, "peak_reserved_gib": 40.0}, 3)
    assert done.holds and "50.0% slower than predicted" in describe.verification(done)[0]
    assert "differs from the probed run" in describe.verification(done)[-1]
    assert not with_result(other, "OutOfMemoryError: CUDA out of memory", 3).holds
    page = render(replace(summary(), verification=done), "out")
    assert (
        "winner&#39;s trl_sft.yaml" in page.replace("'", "&#39;")
        and "Nothing was predicted for this file" in page
    )


def test_every_second_batch_of_a_soak_has_the_maximum_length() -> None:
    for size in (1, 4, 32):
        config = TrainConfig(micro_batch_size=size, seq_len=512)
        lengths = straining_lengths(config)
        batches = [lengths[place : place + size] for place in range(0, len(lengths), size)]
        assert sum(512 in batch for batch in batches) / len(batches) == pytest.approx(0.5, abs=0.2)
        assert all(length == 512 or 2 <= length <= 128 for length in lengths)


def test_a_verification_is_stored_and_shown_in_the_report() -> None:
    done = with_result(
        promise(), {"steps": 3, "seconds_per_step": 2.0 / 0.99, "peak_reserved_gib": 19.9}, 3
    )
    assert from_data(Verification, to_data(done)) == done
    study = replace(summary(), verification=done)
    assert summary_data(study, "out")["verification"]["holds"] is True
    page = render(study, "out")
    assert (
        "checked against the exported run" in page
        and "990 measured in 200 micro batches of train.py" in page
    )
    assert "checked against the exported run" not in render(summary(), "out")


def recipe(**changes: Any) -> Recipe:
    made = summary().recipe
    assert made is not None
    return replace(made, **changes)


@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        ({"winner": {"evidence": Evidence.PROJECTED}}, UsageError, "projected, not measured"),
        ({"winner": {"evidence": Evidence.EXTRAPOLATED}}, UsageError, "extrapolated, not measured"),
        ({"trainer": "trl"}, EnvironmentProblem, "TRL is not installed"),
        ({}, EnvironmentProblem, "this machine has no GPU"),
    ],
)
def test_winners_that_cannot_run_on_this_machine_are_refused(
    made: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.core.nvml.list_gpus", list)
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    winner = replace(recipe().winner, **made.pop("winner", {}))
    with pytest.raises(error, match=message) as caught:
        command.require_measured_here(recipe(winner=winner, **made))
    # What was extrapolated was so here, for want of time.
    assert (" --budget 10m` continues the study" in str(caught.value.remedy)) is (
        winner.evidence is Evidence.EXTRAPOLATED
    )


def test_shallow_only_and_verify_are_refused_together() -> None:
    from autotune.cli.commands.run import run_spec

    with pytest.raises(
        UsageError, match=r"--verify runs the exported script on the target GPU itself"
    ):
        run_spec(StudySpec(model="demo-3m", gpu="cpu", verify=True, shallow_only=True))


def on_cpu(**knobs: Any) -> Recipe:
    config = TrainConfig(
        **{"micro_batch_size": 2, "seq_len": 32, "precision": "fp32", "checkpointing": "none"}
        | knobs
    )
    workload = Workload(examples=64, lengths=Lengths.constant(32), global_batch=4)
    base = recipe(model=resolve_model("demo-3m"), workload=workload, device=resolve_device("cpu"))
    return replace(base, winner=replace(base.winner, config=config))


@pytest.mark.probe
def test_verify_runs_the_exported_script(tmp_path: Path) -> None:
    """The run evaluates before and after and saves adapters. Only its log remains."""
    (tmp_path / "logs").mkdir()
    messages: list[str] = []
    done = verify(on_cpu(), tmp_path, micro_steps=4, say=messages.append)
    assert (
        "for 3 steps, about " in messages[0]
        and messages[-1].startswith("verifying: step ")
        and "of 3, " in messages[-1]
    )
    assert (
        done.reason is None
        and done.tokens_per_s
        and done.seconds_per_step
        and done.micro_steps == 4
    )
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]
    assert (tmp_path / "logs" / "verify.log").is_file()
    with pytest.raises(Cancelled):
        verify(on_cpu(), tmp_path, micro_steps=4, should_stop=lambda: True)
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


@pytest.mark.probe
def test_a_soak_runs_a_file_that_was_not_probed(tmp_path: Path) -> None:
    """With packing, since otherwise all rows of train.py have the same length."""
    (tmp_path / "logs").mkdir()
    trl = replace(on_cpu(packing=True), trainer="trl")
    done = verify(trl, tmp_path, form="train", micro_steps=8, soak=True)
    assert done.holds and not done.probed and done.seconds_per_step, describe.verification(done)
    assert len(done.peaks_gib) == 4 and all(done.peaks_gib)


@pytest.mark.probe
def test_verify_runs_the_exported_yaml_with_trl_sft(tmp_path: Path) -> None:
    """A study with TRL is verified by its own format. The time on a CPU is not checked."""
    pytest.importorskip("trl")
    pins = {
        "micro_batch_size": 2,
        "seq_len": 32,
        "lora_rank": 16,
        "precision": "fp32",
        "checkpointing": "none",
    }
    pins |= {
        "optimizer": "adamw_torch_fused",
        "attention": "sdpa",
        "compile": "none",
        "quantization": "none",
    }
    study = [
        "--model",
        "demo-3m",
        "--gpu",
        "cpu",
        "--trainer",
        "trl",
        "--trials",
        "1",
        "--global-batch",
        "4",
    ]
    study += [
        "--tokens-per-example",
        "32",
        "--out",
        "out",
        *(f"--set={knob}={value}" for knob, value in pins.items()),
    ]

    def autotune(*arguments: str) -> tuple[str, str]:
        line = [sys.executable, "-m", "autotune", *arguments]
        ended = subprocess.run(
            line, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=400
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout, ended.stderr

    autotune("run", *study, "--quiet")
    output, shown = autotune("verify", "--micro-steps", "8", "--tolerance", "90", "--json")
    assert "verifying: step " in shown
    verification = json.loads(output)
    assert (
        verification["file"] == "trl_sft.yaml" and verification["probed"] and verification["holds"]
    ), verification
    assert (
        verification["seconds_per_step"]
        and len(verification["peaks_gib"]) == 4
        and not (tmp_path / "out" / ".verify").exists()
    )
    assert "8 micro batches of trl_sft.yaml" in (tmp_path / "out" / "report.html").read_text()


def test_weights_larger_than_the_disk_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "autotune.export.run.verify.run_exported", lambda *_, **__: pytest.fail("begun")
    )
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10 * 2**30))
    with pytest.raises(StorageError, match=r"weights of this model take 13\.6 GiB") as caught:
        verify(recipe(), tmp_path, form="trl")
    assert "--format train" in (caught.value.remedy or "") and not list(tmp_path.iterdir())


def test_an_unknown_study_format_or_number_is_a_usage_error(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'a.db'}"
    with pytest.raises(UsageError, match="there is no database"):
        command.verify("nobody", storage=url)
    ProbeStore(url).close()
    with pytest.raises(UsageError, match="there is no study"):
        command.verify("nobody", storage=url)
    with pytest.raises(UsageError, match="--format cannot be 'axolotl'"):
        command.verify("nobody", storage=url, format_="axolotl")
    with pytest.raises(UsageError, match="--micro-steps must be a positive number"):
        command.verify("nobody", storage=url, micro_steps=0)
