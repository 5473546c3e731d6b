"""Several examples to a row: as many rows as best fit finds, nobody sees a neighbour, a step is what was asked for."""

import importlib.util
import math
import random
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from autotune.catalog import resolve_device
from autotune.core.errors import UsageError
from autotune.core.probe_types import Measurement, Outcome, ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.probe.supervisor import WorkerProber
from autotune.problem.constraints import ATTENTIONS, NO_SDPA, PACKED_APART
from autotune.problem.length_distribution import Lengths
from autotune.problem.packing import packed_rows
from autotune.problem.performance import Performance, performance
from autotune.problem.run_cost import by_examples
from autotune.problem.search_space import SearchSpace
from autotune.problem.setup import Setup, set_up
from autotune.problem.study_spec import StudySpec
from autotune.problem.workload import PROBED_ROWS, Workload
from autotune.study.coordinate_search import next_move
from tests.helpers.sessions import space

# Cut at 10, the longest first: 10; 7 + 3; 6 + 3 (1 is left); 5 + 5; 5 + 2 (3 are left); 1 goes where 1 is left.
BY_HAND = Lengths.of([7, 6, 5, 5, 5, 3, 3, 2, 1, 12], "counted")
PACKED = TrainConfig(seq_len=10, micro_batch_size=1, packing=True)
SKEWED = Lengths.of([100] * 60 + [300] * 25 + [700] * 10 + [2000] * 5, "counted")


def rows_of(lengths: Lengths, seq_len: int) -> list[tuple[int, ...]]:
    return sorted(row.examples for row in packed_rows(lengths, seq_len) for _ in range(row.number))


def best_fit(examples: list[int], seq_len: int) -> list[list[int]]:
    """As the textbook has it, one example after the other."""
    rows: list[list[int]] = []
    for tokens in sorted(examples, reverse=True):
        having_room = [row for row in rows if sum(row) + tokens <= seq_len]
        if having_room:
            max(having_room, key=sum).append(tokens)
        else:
            rows.append([tokens])
    return rows


def test_rows_by_hand() -> None:
    assert rows_of(BY_HAND, 10) == [(5, 2), (5, 5), (6, 3, 1), (7, 3), (10,)]


