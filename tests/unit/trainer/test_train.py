"""The training of the exported script, in this process, of a
model that takes milliseconds a step.
"""

import json
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Gemma4Config, LlamaConfig, TrainerCallback

from autotune.core.train_config import TrainConfig
from autotune.export import script
from autotune.trainer import model_builder, rows, train
from autotune.trainer.clock import Clock
from autotune.trainer.lean_trainer import training_arguments
from autotune.trainer.reading import BadDataset
from autotune.trainer.settings import Options, RunSettings
from tests.helpers.factories import TINY
from tests.unit.export.test_script import demo

# PEFT asks with a name from before transformers 5.23
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

SHAPE = TINY | {"model_type": "llama", "num_hidden_layers": 2}
OPTIONS = Options(
    model="m",
    dataset=None,
    split=None,
    lengths=None,
    max_steps=2,
    held_out=0,
    held_out_tokens=0,
    output_dir="",
    saves=False,
    checkpoint=None,
    progress=None,
    report_to="none",
)


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """One thread: more would wait for each other at each of many small products."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    for number, handler in before.items():
        signal.signal(number, handler)


def settings(changes: dict[str, Any] | None = None, **knobs: Any) -> RunSettings:
    small = {"micro_batch_size": 2, "seq_len": 16, "precision": "fp32", "optimizer": "adamw_torch"}
    made = script.settings(demo(TrainConfig(**small | knobs)))
    return replace(made, **{"lengths": [16], "warmup_steps": 0} | (changes or {}))


def run(
    made: RunSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str], **options: Any
) -> dict[str, Any]:
    """What the script prints."""
    (tmp_path / "shape.json").write_text(json.dumps(SHAPE))
    train.main(made, replace(OPTIONS, **options), tmp_path / "shape.json")
    printed: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return printed


@pytest.mark.parametrize(
    "knobs", [{}, {"method": "full"}, {"packing": True}, {"loss": "chunked"}], ids=str
)
def test_a_run_learns_and_repeats_itself(
    knobs: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = settings({"examples": 64, "learning_rate": 0.01}, **knobs)
    first = run(made, tmp_path, capsys, max_steps=2, held_out=4, held_out_tokens=16)
    assert (
        first["steps"] == 2 and first["seconds_per_step"] > 0 and first["peak_reserved_gib"] is None
    )
    before, after = first["held_out_loss"]
    assert before == pytest.approx(4.85, abs=0.2) and after != before  # ln 128
    torch.manual_seed(1)
    again = run(made, tmp_path, capsys, max_steps=2, held_out=4, held_out_tokens=16)
    assert again["held_out_loss"] == first["held_out_loss"]


def test_without_held_out_examples_there_is_no_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two rows fill one micro batch, and a blank row completes another."""
    alone = run(
        settings({"examples": 2, "accumulation": 1, "epochs": 3}), tmp_path, capsys, max_steps=-1
    )
    assert (alone["steps"], alone["held_out_loss"]) == (3, [])
    assert run(settings({"examples": 1, "epochs": 3}), tmp_path, capsys, max_steps=-1)["steps"] == 3
    held = run(settings({"examples": 2}), tmp_path, capsys, held_out=1, held_out_tokens=16)
    assert held["steps"] == 2


