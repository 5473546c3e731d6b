"""Damaged dataset files. Each input is tried in a child that may crash or hang."""

import contextlib
import copy
import io
import json
import os
import random
import select
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow
import pyarrow.parquet
from PIL import Image
from transformers import AutoTokenizer

from autotune.core.errors import AutotuneError
from autotune.core.images import picture_of
from autotune.problem.dataset import dataset_lengths, form_of, image_lengths
from autotune.trainer.picture_files import BadPicture, read_picture
from tests.helpers.seeing import seeing
from tests.helpers.tokenizers import CHATML, byte_level

T = TypeVar("T")
LATE_S = 20.0
KINDS = ("jsonl", "json", "csv", "parquet", "arrow", "image")
ENDS = ("tracebacks", "signals", "unexpected", "over_20_s")

# --- trying


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """How one input ended: `answer`, `error` (one sentence), or one of ENDS with a text that says
    more.
    """

    input: str
    end: str
    seconds: float
    text: str = ""


def tried(
    inputs: Sequence[T],
    run: Callable[[T], tuple[str, str]],
    *,
    name: Callable[[T], str] = str,
    late_s: float = LATE_S,
) -> list[Trial]:
    """Run each input in a child process; a signal or a late end costs one child and loses no other
    input.
    """
    trials: list[Trial] = []
    while len(trials) < len(inputs):
        rest = inputs[len(trials) :]
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.close(reader)
            _run_all(rest, run, name, writer)
        os.close(writer)
        trials += _collected(rest, name, reader, child, late_s)
    return trials


def _run_all(
    inputs: Sequence[T], run: Callable[[T], tuple[str, str]], name: Callable[[T], str], to: int
) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    warnings.simplefilter("ignore")
    for one in inputs:
        start = time.monotonic()
        try:
            end, text = run(one)
        except BaseException:
            end, text = "tracebacks", traceback.format_exc()
        trial = Trial(input=name(one), end=end, seconds=time.monotonic() - start, text=text[-2000:])
        os.write(to, json.dumps(asdict(trial)).encode() + b"\n")
    os._exit(0)


def _collected(
    inputs: Sequence[T], name: Callable[[T], str], reader: int, child: int, late_s: float
) -> list[Trial]:
    """Read a child's trials until its end. The input after the last one is what ended it."""
    trials: list[Trial] = []
    with open(reader, "rb", buffering=0) as pipe:
        text = b""
        while ready := select.select([pipe], [], [], late_s)[0]:
            part = pipe.read(1 << 16)
            if not part:
                break
            *lines, text = (text + part).split(b"\n")
            trials += [Trial(**json.loads(line)) for line in lines]
    if not ready:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if len(trials) < len(inputs):
        end = "signals" if ready else "over_20_s"
        trials.append(
            Trial(input=name(inputs[len(trials)]), end=end, seconds=late_s, text=f"status {status}")
        )
    return trials


# --- files

