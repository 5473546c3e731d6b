"""The gate refuses what is surely as large as something that ran out, and nothing else."""

from dataclasses import replace

import pytest

from autotune.core.train_config import TrainConfig
from autotune.prediction.memory_predictor import Frontier, KnownOom, needs_at_least
from tests.helpers.factories import oom_detail

BASE = TrainConfig(micro_batch_size=8, seq_len=1024, lora_rank=16, checkpointing="every_2", optimizer="adamw_8bit")


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"micro_batch_size": 16},
        {"seq_len": 1025},
        {"lora_rank": 17},
        {"checkpointing": "none"},
        {"checkpointing": "every_3"},  # recomputes fewer layers
        {"optimizer": "adamw_torch"},
        {"optimizer": "adamw_torch_fused"},
        {"micro_batch_size": 32, "seq_len": 4096, "lora_rank": 64, "checkpointing": "none"},
    ],
)
def test_larger_in_every_knob(change):
    assert needs_at_least(replace(BASE, **change), BASE)


@pytest.mark.parametrize(
    "change",
    [
        {"micro_batch_size": 4},
        {"seq_len": 1023},
        {"lora_rank": 8},
        {"checkpointing": "full"},
        {"optimizer": "paged_adamw_8bit"},
        {"optimizer": "lion_8bit"},
        {"optimizer": "adafactor"},  # not in the order
        {"precision": "fp32"},
        {"quantization": "nf4"},
        {"attention": "eager"},
        {"packing": True},
        {"dora": True},
        {"compile": "per_layer"},
        {"loss": "chunked"},
        {"method": "full"},
        {"micro_batch_size": 32, "seq_len": 512},  # twice the tokens, but shorter rows
        {"micro_batch_size": 32, "checkpointing": "full"},
    ],
)
def test_not_comparable(change):
    assert not needs_at_least(replace(BASE, **change), BASE)


def test_optimizers_out_of_the_order_are_compared_with_themselves():
    small, large = TrainConfig(optimizer="adafactor"), TrainConfig(optimizer="adafactor", micro_batch_size=16)
    assert needs_at_least(large, small)
    assert not needs_at_least(large, replace(small, optimizer="lion_8bit"))
    full = TrainConfig(method="full", micro_batch_size=1)
    assert needs_at_least(replace(full, micro_batch_size=2), full)
    assert needs_at_least(TrainConfig(optimizer="adamw_torch"), TrainConfig())
    assert needs_at_least(TrainConfig(), TrainConfig(optimizer="adamw_torch"))


def test_the_frontier_names_the_first_that_ran_out():
    frontier = Frontier()
    assert frontier.refuses(BASE, 2) is None
    larger = replace(BASE, micro_batch_size=16)
    frontier.add(KnownOom(trial=3, config=larger, micro_steps=2, detail=oom_detail()))
    frontier.add(KnownOom(trial=None, config=BASE, micro_steps=2, detail=oom_detail()))
    assert frontier.refuses(replace(BASE, micro_batch_size=32), 2).trial == 3
    known = frontier.refuses(replace(BASE, micro_batch_size=15), 2)
    assert (known.trial, known.config, known.detail) == (None, BASE, oom_detail())
    assert frontier.refuses(replace(BASE, micro_batch_size=7), 2) is None


def test_a_step_of_one_micro_batch_keeps_no_gradients_alive_and_is_not_refused_for_them():
    frontier = Frontier()
    frontier.add(KnownOom(trial=3, config=BASE, micro_steps=2, detail=oom_detail()))
    whole_batch = replace(BASE, micro_batch_size=32)
    assert frontier.refuses(whole_batch, 1) is None
    frontier.add(KnownOom(trial=4, config=BASE, micro_steps=1, detail=oom_detail()))
    assert frontier.refuses(whole_batch, 1).trial == 4
