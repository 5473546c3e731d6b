"""`autotune gpus`, `models` and `spaces` through the real command line."""

import json
import re
from datetime import date

import pytest
from typer.testing import CliRunner

from autotune import __version__
from autotune.catalog import age, list_devices, list_models
from autotune.cli.app import app
from autotune.cli.commands import catalogs
from autotune.core.errors import UsageError
from autotune.core.units import DASH


def output(*args: str) -> str:
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout


def test_gpus():
    lines = output("gpus").splitlines()
    assert re.fullmatch(r"\d+ GPUs with \d+ to \d+ GiB of memory are known", lines[0])
    row = next(line for line in lines if " h200-sxm " in line)
    assert [cell.strip() for cell in row.strip("│┃ ").split("│")] == [
        "h200-sxm",
        "140.4",
        "989",
        "4,800",
        "$3.59",
    ]
    details = output("gpus", "--details").splitlines()
    row = next(line for line in details if " h200-sxm " in line)
    offer = f"runpod, {age('2026-10-03', date.today())}"
    assert [cell.strip() for cell in row.strip("│┃ ").split("│")][4:] == ["$3.59", offer, DASH]
    assert all(any(f" {device.name} " in line for line in lines) for device in list_devices())


def test_gpus_as_json():
    rows = {row["name"]: row for row in json.loads(output("gpus", "--json"))}
    assert set(rows) == {device.name for device in list_devices()}
    assert rows["h200-sxm"]["memory_gib"] == pytest.approx(143771 / 1024)
    assert rows["h200-sxm"]["price"]["usd_per_day"] == pytest.approx(24 * 3.59)
    assert rows["h200-sxm"]["purchase"] is None and rows["rtx-4090"]["purchase"]["usd"] == 1599
    assert rows["cpu"]["price"] is None
    assert rows["cpu"]["bf16_tflops"] is None


def test_a_part_of_a_name_selects_gpus_and_models():
    names = {row["name"] for row in json.loads(output("gpus", "RTX 4090", "--json"))}
    assert names == {"rtx-4090", "rtx-4090-laptop"}
    assert output("gpus", "v100-pcie-16").startswith("v100-pcie-16gb has 15.8 GiB of memory\n")
    assert output("gpus", "cpu").startswith("cpu has the memory of the machine\n")
    assert {row["name"] for row in json.loads(output("gpus", "a10g", "--json"))} == {"a10g"}

    names = {row["name"] for row in json.loads(output("models", "qwen3-8b", "--json"))}
    assert "Qwen/Qwen3-8B" in names
    assert all("qwen3-8b" in name.lower() for name in names)
    assert output("models", "demo").startswith("demo-3m has 0.00315 billion parameters\n")

    for command, what in (("gpus", "gpu"), ("models", "model")):
        failed = CliRunner().invoke(app, [command, "nosuch"])
        assert isinstance(failed.exception, UsageError)
        assert str(failed.exception).startswith(f"unknown {what} 'nosuch'")


def test_models():
    lines = output("models").splitlines()
    row = next(line for line in lines if " demo-3m " in line)
    assert [cell.strip() for cell in row.strip("│┃ ").split("│")] == [
        "demo-3m",
        "0.00315",
        "512",
    ]
    assert " mistral-7b, mistral-7b-v0.3 " in output("models", "--details")


def test_models_as_json():
    rows = {row["name"]: row for row in json.loads(output("models", "--json"))}
    assert set(rows) == {spec.name for spec in list_models()}
    demo = rows["demo-3m"]
    assert (demo["params"], demo["num_layers"], demo["hidden_size"]) == (3_147_456, 4, 192)
    assert demo["config"]["model_type"] == "llama"


def test_spaces():
    lines = output("spaces").splitlines()
    row = next(line for line in lines if " lora " in line)
    cells = [cell.strip() for cell in row.strip("│┃ ").split("│")]
    assert cells[:3] == [
        "lora",
        "138,240",
        "micro_batch_size, seq_len, lora_rank, precision, optimizer, checkpointing, compile,"
        " lora_kernels, loss, "
        "packing, packed_attention, padding",
    ]
    assert cells[3].endswith("search_spaces/lora.yaml")


