"""Dry probes of other objectives run TRL's own step, and hold what cards were measured to hold and
formulas say.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from trl.kernels import chunked_logprob
from trl.trainer import utils as trl_utils

from autotune.catalog import ModelSpec, resolve_model
from autotune.core.objective import Objective
from autotune.core.probe_types import DryCount, MicroBatch, ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.dry.counting import dry_probe
from autotune.dry.preference import simulate_trl
from autotune.dry.prober import DryProber
from autotune.prediction.memory_formula import memory_breakdown
from tests.helpers.factories import TINY
from tests.unit.prediction.test_sharded_memory import truncated

pytestmark = [
    pytest.mark.probe,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # TRL asks it
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing.*` is deprecated:FutureWarning"),
    # of GPT-2's Conv1D
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
    # of experts
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),
]

PROBED = [objective for objective in Objective if not objective.generates]
OTHERS = [objective for objective in PROBED if objective is not Objective.SFT]
MEASURED = json.loads(
    (Path(__file__).parents[2] / "benchmarks" / "results" / "objectives.json").read_text()
)["rows"]
MODEL = TINY | {"model_type": "llama", "num_hidden_layers": 2}
FULL = {"method": "full", "precision": "bf16_pure"}


def counted(model: ModelSpec, objective: Objective, **knobs: Any) -> DryCount:
    return dry_probe(asked(model.config, objective, **knobs))


def asked(model: dict[str, Any], objective: Objective, **knobs: Any) -> ProbeRequest:
    return ProbeRequest(
        config=TrainConfig(**knobs),
        model=model,
        memory_gib=1.0,
        objective=objective,
        trainer=objective.trainers[0],
    )


@pytest.mark.parametrize("objective", OTHERS)
def test_a_whole_model_holds_what_an_h200_was_measured_to_hold(
    objective: Objective, tmp_path: Path
) -> None:
    """Half of each measured row is an answer; here all of it is,
    so that a little more is counted.
    """
    row = next(
        row for row in MEASURED if row["model"] == "llama-3.2-3b" and row["objective"] == objective
    )
    knobs = {
        "micro_batch_size": 16 // objective.rows_per_example,
        "seq_len": 1024,
        "checkpointing": "full",
    }
    with DryProber(tmp_path) as prober:
        count = prober.count(asked(resolve_model("llama-3.2-3b").config, objective, **knobs)).count
    assert count is not None and count.peak_allocated_gib == pytest.approx(
        row["peak_gib"], rel=2e-3
    )
    assert count.peak_allocated_gib >= row["peak_gib"] * 0.9999


@pytest.mark.parametrize("objective", OTHERS)
@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("mistral-7b", {"checkpointing": "none"}),
        ("mistral-7b", {"checkpointing": "full", "quantization": "nf4"}),
        ("mistral-7b", {"checkpointing": "none", **FULL}),
        ("mistral-7b", {"checkpointing": "full", "method": "full"}),
        ("qwen2.5-1.5b", {"checkpointing": "none", "padding": "masked", "precision": "fp16_mixed"}),
        ("qwen2.5-1.5b", {"checkpointing": "full", **FULL}),
        ("qwen2.5-1.5b", {"checkpointing": "none", "method": "full"}),
    ],
    ids=str,
)
def test_the_formula_says_what_is_counted(
    name: str, objective: Objective, knobs: dict[str, Any]
) -> None:
    """Of four layers, where the head weighs much."""
    model = truncated(name, 4)
    rows = 8 // objective.rows_per_example
    count = counted(model, objective, micro_batch_size=rows, seq_len=512, **knobs)
    found = memory_breakdown(
        model, TrainConfig(micro_batch_size=rows, seq_len=512, **knobs), objective=objective
    )
    assert found is not None
    assert found.peak_gib == pytest.approx(count.peak_allocated_gib, rel=0.02)
    assert found.weights == pytest.approx(count.model_gib, rel=0.02)


def test_a_full_fine_tuning_for_answers_holds_a_copy_of_the_model() -> None:
    alone, beside = (
        counted(truncated("mistral-7b", 2), one, **FULL)
        for one in (Objective.REWARD, Objective.DPO)
    )
    head_gib = 2 * 32768 * 4096 / 2**30
    assert beside.model_gib == pytest.approx(2 * (alone.model_gib + head_gib), rel=1e-3)
    assert beside.gradients_gib == pytest.approx(alone.gradients_gib + head_gib, rel=1e-3)


def test_the_untrained_model_and_other_answers_are_more_work() -> None:
    """DPO has one more forward pass, KTO three; a step by labels has none."""
    rows = {Objective.DPO: 2, Objective.KTO: 4, Objective.CLASSIFICATION: 4}
    work = {
        one: counted(truncated("mistral-7b", 2), one, micro_batch_size=size, seq_len=256)
        for one, size in rows.items()
    }
    dpo, kto, labels = (sum(work[one].flops.values()) for one in rows)
    assert 1.4 < dpo / labels < 1.9 and 1.35 < kto / dpo < 1.7
    assert (
        work[Objective.KTO].operations
        > work[Objective.DPO].operations
        > work[Objective.CLASSIFICATION].operations
    )


@pytest.mark.parametrize("family", ["gpt2", "qwen3_moe", "gpt_neox"])
@pytest.mark.parametrize("objective", OTHERS)
def test_models_without_a_formula_are_counted(family: str, objective: Objective) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = MODEL | {"model_type": family, "n_embd": 32, "n_head": 2, "n_layer": 2, **experts}
    knobs: dict[str, Any] = {"micro_batch_size": 2, "seq_len": 32}
    if family == "gpt_neox" and not objective.num_labels:
        knobs |= {"checkpointing": "none"}
    count = dry_probe(asked(model, objective, **knobs))
    assert count.peak_allocated_gib > count.model_gib > 0 and count.trainable_params


def test_pairs_have_a_mask_where_their_rows_differ() -> None:
    """Also a pair alone: a micro batch of one example has two rows."""
    model = truncated("mistral-7b", 2)
    plain, masked = (
        counted(
            model,
            Objective.REWARD,
            micro_batch_size=1,
            seq_len=2048,
            checkpointing="none",
            padding=padding,
        )
        for padding in ("longest", "masked")
    )
    assert masked.segment_peak_gib["forward"] > plain.segment_peak_gib["forward"]


def test_rows_are_as_long_as_the_longest_that_are_asked_for() -> None:
    short = MicroBatch(rows=((16,), (16,)), length=16, share=1.0)
    request = asked(MODEL, Objective.DPO, micro_batch_size=2, seq_len=64, checkpointing="none")
    less = dry_probe(replace(request, micro_batches=(short,)))
    assert less.segment_peak_gib["forward"] < dry_probe(request).segment_peak_gib["forward"]


def test_answers_for_one_objective_are_not_those_for_another(tmp_path: Path) -> None:
    with DryProber(tmp_path) as prober:
        knobs = {"micro_batch_size": 2, "seq_len": 64, "checkpointing": "none"}
        counts = [prober.count(asked(MODEL, one, **knobs)).count for one in PROBED]
    assert all(counts) and len({count.operations for count in counts if count}) == len(counts)


def test_trl_is_as_before_outside() -> None:
    before = trl_utils._use_triton, chunked_logprob._backward_tile, chunked_logprob._addmm_fp32
    with simulate_trl(padded=False):
        assert (torch.ones((), device="meta") * 2).item() == 1.0
        assert bool(torch.ones(2, dtype=torch.bool, device="meta").all())
    with simulate_trl(padded=True):
        assert not bool(torch.ones(2, dtype=torch.bool, device="meta").all())
        assert torch.ones((), dtype=torch.long, device="meta").item() == 1
    assert before == (
        trl_utils._use_triton,
        chunked_logprob._backward_tile,
        chunked_logprob._addmm_fp32,
    )
    assert torch.full((), 3.0).item() == 3.0
