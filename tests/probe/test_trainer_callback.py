"""The callback inside transformers' and TRL's own trainers, on the CPU with a tiny model."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from trl import DPOConfig, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from typer.testing import CliRunner

from autotune.api import trainer_callback
from autotune.api.trainer_callback import PreflightCallback, catalogued, objective_of, run_values
from autotune.catalog import list_models, resolve_model
from autotune.cli.app import app
from autotune.core.errors import UsageError
from autotune.planning.foreign_config import read_file
from autotune.planning.observations import read_submission
from tests.helpers.factories import FINGERPRINT
from tests.helpers.tokenizers import byte_level

pytestmark = [
    pytest.mark.probe,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
LENGTH = 32
LONG = 512
LORA = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
A2 = replace(FINGERPRINT, device="NVIDIA A2", device_memory_gib=14.8, compute_capability="8.6")


def tiny(**changes: Any) -> Any:
    """The demo model in bf16, with random weights."""
    config = AutoConfig.for_model(**dict(resolve_model("demo-3m").config) | changes)
    return AutoModelForCausalLM.from_config(config).to(torch.bfloat16)


def rows(length: int = LENGTH, count: int = 80) -> Dataset:
    """Equal examples of one length; a quarter of each is padding."""
    ids = list(range(5, 5 + length))
    real = 3 * length // 4
    mask = [1] * real + [0] * (length - real)
    return Dataset.from_list([{"input_ids": ids, "attention_mask": mask, "labels": ids}] * count)


def arguments(folder: Path, **changes: Any) -> dict[str, Any]:
    usual = {"output_dir": str(folder), "per_device_train_batch_size": 2, "max_steps": 6}
    usual |= {"gradient_accumulation_steps": 2, "use_cpu": True, "bf16": True, "report_to": []}
    return usual | {"save_strategy": "no", "disable_tqdm": True} | changes


def autotune(*words: str) -> str:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    return done.stdout


def speed(evidence: Path) -> tuple[float, int]:
    """The speed that `autotune plan` predicts for an A2, and the measurements behind it."""
    words = ["plan", "--model", "demo-3m", "--gpu", "a2", "--tokens-per-example", "512"]
    best = json.loads(autotune(*words, "--evidence", str(evidence), "--json"))["best"]
    return best["tokens_per_s"], best["measurements_on_this_card"]


def evidence_of(tmp_path: Path, measured: Path) -> Path:
    """Import a file, and return the directory of evidence."""
    evidence = tmp_path / "evidence"
    autotune("import", str(measured), "--evidence", str(evidence))
    return evidence


def test_in_transformers_the_imported_file_changes_a_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real steps on the CPU. The machine and the clock are those of an A2 that is half as fast as
    the formula predicts.
    """
    said: list[str] = []
    clock = iter([100.0, 100.031])  # the end of the warm-up, and of one more step
    monkeypatch.setattr(trainer_callback, "machine", lambda kind: (A2, "a2"))
    monkeypatch.setattr(trainer_callback, "perf_counter", lambda: next(clock))
    changes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 2}
    Trainer(
        model=get_peft_model(tiny(), LORA),
        args=TrainingArguments(**arguments(tmp_path, **changes)),
        train_dataset=rows(LONG),
        callbacks=[PreflightCallback("a2", steps=2, say=said.append)],
    ).train()

    assert said[0].startswith("autotune: fits: needs ") and " on a2" in said[0]
    assert any("estimated speed: " in line for line in said)
    measured = tmp_path / "autotune-measured.json"
    assert said[-1].startswith(f"autotune: wrote {measured}")
    (observed,) = read_submission(measured)
    assert (observed.device, observed.model, observed.trainer) == ("a2", "demo-3m", "transformers")
    assert observed.step_time_s == pytest.approx(0.031) and observed.peak_reserved_gib is None
    assert observed.tokens_per_s == pytest.approx(4 * LONG / 0.031)
    config = observed.config
    assert (config.method, config.lora_rank, config.micro_batch_size) == ("lora", 8, 4)
    assert (config.precision, config.checkpointing) == ("bf16_mixed", "none")
    # Unlike TRL, this Trainer holds all logits, and cuts no example.
    assert (config.loss, config.seq_len, config.padding) == ("full", LONG, "masked")
    row = json.loads(measured.read_text())["rows"][0]
    assert row["useful_tokens_per_s"] == pytest.approx(0.75 * row["raw_tokens_per_s"])

    before, none = speed(tmp_path / "nothing")
    after, one = speed(evidence_of(tmp_path, measured))
    assert (none, one) == (0, 1) and after < 0.95 * before


