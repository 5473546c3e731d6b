"""Real CPU probes on several ranks: fake worlds in one worker, and two real ranks that meet over
gloo.
"""

import math
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from autotune.catalog import resolve_model
from autotune.core.errors import Cancelled, UsageError
from autotune.core.parallelism import ZERO
from autotune.core.probe_types import (
    Measurement,
    MicroBatch,
    Outcome,
    Phase,
    ProbeRequest,
    ProbeResult,
    World,
)
from autotune.prediction.estimate import memory_of
from autotune.probe.fault_injection import VARIABLE
from autotune.probe.monitor import DEADLINES
from autotune.probe.rank_pool import RankPool
from autotune.probe.supervisor import WorkerProber
from tests.helpers.probing import MODEL, alive, request
from tests.probe.test_families import ALWAYS

pytestmark = pytest.mark.probe

LARGER = MODEL | {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 18,
    "num_attention_heads": 8,
}
LARGER |= {"num_key_value_heads": 8, "vocab_size": 8000}
# few tokens, since its weights alone are the point
OF_LARGER: dict[str, Any] = {"model": LARGER, "seq_len": 16}
LESS_GIB = 1.6  # leaves less, beside the libraries, than the weights of the larger model in fp32
STOPPED_S = 1.0  # after a rank has said that it failed


def shared(
    num_gpus: int, strategy: str, world: World = World.FAKE, micro_steps: int = 1, **how: Any
) -> ProbeRequest:
    """A request for a few short steps on so many GPUs."""
    asked = request(**({"micro_batch_size": 2, "num_gpus": num_gpus, "sharding": strategy} | how))
    made: ProbeRequest = replace(asked, world=world, micro_steps=micro_steps)
    return made


def measured(result: ProbeResult) -> Measurement:
    assert result.outcome is Outcome.OK, result.reason
    assert result.notes == () and result.measurement is not None
    return result.measurement


# Fake worlds.


def test_one_worker_plays_a_rank_of_eight_then_trains_alone_then_plays_one_of_two(
    prober: WorkerProber,
) -> None:
    """Weights, adapters, gradients and optimizer state are 1/N, and nothing of one world is left in
    the next.
    """
    log = prober.logs / "world.log"
    alone = measured(prober.probe(shared(1, "none"), log))
    starts = prober.starts
    for num_gpus, strategy, method in (
        (8, "fsdp2", "lora"),
        (2, "fsdp2_keep", "full"),
        (2, "fsdp2", "lora"),
    ):
        whole = measured(prober.probe(shared(1, "none", method=method), log))
        rank = measured(prober.probe(shared(num_gpus, strategy, method=method), log))
        for name in ("model_gib", "adapters_gib", "gradients_gib", "optimizer_gib"):
            assert getattr(rank, name) == pytest.approx(
                getattr(whole, name) / num_gpus, rel=0.01
            ), name
        assert (rank.trainable_params, rank.total_params) == (
            whole.trainable_params,
            whole.total_params,
        )
    again = measured(prober.probe(shared(1, "none"), log))
    assert prober.starts == starts  # each world returned its memory
    assert again.losses[:3] == pytest.approx(alone.losses[:3], rel=1e-6)


@pytest.mark.parametrize(
    ("family", "strategy", "method"), [("qwen3_moe", "fsdp2", "full"), ("gpt2", "ddp", "lora")]
)
def test_a_rank_of_a_family_without_a_formula_is_played(
    prober: WorkerProber, family: str, strategy: str, method: str
) -> None:
    asked = shared(
        4, strategy, method=method, model=MODEL | {"model_type": family} | ALWAYS[family]
    )
    assert measured(prober.probe(asked, prober.logs / "family.log")).trainable_params > 0


