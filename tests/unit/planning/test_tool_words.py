"""A faster configuration in the keys of the tool whose file was read."""

from dataclasses import replace
from typing import Any

import pytest

from autotune.core.train_config import TrainConfig
from autotune.planning.fixes import CUT_CROSS_ENTROPY, LIGER, apply_edits
from autotune.planning.foreign_config import parse
from autotune.planning.tool_words import changes_to
from autotune.report.values.check import TRANSFORMERS

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "TRL": ("trl", {"model_name_or_path": "m", "dtype": "bfloat16", "packing": True}),
    "transformers": (
        "trl",
        {"model_name_or_path": "m", "bf16": True, TRANSFORMERS: True, "max_length": 512},
    ),
    "Axolotl": ("axolotl", {"base_model": "m", "gradient_checkpointing": True}),
    "Axolotl with plugins": (
        "axolotl",
        {
            **{"base_model": "m", "gradient_checkpointing": True, "liger_rope": True},
            **{"plugins": [LIGER, CUT_CROSS_ENTROPY], "cut_cross_entropy": True},
        },
    ),
    "LLaMA-Factory": (
        "llamafactory",
        {"model_name_or_path": "m", "do_train": True, "finetuning_type": "full", "bf16": True},
    ),
}
CHANGES: list[dict[str, Any]] = [
    {"micro_batch_size": 2},
    {"checkpointing": "none"},
    {"checkpointing": "full"},
    {"checkpointing": "every_2"},
    {"checkpointing": "offload"},
    {"checkpointing": "selective_50", "compile": "per_layer"},
    {"loss": "full", "kernels": "torch"},
    {"loss": "chunked", "kernels": "liger"},
    {"loss": "chunked", "kernels": "torch"},
    {"packing": True},
    {"packing": False, "micro_batch_size": 4, "checkpointing": "none", "kernels": "liger"},
    {"attention": "eager"},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
@pytest.mark.parametrize("name", RUNS)
def test_the_edited_file_describes_the_configuration(name: str, change: dict[str, Any]) -> None:
    tool, values = RUNS[name]
    run = parse(values, tool)
    wanted: TrainConfig = replace(run.config, **change)
    changes = changes_to(run, wanted, 2, packing=True)
    edited = parse(apply_edits(run.values, changes.edits), tool)
    in_words = {phrase.split()[0] for phrase in changes.own}
    for knob in ("micro_batch_size", "checkpointing", "compile", "loss", "kernels", "packing"):
        if knob not in in_words:
            assert getattr(edited.config, knob) == getattr(wanted, knob), knob
    assert edited.config.attention == wanted.attention
    assert edited.accumulation == 2
    # Autotune's words stand only for values that the tool cannot express.
    assert in_words <= {"checkpointing", "loss", "kernels", "packing"}


def test_a_change_of_each_tool() -> None:
    def edits(name: str, **change: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
        run = parse(RUNS[name][1], RUNS[name][0])
        config = replace(run.config, **change)
        changes = changes_to(run, config, run.accumulation, packing=True)
        return changes.edits, changes.own

    assert edits("TRL", checkpointing="none", loss="full", micro_batch_size=4) == (
        {"per_device_train_batch_size": 4, "gradient_checkpointing": False},
        ("loss full",),
    )
    assert edits("Axolotl", loss="chunked") == (
        {"plugins": [CUT_CROSS_ENTROPY], "cut_cross_entropy": True},
        (),
    )
    assert edits("LLaMA-Factory", checkpointing="none", compile="per_layer") == (
        {"disable_gradient_checkpointing": True, "torch_compile": True},
        (),
    )
    assert edits("transformers", packing=True, loss="chunked") == (
        {"use_liger_kernel": True},
        ("packing true", "kernels torch"),
    )
    assert edits("TRL", checkpointing="every_2")[0] == {
        "gradient_checkpointing_kwargs": {"every_n_layers": 2}
    }
