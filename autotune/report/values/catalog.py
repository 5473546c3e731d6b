"""Rows of the catalogue for programs: GPUs, prices and suites of published results."""

from dataclasses import dataclass, fields
from typing import ClassVar

from autotune.catalog import DeviceSpec, Price, Purchase
from autotune.core.json_view import keys


@dataclass(frozen=True, slots=True, kw_only=True)
class DatedPrice:
    """The price of one GPU for an hour, a day and a week, with the price's age in words."""

    JSON: ClassVar = {field.name: f"price.{field.name}" for field in fields(Price)} | keys(
        "age", usd_per_day="price.usd_per_day", usd_per_week="price.usd_per_week"
    )

    price: Price
    age: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU, with the price of an hour and the price of a new card; an unknown price is None."""

    JSON: ClassVar = {field.name: f"device.{field.name}" for field in fields(DeviceSpec)} | keys(
        "price", "purchase"
    )

    device: DeviceSpec
    price: DatedPrice | None
    purchase: Purchase | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A suite of configurations with published results."""

    name: str
    gpu: str
    configs: int
    source: str | None
    file: str
