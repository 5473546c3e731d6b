"""Submissions: nothing private goes out, and nothing but checked numbers comes in."""

import copy
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from autotune.api import StudyResult
from autotune.catalog import resolve_device
from autotune.cli.commands import share
from autotune.core.errors import NothingFits, UsageError
from autotune.core.probe_types import Evidence
from autotune.core.train_config import TrainConfig
from autotune.planning.observations import load_evidence, read_submission, store_submission
from autotune.planning.submission import MeasuredRow, Submission, _public_version, submission_of
from autotune.problem.study_spec import StudySpec
from autotune.study.storage.probe_store import ProbeStore
from autotune.study.summary import Recipe
from tests.helpers.factories import FINGERPRINT, result, summary
from tests.helpers.sessions import record_of

CANARY = "c4n4ry"
DAY = "2026-11-22"


def recipe_of(**names: str) -> Recipe:
    recipe = summary(**names).recipe
    assert recipe is not None
    return recipe


@pytest.fixture(scope="module")
def good() -> dict[str, Any]:
    return dict(json.loads(submission_of(recipe_of(), DAY).text))


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Any], Path]:
    def write(data: Any) -> Path:
        path = tmp_path / "theirs.json"
        path.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
        return path

    return write


# --- what goes out


def test_the_name_of_a_product_is_cut_to_a_hundred_characters() -> None:
    recipe = recipe_of()
    long = replace(recipe.fingerprint, device="A processor " + 200 * "x")
    named = replace(recipe, device=resolve_device("cpu"), fingerprint=long)
    assert len(json.loads(submission_of(named, DAY).text)["product"]) == 100


def test_a_submission_holds_what_was_measured(write: Callable[[Any], Path]) -> None:
    recipe = recipe_of()
    submission = submission_of(recipe, DAY)
    winner, baseline = read_submission(write(submission.text.encode()))
    assert (winner.device, winner.model, winner.model_digest) == (
        "h200-sxm",
        recipe.model.name,
        recipe.model.digest,
    )
    assert (
        winner.config == recipe.winner.config
        and recipe.baseline
        and baseline.config == recipe.baseline.config
    )
    assert winner.accumulation == 8 and winner.step_time_s == recipe.winner.performance.step_time_s
    assert winner.tokens_per_s == pytest.approx(32 * 1024 / recipe.winner.performance.step_time_s)
    assert winner.peak_reserved_gib == recipe.winner.measurement.peak_reserved_gib
    assert (winner.as_of, winner.evidence, winner.trainer) == (
        DAY,
        Evidence.MEASURED,
        "transformers",
    )
    assert submission.digest in winner.source
    data = json.loads(submission.text)
    assert data["versions"]["driver"] == "580.159.04" and data["versions"]["torch"] == "2.11.0"
    assert data["rows"][0]["power_w"] == 650.0 and data["rows"][0]["limit_gib"] == 132.0


def test_a_study_on_several_gpus_has_the_tokens_of_all_of_them() -> None:
    recipe = recipe_of()
    config = replace(recipe.winner.config, num_gpus=2, sharding="ddp")
    several = replace(recipe, winner=replace(recipe.winner, config=config), baseline=None)
    (row,) = submission_of(several, DAY).rows
    assert row.accumulation == 4
    assert row.raw_tokens_per_s == pytest.approx(32 * 1024 / recipe.winner.performance.step_time_s)


def private(recipe: Recipe) -> Recipe:
    """The same study with a canary wherever a user's own words can stand."""
    words = {
        "name": f"{CANARY}-model",
        "weights": f"/home/{CANARY}/model",
        "tokenizer": f"/home/{CANARY}/model",
    }
    config = recipe.model.config | {"vocab_size": 32_769}
    return replace(
        recipe,
        study=f"{CANARY}-study",
        model=replace(
            recipe.model, **words, source=CANARY, config=config, params=None, aliases=(CANARY,)
        ),
        price=replace(recipe.price, provider=CANARY, source=CANARY) if recipe.price else None,
        reason=CANARY,
        caveats=(f"/data/{CANARY}.jsonl could not be read",),
        numerics=CANARY,
        fingerprint=replace(
            FINGERPRINT,
            allocator=CANARY,
            packages={"torch": "2.11.0+cu130", "trl": f"1.16.0+{CANARY}.host"},
        ),
    )


