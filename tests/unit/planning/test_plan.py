"""Plans: what fits, the rule of the winner, what other people's measurements change, and the
command itself.
"""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.catalog import list_devices, resolve_device, resolve_model
from autotune.cli.commands import plan as command
from autotune.core.errors import NothingFits, UsageError
from autotune.core.json_view import json_data
from autotune.core.objective import Objective
from autotune.core.probe_types import Evidence, Outcome
from autotune.core.train_config import TrainConfig
from autotune.core.units import fmt_gib
from autotune.planning import plan as plan_module
from autotune.planning.device_estimate import (
    corrected_by_observations,
    device_limit_gib,
    planned_device,
)
from autotune.planning.named_estimates import estimate_named_configs
from autotune.planning.observations import known_observations, published_observations
from autotune.planning.plan import (
    BATCHES,
    candidates,
    distinguishable,
    memory_tables,
    plan,
    plan_setup,
    plan_task,
    planned_setup,
    table_cells,
)
from autotune.prediction import memory_formula, step_time
from autotune.prediction.estimate import estimate
from autotune.prediction.memory_formula import CONTEXT_GIB, ERROR, memory_breakdown
from autotune.prediction.observed_speed import Observation, measured_ratios, observed_transfer
from autotune.prediction.transfer import speed_transfer
from autotune.problem.run_cost import FITS, OOM, TIGHT
from autotune.problem.search_space import SearchSpace
from autotune.problem.study_spec import NamedConfig, StudySpec
from autotune.problem.task import BASELINE
from autotune.report.values.plan import Plan

A10, H100 = resolve_device("a10"), resolve_device("h100")
HERE = Path("nowhere")


def task(gpu: str = "a10", **spec: Any) -> Any:
    return planned_setup(
        StudySpec(**{"model": "mistral-7b", "gpu": gpu} | spec), resolve_device(gpu)
    ).task


def planned(case: Any) -> Plan:
    return plan_task(case, device_limit_gib(case.device, 0.05))


def observation(tokens_per_s: float, **changes: Any) -> Observation:
    values: dict[str, Any] = {
        "device": "a10",
        "model": "mistralai/Mistral-7B-v0.3",
        "model_digest": None,
        "config": TrainConfig(micro_batch_size=8, seq_len=512),
        "accumulation": 4,
        "tokens_per_s": tokens_per_s,
        "step_time_s": None,
        "peak_reserved_gib": None,
        "source": "a test",
        "as_of": None,
    }
    return Observation(**values | changes)


def test_a_published_case_is_estimated_as_it_was_measured() -> None:
    """An A10 with 8 rows of 512 tokens: about 20 GB with every layer recomputed, out of memory
    without.
    """
    case, limit = task(), device_limit_gib(A10, 0.0)
    config = TrainConfig(micro_batch_size=8, seq_len=512, optimizer="paged_adamw_8bit")
    recomputed = estimate(case, config, limit)
    plain = estimate(case, replace(config, checkpointing="none"), limit)
    assert recomputed is not None and plain is not None
    assert (recomputed.state, plain.state) == (FITS, OOM)
    assert recomputed.need_gib + CONTEXT_GIB == pytest.approx(20e9 / 2**30, rel=0.15)


def test_an_observation_on_a_card_corrects_its_estimated_speed() -> None:
    case, limit, config = (
        task(),
        device_limit_gib(A10, 0.05),
        TrainConfig(micro_batch_size=4, seq_len=512),
    )
    alone = estimate(case, config, limit)
    slow = estimate(case, config, limit, [observation(500.0)])
    assert (
        alone
        and slow
        and alone.tokens_per_s
        and slow.tokens_per_s
        and alone.interval
        and slow.interval
    )
    assert slow.tokens_per_s < alone.tokens_per_s
    assert slow.interval[1] / slow.interval[0] < alone.interval[1] / alone.interval[0]
    assert slow.num_observations == 1 and slow.cost and slow.cost.evidence is Evidence.ESTIMATED


def test_examples_a_second_follow_from_tokens_a_second() -> None:
    """Nobody gave lengths: each row of 512 tokens holds an example of 1,024 that is cut."""
    found = estimate(task(), TrainConfig(micro_batch_size=4, seq_len=512), 100.0)
    assert (
        found
        and found.tokens_per_s
        and found.samples_per_s == pytest.approx(found.tokens_per_s / 512)
    )


