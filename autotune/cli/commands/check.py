"""`autotune check`: whether a run that another tool's YAML describes fits a card, how long it takes, what to change.

By formula and at once. Nothing of the file is run; what is printed of it can be printed.
"""

import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from autotune.catalog import DeviceSpec, ModelSpec, list_devices, list_models, resolve_model
from autotune.cli.commands.catalogs import print_json
from autotune.cli.commands.plan import HOW_SURE, hours, sightings, target
from autotune.core.errors import NothingFits, UsageError
from autotune.core.files import load_yaml
from autotune.core.probe_types import Evidence
from autotune.core.text import printable
from autotune.core.train_config import TrainConfig
from autotune.core.units import DASH, fmt_count, fmt_gib, fmt_usd
from autotune.planning.foreign_config import FP32_BASE, ForeignConfig, read_foreign
from autotune.planning.plan import FITS, OOM, TIGHT, limit_of, make_plan
from autotune.planning.run_check import Change, Checked, Duration, FixSearch, Setting, check, duration, smallest_card
from autotune.prediction.memory_formula import ERROR
from autotune.problem.constraints import NO_SDPA
from autotune.problem.length_distribution import Lengths
from autotune.problem.setup import DEFAULT_TOKENS, set_up
from autotune.problem.study_spec import StudySpec, make_spec
from autotune.problem.task import Task
from autotune.problem.workload import Workload
from autotune.report.comparison import price_text

SAYS = {FITS: "fits", TIGHT: "too close to tell", OOM: "out of memory"}
WORTH = 1.05  # times as fast, from which on another configuration is told
_DATA = ("dataset", "tokenizer", "lengths", "mean_tokens", "p99_tokens", "tokens_per_example", "tokens", "examples")


@dataclass(frozen=True, slots=True, kw_only=True)
class Faster:
    """Another configuration that learns the same, how many times as fast it is, and the command that measures it."""

    config: TrainConfig
    times: float
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """All that is told of one file. `first` is what to change, `alone` what each change would save."""

    file: Path
    setting: Setting
    checked: Checked
    first: Change | None
    alone: tuple[tuple[Change, float], ...]
    card: DeviceSpec | None
    faster: Faster | None
    notes: tuple[str, ...]

    @property
    def timed(self) -> Duration | None:
        """Of the run as it is, or of what it would have to be."""
        if self.checked.fits != OOM:
            return self.checked.duration
        return self.first.checked.duration if self.first else None


def check_file(file: Path, flags: dict[str, Any], *, evidence: Path, as_json: bool = False) -> None:
    """Print whether it fits. `flags` are of `plan`: gpu, model, and about examples, memory and prices; None is absent.

    Raises:
        UsageError: the file, the model or the card cannot be read or is not known.
        NothingFits: it does not fit.
    """
    answer = answer_of(file, flags, evidence)
    if as_json:
        print_json(as_data(answer))
    for label, text in lines(answer) if not as_json else ():
        print(printable(f"{label:>8}  {text}" if label else text))
    device = answer.setting.device.name
    if answer.checked.fits == TIGHT:
        print(f"warning: {printable(file.name)} may run out of memory on {device}", file=sys.stderr)
    if answer.checked.fits == OOM:
        larger = f"a larger GPU, such as {answer.card.name}" if answer.card else "several GPUs that share the model"
        remedy = f"{shown(answer.first.edits)}, or {larger}" if answer.first else larger
        raise NothingFits(f"{printable(file.name)} does not fit {device}", remedy=printable(remedy))


