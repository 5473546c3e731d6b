"""Workload: the examples of the full run, and the rows that padding or packing makes of them.

RunShape computes everything about steps: the global batch, the number of steps, and how many micro
batches a probe's step has.
"""

import bisect
import itertools
import math
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import Any, ClassVar

from autotune.core.objective import Objective
from autotune.core.parallelism import Parallelism
from autotune.core.probe_types import MicroBatch
from autotune.core.train_config import TrainConfig
from autotune.problem.images import Pictured, images_of, num_image_tokens
from autotune.problem.length_distribution import Lengths
from autotune.problem.packing import Rows, examples_per_row, packed_rows
from autotune.problem.padding import (
    Draw,
    bucket_shares,
    buckets,
    new_length_share,
    padded_tokens,
    sort_group_size,
    stand_ins,
    waiting,
)

PROBED_ROWS = 8  # the number of different packed rows that a probe trains on in turn
# Indices into eight rows that are sorted by length. In the order of these indices, consecutive rows
# have very different lengths.
_SPREAD = (0, 4, 2, 6, 1, 5, 3, 7)
# A probe's step has two micro batches if the run accumulates gradients: the second micro batch has
# a higher peak, because the gradients of the first are still allocated.
PROBED_MICRO_BATCHES = 2
# A confirming probe has more micro batches in a step, so its steps are more similar to the run's
# steps.
CONFIRMED_MICRO_BATCHES = 4
KEPT_CONFIGS = 2**14  # more than the configurations of a plan


