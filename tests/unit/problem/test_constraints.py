"""Floors that are never given up unasked."""

import pytest

from autotune.problem.constraints import Floors, Narrowing, apply_floors
from autotune.problem.length_distribution import Lengths
from autotune.problem.search_space import Knob, SearchSpace, load_space
from autotune.problem.workload import Workload

WORKLOAD = Workload(examples=1000, lengths=Lengths.constant(1024), global_batch=32)


def space(**knobs) -> SearchSpace:
    return SearchSpace(name="test", knobs=tuple(Knob(name=name, values=values) for name, values in knobs.items()))


def floored(searched: SearchSpace, workload: Workload = WORKLOAD, **floors) -> Narrowing:
    narrowing = Narrowing.of(searched)
    apply_floors(narrowing, workload, Floors(**floors))
    return narrowing


def narrowed(searched: SearchSpace, workload: Workload = WORKLOAD, **floors) -> dict[str, tuple]:
    return {knob.name: knob.choices() for knob in floored(searched, workload, **floors).space.knobs}


def test_the_default_floors():
    narrowing = floored(load_space("default"))
    assert {knob.name: knob.choices() for knob in narrowing.space.knobs if knob.kind == "learning"} == {
        "method": ("lora",),
        "quantization": ("none",),
        "double_quant": (True, False),
        "seq_len": (1024,),
        "lora_rank": (16, 32, 64),
        "precision": ("bf16_mixed", "bf16_pure", "fp16_mixed"),
        "optimizer": ("adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit"),
    }
    assert [str(removal) for removal in narrowing.removals] == [
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
