"""Named configurations estimated by formula, for `autotune plan`."""

from autotune.core.probe_types import Evidence, Outcome
from autotune.planning.observations import Observation
from autotune.planning.plan import OOM, TIGHT, planned
from autotune.prediction.memory_formula import CONTEXT_GIB
from autotune.problem.study_spec import StudySpec
from autotune.problem.task import Task
from autotune.study.named_configs import ConfigResult, cases


def estimate(spec: StudySpec, task: Task, limit_gib: float, seen: tuple[Observation, ...]) -> list[ConfigResult]:
    """Each case by formula."""
    told = []
    for case, config, own in cases(spec, task):
        one = planned(own, config, limit_gib, seen)
        if one is None:
            reason = "there is no formula for it"
            told.append(
                ConfigResult(
                    case=case, config=config, outcome=Outcome.REFUSED, evidence=Evidence.ESTIMATED, reason=reason
                )
            )
            continue
        shape = own.workload.run_shape(config)
        rows = None if one.samples_per_s is None else one.samples_per_s / shape.examples_per_row
        told.append(
            ConfigResult(
                case=case,
                config=config,
                outcome=Outcome.OOM if one.fits == OOM else Outcome.OK,
                evidence=Evidence.ESTIMATED,
                reason="too close to tell" if one.fits == TIGHT else None,
                tokens_per_s=None if rows is None else rows * config.seq_len,
                samples_per_s=one.samples_per_s,
                step_time_s=None if not rows else shape.rows_per_step / rows,
                peak_gib=one.footprint.peak_reserved_gib,
                whole_gib=one.footprint.peak_reserved_gib + CONTEXT_GIB,
            )
        )
    return told
