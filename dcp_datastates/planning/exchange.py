"""The messages of planning between a rank and the coordinator.

A rank offers its local plan, by digest alone if the coordinator has cached it. The coordinator answers with the rank's
share, by digest alone if the rank has cached it. With its vote, the rank reports the places of its share, by digest
again if the coordinator has the report: a report leaves out the attempt's directory, so it is the same from save to
save. So a save whose structure is unchanged sends a few bytes each way.
"""

from __future__ import annotations

from dataclasses import dataclass

from dcp_datastates.format.chunk_table import Ints
from dcp_datastates.planning.packing import Message, digest_of
from dcp_datastates.process.lazily import lazily

__all__ = ["Answer", "Offer", "RankReport", "Report"]


@dataclass(frozen=True)
class Offer(Message):
    """A rank's message: its local plan."""

    digest: bytes
    share: bytes
    """Digest of the share that this rank last received for the plan; empty if none."""
    data: bytes | None
    """The encoded plan; None if the coordinator has cached it."""
    keep: tuple[bytes, ...] = ()
    """With ``data``: the digests of plans that this rank will not send again. The coordinator can drop all others."""


@dataclass(frozen=True)
class Answer(Message):
    """The coordinator's message: the rank's share of the global plan."""

    global_plan: bytes
    """The name of the global plan in the coordinator's cache."""
    digest: bytes
    data: bytes | None
    """The encoded share; None if the rank has cached it."""


@dataclass(frozen=True, eq=False)
class Report(Message):
    """The places of a share's items, in their order: file, offset and length (bytes).

    ``files``: name (below the attempt's directory), size in bytes, and offset of the checksum table.
    """

    files: tuple[tuple[str, int, int], ...]
    numbers: Ints
    offsets: Ints
    lengths: Ints

    @lazily
    def digest(self) -> bytes:
        return digest_of(self.encode())


@dataclass(frozen=True)
class RankReport(Message):
    """What a rank tells of its share that is written: a report, by digest alone if the coordinator has it."""

    digest: bytes
    data: bytes | None
    samples: bytes = b""
    """Samples of the replicas that this rank shares with others; see ``replicas.py``."""
