"""Plans for several GPUs: what fits and how fast, which row is chosen, what is refused, and the
command itself.
"""

import json
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import autotune
from autotune.catalog import resolve_device
from autotune.cli import app
from autotune.core.errors import NothingFits, UsageError
from autotune.core.json_view import json_data
from autotune.core.knobs import FP32_ADAMW, KNOBS
from autotune.core.parallelism import FSDP2, STRATEGIES, Parallelism
from autotune.core.probe_types import DryCount, ExpertShard
from autotune.core.train_config import TrainConfig
from autotune.core.units import gib
from autotune.planning import several_gpus
from autotune.planning.device_estimate import DIVIDED_EXPERTS, UNCHECKED, limit_of
from autotune.planning.plan import planned_setup
from autotune.planning.several_gpus import GpuPlan, RankPlan, plan_gpus, plan_spec
from autotune.prediction.estimate import estimate
from autotune.problem.run_cost import FITS, OOM, TIGHT
from autotune.problem.study_spec import StudySpec
from autotune.report.answers import gpu_answer


@cache
def planned(numbers: tuple[int, ...] = (1, 2, 8), gpu: str = "h100", **options: Any) -> GpuPlan:
    values: dict[str, Any] = {"model": "mistral-7b", "price": 2.0}
    spec = StudySpec(gpu=gpu, **values | options)
    device = resolve_device(gpu)
    return plan_gpus(planned_setup(spec, device).task, limit_of(spec, device), numbers)


def row(made: GpuPlan, num_gpus: int, strategy: str) -> RankPlan:
    return next(
        one
        for one in made.rows
        if one.parallelism == Parallelism(num_gpus=num_gpus, strategy=strategy)
    )


def test_each_number_has_each_strategy() -> None:
    found = [(one.num_gpus, one.parallelism.strategy) for one in planned().rows]
    assert found == [
        (1, "none"),
        *((number, strategy) for number in (2, 8) for strategy in STRATEGIES[1:]),
    ]


def test_one_gpu_is_estimated_as_ever() -> None:
    made = planned()
    one = row(made, 1, "none").estimate
    assert one is not None and one == estimate(made.task, one.config, made.limit_gib)


def test_more_gpus_train_faster_and_cost_more_where_one_could_train() -> None:
    made = planned()
    alone, two, eight = row(made, 1, "none"), row(made, 2, "ddp"), row(made, 8, "ddp")
    assert alone.tokens_per_s and two.tokens_per_s and eight.tokens_per_s
    assert alone.tokens_per_s < two.tokens_per_s < eight.tokens_per_s
    assert alone.efficiency == 1.0
    assert two.efficiency == pytest.approx(two.tokens_per_s / 2 / alone.tokens_per_s)
    assert two.estimate and two.estimate.cost and two.hours
    assert two.estimate.cost.usd_per_hour == 4.0 and two.usd == pytest.approx(4.0 * two.hours)
    assert two.accumulation == 32 // 2 // two.estimate.config.micro_batch_size


def test_no_interval_begins_above_as_many_single_gpus() -> None:
    made = planned((2,), space="full")
    assert any(one.interval for one in made.rows)
    for one in made.rows:
        if one.estimate and one.interval and one.tokens_per_s:
            alone = estimate(made.task, one.estimate.config, 1000.0)
            assert alone and alone.interval
            assert (
                one.interval[0]
                < one.tokens_per_s
                < one.interval[1]
                <= 2 * alone.interval[1] * 1.0001
            )


def test_what_one_gpu_cannot_train_has_no_efficiency() -> None:
    made = planned(space="full", model="llama-3.1-8b")
    assert row(made, 1, "none").state == row(made, 2, "ddp").state == OOM
    sharded = row(made, 8, "fsdp2")
    assert sharded.state == FITS and sharded.tokens_per_s and sharded.efficiency is None
    assert "bf16_sharded" in sharded.label and "bf16_mixed" not in sharded.label
    assert row(made, 1, "none").label.startswith("full 1x1024 bf16_mixed")


def test_the_row_that_does_not_fit_is_the_leanest() -> None:
    one = row(planned(space="full", model="llama-3.1-8b"), 1, "none").estimate
    assert one is not None and one.tokens_per_s is None
    assert (one.config.optimizer, one.config.checkpointing, one.config.micro_batch_size) == (
        "adamw_8bit",
        "full",
        1,
    )


