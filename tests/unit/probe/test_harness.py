"""What a probe trains on, what it says of its memory and times, and which losses it does not
believe.
"""

import contextlib
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from transformers import LlamaConfig, default_data_collator

from autotune.core.objective import Objective
from autotune.core.probe_types import KernelTimes, MicroBatch, Phase, ProbeRequest, SkewedRouting
from autotune.core.rollout_types import COLOCATED, Engine, Generation
from autotune.core.train_config import TrainConfig
from autotune.probe import harness as module
from autotune.probe.harness import (
    BadLoss,
    Probe,
    RecordingMixin,
    WrongPrecision,
    _StepEndCallback,
    random_rows,
)
from autotune.probe.kernels import Kernel
from autotune.probe.model_settings import model_settings
from autotune.probe.recorder import Recorder, StepTimes
from autotune.probe.resident import build_resident, module_names
from autotune.probe.schedule import Schedule
from tests.helpers.factories import TINY
from tests.helpers.factories import measurement as measured

GIB = 2**30


@pytest.mark.parametrize(
    ("knobs", "phase", "allocated_gib", "tokens", "bytes"),
    [
        ({}, Phase.BACKWARD, 0.0, 4096, 6),
        ({"precision": "fp32"}, Phase.BACKWARD, 0.0, 4096, 8),
        ({"loss": "chunked"}, Phase.BACKWARD, 0.0, 1024, 6),
        ({"loss": "chunked", "micro_batch_size": 1, "seq_len": 128}, Phase.BACKWARD, 0.0, 128, 6),
        ({}, Phase.FORWARD, 90.0, 4096, 6),
        ({}, Phase.FORWARD, 1.2, 0, 0),  # there is no room for them beside the model
        # there is just the room for them, and layers have inputs
        ({}, Phase.FORWARD, 1.732421875, 0, 0),
        ({}, Phase.OPTIMIZER, 90.0, 0, 0),
    ],
    ids=str,
)
def test_logits_are_there_from_the_end_of_the_forward_pass_on(
    knobs: dict[str, Any], phase: Phase, allocated_gib: float, tokens: int, bytes: int
) -> None:
    config = TrainConfig(**{"micro_batch_size": 4, "seq_len": 1024} | knobs)
    probe: Any = SimpleNamespace(
        request=ProbeRequest(config=config, model={"model_type": "llama"}, memory_gib=80.0),
        recorder=SimpleNamespace(phase=phase),
        base=SimpleNamespace(config=LlamaConfig(vocab_size=32_000)),
        meter=SimpleNamespace(allocated_gib=lambda: allocated_gib),
        resident=SimpleNamespace(model_gib=1.0),
    )
    assert Probe._logits_gib(probe) == pytest.approx(tokens * 32_000 * bytes / GIB)


@pytest.mark.parametrize(
    ("losses", "bad"), [((2.5, 1.0), False), ((2.5, 0.0), True), ((float("nan"), 2.5), True)]
)
def test_a_loss_of_exactly_nothing_is_as_bad_as_one_that_is_no_number(
    losses: tuple[float, ...], bad: bool
) -> None:
    """Such as of a model whose layers return zeros."""
    idle = SimpleNamespace(train=lambda: None)
    probe: Any = object.__new__(Probe)
    probe.request, probe.scratch = request_of(evaluate=False), None
    probe.meter = SimpleNamespace(
        reset_peak=idle.train, synchronize=idle.train, return_freed=lambda resident_gib: None
    )
    probe.recorder = SimpleNamespace(
        begin=lambda phase: None,
        record_peak=idle.train,
        check_steady=idle.train,
        losses=[torch.tensor(one) for one in losses],
    )
    for name, value in {
        "_prepare": None,
        "_make_trainer": idle,
        "_state_gib": 0.0,
        "_time_host": None,
        "_measurement": "measured",
    }.items():
        setattr(probe, name, lambda *_, value=value: value)
    if bad:
        with pytest.raises(BadLoss):
            probe.run()
    else:
        assert probe.run() == "measured"


