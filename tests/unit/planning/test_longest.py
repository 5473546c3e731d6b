"""The longest row: the line through two counts, what bounds it, and the few rows that are tried on
a card.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from autotune.catalog import resolve_device, resolve_model
from autotune.cli.app import app
from autotune.core.errors import EnvironmentProblem, NothingFits, UsageError
from autotune.core.json_view import json_data
from autotune.core.nvml import GpuInfo
from autotune.core.probe_types import (
    DryCount,
    ModelShape,
    OomDetail,
    Outcome,
    Phase,
    ProbeRequest,
    ProbeResult,
)
from autotune.core.process import StopToken
from autotune.core.train_config import TrainConfig
from autotune.planning import longest as module
from autotune.planning.counted_memory import DryAnswer
from autotune.planning.device_estimate import limit_of
from autotune.planning.longest import Longest, find_longest, longest_answer, verify
from autotune.prediction.estimate import memory_of, memory_state
from autotune.prediction.memory_formula import COUNT_ERROR, TILED_SHARE, counted_breakdown
from autotune.problem.run_cost import FITS, TIGHT
from autotune.problem.study_spec import StudySpec
from autotune.problem.target import Target
from autotune.report.json_forms import form_of
from autotune.report.values.longest import LongestRow
from tests.helpers.factories import measurement, result

MODEL = resolve_model("llama-3.1-8b")
FIXED, EACH = 6.0, 1e-4  # GiB of the model, and of a token


def count_of(config: TrainConfig, depth: int | None = None, bend: int = 10**9) -> DryCount:
    """What grows by EACH with a token, and by twice as much after `bend` tokens."""
    model = FIXED if depth is None else 2.0
    peak = model + EACH * (config.seq_len + max(config.seq_len - bend, 0))
    return DryCount(
        model_gib=model,
        adapters_gib=0.0,
        gradients_gib=0.0,
        optimizer_gib=0.0,
        segment_peak_gib={"backward_layers": peak},
        peak_allocated_gib=peak,
        trainable_params=1,
        total_params=1,
        flops={"mm": config.seq_len * 10**10, "flash_attention": config.seq_len**2 * 10**4},
        moved_bytes={"other": config.seq_len * 10**6},
        operations=1000,
    )


def test_rows_are_tried_only_on_a_card_that_is_the_one_or_can_stand_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = GpuInfo(
        index=0,
        uuid="GPU-0",
        name="NVIDIA H200",
        memory_gib=140.4,
        used_gib=0.5,
        compute_capability="9.0",
        driver="580",
        processes=(),
    )
    here = Target(device=resolve_device("h200"), card=card)
    monkeypatch.setattr(module, "find_target", lambda name: here)
    assert module._target_here("h200") is here
    monkeypatch.setattr(module, "find_target", lambda name: replace(here, card=None))
    assert module._target_here("cpu") is None

    def without(name: str) -> Target:
        raise EnvironmentProblem("no GPU")

    monkeypatch.setattr(module, "find_target", without)
    assert module._target_here("h200") is None


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts by `count_of`; the lengths that were asked for."""
    lengths: list[int] = []

    def answer(
        model: Any, config: TrainConfig, micro_steps: int, *_: Any, depth: int | None = None
    ) -> DryAnswer:
        lengths.append(config.seq_len)
        return DryAnswer(count=count_of(config, depth))

    monkeypatch.setattr(module, "dry_count", answer)
    monkeypatch.setattr(module, "shape_of", lambda model: None)
    return lengths


def asked(limit_gib: float = 22.0, **more: Any) -> Longest:
    return Longest(model=MODEL, device=resolve_device("h100"), limit_gib=limit_gib, rank=32, **more)


def need(tokens: int) -> float:
    config = asked().config("qlora", tokens)
    memory = counted_breakdown(MODEL, config, count_of(config))
    return memory.peak_reserved_gib * (1 + TILED_SHARE)