@pytest.mark.extra
@pytest.mark.parametrize("method", ["lora", "full"])
def test_what_the_stages_of_deepspeed_divide(prober: WorkerProber, method: str) -> None:
    """Weights in bf16, and 12 bytes of state for each trained value, fp32 masters among them.

    The processes stay.
    """
    pytest.importorskip("deepspeed")
    sizes, log = {"method": method, "precision": "bf16_mixed"}, prober.logs / "zero.log"
    alone = measured(prober.probe(shared(1, "none", **sizes), log))
    starts = prober.starts
    for strategy, held in (("zero1", 1), ("zero2", 1), ("zero3", 4)):
        found = measured(prober.probe(shared(4, strategy, micro_steps=2, **sizes), log))
        assert (alone.total_params, alone.trainable_params) == (
            found.total_params,
            found.trainable_params,
        )
        trained = found.trainable_params
        frozen = found.total_params - trained if method == "lora" else 0
        assert found.model_gib * 2**30 == pytest.approx(2 * (frozen or trained) / held, rel=0.05)
        assert found.optimizer_gib * 2**30 == pytest.approx(12 * trained / 4, rel=0.01)
        measured(prober.probe(shared(1, "none", **sizes), log))
    assert prober.starts == starts


def test_copies_are_shared_out_among_fewer(prober: WorkerProber) -> None:
    """A rank of 16 that hold two copies has an eighth of each."""
    log = prober.logs / "copies.log"
    copied, eight = (
        measured(
            prober.probe(shared(number, "fsdp2", micro_steps=2, method="full", copies=copies), log)
        )
        for number, copies in ((16, 2), (8, 1))
    )
    for name in ("model_gib", "gradients_gib", "optimizer_gib", "total_params", "trainable_params"):
        assert getattr(copied, name) == getattr(eight, name) > 0, name
    starts = prober.starts
    measured(prober.probe(shared(1, "none"), log))
    assert prober.starts == starts


def test_every_rank_of_ddp_holds_all(prober: WorkerProber) -> None:
    alone = measured(prober.probe(shared(1, "none"), prober.logs / "alone.log"))
    rank = measured(prober.probe(shared(8, "ddp", micro_steps=2), prober.logs / "ddp.log"))
    for name in ("model_gib", "adapters_gib", "gradients_gib", "optimizer_gib"):
        assert getattr(rank, name) == pytest.approx(getattr(alone, name), rel=1e-3)


@pytest.mark.parametrize(
    "knobs",
    [
        {"checkpointing": "full", "loss": "chunked", "precision": "bf16_mixed"},
        {"method": "full", "loss": "chunked", "model": MODEL | {"tie_word_embeddings": True}},
        {"compile": "per_layer", "checkpointing": "full", "precision": "bf16_mixed"},
    ],
    ids=str,
)
def test_what_fsdp2_trains_with(prober: WorkerProber, knobs: dict[str, Any]) -> None:
    starts = prober.starts
    measured(prober.probe(shared(2, "fsdp2", micro_steps=2, **knobs), prober.logs / "knobs.log"))
    assert prober.starts == starts


# Filling 0.8 GiB of weights takes long, and real ranks do it too.
@pytest.mark.families
@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_model_larger_than_a_rank_is_shared_out_before_it_has_memory(
    prober: WorkerProber, method: str
) -> None:
    """A rank holds what it would if the whole model had been there first, and its limit is below
    that.
    """
    roomy, tight = (
        measured(
            prober.probe(
                shared(8, "fsdp2", **OF_LARGER, method=method, memory_gib=gib),
                prober.logs / "l.log",
            )
        )
        for gib in (8.0, LESS_GIB)
    )
    assert tight.limit_gib < roomy.total_params * 4 / 2**30 < roomy.limit_gib
    assert tight.peak_allocated_gib == pytest.approx(roomy.peak_allocated_gib, rel=0.01)
    for name in (
        "model_gib",
        "adapters_gib",
        "gradients_gib",
        "optimizer_gib",
        "total_params",
        "trainable_params",
    ):
        assert getattr(tight, name) == pytest.approx(getattr(roomy, name)), name


def test_vectors_of_a_model_without_memory_have_values() -> None:
    """Biases and norms are not initialised as a model is made: memory may hold anything then."""
    import torch

    from autotune.probe.model_settings import model_settings
    from autotune.trainer.model_builder import config_of, is_outline, outline

    spoiled = [torch.full((size,), torch.nan) for size in (32, 64, 128, 256) for _ in range(200)]
    del spoiled
    for family in ("qwen2", "stablelm"):
        model = outline(
            config_of(
                MODEL | {"model_type": family, "tie_word_embeddings": False, "use_qkv_bias": True}
            ),
            model_settings(request().config, family),
            torch.device("cpu"),
            0.0,
        )
        assert model is not None and is_outline(model)
        for name, parameter in model.named_parameters():
            assert parameter.is_meta or parameter.eq(float(name.endswith("weight"))).all(), name


