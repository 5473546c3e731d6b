"""Real CPU workers on the first layers of tiny models: what they predict, and that models kept for
later are harmless.

Shapes have few tokens and much to keep of each, so that peaks are hundreds of MiB and probes take a
second or two: a process's memory wanders by a MiB, and at full depth that counts as often as layers
were left out.
"""

from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from autotune.core.errors import UsageError
from autotune.core.probe_types import (
    Measurement,
    ModelShape,
    Outcome,
    Phase,
    ProbeRequest,
    ProbeResult,
)
from autotune.core.train_config import TrainConfig
from autotune.prediction.depth_extrapolation import depths, extrapolate
from autotune.probe.supervisor import WorkerProber
from tests.helpers.factories import TINY

pytestmark = pytest.mark.probe

MIB = 1 / 1024

DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 2,
    "first_k_dense_replace": 3,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}


def family(model_type: str, num_hidden_layers: int, **more: Any) -> dict[str, Any]:
    return TINY | {"model_type": model_type, "num_hidden_layers": num_hidden_layers} | more


TINY_LLAMA = family("llama", 8)
INFINITE = {"__float__": "Infinity"}


@pytest.fixture(scope="module")
def prober(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProber]:
    """One warm worker, which serves every test."""
    with WorkerProber("cpu", tmp_path_factory.mktemp("logs")) as started:
        started.fingerprint  # noqa: B018 (the worker is up from here on, and any second start is a fault)
        yield started


def ask(
    prober: WorkerProber,
    model: dict[str, Any],
    depth: int | None = None,
    memory_gib: float = 4.0,
    **knobs: Any,
) -> ProbeResult:
    """A probe of three short steps, the last of them timed."""
    small = {
        "micro_batch_size": 2,
        "seq_len": 32,
        "precision": "fp32",
        "checkpointing": "none",
        "lora_rank": 8,
    }
    asked = ProbeRequest(
        config=TrainConfig(**(small | knobs)),
        model=model,
        device="cpu",
        memory_gib=memory_gib,
        micro_steps=1,
        min_timed_micros=1,
        min_timed_s=0.0,
        depth=depth,
    )
    return prober.probe(asked, prober.logs / f"{model['model_type']}-{depth or 'all'}.log")


def measure(
    prober: WorkerProber, model: dict[str, Any], depth: int | None = None, **how: Any
) -> Measurement:
    result = ask(prober, model, depth, **how)
    assert result.outcome is Outcome.OK, result.reason
    assert (result.depth, result.notes) == (depth, ())
    assert result.measurement is not None
    return result.measurement


def assert_same_losses(found: Measurement, expected: Measurement) -> None:
    """Of all steps that both took: how many those are hangs on how long they take."""
    steps = min(len(found.losses), len(expected.losses))
    assert steps >= 2
    assert found.losses[:steps] == pytest.approx(expected.losses[:steps], rel=1e-6)


# How layers repeat.


@pytest.mark.parametrize(
    ("model", "prefix", "period"),
    [
        (TINY_LLAMA, 0, 1),
        (family("phi3", 16), 0, 1),
        (family("qwen2", 8, tie_word_embeddings=True), 0, 1),
        (family("gemma2", 8, head_dim=16), 0, 2),  # sliding and full attention take turns
        (family("gemma2", 9, head_dim=16), 0, 2),
        (family("gemma3_text", 14, head_dim=16), 0, 6),  # five sliding, one full, and two left over
        (family("gemma3_text", 34, head_dim=16), 0, 6),
        (family("gemma3_text", 8, head_dim=16), 0, None),  # the pattern is not seen twice
        (family("deepseek_v3", 11, **DEEPSEEK), 3, 1),  # dense layers first
        (
            family("llama4_text", 16, head_dim=16, intermediate_size_mlp=64, num_local_experts=4),
            0,
            4,
        ),
    ],
    ids=lambda value: (
        f"{value['model_type']}-{value['num_hidden_layers']}" if isinstance(value, dict) else ""
    ),
)
def test_a_model_says_how_its_layers_repeat(
    prober: WorkerProber, model: dict[str, Any], prefix: int, period: int | None
) -> None:
    shape = prober.describe(model)
    assert shape is not None
    assert (shape.num_layers, shape.prefix, shape.period) == (
        model["num_hidden_layers"],
        prefix,
        period,
    )
    assert (shape.unquantized == 0) is (model["model_type"] not in ("deepseek_v3", "llama4_text"))
    pair = depths(shape, None)
    if model["num_hidden_layers"] >= 16:
        assert pair is not None
    for depth in pair or ():
        assert period is not None and (shape.num_layers - depth) % period == 0
        assert depth > prefix  # one of the layers that repeat, at least


