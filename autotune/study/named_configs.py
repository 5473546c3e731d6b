"""A suite: named configurations that are probed unchanged and compared with published numbers."""

import json
import statistics
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.catalog import DeviceSpec, ModelSpec, resolve_model
from autotune.core.errors import Cancelled, UsageError, did_you_mean
from autotune.core.files import document, write_atomic
from autotune.core.json_view import add_prefix, json_data, keys
from autotune.core.knobs import KNOBS
from autotune.core.other_trainer import USUAL
from autotune.core.probe_types import Evidence, Outcome, ProbeRequest, ProbeResult
from autotune.core.train_config import TrainConfig
from autotune.core.units import DASH, GIB, fmt_count
from autotune.prediction.projection import run_performance
from autotune.problem.constraints import refusal
from autotune.problem.length_distribution import Lengths
from autotune.problem.run_cost import FITS, TIGHT
from autotune.problem.study_spec import NamedConfig, Published, StudySpec
from autotune.problem.task import Task
from autotune.problem.workload import Workload
from autotune.study.ranking import ROOMY

if TYPE_CHECKING:
    from autotune.probe.rank_pool import RankPool
    from autotune.probe.supervisor import WorkerProber
    from autotune.study.storage.probe_store import ProbeStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A published number or outcome (`theirs`), and our number or outcome (`ours`).

    `interval` is the 80 % interval of an estimated speed, the largest errors of an estimated
    memory, or the range of measured speeds. `inside` says whether the published number is in the
    interval, or whether the outcomes agree; it is None if this cannot be judged.
    """

    theirs: float | str
    ours: float | str | None
    interval: tuple[float, float] | None = None
    inside: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigResult:
    """The result of a case, which is a named configuration of a suite.

    `tokens_per_s` includes padding: each row has `seq_len` tokens. `with_context_gib` is the peak
    of reserved memory plus the memory of the CUDA context. The peak includes `nccl_gib`, the memory
    of NCCL, which torch does not count. `interval` is the 80 % interval of an estimated
    `tokens_per_s`, or the range of the measurements. `interval_gib` is the interval of an estimated
    `peak_reserved_gib`; it is None for a measured peak. `tight` means that the configuration may
    not fit, or that less than a tenth of the memory is free. `doubt` says why the published speed
    cannot be right. `host_share` is the host's weight in the estimated time of a micro batch, from
    0 (GPU-bound) to 1 (CPU-bound).
    """

    JSON: ClassVar = keys(name="case.name") | keys(
        *(
            "config",
            "outcome",
            "verdict",
            "evidence",
            "reason",
            "tight",
            "tokens_per_s",
            "interval",
            "samples_per_s",
        ),
        *(
            "step_time_s",
            "peak_allocated_gib",
            "peak_reserved_gib",
            "interval_gib",
            "with_context_gib",
            "published",
            "doubt",
        ),
        differs="case.differs",
    )

    case: NamedConfig
    config: TrainConfig
    outcome: Outcome
    evidence: Evidence
    reason: str | None = None
    tight: bool = False
    tokens_per_s: float | None = None
    interval: tuple[float, float] | None = None
    samples_per_s: float | None = None
    step_time_s: float | None = None
    peak_allocated_gib: float | None = None
    peak_reserved_gib: float | None = None
    interval_gib: tuple[float, float] | None = None
    with_context_gib: float | None = None
    nccl_gib: float = 0.0
    host_share: float | None = None
    doubt: str | None = None

    @property
    def verdict(self) -> str:
        """Whether the case fits in memory, in words, or the outcome's name if the probe failed."""
        if self.case.excluded:
            return "not predicted"
        if self.outcome is Outcome.OK:
            return TIGHT if self.tight else FITS
        return NO_FIT if self.outcome is Outcome.OOM else self.outcome.value

    def published_pairs(self) -> dict[str, tuple[float | str, float | str | None]]:
        """Return {name: (published, ours)} for every published number.

        The outcome is included if either the published outcome or our outcome is OOM.
        """
        theirs = self.case.published or Published()

        whole_gib = self.with_context_gib
        reserved_gib = self.peak_reserved_gib
        if reserved_gib is not None:
            reserved_gib -= self.nccl_gib
        step_s = self.step_time_s
        pairs: dict[str, tuple[float | str | None, float | str | None]] = {
            "tokens/s": (theirs.tokens_per_s, self.tokens_per_s),
            "samples/s": (theirs.samples_per_s, self.samples_per_s),
            "s/step": (theirs.s_per_step, step_s),
            "s/micro batch": (
                theirs.s_per_micro_batch,
                None if step_s is None else step_s / self.case.accumulation,
            ),
            "peak GiB": (theirs.peak_gib, self.peak_allocated_gib),
            "reserved GiB": (theirs.reserved_gib, reserved_gib),
            "reserved GB": (theirs.reserved_gb, _in_gb(reserved_gib)),
            "whole GB": (theirs.peak_gb, _in_gb(whole_gib)),
            "whole GiB": (theirs.process_gib, whole_gib),
        }

        if self.case.published and (theirs.outcome == Outcome.OOM or self.outcome is Outcome.OOM):
            ours: str | None = None
            if self.outcome in (Outcome.OK, Outcome.OOM):
                ours = TIGHT if self.tight else self.outcome.value
            pairs = {"outcome": (theirs.outcome, ours), **pairs}
        return {
            name: (published, ours)
            for name, (published, ours) in pairs.items()
            if published is not None
        }

    def known_pairs(self) -> dict[str, tuple[float | str, float | str]]:
        """Return {name: (published, ours)} for each name whose two numbers are known."""
        return {
            name: (theirs, ours)
            for name, (theirs, ours) in self.published_pairs().items()
            if ours is not None
        }

    def ratios(self, names: Collection[str]) -> list[float]:
        """Return the ratio published / ours for each name in `names`, if both numbers are known."""
        pairs = [pair for name, pair in self.known_pairs().items() if name in names]
        return [float(theirs) / float(ours) for theirs, ours in pairs]

    def cells(self) -> tuple[str, ...]:
        """Return a table row: name, configuration, verdict, speed, memory and published numbers."""
        published = "; ".join(
            f"{name} {_number(pair.theirs)}"
            + (
                ""
                if pair.ours is None
                else f", here {_number(pair.ours)}{_relative_difference(pair.theirs, pair.ours)}"
            )
            + {True: ", inside", False: ", outside", None: ""}[pair.inside]
            for name, pair in self.published.items()
        )
        verdict = self.verdict + (f": {self.reason}" if self.reason else "")

        speed = DASH
        memory = DASH
        if self.tokens_per_s is not None:
            between = f" ({' to '.join(map(fmt_count, self.interval))})" if self.interval else ""
            speed = f"{fmt_count(self.tokens_per_s)}{between} [{self.evidence}]"
        if self.peak_reserved_gib is not None:
            between = " ({:.1f} to {:.1f})".format(*self.interval_gib) if self.interval_gib else ""
            memory = f"{self.peak_reserved_gib:.1f}{between}"
        return self.case.name, self.config.label(), verdict, speed, memory, published or DASH

    @property
    def published(self) -> dict[str, Pair]:
        """Map the name of each published number to this number and our number."""
        return {
            name: self._pair(name, theirs, ours)
            for name, (theirs, ours) in self.published_pairs().items()
        }

    def _pair(self, name: str, theirs: float | str, ours: float | str | None) -> Pair:
        """Compare a published number with ours and with the interval of ours."""
        if isinstance(theirs, str) or isinstance(ours, str) or ours is None:
            judged = None if ours in (None, TIGHT) else theirs == ours
            return Pair(theirs=theirs, ours=ours, inside=judged)

        span, middle = self.interval_gib, self.peak_reserved_gib
        if name in SPEEDS:
            span, middle = self.interval, self.tokens_per_s
        if span is None or not middle:
            return Pair(theirs=theirs, ours=ours)
        # A time is inversely proportional to the speed, so its interval is reversed.
        shares = sorted(middle / end if name in TIMES else end / middle for end in span)
        low, high = (ours * share for share in shares)
        inside = low <= theirs <= high
        return Pair(theirs=theirs, ours=ours, interval=(low, high), inside=inside)

    def comparison(self) -> list[tuple[str, ...]]:
        """Return a row of the table COMPARED for each published number."""
        rows: list[tuple[str, ...]] = []
        for name, pair in self.published.items():
            ours = DASH if pair.ours is None else _number(pair.ours)
            if pair.interval is not None:
                ours += f" ({' to '.join(map(_number, pair.interval))})"
            verdict = {True: "inside", False: "outside", None: DASH}[pair.inside]
            rows.append(
                (self.case.name, name, _number(pair.theirs), ours, verdict, self._why(name, pair))
            )
        return rows

    def _why(self, name: str, pair: Pair) -> str:
        """Return why a published number cannot be judged, is doubtful or differs from ours."""
        if pair.ours is None:
            without_speed = name in SPEEDS and self.outcome is Outcome.OK
            differs = self.case.differs if without_speed else None
            return self.case.excluded or differs or self.reason or self.verdict
        doubt = self.doubt if name in SPEEDS else None
        differs = None
        if pair.inside is False:
            # A count follows the trainer's memory, so that only the speed differs.
            is_followed = self.case.trainer != USUAL and name not in SPEEDS
            stated = None if is_followed else self.case.differs
            differs = stated or (None if doubt else "the cause is not known")
        return "; ".join(filter(None, (doubt, differs))) or (self.reason or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcedResult:
    """A result, and the source of its suite's published numbers."""

    JSON: ClassVar = add_prefix("result", ConfigResult.JSON) | keys("source")

    result: ConfigResult
    source: str | None


# The units of published speeds. If a case has numbers in several units, they express one speed.
TIMES = ("s/step", "s/micro batch")
SPEEDS = ("tokens/s", "samples/s", *TIMES)
PEAKS = ("peak GiB", "reserved GiB", "reserved GB", "whole GB", "whole GiB")
NO_FIT = "does not fit"
SEVERAL = (
    "named configurations are probed on one GPU; to use several GPUs, search with "
    "`autotune run --gpus`"
)
COLUMNS = {
    "case": "left",
    "configuration": "left",
    "verdict": "left",
    "tokens/s": "right",
    "GiB": "right",
} | {"published": "left"}
COMPARED = {
    "case": "left",
    "number": "left",
    "published": "right",
    "estimated (interval)": "right",
    "published is": "left",
    "reason": "left",
}


def cases(spec: StudySpec, task: Task) -> Iterator[tuple[NamedConfig, TrainConfig, Task]]:
    """Yield each case with its configuration and its task.

    Each case has a task of its own, with the case's model and gradient accumulation. All rows of
    the task have `seq_len` tokens. Raises UsageError for unknown knobs and invalid values.
    """
    for case in spec.configs:
        knobs = spec.pins | case.knobs
        for name in knobs:
            if name not in KNOBS:
                raise UsageError(
                    f"{case.name}: there is no setting {name!r}{did_you_mean(name, KNOBS)}",
                    remedy=f"see {document('knobs.md')}",
                )

        try:
            config = TrainConfig(**knobs)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"{case.name}: {error}", remedy="correct this configuration in the file"
            ) from None

        lengths = (
            Lengths.constant(config.seq_len, "given")
            if not config.packing
            else task.workload.lengths
        )

        workload = Workload(
            examples=task.workload.examples,
            lengths=lengths,
            global_batch=config.micro_batch_size * case.accumulation * config.num_gpus,
            objective=task.workload.objective,
        )

        model = resolve_model(case.model) if case.model else task.model
        if case.model_overrides:
            model = model.with_overrides(case.model_overrides)

        yield case, config, replace(task, model=model, workload=workload)