@pytest.mark.parametrize("limit_gib", [22.0, 60.0, 9.0, 7.0])
def test_the_prediction_is_the_longest_multiple_that_surely_fits(
    counted: list[int], limit_gib: float
) -> None:
    row = asked(limit_gib).predict("qlora")
    assert row.tokens is not None and row.tokens % module.STEP == 0
    assert need(row.tokens) <= limit_gib < need(row.tokens + 2 * module.STEP)
    assert (row.limited_by, row.evidence, row.problem) == ("gpu memory", "estimated", None)
    assert row.step_s_low < row.step_s < row.step_s_high  # type: ignore[operator]


def test_a_plan_gives_the_same_memory_and_the_same_verdict(counted: list[int]) -> None:
    """Counts of 157,696 tokens, 4 % below the limit, failed once on an H100: too close to tell."""
    row = asked(22.0).predict("qlora")
    found = memory_of(MODEL, TrainConfig(**row.config), 1, count=lambda _, one, *__: count_of(one))
    assert found is not None and row.gpu_gib == pytest.approx(found.peak_reserved_gib)
    assert memory_state(found.peak_reserved_gib, 22.0, found.error) == FITS
    assert found.peak_reserved_gib * (1 - found.error) == pytest.approx(
        found.peak_reserved_gib / (1 + TILED_SHARE), rel=0.001
    )
    assert memory_state(1.03 * 0.96 * 22.0, 22.0, found.error) == TIGHT

    whole = replace(TrainConfig(**row.config), tiling="none")
    apart = counted_breakdown(MODEL, whole, count_of(whole))
    assert found.peak_reserved_gib == pytest.approx((1 + TILED_SHARE) * apart.peak_reserved_gib)
    assert apart.error == COUNT_ERROR


def test_a_line_that_bends_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(
        model: Any, config: TrainConfig, micro_steps: int, *_: Any, depth: int | None = None
    ) -> DryAnswer:
        return DryAnswer(count=count_of(config, depth, bend=100_000))

    monkeypatch.setattr(module, "dry_count", answer)
    row = asked(30.0).predict("qlora")
    assert row.tokens is not None and row.gpu_gib is not None
    assert 0.95 * 30.0 < row.gpu_gib * (1 + TILED_SHARE) <= 30.0


def test_the_host_and_the_user_bound_it_too(counted: list[int]) -> None:
    """32 layers of 4,096 values in 16 bits are 256 KiB a token: 4,096 tokens to a GiB."""
    row = asked(60.0, host_limit_gib=30.0).predict("qlora")
    assert (row.tokens, row.limited_by) == (
        30 * 4096,
        "host memory",
    ) and row.host_gib == pytest.approx(30.0)
    row = asked(60.0, host_limit_gib=30.0, most_tokens=9_000).predict("qlora")
    assert (row.tokens, row.limited_by) == (9_000, "what was asked for")
    assert max(counted[-3:]) == 9_000
    assert asked().host_gib(asked().config("full", 4096)) == 2.0  # in 32 bits


def test_a_gpu_that_shares_the_hosts_memory_holds_the_offloaded_inputs_too(
    counted: list[int],
) -> None:
    apart = asked(60.0)
    config = apart.config("qlora", 4096)
    shared = replace(apart, device=resolve_device("dgx-spark"))
    held = [query.memory(config) for query in (shared, apart)]
    assert held[0] is not None and held[1] is not None
    assert held[0].peak_reserved_gib == pytest.approx(held[1].peak_reserved_gib + 1.0)
    rows = [query.predict("qlora").tokens or 0 for query in (apart, shared)]
    assert 0 < rows[1] < 0.5 * rows[0]


