"""Submission: the winner and the baseline of a study as others may read them, and such files of others, checked.

Nothing of the user's is in one: no path, no name but those of the catalogue and the card, no dataset, no log. What
comes in is only ever read as numbers and short words, each held against a range or a list.
"""

import functools
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, ClassVar, Literal

from autotune import __version__
from autotune.catalog import list_devices, list_models, match_device
from autotune.catalog._data import load_data
from autotune.core.errors import UsageError
from autotune.core.files import write_atomic
from autotune.core.probe_types import Evidence, Fingerprint
from autotune.core.serialization import to_data
from autotune.core.text import printable
from autotune.core.train_config import TrainConfig, digest_of
from autotune.study.summary import Candidate, Recipe

EVIDENCE = Path("runs/evidence")  # what `autotune import` keeps, in the current directory
SCHEMA_VERSION = 1
MAX_BYTES = 2**20
STRICT: dict[str, Any] = {"extra": "forbid", "strict": True, "allow_inf_nan": False}
_PRODUCT = r"[A-Za-z0-9][A-Za-z0-9 ()@.,_+-]{0,99}"
_VERSION = r"[0-9A-Za-z][0-9A-Za-z.+_-]{0,39}"
_WORD = r"[a-z0-9][a-z0-9_.-]{0,63}"
_RANGES = {
    "accumulation": (1, 2**24),
    "useful_tokens_per_s": (1e-6, 1e9),
    "raw_tokens_per_s": (1e-6, 1e9),
    "step_time_s": (1e-6, 1e7),
    "peak_reserved_gib": (1e-3, 1e5),
    "limit_gib": (1e-3, 1e5),
    "context_gib": (0, 1e3),
    "power_w": (0, 1e5),
}
AGREE = 0.01  # by how much tokens/s may differ from what batch and step time come to


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One measurement somebody made of a configuration on a card.

    `tokens_per_s` counts whole rows, padding included: how many tokens are useful hangs on somebody's data. `model` is
    a name of the catalogue, None for another model of which the digest of its shape is known.
    """

    device: str
    model: str | None
    model_digest: str | None
    config: TrainConfig
    accumulation: int
    tokens_per_s: float
    step_time_s: float | None
    peak_reserved_gib: float | None
    source: str
    as_of: str | None
    trainer: str = "transformers"
    evidence: Evidence = Evidence.MEASURED


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedGpu:
    """`name` of the catalogue, `product` as the driver calls it."""

    __pydantic_config__: ClassVar[Any] = STRICT

    name: str
    product: str
    memory_gib: float

    def __post_init__(self) -> None:
        device = next((device for device in list_devices() if device.name == self.name), None)
        if device is None:
            raise ValueError(f"name: {self.name!r} is not in the catalogue of GPUs")
        _matches("product", self.product, _PRODUCT)
        _within("memory_gib", self.memory_gib, 0.1, 1e5)
        if device.kind != "cpu" and match_device(self.product, self.memory_gib) != device:
            raise ValueError(f"product: {self.product!r} of {self.memory_gib:g} GiB is no {self.name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedModel:
    """A model by its name in the catalogue, or else by kind, size and shape alone."""

    __pydantic_config__: ClassVar[Any] = STRICT

    name: str | None
    model_type: str
    params: int
    digest: str

    def __post_init__(self) -> None:
        _matches("model_type", self.model_type, _WORD)
        _matches("digest", self.digest, r"[0-9a-f]{12}")
        _within("params", self.params, 1, 1e14)
        if self.name is not None and (self.name, self.digest) not in {(one.name, one.digest) for one in list_models()}:
            raise ValueError(f"name: {self.name!r} of shape {self.digest} is not in the catalogue of models")


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedVersions:
    """What the numbers were measured with."""

    __pydantic_config__: ClassVar[Any] = STRICT

    autotune: str
    python: str
    driver: str | None
    cuda: str | None
    packages: dict[str, str]

    def __post_init__(self) -> None:
        if len(self.packages) > 50:
            raise ValueError("packages: more than 50")
        for name, version in self.packages.items():
            _matches("packages", name, _WORD)
            _matches("packages", version, _VERSION)
        for name in ("autotune", "python", "driver", "cuda"):
            if (version := getattr(self, name)) is not None:
                _matches(name, version, _VERSION)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedRow:
    """One configuration and what it did. Useful tokens are those of the full run that is trained on; raw ones, all."""

    __pydantic_config__: ClassVar[Any] = STRICT

    config: TrainConfig
    accumulation: int
    useful_tokens_per_s: float
    raw_tokens_per_s: float
    step_time_s: float
    peak_reserved_gib: float
    limit_gib: float
    context_gib: float | None
    power_w: float | None
    evidence: Evidence

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            if (value := getattr(self, name)) is not None:
                _within(name, value, low, high)
        come_to = _raw(self.config, self.accumulation, self.step_time_s)
        if not math.isclose(self.raw_tokens_per_s, come_to, rel_tol=AGREE):
            raise ValueError("raw_tokens_per_s: not what batch and step time come to")
        if self.useful_tokens_per_s > self.raw_tokens_per_s * (1 + AGREE):
            raise ValueError("useful_tokens_per_s: more than all tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """The file. Field names are its keys."""

    __pydantic_config__: ClassVar[Any] = STRICT

    schema_version: int
    date: str
    gpu: SubmittedGpu
    model: SubmittedModel
    trainer: Literal["transformers", "trl"]
    global_batch: int
    versions: SubmittedVersions
    winner: SubmittedRow
    baseline: SubmittedRow | None

    def __post_init__(self) -> None:
        _within("schema_version", self.schema_version, SCHEMA_VERSION, SCHEMA_VERSION)
        _matches("date", self.date, r"20[0-9]{2}-[0-9]{2}-[0-9]{2}")
        date.fromisoformat(self.date)
        _within("global_batch", self.global_batch, 1, 2**24)
        for row in self.rows:
            if row.peak_reserved_gib > self.gpu.memory_gib:
                raise ValueError("peak_reserved_gib: more than the GPU's memory")

    @property
    def rows(self) -> tuple[SubmittedRow, ...]:
        return (self.winner,) if self.baseline is None else (self.winner, self.baseline)

    @property
    def text(self) -> str:
        return json.dumps(to_data(self), indent=2) + "\n"

    @property
    def digest(self) -> str:
        return digest_of(to_data(self))

    def observations(self) -> Iterator[Observation]:
        for row in self.rows:
            yield Observation(
                device=self.gpu.name,
                model=self.model.name,
                model_digest=self.model.digest,
                config=row.config,
                accumulation=row.accumulation,
                tokens_per_s=row.raw_tokens_per_s,
                step_time_s=row.step_time_s,
                peak_reserved_gib=row.peak_reserved_gib,
                source=f"submission {self.digest}",
                as_of=self.date,
                trainer=self.trainer,
                evidence=row.evidence,
            )


@functools.cache
def published_observations() -> tuple[Observation, ...]:
    """What comes with the package: measurements that others published."""
    unknown = {"step_time_s": None, "peak_reserved_gib": None, "model_digest": None}
    return tuple(
        Observation(**unknown | row | {"config": TrainConfig(**row["config"])}) for row in load_data("sightings")
    )


def known_observations(directory: Path = EVIDENCE, say: Callable[[str], None] = print) -> tuple[Observation, ...]:
    """What was published, and what was imported into `directory`; `say` gets a warning for each unreadable file."""
    imported, problems = load_evidence(directory)
    for problem in problems:
        say(f"warning: {problem}")
    return (*published_observations(), *imported)


def submission_of(recipe: Recipe, measured_on: str) -> Submission:
    """What others may know of a study. `measured_on` is a day, like 2026-11-22.

    Raises:
        UsageError: the GPU is not in the catalogue, so that nobody could compare it, or a number cannot be.
    """
    spec, fingerprint, held = recipe.model, recipe.fingerprint, recipe.winner.measurement
    if recipe.device.name not in {device.name for device in list_devices()}:
        raise UsageError(
            f"{recipe.device.name} is not in the catalogue of GPUs: nobody could compare this study",
            remedy="add a row to autotune/catalog/data/gpus.yaml, and run the study again",
        )
    catalogued = (spec.name, spec.digest) in {(one.name, one.digest) for one in list_models()}
    adapters = held.trainable_params if recipe.winner.config.method == "lora" else 0
    try:
        return Submission(
            schema_version=SCHEMA_VERSION,
            date=measured_on,
            gpu=SubmittedGpu(
                name=recipe.device.name,
                product=re.sub(r"[^A-Za-z0-9 ()@.,_+-]", " ", fingerprint.device).strip()[:100],
                memory_gib=fingerprint.device_memory_gib,
            ),
            model=SubmittedModel(
                name=spec.name if catalogued else None,
                model_type=spec.config["model_type"],
                params=spec.params or held.total_params - adapters,
                digest=spec.digest,
            ),
            trainer="trl" if recipe.trainer == "trl" else "transformers",
            global_batch=recipe.workload.global_batch,
            versions=_versions(fingerprint),
            winner=_row(recipe, recipe.winner),
            baseline=_row(recipe, recipe.baseline) if recipe.baseline else None,
        )
    except ValueError as error:
        raise UsageError(f"this study cannot be submitted: {error}", remedy="run it again, then submit that") from None


def read_submission(path: Path) -> tuple[Observation, ...]:
    """What a file says that somebody else wrote.

    Raises:
        UsageError: unreadable, too large, or anything in it that a submission does not have.
    """
    return tuple(_load(path).observations())


def store_submission(path: Path, directory: Path) -> tuple[Path, bool]:
    """Check a file and put it into `directory`, by the digest of what it says. True: it was there before.

    Raises:
        UsageError: as `read_submission`.
        StorageError: `directory` cannot be written.
    """
    submission = _load(path)
    target = directory / f"{submission.digest}.json"  # a name of ours: nothing in the file has a say in it
    try:
        known = _load(target) == submission
    except UsageError:
        known = False
    if not known:
        write_atomic(target, submission.text)
    return target, known


def load_evidence(directory: Path) -> tuple[tuple[Observation, ...], tuple[str, ...]]:
    """What every valid file of `directory` says, each once, and what is wrong with the others. Never raises."""
    found: dict[str, Submission] = {}
    problems = []
    try:
        names = sorted(name for name in os.listdir(directory) if name.endswith(".json"))
    except FileNotFoundError:
        return (), ()
    except OSError as error:
        return (), (f"cannot read {_plain(str(directory))}: {error.strerror}",)
    for name in names:
        try:
            submission = _load(directory / name)
        except UsageError as error:
            problems.append(str(error))
        else:
            found[submission.digest] = submission
    return tuple(observed for one in found.values() for observed in one.observations()), tuple(problems)


def _load(path: Path) -> Submission:
    from pydantic import ValidationError

    shown = _plain(str(path))
    try:
        return _adapter().validate_json(_read(path))  # type: ignore[no-any-return]
    except OSError as error:
        raise UsageError(f"cannot read {shown}: {error.strerror or error}", remedy="check the path") from None
    except ValidationError as error:
        problems = []
        for item in error.errors(include_url=False, include_context=False, include_input=False)[:5]:
            where = ".".join(str(part) for part in item["loc"]) or "the file"
            problems.append(f"{shown}: {_plain(where)}: {_plain(item['msg'].removeprefix('Value error, '))}")
        raise UsageError(
            "\n".join(problems), remedy="ask for a file that `autotune submit` of this version wrote"
        ) from None


def _read(path: Path) -> bytes:
    """A regular file of no more than `MAX_BYTES`. Raises OSError; whatever waits for a writer is not waited for."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("not a regular file")
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise OSError(f"more than {MAX_BYTES >> 20} MiB, which no submission has")
    return data


