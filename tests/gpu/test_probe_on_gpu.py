"""Real probes of a tiny model on an NVIDIA GPU: they measure memory, repeat, and report when it
runs out.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.core.nvml import list_gpus
from autotune.core.probe_types import Measurement, Outcome, ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.dry.prober import DryProber
from autotune.probe.supervisor import WorkerProber, check_worker

pytestmark = pytest.mark.skipif(not list_gpus(), reason="needs an NVIDIA GPU")

TINY_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
}
CASES: dict[str, dict[str, Any]] = {
    "full": {"method": "full", "precision": "bf16_pure"},
    "lora": {"method": "lora", "precision": "bf16_mixed"},
    "paged": {"method": "full", "precision": "bf16_mixed", "optimizer": "paged_adamw_8bit"},
    "nf4": {"method": "lora", "precision": "bf16_mixed", "quantization": "nf4"},
    "graphs": {"cuda_graphs": "micro_batch", "loss": "chunked", "padding": "max_length"},
    "joined": {
        "compile": "per_layer",
        "lora_kernels": "joined",
        "loss": "chunked",
        "padding": "max_length",
    },
}
EIGHT_BITS: dict[str, dict[str, Any]] = {
    "joined on fp8": {"quantization": "fp8", "lora_kernels": "joined"},
    "tensorwise": {"method": "full", "fp8_products": "tensorwise"},
    "rowwise": {"method": "full", "fp8_products": "rowwise"},
    "compiled graphs": {"cuda_graphs": "micro_batch"},
}


@pytest.fixture(scope="module")
def prober(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProber]:
    """One warm worker on the first GPU, which has told how much memory there is."""
    with WorkerProber("cuda", tmp_path_factory.mktemp("logs")) as started:
        assert started.fingerprint.compute_capability
        yield started


def request(memory_gib: float, **knobs: Any) -> ProbeRequest:
    small = {"micro_batch_size": 8, "seq_len": 512, "checkpointing": "none"}
    return ProbeRequest(
        config=TrainConfig(**(small | knobs)),
        model=TINY_LLAMA,
        memory_gib=memory_gib,
        min_timed_s=0.2,
    )


def answer(prober: WorkerProber, asked: ProbeRequest, name: str) -> Measurement:
    result = prober.probe(asked, prober.logs / f"{name}.log")
    assert result.outcome is Outcome.OK, result.reason
    assert result.measurement is not None
    return result.measurement


def measured(prober: WorkerProber, name: str) -> Measurement:
    return answer(prober, request(prober.memory_gib, **CASES[name]), name)


def test_memory_lies_in_segments_of_the_kind_that_is_asked_for(prober: WorkerProber) -> None:
    """A warm worker changes from one to the other, and back: what is allocated is the same, and
    blocks of 2 MiB are.
    """
    kinds = ("expandable", "fixed", "expandable")
    asked = [request(prober.memory_gib, checkpointing="full", allocator=kind) for kind in kinds]
    first, fixed, last = (
        answer(prober, each, f"segments-{number}") for number, each in enumerate(asked)
    )
    assert first.peak_allocated_gib == pytest.approx(fixed.peak_allocated_gib, rel=1e-3)
    assert fixed.peak_reserved_gib != first.peak_reserved_gib == last.peak_reserved_gib


@pytest.mark.parametrize("name", CASES)
def test_a_probe_measures_memory_that_repeats(prober: WorkerProber, name: str) -> None:
    first, second = measured(prober, name), measured(prober, name)
    assert min(first.step_s) > 0
    assert (
        0 < first.model_gib < first.peak_allocated_gib <= first.peak_reserved_gib < first.limit_gib
    )
    assert second.peak_allocated_gib == pytest.approx(first.peak_allocated_gib, rel=0.01)
    assert second.peak_reserved_gib == pytest.approx(first.peak_reserved_gib, rel=0.01)
    assert second.loss_first == pytest.approx(first.loss_first, rel=1e-3)
    assert prober.starts == 1


def test_the_context_is_measured(prober: WorkerProber) -> None:
    context_gib = measured(prober, "lora").context_gib
    assert context_gib is not None and 0.1 < context_gib < 3.0


def test_a_paged_optimizer_returns_its_memory(prober: WorkerProber) -> None:
    """Torch does not count managed memory: two bytes for each parameter of layers and head, eight
    of the embedding.

    Layers have 11.8 million, head and embedding 4.2 million each.
    """
    pytest.importorskip("bitsandbytes")
    used = []
    for _ in range(4):
        assert measured(prober, "paged").managed_gib == pytest.approx(0.0610, rel=0.01)
        used.append(measured(prober, "lora").context_gib or 0.0)
    assert used[-1] - used[0] < 0.02
    assert prober.starts == 1


def test_memory_that_runs_out_is_reported(prober: WorkerProber) -> None:
    context_gib = measured(prober, "lora").context_gib or 0.0
    little = request(context_gib + 1.0, **CASES["lora"])
    large = replace(little, config=replace(little.config, micro_batch_size=64))
    result = prober.probe(large, prober.logs / "oom.log")
    assert result.outcome is Outcome.OOM
    assert result.oom is not None and result.oom.margin > 0
    assert sum(result.oom.terms_gib.values()) == pytest.approx(result.oom.allocated_gib)
    assert prober.starts == 1  # the worker goes on
    measured(prober, "lora")


@pytest.mark.parametrize(
    "knobs",
    [
        {"modules_to_save": "embedding_and_head"},
        {"quantization": "nf4", "kbit_preparation": True, "checkpointing": "full"},
        {
            "quantization": "nf4",
            "kbit_preparation": True,
            "modules_to_save": "head",
            "loss": "chunked",
        },
        {"quantization": "fp8", "compile": "per_layer"},
    ],
    ids=["saved", "prepared", "both", "fp8"],
)
def test_what_a_dry_probe_counts_is_taken(
    prober: WorkerProber, knobs: dict[str, Any], tmp_path: Path
) -> None:
    asked = request(prober.memory_gib, **knobs)
    with DryProber(tmp_path) as dry:
        count = dry.count(asked).count
    assert count is not None
    assert answer(prober, asked, "counted").peak_allocated_gib == pytest.approx(
        count.peak_allocated_gib, rel=0.01
    )


# of torch 2.11 itself, while Dynamo compiles
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_both_products_in_8_bits_are_those_of_the_weight(compiled: bool) -> None:
    """Sides differ, so that a factor in the wrong layout fails; a weight that is not turned over is
    off by 1.4.
    """
    import torch

    from autotune.trainer.float8 import Float8Linear

    plain = torch.nn.Linear(
        256, 512, bias=False, dtype=torch.bfloat16, device="cuda"
    ).requires_grad_(False)
    layer: Any = Float8Linear(plain, plain.weight.device)
    run = torch.compile(layer, fullgraph=True, dynamic=False) if compiled else layer
    inputs = torch.randn(2, 40, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    gradients = torch.randn(2, 40, 512, dtype=torch.bfloat16, device="cuda")
    outputs = run(inputs)
    outputs.backward(gradients)
    gradient = inputs.grad
    assert gradient is not None
    outputs, inputs = outputs.detach(), inputs.detach().requires_grad_(False)
    for found, expected in (
        (outputs, inputs @ plain.weight.t()),
        (gradient, gradients @ plain.weight),
    ):
        assert 0.01 < float((found - expected).norm() / expected.norm()) < 0.1


def test_a_worker_is_healthy() -> None:
    fingerprint, nf4_problem = check_worker("cuda")
    assert fingerprint.cuda and nf4_problem is None


def test_a_profile_of_a_micro_batch_divides_its_time(prober: WorkerProber) -> None:
    """With long rows the device is busy for much of the time."""
    asked = replace(request(prober.memory_gib, seq_len=2048, precision="bf16_pure"), depth=2)
    plain = answer(prober, asked, "plain")
    found = answer(prober, replace(asked, profile=True), "profiled").kernels
    again = answer(prober, asked, "again")
    assert plain.kernels is None and found is not None
    assert found.fp8_s == 0 < min(found.products_s, found.attention_s, found.bytes_s)
    assert found.products_s + found.attention_s + found.bytes_s == pytest.approx(
        found.busy_s, rel=0.02
    )
    assert 0.2 * found.micro_s < found.busy_s < 1.1 * found.micro_s
    # A profile leaves nothing behind that slows the host, whose own pace varies by up to 1.6 times,
    # or holds memory.
    assert plain.host_micro_s is not None and again.host_micro_s is not None
    assert again.host_micro_s < 2 * plain.host_micro_s
    assert again.context_gib == pytest.approx(plain.context_gib, abs=0.1)


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_products_in_8_bits_and_graphs_of_compiled_layers_learn_the_same(
    prober: WorkerProber, name: str
) -> None:
    """Losses of the same micro batches, with the lever and with compiled layers alone."""
    lever = EIGHT_BITS[name]
    needs_fp8 = "cuda_graphs" not in lever
    if needs_fp8 and float(prober.fingerprint.compute_capability or 0) < 8.9:
        pytest.skip("needs products in 8-bit floats")
    plain = {"compile": "per_layer", "loss": "chunked", "padding": "max_length"}
    plain["method"] = lever.get("method", "lora")
    expected, found = (
        answer(prober, request(prober.memory_gib, **knobs), "eight_bits").losses
        for knobs in (plain, plain | lever)
    )
    assert found[:4] == pytest.approx(expected[:4], rel=0.01)