def probe_configs(
    spec: StudySpec,
    task: Task,
    prober: "WorkerProber | RankPool",
    store: "ProbeStore",
    out: Path,
    *,
    memory_gib: float,
    say: Callable[[str], None],
    should_stop: Callable[[], bool],
) -> list[ConfigResult]:
    """Probe each case with rows of full length, or take its stored result.

    After each probe, suite.json and suite.md are written. If `should_stop` returns True or a probe
    is cancelled, the remaining cases have no result.
    """
    # Imported here because it loads SQLAlchemy, which estimates do not need.
    from autotune.study.evaluator import Evaluator

    results: list[ConfigResult] = []
    models: list[ModelSpec] = []
    for case, config, case_task in cases(spec, task):
        if should_stop():
            break
        models.append(case_task.model)
        if not_probed := case.excluded or (SEVERAL if config.num_gpus > 1 else None):
            results.append(_refused_result(case, config, not_probed))
            continue

        say(f"{case.name}: {config.label()}")

        def request(config: TrainConfig, task: Task = case_task) -> ProbeRequest:
            return ProbeRequest(
                config=config,
                model=task.model.config,
                weights=task.model.weights,
                device=prober.device,
                trainer=task.trainer,
                objective=task.workload.objective,
                micro_steps=task.workload.run_shape(config).confirmation_micro_steps,
                min_timed_s=2.0,
                memory_gib=memory_gib,
                headroom=spec.headroom,
                seed=spec.seed,
                flash=task.device.has_flash,
            )

        study = case_task.study
        logs = out / "logs"
        evaluator = Evaluator(
            prober, store, study=study, logs=logs, request=request, model=case_task.model_key
        )

        try:
            shape = prober.describe(case_task.model.config)
            refused = refusal(config, case_task.model, task.trainer, shape, task.device)
            result = None if refused else evaluator.evaluate(config, None).result
        except UsageError as error:
            result = None
            refused = str(error)
        except Cancelled:
            break

        if result is None:
            results.append(_refused_result(case, config, refused))
        else:
            results.append(to_config_result(case, config, case_task, result))
        write_results(with_doubts(results, models, task.device), out)
    return with_doubts(results, models[: len(results)], task.device)