def test_without_an_example_to_train_on_nothing_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The only example has one token, so that it predicts nothing."""
    monkeypatch.setattr(train, "random_examples", lambda *_: [torch.tensor([5])])
    with pytest.raises(SystemExit, match="no example is left to train on: give more examples"):
        run(settings(), tmp_path, capsys)
    for number in (0, -3):
        with pytest.raises(SystemExit, match="no example is left to train on"):
            train.check_number(number)
    train.check_number(1)


def test_a_share_of_the_dataset_is_evaluated_during_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 13 examples 3 are held out, more than a micro batch; 10 make five micro batches, 5 steps
    in two passes.
    """
    examples = [torch.arange(16) + index for index in range(13)]
    monkeypatch.setattr(train, "read_examples", lambda *_: list(examples))
    facts = {"dataset": ["d", "a digest"], "settings": {"micro_batch_size": 2}}
    monkeypatch.setattr(train, "describe", lambda *_: facts)
    seen: list[list[int]] = []
    collate = rows.collate

    def watched(batch: list[rows.Row], *args: Any, **kwargs: Any) -> Any:
        seen.append([int(row[0][0]) for row in batch])
        return collate(batch, *args, **kwargs)

    monkeypatch.setattr(rows, "collate", watched)
    build, shape = model_builder.build, model_builder.config_of(SHAPE)
    monkeypatch.setattr(model_builder, "load", lambda _, asked, device: build(shape, asked, device))
    made = settings(
        {"eval_share": 0.2, "eval_steps": 2, "save_steps": 3, "accumulation": 2, "epochs": 2}
    )
    printed = run(
        made,
        tmp_path,
        capsys,
        dataset="d",
        max_steps=-1,
        output_dir=str(tmp_path / "o"),
        saves=True,
    )
    assert (
        printed["steps"] == 6
        and len(printed["held_out_loss"]) == 3
        and len(set(printed["held_out_loss"])) == 3
    )
    evaluated, trained = rows.hold_out(examples, 0.2, 999)[::-1]
    held_out = {int(example[0]) for example in evaluated}
    assert len(held_out) == 3 and len(trained) == 10
    batches = [set(batch) for batch in seen]
    # two rows, and the one that is left
    assert sum(batch <= held_out for batch in batches) == 3 * 2
    assert all(batch <= held_out or not batch & held_out for batch in batches)
    left = sorted(path.name for path in (tmp_path / "o").glob("checkpoint-*"))
    assert left == ["checkpoint-3", "checkpoint-6"]
    assert train.find_difference(str(tmp_path / "o" / "checkpoint-3"), facts) is None


@pytest.mark.parametrize(
    ("options", "share"),
    [({"dataset": "d"}, 0.3), ({}, 0.0), ({"dataset": "d", "held_out": 2}, 0.0)],
    ids=str,
)
def test_what_is_held_out_of_a_dataset(options: dict[str, Any], share: float) -> None:
    assert train.held_out_share(settings({"eval_share": 0.3}), replace(OPTIONS, **options)) == share


