"""Parse the user's GPU counts, host counts, network between hosts, and time limit."""

import math
import re
from collections.abc import Sequence

from autotune.core.errors import UsageError
from autotune.core.text import split_count
from autotune.core.units import parse_duration

Counts = str | int | Sequence[int]

MOST_GPUS = 8  # the largest number of GPUs in one host
# The nominal GB/s that a host sends through all its network adapters. Collectives reach the
# fraction REACHED of the nominal rate: through an adapter with 400 Gb/s, which is 50 GB/s,
# nccl-tests measure 45 GB/s.
NETWORKS = {
    "ethernet-10": 1.25,
    "ethernet-25": 3.125,
    "ethernet-100": 12.5,
    "ethernet-400": 50.0,
    "infiniband-8x200": 200.0,
    "infiniband-8x400": 400.0,
}
REACHED = 0.9


def parse_gpus(given: Counts, most: int = MOST_GPUS) -> tuple[int, ...]:
    """Parse '1,2,4', or [1, 2, 4], to (1, 2, 4).

    Raises UsageError for anything else, and for more GPUs than `most`, which one host may have.
    """
    numbers = _parse_counts("--gpus", given, "1,2,4,8")
    if numbers[-1] > most:
        raise UsageError(
            f"--gpus {numbers[-1]}: up to {most} GPUs of one host are supported",
            remedy=f"give at most {most}; `autotune plan` takes several hosts with --nodes",
        )
    return numbers


def parse_nodes(given: Counts | None) -> tuple[int, ...]:
    """Parse host counts, given in the same forms as for `parse_gpus`; the default is one host."""
    return (1,) if given is None else _parse_counts("--nodes", given, "1,2,4")


def _parse_counts(option: str, given: Counts, example: str) -> tuple[int, ...]:
    if isinstance(given, str):
        text = given
    else:
        text = ",".join(map(str, [given] if isinstance(given, int) else given))
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,6}", part) and int(part) for part in parts):
        raise UsageError(
            f"{option} cannot be {text!r}", remedy=f"separate numbers by commas: {option} {example}"
        )
    return tuple(sorted({int(part) for part in parts}))


def parse_network(given: str | float | None) -> float | None:
    """Return the GB/s that collectives reach between hosts.

    `given` is a name in NETWORKS or a nominal rate in GB/s. Raises UsageError for anything else.
    """
    if given is None:
        return None

    try:
        nominal = NETWORKS[given] if isinstance(given, str) and given in NETWORKS else float(given)
    except ValueError:
        nominal = 0.0

    if not 0 < nominal < math.inf:
        names = ", ".join(NETWORKS)
        raise UsageError(
            f"--network cannot be {given!r}",
            remedy=f"give the GB/s that a host can send, or one of {names}",
        )
    return REACHED * nominal


def counted_gpu(gpu: str, gpus: Counts | None) -> tuple[str | None, str]:
    """Split a count from a name. Raises UsageError if `gpus` gives another count."""
    count, name = split_count(gpu)
    if count is not None and gpus is not None:
        raise UsageError(
            f"--gpu says {count} GPUs and --gpus {gpus}", remedy="leave out one of them"
        )
    return count, name


def parse_within(within: str | float | None) -> float | None:
    """Convert a time limit to hours: '6h' -> 6.0. A number is already in hours.

    Raises UsageError unless the time is positive.
    """
    if within is None:
        return None
    try:
        return parse_duration(within if isinstance(within, str) else f"{within}h") / 3600
    except ValueError as error:
        raise UsageError(f"--within: {error}", remedy="for example --within 6h") from None
