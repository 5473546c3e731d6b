"""What the command line says to bad input: one error, a remedy, a documented exit code, nothing on
stdout.
"""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from autotune.cli import app

CANARY = "s3cr3t-c4n4ry"
RUN = ("run", "--gpu", "cpu", "--model", "demo-3m")

MISSPELT_SPEC = "model: demo-3m\ngpu: cpu\nbugdet: 5m\n"
WRONG_SPEC = "model: demo-3m\ngpu: cpu\nexamples:\n  - 5\n"
BROKEN_SPEC = "model: demo-3m\ngpu: [cpu\nbudget: 5m\n"
MISSPELT_SPACE = "version: 1\nknobs:\n  micro_batch_size:\n    valeus: [1, 2]\n"
WRONG_SPACE = (
    "version: 1\nknobs:\n  micro_batch_size: {values: [1, 2]}\n  lora_rank: {values: [16, many]}\n"
)
UNKNOWN_KNOB = "version: 1\nknobs:\n  micro_batchsize: {values: [1, 2]}\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AUTOTUNE_STORAGE", raising=False)
    for name, text in {
        "misspelt.yaml": MISSPELT_SPEC,
        "wrong.yaml": WRONG_SPEC,
        "broken.yaml": BROKEN_SPEC,
        "misspelt-space.yaml": MISSPELT_SPACE,
        "wrong-space.yaml": WRONG_SPACE,
        "unknown-knob.yaml": UNKNOWN_KNOB,
        "in-the-way": "a file",
        "no.db": "certainly not SQLite" * 100,
    }.items():
        (tmp_path / name).write_text(text)
    return tmp_path


