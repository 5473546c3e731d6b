"""The models that one card trains, as a value: an entry for each model and method."""

from dataclasses import dataclass
from typing import ClassVar

from autotune.catalog import DeviceSpec, ModelSpec, Price, resolve_model
from autotune.core.json_view import also, keys
from autotune.core.probe_types import Evidence

METHODS = {"lora": "LoRA", "qlora": "QLoRA (nf4)", "full": "Full fine-tuning"}  # search spaces, with their titles


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What is known of one model, trained by one method, on one card; None is unknown.

    `need_gib` is the peak of `config`, the best configuration; where nothing surely fits, of the one that needs the
    least, as is `least_gib` always. With `learns_differently`, only what the floors keep for such cases fits. `problem`
    says why the model cannot be trained so, and nothing else is known. `longest_row` is the longest power of two, in
    tokens, or all that the model's positions allow, of which one row surely fits. Field names are keys of the JSON.
    """

    JSON: ClassVar = also("params")

    model: str
    method: str
    card: str
    state: str
    need_gib: float | None
    least_gib: float | None
    memory_by: str | None
    tokens_per_s: float | None = None
    interval: tuple[float, float] | None = None
    usd_per_1000: float | None = None
    config: str | None = None
    learns_differently: bool = False
    problem: str | None = None
    longest_row: int | None = None

    @property
    def params(self) -> int | None:
        """The parameters of the model."""
        return resolve_model(self.model).params


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainable:
    """The entries of each of the `models`, by `METHODS`, on one card, for samples of so many tokens (`lengths`).

    `how_sure` says where the numbers come from, `calibrated` which were calibrated. `is_guess`: no such card was
    measured.
    """

    JSON: ClassVar = keys(device="device.name", own_card="device.given", samples="lengths") | keys(
        "limit_gib", "price", "how_sure", "calibrated", "evidence", "entries"
    )
    evidence: ClassVar[Evidence] = Evidence.ESTIMATED

    device: DeviceSpec
    price: Price | None
    limit_gib: float
    lengths: str
    models: tuple[ModelSpec, ...]
    entries: tuple[Entry, ...]
    how_sure: str
    calibrated: str | None = None
    is_guess: bool = False

    def row(self, model: ModelSpec) -> list[Entry]:
        """The entries of a model, in the order of METHODS."""
        return [entry for entry in self.entries if entry.model == model.name]
