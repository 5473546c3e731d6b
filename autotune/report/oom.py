"""Makes the OOM report: why trials did not fit, the first change to make, and trial details.

The details of a trial are its excess over the memory limit, its use of memory, remedies, and the
most similar configurations that fit. The report also lists refusals: trials that were not probed,
because they were predicted not to fit. The functions are pure: they turn a StudySummary into an
OomReport, and an OomReport into sentences, Markdown or plain data.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from autotune.core.json_view import keys
from autotune.core.knobs import KNOBS
from autotune.core.lora_targets import ALL_LINEAR
from autotune.core.pages import environment
from autotune.core.probe_types import Outcome
from autotune.core.train_config import TrainConfig
from autotune.core.units import DASH, fmt_count, fmt_gib
from autotune.study.summary import StudySummary, TrialRecord

NUM_NEAREST = 3
# Advice is given for the largest term of memory, and for every other term that has at least this
# share of the memory.
WORTH_ADVICE = 0.25
Advice = Iterator[tuple[str, Any, str]]  # knob, suggested value, why


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One use of memory, such as weights. `share` is this term's share of the sum of all terms."""

    name: str
    gib: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A suggested change of a knob or, if `knob` is None, of something outside the search space."""

    knob: str | None
    current: Any
    suggested: Any
    why: str

    @property
    def edit(self) -> str:
        """The change as 'loss full → chunked'."""
        return f"{self.knob} {self.current} → {self.suggested}"

    def __str__(self) -> str:
        """Return 'loss full → chunked: why', or only the reason without a knob."""
        return self.why if self.knob is None else f"{self.edit}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The memory term that is most often the largest, and the first change to make.

    `shares` are the smallest and the largest share of memory that this term takes, over the
    configurations whose largest term it is.
    """

    term: str
    shares: tuple[float, float]
    change: Change

    def __str__(self) -> str:
        """Return 'logits hold 60 % of the memory', or 'logits hold 54 to 60 % of the memory'."""
        low, high = (f"{100 * share:.0f}" for share in self.shares)
        return f"{self.term} hold {low if low == high else f'{low} to {high}'} % of the memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """A configuration of the study that fits.

    `differs` maps each changed knob to its value in the trial that did not fit, and its value in
    this configuration.
    """

    number: int
    label: str
    distance: float
    differs: dict[str, list[Any]]
    tokens_per_second: float | None
    peak_reserved_gib: float | None

    def __str__(self) -> str:
        """Return 'trial 3 (9,200 tokens/s, 23.0 GiB): micro_batch_size 8 → 4'."""
        numbers = f"{fmt_count(self.tokens_per_second)} tokens/s, {fmt_gib(self.peak_reserved_gib)}"
        return f"trial {self.number} ({numbers}): {self.changes() or 'the same configuration'}"

    def changes(self) -> str:
        """List the changes as 'seq_len 2048 → 1024, micro_batch_size 4 → 16'."""
        return ", ".join(
            f"{knob} {value} → {fitting}" for knob, (value, fitting) in self.differs.items()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OomEntry:
    """One trial that did not fit.

    `margin` is the needed memory divided by the limit, minus 1. The margin of a refused trial is a
    prediction.
    """

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
    """Every OOM and refusal of a study, in the order of the trials."""

    JSON: ClassVar = keys(
        "schema_version",
        "study",
        "entries",
        trials="num_trials",
        oom="num_oom",
        refused="num_refused",
    )
    schema_version: ClassVar[int] = 1

    study: str
    num_trials: int
    entries: tuple[OomEntry, ...]

    @property
    def configurations(self) -> tuple[OomEntry, ...]:
        """The first entry of each configuration; a search may try a configuration twice."""
        return tuple(
            {tuple(entry.config.items()): entry for entry in reversed(self.entries)}.values()
        )[::-1]

    @property
    def num_oom(self) -> int:
        """The number of trials that ran out of memory."""
        return self.count(Outcome.OOM)

    @property
    def num_refused(self) -> int:
        """The number of trials that were refused before launch."""
        return self.count(Outcome.REFUSED)

    def count(self, outcome: Outcome) -> int:
        """Count the entries with this outcome."""
        return sum(entry.outcome == outcome.value for entry in self.entries)

    @property
    def closest(self) -> OomEntry | None:
        """The entry that exceeds its limit by the least, or None if no excess is known."""
        entries = [entry for entry in self.entries if entry.margin is not None]
        return min(entries, key=lambda entry: (entry.margin or 0.0, entry.number), default=None)

    @property
    def cause(self) -> Cause | None:
        """The memory term that is most often the largest, or None if no term is known.

        The cause's `change` is the first remedy for the configuration that exceeds its limit by the
        least.
        """
        entries = [entry for entry in self.configurations if entry.terms]
        if not entries:
            return None

        ((name, _),) = Counter(entry.terms[0].name for entry in entries).most_common(1)
        caused = [entry for entry in entries if entry.terms[0].name == name]
        shares = [entry.terms[0].share for entry in caused]
        closest = min(caused, key=lambda one: math.inf if one.margin is None else one.margin)
        return Cause(term=name, shares=(min(shares), max(shares)), change=closest.changes[0])

    @property
    def first_change(self) -> Change | None:
        """The first change to make: the remedy for the cause or, without a cause, for `closest`."""
        if (cause := self.cause) is not None:
            return cause.change
        entry = self.closest or next(iter(self.entries), None)
        return None if entry is None else entry.changes[0]

    def headline(self) -> str:
        """Return the counts and the cause.

        For example '2 of 6 trials ran out of memory: logits hold 60 % of the memory'.
        """
        if not self.entries:
            return f"no trial of {self.num_trials} ran out of memory, and none was refused"

        number = self.num_oom or self.num_refused
        trials = f"{number} of {self.num_trials} trials"
        verb = "ran out of memory"
        if not self.num_oom:
            verb = f"{'was' if number == 1 else 'were'} refused before launch"
        if (cause := self.cause) is not None:
            return f"{trials} {verb}: {cause}"
        if (closest := self.closest) is not None:
            return f"{trials} {verb}: the closest missed the limit by {excess_text(closest)}"
        return f"{trials} {verb}"

    def answer(self) -> tuple[str, ...]:
        """Return the answer in sentences; the first one has the cause and the first change."""
        change = self.first_change
        if change is None:
            return (_sentence(self.headline()),)

        first = f"{self.headline()}. First change: {change.edit if change.knob else change.why}"
        sentences = [first, *([change.why] if change.knob else [])]
        if self.num_oom and self.num_refused:
            were = "trial was" if self.num_refused == 1 else "trials were"
            sentences.append(
                f"{self.num_refused} more {were} predicted not to fit, and refused before launch"
            )

        if (closest := self.closest) is not None:
            phase = f" in {closest.phase}" if closest.phase else ""
            sentences.append(
                f"closest to fitting: trial {closest.number}, {closest.label}, missed the limit of "
                f"{fmt_gib(closest.limit_gib)} by {excess_text(closest)}{phase}"
            )
            similar = sorted(closest.nearest, key=lambda one: -(one.tokens_per_second or 0.0))
            sentences += [f"a similar configuration fits: {one}" for one in similar[:1]]
        return tuple(map(_sentence, sentences))

    def markdown(self) -> str:
        """Return the content of oom_report.md."""
        pages = environment("autotune.report")
        pages.filters["missed"] = excess_text
        text = pages.get_template("oom_report.md.j2").render(report=self, dash=DASH)
        return text.rstrip() + "\n"


def oom_report(summary: StudySummary) -> OomReport:
    """Return every OOM and refusal of the study, in the order of the trials."""
    # A dict keeps the last value of a key. The trials are reversed, so that the first trial of each
    # configuration is kept.
    fits = {row.config: row for row in reversed(summary.trials) if row.outcome is Outcome.OK}
    rows = [row for row in summary.trials if row.outcome in (Outcome.OOM, Outcome.REFUSED)]
    nearest = {config: _nearest(config, fits) for config in {row.config for row in rows}}
    entries = tuple(_entry(row, nearest[row.config], has_sdpa=summary.has_sdpa) for row in rows)
    return OomReport(study=summary.study, num_trials=len(summary.trials), entries=entries)


def distance(one: TrainConfig, other: TrainConfig) -> float:
    """Return the weighted number of knobs that differ.

    The difference of an integer knob is |log2(ratio of the two values)|: each doubling counts as 1.
    """
    total = 0.0
    for name, (value, other_value) in _differences(one, other).items():
        knob = KNOBS[name]
        if knob.form != "integer":
            total += knob.distance_weight
        elif value is not None and other_value is not None:
            # If one value is None, the methods differ too, and that difference is counted already.
            total += knob.distance_weight * abs(math.log2(value / other_value))
    return total


def advise(
    config: TrainConfig, terms: tuple[Term, ...], *, has_sdpa: bool = True
) -> tuple[Change, ...]:
    """Return remedies, the remedies for the largest term of memory first.

    If no term is known, the remedies are for activations, optimizer and weights. `has_sdpa` says
    whether the model can use SDPA attention.
    """
    ranked = sorted(terms, key=lambda term: -term.gib)
    names = [term.name for term in ranked if term is ranked[0] or term.share >= WORTH_ADVICE]

    changes: list[Change] = []
    for name in names or ["activations", "optimizer", "weights"]:
        for knob, suggested, why in _ADVICE.get(name, _activations)(config):
            change = Change(knob=knob, current=getattr(config, knob), suggested=suggested, why=why)
            possible = has_sdpa or (knob, suggested) != ("attention", "sdpa")
            if possible and change not in changes:
                changes.append(change)

    if not changes:
        why = "no setting reduces this memory: use a smaller model, or a GPU with more memory"
        changes.append(Change(knob=None, current=None, suggested=None, why=why))
    return tuple(changes)


def excess_text(entry: OomEntry) -> str:
    """Format the excess over the limit as '12.3 % (16.2 GiB)'."""
    if entry.margin is None:
        return DASH
    gib = "" if entry.missed_gib is None else f" ({fmt_gib(entry.missed_gib)})"
    return f"{100 * entry.margin:.1f} %{gib}"


def _sentence(text: str) -> str:
    """Return the text with a capital letter at its start, and with a full stop at its end."""
    return f"{text[0].upper()}{text[1:]}."


def _entry(row: TrialRecord, nearest: tuple[Neighbour, ...], *, has_sdpa: bool) -> OomEntry:
    """Return the entry of a trial that did not fit. A refusal has no details of memory."""
    detail = row.oom
    limit = detail.limit_gib if detail else row.limit_gib
    margin = detail.margin if detail else row.margin

    terms_gib = detail.terms_gib if detail else {}
    total = sum(terms_gib.values()) or 1.0
    ranked = sorted(terms_gib.items(), key=lambda item: -item[1])
    terms = tuple(Term(name=name, gib=gib, share=gib / total) for name, gib in ranked)

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
        changes=advise(row.config, terms, has_sdpa=has_sdpa),
        reason=row.reason,
        log=row.log,
    )


def _nearest(config: TrainConfig, fits: dict[TrainConfig, TrialRecord]) -> tuple[Neighbour, ...]:
    """Return the NUM_NEAREST configurations that fit and that differ least from `config`."""
    rows = heapq.nsmallest(
        NUM_NEAREST, fits.values(), key=lambda row: (distance(config, row.config), row.number)
    )

    return tuple(
        Neighbour(
            number=row.number,
            label=row.config.label(),
            distance=round(distance(config, row.config), 3),
            differs=_differences(config, row.config),
            tokens_per_second=row.tokens_per_second,
            peak_reserved_gib=row.peak_reserved_gib,
        )
        for row in rows
    )


def _differences(one: TrainConfig, other: TrainConfig) -> dict[str, list[Any]]:
    """Return {knob: [value, other value]}, the knobs with the largest weight first."""
    values = {name: [getattr(one, name), getattr(other, name)] for name in _HEAVIEST_FIRST}
    return {name: pair for name, pair in values.items() if pair[0] != pair[1]}


def _smaller_batch(config: TrainConfig) -> Advice:
    """Advise smaller micro batches and shorter rows."""
    if config.micro_batch_size > 1:
        why = (
            "fewer sequences at a time; "
            "more micro batches are accumulated, so the global batch stays the same"
        )
        yield "micro_batch_size", config.micro_batch_size // 2, why
    if config.seq_len > 1:
        why = "only if few examples are longer: the rest of a longer example is cut off"
        yield "seq_len", config.seq_len // 2, why


def _activations(config: TrainConfig) -> Advice:
    """Advise recomputation, then offloading, and smaller micro batches."""
    if config.checkpoint_every != 1:
        why = "recomputes all layers in the backward pass: in all, about one more forward pass"
        yield "checkpointing", "full", why
    elif config.micro_batch_size == 1 and not config.offloads:
        why = (
            "on a GPU: the inputs of the layers wait in host memory; the copies make a step slower"
        )
        yield "checkpointing", "offload", why
    if config.attention == "eager":
        yield "attention", "sdpa", "does not store the matrix of attention scores"

    yield from _smaller_batch(config)


def _logits(config: TrainConfig) -> Advice:
    """Advise computing the loss in chunks, and smaller micro batches."""
    if config.loss == "full":
        why = "never holds all logits at once; not for a model that caps or scales its logits"
        yield "loss", "chunked", why
    yield from _smaller_batch(config)


def _optimizer(config: TrainConfig) -> Advice:
    """Advise a smaller optimizer state, and fewer trained parameters."""
    if config.optimizer in ("adamw_torch_fused", "adamw_torch"):
        why = "its state has 8 bits for each value, about a quarter of the memory"
        yield "optimizer", "adamw_8bit", why
    elif config.optimizer == "adamw_8bit":
        why = "its state can move to host memory while it is not used"
        yield "optimizer", "paged_adamw_8bit", why
    yield from _fewer_trained(config)


def _fewer_trained(config: TrainConfig) -> Advice:
    """Advise fewer trained parameters: gradients, optimizer state and adapters shrink with them."""
    if config.method == "full":
        why = "trains adapters only, with hardly any gradients and optimizer state"
        yield "method", "lora", why
        return

    if config.lora_rank is not None and config.lora_rank > 1:
        yield "lora_rank", config.lora_rank // 2, "half the adapters, gradients and state"
    if config.lora_targets == ALL_LINEAR:
        why = "fewer adapters, which also keep fewer activations; learns less"
        yield "lora_targets", "attention", why


def _weights(config: TrainConfig) -> Advice:
    """Advise smaller weights."""
    if config.method == "full":
        yield "method", "lora", "the base is frozen and can then be quantised"
        if config.precision != "bf16_pure":
            yield "precision", "bf16_pure", "no fp32 master weights; learns differently"
    elif config.quantization != "nf4":
        yield "quantization", "nf4", "a frozen base in 4 bits (QLoRA); learns a little differently"
    elif not config.double_quant:
        yield "double_quant", True, "quantises the constants of the quantisation too"


_HEAVIEST_FIRST = sorted(KNOBS, key=lambda name: -KNOBS[name].distance_weight)
_ADVICE: dict[str, Callable[[TrainConfig], Advice]] = {
    "activations": _activations,
    "logits": _logits,
    "optimizer": _optimizer,
    "gradients": _fewer_trained,
    "adapters": _fewer_trained,
    "weights": _weights,
}
