"""The Trainer of probe and script: the arguments that everything measured rests on, and what it
leaves out.
"""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainingArguments

from autotune.core.train_config import TrainConfig
from autotune.export import script
from autotune.trainer.lean_trainer import (
    LeanTrainer,
    compile_layers,
    run_layers_eagerly,
    training_arguments,
    visit_modules_on_change,
)
from tests.unit.export.test_script import recipe


def test_what_speed_and_memory_depend_on() -> None:
    """The defaults of the libraries' recipes: gradients clipped at 1, whole batches only, and no
    reporter.
    """
    config = TrainConfig(
        micro_batch_size=4, optimizer="lion_8bit", loader_workers=2, kernels="liger"
    )
    plain = training_arguments(script.settings(recipe(config)), accumulation=8, on_cpu=False)
    assert plain == {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 8,
        "optim": "lion_8bit",
        "bf16": True,
        "fp16": False,
        "use_cpu": False,
        "learning_rate": config.learning_rate,
        "max_grad_norm": 1.0,
        "logging_steps": 10,
        "logging_first_step": True,
        "logging_nan_inf_filter": False,
        "report_to": [],
        "dataloader_drop_last": True,
        "dataloader_num_workers": 2,
        "dataloader_pin_memory": True,
        "use_liger_kernel": True,
        "liger_kernel_config": {"cross_entropy": False, "fused_linear_cross_entropy": False},
    }


@pytest.mark.parametrize(
    ("precision", "bf16", "fp16"),
    [
        ("bf16_mixed", True, False),
        ("fp16_mixed", False, True),
        ("bf16_pure", False, False),
        ("fp32", False, False),
    ],
)
def test_only_mixed_precision_is_the_trainers(precision: str, bf16: bool, fp16: bool) -> None:
    config = TrainConfig(precision=precision)
    on_cpu = training_arguments(script.settings(recipe(config)), accumulation=1, on_cpu=True)
    assert (on_cpu["bf16"], on_cpu["fp16"]) == (bf16, fp16)
    assert (
        on_cpu["use_cpu"] and not on_cpu["dataloader_pin_memory"] and not on_cpu["use_liger_kernel"]
    )


class _Counting(nn.Module):
    visits = 0

    def train(self, mode: bool = True) -> Any:
        _Counting.visits += 1
        return super().train(mode)


def test_modules_are_visited_only_when_the_mode_changes() -> None:
    model = nn.Sequential(_Counting()).eval()
    visit_modules_on_change(model)
    assert model.training and model[0].training
    _Counting.visits = 0
    assert model.train() is model and _Counting.visits == 0
    assert model.eval() is model and _Counting.visits == 1 and not model[0].training
    assert model.train(False) is model and _Counting.visits == 1
    assert model.train() is model and _Counting.visits == 2 and model[0].training


class _Layer(nn.Module):
    """A layer whose compiled code is a function that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.ways: list[str] = []

    def forward(self, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.ways.append("eager")
        return {"loss": self.weight.sum() * labels.float().mean()}

    def compiled(self, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.ways.append("compiled")
        return {"loss": self.weight.sum() * labels.float().mean()}


def test_evaluation_compiles_nothing_and_leaves_out_no_row(tmp_path: Path) -> None:
    """Three rows in micro batches of two; the training goes on with the code that was compiled for
    it.
    """
    layer = _Layer()
    layer._compiled_call_impl = layer.compiled
    rows = [{"labels": torch.ones(2)}] * 3
    arguments = training_arguments(settings_of_two_rows(), accumulation=1, on_cpu=True) | {
        "optim": "adamw_torch"
    }
    steps = {
        "max_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 2,
    }
    args = TrainingArguments(
        output_dir=str(tmp_path), save_strategy="no", disable_tqdm=True, **arguments, **steps
    )
    trainer = LeanTrainer(layer, args, train_dataset=rows, eval_dataset=rows)
    assert "train" in vars(layer)  # it visits no module where nothing changes
    trainer.train()
    assert layer.ways == ["compiled", "eager", "eager"] * 2
    assert args.dataloader_drop_last


class _Model(nn.Module):
    """Two layers and a norm; its loss is on the labels, which are its input too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))

    def forward(self, labels: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        return {"loss": (self.layers(labels) - labels.flip(-1)).square().mean()}


def trained(
    folder: Path, optimizer: str, resumed_from: str | None = None, **changes: Any
) -> LeanTrainer:
    config = TrainConfig(
        method="full", micro_batch_size=2, precision="fp32", optimizer=optimizer, **changes
    )
    arguments = training_arguments(script.settings(recipe(config)), accumulation=1, on_cpu=True)
    arguments |= {"max_grad_norm": 0.0, "learning_rate": 0.01, "warmup_steps": 3, "seed": 3}
    steps = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4, "disable_tqdm": True}
    rows = [
        {"labels": torch.randn(4, generator=torch.Generator().manual_seed(row))}
        for row in range(16)
    ]
    args = TrainingArguments(output_dir=str(folder), **arguments, **steps)
    in_backward = config.optimizer_in_backward
    trainer = LeanTrainer(_Model(), args, train_dataset=rows, optimizer_in_backward=in_backward)
    trainer.train(resume_from_checkpoint=resumed_from)
    return trainer