def test_the_choices() -> None:
    made = planned()
    fitting = [one for one in made.rows if one.state == FITS and one.usd and one.tokens_per_s]
    assert made.cheapest and made.cheapest.usd == min(one.usd for one in fitting if one.usd)
    assert made.fastest and made.fastest.tokens_per_s == max(
        one.tokens_per_s for one in fitting if one.tokens_per_s
    )
    assert made.cheapest_within is None
    assert made.fastest.hours and made.cheapest.hours and made.fastest.hours < made.cheapest.hours
    middle = (made.fastest.hours + made.cheapest.hours) / 2
    within = replace(made, within_hours=middle).cheapest_within
    in_time = [one for one in fitting if one.hours is not None and one.hours <= middle]
    assert within in in_time and within and within.usd == min(one.usd for one in in_time if one.usd)
    assert replace(made, within_hours=made.cheapest.hours).cheapest_within == made.cheapest
    assert replace(made, within_hours=made.fastest.hours / 2).cheapest_within is None


def test_without_a_price_the_fastest_in_time_is_taken() -> None:
    made = planned(gpu="l40s", price=None)
    # the fewest GPU-hours
    assert made.cheapest and made.cheapest.num_gpus == 1 and made.fastest is not None
    assert replace(made, within_hours=1000.0).cheapest_within == made.cheapest


def test_tight_rows_are_not_chosen() -> None:
    made = planned()
    tight = replace(made.rows[0], estimate=replace(made.rows[0].estimate, state=TIGHT))  # type: ignore[type-var]
    only = replace(made, rows=(tight,))
    assert only.fastest is only.cheapest is None and only.trainable == ()


OWN = "memory=24,bf16_tflops=165,bandwidth_gb_s=1008"


def test_without_a_link_there_is_no_speed_for_several() -> None:
    made = planned(gpu=OWN, model="qwen2.5-1.5b")
    assert row(made, 1, "none").tokens_per_s and row(made, 2, "ddp").tokens_per_s is None
    assert row(made, 2, "ddp").state == FITS and row(made, 2, "ddp").estimate is not None
    assert row(made, 2, "ddp").estimate.config.compile == "per_layer"  # type: ignore[union-attr]
    assert made.fastest == row(made, 1, "none")
    assert made.needs_link and made.links == {}


def test_a_link_by_rule_gives_a_speed_with_a_wider_interval() -> None:
    made = planned(gpu="rtx-4090", model="qwen2.5-1.5b")
    both = row(made, 2, "fsdp2")
    assert both.step is not None and not made.needs_link
    assert made.links == {
        "the GPUs": "about 15 GB/s over PCIe 4.0 x16 (no peer access), from the data sheet,"
        " not measured"
    }
    assert "The bandwidth between the GPUs is from the data sheet, not measured" in made.how_sure

    device = replace(resolve_device("rtx-4090"), link_by_rule=False)
    measured = plan_gpus(replace(made.task, device=device), made.limit_gib, (2,))
    same = row(measured, 2, "fsdp2").step
    assert same is not None and same.step_s == both.step.step_s
    assert same.interval_s[0] == both.step.interval_s[0]
    assert same.interval_s[1] < both.step.interval_s[1]
    assert "GPUs is from the data sheet" not in measured.how_sure + str(measured.links)


def test_more_gpus_with_links_between_each_pair_exchange_more() -> None:
    made = planned(gpu="mi300x", model="qwen2.5-1.5b")
    two, eight = (row(made, number, "fsdp2").step for number in (2, 8))
    assert two is not None and eight is not None
    # On 8 GPUs, a rank sends 7/8 of the weights over 336 GB/s; on 2 GPUs, 1/2 over 48 GB/s.
    sent = two.communication_s / eight.communication_s
    assert sent == pytest.approx((1 / 2 / 48) / (7 / 8 / 336) * _batches(made), rel=0.01)


def _batches(made: GpuPlan) -> float:
    """How many micro batches a rank of two GPUs has for each micro batch of a rank of eight."""
    two, eight = row(made, 2, "fsdp2"), row(made, 8, "fsdp2")
    assert two.accumulation is not None and eight.accumulation is not None
    return two.accumulation / eight.accumulation


def test_refusals_have_their_reason() -> None:
    made = planned((2,), space="qlora")
    assert row(made, 2, "ddp").state == FITS
    assert row(made, 2, "fsdp2").problem is None and row(made, 2, "fsdp2").state == FITS
    refused = row(made, 2, "zero2")
    assert refused.problem == (
        "nf4 weights are untested under zero2: with these weights ddp needs no more memory"
    )
    assert refused.state is refused.hours is refused.usd is None
    assert refused.label == "" and refused.interval is None
    odd = planned((3,))
    assert "on each of 3 devices does not divide the global batch 32" in (
        row(odd, 3, "ddp").problem or ""
    )