def answer_of(file: Path, flags: dict[str, Any], evidence: Path) -> Answer:
    """Raises UsageError."""
    run = read_foreign(file)
    values = {key: value for key, value in load_yaml(file.read_text(encoding="utf-8")).items() if isinstance(key, str)}
    device = target(flags.get("gpu") or "auto")
    model, taken = find_model(named := flags.get("model") or run.model)
    run = replace(run, config=_attending(run, model))
    spec = make_spec(None, flags | {"gpu": device.name, "model": model.name if taken else named})
    task, said = _subject(spec, device, run)
    setting = Setting(
        model=model,
        device=device,
        limit_gib=limit_of(device, spec.headroom, spec.memory_gib),
        workload=_workload(task.workload, spec, run),
        price=task.price,
        seen=sightings(evidence),
        padded=run.format == "axolotl" and values.get("pad_to_sequence_len") is True,
    )
    checked = check(setting, run)
    if checked is None:
        raise UsageError(
            printable(f"there is no formula for {model.config['model_type']} models"),
            remedy="measure it: `autotune run`, with --shallow-only where the GPU is too small",
        )
    first: Change | None = None
    alone: tuple[tuple[Change, float], ...] = ()
    if checked.fits != FITS:
        search = FixSearch(setting=setting, checked=checked, values=values, reread=partial(_reread, model))
        first = search.first()
        alone = tuple((change, search.saves(change)) for change in search.alone())
    base = checked if checked.fits != OOM else first.checked if first else None
    return Answer(
        file=file,
        setting=setting,
        checked=checked,
        first=first,
        alone=alone,
        card=smallest_card(checked, list_devices(), spec.headroom) if checked.fits != FITS else None,
        faster=_faster(task, spec, setting, base.run) if base else None,
        notes=(*_notes(setting, checked, taken), *said, *run.notes),
    )


def find_model(name: str) -> tuple[ModelSpec, str | None]:
    """The model that a file names, and a sentence where it is taken for another after its name.

    Copies of a model under another organisation, its directory elsewhere, and what was tuned of it for chats are built
    alike. Raises UsageError.
    """
    specs = list_models()
    exact = {key.lower() for spec in specs for key in (spec.name, *spec.aliases)}
    if name.lower() not in exact and not os.path.isdir(os.path.expanduser(name)):
        alike = {_shape_name(key): spec for spec in specs for key in (spec.name, *spec.aliases)}
        if (found := alike.get(_shape_name(name))) is not None:
            return found, f"{name} is taken to be shaped like {found.name}, after its name (else give --model)."
    try:
        return resolve_model(name), None
    except UsageError as error:
        raise UsageError(
            str(error),
            remedy="give --model: a name of its shape that `autotune models` lists, or a directory with config.json",
        ) from None


def _shape_name(name: str) -> str:
    """'NousResearch/Meta-Llama-3.1-8B-Instruct' -> 'llama-3.1-8b'."""
    last = re.split(r"[/\\]", name.rstrip("/\\"))[-1].lower().removeprefix("meta-")
    return re.sub(r"-(?:instruct|chat|base|it|hf|\d{4})(?=-|$)", "", last)


def _attending(run: ForeignConfig, model: ModelSpec) -> TrainConfig:
    """Where transformers refuses SDPA it takes eager attention unasked."""
    eager = model.config["model_type"] in NO_SDPA and run.config.attention == "sdpa"
    return replace(run.config, attention="eager") if eager else run.config


def _reread(model: ModelSpec, values: dict[str, Any]) -> ForeignConfig | None:
    """These values as their tool would read them; None where it refuses them."""
    import yaml

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "changed.yml"
        path.write_text(yaml.safe_dump(values, allow_unicode=True), encoding="utf-8")
        try:
            run = read_foreign(path)
        except UsageError:
            return None
    return replace(run, config=_attending(run, model))


def _subject(spec: StudySpec, device: DeviceSpec, run: ForeignConfig) -> tuple[Task, tuple[str, ...]]:
    """The study of the same examples with the same global batch, and what is odd about their lengths."""
    context = resolve_model(spec.model).max_seq_len or run.config.seq_len
    rows = run.accumulation * run.config.micro_batch_size
    spec = replace(spec, gpu=device.name, pins={"seq_len": min(run.config.seq_len, context)}, global_batch=rows)
    setup = set_up(spec, device, partial(print, file=sys.stderr))
    assumed = setup.task.workload.lengths.source == "assumed"
    return setup.task, () if assumed else tuple(f"{text}." for text in setup.warnings if "cut off" in text)


