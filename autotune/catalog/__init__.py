"""Data sheets of GPUs, models and prices, read from the YAML files in `data/`."""

from autotune.catalog.devices import DeviceSpec, list_devices, match_device, resolve_device
from autotune.catalog.example_cards import example_card
from autotune.catalog.models import ModelSpec, list_models, resolve_model
from autotune.catalog.prices import (
    EXAMPLE,
    NO_PRICE,
    Price,
    Purchase,
    age,
    describe_price,
    find_price,
    find_purchase,
    find_spot,
    list_prices,
    load_prices,
    prices_of,
)

__all__ = [
    "EXAMPLE",
    "NO_PRICE",
    "DeviceSpec",
    "ModelSpec",
    "Price",
    "Purchase",
    "age",
    "describe_price",
    "example_card",
    "find_price",
    "find_purchase",
    "find_spot",
    "list_devices",
    "list_models",
    "list_prices",
    "load_prices",
    "match_device",
    "prices_of",
    "resolve_device",
    "resolve_model",
]