def test_what_runs_out_of_memory_in_a_fake_world_leaves_nothing_behind(
    prober: WorkerProber,
) -> None:
    log = prober.logs / "oom.log"
    starts = prober.starts
    large = shared(2, "fsdp2", memory_gib=0.5, micro_batch_size=128, seq_len=256)
    assert prober.probe(large, log).outcome is Outcome.OOM
    measured(prober.probe(shared(2, "fsdp2"), log))
    measured(prober.probe(shared(1, "none"), log))
    assert prober.starts == starts


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (shared(2, "fsdp2", optimizer="adafactor"), "Adafactor mixes whole and sharded tensors"),
        (replace(shared(2, "ddp"), trainer="trl"), "--trainer trl is untested on several GPUs"),
    ],
)
def test_what_is_not_tried_is_refused(
    prober: WorkerProber, asked: ProbeRequest, words: str
) -> None:
    result = prober.probe(asked, prober.logs / "refused.log")
    assert result.outcome is Outcome.REFUSED and words in (result.reason or "")


# Real ranks.


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Two real ranks, which serve every test."""
    with RankPool("cpu", 2, tmp_path_factory.mktemp("ranks")) as started:
        yield started


def step_losses(found: Measurement) -> list[float]:
    """The loss of each step, over its micro batches."""
    each = found.micro_steps
    return [
        sum(found.losses[begin : begin + each])
        for begin in range(0, len(found.losses) - each + 1, each)
    ]


# Each strategy with each method and with each number of micro steps; the others are a wide grid.
LEARNING = [
    ("ddp", "lora", 1),
    ("ddp", "full", 2),
    ("fsdp2", "lora", 2),
    ("fsdp2", "full", 1),
    ("fsdp2_keep", "lora", 1),
    ("fsdp2_keep", "full", 2),
]
OTHERS = [(strategy, method, 3 - micro_steps) for strategy, method, micro_steps in LEARNING]


@pytest.mark.parametrize(
    ("strategy", "method", "micro_steps"),
    [*LEARNING, *(pytest.param(*other, marks=pytest.mark.families) for other in OTHERS)],
)
def test_two_ranks_learn_what_one_process_does(
    pool: RankPool, strategy: str, method: str, micro_steps: int
) -> None:
    """The global batch is micro batch x accumulation x ranks: as large here as with twice the micro
    batches on one.
    """
    log = pool.logs / "losses.log"
    alone = measured(pool.probe(shared(1, "none", micro_steps=2 * micro_steps, method=method), log))
    both = measured(pool.probe(shared(2, strategy, World.REAL, micro_steps, method=method), log))
    expected, found = step_losses(alone), step_losses(both)
    steps = min(len(expected), len(found))
    assert steps >= 2
    assert found[:steps] == pytest.approx(expected[:steps], rel=1e-4)


def test_shards_without_masters_take_half_of_the_memory(pool: RankPool) -> None:
    """Weights, gradients and state in bf16 instead of fp32, and the losses of one process."""
    log, knobs = pool.logs / "pure.log", {"method": "full", "precision": "bf16_pure"}
    alone = measured(pool.probe(shared(1, "none", micro_steps=2, **knobs), log))
    both = measured(pool.probe(shared(2, "fsdp2", World.REAL, 1, **knobs), log))
    assert step_losses(both)[:2] == pytest.approx(step_losses(alone)[:2], rel=5e-3)
    masters = measured(pool.probe(shared(2, "fsdp2", World.FAKE, 1, method="full"), log))
    for name in ("model_gib", "optimizer_gib"):
        assert getattr(both, name) == pytest.approx(getattr(masters, name) / 2, rel=0.05), name


@pytest.mark.parametrize("double_quant", [False, True])
def test_two_ranks_learn_with_a_sharded_4_bit_base_what_one_process_does(
    pool: RankPool, double_quant: bool
) -> None:
    """Each rank holds half of the packed weights and of their scales, and half of all else."""
    knobs = {"quantization": "nf4", "double_quant": double_quant}
    log = pool.logs / "nf4.log"
    alone = measured(pool.probe(shared(1, "none", micro_steps=2, **knobs), log))
    both = measured(pool.probe(shared(2, "fsdp2", World.REAL, 1, **knobs), log))
    expected, found = step_losses(alone), step_losses(both)
    steps = min(len(expected), len(found))
    assert steps >= 2
    assert found[:steps] == pytest.approx(expected[:steps], rel=1e-5)
    # A process alone also holds the tables of both codes for each of the 14 layers.
    codes = 14 * 4 * (16 + 256) / 2**30
    halves = (alone.model_gib - codes) / 2, alone.model_gib / 2
    assert 0.95 * halves[0] < both.model_gib < 1.05 * halves[1]
    assert (alone.total_params, alone.trainable_params) == (
        both.total_params,
        both.trainable_params,
    )


@pytest.mark.extra
@pytest.mark.parametrize("method", ["lora", "full"])
def test_two_ranks_learn_by_deepspeed_what_one_process_does(pool: RankPool, method: str) -> None:
    """All in bf16, under autocast where one process trains."""
    pytest.importorskip("deepspeed")
    knobs, log = {"method": method, "precision": "bf16_mixed"}, pool.logs / "zero.log"
    alone = measured(pool.probe(shared(1, "none", micro_steps=4, **knobs), log))
    # the first alone: ranks count alike after it
    measured(pool.probe(shared(2, "zero3", micro_steps=2, **knobs), log))
    expected = step_losses(alone)
    cases = [("zero1", "full"), ("zero2", "full"), ("zero3", "full"), ("zero3", "chunked")]
    for strategy, loss in cases:
        asked = shared(2, strategy, World.REAL, 2, loss=loss, **knobs)
        found = step_losses(measured(pool.probe(asked, log)))
        steps = min(len(expected), len(found))
        assert steps >= 2
        assert found[:steps] == pytest.approx(expected[:steps], rel=2e-3), (strategy, loss)


@pytest.mark.extra
@pytest.mark.parametrize(("method", "tight_gib"), [("lora", 1.03), ("full", 1.15)])
def test_the_third_stage_builds_a_large_model_as_shards(
    prober: WorkerProber, method: str, tight_gib: float
) -> None:
    """The second limit is below the model's weights beside a CUDA context."""
    pytest.importorskip("deepspeed")
    model = LARGER | {"num_hidden_layers": 2}
    found = []
    for memory_gib in (8.0, tight_gib):
        asked = shared(2, "zero3", method=method, precision="bf16_mixed", model=model, seq_len=16)
        asked = replace(asked, memory_gib=memory_gib)
        result = prober.probe(asked, prober.logs / "as_shards.log")
        assert result.outcome is Outcome.OK and result.measurement is not None, result.reason
        found.append(result.measurement)
    whole, built = found
    assert built.losses[:2] != whole.losses[:2]  # its random weights are others
    assert built.losses[0] == pytest.approx(math.log(8000), rel=0.1)
    assert built.peak_allocated_gib == pytest.approx(whole.peak_allocated_gib, rel=0.01)
    for name in ("model_gib", "adapters_gib", "optimizer_gib", "total_params", "trainable_params"):
        assert getattr(built, name) == pytest.approx(getattr(whole, name)), name