def test_a_model_that_fits_nowhere_is_planned_in_the_hosts_memory() -> None:
    """QLoRA of a 70B on two cards of 24 GB: alone, one card is too small even in 4 bits."""
    made = planned((1, 2), "rtx-3090", model="llama-2-70b", space="qlora")
    names = [one.parallelism.name for one in made.rows if one.num_gpus == 2]
    assert names[-1] == "fsdp2, offloaded" and names.count("fsdp2, offloaded") == 1
    found = made.rows[-1]
    assert found.state == FITS and found.estimate is not None and found.estimate.memory is not None
    # half of the packed weights, of their scales, of embedding and head, and of the adapters
    assert 18 < found.estimate.memory.host < 30
    assert row(made, 1, "none").state == OOM
    large = planned((2,))
    assert all(not one.parallelism.offload for one in large.rows)
    assert UNCHECKED in made.how_sure and UNCHECKED not in large.how_sure


def test_gradients_are_shared_out_in_each_micro_batch_if_they_do_not_fit_whole() -> None:
    """A batch of 256 on 4 GPUs takes several micro batches, whose gradients would wait whole."""
    spec = StudySpec(model="llama-3.1-8b", gpu="l40s", space="full", global_batch=256)

    made = plan_spec(spec, 4)
    whole, shared = row(made, 4, "fsdp2"), made.rows[-1]
    assert whole.state != FITS and shared.parallelism.sync_each_batch and shared.state == FITS
    assert shared.parallelism.name == "fsdp2, sync_each_batch" and (shared.accumulation or 0) > 1
    assert (shared.tokens_per_s or 0) > (whole.tokens_per_s or 0)
    pinned = plan_spec(replace(spec, pins={"sharding": "fsdp2", "sync_each_batch": False}), 4)
    assert not any(one.parallelism.sync_each_batch for one in pinned.rows)


def test_a_model_without_a_formula_is_refused_if_it_cannot_be_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(several_gpus, "obstacle", lambda: "counting needs Linux")
    with pytest.raises(UsageError, match="no formula for gpt_neox models, and counting needs Li"):
        planned(model="pythia-1b")


@pytest.mark.parametrize(
    ("knob", "value"), [("sharding", "zero9"), ("copies", "x"), ("offload", 7)]
)
def test_a_wrong_pin_of_sharding_is_an_error_with_its_name(knob: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"--set {knob}: "):
        plan_spec(StudySpec(model="mistral-7b", gpu="h100", pins={knob: value}), "2")


def test_as_data() -> None:
    made = replace(planned((1, 2)), within_hours=100.0)
    data = json.loads(json.dumps(json_data(made)))
    assert (data["device"], data["link_gb_s"], data["within_hours"]) == ("h100-sxm", 370, 100.0)
    assert (
        data["cheapest"]
        == data["cheapest_within"]
        == {"num_gpus": 1, "strategy": "none", "hosts": 1}
    )
    first, *_, last = data["rows"]
    assert {one["evidence"] for one in data["rows"]} == {"estimated"}
    assert first["step"] is None and first["of_one_gpu"]["tokens_per_s"] == first["tokens_per_s"]
    assert (last["strategy"], last["precision"], last["num_gpus"]) == ("zero3", "bf16_sharded", 2)
    assert last["tokens_per_s"] == pytest.approx(2 * last["of_one_gpu"]["tokens_per_s"])
    assert last["interval_tokens_per_s"] == pytest.approx(
        [2 * end for end in last["of_one_gpu"]["interval_tokens_per_s"]]
    )
    assert last["step"]["exposed_s"] > 0 and last["of_one_gpu"]["memory_gib"]["nccl"] == 0.76
    assert first["num_without_speed"] == 0
    assert last["hours"] == last["of_one_gpu"]["cost"]["full_run_hours"] and last["problem"] is None
    refused = json_data(planned((2,), space="qlora"))["rows"][-1]
    assert (
        refused["precision"] is refused["of_one_gpu"] is refused["accumulation"] is None
        and refused["problem"]
    )


