"""The words for what a study found: a candidate's numbers, the winner's configuration, ablations
and trade-offs.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.catalog import resolve_model
from autotune.core.probe_types import Evidence, Outcome
from autotune.core.train_config import TrainConfig
from autotune.problem.run_cost import Pauses
from autotune.report import describe
from autotune.report.study_directory import write_exports
from autotune.study.ablation import AblatedKnob, Ablation
from autotune.study.summary import Candidate, Recipe
from tests.helpers.factories import summary
from tests.helpers.hostile import NAMES


def recipe() -> Recipe:
    made = summary().recipe
    assert made is not None
    return made


def test_every_outcome_has_a_label_of_its_own() -> None:
    assert set(describe.LABELS) == set(Outcome) and len(set(describe.LABELS.values())) == len(
        Outcome
    )


def test_a_candidate_in_one_line() -> None:
    assert describe.candidate_line(recipe().winner) == (
        "16,549 tokens/s, 54.4 GiB, full run 10 min 19 s, $0.617 [measured]"
    )


_TELLS = (
    "import json, sys\n\ndef main(settings, options, _):\n"
    "    print(json.dumps([options.model, options.dataset]))\n"
)


@pytest.mark.parametrize("name", NAMES)
def test_the_printed_commands_run_as_they_are(name: str, tmp_path: Path) -> None:
    """With the study's directory, its dataset and its model.

    What trains in the end is replaced here.
    """
    folder = name.replace("/", "").replace("\0", "")
    rows = tmp_path / folder / "rows.jsonl"
    rows.parent.mkdir()
    rows.write_text("{}")
    base = recipe()
    made = replace(base, study=name, model=replace(base.model, weights=str(rows.parent)))
    write_exports(tmp_path / folder, made, ["train"])
    (tmp_path / folder / "export" / "runtime" / "train.py").write_text(_TELLS)
    study = replace(summary(), recipe=made, dataset=str(rows))
    commands = describe.training_commands(study, made, folder)
    assert list(commands) == ["try the exported run", "start the full run"]
    for command, dataset in zip(commands.values(), (None, str(rows)), strict=True):
        variables = {"PATH": os.environ["PATH"], "PYTHON": sys.executable}
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=variables, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == [str(rows.parent), dataset]
    assert not [path for path in tmp_path.rglob("*") if path.name == "CANARY"]


@pytest.mark.parametrize(
    ("dataset", "wanted"),
    [
        *(
            ("~/rows.jsonl", "/home/me/rows.jsonl"),
            ("a/rows.jsonl", "a/rows.jsonl"),
            ("rows.parquet", "rows.parquet"),
        ),
        # of another machine
        *(("~nobody-here/rows.jsonl", "'~nobody-here/rows.jsonl'"), (None, None)),
    ],
)
def test_the_command_names_the_dataset_that_the_script_can_read(
    dataset: str | None, wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    purpose, command = list(
        describe.training_commands(replace(summary(), dataset=dataset), recipe(), "out").items()
    )[1]
    assert command == f"bash out/export/launch.sh --dataset {wanted or 'data.jsonl'}"
    assert purpose.startswith("start" if wanted else "write your examples")


def test_a_model_without_weights_has_no_full_run() -> None:
    made = replace(recipe(), model=resolve_model("demo-3m"))
    assert list(describe.training_commands(summary(), made, "out")) == ["try the exported run"]


def test_unknown_numbers_are_dashes() -> None:
    winner = recipe().winner
    cost = replace(winner.cost, full_run_usd=None, interval_usd=None, kwh=None, spot_usd=None)
    bare = replace(winner, cost=cost, performance=replace(winner.performance, mfu=None))
    numbers = describe.numbers(bare)
    assert {name for name, number in numbers.items() if number.text == "–"} == {
        "MFU",
        "USD",
        "USD at the spot price",
        "energy",
    }
    assert numbers["free below the limit"].text == "59%"
    assert "$" not in describe.full_run(cost) and "kWh" not in describe.full_run(cost)
    assert describe.usd_range(cost) == "–"


def test_evidence_is_named_apart_where_speed_and_memory_differ() -> None:
    winner = recipe().winner
    assert describe.evidence(winner) == "measured"
    mixed = replace(winner, evidence=Evidence.EXTRAPOLATED)
    assert describe.evidence(mixed) == "speed extrapolated, memory measured"


def test_the_memory_of_a_trial_that_did_not_fit_is_the_least_it_needed() -> None:
    fits, _, too_large = summary().trials[:3]
    assert describe.memory_gib(fits) == 20.0
    assert describe.memory_gib(too_large) == pytest.approx(132 * 1.02)
    assert describe.memory_gib(replace(too_large, margin=None)) is None


def test_the_winners_configuration_in_phrases() -> None:
    phrases = describe.configuration(recipe())
    assert phrases[:3] == (
        "LoRA of rank 16",
        "4 sequences of 1,024 tokens at a time, accumulated 8 times: a global batch of 32",
        "no activation checkpointing",
    )


@pytest.mark.parametrize(
    ("changes", "phrase"),
    [
        ({"method": "full"}, "full fine-tuning"),
        (
            {"quantization": "nf4", "double_quant": True},
            "QLoRA of rank 16 on a 4-bit (NF4) base, double quantised",
        ),
        ({"dora": True, "rslora": True}, "rsDoRA of rank 16"),
        ({"checkpointing": "every_3"}, "activation checkpointing in one of every 3 layers"),
        (
            {"checkpointing": "selective_50"},
            "compiled layers that keep up to 50% of their activations",
        ),
        (
            {"checkpointing": "offload"},
            "activation checkpointing in every layer, with its inputs in host memory",
        ),
        ({"loss": "chunked"}, "head and cross-entropy in chunks of tokens"),
        (
            {"compile": "none", "kernels": "liger"},
            "Liger's kernels for norms, rotary positions and MLPs",
        ),
        ({"loader_workers": 2}, "batches made by 2 other processes"),
        (
            {"micro_batch_size": 1, "packing": True},
            "1 sequence of 1,024 tokens at a time, accumulated 32 times: packed, a global batch of"
            " 32.0 examples on average",
        ),
    ],
)
def test_each_decision_has_its_phrase(changes: dict[str, Any], phrase: str) -> None:
    made = recipe()
    config = replace(made.winner.config, **changes)
    assert phrase in describe.configuration(
        replace(made, winner=replace(made.winner, config=config))
    )


def ablated(knob: str, config: TrainConfig, **changes: Any) -> AblatedKnob:
    values = {
        "knob": knob,
        "config": config,
        "outcome": Outcome.OK,
        "evidence": Evidence.MEASURED,
    } | changes
    return AblatedKnob(**values)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens_per_s": 500.0, "peak_gib": 12.0}, "2.00 times as fast, 8.00 GiB more"),
        (
            {"tokens_per_s": 1010.0, "error": 0.02, "peak_gib": 21.0},
            "no clear difference in speed, 1.00 GiB less",
        ),
        (
            {"tokens_per_s": 1000.0, "peak_gib": 20.0},
            "no clear difference in speed, the same memory",
        ),
        ({"tokens_per_s": 1250.0}, "0.80 times as fast"),
        (
            {"outcome": Outcome.OOM, "peak_gib": 30.0, "limit_gib": 22.0},
            "does not fit without it: needs at least 30.0 GiB of 22.0 GiB",
        ),
        ({"outcome": Outcome.CRASH}, "without it: crash"),
    ],
)
def test_the_effect_of_a_knob(changes: dict[str, Any], words: str) -> None:
    config = TrainConfig(checkpointing="none")
    winner = ablated("", config, tokens_per_s=1000.0, error=0.01, peak_gib=20.0)
    undone = ablated("checkpointing", TrainConfig(checkpointing="full"), **changes)
    found = Ablation(winner=winner, baseline=TrainConfig(), undone=(undone,))
    assert describe.ablation(found) == [f"checkpointing none instead of full: {words} [measured]"]


def test_evaluations_and_checkpoints_are_said_as_far_as_they_are_known() -> None:
    recipe = summary().recipe
    assert recipe is not None
    pauses = Pauses(
        num_evaluations=3,
        evaluation_s=90.0,
        num_checkpoints=1,
        checkpoint_s=1.5,
        checkpoint_gib=0.5,
    )
    cost = replace(recipe.winner.cost, pauses=pauses)
    assert describe.pauses(cost) == ("3 evaluations in 1 min 30 s", "1 checkpoint in 1.5 s")
    assert "3 evaluations in 1 min 30 s and 1 checkpoint in 1.5 s included" in describe.full_run(
        cost
    )
    assert describe.left_out(cost) == "They do not include start-up."
    unknown = replace(cost, pauses=replace(pauses, evaluation_s=None))
    assert describe.pauses(unknown) == ("1 checkpoint in 1.5 s",)
    assert describe.left_out(unknown) == "They do not include start-up and evaluation."
    none = replace(
        cost, pauses=replace(pauses, num_evaluations=0, evaluation_s=0.0, checkpoint_s=None)
    )
    assert describe.pauses(none) == () and "included" not in describe.full_run(none)
    assert (
        describe.left_out(recipe.winner.cost)
        == "They do not include start-up, checkpoint saves and evaluation."
    )


def test_a_speed_up_of_measurements_that_disagree_is_an_interval() -> None:
    """The headline's time and cost are intervals, too, and every end is rounded outwards."""
    made = recipe()
    assert made.baseline is not None

    def text(low: float, high: float) -> str:
        speed = replace(made.winner.performance, tokens_per_second=1.0, spread=(0.0, 0.0))
        other = replace(speed, spread=(low - 1, high - 1))
        found = replace(
            made,
            winner=replace(made.winner, performance=speed),
            baseline=replace(made.baseline, performance=other),  # type: ignore[type-var]
            disagreement="measurements of a differ by 9%",
        )
        return describe.speed_up(found)

    assert text(1.61, 1.79) == "1.6 to 1.8 times the speed of the baseline"
    assert text(1.69, 1.71) == "1.6 to 1.8 times the speed of the baseline"
    assert text(1.033, 1.257) == "3 to 26% faster than the baseline"
    assert text(0.855, 0.945) == "5 to 15% slower than the baseline"
    assert text(0.96, 1.2) == (
        "the machine is too unsteady for a speed-up: measurements of a differ by 9%"
    )

    study = replace(summary(), recipe=replace(made, disagreement="measurements of a differ by 9%"))
    cost = made.winner.cost
    assert study.recipe is not None
    assert describe.headline(study).startswith(
        f"{describe.speed_up(study.recipe)}: the full run takes {describe.hours_range(cost)} "
        f"and costs {describe.usd_range(cost)} ("
    )


