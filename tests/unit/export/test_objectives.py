"""What an objective changes of a study before anything runs: the trainer, the space, the examples,
the exports.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.catalog import resolve_device
from autotune.core.errors import UsageError
from autotune.core.learning_rate import default_learning_rate
from autotune.core.objective import Objective
from autotune.core.probe_types import ModelShape
from autotune.core.train_config import TrainConfig
from autotune.export.formats import export_all, usual_formats
from autotune.problem.dataset import dataset_lengths, form_of, rows_of
from autotune.problem.setup import Setup, adapt_to_layers, set_up
from autotune.problem.study_spec import StudySpec
from autotune.problem.target import Target
from autotune.study.learning import Attempt, Learning
from tests.helpers.tokenizers import byte_level
from tests.unit.export.test_script import recipe

MEASURED = [objective for objective in Objective if not objective.generates]
OTHERS = [objective for objective in MEASURED if objective is not Objective.SFT]


def setup(objective: str, **options: Any) -> Setup:
    if objective in ("dpo", "kto", "reward"):
        pytest.importorskip("trl")
    return set_up(
        StudySpec(model="demo-3m", gpu="cpu", objective=objective, **options),
        Target(device=resolve_device("cpu")),
    )


@pytest.mark.parametrize(("bf16", "precision"), [(True, "bf16_mixed"), (False, "fp32")])
@pytest.mark.parametrize(
    ("objective", "trainer", "sizes", "loss"),
    [
        *(("dpo", "trl", 1, "chunked"), ("kto", "trl", 2, "chunked")),
        *(("reward", "trl", 1, "full"), ("classification", "transformers", 1, "full")),
    ],
)
def test_an_objective_has_its_trainer_and_what_that_can_do(
    monkeypatch: pytest.MonkeyPatch,
    objective: str,
    trainer: str,
    sizes: int,
    loss: str,
    bf16: bool,
    precision: str,
) -> None:
    monkeypatch.setattr("autotune.catalog.devices.multiplies_bf16", lambda: bf16)
    task = setup(objective, space="lora").task
    assert task.space.choices("precision") == (precision,)
    assert task.trainer == trainer and task.workload.objective == objective
    assert min(task.space.choices("micro_batch_size")) == sizes and task.space.choices("loss") == (
        loss,
    )
    assert True not in task.space.choices("packing")
    if objective in ("dpo", "kto"):
        assert set(task.space.choices("checkpointing")) <= {"none", "full"}
    request = task.request(task.baselines[0], device="cpu", memory_gib=4.0, headroom=0.05, seed=0)
    assert (request.objective, request.trainer) == (objective, trainer)
    sft = setup("sft", space="lora").task
    assert task.model_key != sft.model_key


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(UsageError, match="dpo is trained by trl"):
        StudySpec(model="demo-3m", objective="dpo", trainer="transformers")
    with pytest.raises(UsageError, match="objective ppo is not offered: it generates answers"):
        StudySpec(model="demo-3m", objective="ppo")
    with pytest.raises(UsageError, match="grpo trains on generated answers"):
        setup("grpo")
    with pytest.raises(UsageError, match="objective cannot be 'sfft'"):
        StudySpec(model="demo-3m", objective="sfft")
    with pytest.raises(UsageError, match="loss_on is for sft"):
        StudySpec(model="demo-3m", objective="classification", loss_on="all")
    with pytest.raises(UsageError, match="classification is untested on several GPUs"):
        setup("classification", gpus=2)


def saved(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def test_a_pair_is_as_long_as_its_longer_answer(tmp_path: Path) -> None:
    """A byte is a token here, and the end of an answer one more."""
    tokenizer = byte_level()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    pairs = saved(
        tmp_path / "pairs.jsonl",
        {"prompt": "abc", "chosen": "de", "rejected": "defgh"},
        {"prompt": "a", "chosen": "xyz", "rejected": "b"},
    )

    def lengths(objective: Objective) -> list[int]:
        found = dataset_lengths(pairs, str(tmp_path / "tokenizer"), objective=objective)
        return sorted(length for length, number in found.counts for _ in range(number))

    longest = [len(tokenizer(text)["input_ids"]) + 1 for text in ("axyz", "abcdefgh")]
    assert lengths(Objective.DPO) == lengths(Objective.REWARD) == longest
    assert len(lengths(Objective.KTO)) == 4  # TRL takes pairs apart
    assert form_of(pairs, None, Objective.DPO) == "unknown"
    estimated = dataset_lengths(pairs, None, objective=Objective.DPO)
    assert estimated.number == 2 and 0 < estimated.trained_share < 1


@pytest.mark.parametrize(
    ("objective", "row"),
    [
        (Objective.DPO, {"prompt": "a", "completion": "b"}),
        (Objective.KTO, {"prompt": "a", "completion": "b"}),
        (Objective.REWARD, {"text": "a"}),
        (Objective.CLASSIFICATION, {"text": "a"}),
    ],
)
def test_a_row_without_what_the_objective_needs_is_named(
    objective: Objective, row: dict[str, Any], tmp_path: Path
) -> None:
    file = saved(tmp_path / "rows.jsonl", row)
    with pytest.raises(UsageError, match=f"rows.jsonl.*{objective} needs"):
        dataset_lengths(file, None, objective=objective)


def test_the_rows_of_examples() -> None:
    asked = {"role": "user", "content": "a question"}
    chats = {
        name: [asked, {"role": "assistant", "content": name}] for name in ("chosen", "rejected")
    }
    assert rows_of(Objective.DPO, chats) == [
        [{"messages": chats["chosen"]}, {"messages": chats["rejected"]}]
    ]
    assert rows_of(Objective.REWARD, {"chosen": "a", "rejected": "b"}) == [
        [{"text": "a"}, {"text": "b"}]
    ]
    assert rows_of(Objective.DPO, {"prompt": "a question", **chats}) == rows_of(
        Objective.DPO, chats
    )
    with pytest.raises(ValueError, match="the prompt's text is not in the example's messages"):
        rows_of(Objective.DPO, {"prompt": "another question", **chats})
    shared = {"chosen": "ask: yes", "rejected": "ask: no"}
    expected = [{"prompt": "ask: ", "completion": answer} for answer in ("yes", "no")]
    assert rows_of(Objective.DPO, shared) == [expected]
    wanted = {"prompt": "a", "completion": "b", "label": True}
    assert rows_of(Objective.KTO, wanted) == [[{"prompt": "a", "completion": "b"}]]
    assert rows_of(Objective.CLASSIFICATION, {"text": "a", "label": 0}) == [[{"text": "a"}]]
    alpaca = {"system": "s", "instruction": "a", "input": "b"}
    pair = [alpaca | {"output": answer} for answer in ("yes", "no")]
    assert rows_of(Objective.DPO, alpaca | {"chosen": "yes", "rejected": "no"}) == [pair]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("objective", [Objective.DPO, Objective.KTO, Objective.REWARD])
def test_trl_takes_the_file_of_an_objective(objective: Objective, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    base = recipe(TrainConfig(loss="chunked", checkpointing="none"), trainer="trl")
    made = replace(base, workload=replace(base.workload, objective=objective))
    assert usual_formats(made) == ["recipe", "trl"]
    files = export_all(made, ["trl"])
    text = files[f"trl_{objective}.yaml"]
    (tmp_path / "file.yaml").write_text(text)
    config = {
        Objective.DPO: trl.DPOConfig,
        Objective.KTO: trl.KTOConfig,
        Objective.REWARD: trl.RewardConfig,
    }
    parser = trl.TrlParser(
        (trl.ScriptArguments, config[objective], trl.ModelConfig, trl.DatasetMixtureConfig)
    )
    arguments = ["--config", str(tmp_path / "file.yaml"), "--use_cpu", "true", "--bf16", "false"]
    _, training, model, _ = parser.parse_args_and_config(arguments, fail_with_unknown_args=True)
    assert (
        training.learning_rate == default_learning_rate("lora", objective)
        and model.lora_alpha == 32
    )
    assert f"trl {objective} --config trl_{objective}.yaml" in text and "Loss:" not in text
    assert (yaml.safe_load(text).get("lora_task_type") == "SEQ_CLS") is (
        objective is Objective.REWARD
    )
    with pytest.raises(
        UsageError, match=f"axolotl is not written: {objective} is untested in axolotl files"
    ):
        export_all(made, ["axolotl"])


def test_the_script_of_a_classifier() -> None:
    base = recipe(TrainConfig())
    made = replace(base, workload=replace(base.workload, objective=Objective.CLASSIFICATION))
    assert usual_formats(made) == ["recipe", "train"]
    settings = json.loads(export_all(made, ["train"])["train_config.json"])
    assert (
        settings["objective"] == "classification" and settings["model_settings"]["num_labels"] == 2
    )


def test_a_model_without_a_head_over_labels_is_refused() -> None:
    found = setup("classification")
    shape = ModelShape(num_layers=2, prefix=0, period=1, has_labels=False)
    with pytest.raises(UsageError, match="no head over labels for llama"):
        adapt_to_layers(found, shape)
    assert adapt_to_layers(setup("sft"), shape).task.workload.objective is Objective.SFT


def test_a_rate_that_was_learned_with_another_alpha_is_not_written() -> None:
    attempts = (Attempt(learning_rate=1e-3, seed=0, steps=5, loss=1.0, seconds=1.0),)
    for rank, default, rate in ((64, None, 2e-4), (64, 2e-4, 1e-3), (16, None, 1e-3)):
        config = TrainConfig(lora_rank=rank)
        found = Learning(
            config=config, attempts=attempts, run_steps=100, held_out=8, default=default
        )
        made = replace(recipe(config), learning=found)
        assert made.learning_rate == rate
        for tool, text in ((tool, export_all(made, [tool])) for tool in ("trl", "axolotl")):
            is_said = "was not tuned" in "".join(text.values())
            assert is_said is (rate == 2e-4), tool


def test_a_large_model_learns_at_half_the_rate() -> None:
    small, large = (
        default_learning_rate("lora", params=params) for params in (7 * 10**9, 65 * 10**9)
    )
    assert (small, large) == (2e-4, 1e-4)
    assert default_learning_rate("lora", Objective.CLASSIFICATION, 65 * 10**9) == large
    assert default_learning_rate("full") == default_learning_rate("full", params=65 * 10**9) == 1e-5
    assert default_learning_rate("lora", Objective.DPO) == 5e-6
