"""One rank's part in a load that reads once what several ranks need.

1. Each rank offers to share: it tells the coordinator which blocks it needs, and its address. Both this and the answer
   travel as bytes with what the ranks tell each other anyway (:class:`JointReads`).
2. The coordinator says who reads which of them (:func:`~dcp_datastates.sharing.assignment.assign`).
3. Each rank reads its own units, ahead of need while there is room, and keeps each until its readers have it
   (:class:`OwnUnits`). It asks the other ranks for theirs, over TCP
   (:mod:`dcp_datastates.wire`). A unit that it does not receive in time it reads from storage.

The engine verifies every block in each rank, wherever its bytes come from. No step waits for another rank without a
bound of seconds, and none is a collective.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import socket
import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from typing_extensions import Buffer

from dcp_datastates._native import BLOCK_BYTES
from dcp_datastates.format.metadata_table import MetadataTable, Note
from dcp_datastates.io.committed import range_reader
from dcp_datastates.io.reads import Reads
from dcp_datastates.io.streams import ReadRange
from dcp_datastates.process.memory_limit import largest_host_cache_bytes
from dcp_datastates.ranks.rank_set import RankSet
from dcp_datastates.sharing.assignment import (
    FileBlocks,
    Offer,
    Share,
    Unit,
    assign,
    blocks_of,
    needed_blocks,
)
from dcp_datastates.storage.object_path import Location, ObjectPath
from dcp_datastates.wire.line import Client, DamagedError, Line, RefusedError
from dcp_datastates.wire.secret import Address
from dcp_datastates.wire.server import Server, listen

logger = logging.getLogger(__name__)

_MOST_KEPT_BYTES: Final = 256 << 20
"""Units that wait for their readers take at most 256 MiB, and in all ranks of a machine a 64th of its memory."""

_AHEAD_THREADS: Final = 8
"""Reads ahead of need at once: enough for the bandwidth of a store, and few beside those of ``download.fetch``."""

_NO_ROOM_SECONDS: Final = 0.01

_ANSWER_SECONDS: Final = 10.0
"""For a connection, and for one unit: some time above what a busy store takes. A slower rank is asked no more."""

_KEPT_SECONDS: Final = 15.0
"""How long a rank whose own load has ended keeps what the others have not taken: longer than they wait for an answer.
"""

_MOST_LINES: Final = 32
"""Connections to all other ranks together, if there are fewer ranks; else one to each, which has a thread for each."""

_THREAD_NAME: Final = "dcp_datastates-sharing"

_IN_MEMORY: Final = ("ram://", "node://", "memory://")
_MOUNTS: Final = Path("/proc/self/mountinfo")
_NETWORK: Final = (
    *("afs", "beegfs", "ceph", "gpfs", "lustre", "panfs", "pvfs2", "wekafs"),
    *("cifs", "nfs", "nfs4", "smb", "smb3", "fuse"),
)
"""Types of file systems whose files lie on other machines; ``fuse``: so do most of those in user space."""


@dataclass(eq=False)
class _Kept:
    """What is kept of a unit: its bytes, when they are read (None: they could not be)."""

    data: Future[memoryview | None] = field(default_factory=Future)
    taken: int = 0
    """Bytes, by all readers together."""
    in_use: int = 0
    """By so many readers now."""


class OwnUnits:
    """``units``, which are read by ``read``; at most ``most_bytes`` of them are kept. Any thread.

    A unit goes when all of its readers have taken it, when a reader needs the room, or if it could not be read. It does
    not come back: a reader that still needs it reads storage.
    """

    def __init__(
        self, read: Callable[[Unit], Buffer], units: Iterable[Unit], most_bytes: int
    ) -> None:
        self.are_gone: Final = threading.Event()
        """Whether all have been read, and are kept no more."""
        self._read = read
        self._lock = threading.RLock()  # guards what follows
        self._room: float = most_bytes
        self._left = set(units)
        self._kept: dict[Unit, _Kept] = {}  # the oldest first
        if not self._left:
            self.are_gone.set()

    def read_ahead(self, unit: Unit) -> bool:
        """Read the unit, unless that was done before. False: there is no room now."""
        return self._begun(unit) is not None or unit not in self._left

    @contextlib.contextmanager
    def taken(self, unit: Unit, begin: int, end: int) -> Iterator[memoryview | None]:
        """The bytes [begin, end) of the unit, which count as taken by one reader after the block: kept, or read now, if
        need be in the place of the oldest that nobody uses. None: it has gone, all of the room is in use, or there are
        no such bytes. Waits for a read that has begun.
        """
        kept = self._begun(unit, is_used=True)
        if kept is None:
            yield None
            return
        whole, part = None, None
        try:
            whole = kept.data.result()
            if whole is not None and 0 <= begin < end <= whole.nbytes:
                part = whole[begin:end]
            yield part
        finally:
            with self._lock:
                kept.in_use -= 1
                kept.taken += 0 if part is None else part.nbytes
                if whole is not None and kept.taken >= unit.readers * whole.nbytes:
                    self._drop(unit)

    def close(self) -> None:
        """Keep nothing any more."""
        with self._lock:
            self._room = -math.inf
            for unit in list(self._kept):
                self._drop(unit)

    def _begun(self, unit: Unit, is_used: bool = False) -> _Kept | None:
        """What is kept of the unit, read here unless that was begun before. None: it has gone, or has no room.
        ``is_used``: makes room for it, and counts as a use from now on.
        """
        with self._lock:
            if is_new := (kept := self._kept.get(unit)) is None and unit in self._left:
                if is_used:
                    self._make_room(unit)
                if unit.nbytes > self._room:
                    return None
                self._room -= unit.nbytes
                self._kept[unit] = kept = _Kept()
            if kept is not None:
                kept.in_use += is_used
        if kept is not None and is_new:
            self._fill(unit, kept)
        return kept

    def _make_room(self, unit: Unit) -> None:
        for other, each in list(self._kept.items()):
            if unit.nbytes > self._room and each.data.done() and not each.in_use:
                self._drop(other)

    def _fill(self, unit: Unit, new: _Kept) -> None:
        try:
            new.data.set_result(memoryview(self._read(unit)).cast("B"))
        except BaseException as error:
            with self._lock:
                self._drop(unit)
            new.data.set_result(None)
            if not isinstance(error, Exception):
                raise

    def _drop(self, unit: Unit) -> None:
        if self._kept.pop(unit, None) is not None:
            self._room += unit.nbytes
        self._left.discard(unit)
        if not self._left:
            self.are_gone.set()


class SharedReads:
    """Reads data files for this rank's load, and for other ranks: :class:`dcp_datastates.io.restore.Sharing`.

    Args:
        share: what the coordinator has said.
        listening: the socket at this rank's ``address``, which this takes over.
        note: of the checkpoint.
        place: where it is read from.
    """

    def __init__(
        self, share: Share, listening: socket.socket, address: Address, note: Note, place: Location
    ) -> None:
        self._share: Final = share
        self._blocks: Final = blocks_of(note.files)
        self._files: Final = {str(place / name): file for name, file in self._blocks.items()}
        self._in_order: Final = list(self._files.items())
        self._storage: Final = range_reader(place / name for name in self._blocks)
        lines = max(1, _MOST_LINES // max(1, len(share.addresses)))
        self._peers: Final = {
            rank: Client([address], most_idle=lines) for rank, address in share.addresses.items()
        }
        self._turns: Final = {rank: threading.BoundedSemaphore(lines) for rank in self._peers}
        """Of the threads that ask a rank: more would be as many threads there, for each of thousands of ranks."""
        self._silent: set[int] = set()
        """Other ranks that are asked no more."""
        self._own: Final = {unit.begin: unit for unit in share.units if unit.owner == share.rank}
        most = min(_MOST_KEPT_BYTES, largest_host_cache_bytes(len(self._peers) + 1) // 16)
        self._units: Final = OwnUnits(self._read_unit, self._own.values(), most)
        self._left: set[str] = set()
        self._server: Final = Server(listening, address, _THREAD_NAME, self._serve)

    @contextlib.contextmanager
    def reading(self, reads: Reads) -> Iterator[ReadRange]:
        """A function that returns ranges of data files, for a restore of ``reads``; until the end of the block, this
        rank's units are read ahead, in the order in which the engine asks for them.
        """
        units = self._share.own_units(needed_blocks(reads, self._blocks))
        units.reverse()
        stop = threading.Event()

        def read_ahead() -> None:
            with contextlib.suppress(IndexError):  # all have been begun
                while not stop.is_set():
                    unit = units.pop()
                    while not self._units.read_ahead(unit) and not stop.wait(_NO_ROOM_SECONDS):
                        pass

        with ThreadPoolExecutor(_AHEAD_THREADS, thread_name_prefix=_THREAD_NAME) as executor:
            try:
                with contextlib.suppress(RuntimeError):  # the system gives fewer threads, or none
                    for _ in range(_AHEAD_THREADS):
                        executor.submit(read_ahead)
                yield self._read_range
            finally:
                stop.set()

    def leave(self, files: Collection[str]) -> bool:
        """Read ``files`` from storage from now on, each block for this rank alone; returns whether this is new."""
        is_new = not self._left.issuperset(files)
        self._left.update(files)
        return is_new

    def end(self, all_have_read: bool = False) -> None:
        """This rank's load has ended. Returns immediately. Unless ``all_have_read``, what the others have not taken yet
        is kept for them, for at most 15 s.
        """
        for peer in self._peers.values():
            peer.close()
        if not all_have_read:
            later = threading.Thread(
                target=self._end, args=[_KEPT_SECONDS], name=_THREAD_NAME, daemon=True
            )
            with contextlib.suppress(RuntimeError):  # the system gives no thread
                later.start()
                return
        self._end(0.0)

    def _end(self, seconds: float) -> None:
        self._units.are_gone.wait(seconds)
        self._server.close()
        self._units.close()

    # ---- this rank's own load ------------------------------------------------------------------------

    def _read_range(self, path: str, begin: int, end: int) -> Buffer:
        file = self._files[path]
        if end > file.nbytes or file.name in self._left:  # the table of checksums; or all
            return self._storage(path, begin, end)
        pieces = list(self._pieces(path, file, begin, end))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _pieces(self, path: str, file: FileBlocks, begin: int, end: int) -> Iterator[memoryview]:
        first, last = begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)
        for start, stop, unit in self._share.pieces(file.first + first, file.first + last):
            low = max((start - file.first) * BLOCK_BYTES, begin)
            high = min((stop - file.first) * BLOCK_BYTES, end)
            data = None
            if unit is not None:
                at = (unit.begin - file.first) * BLOCK_BYTES
                ask = self._taken if unit.owner == self._share.rank else self._asked
                data = ask(unit, low - at, high - at)
            yield memoryview(self._storage(path, low, high) if data is None else data).cast("B")

    def _taken(self, unit: Unit, begin: int, end: int) -> Buffer | None:
        with self._units.taken(unit, begin, end) as data:
            return data

    def _asked(self, unit: Unit, begin: int, end: int) -> Buffer | None:
        """The bytes [begin, end) of another rank's unit; None if it does not give them."""
        peer, turns = self._peers[unit.owner], self._turns[unit.owner]
        if not turns.acquire(timeout=_ANSWER_SECONDS):
            return None
        try:
            if unit.owner in self._silent:
                return None
            words = ["unit", unit.begin, begin, end]
            _, data = peer.ask(words, most=end - begin, seconds=_ANSWER_SECONDS)
            if data.nbytes != end - begin:
                raise DamagedError
            return data
        except RefusedError:  # it is not kept
            return None
        except OSError as error:
            if unit.owner not in self._silent:
                self._silent.add(unit.owner)
                logger.log(
                    # A rank that has ended its load long before this one takes no connections any more.
                    logging.INFO if isinstance(error, ConnectionError) else logging.WARNING,
                    "rank %d (%s:%d) does not pass on what it reads for this rank, which reads it from storage: %s",
                    *(unit.owner, *peer.addresses[0][:2], error),
                )
            return None
        finally:
            turns.release()

    def _read_unit(self, unit: Unit) -> Buffer:
        at = bisect_right(self._in_order, unit.begin, key=lambda each: each[1].first) - 1
        path, file = self._in_order[at]
        begin = (unit.begin - file.first) * BLOCK_BYTES
        end = min(begin + unit.nbytes, file.nbytes)
        data = self._storage(path, begin, end)
        if memoryview(data).nbytes != end - begin:
            raise OSError(errno.EIO, "storage has returned another number of bytes")
        return data

    # ---- for the other ranks -------------------------------------------------------------------------

    def _serve(self, line: Line) -> None:
        for words, _ in line.requests():
            match words:
                case ["unit", int(block), int(begin), int(end)] if block in self._own:
                    with self._units.taken(self._own[block], begin, end) as data:
                        if data is not None:
                            line.answer(None, data)
                            continue
            line.refuse(OSError(errno.ENOENT, "it is not kept"))