@pytest.mark.parametrize(
    ("lengths", "shares", "trained", "profiled", "micro_s"),
    [
        ((), (), [64], 64, 1.5),
        ((16, 32, 64), (0.4, 0.4, 0.2), [16], 32, 0.2),  # steps of 16 and 32, and of 16 and 64
        ((16, 32, 64), (0.1, 0.1, 0.8), [64], 64, 0.3),  # the longest fills the second step
    ],
    ids=str,
)
def test_the_last_micro_batch_of_a_step_is_profiled_that_is_about_as_long_as_the_mean(
    lengths: tuple[int, ...],
    shares: tuple[float, ...],
    trained: list[int],
    profiled: int,
    micro_s: float,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kinds = [
        MicroBatch(rows=((n,),), length=n, share=share)
        for n, share in zip(lengths, shares, strict=True)
    ]
    request = request_of(*kinds, config=TrainConfig(seq_len=64), depth=2, profile=True)
    schedule = Schedule.plan(request)
    in_order = [
        request.kinds[index].length for step in range(20) for index in schedule.micro_batches(step)
    ]
    seen: list[int] = []
    before: list[int] = []

    def run_profiled(run: Any) -> list[Kernel]:
        before.extend(seen)
        seen.clear()
        run()
        return [Kernel(name="gemm", start_s=1.0, end_s=3.0)]

    monkeypatch.setattr(module, "run_profiled", run_profiled)
    trainer = SimpleNamespace(
        get_train_dataloader=lambda: in_order,
        get_batch_samples=lambda batches, number, device: (
            [next(batches) for _ in range(number)],
            None,
        ),
        train_unrecorded=lambda model, inputs: seen.append(inputs),
    )
    probe = probe_of(
        request,
        recorder=SimpleNamespace(schedule=schedule),
        trainer=trainer,
        model=None,
        meter=SimpleNamespace(torch_device=CPU, synchronize=lambda: None),
    )
    timed: Any = SimpleNamespace(
        micro_step_s=(1.0, 1.5, 9.0),
        kind_s=tuple(zip(shares, (0.1, 0.2, 0.3), strict=False)) if kinds else (),
    )
    kernels = probe._profile(timed)
    assert (before, seen) == (trained, [profiled])
    assert kernels is not None and (kernels.products_s, kernels.micro_s) == (2.0, micro_s)
    assert capsys.readouterr().out.split() == ["2000.000", "ms", "1", "products", "gemm"]


@pytest.mark.parametrize(
    ("depth", "profile", "device", "profiled"),
    [
        (2, True, "cuda", True),
        (None, True, "cuda", False),
        (2, False, "cuda", False),
        (2, True, "cpu", False),
    ],
)
def test_a_micro_batch_of_a_few_layers_on_a_gpu_is_profiled_where_that_was_asked_for(
    depth: int | None, profile: bool, device: str, profiled: bool
) -> None:
    nothing = SimpleNamespace(train=lambda: None)
    measurement = measured()
    probe = probe_of(
        request_of(depth=depth, profile=profile),
        scratch=None,
        meter=SimpleNamespace(
            torch_device=torch.device(device),
            reset_peak=nothing.train,
            synchronize=nothing.train,
            return_freed=lambda resident_gib: None,
        ),
        recorder=SimpleNamespace(
            begin=lambda phase: None,
            record_peak=nothing.train,
            check_steady=nothing.train,
            losses=[],
        ),
        _prepare=nothing.train,
        _make_trainer=lambda scratch: nothing,
        _state_gib=lambda: 0.0,
        _time_host=nothing.train,
        _measurement=lambda losses: measurement,
        _profile=lambda measured: KERNELS,
    )
    assert probe.run() == replace(measurement, kernels=KERNELS if profiled else None)


CPU = torch.device("cpu")
KERNELS = KernelTimes(
    products_s=0.3, fp8_s=0.0, attention_s=0.1, bytes_s=0.2, busy_s=0.6, micro_s=0.7, num_kernels=99
)


def probe_of(request: ProbeRequest, **parts: Any) -> Any:
    """A probe with these parts alone."""
    made: Any = object.__new__(Probe)
    made.request = request
    for name, value in parts.items():
        setattr(made, name, value)
    return made


def request_of(*kinds: MicroBatch, **wanted: Any) -> ProbeRequest:
    values: dict[str, Any] = {"config": TrainConfig(), "memory_gib": 80.0, "micro_batches": kinds}
    values["model"] = {"model_type": "llama"}
    return ProbeRequest(**values | wanted)


def test_a_row_that_is_not_packed_is_padded_and_its_last_part_alone_is_trained_on() -> None:
    kind = MicroBatch(rows=((4,), (2,)), length=6, share=1.0)
    made = random_rows(kind, 50, torch.Generator().manual_seed(0), packing=False, trained_share=0.5)
    assert len(made) == 2 and all(row.keys() == {"input_ids", "labels"} for row in made)
    assert [row["input_ids"].shape for row in made] == [(6,), (6,)]
    assert [(row["labels"] >= 0).tolist() for row in made] == [
        [False, False, True, True, False, False],
        [False, True, False, False, False, False],
    ]
    assert all(0 <= token < 50 for row in made for token in row["input_ids"].tolist())
    assert made[0]["input_ids"][:4].unique().numel() > 1


def test_a_masked_row_has_its_mask() -> None:
    kind = MicroBatch(rows=((4,), (2,)), length=6, share=1.0)
    made = random_rows(kind, 50, torch.Generator().manual_seed(0), packing=False, masked=True)
    assert [row["attention_mask"].tolist() for row in made] == [
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 0, 0],
    ]


LONG, SHORT = (MicroBatch(rows=((length,), (4,)), length=length, share=0.5) for length in (40, 9))


def test_a_new_length_takes_longer_by_what_a_plan_takes_without_loading_libraries() -> None:
    """A micro batch of 19 tokens takes 1.9 s.

    New lengths plan for 0.25 s, the first also loads libraries for 4 s.
    """
    clock, trained = [0.0], list[int]()

    def train_on(batch: list[dict[str, torch.Tensor]]) -> None:
        length = len(batch[0]["input_ids"])
        clock[0] += length / 10 + 0.25 + (4.0 if not trained else 0.0)
        trained.append(length)

    config = TrainConfig(micro_batch_size=2, padding="masked", seq_len=77)
    frequent = replace(SHORT, rows=((19,), (4,)), length=19, share=0.7)
    kinds = (replace(LONG, share=0.3), replace(SHORT, length=15, share=0.0), frequent)
    probe = probe_of(
        request_of(*kinds, config=config),
        base=SimpleNamespace(config=LlamaConfig(vocab_size=50)),
        meter=SimpleNamespace(
            mark=lambda: clock[0], synchronize=lambda: None, seconds=lambda begin, end: end - begin
        ),
        recorder=SimpleNamespace(times=lambda: SimpleNamespace(kinds=((0.3, 4.0), (0.7, 1.9)))),
        trainer=SimpleNamespace(data_collator=lambda rows: rows),
        _train_on=train_on,
    )
    # The next odd ones below the most frequent, 19, but for 15, which is a kind; after six seconds
    # no other begins.
    assert probe._time_new_lengths() == pytest.approx((4.25 + 0.25) / 2) and trained == [17, 13]
    assert probe._time_new_lengths() == pytest.approx(0.25) and trained == [17, 13, 11, 9, 7, 5, 3]
    assert probe._time_new_lengths() is None  # none is left


def test_positions_of_a_packed_row_restart_at_each_example() -> None:
    kind = MicroBatch(rows=((3, 2),), length=5, share=1.0)
    (row,) = random_rows(kind, 50, torch.Generator().manual_seed(0), packing=True)
    assert row["position_ids"].tolist() == [0, 1, 2, 0, 1]
    assert (row["labels"] >= 0).tolist() == [False, True, True, False, True]


