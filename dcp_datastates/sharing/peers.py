"""The other ranks, as this one asks them for the units that they own.

Their failures are not failures of the load: without an answer, a rank reads storage. A rank that fails, or is slow, is
asked no more.
"""

from __future__ import annotations

import errno
import logging
import struct
import threading
import time
from collections.abc import Mapping
from typing import Final

from dcp_datastates._native import SEGMENT_BYTES
from dcp_datastates.sharing.assignment import Address, Unit
from dcp_datastates.tiers.ram_protocol import DamagedError, Kind, Line

__all__ = ["REQUEST", "Peers"]

logger = logging.getLogger(__name__)

REQUEST: Final = struct.Struct("!QQQ")
"""``READ`` has the first block of a unit, and the range of its bytes. The answer is ``OK`` with these, or ``ERROR``."""

_CONNECT_SECONDS: Final = 3.0
_ANSWER_SECONDS: Final = 10.0
"""For one unit: some time above what a busy store takes."""

_FAIR: Final = 4.0
"""An answer may take so many times longer than this rank's own reads of storage. Waiting beyond that is lost."""

_MOST_LOST_BY_ONE: Final = 20.0
_MOST_LOST: Final = 60.0
"""Seconds lost, over all threads that wait, after which a rank is asked no more, or none is. Answers that come sooner
than :data:`_FAIR` make up for late ones.
"""

_MOST_LINES: Final = 32
"""Connections to all peers together, if there are fewer peers; else one to each."""


class _Peer:
    """One other rank. Up to ``lines`` threads ask at once, each by a connection of its own; others wait."""

    def __init__(self, address: Address, lines: int) -> None:
        self.address: Final = address
        self.turns: Final = threading.BoundedSemaphore(lines)
        self.idle: list[Line] = []
        self.lost = 0.0
        self.is_left = False

    def connected(self) -> Line:
        line = Line.to(self.address.host, self.address.port, _CONNECT_SECONDS)
        try:
            line.end_within(_ANSWER_SECONDS)
            line.send(Kind.HELLO, self.address.token)
            if line.receive(most=SEGMENT_BYTES)[0] is not Kind.OK:
                raise PermissionError(errno.EACCES, "it does not admit this rank")
        except BaseException:
            line.close()
            raise
        return line


class Peers:
    """The ranks at ``addresses``. Any thread."""

    def __init__(self, addresses: Mapping[int, Address]) -> None:
        lines = max(1, _MOST_LINES // max(1, len(addresses)))
        self._peers = {rank: _Peer(address, lines) for rank, address in addresses.items()}
        self._lock = threading.RLock()  # guards the state of all peers, and what follows
        self._lost = 0.0
        self._is_closed = False

    def ask(self, unit: Unit, begin: int, end: int, usual: float) -> memoryview | None:
        """The bytes [begin, end) of ``unit``, from its owner; None if it does not give them.

        ``usual``: the seconds that this rank's own reads of storage take.
        """
        peer, began = self._peers[unit.owner], time.monotonic()
        if not peer.turns.acquire(timeout=_ANSWER_SECONDS):
            return None  # those whose turn it is are charged for that
        try:
            return self._ask_in_turn(peer, unit, begin, end, began, usual)
        finally:
            peer.turns.release()

    def _ask_in_turn(
        self, peer: _Peer, unit: Unit, begin: int, end: int, began: float, usual: float
    ) -> memoryview | None:
        with self._lock:
            if peer.is_left or self._is_closed:
                return None
            line = peer.idle.pop() if peer.idle else None
        try:
            if line is None:
                line = peer.connected()
            data = _ask(line, REQUEST.pack(unit.begin, begin, end), end - begin)
        except BaseException as error:
            if line is not None:
                line.close()
            if not isinstance(error, OSError):
                raise
            self._leave(unit.owner, error)
            return None
        self._give_back(peer, line)
        self._charge(unit.owner, time.monotonic() - began - _FAIR * usual)
        return data

    def close(self) -> None:
        """Ask no more."""
        with self._lock:
            self._is_closed = True
            lines = [line for peer in self._peers.values() for line in peer.idle]
        for line in lines:
            line.close()

    def _give_back(self, peer: _Peer, line: Line) -> None:
        with self._lock:
            if not self._is_closed:
                peer.idle.append(line)
                return
        line.close()

    def _charge(self, rank: int, lost: float) -> None:
        """An answer has cost so many seconds, or has come sooner than it had to."""
        peer = self._peers[rank]
        with self._lock:
            peer.lost = max(0.0, peer.lost + lost)
            self._lost = max(0.0, self._lost + lost)
            all_are_slow = self._lost > _MOST_LOST
            if not (all_are_slow or peer.lost > _MOST_LOST_BY_ONE):
                return
        for each in self._peers if all_are_slow else [rank]:
            self._leave(each)

    def _leave(self, rank: int, error: OSError | None = None) -> None:
        """Ask the rank no more."""
        peer = self._peers[rank]
        with self._lock:
            if peer.is_left:
                return
            peer.is_left = True
        logger.log(
            # A rank that has ended its load long before this one takes no connections any more.
            logging.WARNING if error is None or isinstance(error, TimeoutError) else logging.INFO,
            "rank %d (%s:%d) does not pass on what it reads for this rank, which reads it from storage: %s",
            *(rank, peer.address.host, peer.address.port),
            error or f"its answers take longer than {_FAIR:.0f} times what storage takes",
        )


def _ask(line: Line, request: bytes, nbytes: int) -> memoryview | None:
    line.end_within(_ANSWER_SECONDS)
    line.send(Kind.READ, request)
    kind, data = line.receive(most=SEGMENT_BYTES)
    if kind is Kind.ERROR:
        return None
    if kind is not Kind.OK or data.nbytes != nbytes:
        raise DamagedError
    return data