def test_hosts_are_as_fast_as_what_links_them() -> None:
    """On one host the network does not matter; a fast one does not slow the others; a slow one
    does.
    """

    def made(network: str | float) -> dict[tuple[int, str], RankPlan]:
        rows = autotune.plan(
            "llama-3.1-8b",
            gpu="h100",
            gpus=8,
            nodes=[1, 2],
            network=network,
            space="full",
            global_batch=128,
        ).rows
        return {(one.hosts, one.parallelism.name): one for one in rows}

    fast, slow = made(400.0), made("ethernet-25")
    assert {hosts for hosts, _ in fast} == {1, 2} and fast[2, "fsdp2"].num_gpus == 16
    assert fast[1, "fsdp2"] == slow[1, "fsdp2"]
    one, two, far = (
        found.tokens_per_s or 0.0
        for found in (fast[1, "fsdp2"], fast[2, "fsdp2"], slow[2, "fsdp2"])
    )
    assert 1.8 * one < two < 2.2 * one and far < one
    step = slow[2, "fsdp2"].step
    assert step is not None and step.exposed_s > 0.5 * step.step_s  # hardly anything is hidden
    copies = slow[2, "hsdp"].tokens_per_s or 0.0
    assert far < copies < two and (1, "hsdp") not in slow  # only gradients pass through the network
    assert slow[2, "hsdp"].estimate is not None and slow[2, "fsdp2"].estimate is not None
    assert slow[2, "hsdp"].estimate.need_gib > slow[2, "fsdp2"].estimate.need_gib
    many = autotune.plan("mistral-7b", gpu="h100", nodes=[3, 16], network=400.0, global_batch=384)
    assert isinstance(many, GpuPlan)
    data = json_data(many)
    assert {(one["hosts"], one["num_gpus"]) for one in data["rows"]} == {(3, 24), (16, 128)}
    # any number of them
    assert all(one["tokens_per_s"] for one in data["rows"] if one["strategy"] == "fsdp2")
    assert data["fastest"]["hosts"] == 16


NETWORK = "11.25 GB/s, 0.9 of the nominal rate"
NVLINK = "370 GB/s over NVLink 4 x18"


@pytest.mark.parametrize(
    ("gpu", "gpus", "nodes", "links"),
    [
        ("h100", [1, 2], None, {"the GPUs": NVLINK}),
        ("h100", 1, [1, 2], {"the hosts": NETWORK}),
        ("h100", [1, 2], 2, {"the GPUs of a host": NVLINK, "the hosts": NETWORK}),
        ("rtx-4090", 1, 2, {"the hosts": NETWORK}),
        (OWN, 1, 2, {"the hosts": NETWORK}),
        ("dgx-spark", 1, 2, {"the hosts": NETWORK}),
    ],
)
def test_only_the_links_in_use_are_named(gpu: str, gpus: Any, nodes: Any, links: Any) -> None:
    spec = StudySpec(model="qwen2.5-1.5b", gpu=gpu)
    made = plan_spec(spec, gpus, nodes=nodes, network=nodes and "ethernet-100")
    assert made.links == links and not made.needs_link
    # the data sheet's link says nothing about a network
    assert "between the GPUs is from the data sheet" not in made.how_sure
    assert "The speed on several GPUs comes from formulas" in made.how_sure
    assert all(row.tokens_per_s for row in made.rows if row.parallelism.strategy == "ddp")


def test_gpus_of_their_own_hosts_exchange_as_fast_as_the_network() -> None:
    spec = StudySpec(model="qwen2.5-1.5b", gpu="rtx-4090")  # its link has 15 GB/s
    slow, fast = (
        row(plan_spec(spec, 1, nodes=2, network=rate), 2, "ddp").step for rate in (12.5, 400.0)
    )
    assert slow is not None and fast is not None
    assert slow.communication_s == pytest.approx(fast.communication_s * 400 / 12.5)


def test_what_is_asked_of_fsdp2_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """`--set` of a knob that one GPU does not have."""
    asked = {"sharding": "fsdp2", "offload": True}
    made = autotune.plan("llama-3.1-8b", gpu="h100", gpus=[1, 2], space="full", pins=asked)
    assert isinstance(made, GpuPlan)
    assert [row.parallelism.strategy for row in made.rows] == ["none", "fsdp2"]
    low, high = made.rows[1].interval or (0.0, 0.0)
    assert made.rows[1].parallelism.offload and 0 < 4 * low < high  # the host is not known
    both = autotune.plan(
        "llama-3.1-8b", gpu="h100", gpus=8, space="full", pins={"sync_each_batch": True}
    )
    assert isinstance(both, GpuPlan)
    # The other strategies would ignore the pin.
    assert {row.parallelism.strategy: row.parallelism.sync_each_batch for row in both.rows} == (
        dict.fromkeys(FSDP2, True)
    )
    copied = autotune.plan(
        "llama-3.1-8b", gpu="h100", gpus=[2, 8], space="full", pins={"copies": 4}
    )
    assert isinstance(copied, GpuPlan)
    names = {
        (row.num_gpus, row.parallelism.name)
        for row in copied.rows
        if row.parallelism.strategy in FSDP2
    }
    # two GPUs cannot hold four copies; hsdp does not surely fit, so it is also planned leaner
    assert names == {
        *((2, "fsdp2"), (2, "fsdp2_keep")),
        *((8, "hsdp"), (8, "hsdp_keep"), (8, "hsdp, sync_each_batch"), (8, "hsdp, offloaded")),
    }


