"""Decisions in the store: for whom gloo does not reach, and so that no round is ever decided twice.

Under ``decision/<round>`` the first to write decides: the coordinator, before it publishes; or whoever finds a
rank lost and gives the round up. So a round that was given up is never published.
"""

from __future__ import annotations

import contextlib
from typing import Final

from dcp_datastates.commit.decision import Decision
from dcp_datastates.commit.peers import Connection

__all__ = ["Decided", "Record"]

_KEPT: Final = 64
"""Decisions of so many rounds stay in the store, for ranks that are behind: saves that fail may be begun at ten a
second, and hearts look once a second."""


class Decided(Exception):
    """The round that this rank waits in was decided elsewhere."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(decision)
        self.decision = decision


class Record:
    """What was decided, by round. Of the commit thread; without a store (one rank alone), nothing ever was."""

    def __init__(self, store: Connection | None = None) -> None:
        self._store = store

    def find(self, number: int) -> Decision | None:
        """What it says of the round now."""
        if self._store is None:
            return None
        key = _key(number)
        return Decision.decode(self._store.get(key)) if self._store.check([key]) else None

    def decide(self, number: int, decision: Decision) -> Decision:
        """Decide the round, unless somebody has, and return what stands.

        Raises:
            Decided: somebody else has, for good.
            RuntimeError: the store cannot be reached.
        """
        if self._store is None:
            return decision
        wanted = decision.encode()
        found = self._store.compare_set(_key(number), "", wanted).decode()
        standing = decision if found == wanted else Decision.decode(found.encode())
        if standing is not decision and standing.final:
            raise Decided(standing)
        return standing

    def settle(self, number: int, decision: Decision) -> None:
        """Coordinator: note the decision where every rank finds it, whatever becomes of gloo."""
        if self._store is not None:
            with contextlib.suppress(Exception):  # the store may be gone; gloo may reach them yet
                self._store.set(_key(number), decision.encode())

    def forget_before(self, number: int) -> None:
        """Coordinator, once a round: drop what nobody may want any more."""
        if self._store is not None:
            with contextlib.suppress(Exception):
                self._store.delete_key(_key(number - _KEPT))


def _key(number: int) -> str:
    return f"decision/{number}"
