"""A knob that is added by one row and one field is in the space, the command line, the report and
the exports.

The row, the field and the key are those of docs/adding.md. They are added to a copy of the package,
and a fresh process looks for the knob.
"""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOOKS = """
from dataclasses import replace
from pathlib import Path

import autotune
from autotune.core.errors import UsageError
from autotune.core.knobs import KNOBS
from autotune.core.train_config import TrainConfig
from autotune.export.formats import FORMATS
from autotune.problem.search_space import SearchSpace
from autotune.report import describe, infos, oom
from autotune.report.html import render
from autotune.study.neighbours import neighbours
from tests.helpers.factories import summary

assert Path(autotune.__file__).is_relative_to(COPY), autotune.__file__

# the configuration
fast = TrainConfig(matmul_precision="high")
assert fast.digest != TrainConfig().digest and fast.as_dict()["matmul_precision"] == "high"
assert fast.label().endswith(" tf32") and TrainConfig().label().endswith("adamw_torch_fused")
try:
    TrainConfig(matmul_precision="low")
except ValueError as error:
    assert str(error) == "matmul_precision is one of highest, high, not 'low'"
else:
    raise AssertionError

# the space: from a file, searched, pinned, with neighbours
Path("own.yaml").write_text(
    "version: 1\\nknobs:\\n  matmul_precision: {values: [highest, high]}\\n  seq_len: 512\\n"
)
space = SearchSpace.load("own.yaml")
assert space.knob("matmul_precision").kind == "system" and space.size() == 2
assert space.pin("matmul_precision", "high").size() == 1
short = TrainConfig(seq_len=512)
(neighbour,) = neighbours(space, short, {short.digest})
assert space.config(neighbour) == replace(short, matmul_precision="high")
assert SearchSpace.of(matmul_precision=["highest", "high"]).size() == 2

# the report: distance, words, axis, page
study = summary()
recipe = replace(study.recipe, winner=replace(study.recipe.winner, config=fast))
both = ["highest", "high"] * len(study.trials)
trials = [replace(row, config=replace(row.config, matmul_precision=value))
          for row, value in zip(study.trials, both, strict=False)]
study = replace(study, recipe=recipe, trials=tuple(trials))
assert oom.distance(fast, TrainConfig()) == 0.5
assert "fp32 products with TF32" in describe.configuration(recipe)
assert "matmul_precision" in dict(infos.parallel(study).axes)
page = render(study, "out")
assert "fp32 products with TF32" in page and "matmul_precision" in page

# the exports: a tool that has no key for it names it
for name in ("trl", "llamafactory"):
    text = "".join(FORMATS[name](recipe).values())
    assert "matmul_precision" in text and "has no key for it" in text, name
text = "".join(FORMATS["axolotl"](recipe).values())
assert "matmul_precision" not in text and "\\ntf32: true\\n" in text
assert "matmul_precision: high" in "".join(FORMATS["recipe"](recipe).values())
"""


def documented(kind: str) -> str:
    """The example of `docs/adding.md` that is marked so, without its indentation."""
    text = (ROOT / "docs" / "adding.md").read_text()
    found = re.search(rf"^ *```\w+ {kind}\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return textwrap.dedent(found[1])


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package and one knob more."""
    folder = tmp_path_factory.mktemp("with_a_knob")
    shutil.copytree(
        ROOT / "autotune", folder / "autotune", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copytree(ROOT / "search_spaces", folder / "search_spaces")
    for name, example, anchor in (
        ("core/knobs.yaml", "knob", "\n\n- name: loader_workers\n"),
        ("core/train_config.py", "field", "\n\n    def __post_init__"),
        ("export/keys.yaml", "keys", "\n\n  schedule:\n"),
    ):
        path = folder / "autotune" / name
        source = path.read_text()
        assert source.count(anchor) == 1
        indent = {"knob": "", "field": "    ", "keys": "  "}[example]
        text = textwrap.indent(documented(example).rstrip("\n"), indent)
        path.write_text(source.replace(anchor, f"\n{text}{anchor}"))
    return folder


def run(copy: Path, *command: str) -> str:
    environment = os.environ | {
        "PYTHONPATH": f"{copy}{os.pathsep}{ROOT}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        [sys.executable, *command],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_knob_of_the_registry_is_found_everywhere(copy: Path) -> None:
    (copy / "looks.py").write_text(f"COPY = {str(copy)!r}\n{LOOKS}")
    run(copy, "looks.py")


def test_the_command_line_takes_it(copy: Path) -> None:
    planned = run(
        copy,
        "-m",
        "autotune",
        "plan",
        "--gpu",
        "h100",
        "--model",
        "mistral-7b",
        "--set",
        "matmul_precision=high",
        "--details",
    )
    assert "tf32" in planned
