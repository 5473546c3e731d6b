"""One winner with its reason, and what another candidate must beat."""

from dataclasses import replace

import pytest

from autotune.core.train_config import TrainConfig
from autotune.problem.search_space import SearchSpace
from autotune.study.ranking import Scored, choose, explain_choice, more_capable, score_to_beat


def scored(speed: float, free_fraction: float = 0.5, **knobs) -> Scored:
    return Scored(config=TrainConfig(**knobs), score=speed, free_fraction=free_fraction)


def test_the_cheapest_wins():
    fast, slow = scored(110.0, micro_batch_size=4), scored(100.0)
    assert choose([slow, fast], 0.05) is fast
    assert choose([slow], 0.0) is slow


RANKS = SearchSpace.of(lora_rank=[8, 16, 64])


@pytest.mark.parametrize(
    ("rank", "tried", "said"),
    [
        (16, (8, 16, 64), "no more capable configuration costs at most 5% more"),
        (16, (8, 16), "nothing more capable was tried"),
        (64, (16, 64), "the space has nothing more capable"),
    ],
)
def test_nothing_more_capable_is_said_only_of_what_was_tried(rank, tried, said):
    fast, slow = scored(110.0, lora_rank=rank), scored(100.0, lora_rank=8)
    configs = [TrainConfig(lora_rank=one) for one in tried]
    assert (
        explain_choice(fast, [fast, slow], 0.05, RANKS, configs)
        == f"the cheapest above the floors; {said}"
    )


def test_more_capable_within_the_slack_wins():
    fast = scored(104.0, lora_rank=16, optimizer="adamw_8bit")
    able = scored(100.0, lora_rank=64)
    assert choose([fast, able], 0.05) is able
    assert explain_choice(able, [fast, able], 0.05, RANKS, ()) == (
        "it is more capable: lora_rank 64 instead of 16, optimizer adamw_torch_fused instead of"
        " adamw_8bit, "
        "for 4.0% more cost than the cheapest (slack allows 5%)"
    )
    assert choose([fast, able], 0.03) is fast
    assert choose([fast, able], 0.0) is fast
    as_fast = scored(103.96, lora_rank=64)
    assert explain_choice(as_fast, [fast, as_fast], 0.05, RANKS, ()).endswith(
        "instead of adamw_8bit, at the same cost as the cheapest"
    )


def test_the_slack_is_a_share_of_the_cost():
    # 100 / 95.3 is 4.93 % more cost; 100 / 95.2 is 5.04 %.
    fast = scored(100.0)
    assert choose([fast, scored(95.3, lora_rank=64)], 0.05).config.lora_rank == 64
    assert choose([fast, scored(95.2, lora_rank=64)], 0.05) is fast


def test_a_tenth_of_free_memory_is_worth_the_slack():
    tight, roomy = (
        scored(100.0, free_fraction=0.02),
        scored(99.0, free_fraction=0.31, checkpointing="every_2"),
    )
    assert choose([tight, roomy], 0.05) is roomy
    assert explain_choice(roomy, [tight, roomy], 0.05, RANKS, ()) == (
        "it leaves more memory free, for 1.0% more cost than the cheapest (slack allows 5%); "
        "nothing more capable was tried"
    )
    assert choose([tight, scored(99.0, free_fraction=0.04, micro_batch_size=4)], 0.05) is tight
    for free_fraction, is_roomy in ((0.1, True), (0.0999, False)):
        other = scored(99.0, free_fraction=free_fraction, micro_batch_size=4)
        assert choose([tight, other], 0.05) is (other if is_roomy else tight)


def test_more_free_memory_than_that_is_worth_no_speed():
    """Otherwise chance would decide which of two equally fast configurations wins."""
    large, small = (
        scored(99.0, free_fraction=0.3, micro_batch_size=8),
        scored(98.0, free_fraction=0.6, micro_batch_size=4),
    )
    for fastest in (scored(100.0, free_fraction=0.3), scored(100.0, free_fraction=0.6)):
        assert (
            choose([replace(fastest, config=TrainConfig(lora_rank=8)), large, small], 0.05) is large
        )


