"""Finalists, and rates, train on the user's examples: which of them learns less shows."""

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.catalog import ModelSpec, resolve_model
from autotune.core.errors import AutotuneError, Cancelled, UsageError
from autotune.core.train_config import TrainConfig
from autotune.export import script
from autotune.export.formats import export_all
from autotune.export.run.learn import Learner, learn
from autotune.export.run.process import write_files
from autotune.export.run.quality import compare, measurement_obstacle
from autotune.problem.length_distribution import Lengths
from autotune.problem.workload import Workload
from autotune.report import describe
from autotune.report.html import draw, render
from autotune.report.json_forms import form_of
from autotune.study.summary import Candidate, Learned, Quality, Recipe
from tests.helpers.factories import summary
from tests.helpers.hostile import arguments_of_autotune

GOOD = TrainConfig(
    micro_batch_size=4,
    seq_len=32,
    lora_rank=16,
    precision="fp32",
    optimizer="adamw_torch",
    checkpointing="none",
)
# only the first four tokens of each example, which the model already predicts
CRIPPLED = replace(GOOD, seq_len=4)
PACKED = replace(GOOD, seq_len=64, packing=True, micro_batch_size=2)


def learned(
    config: TrainConfig = GOOD, hours: float = 1.0, after: float | None = 2.0, **changes: Any
) -> Learned:
    return Learned(
        config=config,
        full_run_hours=hours,
        full_run_usd=None,
        seconds=1.0,
        loss_before=3.0,
        loss_after=after,
        **changes,
    )


def quality(*results: Learned) -> Quality:
    return Quality(steps=20, trained_on=640, held_out=64, tokens=32, learned=results)


# Reports


def test_the_lowest_loss_comes_first_and_failures_last() -> None:
    low, high, failed = (
        learned(after=1.0),
        learned(CRIPPLED, after=2.0),
        learned(after=None, reason="out of memory"),
    )
    assert quality(failed, high, low).ranked() == (low, high, failed)
    assert describe.learned_text(failed) == "failed: out of memory"


def test_the_front_has_finalists_that_none_beats_in_time_and_loss() -> None:
    fast, good = learned(hours=1.0, after=2.0), learned(hours=2.0, after=1.5)
    beaten, failed = learned(hours=3.0, after=1.7), learned(hours=0.1, after=None, reason="no")
    assert quality(beaten, good, failed, fast).pareto_front() == (fast, good)


def test_a_finalist_that_learns_more_than_the_winner_is_named() -> None:
    check = quality(learned(CRIPPLED, after=2.0), learned(GOOD, after=1.5))
    assert check.notes(GOOD) == []
    (message,) = check.notes(CRIPPLED)
    assert GOOD.label() in message and "1.5000 against the winner's 2.0000" in message
    (message,) = check.notes(replace(GOOD, lora_rank=64))
    assert message.startswith("the winner's loss is unknown")
    (message,) = quality(learned(GOOD, after=None, reason="out of memory")).notes(GOOD)
    assert message.endswith("its training failed: out of memory")


def test_the_report_shows_the_losses() -> None:
    plain = summary()
    assert "What the finalists learned" not in render(plain, "s")
    assert plain.recipe is not None
    winner = learned(plain.recipe.winner.config, hours=1.0, after=2.25)
    page = render(
        replace(plain, quality=quality(winner, learned(CRIPPLED, hours=0.5, after=2.75))), "s"
    )
    assert "What the finalists learned" in page and "2.2500" in page and "2.7500" in page
    assert "Pareto front" in page


# Preconditions


def test_reasons_why_the_check_cannot_run(tmp_path: Path) -> None:
    bare = resolve_model("demo-3m")
    model = replace(bare, weights=str(tmp_path), tokenizer=str(tmp_path))
    many = Workload(lengths=Lengths.of([8] * 100, "counted"), global_batch=8)

    def why(
        model: ModelSpec = model, workload: Workload = many, dataset: str | None = "rows.jsonl"
    ) -> str:
        return measurement_obstacle(model, workload, dataset) or ""

    assert why() == ""
    assert "real weights" in why(model=bare)
    assert "--dataset" in why(dataset=None)
    assert "tokenizer" in why(model=replace(model, tokenizer=None))
    assert "too few" in why(workload=replace(many, global_batch=128))


