"""What a card can train: one model of each size, by method, from the formulas of a plan."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from autotune.catalog import list_models, resolve_device, resolve_model
from autotune.catalog.model_sizes import Sizes
from autotune.cli.app import app
from autotune.core.errors import NothingFits, UsageError
from autotune.core.json_view import json_data
from autotune.planning.device_estimate import limit_of
from autotune.planning.plan import plan, planned_setup
from autotune.planning.trainable import METHODS, STEP, Trainable, longest_row, sizes, trainable
from autotune.prediction.estimate import memory_state
from autotune.prediction.memory_formula import memory_breakdown
from autotune.problem.run_cost import FITS, OOM, TIGHT
from autotune.problem.study_spec import StudySpec

SPEC = StudySpec(model="demo-3m", tokens_per_example=1024, global_batch=32)
RTX_4090 = resolve_device("rtx-4090")
SOME = ("qwen2.5-0.5b", "llama-3.1-8b", "gemma-2-9b", "llama-3.1-70b")


@pytest.fixture(scope="module")
def made() -> Trainable:
    return trainable(SPEC, RTX_4090, list(map(resolve_model, SOME)))


def test_each_size_is_there_once() -> None:
    chosen = sizes()
    params = [model.params or 0 for model in chosen]
    assert params == sorted(params) and all(Sizes.of(model) for model in chosen)
    covered = [model for model in list_models() if Sizes.of(model) and (model.params or 0) >= 10**8]
    assert all(
        any(size / STEP <= (model.params or 0) <= size * STEP for size in params)
        for model in covered
    )
    names = {model.short for model in chosen}
    assert {"Mistral-7B-v0.3", "Llama-3.1-8B", "Llama-3.1-405B"} <= names
    assert not names & {"Meta-Llama-3-8B", "demo-3m"}  # a shorter context, and no real model


def test_verdicts_follow_from_the_memory(made: Trainable) -> None:
    found = {(entry.model, entry.method): entry for entry in made.entries}
    assert list(METHODS) == [entry.method for entry in made.row(made.models[0])]
    assert found["Qwen/Qwen2.5-0.5B", "full"].state == FITS
    assert found["meta-llama/Llama-3.1-8B", "lora"].state == FITS
    assert found["google/gemma-2-9b", "lora"].state == TIGHT
    assert found["meta-llama/Llama-3.1-70B", "qlora"].state == OOM
    for entry in made.entries:
        assert (
            entry.least_gib is not None and entry.memory_by == "formula" and entry.problem is None
        )
        assert entry.state == memory_state(entry.least_gib, made.limit_gib)
        known = (entry.tokens_per_s, entry.interval, entry.usd_per_1000)
        assert (None not in known) if entry.state == FITS else known == (None, None, None)


@pytest.mark.parametrize("method", METHODS)
def test_a_speed_is_nearly_that_of_a_plan_of_the_whole_space(made: Trainable, method: str) -> None:
    best = plan(replace(SPEC, model="qwen2.5-0.5b", space=method), device=RTX_4090).best
    entry = next(entry for entry in made.row(made.models[0]) if entry.method == method)
    assert best is not None and entry.tokens_per_s == pytest.approx(best.tokens_per_s, rel=0.05)
    price = made.price
    assert price is not None and entry.tokens_per_s is not None
    assert entry.usd_per_1000 == pytest.approx(
        1000 * 1024 / entry.tokens_per_s / 3600 * price.usd_per_hour
    )


def test_the_longest_row_fits_and_twice_as_long_does_not() -> None:
    spec = replace(SPEC, model="llama-3.1-8b", space="lora")
    setup, limit_gib = planned_setup(spec, RTX_4090), limit_of(spec, RTX_4090)
    longest = longest_row(setup, limit_gib)
    assert longest == 8192
    space = setup.task.space
    config = replace(space.config(space.leanest()), lora_rank=16, micro_batch_size=1)
    needs = [
        memory_breakdown(setup.task.model, replace(config, seq_len=length))
        for length in (8192, 32768)
    ]
    states = [memory_state(need.peak_reserved_gib, limit_gib, need.error) for need in needs if need]
    assert states[0] == FITS and states[1] != FITS
    small = replace(spec, model="qwen3-0.6b")
    # as far as its positions go
    assert longest_row(planned_setup(small, RTX_4090), limit_gib) == 40960
    assert longest_row(setup, 1.0) is None


def test_what_cannot_be_known_is_said(made: Trainable) -> None:
    unpriced = trainable(SPEC, resolve_device("a2"), [resolve_model("qwen2.5-0.5b")])
    assert unpriced.price is None and all(entry.usd_per_1000 is None for entry in unpriced.entries)
    with pytest.raises(UsageError):
        trainable(SPEC, resolve_device("cpu"), [resolve_model("qwen2.5-0.5b")])
    data = json_data(made)
    assert data["device"] == "rtx-4090" and data["price"]["usd_per_hour"] == 0.34
    assert [entry["params"] for entry in data["entries"][:3]] == [494032768] * 3
    assert data["evidence"] == "estimated" and json.dumps(data)


# --- the command


def run(*args: str) -> Any:
    return CliRunner().invoke(app, ["plan", *args])


def test_the_command_prints_tables_and_writes_a_page(tmp_path: Path) -> None:
    file = tmp_path / "card.html"
    asked = ("--gpu", "rtx-3060", "--tokens-per-example", "512", "--details", "--html", str(file))
    result = run(*asked)
    assert result.exit_code == 0, result.output
    text = result.stdout
    assert text.startswith("rtx-3060-12gb trains models of up to ") and text.index("needs") < 300
    assert (
        "What rtx-3060-12gb can train\n" in text
        and "Nothing was measured here. Estimated: " in text
    )
    assert all(title in text for title in METHODS.values())
    row = next(line for line in text.splitlines() if "Llama-3.1-8B" in line)
    assert "no: needs " in row and "–" in row
    page = file.read_text(encoding="utf-8")
    assert (
        "<title>What rtx-3060-12gb can train – autotune</title>" in page
        and "Plotly.newPlot" in page
    )
    assert page.count("<tbody>") == 3


def test_the_command_as_json() -> None:
    result = run("--gpu", "rtx-3060", "--json")
    data = json.loads(result.stdout)
    assert {entry["method"] for entry in data["entries"]} == set(METHODS)
    assert len(data["entries"]) == 3 * len(sizes())


@pytest.mark.parametrize(
    ("args", "kind", "said"),
    [
        (["--gpus", "1,2"], UsageError, "no model is given"),
        (["--gpu", "rtx-3060", "--space", "lora"], UsageError, "no model is given"),
        ([], UsageError, "no model is given"),
        (
            ["--gpu", "rtx-3060", "--model", "gpt2", "--html", "x.html"],
            UsageError,
            "without a model",
        ),
        (
            ["--gpu", "rtx-3060", "--objective", "dpo"],
            UsageError,
            "--objective dpo is planned for one model",
        ),
        (["--gpu", "rtx-3060", "--memory-gib", "1.2"], NothingFits, "no model is certain to fit"),
    ],
)
def test_what_the_command_refuses(args: list[str], kind: type[Exception], said: str) -> None:
    error = run(*args).exception
    assert isinstance(error, kind) and said in str(error)