def test_nothing_private_goes_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tables: Path
) -> None:
    """Through the command: study, model directory, dataset, database, log and report all have the
    canary.
    """
    from tests.helpers.sessions import subject_of

    database = tmp_path / f"{CANARY}.db"
    shutil.copy(tables, database)
    url = f"sqlite:///{database}"
    store = ProbeStore(url)
    probe = result(
        TrainConfig(), started_at="2026-10-31T23:59:59Z", log=f"{CANARY}.log", reason=CANARY
    )
    store.add(f"{CANARY}-study", 0, probe, FINGERPRINT)
    store.close()
    whole = summary(study=f"{CANARY}-study")
    assert whole.recipe is not None
    whole = replace(whole, recipe=private(whole.recipe), notes=(CANARY,))
    task = subject_of(study=f"{CANARY}-study")
    spec = StudySpec(model=task.model.name, dataset=f"/data/{CANARY}.jsonl")
    found = StudyResult(
        summary=whole, record=record_of(task, tmp_path / f"{CANARY}-out", spec=spec), url=url
    )
    monkeypatch.setattr("autotune.api.load_study", lambda name, storage: found)
    out = tmp_path / "out.json"
    share.submit(out=out, storage=url)
    text = out.read_text()
    assert CANARY not in text and "/" not in text and os.uname().nodename not in text
    data = json.loads(text)
    assert whole.recipe is not None
    assert (data["model"], data["model_digest"]) == (None, whole.recipe.model.digest)
    assert (data["versions"]["torch"], data["versions"]["trl"]) == ("2.11.0+cu130", "1.16.0")
    assert data["date"] == "2026-10-31"
    assert [one.model for one in read_submission(out)] == [None, None]


@pytest.mark.parametrize("change", [{"name": "gpt2"}, {"config": {"vocab_size": 5}}])
def test_only_a_model_of_the_catalogue_is_named(change: dict[str, Any]) -> None:
    """A directory may be called as a model of the catalogue is; or a model have been changed."""
    recipe = recipe_of(model="demo-3m")
    assert submission_of(recipe, DAY).model == "demo-3m"
    if "config" in change:
        change = {"config": recipe.model.config | change["config"]}
    assert submission_of(replace(recipe, model=replace(recipe.model, **change)), DAY).model is None


def test_a_projected_study_cannot_be_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = summary().recipe
    recipe = replace(made, winner=replace(made.winner, evidence=Evidence.PROJECTED))
    found = SimpleNamespace(recipe=recipe)
    monkeypatch.setattr("autotune.api.load_study", lambda name, storage: found)
    with pytest.raises(UsageError, match="no training was measured on"):
        share.submit()


def test_a_card_outside_the_catalogue_cannot_be_submitted() -> None:
    recipe = recipe_of()
    with pytest.raises(UsageError, match="h300 is not in the catalogue"):
        submission_of(replace(recipe, device=replace(recipe.device, name="h300")), DAY)
    with pytest.raises(UsageError, match="is no a10"):  # an H200 by its driver
        submission_of(replace(recipe, device=resolve_device("a10")), DAY)


def test_a_study_on_a_processor_and_without_a_baseline(write: Callable[[Any], Path]) -> None:
    recipe = replace(recipe_of(model="demo-3m"), device=resolve_device("cpu"), baseline=None)
    fingerprint = replace(
        FINGERPRINT, device="Intel(R) Xeon(R) CPU @ 2.20GHz", driver=None, cuda=None
    )
    submission = submission_of(replace(recipe, fingerprint=fingerprint), DAY)
    assert not {"driver", "cuda"} & set(submission.versions)
    (sighting,) = read_submission(write(submission.text.encode()))
    assert (sighting.device, sighting.model) == ("cpu", "demo-3m")


def test_a_study_without_a_winner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:

    found = StudyResult(summary=replace(summary(), recipe=None), record=record_of(out=tmp_path))
    monkeypatch.setattr("autotune.api.load_study", lambda name, storage: found)
    with pytest.raises(NothingFits):
        share.submit()
    assert list(tmp_path.iterdir()) == []


# --- what comes in