@pytest.mark.parametrize(
    ("model", "period", "reached"),
    [
        (family("mixtral", 4, num_local_experts=8), 1, True),
        (
            family(
                "qwen3_moe",
                6,
                head_dim=16,
                num_experts=8,
                moe_intermediate_size=64,
                decoder_sparse_step=2,
            ),
            2,
            True,
        ),
        (family("gpt_oss", 4, head_dim=16, num_local_experts=8), 2, False),
    ],
    ids=["mixtral", "qwen3_moe", "gpt_oss"],
)
def test_fused_experts_are_reached_by_adapters_as_parametrizations_at_best(
    prober: WorkerProber, model: dict[str, Any], period: int, reached: bool
) -> None:
    """PEFT knows the experts of some families, and replaces the
    whole weight in each forward pass.
    """
    shape = prober.describe(model)
    assert shape is not None and shape.period == period
    assert 0.5 < shape.unquantized < 1
    assert (shape.untrained == 0) is shape.parametrized is reached


@pytest.mark.parametrize(
    "model",
    [
        family("mamba2", 2, num_heads=4, head_dim=16, n_groups=1, time_step_limit=[0.0, INFINITE]),
        family("falcon_h1", 2, mamba_d_ssm=64, mamba_n_heads=4, time_step_limit=[0.0, INFINITE]),
    ],
    ids=lambda model: model["model_type"],
)
def test_a_config_is_read_as_transformers_reads_it_and_adapters_are_where_peft_takes_them(
    prober: WorkerProber, model: dict[str, Any]
) -> None:
    shape = prober.describe(model)
    assert shape is not None and shape.num_layers == 2 and shape.no_adapters is None
    attention = "sdpa" if shape.sdpa else "eager"
    for method in ("lora", "full"):
        result = ask(prober, model, micro_batch_size=1, method=method, attention=attention)
        assert result.outcome is Outcome.OK, result
        assert result.measurement is not None and result.measurement.trainable_params


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (family("no-such-model", 8), "has model type `no-such-model`"),
        (family("clip_text_model", 2), "no causal language model of type clip_text_model"),
        (family("llama", 8, num_attention_heads=3), "hidden size"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_a_model_that_cannot_be_trained_is_refused_in_a_line_and_does_no_harm(
    prober: WorkerProber, model: dict[str, Any], reason: str
) -> None:
    starts = prober.starts
    with pytest.raises(UsageError, match=rf"^this model cannot be trained: .*{reason}.*$"):
        prober.describe(model)
    linear = [f"self_attn.{name}_proj" for name in "qkvo"] + [
        f"mlp.{name}_proj" for name in ("gate", "up", "down")
    ]
    known = ModelShape(
        num_layers=8,
        prefix=0,
        period=1,
        plain_head=True,
        flex=True,
        linear_layers=tuple(sorted(linear)),
    )
    assert prober.describe(TINY_LLAMA) == known
    measure(prober, TINY_LLAMA)
    assert prober.starts == starts


# What two depths predict.

WIDE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 1024,
}


