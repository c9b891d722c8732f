"""The coordinator's decisions, in the store: for ranks that gloo does not reach. Only the coordinator writes them.

Ranks that archive together (``tiers/carrying.py``) have no other way to each other: they leave their reasons there.
"""

from __future__ import annotations

import json
from typing import Final

from dcp_datastates.commit.vote import Decision, Outcome, Reason
from dcp_datastates.ranks.connection import Connection

_KEPT: Final = 64
"""How many rounds' decisions stay in the store, for ranks that are behind."""

_EXPLAINED: Final = 8
"""How many ranks' reasons the store keeps for one decision."""


class DecisionLog:
    """Decisions by round. Only the commit thread uses it.

    All methods raise RuntimeError if the store cannot be reached.
    """

    def __init__(self, store: Connection) -> None:
        self._store = store
        self._unsaid: dict[int, Decision] = {}

    def find(self, number: int) -> Decision | None:
        """The decision about the round; None if the store does not have it."""
        key = _decision(number)
        return Decision.decode(self._store.get(key)) if self._store.check([key]) else None

    def note(self, number: int, decision: Decision) -> None:
        """Coordinator: write the decision to the store; if that fails, :meth:`flush` tries again."""
        self._unsaid[number] = decision
        self.flush()

    def flush(self) -> None:
        """Coordinator: write the decisions that could not be written before."""
        for number, decision in list(self._unsaid.items()):
            self._store.set(_decision(number), decision.encode())
            del self._unsaid[number]

    def explain(self, number: int, rank: int, reason: Reason) -> None:
        """Write the reason why ``rank`` fails; the store keeps the first few ranks' reasons."""
        # The client may send a request twice: then the count is one too high, and no reason is lost.
        place = self._store.add(_reasons(number), 1)
        if place <= _EXPLAINED:
            text = json.dumps([rank, reason.kind, reason.message])
            self._store.set(f"{_reasons(number)}/{place}", text)

    def failures(self, number: int) -> Decision | None:
        """Coordinator: the decision to fail, for the reasons that ranks have written; None if there are none."""
        count = self._store.add(_reasons(number), 0)
        keys = [f"{_reasons(number)}/{place + 1}" for place in range(min(count, _EXPLAINED))]
        reasons = {}
        for key in keys:
            if self._store.check([key]):
                rank, kind, message = json.loads(self._store.get(key))
                reasons[rank] = Reason(kind, message)
        more = max(0, count - len(keys))
        return Decision(Outcome.FAILED, reasons, more=more) if reasons else None

    def forget_before(self, number: int) -> None:
        """Coordinator, once a round: delete the decision that no rank asks for any more."""
        self._store.delete_key(_decision(number - _KEPT))

    def forget(self, number: int) -> None:
        """Coordinator: delete the entries of the round."""
        if self._store.check([_reasons(number)]):
            for place in range(_EXPLAINED):
                self._store.delete_key(f"{_reasons(number)}/{place + 1}")
            self._store.delete_key(_reasons(number))
        self._store.delete_key(_decision(number))


def _decision(number: int) -> str:
    return f"decision/{number}"


def _reasons(number: int) -> str:
    return f"reasons/{number}"
