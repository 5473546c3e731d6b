"""The commands that a run prints at its end: the command line parses each of them."""

import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from autotune.api import steps
from autotune.catalog import resolve_device, resolve_model
from autotune.cli.app import LazyGroup, app
from autotune.cli.console import Display
from autotune.cli.last_screen import next_steps
from autotune.core.probe_types import Evidence
from autotune.core.process import StopToken
from autotune.study.summary import StudySummary, TrainingData
from tests.helpers.factories import summary
from tests.helpers.hostile import arguments_of_autotune

OUT = "runs/one"


def changed(study: StudySummary, *, config: dict[str, Any] | None = None, **recipe: Any) -> Any:
    """The study with another recipe; `config` changes the winner's configuration."""
    made = study.recipe
    assert made is not None
    evidence = recipe.pop("evidence", made.winner.evidence)
    winner = replace(
        made.winner, config=replace(made.winner.config, **(config or {})), evidence=evidence
    )
    return replace(study, recipe=replace(made, winner=winner, **recipe))


def with_data(study: StudySummary, path: str) -> StudySummary:
    return replace(changed(study, data=TrainingData(path=path)), dataset=path, split="test")


STUDIES = {
    "lora on a CPU": changed(
        summary(model="demo-3m", device="cpu"), model=resolve_model("demo-3m")
    ),
    "nothing fits": replace(summary(), recipe=None),
    "stopped": replace(summary(), stopped=True),
    "stopped at once": replace(summary(), recipe=None, trials=(), stopped=True),
    "several GPUs, planned": changed(
        summary(), config={"num_gpus": 8, "sharding": "fsdp2"}, evidence=Evidence.PROJECTED
    ),
    "qlora": with_data(changed(summary(), config={"quantization": "nf4"}), "/data/my rows.jsonl"),
    "unsteady": changed(
        summary(study="-a b"), evidence=Evidence.DISTURBED, disagreement="two probes differ"
    ),
    "for another card": with_data(
        changed(summary(), evidence=Evidence.PROJECTED, device=resolve_device("a10")), "org/rows"
    ),
}
VERBS = {
    "lora on a CPU": ["train", "verify", "explain"],
    "nothing fits": ["oom"],
    "stopped": ["resume", "train", "verify", "explain"],
    "stopped at once": ["resume"],
    "several GPUs, planned": ["train", "explain"],
    "qlora": ["train", "verify", "explain"],
    "unsteady": ["train", "explain"],
    "for another card": ["train", "explain"],
}


def parse(arguments: list[str]) -> dict[str, Any]:
    """Parse a command line with the real parser, and return the values of the options."""
    group = typer.main.get_command(app)
    assert isinstance(group, LazyGroup)
    context = group.make_context("autotune", ["--debug", *arguments])
    name, command, rest = group.resolve_command(context, list(arguments))
    return {"verb": name, **command.make_context(name, rest).params}


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("storage", [None, "sqlite:///a b.db"])
def test_each_printed_command_is_one_that_the_program_knows(
    name: str, storage: str | None, tmp_path: Path
) -> None:
    study = STUDIES[name]
    commands = list(next_steps(study, OUT, storage).values())
    parsed = [parse(arguments_of_autotune(command, tmp_path)) for command in commands]
    assert [one["verb"] for one in parsed] == VERBS[name]
    assert {(one["study"], one["storage"]) for one in parsed} == {(study.study, storage)}

    train = next((one for one in parsed if one["verb"] == "train"), {})
    if study.dataset:
        given = (str(train["dataset"]), train["split"], train["random_weights"])
        assert given == (study.dataset, "test", False)
    elif study.recipe:
        assert train["random_weights"] and train["max_steps"] == 5


def test_a_password_is_kept_off_the_printed_commands() -> None:
    url = "postgresql+psycopg://me:secret@host/db"
    variable = "export AUTOTUNE_STORAGE=postgresql+psycopg://me:PASSWORD@host/db"
    for study in STUDIES.values():
        first, *others = next_steps(study, OUT, url).items()
        assert first == ("first, with your password for PASSWORD", variable)
        assert [command for _, command in others] == list(next_steps(study, OUT).values())

    plan: Any = SimpleNamespace(spec=SimpleNamespace(storage=url), study="one")
    assert steps.resume_command(plan) == f"{variable} && autotune resume one"


def test_a_stopped_study_names_the_command_that_continues_it(tmp_path: Path) -> None:
    stop = StopToken()
    stop.signal = 2
    spec = SimpleNamespace(storage="sqlite:///a b.db")
    plan: Any = SimpleNamespace(spec=spec, study="-a b")
    outcome = steps.with_interruption(steps.RunOutcome(plan=plan, data={}), stop)
    assert outcome.error is not None and outcome.error.exit_code == 130
    command = (outcome.error.remedy or "").removeprefix("continue with: ")
    parsed = parse(arguments_of_autotune(command, tmp_path))
    assert (parsed["verb"], parsed["study"], parsed["storage"]) == ("resume", "-a b", spec.storage)
    nothing = steps.with_interruption(steps.RunOutcome(plan=plan, data=None), stop).error
    assert nothing is not None and nothing.remedy == "run the same command again"


def test_a_trl_study_names_the_command_of_trl() -> None:
    study = with_data(changed(summary(), trainer="trl"), "org/rows")
    assert next(iter(next_steps(study, OUT))) == "start the full run"
    command, *others = next_steps(study, OUT).values()
    assert command.startswith("cd runs/one/export && ") and " trl sft --config " in command
    assert [shlex.split(other)[1] for other in others] == ["verify", "explain"]


def test_the_place_of_the_run_is_named_if_it_is_another_one() -> None:
    purposes = {name: next(iter(next_steps(study, OUT))) for name, study in STUDIES.items()}
    assert "on 8 GPUs" in purposes["several GPUs, planned"]
    assert purposes["for another card"] == "start the full run on the a10"
    assert purposes["qlora"] == "start the full run"


def test_a_study_in_which_nothing_fits_prints_the_next_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Display(budget_s=600.0) as display:
        display.result(STUDIES["nothing fits"], OUT)
    shown = capsys.readouterr().err
    assert "no configuration succeeded" in shown and "autotune oom h200-mistral-7b" in shown


def test_an_unsteady_machine_is_asked_once_it_is_quiet() -> None:
    """`explain` refuses to compare speeds before."""
    for name in ("unsteady", "qlora"):
        *_, purpose = next_steps(STUDIES[name], OUT)
        assert purpose.startswith("when the machine is quiet, ") is (name == "unsteady")