def at_depths(
    prober: WorkerProber,
    model: dict[str, Any],
    knobs: dict[str, Any],
    pair: tuple[int, int] | None = None,
) -> tuple[list[tuple[int, Measurement]], Measurement, Measurement]:
    """Two truncated probes, what they predict of the whole model, and what was measured of it."""
    shape = prober.describe(model)
    assert shape is not None
    pair = pair or depths(
        shape, TrainConfig(**({"checkpointing": "none"} | knobs)).checkpoint_every
    )
    assert pair is not None
    probes = [(depth, measure(prober, model, depth, **knobs)) for depth in pair]
    return (
        probes,
        extrapolate(probes, shape.num_layers).measurement,
        measure(prober, model, **knobs),
    )


@pytest.mark.parametrize(
    ("model", "knobs"),
    [
        (WIDE | {"model_type": "llama", "num_hidden_layers": 6}, {"seq_len": 512}),
        # Gemma 2 has eager attention only.
        (
            WIDE | {"model_type": "gemma2", "num_hidden_layers": 8, "head_dim": 32},
            {"seq_len": 128, "micro_batch_size": 16, "attention": "eager"},
        ),
        (
            WIDE | {"model_type": "qwen2", "num_hidden_layers": 6, "tie_word_embeddings": True},
            {"seq_len": 512, "method": "full"},
        ),
        (
            WIDE | {"model_type": "mixtral", "num_hidden_layers": 6, "num_local_experts": 4},
            {"seq_len": 384},
        ),
    ],
    ids=["llama", "gemma2", "qwen2-full", "mixtral"],
)
def test_two_depths_predict_the_whole_model(
    prober: WorkerProber, model: dict[str, Any], knobs: dict[str, Any]
) -> None:
    for _ in range(2):
        probes, predicted, whole = at_depths(prober, model, {"micro_batch_size": 8} | knobs)
        if predicted.peak_allocated_gib == pytest.approx(whole.peak_allocated_gib, rel=0.02):
            # else Python's table of interned strings doubled meanwhile: 4 MiB, once in a process's
            # life
            break
    (_, shallow), _ = probes
    # there was much to predict
    assert whole.peak_allocated_gib > max(1.5 * shallow.peak_allocated_gib, 150 * MIB)
    assert predicted.peak_allocated_gib == pytest.approx(whole.peak_allocated_gib, rel=0.02)
    assert predicted.peak_reserved_gib == pytest.approx(whole.peak_reserved_gib, rel=0.02)
    for exact in ("model_gib", "adapters_gib", "gradients_gib", "optimizer_gib"):
        assert getattr(predicted, exact) == pytest.approx(getattr(whole, exact), rel=1e-4), exact
    assert (predicted.trainable_params, predicted.total_params) == (
        whole.trainable_params,
        whole.total_params,
    )


def test_a_head_that_is_tied_to_the_embedding_counts_once(prober: WorkerProber) -> None:
    tied, apart = (
        measure(prober, family("qwen2", 2, vocab_size=4096, tie_word_embeddings=tie), method="full")
        for tie in (True, False)
    )
    assert apart.total_params - tied.total_params == 4096 * 32
    assert apart.trainable_params - tied.trainable_params == 4096 * 32
    assert (apart.model_gib - tied.model_gib) * 2**30 == 4 * 4096 * 32


def test_the_first_layers_may_be_of_another_kind(prober: WorkerProber) -> None:
    """Recomputing a sparse layer takes more than any of the dense ones before it: the shallow probe
    must have one.
    """
    sparse = DEEPSEEK | {"first_k_dense_replace": 2, "num_experts_per_tok": 4}
    model = TINY | sparse | {"model_type": "deepseek_v3", "num_hidden_layers": 8, "vocab_size": 512}
    model |= {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 256}
    knobs = {"micro_batch_size": 16, "seq_len": 128, "checkpointing": "full"}
    _, predicted, whole = at_depths(prober, model, knobs)
    # Without one the forecast is twice the truth; with one it is as good as 90 MiB of a wandering
    # process allow.
    assert predicted.peak_allocated_gib == pytest.approx(whole.peak_allocated_gib, rel=0.15)