@pytest.mark.parametrize(
    ("pins", "gpus", "ignored", "chosen"),
    [
        ({"offload": True}, [1, 2], {1: "offload=true"}, 2),
        ({"copies": 4}, [1, 2, 8], {1: "copies=4", 2: "copies=4"}, 8),
        # one GPU has nothing to shard
        ({"sharding": "zero2", "sync_each_batch": False}, [1, 2], {}, 1),
    ],
)
def test_a_number_of_gpus_that_ignores_a_pin_is_only_compared(
    pins: dict[str, Any], gpus: list[int], ignored: dict[int, str], chosen: int
) -> None:
    made = autotune.plan("mistral-7b", gpu="h100", gpus=gpus, pins=pins)
    assert isinstance(made, GpuPlan)
    assert {
        row.num_gpus: ", ".join(row.ignored_pins) for row in made.rows if row.ignored_pins
    } == ignored
    assert made.fastest and made.cheapest and made.cheapest.num_gpus == chosen
    assert not made.cheapest.ignored_pins and not made.fastest.ignored_pins
    # the answer names the pins, even if it can follow them with no number of GPUs
    reason = gpu_answer(made).reason
    assert all(f" with {pin}" in reason for pin in ignored.values())
    alone = replace(made, rows=tuple(row for row in made.rows if row.ignored_pins))
    if ignored:
        (pin,) = set(ignored.values())
        assert alone.cheapest is None and not alone.fits
        numbers = {row.num_gpus for row in alone.rows}
        who = f"{min(numbers)} h100-sxm cannot train" if len(numbers) == 1 else "No number of"
        answer = gpu_answer(alone).answer
        assert answer.startswith(who) and f" Mistral-7B-v0.3 with {pin}: " in answer


@pytest.mark.parametrize(
    ("gpus", "pins", "need", "change"),
    [
        (
            8,
            {"sharding": "zero3", "offload": True},
            "offload true .* fsdp2_keep, not zero3",
            "shar",
        ),
        (8, {"sharding": "ddp", "copies": 2}, "copies 2 .* fsdp2_keep, not ddp", "sharding"),
        (1, {"offload": True}, "offload true has no effect: it needs several GPUs", "--gpus"),
        (1, {"sharding": "zero2"}, "sharding zero2 has no effect: it needs several", "--gpus"),
        ([1, 2], {"copies": 2}, "copies 2 .* GPUs of one host in 2 equal groups", "--gpus"),
    ],
)
def test_a_pin_of_sharding_that_no_plan_can_follow_is_an_error(
    gpus: Any, pins: dict[str, Any], need: str, change: str
) -> None:
    with pytest.raises(UsageError, match=need) as raised:
        autotune.plan("llama-3.1-8b", gpu="h100", gpus=gpus, pins=pins)
    assert f"or change {change}" in str(raised.value.remedy)


GRAPHS = """version: 1
description: CUDA graphs, which one GPU has and several have not
knobs:
  method: lora
  micro_batch_size: {values: [1, 2]}
  seq_len: 512
  checkpointing: none
  padding: bucket
  cuda_graphs: {values: [none, micro_batch]}
  tiling: {values: [none, tokens]}
"""


# The command


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[Any, str, str]:
    monkeypatch.setattr(sys, "argv", ["autotune", "plan", "--model", "mistral-7b", *arguments])
    with pytest.raises(SystemExit) as ended:
        app.main()
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("folder")
def test_the_command_prints_a_table_and_the_choices(monkeypatch: Any, capsys: Any) -> None:
    asked = ("--gpu", "h100", "--gpus", "1,2", "--price", "2", "--within", "5h")
    _, short, _ = run(monkeypatch, capsys, *asked)
    assert short.startswith("1 h100-sxm trains Mistral-7B-v0.3 cheapest within 5 h: LoRA r")
    assert short.count("\n│ ") == 2 and "Every number" not in short
    code, out, _ = run(monkeypatch, capsys, *asked, "--details")
    assert code == 0 and out.count("Every number is estimated") == 1
    rows = {
        tuple(cell.strip() for cell in line.strip("│ ").split("│"))[:2]: line
        for line in out.splitlines()
        if "│" in line
    }
    assert set(rows) == {("1", "none"), *(("2", strategy) for strategy in STRATEGIES[1:])}
    assert (
        " fits " in rows["2", "ddp"] and " 1.00 " in rows["1", "none"] and "$" in rows["2", "zero3"]
    )
    assert "cheapest: 1 GPU (lora r" in out and "fastest: 2 GPUs, ddp (lora r" in out
    assert "cheapest within 5 h: 1 GPU (" in out and "it may take" not in out
    assert "no speed for several GPUs" not in out and "at $2.00/h" in out