def changed(data: dict[str, Any], where: str, value: Any) -> dict[str, Any]:
    """A copy with another value at 'rows.0.config.dora'."""
    data = copy.deepcopy(data)
    *path, last = (int(key) if key.isdigit() else key for key in where.split("."))
    inner: Any = data
    for key in path:
        inner = inner[key]
    inner[last] = value
    return data


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("schema_version", 4),
        ("schema_version", 1),
        ("schema_version", "2"),
        ("schema_version", 2.0),
        ("schema_version", True),
        ("extra", 1),
        ("\x1b[31mred\x1b[0m", 1),
        ("date", "2026-02-30"),
        ("date", "yesterday"),
        ("date", None),
        ("trainer", "eval"),
        ("global_batch", 0),
        ("global_batch", 10**30),
        ("gpu", "../../x"),
        ("gpu", "h200"),  # an alias: one card has one name
        ("gpu", "a10g"),
        ("product", "NVIDIA H200\x1b[2J"),
        ("product", "<script>alert(1)</script>"),
        ("product", "NVIDIA A10"),
        ("memory_gib", float("nan")),
        ("memory_gib", -1),
        ("model", "../../x"),
        ("model", "openai-community/gpt2"),  # of another shape
        ("model_digest", "../../../../x"),
        ("model_digest", "x" * 12),
        ("versions.python", "3.12\n"),
        ("versions.driver", 580),
        ("versions", {"../x": "1"}),
        ("versions", {"torch": "1; rm -rf /"}),
        ("versions", {f"p{number}": "1" for number in range(55)}),
        ("winner", {}),
        ("rows", None),
        ("rows", []),
        ("rows.0", None),
        ("rows.0", []),
        ("rows.0.extra", 1),
        ("rows.0.config.extra", 1),
        ("rows.0.config.method", "qlora"),
        ("rows.0.config.micro_batch_size", True),
        ("rows.0.config.micro_batch_size", 4.0),
        ("rows.0.config.micro_batch_size", -4),
        ("rows.0.config.dora", 1),
        ("rows.0.config.lora_rank", None),
        ("rows.0.config.checkpointing", "every_0"),
        ("rows.0.accumulation", 0),
        ("rows.0.accumulation", 1),  # other than batch and step time say
        ("rows.0.step_time_s", 1e-300),
        ("rows.0.step_time_s", True),
        ("rows.0.step_time_s", "1.98"),
        ("rows.0.raw_tokens_per_s", float("inf")),
        ("rows.0.raw_tokens_per_s", 1e6),
        ("rows.0.useful_tokens_per_s", 17_000),  # of 16,549
        ("rows.0.useful_tokens_per_s", -1),
        ("rows.0.peak_reserved_gib", 0),
        ("rows.0.peak_reserved_gib", 150),  # on a card of 140
        ("rows.0.power_w", float("-inf")),
        ("rows.0.evidence", "believed"),
        ("rows.1.step_time_s", float("nan")),
    ],
)
def test_a_submission_with_one_thing_wrong(
    good: dict[str, Any], write: Callable[[Any], Path], tmp_path: Path, where: str, value: Any
) -> None:
    with pytest.raises(UsageError) as caught:
        store_submission(write(changed(good, where, value)), tmp_path / "evidence")
    assert str(caught.value).replace("\n", "").isprintable() and len(str(caught.value)) < 5000
    assert [one.name for one in tmp_path.iterdir()] == ["theirs.json"]