def test_the_peak_may_move_as_depth_grows(prober: WorkerProber) -> None:
    """With few layers the logits are the peak; with all of them it is what full fine-tuning keeps
    for each parameter.

    Up to the logits that is 12 bytes (weight and two moments), 16 once the gradients are there.
    """
    model = {
        "model_type": "llama",
        "hidden_size": 192,
        "intermediate_size": 1024,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "vocab_size": 8192,
        "num_hidden_layers": 18,
        "tie_word_embeddings": False,
    }
    knobs = {"method": "full", "checkpointing": "full", "micro_batch_size": 1, "seq_len": 440}
    probes, predicted, whole = at_depths(prober, model, knobs, (2, 8))
    for _, measured in probes:
        assert peak_segment(measured) == Phase.BACKWARD  # its first part: the head's
    # within a MiB of each other
    assert peak_segment(whole) in ("backward_layers", "backward_inputs", Phase.OPTIMIZER)
    assert predicted.peak_allocated_gib == pytest.approx(whole.peak_allocated_gib, rel=0.03)

    (shallow, low), (wide, high) = probes
    slope = (high.peak_allocated_gib - low.peak_allocated_gib) / (wide - shallow)
    line = low.peak_allocated_gib + slope * (18 - shallow)
    assert line < 0.94 * whole.peak_allocated_gib


def peak_segment(measured: Measurement) -> str:
    return max(measured.segment_peak_gib, key=measured.segment_peak_gib.__getitem__)


# Models and adapters that stay on the device between probes.


def test_models_that_wait_aside_change_nothing(prober: WorkerProber) -> None:
    """The whole model weighs 26 MiB, its first two layers 10: a peak that counted the other one
    would show it.
    """
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    model = (
        WIDE
        | heads
        | {
            "model_type": "llama",
            "hidden_size": 256,
            "intermediate_size": 1024,
            "num_hidden_layers": 6,
        }
    )
    knobs = {"micro_batch_size": 3, "seq_len": 256}
    starts = prober.starts

    def alone(depth: int | None) -> Measurement:
        measure(prober, TINY_LLAMA)  # another family: whatever waits aside is dropped
        return measure(prober, model, depth, **knobs)

    fresh = {depth: alone(depth) for depth in (2, None)}
    later = {depth: measure(prober, model, depth, **knobs) for depth in (2, 4, None)}

    assert fresh[None].model_gib > 24 * MIB
    for depth, before in fresh.items():
        assert_same_losses(later[depth], before)
        assert later[depth].peak_allocated_gib == pytest.approx(
            before.peak_allocated_gib, rel=0.01, abs=4 * MIB
        )
        assert later[depth].limit_gib == pytest.approx(before.limit_gib, abs=8 * MIB)
    assert later[None].peak_allocated_gib == pytest.approx(fresh[None].peak_allocated_gib, rel=0.01)
    assert (
        fresh[2].peak_allocated_gib < later[4].peak_allocated_gib < fresh[None].peak_allocated_gib
    )
    assert prober.starts == starts


# The fp32 base and the bf16 one in turn: a worker that is asked in this order never keeps anything.
ADAPTERS: dict[str, dict[str, Any]] = {
    "rank 8": {},
    "bf16_mixed": {"precision": "bf16_mixed"},
    "rank 16": {"lora_rank": 16},
    "bf16_pure": {"precision": "bf16_pure"},
    "checkpointing": {"checkpointing": "full"},
    "checkpointing bf16": {"checkpointing": "full", "precision": "bf16_mixed"},
}
# Adapters that are kept, replaced by wider and narrower ones, put on another base, or of another
# dtype on the same one.
IN_TURN = (
    *("rank 8", "rank 8", "rank 16", "rank 8", "checkpointing", "rank 8"),
    *("bf16_mixed", "bf16_pure", "bf16_mixed", "checkpointing bf16", "bf16_mixed"),
    *("rank 8", "checkpointing", "checkpointing", "rank 16", "rank 8"),
)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Measurement]:
    """Each configuration in a new worker, on a base and with adapters of its own."""
    with WorkerProber("cpu", tmp_path_factory.mktemp("fresh")) as other:
        return {name: measure(other, TINY_LLAMA, 2, **knobs) for name, knobs in ADAPTERS.items()}