CALL = {"type": "function", "function": {"name": "f", "arguments": {"city": "x"}}}
TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "a question"},
    {"role": "assistant", "content": "an answer", "tool_calls": [CALL]},
    {"role": "tool", "content": "a result"},
    {"role": "assistant", "content": "the end", "weight": 1},
]
ROWS: tuple[dict[str, Any], ...] = (
    {"messages": TURNS, "chat_template_kwargs": {"enable_thinking": False}},
    {
        "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
        "system": "s",
    },
    {"prompt": "p", "completion": "c"},
    {"prompt": TURNS[:2], "completion": TURNS[4:]},
    {"instruction": "i", "input": "n", "output": "o", "history": [["q", "a"]]},
    {"text": "some words"},
)
VALUES: tuple[Any, ...] = (
    *(
        None,
        5,
        -1.5,
        True,
        "",
        [],
        {},
        " ",
        "x",
        [1],
        {"a": 1},
        "[",
        "{}",
        [[]],
        "\ud83d",
        float("nan"),
        10**30,
    ),
    *(
        [{"type": "text", "text": "z"}],
        [{"type": "image"}],
        "null",
        "\x00",
        [None],
        {"function": 3},
        "[" * 3000,
    ),
    *({"chat_template": "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3}, "x" * 100_000),
)
KEYS = (
    "messages",
    "role",
    "content",
    "from",
    "value",
    "tools",
    "tool_calls",
    "train",
    "weight",
    "system",
    "prompt",
)
KEYS += (
    "chat_template_kwargs",
    "arguments",
    "name",
    "type",
    "text",
    "history",
    "images",
    "reasoning_content",
)
BYTES = (
    b"\xff\xff\xff\x7f",
    b"\0\0\0\0",
    b"\xff\xff\xff\xff",
    b"\0\0\0\x80",
    b"\xff" * 7 + b"\x7f",
    b"\0" * 8,
)
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "EPS", "PPM")
PATHS = (
    "../a.png",
    "/etc/hostname",
    "/dev/zero",
    "a\0b",
    "pipe.png",
    "",
    "x" * 5000,
    "a.png",
    ".",
    "http://host/a",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A damaged file: of one kind, and the same for the same number."""

    kind: str
    number: int

    def __str__(self) -> str:
        return f"{self.kind} {self.number}"


def files(count: int) -> list[File]:
    """Return this number of files, of each kind in turn."""
    return [File(kind=KINDS[number % len(KINDS)], number=number) for number in range(count)]


class FileReader:
    """Writes a damaged file into a folder, and reads it as plans and runs do."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        tokenizer = byte_level()
        tokenizer.chat_template = CHATML
        self._tokenizer = str(folder / "tokenizer")
        tokenizer.save_pretrained(self._tokenizer)
        # its import takes long, and each child would repeat it
        AutoTokenizer.from_pretrained(self._tokenizer)
        self._model = seeing("idefics3")

    def read(self, file: File) -> tuple[str, str]:
        """Return the end of reading a file, and its error."""
        chance = random.Random(file.number)
        folder = self._folder / f"{file.kind}-{file.number}"
        folder.mkdir()
        try:
            return (
                self._read_image(folder, chance)
                if file.kind == "image"
                else self._read(folder, file.kind, chance)
            )
        except (AutotuneError, BadPicture) as error:
            return ("error", str(error)) if str(error) else ("unexpected", repr(error))

    def _read(self, folder: Path, kind: str, chance: random.Random) -> tuple[str, str]:
        path = folder / f"rows.{kind}"
        path.write_bytes(_rows_file(kind, chance))
        for tokenizer in (None, self._tokenizer):
            with contextlib.redirect_stderr(io.StringIO()):
                assert (
                    dataset_lengths(path, tokenizer, loss_on=chance.choice((None, "all"))).mean >= 1
                )
        return "answer", form_of(path, None)

    def _read_image(self, folder: Path, chance: random.Random) -> tuple[str, str]:
        content = io.BytesIO()
        Image.new("RGB", (chance.randint(1, 90), chance.randint(1, 90)), "red").save(
            content, chance.choice(FORMATS)
        )
        (folder / "a.png").write_bytes(
            content.getvalue() if chance.random() < 0.2 else damaged(content.getvalue(), chance)
        )
        os.mkfifo(folder / "pipe.png")
        name = chance.choice(PATHS) if chance.random() < 0.3 else "a.png"
        row = {"messages": [{"role": "user", "content": "<image>what"}, TURNS[4]], "images": [name]}
        (folder / "rows.jsonl").write_text(json.dumps(row))

        problems = []
        for read in (
            lambda: image_lengths(
                folder / "rows.jsonl",
                None,
                lambda width, height: picture_of(self._model, width, height),
            ),
            lambda: read_picture(name, folder),
        ):
            try:
                read()
            except (AutotuneError, BadPicture) as error:
                problems.append(str(error) or "without a sentence")
        return ("error", problems[0]) if problems else ("answer", "")


def _rows_file(kind: str, chance: random.Random) -> bytes:
    """Return a file whose rows or bytes are damaged."""
    rows = [copy.deepcopy(chance.choice(ROWS)) for _ in range(chance.randint(1, 4))]
    if kind in ("parquet", "arrow"):
        return damaged(_table_file(kind, rows, chance), chance)
    rows = [damaged_row(row, chance) if chance.random() < 0.7 else row for row in rows]
    if kind == "csv":
        lines = [",".join(map(str, row)) for row in rows[:1]] + [
            ",".join(map(repr, row.values())) for row in rows
        ]
        content = "\n".join(lines).encode(errors="surrogatepass")
    elif kind == "json":
        content = json.dumps(rows).encode()
    else:
        content = "\n".join(map(json.dumps, rows)).encode()
    return damaged(content, chance) if chance.random() < 0.5 else content


def _table_file(kind: str, rows: list[dict[str, Any]], chance: random.Random) -> bytes:
    """Return a whole table with the columns of the first row, and some of unusual types."""
    table = pyarrow.Table.from_pylist([rows[0]] * chance.randint(1, 200))
    times = pyarrow.array([2 ** chance.randint(1, 62)] * len(table), pyarrow.int64())
    table = table.append_column("when", times.cast(pyarrow.timestamp("us")))
    table = table.append_column("kind", pyarrow.array(["a"] * len(table)).dictionary_encode())
    content = io.BytesIO()
    if kind == "parquet":
        pyarrow.parquet.write_table(
            table, content, compression=chance.choice(("zstd", "snappy", "none"))
        )
        return content.getvalue()
    make = pyarrow.ipc.new_stream if chance.random() < 0.5 else pyarrow.ipc.new_file
    options = pyarrow.ipc.IpcWriteOptions(compression=chance.choice((None, None, "zstd")))
    with make(content, table.schema, options=options) as writer:
        writer.write_table(table, chance.choice((7, 1000)))
    return content.getvalue()


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Return the bytes with some of them changed, moved, added or cut off."""
    data = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 5, 20))):
        place, kind = chance.randrange(len(data)), chance.random()
        if kind < 0.4:
            data[place] = chance.randrange(256)
        elif kind < 0.75:
            part = chance.choice(BYTES)
            data[place : place + len(part)] = part
        elif kind < 0.8:
            data = data[:place] or bytearray(b"x")
        elif kind < 0.9:
            start = chance.randrange(len(data))
            data[place : place + 16] = data[start : start + 16]
        else:
            data[place:place] = chance.randbytes(chance.randint(1, 9))
    return bytes(data)


def damaged_row(row: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """Return the row with some of its values and keys replaced, added or removed."""
    for _ in range(chance.randint(1, 3)):
        places = list(_places(row))
        if not places:
            break
        holder, key = chance.choice(places)
        kind = chance.random()
        if kind < 0.5:
            holder[key] = copy.deepcopy(chance.choice(VALUES))
        elif kind < 0.7 and isinstance(holder, dict):
            holder[chance.choice(KEYS)] = holder.pop(key)
        elif kind < 0.85 and isinstance(holder, dict):
            holder[chance.choice(KEYS)] = copy.deepcopy(chance.choice(VALUES))
        else:
            del holder[key]
    return row


def _places(holder: Any) -> Any:
    for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
        yield holder, key
        if isinstance(holder[key], dict | list):
            yield from _places(holder[key])
