"""Random command lines. Most of them come from one that ends in an answer, with few changes."""

import contextlib
import io
import json
import os
import random
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import typer
from huggingface_hub import constants as hub

from autotune.cli import app
from autotune.planning.submission import submission_of
from autotune.study.storage.study_record import start_record
from tests.helpers.factories import summary
from tests.helpers.hostile import WORDS
from tests.helpers.replay import machine
from tests.helpers.sessions import by_tokens, record_of, starter, whole

EXIT_CODES = {0, 2, 3, 4, 5, 6, 7}

# Words that no command writes to outside its folder, whoever runs it
SAFE_WORDS = tuple(word for word in WORDS if not word.startswith(("/", "~root", "postgresql:")))
WRONG_PORTS = ("me:word@localhost:abc", "me:word@localhost:99999")
ARGUMENTS = (
    *SAFE_WORDS,
    *("demo-3m", "h200", "a10,h200", "lora", "trl", "1", "0", "-1", "2", "8", "1000", "0.5", "5m"),
    *("json", "table", "rows.jsonl", "spec.yaml", "run.yaml", "x.html", "folder", "in-the-way/x"),
    *("x", "sqlite:///x.db", "sqlite:///x.db?timeout=z", "a=1", "micro_batch_size=2", "1e5", "٣"),
    *(f"postgresql+psycopg://{server}/db" for server in WRONG_PORTS),
    *("method=full", "seq_len=64", "99999999999999999999", "1,2,4", "2026-01-01"),
)

# These start probes, training, servers or tests of the machine. Here they only parse their options:
# they find no study, or end at once for want of a GPU or by an option that they lack.
WORKING = {"run", "doctor", "calibrate", "longest", "dev", "explain", "learn", "train", "verify"}
WORKING |= {"resume", "dashboard", "worker", "mcp"}
ENDING = {"run": "--gpu a10 --model demo-3m", "calibrate": "--gpu a10"}
ENDING |= {"longest": "--gpu no-such-gpu --model demo-3m"}
ENDING |= dict.fromkeys(("dev", "doctor", "mcp"), "--no-such-option")

STORED = "--storage sqlite:///study.db"
ANSWERED = (
    *("plan --gpu h200 --model demo-3m", "plan --gpu a10 --model llama-3.2-1b --seq-len 512"),
    *("plan --spec spec.yaml", "plan --spec spec.yaml --dataset rows.jsonl"),
    *("plan --gpu a10 --model demo-3m --gpus 2", "plan --gpu h100 --model mistral-7b --json"),
    *("compare --gpus a10,h200 --model demo-3m", "compare --spec spec.yaml --gpus a10,l4 --json"),
    *("check run.yaml --gpu a10", "check run.yaml --gpu h200 --gpus 2 --json"),
    *("check run.yaml --gpu a10 --dataset rows.jsonl", "check llamafactory.yaml --gpu h100"),
    *("gpus", "models", "spaces", "suites", "prices", "prices h100", "schema plan"),
    *("import theirs.json", "import theirs.json --json"),
    *(f"{words} {STORED}" for words in ("list", "status", "status one --json", "status --nodes")),
    *(f"{words} {STORED}" for words in ("oom one", "export one", "export --format trl", "report")),
    *(f"{words} {STORED}" for words in ("report one one", "submit one", "delete one --yes")),
)
# Values that a command accepts
ACCEPTED = dict(
    line.split(maxsplit=1)
    for line in """\
--examples 1000 20000
--epochs 1 3
--tokens-per-example 100 512 3000
--tokens 1000000
--mean-tokens 200
--p99-tokens 900
--lengths lengths
--dataset rows.jsonl
--loss-on all assistant
--objective sft dpo
--global-batch 8 32
--seq-len 256 2048
--rank 8 64
--set method=full micro_batch_size=2 checkpointing=none slack=0.1 global_batch_tokens=16384
--memory-gib 12 79.5
--headroom 0 0.1
--price 2.5
--prices prices.yaml
--min-rank 8
--max-truncated 0.5
--evidence folder
--space lora default
--gpus 2 1,2 a10,h200
--gpu a10 h100 mi300x
--model demo-3m qwen3-0.6b
--within 6h 90m
--nodes 1 2
--network 400
--html x.html
--methods lora full,qlora
--max-usd 100
--max-hours 10
--owned a10
--owned-usd 500
--owned-hours 100
--electricity 0.2
--sizes 1000 1000,20000
--buy 2000
--hours-per-week 10
--format trl recipe markdown csv slurm
--out x new/y
--json-dir nodes
--storage sqlite:///study.db
--workers 2
""".splitlines()
)
LEFT_OUT = {"--live"}  # it asks a server
LEFT_OUT_OF_WORK = {"--gpu", "--model"}