def test_adapters_that_stay_are_as_good_as_new_ones(
    prober: WorkerProber, fresh: dict[str, Measurement]
) -> None:
    starts = prober.starts
    for name in IN_TURN:
        measured = measure(prober, TINY_LLAMA, 2, **ADAPTERS[name])
        assert measured.loss_first != measured.loss_last
        assert_same_losses(measured, fresh[name])
    # they are not equal for want of any difference
    assert len({one.losses[:2] for one in fresh.values()}) >= 4
    assert prober.starts == starts


# A cap.


def test_memory_that_ran_out_at_one_depth_leaves_the_others_alone(prober: WorkerProber) -> None:
    model = WIDE | {"model_type": "llama", "num_hidden_layers": 8}
    knobs = {"micro_batch_size": 4, "seq_len": 256}
    before = measure(prober, model, 2, **knobs)
    starts = prober.starts

    little = (before.context_gib + 0.25) / 0.95
    result = ask(prober, model, 2, memory_gib=little, micro_batch_size=64, seq_len=512)
    assert (result.outcome, result.depth) == (Outcome.OOM, 2)
    assert result.phase in (Phase.FORWARD, Phase.BACKWARD)
    assert result.oom is not None and result.oom.limit_gib == pytest.approx(0.25, abs=32 * MIB)

    measure(prober, model, 4, memory_gib=little, **knobs)
    after = measure(prober, model, 2, memory_gib=little, **knobs)
    assert_same_losses(after, before)
    assert after.peak_allocated_gib == pytest.approx(
        before.peak_allocated_gib, rel=0.01, abs=4 * MIB
    )
    assert prober.starts == starts


def test_a_model_that_does_not_load_is_probed_in_part(prober: WorkerProber) -> None:
    """Its layers weigh 16 MiB each, 32 of them 512; the first two wait aside while the whole is
    tried in vain.
    """
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    model = WIDE | heads | {"model_type": "llama", "hidden_size": 512, "intermediate_size": 2048}
    model["num_hidden_layers"] = 32
    before = measure(prober, model, 2)
    starts = prober.starts

    little = (before.context_gib + 0.25) / 0.95
    result = ask(prober, model, memory_gib=little)
    assert (result.outcome, result.depth, result.phase) == (Outcome.OOM, None, Phase.LOAD)
    assert result.oom is not None and result.oom.limit_gib == pytest.approx(0.25, abs=32 * MIB)

    after = measure(prober, model, 2, memory_gib=little)
    assert_same_losses(after, before)
    assert after.peak_allocated_gib == pytest.approx(
        before.peak_allocated_gib, rel=0.01, abs=4 * MIB
    )
    assert prober.starts == starts


def test_recomputation_leaves_no_hook_behind(prober: WorkerProber) -> None:
    """Where the embedding's output required gradients, the next probe would run through one more
    segment.
    """
    model = family("llama", 4)
    before = measure(prober, model, checkpointing="none")
    measure(prober, model, checkpointing="full")
    after = measure(prober, model, checkpointing="none")
    assert after.segment_peak_gib.keys() == before.segment_peak_gib.keys()
    assert "backward_inputs" not in after.segment_peak_gib


def test_other_processes_make_the_same_batches_and_are_gone_afterwards(
    prober: WorkerProber,
) -> None:
    alone = measure(prober, TINY_LLAMA, loader_workers=0)
    assert prober._process is not None
    worker = psutil.Process(prober._process.pid)
    others = worker.children(recursive=True)  # who ends them all with it
    helped = measure(prober, TINY_LLAMA, loader_workers=2)
    assert helped.losses[:2] == alone.losses[:2] and len(alone.losses) >= 2
    assert worker.children(recursive=True) == others
