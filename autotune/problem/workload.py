"""Workload: the examples of the full run. They are cut at seq_len, and padded or packed to rows.

RunShape has all rules about steps: size of the global batch, number of steps, micro batches of a probe.
"""

import bisect
import itertools
import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

from autotune.core.objective import Objective
from autotune.core.parallelism import Parallelism
from autotune.core.probe_types import MicroBatch
from autotune.core.train_config import TrainConfig
from autotune.problem.images import Pictured, images_of, taken
from autotune.problem.length_distribution import Lengths
from autotune.problem.packing import Rows, packed_rows
from autotune.problem.padding import (
    Draw,
    bucket_shares,
    buckets,
    new_length_share,
    padded_tokens,
    sorted_together,
    stand_ins,
    waiting,
)

PROBED_ROWS = 8  # different rows that a probe trains on in turn
_SPREAD = (0, 4, 2, 6, 1, 5, 3, 7)  # an order of rows sorted by length in which any few neighbours differ much
PROBED_MICRO_BATCHES = 2  # the second one peaks higher, since the gradients of the first are still allocated
CONFIRMED_MICRO_BATCHES = 4  # a confirmation times longer steps, nearer to those of the run


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """How one run of `epochs` passes over `examples` examples processes them.

    A row has `tokens_per_row` tokens with their padding, and `examples_per_row` examples, on average;
    `useful_tokens_per_row` are neither padding nor cut off. A forward pass of one device takes `micro_batch_size` rows,
    an optimizer step `accumulation` such micro batches on each of `world_size` devices.
    """

    micro_batch_size: int
    accumulation: int
    world_size: int = 1
    tokens_per_row: float
    examples_per_row: float
    useful_tokens_per_row: float
    examples: int
    epochs: float

    @property
    def rows_per_step(self) -> int:
        """Rows of one optimizer step: the global batch, counted in rows."""
        return self.micro_batch_size * self.accumulation * self.world_size

    @property
    def examples_per_step(self) -> float:
        """Examples of one optimizer step, on average: the global batch, counted in examples."""
        return self.rows_per_step * self.examples_per_row

    @property
    def tokens_per_step(self) -> float:
        """Tokens of one optimizer step on average, padding included."""
        return self.rows_per_step * self.tokens_per_row

    @property
    def useful_tokens_per_step(self) -> float:
        """Tokens of one optimizer step that are neither padding nor cut off."""
        return self.rows_per_step * self.useful_tokens_per_row

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the run. The last batch of an epoch may be smaller and counts as a step."""
        steps_per_epoch = math.ceil(round(self.examples / self.examples_per_step, 6))
        return math.ceil(steps_per_epoch * self.epochs)

    @property
    def probe_micro_steps(self) -> int:
        """Micro batches in each step of a probe."""
        return min(self.accumulation, PROBED_MICRO_BATCHES)

    @property
    def confirmation_micro_steps(self) -> int:
        """Micro batches in each step of a confirmation."""
        return min(self.accumulation, CONFIRMED_MICRO_BATCHES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The examples of one pass with their lengths, the number of passes, and the examples of an optimizer step.

    The length of a pair of answers (`objective`) is that of the longer one, with the prompt.

    Of the examples, `eval_share` is held out: evaluated, and not trained on. `loss_on` says which tokens are trained
    on: completion, assistant or all; None goes by each row of the dataset, whose first has
    `form` (`dataset.form_of`). The global batch is the user's and the
    same for every candidate, as nearly as whole rows of packed examples allow. `dealt` is whether the trainer deals the
    padded rows of each step out by length, as train.py does. `pictured` are examples with images (`problem.images`),
    which count in their lengths, `images_end` is the most tokens of a row as far as its last image (0: unknown), and
    `vision` is whether a vision tower is trained too. Raises ValueError for a number below 1.
    """

    JSON: ClassVar = "facts()"

    examples: int = 10_000
    epochs: int = 1
    lengths: Lengths = Lengths.constant(1024, "assumed")  # noqa: RUF009 (frozen)
    examples_assumed: bool = True
    global_batch: int = 32
    eval_share: float = 0.0
    loss_on: str | None = None
    form: str = "unknown"
    objective: Objective = Objective.SFT
    dealt: bool = False
    pictured: tuple[Pictured, ...] = ()
    images_end: int = 0
    vision: str = "frozen"

    def __post_init__(self) -> None:
        for name in ("examples", "epochs", "global_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    def held_out(self, examples: int | None = None) -> int:
        """Examples that are held out, rounded up as all trainers do; of `examples` instead of all, where that is given.

        At least one example is left to train on.
        """
        total = self.examples if examples is None else examples
        return min(math.ceil(self.eval_share * total), total - 1)

    @property
    def trained(self) -> int:
        """Examples that are trained on in each pass."""
        return self.examples - self.held_out()

    @property
    def trains_on(self) -> str:
        """What is trained on: completion, assistant or all; where the form is not known, as if it were messages."""
        by_form = {"text": "all"} | dict.fromkeys(("prompt_completion", "chat_completion", "alpaca"), "completion")
        return self.loss_on or by_form.get(self.form, "assistant")

    def examples_per_row(self, config: TrainConfig) -> float:
        """Examples in a row, on average: 1 unless they are packed."""
        if not config.packing:
            return 1  # an int, so that the global batch of unpacked examples is written as an int
        rows = self._packed(config.seq_len)
        return sum(group.number * len(group.examples) for group in rows) / sum(group.number for group in rows)

    def _packed(self, seq_len: int) -> tuple[Rows, ...]:
        """All trained examples in packed rows. The known lengths are repeated to come to their number."""
        return packed_rows(self.lengths, seq_len, max(1, round(self.trained / self.lengths.number)))

    def run_shape(
        self, config: TrainConfig, *, accumulation: int | None = None, world_size: int | None = None
    ) -> RunShape:
        """How the full run divides these examples into steps.

        `world_size` is that of the configuration unless it is given. Without `accumulation`, a step has as many micro
        batches as come to the global batch; of packed rows, as many as
        hold about its examples. Raises ValueError where the micro batches do not divide the global batch.
        """
        devices = world_size or config.num_gpus
        return RunShape(
            micro_batch_size=config.micro_batch_size,
            accumulation=accumulation or self.accumulation(config, devices),
            world_size=devices,
            tokens_per_row=self.tokens_per_row(config),
            examples_per_row=self.examples_per_row(config),
            useful_tokens_per_row=self.useful_tokens_per_row(config),
            examples=self.trained,
            epochs=self.epochs,
        )

    def divides(self, config: TrainConfig) -> bool:
        """Whether whole micro batches on all GPUs come to the global batch; of packed rows they need not."""
        return config.packing or self.global_batch % (config.micro_batch_size * config.num_gpus) == 0

    def accumulation(self, config: TrainConfig, world_size: int | None = None) -> int:
        """Micro batches in a step, as `run_shape` has them. Raises ValueError as it does."""
        devices = world_size or config.num_gpus
        rows_at_once = config.micro_batch_size * devices
        if config.packing:
            rows = self.global_batch / self.examples_per_row(config)
            return max(1, round(rows / rows_at_once))
        accumulation, remainder = divmod(self.global_batch, rows_at_once)
        if remainder:
            each = f" on each of {devices} devices" if devices > 1 else ""
            raise ValueError(
                f"micro batch {config.micro_batch_size}{each} does not divide the global batch {self.global_batch}"
            )
        return accumulation

    def useful_tokens_per_row(self, config: TrainConfig) -> float:
        """Tokens of a row that are neither padding nor cut off, on average."""
        return self.lengths.tokens_within(config.seq_len) / self.lengths.number * self.examples_per_row(config)

    def tokens_per_row(self, config: TrainConfig) -> float:
        """Tokens of a row with its padding, on average."""
        if config.padding == "max_length":  # packed rows too
            return config.seq_len
        return padded_tokens(self._draw(config), bucketed=config.padding == "bucket")

    def waiting_share(
        self, config: TrainConfig, parallelism: Parallelism | None = None, accumulation: int | None = None
    ) -> float:
        """By which share micro batches take longer on several GPUs, which wait for the one with the longest rows.

        Their time is taken for proportional to their tokens. Shards are gathered in each micro batch; DDP waits once a
        step, whose sums differ less, and so do hosts with copies of the shards, here taken for waiting in each micro
        batch. `parallelism` takes the place of the configuration's, `accumulation` that of the global batch's.
        """
        parallelism = parallelism or Parallelism.of(config)
        number = parallelism.num_gpus
        if number == 1 or config.padding == "max_length":
            return 0.0
        # Rows that are grouped by length are not dealt out: one rank has the longest of each micro batch.
        each_waits = parallelism.shards or config.group_by_length
        each = 1 if each_waits else accumulation or self.run_shape(config, world_size=number).accumulation
        return waiting(self._draw(config), number, each, bucketed=config.padding == "bucket")

    def longest_row(self, config: TrainConfig) -> int:
        """Tokens of the longest row that can occur, with its padding."""
        return config.seq_len if config.padding == "max_length" else self._draw(config).longest

    def at_longest(self, config: TrainConfig) -> TrainConfig:
        """The configuration with the longest rows that occur as its length: what formulas of memory ask for."""
        return _at_length(self.with_mask(config), self.longest_row(config))

    def at_mean(self, config: TrainConfig) -> TrainConfig:
        """The configuration with the mean length of padded rows as its length: what formulas of time ask for."""
        return _at_length(self.with_mask(config), max(1, round(self.tokens_per_row(config))))

    def with_mask(self, config: TrainConfig) -> TrainConfig:
        """With the mask that TRL gives all rows, where that hides padding."""
        padded = self.objective is not Objective.SFT and self.objective.trainers[0] == "trl"
        padded = padded and (len(self.lengths.counts) > 1 or config.padding == "max_length")
        return replace(config, padding="masked") if padded and config.padding != "masked" else config

    def padded_lengths(self, config: TrainConfig) -> tuple[int, ...]:
        """The lengths to the next of which rows are padded; () where it is the longest row of each micro batch."""
        if config.has_any_length:
            return ()
        return (config.seq_len,) if config.padding == "max_length" else buckets(self._draw(config))

    def new_length_share(self, config: TrainConfig, micro_batches: int | None = None) -> float:
        """The share of the run's micro batches, or of its first `micro_batches`, of a length that none had before.

        0 where rows have few lengths.
        """
        if not config.has_any_length:
            return 0.0
        shape = self.run_shape(config)
        return new_length_share(self._draw(config), micro_batches or shape.num_steps * shape.accumulation)

    def deals(self, config: TrainConfig) -> bool:
        """Whether the rows of a step are dealt out by length: where that changes anything.

        Masked rows are those of the usual trainers, and others are grouped by length if that was asked for.
        """
        differ = len(self.lengths.counts) > 1 and config.padding in ("longest", "bucket")
        return self.dealt and differ and not config.group_by_length and self.global_batch > config.micro_batch_size

    def _draw(self, config: TrainConfig) -> Draw:
        size, grouped = config.micro_batch_size, self.global_batch if self.deals(config) else 0
        if config.group_by_length:
            grouped = sorted_together(self.trained, size * max(1, self.global_batch // size))
        return Draw(lengths=self.lengths, seq_len=config.seq_len, size=size, sorted_together=grouped)

    def attended(self, config: TrainConfig) -> int:
        """The length in tokens that sequences of one length would need for as much attention a token as these do."""
        tokens = [(min(tokens, config.seq_len), number) for tokens, number in self.lengths.counts]
        return round(sum(one * one * number for one, number in tokens) / sum(one * number for one, number in tokens))

    def fill(self, config: TrainConfig) -> float:
        """The share of the rows that is not padding."""
        return self.useful_tokens_per_row(config) / self.tokens_per_row(config)

    def truncated(self, seq_len: int) -> float:
        """The share of all tokens that is cut off at `seq_len`."""
        return 1.0 - self.lengths.tokens_within(seq_len) / self.lengths.total

    @cache  # noqa: B019 (a study has one of these)
    def micro_batches(self, config: TrainConfig) -> tuple[MicroBatch, ...]:
        """Kinds of micro batch for a probe that represent those of the run; () if all rows are full."""
        if config.packing:
            return self._packed_micro_batches(config)
        kinds = self._padded_micro_batches(config)
        if self.pictured:
            longest = max(kind.length for kind in kinds)
            return tuple(self._with_images(kind, peaks=kind.length == longest) for kind in kinds)
        full = all(row == (config.seq_len,) for kind in kinds for row in kind.rows)
        return () if full else kinds

    def _with_images(self, kind: MicroBatch, *, peaks: bool) -> MicroBatch:
        """The kind with images in its rows. The first row of one that sets the peak has the largest."""
        images = tuple(
            images_of(self.pictured, row[0], largest=peaks and place == 0) for place, row in enumerate(kind.rows)
        )
        return replace(kind, images=images)

    @property
    def image_tokens(self) -> int:
        """The most tokens that the images of a row take; 0 where there are none."""
        return max((taken(pictures) for _, pictures in self.pictured), default=0)

    def _padded_micro_batches(self, config: TrainConfig) -> tuple[MicroBatch, ...]:
        """The kinds that are timed, short ones between long ones, and the longest, which sets the peak.

        Where rows may have any length, the lengths are odd, as half of all are: cuDNN builds kernels for each alignment
        of a length, for seconds each (`runtime.patches`), and a probe needs one time alone.
        """
        draw = self._draw(config)
        if config.padding == "max_length":
            rows = tuple((max(2, tokens),) for tokens in self.lengths.sample(draw.size, draw.seq_len))
            return (MicroBatch(rows=rows, length=config.seq_len, share=1.0),)
        if config.has_any_length:
            shares = dict[int, float]()
            for length, share in stand_ins(draw).items():
                odd = min(length | 1, draw.longest)
                shares[odd] = shares.get(odd, 0.0) + share
        else:
            shares = bucket_shares(draw)
        kinds = [_kind(draw, length, share) for length, share in shares.items()]
        half = math.ceil(len(kinds) / 2)
        pairs = itertools.zip_longest(kinds[:half], reversed(kinds[half:]))
        mixed = tuple(kind for pair in pairs for kind in pair if kind is not None)
        return mixed if draw.longest in shares else (*mixed, _kind(draw, draw.longest, 0.0))

    def _packed_micro_batches(self, config: TrainConfig) -> tuple[MicroBatch, ...]:
        """Micro batches of PROBED_ROWS packed rows, with the same share each."""
        size = config.micro_batch_size
        number = math.ceil(PROBED_ROWS / size)
        endless = itertools.cycle(self._packed_rows(config.seq_len))
        return tuple(
            MicroBatch(rows=tuple(itertools.islice(endless, size)), length=config.seq_len, share=1 / number)
            for _ in range(number)
        )

    def _packed_rows(self, seq_len: int) -> tuple[tuple[int, ...], ...]:
        """Rows that represent all packed ones.

        The first has several examples, and the second is filled by one, where there are both kinds: transformers makes
        a mask only for the first kind, and a probe compiles and measures both in its first steps.
        """
        rows = self._packed(seq_len)
        ends = list(itertools.accumulate(group.number for group in rows))
        # Rows at equal distances in the order in which they were filled, so that all kinds are represented.
        places = ((2 * index + 1) * ends[-1] / (2 * PROBED_ROWS) for index in range(PROBED_ROWS))
        in_order = [rows[bisect.bisect_right(ends, place)].examples for place in places]
        chosen = [in_order[index] for index in _SPREAD]
        shared = next((row for row in chosen if len(row) > 1), chosen[0])
        chosen.remove(shared)
        single = next((row for row in chosen if len(row) == 1), chosen[0])
        chosen.remove(single)
        return (shared, single, *chosen)

    def facts(self) -> dict[str, Any]:
        """Plain data for reports and exports."""
        return {
            "examples": self.examples,
            "examples_assumed": self.examples_assumed,
            "epochs": self.epochs,
            "tokens_per_example": self.lengths.facts(),
            "global_batch": self.global_batch,
            "eval_share": self.eval_share,
            "loss_on": self.loss_on,
            "objective": self.objective,
            **({"image_tokens": self.image_tokens, "vision": self.vision} if self.pictured else {}),
        }


def _at_length(config: TrainConfig, seq_len: int) -> TrainConfig:
    """The configuration itself where it has this length: to make another takes longer than a formula does."""
    return config if config.seq_len == seq_len else replace(config, seq_len=seq_len)


def _kind(draw: Draw, longest: int, share: float) -> MicroBatch:
    """Micro batches with a row of `longest` tokens, and others as they are drawn beside such a row."""
    not_longer = 1 - draw.lengths.longer(longest) if longest < draw.seq_len else 1.0
    apart = 1 / draw.sorted_together if draw.sorted_together else not_longer / draw.size
    others = (draw.lengths.quantile(not_longer - index * apart) for index in range(1, draw.size))
    rows = [longest, *(min(tokens, longest) for tokens in others)]
    # A single token predicts nothing, and has no loss.
    return MicroBatch(rows=tuple((max(2, tokens),) for tokens in rows), length=max(2, longest), share=share)
