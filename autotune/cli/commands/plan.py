"""`autotune plan`: what a card would hold, how fast it would train and what that would cost, without having one."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from autotune.catalog import DeviceSpec, resolve_device
from autotune.cli.commands.catalogs import print_json, print_table
from autotune.core.errors import EnvironmentProblem, NothingFits, UsageError
from autotune.core.train_config import TrainConfig
from autotune.core.units import DASH, fmt_count, fmt_gib, fmt_seconds, fmt_usd
from autotune.planning.observations import Observation, load_evidence
from autotune.planning.plan import FITS, TIGHT, Cell, Plan, Planned, limit_of, make_plan, published, what_fits
from autotune.problem.setup import Setup, open_reserve, set_up
from autotune.problem.study_spec import StudySpec
from autotune.problem.target import find_target
from autotune.problem.task import BASELINE, Task
from autotune.report.comparison import price_text
from autotune.study.storage.location import DEFAULT_ROOT

EVIDENCE = DEFAULT_ROOT / "evidence"
BATCHES = (1, 2, 4, 8, 16, 32)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
HOW_SURE = (
    "memory by a formula that was within 0.3 % of the models on an H200 that it was made with, and 5.1 % of ten others "
    "(LoRA, nf4, full fine-tuning), speed by another, whose ranges hold 80 % of cases"
)


def plan(spec: StudySpec, *, evidence: Path, as_json: bool = False) -> None:
    """Print a plan.

    Raises:
        UsageError: what cannot be, or no formula knows.
        NothingFits: no configuration of the space.
    """
    if spec.configs:
        _suite(spec, sightings(evidence), as_json=as_json)
        return
    made = plan_of(spec, target(spec.gpu), sightings(evidence))
    task = made.task
    tables = {label(base): cells(task, base, made.limit_gib) for base in bases(task)}
    if as_json:
        print_json(as_data(made) | {"what_fits": {name: list(map(cell_data, found)) for name, found in tables.items()}})
    else:
        _print(made, tables)
    if made.best is None:
        raise NothingFits(
            f"nothing in the search space surely fits {task.device.name}",
            remedy="take a larger GPU (`autotune compare --gpus ...`), --space qlora, or a shorter --seq-len",
        )


def _suite(spec: StudySpec, seen: tuple[Observation, ...], *, as_json: bool) -> None:
    """The named configurations, beside what was published of them."""
    from autotune.cli.commands.suite import estimate
    from autotune.study.named_configs import COLUMNS

    task = subject_of(replace(spec, pins={}, configs=()), target(spec.gpu))
    told = estimate(spec, task, limit_of(task.device, spec.headroom, spec.memory_gib), seen)
    if as_json:
        print_json([one.data() for one in told])
    else:
        print(f"{task.device.name}. Nothing was measured here. Estimated: {HOW_SURE}.")
        print_table(None, dict(COLUMNS), [one.cells() for one in told])


def target(gpu: str) -> DeviceSpec:
    """The card that is planned for; with `auto` the one that is here."""
    if gpu.strip().lower() != "auto":
        return resolve_device(gpu)
    try:
        return find_target(gpu).device
    except EnvironmentProblem:
        raise UsageError("which GPU? There is none here", remedy="name one: --gpu a10 (`autotune gpus`)") from None


def subject_of(spec: StudySpec, device: DeviceSpec) -> Task:
    """The study that `autotune run` would do on this card."""
    return _setup(spec, device).task


def plan_of(spec: StudySpec, device: DeviceSpec, seen: Sequence[Observation]) -> Plan:
    """The plan of that study, or of its reserve where nothing else fits."""
    setup = _setup(spec, device)
    settings: dict[str, Any] = {"headroom": spec.headroom, "memory_gib": spec.memory_gib, "seen": seen}
    made = make_plan(setup.task, **settings)
    if made.best is None and setup.reserve != setup.task.space:
        opened = make_plan(open_reserve(setup).task, **settings)
        if opened.best is not None:
            return replace(opened, reason=f"nothing fits without a quantised base or leaner state; {opened.reason}")
    return made


def _setup(spec: StudySpec, device: DeviceSpec) -> Setup:
    setup = set_up(spec, device, partial(print, file=sys.stderr))
    for removal in setup.removals:
        print(f"left out: {removal}", file=sys.stderr)
    for warning in setup.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return setup


def sightings(evidence: Path) -> tuple[Observation, ...]:
    """What others measured: published, and imported."""
    imported, problems = load_evidence(evidence)
    for problem in problems:
        print(f"warning: {problem}", file=sys.stderr)
    return (*published(), *imported)


def bases(task: Task) -> list[TrainConfig]:
    """Of which tables are made: LoRA, QLoRA and full fine-tuning, each as guides give it."""
    precision = "bf16_mixed" if task.device.supports_bf16 else "fp16_mixed"
    attention = task.baselines()[0].attention
    lora = replace(BASELINE, precision=precision, attention=attention)
    nf4 = replace(lora, quantization="nf4", double_quant=True)
    full = replace(lora, method="full")
    return [lora, nf4, full, replace(full, precision="bf16_pure", optimizer="adamw_8bit")]


def label(config: TrainConfig) -> str:
    """What is the same in all cells of a table."""
    kind = "full fine-tuning" if config.method == "full" else f"LoRA r{config.lora_rank}"
    base = f" on {config.quantization}" if config.quantization != "none" else ""
    return f"{kind}{base}, {config.precision}, {config.optimizer}"


def cells(task: Task, base: TrainConfig, limit_gib: float) -> list[Cell]:
    longest = task.model.max_seq_len or max(LENGTHS)
    lengths = [length for length in LENGTHS if length <= longest] or [longest]
    return list(what_fits(task, base, limit_gib, BATCHES, lengths))


def as_data(made: Plan) -> dict[str, Any]:
    """As plain data."""
    task = made.task
    return {
        "model": task.model.name,
        "device": task.device.name,
        "workload": task.workload.facts(),
        "price": asdict(task.price) if task.price else None,
        "limit_gib": made.limit_gib,
        "best": made.best and planned_data(made.best),
        "baseline": planned_data(made.baseline),
        "reason": made.reason,
        "configurations": {"looked_at": made.looked_at, "of": made.of},
        "seen": [one.source for one in made.seen],
        "how_sure": HOW_SURE,
    }


def planned_data(one: Planned) -> dict[str, Any]:
    return {
        "config": one.config.as_dict(),
        "label": one.config.label(),
        "fits": one.fits,
        "peak_reserved_gib": one.footprint.peak_reserved_gib,
        "limit_gib": one.limit_gib,
        "memory_gib": one.footprint.terms(),
        "tokens_per_s": one.tokens_per_s,
        "interval_tokens_per_s": one.interval,
        "samples_per_s": one.samples_per_s,
        "cost": asdict(one.cost) if one.cost else None,
        "measurements_on_this_card": one.carried.basis if one.carried else 0,
        "evidence": one.evidence,
    }


def cell_data(cell: Cell) -> dict[str, Any]:
    return {
        "micro_batch_size": cell.micro_batch_size,
        "seq_len": cell.seq_len,
        "none_gib": cell.plain.footprint.peak_reserved_gib,
        "full_gib": cell.recomputed.footprint.peak_reserved_gib,
        "fits": cell.shown.fits,
        "checkpointing": cell.shown.config.checkpointing,
    }


def _print(made: Plan, tables: dict[str, list[Cell]]) -> None:
    task = made.task
    memory = fmt_gib(task.device.memory_gib)
    print(f"{task.model.name} on {task.device.name}: {memory}, {fmt_gib(made.limit_gib)} of it for tensors")
    print(f"Nothing was measured here. Estimated: {HOW_SURE}.\n")
    for name, one in (("best", made.best), ("guides", made.baseline)):
        if one is not None:
            print(f"{name:>8}  {one.config.label()}")
            for kind, text in lines(one, task).items():
                print(f"{kind:>8}  {text}")
            print()
    if made.best is not None:
        looked = (
            "" if made.looked_at >= made.of else f" (of the first {made.looked_at:,} of {made.of:,} configurations)"
        )
        print(f"{'why':>8}  {made.reason}{looked}\n")
    for name, found in tables.items():
        lengths = list(dict.fromkeys(cell.seq_len for cell in found))
        fitting = [cell for cell in found if cell.shown.fits in (FITS, TIGHT)]
        if not fitting:
            least = min(cell.recomputed.footprint.peak_reserved_gib for cell in found)
            print(f"{name}: does not fit, the least it needs is {fmt_gib(least)} of {fmt_gib(made.limit_gib)}")
            continue
        print(f"{name}: GiB by length and micro batch (c: only with every layer recomputed, ?: too close to tell)")
        print_table(
            None,
            {"seq_len": "right"} | {str(size): "right" for size in BATCHES},
            [(str(length), *(shown(cell) for cell in found if cell.seq_len == length)) for length in lengths],
        )


def lines(one: Planned, task: Task) -> dict[str, str]:
    """What is planned of a configuration, by what it is about."""
    terms = " + ".join(f"{name} {value:.1f}" for name, value in one.footprint.terms().items() if value >= 0.05)
    said = {"memory": f"{fmt_gib(one.footprint.peak_reserved_gib)} of {fmt_gib(one.limit_gib)}, {one.fits}: {terms}"}
    if one.tokens_per_s is None or one.interval is None or one.cost is None or one.carried is None:
        return said | {"speed": "unknown"}
    basis = one.carried.basis
    by = f", tightened by {basis} measured on this card" if basis else ""
    low, high = map(fmt_count, one.interval)
    said["speed"] = f"{fmt_count(one.tokens_per_s)} useful tokens/s ({low} to {high}{by})"
    cost, price = one.cost, task.price
    examples = f"{cost.examples:,} examples x {cost.epochs}"
    said["run"] = f"{hours(cost.full_run_hours)} ({' to '.join(map(hours, cost.interval_hours))}) for {examples}"
    if price is not None and cost.interval_usd is not None:
        bounds = " to ".join(map(fmt_usd, cost.interval_usd))
        spot = f", spot {fmt_usd(cost.spot_usd)}" if cost.spot_usd is not None else ""
        said["cost"] = f"{fmt_usd(cost.full_run_usd)} ({bounds}){spot} at {price_text(price, date.today())}"
    else:
        said["cost"] = f"{DASH} (no price is known: --price USD_PER_HOUR)"
    return said


def hours(value: float) -> str:
    return fmt_seconds(value * 3600)


def shown(cell: Cell) -> str:
    """'31.2', '18.4 c', '22.0 c?', 'OOM'."""
    one = cell.shown
    if one.fits not in (FITS, TIGHT):
        return "OOM"
    mark = "c" if one.config.checkpointing == "full" else ""
    mark += "?" if one.fits == TIGHT else ""
    return f"{one.footprint.peak_reserved_gib:.1f} {mark}".strip()


def gpus_of(text: Sequence[str]) -> list[DeviceSpec]:
    """Cards by names with commas between them, or given one by one; each once."""
    names = [name for part in text for name in part.split(",") if name.strip()]
    if not names:
        raise UsageError("which GPUs?", remedy="for example --gpus a10,l4,a100-80gb,h100")
    return list(dict.fromkeys(resolve_device(name) for name in names))
