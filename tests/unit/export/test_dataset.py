"""Exported files name the study's dataset, and mask prompts only if the template supports it."""

import hashlib
import inspect
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.core.files import load_data
from autotune.core.train_config import TrainConfig
from autotune.export import keys
from autotune.export.formats import export_all
from autotune.problem.dataset import chat_template_in, files_of, full_path
from autotune.study.summary import Recipe, TrainingData
from autotune.trainer.command_line import parse_options
from autotune.trainer.settings import RunSettings
from tests.unit.export.test_tool_file_axolotl import recipe

MARKED = "{% generation %}{{ messages[0]['content'] }}{% endgeneration %}"
ROW = json.dumps({"messages": [{"role": "user", "content": "a"}]})


def trained_on(data: TrainingData | None, form: str = "messages", **workload: Any) -> Recipe:
    made = recipe(TrainConfig())
    return replace(made, data=data, workload=replace(made.workload, form=form, **workload))


def data_of(path: Path, split: str | None = None, template: str | None = None) -> TrainingData:
    name = full_path(str(path))
    return TrainingData(path=name, split=split, files=files_of(name, split), chat_template=template)


def exported(made: Recipe, tool: str) -> dict[str, Any]:
    files = export_all(made, [tool])
    name = {"trl": "trl_sft.yaml"}.get(tool, f"{tool}.yaml")
    return {"text": files[name], **yaml.safe_load(files[name])}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    for name in ("rows.jsonl", "parts/train-0.csv", "parts/train-1.csv", "parts/test.csv"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(ROW + "\n" if file.suffix == ".jsonl" else "prompt,completion\na,b\n")
    return tmp_path


def test_the_exported_run_trains_on_the_dataset_of_the_study(
    rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without another option, from any directory."""
    monkeypatch.chdir(rows)
    text = export_all(trained_on(data_of(Path("rows.jsonl"))), ["train"])["train_config.json"]
    (rows / "train_config.json").write_text(text)
    settings = RunSettings.read(rows / "train_config.json")
    monkeypatch.chdir("/")
    assert parse_options(settings, []).dataset == str(rows / "rows.jsonl")
    assert parse_options(settings, ["--random-weights"]).dataset is None
    other = parse_options(settings, ["--dataset", str(rows / "parts"), "--split", "test"])
    assert (other.dataset, other.split) == (str(rows / "parts"), "test")


def test_the_settings_of_earlier_versions_name_no_dataset(tmp_path: Path) -> None:
    values = json.loads(export_all(trained_on(None), ["train"])["train_config.json"])
    del values["dataset"], values["split"]
    (tmp_path / "train_config.json").write_text(json.dumps(values))
    assert RunSettings.read(tmp_path / "train_config.json").dataset is None


def test_each_tool_reads_a_file(rows: Path) -> None:
    made = trained_on(data_of(file := rows / "rows.jsonl"))
    trl = exported(made, "trl")
    assert trl["datasets"] == [{"path": "json", "data_files": str(file)}]
    assert "dataset_name" not in trl
    assert exported(made, "axolotl")["datasets"] == [
        {"path": str(file), "ds_type": "json", "split": "train", "type": "chat_template"}
    ]
    info = json.loads(export_all(made, ["llamafactory"])["dataset_info.json"])
    assert info["your_dataset"]["file_name"] == str(file)
    assert info["your_dataset"]["columns"] == {"messages": "messages"}


@pytest.mark.parametrize(("split", "names"), [(None, ["0", "1"]), ("test", [None])])
def test_trl_gets_the_files_of_the_split(rows: Path, split: str | None, names: Any) -> None:
    folder = rows / "parts"
    made = trained_on(data_of(folder, split), "prompt_completion")
    files = [str(folder / (f"train-{name}.csv" if name else "test.csv")) for name in names]
    given = files if len(files) > 1 else files[0]
    assert exported(made, "trl")["datasets"] == [{"path": "csv", "data_files": given}]
    (axolotl,) = exported(made, "axolotl")["datasets"]
    assert (axolotl["path"], axolotl["split"]) == (str(folder), split or "train")


def test_each_tool_gets_the_name_on_the_hub() -> None:
    made = trained_on(data_of(Path("org/rows:small"), "dev"))
    source = {"path": "org/rows", "name": "small", "split": "dev"}
    assert exported(made, "trl")["datasets"] == [source]
    assert exported(made, "axolotl")["datasets"] == [source | {"type": "chat_template"}]
    info = json.loads(export_all(made, ["llamafactory"])["dataset_info.json"])["your_dataset"]
    assert (info["hf_hub_url"], info["subset"], info["split"]) == ("org/rows", "small", "dev")
    assert "file_name" not in info


def test_without_a_dataset_a_placeholder_says_so() -> None:
    for tool in ("trl", "axolotl"):
        assert "your/dataset" in exported(trained_on(None), tool)["text"]


@pytest.mark.parametrize(
    ("template", "is_masked", "said"),
    [
        (MARKED, True, "TRL finds answers by its own copy"),
        ("{{ messages }}", False, "TRL trains on every token of messages. It can train on"),
        (None, True, "the study did not see the chat template"),
    ],
)
def test_trl_masks_prompts_only_if_the_template_marks_answers(
    template: str | None, is_masked: bool, said: str, rows: Path
) -> None:
    found = exported(trained_on(data_of(rows / "rows.jsonl", template=template)), "trl")
    assert found.get("assistant_only_loss", False) is is_masked
    assert said in found["text"]


def test_the_templates_that_trl_replaces_are_known() -> None:
    utils = pytest.importorskip("trl.chat_template_utils")
    source = inspect.getsource(utils.get_training_chat_template)
    names = re.findall(r"chat_template == (\w+_chat_template)", source)
    texts = [getattr(utils, name) for name in names]
    digests = [hashlib.sha256(text.encode()).hexdigest()[:8] for text in texts]
    assert load_data("autotune.export", "tools")["trl"]["templates"] == digests
    assert keys.finds_answers(TrainingData(path="a", chat_template=texts[0])) is True


def test_the_chat_template_of_a_tokenizer_is_read(tmp_path: Path) -> None:
    assert chat_template_in(str(tmp_path)) is None
    config = tmp_path / "tokenizer_config.json"
    named = [{"name": "tools", "template": "a"}, {"name": "default", "template": "b"}]
    for template, expected in (("c", "c"), (named, "b"), (None, None), ([], None), (3, None)):
        config.write_text(json.dumps({"chat_template": template}))
        assert chat_template_in(str(tmp_path)) == expected
    config.write_text("[1")
    assert chat_template_in(str(tmp_path)) is None
    (tmp_path / "chat_template.jinja").write_text("d")
    assert chat_template_in(str(tmp_path)) == "d"
