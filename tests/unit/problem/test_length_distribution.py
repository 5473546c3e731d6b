"""Lengths of examples: by hand, from a file, from two numbers, and what is useful of them at a
sequence length.
"""

import pytest

from autotune.core.errors import UsageError
from autotune.core.serialization import from_data, to_data
from autotune.core.train_config import TrainConfig
from autotune.problem.length_distribution import SAYS, Lengths, read_lengths
from autotune.problem.workload import Workload

# 10 examples, 6,400 tokens: 4 of 100, 3 of 500, 2 of 1,000, 1 of 2,500.
SKEWED = Lengths.of([100] * 4 + [500] * 3 + [1000] * 2 + [2500], "counted")


@pytest.mark.parametrize(
    ("seq_len", "kept", "longer"),
    [
        (50, 500, 1.0),
        (100, 1000, 0.6),
        (512, 400 + 1500 + 3 * 512, 0.3),
        (1024, 4924, 0.1),
        (4096, 6400, 0.0),
    ],
)
def test_truncation_by_hand(seq_len: int, kept: int, longer: float) -> None:
    assert SKEWED.tokens_within(seq_len) == kept
    assert SKEWED.longer(seq_len) == longer
    workload = Workload(lengths=SKEWED)
    assert workload.useful_tokens_per_row(TrainConfig(seq_len=seq_len)) == kept / 10
    assert workload.truncated(seq_len) == pytest.approx(1 - kept / 6400)
    assert workload.fill(TrainConfig(seq_len=seq_len, padding="max_length")) == pytest.approx(
        kept / 10 / seq_len
    )


def test_the_figures_of_a_distribution() -> None:
    assert (SKEWED.number, SKEWED.total, SKEWED.mean, SKEWED.longest) == (10, 6400, 640.0, 2500)
    assert [SKEWED.quantile(share) for share in (0.0, 0.4, 0.41, 0.7, 0.9, 0.99, 1.0)] == [
        100,
        100,
        500,
        500,
        1000,
        2500,
        2500,
    ]
    assert (
        str(SKEWED)
        == "640 tokens on average, 2,500 at the 99th percentile, 2,500 the longest (counted)"
    )
    assert str(Lengths.constant(1024, "assumed")) == "1,024 tokens each (assumed)"
    assert str(Lengths.constant(1024)) == "1,024 tokens each"


def test_a_distribution_survives_serialization() -> None:
    assert from_data(Lengths, to_data(SKEWED)) == SKEWED


def test_different_distributions_have_different_digests() -> None:
    same = Lengths.of([2500] + [1000] * 2 + [500] * 3 + [100] * 4, "counted")
    assert SKEWED.facts() == same.facts()
    assert [SKEWED.facts()[name] for name in ("mean", "median", "p99", "longest")] == [
        640,
        500,
        2500,
        2500,
    ]
    assert (
        SKEWED.facts()["digest"]
        != Lengths.of([100] * 4 + [500] * 3 + [1000] * 2 + [2501], "counted").facts()["digest"]
    )
    assert "tokens_per_example" in Workload(lengths=SKEWED).facts()


@pytest.mark.parametrize(
    ("mean", "p99"), [(300.0, 2000.0), (1000.0, 1500.0), (512.0, 512.0), (100.0, 1000.0)]
)
def test_two_numbers_describe_a_distribution(mean: float, p99: float) -> None:
    described = Lengths.from_summary(mean, p99)
    # the last thousandth of the tail is one point
    assert described.mean == pytest.approx(mean, rel=0.03)
    assert described.quantile(0.99) == pytest.approx(p99, rel=0.03)
    assert described.source == "summary"


@pytest.mark.parametrize(("mean", "p99"), [(300.0, 299.0), (100.0, 1600.0), (0.5, 10.0)])
def test_two_numbers_without_a_distribution_are_an_error(mean: float, p99: float) -> None:
    with pytest.raises(ValueError, match="99th percentile"):
        Lengths.from_summary(mean, p99)


def test_a_file_of_lengths(tmp_path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("100\n\n 500 \n100\n")
    assert read_lengths(file) == Lengths(counts=((100, 2), (500, 1)), source="counted")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("100\n12.5\n", "line 2: '12.5'"),
        ("0\n", "line 1: '0'"),
        ("-3", "line 1"),
        ("tokens\n100", "line 1"),
        ("", "empty"),
    ],
)
def test_a_wrong_line_of_a_file_is_named(tmp_path, text: str, message: str) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_lengths(file)
    with pytest.raises(UsageError, match="cannot read"):
        read_lengths(tmp_path / "nothing.txt")


@pytest.mark.parametrize("counts", [(), ((0, 1),), ((1, 2), (5, 0)), ((1, 0), (5, 2))], ids=str)
def test_no_distribution_has_examples_without_tokens_or_lengths_without_examples(counts) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Lengths(counts=counts, source="given")


