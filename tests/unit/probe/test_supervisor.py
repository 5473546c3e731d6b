"""What is probed once more since the machine may be to blame, which of two answers counts, and what
silence means.

The answers are given: heat and crashes that come and go cannot be had at will. `tests/faults` has
those that can.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.core.errors import Cancelled, EnvironmentProblem, TooManyFailures, UsageError
from autotune.core.probe_types import (
    DeviceRates,
    ModelShape,
    OomDetail,
    Outcome,
    Phase,
    ProbeRequest,
    ProbeResult,
    Rung,
    Telemetry,
)
from autotune.core.serialization import to_data
from autotune.core.train_config import TrainConfig
from autotune.probe import supervisor
from autotune.probe.monitor import Monitor
from autotune.probe.supervisor import HOST_OOM, WorkerProber
from tests.helpers.factories import FINGERPRINT, PROFILE, measurement, result

HOT = result(measurement=measurement(telemetry=Telemetry(throttle_reasons=("hardware thermal",))))
COOL = result(measurement=measurement(telemetry=Telemetry(throttle_reasons=("power cap",))))
OOM = result(outcome=Outcome.OOM)
CRASH = result(outcome=Outcome.CRASH, reason="the worker was killed by SIGSEGV")
GONE = EnvironmentProblem("the probe worker could not start")
REQUEST = ProbeRequest(config=TrainConfig(), model={}, memory_gib=1.0)
Answers = Callable[..., WorkerProber]


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answers:
    def start(*given: ProbeResult | Exception) -> WorkerProber:
        prober, left = WorkerProber("cpu", tmp_path), list(given)

        def once(request: ProbeRequest, log: Path) -> ProbeResult:
            one = left.pop(0)
            if isinstance(one, Exception):
                raise one
            return one

        monkeypatch.setattr(prober, "_probe_once", once)
        return prober

    return start


def outcomes(prober: WorkerProber, times: int) -> list[tuple[Outcome, bool]]:
    """Of so many probes: what came of each, and whether it was tried twice."""
    found = [prober.probe(REQUEST, Path("one.log")) for _ in range(times)]
    return [(one.outcome, any("twice" in note for note in one.notes)) for one in found]


def test_a_crash_is_tried_once_more_and_the_second_answer_counts(answers: Answers) -> None:
    again = replace(COOL, seconds={"total": 2.0}, started_at="2026-11-22T12:00:10+00:00")
    first = replace(CRASH, started_at="2026-11-22T12:00:00+00:00")
    found = answers(first, again).probe(REQUEST, Path("one.log"))
    assert found.outcome is Outcome.OK and found.notes == (
        f"tried twice, because the first time {CRASH.reason}",
    )
    assert found.seconds["total"] == 5.0 and found.started_at == first.started_at  # both tries


def test_what_crashed_twice_is_not_tried_twice_again(answers: Answers) -> None:
    other = replace(CRASH, config=TrainConfig(micro_batch_size=2))
    assert outcomes(answers(CRASH, CRASH, CRASH, other, COOL), 3) == [
        (Outcome.CRASH, True),
        (Outcome.CRASH, False),
        (Outcome.OK, True),
    ]


def test_what_has_a_reason_of_its_own_is_not_tried_again(answers: Answers) -> None:
    for known in (
        replace(CRASH, reason=HOST_OOM),
        replace(CRASH, phase=Phase.LOAD, reason="ValueError: no such attention"),
        replace(CRASH, outcome=Outcome.TIMEOUT, phase=Phase.STEADY),
        OOM,
    ):
        assert outcomes(answers(known), 1) == [(known.outcome, False)]
    broken = replace(
        CRASH, phase=Phase.STEADY, reason="AcceleratorError: CUDA error: an illegal memory access"
    )
    assert outcomes(answers(broken, COOL), 1) == [(Outcome.OK, True)]


def test_a_crash_after_which_no_worker_starts_is_the_result(answers: Answers) -> None:
    prober = answers(CRASH, GONE, GONE)
    assert outcomes(prober, 1) == [(Outcome.CRASH, False)]
    with pytest.raises(EnvironmentProblem):
        prober.probe(REQUEST, Path("one.log"))


def test_a_hot_measurement_counts_where_the_second_fails(answers: Answers) -> None:
    for second in (CRASH, OOM):
        assert outcomes(answers(HOT, second), 1) == [(Outcome.OK, True)]
    assert outcomes(answers(HOT, GONE), 1) == [(Outcome.OK, False)]


def test_a_card_that_stays_hot_is_as_it_is_until_it_was_seen_cool(answers: Answers) -> None:
    twice, once, out = (Outcome.OK, True), (Outcome.OK, False), (Outcome.OOM, False)
    assert outcomes(answers(HOT, HOT, OOM, HOT, COOL, HOT, COOL), 5) == [
        twice,
        out,
        once,
        once,
        twice,
    ]
    assert outcomes(answers(HOT, COOL, HOT, COOL), 2) == [twice, twice]


def test_new_errors_of_the_cards_own_memory_end_the_session(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Card:
        def uncorrected_errors(self) -> int:
            return 3

    prober = answers(CRASH)
    monkeypatch.setattr(prober, "_nvml", Card())
    monkeypatch.setattr(prober, "_memory_errors", 1)
    with pytest.raises(TooManyFailures, match="2 new uncorrected ECC errors"):
        prober.probe(REQUEST, Path("one.log"))


READY = {"event": "ready", "fingerprint": to_data(FINGERPRINT), "seconds": 9.5}
READY |= {"memory_gib": 8.0, "context_gib": 0.5}
START = {"event": "phase", "phase": "start"}
STEADY = {"event": "phase", "phase": "steady"}
SHAPE = ModelShape(num_layers=4, prefix=0, period=1)
RATES = DeviceRates(products={"fp32": {32: 1.0}}, copy_gb_s=2.0, link_gb_s=None, launch_us=3.0)


def answer(found: ProbeResult, reusable: bool = True) -> dict[str, Any]:
    return {"event": "result", "result": to_data(found), "reusable": reusable}


class Script:
    """A worker that says what a test wrote for it, and keeps what it receives.

    It ends with `code`.
    """

    def __init__(self, said: list[Any], code: int | None = None) -> None:
        self.left = said
        self.code = code
        self.told: list[Any] = []

    def send(self, message: dict[str, Any]) -> None:
        self.told.append(message)

    def receive(self, monitor: Monitor, should_stop: Callable[[], bool]) -> Any:
        said = self.left.pop(0)
        if isinstance(said, BaseException):
            raise said
        return said

    def dump_stacks(self) -> None:
        self.told.append("dump")

    def wait_for_exit(self, timeout_s: float) -> int | None:
        return self.code

    def close(self) -> None:
        self.told.append("close")


Started = Callable[..., tuple[WorkerProber, list[Script]]]


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    """A prober whose workers say these things, one list for each worker that is started, and end
    with `code`.
    """

    def make(*said: list[Any], code: int | None = None) -> tuple[WorkerProber, list[Script]]:
        scripts = [Script(one, code) for one in said]
        waiting = list(scripts)
        monkeypatch.setattr(
            supervisor, "WorkerProcess", lambda device, log, variables, module: waiting.pop(0)
        )
        monkeypatch.setattr(supervisor, "DUMP_S", 0.0)
        return WorkerProber("cpu", tmp_path / "logs"), scripts

    return make


def test_one_worker_serves_until_it_is_not_as_good_as_new(started: Started) -> None:
    first = [START, READY, STEADY, answer(COOL), answer(COOL, reusable=False)]
    prober, scripts = started(first, [READY, answer(COOL)])
    assert prober.fingerprint == FINGERPRINT and prober.memory_gib == 8.0 and prober.starts == 1
    found = [prober.probe(REQUEST, Path("logs/one.log")) for _ in range(3)]
    assert {one.outcome for one in found} == {Outcome.OK} and {one.log for one in found} == {
        "one.log"
    }
    assert prober.starts == 2 and [script.told.count("close") for script in scripts] == [1, 0]
    assert scripts[0].told[0] == {"request": to_data(REQUEST), "log": "logs/one.log"}
    # The start counts to the first whole model that each worker probes.
    assert [one.seconds.get("start") for one in found] == [9.5, None, 9.5]
    assert found[0].measurement is not None and found[0].measurement.telemetry is None  # of a CPU
    with prober:
        pass
    assert scripts[1].told[-1] == "close"


def test_the_start_of_a_worker_waits_for_a_whole_model(started: Started) -> None:
    prober, _ = started([READY, answer(COOL), answer(COOL)])
    few = prober.probe(replace(REQUEST, depth=2), Path("one.log"))
    whole = prober.probe(REQUEST, Path("one.log"))
    assert "start" not in few.seconds and whole.seconds == {"start": 9.5} | COOL.seconds


def test_a_worker_without_progress_is_ended_after_it_wrote_its_stack(started: Started) -> None:
    prober, scripts = started([READY, STEADY, None])
    found = prober.probe(replace(REQUEST, depth=2, rung=Rung.SHALLOW), Path("logs/one.log"))
    assert (found.outcome, found.phase, found.log) == (Outcome.TIMEOUT, Phase.STEADY, "one.log")
    assert (found.depth, found.rung, found.request_digest) == (
        2,
        Rung.SHALLOW,
        replace(REQUEST, depth=2).digest,
    )
    assert found.reason == "no progress in phase steady for 900 s; the stack is in the log"
    assert scripts[0].told[-2:] == ["dump", "close"]


@pytest.mark.parametrize(
    ("code", "kills", "reason"),
    [
        (-9, [3, 4], HOST_OOM),
        (-9, [3, 3], "the worker was killed by SIGKILL"),
        (-11, [3, 4], "the worker was killed by SIGSEGV"),
        (1, [3, 4], "the worker ended with exit code 1"),
        (0, [3, 3], "the worker ended with exit code 0"),
        (None, [3, 3], "the worker ended with exit code None"),
    ],
)
def test_why_a_worker_has_ended(
    started: Started,
    monkeypatch: pytest.MonkeyPatch,
    code: int | None,
    kills: list[int],
    reason: str,
) -> None:
    counts = iter(kills)
    monkeypatch.setattr(supervisor, "host_oom_kills", lambda: next(counts))
    prober, scripts = started([READY, STEADY, EOFError()], code=code)
    found = prober._probe_once(REQUEST, Path("one.log"))
    assert (found.outcome, found.phase, found.reason) == (Outcome.CRASH, None, reason)
    assert scripts[0].told[-1] == "close" and "total" in found.seconds


def test_who_cancels_leaves_no_worker(started: Started) -> None:
    prober, scripts = started([READY, Cancelled()])
    with pytest.raises(Cancelled):
        prober.probe(REQUEST, Path("one.log"))
    assert scripts[0].told[-1] == "close"
    stopped = WorkerProber("cpu", prober.logs, should_stop=lambda: True)
    with pytest.raises(Cancelled):
        stopped.probe(REQUEST, Path("one.log"))
    assert stopped.starts == 0


@pytest.mark.parametrize(
    ("said", "error", "words"),
    [
        (
            {"event": "broken", "reason": "ImportError: x"},
            EnvironmentProblem,
            "could not start: ImportError: x",
        ),
        (
            {"event": "broken", "reason": "wrong", "unhealthy": True},
            TooManyFailures,
            "cannot be trusted: wrong",
        ),
        (
            {"event": "broken", "reason": "wrong", "unhealthy": False},
            EnvironmentProblem,
            "could not start: wrong",
        ),
        (None, EnvironmentProblem, "could not start: it did not start within 240 s"),
        (EOFError(), EnvironmentProblem, "could not start: it ended while starting"),
        (ConnectionResetError(), EnvironmentProblem, "could not start: it ended while starting"),
    ],
    ids=repr,
)
def test_a_worker_that_does_not_start(
    started: Started, said: Any, error: type[Exception], words: str
) -> None:
    prober, scripts = started([START, said], [READY])
    with pytest.raises(error, match=words):
        prober.probe(REQUEST, Path("one.log"))
    assert scripts[0].told == ["close"]
    assert prober.fingerprint == FINGERPRINT and prober.starts == 2  # the next one may


def test_a_model_is_described_refused_or_given_up(started: Started) -> None:
    broken = {"event": "broken", "reason": "no causal\x1b[31m model"}
    described = {"event": "described", "shape": to_data(SHAPE)}
    prober, scripts = started([READY, described, broken, None], [READY, EOFError()], [READY])
    assert prober.describe({"model_type": "llama"}) == SHAPE
    assert scripts[0].told == [{"describe": {"model_type": "llama"}}]
    with pytest.raises(UsageError, match="this model cannot be trained: no causal") as caught:
        prober.describe({})
    assert "\x1b" not in str(caught.value) and "close" not in scripts[0].told
    assert prober.describe({}) is None and scripts[0].told[-1] == "close"  # it hangs
    assert prober.describe({}) is None and scripts[1].told[-1] == "close"  # it ends
    assert prober.starts == 2


def test_rates_are_those_of_the_worker(started: Started) -> None:
    prober, scripts = started([READY, {"event": "rates", "rates": to_data(RATES)}])
    assert prober.rates() == RATES and scripts[0].told == [{"rates": True}]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"event": "broken", "reason": "no memory"}, "no memory"),
        (None, "it took more than 240 s"),
        (EOFError(), "the worker was killed by SIGKILL"),
    ],
    ids=repr,
)
def test_a_device_that_cannot_be_measured(started: Started, said: Any, reason: str) -> None:
    prober, scripts = started([READY, said], code=-9)
    with pytest.raises(EnvironmentProblem, match=f"the device could not be measured: {reason}"):
        prober.rates()
    assert scripts[0].told[-1] == "close"


@pytest.mark.parametrize(
    ("counters", "kills"),
    [("pgfault 12\noom_kill 7\noom_kill_x 9\n", 7), ("pgfault 12\n", 0), (None, 0)],
)
def test_the_kernel_counts_whom_it_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counters: str | None, kills: int
) -> None:
    file = tmp_path / "vmstat"
    if counters is not None:
        file.write_text(counters)
    monkeypatch.setattr(supervisor, "Path", {"/proc/vmstat": file}.__getitem__)
    assert supervisor.host_oom_kills() == kills


def test_errors_of_the_cards_memory_that_were_there_before_end_nothing(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Card:
        def uncorrected_errors(self) -> int:
            return 3

    prober = answers(CRASH, COOL)
    monkeypatch.setattr(prober, "_nvml", Card())
    monkeypatch.setattr(prober, "_memory_errors", 3)
    assert outcomes(prober, 1) == [(Outcome.OK, True)]


@pytest.mark.parametrize(
    ("device", "found", "why_not"),
    [
        ("cpu", None, None),
        ("cuda", COOL, None),
        ("cuda", replace(OOM, reason="out of memory in load"), "out of memory in load"),
        ("cuda", replace(OOM, reason=None), "oom"),
    ],
)
def test_a_worker_is_checked_and_on_a_gpu_4_bit_weights_are(
    started: Started,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    found: ProbeResult | None,
    why_not: str | None,
) -> None:
    monkeypatch.setattr(supervisor.Nvml, "open", lambda card: None)
    _, scripts = started([READY, *([answer(found)] if found else [])])
    assert supervisor.check_worker(device) == (FINGERPRINT, why_not)
    asked = [
        told["request"]["config"]["quantization"] for told in scripts[0].told if told != "close"
    ]
    assert asked == (["nf4"] if found else []) and scripts[0].told[-1] == "close"


def test_a_probe_without_an_answer_began_when_it_was_asked_for(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in milliseconds, as the worker reports it."""
    clock = iter([100.0, 107.5])
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: next(clock))
    request = replace(REQUEST, depth=2)
    before = datetime.now(UTC)
    failed = supervisor.failed_result(
        request, Outcome.CRASH, None, "it ended", supervisor.time.monotonic(), Path("a/one.log")
    )
    assert failed.seconds == {"total": 7.5} and failed.log == "one.log"
    began = datetime.fromisoformat(failed.started_at or "")
    taken = timedelta(seconds=7.5)
    assert before - taken - timedelta(milliseconds=1) < began <= datetime.now(UTC) - taken
    assert began.microsecond % 1000 == 0 and len(failed.started_at or "") == len(
        "2026-11-22T12:00:00.000+00:00"
    )