# ---- what the ranks tell each other before ------------------------------------------------------------


class JointReads:
    """This rank's side. One thread uses it. :meth:`close` ends what was offered and not taken.

    Args:
        wanted: whether to share; None: where it pays.
        rank_set: the ranks that load.
        place: where they read from.
    """

    def __init__(self, wanted: bool | None, rank_set: RankSet, place: Location) -> None:
        self._wanted = rank_set.world > 1 and (pays(place) if wanted is None else wanted)
        self._rank_set = rank_set
        self._place = place
        self._own: tuple[socket.socket, Address] | None = None
        """Where the other ranks reach this one. Until it reads, their connections wait in the kernel's queue."""
        self.sharing: SharedReads | None = None
        """This rank's shared reads, once it has the first rank's answer; None if it shares nothing."""

    def offer(self, reads: Callable[[], Reads], table: MetadataTable) -> bytes:
        """What this rank tells the first one, before it reads; empty if it shares nothing. Only if it shares, it asks
        for its ``reads``.
        """
        self.close()
        if not self._wanted:
            return b""
        runs = needed_blocks(reads(), blocks_of(table.note.files))
        try:
            self._own = _, address = listen(self._rank_set.address)
        except OSError as error:
            logger.info("this rank shares no reads: it has no address for the others: %s", error)
            return b""
        return Offer(tuple(address), runs.ravel()).encode()

    def take(self, share: bytes, table: MetadataTable) -> None:
        """Take the first rank's answer."""
        if self._own is not None and share:
            try:
                self.sharing = SharedReads(Share.decode(share), *self._own, table.note, self._place)
                self._own = None
                return
            except RuntimeError as error:
                logger.warning("this rank shares no reads: the system gives no thread: %s", error)
        self.close()  # the others are refused immediately

    def close(self, all_have_read: bool = False) -> None:
        """Idempotent. ``all_have_read``: no other rank needs anything of this one any more."""
        if self._own is not None:
            self._own[0].close()
        if self.sharing is not None:
            self.sharing.end(all_have_read)
        self._own = self.sharing = None


