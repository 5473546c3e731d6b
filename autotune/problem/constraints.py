"""What a study may search: learning knobs above their floors, and packing only where it goes with the other knobs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from autotune.core.errors import UsageError
from autotune.core.knobs import ADAMW
from autotune.core.train_config import TrainConfig
from autotune.problem.search_space import Removal, SearchSpace
from autotune.problem.workload import Workload

# Models and attention that were tried to keep packed examples apart (tests/probe/test_packing.py). With
# flash_attention_2 transformers does so only in micro batches of one row.
PACKED_APART = {"gemma", "gemma2", "gpt2", "gpt_neox", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3"}
PACKED_APART |= {"qwen3_moe"}
ATTENTIONS = ("sdpa", "eager")
OFF_BATCH = 0.25  # how far a step of packed rows may be off the global batch
WORTH_PACKING = 1.05  # examples a row from which on packing is worth a look
MOST_LENGTHS = 16  # each is packed once


@dataclass(frozen=True, slots=True, kw_only=True)
class Floors:
    """What may not be given up for speed unless it is asked for, or nothing else fits."""

    min_rank: int = 16
    max_truncated: float = 0.01
    allow_quantized: bool = False
    allow_pure_bf16: bool = False  # full fine-tuning without fp32 master weights
    allow_any_optimizer: bool = False
    slack: float = 0.05


def apply_floors(space: SearchSpace, workload: Workload, floors: Floors) -> tuple[SearchSpace, list[Removal]]:
    """The space above the floors, and what was taken out and why. A knob with one value is the user's choice."""
    removals: list[Removal] = []

    def narrow(name: str, allowed: Callable[[Any], bool], reason: str) -> None:
        nonlocal space
        knob = space.knob(name)
        if knob is None or len(knob.choices()) == 1 or not any(map(allowed, knob.choices())):
            return
        space, removed = space.narrow(name, allowed, reason)
        removals.extend(removed)

    length = workload.lengths.longest
    seq_len = space.knob("seq_len")
    if seq_len:
        longest = max(seq_len.choices())
        least_cut = workload.truncated(longest)
        limit = max(floors.max_truncated, least_cut)
        cut = f"would cut off more than {limit:.0%} of the tokens (--max-truncated)"
        narrow("seq_len", lambda value: workload.truncated(value) <= limit + 1e-9, cut)
        covering = [value for value in space.knob("seq_len").choices() if value >= length]  # type: ignore[union-attr]
        if covering:
            padding = f"no example is longer than {length} tokens: the rest of a row would be padding"
            narrow("seq_len", lambda value: value <= min(covering), padding)
    narrow(
        "lora_rank", lambda value: value >= floors.min_rank, f"below the rank floor of {floors.min_rank} (--min-rank)"
    )
    if not floors.allow_quantized:
        reason = "a quantised base learns differently: used only where nothing else fits (--allow-quantized)"
        narrow("quantization", lambda value: value == "none", reason)
    if not floors.allow_any_optimizer:
        reason = "not AdamW: used only where nothing else fits (--allow-any-optimizer)"
        narrow("optimizer", lambda value: value in ADAMW, reason)
    method = space.knob("method")
    if not floors.allow_pure_bf16 and method and "full" in method.choices():
        reason = "no fp32 master weights: used only where nothing else fits (--allow-pure-bf16)"
        narrow("precision", lambda value: value != "bf16_pure", reason)
    return space, removals


def packable(space: SearchSpace, workload: Workload, model_type: str) -> tuple[SearchSpace, list[Removal]]:
    """The space with packing only beside what it goes with, and what was taken out.

    Raises UsageError where packing was asked for and cannot be.
    """
    knob = space.knob("packing")
    if knob is None or True not in knob.choices():
        return space, []
    asked_for = knob.choices() == (True,)
    beside = _beside(space, workload, model_type, asked_for)
    if isinstance(beside, str):
        if asked_for:
            raise UsageError(
                f"packing was asked for, but {beside}", remedy="leave packing out, or change what it names"
            )
        return space.narrow("packing", lambda value: not value, beside)
    removals = []
    for name, (allowed, reason) in beside.items():
        left = tuple(value for value in _choices(space, name) if value not in allowed)
        if not left:
            continue
        if asked_for:
            space, removed = space.narrow(name, lambda value, allowed=allowed: value in allowed, reason)  # type: ignore[misc]
            removals += removed
        else:
            space = space.condition("packing", name, allowed)
            why = f"not beside {name} {', '.join(map(str, left))}: {reason}"
            removals.append(Removal(knob="packing", values=(True,), reason=why))
    return space, removals


def _beside(
    space: SearchSpace, workload: Workload, model_type: str, asked_for: bool
) -> dict[str, tuple[tuple[Any, ...], str]] | str:
    """Beside which values of other knobs packing may be, and why not beside others; only why if beside none."""
    if model_type not in PACKED_APART:
        return f"whether {model_type} keeps packed examples apart was not tried"
    if workload.lengths.source == "assumed" and not asked_for:
        return "how long the examples are was not given (--dataset, --lengths)"
    attentions = tuple(one for one in _choices(space, "attention") if one in ATTENTIONS)
    untried = f"it was tried with {' and '.join(ATTENTIONS)} attention alone"
    if not attentions:
        return untried
    lengths, sizes = _choices(space, "seq_len"), _choices(space, "micro_batch_size")
    if len(lengths) > MOST_LENGTHS:
        return f"the space has more than {MOST_LENGTHS} values of seq_len (--seq-len)"
    rows = {length: TrainConfig(seq_len=length, packing=True) for length in lengths}
    held = {length: workload.examples_per_row(row) for length, row in rows.items()}
    if max(held.values()) < WORTH_PACKING and not asked_for:
        return "no row has room for a second example"

    def fits(length: int, size: int) -> bool:
        step = workload.run_shape(replace(rows[length], micro_batch_size=size)).examples_per_step
        return abs(step / workload.global_batch - 1) <= OFF_BATCH and step <= max(workload.examples, held[length])

    fitting = {length: {size for size in sizes if fits(length, size)} for length in lengths}
    reason = f"a step would be over {OFF_BATCH:.0%} off the global batch of {workload.global_batch} (--global-batch)"
    # The shortest rows allow most micro batches; each longer one takes some away, and is left out where it takes all.
    allowed, kept = set(sizes), []
    for length in sorted(lengths):
        if allowed & fitting[length]:
            allowed &= fitting[length]
            kept.append(length)
    if not kept:
        return f"{reason}: a row holds {min(held.values()):.1f} examples"
    return {
        "attention": (attentions, untried),
        "seq_len": (tuple(kept), reason),
        "micro_batch_size": (tuple(size for size in sizes if size in allowed), reason),
    }


def _choices(space: SearchSpace, name: str) -> tuple[Any, ...]:
    return knob.choices() if (knob := space.knob(name)) else (getattr(TrainConfig(), name),)
