"""A process's part in a study, with recorded probes: what a leader keeps of it, who may join, and
what ends it.
"""

import math
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.catalog import resolve_device
from autotune.core.errors import (
    Cancelled,
    EnvironmentProblem,
    NothingFits,
    TooManyFailures,
    UsageError,
)
from autotune.core.nvml import GpuInfo
from autotune.core.objective import Objective
from autotune.core.probe_types import (
    Evidence,
    ModelShape,
    Outcome,
    ProbeRequest,
    ProbeResult,
    Rung,
)
from autotune.core.process import StopToken
from autotune.core.train_config import TrainConfig
from autotune.prediction.memory_formula import memory_breakdown
from autotune.problem.disturbance import ASSUME_QUIET
from autotune.problem.setup import Setup
from autotune.problem.speed_transfer import SpeedTransfer
from autotune.problem.study_spec import StudySpec
from autotune.problem.target import Target
from autotune.problem.task import Task
from autotune.problem.workload import Workload
from autotune.report import describe
from autotune.study import session as session_module
from autotune.study.decomposition import WHOLE
from autotune.study.optimizer import Optimizer
from autotune.study.preparation import prepare_session
from autotune.study.progress import TextProgress
from autotune.study.session import (
    Leader,
    Session,
    await_study,
    explain,
    find_record,
    read_summary,
    require_device,
    work,
    worker_device,
    worker_folder,
)
from autotune.study.storage.leases import Leases, Worker
from autotune.study.storage.optuna_storage import read_record
from autotune.study.storage.study_record import (
    Limits,
    ProbeTerms,
    StudyPhase,
    StudyRecord,
    update_record,
)
from autotune.study.summary import Projections
from tests.helpers.factories import FINGERPRINT, calibration, result
from tests.helpers.layered import SHAPE, layered
from tests.helpers.replay import Answers, ReplayProber, machine
from tests.helpers.sessions import BASELINE, by_tokens, record_of, subject_of

SPACE = """\
version: 1
knobs:
  micro_batch_size: {values: [1, 2, 4, 8]}
  seq_len: {values: [256]}
  lora_rank: {values: [16]}
  checkpointing: {values: [none, full]}
"""


class Recorded(ReplayProber):
    """Answers in place of a worker process, on a machine with 200 GiB."""

    answers: Answers = staticmethod(machine(rate=by_tokens, limit_gib=100.0))
    shape: ModelShape | None = None
    fingerprint_here = FINGERPRINT
    memory_gib = 200.0

    def __init__(self, device: str, logs: Path, *, should_stop: Callable[[], bool]) -> None:
        super().__init__(self.answers, self.fingerprint_here, self.shape)
        self.device, self.should_stop = device, should_stop

    def __enter__(self) -> "Recorded":
        return self

    def __exit__(self, *_: object) -> None: ...

    def launch(self) -> None: ...


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[Recorded]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "space.yaml").write_text(SPACE)
    monkeypatch.setattr(session_module, "WorkerProber", Recorded)
    monkeypatch.setattr("autotune.catalog.example_cards._OF_MODELS", {})  # the answers have more
    for name in ("answers", "shape", "fingerprint_here"):  # whatever a test sets is undone
        monkeypatch.setattr(Recorded, name, Recorded.__dict__[name])
    return Recorded


URL = "sqlite:///a.db"


def lead(said: list[str] | None = None, *, stop: StopToken | None = None, **options: Any) -> Leader:
    """Lead the study 'mine' as a process does."""
    values = {
        "model": "demo-3m",
        "gpu": "cpu",
        "study": "mine",
        "storage": URL,
        "space": "space.yaml",
        "out": "out",
    }
    spec = StudySpec(
        **(values | {"tokens_per_example": 256, "trials": 3, "budget": "1h"} | options)
    )
    plan = prepare_session(spec)
    lines: list[str] = [] if said is None else said
    with Session(
        plan.url, plan.out, plan.device, stop=stop, progress=TextProgress(lines.append)
    ) as session:
        leader = Leader(
            session,
            plan,
            on_resumed=lambda rows: lines.append(f"resumed with {len(rows)}"),
            on_trial=lambda row: lines.append(f"on trial {row.number}"),
        )
        leader.search()
    return leader