def test_in_trl_the_run_is_checked_before_step_1_and_measured_on_the_cpu(tmp_path: Path) -> None:
    said: list[str] = []
    tokenizer = byte_level()
    tokenizer.pad_token = tokenizer.eos_token
    trainer = SFTTrainer(
        model=tiny(vocab_size=len(tokenizer) + 8),
        args=SFTConfig(**arguments(tmp_path, max_length=LENGTH, activation_checkpointing=True)),
        train_dataset=Dataset.from_list([{"text": "the model answers a question " * 9}] * 40),
        processing_class=tokenizer,
        peft_config=LORA,
        callbacks=[PreflightCallback("a10", steps=4, say=said.append)],
    )
    stepped: list[int] = []
    trainer.add_callback(seen(lambda state: stepped.append(len(said))))
    trainer.train()

    assert stepped[0] >= 2 and " on a10" in said[0]  # the check came before the first step
    assert any(" useful tokens/s, a peak is measured on GPUs only" in line for line in said)
    (observed,) = read_submission(tmp_path / "autotune-measured.json")
    assert (observed.device, observed.model, observed.trainer) == ("cpu", None, "trl")
    assert observed.config.seq_len == LENGTH and observed.config.checkpointing == "full"
    assert observed.tokens_per_row == LENGTH and observed.accumulation == 2
    shown = autotune(
        "import", str(tmp_path / "autotune-measured.json"), "--evidence", str(tmp_path / "e")
    )
    assert shown.startswith("cpu  a model of shape ")


def test_the_rollouts_of_grpo_are_checked_before_step_1(tmp_path: Path) -> None:
    said: list[str] = []
    tokenizer = byte_level()
    tokenizer.pad_token = tokenizer.eos_token
    rollouts = {"num_generations": 4, "max_completion_length": 8, "max_steps": 2, "beta": 0.1}
    rollouts |= {"activation_checkpointing": False}
    GRPOTrainer(
        model=tiny(vocab_size=len(tokenizer) + 8),
        reward_funcs=lambda completion_ids, **_: [float(len(ids)) for ids in completion_ids],
        args=GRPOConfig(**arguments(tmp_path, **rollouts)),
        train_dataset=Dataset.from_list([{"prompt": "a question"}] * 8),
        processing_class=tokenizer,
        peft_config=LORA,
        callbacks=[PreflightCallback("a10", say=said.append)],
    ).train()
    assert said[0].startswith("autotune: fits: needs ") and " on a10" in said[0]
    run = read_file(tmp_path / "autotune-run.yaml", "grpo")
    assert run.rollouts is not None
    assert (run.rollouts.num_generations, run.rollouts.completion_tokens) == (4, 8)
    assert run.rollouts.has_reference and run.rollouts.sequences == 4


