"""One rank's part in a load that reads once what several ranks need.

1. Each rank tells the coordinator which blocks it needs, and its address (:func:`offer`).
2. The coordinator says who reads which of them (:func:`~dcp_datastates.sharing.assignment.assign`).
3. Each rank reads its own units, ahead of need while there is room, and keeps each until its readers have it
   (:class:`~dcp_datastates.sharing.kept_units.KeptUnits`). It asks the other ranks for theirs, over TCP
   (:class:`~dcp_datastates.sharing.peers.Peers`). A unit that it does not receive in time it reads from storage.

The engine verifies every block in each rank, wherever its bytes come from. No step waits for another rank without a
bound of seconds, and none is a collective.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from typing_extensions import Buffer

from dcp_datastates._native import BLOCK_BYTES
from dcp_datastates.format.metadata import Note
from dcp_datastates.io.download import ReadRange
from dcp_datastates.io.requests import Request
from dcp_datastates.io.stored_files import range_reader
from dcp_datastates.process.memory_limit import largest_host_cache_bytes
from dcp_datastates.ranks.own_address import own_address
from dcp_datastates.sharing.assignment import Address, Offer, Share, Unit
from dcp_datastates.sharing.blocks import Blocks, FileBlocks, needed_blocks
from dcp_datastates.sharing.kept_units import KeptUnits
from dcp_datastates.sharing.peers import REQUEST, Peers
from dcp_datastates.storage.object_path import Location
from dcp_datastates.tiers import ram_messages as messages
from dcp_datastates.tiers import ram_protocol as protocol
from dcp_datastates.tiers.ram_protocol import Kind, Line
from dcp_datastates.tiers.ram_server import LineServer

__all__ = ["OwnOffer", "SharedReads", "offer"]

logger = logging.getLogger(__name__)

_MOST_KEPT_BYTES: Final = 256 << 20
"""Units that wait for their readers take at most 256 MiB, and in all ranks of a machine a 64th of its memory."""

_AHEAD_THREADS: Final = 8
"""Reads ahead of need at once: enough for the bandwidth of a store, and few beside those of ``download.fetch``."""

_NO_ROOM_SECONDS: Final = 0.01

_IDLE_SECONDS: Final = 15.0
"""How long a rank whose own load has ended keeps units that nobody asks for: longer than anybody waits for one."""

_LOOK_SECONDS: Final = 0.1

_THREAD_NAME: Final = "dcp_datastates-sharing"


@dataclass(frozen=True, eq=False)
class OwnOffer:
    """A rank's :class:`Offer`, and the socket at which it takes connections, in the kernel's queue until it reads."""

    offer: Offer
    listening: socket.socket

    def close(self) -> None:
        """Idempotent."""
        self.listening.close()


def offer(requests: Iterable[Request], note: Note, store_host: str) -> OwnOffer | None:
    """What this rank tells the coordinator before it reads; None if it has no address for the others.

    ``store_host``: the host of the ranks' store.
    """
    runs = needed_blocks(requests, Blocks(note.files))
    try:
        host = own_address(store_host)
        listening = protocol.listen(host)
    except OSError as error:
        logger.info("this rank reads all that it needs from storage: it has no address: %s", error)
        return None
    token = secrets.token_bytes(protocol.TOKEN_BYTES)
    address = Address(host, int(listening.getsockname()[1]), token)
    return OwnOffer(Offer(address, runs), listening)


class _Server(LineServer):
    def __init__(self, own: OwnOffer, answer: Callable[[Line], None]) -> None:
        self._answer_one = answer
        super().__init__(own.listening, own.offer.address.token, _THREAD_NAME)

    def answer(self, line: Line) -> None:
        self._answer_one(line)


class SharedReads:
    """Reads data files for this rank's load, and for other ranks: :class:`dcp_datastates.io.stored_checkpoint.Sharing`.

    Args:
        share: what the coordinator has said.
        own: what this rank has offered. This takes over the socket.
        note: of the checkpoint.
        place: where it is read from.
    """

    def __init__(self, share: Share, own: OwnOffer, note: Note, place: Location) -> None:
        self._share: Final = share
        self._blocks: Final = Blocks(note.files)
        self._paths: Final = {str(place / file.name): file for file in self._blocks.files.values()}
        self._place: Final = place
        self._storage: Final = range_reader(place / name for name in self._blocks.files)
        most = min(_MOST_KEPT_BYTES, largest_host_cache_bytes(len(share.addresses) + 1) // 16)
        self._units: Final = KeptUnits(self._read_unit, most)
        self._peers: Final = Peers(share.addresses)
        self._left: set[str] = set()
        self._lock = threading.RLock()  # guards what follows
        self._reads, self._seconds = 0, 0.0
        self._last_asked = time.monotonic()
        self._server: Final = _Server(own, self._for_others)

    @contextlib.contextmanager
    def reading(self, requests: Iterable[Request]) -> Iterator[ReadRange]:
        """A function that returns ranges of data files, for a restore of ``requests``; until the end of the block, this
        rank's units are read ahead, in the order in which the engine asks for them.
        """
        runs = needed_blocks(requests, self._blocks)
        units, stop = self._share.own_units(runs), threading.Event()
        lock = threading.Lock()  # guards units
        with ThreadPoolExecutor(_AHEAD_THREADS, thread_name_prefix=_THREAD_NAME) as executor:
            try:
                self._begin_ahead(executor, units, lock, stop)
                yield self._read_range
            finally:
                stop.set()

    def leave(self, files: Collection[str]) -> bool:
        """Read ``files`` from storage from now on, each block for this rank alone; returns whether this is new."""
        is_new = not self._left.issuperset(files)
        self._left.update(files)
        return is_new

    def end(self) -> None:
        """This rank's load has ended. Returns at once; the units that others still need are kept for them, until they
        have them, or have asked for none for 15 s.
        """
        self._peers.close()
        self._last_asked = time.monotonic()
        try:
            threading.Thread(target=self._linger, name=_THREAD_NAME, daemon=True).start()
        except RuntimeError:  # the system gives no thread
            self._stop()

    # ---- this rank's own load ------------------------------------------------------------------------

    def _begin_ahead(
        self,
        executor: ThreadPoolExecutor,
        units: Iterator[Unit],
        lock: threading.Lock,
        stop: threading.Event,
    ) -> None:
        with contextlib.suppress(RuntimeError):  # the system gives fewer threads, or none
            for _ in range(_AHEAD_THREADS):
                executor.submit(self._read_ahead, units, lock, stop)

    def _read_ahead(
        self, units: Iterator[Unit], lock: threading.Lock, stop: threading.Event
    ) -> None:
        while not stop.is_set():
            with lock:
                unit = next(units, None)
            if unit is None:
                return
            while not self._units.read_ahead(unit) and not stop.wait(_NO_ROOM_SECONDS):
                pass

    def _read_range(self, path: str, begin: int, end: int) -> Buffer:
        file = self._paths[path]
        if end > file.nbytes or file.name in self._left:  # the table of checksums; or all
            return self._read(path, begin, end)
        pieces = self._pieces(path, file, begin, end)
        first = next(pieces)
        if first.nbytes == end - begin:
            return first
        joined = bytearray(first)
        for piece in pieces:
            joined += piece
        return joined

    def _pieces(self, path: str, file: FileBlocks, begin: int, end: int) -> Iterator[memoryview]:
        first, last = begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)
        for start, stop, unit in self._share.pieces(file.first + first, file.first + last):
            low = max((start - file.first) * BLOCK_BYTES, begin)
            high = min((stop - file.first) * BLOCK_BYTES, end)
            found = None if unit is None else self._shared(unit, file, low, high)
            yield memoryview(self._read(path, low, high) if found is None else found).cast("B")

    def _shared(self, unit: Unit, file: FileBlocks, begin: int, end: int) -> memoryview | None:
        start = (unit.begin - file.first) * BLOCK_BYTES
        if unit.owner != self._share.rank:
            usual = self._seconds / self._reads if self._reads else float("inf")
            return self._peers.ask(unit, begin - start, end - start, usual)
        with self._units.lent(unit) as data:
            if data is not None:
                data = data[begin - start : end - start]
                self._units.take(unit, data.nbytes)
        return data

    def _read_unit(self, unit: Unit) -> Buffer:
        file = self._blocks.file_of(unit.begin)
        begin = (unit.begin - file.first) * BLOCK_BYTES
        end = min((unit.end - file.first) * BLOCK_BYTES, file.nbytes)
        data = self._read(str(self._place / file.name), begin, end)
        if memoryview(data).nbytes != end - begin:
            raise OSError(errno.EIO, "storage has returned another number of bytes")
        return data

    def _read(self, path: str, begin: int, end: int) -> Buffer:
        began = time.monotonic()
        data = self._storage(path, begin, end)
        if end - begin >= BLOCK_BYTES:  # not of a checksum table
            with self._lock:
                self._reads += 1
                self._seconds += time.monotonic() - began
        return data

    # ---- for the other ranks -------------------------------------------------------------------------

    def _for_others(self, line: Line) -> None:
        kind, data = line.receive(most=REQUEST.size, is_idle=True)
        if kind is not Kind.READ or data.nbytes != REQUEST.size:
            raise protocol.DamagedError
        block, begin, end = REQUEST.unpack(data)
        self._last_asked = time.monotonic()
        unit = self._own_unit(block)
        with contextlib.nullcontext() if unit is None else self._units.lent(unit) as found:
            if unit is None or found is None or not begin < end <= found.nbytes:
                error = OSError(errno.ENOENT, "it is not kept")
                line.send(Kind.ERROR, messages.packed_error(error))
                return
            line.send(Kind.OK, found[begin:end])
            self._units.take(unit, end - begin)
        self._last_asked = time.monotonic()

    def _own_unit(self, block: int) -> Unit | None:
        if block >= 1 << 62:
            return None
        _, _, unit = next(self._share.pieces(block, block + 1))
        own = unit is not None and unit.begin == block and unit.owner == self._share.rank
        return unit if own else None

    def _linger(self) -> None:
        own = sum(1 for _ in self._share.own_units(self._share.spans[:, :2]))
        while self._units.gone < own:
            if time.monotonic() - self._last_asked > _IDLE_SECONDS:
                break
            time.sleep(_LOOK_SECONDS)
        self._stop()

    def _stop(self) -> None:
        self._server.close()
        self._units.clear()
