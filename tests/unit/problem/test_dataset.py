"""The user's own file is counted in each of its forms as the exported script counts it."""

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from autotune.catalog import resolve_device
from autotune.core.errors import EnvironmentProblem, StorageError, UsageError
from autotune.core.objective import Objective
from autotune.problem import dataset
from autotune.problem.dataset import (
    dataset_errors,
    dataset_lengths,
    form_of,
    rows_of,
    tokenised_per_s,
)
from autotune.problem.length_distribution import Lengths
from autotune.problem.setup import set_up
from autotune.problem.study_spec import StudySpec
from autotune.trainer.reading import read_rows
from tests.helpers.tokenizers import byte_level, template

CHAT = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} </s> {% endfor %}"
CHAT += "{% if add_generation_prompt %}<assistant> {% endif %}"
TWO_MESSAGES = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two three"}]
# a row, its words with what ends it, its characters
FORMS: list[tuple[dict[str, Any], int, int, float, float]] = [
    ({"text": "one two three"}, 4, 13, 1.0, 1.0),  # and the shares of both that are trained on
    ({"prompt": "one two ", "completion": "three four five"}, 6, 23, 4 / 6, 15 / 23),
    ({"messages": TWO_MESSAGES}, 7, 25, 3 / 7, 18 / 25),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a tokenizer that makes a token of each word, as transformers saves it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({"[UNK]": 0, "</s>": 1}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", eos_token="</s>")
    fast.chat_template = CHAT
    folder = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(str(folder))
    return str(folder)


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        import pandas

        frame = pandas.DataFrame(rows)
        frame.to_csv(path, index=False) if path.suffix == ".csv" else frame.to_parquet(path)
    return path


def test_nothing_that_a_file_names_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Pillow, rows with an image by its address would send a request each; without, they could
    not be read.
    """
    import datasets

    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    decoded: list[Any] = []
    monkeypatch.setattr(
        datasets.Image, "decode_example", lambda self, value, **_: decoded.append(value)
    )
    pictures = [{"bytes": b"", "path": "http://127.0.0.1:9/picture.png"}] * 3
    features = {"text": {"dtype": "string", "_type": "Value"}, "picture": {"_type": "Image"}}
    about = {"huggingface": json.dumps({"info": {"features": features}})}
    rows = arrow.table({"text": ["one two"] * 3, "picture": pictures}).replace_schema_metadata(
        about
    )
    parquet.write_table(rows, tmp_path / "data.parquet")
    assert dataset_lengths(tmp_path / "data.parquet", None).counts == ((2, 3),) and not decoded


IN_EACH_KIND = [(kind, *form) for kind in (".jsonl", ".parquet", ".csv") for form in FORMS]


@pytest.mark.parametrize(
    ("kind", "row", "words", "characters", "of_words", "of_characters"), IN_EACH_KIND[:-1]
)  # a cell of CSV holds no list
def test_each_form_in_each_kind_of_file(
    tmp_path: Path,
    tokenizer: str,
    kind: str,
    row: dict[str, Any],
    words: int,
    characters: int,
    of_words: float,
    of_characters: float,
) -> None:
    file = written(tmp_path / f"data{kind}", [row] * 3)
    assert dataset_lengths(file, tokenizer) == Lengths(
        counts=((words, 3),), source="counted", trained_share=of_words
    )
    estimated = dataset_lengths(file, None)
    assert replace(estimated, most=None) == Lengths(
        counts=((round(characters / 4), 3),), source="characters", trained_share=of_characters
    )
    assert estimated.most is not None and characters + 512 <= estimated.most <= characters + 900
    assert dataset_lengths(file, tokenizer, loss_on="all").trained_share == 1.0
    assert dataset_lengths(file, None, loss_on="all").trained_share == 1.0


def test_the_estimate_of_what_is_trained_on(tmp_path: Path) -> None:
    four = [*TWO_MESSAGES, *TWO_MESSAGES]
    file = written(tmp_path / "data.jsonl", [{"messages": four}])
    assert dataset_lengths(file, None).trained_share == 36 / 50
    assert dataset_lengths(file, None, loss_on="completion").trained_share == 18 / 50
    file = written(tmp_path / "data.jsonl", [{"prompt": four[:3], "completion": four[3:]}])
    assert dataset_lengths(file, None).trained_share == 18 / 50
    file = written(tmp_path / "data.jsonl", [{"messages": TWO_MESSAGES[:1]}])
    with pytest.raises(UsageError, match="no tokens to train on"):
        dataset_lengths(file, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text": "fine"}\n{"text": null}\n', "jsonl:2: .*its columns: text"),
        ('{"question": "what?"}\n', "jsonl:1: .*its columns: question"),
        ('{"messages": [{"role": "user"}]}\n', "jsonl:1: "),
        ('{"text": "fine"}\n\n{"text": \n', "jsonl:3: not JSON"),
        ("null\n", "jsonl:1: not a JSON object"),
        ("\n\n", "no examples"),
        ("", "no examples"),
    ],
)
def test_an_unusable_row_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(text)
    with pytest.raises(UsageError, match=message) as error:
        dataset_lengths(file, None)
    is_broken = "not JSON" in message or "not a JSON" in message
    assert (error.value.remedy == "correct this line, or remove it") is is_broken
    if message == "no examples":
        with pytest.raises(UsageError, match=message):
            form_of(file, None)


def test_tokens_that_cannot_be_kept_are_an_error_of_storage(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path / "data.jsonl", [{"text": "fine"}])
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    with pytest.raises(StorageError, match="tokens cannot be kept"):
        dataset_lengths(file, tokenizer)


def test_messages_in_a_table_of_text_are_refused(tmp_path: Path, tokenizer: str) -> None:
    kind, row, *_ = IN_EACH_KIND[-1]
    file = written(tmp_path / f"data{kind}", [row])
    for given in (tokenizer, None):
        with pytest.raises(UsageError, match="csv:"):
            dataset_lengths(file, given)


def test_half_a_surrogate_pair_is_an_error_that_names_its_row(
    tmp_path: Path, tokenizer: str
) -> None:
    """JSON can escape one half of a surrogate pair; no tokenizer takes it."""
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "fine"}\n{"text": "\\ud83d"}\n')
    for given in (tokenizer, None):
        with pytest.raises(UsageError, match=r"jsonl:2: .*half of a surrogate pair"):
            dataset_lengths(file, given)


def test_lines_of_several_forms_as_other_tools_write_them(tmp_path: Path, tokenizer: str) -> None:
    """A byte order mark, blank lines, columns that are null in some rows; and a name that is a
    pattern.
    """
    rows = [
        row | dict.fromkeys({"text", "prompt", "completion", "messages"} - set(row))
        for row, *_ in FORMS
    ]
    file = tmp_path / "a[1].jsonl"
    file.write_text("\ufeff" + "\n\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    assert dataset_lengths(file, tokenizer) == Lengths.of([4, 6, 7], "counted", 11 / 17)
    csv = written(tmp_path / "b[1].csv", [{"text": "one two three"}])
    assert dataset_lengths(csv, tokenizer) == Lengths.of([4], "counted")


def test_an_unusable_file_is_a_usage_error(tmp_path: Path, tokenizer: str) -> None:
    broken, latin = tmp_path / "data.parquet", tmp_path / "latin.jsonl"
    broken.write_text("no parquet")
    (tmp_path / "data.xlsx").touch()
    latin.write_bytes('{"text": "é"}\n'.encode("latin-1"))
    for file, message in (
        (broken, "cannot read"),
        (latin, "latin.jsonl:1: not UTF-8"),
        (tmp_path / "none.jsonl", "no file"),
        (tmp_path / "data.xlsx", "none of .jsonl"),
    ):
        with pytest.raises(UsageError, match=message):
            dataset_lengths(file, None)


def test_an_unusable_tokenizer_is_a_usage_error(tmp_path: Path, tokenizer: str) -> None:
    fine = written(tmp_path / "fine.jsonl", [FORMS[2][0]])
    for content in (None, "{}", "no JSON"):
        folder = tmp_path / str(content)
        folder.mkdir()
        if content is not None:
            (folder / "tokenizer.json").write_text(content)
        with pytest.raises(UsageError, match="cannot be loaded"):
            dataset_lengths(fine, str(folder))
    mute = shutil.copytree(tokenizer, tmp_path / "mute")
    (mute / "chat_template.jinja").unlink()
    with pytest.raises(UsageError, match="jsonl:1: the tokenizer has no chat template"):
        dataset_lengths(fine, str(mute))
    (mute / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UsageError, match="roles must alternate"):
        dataset_lengths(fine, str(mute))
    (mute / "chat_template.jinja").write_text("{{ raise_exception('') }}")
    with pytest.raises(UsageError, match=r"chat template refuses the example$"):
        dataset_lengths(fine, str(mute))


def test_a_tokenizer_that_the_hub_cannot_give_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a network, huggingface_hub would try again for 46 s."""

    def fail(url: str) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", fail)
    fine = written(tmp_path / "fine.jsonl", [FORMS[2][0]])
    with pytest.raises(UsageError, match="tokenizer in somebody/absent cannot be loaded: no route"):
        dataset_lengths(fine, "somebody/absent")


def test_a_study_takes_its_examples_from_the_file(tmp_path: Path, tokenizer: str) -> None:
    rows = [{"text": "word " * length} for length in (100, 200, 900)]
    file = str(written(tmp_path / "data.jsonl", rows))
    spec = StudySpec(model="mistral-7b", dataset=file, tokenizer=tokenizer, max_truncated=0.2)
    setup = set_up(spec, resolve_device("h200"))
    workload = setup.task.workload
    assert (workload.examples, workload.examples_assumed) == (3, False)
    assert workload.lengths == Lengths.of([101, 201, 901], "counted")
    # 512 keep all but 389 of 1,203 tokens, which is too few; no example needs more than 1,024.
    assert setup.task.space.knob("seq_len").choices() == (1024,)
    fewer = set_up(StudySpec(model="mistral-7b", dataset=file, examples=50), resolve_device("h200"))
    assert fewer.task.workload.examples == 50
    assert fewer.task.workload.lengths.source == "characters"


def test_no_code_of_a_tokenizer_runs(tmp_path: Path) -> None:
    code = (
        "from transformers import PreTrainedTokenizerFast as Words\n"
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
    )
    (tmp_path / "theirs.py").write_text(code)
    config = {"tokenizer_class": "Words", "auto_map": {"AutoTokenizer": [None, "theirs.Words"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(UsageError, match="cannot be loaded"):
        dataset_lengths(tmp_path / "rows.jsonl", str(tmp_path))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("row", "form"),
    [
        (FORMS[0][0], "text"),
        (FORMS[1][0] | {"text": "more", "messages": None}, "prompt_completion"),
        (FORMS[2][0], "messages"),
        ({"prompt": TWO_MESSAGES[:1], "completion": TWO_MESSAGES[1:]}, "chat_completion"),
        ({"conversations": [{"from": "human", "value": "a"}]}, "conversations"),
        ({"instruction": "a", "input": "", "output": "b"}, "alpaca"),
    ],
)
def test_the_form_is_that_of_the_first_row(tmp_path: Path, row: dict[str, Any], form: str) -> None:
    file = written(tmp_path / "data.jsonl", [row, {"text": "more"}])
    assert form_of(file, None) == form


def test_bytes_are_estimated_four_to_a_token_and_one_token_at_least(tmp_path: Path) -> None:
    said: list[str] = []
    file = written(
        tmp_path / "data.jsonl", [{"text": "x" * length} for length in (1, 5, 7, 10, 400)]
    )
    assert dataset_lengths(file, None, say=said.append) == Lengths.of(
        [1, 1, 2, 2, 100], "characters", most=400 + 512
    )
    assert said == ["reading data.jsonl"]
    file = written(tmp_path / "data.jsonl", [{"text": "é" * 8}])  # of two bytes each
    assert dataset_lengths(file, None).counts == ((4, 1),)


def test_estimated_lengths_have_a_bound_that_holds_for_each_form(tmp_path: Path) -> None:
    """A message has at most 16 tokens besides its JSON, a template 512, and tools are JSON too."""
    call = {"type": "function", "function": {"name": "look", "arguments": {"city": "Köln"}}}
    messages = [*TWO_MESSAGES, {"role": "assistant", "tool_calls": [call]}]
    tool = {"name": "look", "description": "x" * 1000}
    row = {"messages": messages, "tools": [tool]}
    lengths = dataset_lengths(written(tmp_path / "data.jsonl", [row]), None)
    size = len(json.dumps(messages, ensure_ascii=False).encode()) + len(json.dumps(tool))
    assert lengths.most is not None and size + 512 + 3 * 16 <= lengths.most <= size + 900

    pairs = [{"prompt": "p" * 10, "chosen": "c" * 20, "rejected": "r" * 3000}]
    lengths = dataset_lengths(
        written(tmp_path / "pairs.jsonl", pairs), None, objective=Objective.DPO
    )
    assert lengths.most is not None and 3010 + 512 <= lengths.most <= 3010 + 900


def test_a_special_file_beside_a_tokenizer_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Path] = []

    def refuse(directory: Path) -> None:
        looked.append(directory)
        raise UsageError("a pipe", remedy="remove it")

    monkeypatch.setattr(dataset, "refuse_special_files", refuse)
    file = written(tmp_path / "data.jsonl", [{"text": "fine"}])
    with pytest.raises(UsageError, match="a pipe"):
        dataset_lengths(file, str(tmp_path))
    assert looked == [tmp_path]


def test_the_first_line_of_an_error_tells_it() -> None:
    assert dataset._first_line(ValueError(" one\ntwo")) == "one"
    assert dataset._first_line(ValueError("")) == "ValueError"


def test_what_is_missing_to_read_a_dataset_is_an_error_of_the_environment() -> None:
    with (
        pytest.raises(EnvironmentProblem, match="--dataset: no datasets") as caught,
        dataset_errors(),
    ):
        raise ImportError("no datasets")
    assert caught.value.remedy == "or give a file of JSON lines, or --lengths FILE"


def test_a_dataset_is_there_or_is_named(tmp_path: Path) -> None:
    dataset.check_exists(written(tmp_path / "data.jsonl", [{"text": "fine"}]), None)
    with pytest.raises(UsageError, match="no file"):
        dataset.check_exists(tmp_path / "none.jsonl", None)


def test_how_fast_examples_are_read_and_tokenised(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on by a second at each look: at the beginning, after each example, and
    at the end.
    """
    monkeypatch.setattr(dataset, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    file = written(tmp_path / "rows.jsonl", [{"text": "one two three"}] * 5)
    assert tokenised_per_s(file, tokenizer, seconds=100) == 5 / 6
    assert tokenised_per_s(file, tokenizer, seconds=2) == 2 / 3
    (tmp_path / "empty.jsonl").write_text("")
    assert tokenised_per_s(tmp_path / "empty.jsonl", tokenizer) is None
    (tmp_path / "wrong.jsonl").write_text('{"question": 1}\n')
    with pytest.raises(UsageError, match=r"wrong\.jsonl"):
        tokenised_per_s(tmp_path / "wrong.jsonl", tokenizer)


def test_what_a_template_leaves_out_is_said_each_time(tmp_path: Path) -> None:
    """The tokens are made once and kept, and the warning is kept with them."""
    pytest.importorskip("trl")
    byte_level(template("glm4moe")).save_pretrained(tmp_path / "glm")
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": turns}))
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"chosen": turns, "rejected": turns}))
    warning = "warning: {}: the chat template writes no end token after an answer"
    for name, objective in (
        ("a.jsonl", Objective.SFT),
        ("a.jsonl", Objective.SFT),
        ("pairs.jsonl", Objective.DPO),
    ):
        said: list[str] = []
        dataset_lengths(
            tmp_path / name, str(tmp_path / "glm"), objective=objective, say=said.append
        )
        assert any(line.startswith(warning.format(name)) for line in said), said


@pytest.mark.parametrize("name", ["question", "query", "input", "messages", "conversations"])
@pytest.mark.parametrize("answer", ["yes", {"from": "gpt", "value": "yes"}, TWO_MESSAGES[1:]])
def test_a_prompt_of_a_pair_under_another_name_is_refused(name: str, answer: Any) -> None:
    """Each pair would have its answers alone."""
    row = {name: TWO_MESSAGES[:1] if name.endswith("s") else "a question", "system": "s"}
    with pytest.raises(
        ValueError, match=f"^its column {name} is not read beside chosen: rename {name}"
    ):
        rows_of(Objective.DPO, row | {"chosen": answer, "rejected": answer})


def test_other_columns_of_a_pair_are_kept_for_notes() -> None:
    row = {"chosen": TWO_MESSAGES, "rejected": TWO_MESSAGES, "messages": TWO_MESSAGES[:1]}
    ((chosen, _),) = rows_of(Objective.DPO, row | {"note": "a b"})
    assert chosen == {"note": "a b", "messages": TWO_MESSAGES}
    row = {"prompt": "q", "chosen": "a", "rejected": "b", "context": "c d", "label": 1}
    ((chosen, _),) = rows_of(Objective.DPO, row)
    assert chosen == {"context": "c d", "prompt": "q", "completion": "a"}
    with pytest.raises(ValueError, match="its column system needs a prompt in a separate column"):
        rows_of(Objective.DPO, {"system": "s", "chosen": "a", "rejected": "b"})


def test_columns_that_nothing_reads_are_named_without_a_tokenizer(tmp_path: Path) -> None:
    row = {"messages": TWO_MESSAGES, "system_prompt": "a rule"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    said: list[str] = []
    dataset_lengths(tmp_path / "rows.jsonl", None, say=said.append)
    assert any("the column system_prompt is not read" in text for text in said)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        (
            "data/train.json",
            "the path starts at {cwd}; correct the name; did you mean 'train.jsonl'?",
        ),
        (
            "data/zzz.csv",
            "the path starts at {cwd}; correct the name, such as test.csv, train.jsonl",
        ),
        ("none/a.csv", "the path starts at {cwd}; there is no folder none: correct the path, or"),
        ("{cwd}/data/zzz.csv", "correct the name, such as test.csv, train.jsonl"),
    ],
)
def test_a_missing_file_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, remedy: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for file in ("train.jsonl", "test.csv", "notes.md"):
        (tmp_path / "data" / file).write_text("")
    with pytest.raises(UsageError, match="there is no file") as caught, dataset_errors():
        list(read_rows(Path(name.format(cwd=tmp_path))))
    assert (caught.value.remedy or "").startswith(remedy.format(cwd=tmp_path))
