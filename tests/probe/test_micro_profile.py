"""A real micro batch is profiled on the CPU: its parts come to the whole, and a failure stays a
value.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from autotune.catalog import resolve_model
from autotune.core.micro_profile import KernelClass, MicroBatchProfile, Part, Stage
from autotune.core.probe_types import Outcome, Phase
from autotune.probe.fault_injection import VARIABLE
from autotune.probe.supervisor import WorkerProber
from tests.helpers.probing import request

pytestmark = pytest.mark.probe


def profiled(prober: WorkerProber, trace: Path, **knobs: Any) -> MicroBatchProfile:
    asked = request(
        model=resolve_model("demo-3m").config, **{"micro_batch_size": 8, "seq_len": 128} | knobs
    )
    result, found = prober.profile(asked, prober.logs / "profile.log", trace)
    assert result.outcome is Outcome.OK and found is not None, result.reason
    assert result.notes == () and "profile" in result.seconds
    return found


def counts(
    found: MicroBatchProfile, part: Part | None, stage: Stage, kind: KernelClass, name: str = ""
) -> int:
    return sum(
        one.count for one in found.work if (one.part, one.stage, one.kind) == (part, stage, kind)
    )


def test_the_parts_come_to_the_whole(prober: WorkerProber, tmp_path: Path) -> None:
    found = profiled(prober, trace := tmp_path / "trace.json.gz", checkpointing="full")
    assert (found.on_gpu, found.rows, found.length) == (False, 8, 128)
    assert sum(one.seconds for one in found.micro_work) == pytest.approx(found.busy_s)
    # The rest is the time in which the host issues work: it depends on the machine.
    assert found.profiled_s / 2 < found.busy_s <= found.profiled_s
    assert {one.part for one in found.work} == set(Part)
    assert {one.stage for one in found.work} == set(Stage)
    assert found.optimizer_s > 0 and (found.loader_rows_per_s or 0) > 0 and found.micro_s > 0
    with gzip.open(trace) as file:
        assert any(
            event.get("name") == f"autotune: {Part.MLP}" for event in json.load(file)["traceEvents"]
        )
    # Four layers, each of which is computed again: their products by part, aten::linear and what it
    # calls.
    products = {
        (part, stage): counts(found, part, stage, KernelClass.PRODUCTS)
        for part in (Part.PROJECTIONS, Part.MLP)
        for stage in (Stage.FORWARD, Stage.RECOMPUTED)
    }
    layers, each = resolve_model("demo-3m").num_layers, products[Part.MLP, Stage.FORWARD]
    # q, k, v and o; gate, up and down
    assert products[Part.PROJECTIONS, Stage.FORWARD] * 3 == each * 4
    assert products[Part.MLP, Stage.RECOMPUTED] == each and each % (3 * layers) == 0
    assert counts(found, Part.ATTENTION, Stage.BACKWARD, KernelClass.ATTENTION) >= layers


def test_without_checkpoints_nothing_is_computed_again_and_the_worker_stays_clean(
    prober: WorkerProber, tmp_path: Path
) -> None:
    found = profiled(prober, tmp_path / "trace.json.gz", method="full")
    assert {one.stage for one in found.work} == set(Stage) - {Stage.RECOMPUTED}
    assert {one.part for one in found.work} == set(Part) - {Part.ADAPTERS}
    starts = prober.starts
    assert (
        prober.probe(request(), prober.logs / "after.log").notes == () and prober.starts == starts
    )


def test_what_runs_out_of_memory_has_no_profile(prober: WorkerProber, tmp_path: Path) -> None:
    asked = request(0.2, model=resolve_model("demo-3m").config, micro_batch_size=64, seq_len=512)
    result, found = prober.profile(
        asked, prober.logs / "oom.log", trace := tmp_path / "trace.json.gz"
    )
    assert (result.outcome, found) == (Outcome.OOM, None) and not trace.exists()


def test_a_trace_that_cannot_be_written_is_a_result(prober: WorkerProber, tmp_path: Path) -> None:
    (trace := tmp_path / "trace.json.gz").mkdir()
    result, found = prober.profile(request(), prober.logs / "no-trace.log", trace)
    assert (result.outcome, result.phase, found) == (Outcome.CRASH, Phase.PROFILE, None)
    assert (
        prober.profile(request(), prober.logs / "profile.log", tmp_path / "other.json.gz")[1]
        is not None
    )


@pytest.mark.parametrize(("fault", "outcome"), [("oom", Outcome.OOM), ("sigkill", Outcome.CRASH)])
def test_what_strikes_while_it_profiles_is_a_result(
    fault: str, outcome: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, f"{fault}@profile")
    with WorkerProber("cpu", tmp_path) as prober:
        result, found = prober.profile(
            request(), tmp_path / "profile.log", tmp_path / "trace.json.gz"
        )
    assert (result.outcome, found) == (outcome, None)
