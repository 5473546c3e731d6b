"""Somebody's own run, held against a card by formula: what it needs, how long it takes, what would make it fit.

A `ForeignRun` goes in; nothing is looked up and no file is read. Where no formula knows the way it computes, what it
needs is told between two ways that are known, or from one of them up.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from autotune.catalog import DeviceSpec, ModelSpec, Price, resolve_device
from autotune.core.train_config import TrainConfig
from autotune.core.units import gib
from autotune.planning.foreign_config import FP32_BASE, ForeignConfig
from autotune.planning.observations import Observation
from autotune.planning.plan import FITS, OOM, TIGHT, limit_of, ratios
from autotune.prediction.memory_formula import ERROR, MemoryBreakdown, Sizes, footprint
from autotune.prediction.step_time import REFERENCE, pace
from autotune.prediction.transfer import carry, interval
from autotune.problem.length_distribution import Lengths
from autotune.problem.workload import Workload

OFFLOADED = 1.06  # times as long: measured by `benchmarks/levers.py`, Mistral-7B on an H200
MOST_TRIED, LEAST_LENGTH = 1024, 256  # the largest micro batch that is advised, and the shortest sequence
_INNER = ("model_init_kwargs", "bnb_config_kwargs")  # what stands in there goes before what stands beside it
_CUT = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"
_MICRO = dict.fromkeys(("trl", "llamafactory"), "per_device_train_batch_size") | {"axolotl": "micro_batch_size"}
_ACCUMULATION = "gradient_accumulation_steps"
_LENGTH = {"trl": "max_length", "axolotl": "sequence_len", "llamafactory": "cutoff_len"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """At least and at most, at the peak of a step; equal where a formula knows the way, `most` None where none does."""

    least: MemoryBreakdown
    most: MemoryBreakdown | None

    @property
    def told(self) -> MemoryBreakdown:
        return self.most or self.least

    def fits(self, limit_gib: float) -> str:
        """FITS beyond the error of the formula, OOM, or TIGHT where neither can be told."""
        if self.least.peak_reserved_gib > limit_gib:
            return OOM
        sure = self.most is not None and self.most.peak_reserved_gib * (1 + ERROR) <= limit_gib
        return FITS if sure else TIGHT


@dataclass(frozen=True, slots=True, kw_only=True)
class Duration:
    """How fast it trains and what all of it takes; intervals hold 80 % of the cases.

    Speeds are of one GPU and count useful tokens. `usd` is that of all GPUs, None without a price.
    """

    tokens_per_s: float
    interval: tuple[float, float]
    samples_per_s: float
    num_steps: int
    hours: float
    interval_hours: tuple[float, float]
    usd: float | None
    interval_usd: tuple[float, float] | None
    basis: int  # measurements on this card that it rests on


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What every verdict hangs on beside the run: `workload` is a pass of its examples, the batch aside."""

    model: ModelSpec
    device: DeviceSpec
    limit_gib: float
    workload: Workload
    price: Price | None = None
    seen: tuple[Observation, ...] = ()
    padded: bool = False  # to the whole length, and not to the longest of a micro batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """`duration` is None where no formula knows it; of what does not fit, it is how long it would take."""

    run: ForeignConfig
    need: Need
    fits: str
    duration: Duration | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """`edits` are keys of the run's own tool with the values to write there."""

    edits: dict[str, Any]
    checked: Checked


def check(setting: Setting, run: ForeignConfig) -> Checked | None:
    """None for a model that has no formula."""
    need = need_of(setting.model, run)
    if need is None:
        return None
    return Checked(run=run, need=need, fits=need.fits(setting.limit_gib), duration=duration(setting, run))


def need_of(model: ModelSpec, run: ForeignConfig) -> Need | None:
    """None for a model that has no formula."""
    config, steps, sizes = run.config, min(run.accumulation, 2), Sizes.of(model)
    least = most = replace(config, dora=False)  # DoRA takes more, nobody looked how much
    if config.quantization == "int8":
        least, most = replace(least, quantization="nf4"), replace(most, quantization="none")
    low, high = (footprint(model, _kept(one), steps) for one in (least, most))
    if sizes is None or low is None or high is None:
        return None
    if FP32_BASE in run.notes:
        quantized = config.quantization != "none"
        low, high = (_in_fp32(sizes, _kept(config), quantized, one) for one in (low, high))
    if config.offloads:  # what waits in the host's memory
        waits = gib(config.tokens * sizes.layers * sizes.hidden * (2 if config.method == "lora" else 4))
        low = replace(low, activations=max(low.activations - waits, 0.0))
    return Need(least=low, most=None if config.dora else high)


