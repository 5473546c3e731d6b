"""A calibration: the rates that `autotune calibrate` measured on one machine, and their file.

The rates replace the data sheet's values in the formulas. A calibration is valid only for the card
that it names and for the host that made it. The user's cache keeps one file for each card; a copy
of the file works on another machine.
"""

import json
import math
from dataclasses import dataclass, replace
from datetime import date
from itertools import pairwise
from pathlib import Path

from autotune.core.errors import AutotuneError, UsageError
from autotune.core.files import read_user_text, write_atomic
from autotune.core.parallelism import Parallelism
from autotune.core.probe_types import CollectiveRates, DeviceRates, Fingerprint
from autotune.core.serialization import from_data, to_data
from autotune.core.text import dashed, printable
from autotune.trainer.cache_folders import user_cache

HERE = "this machine"
# No plausible rate, size or time is outside these bounds, in whatever unit its field has.
LEAST = 1e-6
MOST = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The measured rates of a card and its host. Raises ValueError for an implausible number.

    Args:
        device: the card's name in the catalogue, or its name on this machine if the catalogue
            lacks it.
        layer_ms: the host's time to issue one decoder layer with adapters, not compiled: forward
            pass, recomputation and backward pass.
        reference: the speed of a short training of known layers, divided by the formula's speed
            for `rates`, or None if no formula covers the device.
        processor: the host's processor; `cores` and `memory_gib` also describe the host.
        disk_mb_s: the host's disk speed, or None if no file could be written.
        place: the source of the calibration: this machine, or a file.
        collectives: rates of communication between several such GPUs.
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
    def on_gpu(self) -> bool:
        """Whether a GPU was measured. A CPU both issues and computes the work."""
        return self.fingerprint.compute_capability is not None

    def bus_gb_s(self, parallelism: Parallelism) -> float | None:
        """Return the GB/s of a strategy's collectives, or None for an unmeasured GPU count."""
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
        """Return the TFLOP/s of matrix products as large as square products of this side.

        The default is the largest measured side. The dtype is the training dtype: bf16 if the card
        has it, otherwise fp16. Between two measured sides, the logarithms are interpolated. Beyond
        the smallest and the largest side, the rate is constant.
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
    """Return the calibration in a file, which another user may have made.

    Raises UsageError if the file is unreadable, has another form or is from a newer autotune.
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
    except (AutotuneError, ValueError) as error:  # from a newer version, or not JSON
        reason = str(error)

    reason = printable(reason.replace("Value error, ", ""))
    raise UsageError(
        f"{path} is no calibration: {reason}",
        remedy="make it again: `autotune calibrate --out FILE`",
    )


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Write a calibration for `read_calibration`. Raises StorageError."""
    write_atomic(path, json.dumps(to_data(calibration), indent=2) + "\n")


def kept_path(device: str) -> Path:
    """Return the path of this user's calibration of a card with this name."""
    return user_cache() / "calibration" / f"{dashed(device)}.json"