@pytest.mark.usefixtures("folder")
def test_an_impossible_number_of_gpus_has_its_reason(monkeypatch: Any, capsys: Any) -> None:
    code, short, _ = run(monkeypatch, capsys, "--gpu", "h100", "--gpus", "1,3")
    assert code == 0 and short.count("does not divide the global batch 32") == 1
    _, details, _ = run(monkeypatch, capsys, "--gpu", "h100", "--gpus", "1,3", "--details")
    assert "\n3 ddp, 3 fsdp2, " in details and details.count("does not divide") == 1


@pytest.mark.usefixtures("folder")
def test_what_one_gpu_alone_can_do_is_said(monkeypatch: Any, capsys: Any) -> None:
    """No formula knows the speed of CUDA graphs, and several GPUs have none."""
    Path("graphs.yaml").write_text(GRAPHS)
    asked = ("--gpu", "h100", "--gpus", "1,2", "--space", "graphs.yaml", "--details")
    code, out, err = run(monkeypatch, capsys, *asked)
    assert code == 0 and "left out: tiling tokens: " in out and err == ""
    assert (
        "\n1 GPU: 2 more configurations fit, but no formula gives their speed: "
        "`autotune run` measures it\n" in out
    )
    assert out.count("no formula gives") == 1
    _, out, _ = run(monkeypatch, capsys, *asked, "--set", "cuda_graphs=micro_batch")
    refused = ", ".join(f"2 {strategy}" for strategy in STRATEGIES[1:])
    assert f"{refused}: cuda_graphs micro_batch works only with number of GPUs 1\n" in out


@pytest.mark.usefixtures("folder")
def test_a_file_says_how_many_gpus_there_are(monkeypatch: Any, capsys: Any) -> None:
    Path("study.yaml").write_text(
        "model: mistral-7b\ngpu: h100\ngpus: [1, 2]\nwithin: 5h\nprice: 2.0\n"
    )
    code, out, _ = run(monkeypatch, capsys, "--spec", "study.yaml")
    assert code == 0 and out.startswith("1 h100-sxm trains Mistral-7B-v0.3 cheapest within 5 h: ")
    code, out, _ = run(monkeypatch, capsys, "--spec", "study.yaml", "--gpus", "4")
    assert code == 0 and out.startswith("4 h100-sxm with ddp train Mistral-7B-v0.3 cheapest ")


@pytest.mark.usefixtures("folder")
def test_a_deadline_that_may_be_missed_is_marked(monkeypatch: Any, capsys: Any) -> None:
    hours = planned().rows[0].hours
    assert hours is not None
    within = f"{round(hours * 3600 * 1.05)}s"
    code, out, _ = run(
        monkeypatch, capsys, "--gpu", "h100", "--gpus", "1", "--within", within, "--price", "2"
    )
    assert code == 0 and "why  the cheapest in time; it may take " in out


@pytest.mark.usefixtures("folder")
def test_a_count_before_the_name_of_the_gpu(monkeypatch: Any, capsys: Any) -> None:
    alone = "2xrtx-4090-laptop"
    code, out, _ = run(monkeypatch, capsys, "--gpu", alone, "--space", "qlora", "--json")
    data = json.loads(out)
    assert (
        code == 0
        and data["device"] == "rtx-4090-laptop"
        and {one["num_gpus"] for one in data["rows"]} == {2}
    )
    asked = ("--gpu", alone, "--space", "qlora", "--details")
    _, out, _ = run(monkeypatch, capsys, *asked)
    assert "2 zero1: nf4 weights are untested under zero1" in " ".join(out.split())
    assert (
        "no speed for several GPUs: a host has only one of these GPUs" in out
        and "cheapest: none is known" in out
    )
    assert "impossible" in out


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (("--gpu", "2xh100", "--gpus", "2"), 2, "--gpu says 2 GPUs and --gpus 2"),
        (("--gpu", "h100", "--gpus", ""), 2, "--gpus cannot be ''"),
        (("--gpu", "h100", "--within", "6h"), 2, "--gpus is missing"),
        (("--gpu", "h100", "--nodes", "2"), 2, "--nodes needs the bandwidth between the hosts"),
        (("--gpu", "h100", "--nodes", "x", "--network", "50"), 2, "--nodes cannot be 'x'"),
        (("--gpu", "h100", "--nodes", "2", "--network", "slow"), 2, "--network cannot be 'slow'"),
        (
            ("--gpu", "h100", "--gpus", "2", "--within", "soon"),
            2,
            "--within: 'soon' is not a duration",
        ),
        (
            ("--gpu", "h100", "--gpus", "2", "--within", "1s"),
            4,
            "no plan is known to end within 1s",
        ),
        (("--gpu", "h100", "--gpus", "16"), 2, "--gpus 16: up to 8 GPUs"),
        (
            ("--gpu", "a10", "--gpus", "2", "--space", "full", "--set", "sharding=ddp"),
            4,
            "no configuration of the search space is certain to fit 2 x a10",
        ),
        (
            ("--gpu", "2xa10", "--space", "full", "--set", "sharding=ddp"),
            4,
            "no configuration of the search space is certain to fit 2 x a10",
        ),
        (
            ("--gpu", "8xh100", "--global-batch", "4"),
            4,
            "no plan for 8 x h100-sxm is possible: micro batch 1 on each of 8 devices does not",
        ),
    ],
    ids=str,
)
def test_errors(
    monkeypatch: Any, capsys: Any, arguments: tuple[str, ...], code: int, error: str
) -> None:
    ended, _, err = run(monkeypatch, capsys, *arguments)
    assert ended == code and f"error: {error}" in err and "  try: " in err


