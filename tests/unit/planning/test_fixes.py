"""Which changes of a file are tried, how much each changes what is learned, and which of them go
together.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.planning.fixes import (
    ADAPTERS,
    CUT_CROSS_ENTROPY,
    OTHER_OPTIMIZER,
    QUANTIZED,
    SAME_RESULT,
    SHORTER,
    FixSearch,
    _subsets,
    apply_edits,
    fixes_of,
)
from autotune.planning.foreign_config import parse
from autotune.planning.run_check import check
from autotune.planning.run_estimate import CheckContext
from autotune.prediction.memory_formula import CONTEXT_GIB
from autotune.problem.run_cost import FITS, TIGHT
from autotune.report.values.check import CheckReport
from tests.helpers.sessions import subject_of
from tests.unit.cli.test_check import AXOLOTL, AXOLOTL_FULL, FACTORY, FACTORY_FULL, TRL_7B, changed

BF16, EIGHT_BIT = (
    (SAME_RESULT, {"dtype": "bfloat16"}),
    (OTHER_OPTIMIZER, {"optim": "adamw_bnb_8bit"}),
)
LIGER = "axolotl.integrations.liger.LigerPlugin"


@pytest.mark.parametrize(
    ("tool", "text", "changes", "expected"),
    [
        ("trl", TRL_7B, {}, [BF16, EIGHT_BIT, (QUANTIZED, {"load_in_4bit": True})]),
        ("trl", TRL_7B, {"dtype": "bfloat16", "load_in_4bit": True}, [EIGHT_BIT]),
        (
            "trl",
            TRL_7B,
            {"load_in_8bit": True, "optim": "adamw_torch", "dtype": "bfloat16"},
            [EIGHT_BIT, (QUANTIZED, {"load_in_4bit": True, "load_in_8bit": False})],
        ),
        (
            "trl",
            TRL_7B,
            {
                "gradient_checkpointing": False,
                "optim": "adafactor",
                "dtype": "bfloat16",
                "load_in_4bit": True,
            },
            [(SAME_RESULT, {"gradient_checkpointing": True})],
        ),
        (
            "trl",
            TRL_7B,
            {
                "activation_checkpointing": False,
                "optim": "adafactor",
                "dtype": "bfloat16",
                "load_in_4bit": True,
            },
            [(SAME_RESULT, {"activation_checkpointing": True})],
        ),
        (
            "trl",
            TRL_7B,
            {"use_dora": True, "optim": "adafactor", "dtype": "bfloat16", "load_in_4bit": True},
            [(OTHER_OPTIMIZER, {"use_dora": False})],
        ),
        (
            "trl",
            TRL_7B,
            {"use_peft": None, "lora_r": None, "lora_alpha": None},
            [
                EIGHT_BIT,
                (QUANTIZED, {"dtype": "bfloat16"}),
                (
                    ADAPTERS,
                    {"use_peft": True, "lora_target_modules": "all-linear", "dtype": "bfloat16"},
                ),
                (
                    ADAPTERS,
                    {
                        "use_peft": True,
                        "lora_target_modules": "all-linear",
                        "dtype": "bfloat16",
                        "load_in_4bit": True,
                    },
                ),
            ],
        ),
        (
            "axolotl",
            AXOLOTL,
            {
                "gradient_checkpointing": False,
                "activation_checkpointing": False,
                "optimizer": "adafactor",
            },
            [
                (SAME_RESULT, {"plugins": [CUT_CROSS_ENTROPY], "cut_cross_entropy": True}),
                (SAME_RESULT, {"gradient_checkpointing": True}),
            ],
        ),
        (
            "axolotl",
            AXOLOTL,
            {
                "plugins": f"some.Other, {LIGER}",
                "liger_cross_entropy": True,
                "optimizer": "adafactor",
            },
            [
                (
                    SAME_RESULT,
                    {"liger_fused_linear_cross_entropy": True, "liger_cross_entropy": False},
                )
            ],
        ),
        (
            "axolotl",
            AXOLOTL,
            {
                "plugins": ["some.Other", CUT_CROSS_ENTROPY],
                "cut_cross_entropy": False,
                "optimizer": "adafactor",
            },
            [
                (
                    SAME_RESULT,
                    {"plugins": ["some.Other", CUT_CROSS_ENTROPY], "cut_cross_entropy": True},
                )
            ],
        ),
        (
            "axolotl",
            AXOLOTL_FULL,
            {"optimizer": "adafactor"},
            [
                (ADAPTERS, {"adapter": "lora", "lora_target_linear": True, "lora_r": 16}),
                (
                    ADAPTERS,
                    {
                        "adapter": "qlora",
                        "lora_target_linear": True,
                        "lora_r": 16,
                        "load_in_4bit": True,
                    },
                ),
            ],
        ),
        (
            "axolotl",
            AXOLOTL_FULL,
            {"lora_r": 8, "optimizer": "adamw_torch"},
            [
                (OTHER_OPTIMIZER, {"optimizer": "adamw_bnb_8bit"}),
                (ADAPTERS, {"adapter": "lora", "lora_target_linear": True, "lora_r": 8}),
                (
                    ADAPTERS,
                    {
                        "adapter": "qlora",
                        "lora_target_linear": True,
                        "lora_r": 8,
                        "load_in_4bit": True,
                    },
                ),
            ],
        ),
        (
            "llamafactory",
            FACTORY,
            {"disable_gradient_checkpointing": True},
            [
                (SAME_RESULT, {"enable_liger_kernel": True}),
                (SAME_RESULT, {"disable_gradient_checkpointing": False}),
                EIGHT_BIT,
                (QUANTIZED, {"quantization_bit": 4}),
            ],
        ),
        (
            "llamafactory",
            FACTORY_FULL,
            {"enable_liger_kernel": True, "pure_bf16": True},
            [
                EIGHT_BIT,
                (ADAPTERS, {"finetuning_type": "lora"}),
                (ADAPTERS, {"finetuning_type": "lora", "quantization_bit": 4}),
            ],
        ),
    ],
)
def test_the_changes_that_are_tried(
    tool: str, text: str, changes: dict[str, Any], expected: list[tuple[int, dict[str, Any]]]
) -> None:
    run = parse(yaml.safe_load(changed(text, **changes)), tool)
    assert list(fixes_of(run)) == expected


def test_axolotl_can_quantise_the_experts_of_a_mixture() -> None:
    edits = (QUANTIZED, {"quantize_moe_experts": True})
    in_4_bits = {"adapter": "qlora", "load_in_4bit": True}
    for text, changes, tool, has_experts, is_offered in (
        (AXOLOTL, in_4_bits, "axolotl", True, True),
        (AXOLOTL, in_4_bits, "axolotl", False, False),
        (AXOLOTL, in_4_bits | edits[1], "axolotl", True, False),
        (TRL_7B, {"load_in_4bit": True}, "trl", True, False),
    ):
        run = parse(yaml.safe_load(changed(text, **changes)), tool)
        assert run.config.quantization == "nf4"
        assert (edits in fixes_of(run, has_experts=has_experts)) is is_offered


def test_which_changes_go_together() -> None:
    """0 and 0 change nothing that is learned, 1 the optimizer, 4 and 4 are two ways to train
    adapters.
    """
    fixes = [(SAME_RESULT, {"a": 1}), (SAME_RESULT, {"b": 1}), (OTHER_OPTIMIZER, {"c": 1})]
    fixes += [(ADAPTERS, {"d": 1}), (ADAPTERS, {"d": 2})]

    def combinations(rank: int) -> list[tuple[int, str]]:
        return [
            (count, "".join(f"{key}{value}" for key, value in edits.items()))
            for count, edits in _subsets(fixes, rank)
        ]

    without_c = [(0, ""), (1, "a1"), (1, "b1"), (2, "a1b1")]
    with_c = [(1, "c1"), (2, "a1c1"), (2, "b1c1"), (3, "a1b1c1")]
    assert combinations(SAME_RESULT) == without_c
    assert combinations(OTHER_OPTIMIZER) == with_c
    assert combinations(QUANTIZED) == []
    assert sorted(combinations(SHORTER)) == sorted(without_c + with_c)
    assert sorted(combinations(ADAPTERS)) == sorted(
        (count + 1, f"{edits}d{which}") for count, edits in without_c + with_c for which in (1, 2)
    )


@pytest.fixture
def search(tmp_path: Path) -> Callable[..., FixSearch]:
    def made(text: str, gpu: str = "a10", **options: Any) -> FixSearch:
        (tmp_path / "run.yml").write_text(text)
        found: CheckReport = check(tmp_path / "run.yml", {"gpu": gpu, **options})
        task = subject_of(
            model=found.model, device=found.device, workload=found.workload, price=found.price
        )
        context = CheckContext(task=task, limit_gib=found.limit_gib)
        return FixSearch(context=context, checked=found.checked)

    return made


def test_lengths_are_halved_down_to_256(search: Callable[..., FixSearch]) -> None:
    def shorter(**keys: Any) -> list[dict[str, int]]:
        found = search(changed(TRL_7B, **keys))
        return found._shorter_lengths(found.checked.run)

    assert shorter() == [{"max_length": 512}, {"max_length": 256}]  # of 1,024
    assert shorter(max_seq_length=1025) == [
        {"max_seq_length": length} for length in (1024, 512, 256)
    ]
    assert shorter(max_length=600, max_seq_length=9) == [{"max_length": 512}, {"max_length": 256}]
    assert shorter(max_length=257) == [{"max_length": 256}] and shorter(max_length=256) == []


def test_micro_batches_divide_the_global_batch(search: Callable[..., FixSearch]) -> None:
    found = search(changed(TRL_7B, per_device_train_batch_size=6, gradient_accumulation_steps=2))
    sizes = found._smaller_batches(found.checked.run)
    assert [tuple(size.values()) for size in sizes] == [(4, 3), (3, 4), (2, 6), (1, 12)]
    assert {tuple(size) for size in sizes} == {
        ("per_device_train_batch_size", "gradient_accumulation_steps")
    }


def test_each_change_alone_saves_memory_or_makes_it_fit(search: Callable[..., FixSearch]) -> None:
    """Also what does not make it fit is named with what it saves; what saves nothing is not."""
    found = search(changed(AXOLOTL_FULL, gradient_checkpointing=True), "t4")
    alone = found.each_alone()
    assert [list(one.edits) for one in alone] == [
        ["optimizer"],
        ["adapter", "lora_target_linear", "lora_r"],
        ["adapter", "lora_target_linear", "lora_r", "load_in_4bit"],
        ["micro_batch_size", "gradient_accumulation_steps"],
        ["sequence_len"],
    ]
    assert all(found.saved_gib(one) > 0.005 for one in alone) and not any(
        one.state == FITS for one in alone[:2]
    )
    assert alone[3].edits == {"micro_batch_size": 1, "gradient_accumulation_steps": 8}, (
        "the smallest where none fits"
    )
    assert alone[4].edits == {"sequence_len": 2048}, "the longest where none fits"


def test_a_run_too_close_to_tell_is_the_last_resort(search: Callable[..., FixSearch]) -> None:
    """A run that does not fit is advised what may fit, where nothing surely does; one that may fit
    already is not.
    """
    text = changed(
        FACTORY, quantization_bit=4, enable_liger_kernel=True, optim="adafactor", cutoff_len=256
    )
    need = search(text, "h100-sxm").checked.estimate.need_gib
    larger = changed(text, cutoff_len=512)
    grown = search(larger, "h100-sxm").checked.estimate.need_gib
    assert grown > need
    best = search(larger, "h100-sxm", memory_gib=(need + 0.001) + CONTEXT_GIB, headroom=0.0).best()
    assert best is not None and best.state == TIGHT and best.edits == {"cutoff_len": 256}
    assert (
        search(text, "h100-sxm", memory_gib=(need + 0.001) + CONTEXT_GIB, headroom=0.0).best()
        is None
    )


def test_micro_batches_above_1024_are_not_tried(search: Callable[..., FixSearch]) -> None:
    found = search(TRL_7B)
    run = found.checked.run

    def sizes(micro: int, accumulation: int) -> list[tuple[int, ...]]:
        resized = replace(
            run, config=replace(run.config, micro_batch_size=micro), accumulation=accumulation
        )
        return [tuple(size.values()) for size in found._smaller_batches(resized)]

    assert sizes(4096, 1) == [(2**power, 2 ** (12 - power)) for power in range(10, -1, -1)]
    assert sizes(1024, 2)[0] == (512, 4) and sizes(2, 3) == [(1, 6)] and sizes(1, 8) == []


def test_a_run_is_resized_by_the_keys_of_its_tool(search: Callable[..., FixSearch]) -> None:
    found = search(changed(TRL_7B, max_seq_length=900))
    run = found.checked.run
    assert found._resize(run, {}) == run
    size = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "max_seq_length": 300,
    }
    other = found._resize(run, size)
    assert (other.config.micro_batch_size, other.accumulation, other.config.seq_len) == (4, 4, 300)
    assert replace(other, config=run.config, accumulation=run.accumulation) == run


def test_edits_of_a_mapping_that_is_empty_stand_at_the_top() -> None:
    assert apply_edits({"model_init_kwargs": None, "a": 1}, {"a": 2, "b": 3}) == {
        "model_init_kwargs": None,
        "a": 2,
        "b": 3,
    }
    nested = {"model_init_kwargs": {"c": 1}, "bnb_config_kwargs": {"a": 1, "b": 2}}
    assert apply_edits(nested, {"a": 5, "c": 6}) == {
        "model_init_kwargs": {"c": 6},
        "bnb_config_kwargs": {"a": 5, "b": 2},
    }


def test_what_the_tool_would_refuse_is_not_advised(search: Callable[..., FixSearch]) -> None:
    """Full training does not read lora_alpha, adapters would."""
    found = search(changed(AXOLOTL_FULL, lora_alpha=-1), "t4")
    alone = found.each_alone()
    assert alone and not any("adapter" in one.edits for one in alone)
    assert found._parse({"adapter": "lora", "lora_r": 16}) is None
    assert found._parse({}) is found.checked.run and found.best() is None


def test_the_fewest_changes_come_first_then_the_fastest(search: Callable[..., FixSearch]) -> None:
    """A smaller micro batch is one more change; on a card that holds all, only speed decides
    between two.
    """
    text = changed(FACTORY, disable_gradient_checkpointing=True, per_device_train_batch_size=6)
    slow, fast = {"disable_gradient_checkpointing": False}, {"enable_liger_kernel": True}
    both = [(SAME_RESULT, slow), (SAME_RESULT, fast)]
    large = search(text, "h200-sxm", headroom=0.0)
    needs, speeds = [], []
    for edits in (slow, fast):
        one = large._largest(edits, {}, (FITS,))
        assert one is not None and one.edits == edits and one.estimate.tokens_per_s
        needs.append(one.estimate.need_gib)
        speeds.append(one.estimate.tokens_per_s)
    assert needs[0] < needs[1] / 1.2 and speeds[0] < speeds[1]
    for fixes in (both, both[::-1]):
        best = large._best_subset(fixes, SAME_RESULT, {}, (FITS,))
        assert best is not None and best.edits == fast
        assert large._best_subset([], SAME_RESULT, {}, (FITS,)) is None, (
            "it fits as it is: nothing to change"
        )
        small = search(text, "h200-sxm", headroom=0.0, memory_gib=needs[0] * 1.15 + CONTEXT_GIB)
        best = small._best_subset(fixes, SAME_RESULT, {}, (FITS,))
        assert best is not None and best.edits == slow
        resized = small._largest(fast, {}, (FITS,))
        assert resized is not None and set(resized.edits) > set(fast) and resized.state == FITS


def test_dora_left_out_is_advised_although_it_saves_nothing_that_is_known(
    search: Callable[..., FixSearch],
) -> None:
    """The need with DoRA is known from below alone; without it the run fits."""
    found = search(changed(AXOLOTL, peft_use_dora=True), "h100-sxm")
    without = next(one for one in found.each_alone() if one.edits == {"peft_use_dora": False})
    assert without.state == FITS and abs(found.saved_gib(without)) < 0.005
    assert [size["sequence_len"] for size in found._lengths_for(SHORTER)] == [2048, 1024, 512, 256]
    assert found._lengths_for(QUANTIZED) == found._lengths_for(SAME_RESULT) == [{}]
    assert found._lengths_for(ADAPTERS) == [{}, *found._lengths_for(SHORTER)]


@pytest.mark.parametrize("num_gpus", [1, 8])
def test_a_changed_run_keeps_its_number_of_gpus(
    num_gpus: int, search: Callable[..., FixSearch]
) -> None:
    keys: dict[str, Any] = {"per_device_train_batch_size": 2, "max_length": 4096}
    found = search(changed(TRL_7B, **keys), gpu="h100-sxm", gpus=num_gpus)
    fixed = found.each_alone()
    assert fixed and {one.run.config.num_gpus for one in fixed} == {num_gpus}
