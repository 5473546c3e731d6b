"""Prices: of one GPU, of a catalogued device, and the default."""

from dataclasses import replace
from datetime import date

import pytest

from autotune.catalog import describe_price, find_price, list_devices, list_prices
from autotune.catalog.prices import Price


def test_prices_are_of_one_gpu():
    aws = next(price for price in list_prices() if price.provider == "aws")
    assert (aws.count, aws.usd_per_hour) == (8, pytest.approx(32.77 / 8))
    lambda_v100 = next(price for price in list_prices() if price.provider == "lambda" and "v100" in price.device)
    assert lambda_v100.usd_per_hour == pytest.approx(0.79)


def test_every_price_is_of_a_catalogued_device():
    names = {device.name for device in list_devices()}
    assert {price.device for price in list_prices()} <= names
    assert all(price.usd_per_hour > 0 and price.source for price in list_prices())


def test_default_price():
    a100 = find_price("a100-80gb-sxm")
    assert a100 and a100.quotable and a100.provider == "verda"
    a10 = find_price("a10")  # only an old row: used, and its date kept
    assert a10 and (a10.quotable, a10.as_of) == (False, "2026-01")
    rtx = find_price("rtx-4090")
    assert rtx and rtx.usd_per_hour == 0.34
    assert find_price("cpu") is None


def test_a_price_is_described_with_its_age_and_the_instance_that_it_is_part_of():
    today = date(2026, 4, 1)
    one = Price(provider="lambda", device="a10", usd_per_hour=0.75, as_of="2026-01", source="x")
    assert describe_price(one, today) == "$0.75/h, lambda, 3 months old"
    assert describe_price(replace(one, count=2), today) == "$0.75/h, lambda, 3 months old, 1/2 of an instance of 2"
    eighth = replace(one, count=8, quotable=False)
    assert describe_price(eighth, today) == (
        "$0.75/h, lambda, 3 months old, 1/8 of an instance of 8, a reference and not a quote"
    )
    assert describe_price(None, today) == "– (no price is known)"
