"""Makes the parts that all exporters need: the comment at the top of a file, and derived values."""

from collections.abc import Iterable
from typing import Any

from autotune.core.text import printable
from autotune.core.units import fmt_count, fmt_gib, fmt_many, fmt_seconds, fmt_usd
from autotune.study.summary import Recipe
from autotune.trainer.settings import ALLOCATOR_VARIABLE, ALLOCATORS

WARMUP_SHARE = 0.03


def on_cpu(recipe: Recipe) -> bool:
    """Return whether the study ran on a CPU; its exported scripts then run on a CPU, too."""
    return recipe.device.kind == "cpu"


def environment(recipe: Recipe) -> str:
    """Return the environment variables for a command line.

    The variables make only the GPUs that the study used visible, numbered as in nvidia-smi. If a
    training with a single process saw several GPUs, Trainer would split its batches among them, and
    TRL would refuse to run.
    """
    if on_cpu(recipe):
        return "CUDA_VISIBLE_DEVICES="
    gpus = ",".join(map(str, range(recipe.config.num_gpus)))
    return f"CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={gpus} {'='.join(allocator(recipe))}"


def allocator(recipe: Recipe) -> tuple[str, str]:
    """Return the name and value of the environment variable with the measured allocator setting."""
    return ALLOCATOR_VARIABLE, ALLOCATORS[recipe.config.allocator]


def one_line(text: str) -> str:
    """Return `text` in a form that is safe in a comment: one line of printable characters.

    `text` may contain names that users or model authors chose.
    """
    return printable(text, " ").rstrip()


def comment(lines: Iterable[str]) -> str:
    """Return the lines as a `#` comment of YAML, Python or bash, without a newline at the end."""
    return "\n".join(f"# {one_line(line)}".rstrip() for line in lines)


def yaml_sections(head: Iterable[str], sections: Iterable[tuple[str, dict[str, Any]]]) -> str:
    """Return YAML with `head` as a comment at the top. Each section is (note, keys and values).

    A note that is not empty is a comment above its section. Sections without keys are left out.
    """
    import yaml

    text = comment(head) + "\n"
    for note, values in sections:
        if values:
            heading = f"{comment([note])}\n" if note else ""
            text += "\n" + heading + yaml.safe_dump(values, sort_keys=False, width=120)
    return text


def summary_lines(recipe: Recipe) -> list[str]:
    """Return six lines: two about the winner, two about its results, two about the measurement."""
    winner = recipe.winner
    cost = winner.cost
    workload = recipe.workload
    memory = winner.measurement
    fingerprint = recipe.fingerprint

    low, high = (fmt_seconds(3600 * hours) for hours in cost.interval_hours)
    machine = [fingerprint.device]
    machine += [f"driver {fingerprint.driver}"] if fingerprint.driver else []
    machine += [f"CUDA {fingerprint.cuda}"] if fingerprint.cuda else []
    packages = [f"{name} {version}" for name, version in sorted(fingerprint.packages.items())]

    return [
        f"autotune study {recipe.study}: {recipe.model.name} on {recipe.device.label}",
        f"Configuration: {winner.config.label()}, {recipe.accumulation} micro batches a step",
        f"Expect ({winner.evidence.value}): {fmt_seconds(winner.performance.step_time_s)} a step,"
        f" {fmt_count(winner.performance.tokens_per_second)} useful tokens/s"
        f"{trained_tokens_text(recipe)},"
        f" peak {fmt_gib(memory.peak_reserved_gib)} of {fmt_gib(memory.limit_gib)}",
        f"Full run: {fmt_many(workload.examples, 'example')}, {fmt_many(workload.epochs, 'epoch')},"
        f" {fmt_many(cost.num_steps, 'step')}: {fmt_seconds(3600 * cost.full_run_hours)}"
        f" ({low} to {high}), {fmt_usd(cost.full_run_usd)}",
        f"Probed with {recipe.trainer} on {', '.join(machine)}",
        f"Fingerprint {fingerprint.digest}: python {fingerprint.python}, {', '.join(packages)}",
    ]


def trained_tokens_text(recipe: Recipe) -> str:
    """Return text such as " (900 of them trained on)", or "" if all tokens are trained on."""
    share = recipe.workload.lengths.trained_share
    trained = fmt_count(share * recipe.winner.performance.tokens_per_second)
    return "" if share == 1 else f" ({trained} of them trained on)"


def warmup_steps(recipe: Recipe) -> int:
    """Return the number of optimizer steps with a rising learning rate (warm-up).

    The result is a number of steps, because transformers 5.16 removed warmup_ratio.
    """
    return warmup_steps_of(recipe.winner.cost.num_steps)


def warmup_steps_of(num_steps: int) -> int:
    """Return the number of warm-up steps in a run of `num_steps` optimizer steps."""
    return round(WARMUP_SHARE * num_steps)


def save_steps(recipe: Recipe) -> int:
    """Return the number of optimizer steps between two checkpoints."""
    winner = recipe.winner
    return recipe.run_options.steps_between_saves(
        winner.cost.num_steps, winner.performance.step_time_s
    )


def eval_steps(recipe: Recipe) -> int:
    """Return the number of optimizer steps between two evaluations of the held-out examples."""
    winner = recipe.winner
    return recipe.run_options.steps_between_evaluations(
        winner.cost.num_steps, winner.performance.step_time_s
    )


def model_source(recipe: Recipe) -> str:
    """Return the source of the weights: the user's directory, or the model's name."""
    return recipe.model.weights or recipe.model.name


def has_published_weights(recipe: Recipe) -> bool:
    """Return whether the model has weights, on the Hub (org/name) or in a directory.

    A model that autotune made up, such as demo-3m, has no weights.
    """
    return recipe.model.weights is not None or "/" in recipe.model.name
