"""A dry probe counts what a step holds: to the byte what it holds on a CPU, and what an H200 was
measured to hold.
"""

import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import convert_to_fp32
from torch import fx, nn

from autotune.catalog import resolve_model
from autotune.catalog.model_sizes import Sizes
from autotune.core.other_trainer import OtherTrainer
from autotune.core.probe_types import DryCount, MicroBatch, ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.core.units import GIB
from autotune.dry import compiled as dry_compile
from autotune.dry import counting as module
from autotune.dry.counting import (
    META,
    CountedStep,
    _moments,
    cuda_workspace,
    dry_probe,
    make_optimizer,
    quantized_linear,
)
from autotune.dry.meta_device import simulate_cuda
from autotune.dry.prober import DryProber
from autotune.dry.storage_counter import StorageCounter, blocks
from autotune.prediction.memory_formula import (
    evaluation_moments,
    kept_bytes,
    live_logits,
    memory_breakdown,
)
from autotune.probe.accounting import trained_parameters
from autotune.probe.model_settings import model_settings
from autotune.trainer import float8
from autotune.trainer.float8 import Float8Linear
from autotune.trainer.model_builder import build, config_of
from tests.helpers.factories import TINY

pytestmark = [
    pytest.mark.probe,
    # PEFT 0.21 asks it
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # of GPT-2's Conv1D
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"
    ),  # experts, which are wrapped
]

TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
# A few families that differ in kind: dense, mixtures, hybrid, state-space, learned positions,
# Conv1D.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3_moe": EXPERTS,
    "mixtral": EXPERTS,
    "gemma3_text": {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {"n_embd": 32, "n_head": 2, "n_layer": 2},
    "gpt_neox": {},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8},
    "gpt_oss": EXPERTS | {"head_dim": 16},
}
EAGER = {"gpt_oss", "mamba2"}
# cast or scaled after the head, which chunks of the loss cannot follow
CHANGES_LOGITS = {"mamba2", "falcon_h1"}


MISTRAL_COMPILED = {
    "forward": 2.801533,
    "backward": 3.020221,
    "backward_layers": 2.581563,
    "backward_inputs": 1.459651,
    "optimizer": 1.394709,
}


def request(family: str, depth: int | None = None, **knobs: Any) -> ProbeRequest:
    model = TINY | TOKENS | FAMILIES[family] | {"model_type": family, "num_hidden_layers": 2}
    if family in EAGER:
        knobs = {"attention": "eager"} | knobs
    if family in CHANGES_LOGITS:
        knobs.pop("loss", None)
    config = TrainConfig(**({"micro_batch_size": 2, "seq_len": 64} | knobs))
    return ProbeRequest(config=config, model=model, memory_gib=1.0, depth=depth)


def counted_on(device: str, wanted: ProbeRequest) -> DryCount:
    """The count without what kernels of CUDA allocate, on this device."""
    if device == "cpu":
        return CountedStep(wanted, torch.device("cpu"), lambda func, args: 0).count()
    with simulate_cuda(packed=False, padded=False):
        return CountedStep(wanted, META, lambda func, args: 0).count()


