"""Levers that transformers has no one switch for: fp8 products, cuDNN's attention, checkpoints in
host memory.
"""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from autotune.catalog import resolve_device, resolve_model
from autotune.core.errors import UsageError
from autotune.core.probe_types import Measurement, ModelShape, Outcome, ProbeRequest
from autotune.core.train_config import TrainConfig
from autotune.export.formats import export_all
from autotune.prediction.memory_predictor import needs_at_least
from autotune.probe.supervisor import WorkerProber
from autotune.problem.length_distribution import Lengths
from autotune.problem.search_space import Knob, SearchSpace
from autotune.problem.setup import adapt_to_layers, set_up
from autotune.problem.study_spec import StudySpec
from autotune.problem.workload import Workload
from autotune.study.coordinate_search import next_move
from tests.helpers.factories import TINY, summary
from tests.unit.export.test_script import write

TINY_LLAMA = TINY | {"model_type": "llama", "num_hidden_layers": 2}
FITS_FP8 = TINY_LLAMA | {"num_key_value_heads": 2}  # every side of its matrices is a multiple of 16


def measured(prober: WorkerProber, **knobs: Any) -> Measurement:
    values: dict[str, Any] = {"micro_batch_size": 4, "seq_len": 64, "precision": "fp32"}
    asked = ProbeRequest(
        config=TrainConfig(**(values | knobs)),
        model=FITS_FP8 | {"hidden_size": 64, "vocab_size": 512},
        device="cpu",
        memory_gib=4.0,
        micro_steps=2,
        min_timed_s=0.0,
        min_timed_micros=1,
    )
    result = prober.probe(asked, prober.logs / "probe.log")
    assert result.measurement is not None and result.notes == (), result.reason
    return result.measurement


def built(model: dict[str, Any], attention: str = "sdpa") -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    shape = dict(model)
    model_config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    return AutoModelForCausalLM.from_config(model_config, attn_implementation=attention)


@pytest.mark.probe
def test_fp8_multiplies_differently_and_leaves_the_rest_and_the_head_alone() -> None:
    import torch

    from autotune.trainer.float8 import multiply_in_fp8

    model = built(FITS_FP8)
    tokens = torch.randint(0, 128, (2, 16))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    expected = model(input_ids=tokens).logits
    multiply_in_fp8(model)
    found = model(input_ids=tokens).logits
    after = model.state_dict()
    assert all(
        torch.equal(weight, before[name]) for name, weight in after.items() if name in before
    )
    assert {name for name in before if name not in after} == {
        name for name in before if "_proj." in name
    }
    assert type(model.get_output_embeddings()) is torch.nn.Linear
    layers = [
        type(one).__name__
        for one in model.model.layers[0].modules()
        if isinstance(one, torch.nn.Linear)
    ]
    assert set(layers) == {"Float8Linear"}
    off = float(((found - expected).norm() / expected.norm()).detach())
    assert 1e-4 < off < 0.1


@pytest.mark.probe
def test_fp8_needs_matrices_whose_sides_are_multiples_of_16() -> None:
    import torch

    from autotune.trainer.float8 import multiply_in_fp8

    model = built(TINY_LLAMA | {"intermediate_size": 72})
    multiply_in_fp8(model)
    kinds = {
        name: type(one).__name__
        for name, one in model.named_modules()
        if isinstance(one, torch.nn.Linear)
    }
    assert kinds["model.layers.0.self_attn.q_proj"] == "Float8Linear"
    assert kinds["model.layers.0.mlp.up_proj"] == kinds["model.layers.0.mlp.down_proj"] == "Linear"


@pytest.mark.probe
@pytest.mark.parametrize("precision", ["fp32", "bf16_pure"])
def test_a_probe_with_an_fp8_base_trains_and_leaves_nothing_behind(
    prober: WorkerProber, precision: str
) -> None:
    plain, fp8, again = (
        measured(prober, precision=precision, quantization=one) for one in ("none", "fp8", "none")
    )
    assert again.losses[:2] == plain.losses[:2]
    assert fp8.losses[:2] != plain.losses[:2]
    assert fp8.losses[:2] == pytest.approx(plain.losses[:2], rel=0.01)
    assert fp8.trainable_params == plain.trainable_params and fp8.total_params == plain.total_params
    # Two layers of seven matrices of 64 x 64, each with a scale.
    saved = 2 * 7 * (64 * 64 * ({"fp32": 4, "bf16_pure": 2}[precision] - 1) - 4)
    assert fp8.model_gib == pytest.approx(plain.model_gib - saved / 2**30, rel=1e-9)


@pytest.mark.probe
def test_a_probe_with_fp8_products_trains_and_leaves_nothing_behind(prober: WorkerProber) -> None:
    full = {"method": "full", "compile": "per_layer", "padding": "max_length"}
    full["precision"] = "bf16_mixed"
    plain, *in_fp8, again = (
        measured(prober, **full, fp8_products=one)
        for one in ("none", "tensorwise", "rowwise", "none")
    )
    assert again.losses[:2] == plain.losses[:2]
    for fp8 in in_fp8:
        assert fp8.losses[:2] != plain.losses[:2]
        assert fp8.losses[:2] == pytest.approx(plain.losses[:2], rel=0.01)
        assert fp8.model_gib == plain.model_gib