def deep(levels: int) -> bytes:
    return b'{"schema_version": ' + b"[" * levels + b"]" * levels + b"}"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "Invalid JSON"),
        (b"not JSON", "Invalid JSON"),
        (b"\xff\xfe\x00", "Invalid JSON"),
        (b"null", "Input should be"),
        (b"[]", "Input should be"),
        (b"1e999", "Input should be"),
        (deep(100), "schema_version"),
        (deep(400_000), "Invalid JSON"),
        (b'{"winner": ' * 80_000, "Invalid JSON"),
        (b" " * 5 * 2**20, "more than 1 MiB"),
        (b"__import__('os').system('touch pwned')", "Invalid JSON"),
        (b"!!python/object/apply:os.system ['touch pwned']", "Invalid JSON"),
        (
            json.dumps({f"key{number}": number for number in range(40_000)}).encode(),
            "Field required",
        ),
    ],
    ids=lambda value: repr(value[:20]),
)
def test_a_file_that_is_not_a_submission_is_refused(
    write: Callable[[Any], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    data: bytes,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(data)
    with pytest.raises(UsageError, match=said):
        share.import_(path)
    assert [one.name for one in tmp_path.iterdir()] == ["theirs.json"]


def test_numbers_as_they_stand_in_a_file(
    good: dict[str, Any], write: Callable[[Any], Path]
) -> None:
    text = json.dumps(good)
    whole = ('"global_batch": 32', '"schema_version": 2', '"micro_batch_size": 4')
    long = ("9" * 400, "9" * 4000, "9" * 5000, "1." + "0" * 5000 + "9")
    for key in ('"step_time_s": 1.98', '"memory_gib": 139.8', *whole):
        assert text.count(key) == 1
        for number in ("1e999", "-1e999", "NaN", "Infinity", "0x1p3", "1_0", *long):
            with pytest.raises(UsageError):
                read_submission(
                    write(text.replace(key, f"{key.partition(' ')[0]} {number}").encode())
                )


@pytest.mark.parametrize("kind", ["missing", "folder", "fifo", "device", "loop"])
def test_a_path_that_is_not_a_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.json"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "loop":
        path.symlink_to(path)
    with pytest.raises(UsageError, match="cannot read"):
        read_submission(path)


# --- files of version 1

VERSION_1 = Path(__file__).with_name("submission_1.json").read_bytes()
OLD = json.loads(VERSION_1)


def test_a_file_of_version_1_is_read(
    write: Callable[[Any], Path], good: dict[str, Any], tmp_path: Path
) -> None:
    """It is stored in the form of version 2.

    A file that an earlier version stored does not count twice.
    """
    good = changed(good, "versions.autotune", OLD["versions"]["autotune"])
    winner, _ = read_submission(write(VERSION_1))
    assert (winner.device, winner.model, winner.as_of) == (
        "h200-sxm",
        "mistralai/Mistral-7B-v0.3",
        DAY,
    )
    assert (winner.step_time_s, winner.peak_reserved_gib, winner.config.compile) == (
        1.98,
        54.366,
        "per_layer",
    )
    assert read_submission(write(VERSION_1)) == read_submission(write(good))
    kept, known = store_submission(write(VERSION_1), tmp_path / "evidence")
    assert not known and json.loads(kept.read_text()) == good
    assert store_submission(write(good), tmp_path / "evidence") == (kept, True)
    (tmp_path / "evidence" / "0123456789ab.json").write_bytes(VERSION_1)
    assert load_evidence(tmp_path / "evidence") == (read_submission(kept), ())


def test_a_file_of_version_1_without_a_baseline_a_driver_or_a_name(
    write: Callable[[Any], Path],
) -> None:
    data = changed(changed(OLD, "versions.driver", None), "versions.cuda", None)
    (row,) = read_submission(write(changed(changed(data, "model.name", None), "baseline", None)))
    assert row.model is None and row.model_digest == OLD["model"]["digest"]


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("schema_version", 2),
        ("extra", 1),
        ("date", "yesterday"),
        ("gpu", "h200-sxm"),
        ("gpu.name", "../../x"),
        ("gpu.product", "NVIDIA A10"),
        ("gpu.memory_gib", -1),
        ("gpu.extra", 1),
        ("gpu.date", "2026-11-22"),
        ("product", "NVIDIA H200"),
        ("model.extra", 1),
        ("versions.extra", "1"),
        ("model", None),
        ("model.name", "openai-community/gpt2"),
        ("model.digest", "../../../../x"),
        ("versions", []),
        ("versions.python", "3.12\n"),
        ("versions.driver", 580),
        ("versions.packages", {"../x": "1"}),
        ("versions.packages", None),
        ("versions.packages", {f"p{number}": "1" for number in range(51)}),
        ("winner", None),
        ("winner", []),
        ("winner.extra", 1),
        ("winner.config.method", "qlora"),
        ("winner.accumulation", 1),
        ("winner.peak_reserved_gib", 150),
        ("baseline", []),
        ("baseline.step_time_s", float("nan")),
    ],
)
def test_a_file_of_version_1_with_one_thing_wrong(
    write: Callable[[Any], Path], tmp_path: Path, where: str, value: Any
) -> None:
    with pytest.raises(UsageError) as caught:
        store_submission(write(changed(OLD, where, value)), tmp_path / "evidence")
    assert str(caught.value).replace("\n", "").isprintable()
    assert [one.name for one in tmp_path.iterdir()] == ["theirs.json"]


# --- what is kept


