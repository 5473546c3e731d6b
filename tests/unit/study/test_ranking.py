"""One winner with its reason, and what another candidate must beat."""

from dataclasses import replace

import pytest

from autotune.core.train_config import TrainConfig
from autotune.problem.search_space import SearchSpace
from autotune.study.ranking import Scored, choose, more_capable, to_beat


def scored(speed: float, free_fraction: float = 0.5, **knobs) -> Scored:
    return Scored(config=TrainConfig(**knobs), score=speed, free_fraction=free_fraction)


def test_the_cheapest_wins():
    fast, slow = scored(110.0, micro_batch_size=4), scored(100.0)
    winner, reason = choose([slow, fast], 0.05)
    assert winner is fast
    assert reason == "the cheapest above the floors; nothing more capable is within the slack"
    assert choose([slow], 0.0) == (slow, reason)


def test_more_capable_within_the_slack_wins():
    fast = scored(104.0, lora_rank=16, optimizer="adamw_8bit")
    able = scored(100.0, lora_rank=64)
    winner, reason = choose([fast, able], 0.05)
    assert winner is able
    assert reason == (
        "it is more capable: lora_rank 64 instead of 16, optimizer adamw_torch_fused instead of adamw_8bit, "
        "for 4.0% more cost than the cheapest (slack 5%)"
    )
    assert choose([fast, able], 0.03)[0] is fast
    assert choose([fast, able], 0.0)[0] is fast


def test_the_slack_is_a_share_of_the_cost():
    # 100 / 95.3 is 4.93 % more cost; 100 / 95.2 is 5.04 %.
    fast = scored(100.0)
    assert choose([fast, scored(95.3, lora_rank=64)], 0.05)[0].config.lora_rank == 64
    assert choose([fast, scored(95.2, lora_rank=64)], 0.05)[0] is fast


def test_a_tenth_of_free_memory_is_worth_the_slack():
    tight, roomy = scored(100.0, free_fraction=0.02), scored(99.0, free_fraction=0.31, checkpointing="every_2")
    winner, reason = choose([tight, roomy], 0.05)
    assert winner is roomy
    assert reason == "it leaves more memory free, for 1.0% more cost than the cheapest (slack 5%)"
    assert choose([tight, scored(99.0, free_fraction=0.04, micro_batch_size=4)], 0.05)[0] is tight


def test_more_free_memory_than_that_is_worth_no_speed():
    """Otherwise chance would decide which of two equally fast configurations wins."""
    large, small = (
        scored(99.0, free_fraction=0.3, micro_batch_size=8),
        scored(98.0, free_fraction=0.6, micro_batch_size=4),
    )
    for fastest in (scored(100.0, free_fraction=0.3), scored(100.0, free_fraction=0.6)):
        assert choose([replace(fastest, config=TrainConfig(lora_rank=8)), large, small], 0.05)[0] is large


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
        ({"lora_rank": 64, "free_fraction": 0.5}, 100.0 / 1.05),  # or as capable, and leaves more free
    ],
)
def test_what_a_candidate_must_beat(candidate, bar):
    others = [scored(speed, 0.05, lora_rank=rank) for speed, rank in ((100.0, 16), (97.0, 64), (94.0, 256))]
    candidate = {"free_fraction": 0.05} | candidate
    need = to_beat(scored(0.0, **candidate), others, 0.05)
    assert need == pytest.approx(bar)
    better, worse = scored(need * 1.001, **candidate), scored(need * 0.999, **candidate)
    assert choose([*others, worse], 0.05)[0] is not worse
    cheapest = max([*others, better], key=lambda one: one.score)
    assert better in (choose([*others, better], 0.05)[0], cheapest)


def test_a_knob_is_raised_whether_or_not_the_file_names_its_kind(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("version: 1\nknobs:\n  lora_rank: {values: [16, 32, 64]}\n  micro_batch_size: {values: [1, 8]}\n")
    raised = more_capable(SearchSpace.load(str(path)), TrainConfig(lora_rank=16))
    assert [config.lora_rank for config in raised] == [64, 32]