class _Steep(nn.Module):
    """A model with a gradient of a million, that remembers how many rows each micro batch had."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.num_rows: list[int] = []
        self.num_labels: list[int] = []

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.num_rows.append(len(input_ids))
        self.num_labels += (labels != rows.IGNORED).sum(1).tolist()
        return {"loss": 1e6 * self.weight.sum()}


class _Norms(TrainerCallback):
    """In the place of the clock: the norm of the gradients that
    each step of the optimizer takes.
    """

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, *, model: Any, **_: Any
    ) -> None:
        self.norms.append(float(model.weight.grad.norm()))


def test_gradients_are_clipped_and_an_epoch_has_every_row_once(tmp_path: Path) -> None:
    model, norms = _Steep(), _Norms()
    options = replace(OPTIONS, dataset="rows.jsonl", max_steps=-1, output_dir=str(tmp_path))
    lengths = (5, 9, 16, 3, 7, 8, 11)
    examples = train.fill_batches(settings(), [[torch.arange(length)] for length in lengths])
    trainer = train.make_trainer(settings(), options, model, None, norms, examples, [])  # type: ignore[arg-type]
    trainer.train()
    assert model.num_rows == [2, 2, 2, 2]
    assert sorted(model.num_labels) == sorted([0, *(length - 1 for length in lengths)])
    assert norms.norms == pytest.approx([1.0, 1.0], rel=1e-3)


@pytest.mark.parametrize(
    "knobs", [{}, {"packing": True}, {"loss": "chunked"}, {"padding": "masked"}], ids=str
)
def test_a_row_that_fills_a_micro_batch_changes_no_gradient(
    knobs: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three rows in two micro batches of two, or in one of three."""
    few = {"examples": 4, "epochs": 1, "lengths": [16, 9, 5], "learning_rate": 0.1}
    filled, whole = (
        run(
            replace(settings(few | {"accumulation": steps}, method="full", **knobs), **size),
            tmp_path,
            capsys,
            max_steps=-1,
            held_out=1,
            held_out_tokens=16,
        )
        for steps, size in ((2, {"micro_batch_size": 2}), (1, {"micro_batch_size": 3}))
    )
    assert filled["steps"] == whole["steps"] == 1
    assert filled["held_out_loss"] == pytest.approx(whole["held_out_loss"], rel=1e-5)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_run_that_is_stopped_saves_a_checkpoint_and_says_so(
    number: int,
    code: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def begin(clock: Clock, *_: Any, **__: Any) -> None:
        clock.mark()
        signal.raise_signal(number)

    monkeypatch.setattr(Clock, "on_step_begin", begin)
    output = tmp_path / "o"
    with pytest.raises(SystemExit) as ended:
        run(
            settings({"examples": 64}),
            tmp_path,
            capsys,
            max_steps=9,
            output_dir=str(output),
            saves=True,
        )
    assert ended.value.code == code
    # no model that looks as if it were trained
    assert [path.name for path in output.iterdir()] == ["checkpoint-1"]


def test_what_was_trained_is_saved_where_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for saves in (True, False):
        run(settings(), tmp_path, capsys, output_dir=str(tmp_path / str(saves)), saves=saves)
    assert (tmp_path / "True" / "adapter_model.safetensors").exists()
    assert not list(tmp_path.glob("False/*")) and not list(tmp_path.glob("True/checkpoint-*"))


WORDS = LlamaConfig(vocab_size=3)


def lengths_of(made: RunSettings, **options: Any) -> list[int]:
    return [len(one) for one in train.random_examples(made, replace(OPTIONS, **options), WORDS)]


def test_random_examples_have_the_measured_lengths_in_turn(tmp_path: Path) -> None:
    made = settings({"lengths": [3, 5], "examples": 7})
    assert lengths_of(made) == [3, 5, 3, 5, 3, 5, 3]
    (tmp_path / "lengths").write_text("4\n99\n")
    assert lengths_of(made, lengths=str(tmp_path / "lengths")) == [4, 16, 4, 16, 4, 16, 4]
    assert (
        lengths_of(replace(made, lengths=list(range(1, 101)), examples=200)) == [*range(1, 101)] * 2
    )


def test_random_examples_use_the_whole_vocabulary_and_repeat_after_64() -> None:
    examples = train.random_examples(
        settings({"lengths": [16, 8], "examples": 150}), OPTIONS, WORDS
    )
    assert len(examples) == 150 and set(torch.cat(examples[:64]).tolist()) == {0, 1, 2}
    assert len({example.data_ptr() for example in examples}) == 64
    assert examples[64] is examples[0]


@pytest.mark.parametrize(
    ("options", "strategy"),
    [
        ({"saves": True, "dataset": "d", "max_steps": -1}, "steps"),
        ({"saves": True, "dataset": "d", "max_steps": 1}, "no"),
        ({"saves": True, "max_steps": -1}, "no"),
        ({"dataset": "d", "max_steps": -1}, "no"),
    ],
    ids=str,
)
def test_what_the_trainer_is_told(
    options: dict[str, Any], strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = settings({"save_steps": 7, "warmup_steps": 3, "epochs": 4, "accumulation": 5})
    base = model_builder.build(
        model_builder.config_of(SHAPE), made.model_settings, torch.device("cpu")
    )
    model = train.add_adapters(base, made, torch.device("cpu"))
    rows = [[torch.arange(16)]] * 5
    asked = replace(OPTIONS, output_dir=str(tmp_path / "o"), **options)
    trainer = train.make_trainer(made, asked, model, None, Clock(False), rows, rows[:1])
    args = trainer.args
    assert (args.save_strategy, args.save_steps, args.save_total_limit) == (strategy, 7, 2)
    assert (args.num_train_epochs, args.max_steps, args.warmup_steps) == (
        4,
        options["max_steps"],
        3,
    )
    assert (args.lr_scheduler_type, args.per_device_eval_batch_size) == ("cosine", 1)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (2, 5)
    assert args.output_dir == str(tmp_path / "o") and args.use_cpu
    assert len(trainer.get_train_dataloader()) == 2 and len(trainer.eval_dataset) == 1
    assert trainer.floating_point_ops({}) == 0
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["input_ids"].shape == (2, 16) and "position_ids" not in batch

    # Without a directory, no rank makes one.
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    train.make_trainer(
        made, replace(asked, output_dir=""), model, None, Clock(False), rows, rows[:1]
    )
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("precision", ["bf16_pure", "bf16_mixed"])
def test_adapters_of_a_checkpoint_keep_their_type(precision: str, tmp_path: Path) -> None:
    made = settings(precision=precision)
    base = model_builder.build(
        model_builder.config_of(SHAPE), made.model_settings, torch.device("cpu")
    )
    model: Any = train.add_adapters(base, made, torch.device("cpu"))
    before = {weight.dtype for weight in model.parameters() if weight.requires_grad}
    model.save_pretrained(tmp_path)
    model.load_adapter(str(tmp_path), "default", is_trainable=True)
    assert {weight.dtype for weight in model.parameters() if weight.requires_grad} == before


def test_padding_is_not_counted_in_the_speed() -> None:
    """Rows of 5 and 7 tokens on the mean, 2 in a micro batch, 3 micro batches a step: 36 tokens in
    2 seconds.
    """

    class Two(Clock):
        def measurements(self) -> dict[str, Any]:
            return {"seconds_per_step": 2.0}

    made = settings({"accumulation": 3})
    trained = [torch.arange(5), torch.tensor([-2, -1, -3, 4, 5, 6, 7])]
    assert train.summary(made, Two(False), 9, trained, 2) == {
        "seconds_per_step": 2.0,
        "steps": 9,
        "tokens_per_second": 18.0,
        "trained_share": 9 / 12,
    }
    assert train.summary(made, Clock(False), 9, trained, 2)["tokens_per_second"] is None


def test_no_code_of_a_tokenizer_is_run_and_nobody_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'CANARY')!r}, 'w')\n")
    config = {"tokenizer_class": "Strange", "auto_map": {"AutoTokenizer": ["evil.T", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "strange"}))
    with pytest.raises(ValueError, match="trust_remote_code"):
        train.read_examples(settings(), replace(OPTIONS, model=str(tmp_path), dataset="nowhere"))
    assert not (tmp_path / "CANARY").exists()