ROWS = ({"prompt": "why " * size, "completion": "so"} for size in (3, 90))
MODEL = "model_name_or_path: demo-3m\n"
PRICE = """\
- {provider: me, device: a10, usd: 0.5, spot_usd: null, count: 1, quotable: false, source: mine,
   as_of: "2026-11-22"}
"""
FILES = {
    "rows.jsonl": "\n".join(map(json.dumps, ROWS)),
    "spec.yaml": "model: demo-3m\ngpu: a10\n",
    "run.yaml": MODEL + "use_peft: true\nmax_length: 512\n",
    "llamafactory.yaml": MODEL + "stage: sft\nfinetuning_type: lora\ndo_train: true\n",
    "prices.yaml": PRICE,
    "lengths": "100\n300\n2000\n",
    "in-the-way": "",
}

# --- lines


def command_lines(count: int) -> list[list[str]]:
    """Return this number of random command lines."""
    group = typer.main.get_group(app.app)
    context = typer.Context(group)
    parameters = {}
    for name in app.COMMANDS:
        _, command, _ = group.resolve_command(context, [name])
        parameters[name] = [one for one in command.params if one.name != "help" and not one.hidden]
    return [_command_line(parameters, random.Random(number)) for number in range(count)]


def _command_line(parameters: dict[str, list[Any]], chance: random.Random) -> list[str]:
    """Return a line whose changes mostly have accepted values, or one with any words."""
    if chance.random() < 0.6:
        words = shlex.split(chance.choice(ANSWERED))
        return words + _options(parameters[words[0]], chance.choice((0, 1, 1, 2, 3)), 0.8, chance)

    name = chance.choice(list(parameters))
    words = [name, *shlex.split(ENDING.get(name, ""))]
    left_out = LEFT_OUT_OF_WORK if name in WORKING else set[str]()
    kept = [one for one in parameters[name] if not left_out & {*one.opts}]
    words += _options(kept, chance.randint(0, 5), 0.0, chance)
    if chance.random() < 0.1:
        words.insert(chance.randrange(len(words) + 1), chance.choice(ARGUMENTS))
    return words


def _options(
    parameters: list[Any], count: int, accepted: float, chance: random.Random
) -> list[str]:
    """Return words for this number of parameters; a share of the values is `accepted`."""
    words: list[str] = []
    for parameter in chance.sample(parameters, min(len(parameters), count)):
        options = [one for one in parameter.opts if one.startswith("-") and one not in LEFT_OUT]
        values: tuple[str, ...] = ARGUMENTS
        if options and options[0] in ACCEPTED and chance.random() < accepted:
            values = tuple(ACCEPTED[options[0]].split())

        if parameter.param_type_name == "argument":
            # A line that ends in an answer has its arguments already.
            words += [chance.choice(values)] if chance.random() >= accepted else []
        elif options:
            words.append(chance.choice(options))
            if not parameter.is_flag or chance.random() < 0.05:
                words.append(chance.choice(values))
    return words


# --- running them


def enter(root: Path) -> dict[str, str]:
    """Enter a folder with the files that lines name, and return the variables of a stranger.

    It is so deep that `../../x` stays below `root`.
    """
    folder = root / "a" / "b" / "c"
    (folder / "folder").mkdir(parents=True)
    os.chdir(folder)
    for name, text in FILES.items():
        Path(name).write_text(text)

    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "AUTOTUNE_DATABASE_WAIT": "0"}
    home = {"HOME": str(root), "XDG_CACHE_HOME": str(root / "cache")}
    return offline | home | {"AUTOTUNE_STORAGE": "sqlite:///a.db"}


def store_study() -> None:
    """Store a finished study with trials that ran out of memory, and another's submission."""
    recipe = summary().recipe
    assert recipe is not None
    Path("theirs.json").write_text(submission_of(recipe, "2026-11-22").text)

    opened: list[Any] = []
    start = starter("sqlite:///kept.db", Path("logs"), opened)
    session = whole(start, machine(limit_gib=2.2, rate=by_tokens), trials=6)
    start_record(session.search, record_of(out=Path("one")))
    for connection in opened:
        connection.close()


def run_command(words: list[str]) -> tuple[str, str]:
    """Run a command line in this process, and return its end and its error."""
    sys.argv = ["autotune", *words]
    hub.HF_HUB_OFFLINE = True  # it is read from the environment when the library is imported
    shutil.copy("kept.db", "study.db")  # an earlier line may have deleted the study
    errors = io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            app.main()
    except SystemExit as ended:
        code = ended.code
    text = errors.getvalue()
    if "Traceback (most recent call last)" in text and "--debug" not in words:
        return "tracebacks", text
    if re.search(r"^error: unexpected ", text, re.MULTILINE) or code not in EXIT_CODES:
        return "unexpected", f"exit code {code}: {text}"
    return ("error" if code else "answer"), text
