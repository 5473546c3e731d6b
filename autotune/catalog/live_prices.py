"""Reads today's cloud prices with gpuhunt (`pip install gpuhunt`), which is imported on first use.

Only gpuhunt's published catalogues are read, not marketplaces. The catalogues need no account and
no key.
"""

import functools
import logging
import re
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import date
from typing import Any

from autotune.catalog.devices import DeviceSpec, match_device, named_device
from autotune.catalog.prices import Price, best_first
from autotune.core.errors import EnvironmentProblem
from autotune.core.text import printable

TIMEOUT_S = 20.0  # without a timeout, gpuhunt waits for its server forever
# gpuhunt marks offers with flags. A study cannot use the offers with these flags: they need at
# least two machines, or days of notice.
BOUND_FLAGS = frozenset({"runpod-cluster", "gcp-dws-calendar-mode"})
# Names that mean one card in the catalogue and another card at clouds. Each value is the
# catalogue's name for the card that clouds rent out. In the catalogue, rtx-pro-6000 is the
# workstation card; clouds rent out the server edition under this name.
RENTED = {"rtx-pro-6000": "rtx-pro-6000-server"}


def live_prices(device: DeviceSpec, *, today: date | None = None) -> tuple[Price, ...]:
    """Return today's cloud prices for `device`, the best first.

    For each provider and instance size, only the price of the cheapest region is returned. Raises
    EnvironmentProblem if gpuhunt is not installed, or its catalogues could not be fetched.
    """
    return tuple(best_first(device.name, _all(today or date.today())))


def to_prices(items: Iterable[Any], version: str, today: date) -> list[Price]:
    """Convert gpuhunt's items to prices.

    Unknown GPUs are left out, and so are instances without an on-demand price.
    """
    # For each provider, device and GPU count: the cheapest spot offer (True) and on-demand offer
    # (False).
    cheapest: dict[tuple[str, str, int], dict[bool, Any]] = {}
    for item in items:
        if (
            not item.gpu_count
            or not item.gpu_name
            or not item.gpu_memory
            or not 0 < item.price < float("inf")
        ):
            continue
        device = (
            None
            if BOUND_FLAGS & set(item.flags)
            else match_product(item.gpu_name, item.gpu_memory, item.instance_name)
        )
        if device is not None:
            kinds = cheapest.setdefault((item.provider, device.name, item.gpu_count), {})
            if item.spot not in kinds or item.price < kinds[item.spot].price:
                kinds[item.spot] = item

    return [
        Price(
            provider=_one_line(provider),
            device=name,
            usd_per_hour=kinds[False].price / count,
            spot_usd_per_hour=kinds[True].price / count if True in kinds else None,
            count=count,
            as_of=today.isoformat(),
            source=_one_line(
                f"gpuhunt {version}, {kinds[False].instance_name} in {kinds[False].location}"
            ),
        )
        for (provider, name, count), kinds in cheapest.items()
        if False in kinds
    ]


@functools.cache
def match_product(gpu_name: str, memory_gb: float, instance: str) -> DeviceSpec | None:
    """Return the product for gpuhunt's GPU name (A100, RTX6000Ada, H100NVL), memory and instance.

    gpuhunt does not state the form factor (PCIe or SXM), but some instance names contain it:
    RunPod's names contain the driver's name of the card, and Lambda's contain pcie or sxm. For
    other instances, the catalogue is searched for gpuhunt's name. The result is None if no product
    matches.
    """
    if found := match_device(instance, memory_gb):
        return found

    # Convert gpuhunt's name to the catalogue's spelling.
    name = re.sub(
        r"^rtx(pro)?(?=\d)", lambda match: "rtx-pro-" if match[1] else "rtx-", gpu_name.lower()
    )
    name = re.sub(r"(?<=\d)(?=(?:ada|nvl|ti|super|tisuper)$)|(?<=\dti)(?=super$)", "-", name)
    form = re.search(r"(?<![a-z0-9])(pcie|sxm\d?)(?![a-z0-9])", instance.lower())
    if form and (found := match_device(f"{name}-{form[1]}", memory_gb)):
        return found

    for known in (f"{name}-{memory_gb:.0f}gb", RENTED.get(name, name)):
        device = named_device(known)
        if device and device.memory_gib and device.has_memory(memory_gb):
            other_form = form and re.search("pcie|sxm", device.name)
            return None if other_form else device
    return None


@functools.cache
def _all(today: date) -> tuple[Price, ...]:
    return tuple(to_prices(*_fetch(), today))


def _fetch() -> tuple[list[Any], str]:
    """Fetch all of gpuhunt's GPU offers, and return them with gpuhunt's version."""
    try:
        import gpuhunt
    except ImportError:
        raise EnvironmentProblem(
            "live prices come through gpuhunt, which is not installed", remedy="pip install gpuhunt"
        ) from None
    from importlib.metadata import version

    try:
        with _quick_and_quiet():
            # `gpuhunt.query` would also query marketplaces, with any API keys in the environment,
            # and would fail if one of the marketplaces failed.
            items = gpuhunt.Catalog().query(min_gpu_count=1)
    except Exception as error:
        raise EnvironmentProblem(
            f"live prices could not be fetched: {_one_line(str(error)) or type(error).__name__}",
            remedy="check the network, or leave --live out",
        ) from None
    return items, version("gpuhunt")


@contextmanager
def _quick_and_quiet() -> Iterator[None]:
    """Limit the time that gpuhunt waits, and silence its tracebacks for unreachable catalogues."""
    logger = logging.getLogger("gpuhunt")
    level = logger.level
    timeout = socket.getdefaulttimeout()

    logger.setLevel(logging.CRITICAL + 1)
    socket.setdefaulttimeout(TIMEOUT_S)
    try:
        yield
    finally:
        logger.setLevel(level)
        socket.setdefaulttimeout(timeout)


def _one_line(text: str) -> str:
    """Return a server's text, made safe to print on one line of a terminal."""
    return printable(text, " ")[:200]