class Said:
    """What one command wrote, and how it ended."""

    def __init__(self, code: object, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def is_one_error(self) -> bool:
        lines = self.err.splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        remedies = [line for line in lines if line.startswith("  try: ")]
        # Lines before the error are progress; the remedy comes last, but for where more is said.
        return len(errors) == len(remedies) == 1 and remedies[0] in (lines[-1], *lines[-2:-1])


def said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> Said:
    """Run the program in this process, through its entry point."""
    monkeypatch.setattr(sys, "argv", ["autotune", *arguments])
    with pytest.raises(SystemExit) as ended:
        app.main()
    captured = capsys.readouterr()
    return Said(ended.value.code, captured.out, captured.err)


def test_windows_is_refused_before_a_module_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setitem(sys.modules, "fcntl", None)  # type: ignore[arg-type]
    ended = said(monkeypatch, capsys, *RUN)
    assert (
        ended.code == 3 and ended.is_one_error() and "autotune run runs on Linux only" in ended.err
    )


USAGE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no model": (("run", "--gpu", "cpu"), ("no model is given",)),
    "unknown GPU": (("run", "--model", "demo-3m", "--gpu", "h2000"), ("'h2000'", "did you mean")),
    "unknown model": (
        ("run", "--gpu", "cpu", "--model", "demo-3n"),
        ("'demo-3n'", "did you mean", "demo-3m"),
    ),
    "unknown space": ((*RUN, "--space", "loar"), ("'loar'", "did you mean 'lora'")),
    "unknown knob": (
        (*RUN, "--set", "microbatch_size=4"),
        ("'microbatch_size'", "did you mean 'micro_batch_size'"),
    ),
    "wrong value": ((*RUN, "--set", "micro_batch_size=many"), ("micro_batch_size", "'many'")),
    "unknown choice": ((*RUN, "--set", "precision=fp8"), ("precision", "'fp8'", "bf16_mixed")),
    "wrong checkpointing": ((*RUN, "--set", "checkpointing=every_1"), ("every_1",)),
    "no equals sign": ((*RUN, "--set", "nonsense"), ("'nonsense'", "NAME=VALUE")),
    "no value": ((*RUN, "--set", "precision="), ("'precision='", "NAME=VALUE")),
    "no YAML": ((*RUN, "--set", "precision=[fp32"), ("cannot be read",)),
    "two ranks": (
        (*RUN, "--rank", "16", "--set", "lora_rank=32"),
        ("lora_rank is set to 16 and to 32",),
    ),
    "two values": (
        (*RUN, "--set", "dora=true", "--set", "dora=false"),
        ("dora is set to True and to False",),
    ),
    "no such rank": (
        (*RUN, "--min-rank", "999"),
        ("--min-rank 999", "the largest rank of the space is 32"),
    ),
    "uneven batch": (
        (*RUN, "--set", "micro_batch_size=5"),
        ("micro_batch_size", "global batch of 32"),
    ),
    "too long": ((*RUN, "--seq-len", "1024"), ("seq_len", "context of 512")),
    "bad budget": ((*RUN, "--budget", "soon"), ("--budget", "'soon'")),
    "no budget": ((*RUN, "--budget", "0s"), ("--budget", "positive")),
    "no memory": ((*RUN, "--memory-gib", "0"), ("memory_gib", "0")),
    "headroom of all": ((*RUN, "--headroom", "1"), ("headroom",)),
    "no trials": ((*RUN, "--trials", "0"), ("trials",)),
    "both sizes": ((*RUN, "--examples", "5", "--tokens", "5000"), ("examples or tokens",)),
    "JSON twice": ((*RUN, "--json", "--events"), ("--events",)),
    "unknown command": (
        ("plann",),
        ("no command 'plann'; did you mean 'plan'", "`autotune --help`"),
    ),
    "unknown option": (
        ("plan", "--modle", "x"),
        ("plan has no option '--modle'; did you mean '--model'",),
    ),
    "an option of another command": (
        ("compare", "--gpu", "a10"),
        ("no option '--gpu'; did you mean '--gpus'?",),
    ),
    "an option that became a setting": (
        (*RUN, "--seed", "3"),
        (
            "autotune run has no option '--seed'",
            "try: give --set seed=3, or the key seed in a file",
        ),
    ),
    "a flag that became a setting": ((*RUN, "--fresh"), ("try: give --set fresh=true, or the",)),
    "a setting of plan": (
        ("plan", "--gpu", "a10", "--model", "demo-3m", "--slack=0.1"),
        ("autotune plan has no option '--slack'", "give --set slack=0.1"),
    ),
    "a method of plan": (
        ("plan", "--method", "qlora", "--gpu", "t4"),
        ("autotune plan has no option '--method'", "give --space qlora (lora, qlora or full)"),
    ),
    "a setting that plan does not read": (
        ("plan", "--gpu", "a10", "--model", "demo-3m", "--set", "seed=3"),
        ("--set seed: this command does not read seed", "`autotune run`"),
    ),
    "a setting with an option": (
        (*RUN, "--set", "epochs=3"),
        ("--set epochs: epochs is not a setting", "try: give --epochs 3"),
    ),
    "a setting with a flag": (
        (*RUN, "--set", "allow_quantized=true"),
        ("allow_quantized is not a setting", "try: give --allow-quantized\n"),
    ),
    "two values of a setting": (
        (*RUN, "--set", "seed=3", "--set", "seed=4"),
        ("seed is set to 3 and to 4",),
    ),
    "wrong value of a setting": ((*RUN, "--set", "seed=many"), ("seed cannot be 'many'",)),
    "unknown choice of a setting": (
        (*RUN, "--set", "vision=blind"),
        ("vision cannot be 'blind': it is frozen or trained",),
    ),
    "a dry run": ((*RUN, "--dry-run"), ("no option '--dry-run'", "try: `autotune plan` estimates")),
    "unknown option of all": (
        ("--verson",),
        ("autotune has no option '--verson'; did you mean '--version'?",),
    ),
    "unknown short option": (
        ("longest", "-z"),
        ("no option '-z'", "`autotune longest --help` lists its options"),
    ),
    "no value of an option": (
        ("plan", "--gpu"),
        ("option '--gpu' requires an argument", "try: give --gpu VALUE;"),
    ),
    "value of a flag": (
        ("run", "--quiet=3"),
        ("'--quiet' does not take a value", "try: give --quiet alone"),
    ),
    "no number": (
        ("run", "--trials", "x"),
        ("--trials: 'x': ", "integer", "`autotune run --help`"),
    ),
    "no number after =": (("run", "--trials=x"), ("--trials: 'x': ", "integer")),
    "no argument": (
        ("check",),
        ("check: missing argument", "FILE", "try: autotune check [OPTIONS]"),
    ),
    "two arguments": (
        ("check", "a", "b"),
        ("unexpected extra argument", "b", "try: autotune check [OPTIONS]"),
    ),
    "unknown part": (
        ("dev", "foo"),
        ("autotune dev: no such command 'foo'", "try: autotune dev [OPTIONS] COMMAND"),
    ),
    "no such spec": (("run", "--spec", "nowhere.yaml"), ("nowhere.yaml", "No such file")),
    "misspelt key": (("run", "--spec", "misspelt.yaml"), ("misspelt.yaml:3:", "bugdet")),
    "wrong type": (("run", "--spec", "wrong.yaml"), ("wrong.yaml:", "examples")),
    "broken YAML": (("run", "--spec", "broken.yaml"), ("broken.yaml:3", "not valid YAML")),
    "misspelt space": (
        (*RUN, "--space", "misspelt-space.yaml"),
        ("misspelt-space.yaml:4:", "valeus"),
    ),
    "wrong space": (
        (*RUN, "--space", "wrong-space.yaml"),
        ("wrong-space.yaml", "lora_rank", "'many'"),
    ),
    "unknown knob in a space": (
        (*RUN, "--space", "unknown-knob.yaml"),
        ("'micro_batchsize'", "did you mean"),
    ),
    "no study": (("status",), ("no database sqlite:///runs/autotune.db", "autotune run")),
    "no study to export": (("export",), ("no database",)),
    "unknown format": (("export", "--format", "unsloth"), ("'unsloth'", "trl")),
    "no URL": ((*RUN, "--storage", f"me:{CANARY}@host"), ("--storage",)),
    "no URL of a worker": (
        ("worker", "--study", "x", "--storage", "x"),
        ("--storage is not a usable database URL",),
    ),
    "unknown driver": (
        (*RUN, "--storage", f"nonsense://me:{CANARY}@host/db"),
        ("--storage", "nonsense"),
    ),
    "no port": ((*RUN, "--storage", f"postgresql+psycopg://me:{CANARY}@host:x/db"), ("--storage",)),
}
SERVER = f"postgresql+psycopg://me:{CANARY}@127.0.0.1:1/studies"
MACHINE = {
    "not this GPU": (
        ("run", "--model", "demo-3m", "--gpu", "h200"),
        ("h200", "no NVIDIA GPU here"),
    ),
    "no GPU": (("run", "--model", "demo-3m"), ("no NVIDIA GPU here",)),
}
STORAGE = {
    "a file in the way": ((*RUN, "--out", "in-the-way/out"), ("in-the-way/out", "Not a directory")),
    "out is a file": ((*RUN, "--out", "in-the-way"), ("in-the-way",)),
    "out is a folder": (
        ("compare", "--gpus", "a10", "--model", "demo-3m", "--out", "."),
        ("cannot write .: Is a directory",),
    ),
    "no folder for SQLite": (
        (*RUN, "--storage", "sqlite:///in-the-way/a.db"),
        ("unable to open database file",),
    ),
    "no database": ((*RUN, "--storage", "sqlite:///no.db"), ("no.db", "not a database")),
    "unreachable server": ((*RUN, "--storage", SERVER), ("127.0.0.1", "onnection")),
    "unreachable, by status": (("status", "--storage", SERVER), ("127.0.0.1", "onnection")),
    "unreachable, by report": (("report", "--storage", SERVER), ("127.0.0.1", "onnection")),
}
TABLE = [
    pytest.param(code, arguments, expected, id=name)
    for code, rows in ((2, USAGE), (3, MACHINE), (6, STORAGE))
    for name, (arguments, expected) in rows.items()
]


