"""The OOM report: what did not fit, by how much, what held the memory, the nearest thing that fits, what to change.

Pure: StudySummary -> OomReport, as Markdown or as plain data. Refusals (predicted, never launched) stand beside OOMs.
"""

import heapq
import math
import re
from dataclasses import asdict, dataclass
from typing import Any

from autotune.core.knobs import KNOBS
from autotune.core.probe_types import Outcome
from autotune.core.train_config import TrainConfig
from autotune.core.units import DASH, fmt_count, fmt_gib
from autotune.study.summary import StudySummary, TrialRecord

NUM_NEAREST = 3
# A second term is worth advice of its own from this share of the memory on.
WORTH_ADVICE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One holder of memory; `share` is of all named terms."""

    name: str
    gib: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Advice on one knob, or on something outside the search space (`knob` None)."""

    knob: str | None
    current: Any
    suggested: Any
    why: str

    def __str__(self) -> str:
        return self.why if self.knob is None else f"{self.knob} {self.current} → {self.suggested}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """A configuration of the study that fits. `differs` is {knob: [here, there]}."""

    number: int
    label: str
    distance: float
    differs: dict[str, list[Any]]
    tokens_per_second: float | None
    peak_reserved_gib: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OomEntry:
    """One trial that did not fit. `margin` is memory needed / limit - 1; for a refusal it is predicted."""

    number: int
    label: str
    config: dict[str, Any]
    outcome: str
    phase: str | None
    requested_gib: float | None
    allocated_gib: float | None
    reserved_gib: float | None
    limit_gib: float | None
    margin: float | None
    missed_gib: float | None
    terms: tuple[Term, ...]
    nearest: tuple[Neighbour, ...]
    changes: tuple[Change, ...]
    reason: str | None
    log: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OomReport:
    study: str
    num_trials: int
    entries: tuple[OomEntry, ...]

    def count(self, outcome: Outcome) -> int:
        return sum(entry.outcome == outcome.value for entry in self.entries)

    def headline(self) -> str:
        """'3 of 12 trials ran out of memory, 2 were refused before launch.'"""
        if not self.entries:
            return f"No trial of {self.num_trials} ran out of memory and none was refused."
        oom, refused = self.count(Outcome.OOM), self.count(Outcome.REFUSED)
        return f"{oom} of {self.num_trials} trials ran out of memory, {refused} were refused before launch."

    def data(self) -> dict[str, Any]:
        """oom_report.json."""
        return {
            "schema_version": 1,
            "study": self.study,
            "trials": self.num_trials,
            "oom": self.count(Outcome.OOM),
            "refused": self.count(Outcome.REFUSED),
            "entries": [asdict(entry) for entry in self.entries],
        }

    def markdown(self) -> str:
        """oom_report.md."""
        lines = [f"# Out of memory: {code(self.study)}", "", self.headline(), ""]
        if self.entries:
            lines += [
                "Need and limit are reserved GiB (2^30 bytes). `refused` means predicted not to fit: nothing was "
                "launched, and its need is an estimate.",
                "",
                "| trial | config | outcome | phase | limit | missed by |",
                "|---:|---|---|---|---:|---:|",
            ]
            for entry in self.entries:
                cells = [str(entry.number), code(entry.label), entry.outcome, entry.phase or DASH]
                cells += [fmt_gib(entry.limit_gib), missed(entry)]
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
            lines.append("")
        for entry in self.entries:
            lines += _section(entry)
        return "\n".join(lines).rstrip() + "\n"


def oom_report(summary: StudySummary) -> OomReport:
    """Every OOM and refusal of the study, in the order they ran."""
    fits: dict[TrainConfig, TrialRecord] = {}
    for row in summary.trials:
        if row.outcome is Outcome.OK:
            fits.setdefault(row.config, row)
    nearest: dict[TrainConfig, tuple[Neighbour, ...]] = {}
    entries = []
    for row in summary.trials:
        if row.outcome not in (Outcome.OOM, Outcome.REFUSED):
            continue
        if row.config not in nearest:
            nearest[row.config] = _nearest(row.config, fits)
        entries.append(_entry(row, nearest[row.config]))
    return OomReport(study=summary.study, num_trials=len(summary.trials), entries=tuple(entries))


def distance(one: TrainConfig, other: TrainConfig) -> float:
    """Weighted count of the knobs that differ; integer knobs count |log2 ratio| (one for each doubling)."""
    total = 0.0
    for name, knob in KNOBS.items():
        here, there = getattr(one, name), getattr(other, name)
        if here == there:
            continue
        if knob.form == "integer":
            # No rank on one side: the method differs, which is counted already.
            total += 0.0 if here is None or there is None else knob.distance_weight * abs(math.log2(here / there))
        else:
            total += knob.distance_weight
    return total


def advise(config: TrainConfig, terms: tuple[Term, ...]) -> tuple[Change, ...]:
    """What to change, from the term that holds most; from all levers of the configuration where no term is known."""
    ranked = sorted(terms, key=lambda term: -term.gib)
    names = [term.name for i, term in enumerate(ranked) if i == 0 or term.share >= WORTH_ADVICE]
    changes: list[Change] = []
    for name in names or ["activations", "optimizer", "weights"]:
        changes += [change for change in _LEVERS.get(name, _activations)(config) if change not in changes]
    if not changes:
        why = "no knob reduces what holds the memory here: take a smaller model, or a GPU with more memory"
        changes.append(Change(knob=None, current=None, suggested=None, why=why))
    return tuple(changes)


def missed(entry: OomEntry) -> str:
    """'12.3 % (16.2 GiB)'."""
    if entry.margin is None:
        return DASH
    return f"{entry.margin:.1%}" + (f" ({fmt_gib(entry.missed_gib)})" if entry.missed_gib is not None else "")


def code(text: str) -> str:
    """Any text as one Markdown code span, in which nothing is interpreted."""
    flat = "".join(char if char.isprintable() else " " for char in text)
    flat = " ".join(flat.split()) or DASH
    fence = "`" * (1 + max(map(len, re.findall("`+", flat)), default=0))
    pad = " " if "`" in (flat[0], flat[-1]) else ""
    return f"{fence}{pad}{flat}{pad}{fence}"


def _entry(row: TrialRecord, nearest: tuple[Neighbour, ...]) -> OomEntry:
    detail = row.oom
    limit = detail.limit_gib if detail else row.limit_gib
    margin = detail.margin if detail else row.margin
    named = detail.terms_gib if detail else {}
    total = sum(named.values())
    terms = tuple(
        Term(name=name, gib=gib, share=gib / total if total > 0 else 0.0)
        for name, gib in sorted(named.items(), key=lambda item: -item[1])
    )
    return OomEntry(
        number=row.number,
        label=row.config.label(),
        config=row.config.as_dict(),
        outcome=row.outcome.value,
        phase=detail.phase.value if detail else None,
        requested_gib=detail.requested_gib if detail else None,
        allocated_gib=detail.allocated_gib if detail else None,
        reserved_gib=detail.reserved_gib if detail else None,
        limit_gib=limit,
        margin=margin,
        missed_gib=None if margin is None or limit is None else margin * limit,
        terms=terms,
        nearest=nearest,
        changes=advise(row.config, terms),
        reason=row.reason,
        log=row.log,
    )


def _nearest(config: TrainConfig, fits: dict[TrainConfig, TrialRecord]) -> tuple[Neighbour, ...]:
    close = heapq.nsmallest(
        NUM_NEAREST,
        ((distance(config, other), row.number, row) for other, row in fits.items()),
        key=lambda one: one[:2],
    )
    return tuple(
        Neighbour(
            number=number,
            label=row.config.label(),
            distance=round(far, 3),
            differs={
                knob: [getattr(config, knob), getattr(row.config, knob)]
                for knob in sorted(KNOBS, key=lambda name: -KNOBS[name].distance_weight)
                if getattr(config, knob) != getattr(row.config, knob)
            },
            tokens_per_second=row.tokens_per_second,
            peak_reserved_gib=row.peak_reserved_gib,
        )
        for far, number, row in close
    )


def _change(config: TrainConfig, knob: str, suggested: Any, why: str) -> Change:
    return Change(knob=knob, current=getattr(config, knob), suggested=suggested, why=why)


def _shorter(config: TrainConfig) -> list[Change]:
    changes = []
    if config.micro_batch_size > 1:
        why = "fewer sequences at a time; the global batch stays, more micro batches are accumulated"
        changes.append(_change(config, "micro_batch_size", config.micro_batch_size // 2, why))
    if config.seq_len > 1:
        why = "only if few examples are longer: what is longer is cut off"
        changes.append(_change(config, "seq_len", config.seq_len // 2, why))
    return changes


def _activations(config: TrainConfig) -> list[Change]:
    changes = []
    if config.checkpoint_every != 1:
        why = "activations are recomputed in backward rather than kept, for about one more forward pass"
        changes.append(_change(config, "checkpointing", "full", why))
    elif config.micro_batch_size == 1 and not config.offloads:
        why = "on a GPU: what layers are recomputed from waits in the host's memory; the copies make a step slower"
        changes.append(_change(config, "checkpointing", "offload", why))
    if config.attention == "eager":
        changes.append(_change(config, "attention", "sdpa", "does not keep the matrix of attention scores"))
    return changes + _shorter(config)


def _logits(config: TrainConfig) -> list[Change]:
    why = "head and cross-entropy in chunks never hold all logits at once; not where a model caps or scales them"
    return [*([_change(config, "loss", "chunked", why)] if config.loss == "full" else []), *_shorter(config)]


def _optimizer(config: TrainConfig) -> list[Change]:
    smaller = {
        "adamw_torch_fused": ("adamw_8bit", "keeps its state in 8 bits, about a quarter of the memory"),
        "adamw_torch": ("adamw_8bit", "keeps its state in 8 bits, about a quarter of the memory"),
        "adamw_8bit": ("paged_adamw_8bit", "its state can move to host memory while it is not used"),
    }
    changes = [_change(config, "optimizer", *smaller[config.optimizer])] if config.optimizer in smaller else []
    return changes + _fewer_trained(config)


def _fewer_trained(config: TrainConfig) -> list[Change]:
    """Gradients, optimizer state and adapters are all proportional to what is trained."""
    if config.method == "full":
        return [_change(config, "method", "lora", "trains adapters only: hardly any gradients and optimizer state")]
    if config.lora_rank is not None and config.lora_rank > 1:
        return [_change(config, "lora_rank", config.lora_rank // 2, "half the adapters, gradients and state")]
    return []


def _weights(config: TrainConfig) -> list[Change]:
    if config.method == "full":
        changes = [_change(config, "method", "lora", "the base is frozen, and can then be quantised")]
        if config.precision != "bf16_pure":
            changes.append(_change(config, "precision", "bf16_pure", "no fp32 master weights; learns differently"))
        return changes
    if config.quantization != "nf4":
        return [_change(config, "quantization", "nf4", "a frozen base in 4 bits (QLoRA); learns a little differently")]
    if not config.double_quant:
        return [_change(config, "double_quant", True, "quantises the constants of the quantisation too")]
    return []


_LEVERS = {
    "activations": _activations,
    "logits": _logits,
    "optimizer": _optimizer,
    "gradients": _fewer_trained,
    "adapters": _fewer_trained,
    "weights": _weights,
}


def _section(entry: OomEntry) -> list[str]:
    """One trial in Markdown."""
    lines = [f"## Trial {entry.number}: {entry.outcome}", "", code(entry.label), ""]
    if entry.reason:
        lines.append(f"- Reason: {code(entry.reason)}")
    lines.append(f"- Missed the limit of {fmt_gib(entry.limit_gib)} by {missed(entry)}; phase: {entry.phase or DASH}")
    lines.append(
        f"- Requested {fmt_gib(entry.requested_gib)} on top of {fmt_gib(entry.allocated_gib)} allocated, "
        f"{fmt_gib(entry.reserved_gib)} reserved"
    )
    if entry.terms:
        parts = (f"{code(term.name)} {fmt_gib(term.gib)} ({term.share:.0%})" for term in entry.terms)
        lines.append("- What held the memory: " + ", ".join(parts))
    else:
        lines.append("- What held the memory is not known")
    if entry.log:
        lines.append(f"- Log: {code(entry.log)}")
    lines += ["", "Nearest configurations that fit:", ""]
    for one in entry.nearest:
        differs = ", ".join(f"{knob} {here} → {there}" for knob, (here, there) in one.differs.items())
        speed = f"{fmt_count(one.tokens_per_second)} tokens/s, {fmt_gib(one.peak_reserved_gib)}"
        lines.append(f"- trial {one.number} ({speed}): {code(differs or 'the same configuration')}")
    if not entry.nearest:
        lines.append("- none: nothing of this study fitted")
    lines += ["", "What to change:", ""]
    lines += [f"{i}. {code(f'{c.knob} {c.current} → {c.suggested}')}: {c.why}" if c.knob else f"{i}. {c.why}"
              for i, c in enumerate(entry.changes, 1)]  # fmt: skip
    return [*lines, ""]