@functools.cache
def _adapter() -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(Submission)


def _row(recipe: Recipe, candidate: Candidate) -> SubmittedRow:
    measured, speed = candidate.measurement, candidate.performance
    accumulation = recipe.workload.run_shape(candidate.config).accumulation
    return SubmittedRow(
        config=candidate.config,
        accumulation=accumulation,
        useful_tokens_per_s=speed.tokens_per_second,
        raw_tokens_per_s=_raw(candidate.config, accumulation, speed.step_time_s),
        step_time_s=speed.step_time_s,
        peak_reserved_gib=measured.peak_reserved_gib,
        limit_gib=measured.limit_gib,
        context_gib=measured.context_gib,
        power_w=measured.telemetry.power_w if measured.telemetry else None,
        evidence=candidate.evidence,
    )


def _raw(config: TrainConfig, accumulation: int, step_time_s: float) -> float:
    """Tokens a second, padding included."""
    return accumulation * config.tokens / step_time_s


def _versions(fingerprint: Fingerprint) -> SubmittedVersions:
    return SubmittedVersions(
        autotune=_public(__version__),
        python=_public(fingerprint.python),
        driver=fingerprint.driver,
        cuda=fingerprint.cuda,
        packages={name: _public(version) for name, version in fingerprint.packages.items()},
    )


def _public(version: str) -> str:
    """Without the local part, which a build of one's own fills as it likes; but for the device that torch is for."""
    public, _, local = version.partition("+")
    return version if re.fullmatch(r"(cu|cpu|rocm|xpu)[0-9.]*", local) else public


def _matches(name: str, text: str, pattern: str) -> None:
    if not re.fullmatch(pattern, text):
        raise ValueError(f"{name}: {text[:50]!r} cannot be one")


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        wanted = f"between {low:g} and {high:g}" if low < high else f"{low:g}"
        raise ValueError(f"{name}: {str(value)[:20]} is not {wanted}")


def _plain(text: str) -> str:
    """On one line of a terminal, whatever stood in a file."""
    return printable(text)[:300]
