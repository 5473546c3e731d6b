"""Price: what an hour of a GPU costs. Seeds with their dates, to be overridden by what the user pays."""

import functools
from dataclasses import dataclass

from autotune.catalog.rows import load_data


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """USD for one hour of one GPU, rented on demand in an instance of `count`. `as_of` None: undated."""

    provider: str
    device: str
    usd_per_hour: float
    spot_usd_per_hour: float | None = None
    count: int = 1
    quotable: bool = True
    as_of: str | None = None
    source: str


@functools.cache
def list_prices() -> tuple[Price, ...]:
    return tuple(
        Price(
            provider=row["provider"],
            device=row["device"],
            usd_per_hour=row["usd"] / row["count"],
            spot_usd_per_hour=None if row["spot_usd"] is None else row["spot_usd"] / row["count"],
            count=row["count"],
            quotable=row["quotable"],
            as_of=row["as_of"],
            source=row["source"],
        )
        for row in load_data("prices")
    )


def find_price(device: str) -> Price | None:
    """The default price of `device`, a catalogue name; None when no row has it.

    Quotable rows go before old or second-hand ones, instances of one GPU before larger ones (nobody rents an eighth of
    eight), and then the cheapest on-demand price wins.
    """
    rows = [price for price in list_prices() if price.device == device]
    return min(rows, key=lambda price: (not price.quotable, price.count, price.usd_per_hour), default=None)
