"""Numbers of GPUs and deadlines as users write them."""

import pytest

from autotune.core.errors import UsageError
from autotune.core.text import split_count
from autotune.problem.gpu_counts import (
    parse_gpus,
    parse_network,
    parse_nodes,
    parse_within,
)


def test_numbers_and_counts() -> None:
    assert parse_gpus("8, 1,2,2") == parse_gpus([8, 2, 1]) == (1, 2, 8) and parse_gpus(
        "8"
    ) == parse_gpus(8) == (8,)
    for wrong in ("", "0", "two", "1,,2", "-2", "1.5"):
        with pytest.raises(UsageError, match="--gpus cannot be"):
            parse_gpus(wrong)
    with pytest.raises(UsageError, match="--gpus 9: up to 8 GPUs"):
        parse_gpus("1,9")
    assert split_count("8xh100") == ("8", "h100") and split_count(" 2 x rtx-4090") == (
        "2",
        "rtx-4090",
    )
    assert split_count("h100") == (None, "h100") and split_count("memory=24") == (None, "memory=24")


def test_deadlines() -> None:
    assert (parse_within("6h"), parse_within("90m"), parse_within(2), parse_within(None)) == (
        6.0,
        1.5,
        2.0,
        None,
    )
    for wrong in ("soon", "0h", -1.0):
        with pytest.raises(UsageError, match="--within"):
            parse_within(wrong)


def test_what_links_hosts_reaches_nine_tenths_of_its_rate() -> None:
    assert (
        parse_network("ethernet-100") == 0.9 * 12.5
        and parse_network(50.0) == parse_network("50") == 45.0
    )
    assert (
        parse_network(None) is None and parse_nodes(None) == (1,) and parse_nodes("2,4") == (2, 4)
    )
    for wrong in ("fast", "0", -1.0, "nan", "inf"):
        with pytest.raises(UsageError, match="--network cannot be"):
            parse_network(wrong)