@pytest.fixture
def cuda_product(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets a CPU run the fp8 product of CUDA, with a kernel that is fast on any CPU."""
    on_cpu = float8._multiply_on_cpu
    monkeypatch.setattr(float8, "_multiply_on_cpu", torch._scaled_mm)

    def kernel(
        rows: torch.Tensor,
        factor: torch.Tensor,
        row_scale: torch.Tensor,
        scale: torch.Tensor,
        bias: None = None,
        scale_result: None = None,
        out_dtype: torch.dtype = torch.float32,
        use_fast_accum: bool = False,
    ) -> torch.Tensor:
        return on_cpu(
            rows, factor, row_scale, scale, out_dtype=out_dtype, use_fast_accum=use_fast_accum
        )

    kernels = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings(action="ignore"):  # torch warns that its kernel is replaced
        kernels.impl("_scaled_mm", kernel, "CPU")
    yield
    kernels._destroy()


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "gemma3_text"])
@pytest.mark.parametrize(
    "knobs",
    [
        {"checkpointing": "none", "precision": "fp32"},
        {"checkpointing": "full", "precision": "bf16_pure"},
        {"method": "full", "checkpointing": "every_2", "precision": "fp32"},
        {"checkpointing": "none", "precision": "bf16_pure", "quantization": "fp8"},
        {"checkpointing": "full", "precision": "fp32", "quantization": "fp8"},
    ],
    ids=["lora", "pure", "full", "fp8", "fp8 recomputed"],
)
def test_the_count_is_that_of_the_same_step_on_a_cpu(
    family: str, knobs: dict[str, Any], cuda_product: None
) -> None:
    wanted = request(family, attention="eager", **knobs)
    # A CPU keeps factors instead of CUDA's masks.
    without_dropout = (
        dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0) if family == "gpt2" else {}
    )
    wanted = replace(wanted, model=wanted.model | without_dropout)
    dry, real = counted_on("meta", wanted), counted_on("cpu", wanted)
    # The gradients of norms on a CPU take temporary tensors that CUDA does not.
    allowed = 4096 / 2**30 if knobs["precision"] == "bf16_pure" else 0.0
    assert dry.segment_peak_gib == pytest.approx(real.segment_peak_gib, abs=allowed, rel=0)
    for name in (
        "model_gib",
        "adapters_gib",
        "gradients_gib",
        "optimizer_gib",
        "trainable_params",
        "flops",
    ):
        assert getattr(dry, name) == getattr(real, name), name


PADDED = {"padding": "masked", "micro_batch_size": 4, "seq_len": 4096, "quantization": "nf4"}
# GiB that real probes of two layers held on an H200 (`benchmarks/data/depth_h200.jsonl`, and a
# study on padded rows).
MEASURED: list[tuple[str, dict[str, Any], dict[str, float]]] = [
    (
        "mistral-7b",
        {"micro_batch_size": 1, "seq_len": 512, "checkpointing": "none"},
        {
            "forward": 1.786798,
            "backward": 1.813772,
            "backward_layers": 1.665332,
            "optimizer": 1.414133,
        },
    ),
    (
        "mistral-7b",
        {"method": "full", "micro_batch_size": 2, "seq_len": 1024, "precision": "bf16_pure"},
        {
            "forward": 6.032014,
            "backward": 6.156983,
            "backward_layers": 5.907236,
            "backward_inputs": 5.578355,
            "optimizer": 5.312728,
        },
    ),
    (
        "mistral-7b",
        {
            "method": "full",
            "micro_batch_size": 1,
            "precision": "bf16_pure",
            "checkpointing": "none",
            "optimizer": "adamw_8bit",
        },
        {
            "forward": 5.494083,
            "backward": 5.556575,
            "backward_layers": 5.294853,
            "backward_inputs": 5.024572,
            "optimizer": 4.766758,
        },
    ),
    (
        "llama-3.1-8b",
        {"micro_batch_size": 4, "lora_rank": 64, "checkpointing": "every_2"},
        {
            "forward": 8.858206,
            "backward": 9.795644,
            "backward_layers": 4.34641,
            "backward_inputs": 3.050961,
            "optimizer": 2.98846,
        },
    ),
    (
        "phi-3-mini",
        {
            "micro_batch_size": 2,
            "quantization": "nf4",
            "double_quant": True,
            "checkpointing": "none",
        },
        {
            "forward": 1.744131,
            "backward": 1.854604,
            "backward_layers": 1.237897,
            "optimizer": 0.561815,
        },
    ),
    (
        "mixtral-8x7b",
        {"micro_batch_size": 4, "quantization": "nf4"},
        {
            "forward": 9.327747,
            "backward": 7.770351,
            "backward_layers": 11.281075,
            "backward_inputs": 6.242496,
            "optimizer": 6.179995,
        },
    ),
    (
        "mixtral-8x7b",
        {"micro_batch_size": 2, "quantization": "int8"},
        {
            "forward": 9.174237,
            "backward": 7.072114,
            "backward_layers": 10.588006,
            "backward_inputs": 6.307938,
            "optimizer": 6.214187,
        },
    ),
    (
        "gemma-2-9b",
        {"micro_batch_size": 1, "seq_len": 4096, "optimizer": "adamw_8bit", "attention": "eager"},
        {
            "forward": 14.460747,
            "backward": 16.381706,
            "backward_layers": 7.413887,
            "backward_inputs": 2.588678,
            "optimizer": 2.533989,
        },
    ),
    (
        "llama-3.1-70b",
        PADDED,
        {
            "forward": 25.845435,
            "backward": 29.499610,
            "backward_layers": 13.650856,
            "backward_inputs": 5.450690,
            "optimizer": 4.950703,
        },
    ),
    (
        "llama-3.1-70b",
        PADDED | {"loss": "chunked"},
        {
            "forward": 9.523717,
            "backward": 6.265236,
            "backward_layers": 13.650856,
            "backward_inputs": 5.450690,
            "optimizer": 4.950703,
        },
    ),
]


@pytest.mark.parametrize(("model", "knobs", "measured"), MEASURED)
def test_the_count_is_what_an_h200_was_measured_to_hold(
    model: str, knobs: dict[str, Any], measured: dict[str, float]
) -> None:
    config = TrainConfig(**({"seq_len": 1024} | knobs))
    dry = dry_probe(
        ProbeRequest(config=config, model=resolve_model(model).config, memory_gib=100.0, depth=2)
    )
    assert undivided(dry) == pytest.approx(measured, rel=1e-4)
    assert dry.peak_allocated_gib == pytest.approx(max(measured.values()), rel=1e-4)


def undivided(dry: DryCount) -> dict[str, float]:
    """The peaks of its segments, as they were measured while the forward pass was one."""
    segments = dict(dry.segment_peak_gib)
    return segments | {"forward": max(segments["forward"], segments.pop("forward_head"))}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "knobs",
    [
        {"checkpointing": "none"},
        {"quantization": "nf4", "loss": "chunked"},
        {"quantization": "int8"},
        {"method": "full", "precision": "bf16_pure"},
        {"method": "full", "precision": "bf16_mixed"},
    ],
    ids=["lora", "qlora", "int8", "full", "mixed"],
)
def test_every_kind_of_model_is_counted(family: str, knobs: dict[str, Any]) -> None:
    wanted = request(family, **knobs)
    dry = dry_probe(wanted)
    held = dry.model_gib + dry.adapters_gib + dry.optimizer_gib
    assert 0 < held < dry.peak_allocated_gib < held + 0.2
    assert sum(dry.flops.values()) > 0
    assert dry.moved_bytes["thin product"] > 0 and dry.operations > 0


def test_what_a_compiled_layer_keeps_is_what_an_h200_was_measured_to_hold() -> None:
    config = TrainConfig(
        micro_batch_size=4,
        seq_len=1024,
        precision="bf16_pure",
        checkpointing="full",
        compile="per_layer",
    )
    dry = dry_probe(
        ProbeRequest(
            config=config, model=resolve_model("mistral-7b").config, memory_gib=100.0, depth=2
        )
    )
    gib = dry.segment_peak_gib
    # Inductor orders and reuses the temporary tensors of a layer's backward pass in its own way.
    assert gib.pop("backward_layers") == pytest.approx(
        MISTRAL_COMPILED.pop("backward_layers"), rel=0.02
    )
    gib["forward"] = max(gib["forward"], gib.pop("forward_head"))
    assert gib == pytest.approx(MISTRAL_COMPILED, rel=1e-4)


def test_a_layer_keeps_what_its_budget_lets_it() -> None:
    """KiB that a layer of Mistral 7B keeps of each token, beside trillions of operations of a micro
    batch of 1,024.
    """
    model = resolve_model("mistral-7b").config
    kept, flops = {}, {}
    for value in ("none", "selective_50", "selective_30"):
        config = TrainConfig(
            micro_batch_size=1,
            seq_len=1024,
            checkpointing=value,
            compile="per_layer",
            loss="chunked",
        )
        one, two = (
            dry_probe(ProbeRequest(config=config, model=model, memory_gib=80.0, depth=n))
            for n in (1, 2)
        )
        weights = sum(
            getattr(two, name) - getattr(one, name)
            for name in ("model_gib", "adapters_gib", "gradients_gib", "optimizer_gib")
        )
        more = two.segment_peak_gib["forward_head"] - one.segment_peak_gib["forward_head"] - weights
        kept[value] = more * 2**20 / 1024
        flops[value] = (sum(two.flops.values()) - sum(one.flops.values())) / 1e12
    expected = {"none": 146.8, "selective_50": 74.2, "selective_30": 48.2}
    assert kept == pytest.approx(expected, abs=0.11)
    expected = {"none": 0.962, "selective_50": 1.023, "selective_30": 1.135}
    assert flops == pytest.approx(expected, abs=0.001)


def test_only_what_grows_with_depth_grows() -> None:
    one, two, whole = (dry_probe(request("llama", depth=depth)) for depth in (1, 2, None))
    assert one.peak_allocated_gib < two.peak_allocated_gib == whole.peak_allocated_gib


def test_a_count_does_not_depend_on_what_was_compiled_before() -> None:
    """The second depth runs the compiled code of the first; other layers are compiled anew."""
    shallow, deep, others = (
        request("llama", depth=depth, compile="per_layer", **knobs)
        for depth, knobs in ((1, {}), (2, {}), (1, {"checkpointing": "none"}))
    )
    torch._dynamo.reset()
    dry_compile._Compiled.key = None
    in_turn = [dry_probe(one) for one in (shallow, deep, others, deep, shallow)]
    alone = []
    for one in (deep, shallow):
        dry_compile._Compiled.key = None
        alone.append(dry_probe(one))
    assert in_turn[1] == in_turn[3] == alone[0] and in_turn[0] == in_turn[4] == alone[1]


def test_a_single_micro_batch_has_no_gradients_in_its_forward_pass() -> None:
    wanted = request("llama", method="full", precision="bf16_pure")
    single = ProbeRequest(config=wanted.config, model=wanted.model, memory_gib=1.0, micro_steps=1)
    accumulated, alone = dry_probe(wanted), dry_probe(single)
    batch = 2 * 2 * 64 * 8 / 2**30  # token ids and labels of the other micro batch
    difference = accumulated.segment_peak_gib["forward"] - alone.segment_peak_gib["forward"]
    assert difference == pytest.approx(accumulated.gradients_gib + batch, rel=1e-6)


@pytest.mark.parametrize("optimizer", ["adamw_torch", "adamw_torch_fused", "adafactor"])
def test_an_optimizer_in_the_backward_pass_frees_each_gradient(optimizer: str) -> None:
    """The count is that of the same step on a CPU.

    The state is that of an optimizer at the end of the step.
    """
    knobs = {"method": "full", "precision": "fp32", "attention": "eager", "optimizer": optimizer}
    at_end = replace(request("llama", checkpointing="full", **knobs), micro_steps=1)
    inside = replace(at_end, config=replace(at_end.config, optimizer_in_backward=True))
    dry, real, whole = (
        counted_on("meta", inside),
        counted_on("cpu", inside),
        counted_on("meta", at_end),
    )
    # torch has them on the CPU
    numbers_of_steps = 21 * 512 / 2**30 if optimizer == "adamw_torch" else 0.0
    assert dry.segment_peak_gib == pytest.approx(
        real.segment_peak_gib, rel=1e-9, abs=numbers_of_steps
    )
    assert dry.optimizer_gib == whole.optimizer_gib
    # the embedding's
    assert dry.gradients_gib * 2**30 == 128 * 32 * 4 < whole.gradients_gib * 2**30
    assert dry.peak_allocated_gib < whole.peak_allocated_gib
    assert (
        "optimizer" not in dry.segment_peak_gib
        or dry.segment_peak_gib["optimizer"] < dry.peak_allocated_gib
    )


@pytest.mark.parametrize(("size", "is_hidden"), [(1, False), (2, True)])
def test_padded_rows_have_a_mask_unless_each_is_alone(size: int, is_hidden: bool) -> None:
    """512 x 512 of it for each row, of a byte at least.

    A row alone has no padding, and models leave out its mask.
    """
    plain, masked = (
        dry_probe(request("llama", seq_len=512, micro_batch_size=size, padding=padding))
        for padding in ("longest", "masked")
    )
    difference = masked.segment_peak_gib["forward"] - plain.segment_peak_gib["forward"]
    assert difference * 2**30 >= 2 * 512 * 512 if is_hidden else difference == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_model_is_counted_with_padding(family: str) -> None:
    knobs = {"method": "full", "precision": "bf16_pure", "checkpointing": "none"}
    plain, masked = (
        dry_probe(request(family, padding=padding, **knobs)) for padding in ("longest", "masked")
    )
    assert masked.peak_allocated_gib >= plain.peak_allocated_gib


@pytest.fixture(scope="module")
def whole_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DryProber]:
    with DryProber(tmp_path_factory.mktemp("counts")) as prober:
        yield prober


# Rows, length, checkpointing and micro steps. These pairs have both values of each; the others are
# a wide grid.
CORNERS = [(1, 512, "none", 1), (16, 512, "full", 2), (1, 2048, "full", 2), (16, 2048, "none", 1)]
GRID = itertools.product((1, 16), (512, 2048), ("none", "full"), (1, 2))
STEPS = [
    *CORNERS,
    *(pytest.param(step, marks=pytest.mark.families) for step in GRID if step not in CORNERS),
]


@pytest.mark.parametrize("step", STEPS, ids=str)
@pytest.mark.parametrize("precision", ["bf16_pure", "bf16_mixed"])
@pytest.mark.parametrize("loss", ["full", "chunked"])
@pytest.mark.parametrize("model", ["mistral-7b", "qwen2.5-1.5b"], ids=["untied", "tied"])
def test_a_full_fine_tuning_has_the_peak_of_its_formula(
    whole_models: DryProber, model: str, loss: str, precision: str, step: tuple[int, int, str, int]
) -> None:
    """With the loss in chunks few layers peak in the head, many where their casts are: two lines in
    depth, not one.
    """
    spec = resolve_model(model)
    rows, length, checkpointing, micro_steps = step
    knobs = {"method": "full", "loss": loss, "precision": precision, "checkpointing": checkpointing}
    config = TrainConfig(micro_batch_size=rows, seq_len=length, **knobs)
    wanted = ProbeRequest(config=config, model=spec.config, memory_gib=1.0, micro_steps=micro_steps)
    count, formula = whole_models.count(wanted).count, memory_breakdown(spec, config, micro_steps)
    assert count is not None and formula is not None
    assert formula.peak_gib == pytest.approx(count.peak_allocated_gib, rel=0.009)


def test_compiled_layers_of_an_int8_base_are_refused() -> None:
    with pytest.raises(ValueError, match="compiled layers with an int8 base is not known"):
        dry_probe(request("llama", quantization="int8", compile="per_layer"))


# Dynamo does it itself
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("family", "compiled"),
    [
        ("llama", "per_layer"),
        *((family, "none") for family in ("llama", "mixtral", "gpt_neox")),
        *(
            pytest.param(family, "per_layer", marks=pytest.mark.families)
            for family in ("mixtral", "gpt_neox")
        ),
    ],
)
def test_an_fp8_base_has_a_byte_a_weight_and_a_scale_a_matrix(family: str, compiled: str) -> None:
    plain, fp8 = (
        dry_probe(request(family, quantization=one, compile=compiled)) for one in ("none", "fp8")
    )
    wanted = request(family, quantization="fp8")
    base = build(config_of(wanted.model), model_settings(wanted.config, family), META)
    kept = [one.weight_fp8.numel() for one in base.modules() if isinstance(one, Float8Linear)]
    saved = sum(blocks(2 * size) - blocks(size) - blocks(4) for size in kept)
    assert len(kept) >= 4 and saved > 0
    assert fp8.total_params == plain.total_params
    assert fp8.model_gib == pytest.approx(plain.model_gib - saved / 2**30, rel=1e-9)
    # Gradients, inputs and one weight at a time are cast or turned over in the meantime.
    allowed = (max(kept) + 4 * 128 * 512) / 2**30
    assert plain.peak_allocated_gib - saved / 2**30 <= fp8.peak_allocated_gib + 4096 / 2**30
    assert fp8.peak_allocated_gib <= plain.peak_allocated_gib - saved / 2**30 + allowed


TOGETHER = {"checkpointing": "none", "compile": "per_layer", "loss": "chunked"}


@pytest.mark.parametrize(
    ("model", "knobs"),
    [
        ("mistral-7b", {}),
        pytest.param("mistral-7b", TOGETHER, marks=pytest.mark.families),
        ("llama-3.1-8b", TOGETHER | {"precision": "bf16_pure"}),
    ],
    ids=str,
)
def test_whole_models_in_fp8_hold_half_of_their_layers_less(
    model: str, knobs: dict[str, Any], whole_models: DryProber
) -> None:
    """32 layers of 218,103,808 weights, a byte of each; what is cast and turned over is no part of
    their peaks.
    """
    spec = resolve_model(model)

    def peak(quantization: str) -> float:
        config = TrainConfig(quantization=quantization, micro_batch_size=4, seq_len=2048, **knobs)
        count = whole_models.count(
            ProbeRequest(config=config, model=spec.config, memory_gib=1.0)
        ).count
        by_formula = memory_breakdown(spec, config)
        assert count is not None and by_formula is not None
        assert by_formula.weights == pytest.approx(count.model_gib, rel=2e-5)
        assert by_formula.peak_gib == pytest.approx(count.peak_allocated_gib, rel=0.01)
        return count.peak_allocated_gib

    assert peak("none") - peak("fp8") == pytest.approx(32 * 218_103_808 / 2**30, rel=1e-3)


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def kernel(name: str) -> Any:
    """Stands for the operation of bitsandbytes with this name."""
    return SimpleNamespace(overloadpacket=SimpleNamespace(__name__=name))


FLASH = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
SOFTMAX = torch.ops.aten._softmax_backward_data.default


@pytest.mark.parametrize(
    ("func", "args", "workspace"),
    [
        (SOFTMAX, (tensor(2, 3, 100), tensor(2, 3, 100)), 1536),  # 600 numbers of 2 bytes
        (SOFTMAX, (tensor(600), tensor(600, dtype=torch.float32), -1, torch.float32), 2560),
        (SOFTMAX, (tensor(600, dtype=torch.float32), tensor(600)), 2560),
        # 8 heads of 256 rows, padded from 130, and of 64 numbers, padded from 40; 83200 bytes of
        # keys and values each
        (
            FLASH,
            (tensor(2, 4, 130, 40),) * 2 + (tensor(2, 2, 130, 40), None),
            8192 * 64 + 8192 + 2 * 83456,
        ),
        (FLASH, (tensor(2, 4, 130, 40),) * 3, 8192 * 64 + 8192),
        (FLASH, (tensor(1, 1, 128, 32),) * 3, 512 * 32 + 512),  # nothing to pad
        (FLASH, (tensor(1, 1, 129, 33),) * 3, 1024 * 64 + 1024),
        # 6000 numbers and 300 rows of 4 bytes
        (EFFICIENT, (tensor(2, 3, 50, 20),) * 3, 24064 + 1536),
        (kernel("gemm_4bit"), (tensor(8), None, [100, 7], 0), 1536),
        (kernel("int8_vectorwise_quant"), (tensor(7, 100, dtype=torch.float16), 0.0), 1536 + 1024),
        (
            kernel("int8_scaled_mm"),
            (tensor(3, 100), tensor(70, 100), 0, 0, None, torch.float16),
            1024,
        ),
        (
            kernel("int8_scaled_mm"),
            (tensor(3, 100), tensor(70, 100), 0, 0, None, torch.bfloat16),
            1024 + 512,
        ),
        (torch.ops.aten.mm.default, (tensor(600, 600),) * 2, 0),
        (SimpleNamespace(), (), 0),
    ],
    ids=str,
)
def test_what_kernels_allocate_for_themselves_by_hand(
    func: Any, args: tuple[Any, ...], workspace: int
) -> None:
    assert cuda_workspace(func, args) == workspace


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize(
    ("shape", "sizes"), [((1000, 70, True), (35_000, 1094, 5)), ((3, 5, False), (8, 1, 1))]
)
def test_a_quantised_layer_has_the_tensors_of_bitsandbytes(
    shape: tuple[int, int, bool], sizes: tuple[int, int, int], double_quant: bool
) -> None:
    """By hand: half a byte a weight, a scale for 64 of them, and a scale for 256 of these."""
    packed, scales, nested = sizes
    config = TrainConfig(quantization="nf4", double_quant=double_quant, precision="bf16_pure")
    layer: Any = quantized_linear(shape, model_settings(config, "llama"))
    state = layer.quant_state
    assert (
        state is layer.weight.quant_state
        and layer.weight.module is layer
        and layer.weight.bnb_quantized
    )
    assert (layer.in_features, layer.out_features) == shape[:2]
    assert (
        layer.weight.shape == (packed, 1)
        and layer.weight.dtype is torch.uint8
        and layer.weight.is_meta
    )
    assert not layer.weight.requires_grad and layer.weight.compress_statistics is double_quant
    assert (layer.weight.quant_type, state.quant_type, state.blocksize) == ("nf4", "nf4", 64)
    assert layer.compute_dtype is state.dtype is torch.bfloat16 and state.shape == (
        shape[1],
        shape[0],
    )
    assert (state.absmax.numel(), state.code.numel(), state.code.dtype) == (
        scales,
        16,
        torch.float32,
    )
    assert state.absmax.dtype is (torch.uint8 if double_quant else torch.float32)
    assert state.nested is double_quant
    held = [state.absmax, state.code]
    if double_quant:
        inner = state.state2
        assert (inner.absmax.numel(), inner.code.numel(), inner.blocksize) == (nested, 256, 256)
        assert (
            inner.absmax.dtype
            is inner.code.dtype
            is inner.dtype
            is state.offset.dtype
            is torch.float32
        )
        assert state.offset.shape == ()
        held += [inner.absmax, inner.code, state.offset]
    if shape[2]:
        assert (
            layer.bias.shape == (70,)
            and layer.bias.dtype is torch.bfloat16
            and not layer.bias.requires_grad
        )
        held.append(layer.bias)
    else:
        assert layer.bias is None
    assert all(one.is_meta for one in held)


def int8_layer(shape: tuple[int, int, bool]) -> Any:
    return quantized_linear(
        shape, model_settings(TrainConfig(quantization="int8", precision="bf16_pure"), "llama")
    )


def test_a_layer_in_8_bits_has_a_byte_a_weight_and_a_scale_a_row() -> None:
    layer = int8_layer((1000, 70, True))
    assert (
        layer.weight.shape == (70, 1000)
        and layer.weight.dtype is torch.int8
        and layer.weight.is_meta
    )
    assert (
        not layer.weight.requires_grad
        and not layer.weight.has_fp16_weights
        and not layer.state.has_fp16_weights
    )
    assert layer.weight.SCB.shape == (70,) and layer.weight.SCB.dtype is torch.float32
    assert (
        layer.bias.shape == (70,)
        and layer.bias.dtype is torch.bfloat16
        and not layer.bias.requires_grad
    )
    counter = StorageCounter(META)
    counter.hold_module(layer)
    assert counter.live == 70_144 + 512 + 512  # in blocks
    with counter:
        layer(tensor(3, 1000))
    assert counter.live == 70_144 + 512 + 512
    assert int8_layer((3, 5, False)).bias is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_step_through_a_layer_in_8_bits_by_hand(dtype: torch.dtype) -> None:
    """64 rows of 1024 numbers become 512; all sizes are whole blocks.

    Checkpointing does not free what it keeps.
    """
    rows, fan_in, fan_out = 64, 1024, 512
    layer = int8_layer((fan_in, fan_out, False))
    counter = StorageCounter(META, cuda_workspace)
    counter.hold_module(layer)
    counter.begin()
    held, in_fp16 = counter.live, dtype is torch.float16
    with counter:
        inputs = tensor(2, rows // 2, fan_in, dtype=dtype).requires_grad_()
        outputs = torch.utils.checkpoint.checkpoint(
            lambda x: layer(x + 1), inputs, use_reentrant=False
        )
        # the inputs of the layer, which bitsandbytes does not give to autograd
        kept = 2 * rows * fan_in
        given, made = 2 * rows * fan_in, 2 * rows * fan_out
        assert counter.live == held + given + kept + made
        # In fp16 and in 8 bits, with a scale a row, the absolute values, and for each whether it is
        # an outlier.
        quantised = (0 if in_fp16 else 2 * rows * fan_in) + rows * fan_in + 512 + 3 * rows * fan_in
        multiplied = (
            rows * fan_in + 512 + 4 * rows * fan_out + (0 if in_fp16 else 2 * rows * fan_out) + made
        )
        assert counter.take_peak() == held + given + kept + max(quantised, multiplied)
        assert counter.flops == {"int8_scaled_mm": 2 * rows * fan_in * fan_out}
        counter.begin()
        gradient = tensor(2, rows // 2, fan_out, dtype=dtype)
        outputs.backward(gradient)
        # the weight in the type of the inputs, and their gradient
        backward = 2 * fan_in * fan_out + given
        assert counter.take_peak() == held + given + kept + 2 * made + backward


def test_an_int8_base_lies_between_nf4_and_bf16_until_activations_decide() -> None:
    """Weights by hand; checkpointing frees nothing of the inputs of the matrices, so many tokens
    need more.
    """
    spec = resolve_model("qwen2.5-1.5b")

    @cache
    def count(quantization: str, rows: int) -> DryCount:
        config = TrainConfig(
            quantization=quantization, micro_batch_size=rows, seq_len=512, loss="chunked"
        )
        return dry_probe(ProbeRequest(config=config, model=spec.config, memory_gib=1.0, depth=4))

    def peaks(rows: int) -> list[float]:
        return [count(one, rows).peak_allocated_gib for one in ("nf4", "int8", "none")]

    nf4, int8, bf16 = peaks(1)
    assert nf4 < int8 < bf16 < 1.5 * int8
    nf4, int8, bf16 = peaks(32)
    assert nf4 < bf16 < int8 < 1.5 * bf16
    sizes = Sizes.of(spec)
    assert sizes is not None
    matrices = 4 * sum(a * b for a, b in sizes.matrices.values())
    scales = 4 * 4 * sum(fan_out for _, fan_out in sizes.matrices.values())
    saved = (count("none", 1).model_gib - count("int8", 1).model_gib) * 2**30
    assert saved == pytest.approx(matrices - scales, abs=512 * 28)
    assert count("int8", 1).total_params == count("none", 1).total_params


def test_random_weights_of_wide_models_have_outliers_that_are_not_counted() -> None:
    """Of Mistral's inputs of down_proj nearly all columns have one of 6 or more then, and are kept
    a second time.
    """
    config = TrainConfig(
        micro_batch_size=2, seq_len=1024, quantization="int8", checkpointing="full"
    )
    dry = dry_probe(
        ProbeRequest(
            config=config, model=resolve_model("mistral-7b").config, memory_gib=100.0, depth=2
        )
    )
    columns = 2 * 2 * 1024 * 14_336 * 2 / 2**30  # of two layers
    on_an_h200 = {"forward": 2.02804, "backward": 2.132501, "backward_inputs": 1.35097}
    for name, peak in on_an_h200.items():
        assert 0.98 * columns < peak - undivided(dry)[name] < columns, name
    # only which columns these were
    assert undivided(dry)["optimizer"] == pytest.approx(1.008461, rel=3e-4)


# An embedding and a linear layer of 6400 numbers each, a norm of 64 and 64, and a linear layer of
# just 100,000.
SMALL, LARGE, NORM = 25_600, 400_384, 512  # bytes in fp32, in blocks
IN_8_BITS, OF_LARGE = 6656 + 512, 100_352 + 2048  # with a scale for each 256
OPTIMIZERS = {
    "adamw_torch": 2 * (2 * SMALL + 2 * NORM + LARGE),
    "adamw_torch_fused": 2 * (2 * SMALL + 2 * NORM + LARGE) + 5 * 512,
    "adamw_8bit": 2 * (SMALL + IN_8_BITS + 2 * NORM + OF_LARGE),
    "lion_8bit": SMALL + IN_8_BITS + 2 * NORM + OF_LARGE,
    "paged_adamw_8bit": 2 * (SMALL + IN_8_BITS + 2 * NORM + 2048),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_an_optimizer_by_hand(name: str) -> None:
    """Embeddings and what has fewer than 4096 numbers are in 32 bits; a paged state of 100,000 is
    on the host.
    """
    model = nn.ModuleList(
        [
            nn.Embedding(100, 64),
            nn.Linear(64, 100, False),
            nn.LayerNorm(64),
            nn.Linear(250, 400, False),
        ]
    )
    model = model.to_empty(device=META)
    frozen = nn.Linear(64, 64, device=META).requires_grad_(False)
    model.append(frozen)
    with StorageCounter(META) as counter:
        step = make_optimizer(TrainConfig(optimizer=name), model, trained_parameters(model))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        gradients = counter.live
        assert gradients == 2 * SMALL + 2 * NORM + LARGE
        step()
        assert counter.live - gradients == OPTIMIZERS[name]
        step()
        assert counter.live - gradients == OPTIMIZERS[name]


@pytest.mark.parametrize(
    ("numel", "counts"),
    [
        (4095, [(torch.float32, 4095)]),
        (4096, [(torch.uint8, 4096), (torch.float32, 16)]),
        (4097, None),
    ],
)
def test_a_state_has_8_bits_from_4096_numbers_on(numel: int, counts: list[Any] | None) -> None:
    made = list(
        _moments("lion_8bit", nn.Parameter(torch.empty(numel, device=META)), in_32_bits=False)
    )
    assert [(one.dtype, one.numel()) for one in made] == (
        counts or [(torch.uint8, 4097), (torch.float32, 17)]
    )
    assert all(one.is_meta for one in made)


def test_adafactor_keeps_a_row_and_a_column_of_a_matrix() -> None:
    """By hand: 400 and 250 numbers in blocks, as many as there are of a vector, and the size of
    each.
    """
    model = nn.Linear(250, 400).to_empty(device=META)
    with simulate_cuda(packed=False, padded=False), StorageCounter(META) as counter:
        counter.hold_module(model)
        step = make_optimizer(TrainConfig(optimizer="adafactor"), model, trained_parameters(model))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        before = counter.live
        step()
        assert counter.live - before == (2048 + 1024) + 2048 + 2 * 512


# bytes in fp32: q and o, k and v, the three of the MLP, two norms
LAYER = 2 * 4096 + 2 * 2048 + 3 * 8192 + 2 * 512
ENDS = 2 * 16_384 + 512  # embedding, head, the last norm


def test_a_full_fine_tuning_by_hand() -> None:
    """Of 26,784 parameters; AdamW has two of each. `always` is held at any time."""
    wanted = request(
        "llama", method="full", precision="fp32", optimizer="adamw_torch", checkpointing="none"
    )
    with simulate_cuda(packed=False, padded=False):
        plain, more = (
            CountedStep(wanted, META, lambda func, args: 0).count(*always)
            for always in ((), (2**29,))
        )
    trained = 2 * LAYER + ENDS
    assert 0 <= plain.model_gib * 2**30 - trained <= 1024  # frequencies of the positions
    assert plain.gradients_gib * 2**30 == trained and plain.optimizer_gib * 2**30 == 2 * trained
    assert plain.adapters_gib == 0 and plain.trainable_params == plain.total_params == 26_784
    backward = {"backward", "backward_layers", "backward_inputs"}
    assert set(plain.segment_peak_gib) == {"forward", "forward_head", *backward, "optimizer"}
    assert plain.peak_allocated_gib == max(plain.segment_peak_gib.values())
    assert all(
        peak - plain.segment_peak_gib[name] == 0.5 for name, peak in more.segment_peak_gib.items()
    )
    assert more.peak_allocated_gib == plain.peak_allocated_gib + 0.5
    # 128 tokens pass the head and the matrices of two layers, once forward and twice backward, two
    # operations each.
    assert sum(count for name, count in plain.flops.items() if name == "mm") == 3 * 2 * 128 * (
        2 * 9216 + 4096
    )


@pytest.mark.parametrize(("precision", "size"), [("bf16_pure", 2), ("bf16_mixed", 4), ("fp32", 4)])
def test_adapters_by_hand(precision: str, size: int) -> None:
    """Of rank 16 on each linear layer: 8192 numbers a layer, in the type of a base that is trained
    in 16 bits alone.
    """
    dry = dry_probe(
        request("llama", lora_rank=16, precision=precision, optimizer="adamw_torch_fused")
    )
    assert dry.trainable_params == 16_384 and dry.total_params == 16_384 + 26_784
    assert dry.adapters_gib * 2**30 == dry.gradients_gib * 2**30 == 16_384 * size
    # and the number of steps of each of 28
    assert dry.optimizer_gib * 2**30 == 2 * 16_384 * size + 28 * 512
    assert min(dry.segment_peak_gib.values()) * 2**30 > 64 * 2**20  # cuBLAS's


def test_a_batch_has_positions_where_examples_share_rows() -> None:
    kinds = (
        MicroBatch(rows=((8,),), length=8, share=1.0),
        MicroBatch(rows=((24,),), length=24, share=0.0),
    )
    for packing, names in (
        (False, ["input_ids", "labels"]),
        (True, ["input_ids", "labels", "position_ids"]),
    ):
        wanted = replace(request("llama", micro_batch_size=3, packing=packing), micro_batches=kinds)
        with simulate_cuda(packed=packing, padded=False):
            batch = CountedStep(wanted, META, cuda_workspace)._batch()
        assert list(batch) == names
        assert {(one.shape, one.dtype, one.device) for one in batch.values()} == {
            ((3, 24), torch.long, META)
        }


def test_packed_rows_have_a_mask() -> None:
    """512 x 512 of it for each of two rows, of a byte at least."""
    plain, packed = (
        dry_probe(request("llama", seq_len=512, packing=packing)) for packing in (False, True)
    )
    difference = packed.segment_peak_gib["forward"] - plain.segment_peak_gib["forward"]
    assert difference * 2**30 >= 2 * 512 * 512


@pytest.mark.parametrize(
    ("precision", "calls"), [("fp32", 0), ("bf16_pure", 0), ("bf16_mixed", 1), ("fp16_mixed", 1)]
)
@pytest.mark.parametrize("loss", ["full", "chunked"])
def test_outputs_of_autocast_are_in_32_bits_as_accelerate_makes_them(
    monkeypatch: pytest.MonkeyPatch, precision: str, calls: int, loss: str
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        module, "convert_to_fp32", lambda outputs: seen.append(outputs) or convert_to_fp32(outputs)
    )
    wanted = request("llama", precision=precision, method="full", loss=loss)
    with simulate_cuda(packed=False, padded=False):
        step = CountedStep(wanted, META, cuda_workspace)
        types: list[torch.dtype] = []
        linear = next(one for one in step._base.modules() if isinstance(one, nn.Linear))
        linear.register_forward_hook(lambda module, inputs, output: types.append(output.dtype))
        assert step._forward(step._batch()).shape == ()
    assert len(seen) == calls
    expected = {"fp32": torch.float32, "fp16_mixed": torch.float16}.get(precision, torch.bfloat16)
    assert types == [expected]


def test_the_peak_of_a_part_that_is_entered_again_is_the_largest() -> None:
    peaks = iter([9, 3, 7, 5, 1])
    step: Any = object.__new__(CountedStep)
    step._counter, step._segment, step._segments = (
        SimpleNamespace(take_peak=lambda: next(peaks)),
        "",
        {},
    )
    for name in ("forward", "backward", "forward", "backward", ""):
        step._enter(name)
    assert step._segments == {"forward": 5, "backward": 7} and step._segment == ""


def graph_of(build: Callable[[fx.Graph], None]) -> fx.GraphModule:
    graph = fx.Graph()
    build(graph)
    return fx.GraphModule(nn.Module(), graph)


def short(node: fx.Node) -> str:
    """The name of its operation."""
    return node.name.split("_")[0]


aten = torch.ops.aten


def test_a_compiled_graph_holds_what_its_kernels_store() -> None:
    """By hand, of tensors of 16 KiB: the input and the argument of the first product, then that and
    the product.

    The sine is computed inside the cosine, the exponential inside the sum; the input lives until
    the cosine is made.
    """

    def build(graph: fx.Graph) -> None:
        x = graph.placeholder("x")
        sine = graph.call_function(aten.sin.default, (x,))
        cosine = graph.call_function(aten.cos.default, (sine,))
        turned = graph.call_function(aten.t.default, (cosine,))
        product = graph.call_function(aten.mm.default, (turned, cosine))
        exponential = graph.call_function(aten.exp.default, (product,))
        flat = graph.call_function(aten.view.default, (exponential, [4096]))
        total = graph.call_function(aten.sum.dim_IntList, (flat, [0]))
        graph.output((total,))

    made = graph_of(build)
    fused = dry_compile._FusedInterpreter(made)
    assert {short(node) for node in fused._inside} == {"sin", "exp"}
    ends = {
        short(node): {short(one) for one in nodes}
        for node, nodes in fused.user_to_last_uses.items()
    }
    assert ends == {
        "cos": {"sin", "x"},
        "mm": {"cos", "t"},
        "sum": {"view", "exp", "mm"},
        "output": {"sum"},
    }
    run: Any = dry_compile._compile_graph(made, None)
    assert run._boxed_call is True
    with StorageCounter(META) as counter:
        for _ in range(2):
            arguments = [torch.empty(64, 64, device=META)]
            (total,) = run(arguments)
            assert total.shape == () and counter.take_peak() == 2 * 16_384
            assert counter.live == 512 and StorageCounter.fusing is False
            del total
            assert counter.live == 0 and counter.take_peak() == 512


@pytest.mark.parametrize(
    ("target", "args", "elementwise", "view", "reduction"),
    [
        (aten.exp.default, (), True, False, False),
        (aten._to_copy.default, (), True, False, False),
        (torch.ops.prims.convert_element_type.default, (torch.float16,), True, False, False),
        (aten.mm.default, (), False, False, False),
        (aten.t.default, (), False, True, False),
        (aten.sum.default, (), False, False, True),
        (aten.amax.default, (), False, False, True),
        (aten.var_mean.correction, (), False, False, True),
        (torch.sin, (), False, False, False),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_an_operation_of_a_graph_is(
    target: Any, args: tuple[Any, ...], elementwise: bool, view: bool, reduction: bool
) -> None:
    """A value is stored unless element-wise operations and reductions alone use it, or views for
    these.
    """

    def build(graph: fx.Graph) -> None:
        x = graph.placeholder("x")
        used = graph.call_function(target, (graph.call_function(aten.neg.default, (x,)), *args))
        beside = graph.call_function(aten.neg.default, (x,))
        graph.output(
            (
                graph.call_function(aten.exp.default, (used,)),
                graph.call_function(aten.exp.default, (beside,)),
            )
        )

    negated, used, *_ = [node for node in graph_of(build).graph.nodes if node.op != "placeholder"]
    found = (
        dry_compile._is_elementwise(used),
        dry_compile._is_view(used),
        dry_compile._is_reduction(used),
    )
    assert found == (elementwise, view, reduction)
    assert dry_compile._is_stored(negated) is not (elementwise or view or reduction)
    placeholder = next(iter(negated.graph.nodes))
    assert not dry_compile._is_elementwise(placeholder) and not dry_compile._is_view(placeholder)
    assert not dry_compile._is_reduction(placeholder)


def test_a_failed_operation_leaves_what_is_counted_as_it_was() -> None:
    def build(graph: fx.Graph) -> None:
        x = graph.placeholder("x")
        wrong = graph.call_function(aten.add.Tensor, (x, "no number"))
        graph.output((graph.call_function(aten.exp.default, (wrong,)),))

    made = dry_compile._compile_graph(graph_of(build), None)
    with pytest.raises(RuntimeError):
        made([torch.empty(4, device=META)])
    assert StorageCounter.fusing is False


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.inner(hidden)) + hidden


def test_layers_are_compiled_one_by_one_for_each_length() -> None:
    """Another graph for another length, and none where a length comes again."""
    from torch._dynamo.utils import counters

    layers: list[nn.Module] = [_Layer().to_empty(device=META) for _ in range(2)]
    dynamo: Any = torch._dynamo.config
    with dynamo.patch(
        recompile_limit=8, accumulated_recompile_limit=256, fail_on_recompile_limit_hit=False
    ):
        dry_compile.compile_for_count(layers)
        assert dynamo.recompile_limit == dynamo.accumulated_recompile_limit == 64
        assert dynamo.fail_on_recompile_limit_hit is True
        graphs = []
        for length in (4, 4, 6, 7, 4):
            for layer in layers:
                layer(torch.empty(length, 8, device=META, requires_grad=True)).sum().backward()
            graphs.append(counters["stats"]["unique_graphs"])
        steps = [after - before for before, after in pairwise(graphs)]
        assert steps[0] == steps[3] == 0 and steps[1] == steps[2] > 0
        assert dry_compile.compile_for_count(layers, key="a")
        layers[0](torch.empty(4, 8, device=META, requires_grad=True)).sum()
        compiled = counters["stats"]["unique_graphs"]
        assert compiled > 0
        others: list[nn.Module] = [_Layer().to_empty(device=META)]
        assert not dry_compile.compile_for_count(others, key="a")
        others[0](torch.empty(4, 8, device=META, requires_grad=True)).sum()
        assert counters["stats"]["unique_graphs"] == compiled
        assert dry_compile.compile_for_count(layers, key="b")
    torch._dynamo.reset()


def test_a_compiled_kernel_reads_what_is_stored_once_and_writes_what_others_need() -> None:
    """Three operations on 8 x 16 numbers become one kernel before the product, and one on 8 x 4
    after it.
    """

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16, 4, device=META))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return ((rows * 2).sin() + rows) @ self.weight * 3

    layer, rows = Layer(), torch.ones(8, 16, device=META)
    counter = StorageCounter(META)
    with torch.no_grad(), counter:
        layer(rows)
        assert (counter.moved["other"], counter.operations) == (
            4 * (2 + 2 + 3) * 8 * 16 + 4 * 2 * 8 * 4,
            5,
        )
        counter.begin()
        dry_compile.compile_for_count([layer])
        layer(rows)
    assert (counter.moved["other"], counter.operations) == (4 * 2 * 8 * 16 + 4 * 2 * 8 * 4, 3)
    assert counter.flops == {"mm": 2 * 8 * 16 * 4}


IN_GATE = {
    ("tinyllama", "pure"),
    ("tinyllama", "some"),
    ("phi-3-mini", "nf4"),
    ("qwen3-0.6b", "eager"),
}
DROPOUT: dict[str, dict[str, Any]] = {
    "pure": {"precision": "bf16_pure"},
    "eager": {"precision": "bf16_pure", "attention": "eager"},
    "some": {"precision": "bf16_mixed", "lora_targets": "q_v"},
    "nf4": {"precision": "bf16_mixed", "quantization": "nf4"},
}


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        pytest.param(*row, marks=() if row in IN_GATE else pytest.mark.families)
        for row in itertools.product(("tinyllama", "phi-3-mini", "qwen3-0.6b"), DROPOUT)
    ],
)
def test_what_dropout_keeps_is_counted_as_the_formula_says(model: str, kind: str) -> None:
    knobs = DROPOUT[kind]
    if model == "phi-3-mini" and "lora_targets" in knobs:
        knobs = knobs | {"lora_targets": "attention"}
    spec = resolve_model(model)
    sizes = Sizes.of(spec)
    assert sizes is not None

    def of_a_layer(share: float) -> tuple[float, float]:
        """What a layer adds to the peak of the forward pass, counted, and what the formula says
        that it keeps.
        """
        config = TrainConfig(
            micro_batch_size=2,
            seq_len=512,
            checkpointing="none",
            loss="chunked",
            lora_dropout=share,
            **knobs,
        )
        shallow, deep = (
            dry_probe(ProbeRequest(config=config, model=spec.config, memory_gib=100.0, depth=depth))
            for depth in (3, 4)
        )
        counted = deep.segment_peak_gib["forward"] - shallow.segment_peak_gib["forward"]
        return counted, config.tokens * kept_bytes(sizes, config) / 2**30

    (counted, kept), (counted_without, kept_without) = of_a_layer(0.1), of_a_layer(0.0)
    assert counted - counted_without == pytest.approx(kept - kept_without, rel=0.01)


def test_an_evaluation_holds_what_it_holds_on_a_cpu() -> None:
    """No micro batch in a step means an evaluation: nothing is kept for a backward pass, and there
    are no gradients.
    """
    wanted = replace(
        request("llama", attention="eager", precision="fp32", checkpointing="none"), micro_steps=0
    )
    dry, real = counted_on("meta", wanted), counted_on("cpu", wanted)
    assert dry.segment_peak_gib == pytest.approx(real.segment_peak_gib, abs=0, rel=0)
    assert set(dry.segment_peak_gib) == {"evaluate", "evaluate_head"}
    step = counted_on("meta", replace(wanted, micro_steps=1))
    assert dry.peak_allocated_gib < step.segment_peak_gib["forward"]


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("llama-3.2-1b", {"quantization": "nf4"}),
        ("llama-3.2-1b", {"loss": "chunked", "attention": "eager", "seq_len": 2048}),
        ("qwen3-0.6b", {"method": "full", "loss": "chunked"}),
        ("phi-3-mini", {"loss": "chunked"}),
        ("phi-3-mini", {"method": "full"}),
    ],
)
def test_the_formula_of_an_evaluation_is_within_its_count(name: str, knobs: dict[str, Any]) -> None:
    model = resolve_model(name)
    sizes = Sizes.of(model)
    assert sizes is not None
    config = TrainConfig(**{"micro_batch_size": 8, "seq_len": 1024} | knobs)
    counted = dry_probe(
        ProbeRequest(config=config, model=model.config, memory_gib=1.0, micro_steps=0, depth=2)
    )

    base = counted.total_params - (counted.trainable_params if config.method == "lora" else 0)
    shallow = replace(sizes, layers=2, params=base)
    trained = base if config.method == "full" else shallow.adapter_params(config)
    wide = 4 if config.method == "full" else 2
    logits = live_logits(config, sizes.vocab)
    found = max(map(sum, evaluation_moments(shallow, config, trained, wide, logits).values()))
    held = counted.model_gib + counted.adapters_gib + counted.optimizer_gib + 64 / 1024
    assert found / 2**30 == pytest.approx(counted.peak_allocated_gib - held, rel=0.04)


# --- trainers of other projects


WIDE_HEAD = {"vocab_size": 32_000}
TOKENS_OF_STEP = 4 * 512


def peak(other: OtherTrainer, segment: str = "", **knobs: Any) -> float:
    """Bytes at the peak of a segment, or of the whole step, of another trainer's step."""
    wanted = request("llama", **{"micro_batch_size": 4, "seq_len": 512} | knobs)
    count = dry_probe(replace(wanted, model=wanted.model | WIDE_HEAD), other)
    return GIB * (count.segment_peak_gib[segment] if segment else count.peak_allocated_gib)


def test_a_loop_that_holds_the_outputs_keeps_one_copy_of_the_logits() -> None:
    held, usual = (
        peak(OtherTrainer(keeps_logits=keeps), "backward", precision="bf16_mixed")
        for keeps in (True, False)
    )
    assert held - usual == pytest.approx(4 * TOKENS_OF_STEP * 32_000, rel=0.01)


def test_a_loss_in_16_bits_needs_half_of_the_bytes() -> None:
    pure = {"precision": "bf16_pure", "checkpointing": "full"}
    upcast, kept = (peak(OtherTrainer(upcasts_logits=one), **pure) for one in (True, False))
    assert upcast - kept == pytest.approx(6 * TOKENS_OF_STEP * 32_000, rel=0.01)


def test_without_autocast_adapters_keep_their_inputs_in_32_bits() -> None:
    """The cast input of an adapter has 4 bytes for each value instead of 2."""
    knobs = {"precision": "bf16_mixed", "checkpointing": "none"}
    with_it, without = (
        peak(OtherTrainer(autocast=one), "forward", **knobs) for one in (True, False)
    )
    # Queries, keys, values, outputs and two matrices of the MLP read the hidden size.
    inputs = 6 * TINY["hidden_size"] + TINY["intermediate_size"]
    assert without - with_it > 2 * TOKENS_OF_STEP * 2 * inputs


def test_a_4_bit_base_may_be_unpacked_to_the_dtype_of_its_input() -> None:
    """In the backward pass, the largest unpacked matrix is also cast to 32 bits."""
    nf4 = {"quantization": "nf4", "kbit_preparation": True, "micro_batch_size": 1, "seq_len": 8}
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "head_dim": 128}
    wanted = request("llama", **nf4)
    wanted = replace(wanted, model=wanted.model | sizes)
    in_16, in_32 = (
        dry_probe(wanted, OtherTrainer(autocast=False, unpacks_to_input=one))
        for one in (False, True)
    )
    more = in_32.segment_peak_gib["backward_layers"] - in_16.segment_peak_gib["backward_layers"]
    assert more * GIB == pytest.approx(4 * 512 * 2048, rel=0.05)