@pytest.mark.probe
def test_offloaded_checkpoints_learn_the_same_and_stay_on_the_host() -> None:
    import torch

    from autotune.probe.model_settings import model_settings
    from autotune.trainer.host_checkpoints import HostCheckpoints
    from autotune.trainer.model_builder import decoder_layers, set_checkpointing

    model = built(TINY_LLAMA).train()
    tokens = torch.randint(0, 128, (2, 16))
    on_device = model_settings(TrainConfig(checkpointing="full"), "llama")
    on_host = model_settings(TrainConfig(checkpointing="offload"), "llama")

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        return [one.grad.clone() for one in model.parameters() if one.grad is not None]

    set_checkpointing(model, on_device)
    expected = gradients()
    set_checkpointing(model, on_host)
    copied: list[torch.Size] = []
    with pytest.MonkeyPatch.context() as patch:
        store = HostCheckpoints._store
        patch.setattr(
            HostCheckpoints,
            "_store",
            lambda self, one: copied.append(one.shape) or store(self, one),
        )
        found = gradients()
    assert copied == [torch.Size((2, 16, 32))] * 2  # the inputs of both layers
    assert all(map(torch.equal, found, expected))
    set_checkpointing(model, on_device)
    assert all(
        "partial" not in repr(one._gradient_checkpointing_func.func)
        for one in decoder_layers(model)
    )


@pytest.mark.probe
def test_cudnn_attention_is_a_name_of_its_own_and_falls_back_to_nothing() -> None:
    """What another kernel computed would be reported as cuDNN's speed. There is none on a CPU."""
    import torch

    from autotune.trainer.patches import CUDNN_ATTENTION, register_attentions

    register_attentions()
    model = built(TINY_LLAMA, CUDNN_ATTENTION)
    assert model.config._attn_implementation == CUDNN_ATTENTION
    with pytest.raises(RuntimeError, match=r"No (viable|available)"):
        model(input_ids=torch.randint(0, 128, (1, 16)))


@pytest.mark.probe
def test_kernels_that_stand_in_for_methods_are_taken_out_again() -> None:
    """Liger binds functions to the modules of a model, and puts its classes among the names of the
    model's code.
    """
    import torch

    from autotune.probe.resident import ResidentModel, clean, module_names

    model = built(TINY_LLAMA)
    tokens, before = torch.randint(0, 128, (1, 16)), dict(module_names(model))
    expected = model(input_ids=tokens).logits
    for module in (model.model.norm, model.model.layers[0].mlp):
        module.forward = lambda hidden: 2 * hidden
        module._get_name = lambda: "Other"
    assert not torch.equal(model(input_ids=tokens).logits, expected)
    clean(ResidentModel(family=(), base=model, model_gib=0.0))
    assert torch.equal(model(input_ids=tokens).logits, expected)
    assert "apply_rotary_pos_emb" in before and module_names(model) == before


@pytest.mark.probe
@pytest.mark.parametrize(
    "knobs",
    [
        {"quantization": "fp8"},
        {"method": "full", "compile": "per_layer", "fp8_products": "rowwise"}
        | {"precision": "bf16_mixed"},
        {"checkpointing": "offload"},
        {"checkpointing": "offload", "tiling": "tokens"},
        {
            "packing": True,
            "packed_attention": "varlen",
            "precision": "bf16_mixed",
            "loader_workers": 2,
        },
    ],
    ids=str,
)
def test_the_exported_script_applies_the_same_patches(
    tmp_path: Path, knobs: dict[str, Any]
) -> None:
    """Scripts without patches run in test_train_script."""
    known = summary().recipe
    assert known is not None

    def exported(**knobs: Any) -> dict[str, str]:
        config = TrainConfig(
            **({"micro_batch_size": 8, "seq_len": 32, "precision": "fp32"} | knobs)
        )
        lengths = Lengths.of([5, 11, 32], "counted") if config.packing else Lengths.constant(32)
        workload = Workload(examples=64, lengths=lengths, global_batch=16)
        made = replace(known, winner=replace(known.winner, config=config), workload=workload)
        return export_all(replace(made, model=resolve_model("demo-3m")), ["train"])

    files = exported(**knobs)
    write(files, tmp_path)
    command = [
        sys.executable,
        "train.py",
        "--random-weights",
        "--max-steps",
        "2",
        "--output-dir",
        "",
    ]
    command += ["--held-out", "4", "32"] if knobs.get("packing") else []
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1])["steps"] == 2


def test_offloading_is_the_last_resort_and_the_first_to_be_given_up() -> None:
    knob = Knob(name="checkpointing", values=("none", "offload", "full"))
    space = SearchSpace(name="levers", knobs=(Knob(name="method", values=("lora",)), knob))
    assert space.leanest()["checkpointing"] == "offload"
    here = TrainConfig(checkpointing="offload")
    first = next_move(space, here, "checkpointing", {})
    assert first is not None and first["checkpointing"] == "none"
    ooms = {space.config(first).digest: Outcome.OOM}
    second = next_move(space, here, "checkpointing", ooms)
    assert second is not None and second["checkpointing"] == "full"
    assert next_move(space, replace(here, checkpointing="full"), "checkpointing", ooms) is None