@pytest.mark.parametrize(
    ("score", "noise", "free", "rank", "wins"),
    [
        (99.8, 0.01, 0.61, 16, True),
        (98.0, 0.01, 0.61, 16, False),  # slower than noise explains
        (98.0, 0.03, 0.61, 16, True),
        (94.0, 0.1, 0.61, 16, False),  # beyond the slack
        (99.8, 0.01, 0.343, 16, False),  # as much memory, in whole percent
        (99.8, 0.01, 0.61, 8, False),  # less capable
    ],
)
def test_a_tie_in_speed_goes_to_what_needs_less_memory(score, noise, free, rank, wins):
    fast = replace(scored(100.0, 0.34, micro_batch_size=16), noise=0.01)
    other = replace(scored(score, free, lora_rank=rank), noise=noise)
    assert choose([fast, other], 0.05) is (other if wins else fast)
    if wins:
        said = "it leaves more memory free, at no measurable cost; nothing more capable was tried"
        assert explain_choice(other, [fast, other], 0.05, RANKS, ()) == said
        assert score_to_beat(other, [fast], 0.05) == pytest.approx(100.0 / (1 + noise))


def test_of_equals_none_wins_whose_host_sets_the_pace():
    """It needs less memory, but whatever else the host does makes it slower."""
    steady, hosted = scored(100.0, 0.3, micro_batch_size=4), scored(100.5, 0.6, micro_batch_size=1)
    steady, hosted = (
        replace(one, noise=0.02, host_bound=one is hosted) for one in (steady, hosted)
    )
    assert choose([steady, hosted], 0.05) is steady
    assert explain_choice(steady, [steady, hosted], 0.05, RANKS, ()) == (
        "it is not CPU-bound, at no measurable cost; nothing more capable was tried"
    )
    assert score_to_beat(steady, [hosted], 0.05) == pytest.approx(100.5 / 1.02)
    assert score_to_beat(hosted, [steady], 0.05) == 100.0
    tight = replace(hosted, free_fraction=0.05)
    assert "it leaves more memory free" in explain_choice(steady, [steady, tight], 0.05, RANKS, ())
    faster = replace(hosted, score=104.0)
    assert choose([steady, faster], 0.05) is faster
    assert choose([replace(steady, host_bound=True), hosted], 0.05) is hosted


@pytest.mark.parametrize(("fastest_of_slow", "tied"), [(-0.04, True), (-0.01, False)])
def test_long_steps_on_a_busy_machine_tie_with_nothing_that_is_faster_in_all(fastest_of_slow, tied):
    """3 % slower within 20 % of noise, but by long steps alone: no step was as fast as the other's
    slowest.
    """
    fast = replace(scored(100.0, 0.3, micro_batch_size=16), noise=0.01, spread=(-0.005, 0.01))
    slow = replace(scored(97.0, 0.6), noise=0.2, spread=(fastest_of_slow, 0.8))
    assert slow.ties(fast) is fast.ties(slow) is tied
    assert fast.beats(slow) is not tied and not slow.beats(fast)
    assert choose([fast, slow], 0.05) is (slow if tied else fast)


def test_nobody_wins_an_empty_list():
    with pytest.raises(ValueError, match="empty"):
        choose([], 0.05)


@pytest.mark.parametrize(
    ("candidate", "bar"),
    [
        ({"lora_rank": 16}, 100.0),  # no more capable than the cheapest: it has to be faster
        ({"lora_rank": 32}, 100.0),  # nor than what is chosen already
        ({"lora_rank": 64}, 97.0),  # as capable as that: faster than that is enough
        ({"lora_rank": 128}, 100.0 / 1.05),  # more capable: within the slack is enough
        # or as capable, and leaves more free
        ({"lora_rank": 64, "free_fraction": 0.5}, 100.0 / 1.05),
    ],
)
def test_what_a_candidate_must_beat(candidate, bar):
    others = [
        scored(speed, 0.05, lora_rank=rank)
        for speed, rank in ((100.0, 16), (97.0, 64), (94.0, 256))
    ]
    candidate = {"free_fraction": 0.05} | candidate
    need = score_to_beat(scored(0.0, **candidate), others, 0.05)
    assert need == pytest.approx(bar)
    better, worse = scored(need * 1.001, **candidate), scored(need * 0.999, **candidate)
    assert choose([*others, worse], 0.05) is not worse
    cheapest = max([*others, better], key=lambda one: one.score)
    assert better in (choose([*others, better], 0.05), cheapest)


def test_a_knob_is_raised_whether_or_not_the_file_names_its_kind(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "version: 1\nknobs:\n  lora_rank: {values: [16, 32, 64]}\n"
        "  micro_batch_size: {values: [1, 8]}\n"
    )
    raised = more_capable(SearchSpace.load(str(path)), TrainConfig(lora_rank=16))
    assert [config.lora_rank for config in raised] == [64, 32]
