"""The messages of planning between a rank and the coordinator.

A rank offers its local plan, by digest alone if the coordinator has cached it. The coordinator answers with the rank's
share, by digest alone if the rank has cached it. With its vote, the rank reports the places of its share, by digest
again if the coordinator has the report: a report leaves out the attempt's directory, so it is the same from save to
save. So a save whose structure is unchanged sends a few bytes each way.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass
from typing import Final

from dcp_datastates.format.chunk_table import Ints
from dcp_datastates.planning.packing import pack, pack_ints, unpack, unpack_ints

__all__ = ["Answer", "Offer", "RankReport", "Report"]

_REPORT: Final = b"dsre\x01"
_IN_FULL: Final = b"dsto\x01"
_BY_DIGEST: Final = b"dsto\x02"


@dataclass(frozen=True)
class Offer:
    """A rank's message: its local plan."""

    digest: bytes
    share: bytes
    """Digest of the share that this rank last received for the plan; empty if none."""
    data: bytes | None
    """The encoded plan; None if the coordinator has cached it."""
    keep: tuple[bytes, ...] = ()
    """With ``data``: the digests of plans that this rank will not send again. The coordinator can drop all others."""

    def encode(self) -> bytes:
        data = [] if self.data is None else [self.data]
        keep = b"".join(self.keep)
        return pack(_IN_FULL if data else _BY_DIGEST, [self.digest, self.share, keep, *data])

    @staticmethod
    def decode(encoded: bytes) -> Offer:
        """ValueError: the bytes are not from :meth:`encode`."""
        (digest, share, keep), data = _unpack(encoded, 3)
        size = len(digest)
        if size and len(keep) % size:
            raise ValueError(f"{len(keep)} bytes are no digests of {size} bytes")
        kept = tuple(keep[at : at + size] for at in range(0, len(keep), size or 1))
        return Offer(digest, share, data, kept)


@dataclass(frozen=True)
class Answer:
    """The coordinator's message: the rank's share of the global plan."""

    global_plan: bytes
    """The name of the global plan in the coordinator's cache."""
    digest: bytes
    data: bytes | None
    """The encoded share; None if the rank has cached it."""

    def encode(self) -> bytes:
        data = [] if self.data is None else [self.data]
        return pack(_IN_FULL if data else _BY_DIGEST, [self.global_plan, self.digest, *data])

    @staticmethod
    def decode(encoded: bytes) -> Answer:
        """ValueError: the bytes are not from :meth:`encode`."""
        (global_plan, digest), data = _unpack(encoded, 2)
        return Answer(global_plan, digest, data)


@dataclass(frozen=True, eq=False)
class Report:
    """The places of a share's items, in their order: file, offset and length (bytes).

    ``files``: name (below the attempt's directory), size in bytes, and offset of the checksum table.
    """

    files: tuple[tuple[str, int, int], ...]
    numbers: Ints
    offsets: Ints
    lengths: Ints

    def encode(self) -> bytes:
        columns = (self.numbers, self.offsets, self.lengths)
        files = json.dumps(self.files).encode()
        return pack(_REPORT, [files, *map(pack_ints, columns)])

    @staticmethod
    def decode(data: bytes | memoryview) -> Report:
        """ValueError: the bytes are not from :meth:`encode`."""
        files, *columns = unpack(_REPORT, 4, data)
        first = unpack_ints(columns[0], -1)
        others = [unpack_ints(column, len(first)) for column in columns[1:]]
        names = tuple((name, nbytes, table) for name, nbytes, table in json.loads(bytes(files)))
        return Report(names, first, *others)

    @functools.cached_property
    def digest(self) -> bytes:
        return hashlib.blake2b(self.encode(), digest_size=16).digest()


@dataclass(frozen=True)
class RankReport:
    """What a rank tells of its share that is written: a report, by digest alone if the coordinator has it."""

    digest: bytes
    data: bytes | None
    samples: bytes = b""
    """Samples of the replicas that this rank shares with others; see ``replicas.py``."""

    def encode(self) -> bytes:
        data = [] if self.data is None else [self.data]
        return pack(_IN_FULL if data else _BY_DIGEST, [self.digest, self.samples, *data])

    @staticmethod
    def decode(encoded: bytes) -> RankReport:
        """ValueError: the bytes are not from :meth:`encode`."""
        (digest, samples), data = _unpack(encoded, 2)
        return RankReport(digest, data, samples)


def _unpack(encoded: bytes, count: int) -> tuple[list[bytes], bytes | None]:
    """The ``count`` parts that each message has, and what only a message in full has."""
    if encoded.startswith(_IN_FULL):
        *parts, data = map(bytes, unpack(_IN_FULL, count + 1, encoded))
        return parts, data
    return list(map(bytes, unpack(_BY_DIGEST, count, encoded))), None
