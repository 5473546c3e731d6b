"""StudySpec: what is asked for, from flags or a YAML file. Names are resolved and the space narrowed in `setup`."""

import math
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.core.errors import UsageError
from autotune.core.files import read_user_yaml

if TYPE_CHECKING:
    from pydantic import BaseModel

LENGTH_KEYS = ("tokens_per_example", "mean_tokens", "lengths", "dataset")
ALTERNATIVES = (
    ("tokens", "examples"),
    ("global_batch", "global_batch_tokens"),
    (*LENGTH_KEYS, "p99_tokens", "tokenizer"),
)
TRAINERS = ("transformers", "trl")
MAX_COUNT = 10**15  # no study is as large; beyond it the projection's arithmetic would fail


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What others printed of a configuration: tokens/s count whole rows, `s_per_step` an optimizer step.

    `peak_gb` is 10**9 bytes as nvidia-smi's users write it, all of the process; `peak_gib` what torch says.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    s_per_step: float | None = None
    peak_gib: float | None = None
    peak_gb: float | None = None
    outcome: str = "ok"

    def __post_init__(self) -> None:
        for name in ("tokens_per_s", "samples_per_s", "s_per_step", "peak_gib", "peak_gb"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} cannot be {value!r}")
        if self.outcome not in ("ok", "oom"):
            raise ValueError(f"outcome is ok or oom, not {self.outcome!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedConfig:
    """One configuration of a suite: its knobs beside those of `pins`, and `accumulation` micro batches a step."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    name: str
    knobs: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    accumulation: int = 1
    published: Published = Published()

    def __post_init__(self) -> None:
        if not self.name.isprintable():
            raise ValueError(f"name cannot be {self.name!r}")
        if not 1 <= self.accumulation <= MAX_COUNT:
            raise ValueError(f"accumulation cannot be {self.accumulation!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySpec:
    """One study as a person asks for it. Field names are the YAML keys, and the flags with dashes."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    model: str
    gpu: str = "auto"
    space: str | None = None
    trainer: str = "transformers"
    pins: dict[str, Any] = field(default_factory=dict)
    configs: tuple[NamedConfig, ...] = ()  # to be probed as they are, instead of a search
    examples: int | None = None
    epochs: int = 1
    tokens_per_example: int | None = None
    tokens: int | None = None
    mean_tokens: float | None = None
    p99_tokens: float | None = None
    lengths: str | None = None
    dataset: str | None = None
    tokenizer: str | None = None
    global_batch: int | None = None
    global_batch_tokens: int | None = None
    budget: str = "15m"
    trials: int | None = None
    patience: int = 40
    memory_gib: float | None = None
    headroom: float = 0.05
    price: float | None = None
    prices: str | None = None
    min_rank: int = 16
    max_truncated: float = 0.01
    allow_quantized: bool = False
    allow_pure_bf16: bool = False
    allow_any_optimizer: bool = False
    slack: float = 0.05
    shallow_only: bool = False
    quality: bool = False
    verify: bool = False
    workers: int = 1
    ray: str | None = None
    seed: int = 0
    study: str | None = None
    storage: str | None = None
    out: str | None = None

    def __post_init__(self) -> None:
        counts = (
            "examples",
            "epochs",
            "tokens_per_example",
            "tokens",
            "global_batch",
            "global_batch_tokens",
            "trials",
            "patience",
            "workers",
            "min_rank",
        )
        checks = {name: (count := getattr(self, name)) is None or 1 <= count <= MAX_COUNT for name in counts}
        checks |= {
            "memory_gib": self.memory_gib is None or 0 < self.memory_gib < math.inf,
            "headroom": 0 <= self.headroom < 0.9,
            "price": self.price is None or 0 <= self.price < math.inf,
            "max_truncated": 0 <= self.max_truncated <= 1,
            "slack": 0 <= self.slack <= 1,
            "mean_tokens": self.mean_tokens is None or 1 <= self.mean_tokens <= MAX_COUNT,
            "p99_tokens": self.p99_tokens is None or 1 <= self.p99_tokens <= MAX_COUNT,
            "seed": 0 <= self.seed < 2**31,
            "trainer": self.trainer in TRAINERS,
            "study": self.study is None or self.study.isprintable(),
        }
        for name, fine in checks.items():
            if not fine:
                raise ValueError(f"{name} cannot be {getattr(self, name)!r}")
        names = [case.name for case in self.configs]
        if len(set(names)) < len(names):
            raise ValueError("configs have names of their own: one stands twice")
        if self.tokens is not None and self.examples is not None:
            raise ValueError("give examples or tokens, not both")
        if self.global_batch is not None and self.global_batch_tokens is not None:
            raise ValueError("give global_batch or global_batch_tokens, not both")
        if (self.mean_tokens is None) is not (self.p99_tokens is None):
            raise ValueError("give mean_tokens and p99_tokens together")
        if self.tokenizer is not None and self.dataset is None:
            raise ValueError("a tokenizer counts the examples of a dataset: give dataset too")
        ways = [name for name in LENGTH_KEYS if getattr(self, name) is not None]
        if len(ways) > 1:
            raise ValueError(f"the lengths of the examples are given in more than one way: {', '.join(ways)}")


def make_spec(path: Path | None, flags: dict[str, Any]) -> StudySpec:
    """The spec of a file, if one is given, with the flags that were given (not None) over it.

    Raises:
        UsageError: a value that cannot be, an unknown key (its line is named), or no model.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        if path is not None:
            base: StudySpec = read_user_yaml(path, _file_model()).root  # type: ignore[attr-defined]
            pins = base.pins | given.pop("pins", {})
            for keys in ALTERNATIVES:  # either flag takes the place of all the keys
                if any(key in given for key in keys):
                    given = dict.fromkeys(keys) | given
            return replace(base, **given, pins=pins)
        if "model" not in given:
            raise UsageError("which model?", remedy="give --model NAME (`autotune models` lists them) or --spec FILE")
        return StudySpec(**given)
    except ValueError as error:
        raise UsageError(str(error), remedy="see `autotune run --help`") from None


SPEC_FIELDS = tuple(item.name for item in fields(StudySpec))


@cache
def _file_model() -> "type[BaseModel]":
    from pydantic import RootModel

    return RootModel[StudySpec]
