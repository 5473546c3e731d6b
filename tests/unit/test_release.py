"""What a release consists of: the wheel's content, the container, the citation, the changelog,
notes on upgrading.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from autotune import __version__
from autotune.core.probe_types import Fingerprint
from autotune.study.storage.study_record import SCHEMA_VERSION

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def lines(name: str) -> list[str]:
    return (ROOT / name).read_text(encoding="utf-8").splitlines()


def test_a_wheel_works_from_any_directory(tmp_path: Path) -> None:
    """The package with what pyproject.toml puts inside it, away from the checkout."""
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    targets = PROJECT["tool"]["hatch"]["build"]["targets"]
    for name in targets["wheel"]["packages"]:
        shutil.copytree(ROOT / name, site / name, ignore=shutil.ignore_patterns("__pycache__"))
    for source, inside in targets["wheel"]["force-include"].items():
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, site / inside)
        else:
            (site / inside).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / source, site / inside)
    elsewhere.mkdir()

    def autotune(*args: str) -> str:
        environment = os.environ | {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "autotune", *args]
        return subprocess.run(
            command, cwd=elsewhere, env=environment, capture_output=True, text=True, check=True
        ).stdout

    assert autotune("--version") == f"autotune {__version__}\n"
    suites = json.loads(autotune("suites", "--json"))
    assert len(suites) == len(list((ROOT / "studies" / "published").glob("*.yaml")))
    assert all(suite["file"].startswith(str(site)) for suite in suites)
    spaces = {path.stem for path in (ROOT / "search_spaces").glob("*.yaml")}
    assert set(json.loads(autotune("spaces", "--json"))) == spaces
    planned = json.loads(
        autotune("plan", "--model", "mistral-7b", "--gpu", "a10", "--space", "qlora", "--json")
    )
    assert planned["best"]["fits"] == "fits"
    assert "Published: https://" in autotune("plan", "--spec", "torchtune-llama-3.2-3b")
    pages = {path.name: path for path in (site / "autotune" / "docs").iterdir()}
    texts = [path.read_text(encoding="utf-8") for path in pages.values()]
    linked = set(re.findall(r"\]\(([^)#]+)", "".join(texts)))
    assert pages.keys() == pages_in_messages() | linked


def pages_in_messages() -> set[str]:
    """Return the pages that messages name."""
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "autotune").rglob("*.py"))
    return set(re.findall(r"document\(.([\w-]+\.md).\)", "".join(sources)))


def test_a_source_distribution_has_what_its_tests_read() -> None:
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert all(list(ROOT.glob(pattern)) for pattern in included)
    assert {
        "examples",
        "CITATION.cff",
        "Dockerfile",
        "constraints*.txt",
        "*.md",
        "studies",
        "tests",
    } <= set(included)


def test_each_licence_is_in_the_wheel() -> None:
    """The licence of a library that comes with the package is beside it."""
    vendored = [str(path.relative_to(ROOT)) for path in ROOT.glob("autotune/**/*-LICENSE")]
    assert vendored and PROJECT["project"]["license-files"] == ["LICENSE", *vendored]


def test_the_citation_is_of_this_version() -> None:
    """The keys that the Citation File Format 1.2.0 requires, and those that it knows."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    known = {"abstract", "date-released", "keywords", "license", "type", "version"}
    assert cited.keys() <= known | {"cff-version", "message", "title", "authors"}
    assert (cited["cff-version"], cited["type"]) == ("1.2.0", "software")
    assert cited["version"] == __version__ and cited["license"] == PROJECT["project"]["license"]
    assert cited["abstract"] == PROJECT["project"]["description"]
    assert cited["authors"] and all(
        author.keys() == {"name"} and author["name"] for author in cited["authors"]
    )
    assert (cited["version"], date.fromisoformat(cited["date-released"])) == releases()[0]


def releases() -> list[tuple[str, date]]:
    heads = [
        re.fullmatch(r"## (\d+\.\d+\.\d+) - (\d{4}-\d\d-\d\d)", line)
        for line in lines("CHANGELOG.md")
    ]
    return [(head[1], date.fromisoformat(head[2])) for head in heads if head]