def test_importing_twice_is_reported_and_changes_nothing(
    good: dict[str, Any],
    write: Callable[[Any], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    share.import_(write(good))
    (kept,) = Path("runs/evidence").iterdir()
    first = capsys.readouterr().out
    assert str(kept) in first and "16,549 tokens/s" in first and "already" not in first
    before = kept.stat()
    share.import_(write(dict(reversed(good.items()))))  # the same, written otherwise
    assert f"{kept} was stored before" in capsys.readouterr().out
    assert kept.stat() == before and list(Path("runs/evidence").iterdir()) == [kept]
    assert len(kept.stem) == 12 and int(kept.stem, 16) >= 0
    assert load_evidence(Path("runs/evidence")) == (read_submission(kept), ())


def test_a_link_in_the_way_is_replaced_and_not_followed(
    good: dict[str, Any], write: Callable[[Any], Path], tmp_path: Path
) -> None:
    path, evidence, elsewhere = write(good), tmp_path / "evidence", tmp_path / "elsewhere"
    target, _ = store_submission(path, evidence)
    target.unlink()
    elsewhere.write_text("mine")
    target.symlink_to(elsewhere)
    assert store_submission(path, evidence) == (target, False)
    assert elsewhere.read_text() == "mine" and not target.is_symlink()
    target.write_text("{}")
    assert store_submission(path, evidence) == (target, False)
    assert len(read_submission(target)) == 2


def test_broken_evidence_is_reported_and_the_rest_is_read(
    good: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "good.json").write_text(json.dumps(good))
    (tmp_path / "again.json").write_text(json.dumps(good, indent=4))  # counts once
    (tmp_path / "other.json").write_text(json.dumps(changed(good, "date", "2026-01-01")))
    (tmp_path / "bad\x1b[2J.json").write_text("{}")
    (tmp_path / "worse.json").write_bytes(deep(100_000))
    (tmp_path / "notes.txt").write_text("{}")
    os.mkfifo(tmp_path / "pipe.json")
    sightings, problems = load_evidence(tmp_path)
    assert sorted(one.as_of or "" for one in sightings) == ["2026-01-01"] * 2 + [DAY] * 2
    assert len(problems) == 3
    for problem, name in zip(problems, ("bad?[2J.json", "pipe.json", "worse.json"), strict=True):
        assert name in problem and problem.replace("\n", "").isprintable()


def test_no_evidence(tmp_path: Path) -> None:
    assert load_evidence(tmp_path / "nowhere") == ((), ())
    (tmp_path / "file").write_text("")
    sightings, problems = load_evidence(tmp_path / "file")
    assert sightings == () and "Not a directory" in problems[0]


def test_extrapolated_rows_are_marked(good: dict[str, Any], write: Callable[[Any], Path]) -> None:
    winner, baseline = read_submission(write(changed(good, "rows.0.evidence", "extrapolated")))
    assert (winner.evidence, baseline.evidence) == (Evidence.EXTRAPOLATED, Evidence.MEASURED)


def test_the_shape_of_a_submission_is_fixed(good: dict[str, Any]) -> None:
    """What goes out is listed here: a field more is looked at before it goes."""
    assert list(good) == [
        "schema_version", "date", "gpu", "product", "memory_gib", "model", "model_digest",
        "trainer", "global_batch",
        "versions", "rows",
    ]  # fmt: skip
    assert set(good["versions"]) == {"autotune", "python", "driver", "cuda", *FINGERPRINT.packages}
    assert len(good["rows"]) == 2 and set(good["rows"][0]["config"]) == set(asdict(TrainConfig()))
    measured = {
        "accumulation",
        "tokens_per_row",
        "useful_tokens_per_s",
        "raw_tokens_per_s",
        "step_time_s",
        "peak_reserved_gib",
    }
    assert (
        set(good["rows"][0])
        == {"config", "limit_gib", "context_gib", "power_w", "evidence"} | measured
    )


def test_light_import() -> None:
    code = "import sys, autotune.planning.observations; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"torch", "optuna", "sqlalchemy", "pydantic"} & set(loaded)


def test_the_day_of_a_study_without_times(tmp_path: Path, tables: Path) -> None:
    shutil.copy(tables, tmp_path / "a.db")
    assert (
        share._measured_on("nobody", f"sqlite:///{tmp_path / 'a.db'}") == date.today().isoformat()
    )


@pytest.mark.parametrize(
    ("part", "name", "least", "most"),
    [
        (Submission, "memory_gib", 0.1, 1e5),
        (MeasuredRow, "accumulation", 1, 2**24),
        (MeasuredRow, "tokens_per_row", 1.0, 2.0**24),
        (MeasuredRow, "useful_tokens_per_s", 1e-6, 1e9),
        (MeasuredRow, "raw_tokens_per_s", 1e-6, 1e9),
        (MeasuredRow, "step_time_s", 1e-6, 1e7),
        (MeasuredRow, "peak_reserved_gib", 1e-3, 1e5),
        (MeasuredRow, "limit_gib", 1e-3, 1e5),
        (MeasuredRow, "context_gib", 0.0, 1e3),
        (MeasuredRow, "power_w", 0.0, 1e5),
        (Submission, "schema_version", 2, 3),
        (Submission, "global_batch", 1, 2**24),
    ],
)
def test_the_least_and_the_most_of_each_number(
    part: type[BaseModel], name: str, least: float, most: float
) -> None:
    field = part.model_fields[name]
    numbers: TypeAdapter[Any] = TypeAdapter(Annotated[field.annotation, "", *field.metadata])  # type: ignore[name-defined]
    assert [numbers.validate_python(value) for value in (least, most)] == [least, most]
    below, above = (
        (least - 1, most + 1)
        if isinstance(least, int)
        else (math.nextafter(least, -1), math.nextafter(most, math.inf))
    )
    for value in (below, above):
        with pytest.raises(ValidationError):
            numbers.validate_python(value)


@pytest.mark.parametrize(
    ("field", "factor", "fits"),
    [
        ("raw_tokens_per_s", 1.009, True),
        ("raw_tokens_per_s", 0.991, True),
        ("raw_tokens_per_s", 1.012, False),
        ("raw_tokens_per_s", 0.988, False),
        ("useful_tokens_per_s", 1.009, True),  # of all tokens
        ("useful_tokens_per_s", 1.011, False),
    ],
)
def test_numbers_of_a_row_agree_within_a_percent(
    good: dict[str, Any], write: Callable[[Any], Path], field: str, factor: float, fits: bool
) -> None:
    row = good["rows"][0]
    expected = (
        row["accumulation"]
        * row["config"]["micro_batch_size"]
        * row["tokens_per_row"]
        / row["step_time_s"]
    )
    data = changed(good, f"rows.0.{field}", factor * expected)
    if fits:
        assert read_submission(write(data))
    else:
        with pytest.raises(UsageError, match=field):
            read_submission(write(data))


def test_a_percent_more_useful_tokens_than_all_may_be_rounding(
    good: dict[str, Any], write: Callable[[Any], Path]
) -> None:
    most = good["rows"][0]["raw_tokens_per_s"] * (1 + 0.01)
    assert read_submission(write(changed(good, "rows.0.useful_tokens_per_s", most)))
    with pytest.raises(UsageError, match="more than raw_tokens_per_s"):
        read_submission(
            write(changed(good, "rows.0.useful_tokens_per_s", math.nextafter(most, math.inf)))
        )


def test_rows_are_no_longer_than_seq_len(
    good: dict[str, Any], write: Callable[[Any], Path]
) -> None:
    row = good["rows"][0]
    length = row["config"]["seq_len"]
    raw = row["accumulation"] * row["config"]["micro_batch_size"] * length / row["step_time_s"]
    for tokens, fits in ((length, True), (None, True), (length + 0.5, False)):
        data = changed(
            changed(good, "rows.0.tokens_per_row", tokens), "rows.0.raw_tokens_per_s", raw
        )
        if fits:
            assert read_submission(write(data))[0].tokens_per_row == tokens
        else:
            with pytest.raises(UsageError, match="tokens_per_row: more than seq_len"):
                read_submission(write(data))


def test_a_submission_has_54_versions_and_two_rows_at_most_and_is_not_changed(
    good: dict[str, Any],
) -> None:
    most = changed(good, "versions", {f"p{number}": "1" for number in range(54)})
    made = Submission.model_validate_json(json.dumps(most))
    assert len(made.versions) == 54 and len(made.rows) == 2
    with pytest.raises(ValidationError, match="rows"):
        Submission.model_validate_json(json.dumps(changed(good, "rows", 3 * good["rows"][:1])))
    with pytest.raises(ValidationError, match="frozen"):
        made.trainer = "trl"


@pytest.mark.parametrize(
    ("version", "public"),
    [
        ("2.13.0", "2.13.0"),
        ("2.13.0+cu130", "2.13.0+cu130"),
        ("2.13.0+cpu", "2.13.0+cpu"),
        ("2.13.0+rocm6.4", "2.13.0+rocm6.4"),
        ("2.13.0+of.my.employer", "2.13.0"),
        ("1.0+cu130-of-mine", "1.0"),
    ],
)
def test_only_the_build_of_a_version_is_public(version: str, public: str) -> None:
    assert _public_version(version) == public