def _refused_result(case: NamedConfig, config: TrainConfig, reason: str | None) -> ConfigResult:
    return ConfigResult(
        case=case, config=config, outcome=Outcome.REFUSED, evidence=Evidence.MEASURED, reason=reason
    )


def to_config_result(
    case: NamedConfig, config: TrainConfig, task: Task, result: ProbeResult
) -> ConfigResult:
    """Convert the probe of a case to its result."""
    measurement = result.measurement
    evidence = Evidence.PROJECTED if task.is_projected(config) else Evidence.MEASURED
    if result.disturbed is not None:
        evidence = Evidence.DISTURBED
    if result.outcome is not Outcome.OK or measurement is None:
        return ConfigResult(
            case=case,
            config=config,
            outcome=result.outcome,
            evidence=evidence,
            reason=result.reason,
        )

    speed = run_performance(task, config, [measurement])
    low, high = speed.spread
    tokens_per_s = (
        speed.samples_per_second / task.workload.examples_per_row(config) * config.seq_len
    )

    reserved_gib = measurement.peak_reserved_gib + measurement.managed_gib
    free = 1 - measurement.peak_reserved_gib / measurement.limit_gib
    return ConfigResult(
        case=case,
        config=config,
        outcome=result.outcome,
        evidence=evidence,
        reason=f"{free:.0%} of the memory is free" if free < ROOMY else None,
        tight=free < ROOMY,
        tokens_per_s=tokens_per_s,
        interval=(tokens_per_s / (1 + high), tokens_per_s / (1 + low)),
        samples_per_s=speed.samples_per_second,
        step_time_s=speed.step_time_s,
        peak_allocated_gib=measurement.peak_allocated_gib,
        peak_reserved_gib=measurement.peak_reserved_gib,
        with_context_gib=None
        if measurement.context_gib is None
        else reserved_gib + measurement.context_gib,
    )


