"""Cross-entropy in chunks of tokens: the same loss and gradients in less memory, probed and exported."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.catalog import ModelSpec, resolve_model
from autotune.core.probe_types import Measurement, ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.export import export_all
from autotune.prediction.memory_formula import kept_factors
from autotune.probe.supervisor import WorkerProber
from autotune.problem.length_distribution import Lengths
from autotune.problem.setup import known_shape
from autotune.problem.workload import Workload
from tests.helpers.factories import TINY, summary
from tests.unit.export.test_script import write

pytestmark = pytest.mark.probe

SMALL = TINY | {"num_hidden_layers": 2}
UNCAPPED = {"model_type": "gemma2", "final_logit_softcapping": None}


def built(model: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    shape = dict(model)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(shape.pop("model_type"), **shape))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_loss_and_gradients_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch, tied: bool, frozen: bool) -> None:
    import torch

    from autotune.probe.runtime import chunked_loss

    monkeypatch.setattr(chunked_loss, "CHUNK_TOKENS", 16)  # 58 tokens: three chunks and a rest
    model = built(SMALL | {"model_type": "llama", "tie_word_embeddings": tied})
    model.get_output_embeddings().weight.requires_grad_(not frozen)
    tokens = torch.randint(0, 128, (2, 29))
    labels = tokens.masked_fill(torch.rand(tokens.shape) < 0.3, -100)

    def gradients() -> dict[str, Any]:
        return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}

    expected = model(input_ids=tokens, labels=labels, num_items_in_batch=50).loss
    (3 * expected).backward()
    wanted = gradients()
    model.zero_grad()

    loss = chunked_loss.chunked_loss(model)
    found = loss(model(input_ids=tokens), labels, num_items_in_batch=50)
    (3 * found).backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    assert gradients().keys() == wanted.keys()
    for name, gradient in gradients().items():
        torch.testing.assert_close(gradient, wanted[name], msg=name)

    with torch.no_grad():
        mean = loss(model(input_ids=tokens), labels)
    assert mean.item() == pytest.approx(expected.item() * 50 / (labels[:, 1:] != -100).sum().item(), rel=1e-6)


@pytest.mark.parametrize(
    ("model_type", "plain"),
    [
        ("llama", True),
        ("mixtral", True),
        ("qwen2", True),
        ("gpt2", True),
        ("gemma2", False),
        ("cohere", False),
        ("granite", False),
    ],
)
def test_a_head_whose_logits_are_changed_afterwards_is_found_out(model_type: str, plain: bool) -> None:
    from autotune.probe.runtime.chunked_loss import chunked_loss, has_plain_head

    scaled = {"logits_scaling": 8.0} if model_type == "granite" else {}
    model = built(SMALL | scaled | {"model_type": model_type, "head_dim": 16})
    assert has_plain_head(model) is plain
    assert "forward" not in vars(model.get_output_embeddings()) and "forward" not in vars(model.base_model)
    if not plain:
        with pytest.raises(ValueError, match="changes its logits"):
            chunked_loss(model)


def test_what_a_router_adds_to_the_loss_is_not_left_out() -> None:
    from autotune.probe.runtime.chunked_loss import has_plain_head

    assert not has_plain_head(built(SMALL | {"model_type": "mixtral", "output_router_logits": True}))


@pytest.mark.parametrize("more", [*({"model_type": family} for family in kept_factors("eager")), UNCAPPED], ids=str)
def test_a_plan_knows_of_a_family_what_the_worker_says(prober: WorkerProber, more: dict[str, Any]) -> None:
    model = SMALL | {"head_dim": 16} | more
    shape, known = prober.describe(model), known_shape(ModelSpec(name="small", config=model))
    assert shape is not None and known is not None
    assert replace(shape, period=None, liger=True) == known
    assert known.plain_head is (more["model_type"] != "gemma2" or more == UNCAPPED)


def measured(prober: WorkerProber, loss: str, **knobs: Any) -> Measurement:
    small = {"micro_batch_size": 16, "seq_len": 256, "precision": "fp32", "checkpointing": "none"}
    asked = ProbeRequest(
        config=TrainConfig(**(small | knobs), loss=loss),
        model=SMALL | {"model_type": "llama", "vocab_size": 8192},
        device="cpu",
        memory_gib=4.0,
        micro_steps=1,
        min_timed_s=0.0,
        min_timed_micros=1,
        evaluate=True,
    )
    result = prober.probe(asked, prober.logs / "probe.log")
    assert result.measurement is not None and result.notes == (), result.reason
    return result.measurement


def test_the_memory_model_knows_how_long_a_chunk_is() -> None:
    """It runs without torch, which the chunks need."""
    from autotune.prediction.memory_predictor import HEAD_CHUNK
    from autotune.probe.runtime.chunked_loss import CHUNK_TOKENS

    assert HEAD_CHUNK == CHUNK_TOKENS


def test_a_probe_needs_less_memory_and_leaves_nothing_behind(prober: WorkerProber) -> None:
    """4,096 tokens of 8,192 logits are 128 MiB, and more than one of these is held at once."""
    whole, chunked, again = (measured(prober, loss) for loss in ("full", "chunked", "full"))
    assert chunked.peak_allocated_gib < whole.peak_allocated_gib - 0.125
    assert again.peak_allocated_gib == pytest.approx(whole.peak_allocated_gib, rel=0.05)
    assert again.losses[:2] == whole.losses[:2]


@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed", "bf16_pure"])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_probe_learns_the_same_in_the_same_precision(prober: WorkerProber, method: str, precision: str) -> None:
    """Under autocast the head computes in bf16: in fp32 the first loss would be another."""
    knobs = {"method": method, "precision": precision, "micro_batch_size": 8}
    whole, chunked = (measured(prober, loss, **knobs) for loss in ("full", "chunked"))
    assert chunked.loss_first == pytest.approx(whole.loss_first, rel=1e-6)
    assert chunked.losses[:2] == pytest.approx(whole.losses[:2], rel=1e-4)  # how many there are hangs on their time


def test_the_exported_script_learns_the_same(tmp_path: Path) -> None:
    known, reported = summary().recipe, {}
    assert known is not None
    for loss in ("full", "chunked"):
        config = TrainConfig(micro_batch_size=8, seq_len=256, precision="fp32", checkpointing="none", loss=loss)
        workload = Workload(examples=32, lengths=Lengths.constant(256), global_batch=16)
        made = replace(known, winner=replace(known.winner, config=config), workload=workload)
        files = export_all(replace(made, model=resolve_model("demo-3m")), ["train"])
        folder = write(files, tmp_path / loss)
        ended = subprocess.run(
            [sys.executable, "train.py", "--random-weights", "--max-steps", "2", "--held-out", "4", "256"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        reported[loss] = json.loads(ended.stdout.splitlines()[-1])["held_out_loss"]
    assert len(reported["full"]) == 2
    assert reported["chunked"] == pytest.approx(reported["full"], rel=1e-5)
