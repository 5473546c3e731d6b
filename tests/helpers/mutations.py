"""Mutated datasets and configuration files: each has an answer, or a refusal in plain words.

`fuzzed` tries mutated rows, mutated files of rows, and mutated files of other tools.
"""

import copy
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from autotune.core.errors import AutotuneError
from autotune.core.objective import Objective
from autotune.planning.run_check import check
from autotune.problem.dataset import dataset_lengths, rows_of
from autotune.trainer.examples import BadExample, Encoder
from autotune.trainer.reading import BadDataset
from tests.helpers.hostile import time_limit
from tests.helpers.tokenizers import byte_level, template

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
QUESTION = {"role": "user", "content": "a question"}
ANSWER = {"role": "assistant", "content": "an answer"}
ROWS: tuple[dict[str, Any], ...] = (
    {
        "messages": [
            {"role": "system", "content": "a rule"},
            QUESTION,
            ANSWER | {"tool_calls": [CALL], "reasoning_content": "a thought"},
            {"role": "tool", "content": "a result"},
            ANSWER | {"weight": 1},
        ],
        "tools": [TOOL],
        "system": None,
    },
    {
        "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
        "system": "a rule",
    },
    {"prompt": "a question", "completion": " an answer", "label": True},
    {"prompt": [QUESTION], "completion": [ANSWER]},
    {
        "instruction": "a task",
        "input": "its input",
        "output": "an answer",
        "history": [["q", "a"]],
        "chosen": "an answer",
        "rejected": "another",
    },
    {"text": "some text", "label": 1},
    {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, ANSWER], "prompt": "a question"},
)
VALUES: tuple[Any, ...] = (
    *(None, 5, -1.5, True, "", [], {}, " ", "x", [1], {"a": 1}, "[", "{}", [[]], "\ud83d"),
    *([{"type": "text", "text": "z"}], [{"type": "image"}], float("nan"), 10**30, "null", "\x00"),
    *({"function": 3}, [{"function": {"name": None}}], [None], "../x", "a" * 3000),
)
KEYS = (
    *("messages", "role", "content", "from", "value", "tools", "tool_calls", "train", "weight"),
    *("loss", "reasoning_content", "thinking", "function", "arguments", "name", "system", "prompt"),
    *("history", "chat_template_kwargs", "type", "text"),
)
TEMPLATES = ("llama3", "qwen3", "gptoss", "gemma4", "glm4moe", "qwen3_training", "lfm2", "")
COMMON = {"learning_rate": 2e-4, "gradient_accumulation_steps": 4, "bf16": True}
CONFIGS: tuple[dict[str, Any], ...] = (
    COMMON
    | {
        "model_name_or_path": "mistral-7b",
        "dataset_name": "mine",
        "use_peft": True,
        "lora_r": 16,
        "max_length": 512,
        "accelerate_config": "accelerate.yaml",
    },
    COMMON
    | {
        "base_model": "mistral-7b",
        "adapter": "qlora",
        "load_in_4bit": True,
        "micro_batch_size": 2,
        "lora_r": 8,
        "sequence_len": 4096,
        "datasets": [{"path": "mine", "type": "chat_template"}],
        "deepspeed": "zero.json",
    },
    COMMON
    | {
        "model_name_or_path": "mistral-7b",
        "stage": "sft",
        "finetuning_type": "lora",
        "lora_rank": 8,
        "cutoff_len": 1024,
        "template": "llama3",
        "dataset": "a,b",
        "per_device_train_batch_size": 1,
        "deepspeed": "zero.json",
    },
)
BESIDE: dict[str, dict[str, Any]] = {
    "accelerate.yaml": {
        "distributed_type": "FSDP",
        "num_processes": 2,
        "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True},
    },
    "zero.json": {
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8},
        "bf16": {"enabled": "auto"},
    },
}
OBJECTIVES = (Objective.DPO, Objective.KTO, Objective.REWARD, Objective.CLASSIFICATION)
# The words of Python's own errors
PYTHON = re.compile(
    r"Traceback|\b[A-Z][a-z]\w*(Error|Exception)\b|NoneType|has no attribute"
    r"|object is not|not subscriptable|unhashable|positional argument|unexpected keyword"
    r"|dictionary update sequence|can only concatenate|is not iterable|index out of range"
)


