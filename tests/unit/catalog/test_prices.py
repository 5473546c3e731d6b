"""Prices: of one GPU, of a catalogued device, and the default."""

from dataclasses import replace
from datetime import date

import pytest

from autotune.catalog import (
    describe_price,
    find_price,
    find_purchase,
    find_spot,
    list_devices,
    list_prices,
)
from autotune.catalog.prices import Price


def test_prices_are_of_one_gpu():
    aws = next(
        price
        for price in list_prices()
        if (price.provider, price.device) == ("aws", "a100-40gb-sxm")
    )
    assert (aws.count, aws.usd_per_hour) == (8, pytest.approx(21.9576 / 8))
    assert (aws.usd_per_day, aws.usd_per_week) == (
        pytest.approx(3 * 21.9576),
        pytest.approx(21 * 21.9576),
    )
    google = next(
        price for price in list_prices() if (price.provider, price.device) == ("gcp", "h100-sxm")
    )
    assert google.spot_usd_per_hour == pytest.approx(50.3153 / 8)


def test_every_price_is_of_a_catalogued_device():
    names = {device.name for device in list_devices()}
    assert {price.device for price in list_prices()} <= names
    assert all(price.usd_per_hour > 0 and price.source for price in list_prices())
    assert all(
        price.spot_usd_per_hour is None or price.spot_usd_per_hour < price.usd_per_hour
        for price in list_prices()
    )


def test_default_price():
    a100 = find_price("a100-80gb-sxm")  # one GPU of a list, the cheapest
    assert a100 and (a100.provider, a100.quotable, a100.count, a100.as_of) == (
        "runpod",
        True,
        1,
        "2026-10-03",
    )
    rtx = find_price("rtx-4070")  # a marketplace alone: used, and said so
    assert rtx and (rtx.provider, rtx.quotable, rtx.usd_per_hour) == ("vast", False, 0.123)
    assert find_price("cpu") is None and find_price("a2") is None


def test_the_cheapest_spot_price_may_be_of_another_provider():
    h100 = find_spot("h100-sxm")
    assert h100 and (h100.provider, h100.spot_usd_per_hour) == ("verda", 1.62)
    assert find_spot("rtx-4090") is None
    own = replace(h100, provider="mine", spot_usd_per_hour=5.0)
    assert find_spot("h100-sxm", [own]) == own


def test_what_a_card_costs_to_buy():
    bought = [find_purchase(device.name) for device in list_devices()]
    assert sum(one is not None for one in bought) == 38
    assert all(one is None or (one.usd > 100 and "Wikipedia" in one.source) for one in bought)
    rtx = find_purchase("rtx-4090")
    assert rtx and (rtx.usd, rtx.as_of) == (1599, "2022-10-12")
    assert find_purchase("h100-sxm") is None and find_purchase("rtx-4090-laptop") is None


def test_a_price_is_described_with_its_age_and_the_instance_that_it_is_part_of():
    today = date(2026, 4, 1)
    one = Price(provider="lambda", device="a10", usd_per_hour=0.75, as_of="2026-01", source="x")
    assert describe_price(one, today) == "$0.75/h, lambda, 3 months old"
    assert (
        describe_price(replace(one, count=2), today)
        == "$0.75/h, lambda, 3 months old, 1/2 of an instance with 2 GPUs"
    )
    eighth = replace(one, count=8, quotable=False)
    assert describe_price(eighth, today) == (
        "$0.75/h, lambda, 3 months old, 1/8 of an instance with 8 GPUs, a reference and not a quote"
    )
    assert describe_price(None, today) == "– (no price is known)"
