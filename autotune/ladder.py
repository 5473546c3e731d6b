"""The ladder: what a candidate is put through, cheapest rung first, and why it stopped where it did.

Gate: refuse what is known not to fit. Full: real steps on the whole model, or the stored answer to the same question.
Confirm: the same again, longer, for the few that may win. Every answer is stored before anybody else hears of it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from autotune.config import TrainConfig
from autotune.errors import TooManyFailures
from autotune.memory import Frontier, KnownOom
from autotune.result import Fingerprint, Outcome, ProbeRequest, ProbeResult, Rung
from autotune.store import ProbeStore

MAX_FAILURES_IN_A_ROW = 3


class Prober(Protocol):
    """Who answers requests: the warm worker, or recorded results."""

    @property
    def fingerprint(self) -> Fingerprint: ...

    def probe(self, request: ProbeRequest, log: Path) -> ProbeResult: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result for one candidate, and whether it was known already."""

    result: ProbeResult
    reused: bool = False


class Ladder:
    """One study's rungs on one device. `request` makes the full-depth request for a configuration."""

    def __init__(
        self,
        prober: Prober,
        store: ProbeStore,
        *,
        study: str,
        logs: Path,
        request: Callable[[TrainConfig], ProbeRequest],
    ) -> None:
        self._prober, self._store, self._study, self._logs, self._request = prober, store, study, logs, request
        self._frontier = Frontier()
        self._failures = 0

    def learn(self, trial: int | None, result: ProbeResult) -> None:
        """Take over what an earlier session found out."""
        if result.outcome is Outcome.OOM and result.oom is not None:
            known = KnownOom(
                trial=trial,
                config=result.config,
                micro_steps=self._request(result.config).micro_steps,
                detail=result.oom,
            )
            self._frontier.add(known)

    def evaluate(self, config: TrainConfig, trial: int | None) -> Verdict:
        """Gate, then the stored answer, then a full-depth probe.

        Raises:
            TooManyFailures: probes keep failing for reasons other than memory.
        """
        request = self._request(config)
        known = self._frontier.refuses(config, request.micro_steps)
        if known is not None and known.config != config:
            where = "an earlier probe" if known.trial is None else f"trial {known.trial}"
            result = ProbeResult(
                request_digest=request.digest,
                config=config,
                rung=Rung.GATE,
                outcome=Outcome.REFUSED,
                reason=f"needs at least what {where} ran out with: {known.config.label()}",
                oom=known.detail,
            )
            return Verdict(result=self._stored(trial, result))
        fingerprint = self._prober.fingerprint.digest
        stored = self._store.find(request.digest, fingerprint, (Rung.FULL, Rung.CONFIRM))
        if stored is not None:
            self.learn(trial, stored)
            if trial is not None:  # this study's own row, so that it can be read without the one that measured it
                self._stored(trial, replace(stored, seconds={}, log=None))
            return Verdict(result=replace(stored, log=None), reused=True)
        name = "settle.log" if trial is None else f"trial-{trial:04d}.log"
        result = self._stored(trial, self._prober.probe(request, self._logs / name))
        self.learn(trial, result)
        self._count(result)
        return Verdict(result=result)

    def confirm(self, config: TrainConfig, micro_steps: int, round_: int) -> ProbeResult:
        """Measure a finalist again: more micro batches a step, one evaluation and one save included."""
        request = replace(self._request(config), rung=Rung.CONFIRM, micro_steps=micro_steps, min_timed_steps=3)
        log = self._logs / f"confirm-{config.digest}-{round_}.log"
        result = self._stored(None, self._prober.probe(request, log))
        self.learn(None, result)
        return result

    def _stored(self, trial: int | None, result: ProbeResult) -> ProbeResult:
        self._store.add(self._study, trial, result, self._prober.fingerprint)
        return result

    def _count(self, result: ProbeResult) -> None:
        failed = result.outcome in (Outcome.CRASH, Outcome.TIMEOUT)
        self._failures = self._failures + 1 if failed else 0
        if self._failures >= MAX_FAILURES_IN_A_ROW:
            raise TooManyFailures(
                f"{self._failures} probes in a row failed for reasons other than memory; the last: {result.reason}",
                remedy=f"read {self._logs / (result.log or 'worker.log')}, run `autotune doctor`, go on with --study",
            )