def test_gradients_that_are_divided_in_each_micro_batch_are_the_same(pool: RankPool) -> None:
    log, knobs = pool.logs / "sync.log", {"method": "full"}
    once, each = (
        measured(pool.probe(shared(2, "fsdp2", World.REAL, 2, sync_each_batch=sync, **knobs), log))
        for sync in (False, True)
    )
    assert each.losses[:4] == pytest.approx(once.losses[:4], rel=1e-6)


def test_without_deepspeed_its_stages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from autotune.probe import rank

    asked = shared(2, "zero2", precision="bf16_mixed")
    monkeypatch.setattr(rank, "find_spec", lambda name: None)
    assert rank.refusal(asked) == "zero2 needs DeepSpeed: pip install deepspeed"
    monkeypatch.setattr(rank, "find_spec", lambda name: name)
    assert rank.refusal(asked) is None


def test_real_ranks_train_a_model_that_neither_holds_as_a_whole(tmp_path: Path) -> None:
    """1.2 GiB of weights on two ranks of less than that: each has its half, and all see the same
    loss.

    Their processes are new, since the libraries that others have loaded leave less of the limit.
    """
    asked = shared(2, "fsdp2", World.REAL, **OF_LARGER, memory_gib=LESS_GIB)
    with RankPool("cpu", 2, tmp_path) as fresh:
        found = measured(fresh.probe(asked, tmp_path / "larger.log"))
    assert found.limit_gib < found.total_params * 4 / 2**30
    assert (
        found.losses[0] == pytest.approx(math.log(8000), rel=0.1)
        and found.losses[1] != found.losses[0]
    )
    assert found.model_gib + found.adapters_gib == pytest.approx(
        found.total_params * 2 / 2**30, rel=0.01
    )


