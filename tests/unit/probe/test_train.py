"""What the exported script does beside its model: it clips, leaves short batches out, and runs nobody's code."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, TrainerCallback

from autotune.core.train_config import TrainConfig
from autotune.export import script
from autotune.probe.runtime import model_builder, train
from autotune.probe.runtime.settings import Options, RunSettings
from tests.unit.export.test_script import demo

OPTIONS = Options(
    model="",
    dataset="rows.jsonl",
    lengths=None,
    max_steps=-1,
    held_out=0,
    held_out_tokens=64,
    output_dir="",
    saves=False,
    checkpoint=None,
    progress=None,
)


@pytest.fixture
def settings() -> RunSettings:
    """Micro batches of two rows, two in a step."""
    return script.settings(demo(TrainConfig(micro_batch_size=2, seq_len=32, precision="fp32", optimizer="adamw_torch")))


class _Steep(nn.Module):
    """A model with a gradient of a million, that remembers how many rows each micro batch had."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.num_rows: list[int] = []

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.num_rows.append(len(input_ids))
        return {"loss": 1e6 * self.weight.sum()}


class _Norms(TrainerCallback):
    """In the place of the clock: the norm of the gradients that each step of the optimizer takes."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        self.norms.append(float(model.weight.grad.norm()))


def test_gradients_are_clipped_and_what_fills_no_micro_batch_waits_for_the_next_epoch(
    settings: RunSettings, tmp_path: Path
) -> None:
    model, norms = _Steep(), _Norms()
    options = replace(OPTIONS, output_dir=str(tmp_path))
    examples = [[torch.arange(length)] for length in (5, 9, 32, 3, 7, 8, 9)]
    trainer = train.make_trainer(settings, options, model, None, norms, examples, [])  # type: ignore[arg-type]
    trainer.train()
    assert model.num_rows == [2, 2, 2]
    assert norms.norms == pytest.approx([1.0, 1.0], rel=1e-3)


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A model whose repository brings code of its own for config, model and tokenizer, which leaves a file behind."""
    code = f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
    code += "from transformers import LlamaConfig as Config, LlamaForCausalLM as Model\n"
    code += "from transformers import PreTrainedTokenizerFast as Words\n"
    folder = tmp_path / "foreign"
    folder.mkdir()
    (folder / "theirs.py").write_text(code)
    own = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}
    (folder / "config.json").write_text(json.dumps({"model_type": "theirs", "auto_map": own}))
    tokenizer = {"tokenizer_class": "Words", "auto_map": {"AutoTokenizer": [None, "theirs.Words"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    return folder


def _load(folder: Path, settings: RunSettings) -> None:
    model_builder.load(str(folder), settings.model_settings, torch.device("cpu"))


def _read(folder: Path, settings: RunSettings) -> None:
    train.read_examples(settings, replace(OPTIONS, model=str(folder), dataset=str(folder.parent / "rows.jsonl")))


@pytest.mark.parametrize("read", [_load, _read])
def test_no_code_of_a_repository_runs(
    read: Callable[[Path, RunSettings], None], foreign: Path, settings: RunSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=r"theirs|custom code|trust_remote_code|Words"):
        read(foreign, settings)
    assert not (foreign.parent / "ran").exists()


def test_a_config_that_names_code_is_read_without_it() -> None:
    shape = {"model_type": "llama", "hidden_size": 64, "auto_map": {"AutoConfig": "theirs.Config"}}
    config = model_builder.config_of(shape)
    assert type(config) is LlamaConfig and config.hidden_size == 64 and config.use_cache is False