def test_spaces_as_json():
    spaces = json.loads(output("spaces", "--json"))
    assert set(spaces) == {"cpu", "default", "everything", "full", "lora", "qlora"}
    assert spaces["lora"]["lora_rank"]["values"] == [8, 16, 32, 64]


def test_suites(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = {row["name"]: row for row in json.loads(output("suites", "--json"))}
    assert rows["qwen-7b"]["configs"] == 12 and rows["qwen-7b"]["source"].startswith(
        "https://github.com/QwenLM/Qwen"
    )
    assert all(name in output("suites") for name in rows)
    first = output("plan", "--spec", "qwen-7b").splitlines()[0]
    assert first == "6 of 6 configurations surely fit a100-80gb-sxm (estimated)"
    table = output("plan", "--spec", "qwen-7b", "--details")
    assert (
        "Published: https://github.com/QwenLM/Qwen" in table
        and "6 verdicts, of which 0 wrong" in table
    )
    assert "not predicted: its base is of GPTQ" in table
    compared = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines()]
    assert ["LoRA 1 x 256", "whole GB", "20.1", "19.9 (19.1 to 20.7)", "inside", ""] in compared
    excluded = ["Q-LoRA 1 x 256", "whole GB", "11.5", "–", "–", "its base is of GPTQ, not nf4"]
    assert excluded in compared
    planned = json.loads(output("plan", "--spec", "qwen-7b", "--json"))
    assert [row["verdict"] for row in planned[:6]] == ["fits"] * 6
    assert planned[0]["source"] == rows["qwen-7b"]["source"]


def test_version_and_help():
    assert output("--version") == f"autotune {__version__}\n"
    for command in (
        "run",
        "status",
        "oom",
        "export",
        "report",
        "calibrate",
        "doctor",
        "gpus",
        "models",
        "spaces",
    ):
        assert command in output("--help")
        assert output(command, "-h") == output(command, "--help")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run"], "no model is given"),
        (["plan", "--spec", "qwen-7"],
         "cannot read qwen-7: No such file or directory; did you mean 'qwen-7b'?"),
        (["run", "--model", "demo-3m", "--epochs", "0"],
         "epochs cannot be 0: it is a whole number, 1 to 10**15"),
        (["run", "--model", "demo-3m", "--price", "nan"],
         "price cannot be nan: it is a number, 0 or more"),
        (["run", "--model", "demo-3m", "--budget", "soon"],
         "--budget: 'soon' is not a duration; write it like 90s, 10m or 1h30m"),
        (["run", "--model", "demo-3m", "--set", "seq_len"], "--set 'seq_len' is not NAME=VALUE"),
        (["run", "--model", "demo-3m", "--set", "=1"], "--set '=1' is not NAME=VALUE"),
        (["run", "--model", "demo-3m", "--set", "a=[1"], "--set 'a=[1': the value cannot be read"),
        (["run", "--gpu", "cpu", "--model", "demo-3m", "--set", "seqlen=1"],
         "there is no setting 'seqlen'; did you mean 'seq_len'?"),
        (["run", "--gpu", "a10x", "--model", "demo-3m"],
         "unknown gpu 'a10x'; did you mean 'a10' or 'a10g' or 'a100'?"),
        (["run", "--spec", "no.yaml"], "cannot read no.yaml: No such file or directory"),
    ],
)  # fmt: skip
def test_argument_errors(tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, args)
    assert isinstance(result.exception, UsageError)
    assert str(result.exception) == message
    assert result.exception.remedy
    assert list(tmp_path.iterdir()) == []  # nothing was begun


def test_tables_are_whole_in_a_pipe(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    catalogs.gpus(json_=False, details=True)
    catalogs.models(json_=False, details=True)
    text = capsys.readouterr().out
    assert all(device.name in text for device in list_devices())
    assert all(spec.name in text and ", ".join(spec.aliases) in text for spec in list_models())
    assert re.search(r"\$0.526 │ aws, \d+ (months|years) old ", text) and "$1,599.00 (2022)" in text
    assert "…" not in text


def test_the_tables_as_json(capsys):
    catalogs.gpus(json_=True)
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["cpu"]["memory_gib"] is None and rows["cpu"]["price"] is None
    assert rows["h100-sxm"]["price"]["usd_per_hour"] == 2.69
    catalogs.models(json_=True)
    models = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert models["openai-community/gpt2"]["num_layers"] == 12
