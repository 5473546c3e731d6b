"""`autotune mcp` and `autotune skill`: autotune for agents."""

from pathlib import Path

from autotune.core.errors import UsageError
from autotune.core.installed import is_installed

SKILL = Path(__file__).parents[1] / "SKILL.md"


def mcp() -> None:
    """Serve the tools until stdin ends. Raises UsageError if the package mcp is not installed."""
    if not is_installed("mcp"):
        raise UsageError(
            "autotune mcp needs the package mcp", remedy="pip install 'autotune-llm[mcp]'"
        )
    import asyncio

    from autotune.cli.mcp_server import serve

    asyncio.run(serve())


def skill() -> None:
    """Print SKILL.md."""
    print(SKILL.read_text(encoding="utf-8"), end="")
