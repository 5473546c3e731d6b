"""The other workers of a study as the loop sees them: none, or those that the database knows (`leases`)."""

from collections.abc import Collection
from typing import Protocol


class Coordinator(Protocol):
    """What one worker needs to know of the others. Configurations are named by their digests."""

    name: str

    def take(self, config: str, trial: int) -> bool:
        """Take a configuration; False if another worker has it."""

    def drop(self, config: str) -> None:
        """Release a configuration that is finished or given back."""

    def ahead(self, config: str) -> int:
        """How many unfinished configurations were taken before this one."""

    def taken(self) -> set[str]:
        """The configurations that any worker has taken and not finished."""

    def workers(self) -> Collection[str]:
        """The names of all workers."""


class SingleWorker:
    """The Coordinator of a session that shares its study with nobody."""

    name = ""

    def take(self, config: str, trial: int) -> bool:
        """Nobody else can have it."""
        return True

    def drop(self, config: str) -> None:
        """Nothing is held."""

    def ahead(self, config: str) -> int:
        """Nobody else takes any."""
        return 0

    def taken(self) -> set[str]:
        """Nothing is held."""
        return set()

    def workers(self) -> Collection[str]:
        """There are no others."""
        return ()