def assigned(offers: Sequence[bytes]) -> list[bytes]:
    """The first rank's answers to the offers of all ranks."""
    if not any(offers):
        return list(offers)
    shares = assign({rank: Offer.decode(each) for rank, each in enumerate(offers) if each})
    return [shares[rank].encode() if rank in shares else b"" for rank in range(len(offers))]


def pays(place: Location, mounts: Path = _MOUNTS) -> bool:
    """Whether the place is in an object store, or in a network file system, by the type of its mount in ``mounts``.

    The memory of the job's nodes (``ram://``) is no slower than the other ranks. On a local disk, passing bytes on was
    measured to be slower than reading them again from the page cache.
    """
    if isinstance(place, ObjectPath):
        return not place.root.startswith(_IN_MEMORY)
    kind = _file_system(place, mounts)
    return kind in _NETWORK or kind.startswith("fuse.")


def _file_system(path: Path, mounts: Path) -> str:
    """The type of the file system with ``path``; empty if it is not known."""
    try:
        number = os.stat(path).st_dev
        device = f"{os.major(number)}:{os.minor(number)}"
        for line in mounts.read_text(errors="replace").splitlines():
            fields, _, kind = line.partition(" - ")
            if fields.split()[2] == device:
                return kind.split()[0]
    except (OSError, IndexError):
        pass
    return ""