@pytest.mark.parametrize(
    "optimizer", ["adamw_torch_fused", "adamw_torch", "adafactor", "adamw_8bit"]
)
def test_a_step_in_the_backward_pass_is_the_same_step(tmp_path: Path, optimizer: str) -> None:
    """With warm-up, and after it went on from a checkpoint.

    No gradient is left at the end of a backward pass.
    """
    at_end = trained(tmp_path / "end", optimizer)
    inside = trained(tmp_path / "inside", optimizer, optimizer_in_backward=True)
    resumed = trained(
        tmp_path / "resumed",
        optimizer,
        str(tmp_path / "inside/checkpoint-4"),
        optimizer_in_backward=True,
    )
    for one in (inside, resumed):
        torch.testing.assert_close(
            one.model.state_dict(), at_end.model.state_dict(), rtol=1e-6, atol=1e-7
        )
        assert len(one.optimizer.state_dict()["state"]) == 6
        assert all(parameter.grad is None for parameter in one.model.parameters())


def test_gradients_of_several_micro_batches_cannot_add_up_in_the_backward_pass(
    tmp_path: Path,
) -> None:
    arguments = training_arguments(settings_of_two_rows(), accumulation=2, on_cpu=True)
    args = TrainingArguments(output_dir=str(tmp_path), max_steps=1, **arguments)
    trainer = LeanTrainer(
        _Model(), args, train_dataset=[{"labels": torch.ones(4)}] * 4, optimizer_in_backward=True
    )
    with pytest.raises(ValueError, match="only if a step has one micro batch"):
        trainer.train()


def settings_of_two_rows() -> Any:
    return script.settings(recipe(TrainConfig(micro_batch_size=2, precision="fp32")))


def test_a_model_is_freed_after_its_last_use() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    visit_modules_on_change(model)
    known = weakref.ref(model)
    del model
    assert known() is None


def test_layers_are_compiled_alone_for_their_shapes_and_run_eagerly_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, Any]] = []

    def compiled(function: Any, **options: Any) -> Any:
        asked.append(options)
        return lambda rows: rows * 2

    monkeypatch.setattr(torch, "compile", compiled)  # the real one takes a minute
    layers: list[nn.Module] = [nn.Identity(), nn.Identity()]
    compile_layers(layers)
    assert (
        asked == [{"dynamic": False, "backend": "inductor"}] * 2 and layers[1](torch.tensor(3)) == 6
    )
    run_layers_eagerly(layers)
    assert [int(layer(torch.tensor(3))) for layer in layers] == [3, 3]


def test_rows_of_nearly_the_same_length_share_a_step_where_that_is_asked_for(
    tmp_path: Path,
) -> None:
    """A step has three micro batches of two rows."""
    arguments = training_arguments(settings_of_two_rows(), accumulation=3, on_cpu=True) | {
        "optim": "adamw_torch"
    }
    args = TrainingArguments(
        output_dir=str(tmp_path), save_strategy="no", disable_tqdm=True, max_steps=1, **arguments
    )
    rows = [{"labels": torch.ones(2)}] * 12
    by_length: Any = LeanTrainer(
        _Layer(), args, train_dataset=rows, row_lengths=[*range(12)]
    )._get_train_sampler()
    assert type(by_length).__name__ == "LengthGroupedSampler"
    assert by_length.batch_size == 6 and by_length.lengths == [*range(12)]
    plain: Any = LeanTrainer(_Layer(), args, train_dataset=rows)._get_train_sampler()
    assert type(plain).__name__ == "RandomSampler"


def test_each_step_that_is_dealt_out_has_the_rows_that_it_has_otherwise(tmp_path: Path) -> None:
    """Two rows a micro batch, three micro batches a step; five rows are left over, one of them
    without another.
    """
    arguments = training_arguments(settings_of_two_rows(), accumulation=3, on_cpu=True) | {
        "optim": "adamw_torch"
    }
    args = TrainingArguments(
        output_dir=str(tmp_path), save_strategy="no", disable_tqdm=True, max_steps=1, **arguments
    )
    rows, lengths = (
        [{"labels": torch.tensor(row)} for row in range(23)],
        [7 * row % 23 for row in range(23)],
    )

    def order(epoch: int, **how: Any) -> list[int]:
        loader = LeanTrainer(
            _Layer(),
            args,
            train_dataset=rows,
            data_collator=_rows_of,
            row_lengths=how.get("row_lengths"),
            dealt=True,
        ).get_train_dataloader()
        loader.set_epoch(epoch)
        return [row for batch in loader for row in batch["labels"].tolist()]

    passes = [(order(epoch), order(epoch, row_lengths=lengths)) for epoch in (0, 1)]
    assert passes[0][0] != passes[1][0]
    for drawn, dealt in passes:
        assert sorted(drawn[:18]) != sorted(range(18)) and len(drawn) == len(dealt) == 22
        for begin in (0, 6, 12):
            step = sorted(drawn[begin : begin + 6], key=lengths.__getitem__, reverse=True)
            assert dealt[begin : begin + 6] == step
        assert dealt[18:] == drawn[18:]


def _rows_of(examples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {"labels": torch.stack([example["labels"] for example in examples])}
