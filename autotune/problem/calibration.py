"""A calibration: the rates that `autotune calibrate` measured on one machine, and their file.

In the formulas, these rates replace the rates of the card's data sheet. A calibration is valid only
for the card and the host that were measured. The user's cache keeps one file for each card. A copy
of the file can be used on another machine, to estimate runs on the calibrated machine.
"""

import json
import math
from dataclasses import dataclass, replace
from datetime import date
from itertools import pairwise
from pathlib import Path

from autotune.core.errors import AutotuneError, UsageError
from autotune.core.files import read_user_text, write_atomic
from autotune.core.notebook import ShownAsTable
from autotune.core.parallelism import Parallelism
from autotune.core.probe_types import CollectiveRates, DeviceRates, Fingerprint
from autotune.core.serialization import from_data, to_data
from autotune.core.text import kebab_case, printable
from autotune.core.units import fmt_count, fmt_gib
from autotune.trainer.cache_folders import user_cache

HERE = "this machine"
# The bounds of every number in a calibration. A rate, size or time outside these bounds is
# implausible, whatever its unit is.
LEAST = 1e-6
MOST = 1e9


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Calibration(ShownAsTable):
    """The measured rates of a card and its host. Raises ValueError for an implausible number.

    Args:
        device: the card's name in the catalogue, or its name on this machine if the catalogue lacks
            it.
        layer_ms: the milliseconds of host time to launch the kernels of one uncompiled decoder
            layer with adapters, for its forward pass, recomputation and backward pass.
        reference: the measured speed of a short training, divided by the speed that the formula
            predicts from `rates`; None if no formula covers the device.
        processor: the name of the host's processor; `cores` and `memory_gib` also describe the
            host.
        disk_mb_s: the host's disk speed, or None if no file could be written.
        place: the origin of the calibration in words: this machine, or the name of a file.
        collectives: rates of communication between several GPUs of this kind in the host.
    """

    device: str
    fingerprint: Fingerprint
    rates: DeviceRates
    layer_ms: float
    reference: float | None
    processor: str
    cores: float
    memory_gib: float
    disk_mb_s: float | None
    day: date
    place: str = HERE
    collectives: tuple[CollectiveRates, ...] = ()
    schema_version: int = 1

    def facts(self) -> dict[str, str]:
        """Return the measured machine and its main rates."""
        return {
            "calibration": f"{self.device}, {self.day}",
            "host": f"{self.processor}, {self.cores:g} cores, {fmt_gib(self.memory_gib)}",
            "copy": f"{fmt_count(self.rates.copy_gb_s)} GB/s",
            "layer": f"{self.layer_ms:.3g} ms of the host",
            "disk": f"{fmt_count(self.disk_mb_s)} MB/s",
        }

    def __post_init__(self) -> None:
        rates = self.rates
        sides = [side for by_side in rates.products.values() for side in by_side]
        values = [rate for by_side in rates.products.values() for rate in by_side.values()]
        values += [
            rates.copy_gb_s,
            rates.launch_us,
            self.layer_ms,
            self.cores,
            self.memory_gib,
            *sides,
        ]
        values += [
            rate for rate in (rates.link_gb_s, self.reference, self.disk_mb_s) if rate is not None
        ]
        values += [
            rate
            for one in self.collectives
            for rate in (one.gather_gb_s, one.scatter_gb_s, one.reduce_gb_s)
        ]

        if not all(LEAST <= value <= MOST for value in values):
            raise ValueError(f"a number is not between {LEAST:g} and {MOST:g}")
        if not sides or not all(rates.products.values()):
            raise ValueError("no matrix multiplication was measured")

    @property
    def measures_gpu(self) -> bool:
        """Whether a GPU was measured, so that the host's time is separate from the device's."""
        return self.fingerprint.compute_capability is not None

    def bus_gb_s(self, parallelism: Parallelism) -> float | None:
        """Return the measured GB/s of the collectives that a strategy uses.

        Returns None if this number of GPUs was not measured.
        """
        rates = next(
            (one for one in self.collectives if one.num_gpus == parallelism.num_gpus), None
        )
        if rates is None:
            return None
        if parallelism.strategy == "ddp":
            return rates.reduce_gb_s
        return min(rates.gather_gb_s, rates.scatter_gb_s)

    @property
    def label(self) -> str:
        """A short description, such as 'calibrated on this machine, 2026-11-22'."""
        preposition = "on" if self.place == HERE else "by"
        return f"calibrated {preposition} {printable(self.place)}, {self.day.isoformat()}"

    def products_tflops(self, side: float | None = None) -> float:
        """Return the TFLOP/s of a product of square matrices with `side` rows.

        A product of other matrices is assumed to have the rate of the square product with the same
        number of FLOPs. The default of `side` is the largest measured side. The dtype is bf16 if
        the card has it, otherwise fp16. Between two measured sides, the logarithm of the rate is
        interpolated. A side outside the measured range gets the rate of the nearest measured side.
        """
        by_dtype = self.rates.products
        rates = next((by_dtype[name] for name in ("bf16", "fp16") if name in by_dtype), None)
        points = sorted((rates or next(iter(by_dtype.values()))).items())
        side = points[-1][0] if side is None else min(max(side, points[0][0]), points[-1][0])

        for (low, slower), (high, faster) in pairwise(points):
            if side < high:
                share = math.log(side / low) / math.log(high / low)
                return slower * math.pow(faster / slower, share)
        return points[-1][1]


def read_calibration(path: Path) -> Calibration:
    """Return the calibration in a file.

    The file may be from another user, so it is not trusted. Raises UsageError if the file is
    unreadable, is no calibration, or is from a newer version of autotune.
    """
    from pydantic import ValidationError

    text = read_user_text(path)
    try:
        return replace(from_data(Calibration, json.loads(text)), place=path.name)
    except ValidationError as error:
        problems = [(".".join(map(str, item["loc"])), item["msg"]) for item in error.errors()[:3]]
        reason = "; ".join(
            f"{place}: {message}" if place else message for place, message in problems
        )
    except RecursionError:
        reason = "nested too deeply"
    except (AutotuneError, ValueError) as error:  # the file is from a newer version, or is not JSON
        reason = str(error)

    reason = printable(reason.replace("Value error, ", ""))
    raise UsageError(
        f"{path} is no calibration: {reason}",
        remedy="make it again: `autotune calibrate --out FILE`",
    )


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Write a calibration to a file. Raises StorageError if the file cannot be written."""
    write_atomic(path, json.dumps(to_data(calibration), indent=2) + "\n")


def kept_path(device: str) -> Path:
    """Return the path of this card's calibration in the user's cache."""
    return user_cache() / "calibration" / f"{kebab_case(device)}.json"