def _kept(config: TrainConfig) -> TrainConfig:
    """With checkpoints on the GPU."""
    return replace(config, checkpointing="full") if config.offloads else config


def _in_fp32(sizes: Sizes, config: TrainConfig, quantized: bool, found: MemoryBreakdown) -> MemoryBreakdown:
    """Of a frozen base in float32 under autocast, which keeps no cast of what is frozen.

    Each product casts its weight anew, and the graph holds that cast until the layer's backward pass: those of all
    layers that are not recomputed, and of the head while its logits are there (`test_check.py` counts the first).
    """
    frozen = sizes.params - (sizes.linear_params if quantized else 0)
    every = config.checkpoint_every
    recomputed = 0 if every is None else math.ceil(sizes.layers / every)
    casts = 0 if quantized else min(sizes.layers - recomputed + 1, sizes.layers) * sizes.linear_params / sizes.layers
    checkpoints = config.tokens * recomputed * sizes.hidden  # of 4 bytes a value instead of 2
    head = sizes.embedding if found.logits else 0
    return replace(
        found,
        weights=found.weights + gib(2 * frozen),
        activations=found.activations + gib(2 * (casts + checkpoints)),
        logits=found.logits + gib(2 * head),
    )


def duration(setting: Setting, run: ForeignConfig) -> Duration | None:
    """None where no formula knows how fast the model, the card or the way it computes is."""
    model, workload, config = setting.model, setting.workload, run.config
    length = config.seq_len if config.packing or setting.padded else longest_of(workload.lengths, config)
    took = pace(model, _kept(replace(config, seq_len=length)))
    known = ratios(setting.seen, setting.device, config.method, config.quantization)
    carried = carry(resolve_device(REFERENCE), setting.device, known)
    if took is None or carried is None:
        return None
    again = cast_s(model, run)
    micro = took.micro_s * (OFFLOADED if config.offloads else 1.0) + again
    gpus = run.num_gpus or 1
    shape = workload.run_shape(config, accumulation=run.accumulation, world_size=gpus)
    step = shape.step_time_s(micro, took.rest_s) / carried.ratio
    error = math.hypot(took.error, carried.error, again / micro / 2)
    low, high = interval(1.0, error)
    num_steps = replace(shape, epochs=run.epochs or 1).num_steps if run.max_steps is None else run.max_steps
    hours = num_steps * step / 3600
    usd = None if setting.price is None else hours * gpus * setting.price.usd_per_hour
    tokens_per_s = shape.useful_tokens_per_step / gpus / step
    return Duration(
        tokens_per_s=tokens_per_s,
        interval=(tokens_per_s * low, tokens_per_s * high),
        samples_per_s=shape.examples_per_step / gpus / step,
        num_steps=num_steps,
        hours=hours,
        interval_hours=(hours * low, hours * high),
        usd=usd,
        interval_usd=None if usd is None else (usd * low, usd * high),
        basis=carried.basis,
    )


def longest_of(lengths: Lengths, config: TrainConfig) -> int:
    """Tokens of the longest of a micro batch of examples, on average: to which the other tools pad its rows."""
    seen, before, mean = 0, 0.0, 0.0
    for tokens, number in lengths.counts:
        seen += number
        share: float = (seen / lengths.number) ** config.micro_batch_size
        mean += min(tokens, config.seq_len) * (share - before)
        before = share
    return max(1, min(math.ceil(round(mean, 6)), config.seq_len))


def cast_s(model: ModelSpec, run: ForeignConfig) -> float:
    """Seconds of a micro batch on the reference card in which a base in float32 is cast: 4 bytes read, 2 written."""
    sizes, config = Sizes.of(model), run.config
    if sizes is None or FP32_BASE not in run.notes:
        return 0.0
    every = config.checkpoint_every
    passes = 1.0 if every is None else 1.0 + 1.0 / every
    cast = sizes.embedding + (0 if config.quantization == "nf4" else sizes.linear_params * passes)
    return 6 * cast / ((resolve_device(REFERENCE).bandwidth_gb_s or math.nan) * 1e9)


def smallest_card(checked: Checked, cards: Iterable[DeviceSpec], headroom: float) -> DeviceSpec | None:
    """The one with the least memory on which it fits as it is."""
    half = checked.run.config.precision.startswith("bf16")
    sized = sorted(
        (card for card in cards if card.memory_gib and (card.supports_bf16 or not half)),
        key=lambda card: card.memory_gib or 0.0,
    )
    return next((card for card in sized if checked.need.fits(limit_of(card, headroom)) == FITS), None)


