"""Defines a submission: a file that shares a study's measurements without private data.

pydantic checks each value against a range, a pattern or a list, both when a submission is written
and when it is read. This module loads pydantic, so import it inside the functions that need it.
"""

import json
import math
import re
from datetime import date
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from autotune.catalog import list_devices, list_models, match_device
from autotune.core.errors import UsageError
from autotune.core.objective import Objective
from autotune.core.probe_types import Evidence
from autotune.core.train_config import TrainConfig, digest_of
from autotune.core.version import __version__
from autotune.study.summary import Candidate, Recipe

# A submission states its raw tokens/s, and also the tokens and the time of a step. The stated
# tokens/s may differ by at most this share from the step's tokens divided by its time.
AGREEMENT = 0.01
CHECKED = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

Word = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}\z")]
Version = Annotated[str, Field(pattern=r"^[0-9A-Za-z][0-9A-Za-z.+_-]{0,39}\z")]
Count = Annotated[int, Field(ge=1, le=2**24)]
Rate = Annotated[float, Field(ge=1e-6, le=1e9)]
Gib = Annotated[float, Field(ge=1e-3, le=1e5)]


class MeasuredRow(BaseModel):
    """A configuration and its measurement.

    Raw tokens include padding, and useful tokens exclude it. `tokens_per_row` is the mean length of
    a row with padding, or None if all rows have `seq_len` tokens.
    """

    model_config = CHECKED

    config: TrainConfig
    accumulation: Count
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

        rows = self.accumulation * self.config.micro_batch_size * self.config.num_gpus
        tokens = rows * tokens_per_row
        if not math.isclose(self.raw_tokens_per_s, tokens / self.step_time_s, rel_tol=AGREEMENT):
            raise ValueError("raw_tokens_per_s: not a step's tokens divided by step_time_s")
        if self.useful_tokens_per_s > self.raw_tokens_per_s * (1 + AGREEMENT):
            raise ValueError("useful_tokens_per_s: more than raw_tokens_per_s")
        return self


class Submission(BaseModel):
    """The content of a submission's file. The names of the fields are the file's keys.

    `rows` has the measurement of the study's winner and, if the baseline was measured, also the
    baseline's measurement.

    `gpu` and `model` are names in the catalogue; `model` is None for a model outside the catalogue.
    `product` is the driver's name of the GPU.
    """

    model_config = CHECKED

    schema_version: Annotated[int, Field(ge=2, le=2)]
    date: Annotated[str, Field(pattern=r"^20[0-9]{2}-[0-9]{2}-[0-9]{2}\z")]
    gpu: str
    product: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ()@.,_+-]{0,99}\z")]
    memory_gib: Annotated[float, Field(ge=0.1, le=1e5)]
    model: str | None
    model_digest: Annotated[str, Field(pattern=r"^[0-9a-f]{12}\z")]
    trainer: Literal["transformers", "trl"]
    global_batch: Count
    versions: Annotated[dict[Word, Version], Field(max_length=54)]
    rows: Annotated[list[MeasuredRow], Field(min_length=1, max_length=2)]

    @model_validator(mode="before")
    @classmethod
    def _from_version_1(cls, data: Any) -> Any:
        """Convert a file of version 1: flatten it, and drop the type and the size of its model.

        A file of version 1 with an unknown key stays unchanged, and is later refused because of its
        version.
        """
        match data:
            case {
                "schema_version": 1,
                "gpu": {"name": gpu, "product": product, "memory_gib": memory_gib, **more_of_gpu},
                "model": {"name": model, "digest": digest, **more_of_model},
                "versions": {"packages": {**packages}, **versions},
                "winner": winner,
                "baseline": baseline,
                **facts,
            } if (
                not more_of_gpu
                and more_of_model.keys() <= {"model_type", "params"}
                and versions.keys() <= {"autotune", "python", "driver", "cuda"}
                and facts.keys() <= {"date", "trainer", "global_batch"}
            ):
                known_versions = {
                    name: version for name, version in versions.items() if version is not None
                }
                return {
                    **facts,
                    "schema_version": 2,
                    "gpu": gpu,
                    "product": product,
                    "memory_gib": memory_gib,
                    "model": model,
                    "model_digest": digest,
                    "versions": packages | known_versions,
                    "rows": [winner] if baseline is None else [winner, baseline],
                }
        return data

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        date.fromisoformat(self.date)
        device = {device.name: device for device in list_devices()}.get(self.gpu)
        if device is None:
            raise ValueError(f"gpu: {self.gpu!r} is not in the catalogue of GPUs")

        if device.kind != "cpu" and match_device(self.product, self.memory_gib) != device:
            raise ValueError(
                f"product: {self.product!r} of {self.memory_gib:g} GiB is no {self.gpu}"
            )

        if self.model is not None and not _is_catalogued(self.model, self.model_digest):
            raise ValueError(
                f"model: {self.model!r} of shape {self.model_digest} is not in the catalogue of "
                "models"
            )
        if any(row.peak_reserved_gib > self.memory_gib for row in self.rows):
            raise ValueError("peak_reserved_gib: more than the GPU's memory")
        return self

    @property
    def text(self) -> str:
        """The content of the submission's file, as text."""
        return json.dumps(self.model_dump(mode="json"), indent=2) + "\n"

    @property
    def digest(self) -> str:
        """The digest of the content."""
        return digest_of(self.model_dump(mode="json"))