def test_rows_stand_in_the_order_of_the_schedule_and_repeat_after_a_while() -> None:
    """Of two kinds with 16 rows each, two are made: 64 rows in all."""
    kinds = [MicroBatch(rows=((length,),) * 16, length=length, share=0.5) for length in (3, 5)]
    base = SimpleNamespace(config=LlamaConfig(vocab_size=10**6))
    probe = probe_of(request_of(*kinds, config=TrainConfig(micro_batch_size=16)), base=base)
    order = [0, 1, 1, 0, 0, 1]
    made = [row["input_ids"] for row in probe._rows(order, seed=3)]
    micros = [made[begin : begin + 16] for begin in range(0, len(made), 16)]
    assert [len(rows[0]) for rows in micros] == [3, 5, 5, 3, 3, 5]
    assert micros[4] is not micros[3] and all(map(torch.equal, micros[4], micros[0]))
    assert all(map(torch.equal, micros[5], micros[1]))
    assert not torch.equal(micros[3][0], micros[0][0]) and not torch.equal(
        micros[2][0], micros[1][0]
    )
    assert all(map(torch.equal, made, (row["input_ids"] for row in probe._rows(order, seed=3))))
    assert not torch.equal(made[0], probe._rows(order, seed=4)[0]["input_ids"])


@pytest.mark.parametrize(
    ("precision", "wanted"),
    [("bf16_mixed", True), ("fp16_mixed", True), ("bf16_pure", False), ("fp32", False)],
)
def test_a_probe_under_the_wrong_precision_is_refused(precision: str, wanted: bool) -> None:
    request = request_of(config=TrainConfig(precision=precision))
    probe = probe_of(request, meter=SimpleNamespace(torch_device=CPU))
    with torch.autocast("cpu", torch.bfloat16, enabled=wanted):
        probe._check_autocast()
    state = "off" if wanted else "on"
    refused = pytest.raises(WrongPrecision, match=f"autocast is {state} with {precision}")
    with torch.autocast("cpu", torch.bfloat16, enabled=not wanted), refused:
        probe._check_autocast()


def model_with_gradients() -> nn.Module:
    """Of 4 KiB that are trained, half of which have a gradient, and 4 KiB that are not."""
    model = nn.Module()
    model.first = nn.Parameter(torch.zeros(512))
    model.second = nn.Parameter(torch.zeros(512))
    model.frozen = nn.Parameter(torch.zeros(1024), requires_grad=False)
    model.first.grad = torch.ones(512)
    return model


KIB = 1024 / GIB


def trainer_of(*sizes: int, paged: bool = False) -> Any:
    tensors = {
        f"state{index}": torch.zeros(size, dtype=torch.uint8) for index, size in enumerate(sizes)
    }
    for tensor in tensors.values():
        tensor.is_paged = paged  # type: ignore[attr-defined]
    return SimpleNamespace(optimizer=SimpleNamespace(state={"one": tensors}))


@pytest.mark.parametrize(
    ("allocated_kib", "logits_kib", "found"),
    [
        (25.0, 3.0, {"logits": 3.0, "activations": 6.0}),
        (25.0, 30.0, {"logits": 9.0, "activations": 0.0}),  # no more logits than there is room for
        (12.0, 3.0, {"logits": 0.0, "activations": 0.0}),  # the failed step has begun to unwind
    ],
)
def test_what_holds_memory_adds_up_to_what_is_allocated(
    allocated_kib: float, logits_kib: float, found: dict[str, float]
) -> None:
    probe = probe_of(
        request_of(),
        model=model_with_gradients(),
        resident=SimpleNamespace(model_gib=8 * KIB, joined=None, adapters_gib=lambda: 4 * KIB),
        trainer=trainer_of(2048),
        meter=SimpleNamespace(allocated_gib=lambda: allocated_kib * KIB),
        _logits_gib=lambda: logits_kib * KIB,
    )
    parts = {"weights": 8.0, "adapters": 4.0, "gradients": 2.0, "optimizer": 2.0} | found
    assert probe.memory_terms() == pytest.approx({name: kib * KIB for name, kib in parts.items()})
    assert probe._state_gib() == pytest.approx(14 * KIB)


