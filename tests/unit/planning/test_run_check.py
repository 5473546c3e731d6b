"""What a run needs and takes by formula, and which changes make it fit."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.catalog import ModelSpec, list_devices, resolve_device, resolve_model
from autotune.catalog.model_sizes import Sizes
from autotune.cli.check_text import edits_text, lines
from autotune.core.errors import UsageError
from autotune.core.json_view import json_data
from autotune.core.objective import Objective
from autotune.core.probe_types import DryCount
from autotune.core.train_config import TrainConfig
from autotune.core.units import GIB
from autotune.dry.prober import DryAnswer
from autotune.planning import counted_memory
from autotune.planning.device_estimate import COUNTED, OF_OBJECTIVES, device_limit_gib
from autotune.planning.fixes import FixSearch, apply_edits
from autotune.planning.observations import published_observations
from autotune.planning.run_check import check, find_model
from autotune.planning.run_estimate import (
    CheckContext,
    _cast_s,
    _step_time,
    _with_fp32_base,
    bounds_of,
    check_run,
    memory_bounds,
)
from autotune.prediction.memory_formula import (
    COUNT_ERROR,
    ERROR,
    INT8_ERROR,
    MemoryBreakdown,
    counted_breakdown,
    memory_breakdown,
)
from autotune.prediction.step_time import (
    DEVICE_ERROR,
    OFFLOADED,
    OFFLOADED_ERROR,
    UNKNOWN_HOST,
    estimate_step_time,
)
from autotune.problem.length_distribution import Lengths
from autotune.problem.run_cost import FITS, OOM, TIGHT
from autotune.problem.workload import Workload
from autotune.report.answers import verdict
from autotune.report.values.check import FP32_BASE, CheckReport, ForeignConfig
from tests.helpers.factories import calibration
from tests.helpers.sessions import subject_of
from tests.unit.cli.test_check import (
    AXOLOTL,
    AXOLOTL_FULL,
    FACTORY,
    FACTORY_FULL,
    TRL,
    TRL_7B,
    changed,
)

RUN = ForeignConfig(
    format="trl",
    model="m",
    config=TrainConfig(),
    accumulation=2,
    num_gpus=None,
    epochs=1.0,
    max_steps=None,
    max_examples=None,
    dataset=None,
    notes=(),
)


@pytest.fixture(autouse=True)
def uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bases of 8 bits are not counted here unless a test says what they need: each count takes
    seconds.
    """
    count = counted_memory.dry_count

    def answer(model: ModelSpec, config: TrainConfig, *asked: Any, **options: Any) -> DryAnswer:
        is_int8 = config.quantization == "int8"
        return (
            DryAnswer(refused="Not here.") if is_int8 else count(model, config, *asked, **options)
        )

    monkeypatch.setattr(counted_memory, "dry_count", answer)


@pytest.fixture
def answer(tmp_path: Path) -> Callable[..., CheckReport]:
    def run(text: str, gpu: str = "a10", **flags: Any) -> CheckReport:
        path = tmp_path / "run.yml"
        path.write_text(text)
        return check(path, {"gpu": gpu, **flags}, observations=published_observations())

    return run


def printed(found: CheckReport) -> str:
    return "\n".join(text for _, text in lines(found, details=True))


# --- what to change


OOMS = [
    *((TRL_7B, gpu) for gpu in ("a10", "t4")),
    (
        changed(TRL_7B, model_init_kwargs={"dtype": "float32"}, gradient_checkpointing=False),
        "rtx-4080",
    ),
    (changed(TRL_7B, activation_checkpointing=False, dtype="bfloat16", max_seq_length=4096), "a10"),
    (changed(TRL_7B, load_in_8bit=True, dtype="bfloat16", max_length=8192), "t4"),
    (changed(TRL_7B, use_peft=None, lora_r=None), "a100-40gb-sxm"),
    # counted: a small model's counts take less
    (
        changed(
            TRL_7B,
            model_name_or_path="meta-llama/Llama-3.2-1B",
            per_device_train_batch_size=64,
            use_dora=True,
        ),
        "a10",
    ),
    *((AXOLOTL, gpu) for gpu in ("a10", "t4")),
    (
        changed(
            AXOLOTL, gradient_checkpointing=False, plugins="axolotl.integrations.liger.LigerPlugin"
        ),
        "a10",
    ),
    (
        changed(
            AXOLOTL,
            gradient_checkpointing=False,
            load_in_4bit=False,
            load_in_8bit=True,
            adapter="lora",
        ),
        "a10",
    ),
    (
        changed(
            AXOLOTL,
            base_model="google/gemma-2-9b-it",
            micro_batch_size=6,
            gradient_accumulation_steps=2,
        ),
        "l4",
    ),
    (changed(AXOLOTL, batch_size=8, gradient_accumulation_steps=None), "a10"),
    *((AXOLOTL_FULL, gpu) for gpu in ("a10", "a100-40gb-sxm")),
    *((FACTORY_FULL, gpu) for gpu in ("a10", "a100-40gb-sxm", "h100-sxm")),
    (changed(FACTORY, disable_gradient_checkpointing=True, per_device_train_batch_size=16), "a10"),
    (changed(FACTORY, model_name_or_path="meta-llama/Llama-3.1-70B"), "a100-80gb-sxm"),
]


@pytest.mark.parametrize(("text", "gpu"), OOMS)
def test_the_suggested_changes_make_the_run_fit(
    text: str, gpu: str, answer: Callable[..., CheckReport]
) -> None:
    """Written into the file and checked again."""
    found = answer(text, gpu)
    assert found.checked.state != FITS and found.fix is not None
    assert found.fix.state == FITS
    values = yaml.safe_load(text)
    for change in (found.fix, *(change for change, _ in found.fixes)):
        again = answer(yaml.safe_dump(apply_edits(values, change.edits)), gpu)
        assert again.checked.state == change.state, change.edits
        assert again.checked.bounds == change.bounds, change.edits
        before, after = found.checked.run, again.checked.run
        rows = [run.accumulation * run.config.micro_batch_size for run in (before, after)]
        assert rows[0] == rows[1], "the global batch stays as it is"
    for change, saves in found.fixes:
        reported = change.estimate.need_gib
        assert saves == pytest.approx(found.checked.estimate.need_gib - reported)
        assert saves > 0 or change.state == FITS


