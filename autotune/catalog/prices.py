"""Finds hourly prices of GPUs in the user's list and the catalogue, and prices of new cards."""

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.catalog.devices import catalogued_device
from autotune.core.errors import UsageError
from autotune.core.files import load_data, read_user_yaml
from autotune.core.units import DASH, fmt_usd

if TYPE_CHECKING:
    from pydantic import BaseModel

NO_PRICE = "no price is known"
EXAMPLE = "example"  # the provider's name in the price of the example card
MAX_COUNT = 1024  # the most GPUs in one offer
MAX_USD = 1e6  # the highest accepted USD per hour of an offer; more must be a typing error


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """USD for one hour of one GPU, rented on demand in an instance of `count` GPUs.

    `quotable` is False for a price that no provider quotes, such as the price of one host of a
    marketplace on one day. Such a price is used only if no other price is known. `as_of` is the
    date of the price, or None if the date is unknown.
    """

    provider: str
    device: str
    usd_per_hour: float
    spot_usd_per_hour: float | None = None
    count: int = 1
    quotable: bool = True
    as_of: str | None = None
    source: str

    @property
    def usd_per_day(self) -> float:
        """USD for 24 hours of one GPU; no cloud in the catalogue publishes a lower daily price."""
        return 24 * self.usd_per_hour

    @property
    def usd_per_week(self) -> float:
        """USD for 168 hours of one GPU."""
        return 7 * self.usd_per_day

    def multiply(self, number: float) -> "Price":
        """Return the price of `number` times these GPUs, rented together."""
        if number == 1:
            return self
        spot = self.spot_usd_per_hour
        together = number * self.usd_per_hour
        return replace(
            self, usd_per_hour=together, spot_usd_per_hour=None if spot is None else number * spot
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Purchase:
    """The price of a new card in USD at its launch, on the day `as_of`."""

    device: str
    usd: float
    as_of: str
    source: str


@functools.cache
def list_prices() -> tuple[Price, ...]:
    """Return the prices that come with the package."""
    return tuple(_single_gpu_price(row) for row in load_data("autotune.catalog", "data/prices"))


def load_prices(path: Path) -> tuple[Price, ...]:
    """Read the user's own prices, a YAML list of rows like `data/prices.yaml`.

    A row is `- {provider: mine, device: a10, usd: 0.55, spot_usd: 0.2, count: 1, as_of:
    2026-11-01}`. Provider, device (any name that `catalogued_device` knows) and usd are required.
    Raises UsageError with the line number of a malformed row.
    """
    rows: Any = read_user_yaml(path, _file_model()).model_dump()
    return tuple(_single_gpu_price(row | {"source": row["source"] or path.name}) for row in rows)


def prices_of(device: str, own: Sequence[Price] = ()) -> list[Price]:
    """Return every price of `device`, a catalogue name, the best first.

    The user's own prices come before the catalogue's. In each of the two lists, quotable prices
    come before other prices. Then, smaller instances come before larger ones, because one GPU of an
    eight-GPU instance cannot be rented alone. Instances of equal size are sorted by their on-demand
    price.
    """
    return [*best_first(device, own), *best_first(device, list_prices())]


def best_first(device: str, prices: Iterable[Price]) -> list[Price]:
    """Return the prices of `device` in order of preference (see `prices_of`)."""
    rows = (price for price in prices if price.device == device)
    return sorted(rows, key=lambda price: (not price.quotable, price.count, price.usd_per_hour))


def find_price(device: str, own: Sequence[Price] = ()) -> Price | None:
    """Return the first price from `prices_of`, or None if no price of `device` is known."""
    return next(iter(prices_of(device, own)), None)


def find_spot(device: str, own: Sequence[Price] = ()) -> Price | None:
    """Return the price of `device` with the lowest spot price, or None without a spot price.

    If the user's own rows have a spot price, the catalogue's rows do not count.
    """
    for prices in (own, list_prices()):
        rows = [
            price
            for price in prices
            if price.device == device and price.spot_usd_per_hour is not None
        ]
        if rows:
            return min(rows, key=lambda price: price.spot_usd_per_hour or 0.0)
    return None


def find_purchase(device: str) -> Purchase | None:
    """Return the purchase price of `device`, a catalogue name, or None if it is unknown."""
    return _purchases().get(device)


def age(as_of: str | None, today: date) -> str:
    """Return the age of a price as text; `as_of` is a day, a month or a year.

    The text is like '12 days old', '4 months old', '2 years old' or 'undated'. If `as_of` is only a
    year, the age is the difference of the calendar years.
    """
    if as_of is None:
        return "undated"
    try:
        year, month, day = _parts(as_of)
    except ValueError:
        return f"of an unreadable date ({as_of})"

    months = 12 * (today.year - year) + (today.month - month if month else 0)
    if day and today.day < day:
        months -= 1  # the last month is incomplete
    if months < 0:
        return f"dated in the future ({as_of})"

    if not months and day:
        days = (today - date.fromisoformat(as_of)).days
        return f"{_number(days, 'day')} old" if days else "of today"
    if not months:
        return "of this month" if month else "of this year"
    return (
        f"{_number(months, 'month')} old"
        if month and months < 24
        else f"{_number(months // 12, 'year')} old"
    )


def describe_price(price: Price | None, today: date) -> str:
    """Describe a price with its provider and its age, such as '$0.75/h, lambda, 3 months old'.

    If the price is of an instance with several GPUs, the text says so.
    """
    if price is None:
        return f"{DASH} ({NO_PRICE})"
    if price.provider == EXAMPLE:
        return f"{fmt_usd(price.usd_per_hour)}/h, an example and no market price"
    part = f", 1/{price.count} of an instance with {price.count} GPUs" if price.count > 1 else ""
    doubt = "" if price.quotable else ", a reference and not a quote"
    return (
        f"{fmt_usd(price.usd_per_hour)}/h, {price.provider}, {age(price.as_of, today)}{part}{doubt}"
    )


def _parts(as_of: str) -> tuple[int, int | None, int | None]:
    """Return year, month and day of 2026-11-01, 2026-11 or 2026.

    Raises ValueError for any other text.
    """
    match = re.fullmatch(r"([0-9]{4})(?:-([0-9]{2})(?:-([0-9]{2}))?)?", as_of)
    if match is None:
        raise ValueError(
            f"a date is a day, a month or a year, like 2026-11-01 or 2026, not {as_of[:40]!r}"
        )
    year = int(match[1])
    month, day = (int(part) if part else None for part in match.groups()[1:])
    date(year, month or 1, day or 1)  # raises ValueError for an impossible date
    return year, month, day


def _number(count: int, unit: str) -> str:
    return f"{count} {unit}" + ("" if count == 1 else "s")


def _single_gpu_price(row: dict[str, Any]) -> Price:
    """Return the price of one GPU from a row.

    `usd` and `spot_usd` are prices of the whole instance; all other keys are fields of Price.
    """
    values = dict(row)
    usd = values.pop("usd")
    spot = values.pop("spot_usd")
    spot_usd_per_hour = None if spot is None else spot / row["count"]
    return Price(usd_per_hour=usd / row["count"], spot_usd_per_hour=spot_usd_per_hour, **values)


@functools.cache
def _purchases() -> dict[str, Purchase]:
    table: Any = load_data("autotune.catalog", "data/purchases")
    return {row["device"]: Purchase(**row, source=table["source"]) for row in table["prices"]}


@functools.cache
def _file_model() -> "type[BaseModel]":
    """Make the pydantic model of a price file, on first use."""
    from pydantic import BaseModel, ConfigDict, Field, RootModel, field_validator

    class Row(BaseModel):
        model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

        provider: str = Field(min_length=1, max_length=100)
        device: str
        usd: float = Field(ge=0, le=MAX_USD)
        spot_usd: float | None = Field(default=None, ge=0, le=MAX_USD)
        count: int = Field(default=1, ge=1, le=MAX_COUNT)
        as_of: date | int | str | None = None
        source: str | None = Field(default=None, min_length=1, max_length=300)
        quotable: bool = True

        @field_validator("provider", "source")
        @classmethod
        def _check_printable(cls, text: str | None) -> str | None:
            if text is not None and not text.isprintable():
                raise ValueError("a character that cannot be printed")
            return text

        @field_validator("device")
        @classmethod
        def _check_device(cls, name: str) -> str:
            try:
                return catalogued_device(name).name
            except UsageError as error:  # only a ValueError's message gets the line number
                raise ValueError(str(error)) from None

        @field_validator("as_of")
        @classmethod
        def _date_text(cls, when: date | int | str | None) -> str | None:
            """Convert a date to text, because YAML reads 2026-11-01 as a date, 2026 as a number."""
            if when is not None:
                _parts(str(when))
            return None if when is None else str(when)

    return RootModel[list[Row]]