def record() -> StudyRecord:
    found = read_record(URL, "mine")
    assert found is not None
    return found


def probed(leader: Leader) -> list[Rung]:
    return [request.rung for request in leader.session.prober.requests]  # type: ignore[attr-defined]


def nowhere(*_: object) -> Projections:
    return Projections()


def test_a_leader_keeps_the_record_of_its_study(tmp_path: Path) -> None:
    said: list[str] = []
    leader = lead(said)
    made = record()
    assert made.limits == Limits(budget_s=3600.0, trials=3, patience=40)
    assert (made.phase, made.out, made.spec.storage, made.fingerprint) == (
        "ended",
        "out",
        None,
        FINGERPRINT,
    )
    assert 100 < made.terms.memory_gib < 200 and made.terms.headroom == 0.05
    assert (made.reserve_opened, made.shallow_only, made.too_short_for) == (False, False, ())
    assert 0 < made.wall_seconds < 60 and made.earlier_seconds == 0.0
    assert (
        said[:1] == ["starting the probe worker, which loads PyTorch"] and "resumed with 0" in said
    )
    assert [line for line in said if line.startswith("on trial")] == [
        "on trial 0",
        "on trial 1",
        "on trial 2",
    ]
    assert len(leader.trials.rows) == 3 and leader.failure is None
    with closing(sqlite3.connect("a.db")) as database:
        query = "SELECT value_json FROM study_user_attributes WHERE key = 'schema_version'"
        # another is refused by those who have this one
        assert database.execute(query).fetchall() == [("2",)]
    assert Rung.CONFIRM in probed(leader) and leader.trials.selection.leader() is not None
    with closing(Leases(URL, "mine", Worker.this_process("cpu"))) as leases:
        assert leases.leased_digests() == set() and set(leases.workers()) == {
            leases.name
        }  # it has left
    summary = read_summary(made, URL, nowhere)
    assert summary.recipe is not None and summary.recipe.config == leader.trials.selection.leader()
    assert len(summary.trials) == 3 and summary.wall_seconds >= made.wall_seconds


def test_a_leader_says_what_the_speed_up_consists_of(recorded: type[Recorded]) -> None:
    recorded.shape, recorded.answers = SHAPE, staticmethod(layered(by_tokens, slower=1.02))
    leader = lead(trials=8)
    summary = read_summary(record(), URL, nowhere)
    recipe, made = summary.recipe, summary.decomposition
    assert (
        recipe is not None
        and made is not None
        and recipe.config == leader.trials.selection.leader()
    )
    assert (made.winner, made.baseline) == (
        recipe.config,
        recipe.baseline and recipe.baseline.config,
    )
    assert math.prod(one.factor for one in made.factors) == pytest.approx(recipe.speedup)
    asked = [(one.config, one.depth) for one in leader.session.prober.requests]  # type: ignore[attr-defined]
    assert asked.count((recipe.config, 2)) == 2  # all parts are measured at about the same time
    by_name = {one.name: one.factor for one in made.factors}
    assert by_name == pytest.approx({"recomputation": 1 / 0.7, WHOLE: 1.0})


def test_a_later_session_goes_on_where_the_first_ended() -> None:
    lead()
    first, said = record(), list[str]()
    leader = lead(said, trials=5)
    again = record()
    assert (
        "resumed with 3" in said
        and "trials: 3 done already, 0 interrupted and queued again" in said
    )
    assert [line for line in said if line.startswith("on trial")] == ["on trial 3", "on trial 4"]
    assert again.earlier_seconds == first.wall_seconds < again.wall_seconds
    assert len(leader.trials.rows) == 5 and not any("baseline:" in line for line in said)
    with pytest.raises(UsageError, match="its headroom differs"):
        lead(headroom=0.1)


