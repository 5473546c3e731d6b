"""Submission: the winner and the baseline of a study in the form in which others may read them.

It holds nothing private: no path, no name but those of the catalogue and the card, no dataset, no log. pydantic holds
every value against a range, a pattern or a list, when a submission is made and when one is read. pydantic is loaded at
the top: import this module where it is used.
"""

import json
import math
import re
from datetime import date
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from autotune.catalog import list_devices, list_models, match_device
from autotune.core.errors import UsageError
from autotune.core.objective import Objective
from autotune.core.probe_types import Evidence
from autotune.core.train_config import TrainConfig, digest_of
from autotune.core.version import __version__
from autotune.study.summary import Candidate, Recipe

AGREEMENT = 0.01  # by how much tokens/s may differ from what batch and step time give, as a share

Version = Annotated[str, Field(pattern=r"^[0-9A-Za-z][0-9A-Za-z.+_-]{0,39}\z")]
Word = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}\z")]
Rate = Annotated[float, Field(ge=1e-6, le=1e9)]
Gib = Annotated[float, Field(ge=1e-3, le=1e5)]


class _Checked(BaseModel):
    """The settings of all parts: no further keys, no conversion of types, finite numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True, protected_namespaces=())


class SubmittedGpu(_Checked):
    """`name` is that of the catalogue, `product` that of the driver."""

    name: str
    product: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ()@.,_+-]{0,99}\z")]
    memory_gib: Annotated[float, Field(ge=0.1, le=1e5)]

    @model_validator(mode="after")
    def _is_in_catalogue(self) -> Self:
        device = next((device for device in list_devices() if device.name == self.name), None)
        if device is None:
            raise ValueError(f"name: {self.name!r} is not in the catalogue of GPUs")
        if device.kind != "cpu" and match_device(self.product, self.memory_gib) != device:
            raise ValueError(f"product: {self.product!r} of {self.memory_gib:g} GiB is no {self.name}")
        return self


class SubmittedModel(_Checked):
    """A model by its name in the catalogue, or else by kind, size and shape alone."""

    name: str | None
    model_type: Word
    params: Annotated[int, Field(ge=1, le=10**14)]
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{12}\z")]

    @model_validator(mode="after")
    def _has_its_shape(self) -> Self:
        if self.name is not None and (self.name, self.digest) not in {(one.name, one.digest) for one in list_models()}:
            raise ValueError(f"name: {self.name!r} of shape {self.digest} is not in the catalogue of models")
        return self


class SubmittedVersions(_Checked):
    """The versions of what measured."""

    autotune: Version
    python: Version
    driver: Version | None
    cuda: Version | None
    packages: Annotated[dict[Word, Version], Field(max_length=50)]


class SubmittedRow(_Checked):
    """One configuration and its measurement.

    Useful tokens are those of the full run that are trained on; raw tokens include padding. A row has `tokens_per_row`
    with its padding, on average; without it, `seq_len`.
    """

    config: TrainConfig
    accumulation: Annotated[int, Field(ge=1, le=2**24)]
    tokens_per_row: Annotated[float, Field(ge=1, le=2**24)] | None = None
    useful_tokens_per_s: Rate
    raw_tokens_per_s: Rate
    step_time_s: Annotated[float, Field(ge=1e-6, le=1e7)]
    peak_reserved_gib: Gib
    limit_gib: Gib
    context_gib: Annotated[float, Field(ge=0, le=1e3)] | None
    power_w: Annotated[float, Field(ge=0, le=1e5)] | None
    evidence: Evidence

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        tokens_per_row = self.tokens_per_row or self.config.seq_len
        if tokens_per_row > self.config.seq_len:
            raise ValueError("tokens_per_row: more than seq_len")
        expected = self.accumulation * self.config.micro_batch_size * tokens_per_row / self.step_time_s
        if not math.isclose(self.raw_tokens_per_s, expected, rel_tol=AGREEMENT):
            raise ValueError("raw_tokens_per_s: not what batch and step time come to")
        if self.useful_tokens_per_s > self.raw_tokens_per_s * (1 + AGREEMENT):
            raise ValueError("useful_tokens_per_s: more than all tokens")
        return self


class Submission(_Checked):
    """The file. Field names are its keys."""

    schema_version: Annotated[int, Field(ge=1, le=1)]
    date: Annotated[str, Field(pattern=r"^20[0-9]{2}-[0-9]{2}-[0-9]{2}\z")]
    gpu: SubmittedGpu
    model: SubmittedModel
    trainer: Literal["transformers", "trl"]
    global_batch: Annotated[int, Field(ge=1, le=2**24)]
    versions: SubmittedVersions
    winner: SubmittedRow
    baseline: SubmittedRow | None

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        date.fromisoformat(self.date)
        if any(row.peak_reserved_gib > self.gpu.memory_gib for row in self.rows):
            raise ValueError("peak_reserved_gib: more than the GPU's memory")
        return self

    @property
    def rows(self) -> tuple[SubmittedRow, ...]:
        """The winner, and the baseline if there is one."""
        return (self.winner,) if self.baseline is None else (self.winner, self.baseline)

    @property
    def text(self) -> str:
        """The content of the file."""
        return json.dumps(self.model_dump(mode="json"), indent=2) + "\n"

    @property
    def digest(self) -> str:
        """The same for submissions with the same content."""
        return digest_of(self.model_dump(mode="json"))


def submission_of(recipe: Recipe, measured_on: str) -> Submission:
    """The submission of a study. `measured_on` is a day, like 2026-11-22.

    Raises UsageError if the GPU is not in the catalogue, or a number is impossible.
    """
    spec, fingerprint, measurement = recipe.model, recipe.fingerprint, recipe.winner.measurement
    if recipe.device.name not in {device.name for device in list_devices()}:
        raise UsageError(
            f"{recipe.device.name} is not in the catalogue of GPUs: nobody could compare this study",
            remedy="add a row to autotune/catalog/data/gpus.yaml, and run the study again",
        )
    if recipe.workload.objective is not Objective.SFT:
        raise UsageError(f"the atlas has no studies for {recipe.workload.objective} yet", remedy="share one of sft")
    catalogued = (spec.name, spec.digest) in {(one.name, one.digest) for one in list_models()}
    adapters = measurement.trainable_params if recipe.config.method == "lora" else 0
    try:
        return Submission(
            schema_version=1,
            date=measured_on,
            gpu=SubmittedGpu(
                name=recipe.device.name,
                product=re.sub(r"[^A-Za-z0-9 ()@.,_+-]", " ", fingerprint.device).strip()[:100],
                memory_gib=fingerprint.device_memory_gib,
            ),
            model=SubmittedModel(
                name=spec.name if catalogued else None,
                model_type=spec.config["model_type"],
                params=spec.params or measurement.total_params - adapters,
                digest=spec.digest,
            ),
            trainer="trl" if recipe.trainer == "trl" else "transformers",
            global_batch=recipe.workload.global_batch,
            versions=SubmittedVersions(
                autotune=_public(__version__),
                python=_public(fingerprint.python),
                driver=fingerprint.driver,
                cuda=fingerprint.cuda,
                packages={name: _public(version) for name, version in fingerprint.packages.items()},
            ),
            winner=_row(recipe, recipe.winner),
            baseline=_row(recipe, recipe.baseline) if recipe.baseline else None,
        )
    except ValidationError as error:
        reasons = "; ".join(item["msg"].removeprefix("Value error, ") for item in error.errors())
        raise UsageError(
            f"this study cannot be submitted: {reasons}", remedy="run it again, then submit that"
        ) from None


def _row(recipe: Recipe, candidate: Candidate) -> SubmittedRow:
    config, measured, speed = candidate.config, candidate.measurement, candidate.performance
    shape = recipe.workload.run_shape(config)
    return SubmittedRow(
        config=config,
        accumulation=shape.accumulation,
        tokens_per_row=shape.tokens_per_row,
        useful_tokens_per_s=speed.tokens_per_second,
        raw_tokens_per_s=shape.tokens_per_step / speed.step_time_s,
        step_time_s=speed.step_time_s,
        peak_reserved_gib=measured.peak_reserved_gib,
        limit_gib=measured.limit_gib,
        context_gib=measured.context_gib,
        power_w=measured.telemetry.power_w if measured.telemetry else None,
        evidence=candidate.evidence,
    )


def _public(version: str) -> str:
    """The version without its local part, which may hold anything, unless that names the device of a torch build."""
    public, _, local = version.partition("+")
    return version if re.fullmatch(r"(cu|cpu|rocm|xpu)[0-9.]*", local) else public