def test_what_does_not_fit_or_cannot_be_counted_says_so(
    counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = asked(5.0).predict("qlora")
    assert (
        row.tokens is None
        and row.problem is not None
        and "are needed for 4,096 tokens" in row.problem
    )
    monkeypatch.setattr(module, "dry_count", lambda *_, **__: DryAnswer(refused="no such layers"))
    monkeypatch.setattr(module, "no_count", lambda *_: "no such layers")
    row = asked().predict("qlora")
    assert (row.tokens, row.problem) == (None, "no such layers")


@pytest.mark.parametrize("failing", [1, 2, 3, 4])
def test_a_count_that_fails_between_others_says_so(
    monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """Its process can be killed at any of the counts: two for the line, the check, and the length
    after it.
    """
    lengths: list[int] = []

    def answer(
        model: Any, config: TrainConfig, *_: Any, depth: int | None = None, **__: Any
    ) -> DryAnswer:
        lengths.extend([config.seq_len] if config.seq_len not in lengths else [])
        if lengths.index(config.seq_len) + 1 == failing:
            return DryAnswer(refused="the counting process ended")
        return DryAnswer(count=count_of(config, depth, bend=100_000))

    monkeypatch.setattr(module, "dry_count", answer)
    monkeypatch.setattr("autotune.planning.counted_memory.dry_count", answer)
    row = asked(30.0).predict("qlora")
    assert (row.tokens, row.problem, len(lengths)) == (None, "the counting process ended", failing)


def test_attention_is_counted_below_the_diagonal(counted: list[int]) -> None:
    one, two = (
        asked().step_s(config, count_of(config)) for config in map(asked_config, (10**6, 2 * 10**6))
    )
    of_attention = 10**12 * 10**4 / 2 / (0.35 * 989e12)
    assert one is not None and two is not None
    assert two - 2 * one == pytest.approx(2 * of_attention, rel=0.02)


def test_without_sdpa_long_rows_need_flex_attention() -> None:
    """On a CPU and on older GPUs, eager attention is left; the user may choose another."""
    gpt_oss = resolve_model("openai/gpt-oss-20b")
    found = {
        name: Longest(model=gpt_oss, device=resolve_device(name), limit_gib=20.0)
        .config("lora", 4096)
        .attention
        for name in ("h100", "rtx-4090", "t4")
    }
    assert found == {"h100": "flex_attention", "rtx-4090": "flex_attention", "t4": "eager"}
    chosen = replace(asked(), model=gpt_oss, knobs={"attention": "eager"})
    assert chosen.config("lora", 4096).attention == "eager"
    assert asked_config(4096).attention == "sdpa"


def asked_config(tokens: int) -> TrainConfig:
    return asked().config("qlora", tokens)


class Card:
    """A card on which a token takes `each` GiB, and all that is reserved `more` than what is
    allocated.
    """

    def __init__(self, limit_gib: float, each: float = EACH, more: float = 0.05) -> None:
        self.limit_gib, self.each, self.more = limit_gib, each, more
        self.seen: list[tuple[int, int | None]] = []

    def probe(self, request: ProbeRequest) -> ProbeResult:
        tokens = request.config.seq_len
        self.seen.append((tokens, request.depth))
        peak = (2.0 if request.depth else FIXED) + self.each * tokens + self.more
        made = result(request.config, depth=request.depth)
        if peak <= self.limit_gib:
            found = measurement(peak_gib=peak / 1.02, kind_s=((0.96, 0.1), (0.04, 5.0)))
            return replace(made, measurement=found)
        oom = OomDetail(
            phase=Phase.BACKWARD,
            requested_gib=1.0,
            allocated_gib=peak - 1,
            reserved_gib=peak,
            limit_gib=self.limit_gib,
        )
        return replace(made, outcome=Outcome.OOM, measurement=None, oom=oom)


@pytest.mark.parametrize("each", [0.8 * EACH, EACH, 1.02 * EACH, 1.2 * EACH])
def test_few_rows_are_tried_and_the_longest_that_works_is_kept(
    counted: list[int], each: float
) -> None:
    """Within 3 % of what the card holds, whatever a token takes there, and with two whole models
    mostly.
    """
    card, predicted = Card(22.0, each), asked().predict("qlora")
    row = verify(asked(), predicted, card.probe, 24.0, timed_on="h100")
    possible = (22.0 - FIXED - card.more) / each
    assert row.tokens is not None and 0.965 * possible < row.tokens <= possible
    assert (row.evidence, row.step_s, row.tokens_per_s) == ("measured", 5.0, row.tokens / 5.0)
    assert card.seen[0] == (predicted.tokens, 2) and len(card.seen) <= 4
    assert (
        row.attempts
        and row.attempts[-1].step_s in (5.0, None)
        and row.predicted_tokens == predicted.tokens
    )


def test_the_host_bounds_what_is_tried(counted: list[int]) -> None:
    bounded = asked(host_limit_gib=20.0)
    card = Card(60.0)
    row = verify(bounded, bounded.predict("qlora"), card.probe, 24.0, timed_on="h100")
    assert (row.tokens, row.limited_by) == (20 * 4096, "host memory") and len(card.seen) == 2


def test_a_card_that_fails_verifies_nothing(counted: list[int]) -> None:
    def fail(request: ProbeRequest) -> ProbeResult:
        return replace(result(request.config), outcome=Outcome.CRASH, measurement=None)

    row = verify(asked(), asked().predict("qlora"), fail, 24.0, timed_on="h100")
    assert row.tokens is None and row.problem is not None and "ended with crash" in row.problem
    assert row.predicted_tokens and [one.outcome for one in row.attempts] == ["crash", "crash"]
    nothing = LongestRow(method="full", config={}, problem="too large")
    assert verify(asked(), nothing, fail, 24.0, timed_on="h100") is nothing


def test_the_request_trains_on_one_long_row_after_a_short_one() -> None:
    from autotune.probe.schedule import Schedule

    request = asked().request(asked_config(300_000), 80.0)
    schedule = Schedule.plan(request)
    steps = [schedule.micro_batches(step) for step in range(3)]
    assert [request.kinds[index].length for (index,) in steps] == [1_024, 1_024, 300_000]
    assert schedule.first_counts(0.04 * 60.0) and schedule.rounds_to_time(request, 30.0, 0.0) == 1


def test_the_command_prints_a_table_or_json(
    counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [
        "longest",
        "--model",
        "llama-3.1-8b",
        "--gpu",
        "rtx-4090",
        "--method",
        "qlora",
        "--predict",
    ]
    ended = CliRunner().invoke(app, [*options, "--json"])
    assert ended.exit_code == 0, ended.output
    form_of("longest").validate_python(json.loads(ended.stdout))
    (row,) = json.loads(ended.stdout)["rows"]
    assert row["tokens"] > 131_072 and row["config"]["tiling"] == "tokens"
    ended = CliRunner().invoke(app, options)
    first = ended.stdout.splitlines()[0]
    assert first.startswith(f"rtx-4090 trains sequences of up to {row['tokens']:,} tokens of ")
    assert "trained for 131,072 positions" in ended.stdout and ended.stderr == ""
    assert "cuDNN" not in ended.stdout
    ended = CliRunner().invoke(app, [*options, "--details", "--set", "attention=sdpa_cudnn"])
    assert "cuDNN's attention needs more memory than computed" in ended.stdout
    ended = CliRunner().invoke(app, [*options, "--memory-gib", "4"])
    assert isinstance(ended.exception, NothingFits) and "qlora: " in ended.stdout


@pytest.mark.parametrize(
    ("methods", "knobs", "expected"),
    [
        (["qloar"], {}, "did you mean 'qlora'"),
        (["lora, qloar"], {}, "did you mean 'qlora'"),
        (["lora"], {"tile": 1}, "no setting 'tile'; did you mean 'tiling'"),
        (["lora"], {"loss": "no"}, "loss"),
        (["lora"], {"lora_dropout": 0.1}, "not computed in tiles"),
    ],
)
def test_wrong_names_are_usage_errors(
    methods: list[str], knobs: dict[str, Any], expected: str
) -> None:
    with pytest.raises(UsageError, match=expected):
        find_longest(MODEL, "h100", methods, knobs=knobs, probe=False)


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_the_form_of_the_layers_decides_what_saves_memory(method: str) -> None:
    """A mixture has no tiles, and its adapters and 4-bit experts leave room for tokens."""
    shape = ModelShape(
        num_layers=48,
        prefix=0,
        period=1,
        experts=("mlp.experts.down_proj",),
        plain_head=True,
        tileable=False,
    )
    query = Longest(model=MODEL, device=resolve_device("h100"), limit_gib=70.0, shape=shape)
    config = query.config(method, 4096)
    assert config.tiling == "none"
    assert config.quantize_experts is (method == "qlora")
    assert config.loss == "chunked"
    assert method == "full" or config.lora_targets == "attention"

    capped = replace(query, shape=replace(shape, plain_head=False), knobs={"lora_targets": "q_v"})
    config = capped.config("lora", 4096)
    assert (config.loss, config.lora_targets) == ("full", "q_v")


def test_a_knob_without_effect_is_said_to_have_none(counted: list[int]) -> None:
    said: list[str] = []
    knobs = {"cuda_graphs": "micro_batch", "attention": "sdpa_cudnn", "dora": False}
    find_longest(MODEL, "h100", ["lora"], knobs=knobs, probe=False, say=said.append)
    assert [text for text in said if text.startswith("warning")] == [
        "warning: lora: cuda_graphs has no effect with these settings"
    ]


def test_data_has_what_was_asked(counted: list[int]) -> None:
    wanted = asked(host_limit_gib=100.0)
    made = json_data(longest_answer(wanted, [wanted.predict("lora")]))
    form_of("longest").validate_python(made)
    assert (made["device"], made["host_limit_gib"], made["positions"]) == (
        "h100-sxm",
        100.0,
        131_072,
    )


def test_each_count_of_a_prediction_is_announced_and_can_be_stopped(
    counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine with torch counts for minutes; a signal must end this at once."""
    monkeypatch.setattr(module, "obstacle", lambda: None)
    said, checks = list[str](), list[Any]()

    @contextmanager
    def stop_counting_if(should_stop: Any) -> Iterator[None]:
        checks.append(should_stop)
        yield

    monkeypatch.setattr(module, "stop_counting_if", stop_counting_if)
    stop = StopToken()
    module.find_longest(
        MODEL, "h100", ["qlora"], rank=32, probe=False, say=said.append, should_stop=stop
    )
    announced = [text for text in said if text.startswith("qlora: counting a sequence of ")]
    assert f"qlora: counting a sequence of {counted[0]:,} tokens without the GPU" == announced[0]
    assert len(announced) >= 3 and checks == [stop]


def test_the_table_tells_a_method_that_never_fits_from_one_without_a_prediction() -> None:
    from autotune.cli.commands.longest import _cells

    large = LongestRow(method="full", config={}, limited_by="gpu memory", problem="too large")
    cells = _cells(large)
    assert (cells["longest sequence"], cells["limited by"]) == ("none fits", "gpu memory")
    assert _cells(replace(large, limited_by=None))["longest sequence"] == "–"


@pytest.mark.parametrize("options", [{}, {"headroom": 0.2}, {"memory_gib": 16.0}])
def test_a_study_with_the_same_settings_has_the_same_memory(
    counted: list[int], options: dict[str, float]
) -> None:
    spec = StudySpec(model="llama-3.1-8b", gpu="rtx-4090", **options)  # type: ignore[arg-type]
    query, rows = find_longest(MODEL, "rtx-4090", ["qlora"], probe=False, **options)  # type: ignore[arg-type]
    assert query.limit_gib == limit_of(spec, query.device)
    config = query.config("qlora", rows[0].tokens or 0)
    assert query.request(config, 24.0).headroom == spec.headroom
