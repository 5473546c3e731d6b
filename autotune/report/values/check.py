"""The result of checking another tool's run: the run in its file, the verdict and the changes."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from autotune.catalog import DeviceSpec, ModelSpec, Price
from autotune.core.json_view import add_prefix, keys
from autotune.core.notebook import ShownAsTable
from autotune.core.objective import Objective
from autotune.core.parallelism import Parallelism
from autotune.core.probe_types import Evidence, Phase
from autotune.core.train_config import TrainConfig
from autotune.prediction.estimate import Estimate, Evaluation, MemoryBounds
from autotune.prediction.memory_formula import MemoryBreakdown
from autotune.problem.rollouts import Rollouts
from autotune.problem.run_cost import FITS, OOM, TIGHT
from autotune.problem.workload import Workload
from autotune.report.values.rollouts import by_phase

# Keys that no file has, but that say which program read or made the values
SWIFT, TRANSFORMERS = "ms-swift", "transformers"
VERDICTS = {FITS: "fits", TIGHT: "too close to tell", OOM: "out of memory"}
Edits = dict[str, Any]
FP32_BASE = (
    "Frozen weights that are not quantised are in float32, by TRL's default for dtype or by "
    "prepare_model_for_kbit_training. They take 2 bytes more per parameter than in bfloat16, and "
    "are slower; `dtype: bfloat16` without this call avoids that."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncounted:
    """Memory savings that no formula covers, so the needed memory is only known as a range.

    `shared` and `freed` are names of terms of MemoryBreakdown. At best, the `shared` terms are
    sharded over `num_gpus` GPUs, and the `freed` terms take no memory on the GPU. `causes` are
    phrases that name the savings. If `exchanges` is true, the run also sends weights or gradients
    to other GPUs or to the host, which takes an unknown time.
    """

    causes: tuple[str, ...]
    num_gpus: int = 1
    shared: frozenset[str] = frozenset()
    freed: frozenset[str] = frozenset()
    exchanges: bool = False

    def least(self, memory: MemoryBreakdown) -> MemoryBreakdown:
        """Return the memory if all `shared` terms are sharded and all `freed` terms take no memory.

        If a dry probe (a run on the meta device) computed `memory`, its activations include the
        logits.
        """
        freed = set(self.freed)
        if memory.counted and "logits" in freed:
            freed.add("activations")
        parts = {name: getattr(memory, name) / self.num_gpus for name in self.shared}
        return replace(memory, **parts | dict.fromkeys(freed, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignConfig:
    """A fine-tuning run that the YAML file of another tool describes.

    `format` is trl, axolotl or llamafactory. `model` and `dataset` are names or paths as written;
    commas separate several datasets. The micro batch size is a number of examples; with some
    objectives, an example has two rows. `num_gpus` is None if the file does not state a number.
    `epochs` is None if `max_steps` ends the run. `max_examples` is the limit over all datasets
    together. `held_out` is the number of examples that the run does not train on or, below 1, their
    share. Each of `notes` is a sentence on an assumption, or on a setting that affects memory or
    speed and that `config` lacks; `minor` has the notes that only say how the run is counted. If
    `needs_more` is true, one of these settings needs memory that the estimate leaves out. If
    `whole_logits` is true, the loss holds the logits of a whole micro batch, which `config` lacks.
    `evaluation` is None if the run does not evaluate between its steps.
    `rollouts` is None unless the run generates the completions that it is trained on. `uncounted`
    has the memory savings that no formula covers. `on_one_gpu` is the strategy of a run of
    DeepSpeed on one GPU, which the knob `sharding` cannot express. `ignored` is a sentence that
    names the keys that the tool does not know or the estimate does not count, or "".
    """

    format: str
    model: str
    config: TrainConfig
    accumulation: int
    num_gpus: int | None
    epochs: float | None
    max_steps: int | None
    max_examples: int | None
    dataset: str | None
    notes: tuple[str, ...]
    held_out: float = 0.0
    minor: frozenset[str] = frozenset()
    objective: Objective = Objective.SFT
    needs_more: bool = False
    whole_logits: bool = False
    evaluation: Evaluation | None = None
    rollouts: Rollouts | None = None
    uncounted: Uncounted | None = None
    on_one_gpu: str | None = None
    ignored: str = ""
    values: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def tool(self) -> str:
        """The tool that runs the file: `format`, or another tool whose keys are read as TRL's."""
        others = (tool for tool in (SWIFT, TRANSFORMERS) if self.values.get(tool))
        return next(others, self.format)

    @property
    def parallelism(self) -> Parallelism:
        """The number of GPUs, and the strategy that shards or offloads the run."""
        if self.on_one_gpu is not None:
            return Parallelism(strategy=self.on_one_gpu)
        return Parallelism.of(self.config)


CHECKED = keys(
    *("verdict", "duration"),
    label="run.config.label()",
    config="run.config",
    accumulation="run.accumulation",
    peak_reserved_gib="bounds.reported.peak_reserved_gib",
    bounds_gib="bounds.bounds_gib",
    memory_gib="bounds.reported",
    phase="bounds.reported.phase",
)
CHANGED = keys("edits") | CHECKED