@pytest.mark.parametrize(
    ("method", "adapters_gib", "saved"),
    [
        ("lora", 1.0, "checkpoint"),
        ("lora", 4.0, "checkpoint"),
        ("lora", 5.0, "model"),
        ("full", 1.0, None),
    ],
)
def test_adapters_are_saved_as_the_run_does_where_that_is_small(
    method: str, adapters_gib: float, saved: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first micro batch that is evaluated warms up; of the others each kind counts by its
    share.
    """
    kinds = [
        MicroBatch(rows=((length,),), length=length, share=share)
        for length, share in ((10, 0.375), (40, 0.125))
    ]
    request = request_of(*kinds, config=TrainConfig(method=method))
    done: list[str] = []
    begun: list[Phase] = []
    recorder = SimpleNamespace(
        begin=begun.append,
        record_peak=lambda: done.append("record_peak"),
        schedule=Schedule.plan(request),
        evaluation_ends=[10.0, 11.0, 14.0],  # the kinds take 1 s and 3 s
    )
    trainer = SimpleNamespace(
        evaluate=lambda: done.append("evaluate"),
        save_model=lambda: done.append("model"),
        _save_checkpoint=lambda model, trial: done.append("checkpoint"),
        optimizer=None,
    )
    probe = probe_of(
        request,
        recorder=recorder,
        trainer=trainer,
        model=None,
        meter=SimpleNamespace(
            synchronize=lambda: done.append("wait"), seconds=lambda begin, end: end - begin
        ),
        resident=SimpleNamespace(model_gib=20.0, joined=None, adapters_gib=lambda: adapters_gib),
        _checkpoint_s=None,
    )
    monkeypatch.setattr(module.time, "perf_counter", iter([10.0, 12.5]).__next__)
    probe._evaluate_and_save()
    assert probe._evaluation_s == pytest.approx(0.75 * 1.0 + 0.25 * 3.0)
    assert done == ["evaluate", "record_peak", "wait", *([saved] if saved else [])]
    assert begun == [Phase.EVALUATE, *([Phase.SAVE] if saved else [])]
    assert probe._checkpoint_s == (2.5 if saved == "checkpoint" else None)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_measurement_is_what_was_recorded(device: str) -> None:
    """Phases of the whole probe are none of a step; memory is managed on a GPU alone."""
    times = StepTimes(
        steps=(2.0,),
        micro_batches=(0.9, 1.0),
        rests=(0.1,),
        phases={Phase.FORWARD: 0.5, Phase.STEADY: 0.25},
        kinds=((1.0, 0.95),),
    )
    recorder = SimpleNamespace(
        early_retries=1,
        times=lambda: times,
        warm_s=lambda times: 3.0,
        host_waits=lambda: True,
        peaks={Phase.FIRST_STEP: 5.0, Phase.STEADY: 4.0, Phase.BACKWARD: 3.0},
        reserved_peaks={Phase.FIRST_STEP: 5.0, Phase.BACKWARD: 4.0},
        between=[],
        segments={"first_step": 5.0, "steady": 4.0, "backward_layers": 2.5},
        reserved=6.0,
    )
    probe = probe_of(
        request_of(config=TrainConfig(seq_len=128)),
        recorder=recorder,
        meter=SimpleNamespace(torch_device=SimpleNamespace(type=device), alloc_retries=lambda: 3),
        model=model_with_gradients(),
        trainer=trainer_of(1024, paged=True),
        resident=SimpleNamespace(model_gib=2.0, joined=None, adapters_gib=lambda: 1.0),
        limit_gib=7.0,
        context_gib=0.25,
        _has_random_weights=False,
        _new_length_s=0.125,
        _host_micro_s=0.5,
        _skewed=SkewedRouting(hottest=4.0, ratio=1.5),
        _evaluation_s=0.75,
        _checkpoint_s=None,
        _merge_s=None,
    )
    found = probe._measurement([float(loss) for loss in range(12, 0, -1)])
    assert (found.step_s, found.micro_step_s, found.rest_s) == ((2.0,), (0.9, 1.0), (0.1,))
    assert (found.warm_s, found.host_micro_s, found.host_waits) == (3.0, 0.5, True)
    assert found.kind_s == ((1.0, 0.95),)
    assert found.phase_s == {Phase.FORWARD: 0.5}
    assert found.phase_peak_gib == {Phase.BACKWARD: 3.0} and found.segment_peak_gib == {
        "backward_layers": 2.5
    }
    assert (found.peak_allocated_gib, found.peak_reserved_gib, found.limit_gib) == (5.0, 6.0, 7.0)
    assert (found.row_length, found.micro_steps, found.alloc_retries) == (128, 2, 2)
    assert found.gradients_gib == 4 * KIB and found.optimizer_gib == 0.0
    assert found.managed_gib == (KIB if device == "cuda" else 0.0)
    assert (found.loss_first, found.loss_last) == (12.0, 1.0) and found.losses == tuple(
        range(12, 4, -1)
    )
    assert (found.trainable_params, found.total_params) == (1024, 2048)
    assert (found.evaluation_s, found.checkpoint_s, found.context_gib) == (0.75, None, 0.25)
    assert found.new_length_s == 0.125
    assert found.skewed == SkewedRouting(hottest=4.0, ratio=1.5)
    probe._has_random_weights = True  # the weights are not those that were asked for
    assert probe._measurement([2.0, 1.0]).losses == ()


class Plain:
    """What a Trainer does of itself."""

    def training_step(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        return torch.tensor(2.0) if self.compute_loss(model, inputs) else torch.tensor(0.0)  # type: ignore[attr-defined]

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> bool:
        return True

    def prediction_step(self, model: nn.Module) -> str:
        return "predicted"

    def get_batch_samples(self) -> list[str]:
        return ["batch"]


class ToldOf(RecordingMixin, Plain):
    """A Trainer with a recorder."""


@pytest.fixture
def told() -> Any:
    """A Trainer whose recorder keeps each report. A mark is how much that was until then."""
    trainer: Any = ToldOf()
    said: list[Any] = []
    trainer.recorder = SimpleNamespace(
        said=said,
        begin_micro_batch=lambda: said.append("begin"),
        end_micro_batch=lambda: said.append("end"),
        enter=lambda phase, timed: said.append(phase if timed else None),
        losses=[],
        evaluation_ends=[],
        fetches=[],
        meter=SimpleNamespace(mark=lambda: len(said)),
    )
    return trainer


def test_a_trainer_tells_of_the_phases_of_a_micro_batch(told: Any) -> None:
    model = nn.Linear(1, 1)
    assert told.training_step(model, {}) == 2.0
    assert told.recorder.said == ["begin", Phase.BACKWARD, "end"] and told.recorder.losses == [2.0]
    model.eval()
    assert told.compute_loss(model, {}) and told.recorder.said[3:] == []  # nothing goes backward


def test_a_trainer_marks_what_it_fetches_and_what_it_evaluates(told: Any) -> None:
    assert told.get_batch_samples() == ["batch"] and told.recorder.fetches == [(0, 0)]
    assert told.prediction_step(
        nn.Linear(1, 1)
    ) == "predicted" and told.recorder.evaluation_ends == [0]
    told.train_dataset = ["first", "second", "third"]
    assert list(told._get_train_sampler()) == [0, 1, 2]


@pytest.mark.parametrize("enough", [False, True])
def test_training_stops_when_the_recorder_has_enough(enough: bool) -> None:
    recorder: Any = SimpleNamespace(end_step=lambda: enough)
    control = SimpleNamespace(should_training_stop=False)
    _StepEndCallback(recorder).on_step_end(None, None, control)
    assert control.should_training_stop is enough


@pytest.mark.parametrize(
    ("device", "knobs", "trainer", "caps", "reserved_gib"),
    [
        ("cuda", {"optimizer": "adamw_torch_fused"}, "transformers", [(80.0, 0.05, 0.0)], 0.0),
        (
            "cuda",
            {"optimizer": "paged_adamw_8bit"},
            "transformers",
            [(80.0, 0.05, 0.0), (80.0, 0.05, 2.0)],
            70.0,
        ),
        (
            "cuda",
            {"optimizer": "paged_adamw_8bit"},
            "transformers",
            [(80.0, 0.05, 0.0), (80.0, 0.05, 2.0)],
            70.5,
        ),
        ("cpu", {"optimizer": "paged_adamw_8bit"}, "transformers", [(80.0, 0.05, 0.0)], 0.0),
        ("cuda", {"loss": "chunked"}, "transformers", [(80.0, 0.05, 0.0)], 0.0),
        ("cuda", {"loss": "chunked"}, "trl", [(80.0, 0.05, 0.0)], 0.0),
    ],
    ids=str,
)
def test_a_probe_is_capped_and_brought_into_the_asked_state(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    knobs: dict[str, Any],
    trainer: str,
    caps: list[tuple[float, ...]],
    reserved_gib: float,
) -> None:
    """A paged optimizer would keep two GiB in managed memory, under a limit of 70 GiB."""
    asked: list[tuple[float, ...]] = []
    attention: list[tuple[bool, bool]] = []
    monkeypatch.setattr(
        module, "choose_attention", lambda cudnn, flash: attention.append((cudnn, flash))
    )
    monkeypatch.setattr(module, "set_checkpointing", lambda base, settings: None)
    monkeypatch.setattr(module, "attach", lambda *_: "model")
    monkeypatch.setattr(module, "paged_state_gib", {"model": 2.0}.__getitem__)
    monkeypatch.setattr(module, "chunked_loss", lambda base, *, in_head: "chunked")
    held: list[str] = []
    meter = SimpleNamespace(
        context_gib=lambda: 0.25,
        hold_memory=held.append,
        cap=lambda *values: asked.append(values) or 70.0,  # type: ignore[func-returns-value]
        reserved_gib=lambda: reserved_gib,
        torch_device=SimpleNamespace(type=device),
    )
    config = TrainConfig(**knobs)
    resident = SimpleNamespace()
    parts: dict[str, Any] = {"meter": meter, "resident": resident, "base": None}
    parts["managed_gib"] = 0.0
    request = request_of(config=config, trainer=trainer, flash=False)
    probe = probe_of(request, **parts, _loss=None, _add_hooks=lambda: None)
    if reserved_gib > 70.0:
        with pytest.raises(torch.OutOfMemoryError, match=r"paged optimizer state needs 2\.00 GiB"):
            probe._prepare()
    else:
        probe._prepare()
        assert probe._loss == (
            "chunked" if config.loss == "chunked" and trainer == "transformers" else None
        )
    assert held == [config.allocator]
    assert asked == caps and (probe.limit_gib, probe.context_gib) == (70.0, 0.25)
    assert probe.managed_gib == (2.0 if len(caps) == 2 else 0.0)
    assert attention == [(config.padding != "longest" or trainer == "trl", False)]
    if reserved_gib <= 70.0:
        generation = Generation(engine=Engine(kind=COLOCATED), prompts=(1,), completions=(1,))
        probe.request = replace(request, generation=generation)
        probe._prepare()
        assert attention[1:] == [(False, False)]  # as vLLM does in its process


@pytest.mark.parametrize("method", ["lora", "full"])
def test_layers_are_compiled_alike_and_a_probe_may_compile_as_much_as_a_fresh_process(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Earlier probes have compiled five graphs.

    With adapters, the first layer's input requires gradients.
    """
    compiled: list[Any] = []
    required: list[bool] = []
    dynamo = SimpleNamespace(
        recompile_limit=1, accumulated_recompile_limit=1, fail_on_recompile_limit_hit=False
    )
    monkeypatch.setattr(torch, "_dynamo", SimpleNamespace(config=dynamo), raising=False)
    monkeypatch.setattr(module, "compiled_graphs", lambda: 5)
    monkeypatch.setattr(module, "decoder_layers", lambda model: [model])
    monkeypatch.setattr(
        module, "compile_layers", lambda layers, budget: compiled.extend([*layers, budget])
    )
    monkeypatch.setattr(module, "require_input_gradients", lambda base: required.append(True))
    config = TrainConfig(method=method, checkpointing="selective_50")
    probe_of(request_of(config=config), base=None, model="model")._compile()
    assert compiled == ["model", 0.5] and required == [True] * (method == "lora")
    assert vars(dynamo) == {
        "recompile_limit": 13,
        "accumulated_recompile_limit": 13,
        "fail_on_recompile_limit_hit": True,
    }


def test_tokens_are_of_the_whole_vocabulary_and_trained_as_asked() -> None:
    kind = MicroBatch(rows=((400,),), length=400, share=1.0)
    (row,) = random_rows(kind, 3, torch.Generator().manual_seed(0), packing=False)
    assert set(row["input_ids"].tolist()) == {0, 1, 2} and (row["labels"][1:] >= 0).all()
    base = SimpleNamespace(config=LlamaConfig(vocab_size=3))
    config = TrainConfig(micro_batch_size=1)
    for packing in (False, True):
        asked = request_of(kind, config=replace(config, packing=packing), trained_share=0.25)
        (row,) = probe_of(asked, base=base)._rows([0], seed=0)
        assert (row["labels"] >= 0).tolist() == [False] * 300 + [True] * 100
        assert ("position_ids" in row) is packing


@pytest.mark.parametrize(
    ("padding", "new_lengths", "timed"),
    [("longest", True, False), ("masked", True, True), ("masked", False, False)],
)
def test_what_a_probe_does_in_order(
    tmp_path: Path, padding: str, new_lengths: bool, timed: bool
) -> None:
    """The folder of the Trainer is in the worker's scratch directory, and gone afterwards."""
    done: list[Any] = []

    def note(*what: Any) -> Any:
        return lambda *values: done.append(
            (*what, *values) if len(what) + len(values) > 1 else what[0]
        )

    def trainer(folder: str) -> Any:
        assert Path(folder).parent == tmp_path and Path(folder).name.startswith("autotune-")
        return SimpleNamespace(train=note("train"))

    probe = probe_of(
        request_of(
            *KINDS, config=TrainConfig(padding=padding), evaluate=True, new_lengths=new_lengths
        ),
        scratch=str(tmp_path),
        meter=SimpleNamespace(
            reset_peak=note("reset"),
            synchronize=note("wait"),
            return_freed=note("return"),
            uncap=note("uncap"),
        ),
        recorder=SimpleNamespace(
            begin=note("begin"),
            record_peak=note("record_peak"),
            check_steady=note("steady"),
            losses=[torch.tensor(2.5)],
        ),
        _prepare=note("prepare"),
        _make_trainer=trainer,
        _state_gib=lambda: 0.75,
        _time_new_lengths=lambda: done.append("new") or 0.25,  # type: ignore[func-returns-value]
        _time_host=note("host"),
        _evaluate_and_save=lambda: done.append(("evaluate", len(list(tmp_path.iterdir())))),
        _measurement=lambda losses: losses,
    )
    assert probe.run() == [2.5]
    begun = ("begin", Phase.FIRST_STEP)
    assert done[:5] == ["prepare", "reset", begun, "train", "wait"]
    assert done[5:] == [
        ("return", 0.75),
        "record_peak",
        "steady",
        *["new"] * timed,
        "host",
        ("evaluate", 1),
    ]
    assert not list(tmp_path.iterdir())


def test_the_first_round_may_count_where_attention_has_planned_for_all_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = request_of(*KINDS, config=TrainConfig(padding="masked", micro_batch_size=1))
    planned = {("bf16_mixed", 1, length) for length in (3, 5, 4, 9)}
    base = nn.Linear(2, 2)
    for seen, counts in ((planned, True), (planned - {("bf16_mixed", 1, 9)}, False)):
        monkeypatch.setattr(module, "_SEEN_LENGTHS", seen)
        meter: Any = SimpleNamespace(peaks_are_free=True)
        probe = module.Probe(request, SimpleNamespace(base=base), meter, lambda phase: None)  # type: ignore[arg-type]
        assert probe.recorder.schedule.first_counts(9.0) is counts


@pytest.mark.parametrize("knobs", [{}, {"compile": "per_layer"}], ids=str)
def test_a_probe_brings_the_model_into_the_state_of_its_configuration(
    monkeypatch: pytest.MonkeyPatch, knobs: dict[str, Any]
) -> None:
    done: list[Any] = []
    monkeypatch.setattr(module, "choose_attention", lambda cudnn, flash: None)
    monkeypatch.setattr(
        module, "set_checkpointing", lambda *asked: done.append(("checkpointing", *asked))
    )
    monkeypatch.setattr(module, "attach", lambda *asked: done.append(("attach", *asked)) or "model")
    meter = SimpleNamespace(
        context_gib=lambda: 0.25, hold_memory=lambda _: None, cap=lambda *_: 70.0, torch_device=CPU
    )
    config = TrainConfig(checkpointing="every_2", **knobs)
    resident = SimpleNamespace()
    parts: dict[str, Any] = {"meter": meter, "resident": resident, "base": "base"}
    parts |= {"managed_gib": 0.0, "_loss": None}
    probe = probe_of(request_of(config=config, seed=3), **parts)
    probe._compile, probe._add_hooks = (
        (lambda: done.append("compile")),
        (lambda: done.append("hooks")),
    )
    probe._prepare()
    expected = [
        ("checkpointing", "base", model_settings(config, "llama")),
        ("attach", resident, config, CPU, 3, Objective.SFT, "frozen"),
    ]
    assert done == [*expected, *["compile"] * bool(knobs), "hooks"] and probe.model == "model"


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("trainer", ["transformers", "trl"])
def test_a_step_is_divided_where_it_passes_the_ends_of_the_layers(
    trainer: str, trained: bool
) -> None:
    """TRL takes the head's weights and never calls it.

    Autocast is checked as the embedding runs.
    """
    embedding, layers, head = nn.Embedding(4, 2), nn.Linear(2, 2), nn.Linear(2, 4)
    embedding.requires_grad_(trained)
    wrapped = nn.Module()
    wrapped.forward = lambda hidden: SimpleNamespace(last_hidden_state=layers(hidden))  # type: ignore[method-assign]
    entered: list[Any] = []
    probe = probe_of(
        request_of(trainer=trainer, config=TrainConfig(precision="fp32")),
        base=SimpleNamespace(
            get_input_embeddings=lambda: embedding,
            get_output_embeddings=lambda: head,
            base_model=wrapped,
        ),
        recorder=SimpleNamespace(enter_segment=entered.append),
        meter=SimpleNamespace(torch_device=CPU),
    )
    probe._add_hooks()
    assert len(probe._hooks) == 3
    hidden = wrapped(embedding(torch.tensor([1, 2]))).last_hidden_state
    logits = hidden @ head.weight.T if trainer == "trl" else head(hidden)
    assert entered == ["forward_head"]
    logits.sum().backward()
    assert entered == ["forward_head", "backward_layers", *["backward_inputs"] * trained]
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(WrongPrecision):
        embedding(torch.tensor([1]))


KINDS = (
    MicroBatch(rows=((3,),), length=3, share=0.5),
    MicroBatch(rows=((5,),), length=5, share=0.3),
    MicroBatch(rows=((4,),), length=4, share=0.2),
    MicroBatch(rows=((9,),), length=9, share=0.0),
)


def making(device: str = "cpu", **wanted: Any) -> Any:
    """A probe of a tiny model that is about to make its Trainer."""
    knobs = {"micro_batch_size": 1, "precision": "fp32", "optimizer": "adamw_torch"} | wanted.pop(
        "knobs", {}
    )
    request = request_of(*KINDS, config=TrainConfig(**knobs), seed=5, max_timed_steps=7, **wanted)
    meter: Any = SimpleNamespace(peaks_are_free=True, torch_device=SimpleNamespace(type=device))
    model = nn.Linear(2, 2)
    return probe_of(
        request,
        meter=meter,
        model=model,
        base=SimpleNamespace(config=LlamaConfig(vocab_size=100)),
        resident=SimpleNamespace(joined=None),
        recorder=Recorder(meter, request, lambda phase: None, lambda: 0.0),
        _loss=lambda outputs, labels, num_items_in_batch: None,
    )


# the Trainer's arguments have new names from transformers 5.23 on
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_trainer_of_a_probe_by_hand(tmp_path: Path) -> None:
    """The lead and a round have two steps each: five rounds may warm up, seven steps are timed, a
    round is spare.
    """
    probe = making()
    trainer = probe._make_trainer(str(tmp_path))
    args = trainer.args
    assert args.max_steps == 2 + 2 * 5 + 7 + 2
    assert (args.output_dir, args.seed, args.use_cpu) == (str(tmp_path), 5, True)
    assert (args.per_device_train_batch_size, args.per_device_eval_batch_size) == (1, 1)
    assert (args.gradient_accumulation_steps, args.save_strategy, args.optim) == (
        2,
        "no",
        "adamw_torch",
    )
    assert args.disable_tqdm and args.prediction_loss_only and not args.gradient_checkpointing
    assert trainer.model is probe.model and trainer.compute_loss_func is probe._loss
    assert trainer.recorder is probe.recorder
    callbacks = [type(one).__name__ for one in trainer.callback_handler.callbacks]
    assert "_StepEndCallback" in callbacks and not {"PrinterCallback", "ProgressCallback"} & set(
        callbacks
    )
    schedule = probe.recorder.schedule
    order = [KINDS[index].length for step in range(21) for index in schedule.micro_batches(step)]
    assert [len(row["input_ids"]) for row in trainer.train_dataset] == order and order[:4] == [
        3,
        3,
        3,
        9,
    ]
    assert [len(row["input_ids"]) for row in trainer.eval_dataset] == [9, 3, 5, 4]
    seeded = {seed: probe._rows([0], seed)[0]["input_ids"] for seed in (4, 5, 6, 7)}
    assert torch.equal(trainer.train_dataset[0]["input_ids"], seeded[5])
    assert torch.equal(trainer.eval_dataset[0]["input_ids"], probe._rows([3], 6)[0]["input_ids"])
    assert not torch.equal(seeded[5], seeded[6])


@pytest.mark.parametrize(
    ("padding", "more"),
    [("longest", {}), ("max_length", {"pad_to_multiple_of": 64})],
)
def test_trl_pads_to_whole_rows_where_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, padding: str, more: dict[str, int]
) -> None:
    asked: list[Any] = []
    trainer = SimpleNamespace(add_callback=asked.append, remove_callback=asked.append)

    def trl(
        recorded: type,
        model: Any,
        settings: dict[str, Any],
        train: Any,
        held_out: Any,
        *others: Any,
    ) -> Any:
        assert (
            recorded is RecordingMixin
            and (len(train), len(held_out)) == (42, 4)
            and others == (Objective.SFT, None)
        )
        asked.append(settings)
        return trainer

    monkeypatch.setitem(sys.modules, "autotune.probe.trl_trainer", SimpleNamespace(trl_trainer=trl))  # type: ignore[arg-type]
    probe = making(
        "cuda", trainer="trl", knobs={"padding": padding, "seq_len": 64, "precision": "bf16_mixed"}
    )
    assert probe._make_trainer(str(tmp_path)) is trainer and len(asked) == 4
    settings = asked[0]
    names = ("max_length", "pad_to_multiple_of")
    assert {name: settings[name] for name in names if name in settings} == {"max_length": 64} | more
    assert not settings["use_cpu"] and settings["bf16"] and settings["max_steps"] == 21


