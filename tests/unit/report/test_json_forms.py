"""What commands print with `--json` has the form that its JSON Schema says."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import ValidationError
from typer.testing import CliRunner

from autotune.cli.app import COMMANDS, app
from autotune.core.errors import UsageError
from autotune.core.serialization import to_data
from autotune.export.run.train import Progress
from autotune.report.json_forms import ANSWERS, form_of, schema
from autotune.study.node_health import Rung
from autotune.study.storage.location import to_stored_directory
from autotune.study.storage.study_record import start_record
from autotune.study.summary import summary_data
from tests.helpers.factories import FINGERPRINT, calibration, summary
from tests.helpers.json_contract import KEYS, SCHEMAS, differences, keys
from tests.helpers.replay import machine
from tests.helpers.sessions import Start, by_tokens, record_of, whole

QWEN = ("--model", "qwen2.5-0.5b", "--tokens-per-example", "512")
TRL = (
    "model_name_or_path: mistralai/Mistral-7B-v0.3\nper_device_train_batch_size: 1\n"
    "use_peft: true\nmax_length: 512\n"
)
WITHOUT_STUDY = {
    "gpus": [("gpus",)],
    "models": [("models",)],
    "prices": [("prices",), ("prices", "a2")],
    "spaces": [("spaces",)],
    "suites": [("suites",)],
    "plan --spec": [
        ("plan", "--spec", name) for name in ("a10-mistral-7b", "litgpt-a10g", "two-h100-8k")
    ],
    "plan": [("plan", "--gpu", "a10", *QWEN), ("plan", "--gpu", "a2", *QWEN)],
    "plan --gpu": [("plan", "--gpu", "a2")],
    "plan --gpus": [("plan", "--gpu", "a10", "--gpus", "1,2", *QWEN)],
    "compare": [
        ("compare", "--gpus", "a10,a2,h100", *QWEN, "--buy", "2000", "--max-usd", "5"),
        (
            "compare",
            "--gpus",
            "rtx-4090",
            "--owned",
            "rtx-4090",
            "--owned-usd",
            "1600",
            *QWEN,
            "--buy",
            "1600",
        ),
    ],
    "check": [("check", "trl.yaml", "--gpu", "a10"), ("check", "trl.yaml", "--gpu", "h100")],
    "doctor": [("doctor",)],
    "oom MESSAGE": [("oom", "CUDA out of memory. Tried to allocate 2.00 GiB")],
    "plan --objective grpo": [
        ("plan", "--gpu", "h100", "--model", "qwen2.5-0.5b", "--objective", "grpo"),
    ],
}
OF_STUDY = {
    "status": ("status", "one"),
    "status --nodes": ("status", "one", "--nodes"),
    "list": ("list",),
    "oom": ("oom", "one"),
    "export": ("export", "one", "--format", "recipe"),
    "report": ("report", "one"),
    "submit": ("submit", "one"),
    "delete": ("delete", "one", "--yes"),
}


def printed(*args: str) -> str:
    """What a command prints, which has the keys that it always had."""
    result = CliRunner().invoke(app, [*args, "--json"])
    assert result.stdout, result.output
    if (line := " ".join(args)) in KEYS:
        assert sorted(set(keys(json.loads(result.stdout)))) == KEYS[line]
    return result.stdout


@pytest.mark.parametrize(
    ("command", "args"), [(name, args) for name, all_ in WITHOUT_STUDY.items() for args in all_]
)
def test_what_needs_no_study(
    command: str, args: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trl.yaml").write_text(TRL)
    form_of(command).validate_json(printed(*args))


def test_what_is_of_a_study(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOTUNE_STORAGE", url := "sqlite:///autotune.db")
    session = whole(start, machine(limit_gib=2.2, rate=by_tokens), trials=8)
    start_record(
        session.search, record_of(out=Path(to_stored_directory(tmp_path / "runs" / "one", url)))
    )
    measured = next(
        row.result for row in session.store.probes_of_study("one") if row.result.measurement
    )
    session.store.add("one", None, replace(measured, rung=Rung.NODE, node="b:2:2"), FINGERPRINT)
    for command, args in OF_STUDY.items():
        form_of(command).validate_json(printed(*args))
        if command == "submit":
            form_of("import").validate_json(printed("import", "runs/one/submission.json"))


def test_a_study_without_a_winner_has_the_same_keys() -> None:
    found = summary()
    texts = [json.dumps(summary_data(one, "out")) for one in (found, replace(found, recipe=None))]
    for text in texts:
        form_of("run").validate_json(text)
    assert json.loads(texts[0]).keys() == json.loads(texts[1]).keys()


def test_what_needs_a_device() -> None:
    found = summary()
    for command, value in {
        "calibrate": to_data(calibration()),
        "explain": to_data(found.explanation),
    }.items():
        if value is not None:
            form_of(command).validate_json(json.dumps(value))
    progress = Progress(
        step=2,
        of=2,
        trained_s=1.0,
        left_s=0.0,
        spent_usd=None,
        projected_s=2.0,
        projected_usd=None,
        loss=1.5,
        slowdown=None,
    )
    training = {"study": "one", **progress.to_dict(), "wall_s": 3.0, "exit_code": 0}
    form_of("train").validate_json(json.dumps(training))
    form_of("worker").validate_json('{"study": "one", "trials": 3}')


def test_another_form_is_refused() -> None:
    rows: list[dict[str, Any]] = json.loads(printed("prices", "h100"))
    form_of("prices").validate_python(rows)
    changes: list[dict[str, Any]] = [{"usd_per_hour": "3"}, {"usd_per_day": None}, {"extra": 1}]
    for change in changes:
        with pytest.raises(ValidationError):
            form_of("prices").validate_json(json.dumps([rows[0] | change]))
    del rows[0]["age"]
    with pytest.raises(ValidationError):
        form_of("prices").validate_json(json.dumps(rows))


def test_every_command_with_json_has_a_schema() -> None:
    group = typer.main.get_command(app)
    context: Any = typer.Context(group)
    missing = []
    for name in COMMANDS:
        _, command, _ = group.resolve_command(context, [name])  # type: ignore[attr-defined]
        has_json = any("--json" in parameter.opts for parameter in command.params)
        assert has_json or name in ("dashboard", "dev", "mcp", "schema", "skill"), name
        missing += [name] if has_json and name not in ANSWERS else []
    assert missing == []


def test_schemas() -> None:
    for command in ANSWERS:
        made = schema(command)
        assert made["title"] == f"autotune {command} --json" and made["$schema"].endswith(
            "2020-12/schema"
        )
        assert json.dumps(made)
    nodes = schema("status --nodes")["$defs"]["NodeRowCost"]
    assert (
        nodes["required"] == ["cost_per_1000_samples_usd"]
        and nodes["additionalProperties"] is False
    )
    with pytest.raises(UsageError, match="did you mean"):
        schema("plann")
    result = CliRunner().invoke(app, ["schema", "prices"])
    assert json.loads(result.stdout) == schema("prices")
    assert CliRunner().invoke(app, ["schema"]).stdout.splitlines() == list(ANSWERS)


@pytest.mark.parametrize("command", SCHEMAS)
def test_the_stored_schemas_hold(command: str) -> None:
    assert differences(SCHEMAS[command], schema(command)) == []


def test_a_broken_schema_is_noticed() -> None:
    text = {"type": "string"}
    number = {"anyOf": [{"type": "number"}, {"type": "null"}]}
    stored = {
        "type": "object",
        "properties": {
            "a": text,
            "b": number,
            "c": {"type": "object", "additionalProperties": True},
            "d": {},
        },
        "required": ["a", "b", "c", "d"],
        "additionalProperties": False,
    }
    parts: dict[str, Any] = stored["properties"]  # type: ignore[assignment]
    more = {
        "a": {"type": "string", "enum": ["x"]},
        "b": {"type": "number"},
        "c": {"type": "object"},
        "d": text,
    }
    assert (
        differences(
            stored, stored | {"properties": more, "required": ["d", "c", "b", "a"], "title": "A"}
        )
        == []
    )
    for change in (
        {"properties": {name: parts[name] for name in "abc"}},
        {"properties": parts | {"e": text}},
        {"properties": parts | {"a": number}},
        {"properties": parts | {"b": {"anyOf": [*number["anyOf"], text]}}},
        {"properties": parts | {"c": text}},
        {"required": ["a", "b", "c"]},
        {"additionalProperties": True},
    ):
        assert differences(stored, stored | change)


def test_docs_list_every_schema() -> None:
    text = (Path(__file__).parents[3] / "docs" / "json.md").read_text(encoding="utf-8")
    assert [name for name in ANSWERS if f"`{name}`" not in text] == []
