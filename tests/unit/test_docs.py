"""The documents: links and anchors lead somewhere, errors find their place, and what is shown as an
example works.
"""

import ast
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.catalog import prices
from autotune.catalog.devices import _device
from autotune.catalog.models import ModelSpec
from autotune.core import errors
from autotune.core.errors import AutotuneError
from autotune.core.files import load_data
from autotune.core.knobs import KNOBS
from autotune.core.probe_types import Evidence
from autotune.core.train_config import TrainConfig
from autotune.report.html import draw
from tests.helpers.factories import summary

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CHANGELOG.md", "studies/README.md", "examples/README.md")
DOCUMENTS = sorted([*(ROOT / name for name in PAGES), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def prose(path: Path) -> str:
    """Without what is shown as code."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def anchors(path: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for link in LINK.findall(prose(path)):
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert not link.startswith("http") and target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_image_is_shown_and_small() -> None:
    images = set((ROOT / "docs" / "images").iterdir())
    linked = {
        (path.parent / link).resolve()
        for path in DOCUMENTS
        for link in LINK.findall(prose(path))
        if "images/" in link
    }
    assert images == linked
    assert all(image.stat().st_size < 300_000 for image in images)


def test_each_promise_of_safety_names_its_tests() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    named = [re.findall(r"`([^`]+)`", row.rstrip("| ").rpartition(" | ")[2]) for row in rows]
    assert len(named) >= 17 and all(named)

    files = [ROOT / "tests" / name for names in named for name in names]
    paths = re.findall(r"`((?:tests|benchmarks|autotune)/[\w/]+\.py)`", text)
    files += [ROOT / path for path in paths]
    assert [file for file in files if not file.is_file()] == []


def test_the_readme_has_the_numbers_of_the_stored_studies() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = [
        re.findall(r"[\d,.]+", row) for row in re.findall(r"\| [\d*,]+ \| .*(?= \|$)", text, re.M)
    ]
    studies = [
        json.loads((ROOT / "studies" / name / "summary.json").read_text(encoding="utf-8"))
        for name in ("h200-mistral-7b", "h200-mistral-7b-qlora", "h200-mistral-7b-full")
    ]
    prices = [study["winner"]["cost"]["usd_per_hour"] for study in studies]
    words = " ".join(text.split())
    assert f"for a price of ${prices[0]} an hour" in words
    assert len(set(prices)) == 1

    stored = []
    for study in studies:
        for key in ("baseline", "winner"):
            one = study[key]
            minutes = 60 * one["cost"]["full_run_hours"]
            stored.append(
                [
                    f"{one['performance']['tokens_per_second']:,.0f}",
                    f"{one['memory']['peak_reserved_gib']:.1f}",
                    f"{minutes:.1f}",
                    f"{prices[0] * one['cost']['full_run_hours']:.2f}",
                ]
            )
    assert [row for row in rows if len(row) == 4] == stored


def test_errors_find_their_place() -> None:
    kinds = [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, AutotuneError)
    ]
    explained = {kind.explained for kind in kinds if kind.explained}
    assert len(explained) == 7 and explained <= anchors(ROOT / "docs" / "errors.md")
    codes = {
        int(code)
        for code in re.findall(r"^\| ([\d, ]+) \|", prose(ROOT / "docs" / "errors.md"), re.M)
        if "," not in code
    }
    assert {kind.exit_code for kind in kinds} - {130} <= codes


def test_an_error_is_a_statement() -> None:
    """A question leaves the user without what happened.

    Hints such as "did you mean 'a10'?" may end a statement.
    """
    questions = [
        f"{path.name}:{node.lineno}"
        for path in (ROOT / "autotune").rglob("*.py")
        if '?"' in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args
        if ast.unparse(node.exc.args[0]).rstrip("'\"").endswith("?")
    ]
    assert questions == []


def test_every_label_is_explained() -> None:
    for name in ("evidence.md", "reading-the-report.md"):
        assert all(kind.value in prose(ROOT / "docs" / name) for kind in Evidence)


def test_the_glossary_has_the_terms_of_the_reports() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    terms = load_data("autotune.report", "terms")
    assert [name for name in terms if f"\n| {name} | {terms[name]} |" not in page] == []


def test_the_glossary_reads_a_label_of_a_configuration() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    config = TrainConfig(
        lora_rank=64,
        quantization="nf4",
        checkpointing="every_2",
        compile="per_layer",
        loss="chunked",
        padding="bucket",
    )
    shown = re.findall(r"^```\n(.*?)\n```", page, re.M)
    assert shown == [config.label()]


def example(kind: str) -> str:
    """The example of `docs/adding.md` that is marked so."""
    found = re.search(
        rf"^```\w+ {kind}\n(.*?)^```", (ROOT / "docs" / "adding.md").read_text(), re.M | re.DOTALL
    )
    assert found is not None
    return found[1]


def test_the_gpu_can_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = yaml.safe_load(example("gpus"))
    device = _device(row)
    assert (
        device.supports_bf16
        and device.supports_fp8
        and device.memory_gib == pytest.approx(23.8, abs=0.1)
    )
    (price,) = yaml.safe_load(example("prices"))
    assert prices._single_gpu_price(price).device == device.name


def test_the_model_can_be_added() -> None:
    (row,) = yaml.safe_load(example("models"))
    spec = ModelSpec(**row | {"aliases": tuple(row["aliases"])})
    assert spec.params == _count(spec.config)
    assert spec.flops_per_token("lora", 1024)


def _count(config: dict[str, Any]) -> int:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_exporter_can_be_added() -> None:
    names: dict[str, Any] = {}
    exec(example("exporter"), names)
    recipe = summary().recipe
    (name, text), *none = names["export"](recipe).items()
    assert name == "winner.env" and not none
    assert all(
        f"\n{knob.upper()}=" in text for knob in KNOBS if knob in recipe.winner.config.as_dict()
    )


def test_the_sections_of_the_report_are_all_reported() -> None:
    reported = prose(ROOT / "docs" / "reading-the-report.md")
    page = (ROOT / "autotune" / "report" / "templates" / "report.html.j2").read_text()
    heads = [
        head
        for head in re.findall(r"<h2>(.*?)</h2>", page)
        if head != "How to read the evidence labels"
    ]
    assert len(heads) > 15 and len(draw(summary())) > 5
    for head in heads:
        known = head.split(", checked against")[0]
        assert known in reported, head