class Still:
    """A device whose memory never changes, and whose time is the host's."""

    peaks_are_free = True
    torch_device = CPU
    mark = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self.freed_gib: list[float] = []

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def has_passed(self, mark: float) -> bool:
        return True

    def synchronize(self) -> None: ...

    def reset_peak(self) -> None: ...

    def return_freed(self, resident_gib: float) -> None:
        self.freed_gib.append(resident_gib)

    def peak_gib(self) -> tuple[float, float]:
        return 1.0, 2.0

    def alloc_retries(self) -> int:
        return 0

    def context_gib(self) -> float:
        return 0.5

    def hold_memory(self, allocator: str) -> None: ...

    def cap(self, *_: float) -> float:
        return 3.0


# PEFT asks with a name from before transformers 5.23
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_probe_trains_measures_and_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    values = {
        "micro_batch_size": 1,
        "seq_len": 8,
        "lora_rank": 2,
        "precision": "fp32",
        "optimizer": "adamw_torch",
    }
    values |= {"loss": "chunked"}
    shape = TINY | {"model_type": "llama", "num_hidden_layers": 1}
    short: dict[str, Any] = {
        "min_timed_s": 0.0,
        "min_timed_micros": 1,
        "evaluate": True,
        "device": "cpu",
    }
    request = ProbeRequest(config=TrainConfig(**values), model=shape, memory_gib=4.0, **short)
    resident = build_resident(request, CPU)
    names, losses = dict(module_names(resident.base)), []
    for _ in range(2):
        phases: list[Phase] = []
        meter: Any = Still()
        probe = Probe(request, resident, meter, phases.append, str(tmp_path))
        assert (probe.managed_gib, probe.limit_gib, probe.trainer, probe.model) == (
            0.0,
            0.0,
            None,
            resident.base,
        )
        found = probe.run()
        model: Any = probe.model
        assert phases == [Phase.FIRST_STEP, Phase.STEADY, Phase.EVALUATE, Phase.SAVE]
        assert (found.limit_gib, found.context_gib, found.peak_reserved_gib) == (3.0, 0.5, 2.0)
        assert found.evaluation_s and found.checkpoint_s and found.warm_s and len(found.losses) >= 4
        parts = {
            "forward",
            "forward_head",
            "backward",
            "backward_layers",
            "backward_inputs",
            "optimizer",
        }
        assert set(found.segment_peak_gib) == parts
        assert meter.freed_gib == [
            pytest.approx(resident.model_gib + found.adapters_gib + found.optimizer_gib)
        ]
        assert found.optimizer_gib > 0 and not list(tmp_path.iterdir())
        trainer = probe.trainer
        assert "train" in vars(model) and AcceleratorState._shared_state
        probe.close()
        assert probe.trainer is None and trainer.optimizer is None and trainer.lr_scheduler is None
        assert not trainer.callback_handler.callbacks and not trainer.accelerator._models
        assert (
            not AcceleratorState._shared_state
            and not PartialState._shared_state
            and not GradientState._shared_state
        )
        assert "train" not in vars(model) and module_names(resident.base) == names
        base: Any = resident.base
        ends = (base.get_input_embeddings(), base.get_output_embeddings())
        assert not any(one._forward_hooks or one._forward_pre_hooks for one in ends)
        assert not base.training and "forward" not in vars(base.get_output_embeddings())
        losses.append(found.losses[:4])
    assert losses[0] == losses[1] and len(set(losses[0])) > 1


