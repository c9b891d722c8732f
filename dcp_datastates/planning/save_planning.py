"""How one save is planned: what each kind of planner does for the pipeline (``saving/rank_context.py``)."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch.distributed.checkpoint.planner import WriteItem

from dcp_datastates.format.metadata_table import Compose
from dcp_datastates.planning.messages import Report
from dcp_datastates.planning.part_files import PartFiles
from dcp_datastates.storage.attempt import Attempt


class Written(NamedTuple):
    """What is told of a save's files, besides their places."""

    save: str
    """The path, for messages."""
    metrics: Mapping[str, float]
    """The coordinator's count."""
    checksums: Callable[[], Mapping[int, bytes]]
    """Gives those of what was compared, for each set of ranks, once the files are durable."""


Told = tuple[Callable[[], bytes], Compose | None]


class SavePlanning(Protocol):
    """One rank's side of planning one save. The methods are called in this order, in one thread at a time. A class that
    derives from this exchanges nothing, unless it says what.

    Attributes:
        kind: how the save is planned; all ranks must plan it alike.
        is_cached: whether the plan of the state was known before.
        can_compare: whether it knows which tensors are replicas.
        compare_replicas: in how many saves the coordinator has all replicas compared; 0: not at all.
        items: this rank's part, after :meth:`take`, if the planning resolves all of it.
    """

    kind: str
    is_cached: bool = False
    can_compare: bool = False
    compare_replicas: int = 0
    items: Sequence[WriteItem] = ()

    def propose(self, group: str, rank: int) -> bytes:
        """This rank's message to the coordinator of the ranks with the name ``group``."""
        return b""

    def assign(self, proposals: Sequence[bytes]) -> Sequence[bytes]:
        """Coordinator: the answers to all ranks' messages."""
        return [b""] * len(proposals)

    def take(self, answer: bytes) -> None:
        """Take the coordinator's answer."""
        return

    def left_out(self) -> None:
        """Note, instead, that a rank has left the save out: the coordinator has taken no rank's message."""
        return

    def files(self, rank: int) -> PartFiles:
        """The files of this rank's part; ``KnownFiles`` if it is known where their tensors are in the staged state."""
        return PartFiles.of(self.items, rank)

    def compared(self) -> Mapping[int, PartFiles]:
        """What this rank compares with others in this save, for each set of ranks: to be summed, and not written."""
        return {}

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The data of an item."""

    def sample(self, attempt: Attempt) -> None:
        """Take samples of what this rank shares with others, for :meth:`report`. The state must still be as at the
        call.
        """
        return

    def release(self) -> None:
        """Let go of the state, whose reads have begun. Idempotent."""

    def report(self, places: Report, written: Written) -> Told:
        """What makes this rank's message to the coordinator, once its files are durable; and on the coordinator, what
        makes the metadata of all ranks' messages.

        Args:
            places: where the items are in this rank's files.
            written: what else there is to tell of them.
        """
