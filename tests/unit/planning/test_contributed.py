"""Measurements of other users: the files of the package, folders of files, and calibrations."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from autotune.catalog import resolve_device
from autotune.cli.app import app
from autotune.core.errors import UsageError
from autotune.core.probe_types import CollectiveRates
from autotune.planning.observations import CONTRIBUTED, load_evidence, published_observations
from autotune.planning.submission import Submission, calibration_submission, submission_of
from autotune.problem.calibration import read_calibration
from tests.helpers.factories import calibration, summary

DAY = "2026-11-22"
CANARY = "c4n4ry"


def study_text(rank: int) -> str:
    """The submission of a study whose winner has this rank."""
    recipe = summary().recipe
    assert recipe is not None
    config = replace(recipe.winner.config, lora_rank=rank)
    return submission_of(replace(recipe, winner=replace(recipe.winner, config=config)), DAY).text


def imported(*words: str) -> Any:
    return CliRunner().invoke(app, ["import", *words])


def test_every_file_of_the_package_is_a_valid_submission() -> None:
    found, problems = load_evidence(CONTRIBUTED)
    assert problems == ()
    assert set(found) <= set(published_observations())


def test_a_file_of_the_package_counts_in_estimates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.json").write_text(study_text(8))
    monkeypatch.setattr("autotune.planning.observations.CONTRIBUTED", tmp_path)
    before = len(published_observations())
    published_observations.cache_clear()
    try:
        assert len(published_observations()) == before + 2
    finally:
        monkeypatch.undo()
        published_observations.cache_clear()


def test_a_folder_of_files_is_imported_at_once(tmp_path: Path) -> None:
    folder, evidence = tmp_path / "theirs", tmp_path / "evidence"
    folder.mkdir()
    for rank in (8, 16, 32):
        (folder / f"{rank}.json").write_text(study_text(rank))
    (folder / "notes.txt").write_text("no submission")
    done = imported(str(folder), "--evidence", str(evidence))
    assert done.exit_code == 0 and len(list(evidence.glob("*.json"))) == 3
    assert done.stdout.count("h200-sxm  ") == 6
    data = json.loads(imported(str(folder), "--evidence", str(evidence), "--json").stdout)
    assert data["file"] == str(evidence) and data["was_known"] is True and len(data["rows"]) == 6


def test_an_invalid_file_of_a_folder_is_named_and_the_others_are_kept(tmp_path: Path) -> None:
    evidence = tmp_path / "evidence"
    (tmp_path / "good.json").write_text(study_text(8))
    (tmp_path / "bad.json").write_text(study_text(8).replace('"raw_tokens', '"raw_token'))
    done = imported(str(tmp_path), "--evidence", str(evidence))
    assert isinstance(done.exception, UsageError) and "bad.json" in str(done.exception)
    assert "good.json" not in str(done.exception) and done.exception.remedy
    assert len(list(evidence.glob("*.json"))) == 1


def test_a_folder_without_files_is_an_error(tmp_path: Path) -> None:
    done = imported(str(tmp_path), "--evidence", str(tmp_path / "evidence"))
    assert isinstance(done.exception, UsageError) and "no .json file" in str(done.exception)


def shared_calibration(**changes: Any) -> Submission:
    mine = calibration("t4")
    fingerprint = replace(mine.fingerprint, device="Tesla T4", device_memory_gib=14.6)
    return calibration_submission(replace(mine, fingerprint=fingerprint, **changes))


def test_a_shared_calibration_is_one_for_estimates(tmp_path: Path) -> None:
    mine = calibration("t4")
    links = (CollectiveRates(num_gpus=2, gather_gb_s=9.0, scatter_gb_s=8.0, reduce_gb_s=7.0),)
    path = tmp_path / "theirs.json"
    path.write_text(shared_calibration(collectives=links).text)
    done = imported(str(path), "--evidence", str(tmp_path / "evidence"))
    assert done.exit_code == 0, done.output
    (stored,) = (tmp_path / "evidence" / "calibrations").iterdir()
    assert f"--calibration {stored}" in done.stdout
    theirs = read_calibration(stored)
    assert (theirs.device, theirs.rates, theirs.layer_ms) == ("t4", mine.rates, mine.layer_ms)
    assert theirs.measures_gpu and theirs.day == mine.day and theirs.collectives == links
    assert load_evidence(tmp_path / "evidence") == ((), ())


def test_a_shared_calibration_has_nothing_private() -> None:
    text = shared_calibration(
        place=f"/home/{CANARY}/mine.json", processor="AMD EPYC/9654\x1b[0m"
    ).text
    data = json.loads(text)
    assert CANARY not in text and "/" not in text and "\x1b" not in text
    assert data["schema_version"] == 3 and data["rows"] == [] and data["model"] is None
    assert data["calibration"]["processor"] == "AMD EPYC 9654 0m"


@pytest.mark.parametrize(
    ("key", "value"),
    [("layer_ms", 0.0), ("cores", 1e12), ("reference", -1.0), ("processor", "<script>")],
)
def test_an_implausible_calibration_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    data = json.loads(shared_calibration().text)
    data["calibration"][key] = value
    (tmp_path / "theirs.json").write_text(json.dumps(data))
    done = imported(str(tmp_path / "theirs.json"), "--evidence", str(tmp_path / "evidence"))
    assert isinstance(done.exception, UsageError) and not (tmp_path / "evidence").exists()


def test_a_file_has_either_rows_or_a_calibration(tmp_path: Path) -> None:
    both = json.loads(study_text(8)) | {"schema_version": 3}
    both["calibration"] = json.loads(shared_calibration().text)["calibration"]
    neither = json.loads(shared_calibration().text) | {"calibration": None}
    for data in (both, neither):
        (tmp_path / "theirs.json").write_text(json.dumps(data))
        done = imported(str(tmp_path / "theirs.json"), "--evidence", str(tmp_path / "evidence"))
        assert isinstance(done.exception, UsageError) and "rows: " in str(done.exception)


def test_a_card_outside_the_catalogue_cannot_be_shared() -> None:
    mine = replace(calibration("t4"), device="h300")
    with pytest.raises(UsageError, match="h300 is not in the catalogue"):
        calibration_submission(mine)
    assert resolve_device("t4").compute_capability == "7.5"
