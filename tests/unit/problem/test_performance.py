"""Scores by hand, floors that are never traded unasked, and one winner with its reason."""

from dataclasses import replace

import pytest

from autotune.core.probe_types import Outcome
from autotune.core.train_config import TrainConfig
from autotune.problem.length_distribution import Lengths
from autotune.problem.performance import (
    AGAIN,
    UNSEEN,
    Floors,
    Scored,
    apply_floors,
    capability,
    choose,
    leanest,
    margins,
    performance,
    score,
    step_spread,
    step_time_s,
    to_beat,
)
from autotune.problem.search_space import Knob, SearchSpace, load_space
from autotune.problem.workload import Workload
from tests.helpers.factories import measurement, oom_detail, result

WORKLOAD = Workload(examples=1000, lengths=Lengths.constant(1024), global_batch=32)


def space(**knobs) -> SearchSpace:
    return SearchSpace(name="test", knobs=tuple(Knob(name=name, values=values) for name, values in knobs.items()))


# --- time and score


def test_a_step_is_its_micro_batches_and_the_rest():
    one = measurement(micro_step_s=(0.5, 0.4, 9.0), rest_s=(0.02, 0.03, 0.01))
    assert step_time_s(one, 4) == pytest.approx(4 * 0.5 + 0.02)
    assert step_time_s(measurement(micro_step_s=(0.5,), rest_s=()), 1) == 0.5


def test_spread_is_relative_to_the_reported_step():
    one = measurement(step_s=(1.0, 0.9, 1.2), micro_step_s=(0.5,), rest_s=(0.0,))
    assert step_spread([one], 2) == pytest.approx((-0.1, 0.2))
    assert step_spread([one], 20) == pytest.approx((-0.1, 0.2))
    faster = measurement(step_s=(0.5,), micro_step_s=(0.25,), rest_s=(0.0,))
    assert step_spread([one, faster], 2) == pytest.approx((0.5 / 0.75 - 1, 1.2 / 0.75 - 1))  # 0.75 is reported
    assert step_spread([faster], 1) == (-UNSEEN, UNSEEN)  # one step tells nothing of its spread
    parted = replace(faster, micro_step_s=(0.49, 0.5, 0.53), rest_s=())
    assert step_spread([parted], 1) == pytest.approx((-0.02, 0.06))  # but for its micro batches
    steady = replace(faster, step_s=(0.5,) * 9)
    assert step_spread([steady], 1) == (-AGAIN, AGAIN)  # another probe would not agree with it like that


def test_performance_by_hand():
    # 32 sequences of 1,024 useful tokens in 4 micro batches of 0.5 s and 0.02 s for the optimizer.
    speed = performance(
        TrainConfig(micro_batch_size=8, seq_len=2048),
        [measurement(0.5)],
        WORKLOAD,
        flops_per_token=1e9,
        peak_tflops=100.0,
    )
    assert speed.step_time_s == pytest.approx(2.02)
    assert speed.samples_per_second == pytest.approx(32 / 2.02)
    assert speed.tokens_per_second == pytest.approx(32 * 1024 / 2.02)
    assert speed.mfu == pytest.approx(32 * 2048 * 1e9 / 2.02 / 1e14)  # padding is arithmetic too


def test_the_median_of_the_measurements_counts():
    config = TrainConfig(micro_batch_size=32)
    three = [measurement(0.5), measurement(0.6), measurement(5.0)]
    assert performance(config, three, WORKLOAD).step_time_s == pytest.approx(0.62)


@pytest.mark.parametrize("known", [{}, {"flops_per_token": 1e9}, {"peak_tflops": 100.0}])
def test_an_unknown_peak_gives_no_mfu(known):
    assert performance(TrainConfig(), [measurement()], WORKLOAD, **known).mfu is None


def test_cut_off_tokens_do_not_count():
    config = TrainConfig(micro_batch_size=32, seq_len=512)
    assert performance(config, [measurement(0.48)], WORKLOAD).tokens_per_second == pytest.approx(32 * 512 / 0.5)


def test_a_micro_batch_that_does_not_divide_has_no_performance():
    with pytest.raises(ValueError, match="micro batch 5 does not divide the global batch 32"):
        performance(TrainConfig(micro_batch_size=5), [measurement()], WORKLOAD)


def test_only_what_came_through_or_was_pruned_as_slow_has_a_score():
    for outcome in (Outcome.OK, Outcome.SLOW):
        assert score(result(outcome=outcome, measurement=measurement()), WORKLOAD) == pytest.approx(32 * 1024 / 2.02)
    for outcome in set(Outcome) - {Outcome.OK, Outcome.SLOW}:
        assert score(result(outcome=outcome, measurement=measurement()), WORKLOAD) is None
    assert score(result(measurement=None), WORKLOAD) is None