@pytest.mark.parametrize(("memory_gib", "text"), [(40, TRL_7B), (40, AXOLOTL), (30, FACTORY)])
def test_the_largest_micro_batch_that_fits_is_advised(
    memory_gib: float, text: str, answer: Callable[..., CheckReport]
) -> None:
    """Found by trying each size that divides the global batch of 48."""
    found = answer(changed(text, **_rows(text, 48, 1)), "h100-sxm", memory_gib=memory_gib)
    assert found.checked.state != FITS
    sizes = [size for size in range(1, 48) if 48 % size == 0]
    fitting = [
        size
        for size in sizes
        if answer(
            changed(text, **_rows(text, size, 48 // size)), "h100-sxm", memory_gib=memory_gib
        ).checked.state
        == FITS
    ]
    assert 1 < max(fitting) < 24
    advised = [
        change for change, _ in found.fixes if change.edits.keys() == _rows(text, 1, 1).keys()
    ]
    assert [change.edits for change in advised] == [_rows(text, max(fitting), 48 // max(fitting))]


def _rows(text: str, size: int, accumulation: int) -> dict[str, int]:
    batch = "micro_batch_size" if text == AXOLOTL else "per_device_train_batch_size"
    return {batch: size, "gradient_accumulation_steps": accumulation}


def test_a_need_without_a_formula_says_between_what_it_lies(
    answer: Callable[..., CheckReport],
) -> None:
    int8 = answer(changed(TRL_7B, load_in_8bit=True), "a10")
    said = "could not be counted: the run needs more than the reported memory"
    assert said in " ".join(int8.notes)
    offloaded = answer(changed(AXOLOTL, gradient_checkpointing="offload"), "a10")
    least, notes = "between none and all of it stays on the GPU", " ".join(offloaded.notes)
    assert f"No formula covers the offloaded memory: {least}" in notes


def test_changes_that_affect_learning_come_last(answer: Callable[..., CheckReport]) -> None:
    """Nothing that is learned with changes where micro batch, checkpoints or the loss suffice; then
    the least.
    """

    def keys(text: str, gpu: str, **flags: Any) -> set[str]:
        found = answer(text, gpu, **flags)
        assert found.fix is not None
        return set(found.fix.edits)

    assert keys(TRL_7B, "a10") == {"dtype"}
    assert keys(AXOLOTL, "a10") == {"plugins", "cut_cross_entropy"}
    off = {"gradient_checkpointing": False, "plugins": ["axolotl.integrations.liger.LigerPlugin"]}
    assert keys(changed(AXOLOTL, **off), "a10") >= {"liger_fused_linear_cross_entropy"}
    assert keys(TRL_7B, "t4") >= {"load_in_4bit"}
    assert keys(AXOLOTL_FULL, "h100-sxm", memory_gib=62) == {"optimizer"}
    assert keys(AXOLOTL_FULL, "a10") >= {"adapter"}
    assert keys(FACTORY_FULL, "h100-sxm", memory_gib=40) >= {"pure_bf16"}
    fast = changed(FACTORY, disable_gradient_checkpointing=True)
    assert keys(fast, "a10") <= {"disable_gradient_checkpointing", "enable_liger_kernel"}


def test_nothing_helps(answer: Callable[..., CheckReport]) -> None:
    text = changed(AXOLOTL, base_model="meta-llama/Llama-3.1-70B")
    found = answer(text, "t4")
    assert found.fix is None and found.faster is None and found.runnable is None
    assert "no change that was tried surely makes the run fit" in printed(
        found
    ) and "useful tokens/s" not in printed(found)


def test_fixes_are_found_without_writing_a_file(
    answer: Callable[..., CheckReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a temporary file was made")

    for name in ("TemporaryDirectory", "NamedTemporaryFile", "mkstemp", "mkdtemp"):
        monkeypatch.setattr(f"tempfile.{name}", refuse)
    assert answer(TRL_7B, "t4").fix is not None


def test_edits_are_written_where_the_tool_reads_them() -> None:
    values = {"dtype": "float32", "model_init_kwargs": {"dtype": "float32"}, "a": 1}
    new = apply_edits(values, {"dtype": "bfloat16", "a": 2})
    assert new == {"dtype": "float32", "model_init_kwargs": {"dtype": "bfloat16"}, "a": 2}
    assert values["a"] == 1 and values["model_init_kwargs"] == {"dtype": "float32"}
    assert edits_text({"optim": "adamw_bnb_8bit", "packing": True, "b": [1, "x"]}) == (
        'optim: adamw_bnb_8bit, packing: true, b: [1, "x"]'
    )


# --- what no formula knows, and a base in fp32


def test_bounds(answer: Callable[..., CheckReport]) -> None:
    offloaded = changed(AXOLOTL, gradient_checkpointing="offload")
    plain, other = answer(AXOLOTL, "h100-sxm").checked, answer(offloaded, "h100-sxm").checked
    assert other.bounds.most == plain.bounds.most and plain.bounds.least == plain.bounds.most
    checkpoints = plain.bounds.least.activations - other.bounds.least.activations
    config, sizes = plain.run.config, Sizes.of(resolve_model("llama-3.1-8b"))
    assert sizes is not None
    assert checkpoints == pytest.approx(2 * config.tokens * sizes.layers * sizes.hidden / GIB)
    assert plain.estimate.tokens_per_s is not None and other.estimate.tokens_per_s is not None
    assert 0.9 < other.estimate.tokens_per_s / plain.estimate.tokens_per_s < 1

    small = changed(AXOLOTL, base_model="demo-3m", sequence_len=1024, peft_use_dora=True)
    dora = answer(small, "h100-sxm")
    assert dora.checked.state == TIGHT and dora.checked.bounds.most is None
    assert verdict(dora).startswith("too close to tell: needs at least ")
    assert dora.fix is not None and dora.fix.edits == {"peft_use_dora": False}


def test_a_base_in_fp32(answer: Callable[..., CheckReport]) -> None:
    whole, half = (
        answer(TRL_7B, "h200-sxm").checked,
        answer(changed(TRL_7B, dtype="bfloat16"), "h200-sxm").checked,
    )
    assert FP32_BASE in whole.run.notes and FP32_BASE not in half.run.notes
    sizes = Sizes.of(resolve_model("mistral-7b"))
    assert sizes is not None
    more = {
        name: (value - half.bounds.reported.terms().get(name, 0)) * GIB
        for name, value in whole.bounds.reported.terms().items()
    }
    assert more["weights"] == pytest.approx(2 * sizes.params)
    layer = sizes.linear_params / sizes.layers  # one is recomputed at a time
    assert more["activations"] == pytest.approx(
        2 * (layer + 8 * 1024 * sizes.layers * sizes.hidden)
    )
    assert whole.estimate.tokens_per_s is not None and half.estimate.tokens_per_s is not None
    assert 0.9 < whole.estimate.tokens_per_s / half.estimate.tokens_per_s < 1

    def kept(**keys: Any) -> float:
        return answer(
            changed(TRL_7B, gradient_checkpointing=False, **keys), "h200-sxm"
        ).checked.bounds.reported.activations

    assert (kept() - kept(dtype="bfloat16")) * GIB == pytest.approx(2 * sizes.linear_params)
    four = answer(changed(TRL_7B, load_in_4bit=True), "h200-sxm").checked.bounds.reported.weights
    less = answer(
        changed(TRL_7B, load_in_4bit=True, dtype="bfloat16"), "h200-sxm"
    ).checked.bounds.reported.weights
    assert (four - less) * GIB == pytest.approx(2 * (sizes.params - sizes.linear_params))


@pytest.mark.probe  # torch is loaded, which takes seconds
@pytest.mark.filterwarnings("ignore")
def test_the_graph_holds_each_cast_of_a_frozen_weight() -> None:
    """2 bytes a weight until the backward pass, of layers that are not recomputed; their inputs in
    4 bytes.
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    def saved(dtype: torch.dtype, layers: int, tokens: int, recompute: bool) -> int:
        config = LlamaConfig(
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=97,
        )
        model = LlamaForCausalLM(config).to(dtype).train()
        adapted = get_peft_model(
            model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
        )
        adapted.enable_input_require_grads()
        if recompute:
            adapted.gradient_checkpointing_enable({"use_reentrant": False})
        own = {parameter.untyped_storage().data_ptr() for parameter in adapted.parameters()}
        kept: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in own:
                kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        rows = torch.randint(0, 97, (1, tokens))
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", torch.bfloat16):
            output = adapted.model.model(input_ids=rows).last_hidden_state
        bytes_ = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
        del output
        return bytes_

    def of_a_layer(dtype: torch.dtype, tokens: int, recompute: bool) -> float:
        return (saved(dtype, 3, tokens, recompute) - saved(dtype, 1, tokens, recompute)) / 2

    weights = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160
    for tokens in (64, 128):
        plain = of_a_layer(torch.float32, tokens, False) - of_a_layer(torch.bfloat16, tokens, False)
        assert plain == 2 * weights
        assert (
            of_a_layer(torch.float32, tokens, True) - of_a_layer(torch.bfloat16, tokens, True)
            == 2 * tokens * 64
        )


# --- how long it takes


def test_steps_and_hours(answer: Callable[..., CheckReport]) -> None:
    def steps(text: str, **flags: Any) -> int:
        cost = answer(text, "h100-sxm", **flags).checked.estimate.cost
        assert cost is not None
        low, high = cost.interval_hours
        assert low < cost.full_run_hours < high
        return cost.num_steps

    assert steps(TRL) == math.ceil(10_000 / 16)  # assumed
    assert steps(TRL, examples=3200) == 200
    assert steps(changed(TRL, num_train_epochs=0.5), examples=3200) == 100
    assert steps(changed(TRL, max_steps=77), examples=3200) == 77
    assert steps(changed(TRL, num_processes=4), examples=3200) == 50
    assert steps(FACTORY) == 3 * 2000 // 8
    assert steps(FACTORY, examples=80) == 30
    assert steps(FACTORY, tokens=80 * 1024) == 30
    # four examples of 1,024 tokens to a row of 4,096, assumed
    packed = steps(AXOLOTL, examples=3200)
    assert packed == 4 * 100
    assert steps(AXOLOTL, examples=3200, tokens_per_example=4096) == 4 * 400


def test_assumptions_are_reported(answer: Callable[..., CheckReport]) -> None:
    out = printed(answer(TRL))
    assert "for 10,000 examples (assumed) x 1 epoch, 625 steps" in out
    assert "The length of the examples was not given: 1,024 tokens each (assumed)" in out
    out = printed(
        answer(changed(TRL, max_steps=77), mean_tokens=300.0, p99_tokens=2000.0, price=2.0)
    )
    assert "for 77 steps, estimated" in out and "(assumed)" not in out
    assert "at $2.00/h, given by --price" in out
    assert "one GPU without sharding is assumed (--gpus N)" in out


def test_a_checkpoints_files_are_reported(answer: Callable[..., CheckReport]) -> None:
    found = answer(changed(TRL_7B, model_name_or_path="deepseek-ai/DeepSeek-V3"), "b200")
    assert any("multi-token prediction (1 layer)" in note for note in found.notes)


def test_a_dataset_is_counted(answer: Callable[..., CheckReport], tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("100\n" * 900 + "5000\n" * 100)
    lengths = str(tmp_path / "lengths.txt")
    found = answer(FACTORY, lengths=lengths)
    assert found.workload.examples == 1000  # fewer than max_samples of two datasets
    assert any("of the tokens will be cut off" in note for note in found.notes)
    assert found.checked.estimate.cost is not None and found.checked.estimate.cost.num_steps == 375
    assert found.faster is not None and f"--lengths {lengths}" in found.faster.command
    capped = answer(changed(FACTORY, max_samples=40), lengths=lengths).workload
    assert (capped.examples, capped.examples_assumed) == (80, False)


@pytest.mark.parametrize(
    ("text", "key", "value", "trained"),
    [
        (AXOLOTL, "val_set_size", 0.05, 950),
        (AXOLOTL, "val_set_size", 0.0011, 998),
        (AXOLOTL, "val_set_size", 100, 900),
        (FACTORY, "val_size", 0.5, 500),
        (FACTORY, "val_size", 5000, 1),
    ],
)
def test_examples_that_are_held_out_are_not_trained_on(
    answer: Callable[..., CheckReport],
    tmp_path: Path,
    text: str,
    key: str,
    value: float,
    trained: int,
) -> None:
    (tmp_path / "lengths.txt").write_text("100\n" * 1000)
    lengths = str(tmp_path / "lengths.txt")
    changes: dict[str, Any] = {key: value}
    assert answer(changed(text, **changes), lengths=lengths).workload.examples == trained
    # a number that the user gives is of those that are trained on
    assert answer(changed(text, **changes), examples=70).workload.examples == 70


def test_several_gpus(answer: Callable[..., CheckReport]) -> None:
    one, four = answer(FACTORY), answer(changed(FACTORY, num_processes=4))
    given = answer(FACTORY, gpus=4)
    assert four.checked == replace(given.checked, run=four.checked.run)
    assert four.checked.bounds.reported.communication > 0 and four.checked.bounds.reported.nccl > 0
    a, b = one.checked.estimate, four.checked.estimate
    assert a.cost is not None and b.cost is not None and a.cost.full_run_usd is not None
    assert 0.7 < (b.tokens_per_s or 0) / (a.tokens_per_s or 1) < 1  # some waiting for the link
    assert a.cost.kwh == pytest.approx(0.15 * a.cost.full_run_hours)  # 150 W
    out = printed(four)
    assert "GiB on each of 4 a10, " in out and "useful tokens/s a GPU (" in out
    assert "each of 4 GPUs of one host: the whole model on each GPU (DDP)." in out
    hosts = printed(answer(changed(FACTORY, num_processes=16)))
    assert "each of 16 GPUs of several hosts: the whole model on each GPU (DDP). Its speed" in hosts
    many = printed(answer(changed(FACTORY, num_processes=9)))
    assert "data parallel GPUs: each GPU holds the whole model, and sharding is not" in many
    text = changed(FACTORY, deepspeed="ds_z3_config.json")
    alone, shared = answer(text), answer(changed(text, num_processes=4))
    assert alone.checked.bounds == one.checked.bounds
    assert any(note.startswith("Sharding and offloading") for note in alone.notes)
    assert shared.checked.bounds.reported.weights < one.checked.bounds.reported.weights
    assert (
        "each of 4 GPUs of one host: the model shared out among the GPUs (DeepSpeed ZeRO 3)."
        in printed(shared)
    )


def test_rows_are_padded_to_the_longest_of_a_micro_batch(
    answer: Callable[..., CheckReport],
) -> None:
    lengths = Lengths(counts=((100, 9), (1000, 1)), source="given")
    for micro, share in ((1, 0.1), (2, 0.19), (8, 1 - 0.9**8)):
        config = TrainConfig(micro_batch_size=micro, seq_len=1024)
        assert Workload(lengths=lengths).mean_row_config(config).seq_len == round(100 + 900 * share)
    assert (
        Workload(lengths=lengths)
        .mean_row_config(TrainConfig(micro_batch_size=2**24, seq_len=512))
        .seq_len
        == 512
    )
    text = changed(AXOLOTL, sample_packing=False)
    loose, padded = (
        answer(changed(text, pad_to_sequence_len=padded), "h100-sxm", tokens_per_example=256)
        for padded in (False, True)
    )
    short, full = (report.checked.bounds.reported.peak_reserved_gib for report in (loose, padded))
    assert short < full  # all examples have 256 tokens
    assert (
        loose.checked.estimate.tokens_per_s is not None
        and padded.checked.estimate.tokens_per_s is not None
    )
    assert loose.checked.estimate.tokens_per_s > 2 * padded.checked.estimate.tokens_per_s
    assert not loose.workload.dealt  # which train.py alone does


def test_faster(answer: Callable[..., CheckReport]) -> None:
    found = answer(FACTORY)
    assert found.faster is not None
    own, other = found.checked.run.config, found.faster.config
    for knob in ("lora_rank", "seq_len", "quantization", "precision", "optimizer", "method"):
        assert getattr(own, knob) == getattr(other, knob)
    assert found.faster.command == (
        "autotune run --model Qwen/Qwen3-4B-Instruct-2507 --gpu a10 --rank 8 --seq-len 2048"
        " --global-batch 8"
        " --tokens-per-example 2048 --examples 2000 --epochs 3 --set precision=bf16_mixed --set"
        " optimizer=adamw_torch_fused"
    )
    assert f"to measure it: {found.faster.command}" in printed(found)
    assert "estimated: disable_gradient_checkpointing: true" in printed(found)
    full = answer(changed(FACTORY_FULL, pure_bf16=True, optim="adamw_bnb_8bit"), "h100-sxm").faster
    assert (
        full is not None
        and "--space full" in full.command
        and "optimizer=adamw_8bit" in full.command
    )
    one = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
    best = changed(TRL, dtype="bfloat16", gradient_checkpointing=False, torch_compile=True, **one)
    assert answer(best, "h100-sxm", tokens_per_example=1024).faster is None


def test_the_faster_configuration_packs_as_the_run_does(answer: Callable[..., CheckReport]) -> None:
    """It fills no more of a row than is known of the lengths; a
    run without packing may gain by it.
    """
    for packs in (True, False):
        text = changed(AXOLOTL, sample_packing=packs)
        unknown = answer(text, "h100-sxm").faster
        known = answer(text, "h100-sxm", mean_tokens=512, p99_tokens=2000).faster
        assert unknown is not None and unknown.config.packing is False
        assert known is not None and known.config.packing is True
        assert 1.05 <= unknown.times < 3 and "--mean-tokens 512" in known.command


def test_sequences_beyond_the_context(answer: Callable[..., CheckReport]) -> None:
    """Qwen2.5-0.5B has a context of 32,768 tokens."""
    longer = "Sequences of 32,769 tokens are longer than the model's context of 32,768."
    slow = {"gradient_checkpointing": True, "dtype": "bfloat16", "per_device_train_batch_size": 1}
    whole, beyond = (
        answer(changed(TRL, max_length=length, **slow), "h200-sxm") for length in (32768, 32769)
    )
    assert longer in beyond.notes and not any("longer than" in note for note in whole.notes)
    assert beyond.faster is None and whole.faster is not None
    taken = answer(
        changed(TRL, max_length=32769, model_name_or_path="somebody/Qwen2.5-0.5B"), "h200-sxm"
    )
    assert not any("longer than" in note for note in taken.notes)


def test_the_gradients_that_several_gpus_hold_twice(answer: Callable[..., CheckReport]) -> None:
    """Qwen3-4B has 4.02e9 parameters; LoRA of rank 8 adds 16.5 million, in four bytes each."""
    for text, more in ((FACTORY_FULL, "15.0 GiB"), (FACTORY, "0.06 GiB")):
        notes = answer(changed(text, num_processes=9), "h200-sxm").notes
        assert (
            "The estimate leaves out the communication between the GPUs, and the second copy of the"
            " gradients that torch holds for it"
            f" ({more} more)." in notes
        )
    assert not any(
        "communication" in note for note in answer(changed(FACTORY, num_processes=1)).notes
    )


def test_a_directory_is_read_although_its_name_is_that_of_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "Mistral-7B-v0.3"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(resolve_model("smollm2-135m").config))
    model, assumption = find_model(str(folder))
    assert (model.num_layers, assumption) == (30, None)


def test_casts_of_a_base_in_fp32_take_the_time_to_read_and_write_them() -> None:
    """6 bytes for each value; the recomputation casts the layers again. 4.8 TB/s of an H200."""
    sizes = Sizes.of(resolve_model("mistral-7b"))
    assert sizes is not None
    head, layers = 32768 * 4096, 32 * (4096 * (4096 * 2 + 1024 * 2) + 3 * 4096 * 14336)
    assert (sizes.embedding, sizes.linear_params) == (head, layers)
    for checkpointing, passes in (("none", 1), ("full", 2), ("every_2", 1.5)):
        run = replace(RUN, config=TrainConfig(checkpointing=checkpointing), notes=(FP32_BASE,))
        seconds = 6 * (head + passes * layers) / 4.8e12
        assert _cast_s(resolve_model("mistral-7b"), run) == pytest.approx(seconds)
        assert _cast_s(resolve_model("mistral-7b"), replace(run, notes=())) == 0
    four = replace(RUN, config=TrainConfig(quantization="nf4"), notes=(FP32_BASE,))
    assert _cast_s(resolve_model("mistral-7b"), four) == pytest.approx(6 * head / 4.8e12, rel=1e-12)


def test_what_a_note_says_is_not_counted_leaves_the_need_open_above() -> None:
    model = resolve_model("mistral-7b")
    closed, opened = (
        memory_bounds(model, replace(RUN, needs_more=needs_more)) for needs_more in (False, True)
    )
    assert closed and opened
    assert (closed.least, closed.most, opened.most) == (opened.least, opened.least, None)
    assert (closed.state(80), opened.state(80)) == (FITS, TIGHT)


@pytest.mark.parametrize(
    ("knobs", "casts", "checkpoints", "frozen"),
    [
        ({"checkpointing": "none"}, 32, 0, 7248023552),
        ({"checkpointing": "full"}, 1, 32, 7248023552),
        ({"checkpointing": "every_2"}, 17, 16, 7248023552),
        ({"checkpointing": "full", "quantization": "nf4"}, 0, 32, 7248023552 - 32 * 218103808),
    ],
    ids=str,
)
def test_what_a_base_in_fp32_adds_by_hand(
    knobs: dict[str, Any], casts: int, checkpoints: int, frozen: int
) -> None:
    """A layer of Mistral-7B has 218,103,808 parameters, its head 2^27; inputs of layers are 4,096
    wide.
    """
    sizes = Sizes.of(resolve_model("mistral-7b"))
    config = TrainConfig(micro_batch_size=16, seq_len=512, **knobs)
    before = memory_breakdown(resolve_model("mistral-7b"), config)
    assert sizes is not None and before is not None
    for memory, logits in ((replace(before, logits=3.0), 3.25), (replace(before, logits=0.0), 0.0)):
        after = _with_fp32_base(sizes, config, memory)
        assert after.logits == logits  # 2 bytes of the head's cast, while there are logits
        assert (after.weights - memory.weights) * GIB == pytest.approx(2 * frozen)
        more = 2 * (casts * 218103808 + 16 * 512 * checkpoints * 4096)
        assert (after.activations - memory.activations) * GIB == pytest.approx(more)
        assert (
            replace(
                after, weights=memory.weights, activations=memory.activations, logits=memory.logits
            )
            == memory
        )


def test_recomputed_layers_are_rounded_up() -> None:
    """Of 5 layers, every second: the first, third and fifth, so that the casts of 3 exist at once,
    not of 2.5 or 4.
    """
    mistral = Sizes.of(resolve_model("mistral-7b"))
    assert mistral is not None
    sizes, config = (
        replace(mistral, layers=5),
        TrainConfig(micro_batch_size=1, seq_len=1, checkpointing="every_2"),
    )
    before = memory_breakdown(resolve_model("mistral-7b"), config)
    assert before is not None
    more = _with_fp32_base(sizes, config, before).activations - before.activations
    assert more * GIB == pytest.approx(2 * (3 * 218103808 + 3 * 4096), abs=2)


def test_bounds_are_those_of_the_nearest_configurations_with_a_formula() -> None:
    """Gradients wait from the second micro batch of a step on: two are as many as any number."""
    model = resolve_model("mistral-7b")
    config = TrainConfig(method="full", micro_batch_size=2, seq_len=512)
    lora = {"method": "lora", "lora_rank": 16}

    def bounds(accumulation: int = 2, **knobs: Any) -> Any:
        found = memory_bounds(
            model, replace(RUN, config=replace(config, **knobs), accumulation=accumulation)
        )
        assert found is not None
        return found

    def need(micro_steps: int = 2, **knobs: Any) -> Any:
        return memory_breakdown(model, replace(config, **knobs), micro_steps)

    one, two, three = (bounds(accumulation) for accumulation in (1, 2, 3))
    assert (one.least, one.most) == (need(1), need(1)) and two == three
    assert one.least.peak_gib < two.least.peak_gib and (two.least, two.most) == (need(), need())
    eight = bounds(**lora, quantization="int8")
    # where it cannot be counted
    assert (eight.least, eight.most) == (need(**lora, quantization="nf4"), None)
    dora = bounds(**lora, dora=True)
    assert (dora.least, dora.most) == (need(**lora), None)
    off = bounds(**lora, checkpointing="offload")
    whole = need(**lora, checkpointing="full")
    inputs_gib = 2 * 512 * 32 * 4096 * 2 / GIB
    moved = {"activations": off.least.activations, "host": off.least.host}
    assert off.most == whole and off.least == replace(whole, **moved)
    assert moved == pytest.approx(
        {"activations": whole.activations - inputs_gib, "host": inputs_gib}
    )
    # All of it: pure bf16 has 2 bytes a value, and 4 are counted.
    full = bounds(
        checkpointing="offload",
        precision="bf16_pure",
        loss="chunked",
        optimizer="adamw_torch_fused",
    )
    assert full.least.activations == 0.0 < full.most.activations
    larger = {"checkpointing": "offload", "micro_batch_size": 64, "optimizer": "adamw_8bit"}
    kept = bounds(**larger)
    bytes_ = 64 * 512 * 32 * 4096 * 4
    assert (kept.most.activations - kept.least.activations) * GIB == pytest.approx(bytes_)


def context(**changes: Any) -> CheckContext:
    facts: dict[str, Any] = {
        "model": resolve_model("mistral-7b"),
        "device": resolve_device("h200"),
        "workload": Workload(examples=960, lengths=Lengths.constant(1024, "given")),
        "price": None,
    }
    return CheckContext(task=subject_of(**facts | changes), limit_gib=130.0)


@pytest.mark.parametrize("checkpointing", ["none", "full", "offload"])
def test_a_cast_base_and_offloaded_checkpoints_take_longer(checkpointing: str) -> None:
    """Offloading makes all that the device does take longer.

    Half of the time of the casts is uncertain.
    """
    run = replace(
        RUN, config=TrainConfig(checkpointing=checkpointing, micro_batch_size=2), notes=(FP32_BASE,)
    )
    offloads = checkpointing == "offload"
    plain = replace(run.config, checkpointing="full") if offloads else run.config
    by_formula = estimate_step_time(resolve_model("mistral-7b"), plain, UNKNOWN_HOST)
    found, without = _step_time(context(), run), _step_time(context(), replace(run, notes=()))
    assert by_formula is not None and found is not None and without is not None
    longer = OFFLOADED if offloads else 1.0
    error = math.hypot(DEVICE_ERROR, OFFLOADED_ERROR if offloads else 0.0)
    cast = _cast_s(resolve_model("mistral-7b"), run)
    assert cast > 0
    assert found.products_s == without.products_s == pytest.approx(longer * by_formula.products_s)
    assert without.bytes_s == pytest.approx(longer * by_formula.bytes_s)
    assert found.bytes_s == pytest.approx(longer * by_formula.bytes_s + cast)
    assert found.attention_s == pytest.approx(longer * by_formula.attention_s)
    share = cast / found.device_s
    assert found.device_error == pytest.approx(math.hypot(error, share / 2))
    assert without.device_error == pytest.approx(error)
    assert (found.host_s, found.rest_s, found.side) == (
        by_formula.host_s,
        by_formula.rest_s,
        by_formula.side,
    )
    assert _step_time(context(), replace(run, config=replace(plain, precision="fp32"))) is None
    # twice the 10.2 ms of the measured hosts
    slow = _step_time(context(calibration=calibration(layer_ms=20.4)), run)
    assert slow is not None and slow.host_s == pytest.approx(
        by_formula.host_s * 2 / UNKNOWN_HOST.scale
    )


def test_memory_is_that_of_the_longest_rows_where_lengths_are_known_and_time_that_of_the_mean() -> (
    None
):
    """Nine of ten rows have 100 tokens, one 1,000.

    With one row in a micro batch, the mean is 190.
    """
    run = replace(RUN, config=TrainConfig(micro_batch_size=1, seq_len=2048))
    counts = ((100, 9), (1000, 1))
    given, assumed = (
        context(workload=Workload(lengths=Lengths(counts=counts, source=source)))
        for source in ("given", "assumed")
    )
    assert given.longest_row_config(run).seq_len == 1024  # a multiple of 64
    assert assumed.longest_row_config(run) == run.config
    for multiple, longest in ((8, 1024), (500, 1000), (1536, 1536), (4096, 2048)):
        padded = replace(run, values={"pad_to_multiple_of": multiple})
        assert given.longest_row_config(padded).seq_len == longest
    for one, length in ((given, 1024), (assumed, 2048)):
        shorter = replace(run, config=replace(run.config, seq_len=length))
        assert bounds_of(one, run) == memory_bounds(one.model, shorter)
        mean = estimate_step_time(one.model, replace(run.config, seq_len=190), UNKNOWN_HOST)
        assert _step_time(one, run) == mean


def test_a_run_is_estimated_with_its_own_epochs_steps_and_gpus() -> None:
    """960 examples in micro batches of 8, 3 of these in a step: 40 steps a pass on one device, 20
    on two.
    """
    here = context()
    run = replace(RUN, accumulation=3, epochs=None)

    def steps(**changes: Any) -> int:
        found = check_run(here, replace(run, **changes))
        assert found is not None and found.estimate.cost is not None
        return found.estimate.cost.num_steps

    assert (steps(), steps(epochs=2.0), steps(num_gpus=2), steps(max_steps=7)) == (40, 80, 20, 7)
    found, edits = check_run(here, run), {"a": 1}
    again = check_run(here, run, edits)
    assert found is not None and again is not None
    assert (found.edits, again.edits, found.state) == ({}, edits, FITS)
    estimated, reported = found.estimate, found.bounds.reported
    assert (estimated.device, estimated.config, estimated.limit_gib) == (
        here.device,
        run.config,
        130.0,
    )
    assert (estimated.need_gib, estimated.memory) == (reported.peak_reserved_gib, reported)
    none = check_run(replace(here, limit_gib=1.0), run)
    assert none is not None and none.state == OOM and none.estimate.cost is None
    slow = context(calibration=calibration("h100-sxm"), device=resolve_device("h100"))
    calibrated = check_run(slow, run)
    assert (
        calibrated is not None
        and calibrated.estimate.calibration == slow.task.calibration is not None
    )
    two, twice = (check_run(here, replace(run, num_gpus=number)) for number in (1, 2))
    assert two is not None and twice is not None and two.estimate.price is None
    assert twice.estimate.tokens_per_s == pytest.approx(two.estimate.tokens_per_s)


def test_the_need_grows_with_the_micro_batch() -> None:
    model = resolve_model("mistral-7b")

    def peak(**knobs: Any) -> float:
        need = memory_bounds(model, replace(RUN, config=replace(RUN.config, **knobs)))
        assert need is not None
        return need.least.peak_reserved_gib

    for size in (1, 2, 4, 8, 16):  # what the search for the largest micro batch rests on
        assert peak(micro_batch_size=size) < peak(micro_batch_size=2 * size)


INT8 = TrainConfig(quantization="int8")
COUNT = DryCount(
    model_gib=6.0,
    adapters_gib=1.0,
    gradients_gib=1.0,
    optimizer_gib=2.0,
    segment_peak_gib={"backward_layer": 20.0, "step": 10.0},
    peak_allocated_gib=20.0,
    trainable_params=10,
    total_params=100,
)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> MemoryBreakdown:
    """A dry probe that gives one count for every configuration; the real one is tested with the
    real probe.
    """
    monkeypatch.setattr(counted_memory, "dry_count", lambda *asked, **_: DryAnswer(count=COUNT))
    return counted_breakdown(resolve_model("gpt2"), RUN.config, COUNT)


def test_a_model_without_a_formula_is_counted_and_bounded_where_the_count_leaves_something_out(
    counted: MemoryBreakdown,
) -> None:
    """6 GiB of weights take 12 in float32.

    A base of 4 bits has few values that are not quantised.
    """
    gpt2 = resolve_model("gpt2")

    def bounds(*notes: str, **knobs: Any) -> tuple[MemoryBreakdown, MemoryBreakdown | None]:
        found = memory_bounds(gpt2, replace(RUN, config=replace(RUN.config, **knobs), notes=notes))
        assert found is not None
        return found.least, found.most

    assert (
        bounds() == (counted, counted) and counted.counted and counted.error == COUNT_ERROR < ERROR
    )
    assert bounds(dora=True) == (counted, None)
    assert bounds(FP32_BASE) == (replace(counted, weights=12.0), None)
    assert bounds(FP32_BASE, quantization="nf4", double_quant=True) == (counted, None)
    assert bounds(checkpointing="offload") == (replace(counted, activations=0.0), counted)
    assert not memory_bounds(resolve_model("mistral-7b"), RUN).reported.counted  # type: ignore[union-attr]


def test_an_int8_base_is_counted_though_the_model_has_a_formula(
    counted: MemoryBreakdown, answer: Callable[..., CheckReport]
) -> None:
    """16 bits are no upper bound: an int8 layer keeps its
    inputs, which recomputing does not free.
    """
    eight = changed(AXOLOTL, load_in_4bit=False, load_in_8bit=True, adapter="lora")
    found = answer(eight, "a100-40gb-sxm")
    bounds = found.checked.bounds
    assert (
        bounds.least == bounds.most
        and bounds.reported.counted
        and bounds.reported.weights == counted.weights
    )
    assert bounds.reported.error == INT8_ERROR > ERROR
    assert found.checked.state == FITS and found.checked.estimate.tokens_per_s is None
    assert "The memory of an 8-bit base is computed without outliers" in " ".join(found.notes)
    assert found.faster is None and answer(eight, "rtx-4080").checked.state == OOM
    dora = answer(changed(eight, peft_use_dora=True), "a100-40gb-sxm").checked.bounds
    assert dora.most is None and dora.least == bounds.least


def test_what_cannot_be_counted_has_no_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        counted_memory,
        "dry_count",
        lambda *what, **_: asked.append(what) or DryAnswer(refused="no"),
    )
    gpt2 = resolve_model("gpt2")
    assert memory_bounds(gpt2, replace(RUN, accumulation=1)) is None
    assert asked[0] == (gpt2, RUN.config, 1, Objective.SFT)
    assert check_run(context(model=gpt2), RUN) is None
    monkeypatch.setattr(
        counted_memory, "dry_count", lambda *what, **_: DryAnswer(refused="It has \x1bno layers.")
    )
    assert counted_memory.no_count(gpt2, RUN.config, 2) == "It has ?no layers"
    monkeypatch.setattr(counted_memory, "dry_count", lambda *what, **_: DryAnswer(count=COUNT))
    assert counted_memory.no_count(gpt2, RUN.config, 2) == "it can be counted"


def test_logits_that_change_after_the_head_are_counted_whole(
    answer: Callable[..., CheckReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    def dry(model: ModelSpec, config: TrainConfig, *asked: Any, **_: Any) -> DryAnswer:
        return DryAnswer(refused="no") if config.loss == "chunked" else DryAnswer(count=COUNT)

    monkeypatch.setattr(counted_memory, "dry_count", dry)
    found = answer(changed(TRL, model_name_or_path="gpt2", dtype="bfloat16"), "h100")
    assert found.checked.run.config.loss == "full"
    activations = found.checked.bounds.reported.activations  # with the logits
    least, most = found.checked.bounds.bounds_gib
    assert most is not None and 0 < most - least == pytest.approx(activations, rel=0.1)
    assert any("the fused loss" in note for note in found.notes)


def test_a_quantised_copy_has_the_shape_of_its_original(
    answer: Callable[..., CheckReport],
) -> None:
    model, assumption = find_model("TechxGenus/Meta-Llama-3-8B-Instruct-AWQ")
    assert model.name == "meta-llama/Meta-Llama-3-8B" and assumption is not None
    text = changed(TRL, model_name_or_path="nvidia/Llama-3.1-8B-Instruct-NVFP4", dtype="bfloat16")
    found = answer(text, "h100")
    least, most = found.checked.bounds.bounds_gib
    weights = found.checked.bounds.reported.weights
    assert most is not None and most - least == pytest.approx(weights, rel=0.1)
    assert any("NVFP4 storage" in note for note in found.notes)


def test_a_check_by_counts_says_so_and_tries_each_change_alone(
    counted: MemoryBreakdown, answer: Callable[..., CheckReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        FixSearch, "best", lambda search: pytest.fail("all combinations were counted")
    )
    text = changed(TRL, model_name_or_path="gpt2", dtype="bfloat16")
    fits, small = answer(text, "h100"), answer(text, "t4")
    assert (fits.checked.state, small.checked.state, small.fix) == (FITS, OOM, None)
    assert json_data(fits)["how_sure"].startswith(COUNTED)
    assert COUNTED in dict(lines(fits, details=True))["how"]
    assert not any("casts of a float32 base take is unknown" in text for _, text in lines(fits))
    in_fp32 = answer(changed(TRL, model_name_or_path="gpt2"), "h100")
    assert in_fp32.checked.state == TIGHT and verdict(in_fp32).startswith(
        "too close to tell: needs at least "
    )
    printed = list(lines(in_fp32))
    assert "GPU" not in dict(printed)
    notes = [text for label, text in printed if label == "note"]
    assert any("casts of a float32 base take is unknown" in text for text in notes)


@pytest.mark.parametrize("text", [TRL_7B, AXOLOTL, AXOLOTL_FULL, FACTORY_FULL])
def test_the_smallest_card(text: str, answer: Callable[..., CheckReport]) -> None:
    found = answer(text, "t4")
    assert found.smallest_card is not None
    assert answer(text, found.smallest_card.name).checked.state == FITS
    for card in list_devices():
        if (
            card.memory_gib
            and card.supports_bf16
            and device_limit_gib(card, 0.05) < device_limit_gib(found.smallest_card, 0.05)
        ):
            assert answer(text, card.name).checked.state != FITS, card.name


@pytest.mark.parametrize(
    ("gpu", "bf16", "noted"), [("t4", True, True), ("t4", False, False), ("a10", True, False)]
)
def test_bf16_on_a_card_without_it_is_noted(
    answer: Callable[..., CheckReport], gpu: str, bf16: bool, noted: bool
) -> None:
    found = answer(changed(TRL, bf16=bf16, fp16=not bf16), gpu)
    assert (
        any(note.startswith("t4 has no bf16: torch emulates it slowly") for note in found.notes)
        is noted
    )


@pytest.mark.parametrize(
    ("model", "gpu", "bf16", "warned"),
    [
        ("google/gemma-2-2b", "t4", False, True),
        ("google/gemma-2-2b", "t4", True, True),  # fp16 would take its place
        ("google/gemma-2-2b", "a10", False, True),
        ("google/gemma-2-2b", "a10", True, False),
        ("meta-llama/Llama-3.2-1B", "t4", False, False),
    ],
)
def test_a_model_that_overflows_in_fp16_is_warned_of(
    answer: Callable[..., CheckReport], model: str, gpu: str, bf16: bool, warned: bool
) -> None:
    found = answer(changed(TRL, model_name_or_path=model, bf16=bf16, fp16=not bf16), gpu)
    warning = "gemma2 models are known to overflow in fp16 (huggingface.co/blog/gemma2)"
    assert any(note.startswith(warning) for note in found.notes) is warned


def test_examples_of_unknown_length_have_1024_tokens_or_as_many_as_fit_a_row(
    answer: Callable[..., CheckReport],
) -> None:
    """Nothing of what is assumed is cut off; rows beyond the model's context are as long as the
    file says.
    """
    for model, length, tokens in (("Qwen/Qwen2.5-0.5B", 512, 512), ("Qwen/Qwen2.5-0.5B", 4096,
    1024),
                                  ("demo-3m", 700, 700), ("demo-3m", 2048, 1024)):  # fmt: skip
        found = answer(changed(TRL, model_name_or_path=model, max_length=length))
        assert found.workload.lengths == Lengths.constant(tokens, "assumed")
        assert not any("cut off" in note for note in found.notes)
    given = answer(changed(TRL, max_length=512), tokens_per_example=1024)
    assert given.workload.lengths == Lengths.constant(1024, "given")
    assert [note for note in given.notes if "cut off" in note] == [
        "100% of the examples are longer than every seq_len of the space (512): 50% of the tokens"
        " will be cut off."
    ]


def test_what_can_be_run_is_the_run_itself_unless_it_is_out_of_memory(
    answer: Callable[..., CheckReport],
) -> None:
    fits, dora = answer(TRL), answer(changed(AXOLOTL, peft_use_dora=True), "h100-sxm")
    assert fits.runnable is fits.checked and (fits.fix, fits.fixes, fits.smallest_card) == (
        None,
        (),
        None,
    )
    assert dora.checked.state == TIGHT and dora.runnable is dora.checked and dora.fix is not None
    large = answer(TRL_7B, "a10")
    assert large.checked.state == OOM and large.runnable is large.fix is not None


def test_an_answer_as_data(answer: Callable[..., CheckReport]) -> None:
    """As `autotune check --json` prints it: of a run that fits, of one with a fix, and of one
    without.
    """
    data = json_data(answer(changed(FACTORY, num_processes=2, max_steps=100), price=3.0))
    alone = json_data(answer(changed(FACTORY, max_steps=100)))
    assert {
        name: data[name]
        for name in ("format", "model", "device", "own_card", "num_gpus", "epochs", "max_steps")
    } == {
        "format": "llamafactory",
        "model": "Qwen/Qwen3-4B-Instruct-2507",
        "device": "a10",
        "own_card": None,
        "num_gpus": 2,
        "epochs": None,
        "max_steps": 100,
    }
    workload = data["workload"]
    assert set(workload) == {"examples", "examples_assumed", "tokens_per_example"}
    assert (workload["examples"], workload["examples_assumed"]) == (2000, False)
    assert data["verdict"] == "fits" and data["change"] is None and data["each_change"] == []
    assert data["price"]["usd_per_hour"] == 3.0 and data["smallest_card"] is None
    took = data["duration"]
    assert took["num_steps"] == 100 and took["usd"] == pytest.approx(took["hours"] * 2 * 3.0)
    assert took["interval_hours"][0] < took["hours"] < took["interval_hours"][1]
    assert data["bounds_gib"] == [data["peak_reserved_gib"]] * 2 and data["accumulation"] == 8
    assert data["config"]["lora_rank"] == 8 and data["faster"] is None
    faster = alone["faster"]  # only a run on one GPU is compared with the fastest configuration
    assert set(faster) == {"config", "times", "command", "edits", "own"}
    assert faster["times"] >= 1.05 and (faster["edits"] or faster["own"])
    assert faster["config"]["lora_rank"] == 8
    assert json.dumps(data) and isinstance(data["notes"], list)

    data = json_data(answer(changed(TRL_7B, use_dora=True), "t4"))
    assert (
        data["verdict"] == "out of memory"
        and data["bounds_gib"][1] is None
        and data["duration"] is None
    )
    assert data["smallest_card"] is None  # of DoRA nothing says that it fits
    assert all(
        next(iter(change)) == "edits" and change["saves_gib"] > 0.005
        for change in data["each_change"]
    )
    assert data["change"]["verdict"] == "fits" and data["change"]["edits"]["use_dora"] is False
    assert "saves_gib" not in data["change"]
    none = json_data(answer(changed(AXOLOTL, base_model="meta-llama/Llama-3.1-70B"), "t4"))
    assert none["change"] is none["faster"] is None and none["smallest_card"]


def test_the_faster_configuration_has_the_rows_of_a_step_of_the_run(
    answer: Callable[..., CheckReport],
) -> None:
    """One row, or 2 x 3 of them; each micro batch that is tried divides them.

    Nothing is faster without bf16.
    """
    for micro, accumulation in ((1, 1), (2, 3)):
        rows = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation}
        faster = answer(changed(FACTORY, **rows)).faster
        assert faster is not None and micro * accumulation % faster.config.micro_batch_size == 0
        assert f"--global-batch {micro * accumulation} " in faster.command
    small = {"model_name_or_path": "Qwen/Qwen2.5-0.5B", "cutoff_len": 512}
    old = {
        fp16: answer(changed(FACTORY, **small, fp16=fp16, bf16=not fp16), "t4")
        for fp16 in (True, False)
    }
    assert {one.checked.state for one in old.values()} == {FITS}
    assert old[True].faster is not None and old[False].faster is None
    few = answer(TRL, examples=8, tokens_per_example=100)
    assert few.workload.examples == 8 and not any("do not fill" in note for note in few.notes)


def test_several_gpus_need_a_card_that_is_not_alone_in_its_host(
    answer: Callable[..., CheckReport],
) -> None:
    text = changed(TRL_7B, per_device_train_batch_size=80)
    needs = {}
    for number in (1, 2):
        card = answer(changed(text, num_processes=number), "t4").smallest_card
        assert card is not None
        needs[number] = card
    assert needs[1].is_alone and not needs[2].is_alone


def test_the_smallest_card_has_the_reserve_that_is_asked_for(
    answer: Callable[..., CheckReport],
) -> None:
    """With more of the memory left free a larger card is needed; a run in fp16 needs no card with
    bf16.
    """
    found = [answer(TRL_7B, "t4", headroom=headroom).smallest_card for headroom in (0.0, 0.5)]
    sizes = [card.memory_gib for card in found if card and card.memory_gib]
    assert len(sizes) == 2 and sizes[0] < 0.6 * sizes[1]
    for bf16, name in ((True, "rtx-a4000"), (False, "v100-pcie-16gb")):
        half = {"dtype": "bfloat16" if bf16 else "float16", "bf16": bf16, "fp16": not bf16}
        adapters = {"lora_target_modules": "all-linear", "lora_dropout": 0.0}
        text = changed(
            TRL_7B, load_in_4bit=True, per_device_train_batch_size=16, **adapters, **half
        )
        card = answer(text, "t4", memory_gib=4).smallest_card  # 12.9 GiB and the reserve, of 15.8
        assert card is not None and (card.name, card.supports_bf16) == (name, bf16)


def test_the_command_has_what_was_given_of_the_examples(answer: Callable[..., CheckReport]) -> None:
    """Without a count the examples of the file; those of a count of tokens are not said again."""
    lengths = {"mean_tokens": 512.0, "p99_tokens": 2000.0}
    given = [
        answer(FACTORY, **lengths).faster,
        answer(FACTORY, **lengths, tokens=10**7).faster,
        answer(FACTORY, **lengths, examples=77).faster,
        answer(changed(FACTORY, quantization_bit=4, use_rslora=True)).faster,
    ]
    commands = [one.command for one in given if one]
    assert len(commands) == 4
    assert [text.partition(" --rank")[0].partition("a10 ")[2] for text in commands] == [
        "--mean-tokens 512.0 --p99-tokens 2000.0",
        "--mean-tokens 512.0 --p99-tokens 2000.0 --tokens 10000000",
        "--mean-tokens 512.0 --p99-tokens 2000.0 --examples 77",
        "",
    ]
    assert [text.partition("--global-batch ")[2].partition(" --set")[0] for text in commands] == [
        "8 --examples 2000 --epochs 3",
        "8 --epochs 3",
        "8 --epochs 3",
        "8 --tokens-per-example 2048 --examples 2000 --epochs 3",
    ]
    assert (
        "--set rslora=True --set quantization=nf4 --set double_quant=True --set"
        " precision=bf16_mixed" in commands[3]
    )


# --- other objectives


@pytest.mark.parametrize(
    ("key", "value", "objective"),
    [
        ("loss_type", "sigmoid", Objective.DPO),
        ("desirable_weight", 1.0, Objective.KTO),
        ("center_rewards_coefficient", 0.01, Objective.REWARD),
    ],
)
def test_a_file_of_trl_for_another_objective_needs_what_its_formula_says(
    answer: Callable[..., CheckReport], key: str, value: object, objective: Objective
) -> None:
    found = answer(changed(TRL_7B, **{key: value, "dtype": "bfloat16"}), "h100")
    run, bounds = found.checked.run, found.checked.bounds
    assert run.objective is objective is found.workload.objective
    assert run.config.padding == "masked" and found.faster is None
    steps = min(run.accumulation, 2)
    assert (
        bounds.least
        == bounds.most
        == memory_breakdown(found.model, run.config, steps, objective=objective)
    )
    assert json_data(found)["objective"] == objective and json_data(found)["how_sure"].startswith(
        OF_OBJECTIVES
    )
    assert found.checked.estimate.tokens_per_s


def test_axolotls_answers_may_hold_all_logits(answer: Callable[..., CheckReport]) -> None:
    """Its TRL makes all of them: the upper end of the memory has them, and the lower end none."""
    text = changed(AXOLOTL, rl="dpo", sample_packing=False)
    found = answer(text, "h200")
    least, most = found.checked.bounds.bounds_gib
    assert most is not None and most > 1.5 * least
    assert found.checked.state == FITS and "dpo" in printed(found)
    assert answer(text, "t4").checked.state == OOM
    assert (
        answer(changed(AXOLOTL, reward_model=True, sample_packing=False), "h200").checked.state
        == FITS
    )
    with pytest.raises(UsageError, match="trains for dpo, not kto"):
        answer(text, "h200", objective="kto")


def test_several_gpus_are_not_counted_for_answers(answer: Callable[..., CheckReport]) -> None:
    found = answer(changed(AXOLOTL, rl="kto", sample_packing=False), "h200", gpus=4)
    assert found.checked.run.config.num_gpus == 1
    assert any(note.startswith("Several GPUs are not counted for kto") for note in found.notes)


def test_a_run_that_trains_the_embeddings_has_a_verdict_if_it_fits(
    answer: Callable[..., CheckReport],
) -> None:
    text = (
        "base_model: Qwen/Qwen2.5-0.5B\nadapter: lora\nlora_r: 16\nlora_target_linear: true\n"
        "micro_batch_size: 1\n"
    )
    found = answer(text + "lora_modules_to_save: [embed_tokens, lm_head]\nbf16: true\n")
    assert (found.checked.state, found.faster) == (FITS, None)
    plain = answer(text + "bf16: true\n")
    assert found.checked.estimate.need_gib > plain.checked.estimate.need_gib + 0.5


def test_keys_that_the_tool_ignores_come_right_after_the_verdict(
    answer: Callable[..., CheckReport],
) -> None:
    found = answer("base_model: Qwen/Qwen2.5-0.5B\nmicro_batch_size: 1\nadaptor: lora\n")
    first, second, *_ = (text for _, text in lines(found))
    assert second.startswith("ignored by Axolotl 0.19: 'adaptor'; did you mean 'adapter'")
    assert "needs" in first and found.notes[0] == second


def test_a_name_with_a_count_is_a_number_of_gpus(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model_name_or_path: Qwen/Qwen2.5-0.5B\nmax_length: 512\nbf16: true\n")
    named = check(path, {"gpu": "2xh100", "objective": "sft"})
    counted = check(path, {"gpu": "h100", "gpus": 2, "objective": "sft"})
    assert named.checked.estimate.config.num_gpus == 2
    assert named.device == counted.device and named.checked.estimate == counted.checked.estimate
    with pytest.raises(UsageError, match="--gpu says 2 GPUs and --gpus 4"):
        check(path, {"gpu": "2xh100", "gpus": 4})
