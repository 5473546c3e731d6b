"""The MCP server: agents call commands of autotune as tools, over stdin and stdout.

Each call runs a command in a process of its own. A tool's arguments are therefore the options of
the command, its answer is what the command prints, and a failure has the command's remedy.
"""

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, get_args

import typer
from mcp import types
from mcp.server import Server, ServerRequestContext
from mcp.server.stdio import stdio_server

from autotune.cli.app import COMMANDS, app, function_of
from autotune.core.process import module_command
from autotune.core.version import __version__

TOOLS = ("plan", "compare", "check", "longest", "status", "run")
INSTRUCTIONS = (
    "autotune finds the best configuration for fine-tuning a language model on a GPU. plan, compare"
    " and check estimate without a GPU; run measures real training steps. A failure ends with a"
    " remedy: follow it. `autotune skill` prints a guide."
)
# Options that write files for people, or that this server sets itself
NOT_OFFERED = {"help", "events", "quiet", "format", "html", "out", "json-dir"}
KINDS = {bool: "boolean", int: "integer", float: "number"}
JSON_HELP = "Answer with JSON, which has all numbers, instead of a short text."
LINE_LIMIT = 2**24  # the longest line that a command may print, in bytes; JSON is one line

Say = Callable[[int, str], Awaitable[None]]


def tool(name: str) -> types.Tool:
    """Describe a command as a tool: its arguments are the command's options."""
    properties, required = {}, []
    declared = inspect.signature(function_of(name)).parameters
    for parameter in _parameters(name):
        annotation = declared[parameter.name].annotation
        properties[key := _key(parameter)] = _schema(parameter, annotation)
        if parameter.required:
            required.append(key)
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    _, text = COMMANDS[name]
    return types.Tool(
        name=name,
        description=text.partition("\n\n")[0],
        input_schema=schema | {"additionalProperties": False},
    )


def words(name: str, arguments: dict[str, Any]) -> list[str]:
    """Return the command line for these arguments of a tool.

    An argument that the command does not know becomes an option too, so that the command refuses it
    and names the nearest option.
    """
    positional = {_key(one) for one in _parameters(name) if one.param_type_name == "argument"}
    options, texts = [], []
    for name_given, given in arguments.items():
        key = name_given.replace("_", "-")
        for value in given if isinstance(given, list) else [given]:
            if key in positional:
                texts.append(str(value))
            elif value is True:
                options.append(f"--{key}")
            elif value is not None and value is not False:
                options.append(f"--{key}={value}")
    return [name, *options, "--", *texts]


async def call(name: str, arguments: dict[str, Any], say: Say) -> types.CallToolResult:
    """Run a command, and return its answer; `say` gets each line that it prints meanwhile."""
    process = await asyncio.create_subprocess_exec(
        *module_command("autotune"),
        *words(name, arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=LINE_LIMIT,
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        answer, notes = await asyncio.gather(process.stdout.read(), _notes(process.stderr, say))
        code = await process.wait()
    finally:
        if process.returncode is None:  # the client cancelled the call; a study can be resumed
            with suppress(ProcessLookupError):
                process.terminate()

    text = answer.decode().strip()
    data = json.loads(text) if arguments.get("json") and text else None
    if code:
        text = "\n".join(filter(None, (text, _error(notes))))
    return _result(text, is_error=code != 0, data=data)


async def serve() -> None:
    """Answer the requests on stdin until it ends."""

    async def on_list(context: ServerRequestContext[Any], params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[tool(name) for name in TOOLS])

    async def on_call(
        context: ServerRequestContext[Any], params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        async def say(number: int, text: str) -> None:
            await context.session.report_progress(number, None, text)

        if params.name not in TOOLS:
            text = f"error: there is no tool {params.name!r}\n  try: one of {', '.join(TOOLS)}"
            return _result(text, is_error=True)
        return await call(params.name, params.arguments or {}, say)

    server = Server(
        "autotune",
        version=__version__,
        instructions=INSTRUCTIONS,
        on_list_tools=on_list,
        on_call_tool=on_call,
    )
    async with stdio_server() as (reader, writer):
        await server.run(reader, writer, server.create_initialization_options())


def _result(text: str, *, is_error: bool, data: Any = None) -> types.CallToolResult:
    return types.CallToolResult(
        content=[types.TextContent(type="text", text=text)],
        structured_content=None if data is None else {"answer": data},
        is_error=is_error,
    )


async def _notes(stream: asyncio.StreamReader, say: Say) -> list[str]:
    """Read the lines of stderr, and report each as progress."""
    lines: list[str] = []
    async for line in stream:
        if text := line.decode(errors="replace").rstrip():
            lines.append(text)
            await say(len(lines), text)
    return lines


def _error(notes: list[str]) -> str:
    """Return the error at the end of stderr, with its remedy."""
    starts = [index for index, line in enumerate(notes) if line.startswith("error: ")]
    return "\n".join(notes[starts[-1] :] if starts else notes[-5:])


def _parameters(name: str) -> list[Any]:
    """Return the options and arguments of a command that a tool offers."""
    group = typer.main.get_group(app)
    _, command, _ = group.resolve_command(typer.Context(group, resilient_parsing=True), [name])
    assert command is not None
    return [one for one in command.params if _key(one) not in NOT_OFFERED]


def _key(parameter: Any) -> str:
    """Return the name of an argument: the option without its dashes."""
    return str(max(parameter.opts, key=len).removeprefix("--"))


def _schema(parameter: Any, annotation: Any) -> dict[str, Any]:
    """Return the JSON Schema of an option's value, of the annotated type."""
    value = get_args(annotation)[0]  # of Annotated
    types_of_value = get_args(value) or (value,)
    kind: dict[str, Any] = {
        "type": next((KINDS[one] for one in types_of_value if one in KINDS), "string")
    }
    text = JSON_HELP if _key(parameter) == "json" else getattr(parameter, "help", None) or ""
    if parameter.multiple:
        kind = {"type": "array", "items": kind}
    return kind | {"description": text}
