"""What several exporters need: lines for a header comment, and the values that follow from a recipe."""

from collections.abc import Iterable
from typing import Any

from autotune.core.text import printable
from autotune.core.units import fmt_count, fmt_gib, fmt_seconds, fmt_usd
from autotune.study.summary import Recipe
from autotune.trainer.settings import ALLOCATOR_VARIABLE, ALLOCATORS

WARMUP_SHARE = 0.03


def on_cpu(recipe: Recipe) -> bool:
    """Whether the study is of a CPU, on which its exports then run too."""
    return recipe.device.kind == "cpu"


def environment(recipe: Recipe) -> str:
    """Variables that stand before a command.

    The study's number of GPUs is seen, counted as nvidia-smi does: among more than one Trainer would split each batch
    of a single process, and TRL refuses to run so.
    """
    if on_cpu(recipe):
        return "CUDA_VISIBLE_DEVICES="
    gpus = ",".join(map(str, range(recipe.config.num_gpus)))
    return f"CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={gpus} {'='.join(allocator(recipe))}"


def allocator(recipe: Recipe) -> tuple[str, str]:
    """The environment variable by which torch's allocator is as it was measured: its name and value."""
    return ALLOCATOR_VARIABLE, ALLOCATORS[recipe.config.allocator]


def one_line(text: str) -> str:
    """`text` fit for a comment: one line of printable characters, since anybody may choose study and model names."""
    return printable(text, " ").rstrip()


def comment(lines: Iterable[str]) -> str:
    """The lines as a `#` comment, which YAML, Python and bash share; ends without a newline."""
    return "\n".join(f"# {one_line(line)}".rstrip() for line in lines)


def sectioned(head: Iterable[str], sections: Iterable[tuple[str, dict[str, Any]]]) -> str:
    """YAML below a comment, its keys in sections of which each may have a note; what is empty is left out."""
    import yaml

    text = comment(head) + "\n"
    for note, values in sections:
        if values:
            text += (
                "\n"
                + (f"{comment([note])}\n" if note else "")
                + yaml.safe_dump(values, sort_keys=False, width=120)
            )
    return text


def summary_lines(recipe: Recipe) -> list[str]:
    """What the file is, what to expect of it and where that was measured: six lines, in pairs."""
    winner, cost, workload = recipe.winner, recipe.winner.cost, recipe.workload
    memory, fingerprint = winner.measurement, recipe.fingerprint
    low, high = (fmt_seconds(3600 * hours) for hours in cost.interval_hours)
    machine = [fingerprint.device]
    machine += [f"driver {fingerprint.driver}"] if fingerprint.driver else []
    machine += [f"CUDA {fingerprint.cuda}"] if fingerprint.cuda else []
    packages = [f"{name} {version}" for name, version in sorted(fingerprint.packages.items())]
    return [
        f"autotune study {recipe.study}: {recipe.model.name} on {recipe.device.label}",
        f"Configuration: {winner.config.label()}, {recipe.accumulation} micro batches a step",
        f"Expect ({winner.evidence.value}): {fmt_seconds(winner.performance.step_time_s)} a step,"
        f" {fmt_count(winner.performance.tokens_per_second)} useful tokens/s{trained_on(recipe)},"
        f" peak {fmt_gib(memory.peak_reserved_gib)} of {fmt_gib(memory.limit_gib)}",
        f"Full run: {workload.examples:,} examples, {workload.epochs} epoch(s), {cost.num_steps:,} steps:"
        f" {fmt_seconds(3600 * cost.full_run_hours)} ({low} to {high}), {fmt_usd(cost.full_run_usd)}",
        f"Probed with {recipe.trainer} on {', '.join(machine)}",
        f"Fingerprint {fingerprint.digest}: python {fingerprint.python}, {', '.join(packages)}",
    ]


def trained_on(recipe: Recipe) -> str:
    """How many of the useful tokens per second are trained on; "" where all are."""
    share = recipe.workload.lengths.trained_share
    trained = fmt_count(share * recipe.winner.performance.tokens_per_second)
    return "" if share == 1 else f" ({trained} of them trained on)"


def warmup_steps(recipe: Recipe) -> int:
    """Optimizer steps of warm-up. All versions of transformers take a whole number; 5.16 removed warmup_ratio."""
    return warmup_steps_of(recipe.winner.cost.num_steps)


def warmup_steps_of(num_steps: int) -> int:
    """Optimizer steps of warm-up in a run of so many."""
    return round(WARMUP_SHARE * num_steps)


def save_steps(recipe: Recipe) -> int:
    """Optimizer steps from one checkpoint to the next."""
    winner = recipe.winner
    return recipe.run_options.steps_between_saves(
        winner.cost.num_steps, winner.performance.step_time_s
    )


def eval_steps(recipe: Recipe) -> int:
    """Optimizer steps from one evaluation of the examples that are held out to the next, where any are."""
    winner = recipe.winner
    return recipe.run_options.steps_between_evaluations(
        winner.cost.num_steps, winner.performance.step_time_s
    )


def model_source(recipe: Recipe) -> str:
    """The source of the weights: the user's directory, else the name, which may be one on the Hub."""
    return recipe.model.weights or recipe.model.name


def has_published_weights(recipe: Recipe) -> bool:
    """False for a made-up shape such as demo-3m: its name is neither of the Hub (org/name) nor a directory."""
    return recipe.model.weights is not None or "/" in recipe.model.name
