"""A rank's share: its items for DCP's planners, and for the layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.state.chunks import Box
from support.state.plans import item, plan, replica, thing, with_hints
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType

from dcp_datastates.format.layout import LayoutItem
from dcp_datastates.planning.rank_plan import RankPlan

LOCAL = plan(
    item("plain", (6, 2)), thing("o"), item("scalar", ()), item("cut", (9, 2), Box((3, 0), (6, 2)))
)


def _share(*rows, shared=(), sets=()):
    """Of rows of item, begin, end and hint."""
    columns = np.array(rows, np.int64).reshape(-1, 4).T
    return RankPlan(*columns, np.array(shared, np.int64), np.array(sets, np.int64))


def test_whole_items_are_those_of_the_local_plan_with_their_hints():
    share = _share((0, 0, 6, 0), (1, 0, 1, -1), (2, 0, 1, 0), (3, 0, 6, 1))
    items = share.write_items(LOCAL)
    assert items == LOCAL.write_items()
    assert [each.index.index for each in items] == [0, None, 0, 1]


@pytest.mark.parametrize(
    ("row", "offsets", "sizes"),
    [
        ((0, 0, 2, 0), (0, 0), (2, 2)),
        ((0, 2, 6, 1), (2, 0), (4, 2)),
        ((3, 1, 4, 5), (4, 0), (3, 2)),
    ],
)
def test_some_rows_are_a_chunk_of_their_own_at_their_place_in_the_tensor(row, offsets, sizes):
    (found,) = _share(row).write_items(LOCAL)
    whole = LOCAL.write_items()[row[0]]
    assert found.type is WriteItemType.SHARD
    assert found.index == MetadataIndex(whole.index.fqn, torch.Size(offsets))
    assert found.index.index == row[3]
    assert found.tensor_data.chunk == Box(offsets, sizes).chunk()
    assert found.tensor_data.size == whole.tensor_data.size
    assert found.tensor_data.properties == whole.tensor_data.properties


def test_a_share_of_nothing_has_no_items():
    assert with_hints(_share().write_items(LOCAL)) == []


@pytest.mark.parametrize("at", [-1, 4])
def test_a_share_of_another_plan_is_refused(at):
    with pytest.raises(ValueError, match="other items than the 4 given"):
        _share((at, 0, 1, 0)).write_items(LOCAL)
    with pytest.raises(ValueError, match="other items than the 0 given"):
        _share((0, 0, 1, 0)).write_items(plan())
    assert _share((0, 0, 8, 0)).write_items(plan(replica("r", (8, 2))))


@pytest.mark.parametrize(
    "rows",
    [[], [(0, 2, 5, 0)], [(3, 1, 4, 5), (1, 0, 1, -1), (0, 0, 6, 0)], [(2, 0, 1, 0), (3, 0, 6, 0)]],
)
def test_the_layout_is_told_of_the_same_chunks(rows):
    share = _share(*rows)
    expected = list(map(_plain, map(LayoutItem.of, share.write_items(LOCAL))))
    assert list(map(_plain, share.layout_items(LOCAL))) == expected


def _plain(item):
    return item.fqn, item.dtype, list(item.sizes), list(item.offsets)