# --- margins


@pytest.mark.parametrize(
    ("outcome", "changes", "memory", "health"),
    [
        (Outcome.OK, {"measurement": measurement(peak_reserved_gib=66.0)}, -0.5, 0.0),
        (Outcome.OOM, {}, 133 / 132 - 1, 0.0),
        (Outcome.OOM, {"oom": None}, 0.001, 0.0),
        (Outcome.REFUSED, {"oom": oom_detail()}, 133 / 132 - 1, 0.0),
        (Outcome.NUMERICS, {"measurement": measurement(peak_reserved_gib=66.0)}, -0.5, 1.0),
        (Outcome.NUMERICS, {}, 0.0, 1.0),
        (Outcome.TIMEOUT, {}, 0.0, 1.0),
        (Outcome.CRASH, {}, 0.0, 1.0),
    ],
)
def test_margins(outcome, changes, memory, health):
    assert margins(result(outcome=outcome, **changes)) == pytest.approx({"memory": memory, "health": health})


# --- floors


def narrowed(searched: SearchSpace, workload: Workload = WORKLOAD, **floors) -> dict[str, tuple]:
    return {knob.name: knob.choices() for knob in apply_floors(searched, workload, Floors(**floors))[0].knobs}


def test_the_default_floors():
    kept, removals = apply_floors(load_space("default"), WORKLOAD, Floors())
    assert {knob.name: knob.choices() for knob in kept.knobs if knob.kind == "learning"} == {
        "quantization": ("none",),
        "double_quant": (True, False),
        "seq_len": (1024,),
        "lora_rank": (16, 32, 64),
        "precision": ("bf16_mixed", "bf16_pure", "fp16_mixed"),
        "optimizer": ("adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit"),
    }
    assert [str(removal) for removal in removals] == [
        "seq_len 512: would cut off more than 1% of the tokens (--max-truncated)",
        "seq_len 2048, 4096: no example is longer than 1024 tokens: the rest of a row would be padding",
        "lora_rank 8: below the rank floor of 16 (--min-rank)",
        "quantization fp8, int8, nf4: a quantised base learns differently: used only where nothing else fits "
        "(--allow-quantized)",
    ]


@pytest.mark.parametrize(
    ("length", "max_truncated", "kept"),
    [
        (1024, 0.0, (1024,)),
        (1024, 0.5, (512, 1024)),  # what is allowed to be cut may be
        (1034, 0.01, (1024, 2048)),  # 0.97 % cut off
        (1035, 0.01, (2048,)),  # 1.06 %
        (300, 0.01, (512,)),
        (8192, 0.01, (4096,)),  # longer than everything: as little as can be
        (8192, 0.8, (2048, 4096)),
        (4097, 0.0, (4096,)),
    ],
)
def test_the_floor_of_length(length, max_truncated, kept):
    lengths = space(seq_len=(512, 1024, 2048, 4096))
    workload = Workload(lengths=Lengths.constant(length))
    assert narrowed(lengths, workload, max_truncated=max_truncated)["seq_len"] == kept


def test_a_floor_of_length_on_a_range():
    lengths = SearchSpace(name="range", knobs=(Knob(name="seq_len", low=64, high=4096),))
    assert narrowed(lengths, Workload(lengths=Lengths.constant(1000)))["seq_len"] == tuple(range(990, 1001))


@pytest.mark.parametrize(
    ("knobs", "floors", "kept"),
    [
        ({"lora_rank": (4,)}, {}, (4,)),  # a pin is the user's choice
        ({"lora_rank": (4, 8)}, {}, (4, 8)),  # nothing would be left
        ({"lora_rank": (4, 8, 64)}, {"min_rank": 8}, (8, 64)),
        ({"quantization": ("nf4",)}, {}, ("nf4",)),
        ({"quantization": ("nf4", "int8")}, {}, ("nf4", "int8")),
        ({"quantization": ("nf4", "none")}, {"allow_quantized": True}, ("nf4", "none")),
        ({"seq_len": (64,)}, {}, (64,)),
        ({"optimizer": ("adafactor", "adamw_torch", "lion_8bit")}, {}, ("adamw_torch",)),
        ({"optimizer": ("adafactor", "adamw_torch")}, {"allow_any_optimizer": True}, ("adafactor", "adamw_torch")),
        ({"precision": ("bf16_pure", "bf16_mixed")}, {}, ("bf16_pure", "bf16_mixed")),
        ({"precision": ("bf16_pure", "bf16_mixed"), "method": ("full",)}, {}, ("bf16_mixed",)),
        ({"precision": ("bf16_pure", "fp32"), "method": ("full",)}, {"allow_pure_bf16": True}, ("bf16_pure", "fp32")),
        ({"precision": ("bf16_pure",), "method": ("full",)}, {}, ("bf16_pure",)),
        ({"micro_batch_size": (1, 2)}, {}, (1, 2)),
    ],
)
def test_floors(knobs, floors, kept):
    assert next(iter(narrowed(space(**knobs), **floors).values())) == kept


