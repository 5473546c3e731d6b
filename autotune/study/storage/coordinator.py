"""Who else works on a study, as the loop sees it: nobody, or the workers that a database knows (`leases`)."""

from collections.abc import Collection
from typing import Protocol


class Coordinator(Protocol):
    """What one worker needs to know of the others. Configurations are named by their digests."""

    name: str

    def take(self, config: str, trial: int) -> bool:
        """Take a configuration up; False where another worker is at it."""

    def drop(self, config: str) -> None:
        """It is done, or given back."""

    def ahead(self, config: str) -> int:
        """How many were taken up before this one and are not done."""

    def taken(self) -> set[str]:
        """What anybody is at."""

    def workers(self) -> Collection[str]:
        """Everybody who is at work, by name."""


class SingleWorker:
    """A session that shares its study with nobody."""

    name = ""

    def take(self, config: str, trial: int) -> bool:
        return True

    def drop(self, config: str) -> None:
        pass

    def ahead(self, config: str) -> int:
        return 0

    def taken(self) -> set[str]:
        return set()

    def workers(self) -> Collection[str]:
        return ()
