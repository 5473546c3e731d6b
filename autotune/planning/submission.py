"""Defines a submission: a file that shares measurements without private data.

A study, a run of another trainer (`api/trainer_callback`) and a calibration become such a file.

pydantic checks each value against a range, a pattern or a list, both when a submission is written
and when it is read. This module loads pydantic, so import it inside the functions that need it.
"""

import json
import math
import re
from collections.abc import Sequence
from datetime import date
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from autotune.catalog import ModelSpec, list_devices, list_models, match_device, resolve_device
from autotune.core.errors import UsageError
from autotune.core.objective import Objective
from autotune.core.probe_types import CollectiveRates, DeviceRates, Evidence, Fingerprint
from autotune.core.train_config import TrainConfig, digest_of
from autotune.core.version import __version__
from autotune.problem.calibration import Calibration
from autotune.study.summary import Candidate, Recipe

# A submission states its raw tokens/s, and also the tokens and the time of a step. The stated
# tokens/s may differ by at most this share from the step's tokens divided by its time.
AGREEMENT = 0.01
RATES = ("products", "copy_gb_s", "link_gb_s", "launch_us")  # the fields of DeviceRates
CHECKED = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

Word = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}\z")]
Version = Annotated[str, Field(pattern=r"^[0-9A-Za-z][0-9A-Za-z.+_-]{0,39}\z")]
Count = Annotated[int, Field(ge=1, le=2**24)]
Side = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,8}\z")]  # a number, as a key of JSON
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
    peak_reserved_gib: Gib | None
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


class SharedCalibration(BaseModel):
    """The rates of a machine, without its driver and versions, which the submission has.

    The fields have the meaning of those of `Calibration` and of its rates.
    """

    model_config = CHECKED

    products: dict[Word, dict[Side, float]]
    copy_gb_s: float
    link_gb_s: float | None
    launch_us: float
    layer_ms: float
    reference: float | None
    processor: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ()@.,_+-]{0,99}\z")]
    cores: float
    memory_gib: float
    disk_mb_s: float | None
    collectives: list[CollectiveRates] = []


class Submission(BaseModel):
    """The content of a submission's file. The names of the fields are the file's keys.

    `rows` has the measurement of a run, or of a study's winner and, if it was measured, of the
    baseline. A file with a calibration instead has no rows, no model, no trainer and no batch. In
    version 3 of the file, `calibration` and the trainer Axolotl are new, and the peak of a run on a
    CPU may be unknown.

    `gpu` and `model` are names in the catalogue; `model` is None for a model outside the catalogue.
    `product` is the driver's name of the GPU.
    """

    model_config = CHECKED

    schema_version: Annotated[int, Field(ge=2, le=3)]
    date: Annotated[str, Field(pattern=r"^20[0-9]{2}-[0-9]{2}-[0-9]{2}\z")]
    gpu: str
    product: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ()@.,_+-]{0,99}\z")]
    memory_gib: Annotated[float, Field(ge=0.1, le=1e5)]
    model: str | None
    model_digest: Annotated[str, Field(pattern=r"^[0-9a-f]{12}\z")] | None
    trainer: Literal["transformers", "trl", "axolotl"] | None
    global_batch: Count | None
    versions: Annotated[dict[Word, Version], Field(max_length=54)]
    rows: Annotated[list[MeasuredRow], Field(max_length=2)]
    calibration: SharedCalibration | None = None

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

        about_runs = (self.model_digest, self.trainer, self.global_batch)
        if self.rows and (self.calibration is not None or None in about_runs):
            raise ValueError("rows: need a model, a trainer and a batch, and no calibration")
        if not self.rows and (self.calibration is None or about_runs != (None, None, None)):
            raise ValueError("rows: empty, but the file is no calibration alone")

        if self.model is not None and not _is_catalogued(self.model, self.model_digest or ""):
            raise ValueError(
                f"model: {self.model!r} of shape {self.model_digest} is not in the catalogue of "
                "models"
            )
        if any((row.peak_reserved_gib or 0.0) > self.memory_gib for row in self.rows):
            raise ValueError("peak_reserved_gib: more than the GPU's memory")
        self.to_calibration()  # it refuses implausible numbers
        return self

    def to_calibration(self) -> Calibration | None:
        """Return the machine's calibration, or None if the file has none."""
        if self.calibration is None:
            return None
        versions = dict(self.versions)
        fingerprint = Fingerprint(
            device=self.product,
            compute_capability=resolve_device(self.gpu).compute_capability,
            device_memory_gib=self.memory_gib,
            driver=versions.pop("driver", None),
            cuda=versions.pop("cuda", None),
            python=versions.pop("python", ""),
            packages=versions,
            allocator="",
        )
        shared = {name: getattr(self.calibration, name) for name in SharedCalibration.model_fields}
        shared["collectives"] = tuple(shared["collectives"])
        rates = {name: shared.pop(name) for name in RATES}
        rates["products"] = {
            dtype: {int(side): rate for side, rate in by_side.items()}
            for dtype, by_side in rates["products"].items()
        }
        return Calibration(
            device=self.gpu,
            fingerprint=fingerprint,
            rates=DeviceRates(**rates),
            day=date.fromisoformat(self.date),
            **shared,
        )

    @property
    def text(self) -> str:
        """The content of the submission's file, as text."""
        return json.dumps(self._data, indent=2) + "\n"

    @property
    def digest(self) -> str:
        """The digest of the content."""
        return digest_of(self._data)

    @property
    def _data(self) -> dict[str, Any]:
        """The keys of the file. Version 2 has no key for a calibration."""
        version_2 = {"calibration"} if self.schema_version == 2 else None
        return self.model_dump(mode="json", exclude=version_2)


