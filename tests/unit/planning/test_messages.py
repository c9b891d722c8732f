"""A rank's plan in columns: its bytes, its digest, and what is refused; its share, for planners and for the layout."""

import dataclasses
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.state.chunks import Box
from support.state.plans import item, plan, replica, thing, with_hints
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.planner_helpers import _create_write_items

from dcp_datastates.format.layout import LayoutItem
from dcp_datastates.planning.messages import LocalPlan, RankPlan

quick = settings(max_examples=150)

keys = st.one_of(
    st.sampled_from(["a", "b.c", "", "\0", "\x1f", "ü", "\ud800"]), st.text(max_size=3)
)

nested = st.recursive(
    st.one_of(st.integers(), st.lists(st.integers(0, 3), max_size=2).map(torch.empty)),
    lambda inner: st.one_of(st.dictionaries(keys, inner, max_size=4), st.lists(inner, max_size=3)),
    max_leaves=8,
)


@st.composite
def stock_items(draw):
    """A rank's items, of a random state dict, and the mappings."""
    flat, mappings = {}, {}
    for name in draw(st.lists(keys, max_size=4, unique=True)):
        try:
            flat, mappings = flatten_state_dict({**flat, name: draw(nested)})
        except ValueError:  # two paths of the same name
            continue
    items = [one for name, value in flat.items() for one in _create_write_items(name, value)]
    return items, draw(st.sampled_from([mappings, None]))


@quick
@given(stock_items())
def test_a_plan_survives_its_encoding(given_items):
    items, mappings = given_items
    local = LocalPlan.of(items, mappings)
    assert with_hints(local.write_items()) == with_hints(items)
    heads = {}
    for _ in range(2):
        again = LocalPlan.decode(local.encode(), heads)
        assert with_hints(again.write_items()) == with_hints(items)
        assert again.head.mappings == mappings
        assert list(again.head.mappings or ()) == list(mappings or ())
        assert again.encode() == local.encode()
        assert again.digest == local.digest
    assert len(heads) == 1


def test_equal_plans_have_equal_digests():
    items = [item("a.b", (3, 2)), thing("c.0")]
    one = LocalPlan.of(items, {"a.b": ("a", "b"), "c.0": ("c", 0)})
    other = LocalPlan.of(
        pickle.loads(pickle.dumps(items)), {"a.b": ("".join(["a"]), "b"), "c.0": ("c", 0)}
    )
    assert one.digest == other.digest
    assert one.digest != LocalPlan.of(items, None).digest
    assert one.digest != LocalPlan.of(items[:1], one.head.mappings).digest


@quick
@given(stock_items(), st.data())
def test_damaged_bytes_are_refused_or_decoded(given_items, data):
    encoded = bytearray(LocalPlan.of(*given_items).encode())
    if data.draw(st.booleans()):
        encoded = encoded[: data.draw(st.integers(0, len(encoded) - 1))]
    else:
        encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        LocalPlan.decode(bytes(encoded)).write_items()
    except ValueError as error:
        assert str(error)  # noqa: PT017


@pytest.mark.parametrize("data", [b"", b"x" * 100, b"LocalPlan:", b"RankPlan:" + b"\xff" * 60])
def test_other_bytes_are_refused(data):
    with pytest.raises(ValueError):
        LocalPlan.decode(data)
    with pytest.raises(ValueError):
        RankPlan.decode(data)


def test_an_item_whose_index_is_not_its_chunk_is_refused():
    odd = dataclasses.replace(item("a.b", (3, 2)), index=MetadataIndex("a.b", (1, 0)))
    with pytest.raises(ValueError, match=r"'a\.b'"):
        LocalPlan.of([odd], None)


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
