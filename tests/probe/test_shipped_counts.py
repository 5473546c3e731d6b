"""The counts in the package answer default plans of the catalogue's models without a process, as
counted anew.
"""

import gzip
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.catalog import list_models, resolve_device, resolve_model
from autotune.catalog.model_sizes import Sizes
from autotune.core.errors import UsageError
from autotune.core.other_trainer import USUAL, OtherTrainer
from autotune.core.probe_types import ProbeRequest
from autotune.core.serialization import from_data, to_data
from autotune.dry import prober as dry_prober
from autotune.dry.prober import DRY_VERSION, DryAnswer, DryProber, key_of, shipped_answers
from autotune.planning import counted_memory
from autotune.planning.device_estimate import limit_of
from autotune.planning.plan import plan_setup, planned_setup
from autotune.problem.search_space import SearchSpace
from autotune.problem.study_spec import StudySpec

pytestmark = pytest.mark.probe

REMEDY = "python benchmarks/shipped_counts.py"  # writes the file anew
STORED = json.loads(
    gzip.decompress(Path(dry_prober.__file__).with_name(dry_prober.SHIPPED).read_bytes())
)
SPACES = {name: SearchSpace.load(name) for name in ("default", "lora", "qlora", "full")}


class Asked(DryProber):
    """Remembers what it was asked."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.requests: list[ProbeRequest] = []

    def count(self, request: ProbeRequest, other: OtherTrainer = USUAL) -> DryAnswer:
        self.requests.append(request)
        return super().count(request, other)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """A prober with an empty cache that cannot start a process."""

    def start() -> None:
        raise AssertionError(f"not shipped: {REMEDY}")

    prober = Asked(tmp_path)
    monkeypatch.setattr(counted_memory, "_prober", lambda: prober)
    monkeypatch.setattr(dry_prober, "_start", start)
    return prober


def plan_default(model: str, space: str, card: str) -> None:
    device = resolve_device(card)
    spec = StudySpec(model=model, gpu=device.name, space=SPACES[space])
    # where nothing can be counted or the card can do nothing of the space
    with suppress(UsageError):
        plan_setup(planned_setup(spec, device), limit_of(spec, device), counted=True)


def test_the_file_is_of_this_version_of_dry_probes() -> None:
    path = Path(dry_prober.__file__).with_name(dry_prober.SHIPPED)
    assert STORED["dry_version"] == DRY_VERSION, REMEDY
    assert STORED["command"].startswith(REMEDY) and path.stat().st_size < 2**20
    without_formula = {model.name for model in list_models() if Sizes.of(model) is None}
    assert len(STORED["models"]) >= 43 and set(STORED["models"]) <= without_formula


@pytest.mark.parametrize("card", ["rtx-4090", "h200-sxm", "t4"])
def test_a_default_plan_starts_no_process(asked: Asked, card: str) -> None:
    for model in STORED["models"]:
        for space in SPACES:
            plan_default(model, space, card)
    assert {request.model["model_type"] for request in asked.requests} >= {
        "gpt2",
        "mixtral",
        "qwen3_moe",
        "gpt_oss",
    }
    assert not list(asked._directory.iterdir()), "what is shipped is not kept twice"


@pytest.mark.parametrize(
    ("model", "space", "card"),
    [
        ("gpt2", "lora", "rtx-4090"),
        ("pythia-410m", "full", "t4"),
        ("qwen3-30b-a3b", "qlora", "h200-sxm"),
    ],
)
def test_a_count_made_now_is_the_shipped_one(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, model: str, space: str, card: str
) -> None:
    plan_default(model, space, card)
    request = asked.requests[-1]
    assert request.model == resolve_model(model).config
    monkeypatch.undo()
    with DryProber(asked._directory, shipped=False) as prober:
        now, shipped = (
            prober.count(request),
            from_data(DryAnswer, shipped_answers()[key_of(request)]),
        )
    assert now.count is not None
    assert numbers(to_data(shipped)) == pytest.approx(numbers(to_data(now)), rel=0.005), REMEDY


def numbers(data: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of an answer by their path."""
    found: dict[str, float] = {}
    for name, value in data.items():
        if isinstance(value, dict):
            found |= numbers(value, f"{prefix}{name}.")
        elif value is not None:
            found[f"{prefix}{name}"] = value
    return found


@pytest.mark.parametrize(
    ("installed", "are_used"), [("5.17.0", False), ("5.23.1", True), ("6.0.0.dev0", True)]
)
def test_an_older_transformers_counts_anew(
    monkeypatch: pytest.MonkeyPatch, installed: str, *, are_used: bool
) -> None:
    shipped_answers.cache_clear()
    monkeypatch.setattr(dry_prober.metadata, "version", lambda name: installed)
    assert bool(shipped_answers()) is are_used
    shipped_answers.cache_clear()


def test_without_transformers_the_shipped_answers_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise dry_prober.metadata.PackageNotFoundError(name)

    shipped_answers.cache_clear()
    monkeypatch.setattr(dry_prober.metadata, "version", absent)
    assert shipped_answers()
    shipped_answers.cache_clear()


def test_another_shape_or_version_is_counted(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_default("gpt2", "lora", "rtx-4090")
    request = asked.requests[-1]
    with pytest.raises(AssertionError, match="not shipped"):
        asked.count(replace(request, model=request.model | {"n_layer": 24}))
    monkeypatch.setattr(dry_prober, "DRY_VERSION", DRY_VERSION + 1)
    with pytest.raises(AssertionError, match="not shipped"):
        asked.count(request)
