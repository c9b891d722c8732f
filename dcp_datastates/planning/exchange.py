"""The messages of planning between a rank and the coordinator: what the other side has is named by its digest.

A rank offers its local plan, and the coordinator answers with the rank's share; with its vote, the rank reports where
the items of its share are. A report leaves out the attempt's directory, so it is the same from save to save. So a save
whose structure is unchanged sends a few bytes each way. In each message, what is empty is not sent in full.
"""

from __future__ import annotations

from dataclasses import dataclass

from dcp_datastates.format.ragged import Ints
from dcp_datastates.planning.packing import Message, Named


@dataclass(frozen=True)
class Offer(Message):
    """A rank's message: its local plan."""

    digest: bytes
    share: bytes
    """Digest of the share that this rank last received for the plan; empty if none."""
    data: bytes = b""
    """The encoded plan."""


@dataclass(frozen=True)
class Answer(Message):
    """The coordinator's message: the rank's share of the global plan."""

    digest: bytes
    report: bytes
    """Digest of the rank's report that the coordinator has; empty if none."""
    data: bytes = b""
    """The encoded share."""


@dataclass(frozen=True, eq=False)
class Report(Named):
    """The places of a share's items, in their order: file, offset and length (bytes).

    ``files``: name (below the attempt's directory), size in bytes, and offset of the checksum table.
    """

    files: tuple[tuple[str, int, int], ...]
    numbers: Ints
    offsets: Ints
    lengths: Ints

    def __post_init__(self) -> None:
        if not len(self.numbers) == len(self.offsets) == len(self.lengths):
            raise ValueError("the columns of a report have different lengths")


@dataclass(frozen=True)
class RankReport(Message):
    """What a rank tells of its share that is written."""

    digest: bytes
    samples: bytes = b""
    """Samples of the replicas that this rank shares with others; see ``samples.py``."""
    data: bytes = b""
    """The encoded report."""
