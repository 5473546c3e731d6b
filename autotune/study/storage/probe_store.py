"""The table of probe results, in the same database as Optuna's tables.

A result is found by its probe request and its fingerprint (the device and the packages). Rows are
added, but never changed. Results cost GPU time, so they must not be lost: a result waits in a file
(`outbox`) while the database cannot be reached, or while its probe is repeated.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from autotune.core.errors import StorageError
from autotune.core.probe_types import Fingerprint, Outcome, ProbeResult, Rung
from autotune.core.serialization import from_data, to_data
from autotune.core.train_config import TrainConfig
from autotune.study.storage.database import OTHER, Database, Outages, retry_on_outage
from autotune.study.storage.outbox import Outbox

_metadata = sa.MetaData()
_probes = sa.Table(
    "autotune_probes",
    _metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("study", sa.String(255), nullable=False, index=True),
    sa.Column("model", sa.String(16), nullable=False, index=True),
    sa.Column("trial", sa.Integer),
    sa.Column("config", sa.String(16), nullable=False, index=True),
    sa.Column("request", sa.String(16), nullable=False, index=True),
    sa.Column("fingerprint", sa.String(16), nullable=False),
    sa.Column("rung", sa.String(16), nullable=False),
    sa.Column("outcome", sa.String(16), nullable=False),
    sa.Column("created_at", sa.String(40), nullable=False),
    sa.Column("result", sa.Text, nullable=False),
    sa.Column("circumstances", sa.Text, nullable=False),
)
# If a probe had one of these outcomes, a repetition would have the same outcome. A crash or a
# timeout may not happen again.
REUSABLE = (Outcome.OK, Outcome.OOM, Outcome.NUMERICS)
# Transactions commit in any order, so a row may become visible after rows with higher ids. Each
# query for new rows therefore also covers this number of ids below the highest id that was read.
LATE_ROWS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredProbe:
    """A row of the table. `trial` is None for probes outside the search, such as confirmations."""

    trial: int | None
    result: ProbeResult


class ProbeStore:
    """The probe table of one database.

    Results wait in the file `outbox` while the database is unreachable. Each new row is marked with
    `node`, the name of this worker.
    """

    def __init__(
        self,
        url: str,
        *,
        outbox: Path | None = None,
        outages: Outages | None = None,
        node: str | None = None,
    ) -> None:
        self._node = node
        self.outages = outages or Outages()
        self._outbox = Outbox(path=outbox) if outbox else None
        self._database = Database(url, self.outages, _metadata)
        self._known: set[int] = set()  # ids of rows that this process has written or read
        self._read_to = 0  # the highest id that was read

    def add(
        self,
        study: str,
        trial: int | None,
        result: ProbeResult,
        fingerprint: Fingerprint,
        *,
        model: str = "",
    ) -> None:
        """Append a result, which then survives a crash.

        `model` is the digest of the model's config. Raises StorageError if both the database and
        the outbox fail.
        """
        row = self._row(study, trial, result, fingerprint, model)
        if self._outbox is None:
            self._write(row)
            return

        try:
            with self.outages.fail_fast():  # save the row first, then wait for the database
                self._empty_outbox()
                self._write(row)
        except StorageError as error:
            self._outbox.add(row)
            self.outages.say(f"{error}; the result waits in {self._outbox.path}")

    def keep(
        self,
        study: str,
        trial: int | None,
        result: ProbeResult,
        fingerprint: Fingerprint,
        *,
        model: str = "",
    ) -> dict[str, Any]:
        """Keep a result in the outbox while its probe is repeated, and return the result's row.

        If this process is killed before it discards the row, the next session stores the row.
        """
        row = self._row(study, trial, result, fingerprint, model)
        if self._outbox is not None:
            self._outbox.add(row)
        return row

    def discard(self, row: dict[str, Any]) -> None:
        """Remove the row of a kept result, because the result of the repetition replaces it."""
        if self._outbox is not None:
            self._outbox.remove(row)

    def _row(
        self,
        study: str,
        trial: int | None,
        result: ProbeResult,
        fingerprint: Fingerprint,
        model: str,
    ) -> dict[str, Any]:
        return {
            "study": study,
            "model": model,
            "trial": trial,
            "config": result.config.digest,
            "request": result.request_digest,
            "fingerprint": fingerprint.digest,
            "rung": result.rung.value,
            "outcome": result.outcome.value,
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "result": json.dumps(to_data(replace(result, node=result.node or self._node))),
            "circumstances": json.dumps(to_data(fingerprint)),
        }

    def _write(self, row: dict[str, Any]) -> None:
        with self._database.begin() as connection:
            self._insert(connection, row)

    def _insert(self, connection: sa.Connection, row: dict[str, Any]) -> None:
        self._known.add(
            connection.execute(_probes.insert().values(**row).returning(_probes.c.id)).scalar_one()
        )

    def _empty_outbox(self) -> None:
        """Write each waiting row that the database does not contain yet, and empty the outbox."""
        if self._outbox is None or self._outbox.is_empty():
            return

        with self._outbox.drain() as rows, self._database.begin() as connection:
            for row in rows:
                same = (
                    column == row[column.name] for column in _probes.c if column is not _probes.c.id
                )
                if connection.execute(sa.select(_probes.c.id).where(*same)).first() is None:
                    self._insert(connection, row)

        self.outages.say(f"{len(rows)} results that waited for the database are stored in it now")

    @retry_on_outage
    def find(
        self,
        request: str,
        fingerprint: str,
        rungs: Iterable[Rung],
        *,
        studies: Sequence[str] = (),
    ) -> ProbeResult | None:
        """Return the newest stored result of this request and fingerprint.

        By default, the result may come from any study of the database; if `studies` is given, only
        from these studies. Results whose times other processes disturbed are left out.
        """
        query = (
            sa.select(_probes.c.result)
            .where(
                _probes.c.request == request,
                _probes.c.fingerprint == fingerprint,
                _probes.c.rung.in_([rung.value for rung in rungs]),
                _probes.c.outcome.in_([outcome.value for outcome in REUSABLE]),
            )
            .order_by(_probes.c.id.desc())
        )
        if studies:
            query = query.where(_probes.c.study.in_(studies))

        self._empty_outbox()
        with self._database.connect() as connection:
            texts = list(connection.execute(query).scalars())
        results = (from_data(ProbeResult, json.loads(text)) for text in texts)
        return next((result for result in results if result.disturbed is None), None)

    @retry_on_outage
    def has_measured(self, study: str, config: TrainConfig) -> bool:
        """Whether a study has itself probed a configuration.

        The probe may have had any number of layers, and any session and worker of the study may
        have run it. A result that the study only reused is recognised by its time, which is 0.
        """
        query = sa.select(_probes.c.result).where(
            _probes.c.study == study, _probes.c.config == config.digest
        )
        self._empty_outbox()
        with self._database.connect() as connection:
            texts = list(connection.execute(query).scalars())
        return any(from_data(ProbeResult, json.loads(text)).seconds.get("total") for text in texts)

    def probes_of_study(self, study: str) -> list[StoredProbe]:
        """Return every row of a study, in the order of writing."""
        return self._rows(_probes.c.study == study)

    @retry_on_outage
    def new_rows(self, study: str) -> list[StoredProbe]:
        """Return the rows that other processes have added to a study since the last call."""
        which = sa.and_(_probes.c.study == study, _probes.c.id > self._read_to - LATE_ROWS)
        query = sa.select(_probes.c.id).where(which)
        with self._database.connect() as connection:
            unknown = set(connection.execute(query).scalars()) - self._known
        return self._rows(_probes.c.id.in_(unknown)) if unknown else []

    @retry_on_outage
    def forget(self, study: str) -> None:
        """Delete the rows of a study."""
        with self._database.begin() as connection:
            connection.execute(_probes.delete().where(_probes.c.study == study))

    def probes_of_model(self, model: str, fingerprint: str) -> list[StoredProbe]:
        """Return every row of this model and this fingerprint, in the order of writing.

        The rows may belong to any study.
        """
        return self._rows(sa.and_(_probes.c.model == model, _probes.c.fingerprint == fingerprint))

    @retry_on_outage
    def _rows(self, which: sa.ColumnElement[bool]) -> list[StoredProbe]:
        query = sa.select(_probes).where(which).order_by(_probes.c.id)
        self._empty_outbox()
        with self._database.connect() as connection:
            rows = connection.execute(query).mappings().all()
        self._known.update(row["id"] for row in rows)
        self._read_to = max((self._read_to, *(row["id"] for row in rows)))
        return [
            StoredProbe(trial=row["trial"], result=_result(row["id"], row["result"]))
            for row in rows
        ]

    def close(self) -> None:
        """Close all connections."""
        self._database.close()


def _result(row: int, text: str) -> ProbeResult:
    """Parse the result in a row. Raises StorageError if the text is not a result."""
    try:
        return from_data(ProbeResult, json.loads(text))
    except (TypeError, ValueError) as error:  # pydantic's error is a ValueError
        reason = str(error).splitlines()[0]
        raise StorageError(
            f"row {row} of the probes cannot be read: {reason}", remedy=OTHER
        ) from None
