"""How the ranks of one load agree on what they read for each other: an offer of each rank, and the first rank's answer.

Both travel as bytes with what the ranks tell each other anyway.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from dcp_datastates.format.metadata_table import MetadataTable
from dcp_datastates.io.reads import Reads
from dcp_datastates.ranks.rank_set import RankSet
from dcp_datastates.sharing.assignment import Blocks, Offer, Share, assign, needed_blocks
from dcp_datastates.sharing.shared_reads import SharedReads
from dcp_datastates.storage.object_path import Location, ObjectPath
from dcp_datastates.wire.secret import Address
from dcp_datastates.wire.server import listen

logger = logging.getLogger(__name__)

_IN_MEMORY: Final = ("ram://", "node://", "memory://")

_PARALLEL: Final = ("afs", "beegfs", "ceph", "gpfs", "lustre", "panfs", "pvfs2", "wekafs")
_EXPORTED: Final = ("cifs", "nfs", "nfs4", "smb", "smb3")
_NETWORK: Final = frozenset((*_PARALLEL, *_EXPORTED, "fuse"))
"""Types of file systems whose files lie on other machines; ``fuse``: so do most of those in user space."""

_MOUNTS: Final = Path("/proc/self/mountinfo")


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
        runs = needed_blocks(reads(), Blocks(table.note.files))
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
                own, mine = self._own, Share.decode(share)
                self.sharing = SharedReads(mine, *own, table.note, self._place)
            except RuntimeError as error:
                logger.warning("this rank shares no reads: the system gives no thread: %s", error)
            else:
                self._own = None
                return
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