def agreement(results: list[ConfigResult]) -> str:
    """Compare results with published numbers in one line; return "" if there are none."""
    judged_results = [
        one for one in results if one.case.published and one.outcome in (Outcome.OK, Outcome.OOM)
    ]
    if not judged_results:
        return ""

    close = sum(one.tight for one in judged_results)
    wrong = sum(
        not one.tight and len(set(one.known_pairs().get("outcome", ()))) == 2
        for one in judged_results
    )
    parts = [
        f"{len(judged_results)} verdicts, of which {wrong} wrong and {close} too close to tell"
    ]

    speeds = [
        next(pair.inside for name, pair in one.published.items() if name in SPEEDS)
        for one in judged_results
        if one.interval and one.ratios(SPEEDS)
    ]
    if speeds:
        parts.append(
            f"{len(speeds)} published speeds, {sum(map(bool, speeds))} of them in the predicted"
            " interval"
        )

    if errors := [abs(1 / ratio - 1) for one in judged_results for ratio in one.ratios(PEAKS)]:
        parts.append(
            f"memory {statistics.median(errors):.1%} off (median) and {max(errors):.1%} at worst"
        )
    return "Compared with published numbers: " + "; ".join(parts) + "."


def write_results(results: list[ConfigResult], out: Path) -> None:
    """Write suite.json and suite.md."""
    write_atomic(out / "suite.json", json.dumps(json_data(results), indent=1) + "\n")
    head = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    body = [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in result.cells()) + " |"
        for result in results
    ]
    write_atomic(out / "suite.md", "\n".join([*head, *body]) + "\n")