def _workload(given: Workload, spec: StudySpec, run: ForeignConfig) -> Workload:
    """The examples as they were given; else as many as the file says."""
    if given.lengths.source == "assumed":
        given = replace(given, lengths=Lengths.constant(min(DEFAULT_TOKENS, run.config.seq_len), "assumed"))
    if run.max_examples is None or spec.examples is not None or spec.tokens is not None:
        return given
    examples = run.max_examples if given.examples_assumed else min(given.examples, run.max_examples)
    return replace(given, examples=examples, examples_assumed=False)


def _faster(task: Task, spec: StudySpec, setting: Setting, run: ForeignConfig) -> Faster | None:
    """What else fits and learns the same. Where nobody said how long examples are, by rows that are full."""
    config, workload = run.config, setting.workload
    known = workload.lengths.source != "assumed"
    if not known:
        workload = replace(workload, lengths=Lengths.constant(config.seq_len, "assumed"))
    now = duration(replace(setting, workload=workload), run)
    no_bf16 = config.precision.startswith("bf16") and not setting.device.supports_bf16
    if now is None or no_bf16 or config.seq_len > (setting.model.max_seq_len or config.seq_len):
        return None
    held = ("method", "lora_rank", "rslora", "seq_len", "quantization", "double_quant", "precision", "optimizer")
    pins = {knob: getattr(config, knob) for knob in held}
    if config.packing or not known:
        pins["packing"] = config.packing and known
    space = task.space
    for knob, value in pins.items():
        space = space if value is None else space.pin(knob, value)
    batch = max(1, round(workload.run_shape(config, accumulation=run.accumulation).examples_per_step))
    space, _ = space.narrow("micro_batch_size", lambda size: batch % size == 0, "it does not divide the global batch")
    study = replace(task, model=setting.model, space=space, workload=replace(workload, global_batch=batch))
    best = make_plan(study, headroom=spec.headroom, memory_gib=spec.memory_gib, seen=setting.seen).best
    times = (best.tokens_per_s or 0.0) / now.tokens_per_s if best else 0.0
    if best is None or times < WORTH:
        return None
    given = {name: getattr(spec, name) for name in ("model", "gpu", *_DATA) if getattr(spec, name) is not None}
    given |= {"space": "full"} if config.method == "full" else {"rank": config.lora_rank}
    given |= {"seq_len": config.seq_len, "global_batch": batch} | (
        {} if known else {"tokens_per_example": config.seq_len}
    )
    given |= {} if {"examples", "tokens", "dataset", "lengths"} & set(given) else {"examples": workload.examples}
    words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    told = [
        knob for knob in held if knob not in ("method", "lora_rank", "seq_len") and pins[knob] not in (False, "none")
    ]
    words += [word for knob in told for word in ("--set", f"{knob}={pins[knob]}")]
    return Faster(config=best.config, times=times, command=shlex.join(["autotune", "run", *words]))


def _notes(setting: Setting, checked: Checked, taken: str | None) -> Iterator[str]:
    run, config, device, workload = checked.run, checked.run.config, setting.device, setting.workload
    yield from (taken,) if taken else ()
    if not device.supports_bf16 and config.precision.startswith("bf16"):
        yield f"{device.name} has no bf16: it starts with bf16 off and fp16 on alone, which takes as much memory."
    context = setting.model.max_seq_len
    if context and config.seq_len > context and not taken:
        yield f"Sequences of {config.seq_len:,} tokens are longer than the model's context of {context:,}."
    if checked.need.most is None:
        yield "What DoRA takes beside its adapters is not known: it needs more than told."
    elif checked.need.least != checked.need.most:
        what = "A base in 8 bits" if config.quantization == "int8" else "What is offloaded"
        between = "that of 4 bits and of 16" if config.quantization == "int8" else "none of it on the GPU and all"
        yield f"{what} has no formula: what it needs lies between {between}, and the more is told."
    if run.num_gpus is None:
        yield "The file does not say on how many GPUs it trains: told for one, and sharding is not modelled."
    elif run.num_gpus > 1:
        again = fmt_gib(checked.need.told.gradients or checked.need.told.adapters)
        yield f"Told for each of {run.num_gpus} GPUs, as data parallel: each holds all of it, sharding is not modelled."
        yield f"What they exchange is not counted, nor that torch holds the gradients twice then ({again} more)."
    if workload.lengths.source == "assumed":
        yield f"How long the examples are was not given: {workload.lengths} (--dataset, --lengths, --mean-tokens)."
    if not config.packing and not setting.padded:
        yield "Memory is told for rows of the whole length, speed for rows padded to the longest of a micro batch."