def test_a_fake_rank_holds_what_a_real_one_does(pool: RankPool) -> None:
    for strategy in ("ddp", "fsdp2"):
        real, fake = (
            measured(pool.probe(shared(2, strategy, world, method="full"), pool.logs / "same.log"))
            for world in World
        )
        for name in ("model_gib", "gradients_gib", "optimizer_gib"):
            assert getattr(fake, name) == getattr(real, name)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Four real ranks, which start only once."""
    with RankPool("cpu", 4, tmp_path_factory.mktemp("four")) as started:
        yield started


# two ranks have both
@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=pytest.mark.families)])
def test_a_played_rank_of_two_copies_holds_what_a_real_one_does(
    method: str, four: RankPool
) -> None:
    """Four ranks hold the model twice (HSDP), each half of a copy, as the formula says; and learn
    as one does.
    """
    model = resolve_model("demo-3m")
    knobs: dict[str, Any] = {"method": method, "precision": "bf16_mixed", "model": model.config}
    asked = [shared(4, "fsdp2", world, 2, copies=2, **knobs) for world in World]
    log = four.logs / "copies.log"
    real, fake = (measured(four.probe(one, log)) for one in asked)
    learning = measured(four.probe(shared(4, "fsdp2", World.REAL, method=method, copies=2), log))
    alone = measured(four.probe(shared(1, "none", micro_steps=4, method=method), log))
    by_formula = memory_of(model, asked[0].config)
    assert by_formula is not None
    for name in ("model_gib", "adapters_gib", "gradients_gib", "optimizer_gib"):
        assert getattr(fake, name) == getattr(real, name), name
    weights, adapters = (
        (fake.model_gib, 0.0) if method == "full" else (fake.model_gib, fake.adapters_gib)
    )
    assert weights == pytest.approx(by_formula.weights, rel=0.01)
    assert adapters == pytest.approx(by_formula.adapters, rel=0.01)
    assert fake.optimizer_gib == pytest.approx(by_formula.optimizer, rel=0.01)
    assert fake.peak_allocated_gib == pytest.approx(real.peak_allocated_gib, rel=0.1)
    expected, found = step_losses(alone), step_losses(learning)
    steps = min(len(expected), len(found))
    assert steps >= 2 and found[:steps] == pytest.approx(expected[:steps], rel=1e-4)


@pytest.mark.parametrize(
    "strategy",
    [
        "ddp",
        "fsdp2",
        *(pytest.param(stage, marks=pytest.mark.extra) for stage in ("zero2", "zero3")),
    ],
)
def test_a_confirmation_evaluates_and_saves_on_all_ranks(pool: RankPool, strategy: str) -> None:
    if strategy in ZERO:
        pytest.importorskip("deepspeed")
    precision = "bf16_mixed" if strategy in ZERO else "fp32"
    asked = replace(shared(2, strategy, World.REAL, precision=precision), evaluate=True)
    found = measured(pool.probe(asked, pool.logs / "evaluate.log"))
    assert found.evaluation_s is not None and found.checkpoint_s is not None
    assert Phase.EVALUATE in found.phase_peak_gib


def test_what_ranks_reach_together_is_measured_and_leaves_nothing_behind(pool: RankPool) -> None:
    log = pool.logs / "after.log"
    before = measured(pool.probe(shared(2, "ddp", World.REAL), log))
    starts = pool.starts
    (rates,) = pool.collectives()
    assert rates.num_gpus == 2 and min(rates.gather_gb_s, rates.scatter_gb_s, rates.reduce_gb_s) > 0
    assert measured(pool.probe(shared(2, "ddp", World.REAL), log)).losses[:2] == pytest.approx(
        before.losses[:2]
    )
    assert pool.starts == starts


def test_a_pool_probes_fewer_ranks_in_turn(pool: RankPool) -> None:
    """The first rank then knows lengths of rows that the second has not seen."""
    log = pool.logs / "fewer.log"
    kinds = tuple(
        MicroBatch(rows=((length,),) * 2, length=length, share=0.5) for length in (16, 24)
    )
    for num_gpus, strategy in ((1, "none"), (2, "ddp"), (1, "none")):
        asked = replace(
            shared(num_gpus, strategy, World.REAL, padding="masked", seq_len=24),
            micro_batches=kinds,
        )
        assert asked.plans_by_length
        assert pool.probe(asked, log).outcome is Outcome.OK


def test_a_world_of_another_size_is_refused(pool: RankPool) -> None:
    with pytest.raises(UsageError, match="a pool of 2 ranks cannot probe 4 real ranks"):
        pool.probe(shared(4, "ddp", World.REAL), pool.logs / "four.log")


def pids(pool: RankPool) -> list[int]:
    return [rank.ready_process().pid for rank in pool._ranks]


def test_what_fails_in_one_rank_ends_all_and_the_next_probe_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in turn: memory that ran out in a rank, one that was killed twice, an exit, and a loss
    that is NaN.
    """
    struck = {1: "oom:1#1", 2: "sigkill@first_step:2#0", 3: "exit:3#1", 4: "nan@steady:4#0"}
    monkeypatch.setenv(VARIABLE, ",".join(struck.values()))
    expected = {
        1: (Outcome.OOM, "out of memory in first_step"),
        2: (Outcome.CRASH, "rank 0: the worker was killed by SIGKILL"),
        3: (Outcome.CRASH, "rank 1: the worker ended with exit code 3"),
        4: (Outcome.NUMERICS, "injected: the loss went nan"),
    }
    with RankPool("cpu", 2, tmp_path) as pool:
        right = measured(
            pool.probe(shared(2, "fsdp2", World.REAL), tmp_path / "trial-0000.log")
        ).losses
        for trial, (outcome, reason) in expected.items():
            before = pids(pool)
            result = pool.probe(shared(2, "fsdp2", World.REAL), tmp_path / f"trial-{trial:04d}.log")
            assert (result.outcome, result.reason) == (outcome, reason)
            # and no more of this config
            assert any("tried twice" in note for note in result.notes) is (trial == 2)
            assert result.seconds["stop"] < STOPPED_S and not any(map(alive, before))
        assert (
            measured(pool.probe(shared(2, "fsdp2", World.REAL), tmp_path / "last.log")).losses
            == right
        )
        last = pids(pool)
    assert not any(map(alive, last))