def test_8_bit_products_take_a_card_that_has_them() -> None:
    fp8 = TrainConfig(quantization="fp8", compile="per_layer", seq_len=512)
    found, without = (estimate(task(gpu), fp8, 100.0) for gpu in ("h100", "a100-80gb"))
    assert found and found.tokens_per_s and without and without.tokens_per_s is None


def test_a_projection_from_another_card_is_corrected_as_one_from_the_reference() -> None:
    """H200 to A10 is H200 to A100 and then A100 to A10, whatever was measured on the A10."""
    (h200, a100), config, seen = (
        map(resolve_device, ("h200", "a100")),
        TrainConfig(),
        [observation(500.0)],
    )
    whole, rest = (observed_transfer(card, A10, config, seen) for card in (h200, a100))
    first = speed_transfer(h200, a100)
    assert whole and rest and first
    assert whole.products == pytest.approx(first.products * rest.products)
    assert whole.bytes == pytest.approx(first.bytes * rest.bytes)


def test_a_projection_is_corrected_only_by_what_was_measured_on_its_card() -> None:
    case = task()
    assert corrected_by_observations(case, [observation(500.0)]) is case
    carried = replace(case, measured_on=H100)
    assert corrected_by_observations(carried, []) is carried
    assert corrected_by_observations(carried, [observation(500.0, device="l4")]) is carried
    slow, fast = (
        corrected_by_observations(carried, [observation(speed)]).carried for speed in (500.0, 800.0)
    )
    assert slow and fast and slow.basis == fast.basis == 1 and slow.products < fast.products


@pytest.mark.parametrize(
    "other",
    [
        {"device": "l4"},
        {"model": None},
        {"config": TrainConfig(quantization="nf4")},
        {"config": TrainConfig(method="full")},
        {"config": TrainConfig(micro_batch_size=1, seq_len=64)},  # the host may have set the pace
        {"model": "openai-community/gpt2"},
        {"evidence": Evidence.EXTRAPOLATED},
        {"trainer": "trl"},
        {"tokens_per_s": 32_768_000.0},
    ],
    ids=str,
)
def test_observations_of_something_else_do_not_count(other: dict[str, Any]) -> None:
    assert (
        measured_ratios([observation(**{"tokens_per_s": 300.0} | other)], A10, "lora", "none") == []
    )


def test_published_observations_are_of_known_cards_and_models() -> None:
    assert published_observations()
    for one in published_observations():
        assert one.device in {device.name for device in list_devices()} and one.source
        assert resolve_model(one.model or "").params


def test_the_best_fits_and_is_no_slower_than_what_guides_give() -> None:
    for gpu in ("a10", "h100", "t4"):
        made = planned(task(gpu, space="qlora"))
        assert (
            made.best
            and made.best.state == FITS
            and made.best.tokens_per_s
            and made.baseline.tokens_per_s
        )
        assert made.best.tokens_per_s >= made.baseline.tokens_per_s
        assert made.best.need_gib < made.limit_gib
        assert made.num_estimated == made.space_size


def test_if_nothing_fits_there_is_no_best() -> None:
    made = planned(task(model="llama-3.1-70b"))
    assert made.best is None and made.baseline.state == OOM


def test_a_model_family_without_a_formula_is_an_error() -> None:
    with pytest.raises(UsageError, match="there is no formula for mixtral models"):
        planned(task(model="mixtral-8x7b"))


def test_what_a_run_of_the_model_refuses_is_not_planned() -> None:
    """The logits of Gemma 2 are capped after the head: a loss in chunks would leave that out."""
    case = task("h100", model="gemma-2-9b", allow_quantized=True)
    assert case.space.choices("loss") == ("full",) and "sdpa" not in case.space.choices("attention")
    spec = StudySpec(model="gemma-2-9b", gpu="h100")
    data = json_data(plan(spec))
    assert (data["best"] or data["baseline"])["config"]["loss"] == "full"
    with pytest.raises(UsageError, match="changes its logits after its head"):
        planned_setup(replace(spec, pins={"loss": "chunked"}), H100)
    assert "chunked" in task("h100").space.choices("loss")