def test_what_is_read_of_a_dataset(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked: list[Any] = []

    def tokenise(path: Path, tokenizer: str, **how: Any) -> Path:
        how.pop("say")("2 examples")
        asked.append((path, tokenizer, how))
        if path.name == "bad":
            raise BadDataset("bad:1: needs messages")
        return tmp_path

    monkeypatch.setattr(train, "tokenise", tokenise)
    monkeypatch.setattr(
        train,
        "AutoTokenizer",
        SimpleNamespace(from_pretrained=lambda name, trust_remote_code: (name, trust_remote_code)),
    )
    monkeypatch.setattr(rows, "StoredExamples", lambda folder: ("stored", folder))
    made = settings({"loss_on": "assistant"})
    found: Any = train.read_examples(made, replace(OPTIONS, dataset="data", split="test"))
    assert found == ("stored", tmp_path)
    assert asked == [
        (Path("data"), ("m", False), {"split": "test", "loss_on": "assistant", "encoder": None})
    ]
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "2 examples\n")
    with pytest.raises(SystemExit, match=r"^train\.py: error: bad:1: needs messages$"):
        train.read_examples(made, replace(OPTIONS, dataset="bad"))


@pytest.mark.parametrize("eval_share", [0.0, 0.25])
@pytest.mark.parametrize(
    ("group_by_length", "dealt"), [(True, False), (False, False), (False, True)]
)
def test_everything_that_a_trainer_is_told(
    monkeypatch: pytest.MonkeyPatch, eval_share: float, group_by_length: bool, dealt: bool
) -> None:
    monkeypatch.setattr(train, "TrainingArguments", lambda **arguments: arguments)
    monkeypatch.setattr(train, "LeanTrainer", lambda *given, **named: (given, named))
    changes: dict[str, Any] = {
        "save_steps": 7,
        "warmup_steps": 3,
        "epochs": 4,
        "eval_steps": 9,
        "run_name": "mine",
        "save_total_limit": 2,
    }
    changes |= {"group_by_length": group_by_length, "dealt": dealt}
    made = settings(changes | {"eval_share": eval_share, "padded_lengths": [8, 16]})
    options = replace(
        OPTIONS, dataset="d", max_steps=-1, output_dir="o", saves=True, report_to="trackio"
    )
    train_rows: Any = [[torch.arange(5)], [torch.arange(7), torch.arange(2)]]
    clock: Any = "clock"
    loss: Any = "loss"
    model: Any = "model"
    found: Any = train.make_trainer(made, options, model, loss, clock, train_rows, train_rows[:1])
    (its_model, args, collate, *data), named = found
    assert its_model == "model" and data == [train_rows, train_rows[:1]]
    assert collate.func is rows.collate and collate.keywords == {
        "padded_lengths": [8, 16],
        "packing": False,
        "masked": False,
        "varlen": False,
    }
    lengths = [5, 9] if group_by_length or dealt else None
    assert named == {
        "compute_loss_func": "loss",
        "callbacks": ["clock"],
        "row_lengths": lengths,
        "dealt": dealt,
        "optimizer_in_backward": False,
        "cuda_graphs": False,
        "joined": None,
    }
    plain = training_arguments(made, accumulation=made.accumulation, on_cpu=True) | {
        "report_to": "trackio"
    }
    assert args == plain | {
        "output_dir": "o",
        "max_steps": -1,
        "num_train_epochs": 4,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "save_strategy": "steps",
        "save_steps": 7,
        "save_total_limit": 2,
        "eval_strategy": "steps" if eval_share else "no",
        "eval_steps": 9,
        "per_device_eval_batch_size": 2 if eval_share else 1,
        "prediction_loss_only": True,
        "run_name": "mine",
    }