def seen(act: Any) -> Any:
    """A callback that acts at the end of each step."""
    from transformers import TrainerCallback

    class Seen(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            act(state)

    return Seen()


def test_a_run_that_cannot_be_checked_still_trains(tmp_path: Path) -> None:
    said: list[str] = []
    trainer = Trainer(
        model=tiny(),
        args=TrainingArguments(**arguments(tmp_path, max_steps=3)),
        train_dataset=rows(),
        callbacks=[PreflightCallback("rtx-4091", steps=20, say=said.append)],
    )
    assert trainer.train().global_step == 3
    assert "no check: " in said[0] and "did you mean 'rtx-4090'" in said[0]
    assert "too few steps to be measured" in said[-1]
    assert not (tmp_path / "autotune-measured.json").exists()


def test_the_time_of_saves_and_evaluations_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the steps 3 to 6 takes a second, and each pause 100 s."""
    said: list[str] = []
    callback = PreflightCallback("a10", steps=6, say=said.append)
    now = [0.0]
    monkeypatch.setattr(trainer_callback, "perf_counter", lambda: now[0])

    def pass_time(state: Any) -> None:
        now[0] += 100.0 if state.global_step in (4, 5) else 0.0

    class Clock(type(seen(pass_time))):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            now[0] += 1.0

    trainer = Trainer(
        model=tiny(),
        args=TrainingArguments(**arguments(tmp_path, save_strategy="steps", save_steps=1)),
        train_dataset=rows(),
        callbacks=[callback, Clock()],
    )
    trainer.train()
    assert trainer.state.global_step == 6
    (row,) = json.loads((tmp_path / "autotune-measured.json").read_text())["rows"]
    assert row["step_time_s"] == pytest.approx(1.0)


class Base:
    """Stands for Axolotl's BasePlugin, which Axolotl's own package has."""


@pytest.fixture
def axolotl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The plug-in, with a stand-in for Axolotl."""
    for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["axolotl.integrations.base"], "BasePlugin", Base, raising=False)
    monkeypatch.delitem(sys.modules, "autotune.api.axolotl_plugin", raising=False)
    from autotune.api import axolotl_plugin

    yield axolotl_plugin
    monkeypatch.delitem(sys.modules, "autotune.api.axolotl_plugin", raising=False)


def test_axolotls_plug_in_checks_the_keys_of_its_own_file(tmp_path: Path, axolotl: Any) -> None:
    said: list[str] = []
    plugin = axolotl.PreflightPlugin()
    file = {"base_model": "somebody/her-model", "adapter": "lora", "lora_r": 8, "sequence_len": 64}
    file |= {"micro_batch_size": 2, "gradient_accumulation_steps": 2, "lora_target_linear": True}
    file |= {"plugins": ["autotune.api.axolotl_plugin.PreflightPlugin"], "bf16": True}
    plugin.register(file | {"autotune": {"gpu": "a10", "steps": 4, "say": said.append}})
    callbacks = plugin.add_callbacks_pre_trainer(SimpleNamespace(), None)
    Trainer(
        model=get_peft_model(tiny(), LORA),
        args=TrainingArguments(**arguments(tmp_path)),
        train_dataset=rows(),
        callbacks=callbacks,
    ).train()
    assert " on a10" in said[0]
    written = json.loads((tmp_path / "autotune-run.yaml").read_text())
    assert written == file
    (observed,) = read_submission(tmp_path / "autotune-measured.json")
    assert (observed.trainer, observed.model, observed.config.seq_len) == ("axolotl", "demo-3m", 64)


def test_a_model_is_known_by_its_sizes_whatever_its_name(tmp_path: Path) -> None:
    model = tiny()
    found = catalogued(model.config.to_dict())
    assert found is not None and found.name == "demo-3m"
    assert catalogued(model.config.to_dict() | {"hidden_size": 193}) is None
    values = run_values(
        TrainingArguments(output_dir=str(tmp_path), bf16=True, use_cpu=True), model, "x"
    )
    assert (values["model_name_or_path"], values["dtype"], values["use_peft"]) == (
        "x",
        "bfloat16",
        False,
    )
    assert values["transformers"] is True
    trls = SFTConfig(output_dir=str(tmp_path), use_cpu=True, activation_checkpointing=True)
    assert "transformers" not in run_values(trls, model, "x")


class GKDConfig(TrainingArguments):
    """Stands for the arguments of a trainer that autotune does not know."""


