"""The text of --help: commands in groups, the options of large commands in panels, and the start.

Click's own formatter writes this text. Typer would use the library rich, but importing rich takes
longer than running a short command.
"""

from collections.abc import Mapping
from typing import Any

from typer.core import TyperCommand

# The commands that a newcomer tries, in this order
START = """\
autotune finds the best configuration to fine-tune a language model on a GPU.

Start here:
  1. Estimate without a GPU   autotune plan --model qwen3-8b --gpu rtx-4090
  2. Try a search on a CPU    autotune run --gpu cpu --model demo-3m --budget 2m
  3. Search on an NVIDIA GPU  autotune run --model qwen3-8b --examples 10000

Add --dataset FILE to measure the lengths of your own examples.
`autotune --help` lists all commands, `autotune run --help` the options of run."""

# The commands, grouped by purpose. `app.COMMANDS` has the description of each command.
GROUPS = {
    "Find the best configuration": ("run", "resume", "learn"),
    "Estimate without a GPU": ("plan", "compare", "check", "longest"),
    "Use the result": ("train", "verify", "explain", "export", "report", "submit", "import"),
    "Studies": ("status", "list", "oom", "dashboard", "delete"),
    "Machines and fleets": ("doctor", "calibrate", "worker", "fleet", "dev"),
    "Agents": ("mcp", "skill"),
    "Reference": ("gpus", "models", "prices", "spaces", "suites", "schema"),
}

# Other spellings of an option, which every command accepts. A command documents one spelling.
SPELLINGS = {"methods": "method"}
# A command with more options shows them in panels.
FEW_OPTIONS = 20
# The panels, with the names of parameters. The first panel has the options that are used most.
PANELS = {
    "Most used": (
        *("model", "gpu", "dataset", "examples", "epochs", "global_batch", "space", "budget"),
    ),
    "GPUs": ("gpus", "nodes", "network", "within", "workers"),
    "Lengths of the examples": (
        *("loss_on", "split", "tokenizer", "lengths", "mean_tokens", "p99_tokens"),
        *("tokens_per_example", "tokens"),
    ),
    "Completions (grpo)": (
        *("mean_completion", "p99_completion", "completions", "max_completion"),
        *("num_generations", "prompts_per_step", "steps_per_generation", "iterations", "beta"),
    ),
    "The training": ("objective", "trainer", "methods", "seq_len", "rank", "set_"),
    "What may win": (
        *("min_rank", "max_truncated", "allow_quantized", "allow_fp8", "allow_pure_bf16"),
        *("allow_any_optimizer", "max_usd", "max_hours"),
    ),
    "Memory and prices": (
        *("memory_gib", "headroom", "price", "prices", "calibration", "owned", "owned_usd"),
        *("owned_hours", "usd_per_kwh", "sizes", "buy", "hours_per_week"),
    ),
    "The search": ("spec", "trials", "shallow_only", "quality", "verify", "evidence"),
    "Output": (
        *("details", "study", "storage", "out", "format_", "html", "json_", "events"),
        *("quiet", "help"),
    ),
}


class PanelCommand(TyperCommand):
    """A command whose --help shows many options in panels.

    An option may also be given by a spelling that another command has (SPELLINGS).
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments of a command line."""
        ctx.token_normalize_func = lambda name: SPELLINGS.get(name, name)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the panels. Arguments, and options that belong to no panel, come first."""
        parameters = {one.name: one for one in self.get_params(ctx)}
        if len(parameters) <= FEW_OPTIONS:
            super().format_options(ctx, formatter)
            return

        placed = {name for names in PANELS.values() for name in names}
        others = tuple(name for name in parameters if name not in placed)
        for title, names in ({"Arguments": others} | PANELS).items():
            given = (parameters[name] for name in names if name in parameters)
            if rows := [row for one in given if (row := one.get_help_record(ctx))]:
                with formatter.section(title):
                    formatter.write_dl(rows)


def write_groups(commands: Mapping[str, Any], formatter: Any) -> None:
    """Write the commands in their groups, with the whole first paragraph of each description."""
    width = max(map(len, commands))
    for title, names in GROUPS.items():
        with formatter.section(title):
            formatter.write_dl(
                [(name.ljust(width), commands[name].help.partition("\n\n")[0]) for name in names]
            )