def test_savings_are_stated_beside_the_cost_of_the_search() -> None:
    study = summary()
    saved = describe.savings(study)
    assert re.fullmatch(
        r"saves \$[\d.]+ per run; the search cost \$0\.07 \(the savings are \$[\d.]+ to \$[\d.]+\)",
        saved,
    )
    short = describe.savings(replace(study, search_usd=4.0))
    assert re.fullmatch(
        r"this run is too short to pay for a search: the winner saves \$[\d.]+ per run, and the "
        r"search cost \$4\.00, so \d+ such runs pay for it",
        short,
    )


def test_savings_without_a_price_are_times() -> None:
    study = summary()
    made = recipe()
    assert made.baseline is not None

    def unpriced(candidate: Candidate) -> Candidate:
        return replace(candidate, cost=replace(candidate.cost, full_run_usd=None))

    free = replace(made, winner=unpriced(made.winner), baseline=unpriced(made.baseline))
    text = describe.savings(replace(study, recipe=free, search_usd=None))
    assert re.match(r"saves \d+ min .* per run; the search took 1 min 15 s \(", text)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"baseline": None}, "savings are unknown; the search cost $0.07"),
        ({"alone": True}, "savings are unknown; the search cost $0.07"),
        ({"winner": recipe().baseline}, "savings are not measurable; the search cost $0.07"),
    ],
)
def test_unknown_savings_are_not_stated(changes: dict[str, Any], text: str) -> None:
    assert describe.savings(replace(summary(), recipe=replace(recipe(), **changes))) == text


def test_a_run_that_costs_more_is_no_saving() -> None:
    made = recipe()
    dear = replace(made.winner, cost=replace(made.winner.cost, full_run_usd=9.0))
    text = describe.savings(replace(summary(), recipe=replace(made, winner=dear)))
    assert re.fullmatch(
        r"costs \$[\d.]+ more per run and saves \d+ min \d+ s; the search cost \$0\.07", text
    )