@dataclass(frozen=True, kw_only=True)  # without slots, because it caches a property
class RunShape:
    """The steps of a run that makes `epochs` passes over `examples` examples.

    On average, a row has `tokens_per_row` tokens including padding, and `examples_per_row`
    examples. `useful_tokens_per_row` excludes padding and truncated tokens. A micro batch has
    `micro_batch_size` rows. An optimizer step has `accumulation` micro batches on each of
    `world_size` devices.
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
        """The number of rows in one optimizer step: the global batch in rows."""
        return self.micro_batch_size * self.accumulation * self.world_size

    @property
    def examples_per_step(self) -> float:
        """The mean number of examples in one optimizer step: the global batch in examples."""
        return self.rows_per_step * self.examples_per_row

    @property
    def tokens_per_step(self) -> float:
        """The mean tokens of one optimizer step, with padding."""
        return self.rows_per_step * self.tokens_per_row

    @property
    def useful_tokens_per_step(self) -> float:
        """The mean tokens of one optimizer step without padding and truncated tokens."""
        return self.rows_per_step * self.useful_tokens_per_row

    @cached_property
    def micro_batches_per_epoch(self) -> int:
        """The number of micro batches of each device in a pass over the examples."""
        of_micro_batch = self.examples_per_step / self.accumulation
        return math.ceil(round(self.examples / of_micro_batch, 6))

    @property
    def num_steps(self) -> int:
        """The number of optimizer steps in the run, including the smaller last step of a pass."""
        return math.ceil(self._steps_per_epoch * self.epochs)

    @property
    def _steps_per_epoch(self) -> int:
        return math.ceil(self.micro_batches_per_epoch / self.accumulation)

    def whole_steps(self, num_steps: int | None = None) -> float:
        """Return the number of whole steps with the micro batches of `num_steps` steps.

        The default is all steps of the run. The last step of each pass has only the micro batches
        that are left, as in transformers' Trainer.
        """
        steps = self.num_steps if num_steps is None else num_steps
        passes, more = divmod(steps, max(1, self._steps_per_epoch))
        return passes * self.micro_batches_per_epoch / self.accumulation + more

    @property
    def probe_micro_steps(self) -> int:
        """The number of micro batches in each step of a probe."""
        return min(self.accumulation, PROBED_MICRO_BATCHES)

    @property
    def confirmation_micro_steps(self) -> int:
        """The number of micro batches in each step of a confirming probe."""
        return min(self.accumulation, CONFIRMED_MICRO_BATCHES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The examples of an epoch with their lengths, the number of epochs, and the global batch.

    Raises ValueError for a number below 1.

    Args:
        lengths: the lengths of the examples. If the objective needs pairs of answers, a pair's
            length is the length of the prompt with the longer answer.
        global_batch: the number of examples in an optimizer step, which the user chooses. Every
            candidate of a study has the same global batch or, with packed rows, nearly the same.
        eval_share: the share of the examples that is held out: used for evaluation, but not for
            training.
        loss_on: the tokens to train on: completion, assistant or all. With None, each row of the
            dataset decides.
        form: the form of the dataset's first row (`dataset.form_of`).
        dealt: whether the trainer sorts the padded rows of each step by length and distributes them
            to micro batches, as train.py does.
        pictured: representative examples with images (`problem.images`). The lengths of these
            examples include the images' tokens.
        images_end: the largest position, in tokens, of an image's end in a row; 0 if unknown.
        vision: whether a vision tower is `frozen` or `trained`.
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
        """Return the number of held-out examples, rounded up as all trainers do.

        If `examples` is given, it replaces the workload's number of examples. At least one example
        is not held out.
        """
        total = self.examples if examples is None else examples
        return min(math.ceil(self.eval_share * total), total - 1)

    @property
    def trained(self) -> int:
        """The number of examples in an epoch that are trained on."""
        return self.examples - self.held_out()

    @property
    def trains_on(self) -> str:
        """The tokens to train on: completion, assistant or all.

        An unknown form is treated like the form `messages`.
        """
        by_form = {"text": "all"} | dict.fromkeys(
            ("prompt_completion", "chat_completion", "alpaca"), "completion"
        )
        return self.loss_on or by_form.get(self.form, "assistant")

    def examples_per_row(self, config: TrainConfig) -> float:
        """Return the mean number of examples in a row: 1 unless rows are packed."""
        if not config.packing:
            return 1  # an int, so that reports show the global batch of unpacked examples as an int
        return examples_per_row(self.lengths, config.seq_len, self._repetitions)

    def _packed(self, seq_len: int) -> tuple[Rows, ...]:
        """Pack all trained examples into rows."""
        return packed_rows(self.lengths, seq_len, self._repetitions)

    @property
    def _repetitions(self) -> int:
        """How often the lengths are packed: more than once if only some lengths are known."""
        return max(1, round(self.trained / self.lengths.number))

    @lru_cache(maxsize=KEPT_CONFIGS)  # noqa: B019 (a command has few workloads)
    def run_shape(
        self, config: TrainConfig, *, accumulation: int | None = None, world_size: int | None = None
    ) -> RunShape:
        """Return the steps of the full run with this configuration.

        By default, `world_size` is the configuration's number of GPUs, and `accumulation` is the
        number of micro batches whose examples add up to the global batch. Packed rows add up to the
        global batch only approximately. Raises ValueError if the micro batches do not divide the
        global batch.
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
        """Return whether the micro batches of all GPUs together divide the global batch.

        The result is always true for packed rows.
        """
        rows_at_once = config.micro_batch_size * config.num_gpus
        return config.packing or self.global_batch % rows_at_once == 0

    def accumulation(self, config: TrainConfig, world_size: int | None = None) -> int:
        """Return the number of micro batches in a step.

        Raises ValueError in the same case as `run_shape`.
        """
        devices = world_size or config.num_gpus
        rows_at_once = config.micro_batch_size * devices
        if config.packing:
            rows = self.global_batch / self.examples_per_row(config)
            return max(1, round(rows / rows_at_once))

        accumulation, remainder = divmod(self.global_batch, rows_at_once)
        if remainder:
            each = f" on each of {devices} devices" if devices > 1 else ""
            raise ValueError(
                f"micro batch {config.micro_batch_size}{each} does not divide the global batch"
                f" {self.global_batch}"
            )
        return accumulation

    def useful_tokens_per_row(self, config: TrainConfig) -> float:
        """Return the mean tokens of a row without padding and truncated tokens."""
        tokens_per_example = self.lengths.tokens_within(config.seq_len) / self.lengths.number
        return tokens_per_example * self.examples_per_row(config)

    def tokens_per_row(self, config: TrainConfig) -> float:
        """Return the mean tokens of a row with padding."""
        if config.padding == "max_length":  # packed rows also have this padding
            return config.seq_len
        return padded_tokens(self._draw(config), bucketed=config.padding == "bucket")

    def waiting_share(
        self,
        config: TrainConfig,
        parallelism: Parallelism | None = None,
        accumulation: int | None = None,
    ) -> float:
        """Return the wait for the GPU with the longest rows, as a share of a micro batch's time.

        Times are assumed to be proportional to tokens. GPUs with shards of a model gather layers in
        each micro batch, so they wait for each other in each micro batch. Under DDP, GPUs wait only
        once a step, and the tokens of a complete step differ less from GPU to GPU than the tokens
        of a micro batch. If several groups of GPUs each hold a sharded copy of the model, the
        groups wait for each other only once a step. This function still assumes that the groups
        wait in each micro batch. `parallelism` replaces the configuration's parallelism, and
        `accumulation` replaces the number that follows from the global batch.
        """
        parallelism = parallelism or Parallelism.of(config)
        number = parallelism.num_gpus
        if number == 1 or config.padding == "max_length":
            return 0.0

        # If rows are grouped by length, the same rank gets the longest rows in all micro batches of
        # a step. Its delays add up, as if the other ranks waited in each micro batch.
        each_waits = parallelism.shards or config.group_by_length
        if each_waits:
            each = 1
        else:
            each = accumulation or self.run_shape(config, world_size=number).accumulation
        return waiting(self._draw(config), number, each, bucketed=config.padding == "bucket")

    def longest_row(self, config: TrainConfig) -> int:
        """Return the tokens of the longest possible row, with padding."""
        return config.seq_len if config.padding == "max_length" else self._draw(config).longest

    def longest_row_config(self, config: TrainConfig) -> TrainConfig:
        """Return the configuration with the length of the longest possible row as its seq_len.

        The memory formula needs this length, because the peak occurs with the longest row.
        """
        return _with_length(self.with_mask(config), self.longest_row(config))

    def mean_row_config(self, config: TrainConfig) -> TrainConfig:
        """Return the configuration with the mean padded length of a row as its seq_len.

        The step time formula needs this length, because the formula predicts the time of a mean
        step.
        """
        return _with_length(self.with_mask(config), max(1, round(self.tokens_per_row(config))))

    def with_mask(self, config: TrainConfig) -> TrainConfig:
        """Return the configuration, with masked padding if TRL trains and rows have padding."""
        uses_trl = self.objective is not Objective.SFT and self.objective.trainers[0] == "trl"
        has_padding = len(self.lengths.counts) > 1 or config.padding == "max_length"
        if uses_trl and has_padding and config.padding != "masked":
            return replace(config, padding="masked")
        return config

    def padded_lengths(self, config: TrainConfig) -> tuple[int, ...]:
        """Return the fixed lengths to which rows are padded, or () if there are no fixed lengths.

        A row is padded to the next longer of these lengths. If the result is (), a row is padded to
        the length of the longest row in its micro batch.
        """
        if config.has_any_length:
            return ()
        return (config.seq_len,) if config.padding == "max_length" else buckets(self._draw(config))

    def new_length_share(self, config: TrainConfig, micro_batches: int | None = None) -> float:
        """Return the share of micro batches with a padded length that has not occurred before.

        Only the run's first `micro_batches` micro batches are considered, by default all micro
        batches of the run. If rows are padded to fixed lengths, the share is 0.
        """
        if not config.has_any_length:
            return 0.0
        shape = self.run_shape(config)
        return new_length_share(
            self._draw(config), micro_batches or round(shape.whole_steps() * shape.accumulation)
        )

    def deals(self, config: TrainConfig) -> bool:
        """Return whether the trainer sorts a step's rows by length, to give all GPUs equal work.

        The result is false if sorting would change nothing, or if rows are grouped by length
        instead. The result is also false for the padding `masked`, because trainers that use it do
        not sort rows.
        """
        differ = len(self.lengths.counts) > 1 and config.padding in ("longest", "bucket")
        return (
            self.dealt
            and differ
            and not config.group_by_length
            and self.global_batch > config.micro_batch_size
        )

    def _draw(self, config: TrainConfig) -> Draw:
        size = config.micro_batch_size
        sorted_examples = self.global_batch if self.deals(config) else 0
        if config.group_by_length:
            sorted_examples = sort_group_size(
                self.trained, size * max(1, self.global_batch // size)
            )
        return Draw(
            lengths=self.lengths, seq_len=config.seq_len, size=size, sorted_together=sorted_examples
        )

    def mean_attention_length(self, config: TrainConfig) -> int:
        """Return the mean length of all examples after truncation, weighted by their tokens.

        The attention time per token is proportional to this length.
        """
        tokens = [(min(tokens, config.seq_len), number) for tokens, number in self.lengths.counts]
        return round(
            sum(one * one * number for one, number in tokens)
            / sum(one * number for one, number in tokens)
        )

    def fill(self, config: TrainConfig) -> float:
        """Return the share of the rows' tokens that are not padding."""
        return self.useful_tokens_per_row(config) / self.tokens_per_row(config)

    def truncated(self, seq_len: int) -> float:
        """Return the share of all tokens that `seq_len` truncates."""
        return 1.0 - self.lengths.tokens_within(seq_len) / self.lengths.total

    @cache  # noqa: B019 (a study has only one Workload)
    def micro_batches(self, config: TrainConfig) -> tuple[MicroBatch, ...]:
        """Return a few micro batches that represent all of the run, or () if all rows are full."""
        if config.packing:
            return self._packed_micro_batches(config)
        kinds = self._padded_micro_batches(config)
        if self.pictured:
            longest = max(kind.length for kind in kinds)
            return tuple(self._with_images(kind, peaks=kind.length == longest) for kind in kinds)
        full = all(row == (config.seq_len,) for kind in kinds for row in kind.rows)
        return () if full else kinds

    def _with_images(self, kind: MicroBatch, *, peaks: bool) -> MicroBatch:
        """Return the micro batch `kind` with images in its rows.

        If `peaks` is true, this micro batch determines the memory peak, and its first row has the
        largest images.
        """
        images = tuple(
            images_of(self.pictured, row[0], largest=peaks and place == 0)
            for place, row in enumerate(kind.rows)
        )
        return replace(kind, images=images)

    @property
    def image_tokens(self) -> int:
        """The largest number of tokens that the images of a row take; 0 without images."""
        return max((num_image_tokens(pictures) for _, pictures in self.pictured), default=0)

    def _padded_micro_batches(self, config: TrainConfig) -> tuple[MicroBatch, ...]:
        """Return micro batches to time, and the longest micro batch, which sets the memory peak.

        Short and long micro batches alternate. If rows may have any length, only odd lengths are
        chosen. The reason is that cuDNN takes seconds to build a kernel for each alignment of the
        length (`trainer.patches`). All odd lengths have the same alignment, and half of all lengths
        are odd.
        """
        draw = self._draw(config)
        if config.padding == "max_length":
            rows = tuple(
                (max(2, tokens),) for tokens in self.lengths.sample(draw.size, draw.seq_len)
            )
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
        alternating = tuple(kind for pair in pairs for kind in pair if kind is not None)
        if draw.longest in shares:
            return alternating
        return (*alternating, _kind(draw, draw.longest, 0.0))

    def _packed_micro_batches(self, config: TrainConfig) -> tuple[MicroBatch, ...]:
        """Return micro batches with equal shares, and with PROBED_ROWS packed rows in total."""
        size = config.micro_batch_size
        number = math.ceil(PROBED_ROWS / size)
        endless = itertools.cycle(self._packed_rows(config.seq_len))
        return tuple(
            MicroBatch(
                rows=tuple(itertools.islice(endless, size)), length=config.seq_len, share=1 / number
            )
            for _ in range(number)
        )

    def _packed_rows(self, seq_len: int) -> tuple[tuple[int, ...], ...]:
        """Return PROBED_ROWS rows that represent all packed rows.

        The first row has several examples and the second row has a single example, if such rows
        exist. transformers makes a mask only for rows with several examples. With this order, a
        probe compiles and measures both kinds of rows in its first steps.
        """
        rows = self._packed(seq_len)
        ends = list(itertools.accumulate(group.number for group in rows))

        # The probed rows are evenly spaced among all rows, in the order of packing.
        places = ((2 * index + 1) * ends[-1] / (2 * PROBED_ROWS) for index in range(PROBED_ROWS))
        in_order = [rows[bisect.bisect_right(ends, place)].examples for place in places]

        representatives = [in_order[index] for index in _SPREAD]
        shared_row = next((row for row in representatives if len(row) > 1), representatives[0])
        representatives.remove(shared_row)
        single_row = next((row for row in representatives if len(row) == 1), representatives[0])
        representatives.remove(single_row)
        return (shared_row, single_row, *representatives)

    def facts(self) -> dict[str, Any]:
        """Return plain data for reports and exports."""
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


def _with_length(config: TrainConfig, seq_len: int) -> TrainConfig:
    """Return the configuration with this seq_len.

    If it has this seq_len already, it is not copied.
    """
    return config if config.seq_len == seq_len else _resized(config, seq_len)


# The copies are cached, because plans for many cards and numbers of GPUs need the same ones.
@lru_cache(maxsize=KEPT_CONFIGS)
def _resized(config: TrainConfig, seq_len: int) -> TrainConfig:
    return replace(config, seq_len=seq_len)


def _kind(draw: Draw, longest: int, share: float) -> MicroBatch:
    """Return a micro batch with a row of `longest` tokens and shorter rows of typical lengths."""
    not_longer = 1 - draw.lengths.longer(longest) if longest < draw.seq_len else 1.0
    spacing = 1 / draw.sorted_together if draw.sorted_together else not_longer / draw.size
    others = (draw.lengths.quantile(not_longer - index * spacing) for index in range(1, draw.size))
    rows = [longest, *(min(tokens, longest) for tokens in others)]

    # Rows have at least two tokens: after a single token, there is no next token to predict.
    return MicroBatch(
        rows=tuple((max(2, tokens),) for tokens in rows), length=max(2, longest), share=share
    )