@dataclass(frozen=True, slots=True, kw_only=True)
class Duration:
    """The speed, time and cost of a run. The names of the fields are keys of the JSON output."""

    tokens_per_s: float | None
    interval: tuple[float, float] | None
    samples_per_s: float | None
    num_steps: int
    hours: float
    interval_hours: tuple[float, float]
    usd: float | None
    interval_usd: tuple[float, float] | None
    basis: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRun:
    """A run with its estimate. If the run does not fit, the estimate has no speed and no cost.

    `edits` are the changes that turn the user's file into this run: keys with their new values.
    """

    JSON: ClassVar = CHANGED

    run: ForeignConfig
    bounds: MemoryBounds
    estimate: Estimate
    edits: Edits

    @property
    def state(self) -> str:
        """FITS, TIGHT or OOM."""
        return self.estimate.state

    @property
    def verdict(self) -> str:
        """The state in words, such as "out of memory"."""
        return VERDICTS[self.state]

    @property
    def duration(self) -> Duration | None:
        """The speed, time and cost of the run, or None if they are unknown."""
        cost = self.estimate.cost
        if cost is None:
            return None

        return Duration(
            tokens_per_s=self.estimate.tokens_per_s,
            interval=self.estimate.interval,
            samples_per_s=self.estimate.samples_per_s,
            num_steps=cost.num_steps,
            hours=cost.full_run_hours,
            interval_hours=cost.interval_hours,
            usd=cost.full_run_usd,
            interval_usd=cost.interval_usd,
            basis=self.estimate.num_observations,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleChange:
    """A single change of the file, with the GiB that it saves."""

    JSON: ClassVar = add_prefix("changed", CHANGED) | keys("saves_gib")

    changed: CheckedRun
    saves_gib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Faster:
    """A faster configuration with the same training result.

    `times` is the faster configuration's speed divided by the run's speed. `command` is the shell
    command that measures the configuration. `edits` are the changes of the file, in the keys of its
    tool. `own` has phrases in autotune's words for settings that the tool cannot express.
    """

    config: TrainConfig
    times: float
    command: str
    edits: Edits
    own: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CheckReport(ShownAsTable):
    """The result of checking one file.

    `fix` is the run with the changes that make it fit. `fix` is None if the unchanged run fits, or
    if no changes suffice. Each of `fixes` is a run with a single change, and the GiB that this
    change saves. `phases` has the memory of each phase of a GRPO step. `smallest_card` is the
    smallest card that holds the unchanged run, or None if the run fits already or fits no known
    card. `runnable` is the unchanged run or, if this run is out of memory, `fix`. `minor` has the
    notes that only say how the run is counted. `how_sure` says how the numbers were estimated.
    `calibrated` says which of the numbers rest on a calibration, and when it was made.
    """

    RUN: ClassVar = keys(
        "file",
        format="checked.run.tool",
        objective="checked.run.objective",
        model="model.name",
        device="device.name",
        own_card="device.given",
    )
    REST: ClassVar = keys(
        *("limit_gib", "price", "faster", "notes", "how_sure", "calibrated", "evidence"),
        num_gpus="checked.run.num_gpus",
        epochs="checked.run.epochs",
        max_steps="checked.run.max_steps",
        workload=keys(
            examples="workload.examples",
            examples_assumed="workload.examples_assumed",
            tokens_per_example="workload.lengths.facts()",
        ),
        change="fix",
        each_change="each_change",
        smallest_card="smallest_card.name",
        phases="bounds_of_phases",
    )
    JSON: ClassVar = RUN | add_prefix("checked", CHECKED) | REST
    evidence: ClassVar[Evidence] = Evidence.ESTIMATED

    file: Path
    model: ModelSpec
    device: DeviceSpec
    limit_gib: float
    workload: Workload
    price: Price | None
    checked: CheckedRun
    fix: CheckedRun | None
    fixes: tuple[tuple[CheckedRun, float], ...]
    smallest_card: DeviceSpec | None
    runnable: CheckedRun | None
    faster: Faster | None
    notes: tuple[str, ...]
    how_sure: str
    calibrated: str | None
    phases: dict[Phase, MemoryBounds] = field(default_factory=dict)
    minor: frozenset[str] = frozenset()

    def facts(self) -> dict[str, str]:
        """Return the verdict on the file, and the estimates of its run."""
        verdict = f"{self.checked.verdict} on {self.device.label}"
        facts = {self.file.name: verdict, "model": self.model.name} | self.checked.estimate.facts()
        if self.fix is not None:
            edits = ", ".join(f"{key}: {value}" for key, value in self.fix.edits.items())
            facts["change"] = f"{edits} ({self.fix.verdict})"
        return facts

    @property
    def bounds_of_phases(self) -> dict[str, tuple[float, float | None]]:
        """The lowest and the highest possible peak of each phase of a GRPO step, in GiB."""
        return by_phase(self.phases)

    @property
    def each_change(self) -> tuple[SingleChange, ...]:
        """The runs with a single change, for the JSON output."""
        return tuple(
            SingleChange(changed=changed, saves_gib=saved) for changed, saved in self.fixes
        )
