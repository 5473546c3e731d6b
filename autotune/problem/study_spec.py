"""StudySpec: a user's request for a study, from command-line options or a YAML file."""

import math
import os
import types
from collections.abc import Callable, Collection, Iterable
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_args, get_origin

from autotune.core.errors import UsageError, did_you_mean
from autotune.core.files import read_user_yaml, shipped_files
from autotune.core.images import parse_size
from autotune.core.memory_budget import HEADROOM
from autotune.core.objective import NOT_OFFERED, Objective
from autotune.core.other_trainer import USUAL, OtherTrainer
from autotune.problem.gpu_counts import parse_gpus, parse_within
from autotune.problem.run_options import TRACKERS, RunOptions
from autotune.problem.search_space import SearchSpace

if TYPE_CHECKING:
    from pydantic import BaseModel

DEFAULT_IMAGE = "896x672"
LOSS_ON = ("completion", "assistant", "all")
COMPILE_AHEAD = ("auto", "always", "never")
LENGTH_KEYS = ("tokens_per_example", "mean_tokens", "lengths", "dataset")
ALTERNATIVES = (
    ("tokens", "examples"),
    ("global_batch", "global_batch_tokens"),
    (*LENGTH_KEYS, "p99_tokens", "tokenizer", "split"),
    ("dataset", "image_size"),
    ("completions", "mean_completion", "p99_completion"),
)
# Fields for the objective grpo
ROLLOUTS = (
    *("mean_completion", "p99_completion", "completions", "max_completion"),
    *("num_generations", "prompts_per_step", "steps_per_generation", "iterations", "beta"),
)
MAX_COUNT = 10**15  # the largest accepted number; larger numbers would overflow in costs


class InvalidSpec(UsageError, ValueError):
    """An impossible value in a study's spec.

    InvalidSpec is also a ValueError, because pydantic reports the key of the file at which a
    ValueError occurred. With this key, the error message can name the line of the file.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, remedy="see --help")


@dataclass(frozen=True, slots=True)
class Numbers:
    """The finite numbers from `least` to `most`, of which `least` or `most` may be excluded."""

    least: float
    most: float = math.inf
    excluded: float | None = None

    def __call__(self, value: float) -> bool:
        """Return whether a value is one of these numbers."""
        return self.least <= value <= self.most and value not in (self.excluded, math.inf)

    def __str__(self) -> str:
        if self.most == math.inf:
            more_than = self.excluded == self.least
            return f"more than {self.least}" if more_than else f"{self.least} or more"
        most = "10**15" if self.most == MAX_COUNT else f"{self.most:,}"
        return f"{self.least} {'to below' if self.excluded == self.most else 'to'} {most}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The command-line option of a field of StudySpec, and the field's possible values.

    `metavar` is the value's placeholder in the help, or None to show the type. The help ends with
    `shown_default` in brackets. `allows` returns whether a value of the right type is valid.
    `allows` is not called for None, which is valid if the field's type includes None. `choices`
    lists all valid values of an option that accepts only certain words. If `is_rare` is true, the
    field has no option of its own, and only `--set NAME=VALUE` or a spec file can set it.
    """

    help: str
    metavar: str | None = None
    shown_default: str | None = None
    allows: Callable[[Any], bool] = lambda value: True
    choices: tuple[str, ...] = ()
    is_rare: bool = False

    def expected(self, types: Collection[type]) -> str:
        """Return what a value must be, such as "a whole number, 1 or more", or "" if unknown.

        `types` are the types of the field.
        """
        if self.choices:
            return f"{', '.join(self.choices[:-1])} or {self.choices[-1]}"
        if isinstance(self.allows, Numbers):
            return f"a {'number' if float in types else 'whole number'}, {self.allows}"
        return "true or false" if bool in types else ""


def _option(default: Any, help: str, **details: Any) -> Any:
    """Return a field of StudySpec with its Option.

    The option's help shows the default, unless the default is None or False.
    """
    # The comparison uses `is`, because the default 0 equals False, but must be shown.
    if not any(default is hidden for hidden in (MISSING, None, False)):
        details.setdefault("shown_default", str(default))
    return field(default=default, metadata={"option": Option(help=help, **details)})