def lines(answer: Answer) -> Iterator[tuple[str, str]]:
    """(label, text), the answer first."""
    checked, run = answer.checked, answer.checked.run
    yield "", verdict(answer)
    batch = "one micro batch" if run.accumulation == 1 else f"{run.accumulation:,} micro batches"
    yield "file", f"{answer.file.name} ({run.format}): {run.model}, {run.config.label()}, {batch} a step"
    terms = " + ".join(f"{name} {value:.1f}" for name, value in checked.need.told.terms().items() if value >= 0.05)
    yield "memory", f"{terms}; the peak is in the {checked.need.told.phase} pass"
    if answer.first:
        needs = "fits, with" if answer.first.checked.fits == FITS else "may fit, with"
        yield "change", f"{shown(answer.first.edits)}: then it {needs} {_gib(answer.first)}{_cut(answer, answer.first)}"
    elif checked.fits != FITS:
        yield "change", "nothing that was tried surely makes it fit"
    for change, saves in answer.alone:
        told = f"saves {fmt_gib(saves)}, needs {_gib(change)}: {SAYS[change.checked.fits]}"
        yield "alone", f"{shown(change.edits)}: {told}{_cut(answer, change)}"
    if checked.fits != FITS:
        card = answer.card.name if answer.card else "none of the catalogue"
        yield "card", f"the smallest on which it fits as it is: {card}"
    yield from _duration_lines(answer)
    if answer.faster:
        yield "faster", _faster_line(answer, answer.faster)
    yield from (("note", note) for note in answer.notes)
    yield "how", f"nothing was measured here; estimated: {HOW_SURE}"


def verdict(answer: Answer) -> str:
    """'out of memory: needs 27.3 of 20.6 GiB on a10, 6.7 GiB (33 %) too much'."""
    checked, limit, device = answer.checked, answer.setting.limit_gib, answer.setting.device.name
    need, least = checked.need, checked.need.least.peak_reserved_gib
    peak = least if checked.fits == OOM else need.told.peak_reserved_gib
    on = f"each of {run} {device}" if (run := checked.run.num_gpus or 1) > 1 else device
    between = f"{least:.1f} to " if need.most is not None and checked.fits != OOM else "at least "
    between = "" if need.least == need.most else between
    needs = f"{SAYS[checked.fits]}: needs {between}{peak:.1f} of {limit:.1f} GiB on {on}"
    if between and checked.fits == TIGHT:
        return needs
    by = f"{abs(peak - limit):.1f} GiB ({100 * abs(peak / limit - 1):.0f} %)"
    errs = f", and the formula errs by up to {100 * ERROR:.0f} %" if checked.fits == TIGHT else ""
    return f"{needs}, {by} {'too much' if peak > limit else 'to spare'}{errs}"


def _gib(change: Change) -> str:
    return fmt_gib(change.checked.need.told.peak_reserved_gib)


def _cut(answer: Answer, change: Change) -> str:
    lengths = [one.run.config.seq_len for one in (answer.checked, change.checked)]
    before, then = map(answer.setting.workload.truncated, lengths)
    return f"; {then:.0%} of the tokens are cut off" if then > before else ""