def with_doubts(
    results: list[ConfigResult], models: list[ModelSpec], device: DeviceSpec
) -> list[ConfigResult]:
    """Say of each published speed that cannot be right why. `models` has the model of each result.

    No GPU multiplies faster than its peak. A training of adapters has fewer FLOPs than full
    fine-tuning of the same model with the same micro batch, so it should not be slower.
    """
    full = {
        _workload(one): speed
        for one in results
        if one.config.method == "full" and (speed := _published_tokens_per_s(one)) is not None
    }

    marked = []
    for one, model in zip(results, models, strict=True):
        doubt = None
        if (speed := _published_tokens_per_s(one)) is not None:
            doubt = _above_peak(one.config, speed, model, device)
            faster = full.get(_workload(one), 0.0)
            if doubt is None and speed < faster:
                doubt = f"full fine-tuning is published as {faster / speed:.2g} times as fast"
        marked.append(replace(one, doubt=doubt))
    return marked


def _workload(result: ConfigResult) -> tuple[Any, ...]:
    """Return what two configurations of one model share if they train on equal micro batches."""
    config = result.config
    return result.case.model, config.seq_len, config.micro_batch_size, config.num_gpus


def _published_tokens_per_s(result: ConfigResult) -> float | None:
    """Return the published tokens/s of all GPUs together, or None without a published speed."""
    theirs = result.case.published or Published()
    config = result.config
    tokens = config.tokens * config.num_gpus
    if theirs.tokens_per_s is not None:
        return theirs.tokens_per_s
    if theirs.samples_per_s is not None and not config.packing:
        return theirs.samples_per_s * config.seq_len
    if theirs.s_per_micro_batch is not None:
        return tokens / theirs.s_per_micro_batch
    if theirs.s_per_step is not None:
        return tokens * result.case.accumulation / theirs.s_per_step
    return None


def _above_peak(
    config: TrainConfig, tokens_per_s: float, model: ModelSpec, device: DeviceSpec
) -> str | None:
    """Say by how much a published speed exceeds the peak of the GPUs, or return None."""
    flops = model.flops_per_token(config.method, config.seq_len)
    peaks = [device.bf16_tflops, device.fp16_tflops, device.fp32_tflops]
    if config.multiplies_in_fp8:
        peaks.append(device.fp8_tflops)
    peak = max(filter(None, peaks), default=None)
    if flops is None or peak is None:
        return None
    reached = flops * tokens_per_s / config.num_gpus / 1e12
    if reached <= peak:
        return None
    return f"{reached:,.0f} TFLOP/s on each GPU, above the peak of {peak:,.0f}"


def _in_gb(gib: float | None) -> float | None:
    return None if gib is None else gib * GIB / 1e9


def _number(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _relative_difference(one: float | str, other: float | str) -> str:
    """Return the relative difference of our number from the published number, such as ' (+3%)'."""
    return (
        ""
        if isinstance(one, str) or isinstance(other, str)
        else f" ({round(other / one - 1, 2) + 0.0:+.0%})"
    )
