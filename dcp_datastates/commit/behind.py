"""What happens when saves come faster than they commit: wait, skip this one, or drop the oldest unbegun.

The last two are decided by all ranks together, for a save that only some of them left out could never be committed.
That vote cannot queue behind the late commit that it is about: it has a tree of gloo groups and a thread of its own,
from the first question on. ``async_save`` does not wait for it; DCP's thread does, before it looks at the state, so
nothing of a save is read that may yet be left out.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final, Protocol

from dcp_datastates.commit.gloo_tree import GlooTree, GroupBroken
from dcp_datastates.commit.heart import Heart
from dcp_datastates.commit.peers import Peers
from dcp_datastates.commit.worker import Worker
from dcp_datastates.config import WhenBehind
from dcp_datastates.errors import CheckpointSkipped
from dcp_datastates.forks import ProcessLock, after_fork
from dcp_datastates.waiting import WaitLog

__all__ = ["Policy", "Waiting", "await_room", "enter", "in_flight"]

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.1

_CLOSE_SECONDS: Final = 5.0

_DEPTH: Final = 64
"""How many saves back one may be dropped."""

_ALL: Final = (1 << _DEPTH) - 1


class Waiting(Protocol):
    """A save, as those see it who wait for it."""

    path: Path | None
    exit_timeout: float
    doing: str

    @property
    def over(self) -> bool:
        """Whether its outcome is known."""

    @property
    def begun(self) -> bool:
        """Whether DCP has begun to plan it, or it was left out."""

    def wait_briefly(self, seconds: float) -> None:
        """Return when it is over, or after ``seconds``. Starts its reads."""

    def give_up(self, why: str) -> None:
        """It is over here: what becomes of it is not waited for."""

    def skip(self, error: CheckpointSkipped) -> None:
        """Leave it out."""

    def decided(self) -> None:
        """Whether to leave it out has been decided; DCP's thread may go on."""


_lock = ProcessLock()  # guards _saves
_saves: list[Waiting] = []


def in_flight() -> list[Waiting]:
    """This process's asynchronous saves whose outcome is not known, oldest first."""
    global _saves
    with _lock:
        _saves = [save for save in _saves if not save.over]
        return list(_saves)


def enter(save: Waiting) -> None:
    """``save`` is in flight from now on."""
    with _lock:
        _saves.append(save)


def await_room(limit: int) -> None:
    """Block, without the GIL, until fewer than ``limit`` saves are in flight. Opens their windows.

    Every save ends within its ``commit_timeout`` without progress, so this does, too.
    """
    log = WaitLog(logger, "async_save")
    while len(waiting := in_flight()) >= limit:
        oldest = waiting[0]
        oldest.wait_briefly(_POLL_SECONDS)
        log.look(
            f"{len(waiting)} saves are in flight (max_in_flight={limit}), the oldest to {str(oldest.path)!r}: "
            f"{oldest.doing}"
        )


class Policy:
    """The ranks' common decision about saves that come too fast; one per set of ranks.

    Every rank asks about the same saves in the same order, as it saves the same.
    """

    def __init__(self, peers: Peers, heart: Heart | None) -> None:
        self._peers = peers
        self._heart = heart
        self._worker = Worker("dcp_datastates-policy")
        self._lock = ProcessLock()  # guards _asked and _recent
        self._asked = 0
        self._recent: dict[int, Waiting] = {}  # by number of the question
        self._tree = GlooTree(peers, "policy")

    def ask(self, save: Waiting, limit: int, mode: WhenBehind) -> None:
        """Whether to leave out ``save``, or an older one. Returns at once; ``save.decided()`` follows."""
        with self._lock:
            number = self._asked
            self._asked += 1
            self._recent = {
                asked: other
                for asked, other in self._recent.items()
                if number - asked <= _DEPTH and not other.over
            }
            behind = len([other for other in in_flight() if not _left_out(other)]) >= limit
            mask = sum(
                1 << (number - asked - 1)
                for asked, other in self._recent.items()
                if not other.begun
            )
            self._recent[number] = save
        if not self._worker.post(lambda: self._decide(save, number, behind, mask, mode)):
            save.decided()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._worker.close(_CLOSE_SECONDS)
        self._tree.close()

    def _decide(
        self, save: Waiting, number: int, behind: bool, mask: int, mode: WhenBehind
    ) -> None:
        try:
            asked, least, late, unable = self._ask_all(number, behind, mask)
        except GroupBroken as broken:
            # The saves take their course; if a rank is lost, their commit will say so.
            logger.warning("the ranks could not decide whether to leave out a save: %s", broken)
            save.decided()
            return
        try:
            if asked != least:
                logger.error("the ranks ask about different saves; none is left out")
            elif late:
                self._leave_out(save, number, _ALL & ~unable, mode)
        finally:
            save.decided()

    def _leave_out(self, save: Waiting, number: int, common: int, mode: WhenBehind) -> None:
        if mode == "skip":
            save.skip(CheckpointSkipped("earlier saves are late: all ranks skip this one (skip)"))
            return
        if common:
            with self._lock:
                oldest = self._recent.get(number - common.bit_length())
            if oldest is not None:
                oldest.skip(
                    CheckpointSkipped(
                        "a newer save came before this one had begun: all ranks drop it (newest)"
                    )
                )

    def _ask_all(self, number: int, behind: bool, mask: int) -> tuple[int, int, bool, int]:
        """The greatest and the least number asked about, whether any rank is behind, and which saves not every rank
        can leave out.
        """
        unable = [1 - (mask >> bit & 1) for bit in range(_DEPTH)]
        said = [number, -number, int(behind), *unable]
        if self._heart is not None:
            try:
                self._tree.join(self._check)
                said = self._tree.max(said, self._check)
            except GroupBroken:
                self._tree.leave()
                raise
        return said[0], -said[1], bool(said[2]), sum(bit << at for at, bit in enumerate(said[3:]))

    def _check(self) -> None:
        assert self._heart is not None
        if losses := self._heart.losses():
            raise GroupBroken("; ".join(map(str, losses)))


def _left_out(save: Waiting) -> bool:
    return getattr(save, "left_out", False)


@after_fork
def _forget_in_child() -> None:
    _saves.clear()
