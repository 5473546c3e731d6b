"""`autotune plan` and `check` answer for families without a formula: a dry probe counts their
memory and work.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.catalog import resolve_device, resolve_model
from autotune.cli.plan_text import print_plan
from autotune.core.errors import UsageError
from autotune.core.other_trainer import OtherTrainer
from autotune.core.probe_types import ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.dry.prober import DryAnswer, DryProber
from autotune.planning import counted_memory
from autotune.planning.named_estimates import estimate_named_configs
from autotune.planning.plan import plan
from autotune.planning.run_check import check
from autotune.planning.several_gpus import plan_spec
from autotune.prediction.estimate import memory_of, step_time_of
from autotune.prediction.step_time import MEASURED_HOST
from autotune.problem.run_cost import FITS, OOM
from autotune.problem.study_spec import NamedConfig, Published, StudySpec, make_spec
from autotune.report.answers import gpu_answer
from autotune.report.values.plan import ONLY_BASELINE, ONLY_LEANEST

pytestmark = pytest.mark.probe


@pytest.fixture(autouse=True)
def prober(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with DryProber(tmp_path, shipped=False) as one:
        monkeypatch.setattr(counted_memory, "_prober", lambda: one)
        yield one


def test_a_family_without_a_formula_has_a_counted_baseline(
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = make_spec(None, {"model": "gpt2", "gpu": "a10"})
    made = plan(spec, device=resolve_device("a10"), counted=True)
    assert (
        made.best is made.baseline
        and made.reason == ONLY_BASELINE
        and made.baseline.interval is not None
    )
    low, high = made.baseline.interval
    assert 0 < low < (made.baseline.tokens_per_s or 0.0) < high
    assert made.baseline.state == FITS and made.baseline.memory is not None
    assert sum(made.baseline.memory.terms().values()) == pytest.approx(made.baseline.need_gib)
    assert made.baseline.memory.weights == pytest.approx(124.4e6 * 2 / 2**30, rel=0.02)
    print_plan(made, details=True)
    printed = capsys.readouterr().out
    assert (
        "memory by counting a training step without a GPU" in printed
        and "by a formula" not in printed
    )
    assert (
        f"      why  {ONLY_BASELINE}" in printed
        and "\n  best  " not in printed
        and "useful tokens/s" in printed
    )
    with pytest.raises(UsageError, match=r"there is no formula for gpt2 models$"):
        plan(spec, device=resolve_device("a10"))


def test_where_the_baseline_does_not_fit_the_leanest_is_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Full fine-tuning under autocast holds 16 bytes a parameter, which 2 GiB have no room for
    beside the logits.
    """
    spec = make_spec(None, {"model": "gpt2", "gpu": "a10", "space": "full", "memory_gib": 3.0})
    made = plan(spec, device=resolve_device("a10"), counted=True)
    assert made.baseline.state == OOM and made.best is not None and made.best.tokens_per_s
    assert (
        made.reason.endswith(ONLY_LEANEST)
        and made.best.need_gib < made.limit_gib < made.baseline.need_gib
    )
    print_plan(made, details=True)
    printed = capsys.readouterr().out
    assert f"{ONLY_LEANEST}\n" in printed and f"  best  {made.best.config.label()}" in printed


def test_several_gpus_are_planned_from_counts() -> None:
    """Under DDP, a rank needs the counted memory and buckets of gradients, and sends gradients."""
    spec = make_spec(None, {"model": "gpt2", "gpu": "h100", "pins": {"lora_rank": 16}})
    made = plan_spec(spec, "1,2")
    rows = {row.parallelism.name: row.estimate for row in made.rows}
    alone, ddp, sharded = rows["none"], rows["ddp"], rows["fsdp2"]
    assert alone and ddp and sharded and alone.config == ddp.config
    assert alone.memory and ddp.memory and ddp.step and sharded.step
    trained_gib = ddp.memory.communication
    assert trained_gib == pytest.approx(alone.memory.gradients)
    assert ddp.need_gib == pytest.approx(alone.need_gib + trained_gib + ddp.memory.nccl)
    assert ddp.step.communication_s < sharded.step.communication_s
    assert ddp.tokens_per_s and alone.tokens_per_s and sharded.tokens_per_s
    assert sharded.tokens_per_s < ddp.tokens_per_s < alone.tokens_per_s
    assert sharded.memory and sharded.memory.counted and sharded.need_gib < ddp.need_gib


