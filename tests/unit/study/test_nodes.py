"""The nodes of a study side by side: who measured what, how fast, and who is apart."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.api import load_study
from autotune.catalog import find_price, resolve_device
from autotune.cli.commands import studies
from autotune.core.errors import UsageError
from autotune.core.json_view import json_data
from autotune.core.probe_types import Outcome, ProbeResult, Rung, Telemetry
from autotune.core.train_config import TrainConfig
from autotune.problem.performance import performance
from autotune.report.answer import nodes_answer
from autotune.study.nodes import UNNAMED, Node, node_row, nodes_of
from autotune.study.session import read_nodes
from autotune.study.storage.location import to_stored_directory
from autotune.study.storage.probe_store import ProbeStore, StoredProbe
from autotune.study.storage.study_record import start_record
from tests.helpers.factories import FINGERPRINT, measurement, result
from tests.helpers.sessions import BASELINE, begun, record_of, starter, subject_of

TASK = replace(subject_of(), device=resolve_device("h200"), price=find_price("h200-sxm"))
COOL = Telemetry(
    utilization=1.0,
    power_w=650.0,
    energy_j=None,
    temperature_c=55.0,
    sm_clock_mhz=1980.0,
    throttle_reasons=(),
    num_samples=9,
)


def read(node: str | None, micro_s: float = 0.5, gib: float = 20.0, **changes: Any) -> StoredProbe:
    values: dict[str, Any] = {"telemetry": COOL} | changes
    outcome, rung = values.pop("outcome", Outcome.OK), values.pop("rung", Rung.NODE)
    about = {name: values.pop(name) for name in ("warm", "reason", "started_at") if name in values}
    probed = measurement(micro_s, gib, **values) if outcome is Outcome.OK else None
    made = result(BASELINE, outcome, rung=rung, measurement=probed, node=node, **about)
    return StoredProbe(trial=None, result=made)


def named(*rows: StoredProbe) -> dict[str, Node]:
    return {node.name: node for node in nodes_of(TASK, rows)}


def test_nodes_are_those_of_the_same_work() -> None:
    other = StoredProbe(trial=1, result=result(replace(BASELINE, lora_rank=64), node="a:1:1"))
    found = named(
        read("a:1:1", rung=Rung.FULL), other, read("b:2:2", started_at="2026-11-26T10:00:00")
    )
    assert list(found) == ["a:1:1", "b:2:2"] and [node.num_probes for node in found.values()] == [
        2,
        1,
    ]
    assert [node.apart for node in found.values()] == [(), ()]
    expected = performance(BASELINE, [measurement(0.5, 20.0)], TASK.workload)
    assert (
        found["a:1:1"].performance == expected and found["b:2:2"].last_seen == "2026-11-26T10:00:00"
    )
    assert found["a:1:1"].variation == 0.0 and found["a:1:1"].host == "a"


def test_who_is_apart_and_why() -> None:
    hot = replace(COOL, temperature_c=81.0, throttle_reasons=("software thermal",))
    found = named(
        read("a:1:1"), read("b:1:1"), read("c:1:1", 0.6, telemetry=hot), read("d:1:1", gib=30.0)
    )
    assert found["a:1:1"].apart == found["b:1:1"].apart == ()
    assert [reason.split(" (")[0] for reason in found["c:1:1"].apart] == [
        "-17% tokens/s against the fleet's median",
        "it is at 81 C, the fleet's median is 55 C",
    ]
    assert (
        found["c:1:1"].relative_speed == pytest.approx(0.5 / 0.6)
        and found["a:1:1"].relative_speed == 1.0
    )
    on_cpu = nodes_of(
        replace(TASK, device=resolve_device("cpu")), [read("a:1:1"), read("b:1:1", 0.6)]
    )
    assert [node.relative_speed for node in on_cpu] == [None, None]  # they share the processors
    assert found["d:1:1"].apart == ("it reserves 30.6 GiB, the fleet's median is 20.4 GiB",)
    warm = named(read("a:1:1"), read("c:1:1", telemetry=hot, warm=True))
    # it had worked before
    assert warm["c:1:1"].apart == () and warm["c:1:1"].telemetry.temperature_c == 81.0


def test_the_latest_reading_counts_and_one_that_fails_is_apart() -> None:
    found = named(
        read("a:1:1"),
        read("b:1:1", 0.9),
        read("b:1:1"),
        read("c:1:1", outcome=Outcome.OOM, reason="no room"),
    )
    assert found["b:1:1"].apart == ()
    failed = found["c:1:1"]
    assert failed.apart == ("the baseline fails here: no room",) and failed.performance is None
    assert (
        failed.unmeasured == "the baseline failed here: no room"
        and found["b:1:1"].unmeasured is None
    )
    crashed = named(
        read("a:1:1"), read("a:1:1", outcome=Outcome.CRASH, rung=Rung.FULL, reason="it broke")
    )["a:1:1"]
    assert (crashed.num_probes, crashed.num_failed, failed.num_failed) == (2, 1, 0)
    data = json_data(node_row(failed, TASK))
    assert data["config"] is data["read_at"] is data["performance"]["relative_to_others"] is None
    assert (
        data["performance"]["tokens_per_second"] is data["memory"]["peak_during_training"] is None
    )
    assert (
        data["cost"]["cost_per_1000_samples_usd"] is None
        and data["performance"]["evidence"] is None
    )


def test_what_was_not_measured_has_a_reason() -> None:
    other = StoredProbe(trial=1, result=result(replace(BASELINE, lora_rank=64), node="c:1:1"))
    rows = (
        read("a:1:1", rung=Rung.FULL, outcome=Outcome.OOM, reason="out of memory in forward"),
        other,
    )
    found = named(*rows, read("d:1:1", rung=Rung.SHALLOW))
    assert [found[name].unmeasured for name in ("a:1:1", "c:1:1", "d:1:1")] == [
        "the baseline failed here: out of memory in forward",
        "no probe of the baseline ran here",
        "only a few layers of the baseline were probed here",
    ]
    node = replace(found["a:1:1"], apart=())
    assert "not measured: the baseline failed here: out of memory in forward" in str(
        nodes_answer([node], TASK)
    )


def test_what_was_found_stands_first_and_wide_rows_are_cards_on_a_phone() -> None:
    one = nodes_of(TASK, [read("vm:31984:6716306", started_at="2026-11-26T10:00:00")])
    two = nodes_of(TASK, [read("a:1:1"), read("b:1:1")])
    assert nodes_answer(two, TASK).found == ("None of the 2 nodes is apart from the others.",)
    alone = nodes_answer(one, TASK)
    assert "apart" in nodes_answer(two, TASK).tables[0].columns and "apart:" in " ".join(
        nodes_answer(two, TASK).notes
    )
    assert {"apart", "to others"}.isdisjoint(alone.tables[0].columns) and "apart" not in " ".join(
        alone.notes
    )
    assert alone.found == ("There is only one node, so there is no comparison.",)
    # for the names of their columns
    assert [table.is_wide for table in alone.tables] == [True, False, True]


def test_probes_of_earlier_versions_have_no_name() -> None:
    assert list(named(read(None, rung=Rung.FULL))) == [UNNAMED]
    assert nodes_of(TASK, []) == ()


def test_a_node_as_plain_data() -> None:
    at = "2026-11-26T10:00:00+00:00"
    (node,) = nodes_of(TASK, [read("a:1:1", micro_step_s=(0.4, 0.6), started_at=at)])
    data = json_data(node_row(node, TASK))
    speed = performance(BASELINE, [measurement(0.5, 20.0, micro_step_s=(0.4, 0.6))], TASK.workload)
    assert data["performance"]["samples_per_second"] == pytest.approx(speed.samples_per_second)
    assert data["performance"]["micro_batch_variation"] == pytest.approx(0.2828, abs=1e-4)
    assert data["performance"]["step_time_s"] == pytest.approx(speed.step_time_s)
    assert (data["config"], data["read_at"], data["failed_probes"]) == (BASELINE.as_dict(), at, 0)
    assert data["memory"]["peak_during_training"] == 20.0 and data["memory"]["unit"] == "GiB"
    usd = 1000 / speed.samples_per_second / 3600 * 3.59
    assert data["cost"]["cost_per_1000_samples_usd"] == pytest.approx(usd)
    unpriced = json_data(
        node_row(*nodes_of(replace(TASK, price=None), [read("a:1:1")]), replace(TASK, price=None))
    )
    assert unpriced["cost"]["cost_per_1000_samples_usd"] is None
    told = {"temperature_c": 55.0, "sm_clock_mhz": 1980.0, "power_w": 650.0, "utilization": 1.0}
    assert data["card"] == told | {"throttle_reasons": []}


def test_a_store_names_its_node(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'a.db'}"
    made: ProbeResult = result(TrainConfig())
    for name in ("a:1:1", None):
        store = ProbeStore(url, node=name)
        store.add("one", None, made, FINGERPRINT)
        store.close()
    reader = ProbeStore(url)
    assert [row.result.node for row in reader.probes_of_study("one")] == ["a:1:1", None]
    reader.close()


# --- the command


@pytest.fixture
def study(tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A study in the current directory, in which two nodes measured the baseline."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(tables, "autotune.db")
    url, opened = "sqlite:///autotune.db", list[Any]()
    session = begun(starter(url, tmp_path / "logs", opened))
    start_record(
        session.search, record_of(out=Path(to_stored_directory(tmp_path / "runs" / "one", url)))
    )
    measured = session.store.probes_of_study("one")[0].result
    for node, rung in (("b/../x:2:2", Rung.NODE), ("c:3:3", Rung.NODE)):
        session.store.add("one", None, replace(measured, rung=rung, node=node), FINGERPRINT)
    yield url
    for one in opened:
        one.close()


def test_the_command(study: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    studies.status(
        "one",
        study,
        nodes=True,
        json_dir=tmp_path / "nodes",
        html=tmp_path / "nodes.html",
        json_=False,
    )
    text = capsys.readouterr().out
    assert text.startswith("Nodes of one\n") and "c:3:3" in text and "variation" in text
    files = {path.name: json.loads(path.read_text()) for path in (tmp_path / "nodes").iterdir()}
    found = read_nodes(load_study("one", study).record, study)
    assert (
        {data["node"] for data in files.values()}
        == {node.name for node in found}
        == {UNNAMED, "b/../x:2:2", "c:3:3"}
    )
    assert all(data["performance"]["tokens_per_second"] > 0 for data in files.values())
    assert "<title>Nodes of one – autotune</title>" in (tmp_path / "nodes.html").read_text()
    studies.status("one", study, nodes=True, json_dir=None, html=None, json_=True)
    task = load_study("one", study).task
    assert json.loads(capsys.readouterr().out) == [
        json_data(node_row(node, task)) for node in found
    ]


def test_files_are_of_nodes_alone(study: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="need --nodes"):
        studies.status("one", study, nodes=False, json_dir=tmp_path, html=None, json_=False)
