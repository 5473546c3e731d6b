"""Calibration: what `autotune calibrate` measured of one machine, its file, and what it replaces in the formulas.

It speaks for the card of its name and for the host that it was made on, and for no other. It is kept in the user's
cache, a file for each card, and can be carried to another machine as a file.
"""

import json
import math
from dataclasses import dataclass, replace
from datetime import date
from itertools import pairwise
from pathlib import Path

from autotune.core.errors import AutotuneError, UsageError
from autotune.core.files import cache_directory, read_user_text, write_atomic
from autotune.core.parallelism import Parallelism
from autotune.core.probe_types import CollectiveRates, DeviceRates, Fingerprint
from autotune.core.serialization import from_data, to_data
from autotune.core.text import dashed, printable

HERE = "this machine"
LEAST, MOST = 1e-6, 1e9  # no rate, size or time is outside, in the unit of any field


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was measured of a card and of its host. Raises ValueError for a number that cannot be measured.

    `device` is the card's name in the catalogue, or what a card outside of it is called here. `layer_ms` is the host's
    time to issue one decoder layer: forward pass, recomputation and backward pass, with adapters, not compiled.
    `reference` is the speed of a short training of known layers over what the formula expects of `rates`; None where no
    formula knows the device. `processor`, `cores` and `memory_gib` are the host's, `disk_mb_s` is None where no file
    could be written. `place` is where the calibration was found: this machine, or a file. `collectives` are rates of
    several such GPUs together.
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
        measured = [rate for by_side in rates.products.values() for rate in by_side.values()]
        measured += [rates.copy_gb_s, rates.launch_us, self.layer_ms, self.cores, self.memory_gib, *sides]
        measured += [rate for rate in (rates.link_gb_s, self.reference, self.disk_mb_s) if rate is not None]
        measured += [rate for one in self.collectives for rate in (one.gather_gb_s, one.scatter_gb_s, one.reduce_gb_s)]
        if not all(LEAST <= value <= MOST for value in measured):
            raise ValueError(f"a number is not between {LEAST:g} and {MOST:g}")
        if not sides or not all(rates.products.values()):
            raise ValueError("no product of matrices was measured")

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU was measured. A CPU also computes what it issues."""
        return self.fingerprint.compute_capability is not None

    def bus_gb_s(self, parallelism: Parallelism) -> float | None:
        """GB/s of the collectives that a strategy uses; None where so many GPUs were not measured together."""
        rates = next((one for one in self.collectives if one.num_gpus == parallelism.num_gpus), None)
        if rates is None:
            return None
        return rates.reduce_gb_s if parallelism.strategy == "ddp" else min(rates.gather_gb_s, rates.scatter_gb_s)

    @property
    def label(self) -> str:
        """'calibrated on this machine, 2026-11-22'."""
        preposition = "on" if self.place == HERE else "by"
        return f"calibrated {preposition} {printable(self.place)}, {self.day.isoformat()}"

    def products_tflops(self, side: float | None = None) -> float:
        """TFLOP/s of products that are as large as those of square matrices of this side; of the largest by default.

        They are of the dtype that the card trains in: bf16 where it has that, else fp16. Between two measured sizes the
        logarithms are interpolated; beyond the smallest and the largest the rate is that of these.
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
    """The calibration in a file that may come from somebody else.

    Raises UsageError if it cannot be read, has another form, or is of a newer version of autotune.
    """
    from pydantic import ValidationError

    text = read_user_text(path)
    try:
        return replace(from_data(Calibration, json.loads(text)), place=path.name)
    except ValidationError as error:
        problems = [(".".join(map(str, item["loc"])), item["msg"]) for item in error.errors()[:3]]
        reason = "; ".join(f"{place}: {message}" if place else message for place, message in problems)
    except RecursionError:
        reason = "nested too deeply"
    except (AutotuneError, ValueError) as error:  # of a newer version, or no JSON
        reason = str(error)
    reason = printable(reason.replace("Value error, ", ""))
    raise UsageError(f"{path} is no calibration: {reason}", remedy="make it again: `autotune calibrate --out FILE`")


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Write a calibration for `read_calibration`. Raises StorageError."""
    write_atomic(path, json.dumps(to_data(calibration), indent=2) + "\n")


def kept_path(device: str) -> Path:
    """Where this user's calibration of a card of this name is kept."""
    return cache_directory() / "calibration" / f"{dashed(device)}.json"