def submission_of(recipe: Recipe, measured_on: str) -> Submission:
    """Return the submission of a study. `measured_on` is a day, like 2026-11-22.

    Raises UsageError if the GPU is not in the catalogue, if the study's objective is not sft, or if
    a value is out of range.
    """
    spec = recipe.model
    fingerprint = recipe.fingerprint
    if recipe.device.name not in {device.name for device in list_devices()}:
        raise UsageError(
            f"{recipe.device.name} is not in the catalogue of GPUs: other users could not compare "
            "this study",
            remedy="add a row to autotune/catalog/data/gpus.yaml, and run the study again",
        )
    if recipe.workload.objective is not Objective.SFT:
        raise UsageError(
            f"studies for {recipe.workload.objective} cannot be shared yet",
            remedy="share a study with the objective sft",
        )

    versions = {"autotune": __version__, "python": fingerprint.python, **fingerprint.packages}
    versions |= {"driver": fingerprint.driver or "", "cuda": fingerprint.cuda or ""}

    try:
        return Submission(
            schema_version=2,
            date=measured_on,
            gpu=recipe.device.name,
            product=re.sub(r"[^A-Za-z0-9 ()@.,_+-]", " ", fingerprint.device).strip()[:100],
            memory_gib=fingerprint.device_memory_gib,
            model=spec.name if _is_catalogued(spec.name, spec.digest) else None,
            model_digest=spec.digest,
            trainer="trl" if recipe.trainer == "trl" else "transformers",
            global_batch=recipe.workload.global_batch,
            versions={
                name: _public_version(version) for name, version in versions.items() if version
            },
            rows=[_row(recipe, one) for one in (recipe.winner, recipe.baseline) if one],
        )
    except ValidationError as error:
        reasons = "; ".join(item["msg"].removeprefix("Value error, ") for item in error.errors())
        raise UsageError(
            f"this study cannot be submitted: {reasons}",
            remedy="run the study again, and submit the new results",
        ) from None


def _row(recipe: Recipe, candidate: Candidate) -> MeasuredRow:
    measurement = candidate.measurement
    speed = candidate.performance
    shape = recipe.workload.run_shape(candidate.config)
    return MeasuredRow(
        config=candidate.config,
        accumulation=shape.accumulation,
        tokens_per_row=shape.tokens_per_row,
        useful_tokens_per_s=speed.tokens_per_second,
        raw_tokens_per_s=shape.tokens_per_step / speed.step_time_s,
        step_time_s=speed.step_time_s,
        peak_reserved_gib=measurement.peak_reserved_gib,
        limit_gib=measurement.limit_gib,
        context_gib=measurement.context_gib,
        power_w=measurement.telemetry.power_w if measurement.telemetry else None,
        evidence=candidate.evidence,
    )


def _is_catalogued(name: str, digest: str) -> bool:
    return (name, digest) in {(model.name, model.digest) for model in list_models()}


def _public_version(version: str) -> str:
    """Return the version without the part after "+", which may contain private text.

    The part stays if it names the device of a torch build, such as cu128.
    """
    public, _, local = version.partition("+")
    return version if re.fullmatch(r"(cu|cpu|rocm|xpu)[0-9.]*", local) else public