def test_a_trial_that_is_queued_at_the_end_is_tried_by_a_later_session(
    recorded: type[Recorded],
) -> None:
    """Optuna's dashboard would show it as waiting."""
    answer, seen = recorded.answers, list[TrainConfig]()

    def stopped(request: ProbeRequest) -> ProbeResult:
        if request.config not in seen:
            seen.append(request.config)
            if len(seen) == 3:
                raise Cancelled
        return answer(request)  # type: ignore[operator]

    recorded.answers = staticmethod(stopped)
    assert len(lead(trials=4).trials.rows) == 2
    with closing(Optimizer.open(URL, "mine", record().task.space)) as optimizer:
        assert not optimizer.has_unfinished()

    said: list[str] = []
    later = lead(said, trials=4)
    assert "trials that did not begin in time, queued again: 1" in said
    assert [row.config for row in later.trials.rows][2] == seen[2]


def test_a_budget_that_is_over_is_kept_in_the_record() -> None:
    def answer(request: ProbeRequest) -> ProbeResult:
        return replace(machine(rate=by_tokens, limit_gib=100.0)(request), seconds={"total": 5000.0})

    Recorded.answers = staticmethod(answer)
    leader = lead()
    # 1.5 s of an hour are kept for the answer
    assert leader.session.until == leader.plan.started + 3598.5 and not leader.session.is_over()
    leader.session.until = time.monotonic()
    assert leader.session.is_over()


def test_probes_that_keep_failing_are_for_the_caller_to_raise() -> None:
    def answer(request: ProbeRequest) -> ProbeResult:
        if (request.config.checkpointing, request.config.micro_batch_size) != ("full", 8):
            return result(outcome=Outcome.CRASH, reason="no kernel")
        return machine(rate=by_tokens, limit_gib=100.0)(request)

    Recorded.answers = staticmethod(answer)
    leader = lead(trials=8)
    assert isinstance(leader.failure, TooManyFailures) and "no kernel" in str(leader.failure)
    assert record().phase == StudyPhase.STOPPED and Rung.CONFIRM not in probed(leader)


def test_a_study_in_which_nothing_fits_is_stored_with_its_tries() -> None:
    Recorded.answers = staticmethod(machine(limit_gib=0.1))
    leader = lead(trials=8)
    assert isinstance(leader.failure, NothingFits) and record().phase == StudyPhase.ENDED
    configs = [row.config for row in leader.trials.rows]
    assert configs and len(set(configs)) == len(configs)
    assert all(row.outcome in (Outcome.OOM, Outcome.REFUSED) for row in leader.trials.rows)
    summary = read_summary(record(), URL, nowhere)
    assert summary.recipe is None and len(summary.trials) == len(configs)


def test_an_interrupt_of_a_caller_without_signal_handlers_is_a_stop() -> None:
    def answer(request: ProbeRequest) -> ProbeResult:
        if request.config.checkpointing == "none":
            raise KeyboardInterrupt
        return machine(rate=by_tokens, limit_gib=100.0)(request)

    Recorded.answers = staticmethod(answer)
    leader = lead()
    assert leader.session.stop() and leader.failure is None
    assert record().phase == StudyPhase.STOPPED and record().too_short_for == ()


