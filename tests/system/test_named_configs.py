"""Suites: named configurations instead of a search, with published results for comparison."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.catalog import resolve_device
from autotune.cli.commands import plan
from autotune.cli.commands.run import run_spec
from autotune.core.errors import UsageError
from autotune.core.probe_types import Evidence, Outcome
from autotune.core.train_config import TrainConfig
from autotune.core.units import DASH
from autotune.planning.named_estimates import estimate_named_configs
from autotune.planning.observations import published_observations
from autotune.problem.setup import set_up
from autotune.problem.study_spec import NamedConfig, Published, StudySpec, make_spec, shipped_suites
from autotune.study.named_configs import agreement, cases, to_config_result
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
        "  - {name: one, knobs: {micro_batch_size: 2}, accumulation: 4, published: {tokens_per_s:"
        " 700}}\n"
        "  - {name: two, model: phi-3-mini, knobs: {checkpointing: full}, published: {outcome:"
        " oom}}\n"
    )
    spec = make_spec(path, {})
    one, two = cases(spec, task(spec))
    assert (one[1].checkpointing, one[1].micro_batch_size, one[2].workload.global_batch) == (
        "none",
        2,
        8,
    )
    assert (two[1].checkpointing, two[2].model.short) == ("full", "Phi-3-mini-4k-instruct")
    assert (one[0].published, two[0].published) == (
        Published(tokens_per_s=700),
        Published(outcome="oom"),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("configs: [{name: a, knobs: {rank: 3}}]", "a: there is no setting 'rank'"),
        ("configs: [{name: a, knobs: {precision: bf17}}]", "a: precision is one of"),
        ("configs: [{name: a}, {name: a}]", "one name occurs twice"),
        ("configs: [{name: a, published: {tokens: 3}}]", "configs.0.published.tokens"),
        ("configs: [{name: a, published: {peak_gib: -3}}]", "peak_gib cannot be -3"),
        ("configs: [{name: a, published: {process_gib: .inf}}]", "process_gib cannot be inf"),
        ('configs: [{name: a, excluded: ""}]', "excluded cannot be"),
        ('source: "a\\tb"', "source cannot be"),
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
        NamedConfig(name="one", published=Published(tokens_per_s=100.0, peak_gib=2.0)),
        NamedConfig(name="two"),
    )
    (case, config, own), (other, _, _) = cases(spec, task(spec))
    row = to_config_result(case, config, own, result(config=config, measurement=measurement()))
    assert (row.outcome, row.evidence) == (Outcome.OK, Evidence.MEASURED)
    published, ours = row.known_pairs()["tokens/s"]
    assert (published, ours) == (100.0, row.tokens_per_s)
    assert row.known_pairs()["peak GiB"] == (2.0, measurement().peak_allocated_gib)
    assert "tokens/s 100, here" in row.cells()[-1] and row.published["peak GiB"].theirs == 2.0
    out_of_memory = result(config=config, outcome=Outcome.OOM, oom=oom_detail())
    failed = to_config_result(case, config, own, out_of_memory)
    assert failed.known_pairs() == {"outcome": ("ok", "oom")} and failed.tokens_per_s is None
    assert not to_config_result(other, config, own, out_of_memory).known_pairs()


def test_the_published_suite_of_the_a10_is_not_told_its_own_results() -> None:
    """Its speeds are among the observations that come with the package.

    Outcomes are right, memory is within 10 %.
    """
    spec = make_spec(ROOT / "studies" / "published" / "a10-mistral-7b.yaml", {})
    device, seen = resolve_device("a10"), published_observations()
    rows = estimate_named_configs(spec, device=device, observations=seen)
    assert rows == estimate_named_configs(spec, device=device) and {
        row.evidence for row in rows
    } == {Evidence.ESTIMATED}
    assert [row.outcome.value for row in rows] == [
        row.case.published.outcome for row in rows if row.case.published
    ]
    (optimised,) = (row for row in rows if row.case.name == "optimised")
    theirs, ours = optimised.known_pairs()["whole GB"]
    assert isinstance(theirs, float | int) and ours == pytest.approx(theirs, rel=0.1)
    own = replace(spec, configs=tuple(replace(case, published=None) for case in spec.configs))
    told = estimate_named_configs(own, device=device, observations=seen)
    assert (
        told[0].tokens_per_s
        and rows[0].tokens_per_s
        and told[0].tokens_per_s < rows[0].tokens_per_s
    )


@pytest.mark.parametrize("name", shipped_suites())
def test_the_readme_says_how_estimates_compare(name: str) -> None:
    spec = make_spec(Path(name), {})
    results = estimate_named_configs(spec, device=resolve_device(spec.gpu), counted=True)
    compared = [row for result in results for row in result.comparison()]
    assert {row[0] for row in compared} == {case.name for case in spec.configs if case.published}
    assert all(row[-1] for row in compared if row[-2] == "outside" or row[-3] == DASH)
    said = agreement(results)
    found = re.search(
        r"(\d+) verdicts, of which (\d+) wrong and (\d+) too close to tell;"
        r"(?: (\d+) published speeds, (\d+) of them in .*?;)?"
        r" memory ([\d.]+)% off \(median\) and ([\d.]+)% at worst",
        said,
    )
    assert found is not None, said
    verdicts, wrong, close, speeds, inside, median, worst = found.groups()
    of_speeds = f"{inside} of {speeds}" if speeds else "–"
    row = (
        f"| `{name}` | {len(spec.configs)} | {verdicts}, {wrong} wrong, {close} too close to"
        f" tell | {of_speeds} |"
    )
    assert f"{row} {median} %, {worst} % |" in (ROOT / "studies" / "README.md").read_text(
        encoding="utf-8"
    )


def test_speeds_stand_once_in_the_suites() -> None:
    """`benchmarks/plan.py speed` has rows of its own, whose settings were made before anything was
    predicted.
    """
    rows = yaml.safe_load((ROOT / "benchmarks" / "data" / "published_speeds.yaml").read_text())[
        "rows"
    ]
    specs = [make_spec(path, {}) for path in shipped_suites().values()]
    listed = {
        case.published.tokens_per_s for spec in specs for case in spec.configs if case.published
    }
    assert {row["tokens_per_s"] for row in rows} <= listed


def test_every_shipped_suite_is_valid() -> None:
    for path in (ROOT / "studies").rglob("*.yaml"):
        if "export" in path.parts or path.name == "recipe.yaml":
            continue
        spec = make_spec(path, {})
        assert list(cases(spec, task(spec))) if spec.configs else spec.model


CHUNKS_OF_GEMMA = NamedConfig(
    name="chunks", model="gemma-2-2b", knobs={"loss": "chunked", "attention": "eager"}
)


def test_plan_estimates_a_suite(capsys: pytest.CaptureFixture[str]) -> None:
    case = NamedConfig(name="[one]", knobs={"quantization": "int8", "compile": "per_layer"})
    spec = spec_of(case, NamedConfig(name="two", published=Published(peak_gb=20.0)))
    plan.plan(spec, evidence=NOWHERE, details=True)
    text = capsys.readouterr().out
    assert (
        "[one]" in text
        and "there is no formula for int8 bases" in text
        and "[estimated]" in text
        and "│ two " in text
        and " whole GB " in text
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
            NamedConfig(
                name="one", knobs={"micro_batch_size": 1}, published=Published(tokens_per_s=1000.0)
            ),
            NamedConfig(name="much", knobs={"micro_batch_size": 2**17}),
            CHUNKS_OF_GEMMA,
        ),
    )
    run_spec(spec, quiet=True)
    table = capsys.readouterr().out
    assert "one" in table and "tokens/s 1,000, here" in table and "does not fit" in table
    (folder,) = (tmp_path / "runs").glob("*suite")
    first = json.loads((folder / "suite.json").read_text())
    assert [row["outcome"] for row in first] == ["ok", "oom", "refused"] and first[0][
        "evidence"
    ] == "measured"
    assert first[2]["reason"].startswith("chunked: the model changes its logits")
    assert (folder / "suite.md").read_text().count("\n") == 5
    run_spec(spec, quiet=True, as_json=True)
    again = json.loads(capsys.readouterr().out)
    assert again == first  # equal to the last digit, so that it was not probed again


def test_search_options_are_refused_for_a_suite() -> None:
    with pytest.raises(UsageError, match="are probed unchanged"):
        run_spec(replace(spec_of(NamedConfig(name="one"), gpu="cpu"), quality=True))


def test_knobs_of_a_case_override_the_pins() -> None:
    spec = spec_of(
        NamedConfig(name="one", knobs={"lora_rank": 4}), pins={"lora_rank": 8, "seq_len": 512}
    )
    ((_, config, _),) = cases(spec, task(spec))
    assert config == TrainConfig(lora_rank=4, seq_len=512)