def submission_of(recipe: Recipe, measured_on: str) -> Submission:
    """Return the submission of a study. `measured_on` is a day, like 2026-11-22.

    Raises UsageError if the study's objective is not sft, and in the cases of `make_submission`.
    """
    if recipe.workload.objective is not Objective.SFT:
        raise UsageError(
            f"studies for {recipe.workload.objective} cannot be shared yet",
            remedy="share a study with the objective sft",
        )
    return make_submission(
        recipe.fingerprint,
        recipe.device.name,
        measured_on,
        schema_version=2,
        model=recipe.model,
        trainer="trl" if recipe.trainer == "trl" else "transformers",
        global_batch=recipe.workload.global_batch,
        rows=[_row(recipe, one) for one in (recipe.winner, recipe.baseline) if one],
    )


def calibration_submission(calibration: Calibration) -> Submission:
    """Return the submission of a calibration, without the name of its file.

    Raises UsageError in the cases of `make_submission`.
    """
    rates = calibration.rates
    shared = {
        name: getattr(rates if name in RATES else calibration, name)
        for name in SharedCalibration.model_fields
    }
    shared |= {"collectives": list(calibration.collectives)}
    shared["processor"] = _public_product(calibration.processor)
    shared["products"] = {
        dtype: {str(side): rate for side, rate in by_side.items()}
        for dtype, by_side in rates.products.items()
    }
    return make_submission(
        calibration.fingerprint,
        calibration.device,
        calibration.day.isoformat(),
        calibration=SharedCalibration(**shared),
    )


def make_submission(
    fingerprint: Fingerprint,
    device: str,
    measured_on: str,
    *,
    schema_version: int = 3,
    model: ModelSpec | None = None,
    rows: Sequence[MeasuredRow] = (),
    **details: Any,
) -> Submission:
    """Return a submission of what was measured on this machine, without private names.

    Raises UsageError if the GPU is not in the catalogue, or if a value is out of range.
    """
    if device not in {known.name for known in list_devices()}:
        raise UsageError(
            f"{device} is not in the catalogue of GPUs: other users could not compare this",
            remedy="add a row to autotune/catalog/data/gpus.yaml, and measure again",
        )

    versions = {"autotune": __version__, "python": fingerprint.python, **fingerprint.packages}
    versions |= {"driver": fingerprint.driver or "", "cuda": fingerprint.cuda or ""}
    known_name = model is not None and _is_catalogued(model.name, model.digest)
    unknown = {"trainer": None, "global_batch": None}

    try:
        return Submission(
            schema_version=schema_version,
            date=measured_on,
            gpu=device,
            product=_public_product(fingerprint.device),
            memory_gib=fingerprint.device_memory_gib,
            model=model.name if model is not None and known_name else None,
            model_digest=model.digest if model is not None else None,
            versions={
                name: _public_version(version) for name, version in versions.items() if version
            },
            rows=list(rows),
            **unknown | details,
        )
    except ValidationError as error:
        reasons = "; ".join(item["msg"].removeprefix("Value error, ") for item in error.errors())
        raise UsageError(
            f"this cannot be submitted: {reasons}",
            remedy="measure again, and submit the new results",
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


def _public_product(name: str) -> str:
    """Return the name of a GPU or a processor, with plain characters only."""
    return re.sub(r"[^A-Za-z0-9 ()@.,_+-]+", " ", name).strip()[:100]


def _public_version(version: str) -> str:
    """Return the version without the part after "+", which may contain private text.

    The part stays if it names the device of a torch build, such as cu128.
    """
    public, _, local = version.partition("+")
    return version if re.fullmatch(r"(cu|cpu|rocm|xpu)[0-9.]*", local) else public