def test_rows_hold_one_example_unless_they_are_packed() -> None:
    examples = [torch.arange(length) for length in (9, 3, 6, 16)]
    alone = train.make_rows(settings(), examples)
    packed = train.make_rows(settings(packing=True), examples)
    assert [[len(one) for one in row] for row in alone] == [[9], [3], [6], [16]]
    assert [[len(one) for one in row] for row in packed] == [[16], [9, 6], [3]]


def test_random_examples_of_a_wrapper_use_the_words_of_its_text_model() -> None:
    wrapper = Gemma4Config(text_config={"vocab_size": 3})
    assert not hasattr(wrapper, "vocab_size")
    (example,) = train.random_examples(settings({"lengths": [16], "examples": 1}), OPTIONS, wrapper)
    assert set(example.tolist()) <= {0, 1, 2}


def test_many_lengths_are_no_reason_for_more_examples() -> None:
    examples = train.random_examples(
        settings({"lengths": [*range(1, 101)], "examples": 250}), OPTIONS, WORDS
    )
    assert len(examples) == 250 and len({id(example) for example in examples}) == 100


@pytest.mark.parametrize(
    ("method", "padding"), [("lora", "max_length"), ("full", "max_length"), ("lora", "masked")]
)
def test_a_compiled_run_compiles_for_training_alone(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    method: str,
    padding: str,
) -> None:
    """All shapes that were measured are compiled; the first layer is like the others; the loss is
    computed eagerly.
    """
    done: list[Any] = []
    dynamo = SimpleNamespace(recompile_limit=8)
    monkeypatch.setattr(torch, "_dynamo", SimpleNamespace(config=dynamo), raising=False)
    base = SimpleNamespace(config=LlamaConfig(vocab_size=9))
    trainer = SimpleNamespace(
        evaluate=lambda: done.append("evaluate") or {"eval_loss": float(len(done))},
        train=lambda resume_from_checkpoint: (
            done.append(resume_from_checkpoint) or SimpleNamespace(global_step=5)
        ),
        state=SimpleNamespace(log_history=[{"loss": 9.0}, {"eval_loss": 3.5}]),
        save_model=lambda folder: done.append(("save", folder)),
        is_world_process_zero=lambda: True,
        add_callback=lambda callback: done.append(type(callback).__name__),
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("empty"))
    made_model: Any = nn.Module()
    for name, value in {
        "build": lambda config, settings, device: done.append(device.type) or base,
        "config_of": lambda shape: shape,
        "set_checkpointing": lambda base, settings: done.append("checkpointing"),
        "decoder_layers": lambda model: ["layer"],
        "require_input_gradients": lambda base: done.append("require"),
    }.items():
        monkeypatch.setattr(model_builder, name, value)
    for name, value in {
        "set_seed": lambda seed: done.append(("seed", seed)),
        "choose_attention": lambda cudnn: done.append(("cudnn", cudnn)),
        "load_attention": lambda model, device: done.append(("load", model is base, device.type)),
        "chunked_loss": lambda base, *, in_head: done.append("chunked") or "loss",
        "add_adapters": lambda *_: made_model,
        "make_trainer": lambda settings, options, model, loss, *_: done.append(loss) or trainer,
        "compile_layers": lambda layers, activation_budget: done.append(("compile", *layers)),
        "run_layers_eagerly": lambda layers: done.append(("eager", *layers)),
        "restore_experts": lambda model: done.append(("restore", model is base)),
        "find_difference": lambda checkpoint, facts: done.append(("compare", checkpoint)),
    }.items():
        monkeypatch.setattr(train, name, value)
    (tmp_path / "shape.json").write_text(json.dumps(SHAPE))
    made = replace(
        settings({"examples": 64}, compile="per_layer", loss="chunked", method=method),
        padding=padding,
    )
    options = replace(
        OPTIONS, held_out=4, held_out_tokens=16, checkpoint="c", saves=True, output_dir="o"
    )
    assert train.main(made, options, tmp_path / "shape.json") is trainer
    assert done == [
        *[
            ("seed", 0),
            ("compare", "c"),
            "cpu",
            ("cudnn", True),
            *[("load", True, "cpu")] * (padding == "masked"),
        ],
        *["checkpointing", "chunked", "loss", "Origin", "evaluate"],
        *["require"] * (method == "lora"),
        *[("compile", "layer"), "empty", "c", ("eager", "layer"), ("restore", True)],
        *[("save", "o"), "evaluate"],
    ]
    assert dynamo.recompile_limit == 64
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    before = done.index("evaluate") + 1
    assert printed["steps"] == 5 and printed["held_out_loss"] == [
        float(before),
        3.5,
        float(len(done)),
    ]


def test_packed_rows_say_where_their_examples_end_where_attention_asks_for_it() -> None:
    examples = [[torch.arange(1, 4), torch.arange(5, 7)], [torch.arange(8)]]
    made = settings({"packing": True, "padded_lengths": [8]})
    by_lengths = replace(made, model_settings=replace(made.model_settings, attention="varlen"))
    model: Any = None
    plain, told = (train.make_collator(each, model)(examples) for each in (made, by_lengths))
    assert told.keys() - plain.keys() == {"segments"}
    assert told["segments"].ends.tolist()[:5] == [0, 3, 5, 8, 16] and told[
        "segments"
    ].counts.tolist() == [4, 8]
    assert all(plain[name].equal(told[name]) for name in plain)