def fuzzed(number: int, seed: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Try `number` mutated inputs in a folder, and yield the kind and the outcome of each.

    The outcome is `answered`, `refused` or `fault`. A fault has its input and its reason.
    """
    chosen = random.Random(seed)
    tokenizer = byte_level()
    for index in range(number):
        kind, attempt = ATTEMPTS[index % len(ATTEMPTS)]
        given: list[Any] = []
        row: dict[str, Any] = {"kind": kind, "outcome": "answered"}
        try:
            with time_limit():
                attempt(chosen, folder, tokenizer, given)
        except (AutotuneError, BadDataset, BadExample, ValueError) as error:
            row["outcome"] = "refused"
            if not is_plain(error):
                row |= {
                    "outcome": "fault",
                    "reason": repr(error)[:300],
                    "input": repr(given)[:2000],
                }
        except Exception as error:
            row |= {"outcome": "fault", "reason": repr(error)[:300], "input": repr(given)[:2000]}
        yield row


def is_plain(error: Exception) -> bool:
    """Return whether an error is one of the program's own, without the words of Python's errors."""
    ours = isinstance(error, AutotuneError | BadDataset | BadExample) or type(error) is ValueError
    return ours and bool(str(error)) and not PYTHON.search(str(error))


def mutate(chosen: random.Random, value: Any) -> Any:
    """Change one place of a value: another value, another key, one more element, or none."""
    places = [place for place in _places(value) if place]
    if not places:
        return value
    *path, last = chosen.choice(places)
    holder = value
    for key in path:
        holder = holder[key]
    change = chosen.random()
    other = copy.deepcopy(chosen.choice(VALUES))
    if change < 0.5:
        holder[last] = other
    elif change < 0.7 and isinstance(holder, dict):
        holder[chosen.choice(KEYS)] = holder.pop(last)
    elif change < 0.85:
        if isinstance(holder, dict):
            holder[chosen.choice(KEYS)] = other
        else:
            holder.append(other)
    else:
        del holder[last]
    return value


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _places(value[key], (*path, key))


def _mutated(chosen: random.Random, originals: tuple[Any, ...]) -> Any:
    value = copy.deepcopy(chosen.choice(originals))
    for _ in range(chosen.randint(1, 3)):
        value = mutate(chosen, value)
    return value


def _spoiled(chosen: random.Random, content: bytes) -> bytes:
    """Return the content of a file with bytes cut off, replaced, repeated or inserted."""
    start = chosen.randrange(len(content) + 1)
    end = chosen.randint(start, min(start + 40, len(content)))
    middle = chosen.choice(
        (b"", b"\x00", b"\xff\xfe", b'"', b"}", b"[", b"\n", content[start:end] * 2)
    )
    return content[:start] + middle + (b"" if chosen.random() < 0.3 else content[end:])


def _try_row(chosen: random.Random, folder: Path, tokenizer: Any, given: list[Any]) -> None:
    """Tokenise a mutated row with a chat template."""
    row = _mutated(chosen, ROWS)
    name = chosen.choice(TEMPLATES)
    given += [name, row]
    tokenizer.chat_template = template(name) if name else None
    loss_on = chosen.choice((None, "all", "completion", "assistant"))
    list(Encoder(tokenizer, loss_on).encode([("rows.jsonl:1", row)]))


def _try_objective(chosen: random.Random, folder: Path, tokenizer: Any, given: list[Any]) -> None:
    """Tokenise the answers of a mutated row of another objective."""
    row = _mutated(chosen, ROWS)
    objective = chosen.choice(OBJECTIVES)
    given += [objective, row]
    tokenizer.chat_template = template("llama3")
    for example in rows_of(objective, row):
        list(Encoder(tokenizer, None).encode([("rows.jsonl:1", one) for one in example]))


def _try_file(chosen: random.Random, folder: Path, tokenizer: Any, given: list[Any]) -> None:
    """Read a mutated file of rows."""
    rows = [_mutated(chosen, ROWS) for _ in range(2)] if chosen.random() < 0.5 else list(ROWS)
    suffix = chosen.choice((".jsonl", ".json", ".csv", ".parquet", ".arrow"))
    path = folder / f"rows{suffix}"
    content = _file(suffix, rows)
    given += [suffix, content]
    path.write_bytes(_spoiled(chosen, content) if chosen.random() < 0.7 else content)
    dataset_lengths(path, None)


def _file(suffix: str, rows: list[Any]) -> bytes:
    if suffix == ".jsonl":
        return b"\n".join(json.dumps(row).encode(errors="surrogatepass") for row in rows)
    if suffix == ".json":
        return json.dumps(rows, indent=1).encode(errors="surrogatepass")
    if suffix == ".csv":
        return b'prompt,completion\n"one, and\ntwo",three\n' + b"four,five\n" * 20
    import pyarrow
    import pyarrow.parquet

    sink = pyarrow.BufferOutputStream()
    table = pyarrow.Table.from_pylist([{"prompt": "one", "completion": "two"}] * 20)
    if suffix == ".parquet":
        pyarrow.parquet.write_table(table, sink)
    else:
        with pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    return bytes(sink.getvalue())


def _try_config(chosen: random.Random, folder: Path, tokenizer: Any, given: list[Any]) -> None:
    """Check a mutated file of another tool, with mutated files beside it."""
    for name, content in BESIDE.items():
        made = _mutated(chosen, (content,)) if chosen.random() < 0.5 else content
        given.append(made)
        (folder / name).write_text(json.dumps(made))
    config = _mutated(chosen, CONFIGS) if chosen.random() < 0.7 else chosen.choice(CONFIGS)
    given.append(config)
    text = yaml.safe_dump(config, sort_keys=False).encode(errors="surrogatepass")
    path = folder / "run.yaml"
    path.write_bytes(_spoiled(chosen, text) if chosen.random() < 0.3 else text)
    check(path, {"gpu": "h200"})


Attempt = Callable[[random.Random, Path, Any, list[Any]], None]
ATTEMPTS: tuple[tuple[str, Attempt], ...] = (
    ("row", _try_row),
    ("row of another objective", _try_objective),
    ("file of rows", _try_file),
    ("file of another tool", _try_config),
)
