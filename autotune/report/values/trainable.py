"""The models that one card can train: an entry for each model and method."""

from dataclasses import dataclass
from typing import ClassVar

from autotune.catalog import DeviceSpec, ModelSpec, Price, resolve_model
from autotune.core.json_view import fields_plus, keys
from autotune.core.probe_types import Evidence
from autotune.problem.run_cost import FITS

METHODS = {
    "lora": "LoRA",
    "qlora": "QLoRA (nf4)",
    "full": "Full fine-tuning",
}  # the title of each search space


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A model, trained by one method on one card. Its fields are keys of the JSON output.

    Unknown values are None. `config` is the best configuration that is certain to fit or, if there
    is none, the configuration with the least memory. `need_gib` is the memory peak of `config`.
    `least_gib` is always the peak of the configuration with the least memory. `learns_differently`
    says that the model fits only with reserve settings, which change the training result and are
    tried only if all other settings fail. `problem` says why the model cannot be trained by this
    method; all other values are unknown then. `longest_row` is the length in tokens of the longest
    sequence that is certain to fit: a power of two, or the model's number of positions.
    """

    JSON: ClassVar = fields_plus("params")

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
        """The model's number of parameters."""
        return resolve_model(self.model).params


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainable:
    """The entries for each of `models` and each method of METHODS, on one card.

    `lengths` describes the lengths of the examples. `how_sure` says how the numbers were estimated,
    and `calibrated` says which of them were calibrated. `is_guess` says that the speeds rest on
    data sheets alone, because no similar card was measured.
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
        """Return the entries of a model, in the order of METHODS."""
        return [entry for entry in self.entries if entry.model == model.name]

    def largest(self, method: str) -> Entry | None:
        """Return the entry of the largest model that surely fits with this method, or None.

        A model that fits only with a reserve setting, which changes learning, does not count.
        """
        fitting = {
            entry.model: entry
            for entry in self.entries
            if entry.method == method and entry.state == FITS and not entry.learns_differently
        }
        names = [model.name for model in self.models if model.name in fitting]
        return fitting[names[-1]] if names else None