def test_the_leanest_choice():
    assert leanest(load_space("default")) == {
        "method": "lora",
        "quantization": "nf4",
        "double_quant": True,
        "micro_batch_size": 1,
        "seq_len": 512,
        "lora_rank": 8,
        "precision": "bf16_pure",
        "optimizer": "paged_adamw_8bit",
        "checkpointing": "full",
        "compile": "none",
        "attention": "flash_attention_2",
        "loss": "chunked",
        "packing": False,
    }
    assert leanest(space(checkpointing=("none", "every_4", "every_2"))) == {"checkpointing": "every_2"}
    assert leanest(space(method=("full", "lora"), lora_rank=(8, 4))) == {"method": "lora", "lora_rank": 4}
    assert leanest(space(method=("full",), lora_rank=(8,))) == {"method": "full"}


@pytest.mark.parametrize("name", ["cpu", "default", "full", "lora", "qlora"])
def test_the_leanest_is_a_configuration_of_every_space(name):
    shipped = load_space(name)
    assert shipped.clip(shipped.config(leanest(shipped))) == leanest(shipped)


# --- the winner


def scored(speed: float, headroom: float = 0.5, **knobs) -> Scored:
    return Scored(config=TrainConfig(**knobs), score=speed, headroom=headroom)


def test_capability_is_an_order():
    evaluator = [
        TrainConfig(quantization="nf4", lora_rank=64),
        TrainConfig(quantization="int8", lora_rank=8),
        TrainConfig(method="full", precision="bf16_pure"),
        TrainConfig(lora_rank=16, seq_len=4096),
        TrainConfig(lora_rank=32, seq_len=512),
        TrainConfig(lora_rank=32, precision="bf16_pure"),
        TrainConfig(lora_rank=32, precision="fp16_mixed"),
        TrainConfig(lora_rank=32, optimizer="adafactor"),
        TrainConfig(lora_rank=32, optimizer="adamw_8bit"),
        TrainConfig(lora_rank=32),
        TrainConfig(lora_rank=32, dora=True, seq_len=512),
    ]
    assert sorted(evaluator, key=capability) == evaluator
    assert capability(TrainConfig(micro_batch_size=1, compile="per_layer")) == capability(TrainConfig())


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


def test_a_tenth_of_headroom_is_worth_the_slack():
    tight, roomy = scored(100.0, headroom=0.02), scored(99.0, headroom=0.31, checkpointing="every_2")
    winner, reason = choose([tight, roomy], 0.05)
    assert winner is roomy
    assert reason == "it leaves more memory free, for 1.0% more cost than the cheapest (slack 5%)"
    assert choose([tight, scored(99.0, headroom=0.04, micro_batch_size=4)], 0.05)[0] is tight


def test_no_speed_is_given_for_more_headroom_than_that():
    """Or the winner would hang on which of two that are equally fast happens to be the faster."""
    large, small = scored(99.0, headroom=0.3, micro_batch_size=8), scored(98.0, headroom=0.6, micro_batch_size=4)
    for fastest in (scored(100.0, headroom=0.3), scored(100.0, headroom=0.6)):
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
        ({"lora_rank": 64, "headroom": 0.5}, 100.0 / 1.05),  # or as capable, and leaves more free
    ],
)
def test_what_a_candidate_must_beat(candidate, bar):
    others = [scored(speed, 0.05, lora_rank=rank) for speed, rank in ((100.0, 16), (97.0, 64), (94.0, 256))]
    candidate = {"headroom": 0.05} | candidate
    need = to_beat(scored(0.0, **candidate), others, 0.05)
    assert need == pytest.approx(bar)
    better, worse = scored(need * 1.001, **candidate), scored(need * 0.999, **candidate)
    assert choose([*others, worse], 0.05)[0] is not worse
    cheapest = max([*others, better], key=lambda one: one.score)
    assert better in (choose([*others, better], 0.05)[0], cheapest)