def test_a_stop_during_the_baseline_keeps_its_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other work disturbs the first probe, and the user stops the second."""
    monkeypatch.delenv(ASSUME_QUIET, raising=False)
    stop = StopToken()
    probes = list[TrainConfig]()

    def answer(request: ProbeRequest) -> ProbeResult:
        probes.append(request.config)
        if len(probes) > 1:
            stop.request()
            raise Cancelled
        probed = machine(rate=by_tokens, limit_gib=100.0)(request)
        assert probed.measurement is not None
        return replace(probed, measurement=replace(probed.measurement, other_gpu=0.6))

    Recorded.answers = staticmethod(answer)
    leader = lead(stop=stop)
    (row,) = leader.trials.rows
    assert (row.config, row.evidence) == (probes[0], Evidence.DISTURBED) and len(probes) == 2

    summary = read_summary(record(), URL, nowhere)
    assert summary.stopped and summary.recipe is not None and summary.recipe.alone
    assert describe.breakdown(summary) == "1 configuration: 1 fit"
    assert any("stopped before its end" in note for note in summary.notes)

    Recorded.answers = staticmethod(machine(rate=by_tokens, limit_gib=100.0))
    said: list[str] = []
    later = lead(said)
    assert "trials: 1 done already, 0 interrupted and queued again" in said
    assert [one.config for one in later.trials.rows].count(row.config) == 1
    assert not read_summary(record(), URL, nowhere).stopped


def test_what_nothing_else_than_quantised_bases_fit_is_said_and_kept() -> None:
    """Weights take 1 GiB, in 4 bits a quarter of it; there is half a GiB."""
    Path("space.yaml").write_text(SPACE + "  quantization: {values: [none, nf4]}\n")
    Recorded.answers = staticmethod(machine(limit_gib=0.5, rate=by_tokens))
    said: list[str] = []
    leader = lead(said)
    assert record().reserve_opened and {row.config.quantization for row in leader.trials.rows} == {
        "nf4"
    }
    assert any(
        line.startswith("nothing else fits, so these values are searched too: ") for line in said
    )
    lead(trials=4)  # a later session knows it
    assert record().reserve_opened


def test_a_fresh_study_measures_anew_and_a_later_session_of_it_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Leader, "_decompose", lambda *_: None)  # it always measures
    lead()
    assert Rung.FULL not in probed(lead(study="usual"))
    assert probed(lead(study="fresh", fresh=True)).count(Rung.FULL) == 3
    assert read_record(URL, "fresh").spec.fresh  # type: ignore[union-attr]
    assert Rung.FULL not in probed(lead(study="fresh", fresh=True))


def test_only_one_process_leads() -> None:
    lead()
    other = replace(Worker.this_process("cpu", leads=True), host="another")
    with closing(Leases(URL, "mine", other)) as leases:
        leases._beat()
        with pytest.raises(
            UsageError, match=f"study 'mine' is being run by process {other.pid} of another"
        ):
            lead(trials=4)


def test_layers_that_cannot_be_left_out_exclude_shallow_only() -> None:
    with pytest.raises(UsageError, match="this model's layers cannot be left out"):
        lead(shallow_only=True)
    Recorded.shape = ModelShape(num_layers=8, prefix=0, period=1)
    leader = lead(shallow_only=True)
    assert set(probed(leader)) == {Rung.SHALLOW} and record().shallow_only


@pytest.mark.parametrize(("layers", "rungs"), [(8, {Rung.SHALLOW}), (None, {Rung.FULL})])
def test_an_explanation_is_kept_with_the_study_and_its_probes_apart(
    layers: int | None, rungs: set[Rung]
) -> None:
    lead()
    made = read_summary(record(), URL, nowhere)
    assert made.recipe is not None and made.recipe.baseline is not None and made.explanation is None
    Recorded.shape = layers and ModelShape(num_layers=layers, prefix=0, period=1)
    with Session(URL, Path("explained"), "cpu") as session:
        found = explain(session, record(), made.recipe.config, made.recipe.baseline.config)
        stored = {row.result.rung for row in session.store.probes_of_study("mine, explained")}
    assert record().ablation == found == read_summary(record(), URL, nowhere).explanation
    assert found.undone
    assert stored - {Rung.FULL} == rungs - {Rung.FULL} and len(
        read_summary(record(), URL, nowhere).probes
    ) == len(made.probes)


# --- joining


def searching(**changes: Any) -> StudyRecord:
    """The study of an earlier leader, as if it were still searching."""
    lead()
    values = {"phase": StudyPhase.SEARCHING, "limits": Limits(budget_s=3600.0, trials=6)} | changes
    with closing(Optimizer.open(URL, "mine", record().task.space)) as optimizer:
        update_record(optimizer, **values)
    return record()


def join(found: StudyRecord, said: list[str] | None = None, **options: Any) -> int:
    with Session(
        URL, Path("helper"), "cpu", progress=TextProgress(([] if said is None else said).append)
    ) as session:
        return work(session, found, **options)


def test_a_worker_helps_until_a_limit_is_reached() -> None:
    found, said = searching(), list[str]()
    assert join(found, said) == 3
    assert sum(line.startswith("trial ") for line in said) == 3
    (seconds,) = record().worker_seconds.values()
    assert 0 < seconds < 60 and len(read_summary(record(), URL, nowhere).trials) == 6
    with closing(Leases(URL, "mine", Worker.this_process("cpu"))) as leases:
        assert set(leases.workers()) == {leases.name}


def test_a_worker_leaves_when_the_search_is_over() -> None:
    assert join(searching(phase=StudyPhase.CONFIRMING)) == 0


def test_a_worker_has_what_is_left_of_the_leaders_budget() -> None:
    # 3,610 s of this session's hour are over
    assert join(searching(wall_seconds=5000.0, earlier_seconds=1390.0)) == 0
    assert join(searching(wall_seconds=5000.0, earlier_seconds=4000.0)) == 3


def test_a_worker_of_another_kind_is_refused_unless_that_is_allowed() -> None:
    found = searching()
    Recorded.fingerprint_here = replace(
        FINGERPRINT, driver="590.1", packages={**FINGERPRINT.packages, "torch": "2.9"}
    )
    with pytest.raises(
        EnvironmentProblem, match="this machine differs from the machine that began the study"
    ):
        join(found)
    assert join(found, allow_mixed=True) == 3


def test_a_node_that_needs_more_memory_is_refused_unless_that_is_allowed() -> None:
    found = searching()

    def answer(request: ProbeRequest) -> ProbeResult:
        made = machine(rate=by_tokens, limit_gib=100.0)(request)
        if made.measurement is None:
            return made
        more = 2 * made.measurement.peak_reserved_gib
        return replace(made, measurement=replace(made.measurement, peak_reserved_gib=more))

    Recorded.answers = staticmethod(answer)
    with pytest.raises(TooManyFailures, match="this node is not like the others: it reserves"):
        join(found)
    assert join(found, allow_mixed=True) == 3


@pytest.mark.parametrize("allow_mixed", [False, True])
def test_a_node_that_changes_is_noticed_later(
    monkeypatch: pytest.MonkeyPatch, allow_mixed: bool
) -> None:
    found, said, readings = searching(), list[str](), iter([[], ["it is slow"]])
    monkeypatch.setattr(session_module.NodeMonitor, "is_due", lambda self: True)
    monkeypatch.setattr(session_module.NodeMonitor, "check", lambda self: next(readings, []))
    text = "this node is not like the others any more: it is slow"
    if not allow_mixed:
        with pytest.raises(TooManyFailures, match=text):
            join(found, said)
        return
    assert join(found, said, allow_mixed=True) == 3 and text in said


def test_a_study_is_waited_for_until_its_search_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    said, now = list[str](), [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(session_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(session_module.time, "sleep", sleep)
    with pytest.raises(
        UsageError, match="there is no study 'mine' in this database that could be joined"
    ):
        await_study(URL, "mine", 7.0, said.append)
    # it looks every 2 s
    assert said == ["waiting 7.0 s at most for study 'mine' to begin"] and now == [108.0]
    with pytest.raises(UsageError):
        await_study(URL, "mine", 0.0, said.append)
    assert len(said) == 1 and now == [108.0]
    monkeypatch.undo()


def test_a_record_is_found_by_name_and_a_worker_has_a_folder_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no study in this database"):
        find_record(None, URL)
    lead()
    lead(study="newer", out="elsewhere")
    assert find_record(None, URL).task.study == "newer" and find_record("mine", URL) == record()
    with pytest.raises(UsageError, match="there is no study 'none' in this database") as caught:
        find_record("none", URL)
    assert caught.value.remedy == "the studies are: mine, newer"
    with (
        closing(Optimizer.create(URL, "foreign", record().task.space, seed=0)),
        pytest.raises(UsageError, match="'foreign' is not a study of autotune"),
    ):
        find_record("foreign", URL)
    assert worker_folder(record(), URL, Path("given")) == Path("given")
    assert worker_folder(record(), URL, None).parent == tmp_path / "out"
    assert worker_folder(record(), URL, None).name.startswith("worker-")


# --- the device of a worker


MEMORY = {"NVIDIA A10": 22.5}


def card(name: str = "NVIDIA H200", used_gib: float = 0.0) -> GpuInfo:
    values: dict[str, Any] = {
        "index": 0,
        "uuid": "GPU-0",
        "compute_capability": "9.0",
        "driver": "580",
    }
    return GpuInfo(
        **values, name=name, memory_gib=MEMORY.get(name, 140.4), used_gib=used_gib, processes=()
    )


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the cards of this machine."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return lambda *found: monkeypatch.setattr("autotune.core.nvml.list_gpus", lambda: list(found))


def test_a_device_is_required_by_its_product(cards: Callable[..., None]) -> None:
    h200, cpu = resolve_device("h200"), resolve_device("cpu")
    cards(card())
    assert (require_device(h200, "go"), require_device(cpu, "go", 4)) == ("cuda", "cpu")
    with pytest.raises(
        EnvironmentProblem,
        match="the study is for 2 GPUs, but only 1 of this machine's are visible",
    ):
        require_device(h200, "go", 2)
    for found, here in (((card("NVIDIA A10"),), "a10"), ((), "no GPU")):
        cards(*found)
        assert require_device(cpu, "go") == "cpu"
        with pytest.raises(
            EnvironmentProblem, match=f"the study is for h200-sxm, but this machine has {here}"
        ) as caught:
            require_device(h200, "another card")
        assert caught.value.remedy == "another card"


def test_a_row_of_the_users_own_may_be_of_the_card_that_is_here(
    cards: Callable[..., None], tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text(
        "memory: 140\nbf16_tflops: 900\nnvml_names: [NVIDIA H200]\n"
    )
    cards(card())
    assert require_device(resolve_device(str(tmp_path / "mine.yaml")), "go") == "cuda"
    with pytest.raises(
        EnvironmentProblem, match="the study is for card-140gb, but this machine has h200-sxm"
    ):
        require_device(resolve_device("memory=140,bf16_tflops=900"), "go")


def test_a_worker_needs_the_memory_that_the_study_uses_of_each_card(
    cards: Callable[..., None],
) -> None:
    """80 GiB of 140.4, of which half a GiB that others hold is ignored."""
    on_h200 = record_of()
    stands_in = record_of(
        subject_of(device=resolve_device("a10"), measured_on=resolve_device("h200"))
    )
    for used_gib in (0.0, 60.8):
        cards(card(used_gib=used_gib))
        assert worker_device(on_h200) == worker_device(stands_in) == "cuda"
    cards(card(used_gib=61.0))
    with pytest.raises(
        EnvironmentProblem, match=r"uses 80\.0 GiB of each GPU, but only 79\.4 GiB of"
    ):
        worker_device(on_h200)
    assert worker_device(record_of(subject_of(device=resolve_device("cpu")))) == "cpu"


# --- what a session has


def test_the_formula_is_asked_for_what_it_was_measured_with() -> None:
    terms = ProbeTerms(memory_gib=80.0, headroom=0.05)
    with Session(URL, Path("logs"), "cpu") as session:
        known = []
        answers = Workload(objective=Objective.DPO)
        for changes in (
            {},
            {"device": resolve_device("cpu")},
            {"trainer": "trl"},
            {"trainer": "trl", "workload": answers},
        ):
            evaluator = session.evaluator(subject_of(**changes), terms, study="one", shape=None)
            known.append(evaluator.formula(BASELINE, 2) is not None)
            assert not evaluator.shallow_only and evaluator.request(BASELINE).memory_gib == 80.0
        of_answers = evaluator.formula(BASELINE, 2)
    assert known == [True, False, False, True]
    assert of_answers == memory_breakdown(subject_of().model, BASELINE, 2, objective=Objective.DPO)


def test_preparing_a_dataset_is_said_not_to_count() -> None:
    plan = prepare_session(
        StudySpec(model="demo-3m", gpu="cpu", study="mine", storage=URL, space="space.yaml")
    )
    for dataset, notes in ((None, 0), ("a.jsonl", 1)):
        said: list[str] = []
        read = replace(plan, spec=replace(plan.spec, dataset=dataset), preparation_s=75.0)
        with Session(URL, plan.out, "cpu", progress=TextProgress(said.append)) as session:
            Leader(session, read)
        note = "preparing the dataset took 1 min 15 s, which does not count against the budget"
        assert [note in line for line in said].count(True) == notes


def test_memory_that_others_hold_is_said() -> None:
    plan = prepare_session(
        StudySpec(model="demo-3m", gpu="cpu", study="mine", storage=URL, space="space.yaml")
    )
    for used_gib, notes in ((0.4, 0), (3.1, 1)):
        said: list[str] = []
        shared = replace(
            plan, target=Target(device=resolve_device("h200"), card=card(used_gib=used_gib))
        )
        with Session(URL, plan.out, "cpu", progress=TextProgress(said.append)) as session:
            Leader(session, shared)
        assert ["other processes hold 3.10 GiB of this GPU: " in line for line in said].count(
            True
        ) == notes


def test_the_time_of_a_study_that_still_runs_is_that_of_its_probes() -> None:
    lead()
    made = record()
    probed_s = read_summary(made, URL, nowhere).probe_seconds
    assert probed_s >= 9.0  # three trials of 3 s
    for wall_seconds, worker_seconds, expected_s in (
        (0.5, {}, probed_s),
        (probed_s + 1, {}, probed_s + 1),
        (0.5, {"another": 1.0}, 0.5),  # some of them were its
    ):
        known = replace(made, wall_seconds=wall_seconds, worker_seconds=worker_seconds)
        assert read_summary(known, URL, nowhere).wall_seconds == expected_s


def test_an_explanation_ends_where_the_user_stops_it() -> None:
    lead()
    made = read_summary(record(), URL, nowhere).recipe
    assert made is not None and made.baseline is not None
    with Session(URL, Path("explained"), "cpu") as session:
        session.stop.request()
        assert explain(session, record(), made.config, made.baseline.config).undone == ()
    assert record().ablation is not None


def fitted(before: Task | None, **changes: Any) -> Task:
    """The task that a leader sets up anew where an earlier session had that one."""
    leader, task = Leader.__new__(Leader), subject_of(**changes)
    setup = Setup(task=task, reserve=task.space, removals=())
    leader.plan = SimpleNamespace(setup=setup, spec=SimpleNamespace(shallow_only=False))  # type: ignore[assignment]
    leader._before = None if before is None else record_of(before)
    leader.session = SimpleNamespace(  # type: ignore[assignment]
        prober=SimpleNamespace(describe=lambda config: SHAPE)
    )
    found, shape = leader._fit_setup()
    assert shape is SHAPE
    return found.task


def test_a_later_session_converts_speeds_as_the_first_did() -> None:
    """Another calibration would make values of before and after not compare."""
    stands_in: dict[str, Any] = {
        "device": resolve_device("a10"),
        "measured_on": resolve_device("h200"),
    }
    now, then = (
        SpeedTransfer(products=0.5, bytes=0.4, error=0.1),
        SpeedTransfer(products=0.6, bytes=0.5, error=0.2),
    )
    before = subject_of(**stands_in, carried=then, calibration=calibration())
    again = fitted(before, **stands_in, carried=now)
    assert (again.carried, again.calibration) == (then, before.calibration)
    assert fitted(None, **stands_in, carried=now).carried == now
    assert fitted(before).carried is None  # the card itself


def test_the_seconds_of_all_sessions_are_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    leader = Leader.__new__(Leader)
    leader._earlier_seconds, leader.plan = 5.0, SimpleNamespace(started=100.0)  # type: ignore[assignment]
    monkeypatch.setattr(session_module, "time", SimpleNamespace(monotonic=lambda: 107.5))
    assert leader._wall_seconds == 12.5
