"""The arguments of TRL for a layout of a GRPO run."""

import pytest

from autotune.core.rollout_types import TRANSFORMERS, Engine
from autotune.core.train_config import TrainConfig
from autotune.export.rollouts import (
    engine_arguments,
    export_layout,
    lora_arguments,
    trl_arguments,
)
from autotune.problem.rollouts import Rollouts

ENGINE = Engine(share=0.45, sleeps=True, max_tokens=2304)
ROLLOUTS = Rollouts(
    prompt_tokens=256, completion_tokens=2048, sequences=64, num_generations=8, engine=ENGINE
)


def config(**knobs: object) -> TrainConfig:
    return TrainConfig(**({"micro_batch_size": 4, "checkpointing": "full"} | knobs))  # type: ignore[arg-type]


# the Trainer's arguments have new names from transformers 5.23 on
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_trl_accepts_the_arguments_and_keeps_the_generation() -> None:
    trl = pytest.importorskip("trl")
    arguments = trl_arguments(config(), ROLLOUTS, ENGINE, updates=2)
    on_cpu = {"output_dir": "out", "use_cpu": True, "bf16": False}
    accepted = trl.GRPOConfig(**(arguments | on_cpu))
    assert accepted.generation_batch_size == ROLLOUTS.sequences
    assert accepted.gradient_accumulation_steps == 8
    assert accepted.steps_per_generation == 16
    assert accepted.vllm_gpu_memory_utilization == 0.45
    assert accepted.vllm_enable_sleep_mode
    assert accepted.vllm_max_model_length == 2304
    assert accepted.gradient_checkpointing


@pytest.mark.parametrize(
    ("knobs", "words"),
    [({"micro_batch_size": 24}, "do not divide"), ({"compile": "per_layer"}, "no argument")],
)
def test_what_trl_cannot_do_is_refused(knobs: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        trl_arguments(config(**knobs), ROLLOUTS, ENGINE)


def test_packed_completions_need_an_engine_and_the_modules_beside_the_script() -> None:
    packed = config(packing=True, packed_attention="varlen")
    with pytest.raises(ValueError, match="cannot generate"):
        trl_arguments(packed, ROLLOUTS, Engine(kind=TRANSFORMERS))
    arguments = trl_arguments(packed, ROLLOUTS, ENGINE)
    assert arguments["model_init_kwargs"]["attn_implementation"] == "varlen"
    files = export_layout("qwen3-4b", arguments, None)
    assert files.keys() == {
        "grpo_arguments.json",
        "train_grpo.py",
        "runtime/packed_completions.py",
        "runtime/varlen.py",
    }


def test_a_model_that_generates_itself_has_no_engine() -> None:
    assert engine_arguments(Engine(kind=TRANSFORMERS)) == {"use_vllm": False}


def test_full_fine_tuning_has_no_adapters() -> None:
    assert lora_arguments(config(method="full", lora_rank=None), "qwen3") is None
    arguments = lora_arguments(config(lora_rank=8), "qwen3")
    assert arguments is not None
    assert (arguments["r"], arguments["target_modules"]) == (8, "all-linear")
