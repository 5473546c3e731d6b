"""A light install answers what needs no GPU: on any system, without the extra `run`."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path, PureWindowsPath
from typing import Any

import pytest

from autotune.cli.app import ANYWHERE, COMMANDS
from autotune.core.installed import INSTALL, OF_RUN, NotInstalled
from autotune.planning.foreign_sharding import strategy_of
from autotune.trainer.hub_data import is_hub_name
from tests.helpers import light_machine
from tests.unit.test_architecture import PACKAGE_OF, names_of

ROOT = Path(__file__).parents[2]
RUN = ("--model", "mistral-7b", "--mean-tokens", "300", "--p99-tokens", "900")
RUN += ("--set", "checkpointing=full", "--set", "compile=none", "--set", "packing=false")
RUN += ("--set", "attention=sdpa")
H100, CARDS = (*RUN, "--gpu", "h100"), (*RUN, "--gpus", "h100")
DATASET = ("plan", "--model", "mistral-7b", "--gpu", "a10", "--dataset", "rows.jsonl")
LONGEST = ("longest", "--model", "llama-3.1-8b", "--gpu", "rtx-4090")
ANSWERS: list[tuple[tuple[str, ...], str]] = [
    (("--version",), "autotune "),
    (("--help",), "compare"),
    (("gpus",), "h100-sxm"),
    (("models",), "mistralai/Mistral-7B-v0.3"),
    (("models", "--json"), "mistralai/Mistral-7B-v0.3"),
    (("prices",), "h100-sxm"),
    (("spaces",), "qlora"),
    (("suites", "--json"), "a10-mistral-7b"),
    (("schema", "plan"), '"$schema"'),
    (("plan", *H100), "tokens/s"),
    (("plan", *H100, "--json"), '"tokens_per_s"'),
    (("plan", *H100, "--gpus", "2", "--set", "kernels=torch"), "with ddp"),
    (("plan", "--spec", "a10-mistral-7b", "--details"), "optimised"),
    (("plan", "--model", "shapes", "--gpu", "a10"), "tokens/s"),
    (DATASET, "tokens/s"),
    (("compare", *CARDS, "--sizes", "10000"), "h100-sxm"),
    (("compare", *CARDS, "--json"), '"usd_per_1000_samples"'),
    (("compare", *CARDS, "--format", "markdown"), "| h100-sxm "),
    (("check", "run.yaml", "--gpu", "h100"), "fits"),
    ((*LONGEST, "--method", "lora", "--method", "qlora"), "147,456"),
    (("run", "--help"), "--budget"),
]
FAILURES: list[tuple[tuple[str, ...], str]] = [
    *(((name,), f"autotune {name} needs") for name in COMMANDS if name not in ANYWHERE),
    (("plan", "--model", "no/such", "--gpu", "a10"), "'no/such' is not in the catalogue"),
    ((*DATASET, "--tokenizer", "shapes"), "counting tokens needs"),
    (("longest", "--model", "gemma-2-9b", "--gpu", "h100"), "counting needs torch"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192}
    config |= {"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 16}
    (tmp_path / "shapes").mkdir()
    (tmp_path / "shapes" / "config.json").write_text(json.dumps(config | {"vocab_size": 128256}))
    (tmp_path / "rows.jsonl").write_text('{"text": "Grüße → ок"}\n' * 50, encoding="utf-8")
    (tmp_path / "run.yaml").write_text(
        "# Größe\nbase_model: mistralai/Mistral-7B-v0.3\nadapter: lora\nlora_r: 16\n",
        encoding="utf-8",
    )
    return tmp_path


def run(folder: Path, commands: list[tuple[str, ...]], *system: str) -> list[tuple[Any, str, str]]:
    """Run the commands in one process, whose default encoding knows ASCII only."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "100"}
    environment |= {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    strict = ["-X", "warn_default_encoding", "-W", "error::EncodingWarning"]
    done = subprocess.run(
        [sys.executable, *strict, "-m", light_machine.__name__, *system],
        cwd=folder,
        env=environment,
        input=json.dumps(commands),
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers: list[tuple[Any, str, str]] = json.loads(done.stdout)
    return answers


@pytest.mark.parametrize("system", ["linux", "windows"])
def test_a_light_install_answers_without_a_gpu(folder: Path, system: str) -> None:
    answers = run(folder, [command for command, _ in ANSWERS], system)
    for (command, says), (code, out, errors) in zip(ANSWERS, answers, strict=True):
        assert code == 0, (command, errors)
        assert says in out, command
        assert "Traceback" not in errors, command


def test_other_commands_name_the_line_that_installs_them(folder: Path) -> None:
    answers = run(folder, [command for command, _ in FAILURES])
    for (command, says), (code, out, errors) in zip(FAILURES, answers, strict=True):
        if command == ("doctor",):
            assert code == 3 and INSTALL in out
            continue
        assert code == 2, (command, errors)
        assert says in errors and INSTALL in out + errors, command
        assert errors.count("error: ") == 1, command
    assert {path.name for path in folder.iterdir()} <= {"cache", "rows.jsonl", "run.yaml", "shapes"}


def test_studies_need_linux(folder: Path) -> None:
    ((code, _, errors), (of_help, _, _)) = run(folder, [("run",), ("run", "--help")], "windows")
    assert code == 3 and "autotune run runs on Linux only" in errors and "WSL 2" in errors
    assert of_help == 0


def test_the_names_of_the_extra_are_known() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    packages = {PACKAGE_OF.get(name, name.replace("_", "-")) for name in OF_RUN}
    assert packages == names_of(extras["run"])
    assert not packages & names_of(project["dependencies"])
    assert "autotune-llm[run]" in extras["test"]
    assert project["scripts"]["autotune-llm"] == project["scripts"]["autotune"]
    assert NotInstalled("this").exit_code == 2


def test_paths_of_windows_are_read() -> None:
    class WindowsPath(PureWindowsPath):
        def exists(self) -> bool:
            return False

    assert is_hub_name(WindowsPath("org/name"))  # type: ignore[arg-type]
    assert not is_hub_name(WindowsPath("C:/rows"))  # type: ignore[arg-type]
    assert strategy_of({"deepspeed": r"C:\zero3\configs\ds_z2.json"}) == "zero2"