# Real training


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pretrained model: each sentence counts up from any number, modulo sixteen."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("weights")
    words = {"<s>": 0, "</s>": 1, **{f"w{number}": number + 2 for number in range(16)}}
    plain = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token="<s>", eos_token="</s>", unk_token="<s>"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=18, **shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        rows = (torch.randint(0, 16, (32, 1)) + torch.arange(16)) % 16 + 2
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences that the model does not know: four words count up, then they count down."""
    rows = []
    for number in range(400):
        start = number % 16
        up = [(start + step) % 16 for step in range(4)]
        down = [(start + 3 - step) % 16 for step in range(1, 25)]
        rows.append({"text": " ".join(f"w{word}" for word in up + down)})
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def finalists(weights: Path) -> tuple[Recipe, list[Candidate]]:
    base = summary().recipe
    assert base is not None
    model = replace(resolve_model(str(weights)), weights=str(weights))
    workload = Workload(examples=400, lengths=Lengths.of([29] * 400, "counted"), global_batch=8)
    candidates = [replace(base.winner, config=config) for config in (CRIPPLED, GOOD, PACKED)]
    return replace(
        base, model=model, workload=workload, winner=candidates[0], baseline=None
    ), candidates


@pytest.mark.probe
def test_a_crippled_configuration_ranks_last(weights: Path, dataset: Path, tmp_path: Path) -> None:
    recipe, candidates = finalists(weights)
    messages: list[str] = []
    (tmp_path / "logs").mkdir()
    check = compare(recipe, candidates, dataset, tmp_path, messages.append, lambda: False)
    assert (check.steps, check.trained_on, check.held_out, check.tokens) == (20, 160, 40, 64)
    before, after = (
        {finalist.config: loss for finalist in check.learned if (loss := getattr(finalist, name))}
        for name in ("loss_before", "loss_after")
    )
    # the loss on the same tokens
    assert list(before.values()) == pytest.approx([before[GOOD]] * 3, rel=1e-5)
    assert check.ranked()[-1].config == CRIPPLED
    assert after[GOOD] < 0.98 * before[GOOD] and after[PACKED] == pytest.approx(
        after[GOOD], rel=0.01
    )
    assert after[CRIPPLED] > 0.99 * before[CRIPPLED]
    assert len(messages) == 3 and check.notes(CRIPPLED)


@pytest.mark.probe
def test_a_failed_finalist_is_reported_and_the_others_continue(
    weights: Path, dataset: Path, tmp_path: Path
) -> None:
    """One fails before its first step, the other during it, where a progress bar may follow the
    error.
    """
    recipe, candidates = finalists(weights)
    broken = [
        replace(candidates[0], config=replace(GOOD, **change))
        for change in ({"attention": "flash_attention_2"}, {"attention": "flex_attention"})
    ]
    messages: list[str] = []
    (tmp_path / "logs").mkdir()
    # Two fail, and the user stops the check at the third.
    check = compare(
        replace(recipe, winner=broken[0]),
        [*broken[1:], candidates[1]],
        dataset,
        tmp_path,
        messages.append,
        lambda: len(messages) > 2,
    )
    assert [candidate.config for candidate in check.learned] == [
        candidate.config for candidate in broken
    ]
    at_start, in_step = (candidate.reason or "" for candidate in check.learned)
    assert "lash" in at_start and "Error" in at_start
    assert "Error" in in_step and "it/s" not in in_step
    assert (tmp_path / "logs" / f"quality-{broken[0].config.digest}.log").exists()
    assert not (tmp_path / ".quality").exists()  # the examples belong to the user


@pytest.mark.probe
def test_the_run_command_trains_finalists_at_the_end(
    weights: Path, dataset: Path, tmp_path: Path
) -> None:
    (tmp_path / "space.yaml").write_text(
        "version: 1\nknobs: {micro_batch_size: 4, seq_len: 32, precision: fp32}\n"
    )

    def called(*command: str) -> subprocess.CompletedProcess[str]:
        variables = os.environ | {"PYTHON": sys.executable, "OMP_WAIT_POLICY": "passive"}
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=variables
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done

    def autotune(*arguments: str) -> str:
        return called(sys.executable, "-m", "autotune", *arguments).stdout

    hostile = "coding:utf-7 '; $(touch CANARY) é"
    (tmp_path / hostile).mkdir()
    rows = shutil.copy(dataset, tmp_path / hostile)
    asked = (
        "--gpu",
        "cpu",
        "--model",
        str(weights),
        "--dataset",
        str(rows),
        "--space",
        "space.yaml",
    )
    asked += (
        "--study",
        hostile,
        "--out",
        hostile,
        "--quality",
        "--global-batch",
        "8",
        "--budget",
        "5m",
        "--json",
    )
    ran = called(sys.executable, "-m", "autotune", "run", *asked)
    printed, lines = json.loads(ran.stdout), ran.stderr.splitlines()
    (learned,) = printed["quality"]["learned"]
    assert TrainConfig(**learned["config"]) == TrainConfig(**printed["winner"]["config"])
    assert 0 < learned["loss_after"] < learned["loss_before"]
    stored = json.loads(autotune("status", "--json"))
    assert stored["quality"] == printed["quality"]
    trains = lines[
        next(place for place, line in enumerate(lines) if line.endswith("start the full run:")) + 1
    ]
    trained = json.loads(autotune(*arguments_of_autotune(trains, tmp_path), "--json"))
    assert trained["steps"] == trained["of"] == 50
    assert not (tmp_path / "CANARY").exists()
    learnt = json.loads(output := autotune("learn", "--share", "3", "--json"))
    form_of("learn").validate_json(output)
    assert learnt["steps"] <= 3 * 50
    assert TrainConfig(**learnt["config"]) == TrainConfig(**printed["winner"]["config"])
    assert (
        json.loads(autotune("status", "--json"))["learning"]["learning_rate"]
        == learnt["learning_rate"]
    )
    exported = json.loads(
        (tmp_path / printed["out_dir"] / "export" / "train_config.json").read_text()
    )
    assert exported["learning_rate"] == learnt["learning_rate"]
    (tmp_path / printed["out_dir"] / "report.html").unlink()
    autotune("report")
    assert (
        f"{learned['loss_after']:.4f}"
        in (tmp_path / printed["out_dir"] / "report.html").read_text()
    )


# The learning rate


def to_learn(weights: Path, **changes: Any) -> Recipe:
    """A recipe whose full run has a thousand steps."""
    recipe, candidates = finalists(weights)
    winner = replace(candidates[1], cost=replace(candidates[1].cost, num_steps=1000), **changes)
    return replace(recipe, winner=winner)


@pytest.mark.probe
def test_the_learning_rate_is_found_by_real_trainings(
    weights: Path, dataset: Path, tmp_path: Path
) -> None:
    """The default is far too small for so few steps of so small a model, and the largest rates undo
    what it knows.
    """
    recipe, messages = to_learn(weights), list[str]()
    other = replace(recipe.winner, config=replace(GOOD, lora_rank=64))
    recipe = replace(recipe, cells=(recipe.winner, other))
    found = learn(recipe, dataset, tmp_path, messages.append, lambda: False, share=0.15, others=3)
    assert [compared.config for compared in found.others] == [other.config]
    assert len(found.others[0].losses) == 2 and "lora_rank 64 instead of 16: held-out" in "\n".join(
        describe.learning(found)
    )
    found = replace(found, others=())
    assert found.config == GOOD and found.held_out == 40 and found.steps <= 150
    losses = found.losses()
    assert found.learning_rate > GOOD.learning_rate in losses
    assert min(losses[found.learning_rate]) < min(losses[GOOD.learning_rate])
    curves = [
        attempt.curve
        for attempt in found.last_round
        if attempt.learning_rate == found.learning_rate
    ]
    assert all(curve[-1][1] < curve[0][1] for curve in curves)  # it learns
    assert len(messages) == 2 * len(found.attempts) + 1
    assert not (tmp_path / ".learning").exists() and (tmp_path / "logs" / "learning.log").exists()
    lines = describe.learning(found)
    assert lines[0].startswith(
        f"learning rate {found.learning_rate:.2g}, "
    ) and "(the default)" in "\n".join(lines)
    page = render(replace(summary(), learning=found), "s")
    assert "The learning rate" in page and f"{found.last_round[0].loss:.4f}" in page
    figure = draw(replace(summary(), learning=found))["rates"]
    assert figure is not None and figure["layout"]["xaxis"]["type"] == "log"
    taken = replace(recipe, learning=found)
    exported = export_all(taken, ["train", "trl"])
    assert json.loads(exported["train_config.json"])["learning_rate"] == found.learning_rate
    assert f"learning_rate: {found.learning_rate}" in exported["trl_sft.yaml"]


@pytest.mark.probe
@pytest.mark.parametrize("method", ["lora", "full"])
def test_trainings_do_not_depend_on_those_before(
    method: str, weights: Path, dataset: Path, tmp_path: Path
) -> None:
    """The same rate and seed give the same loss again, whatever was trained in between."""
    config = replace(GOOD, method=method, compile="none")
    write_files(
        tmp_path,
        {"examples.jsonl": dataset.read_text()} | script.export(to_learn(weights, config=config)),
    )
    arguments = [
        "--dataset",
        str(tmp_path / "examples.jsonl"),
        "--output-dir",
        "",
        "--held-out",
        "40",
        "32",
    ]
    with Learner([str(tmp_path), *arguments], tmp_path / "log", lambda: False) as learner:
        first, lost, again, other = (
            learner.train(rate, 6, seed, 200.0)
            for rate, seed in ((1e-3, 0), (1e3, 0), (1e-3, 0), (1e-3, 1))
        )
    assert first.loss is not None and first.loss == pytest.approx(again.loss, rel=1e-6)
    assert [loss for _, loss in first.curve] == pytest.approx(
        [loss for _, loss in again.curve], rel=1e-6
    )
    assert len({first.loss, lost.loss, other.loss}) == 3


# PEFT asks with a name from before transformers 5.23
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.probe
def test_layers_are_compiled_during_a_training_for_as_many_lengths_as_in_a_full_run(
    weights: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's compiler is off, because it takes long and changes no number."""
    import torch

    from autotune.probe import learner as module
    from autotune.trainer.command_line import parse_options
    from autotune.trainer.settings import RunSettings
    from autotune.trainer.train import RECOMPILE_LIMIT

    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    recipe = to_learn(weights, config=replace(GOOD, compile="per_layer", padding="bucket"))
    write_files(tmp_path, {"examples.jsonl": dataset.read_text()} | script.export(recipe))
    settings = RunSettings.read(tmp_path / "train_config.json")
    arguments = ["--dataset", str(tmp_path / "examples.jsonl"), "--output-dir", ""]
    arguments += ["--report-to", "none", "--held-out", "40", "32"]
    files = sorted(tmp_path.iterdir())

    learner = module.Learner(settings, parse_options(settings, arguments))
    asked = module.Training(learning_rate=1e-3, warmup_steps=1, steps=3, seed=0)
    with torch._dynamo.config.patch(recompile_limit=8, optimize_ddp=True):
        answer = learner.train(asked)
        assert torch._dynamo.config.recompile_limit == RECOMPILE_LIMIT
        assert not torch._dynamo.config.optimize_ddp  # the layers were compiled
    assert answer["loss"] > 0 and [step for step, _ in answer["curve"]] == [1, 2, 3]
    assert {layer._compiled_call_impl for layer in learner._layers} == {None}
    assert sorted(tmp_path.iterdir()) == files