@pytest.mark.parametrize(
    ("model", "knobs", "measured_gib"),
    [
        ("qwen2.5-0.5b", {"micro_batch_size": 4, "checkpointing": "none"}, 9.719),
        ("qwen2.5-0.5b", {"micro_batch_size": 8, "method": "full"}, 17.855),
        ("llama-3.2-1b", {"micro_batch_size": 16, "seq_len": 2048}, 60.252),
    ],
    ids=str,
)
def test_segments_that_cannot_grow_are_as_large_as_on_an_h100(
    model: str, knobs: dict[str, Any], measured_gib: float
) -> None:
    """Measured with four layers; torch allocated 8.342, 17.326 and 48.770 GiB."""
    usual = {"seq_len": 1024, "loss": "full", "checkpointing": "full", "allocator": "fixed"}
    config = TrainConfig(**usual | knobs)
    request = ProbeRequest(
        config=config, model=resolve_model(model).config, memory_gib=1.0, depth=4
    )
    count = dry_probe(request)
    assert count.reserved_gib == pytest.approx(measured_gib, rel=0.003)
    assert count.occupied_gib is not None
    assert count.peak_allocated_gib < count.occupied_gib <= count.reserved_gib


def test_only_segments_that_cannot_grow_are_counted_and_only_of_a_training_step() -> None:
    model = resolve_model("qwen2.5-0.5b").config
    fixed = TrainConfig(micro_batch_size=1, seq_len=64, allocator="fixed")
    request = ProbeRequest(config=fixed, model=model, memory_gib=1.0, depth=2)
    assert dry_probe(request).reserved_gib is not None
    growing = replace(request, config=replace(fixed, allocator="expandable"))
    for other in (growing, replace(request, micro_steps=0)):
        count = dry_probe(other)
        assert count.reserved_gib is None and count.occupied_gib is None
