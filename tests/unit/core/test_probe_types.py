"""Requests and results cross the process boundary as JSON and come back equal; digests say what may
be reused.
"""

import json
import math
from dataclasses import replace

import pytest
from pydantic import ValidationError

from autotune.core.probe_types import (
    Fingerprint,
    Measurement,
    MicroBatch,
    ModelShape,
    OomDetail,
    Outcome,
    Phase,
    ProbeRequest,
    ProbeResult,
    Rung,
    Telemetry,
)
from autotune.core.rollout_types import COLOCATED, Engine, Generation
from autotune.core.serialization import from_data, to_data
from autotune.core.train_config import TrainConfig
from tests.helpers.factories import FINGERPRINT, measurement, oom_detail, result

REQUEST = ProbeRequest(
    config=TrainConfig(),
    model={"model_type": "llama", "hidden_size": 64, "rope": {"theta": 1e4}},
    memory_gib=139.8,
)


def through_json(value):
    """As it is read on the other side of a pipe."""
    return from_data(type(value), json.loads(json.dumps(to_data(value), allow_nan=False)))


@pytest.mark.parametrize("outcome", Outcome)
def test_a_result_comes_back_equal(outcome):
    there = result(
        TrainConfig(quantization="nf4", double_quant=True),
        outcome,
        notes=("a\nb\x00", "ä"),
        depth=2,
    )
    back = through_json(there)
    assert back == there
    assert type(back.outcome) is Outcome
    assert type(back.config) is TrainConfig
    assert back.schema_version == 1
    if outcome is Outcome.OK:
        assert back.measurement.phase_s[Phase.FORWARD] == pytest.approx(0.15)
        assert isinstance(back.measurement.step_s, tuple)


def test_a_full_fine_tuning_config_comes_back_equal():
    there = result(TrainConfig(method="full"))
    assert through_json(there).config.digest == there.config.digest


@pytest.mark.parametrize(
    "value", [REQUEST, FINGERPRINT, measurement(), oom_detail(), replace(REQUEST, depth=2)]
)
def test_the_other_values_come_back_equal(value):
    assert through_json(value) == value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"outcome": "fine"}, "outcome"),
        ({"rung": None}, "rung"),
        ({"config": {"seq_len": -1}}, "seq_len is a positive integer, not -1"),
        ({"config": {"method": "magic"}}, "method is one of full, lora, not 'magic'"),
        ({"measurement": {"step_s": "soon"}}, "measurement"),
        ({"seconds": {"total": "long"}}, "seconds"),
        ({"oom": []}, "oom"),
    ],
)
def test_data_of_another_form_is_refused(change, message):
    with pytest.raises(ValidationError, match=message):
        from_data(ProbeResult, to_data(result()) | change)


@pytest.mark.parametrize("data", [None, [], "", 3, {}, {"outcome": "ok"}])
def test_what_is_no_result_at_all(data):
    with pytest.raises(ValidationError):
        from_data(ProbeResult, data)


def test_the_range_of_two_steps_or_else_of_the_micro_batches_of_one() -> None:
    two = measurement(step_s=(1.0, 1.2), micro_step_s=(0.1, 0.3))
    assert two.step_range == pytest.approx(0.8 * 0.2 / 1.1)
    one = replace(two, step_s=(1.0,))
    assert one.step_range == pytest.approx(0.8 * 0.2 / 0.2)
    assert replace(one, micro_step_s=(0.1,)).step_range is None


# --- digests


@pytest.mark.parametrize(
    "change",
    [
        {"config": TrainConfig(seq_len=512)},
        {"model": REQUEST.model | {"hidden_size": 65}},
        {"weights": "somewhere"},
        {"device": "cpu"},
        {"micro_steps": 1},
        {"memory_gib": 139.0},
        {"headroom": 0.1},
        {"depth": 2},
        {"trainer": "trl"},
        {"trained_share": 0.5},
        {"config": TrainConfig(num_gpus=2)},
    ],
)
def test_another_question_has_another_digest(change):
    assert replace(REQUEST, **change).digest != REQUEST.digest


def test_a_truncated_model_is_probed_again_for_its_kernels():
    truncated = replace(REQUEST, depth=2)
    assert replace(truncated, profile=True).digest != truncated.digest