def test_the_changelog_has_versions_and_dates() -> None:
    heads = [line for line in lines("CHANGELOG.md") if line.startswith("## ")]
    assert heads[0] == "## Unreleased" and len(heads) == 1 + len(releases())
    assert releases()[0][0] == __version__
    assert releases() == sorted(releases(), key=lambda release: release[1], reverse=True)


def test_the_container_has_the_versions_that_gpus_measured() -> None:
    pins = dict(
        line.split("==") for line in lines("constraints-gpu.txt") if not line.startswith("#")
    )
    found = []
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        fingerprint = json.loads(path.read_text())["fingerprint"]
        if fingerprint and fingerprint["device"].startswith("NVIDIA"):
            found.append(fingerprint["packages"])
    assert len(found) > 10
    for name, version in pins.items():
        measured = Counter(packages[name] for packages in found if packages.get(name))
        usual = [one for one, _ in measured.most_common(1)]
        assert usual == ([version] if name != "huggingface_hub" else [])  # which no fingerprint has


def test_the_container_is_built_as_linters_want_it() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    instructions = re.sub(
        r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    ).splitlines()
    kinds = [line.split()[0] for line in instructions if line]
    (base,) = (line.split()[1] for line in instructions if line.startswith("FROM"))
    assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-base-ubuntu\d+\.\d+", base)
    assert kinds[-1] == "CMD" and kinds.count("ENTRYPOINT") == 1 and "ADD" not in kinds
    (user,) = (line.split()[1] for line in instructions if line.startswith("USER"))
    assert user not in ("root", "0") and not user.startswith("0:")
    (packages,) = (line for line in instructions if "apt-get install" in line)
    assert (
        "--no-install-recommends" in packages
        and "rm -rf /var/lib/apt/lists" in packages
        and "apt-get update" in packages
    )
    assert "--no-cache-dir" in text and "sudo" not in text and "latest" not in text
    copied = [
        source for line in instructions if line.startswith("COPY") for source in line.split()[1:-1]
    ]
    ignored = lines(".dockerignore")
    assert "*" in ignored and all(
        (ROOT / source).exists() and f"!{source}" in ignored for source in copied
    )
    assert set(PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]) <= set(
        copied
    )


def test_constraints_of_the_container_replace_the_others(tmp_path: Path) -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (program,) = re.findall(r"awk -F== '(.*?)'", text)
    command = ["awk", "-F==", program, "constraints-gpu.txt", "constraints.txt"]
    made = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    pins = [line.split("==") for line in made if not line.startswith("#")]
    assert len({name for name, _ in pins}) == len(pins)
    expected = dict(
        line.split("==")
        for line in (*lines("constraints.txt"), *lines("constraints-gpu.txt"))
        if "#" not in line
    )
    assert dict(pins) == {name: expected[name] for name, _ in pins} and set(expected) == {
        name for name, _ in pins
    }


def test_installation_lines_name_extras_that_exist() -> None:
    first, second = [line for line in lines("README.md") if line.startswith("pip install")][:2]
    assert first.startswith("pip install -c constraints.txt -e '.[run]' && autotune run ")
    assert second == "pip install -c constraints.txt -e '.[test]' && pytest"

    pages = [ROOT / "README.md", ROOT / "Dockerfile", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    named = re.findall(r"pip install [^\n`]*?(?:autotune-llm|\.|/src)\[([\w,-]+)\]", text)
    assert {extra for one in named for extra in one.split(",")} >= {"run", "test", "data", "trl"}
    extras = PROJECT["project"]["optional-dependencies"]
    assert all(extra in extras for one in named for extra in one.split(","))


def test_notes_on_upgrading_are_of_this_version() -> None:
    text = " ".join((ROOT / "docs" / "upgrading.md").read_text(encoding="utf-8").split())
    assert f"| {SCHEMA_VERSION} | {__version__} |" in text and f"## To {__version__}" in text
    assert "probe" in Fingerprint.__dataclass_fields__ and "its `probe`" not in text
    source = (ROOT / "autotune" / "study" / "storage" / "study_record.py").read_text(
        encoding="utf-8"
    )
    for said in (
        "cannot be continued: its",
        "differs: ",
        "'an earlier'",
        "'a newer'",
        "was written by",
    ):
        assert said in source
    for said in (
        "cannot be continued: its fingerprint differs: ",
        "was written by an earlier version",
        "a newer version",
    ):
        assert said in text