def _count(default: int | None, help: str, **details: Any) -> Any:
    """Return a field of StudySpec for a number that is 1 or more."""
    return _option(default, help, allows=Numbers(1, MAX_COUNT), **details)


def _choice(default: str | None, choices: Iterable[str], help: str, **details: Any) -> Any:
    """Return a field of StudySpec whose value is one of `choices`."""
    words = tuple(map(str, choices))
    return _option(default, help, allows=words.__contains__, choices=words, **details)


def _share(default: float | None, help: str, **details: Any) -> Any:
    """Return a field of StudySpec for a number from 0 to 1."""
    return _option(default, help, allows=Numbers(0, 1), **details)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The published results of a configuration.

    `tokens_per_s` includes padding. `s_per_step` is the time of an optimizer step, and
    `s_per_micro_batch` the mean time of a micro batch with its share of the optimizer step.
    `peak_gib` is torch's peak of allocated memory on a GPU. `reserved_gib` and `reserved_gb` (in
    10**9 bytes) are torch's peak of reserved memory. `peak_gb` (in 10**9 bytes) and `process_gib`
    are the memory of the whole process, as nvidia-smi shows it.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    s_per_step: float | None = None
    s_per_micro_batch: float | None = None
    peak_gib: float | None = None
    reserved_gib: float | None = None
    reserved_gb: float | None = None
    peak_gb: float | None = None
    process_gib: float | None = None
    outcome: str = "ok"

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name != "outcome" and value is not None and not 0 < value < math.inf:
                raise InvalidSpec(f"{item.name} cannot be {value!r}")
        if self.outcome not in ("ok", "oom"):
            raise InvalidSpec(f"outcome is ok or oom, not {self.outcome!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedConfig:
    """One named configuration, which is probed without a search.

    Its `knobs` are added to the study's `pins`. An optimizer step has `accumulation` micro batches.
    `model_overrides` replaces keys of the model's config. `excluded` is the reason why autotune
    cannot express the published configuration, or None. An excluded configuration is shown, but
    neither estimated nor probed. `differs` says what the published run computed in another way than
    autotune does, so that the two results differ. `trainer` says what the trainer of the published
    run does in another way and dry probes can follow.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    name: str
    knobs: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    model_overrides: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 1
    published: Published | None = None
    excluded: str | None = None
    differs: str | None = None
    trainer: OtherTrainer = USUAL

    def __post_init__(self) -> None:
        if not self.name.isprintable():
            raise InvalidSpec(f"name cannot be {self.name!r}")
        for name in ("excluded", "differs"):
            reason = getattr(self, name)
            if reason is not None and not (reason and reason.isprintable()):
                raise InvalidSpec(f"{name} cannot be {reason!r}")
        if not 1 <= self.accumulation <= MAX_COUNT:
            raise InvalidSpec(f"accumulation cannot be {self.accumulation!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySpec:
    """One study as a user requests it.

    A field's name is its key in a YAML file. With dashes instead of underscores, the name is an
    option of the command, unless the field is rare (`Option.is_rare`). Raises UsageError for a
    value of the wrong type or out of range, and for contradictory fields.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    model: str = _option(
        MISSING, "Model to train: a catalogue name, a local directory, or a hub id."
    )
    gpu: str = _option(
        "auto",
        "Target GPU: a name, auto (this machine's GPU), cpu, or a description of your own GPU.",
    )
    space: str | SearchSpace | None = _option(  # noqa: RUF009
        None, "Search space: a name (`autotune spaces` lists them) or a file."
    )
    objective: str = _choice(
        "sft",
        Objective,
        "The objective: sft (the next token), dpo or kto (preferred answers), reward (a score),"
        " classification, or grpo (rewarded answers; not for `compare`).",
    )
    trainer: str | None = _choice(
        None,
        ("transformers", "trl"),
        "The trainer: transformers or trl; dpo, kto and reward always use trl.",
        shown_default="as the objective needs",
    )
    pins: dict[str, Any] = field(default_factory=dict)
    # If the spec has such configurations, only these are probed, without a search.
    configs: tuple[NamedConfig, ...] = ()
    source: str | None = None  # the publication that contains the results of `configs`
    examples: int | None = _count(
        None, "Number of examples in the full run.", shown_default="10000"
    )
    epochs: int = _count(1, "Passes over the examples.")
    tokens_per_example: int | None = _count(
        None, "One length in tokens for all examples.", shown_default="1024"
    )
    tokens: int | None = _count(None, "Number of tokens in one pass, instead of --examples.")
    mean_tokens: float | None = _count(
        None, "Mean length of the examples in tokens; needs --p99-tokens."
    )
    p99_tokens: float | None = _count(None, "99th percentile of the lengths of the examples.")
    lengths: str | None = _option(
        None, "File with the lengths of the examples in tokens, one per line.", metavar="FILE"
    )
    dataset: str | None = _option(
        None,
        "Your examples, to measure their lengths: a file (.jsonl, .json, .parquet, .csv, .arrow),"
        " a folder of such files, a dataset that `datasets` has saved, or org/name[:config] on the"
        " Hub.",
        metavar="PATH",
    )
    split: str | None = _option(
        None, "Split of --dataset to use.", metavar="NAME", shown_default="train, if any"
    )
    loss_on: str | None = _choice(
        None,
        LOSS_ON,
        "The tokens to train on: completion, assistant (all of the assistant's text), or all.",
        shown_default="completions or the assistant's text, if the examples have them; else all",
    )
    tokenizer: str | None = _option(
        None,
        "Tokenizer that counts the tokens of --dataset.",
        metavar="DIR",
        shown_default="the model's",
    )
    image_size: str | None = _option(
        None,
        "Without --dataset, for a model that takes images: each example has an image of this"
        " size in pixels.",
        metavar="WxH",
        shown_default="examples are only text",
        is_rare=True,
    )
    vision: str = _choice(
        "frozen",
        ("frozen", "trained"),
        "Whether a vision tower and its projector are frozen or trained.",
        is_rare=True,
    )
    global_batch: int | None = _count(None, "Examples in each optimizer step.", shown_default="32")
    global_batch_tokens: int | None = _count(
        None,
        "Tokens in each optimizer step, instead of --global-batch; met approximately.",
        is_rare=True,
    )
    mean_completion: float | None = _count(
        None, "For grpo: mean tokens of a completion; needs --p99-completion.", shown_default="600"
    )
    p99_completion: float | None = _count(
        None,
        "For grpo: 99th percentile of the tokens of completions.",
        shown_default="2000",
    )
    completions: str | None = _option(
        None,
        "For grpo: file with the tokens of completions, one number per line.",
        metavar="FILE",
    )
    max_completion: int | None = _count(
        None,
        "For grpo: tokens at which a completion is cut off.",
        shown_default="the 99th percentile, or the file's longest",
    )
    num_generations: int | None = _option(
        None,
        "For grpo: completions to each prompt.",
        allows=Numbers(2, MAX_COUNT),
        shown_default="8",
    )
    prompts_per_step: int | None = _count(
        None, "For grpo: prompts in each optimizer step.", shown_default="8"
    )
    steps_per_generation: int | None = _count(
        None, "For grpo: optimizer steps on the completions of a generation.", shown_default="1"
    )
    iterations: int | None = _count(
        None, "For grpo: updates with the same completions.", shown_default="1"
    )
    beta: float | None = _option(
        None,
        "For grpo: weight of the distance from the untrained model; above 0, it computes too.",
        allows=Numbers(0),
        shown_default="0",
    )
    eval_share: float = _option(
        0.0,
        "Share of the examples that the full run holds out and evaluates.",
        allows=Numbers(0, 0.5),
        is_rare=True,
    )
    eval_steps: int | None = _count(
        None,
        "Optimizer steps from one evaluation to the next.",
        shown_default="as often as the run saves",
        is_rare=True,
    )
    save_steps: int | None = _count(
        None,
        "Optimizer steps from one checkpoint to the next.",
        shown_default="about half an hour",
        is_rare=True,
    )
    interruptions_per_day: float | None = _option(
        None,
        "Mean number of times a day that the cloud takes a spot instance back.",
        allows=Numbers(0, 1440),
        shown_default="1 is assumed, and 0 to 6 for the interval",
        is_rare=True,
    )
    restart_minutes: float = _option(
        10.0,
        "Paid minutes from the loss of a spot instance to the next training step.",
        allows=Numbers(0, 1440),
        is_rare=True,
    )
    report_to: str = _choice(
        "none",
        TRACKERS,
        f"Tracker that the full run reports to: {', '.join(TRACKERS)}.",
        is_rare=True,
    )
    budget: str = _option(
        "15m",
        "Time limit from the worker's start to the last confirming probe, such as 90s, 15m or 1h.",
    )
    trials: int | None = _count(None, "Largest number of trials, including refused trials.")
    patience: int = _count(
        40, "Stop after this number of trials without an improvement.", is_rare=True
    )
    memory_gib: float | None = _option(
        None,
        "Use at most this number of GiB of the device's memory.",
        allows=Numbers(0, excluded=0),
    )
    headroom: float = _option(
        HEADROOM, "Share of the memory that must stay free.", allows=Numbers(0, 0.9, excluded=0.9)
    )
    price: float | None = _option(
        None,
        "Price of a GPU in USD per hour, instead of the catalogue's.",
        allows=Numbers(0),
    )
    prices: str | None = _option(
        None, "File with your own prices (`autotune prices` shows the format).", metavar="FILE"
    )
    calibration: str | None = _option(
        None,
        "File that `autotune calibrate --out` wrote.",
        metavar="FILE",
        shown_default="this machine's for this GPU",
    )
    min_rank: int | None = _count(None, "Smallest LoRA rank.", shown_default="16")
    max_truncated: float | None = _share(
        None, "Largest share of tokens that may be truncated.", shown_default="0.01"
    )
    allow_quantized: bool = _option(False, "Let a configuration with a quantised base model win.")
    allow_fp8: bool = _option(
        False, "Let full fine-tuning with matrix products in 8-bit floats win."
    )
    allow_pure_bf16: bool = _option(False, "Let pure bf16 win, which has no fp32 master weights.")
    allow_any_optimizer: bool = _option(False, "Let optimizers other than AdamW win.")
    slack: float = _share(
        0.05,
        "A more capable configuration, such as a higher LoRA rank, wins if it costs at most this"
        " share more.",
        is_rare=True,
    )
    shallow_only: bool = _option(
        False, "Probe a few layers only and extrapolate, for a model that this device cannot hold."
    )
    fresh: bool = _option(
        False,
        "Measure everything anew: reuse no result that another study stored.",
        is_rare=True,
    )
    quality: bool = _option(
        False, "Afterwards train the finalists on --dataset and report their held-out losses."
    )
    verify: bool = _option(
        False,
        "Afterwards run the exported script and compare its speed and memory with the prediction.",
    )
    gpus: int | str | tuple[int, ...] | None = _option(
        None,
        "Number of GPUs for each training; several numbers, such as 1,2,4,8, are compared.",
        shown_default="1",
    )
    within: str | float | None = _option(
        None, "Time within which the full run must end, such as 6h.", metavar="TIME"
    )
    play_ranks: bool = _option(
        False,
        "With --gpus: one GPU simulates a rank even if this machine has enough GPUs."
        " Speeds are then projected.",
        is_rare=True,
    )
    expert_parallel: int = _count(
        1,
        "For `plan --gpus`: number of GPUs that share out the experts of a mixture. autotune"
        " estimates the memory, but cannot train so.",
        is_rare=True,
    )
    workers: int = _count(
        1, "Number of this machine's GPUs that probe at the same time, one configuration each."
    )
    ray: str | None = _option(
        None,
        "Probe on all GPUs in a Ray cluster that are the same product as the target"
        " (pip install ray).",
        metavar="ADDRESS",
        is_rare=True,
    )
    compile_ahead: str = _choice(
        "auto",
        COMPILE_AHEAD,
        "Whether extra processes compile the configurations that are likely to be tried next:"
        " auto (on a GPU, with 4 cores or more), always, or never.",
        is_rare=True,
    )
    seed: int = _option(0, "Seed of the search.", allows=Numbers(0, 2**31 - 1), is_rare=True)
    study: str | None = _option(
        None, "Name of the study; an existing study is continued.", allows=str.isprintable
    )
    storage: str | None = _option(None, "Database of the studies.", metavar="URL")
    out: str | None = _option(None, "Study directory.", shown_default="runs/<study>")

    def __post_init__(self) -> None:
        _refuse(self.objective, self.loss_on)
        for item in fields(self):
            option = item.metadata.get("option")
            value = getattr(self, item.name)
            if option and not (
                _has_type(value, item.type) and (value is None or option.allows(value))
            ):
                expected = option.expected(_types(item.type))
                only = f": it is {expected}" if expected else ""
                raise InvalidSpec(f"{item.name} cannot be {value!r}{only}")

        if not isinstance(self.pins, dict):
            raise InvalidSpec(f"pins maps settings to values, it cannot be {self.pins!r}")
        _check_suite(self.configs, self.source)

        if self.tokens is not None and self.examples is not None:
            raise InvalidSpec("give examples or tokens, not both")
        if self.global_batch is not None and self.global_batch_tokens is not None:
            raise InvalidSpec("give global_batch or global_batch_tokens, not both")
        if (self.mean_tokens is None) is not (self.p99_tokens is None):
            raise InvalidSpec("give mean_tokens and p99_tokens together")
        _check_rollouts(self)
        if self.tokenizer is not None and self.dataset is None:
            raise InvalidSpec("a tokenizer counts the tokens of a dataset: give dataset too")
        if self.eval_steps is not None and not self.eval_share:
            raise InvalidSpec("eval_steps needs examples that are held out: give eval_share too")
        if self.split is not None and self.dataset is None:
            raise InvalidSpec("a split is a part of a dataset: give dataset too")

        # Each of the following properties raises an error for an impossible value.
        _ = (self.numbers_of_gpus, self.within_hours, self.trained_by, self.image)

        length_keys = [name for name in LENGTH_KEYS if getattr(self, name) is not None]
        if len(length_keys) > 1:
            raise InvalidSpec(
                "the lengths of the examples are given in more than one way:"
                f" {', '.join(length_keys)}"
            )

    @property
    def trained_by(self) -> str:
        """The trainer; the default is the objective's first trainer."""
        trainers = Objective(self.objective).trainers
        if self.trainer not in (None, *trainers):
            raise InvalidSpec(f"{self.objective} is trained by {trainers[0]}: leave trainer out")
        return self.trainer or trainers[0]

    @property
    def image(self) -> tuple[int, int]:
        """The width and height in pixels of the assumed images, if there is no dataset."""
        if self.image_size is not None and self.dataset is not None:
            raise InvalidSpec(
                "the images of a dataset have sizes of their own: leave image_size out"
            )
        return parse_size(self.image_size or DEFAULT_IMAGE)

    @property
    def run_options(self) -> RunOptions:
        """The evaluations, saves and reports between the full run's steps."""
        return RunOptions(
            eval_steps=self.eval_steps,
            save_steps=self.save_steps,
            report_to=self.report_to,
            interruptions_per_day=self.interruptions_per_day,
            restart_minutes=self.restart_minutes,
        )

    @property
    def numbers_of_gpus(self) -> tuple[int, ...] | None:
        """The GPU counts to choose from, or None to take the search space's counts."""
        return None if self.gpus is None else parse_gpus(self.gpus)

    @property
    def within_hours(self) -> float | None:
        """The hours within which the full run must end."""
        return parse_within(self.within)

    @property
    def space_name(self) -> str | None:
        """The name or the path of the search space, as the user gave it."""
        return self.space.name if isinstance(self.space, SearchSpace) else self.space


def _refuse(objective: Any, loss_on: str | None) -> None:
    """Raise InvalidSpec for an objective that is not offered, or for `loss_on` without SFT."""
    if reason := NOT_OFFERED.get(str(objective).lower()):
        raise InvalidSpec(f"objective {objective} is not offered: {reason}")
    if loss_on is not None and objective != Objective.SFT:
        raise InvalidSpec(
            f"loss_on is for sft only: the examples of {objective} determine the tokens to train on"
        )


def _check_rollouts(spec: StudySpec) -> None:
    """Raise InvalidSpec for fields of GRPO with another objective, and for contradictory fields."""
    given = [name for name in ROLLOUTS if getattr(spec, name) is not None]
    if not Objective(spec.objective).generates:
        if given:
            raise InvalidSpec(f"{', '.join(given)}: only objective grpo generates completions")
        return
    if (spec.mean_completion is None) is not (spec.p99_completion is None):
        raise InvalidSpec("give mean_completion and p99_completion together")
    if spec.completions is not None and spec.mean_completion is not None:
        raise InvalidSpec("give completions or mean_completion, not both")


def _check_suite(configs: tuple[NamedConfig, ...], source: str | None) -> None:
    """Raise InvalidSpec for duplicate names of configurations, and for an unprintable source."""
    if source is not None and not source.isprintable():
        raise InvalidSpec(f"source cannot be {source!r}")
    names = [config.name for config in configs]
    if len(set(names)) < len(names):
        raise InvalidSpec("configs need different names: one name occurs twice")


OPTIONS: dict[str, Option] = {
    item.name: item.metadata["option"] for item in fields(StudySpec) if "option" in item.metadata
}

RARE = tuple(name for name, option in OPTIONS.items() if option.is_rare)


def make_spec(path: Path | None, options: dict[str, Any]) -> StudySpec:
    """Return the spec in a file. Each option that is not None replaces a value of the file.

    Without a path, the spec has only the options. The path may also be the name of a suite that
    comes with the package. If an option replaces the file's card or model, the published results
    are removed, because they are for the file's card and model. Raises UsageError for an impossible
    value, an unknown key (with its line), or a missing model.
    """
    given_options = {name: value for name, value in options.items() if value is not None}
    if path is None:
        if "model" not in given_options:
            raise UsageError(
                "no model is given",
                remedy="give --model NAME (`autotune models` lists them) or --spec FILE",
            )
        return StudySpec(**given_options)

    path = _spec_file(path)
    base: StudySpec = read_user_yaml(path, _file_model()).root  # type: ignore[attr-defined]
    if isinstance(base.space, SearchSpace):
        raise UsageError(
            f"{path}: space: Input should be a valid string",
            remedy="give the name or path of a space",
        )

    pins = base.pins | given_options.pop("pins", {})
    # The keys of a group exclude each other, so an option replaces all keys of its group.
    for keys in ALTERNATIVES:
        if any(key in given_options for key in keys):
            given_options = dict.fromkeys(keys) | given_options
    spec = replace(base, **given_options, pins=pins)
    if (spec.gpu, spec.model) != (base.gpu, base.model):
        spec = replace(
            spec, source=None, configs=tuple(replace(one, published=None) for one in spec.configs)
        )
    return spec


def shipped_suites() -> dict[str, Path]:
    """Return {name: file} for the package's suites, which contain published results."""
    return shipped_files("published", "studies/published")


def _spec_file(path: Path) -> Path:
    """Return the path if it exists, otherwise the file of the package's suite with this name.

    Raises UsageError if there is neither a file nor a suite.
    """
    shipped = shipped_suites()
    if os.path.lexists(path):
        return path
    if str(path) not in shipped:
        raise UsageError(
            f"cannot read {path}: No such file or directory"
            f"{did_you_mean(str(path), tuple(shipped))}",
            remedy="check the path, or give a name that `autotune suites` lists",
        )
    return shipped[str(path)]


def _types(annotation: Any) -> tuple[type, ...]:
    """Return the annotated types: those of a union, or a single one."""
    members = get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return tuple(get_origin(member) or member for member in members)


def _has_type(value: Any, annotation: Any) -> bool:
    """Return whether a value has the annotated type, which is a class or a union of classes.

    An int is accepted as a float. A bool is accepted neither as an int nor as a float.
    """
    allowed = _types(annotation)
    if isinstance(value, bool):
        return bool in allowed
    return isinstance(value, allowed) or (float in allowed and isinstance(value, int))


@cache
def _file_model() -> "type[BaseModel]":
    """Return the pydantic model of a spec file.

    The model is made on first use, so that other commands do not have to import pydantic.
    """
    from pydantic import RootModel, model_validator

    class SpecFile(RootModel[StudySpec]):
        @model_validator(mode="before")
        @classmethod
        def _refuse_empty(cls, data: Any) -> Any:
            # With an empty list, a search would start, which the user would not expect.
            if isinstance(data, dict) and data.get("configs") == []:
                raise ValueError(
                    "configs is empty: name the configurations to probe,"
                    " or leave the key out to search"
                )
            return data

    return SpecFile