@pytest.mark.parametrize(("code", "arguments", "expected"), TABLE)
def test_bad_input(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: int,
    arguments: tuple[str, ...],
    expected: tuple[str, ...],
) -> None:
    monkeypatch.setattr("autotune.core.nvml.list_gpus", list)  # also on a machine that has one
    answer = said(monkeypatch, capsys, *arguments)
    assert answer.code == code, answer.err
    assert answer.is_one_error(), answer.err
    assert answer.out == ""
    assert "Traceback" not in answer.err and CANARY not in answer.err
    for part in expected:
        assert part in answer.err


def test_help_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(monkeypatch, capsys, "--version").code == 0
    assert said(monkeypatch, capsys, "plan", "--help").out.startswith("Usage: ")
    bare = said(monkeypatch, capsys)
    assert (bare.code, bare.err) == (0, "") and bare.out.startswith("autotune finds ")


@pytest.mark.parametrize("command", ["list", "status", "oom", "report", "resume", "dashboard"])
def test_what_reads_studies_makes_no_database(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    for storage in ((), ("--storage", "sqlite:///a b/no.db")):
        answer = said(monkeypatch, capsys, command, *storage)
        if command == "list" and not storage:
            assert (
                answer.code == 0
                and "there is no study" in answer.out
                and "runs" not in os.listdir()
            )
            continue
        assert answer.code == 2 and answer.is_one_error(), answer.err
        assert "there is no database sqlite:///" in answer.err and not {"runs", "a b"} & set(
            os.listdir()
        )


def test_a_directory_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir("/proc")  # where not even root can make a directory
    answer = said(monkeypatch, capsys, *RUN)
    assert answer.code == 6 and answer.is_one_error(), answer.err
    assert "error: cannot write /proc/runs: " in answer.err and answer.out == ""


def test_an_error_of_the_file_system_is_no_riddle(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise PermissionError(13, "Permission denied", "/the/file")

    monkeypatch.setattr("autotune.catalog.list_devices", fail)
    answer = said(monkeypatch, capsys, "gpus")
    assert answer.code == 6 and answer.is_one_error()
    assert answer.err.startswith("error: /the/file: Permission denied\n")


def test_a_bad_environment_variable_is_reported_as_the_option_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AUTOTUNE_STORAGE", SERVER)
    answer = said(monkeypatch, capsys, "status")
    assert answer.code == 6 and answer.is_one_error() and CANARY not in answer.err


@pytest.mark.parametrize(
    "arguments",
    [("run", "--examples=many"), ("run", "--no-such-option"), ("no-such-command",)],
    ids=" ".join,
)
def test_what_is_no_option_or_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    answer = said(monkeypatch, capsys, *arguments)
    assert (answer.code, answer.out) == (2, "")
    assert arguments[-1].partition("=")[0] in answer.err and "Traceback" not in answer.err


def test_nothing_is_written_where_the_input_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    before = sorted(folder.iterdir())
    said(monkeypatch, capsys, *RUN, "--space", "misspelt-space.yaml")
    said(monkeypatch, capsys, *RUN, "--budget", "soon")
    assert sorted(folder.iterdir()) == before


def test_a_storage_error_after_the_worker_was_started_leaves_no_worker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A study that is named is looked for only then."""
    before = psutil.Process().children(recursive=True)  # other tests' worker may be warm
    answer = said(monkeypatch, capsys, *RUN, "--study", "mine", "--storage", SERVER)
    assert answer.code == 6 and answer.is_one_error()
    assert CANARY not in answer.err
    left = [child for child in psutil.Process().children(recursive=True) if child not in before]
    commands = [" ".join(child.cmdline()) for child in left]
    assert not any("autotune.probe.worker" in command for command in commands)


def test_a_running_study_is_not_run_twice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    import fcntl

    (folder / "out").mkdir()
    with (folder / "out" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4711")
        lock.flush()
        answer = said(monkeypatch, capsys, *RUN, "--study", "mine", "--out", "out")
    assert answer.code == 2 and answer.is_one_error()
    assert "'mine'" in answer.err and "4711" in answer.err


def program(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "autotune", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NO_COLOR": "1"},
    )


def test_the_program_itself() -> None:
    """What the tests above see from within a process is what a shell sees."""
    ended = program(*RUN, "--space", "loar")
    assert (ended.returncode, ended.stdout) == (2, "")
    first, second = ended.stderr.splitlines()
    assert first.startswith("error: unknown search space 'loar'")
    assert second.startswith("  try: ")


@pytest.mark.parametrize("where", ["before", "after"])
def test_debug_shows_the_traceback(where: str) -> None:
    arguments = [*RUN, "--space", "loar"]
    ended = program(*(["--debug", *arguments] if where == "before" else [*arguments, "--debug"]))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "Traceback (most recent call last)" in ended.stderr
    assert "unknown search space 'loar'" in ended.stderr


@pytest.mark.parametrize("words", [("models", "--json"), ("gpus",), ("--version",)], ids=" ".join)
def test_a_reader_that_ends_ends_the_program_silently(words: tuple[str, ...]) -> None:
    """`autotune gpus | head -1`, by print, by rich, and by what is left in the buffer at the end"""
    with subprocess.Popen(
        [sys.executable, "-m", "autotune", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141  # as for a program that SIGPIPE ended


def test_dev_alone_shows_its_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = said(monkeypatch, capsys, "dev")
    assert (answer.code, answer.err) == (0, "") and "inject " in answer.out


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["ru"], {"run"}),
        (["run", "--mod"], {"--model"}),
        (["run", "--model", "demo-"], {"demo-3m"}),
        (["plan", "--gpu", "h200-"], {"h200-sxm", "h200-nvl"}),
        (["run", "--space", "qlo"], {"qlora"}),
        (["run", "--set", "se"], {"seed=", "seq_len="}),
        (
            ["plan", "--set", "s"],
            {"save_steps=", "seq_len=", "sharding=", "slack=", "sync_each_batch="},
        ),
    ],
)
def test_the_shell_completes_commands_options_and_names(
    typed: list[str], offered: set[str]
) -> None:
    words = ["autotune", *typed]
    asked = {
        "_AUTOTUNE_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(typed)),
    }
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.argv[0] = 'autotune'; from autotune.cli.app import main; main()",
        ],
        env=os.environ | asked,
        capture_output=True,
        text=True,
        check=False,
    )
    assert set(done.stdout.split()) == offered, done.stderr


def test_nothing_is_collected_at_the_end_of_a_command() -> None:
    """The first function that is registered for the end is called last."""
    code = "import atexit, gc, sys\n"
    code += (
        "atexit.register(lambda: print(gc.get_freeze_count() > 10_000, gc.get_threshold()[0]))\n"
    )
    code += "from autotune.cli.app import main; sys.argv = ['autotune', 'list']; main()"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    frozen, threshold = ended.stdout.split()[-2:]
    assert frozen == "True" and int(threshold) >= 100_000