def test_an_example_of_one_token_counts(tmp_path) -> None:
    (tmp_path / "lengths.txt").write_text("1\n\n1\n7\n")
    assert read_lengths(tmp_path / "lengths.txt").counts == ((1, 2), (7, 1))


@pytest.mark.parametrize("share", [0.0, -0.1, 1.001, float("nan")])
def test_no_other_share_than_some_of_the_tokens_is_trained_on(share: float) -> None:
    with pytest.raises(ValueError, match="trained_share must be above 0 and at most 1"):
        Lengths.of([100], "counted", share)
    assert Lengths.of([100], "counted", 1.0).trained_share == 1.0


def test_a_sample_has_the_middle_of_each_part_and_is_always_the_same() -> None:
    """Of ten examples in five parts: 100, 100, 500, 500 (one is 1,000, above the middle), 1000 or
    more.
    """
    drawn = SKEWED.sample(5, 4096)
    assert sorted(drawn) == [100, 100, 500, 500, 1000] and drawn == SKEWED.sample(5, 4096)
    assert sorted(SKEWED.sample(10, 700)) == [100] * 4 + [500] * 3 + [700] * 3
    assert SKEWED.sample(1, 4096) == [500]
    many = Lengths.of(range(1, 101), "counted").sample(100, 4096)
    assert sorted(many) == list(range(1, 101)) != many  # not in order


def test_only_lengths_that_were_counted_or_given_are_exact() -> None:
    exact = {source: Lengths.constant(5, source).exact for source in SAYS}
    assert exact == {
        "assumed": True,
        "given": True,
        "counted": True,
        "characters": False,
        "summary": False,
    }


def test_an_estimated_example_may_have_all_tokens_that_it_can_have() -> None:
    counted, estimated = (Lengths.of([100, 300], source) for source in ("counted", "characters"))
    bounded = Lengths.of([100, 300], "characters", most=1500)
    lengths = (counted, estimated, bounded)
    assert [one.longest_within(4096) for one in lengths] == [300, 4096, 1500]
    assert [one.longest_within(200) for one in lengths] == [200] * 3
    assert bounded != estimated  # caches tell them apart


def test_distributions_are_told_apart_by_all_that_they_say() -> None:
    others = [Lengths.of([5], "counted"), Lengths.of([5], "given"), Lengths.of([5], "counted", 0.5)]
    assert len({*others, *map(hash, others)}) == 6 and len(set(others)) == 3
    assert hash(Lengths.of([5], "counted")) == hash(others[0])
    facts = Lengths.of([5, 7], "summary", 0.5).facts()
    assert (facts["source"], facts["trained_share"], len(facts["digest"])) == ("summary", 0.5, 12)


def test_the_longest_mean_that_two_numbers_can_describe_is_one_token() -> None:
    """exp(z^2 / 2) with z = 2.3263 is the largest quotient of percentile and mean: 14.97."""
    assert Lengths.from_summary(100.0, 1496.0).quantile(0.99) == pytest.approx(1496.0, rel=0.05)
    with pytest.raises(
        ValueError, match="no log-normal distribution has a 99th percentile of 15 times its mean"
    ):
        Lengths.from_summary(100.0, 1498.0)
    ones = Lengths.from_summary(1.0, 1.0)
    assert ones.counts == ((1, 1000),)


def test_a_large_file_of_lengths_is_read_and_a_wrong_line_is_shown_in_part(tmp_path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("100\n" * 20_000)
    assert read_lengths(file).counts == ((100, 20_000),)
    for number, fine in (("9" * 9, True), ("9" * 10, False)):
        file.write_text(f"7\n{number}\n")
        if fine:
            assert read_lengths(file).longest == 999_999_999
        else:
            with pytest.raises(UsageError, match="line 2: '9999999999'"):
                read_lengths(file)
    file.write_text("x" * 50)
    with pytest.raises(UsageError, match=f"line 1: '{'x' * 40}' is not a number") as caught:
        read_lengths(file)
    assert caught.value.remedy == "write the length of one example, at least 1, on each line"


def test_a_described_distribution_is_of_a_thousand_examples_with_its_tail() -> None:
    described = Lengths.from_summary(300.0, 1500.0)
    assert described.number == 1000
    # s = 2.3263 - sqrt(5.4119 - 2 ln 5) = 0.8454 and the median 300 exp(-s^2 / 2) = 209.9
    assert described.quantile(0.5) == pytest.approx(210, abs=1)
    # 300,000 times what the normal distribution has above 3.0902 - s, 0.01239
    assert described.longest == 3717
    assert described.total == pytest.approx(300_000, rel=1e-3)