def test_named_configurations_are_planned_for_one_gpu() -> None:
    from autotune.cli.commands.plan import plan_several
    from autotune.problem.study_spec import NamedConfig

    spec = StudySpec(model="mistral-7b", gpu="h100", configs=(NamedConfig(name="one"),))
    asked: dict[str, Any] = dict.fromkeys(("gpus", "nodes", "network", "within"))
    with pytest.raises(UsageError, match="the spec names configurations"):
        plan_several(spec, asked | {"gpus": "2"}, evidence=Path("nowhere"))
    with pytest.raises(NothingFits):
        plan_several(
            StudySpec(model="llama-3.1-70b", gpu="l4"),
            asked | {"gpus": "1"},
            evidence=Path("nowhere"),
        )


def test_python_takes_the_numbers_as_the_command_does() -> None:
    made = autotune.plan("mistral-7b", gpu="h100", gpus=[1, 2], within="6h", price=2.0)
    assert {one.num_gpus for one in made.rows} == {1, 2} and made.within_hours == 6.0
    same = autotune.plan("mistral-7b", gpu="h100", gpus=(2, 1), within=6, price=2.0)
    assert json_data(same) == json_data(made)


def test_python_refuses_what_the_command_refuses() -> None:
    with pytest.raises(UsageError, match="8 GPUs and --gpus"):
        autotune.plan("mistral-7b", gpu="8xh100", gpus=[2])
    with pytest.raises(UsageError, match="--gpus is missing"):
        autotune.plan("mistral-7b", gpu="h100", within="6h")  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="--within"):
        autotune.plan("mistral-7b", gpu="h100", gpus=2, within=-1)


def test_other_objectives_have_no_plan_of_several_gpus() -> None:
    """Their speeds would be those of the next token."""
    with pytest.raises(UsageError, match="--objective kto is untested on several GPUs"):
        plan_spec(StudySpec(model="mistral-7b", gpu="h100", objective="kto"), "4")


def test_the_printed_memory_of_shards_includes_blocks_that_torch_keeps() -> None:
    """Free blocks of side streams count in torch's report, and are freed if the GPU is full."""
    made = planned(gpu="h100", model="llama-3.1-8b")
    shards = next(
        one for one in made.rows if one.num_gpus > 1 and one.parallelism.strategy == "fsdp2"
    ).estimate
    assert shards is not None and shards.memory is not None and shards.memory.pools > 0.1
    assert shards.held_gib == pytest.approx(shards.need_gib + shards.memory.pools)
    assert json_data(shards)["peak_reserved_gib"] == pytest.approx(shards.held_gib)
    assert f"{shards.held_gib:.1f} GiB of" in shards.facts()["memory"]
    full = replace(shards, limit_gib=shards.need_gib + 0.01)
    assert full.held_gib == pytest.approx(full.limit_gib)
    alone = next(one.estimate for one in made.rows if one.num_gpus == 1)
    assert alone is not None and alone.held_gib == alone.need_gib


# --- experts that several GPUs share out


def counted_shard(
    model: Any, config: Any, micro_steps: int, objective: Any, experts: ExpertShard | None = None
) -> DryCount:
    """A count in which 8 GiB of the weights are experts, and the tokens take 1 GiB or 3 GiB."""
    num_gpus = experts.num_gpus if experts else 1
    tokens = 3.0 if experts and experts.fullest else 1.0
    return DryCount(
        model_gib=2 + 8 / num_gpus,
        adapters_gib=0.0,
        gradients_gib=2 + 8 / num_gpus,
        optimizer_gib=4 + 16 / num_gpus,
        segment_peak_gib={"backward": 8 + 32 / num_gpus + tokens},
        peak_allocated_gib=8 + 32 / num_gpus + tokens,
        trainable_params=10**9,
        total_params=10**9,
        expert_gradients_gib=8 / num_gpus if experts else 0.0,
    )