def test_a_prober_starts_nothing_and_watches_a_gpu_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = SimpleNamespace(uncorrected_errors=lambda: 2)
    monkeypatch.setattr(supervisor.Nvml, "open", lambda name: card)
    for device, watched in (("cuda", (card, 2)), ("cpu", (None, None))):
        made = WorkerProber(device, tmp_path)
        assert (made._nvml, made._memory_errors) == watched
        assert (made.starts, made._ready, made._should_stop()) == (0, False, False)


def test_the_first_error_of_a_cards_memory_counts_where_none_were_known(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    prober = answers(CRASH)
    monkeypatch.setattr(prober, "_nvml", SimpleNamespace(uncorrected_errors=lambda: 1))
    with pytest.raises(TooManyFailures, match="1 new uncorrected ECC errors"):
        prober.probe(REQUEST, Path("one.log"))


def test_tries_without_a_time_take_none(answers: Answers) -> None:
    first, second = replace(CRASH, seconds={}), replace(COOL, seconds={"load": 1.0})
    found = answers(first, second).probe(REQUEST, Path("one.log"))
    assert found.seconds == {"load": 1.0, "total": 0.0}


def test_a_worker_is_started_with_a_folder_for_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(supervisor, "WorkerProcess", lambda *asked, module: started.append(asked))
    prober = WorkerProber("cpu", tmp_path / "not" / "yet")
    for count in (1, 2):
        prober.launch()
        assert prober.starts == count and (tmp_path / "not" / "yet").is_dir()
    assert started == [("cpu", tmp_path / "not" / "yet" / "worker.log", {})] * 2


def test_how_long_a_hung_or_an_ended_worker_is_waited_for(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[Any] = []
    assert (supervisor.DUMP_S, supervisor.EXIT_S) == (0.5, 5.0)
    prober, scripts = started([READY, None], [READY, EOFError()])
    monkeypatch.setattr(supervisor, "DUMP_S", 0.25)
    monkeypatch.setattr(
        supervisor.time, "sleep", lambda seconds: waited.append((seconds, scripts[0].told[-1]))
    )
    prober.probe(REQUEST, Path("one.log"))
    assert waited == [(0.25, "dump")]
    monkeypatch.setattr(
        scripts[1], "wait_for_exit", lambda timeout_s: waited.append(timeout_s) or 3
    )
    assert prober._probe_once(
        REQUEST, Path("one.log")
    ).reason == "the worker ended with exit code 3" and waited[1:] == [5.0]


def test_a_profile_comes_with_the_result_of_its_probe(started: Started, tmp_path: Path) -> None:
    found, trace = result(outcome=Outcome.OK), tmp_path / "trace.json.gz"
    out_of_memory = answer(result(outcome=Outcome.OOM), reusable=True) | {
        "profile": to_data(PROFILE)
    }
    prober, (script,) = started(
        [READY, answer(found) | {"profile": to_data(PROFILE)}, answer(found), out_of_memory]
    )
    assert prober.profile(REQUEST, tmp_path / "log", trace)[1] == PROFILE
    assert script.told[0]["trace"] == str(trace)
    assert prober.profile(REQUEST, tmp_path / "log", trace)[1] is None  # the driver shows nothing
    assert prober.profile(REQUEST, tmp_path / "log", trace)[1] is None


def test_a_worker_that_is_killed_while_it_profiles_is_tried_twice(
    started: Started, tmp_path: Path
) -> None:
    lost = [READY, ConnectionError()]
    prober, scripts = started(lost, list(lost), code=-9)
    found, profile = prober.profile(REQUEST, tmp_path / "log", tmp_path / "trace.json.gz")
    assert (found.outcome, profile, len(scripts)) == (Outcome.CRASH, None, 2)


class Ahead:
    """Processes that compile ahead and hold so much memory, until they have to make room."""

    def __init__(self, folder: Path, held_gib: float) -> None:
        self.folder, self._held_gib, self.is_running, self.is_closed = folder, held_gib, True, False
        self.has_ended = False

    def held_gib(self) -> float:
        return self._held_gib

    def make_room(self) -> None:
        self.is_running = False

    def reap(self) -> None:
        self.is_running = self.is_running and not self.has_ended

    def close(self) -> None:
        self.is_closed, self.is_running = True, False


@pytest.mark.parametrize(
    ("need_gib", "reserved_gib", "held_gib", "again"),
    [
        (5.0, 5.0, 2.0, True),
        (5.0, 5.0, 0.5, False),
        (7.0, 6.0, 2.0, False),
        (5.0, 6.0, 2.0, False),
    ],
    ids=[
        "the limit was not all there",
        "the rest of the card sufficed",
        "it needs more than the limit",
        "it reserved more than others left",
    ],
)
def test_a_probe_that_ran_out_beside_others_is_tried_without_them(
    started: Started,
    tmp_path: Path,
    need_gib: float,
    reserved_gib: float,
    held_gib: float,
    again: bool,
) -> None:
    """A card of 8 GiB with a context of 0.5 and a limit of 6.5 has 1 GiB for others."""
    oom = OomDetail(
        phase=Phase.FORWARD,
        requested_gib=None,
        allocated_gib=need_gib,
        reserved_gib=reserved_gib,
        limit_gib=6.5,
    )
    ran_out = result(REQUEST.config, outcome=Outcome.OOM, oom=oom)
    prober, scripts = started([READY, answer(ran_out), answer(result(REQUEST.config))])
    assert prober.fingerprint  # which a worker that starts later would make room for
    ahead = prober.ahead = Ahead(tmp_path, held_gib)  # type: ignore[assignment]
    found = prober.probe(REQUEST, tmp_path / "one.log")
    assert found.outcome is (Outcome.OK if again else Outcome.OOM) and ahead.is_running is not again
    assert scripts[0].told[0]["turns"] == str(tmp_path)
    assert ["turns" in told for told in scripts[0].told[1:]] == [False] * again
    assert bool(found.notes) is again


def test_others_that_do_not_end_their_turn_are_ended_and_what_ran_beside_them_is_measured_again(
    started: Started, tmp_path: Path
) -> None:
    stuck = answer(result(REQUEST.config)) | {"others_are_stuck": True}
    prober, scripts = started(
        [READY, stuck, answer(result(REQUEST.config)), answer(result(REQUEST.config))]
    )
    assert prober.fingerprint
    ahead = prober.ahead = Ahead(tmp_path, 0.0)  # type: ignore[assignment]
    found = prober.probe(REQUEST, tmp_path / "one.log")
    assert found.outcome is Outcome.OK and "still used the device" in found.notes[0]
    assert ahead.is_closed and ["turns" in told for told in scripts[0].told] == [True, False]
    assert not prober.probe(REQUEST, tmp_path / "two.log").notes


def test_a_worker_that_lacked_memory_of_the_host_beside_others_is_tried_without_them(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = answer(result(REQUEST.config, outcome=Outcome.CRASH, reason=HOST_OOM))
    prober, _ = started([READY, killed, answer(result(REQUEST.config)), killed])
    assert prober.fingerprint
    ahead = prober.ahead = Ahead(tmp_path, 0.0)  # type: ignore[assignment]
    found = prober.probe(REQUEST, tmp_path / "one.log")
    assert (
        found.outcome is Outcome.OK
        and "memory of the host" in found.notes[0]
        and not ahead.is_running
    )
    # nobody was beside it
    assert prober.probe(REQUEST, tmp_path / "two.log").outcome is Outcome.CRASH


def test_a_worker_shares_the_device_with_nobody_who_has_ended(
    started: Started, tmp_path: Path
) -> None:
    prober, scripts = started(
        [READY, answer(result(REQUEST.config)), answer(result(REQUEST.config))]
    )
    assert prober.fingerprint
    ahead = prober.ahead = Ahead(tmp_path, 1.0)  # type: ignore[assignment]
    for ahead.has_ended in (False, True):
        assert prober.probe(REQUEST, tmp_path / "one.log").outcome is Outcome.OK
    assert ["turns" in told for told in scripts[0].told] == [True, False]