def test_the_formulas_are_not_computed_again_for_another_card(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor is the space walked again, which takes as long as all estimates do."""
    small, large = task("a10", space="qlora"), task("l4", space="qlora")
    first = planned(small)
    monkeypatch.setattr(memory_formula, "step_moments", None)
    monkeypatch.setattr(step_time, "StepTimeEstimate", None)
    monkeypatch.setattr(SearchSpace, "enumerate", None)
    second = planned(large)
    assert first.best and second.best and second.num_estimated == first.num_estimated > 1000
    assert (second.best.tokens_per_s or 0.0) < (first.best.tokens_per_s or 0.0)


@pytest.mark.parametrize("space", ["default", "lora", "qlora", "full"])
@pytest.mark.parametrize(
    ("model", "batch"), [("llama-3.2-1b", 32), ("mistral-7b", 16), ("gemma-2-9b", 32)]
)
def test_what_is_left_out_for_what_others_need_does_not_fit(
    model: str, batch: int, space: str
) -> None:
    """A micro batch of the whole global batch has no gradients that wait, and may fit where half of
    it does not.
    """
    case = task("rtx-4090", model=model, space=space, global_batch=batch)
    configs, limit_gib = candidates(case.space), device_limit_gib(case.device, 0.05)
    each = {config: estimate(case, config, limit_gib, with_cost=False) for config in configs}
    fits = {
        config: one
        for config, one in each.items()
        if one and one.state == FITS and one.tokens_per_s
    }
    assert plan_module._fitting(case, configs, limit_gib, ()) == (fits, [])
    assert len(fits) < len(configs)


def test_only_the_winner_has_a_cost() -> None:
    """The other configurations have the same estimates as with a cost."""
    case = task("rtx-4090", model="mistral-7b")
    limit_gib = device_limit_gib(case.device, 0.05)
    fits, _ = plan_module._fitting(case, candidates(case.space), limit_gib, ())
    for config, without in list(fits.items())[::100]:
        whole = estimate(case, config, limit_gib)
        assert whole and whole.cost and without == replace(whole, cost=None)
    best = planned(case).best
    assert best == estimate(case, best.config, limit_gib)


def test_a_large_space_is_sampled_everywhere() -> None:
    """And what makes no difference to the formulas does not multiply it."""
    made = planned(
        task("a100-80gb", space="everything", allow_quantized=True, allow_any_optimizer=True)
    )
    assert 10_000 < made.space_size < 30_000 and 5_000 < made.num_estimated <= 10_000
    assert made.best and made.best.config.micro_batch_size * made.best.config.seq_len > 2048


@pytest.mark.parametrize(
    ("pins", "what"),
    [
        ({"quantization": "int8"}, "int8 bases"),
        ({"precision": "fp32"}, "fp32 precision"),
        ({"dora": True}, "DoRA"),
        ({"checkpointing": "offload"}, "offloaded checkpoints"),
    ],
)
def test_a_configuration_without_a_formula_is_an_error(pins: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=f"there is no formula for {what}$"):
        planned(task(space="qlora", pins=pins))


def test_no_more_is_planned_for_than_the_card_has() -> None:
    assert device_limit_gib(A10, 0.05, 80.0) == device_limit_gib(A10, 0.05) and device_limit_gib(
        A10, 0.05, 16.0
    ) < device_limit_gib(A10, 0.05)


def test_a_card_without_memory_cannot_be_planned_for() -> None:
    with pytest.raises(UsageError, match="its memory is not known") as unknown:
        device_limit_gib(replace(A10, memory_gib=None), 0.05)
    assert "--memory-gib" in (unknown.value.remedy or "")
    # which --memory-gib does not change
    with pytest.raises(UsageError, match="its memory is the host's") as host:
        device_limit_gib(resolve_device("cpu"), 0.05, 4.0)
    assert host.value.remedy == "name a GPU"


def test_near_the_limit_the_state_is_tight() -> None:
    case, config = task(), TrainConfig(micro_batch_size=4, seq_len=1024)
    found = estimate(case, config, 100.0)
    assert found is not None
    need = found.need_gib
    verdicts = [estimate(case, config, need * factor) for factor in (0.95, 0.99, 1.01, 1.1)]
    assert [one and one.state for one in verdicts] == [OOM, TIGHT, TIGHT, FITS]


def test_a_table_grows_in_both_directions() -> None:
    cells = list(table_cells(task(), BASELINE, 20.0, (1, 4), (512, 2048)))
    assert [(cell.seq_len, cell.micro_batch_size) for cell in cells] == [
        (512, 1),
        (512, 4),
        (2048, 1),
        (2048, 4),
    ]
    needs = [cell.recomputed.need_gib for cell in cells]
    assert needs[0] < needs[1] < needs[3] and needs[1] == pytest.approx(needs[2])
    assert all(
        cell.chosen is (cell.plain if cell.plain.state == FITS else cell.recomputed)
        for cell in cells
    )


def test_configurations_that_are_named_are_estimated_one_by_one() -> None:
    """Rows of 512 tokens, 4 in a micro batch, 2 of these in a step."""
    fits = {"micro_batch_size": 4, "seq_len": 512, "packing": False}
    named = {
        "fits": fits,
        "large": fits | {"micro_batch_size": 64, "checkpointing": "none"},
        "near": fits | {"micro_batch_size": 4, "seq_len": 1024, "checkpointing": "full"},
        "int8": {"quantization": "int8"},
    }
    configs = tuple(
        NamedConfig(name=name, knobs=knobs, accumulation=2) for name, knobs in named.items()
    )
    spec = StudySpec(model="mistral-7b", gpu="a10", configs=configs)
    one, large, near, without = estimate_named_configs(spec, device=A10)
    assert (one.outcome, large.outcome, without.outcome) == (
        Outcome.OK,
        Outcome.OOM,
        Outcome.REFUSED,
    )
    assert one.interval and one.tokens_per_s and not one.tight
    low, high = (end / one.tokens_per_s for end in one.interval)
    assert 0.5 < low < 1 < high < 2
    need_gib = one.peak_reserved_gib
    assert need_gib and one.peak_allocated_gib and one.peak_allocated_gib < need_gib
    assert one.interval_gib == pytest.approx((need_gib * (1 - ERROR), need_gib * (1 + ERROR)))
    # what cannot run has no speed
    assert large.tokens_per_s is large.step_time_s is large.interval is None
    assert large.peak_reserved_gib and large.peak_reserved_gib > 22
    need_gib = near.peak_reserved_gib
    assert need_gib is not None
    memory_gib = (
        next(gib for gib in range(99) if device_limit_gib(A10, 0.0, gib / 4) > 1.005 * need_gib) / 4
    )
    (near,) = estimate_named_configs(
        replace(spec, configs=configs[2:3], memory_gib=memory_gib, headroom=0.0), device=A10
    )
    assert (near.outcome, near.tight, near.reason) == (Outcome.OK, True, "too close to tell")
    assert without.reason == "there is no formula for int8 bases" and one.reason is None
    assert (
        one.evidence is Evidence.ESTIMATED
        and one.tokens_per_s
        and one.samples_per_s
        and one.step_time_s
    )
    assert one.samples_per_s == pytest.approx(one.tokens_per_s / 512)
    assert one.step_time_s == pytest.approx(2 * 4 * 512 / one.tokens_per_s)
    assert one.peak_reserved_gib and one.with_context_gib == pytest.approx(
        one.peak_reserved_gib + CONTEXT_GIB
    )


def test_tables_are_of_what_guides_write() -> None:
    """LoRA, QLoRA, and two ways of full fine-tuning; lengths by powers of two up to the model's
    context of 4,096.
    """
    made = planned(task("h100", model="llama-2-7b"))
    tables = memory_tables(made)
    assert list(tables) == [
        "LoRA r16, bf16_mixed, adamw_torch_fused",
        "LoRA r16 on nf4, bf16_mixed, adamw_torch_fused",
        "full fine-tuning, bf16_mixed, adamw_torch_fused",
        "full fine-tuning, bf16_pure, adamw_8bit",
    ]
    pinned = memory_tables(planned(task("h100", model="llama-2-7b", pins={"lora_rank": 48})))
    assert [name.partition(",")[0] for name in pinned][:2] == ["LoRA r48", "LoRA r48 on nf4"]
    sdpa = task("t4", model="gemma-2-2b", pins={"attention": "eager"})
    for cells in memory_tables(planned(sdpa)).values():
        assert {cell.plain.config.attention for cell in cells} == {sdpa.baselines[0].attention}
    for cells in tables.values():
        shapes = [(cell.seq_len, cell.micro_batch_size) for cell in cells]
        assert shapes == [
            (length, size) for length in (512, 1024, 2048, 4096) for size in (1, 2, 4, 8, 16, 32)
        ]
        assert all(cell.plain.config.checkpointing == "none" for cell in cells)
        assert all(cell.recomputed.config.checkpointing == "full" for cell in cells)
        assert all(cell.recomputed.need_gib <= cell.plain.need_gib for cell in cells)


# What is planned, in detail


SMALL = {"seq_len": 512, "lora_rank": 16, "optimizer": "adamw_torch_fused"}


def test_a_plan_holds_the_observations_of_its_own_card() -> None:
    case, seen = (
        task(pins=SMALL),
        [observation(500.0), observation(600.0, device="l4"), observation(700.0)],
    )
    limit_gib = device_limit_gib(A10, 0.05)
    made = plan_task(case, limit_gib, seen)
    assert (
        made.seen == (seen[0].source, seen[2].source)
        and made.task is case
        and made.limit_gib == limit_gib
    )
    assert made.best and made.best.num_observations == made.baseline.num_observations == 2
    data = json_data(made)
    assert data["seen"] == ["a test", "a test"] and data["best"]["measurements_on_this_card"] == 2
    assert plan_task(case, limit_gib).seen == ()


def test_a_plan_as_plain_data() -> None:
    case = task(pins=SMALL)
    made = planned(case)
    made = replace(made, what_fits=memory_tables(made))
    data = json_data(made)
    assert (data["model"], data["device"], data["own_card"]) == (case.model.name, "a10", None)
    assert data["configurations"] == {"looked_at": made.num_estimated, "of": made.space_size}
    assert (data["limit_gib"], data["reason"], data["seen"]) == (made.limit_gib, made.reason, [])
    best, table = made.best, made.what_fits
    assert best is not None and best.cost is not None
    for said, one in ((data["best"], best), (data["baseline"], made.baseline)):
        assert (said["config"], said["label"]) == (one.config.as_dict(), one.config.label())
        assert (said["fits"], said["limit_gib"]) == (one.state, one.limit_gib)
        assert (said["tokens_per_s"], tuple(said["interval_tokens_per_s"])) == (
            one.tokens_per_s,
            one.interval,
        )
        assert (said["samples_per_s"], said["measurements_on_this_card"]) == (one.samples_per_s, 0)
    assert data["best"]["cost"]["full_run_hours"] == best.cost.full_run_hours
    for name, cells in table.items():
        for said, cell in zip(data["what_fits"][name], cells, strict=True):
            assert (said["micro_batch_size"], said["seq_len"]) == (
                cell.micro_batch_size,
                cell.seq_len,
            )
            assert (said["none_gib"], said["full_gib"]) == (
                cell.plain.need_gib,
                cell.recomputed.need_gib,
            )
            assert said["checkpointing"] == ("none" if cell.plain.state == FITS else "full")
            assert said["fits"] == (FITS if cell.plain.state == FITS else cell.recomputed.state)
    none = json_data(replace(made, best=None, task=replace(case, price=None)))
    assert none["best"] is None and none["price"] is None
    bare = json_data(replace(made, baseline=replace(made.baseline, memory=None, cost=None)))[
        "baseline"
    ]
    assert bare["memory_gib"] is None and bare["cost"] is None


def test_the_baseline_is_the_first_that_fits_else_the_first() -> None:
    """The guides' own micro batch comes first, then smaller ones; 0.01 GiB hold none."""
    case = task(pins={"seq_len": 1024, "lora_rank": 16})
    needs = [estimate(case, config, 100.0) for config in case.baselines]
    sizes = [one.need_gib for one in needs if one]
    assert len(sizes) > 2 and sizes == sorted(sizes, reverse=True)
    for index, need in enumerate(sizes):
        assert plan_task(case, 1.05 * need).baseline.config == case.baselines[index]
    assert plan_task(case, 0.01).baseline.config == case.baselines[0]
    assert plan_task(case, 0.01).reason == "no configuration is certain to fit"


def test_knobs_without_a_formula_are_as_in_the_baseline_and_their_values_left_out() -> None:
    case = task("h100", space="everything", allow_quantized=True, allow_any_optimizer=True)
    baseline = case.baselines[0]
    space = distinguishable(case.space, baseline)
    for name in ("attention", "dora", "rslora", "loader_workers"):
        assert space.choices(name) == (getattr(baseline, name),), name
    for name, value in (("quantization", "int8"), ("checkpointing", "offload")):
        assert value in case.space.choices(name) and len(case.space.choices(name)) > 1
        assert space.choices(name) == tuple(one for one in case.space.choices(name) if one != value)
        alone = distinguishable(case.space.pin(name, value), baseline)
        assert alone.choices(name) == (value,)  # a space is not left empty


def test_the_reserve_is_opened_only_where_nothing_else_fits() -> None:
    spec = StudySpec(model="llama-2-13b", gpu="a10", pins=SMALL)
    setup = planned_setup(spec, A10)
    closed, opened = plan_task(setup.task, 20.0), plan_setup(setup, 20.0)
    assert closed.best is None and not closed.from_reserve
    assert opened.best and opened.from_reserve and opened.best.config.quantization == "nf4"
    whole, too_small = plan_setup(setup, 70.0), plan_setup(setup, 2.0)
    assert whole.best and not whole.from_reserve and whole.best.config.quantization == "none"
    assert too_small.best is None and not too_small.from_reserve
    assert too_small.leanest.quantization == "nf4" != closed.leanest.quantization


def test_what_fits_at_an_unknown_speed_is_not_said_not_to_fit() -> None:
    space = SearchSpace.load("default").offer("cuda_graphs", ("micro_batch",))
    spec = StudySpec(model="llama-3.2-1b", gpu="h100", space=space, pins=SMALL)
    some = plan(spec, device=H100)
    assert some.best and some.best.config.cuda_graphs == "none" and not some.from_reserve
    assert re.search(
        r"; [1-9][0-9,]* more configurations fit, but no formula gives their speed: "
        r"`autotune run` measures it$",
        some.reason,
    )
    pins = SMALL | {"cuda_graphs": "micro_batch"}  # all configurations have a pinned value
    none = plan(replace(spec, space="default", pins=pins), device=H100)
    assert none.best is None and none.reason == plan_module.NO_SPEED and not none.from_reserve
    assert none.baseline.config.cuda_graphs == "micro_batch" and none.baseline.state == FITS
    assert none.fitting is not None and none.shown is none.fitting
    assert none.fitting.state == FITS and none.fitting.need_gib <= none.baseline.need_gib


def test_tables_are_as_long_as_the_context_and_of_the_precision_of_the_card() -> None:
    made = planned(task("t4", model="smollm2-135m", pins={"seq_len": 512, "lora_rank": 16}))
    tables = memory_tables(made)
    assert list(tables)[:2] == [
        "LoRA r16, fp16_mixed, adamw_torch_fused",
        "LoRA r16 on nf4, fp16_mixed, adamw_torch_fused",
    ]
    cells = tables["LoRA r16 on nf4, fp16_mixed, adamw_torch_fused"]
    assert {cell.seq_len for cell in cells} == {512, 1024, 2048, 4096, 8192}
    assert all(
        cell.plain.config.double_quant and cell.plain.config.lora_rank == 16 for cell in cells
    )
    for context, lengths in (
        (None, {512, 1024, 2048, 4096, 8192, 16384}),
        (300, {300}),
        (512, {512}),
    ):
        model = replace(
            made.task.model, config=made.task.model.config | {"max_position_embeddings": context}
        )
        shorter = memory_tables(replace(made, task=replace(made.task, model=model)))
        assert {cell.seq_len for cells in shorter.values() for cell in cells} == lengths


def test_evidence_that_cannot_be_read_is_a_warning(tmp_path: Path) -> None:
    said: list[str] = []
    assert (
        known_observations(tmp_path / "nowhere", said.append) == published_observations()
        and said == []
    )
    (tmp_path / "bad.json").write_text("{}")
    assert known_observations(tmp_path, said.append) == published_observations()
    assert len(said) == 1 and said[0].startswith(f"warning: {tmp_path}/bad.json: ")
    assert len(said[0].splitlines()) == 5  # no more problems of a file are named


# The command


def test_the_command_prints_estimates_and_their_basis(capsys: pytest.CaptureFixture[str]) -> None:
    spec = StudySpec(model="mistral-7b", gpu="a10")
    command.plan(spec, evidence=HERE)
    short = capsys.readouterr()
    first, *lines = short.out.splitlines()
    assert re.fullmatch(
        r"Mistral-7B-v0.3 fits a10: LoRA r\d+, \d+ x [\d,]+, [\d,]+ tokens/s, \d+ .*, \$[\d.]+ "
        r"\(estimated\)",
        first,
    )
    labels = [line.split("  ")[0].strip() or line.split()[0] for line in lines]
    assert labels == ["needs", "cost", "certainty", "why", lines[-1]] and short.err == ""
    assert "narrowed by measurements on this GPU: 2" in short.out and len(short.out.split()) < 120
    assert re.search(r"\$1\.29/h, lambda, .* old", short.out)

    command.plan(spec, evidence=HERE, details=True)
    text = capsys.readouterr().out
    assert text.startswith(short.out.removesuffix(lines[-1] + "\n"))
    assert "Nothing was measured here. Estimated: memory by a formula" in text
    assert "best  lora r" in text and "baseline  lora r16" in text
    assert "full fine-tuning, bf16_mixed, adamw_torch_fused: does not fit" in text


def test_a_plan_prints_what_it_left_out_and_does_not_miss_packages_of_this_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    spec = StudySpec(model="mistral-7b", gpu="a10", allow_quantized=True)
    command.plan(spec, evidence=HERE, details=True)
    text = capsys.readouterr().out
    assert "left out: lora_rank 8: below the smallest rank of 16 (--min-rank)" in text
    assert "left out: quantization fp8: a10 does not multiply 8-bit floats" in text
    assert "is not installed" not in text


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    command.plan(StudySpec(model="mistral-7b", gpu="a10", price=0.5), evidence=HERE, as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert said["best"]["evidence"] == "estimated" and said["best"]["fits"] == FITS
    assert said["price"]["usd_per_hour"] == 0.5 and said["best"]["cost"]["kwh"] > 0
    assert sum(said["best"]["memory_gib"].values()) == pytest.approx(
        said["best"]["peak_reserved_gib"]
    )
    assert {cell["fits"] for cells in said["what_fits"].values() for cell in cells} == {
        FITS,
        TIGHT,
        OOM,
    }


def test_a_card_of_the_users_own_is_marked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("memory: 24\nbf16_tflops: 125\nbandwidth_gb_s: 600\ntdp_w: 150\narch: ampere\n")
    text = "memory=24,bf16_tflops=125,bandwidth_gb_s=600,tdp_w=150,arch=ampere"
    made = [plan(StudySpec(model="qwen2.5-0.5b", gpu=gpu)).best for gpu in (text, str(file))]
    assert (
        made[0]
        and made[1]
        and made[0].tokens_per_s == made[1].tokens_per_s
        and made[0].price is None
    )
    like = plan(StudySpec(model="qwen2.5-0.5b", gpu="a10"), observations=()).best
    assert like and made[0].tokens_per_s == pytest.approx(like.tokens_per_s, rel=0.05)
    command.plan(StudySpec(model="qwen2.5-0.5b", gpu=text), evidence=HERE)
    text = capsys.readouterr().out
    assert " fits card-24gb (as you described it): " in text and "the GPU has 23.8 GiB" in text
    command.plan(StudySpec(model="qwen2.5-0.5b", gpu=str(file)), evidence=HERE, as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert (said["device"], said["own_card"]) == ("mine", str(file))
    command.plan(StudySpec(model="qwen2.5-0.5b", gpu="dgx-spark"), evidence=HERE)
    assert "(the GPU and its host share 121.6 GiB)" in capsys.readouterr().out


def test_an_unknown_price_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    command.plan(StudySpec(model="smollm2-135m", gpu="gh200-96gb", price=None), evidence=HERE)
    assert "no price" not in capsys.readouterr().out
    command.plan(StudySpec(model="smollm2-135m", gpu="a30"), evidence=HERE)
    assert "no price is known: --price" in capsys.readouterr().out


def test_a_quantised_base_is_planned_where_nothing_else_fits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command.plan(StudySpec(model="llama-2-13b", gpu="a10"), evidence=HERE)
    said = "a run only fits with one of these values: quantization int8 or nf4"
    assert said in capsys.readouterr().out


def test_a_model_that_does_not_fit_has_its_own_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(NothingFits, match=r"no configuration .* is certain to fit a10") as caught:
        command.plan(StudySpec(model="llama-3.1-70b", gpu="a10"), evidence=HERE)
    # the reserve has a quantised base
    assert caught.value.remedy and "qlora" not in caught.value.remedy
    printed = capsys.readouterr().out
    assert printed.startswith("Llama-3.1-70B does not fit a10: it needs at least 41")
    assert "tokens/s" not in printed and "$" not in printed


@pytest.mark.parametrize(
    ("gpu", "limits", "change"),
    [
        ("rtx-4090", {"space": "full"}, "--space lora"),
        ("a10", {"space": "full", "memory_gib": 12.0}, "--space qlora"),
        ("a10", {"space": "qlora", "memory_gib": 6.0}, "--set lora_targets=attention"),
        ("a10", {"space": "full", "memory_gib": 6.0}, "--space qlora --set lora_targets=attention"),
        ("a10", {"space": "qlora", "memory_gib": 4.0}, None),
        (
            "a10",
            {"space": "qlora", "memory_gib": 6.0, "pins": {"lora_targets": "all-linear"}},
            None,
        ),
    ],
)
def test_the_first_change_that_makes_a_model_fit_is_named(
    gpu: str, limits: dict[str, Any], change: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = StudySpec(model="mistral-7b", gpu=gpu, **limits)
    with pytest.raises(NothingFits) as caught:
        command.plan(spec, evidence=HERE)
    printed = capsys.readouterr().out
    if change is None:
        assert "makes it fit" not in printed
        return

    assert f"give {change}, or take a larger GPU" in str(caught.value.remedy)
    assert "`autotune compare --model mistral-7b`" in str(caught.value.remedy)
    (need,) = re.findall(rf"   change  {change} makes it fit in ([\d.]+) GiB\n", printed)
    words = change.split()
    options = dict(zip(words[::2], words[1::2], strict=True))
    pins = dict(one.split("=") for one in [options["--set"]]) if "--set" in options else {}
    space = options.get("--space", spec.space)
    fits = plan(replace(spec, space=space, pins=spec.pins | pins)).best
    assert fits is not None and fmt_gib(fits.need_gib) == f"{need} GiB"


def test_on_a_machine_without_a_gpu_one_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.core.nvml.list_gpus", list)
    with pytest.raises(UsageError, match="no GPU is given"):
        planned_device("auto")


def test_a_plan_starts_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom autotune.cli.app import main\n"
        "sys.argv = ['autotune', 'plan', '--model', 'mistral-7b', "
        "'--gpu', 'a10', '--seq-len', '1024', '--rank', '16']\ntry:\n    main()\n"
        "except SystemExit:\n    pass\n"
        "print(sorted({'torch', 'transformers', 'optuna', 'sqlalchemy', 'plotly'} &"
        " set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stderr.strip().splitlines()[-1] == "[]" and "LoRA r16" in done.stdout


def test_several_gpus_have_a_plan_of_their_own() -> None:
    with pytest.raises(UsageError, match="this plan is for one GPU, not 2"):
        plan(StudySpec(model="mistral-7b", gpu="h100", pins={"num_gpus": 2}))


@pytest.mark.parametrize("objective", [one for one in list(Objective)[1:] if not one.generates])
def test_trainings_for_other_objectives_are_planned(objective: Objective) -> None:
    """The table of what fits has their rows too, and none that cannot be trained."""
    made, next_token = planned(task("h100", objective=objective)), planned(task("h100"))
    assert (
        made.best is not None
        and made.baseline.memory is not None
        and next_token.baseline.memory is not None
    )
    assert made.task.workload.objective is objective and made.best.tokens_per_s
    config = made.baseline.config
    alone = memory_breakdown(
        made.task.model, made.task.workload.longest_row_config(config), 2, objective=objective
    )
    assert made.baseline.memory == alone != next_token.baseline.memory
    tables = memory_tables(made)
    sizes = {cell.micro_batch_size for cells in tables.values() for cell in cells}
    assert sizes == set(BATCHES) - ({1} if objective is Objective.KTO else set())
    full, of_next_token = (
        next(
            cell
            for cell in found["full fine-tuning, bf16_mixed, adamw_torch_fused"]
            if cell.micro_batch_size == 2
        )
        for found in (tables, memory_tables(next_token))
    )
    more = full.recomputed.need_gib / of_next_token.recomputed.need_gib
    assert 1.2 < more < 1.3 if objective.has_reference else 0.9 < more < 1.0


@pytest.mark.parametrize(
    ("knob", "value"), [("kernels", "liger"), ("padding", "bucket"), ("group_by_length", True)]
)
def test_the_best_configuration_has_the_pinned_value(knob: str, value: Any) -> None:
    pins = {"seq_len": 1024, "lora_rank": 16, knob: value}
    lengths = {"mean_tokens": 600, "p99_tokens": 1000}
    spec = StudySpec(model="qwen3-8b", gpu="a100-80gb-sxm", pins=pins, **lengths)
    best = plan(spec).best
    assert best and getattr(best.config, knob) == value