# --- what would make it fit


def edited(values: dict[str, Any], edits: dict[str, Any]) -> dict[str, Any]:
    """The file's values with these written over them, where they have an effect."""
    new = dict(values)
    for key, value in edits.items():
        inner = next((name for name in _INNER if key in (values.get(name) or ())), None)
        if inner is None:
            new[key] = value
        else:
            new[inner] = new[inner] | {key: value}
    return new


def levers(run: ForeignConfig, values: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(rank, edits) of each change but those of micro batch and length, in the tool's own keys.

    Rank 0 leaves what is learned as it is. 1 changes the optimizer's state or drops DoRA, 2 quantises the base or does
    without fp32 master weights, 4 trains adapters instead of everything. 3 is a shorter sequence.
    """
    config, tool = run.config, run.format
    if FP32_BASE in run.notes:
        yield 0, {"dtype": "bfloat16"}
    if config.loss == "full" and tool == "llamafactory":
        yield 0, {"enable_liger_kernel": True}
    if config.loss == "full" and tool == "axolotl":
        yield 0, _fused(values)
    if config.checkpointing == "none":
        newer = "activation_checkpointing" if "activation_checkpointing" in values else "gradient_checkpointing"
        on = {"trl": {newer: True}, "axolotl": {"gradient_checkpointing": True}}
        yield 0, on.get(tool, {"disable_gradient_checkpointing": False})
    if config.optimizer in ("adamw_torch", "adamw_torch_fused"):
        yield 1, {"optimizer" if tool == "axolotl" else "optim": "adamw_bnb_8bit"}
    if config.dora:
        yield 1, {"peft_use_dora" if tool == "axolotl" else "use_dora": False}
    four: dict[str, dict[str, Any]] = {
        "trl": {"load_in_4bit": True},
        "axolotl": {"adapter": "qlora", "load_in_4bit": True},
    }
    nf4 = _without(four.get(tool, {"quantization_bit": 4}), values, "load_in_8bit")
    if config.method == "lora":
        if config.quantization != "nf4":
            yield 2, nf4
        return
    if config.precision != "bf16_pure" and tool != "axolotl":
        yield 2, {"dtype": "bfloat16"} if tool == "trl" else {"pure_bf16": True}
    lora = {"trl": {"use_peft": True, "dtype": "bfloat16"}, "axolotl": {"adapter": "lora", "lora_target_linear": True}}
    adapters: dict[str, Any] = lora.get(tool, {"finetuning_type": "lora"})
    adapters = adapters | ({"lora_r": values.get("lora_r") or 16} if tool == "axolotl" else {})
    yield 4, adapters
    yield 4, adapters | nf4


def _fused(values: dict[str, Any]) -> dict[str, Any]:
    """What fuses Axolotl's loss with the head: Liger, if it is there already."""
    plugins = values.get("plugins") or []
    plugins = [one.strip() for one in plugins.split(",")] if isinstance(plugins, str) else list(plugins)
    if any("liger" in str(one).lower() for one in plugins):
        return _without({"liger_fused_linear_cross_entropy": True}, values, "liger_cross_entropy")
    there = any("cut_cross_entropy" in str(one).lower() for one in plugins)
    return {"plugins": plugins if there else [*plugins, _CUT], "cut_cross_entropy": True}


def _without(edits: dict[str, Any], values: dict[str, Any], key: str) -> dict[str, Any]:
    """And with this key off, if it is on."""
    return edits | ({key: False} if values.get(key) else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class FixSearch:
    """Tries changes of a run. `reread` reads values as the run's tool would; None where it refuses them."""

    setting: Setting
    checked: Checked
    values: dict[str, Any]
    reread: Callable[[dict[str, Any]], ForeignConfig | None]
    known: dict[str, ForeignConfig | None] = field(default_factory=dict)

    def alone(self) -> list[Change]:
        """Each change by itself, if it helps; of micro batches and lengths the largest that fits."""
        run = self.checked.run
        found = [self._change(edits, read) for rank, edits in levers(run, self.values) if (read := self._read(edits))]
        if sizes := self._smaller(run):
            found.append(self._largest({}, {}, (FITS,)) or self._change({}, run, sizes[-1]))
        if lengths := self._shorter(run):
            made = (self._change({}, run, length) for length in lengths)
            found.append(next((one for one in made if one and one.checked.fits == FITS), None))
            found[-1] = found[-1] or self._change({}, run, lengths[0])
        return [one for one in found if one and one.edits and (self.saves(one) > 0.005 or one.checked.fits == FITS)]

    def saves(self, change: Change) -> float:
        """GiB."""
        return self.checked.need.told.peak_reserved_gib - change.checked.need.told.peak_reserved_gib

    def first(self) -> Change | None:
        """What makes it fit: what is learned changes as little as can be, then the fewest changes, then the fastest.

        Of what does not fit, where nothing surely fits, what is too close to tell.
        """
        run = self.checked.run
        ranked = list(levers(run, self.values))
        for accepted in ((FITS,), (TIGHT,)) if self.checked.fits == OOM else ((FITS,),):
            for most in range(5):
                for shorter in [*([] if most == 3 else [{}]), *(self._shorter(run) if most > 2 else ())]:
                    found = [
                        (count + (len(one.edits) > len(edits)), -_speed(one), place, one)
                        for place, (count, edits) in enumerate(_subsets(ranked, most))
                        if (one := self._largest(edits, shorter, accepted)) and one.edits
                    ]
                    if found:
                        return min(found)[-1]
        return None

    def _largest(self, edits: dict[str, Any], shorter: dict[str, Any], accepted: Sequence[str]) -> Change | None:
        """With these edits the largest micro batch that comes to what is accepted, the global batch as it is."""
        if (run := self._read(edits)) is None:
            return None
        sizes = [shorter, *(shorter | size for size in self._smaller(run))]

        def fits(size: dict[str, Any]) -> bool:
            need = need_of(self.setting.model, self._resized(run, size))
            told = OOM if need is None else need.fits(self.setting.limit_gib)
            return told == FITS or told in accepted

        if not fits(sizes[-1]):  # a smaller one never needs more
            return None
        return self._change(edits, run, sizes[bisect_left(sizes, True, key=fits)])

    def _read(self, edits: dict[str, Any]) -> ForeignConfig | None:
        if repr(edits) not in self.known:
            self.known[repr(edits)] = self.reread(edited(self.values, edits)) if edits else self.checked.run
        return self.known[repr(edits)]

    def _change(self, edits: dict[str, Any], run: ForeignConfig, size: dict[str, Any] | None = None) -> Change | None:
        checked = check(self.setting, self._resized(run, size or {}))
        return None if checked is None else Change(edits=edits | (size or {}), checked=checked)

    def _resized(self, run: ForeignConfig, size: dict[str, Any]) -> ForeignConfig:
        config = run.config
        micro, length = size.get(_MICRO[run.format], config.micro_batch_size), size.get(self._length, config.seq_len)
        accumulation = size.get(_ACCUMULATION, run.accumulation)
        return replace(run, config=replace(config, micro_batch_size=micro, seq_len=length), accumulation=accumulation)

    def _smaller(self, run: ForeignConfig) -> list[dict[str, Any]]:
        """Micro batches that leave the global batch as it is, the largest first."""
        micro, rows = run.config.micro_batch_size, run.config.micro_batch_size * run.accumulation
        sizes = [size for size in range(min(micro - 1, MOST_TRIED), 0, -1) if rows % size == 0]
        return [{_MICRO[run.format]: size, _ACCUMULATION: rows // size} for size in sizes]

    def _shorter(self, run: ForeignConfig) -> list[dict[str, Any]]:
        """Powers of two."""
        powers = range((run.config.seq_len - 1).bit_length() - 1, LEAST_LENGTH.bit_length() - 2, -1)
        return [{self._length: 2**power} for power in powers]

    @property
    def _length(self) -> str:
        key = _LENGTH[self.checked.run.format]
        return "max_seq_length" if key not in self.values and "max_seq_length" in self.values else key


def _speed(change: Change) -> float:
    return change.checked.duration.tokens_per_s if change.checked.duration else 0.0


def _subsets(ranked: list[tuple[int, dict[str, Any]]], most: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """How many levers, and their edits together: of ranks up to this one, which is among them if it has any."""
    below = [one for one in ranked if one[0] <= most]
    for count in range(len(below) + 1):
        for some in combinations(below, count):
            ranks = [rank for rank, _ in some]
            if ranks.count(4) <= 1 and (most in (0, 3) or most in ranks):
                together: dict[str, Any] = {}
                for _, edits in some:
                    together |= edits
                yield count, together
