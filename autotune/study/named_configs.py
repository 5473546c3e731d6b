"""A suite: named configurations that are probed as they are, and compared with published numbers. No search."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.catalog import resolve_model
from autotune.core.errors import Cancelled, UsageError, did_you_mean
from autotune.core.files import write_atomic
from autotune.core.knobs import KNOBS
from autotune.core.probe_types import Evidence, Outcome, ProbeRequest, ProbeResult
from autotune.core.serialization import to_data
from autotune.core.train_config import TrainConfig
from autotune.core.units import DASH, GIB, fmt_count
from autotune.probe.rank_pool import RankPool
from autotune.probe.supervisor import WorkerProber
from autotune.problem.constraints import refusal
from autotune.problem.length_distribution import Lengths
from autotune.problem.study_spec import NamedConfig, Published, StudySpec
from autotune.problem.task import Task
from autotune.problem.workload import Workload
from autotune.study.ranking import ROOMY

if TYPE_CHECKING:
    from autotune.study.storage.probe_store import ProbeStore


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigResult:
    """The result of a case. Speeds count whole rows; `with_context_gib` is reserved memory and the CUDA context.

    `interval` is that of the tokens/s: 80 % of cases for estimates, else the range of what was measured. `tight`: it
    may not fit, or leaves less than a tenth of the memory free.
    """

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
    peak_reserved_gib: float | None = None
    with_context_gib: float | None = None

    def against(self) -> dict[str, tuple[float | str, float | str]]:
        """(published, ours) by what it is, for every number that both have; the outcome if one of them is OOM."""
        theirs = self.case.published or Published()
        whole_gb = None if self.with_context_gib is None else self.with_context_gib * GIB / 1e9
        pairs: dict[str, tuple[float | str | None, float | str | None]] = {
            "tokens/s": (theirs.tokens_per_s, self.tokens_per_s),
            "samples/s": (theirs.samples_per_s, self.samples_per_s),
            "s/step": (theirs.s_per_step, self.step_time_s),
            "peak GiB": (theirs.peak_gib, self.peak_reserved_gib),
            "whole GB": (theirs.peak_gb, whole_gb),
        }
        if self.case.published and (theirs.outcome == "oom" or self.outcome is Outcome.OOM):
            pairs = {"outcome": (theirs.outcome, self.outcome.value), **pairs}
        return {
            name: (published, ours)
            for name, (published, ours) in pairs.items()
            if published is not None and ours is not None
        }

    def cells(self) -> tuple[str, ...]:
        """As a row: name, configuration, outcome, speed, memory, and what was published."""
        published = "; ".join(
            f"{name} {_number(one)}, here {_number(other)}{_apart(one, other)}"
            for name, (one, other) in self.against().items()
        )
        outcome = self.outcome.value + (", tight" if self.tight else "") + (f": {self.reason}" if self.reason else "")
        between = f" ({' to '.join(map(fmt_count, self.interval))})" if self.interval else ""
        speed = DASH if self.tokens_per_s is None else f"{fmt_count(self.tokens_per_s)}{between} [{self.evidence}]"
        memory = DASH if self.peak_reserved_gib is None else f"{self.peak_reserved_gib:.1f}"
        return self.case.name, self.config.label(), outcome, speed, memory, published or DASH

    def data(self) -> dict[str, Any]:
        """As plain data."""
        data = to_data(self)
        del data["case"]
        published = {name: {"theirs": theirs, "ours": ours} for name, (theirs, ours) in self.against().items()}
        return {"name": self.case.name, **data, "config": self.config.as_dict(), "published": published}


COLUMNS = {"case": "left", "configuration": "left", "outcome": "left", "tokens/s": "right", "GiB": "right"} | {
    "published": "left"
}


def cases(spec: StudySpec, task: Task) -> Iterator[tuple[NamedConfig, TrainConfig, Task]]:
    """Each case with its configuration, as its own subject: full rows, its accumulation, its model.

    Raises UsageError for knobs and values that cannot be.
    """
    for case in spec.configs:
        knobs = spec.pins | case.knobs
        for name in knobs:
            if name not in KNOBS:
                raise UsageError(
                    f"{case.name}: there is no knob {name!r}{did_you_mean(name, KNOBS)}", remedy="see docs/knobs.md"
                )
        try:
            config = TrainConfig(**knobs)
        except (TypeError, ValueError) as error:
            raise UsageError(f"{case.name}: {error}", remedy="correct it in the file") from None
        if config.num_gpus > 1:
            reason = "configurations that are named are probed on one GPU"
            raise UsageError(f"{case.name}: {reason}", remedy="search with `autotune run --gpus`")
        lengths = Lengths.constant(config.seq_len, "given") if not config.packing else task.workload.lengths
        workload = Workload(
            examples=task.workload.examples,
            lengths=lengths,
            global_batch=config.micro_batch_size * case.accumulation,
        )
        model = resolve_model(case.model) if case.model else task.model
        if model.sees_images:
            reason = "rows of configurations that are named have no images"
            raise UsageError(f"{case.name}: {reason}", remedy="search with `autotune run --model`")
        yield case, config, replace(task, model=model, workload=workload)


def probe_configs(
    spec: StudySpec,
    task: Task,
    prober: WorkerProber | RankPool,
    store: "ProbeStore",
    out: Path,
    *,
    memory_gib: float,
    say: Callable[[str], None],
    should_stop: Callable[[], bool],
) -> list[ConfigResult]:
    """Probe each case in turn with full rows, or take its stored result; write suite.json and suite.md after each.

    The cases from which on `should_stop` returned True, or a probe was cancelled, have no result.
    """
    from autotune.study.evaluator import Evaluator  # it loads SQLAlchemy, which estimates do not need

    results: list[ConfigResult] = []
    for case, config, case_task in cases(spec, task):
        if should_stop():
            break
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

        study, logs = case_task.study, out / "logs"
        evaluator = Evaluator(prober, store, study=study, logs=logs, request=request, model=case_task.model_key)
        try:
            shape = prober.describe(case_task.model.config)
            refused = refusal(config, case_task.model, task.trainer, shape, task.device)
            found = None if refused else evaluator.evaluate(config, None).result
        except UsageError as error:
            found, refused = None, str(error)
        except Cancelled:
            break
        if found is None:
            outcome, evidence = Outcome.REFUSED, Evidence.MEASURED
            results.append(ConfigResult(case=case, config=config, outcome=outcome, evidence=evidence, reason=refused))
        else:
            results.append(to_config_result(case, config, case_task, found))
        write_results(results, out)
    return results


def to_config_result(case: NamedConfig, config: TrainConfig, task: Task, result: ProbeResult) -> ConfigResult:
    """Turn the probe of a case into its result."""
    found = result.measurement
    evidence = Evidence.PROJECTED if task.is_projected(config) else Evidence.MEASURED
    if result.outcome is not Outcome.OK or found is None:
        return ConfigResult(case=case, config=config, outcome=result.outcome, evidence=evidence, reason=result.reason)
    speed = task.performance(config, [found])
    low, high = speed.spread
    tokens_per_s = speed.samples_per_second / task.workload.examples_per_row(config) * config.seq_len
    reserved_gib = found.peak_reserved_gib + found.managed_gib
    free = 1 - found.peak_reserved_gib / found.limit_gib
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
        peak_reserved_gib=found.peak_reserved_gib,
        with_context_gib=None if found.context_gib is None else reserved_gib + found.context_gib,
    )


def write_results(results: list[ConfigResult], out: Path) -> None:
    """Write suite.json and suite.md."""
    write_atomic(out / "suite.json", json.dumps([result.data() for result in results], indent=1) + "\n")
    head = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in result.cells()) + " |" for result in results]
    write_atomic(out / "suite.md", "\n".join([*head, *body]) + "\n")


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _apart(one: float | str, other: float | str) -> str:
    """' (+3 %)' by which ours is more than what was published."""
    return "" if isinstance(one, str) or isinstance(other, str) else f" ({other / one - 1:+.0%})"