def test_a_probe_that_never_began_is_closed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that a library replaced are restored, and bitsandbytes forgets the embedding that was
    registered.
    """
    forgotten: list[bool] = []
    manager = SimpleNamespace(initialize=lambda: forgotten.append(True))
    optim = SimpleNamespace(GlobalOptimManager=SimpleNamespace(get_instance=lambda: manager))
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", optim)  # type: ignore[arg-type]
    names = {"norm": "theirs"}
    cleaned: list[Any] = []
    monkeypatch.setattr(module, "clean", cleaned.append)
    probe = probe_of(
        request_of(), base=None, resident="resident", model=nn.Linear(1, 1), trainer=None
    )
    probe._hooks, probe._module_names, probe._names = [], names, {"norm": "ours"}
    probe.close()
    assert names == {"norm": "ours"} and forgotten == [True] and cleaned == ["resident"]
    monkeypatch.delitem(sys.modules, "bitsandbytes.optim")
    probe.close()
    assert forgotten == [True]


@pytest.mark.parametrize(
    ("knobs", "wanted", "micro_s", "host_s"),
    [
        ({}, {}, 1.0, 0.25),
        ({}, {}, 2.0, 0.5),  # the device's queue was hardly full
        ({}, {"depth": None}, 1.0, 0.5),
        ({"compile": "per_layer"}, {}, 1.0, 0.5),
        ({"micro_batch_size": 1}, {}, 1.0, 0.5),
    ],
    ids=["one row", "short", "whole model", "compiled", "one row already"],
)
def test_one_row_shows_the_hosts_time_if_the_queue_may_have_been_full(
    monkeypatch: pytest.MonkeyPatch,
    knobs: dict[str, Any],
    wanted: dict[str, Any],
    micro_s: float,
    host_s: float,
) -> None:
    ticks = iter([0.0, 0.75, 1.0, 1.25, 2.0, 2.375])  # the first micro batch of one row is slow
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    batches = []
    trainer = SimpleNamespace(
        data_collator=default_data_collator,
        optimizer=SimpleNamespace(zero_grad=lambda: None),
        train_unrecorded=lambda model, batch: batches.append(batch["input_ids"].shape),
    )
    four_rows: dict[str, Any] = {"micro_batch_size": 4, "seq_len": 128}
    config = TrainConfig(**four_rows | knobs)
    probe = probe_of(
        request_of(**{"config": config, "depth": 2} | wanted),
        recorder=SimpleNamespace(
            host_micro_s=lambda: 0.5, times=lambda: SimpleNamespace(micro_batches=(micro_s,))
        ),
        meter=SimpleNamespace(synchronize=lambda: None),
        base=SimpleNamespace(config=LlamaConfig(vocab_size=50)),
        trainer=trainer,
        model=None,
    )
    assert probe._time_host() == host_s
    assert batches == ([(1, 128)] * 3 if host_s == 0.25 else [])


def test_a_measurement_is_kept_if_skewed_routing_runs_out_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cleared = []
    router = SimpleNamespace(weight=torch.zeros(8, 4), top_k=2)
    monkeypatch.setattr(module, "routers", lambda base: [router])
    monkeypatch.setattr(module, "skew_routing", lambda base: contextlib.nullcontext())
    trainer = SimpleNamespace(optimizer=SimpleNamespace(zero_grad=lambda: cleared.append(True)))
    seconds = iter([1.0, 1.5, 1.0, 1.25, 1.0, 2.0])
    parts: dict[str, Any] = {
        "meter": SimpleNamespace(
            mark=lambda: None, synchronize=lambda: None, seconds=lambda *marks: next(seconds)
        ),
        "base": None,
        "trainer": trainer,
        "_random_batch": lambda kind, generator: {},
    }
    found = probe_of(request_of(), **parts, _train_on=lambda batch: None)._time_skewed_routing()
    assert found is not None and found.ratio == 1.5 and not cleared

    def runs_out(batch: Any) -> None:
        raise torch.OutOfMemoryError

    assert probe_of(request_of(), **parts, _train_on=runs_out)._time_skewed_routing() is None
    assert cleared