@pytest.mark.parametrize("seed", range(40))
def test_as_many_rows_as_best_fit_decreasing_and_every_example_once(seed: int) -> None:
    drawn = random.Random(seed)
    seq_len = drawn.choice([8, 17, 64, 500])
    examples = [drawn.randint(1, drawn.choice([seq_len // 4, seq_len + 5])) for _ in range(drawn.randint(1, 120))]
    rows = rows_of(Lengths.of(examples, "counted"), seq_len)
    cut = [min(tokens, seq_len) for tokens in examples]
    assert len(rows) == len(best_fit(cut, seq_len))
    assert sorted(tokens for row in rows for tokens in row) == sorted(cut)
    assert max(map(sum, rows)) <= seq_len


def test_what_packed_rows_hold_and_how_many_a_step_takes() -> None:
    workload = Workload(examples=10, epochs=2, lengths=BY_HAND, global_batch=8)
    assert workload.examples_per_row(PACKED) == 2  # 10 examples in 5 rows
    assert workload.useful_tokens_per_row(PACKED) == (49 - 2) / 5
    assert workload.fill(PACKED) == pytest.approx(0.94)
    assert [workload.run_shape(replace(PACKED, micro_batch_size=size)).accumulation for size in (1, 2, 4, 3, 16)] == [
        4,
        2,
        1,
        1,
        1,
    ]
    assert workload.run_shape(replace(PACKED, micro_batch_size=3)).examples_per_step == 6  # as near as whole rows allow
    assert workload.run_shape(PACKED).num_steps == 2 * 2  # 4 rows, then 1
    alone = replace(PACKED, packing=False)
    assert (workload.fill(alone), workload.run_shape(alone).num_steps) == (pytest.approx(0.47), 2 * 2)


def test_useful_tokens_of_packed_rows_are_what_counts() -> None:
    workload = Workload(examples=10, lengths=BY_HAND, global_batch=8)
    fields = dict.fromkeys(Measurement.__dataclass_fields__, 0.0)
    measured = Measurement(**fields | {"step_s": (1.0,), "micro_step_s": (0.25,), "rest_s": ()})  # type: ignore[arg-type]
    packed, alone = (performance(replace(PACKED, packing=on), [measured], workload) for on in (True, False))
    assert packed.tokens_per_second == pytest.approx(9.4 / 0.25)
    assert alone.tokens_per_second == pytest.approx(4.7 / 0.25)
    assert packed.samples_per_second == pytest.approx(2 / 0.25)


def test_all_examples_are_packed_not_those_alone_that_were_looked_at() -> None:
    """One length was given, of many examples: they share rows all the same."""
    workload = Workload(examples=10_000, lengths=Lengths.constant(3))
    assert workload.examples_per_row(PACKED) == pytest.approx(3, rel=1e-3)


def test_other_sizes_of_the_dataset_take_steps_like_those_that_were_measured() -> None:
    """Fifty examples fill their rows worse than ten thousand would: the step that was measured is theirs."""
    lengths = Lengths.of([100] * 30 + [300] * 13 + [700] * 5 + [2000] * 2, "counted")
    workload = Workload(examples=50, lengths=lengths, global_batch=32)
    config = TrainConfig(seq_len=2048, micro_batch_size=2, packing=True)
    speed = Performance(samples_per_second=10.0, tokens_per_second=1.0, step_time_s=3.0, spread=(0, 0), mfu=None)
    small, large, _ = by_examples(workload, config, speed, None)
    assert small.num_steps == math.ceil(10_000 / workload.run_shape(config).examples_per_step)
    assert large.full_run_hours == pytest.approx(5 * small.full_run_hours, rel=1e-2)


def test_probed_rows_stand_for_all_of_them() -> None:
    workload = Workload(lengths=Lengths.of([10] * 75 + [5] * 50, "counted"))
    rows = workload.rows(PACKED)
    assert rows[:2] == ((5, 5), (10,))  # with a mask, and without: both are compiled and weighed at the start
    assert sorted(rows) == [(5, 5)] * 2 + [(10,)] * 6 and len(rows) == PROBED_ROWS


def test_padded_rows_hold_as_much_as_the_examples_and_full_ones_are_no_rows_at_all() -> None:
    config = TrainConfig(seq_len=1024)
    rows = Workload(lengths=Lengths.of([100] * 50 + [500] * 25 + [4000] * 25, "counted")).rows(config)
    assert sorted(rows) == [(128,)] * 4 + [(512,)] * 2 + [(1024,)] * 2  # in sixteenths of a row
    assert all({sum(pair[0]), sum(pair[1])} != {128} for pair in zip(rows[::2], rows[1::2], strict=True))  # mixed
    almost = Workload(lengths=Lengths.of([101] * 50 + [510] * 25 + [3000] * 25, "counted")).rows(config)
    assert almost == rows  # what was measured of the one serves the other
    assert Workload(lengths=Lengths.constant(1024)).rows(config) == Workload(lengths=Lengths.constant(5000)).rows(
        config
    )
    assert Workload(lengths=Lengths.constant(1024)).rows(config) == ()
    assert set(Workload(lengths=Lengths.constant(1)).rows(replace(config, seq_len=16))) == {(2,)}  # one has no loss


# What of it is proposed.


def prepared(lengths: str | None = None, model: str = "mistral-7b", **asked: Any) -> Setup:
    return set_up(StudySpec(model=model, lengths=lengths, space="lora", **asked), resolve_device("h200"))


def removed(setup: Setup) -> list[str]:
    return [str(one) for one in setup.removals if one.knob == "packing" or "packed" in one.reason]


@pytest.fixture
def skewed(tmp_path: Path) -> str:
    file = tmp_path / "lengths.txt"
    file.write_text("\n".join(str(tokens) for tokens, number in SKEWED.counts for _ in range(number)))
    return str(file)


def test_packing_is_proposed_beside_micro_batches_that_keep_the_global_batch(skewed: str) -> None:
    setup = prepared(skewed)
    knob = setup.task.space.knob("packing")
    assert knob is not None and knob.choices() == (False, True)
    # A row of 2,048 tokens holds 6 of these examples: 32 of them are 5 rows.
    assert knob.when is not None and knob.when["micro_batch_size"] == [1, 2, 4]
    reason = "a step would be over 25% off the global batch of 32 (--global-batch)"
    assert removed(setup) == [f"packing True: not with micro_batch_size 8, 16, 32: {reason}"]
    for chosen in setup.task.space.enumerate():
        config = setup.task.space.config(chosen)
        assert setup.task.workload.run_shape(config).examples_per_step == pytest.approx(32, rel=0.25)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({}, "how long the examples are was not given (--dataset, --lengths)"),
        ({"tokens_per_example": 4096}, "no row has room for a second example"),
        ({"tokens_per_example": 16, "global_batch": 1, "pins": {"seq_len": 4096}}, "a row holds 250.0 examples"),
        (
            {"mean_tokens": 200, "p99_tokens": 900, "pins": {"attention": "flash_attention_2"}},
            "sdpa and eager attention alone",
        ),
    ],
)
def test_where_packing_is_left_out(asked: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: object())
    setup = prepared(**asked)
    assert setup.task.space.knob("packing").choices() == (False,)  # type: ignore[union-attr]
    assert len(removed(setup)) == 1 and removed(setup)[0].endswith(reason)


def test_a_row_length_that_does_not_go_with_the_global_batch_is_left_out_alone() -> None:
    setup = prepared(mean_tokens=200, p99_tokens=900)  # 4,096 tokens hold 20 of them: 32 are no whole rows
    packed = {one.seq_len for one in map(setup.task.space.config, setup.task.space.enumerate()) if one.packing}
    assert packed == {2048}
    assert any("not with seq_len 4096" in line for line in removed(setup))


def test_packing_may_be_asked_for(skewed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: object())
    setup = set_up(
        StudySpec(model="mistral-7b", lengths=skewed, space="default", pins={"packing": True}), resolve_device("h200")
    )
    choices = [setup.task.space.config(chosen) for chosen in setup.task.space.enumerate()]
    assert {config.micro_batch_size for config in choices} == {1, 2, 4}
    assert {config.attention for config in choices} == {"sdpa"}  # with flash_attention_2 neighbours may be seen
    with pytest.raises(
        UsageError, match="packing was asked for, but a step would be over 25% off the global batch of 2"
    ):
        prepared(skewed, pins={"packing": True}, global_batch=2)


def test_packing_is_climbed_to_with_the_largest_micro_batch_that_allows_it() -> None:
    here = TrainConfig(micro_batch_size=8)
    choices: SearchSpace = space(micro_batch_size=(1, 2, 4, 8), packing=(False, True))
    choices = choices.condition("packing", "micro_batch_size", (1, 2, 4))
    chosen = next_move(choices, here, "packing", {here.digest: Outcome.OK})
    assert chosen == {"micro_batch_size": 4, "packing": True}
    tried = {here.digest: Outcome.OK, choices.config(chosen).digest: Outcome.OOM}
    assert next_move(choices, here, "packing", tried) == {"micro_batch_size": 2, "packing": True}
    assert next_move(choices, choices.config(chosen), "packing", tried) is None


# What it does, in real models.

EXAMPLES = (20, 13, 7)
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "vocab_size": 128,
    "pad_token_id": 0,
    "sliding_window": 8,
    "num_local_experts": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


@pytest.mark.probe
@pytest.mark.parametrize(
    ("model_type", "attention"),
    [pair for pair in product(sorted(PACKED_APART), ATTENTIONS) if pair[1] != "sdpa" or pair[0] not in NO_SDPA],
)
def test_nobody_sees_a_neighbour(model_type: str, attention: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from autotune.probe.harness import RandomRows

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SHAPE, use_cache=False)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    rows = RandomRows(2, 48, 128, seed=0, lengths=(EXAMPLES,), packing=True)
    batch = {key: torch.stack([rows[0][key], rows[1][key]]) for key in rows[0]}
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    for row in (0, 1):
        for index, example in enumerate(batch["input_ids"][row].split([*EXAMPLES, 8])[:3]):
            start = sum(EXAMPLES[:index])
            alone = model(input_ids=example[None]).logits[0]
            torch.testing.assert_close(logits[row, start : start + len(example)], alone, atol=1e-5, rtol=1e-4)


@pytest.mark.probe
def test_the_seams_and_the_padding_of_a_packed_row_are_not_learned() -> None:
    from autotune.probe.harness import RandomRows

    row = RandomRows(1, 8, 128, seed=0, lengths=((3, 2),), packing=True)[0]
    assert row["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    ids = row["input_ids"].tolist()
    assert row["labels"].tolist() == [-100, ids[1], ids[2], -100, ids[4], -100, -100, -100]


@pytest.mark.probe
def test_a_packed_probe_is_a_probe_and_leaves_no_trace(prober: WorkerProber, tmp_path: Path) -> None:
    from autotune.catalog import resolve_model

    workload = Workload(lengths=Lengths.of([20] * 50 + [70] * 20 + [128] * 3, "counted"), global_batch=8)

    def request(packing: bool) -> ProbeRequest:
        config = TrainConfig(micro_batch_size=2, seq_len=128, precision="fp32", checkpointing="full", packing=packing)
        model = resolve_model("demo-3m").config
        rows = workload.rows(config)
        # How many steps are timed depends on how well they agree, and so would the last loss.
        short: dict[str, Any] = {"min_timed_s": 0.0, "min_timed_micros": 1, "max_timed_steps": 1, "evaluate": True}
        return ProbeRequest(config=config, model=model, device="cpu", memory_gib=2.0, rows=rows, **short)

    prober.fingerprint  # noqa: B018 (the worker is up from here on)
    starts = prober.starts
    results = [prober.probe(request(on), tmp_path / f"{index}.log") for index, on in enumerate((False, True, False))]
    assert prober.starts == starts
    before, packed, after = (result.measurement for result in results)
    assert before and packed and after
    assert packed.micro_step_s and packed.loss_first != before.loss_first
    assert (before.loss_first, before.loss_last) == pytest.approx((after.loss_first, after.loss_last), rel=1e-6)
    assert results[0].request_digest != results[1].request_digest