def test_stored_requests_keep_their_digest():
    """Also those that an earlier version wrote, with the parallelism beside the configuration."""
    assert REQUEST.digest == "fb267e0ae724"
    assert (
        from_data(ProbeRequest, to_data(REQUEST) | {"num_gpus": 1, "strategy": "none"}) == REQUEST
    )


@pytest.mark.parametrize(
    "change",
    [
        {"rung": Rung.CONFIRM},
        {"seed": 7},
        {"max_timed_steps": 3},
        {"min_timed_s": 9.0},
        {"evaluate": True},
        {"profile": True},  # of a whole model, which is not profiled
        {"memory_gib": 139.8 + 1e-6},  # NVML's total, read twice
        {"model": dict(reversed(REQUEST.model.items()))},
    ],
)
def test_the_same_question_has_the_same_digest(change):
    assert replace(REQUEST, **change).digest == REQUEST.digest


def test_losses_of_other_weights_or_another_seed_answer_nothing():
    """With random weights the seed does not matter: the loss says nothing."""
    real = replace(REQUEST, weights="a")
    assert replace(REQUEST, weights="b").digest != real.digest
    assert replace(real, seed=7).digest != real.digest


def test_fingerprints_are_compared_by_value():
    same = replace(FINGERPRINT, packages=dict(reversed(FINGERPRINT.packages.items())))
    assert same.digest == FINGERPRINT.digest
    assert FINGERPRINT.differences(same) == []
    assert replace(FINGERPRINT, driver=None).digest != FINGERPRINT.digest


def test_differences_name_the_field_then_and_now():
    now = replace(
        FINGERPRINT,
        driver=None,
        packages={"torch": "2.13.0", "transformers": "5.17.0", "trl": "1.0"},
    )
    assert FINGERPRINT.differences(now) == [
        "driver: 580.159.04 then, None now",
        "packages.peft: 0.21.2 then, None now",
        "packages.torch: 2.11.0 then, 2.13.0 now",
        "packages.trl: None then, 1.0 now",
    ]
    assert isinstance(through_json(now), Fingerprint)


# --- margins


def detail(**changes: float | None) -> OomDetail:
    values = {
        "requested_gib": 2.0,
        "allocated_gib": 131.0,
        "reserved_gib": 131.5,
        "limit_gib": 100.0,
    } | changes
    return OomDetail(phase=Phase.FORWARD, **values)


@pytest.mark.parametrize(
    ("oom", "margin"),
    [
        (detail(), 0.33),  # allocated and requested
        (detail(requested_gib=None), 0.315),  # reserved is more
        (detail(requested_gib=0.0, allocated_gib=50.0, reserved_gib=90.0), 0.001),  # never feasible
        (detail(allocated_gib=0.0, requested_gib=500.0), 4.0),
        (detail(limit_gib=0.5), 265.0),
        (detail(limit_gib=0.0), 1.0),
        (detail(limit_gib=-0.2), 1.0),  # the context alone was too much
    ],
)
def test_the_margin_of_an_oom_is_positive(oom, margin):
    assert oom.margin == pytest.approx(margin)


def test_measurements_hold_what_was_read():
    loss = through_json(replace(measurement(), loss_last=-1.5))
    assert (loss.loss_last, loss.micro_steps, loss.alloc_retries) == (-1.5, 2, 0)
    with pytest.raises(TypeError):
        Measurement(step_s=(1.0,))
    assert not math.isnan(loss.peak_reserved_gib)


def test_what_nobody_looked_at_is_neither_promised_nor_feared() -> None:
    shape = ModelShape(num_layers=2, prefix=0, period=1)
    assert (shape.unquantized, shape.untrained, shape.no_adapters) == (0, 0, None)
    assert (shape.parametrized, shape.plain_head, shape.liger, shape.sdpa) == (
        False,
        False,
        False,
        True,
    )
    plain = measurement()
    assert (plain.time_error, plain.managed_gib, plain.alloc_retries) == (
        0,
        0,
        0,
    ) and not plain.host_bound
    failed = ProbeResult(
        request_digest="a", config=TrainConfig(), outcome=Outcome.CRASH, rung=Rung.FULL, seconds={}
    )
    assert (failed.warm, failed.depth, failed.measurement, failed.oom, failed.notes) == (
        False,
        None,
        None,
        None,
        (),
    )