def test_the_objective_follows_from_the_arguments_and_the_model(tmp_path: Path) -> None:
    model = tiny()
    usual = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    new: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True}
    new |= {"activation_checkpointing": True}
    assert objective_of(usual, model) == "sft"
    assert objective_of(SFTConfig(**new), model) == "sft"
    assert objective_of(DPOConfig(**new), model) == "dpo"

    unknown = GKDConfig(output_dir=str(tmp_path), use_cpu=True)
    type(unknown).__module__ = "trl.trainer.gkd_config"
    with pytest.raises(UsageError, match="GKDConfig with a LlamaForCausalLM"):
        objective_of(unknown, model)
    with pytest.raises(UsageError, match="with a Linear"):
        objective_of(usual, torch.nn.Linear(2, 2))


def test_on_a_gpu_the_peak_is_what_torch_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The events of a Trainer on a GPU, by hand, with the answers of torch's allocator."""
    said: list[str] = []
    asked: list[str] = []
    clock = iter([10.0, 14.0])  # the end of the warm-up, and of two more steps
    monkeypatch.setattr(trainer_callback, "machine", lambda kind: (A2, "a2"))
    monkeypatch.setattr(trainer_callback, "perf_counter", lambda: next(clock))
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: asked.append(name))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 3 * 2**30)

    model = get_peft_model(tiny(), LORA)
    usual = vars(TrainingArguments(**arguments(tmp_path, gradient_accumulation_steps=1)))
    args = SimpleNamespace(**usual, device=SimpleNamespace(type="cuda"), world_size=1)
    state = SimpleNamespace(is_world_process_zero=True, global_step=0)
    control = SimpleNamespace(should_evaluate=False, should_save=False)
    callback = PreflightCallback("a2", steps=4, say=said.append)
    callback.on_train_begin(args, state, control, model=model)
    for step in (1, 2, 3, 4):
        callback.on_step_begin(args, state, control, model=model)
        model(input_ids=torch.ones(2, LENGTH, dtype=torch.long))
        state.global_step = step
        callback.on_step_end(args, state, control, model=model)

    assert asked == ["reset_peak_memory_stats", "synchronize", "synchronize"]
    measured = next(line for line in said if "measured in 2 steps" in line)
    assert ": 32 useful tokens/s, 3.00 GiB (estimated: " in measured, measured
    (observed,) = read_submission(tmp_path / "autotune-measured.json")
    assert (observed.peak_reserved_gib, observed.step_time_s) == (3.0, 2.0)
    assert observed.tokens_per_s == 32.0


def test_a_resumed_run_is_measured_from_its_first_own_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    clock = iter([50.0, 53.0])
    monkeypatch.setattr(trainer_callback, "perf_counter", lambda: next(clock))
    model = tiny()
    args = TrainingArguments(**arguments(tmp_path, gradient_accumulation_steps=1))
    state = SimpleNamespace(is_world_process_zero=True, global_step=500)
    control = SimpleNamespace(should_evaluate=False, should_save=False)
    callback = PreflightCallback("a10", steps=1, say=said.append)
    callback.on_train_begin(args, state, control, model=model)
    for step in (501, 502):
        callback.on_step_begin(args, state, control, model=model)
        model(input_ids=torch.ones(2, LENGTH, dtype=torch.long))
        state.global_step = step
        callback.on_step_end(args, state, control, model=model)
    (observed,) = read_submission(tmp_path / "autotune-measured.json")
    assert observed.step_time_s == 3.0 and "measured in 1 steps" in " ".join(said)


def test_a_model_of_the_catalogue_is_known_by_its_sizes() -> None:
    """A model of images has its sizes in `text_config`. A few models have no usual keys."""
    found = [(model, catalogued(model.config)) for model in list_models()]
    for model, known in found:
        assert known is None or known.params == pytest.approx(model.params, rel=1e-3), model.name
    assert sum(known is None for _, known in found) < 0.1 * len(found)
    for model, known in found:
        place = "text_config" if "text_config" in model.config else None
        changed = {**(model.config[place] if place else model.config), "num_hidden_layers": 5}
        other = {**model.config, place: changed} if place else changed
        assert known is None or catalogued(other) is None