def test_the_change_that_makes_several_gpus_fit_is_named() -> None:
    made = plan_spec(
        make_spec(None, {"model": "gpt2", "gpu": "h100", "space": "full", "memory_gib": 2.2}), "2"
    )
    assert not any(row.state == FITS for row in made.rows)
    assert made.change is not None and made.change.options == "--space lora"
    assert gpu_answer(made).change == str(made.change)


def test_flash_attention_is_counted_as_torchs_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its package is seldom installed where nothing is trained; the leanest configuration of a
    space has it.
    """
    asked: list[ProbeRequest] = []

    class Prober:
        def count(self, request: ProbeRequest, other: OtherTrainer) -> DryAnswer:
            asked.append(request)
            return DryAnswer(refused="no")

    monkeypatch.setattr(counted_memory, "_prober", Prober)
    config = TrainConfig(attention="flash_attention_2", padding="longest", micro_batch_size=4)
    masked = replace(config, padding="masked")
    # its examples are kept apart by their lengths, without a mask
    packed = replace(config, packing=True)
    alone = replace(packed, attention="sdpa", packed_attention="varlen")
    for one in (config, masked, packed, alone):
        assert memory_of(resolve_model("gpt2"), one, 2, count=counted_memory.count) is None
    whole = replace(config, attention="sdpa", padding="max_length")
    assert [request.config for request in asked] == [
        replace(config, attention="sdpa"),
        replace(masked, attention="sdpa"),
        whole,
        whole,
    ]
    # Such rows attend to less than whole ones, so that the time is not known.
    for one in (packed, alone):
        step_time = step_time_of(
            resolve_model("gpt2"), one, 2, MEASURED_HOST, count=counted_memory.count
        )
        assert step_time is None and len(asked) == 4


def test_a_run_of_another_tool_is_judged_by_a_count(tmp_path: Path) -> None:
    """124 million parameters in bf16, and 2.4 million of adapters in fp32; float32 takes twice as
    much at least.
    """
    file = tmp_path / "run.yaml"
    file.write_text(
        "model_name_or_path: gpt2\ndataset_name: d\nmax_length: 512\n"
        "per_device_train_batch_size: 2\n"
        "use_peft: true\nlora_r: 16\ndtype: bfloat16\nbf16: true\n"
    )
    found = check(file, {"gpu": "a10"}).checked
    assert found.state == FITS and found.bounds.least == found.bounds.most
    assert found.bounds.reported.counted and (found.estimate.tokens_per_s or 0.0) > 0
    assert found.bounds.reported.weights == pytest.approx(124.4e6 * 2 / 2**30, rel=0.02)
    assert 0.4 < found.estimate.need_gib < 2.0
    file.write_text(file.read_text().replace("dtype: bfloat16\n", ""))
    in_fp32 = check(file, {"gpu": "a10"}).checked.bounds
    assert in_fp32.most is None and in_fp32.least.weights == 2 * found.bounds.reported.weights


@pytest.mark.parametrize(
    ("allocator", "published", "layers"),
    [
        ("fixed", {"reserved_gib": 5.0}, 12),
        ("fixed", {"reserved_gb": 5.0}, 12),
        ("fixed", {"process_gib": 5.0}, 12),
        ("fixed", {"peak_gb": 5.0}, 12),
        ("fixed", {"peak_gib": 5.0}, None),
        ("expandable", {"reserved_gib": 5.0}, None),
    ],
)
def test_all_layers_are_counted_for_published_segments_that_cannot_grow(
    monkeypatch: pytest.MonkeyPatch,
    allocator: str,
    published: dict[str, float],
    layers: int | None,
) -> None:
    asked: list[int | None] = []

    class Prober:
        def count(self, request: ProbeRequest, other: OtherTrainer) -> DryAnswer:
            asked.append(request.depth)
            return DryAnswer(refused="no")

    monkeypatch.setattr(counted_memory, "_prober", Prober)
    case = NamedConfig(
        name="one",
        knobs={"allocator": allocator},
        trainer=OtherTrainer(keeps_logits=True),
        published=Published(**published),
    )
    spec = StudySpec(model="gpt2", gpu="a10", configs=(case,))
    (found,) = estimate_named_configs(spec, device=resolve_device("a10"), counted=True)
    assert asked == [layers]
    assert found.reason == "the run's memory cannot be counted: no"
