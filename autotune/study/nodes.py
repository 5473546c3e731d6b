"""Compare the workers (nodes) of a study by their latest measurements of the baseline.

A node is one worker process that ran probes for the study. Older versions stored probes without the
name of the node; all these probes are shown as one unnamed node.
"""

import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from autotune.core.json_view import View, keys
from autotune.core.probe_types import Evidence, Measurement, Outcome, ProbeResult, Rung, Telemetry
from autotune.core.train_config import TrainConfig
from autotune.problem.performance import Performance, performance
from autotune.problem.task import Task
from autotune.study.node_health import NodeReading, differences

if TYPE_CHECKING:
    from autotune.study.storage.probe_store import StoredProbe

UNNAMED = "unnamed"
# The values that the GPU's driver reports.
TOLD = keys("temperature_c", "sm_clock_mhz", "power_w", "utilization", "throttle_reasons")
FAILED = (Outcome.CRASH, Outcome.TIMEOUT, Outcome.NUMERICS)
WHOLE = (Rung.FULL, Rung.CONFIRM, Rung.NODE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One process that probed for a study.

    - `name` is the name of its worker: host, pid and start time in ticks, separated by colons.
    - A reading is a measurement of the baseline on this node. The fields that describe the reading
      are None if the node has no reading.
    - `num_failed` counts probes that failed for reasons other than memory.
    - `config` is the configuration that the reading measured, and `read_at` is the time of the
    reading.
    - `variation` is the relative standard deviation of the timed micro batches. `relative_speed` is
      the speed divided by the median speed of the other nodes.
    - `apart` says in words how the node differs from the median of the other nodes. `apart` is
      empty if there are no differences or no other nodes.
    - `unmeasured` is the reason for a missing reading, or None.
    """

    name: str
    num_probes: int
    last_seen: str | None
    num_failed: int = 0
    config: TrainConfig | None = None
    read_at: str | None = None
    measurement: Measurement | None = None
    performance: Performance | None = None
    variation: float | None = None
    relative_speed: float | None = None
    cost_per_1000_samples_usd: float | None = None
    apart: tuple[str, ...] = ()
    unmeasured: str | None = None

    @property
    def host(self) -> str:
        """The machine's name."""
        return self.name.partition(":")[0]

    @property
    def telemetry(self) -> Telemetry:
        """The GPU driver's report while the baseline was timed; an unreported value is None."""
        return (self.measurement and self.measurement.telemetry) or Telemetry()


def nodes_of(task: Task, stored: "Sequence[StoredProbe]") -> tuple[Node, ...]:
    """Return the nodes in the order of their first probes."""
    by_name: dict[str, list[ProbeResult]] = {}
    for row in stored:
        by_name.setdefault(row.result.node or UNNAMED, []).append(row.result)

    baseline = _baseline(task, [row.result for row in stored])
    latest = {name: _latest_result(results, baseline) for name, results in by_name.items()}
    readings = {name: _reading(one) for name, one in latest.items() if one is not None}
    timed = task.device.kind != "cpu"  # on a CPU, times depend on other processes

    nodes = []
    for name, results in by_name.items():
        own = readings.get(name)
        others = [reading for other, reading in readings.items() if other != name]
        apart = differences(own, others, timed=timed) if own else []

        last = next((one for one in reversed(results) if one.rung is Rung.NODE), None)
        if last and last.outcome is not Outcome.OK:
            apart.append(f"the baseline fails here: {last.reason or last.outcome}")

        node = Node(
            name=name,
            num_probes=len(results),
            num_failed=sum(one.outcome in FAILED for one in results),
            relative_speed=statistics.median(one.micro_s for one in others) / own.micro_s
            if own and others and timed
            else None,
            last_seen=max((one.started_at for one in results if one.started_at), default=None),
            apart=tuple(apart),
            unmeasured=None
            if own
            else _unmeasured_reason(results, {baseline} if baseline else set(task.baselines)),
        )
        nodes.append(_add_reading(node, latest[name], task))
    return tuple(nodes)


def _baseline(task: Task, results: Sequence[ProbeResult]) -> TrainConfig | None:
    """Return the configuration whose measurements on the nodes are compared.

    If workers were checked (`node_health`), the result is the configuration that the checks
    measured. Otherwise the result is the first of the study's baselines that fits in memory.
    """
    read = [one.config for one in results if one.rung is Rung.NODE]
    whole = {one.config for one in results if _is_whole(one)}
    return next(iter(read), None) or next(
        (config for config in task.baselines if config in whole), None
    )


def _unmeasured_reason(results: Sequence[ProbeResult], baselines: Collection[TrainConfig]) -> str:
    """Return why a node has no measurement of the baseline.

    The reason is the outcome of the node's last probe of the baseline, or that the node never
    probed the baseline.
    """
    last = next((one for one in reversed(results) if one.config in baselines), None)
    if last is None:
        return "no probe of the baseline ran here"
    if last.outcome in (Outcome.OK, Outcome.SLOW):
        return "only a few layers of the baseline were probed here"
    return f"the baseline failed here: {last.reason or last.outcome}"


def _is_whole(result: ProbeResult) -> bool:
    return result.outcome is Outcome.OK and result.measurement is not None and result.rung in WHOLE


def _latest_result(
    results: Sequence[ProbeResult], baseline: TrainConfig | None
) -> ProbeResult | None:
    return next(
        (one for one in reversed(results) if one.config == baseline and _is_whole(one)), None
    )


def _reading(result: ProbeResult) -> NodeReading:
    """Return the values that a probe measured on its node.

    If the worker had run earlier probes, the temperature is left out, because these earlier probes
    warmed the card.
    """
    assert result.measurement is not None
    reading = NodeReading.of(result.measurement)
    return replace(reading, temperature_c=None) if result.warm else reading


def _add_reading(node: Node, result: ProbeResult | None, task: Task) -> Node:
    if result is None or result.measurement is None:
        return node
    speed = performance(result.config, [result.measurement], task.workload)
    times = result.measurement.micro_step_s
    price = task.search_price
    usd = None if price is None else 1000 * price.usd_per_hour / 3600 / speed.samples_per_second
    return replace(
        node,
        config=result.config,
        read_at=result.started_at,
        measurement=result.measurement,
        performance=speed,
        variation=statistics.stdev(times) / statistics.mean(times) if len(times) > 1 else None,
        cost_per_1000_samples_usd=usd,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """A node of a study as data for programs; an unknown value is None."""

    JSON: ClassVar = keys(
        "study",
        node="node.name",
        host="node.host",
        device="device",
        probes="node.num_probes",
        failed_probes="node.num_failed",
        last_seen="node.last_seen",
        read_at="node.read_at",
        config="node.config",
        apart="node.apart",
        unmeasured="node.unmeasured",
        performance=keys(
            samples_per_second="node.performance.samples_per_second",
            tokens_per_second="node.performance.tokens_per_second",
            step_time_s="node.performance.step_time_s",
            relative_to_others="node.relative_speed",
            micro_batch_variation="node.variation",
            evidence="evidence",
        ),
        memory=keys(
            peak_during_training="node.measurement.peak_allocated_gib",
            peak_reserved="node.measurement.peak_reserved_gib",
            limit="node.measurement.limit_gib",
            unit="unit",
        ),
        card=View("node.telemetry", TOLD),
        cost=keys(cost_per_1000_samples_usd="node.cost_per_1000_samples_usd"),
    )
    unit: ClassVar[Literal["GiB"]] = "GiB"

    study: str
    device: str
    node: Node

    @property
    def evidence(self) -> Evidence | None:
        """How the speed was obtained (`Evidence`), or None without a speed."""
        return Evidence.MEASURED if self.node.performance else None


def node_row(node: Node, task: Task) -> NodeRow:
    """Return a node as a row of data; `task` is the task of the node's study."""
    return NodeRow(study=task.study, device=(task.measured_on or task.device).name, node=node)