def test_a_request_is_of_the_whole_model_and_of_whole_steps() -> None:
    """Two micro batches, for a second at least; 5 % stay free, and nothing is evaluated."""
    assert (REQUEST.device, REQUEST.rung, REQUEST.depth, REQUEST.weights) == (
        "cuda",
        Rung.FULL,
        None,
        None,
    )
    assert (REQUEST.micro_steps, REQUEST.min_timed_micros, REQUEST.min_timed_s) == (2, 2, 1.0)
    assert (REQUEST.headroom, REQUEST.evaluate, REQUEST.trainer, REQUEST.seed) == (
        0.05,
        False,
        "transformers",
        0,
    )


def test_the_host_sets_the_pace_from_four_fifths_on() -> None:
    shares = {None: False, 0.0: False, 0.79: False, 0.8: True, 1.0: True}
    assert {share: measurement(host_share=share).host_bound for share in shares} == shares


def test_what_a_peak_consists_of() -> None:
    held = measurement(model_gib=10.0, adapters_gib=1.0, gradients_gib=2.0, optimizer_gib=3.0)
    assert held.terms_gib(20.0) == {
        "weights": 10,
        "adapters": 1,
        "gradients": 2,
        "optimizer": 3,
        "activations": 4,
    }
    assert held.terms_gib(15.0)["activations"] == 0


def test_a_power_cap_is_no_fault() -> None:
    reading = Telemetry(throttle_reasons=("power cap", "hardware thermal"))
    assert reading.slowed_by == ("hardware thermal",) and Telemetry().slowed_by == ()


def test_a_request_has_full_rows_unless_it_names_kinds_of_micro_batches() -> None:
    full = MicroBatch(rows=((1024,),) * 8, length=1024, share=1.0)
    assert REQUEST.kinds == (full,) and REQUEST.longest == full
    short, long = (MicroBatch(rows=((100, 20),), length=length, share=0.5) for length in (128, 256))
    for kinds in ((short, long), (long, short)):
        assert replace(REQUEST, micro_batches=kinds).kinds == kinds
        assert replace(REQUEST, micro_batches=kinds).longest == long


def test_numbers_are_the_same_question_where_they_differ_by_rounding() -> None:
    def digest(share: float, memory_gib: float = 139.8) -> str:
        kind = MicroBatch(rows=((100,),), length=128, share=share)
        return replace(REQUEST, micro_batches=(kind,), memory_gib=memory_gib).digest

    assert digest(0.5) == digest(0.5 + 4e-7) == digest(0.5, 139.8004)
    assert len({digest(0.5), digest(0.5 + 2e-6), digest(0.5, 139.801), REQUEST.digest}) == 4


def test_a_checkpoint_has_what_is_trained_and_its_optimizer_state() -> None:
    held = {"model_gib": 8.0, "optimizer_gib": 3.0, "managed_gib": 0.5}
    assert measurement(adapters_gib=2.0, **held).checkpoint_gib == 5.5
    assert measurement(adapters_gib=0.0, **held).checkpoint_gib == 11.5


LONG, SHORT = (MicroBatch(rows=((length,),), length=length, share=0.5) for length in (40, 9))


@pytest.mark.parametrize(
    ("padding", "trainer", "kinds", "plans"),
    [
        ("masked", "transformers", (LONG, SHORT), True),
        ("masked", "transformers", (LONG, LONG), False),
        ("masked", "transformers", (), False),
        ("longest", "transformers", (LONG, SHORT), False),  # such attention is left out
        ("longest", "trl", (LONG, SHORT), True),
        ("bucket", "trl", (LONG, SHORT), False),
    ],
)
def test_attention_may_plan_for_each_length_where_rows_have_a_mask(
    padding: str, trainer: str, kinds: tuple[MicroBatch, ...], plans: bool
) -> None:
    config = TrainConfig(micro_batch_size=1, padding=padding)
    asked = ProbeRequest(
        config=config, model={}, memory_gib=1.0, micro_batches=kinds, trainer=trainer
    )
    assert asked.plans_by_length is plans
    beside_vllm = Generation(engine=Engine(kind=COLOCATED), prompts=(1,), completions=(1,))
    assert not replace(asked, generation=beside_vllm).plans_by_length  # vLLM leaves it out too
