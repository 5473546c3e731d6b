"""Suites: named configurations instead of a search, with published results for comparison."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.catalog import resolve_device
from autotune.cli.commands import plan
from autotune.cli.commands.run import run_spec
from autotune.core.errors import UsageError
from autotune.core.probe_types import Evidence, Outcome
from autotune.core.train_config import TrainConfig
from autotune.planning.observations import published_observations
from autotune.planning.plan import estimate_named_configs
from autotune.problem.setup import set_up
from autotune.problem.study_spec import NamedConfig, Published, StudySpec, make_spec
from autotune.study.named_configs import cases, to_config_result
from tests.helpers.factories import measurement, oom_detail, result

ROOT = Path(__file__).parents[2]
NOWHERE = Path("nowhere")


def spec_of(*configs: NamedConfig, **more: Any) -> StudySpec:
    return StudySpec(**{"model": "mistral-7b", "gpu": "a10", "configs": configs} | more)


def task(spec: StudySpec) -> Any:
    return set_up(replace(spec, pins={}, configs=()), resolve_device(spec.gpu)).task


def read(path: Path) -> list[Any]:
    spec = make_spec(path, {})
    return list(cases(spec, task(spec)))


def test_a_suite_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "suite.yaml"
    path.write_text(
        "model: mistral-7b\ngpu: a10\npins: {checkpointing: none}\nconfigs:\n"
        "  - {name: one, knobs: {micro_batch_size: 2}, accumulation: 4, published: {tokens_per_s: 700}}\n"
        "  - {name: two, model: phi-3-mini, knobs: {checkpointing: full}, published: {outcome: oom}}\n"
    )
    spec = make_spec(path, {})
    one, two = cases(spec, task(spec))
    assert (one[1].checkpointing, one[1].micro_batch_size, one[2].workload.global_batch) == ("none", 2, 8)
    assert (two[1].checkpointing, two[2].model.short) == ("full", "Phi-3-mini-4k-instruct")
    assert (one[0].published, two[0].published) == (Published(tokens_per_s=700), Published(outcome="oom"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("configs: [{name: a, knobs: {rank: 3}}]", "a: there is no knob 'rank'"),
        ("configs: [{name: a, knobs: {precision: bf17}}]", "a: precision is one of"),
        ("configs: [{name: a}, {name: a}]", "one name stands twice"),
        ("configs: [{name: a, published: {tokens: 3}}]", "configs.0.published.tokens"),
        ("configs: [{name: a, published: {peak_gib: -3}}]", "peak_gib cannot be -3"),
        ("configs: [{name: a, published: {outcome: fine}}]", "outcome is ok or oom"),
        ("configs: [{name: a, accumulation: 0}]", "accumulation cannot be 0"),
        ('configs: [{name: "a\\nb"}]', "name cannot be"),
    ],
)
def test_invalid_suites_are_usage_errors(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "suite.yaml"
    path.write_text(f"model: mistral-7b\ngpu: a10\n{text}\n")
    with pytest.raises(UsageError, match=message):
        read(path)


def test_measured_values_are_shown_next_to_published_ones() -> None:
    spec = spec_of(
        NamedConfig(name="one", published=Published(tokens_per_s=100.0, peak_gib=2.0)), NamedConfig(name="two")
    )
    (case, config, own), (other, _, _) = cases(spec, task(spec))
    row = to_config_result(case, config, own, result(config=config, measurement=measurement()))
    assert (row.outcome, row.evidence) == (Outcome.OK, Evidence.MEASURED)
    published, ours = row.against()["tokens/s"]
    assert (published, ours) == (100.0, row.tokens_per_s)
    assert row.against()["peak GiB"] == (2.0, measurement().peak_reserved_gib)
    assert "tokens/s 100, here" in row.cells()[-1] and row.data()["published"]["peak GiB"]["theirs"] == 2.0
    out_of_memory = result(config=config, outcome=Outcome.OOM, oom=oom_detail())
    failed = to_config_result(case, config, own, out_of_memory)
    assert failed.against() == {"outcome": ("ok", "oom")} and failed.tokens_per_s is None
    assert not to_config_result(other, config, own, out_of_memory).against()


def test_formulas_estimate_the_published_suite_of_the_a10() -> None:
    """Every outcome is right and every value is within 25 %."""
    spec = make_spec(ROOT / "studies" / "a10-mistral-7b.yaml", {})
    rows = estimate_named_configs(spec, device=resolve_device("a10"), observations=published_observations())
    assert len(rows) == 6 and {row.evidence for row in rows} == {Evidence.ESTIMATED}
    for row in rows:
        assert row.case.published and row.outcome.value == row.case.published.outcome
        for theirs, ours in row.against().values():
            assert isinstance(theirs, str) or ours == pytest.approx(theirs, rel=0.25)


def test_every_shipped_suite_is_valid() -> None:
    for path in (ROOT / "studies").rglob("*.yaml"):
        if "export" in path.parts or path.name == "recipe.yaml":
            continue
        spec = make_spec(path, {})
        assert list(cases(spec, task(spec))) if spec.configs else spec.model


CHUNKS_OF_GEMMA = NamedConfig(name="chunks", model="gemma-2-2b", knobs={"loss": "chunked", "attention": "eager"})


def test_plan_estimates_a_suite(capsys: pytest.CaptureFixture[str]) -> None:
    case = NamedConfig(name="[one]", knobs={"quantization": "int8", "compile": "per_layer"})
    plan.plan(spec_of(case, NamedConfig(name="two", published=Published(peak_gb=20.0))), evidence=NOWHERE)
    text = capsys.readouterr().out
    assert (
        "[one]" in text
        and "there is no formula for int8 bases" in text
        and "[estimated]" in text
        and "whole GB 20" in text
    )
    plan.plan(spec_of(case, CHUNKS_OF_GEMMA), evidence=NOWHERE, as_json=True)
    rows = json.loads(capsys.readouterr().out)
    assert [row["outcome"] for row in rows] == ["refused", "refused"]
    assert rows[1]["reason"].startswith("chunked: the model changes its logits")


@pytest.mark.probe
def test_a_suite_is_probed_once_and_its_results_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = {"seq_len": 64, "precision": "fp32", "checkpointing": "none"}
    spec = StudySpec(
        model="demo-3m",
        gpu="cpu",
        pins=small,
        configs=(
            NamedConfig(name="one", knobs={"micro_batch_size": 1}, published=Published(tokens_per_s=1000.0)),
            NamedConfig(name="much", knobs={"micro_batch_size": 2**17}),
            CHUNKS_OF_GEMMA,
        ),
    )
    run_spec(spec, quiet=True)
    table = capsys.readouterr().out
    assert "one" in table and "tokens/s 1,000, here" in table and "oom" in table
    (folder,) = (tmp_path / "runs").glob("*suite")
    first = json.loads((folder / "suite.json").read_text())
    assert [row["outcome"] for row in first] == ["ok", "oom", "refused"] and first[0]["evidence"] == "measured"
    assert first[2]["reason"].startswith("chunked: the model changes its logits")
    assert (folder / "suite.md").read_text().count("\n") == 5
    run_spec(spec, quiet=True, as_json=True)
    again = json.loads(capsys.readouterr().out)
    assert again == first  # equal to the last digit, so that it was not probed again


def test_search_options_are_refused_for_a_suite() -> None:
    with pytest.raises(UsageError, match="configs are probed as they are"):
        run_spec(replace(spec_of(NamedConfig(name="one"), gpu="cpu"), quality=True))


def test_knobs_of_a_case_override_the_pins() -> None:
    spec = spec_of(NamedConfig(name="one", knobs={"lora_rank": 4}), pins={"lora_rank": 8, "seq_len": 512})
    ((_, config, _),) = cases(spec, task(spec))
    assert config == TrainConfig(lora_rank=4, seq_len=512)
