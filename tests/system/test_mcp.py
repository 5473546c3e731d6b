"""Agents: a client of the official SDK talks to `autotune mcp` over stdio, and SKILL.md ships."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters

from autotune.cli.mcp_server import TOOLS, words

ROOT = Path(__file__).parents[2]
SPACE = """\
version: 1
knobs: {micro_batch_size: 2, seq_len: 64, lora_rank: 16, precision: fp32, checkpointing: none,
  compile: none}
"""
LORA = """\
base_model: mistralai/Mistral-7B-v0.3
micro_batch_size: 1
sequence_len: 2048
adapter: lora
lora_r: 16
"""


def with_client(folder: Path, use: Callable[[Client], Awaitable[Any]]) -> Any:
    """Start the server in a folder, and return the result of `use`."""
    environment = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache")}
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "autotune", "mcp"],
        env=environment | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
        cwd=folder,
    )

    async def connect() -> Any:
        async with Client(server) as client:
            return await use(client)

    return asyncio.run(connect())


def called(folder: Path, *calls: tuple[str, dict[str, Any]]) -> list[tuple[bool, str, Any]]:
    """Call tools one after another. Return for each: whether it failed, its text and its data."""

    async def use(client: Client) -> Any:
        return [await client.call_tool(name, arguments) for name, arguments in calls]

    return [
        (result.is_error, result.content[0].text, result.structured_content)
        for result in with_client(folder, use)
    ]


def test_a_client_lists_the_tools_with_their_options(tmp_path: Path) -> None:
    async def use(client: Client) -> Any:
        return await client.list_tools()

    tools = {tool.name: tool for tool in with_client(tmp_path, use).tools}
    assert tuple(tools) == TOOLS
    assert all(tool.description for tool in tools.values())
    options = tools["plan"].input_schema["properties"]
    assert options["examples"] == {
        "type": "integer",
        "description": "Number of examples in the full run. [10000]",
    }
    assert options["set"]["type"] == "array" and options["json"]["type"] == "boolean"
    assert tools["check"].input_schema["required"] == ["file"]
    assert "out" not in options and "events" not in tools["run"].input_schema["properties"]


def test_a_plan_and_a_check_are_short_texts_or_all_numbers(tmp_path: Path) -> None:
    (tmp_path / "fits.yaml").write_text(LORA)
    (tmp_path / "large.yaml").write_text(LORA.replace("batch_size: 1", "batch_size: 64"))
    card = {"model": "qwen3-8b", "gpu": "rtx-4090"}
    plan, numbers, fits, large = called(
        tmp_path,
        ("plan", card),
        ("plan", card | {"tokens_per_example": 512, "json": True}),
        ("check", {"file": "fits.yaml", "gpu": "h100"}),
        ("check", {"file": "large.yaml", "gpu": "a10"}),
    )

    failed, text, data = plan
    assert not failed and data is None
    assert "tokens/s" in text.splitlines()[0] and len(text.splitlines()) < 20
    failed, text, data = numbers
    assert not failed and data["answer"] == json.loads(text)
    assert data["answer"]["best"]["config"]["method"] == "lora"
    failed, text, _ = fits
    assert not failed and "fits" in text.splitlines()[0]
    failed, text, _ = large
    assert failed and "error: large.yaml does not fit a10\n  try: " in text


WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("plan", {"gpu": "rtx-4091"}, "'rtx-4091'", "did you mean 'rtx-4090'"),
    ("plan", {"gpu": "a10", "exampels": 5}, "no option '--exampels'", "'--examples'"),
    ("plan", {"gpu": "a10", "examples": "many"}, "--examples: 'many'", "autotune plan --help"),
    ("plan", {"gpu": "a10", "examples": 0}, "examples cannot be 0", "see --help"),
    ("train", {}, "no tool 'train'", "try: one of plan, compare"),
]


def test_a_wrong_argument_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    calls = [(name, {"model": "qwen3-8b"} | arguments) for name, arguments, _, _ in WRONG]
    for (failed, text, data), (_, _, error, remedy) in zip(
        called(tmp_path, *calls), WRONG, strict=True
    ):
        assert failed and data is None
        assert text.startswith("error: ") and error in text and remedy in text
        assert "\n  try: " in text


@pytest.mark.probe
def test_a_run_of_the_demo_reports_its_progress(tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text(SPACE)
    arguments = {"model": "demo-3m", "gpu": "cpu", "space": "space.yaml", "trials": 1}
    arguments |= {"budget": "5m", "global_batch": 4, "examples": 100, "study": "one"}
    lines: list[str] = []

    async def use(client: Client) -> tuple[Any, Any]:
        async def progress(number: float, total: float | None, message: str | None) -> None:
            lines.append(message or "")

        run = await client.call_tool("run", arguments, progress_callback=progress)
        return run, await client.call_tool("status", {"study": "one", "json": True})

    run, status = with_client(tmp_path, use)
    assert not run.is_error and "tokens/s" in run.content[0].text
    assert any("budget" in line for line in lines) and len(lines) > 3
    assert status.structured_content["answer"]["study"] == "one"
    assert (tmp_path / "runs" / "one" / "export" / "train.py").is_file()


def test_arguments_become_options_that_a_value_cannot_leave() -> None:
    arguments = {"file": "--help", "gpu": "--details", "json": True, "set": ["a=1"], "model": None}
    assert words("check", arguments) == [
        "check",
        "--gpu=--details",
        "--json",
        "--set=a=1",
        "--",
        "--help",
    ]


def test_the_skill_ships_in_the_package_and_names_only_real_commands(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "autotune", "skill"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == (ROOT / "autotune" / "cli" / "SKILL.md").read_text()
    assert done.stdout.startswith("---\nname: autotune\ndescription: ")
    assert len(done.stdout.splitlines()) <= 200
    server = ROOT / "autotune" / "cli" / "mcp_server.py"
    assert len(server.read_text().splitlines()) <= 200