def test_a_training_diverges_if_its_loss_is_no_number_or_half_above_the_first() -> None:
    from transformers import TrainerControl, TrainerState

    from autotune.probe.learner import _Curve

    for losses, diverges in (
        ((2.0, 3.0, 1.0), False),
        ((2.0, 1.0, 3.1), True),
        ((2.0, math.nan), True),
        ((math.inf,), True),
    ):
        curve, control = _Curve(), TrainerControl()
        curve.on_log(None, TrainerState(), control, {"eval_loss": 9.0})
        for step, loss in enumerate(losses):
            curve.on_log(None, TrainerState(global_step=step), control, {"loss": loss})
        assert curve.diverged is control.should_training_stop is diverges
        assert [step for step, _ in curve.points] == [*range(len(losses))]


@pytest.mark.probe
def test_a_training_that_ends_is_reported_and_one_is_stopped(
    weights: Path, dataset: Path, tmp_path: Path
) -> None:
    broken = to_learn(weights, config=replace(GOOD, attention="flash_attention_2"))
    with pytest.raises(AutotuneError, match=r"a training failed: .*FlashAttention2"):
        learn(broken, dataset, tmp_path, lambda _: None, lambda: False, share=0.15)
    with pytest.raises(Cancelled):
        learn(to_learn(weights), dataset, tmp_path, lambda _: None, lambda: True, share=0.15)
    assert not (tmp_path / ".learning").exists()


def test_what_cannot_be_learned(weights: Path, dataset: Path, tmp_path: Path) -> None:
    def refused(recipe: Recipe, **options: Any) -> str:
        with pytest.raises(UsageError) as caught:
            learn(recipe, dataset, tmp_path, lambda _: None, lambda: False, **options)
        return f"{caught.value}; {caught.value.remedy}"

    recipe = to_learn(weights)
    assert "1% of 1,000 steps are too few: the smallest search takes" in refused(recipe, share=0.01)
    assert "--share 0." in refused(recipe, share=0.01)
    short = replace(recipe.winner, cost=replace(recipe.winner.cost, num_steps=2))
    too_short = refused(replace(recipe, winner=short), share=10)
    assert "keep the usual rate" in too_short and "--share" not in too_short
    assert "it needs real weights" in refused(replace(recipe, model=resolve_model("demo-3m")))
    assert "on one GPU" in refused(to_learn(weights, config=replace(GOOD, num_gpus=2)))
    assert "with train.py" in refused(replace(recipe, trainer="trl"))