def test_a_rank_that_hangs_is_ended_with_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "hang@steady:1#1")
    monkeypatch.setitem(DEADLINES, Phase.STEADY, 2.0)
    with RankPool("cpu", 2, tmp_path) as pool:
        before = pids(pool)
        result = pool.probe(shared(2, "ddp", World.REAL), tmp_path / "trial-0001.log")
        assert result.outcome is Outcome.TIMEOUT and result.phase is Phase.STEADY
        assert not any(map(alive, before))


@pytest.mark.real_processes
def test_who_stops_ends_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "hang@load#1")
    stop = threading.Event()
    with RankPool("cpu", 2, tmp_path, should_stop=stop.is_set) as pool:
        before = pids(pool)
        threading.Timer(0.5, stop.set).start()
        begin = time.monotonic()
        with pytest.raises(Cancelled):
            pool.probe(shared(2, "ddp", World.REAL), tmp_path / "trial-0001.log")
        assert time.monotonic() - begin < 5
    assert not any(map(alive, before))


def test_probes_of_all_kinds_follow_each_other_in_the_same_processes(pool: RankPool) -> None:
    """Their processes do not grow with the number of probes."""
    asked = [
        shared(2, "ddp", World.REAL, 2),
        shared(8, "fsdp2"),
        shared(2, "fsdp2", World.REAL, method="full"),
        shared(1, "none"),
        shared(2, "fsdp2_keep", World.REAL, checkpointing="full"),
        shared(2, "ddp", method="full"),
    ]
    before, held = pids(pool), list[float]()
    for _ in range(3):
        for one in asked:
            measured(pool.probe(one, pool.logs / "mixed.log"))
        held.append(
            statistics.fmean(psutil.Process(pid).memory_info().rss for pid in before) / 2**20
        )
    assert pids(pool) == before
    assert held[-1] - held[0] < 30, held