def _duration_lines(answer: Answer) -> Iterator[tuple[str, str]]:
    told, workload, price, run = answer.timed, answer.setting.workload, answer.setting.price, answer.checked.run
    changed = ", with that change" if answer.checked.fits == OOM else ""
    if told is None:
        if answer.checked.fits != OOM or answer.first:
            yield "speed", f"unknown: no formula knows it{changed}"
        return
    each = " a GPU" if (run.num_gpus or 1) > 1 else ""
    by = f", tightened by {told.basis} measured on this card" if told.basis else ""
    low, high = map(fmt_count, told.interval)
    yield "speed", f"{fmt_count(told.tokens_per_s)} useful tokens/s{each} ({low} to {high}{by}), estimated{changed}"
    what = f"{told.num_steps:,} steps"
    if run.max_steps is None:
        assumed = " (assumed)" if workload.examples_assumed else ""
        what = f"{workload.examples:,} examples{assumed} x {run.epochs:g}, {what}"
    yield "run", f"{hours(told.hours)} ({' to '.join(map(hours, told.interval_hours))}) for {what}, estimated{changed}"
    if price is None or told.interval_usd is None:
        yield "cost", f"{DASH} (no price is known: --price USD_PER_HOUR)"
        return
    at = f"({' to '.join(map(fmt_usd, told.interval_usd))}) at {price_text(price, date.today())}{each}"
    yield "cost", f"{fmt_usd(told.usd)} {at}, estimated; start-up, saves and evaluation aside"


def _faster_line(answer: Answer, faster: Faster) -> str:
    base = answer.first.checked if answer.first and answer.checked.fits == OOM else answer.checked
    one, own, assumed = faster.config, base.run.config, answer.setting.workload.lengths.source == "assumed"
    names = ["micro_batch_size", "checkpointing", "compile", "loss", "kernels"] + ["packing"] * (not assumed)
    names += ["attention"] * ("eager" in (one.attention, own.attention))
    pairs = [(name, getattr(one, name), getattr(own, name)) for name in names]
    apart = [f"{name} {new} instead of {old}" for name, new, old in pairs if new != old]
    apart += ["the base in bfloat16"] * (FP32_BASE in base.run.notes)
    usd = answer.timed.usd if answer.timed else None
    cost = f", {fmt_usd(usd / faster.times)} instead of {fmt_usd(usd)}" if usd else ""
    full = " on full rows" if assumed else ""
    return f"{faster.times:.1f} times as fast{full}{cost}, estimated: {', '.join(apart)}; to prove it: {faster.command}"


def shown(edits: dict[str, Any]) -> str:
    """'gradient_checkpointing: true, micro_batch_size: 2', as YAML takes it."""
    texts = {key: value if isinstance(value, str) else json.dumps(value, default=str) for key, value in edits.items()}
    return ", ".join(f"{key}: {text}" for key, text in texts.items())


def as_data(answer: Answer) -> dict[str, Any]:
    """As plain data."""
    setting, run, faster = answer.setting, answer.checked.run, answer.faster
    facts = setting.workload.facts()
    return {
        **{"file": str(answer.file), "format": run.format, "model": setting.model.name, "device": setting.device.name},
        **checked_data(answer.checked),
        **{"limit_gib": setting.limit_gib, "num_gpus": run.num_gpus, "epochs": run.epochs, "max_steps": run.max_steps},
        "workload": {name: facts[name] for name in ("examples", "examples_assumed", "tokens_per_example")},
        "price": asdict(setting.price) if setting.price else None,
        "change": answer.first and change_data(answer.first),
        "each_change": [change_data(change) | {"saves_gib": saves} for change, saves in answer.alone],
        "smallest_card": answer.card.name if answer.card else None,
        "faster": faster and asdict(faster) | {"config": faster.config.as_dict()},
        **{"notes": list(answer.notes), "how_sure": HOW_SURE, "evidence": Evidence.ESTIMATED},
    }


def change_data(change: Change) -> dict[str, Any]:
    return {"edits": change.edits, **checked_data(change.checked)}


def checked_data(checked: Checked) -> dict[str, Any]:
    """Of the run, or of what a change makes of it."""
    need, run = checked.need, checked.run
    return {
        **{"verdict": SAYS[checked.fits], "label": run.config.label(), "config": run.config.as_dict()},
        "accumulation": run.accumulation,
        "peak_reserved_gib": need.told.peak_reserved_gib,
        "bounds_gib": [need.least.peak_reserved_gib, need.most and need.most.peak_reserved_gib],
        **{"memory_gib": need.told.terms(), "phase": need.told.phase},
        "duration": checked.duration and asdict(checked.duration),
    }