def divided(monkeypatch: pytest.MonkeyPatch, numbers: Any, **options: Any) -> GpuPlan:
    monkeypatch.setattr(several_gpus, "obstacle", lambda: None)
    monkeypatch.setattr(several_gpus, "count", counted_shard)
    values: dict[str, Any] = {"model": "qwen3-30b-a3b", "gpu": "h100", "price": 2.0}
    return plan_spec(StudySpec(**values | options), numbers)


def test_divided_experts_have_an_interval_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made = divided(monkeypatch, "4,8", expert_parallel=4)
    assert [one.parallelism.name for one in made.rows] == ["ddp, experts over 4 GPUs"] * 2
    assert made.how_sure == DIVIDED_EXPERTS and "send" in made.how_sure
    four, eight = made.rows
    for one, buckets in ((four, 2.0), (eight, 4.0)):  # two of eight GPUs hold the same experts
        found = one.estimate
        assert found is not None and found.memory is not None and found.least is not None
        assert found.least.communication == found.memory.communication == buckets
        assert found.least.weights == found.memory.weights == 4.0
        assert one.interval_gib is not None
        low, high = one.interval_gib
        assert high - low == pytest.approx(2.0, abs=0.2)
        assert one.state == FITS and found.tokens_per_s is None and one.hours is None
    data = json_data(made)["rows"][0]
    assert data["interval_gib"] == list(four.interval_gib or ())
    assert "to" in gpu_answer(made).needs and gpu_answer(made).reason == DIVIDED_EXPERTS


def test_undivided_experts_are_planned_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    one, without = divided(monkeypatch, "2", expert_parallel=1), divided(monkeypatch, "2")
    assert one.rows == without.rows and one.how_sure == without.how_sure
    assert all(found.interval_gib is None for found in one.rows)


def test_each_strategy_counts_configurations_that_it_can_train(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On one GPU, only an optimizer in 8 bits fits, which FSDP2 cannot shard; and eight GPUs share
    a batch of 32.
    """
    made = divided(monkeypatch, "8", space="full")
    found = {row.parallelism.name: row.estimate for row in made.rows}
    assert all(one is not None and one.config.micro_batch_size <= 4 for one in found.values())
    sharded = found["fsdp2"]
    assert sharded is not None and sharded.config.optimizer in FP32_ADAMW
    assert sharded.memory is not None and sharded.memory.weights == pytest.approx(gib(4e9 / 8))
    pinned = divided(monkeypatch, "8", space="full", pins={"optimizer": "paged_adamw_8bit"})
    problems = {row.parallelism.name: row.problem for row in pinned.rows}
    assert "has no code for sharded tensors" in (problems["fsdp2"] or "")
    assert problems["ddp"] is None


@pytest.mark.parametrize(
    ("options", "reason", "remedy"),
    [
        (
            {"expert_parallel": 3},
            "expert_parallel 3 does not divide the 128 experts of Qwen3-30B-A3B",
            "set it to 2 or 4 or 8 or 16 or 32 or 64 or 128",
        ),
        (
            {"expert_parallel": 8},
            "expert_parallel 8 does not divide 4 GPUs",
            "plan for multiples of 8 GPUs",
        ),
        (
            {"expert_parallel": 4, "model": "mistral-7b"},
            "expert_parallel 4: Mistral-7B-v0.3 has no experts to share out",
            "leave out expert_parallel",
        ),
        (
            {"expert_parallel": 4, "pins": {"sharding": "fsdp2"}},
            "expert_parallel is only estimated with ddp",
            "leave out sharding",
        ),
    ],
    ids=str,
)
def test_experts_that_cannot_be_divided_are_refused(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], reason: str, remedy: str
) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        divided(monkeypatch, "4", **options)
    assert caught.value.remedy == remedy


def test_only_several_gpus_can_divide_experts() -> None:
    spec = StudySpec(model="qwen3-30b-a3b", gpu="h100", expert_parallel=2)
    with pytest.raises(UsageError, match="cannot train with expert_parallel, because its trainer"):
        planned_setup(spec, resolve_device("h100"))
    assert "expert_parallel" not in KNOBS
    for parallelism in ({"strategy": "fsdp2"}, {"strategy": "ddp", "num_gpus": 3}):
        with pytest.raises(ValueError, match="expert_parallel 2 "):
            Parallelism(**{"num_gpus": 4, "expert_parallel": 2} | parallelism)
    compiled = TrainConfig(compile="per_layer")
    split = Parallelism(num_gpus=4, strategy="ddp", expert_parallel=2)
    assert "without compiled layers" in (split.refusal(compiled) or "")
    assert split.refusal(TrainConfig()) is None