def test_what_offloads_is_not_compiled() -> None:
    """Dynamo gives a layer up at the hooks that offload: it would run as it is and be reported as
    compiled.
    """
    config = TrainConfig(checkpointing="offload", compile="per_layer")
    assert config == TrainConfig(checkpointing="offload")
    pinned = StudySpec(
        model="mistral-7b", pins={"checkpointing": "offload", "compile": "per_layer"}
    )
    with pytest.raises(UsageError, match="needs checkpointing other than offload"):
        set_up(pinned, resolve_device("h200"))


def test_compiled_layers_have_kernels_of_their_own() -> None:
    config = TrainConfig(kernels="liger", compile="per_layer")
    assert config == TrainConfig(compile="per_layer")
    assert "liger" in TrainConfig(kernels="liger").label()


def test_liger_is_for_models_that_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: object() if name == "liger_kernel" else there(name)
    )
    values = {
        "kernels": ("torch", "liger"),
        "method": ("lora",),
        "seq_len": (1024,),
        "micro_batch_size": (8,),
    }
    space = SearchSpace(
        name="levers", knobs=tuple(Knob(name=name, values=one) for name, one in values.items())
    )
    monkeypatch.setattr("autotune.problem.search_space.SearchSpace.load", lambda name: space)
    setup = set_up(StudySpec(model="mistral-7b", gpu="h200"), resolve_device("h200"))
    shape = ModelShape(num_layers=32, prefix=0, period=1, plain_head=True)
    for known in (True, False):
        suited = adapt_to_layers(setup, replace(shape, liger=known))
        assert ("liger" in suited.task.space.knob("kernels").choices()) is known  # type: ignore[union-attr]
        assert any("Liger has no kernels" in one.reason for one in suited.removals) is not known


def test_what_does_not_fit_recomputed_may_fit_offloaded() -> None:
    full, offload = TrainConfig(), TrainConfig(checkpointing="offload")
    assert needs_at_least(full, offload)
    assert not needs_at_least(offload, full)


def test_fp8_is_less_capable_than_an_unquantised_base_and_more_than_others() -> None:
    ranked = [TrainConfig(quantization=one) for one in ("nf4", "int8", "fp8", "none")]
    assert sorted(ranked, key=lambda config: config.capability) == ranked


@pytest.mark.parametrize(
    ("gpu", "kept"), [("h200", True), ("l4", True), ("a100-80gb", False), ("cpu", False)]
)
def test_fp8_is_for_devices_that_multiply_it(gpu: str, kept: bool, tmp_path: Path) -> None:
    file = tmp_path / "fp8.yaml"
    file.write_text(
        "version: 1\ndescription: fp8\nknobs:\n  method: lora\n"
        "  quantization: {values: [none, fp8], kind: learning}\n"
        "  attention: {values: [sdpa, sdpa_cudnn], kind: system}\n"
    )
    spec = StudySpec(model="mistral-7b", gpu=gpu, space=str(file), allow_quantized=True)
    made = set_up(spec, resolve_device(gpu))
    assert ("fp8" in made.task.space.knob("quantization").choices()) is kept  # type: ignore[union-attr]
    assert [one.values for one in made.removals if one.knob == "quantization"] == [("fp8",)] * (
        not kept
    )
    assert ("sdpa_cudnn" in made.task.space.knob("attention").choices()) is (gpu != "cpu")  # type: ignore[union-attr]


@pytest.mark.probe
def test_a_lean_trainer_walks_over_the_modules_only_when_the_mode_changes(tmp_path: Path) -> None:
    import gc
    import weakref

    import torch
    from transformers import TrainingArguments

    from autotune.trainer.lean_trainer import LeanTrainer

    class Watched(torch.nn.Module):
        walks: ClassVar[list[bool]] = []

        def train(self, mode: bool = True) -> "Watched":
            self.walks.append(mode)
            return super().train(mode)

    model = built(TINY_LLAMA)
    model.model.norm.watched = Watched()
    rows = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 8
    arguments = {
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "per_device_train_batch_size": 1,
    }
    settings = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, gradient_accumulation_steps=2, **arguments
    )
    model.eval()
    Watched.walks.clear()
    trainer = LeanTrainer(model, settings, train_dataset=rows, eval_dataset=rows)
    assert Watched.walks == [True] and model.model.layers[0].training
    trainer.train()
    assert Watched.walks == [True] and trainer.state.total_flos == 0
    trainer.evaluate()
    assert Watched.walks == [True, False] and not model.model.layers[0].training
    trainer.train()
    assert Watched.walks == [True, False, True]
    gone = weakref.ref(model)
    trainer.accelerator.free_memory()
    del trainer, model
    gc.collect()
    assert gone() is None
