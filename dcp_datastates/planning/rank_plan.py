"""One rank's share of a checkpoint: the items that it writes, and their rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.checkpoint.planner import WriteItem

from dcp_datastates.format.layout import LayoutItem
from dcp_datastates.format.ragged import Ints
from dcp_datastates.planning.local_plan import SHARD, LocalPlan, extents_of, sliced
from dcp_datastates.planning.packing import Named


@dataclass(frozen=True, eq=False)
class RankPlan(Named):
    """A rank's share: M items, in the order of its :class:`LocalPlan`, without repetition."""

    items: Ints
    """(M,): index into the local plan's items."""
    begins: Ints
    """(M,): the first row of dimension 0 within the chunk; 0 if it has no dimensions, or is an object."""
    ends: Ints
    """(M,): the row after the last; 1 if it has no dimensions, or is an object."""
    hints: Ints
    """(M,): position in its tensor's chunk list in the metadata (``MetadataIndex.index``); -1 for an object."""
    shared: Ints
    """(K,): the items that this rank compares with other ranks that hold them: several ranks write parts of them, so
    their replicas must be equal, or one writes them, and nothing declares them equal. Sorted by the set of ranks that
    hold them, in the same order on all of these ranks.
    """
    sets: Ints
    """(K,): the number of each item's set of ranks, the same on all ranks; ascending. Even: several write parts."""

    def __post_init__(self) -> None:
        counts = [len(each) for each in (self.items, self.begins, self.ends, self.hints)]
        if len(set(counts)) > 1 or len(self.shared) != len(self.sets):
            raise ValueError("the columns of a share have different lengths")

    def write_items(self, local: LocalPlan) -> list[WriteItem]:
        """The share as ``WriteItem`` objects, for DCP's planners and other writers.

        A whole item is as in the stock plan, with its hint. A slice is an item of type SHARD: a separate chunk.
        ValueError: this is not a share of that plan.
        """
        offsets, sizes = self._boxes(local)
        kinds = local.head.kinds[self.items]
        extents = extents_of(local.head.ndims, local.sizes)[self.items]
        kinds[(self.begins != 0) | (self.ends != extents)] = SHARD
        return local.parts(self.items, kinds, offsets, sizes, self.hints.tolist())

    def layout_items(self, local: LocalPlan) -> list[LayoutItem]:
        """What the layout needs of :meth:`write_items`."""
        return local.layout_items(self.items, *self._boxes(local))

    def _boxes(self, local: LocalPlan) -> tuple[Ints, Ints]:
        """Each item's offsets and sizes (ragged)."""
        names = local.head.names
        if len(self.items) and not 0 <= self.items.min() <= self.items.max() < len(names):
            raise ValueError(f"the final plan is of other items than the {len(names)} given")
        boxes = (local.head.ndims, local.offsets, local.sizes)
        return sliced(*boxes, self.items, self.begins, self.ends)
