"""Items and results come out of a pickle as they were, and take fewer bytes."""

from __future__ import annotations

import pickle
from dataclasses import replace

import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from support.state.chunks import Box, write_item
from support.state.plans import with_hints
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    LoadItemType,
    ReadItem,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from dcp_datastates import DataStatesReader, DataStatesWriter
from dcp_datastates.dcp.packed import PackedItems, PackedReads, PackedResults
from dcp_datastates.format.chunk_table import FileRecord
from dcp_datastates.format.refusal import TRANSFORM_DESCRIPTORS

names = st.text(max_size=3)
sizes = st.lists(st.integers(0, 2**40), max_size=3).map(tuple)
hints = st.none() | st.integers(0, 5)
indices = st.builds(MetadataIndex, names, st.none() | sizes, hints)


class OwnItem(WriteItem):
    """An item of another planner."""


@st.composite
def items(draw):
    if draw(st.integers(0, 4)) == 0:
        return WriteItem(MetadataIndex(draw(names), None, draw(hints)), WriteItemType.BYTE_IO)
    shape = draw(sizes)
    dtype = draw(st.sampled_from([torch.float32, torch.int8]))
    item = write_item(draw(names), dtype, shape, Box(tuple(0 for _ in shape), shape))
    properties = TensorProperties(dtype, requires_grad=draw(st.booleans()))
    data = replace(item.tensor_data, properties=properties)
    kind = draw(st.sampled_from([WriteItemType.TENSOR, WriteItemType.SHARD]))
    return WriteItem(draw(indices), kind, tensor_data=data)


@st.composite
def results(draw):
    places = st.builds(
        _StorageInfo,
        names,
        st.integers(0, 2**50),
        st.integers(0, 9),
        st.just(TRANSFORM_DESCRIPTORS),
    )
    others = st.builds(_StorageInfo, names, st.integers(0, 9), st.integers(0, 9))
    records = st.builds(FileRecord, names, st.integers(0, 9), st.integers(0, 9))
    found = draw(places | others | records)
    return WriteResult(draw(indices), draw(st.integers(0, 2**50)), found)


def _travelled(values):
    return pickle.loads(pickle.dumps(values))


@settings(max_examples=300)
@given(st.lists(items(), max_size=8))
def test_items_come_as_they_were(given_items):
    found = _travelled(PackedItems(given_items))
    assert type(found) is list
    assert with_hints(found) == with_hints(given_items)
    assert [type(each.index.offset) for each in found] == [
        type(each.index.offset) for each in given_items
    ]


whole_sizes = sizes.map(torch.Size)
reads = st.builds(
    ReadItem,
    st.sampled_from(LoadItemType),
    indices,
    whole_sizes,
    indices,
    whole_sizes,
    whole_sizes,
)


@settings(max_examples=300)
@given(st.lists(reads, max_size=8), st.booleans())
def test_items_of_loads_come_as_they_were(given_reads, same_names):
    if same_names:
        given_reads = [replace(each, storage_index=each.dest_index) for each in given_reads]
    found = _travelled(PackedReads(given_reads))
    assert type(found) is list
    assert [_read_with_hints(each) for each in found] == list(map(_read_with_hints, given_reads))


@given(st.lists(reads, max_size=3), reads)
def test_items_of_loads_by_other_planners_are_left_as_they_are(given_reads, odd):
    odd = replace(odd, lengths=[3])
    found = _travelled(PackedReads([*given_reads, odd]))
    assert found[-1].lengths == [3]
    assert found == [*given_reads, odd]


def _read_with_hints(item):
    return item, item.dest_index.index, item.storage_index.index


@settings(max_examples=300)
@given(st.lists(results(), max_size=8))
def test_results_come_as_they_were(given_results):
    found = _travelled(PackedResults(given_results))
    assert type(found) is list
    assert with_hints(found) == with_hints(given_results)


@given(st.lists(items(), min_size=2, max_size=8))
def test_a_planner_may_change_an_item_that_came(given_items):
    found = _travelled(PackedItems(given_items))
    for item in found:
        if item.tensor_data is not None:
            item.tensor_data.properties.dtype = torch.float16
            item.tensor_data.chunk.sizes = torch.Size([7])
            break
    others = [each for each in found if each is not item]
    assert others == [each for at, each in enumerate(given_items) if found[at] is not item]


class OwnProperties(TensorProperties):
    """Properties with more than DCP has."""


def test_properties_of_other_planners_are_left_as_they_are():
    whole = Box((0,), (4,))
    items = [write_item(name, torch.float32, (4,), whole) for name in "ab"]
    odd = []
    for scale, item in enumerate(items):
        properties = OwnProperties(torch.float32)
        properties.scale = scale
        odd.append(replace(item, tensor_data=replace(item.tensor_data, properties=properties)))
    assert [vars(each.tensor_data.properties)["scale"] for each in odd] == [0, 1]
    packed = PackedItems(odd)
    assert packed.__reduce__()[0] is list


def test_what_cannot_be_looked_at_is_left_as_it_is():
    odd = WriteItem(MetadataIndex("x"), "a type")
    assert _travelled(PackedItems([odd])) == [odd]


@given(st.lists(items(), max_size=3), st.sampled_from(["class", "bytes"]))
def test_items_of_other_planners_are_left_as_they_are(given_items, kind):
    index = MetadataIndex("x", (1,), 2)
    odd = (
        OwnItem(index, WriteItemType.BYTE_IO)
        if kind == "class"
        else WriteItem(index, WriteItemType.BYTE_IO, bytes_io_data=BytesIOWriteData(3))
    )
    found = _travelled(PackedItems([*given_items, odd]))
    assert with_hints(found) == with_hints([*given_items, odd])
    assert type(found[-1]) is type(odd)


def test_many_items_take_a_quarter_of_the_bytes():
    whole = Box((0, 0), (64, 32))
    many = [write_item(f"layers.{n}.weight", torch.float32, (64, 32), whole) for n in range(1000)]
    assert len(pickle.dumps(PackedItems(many))) < len(pickle.dumps(many)) / 4


def test_what_dcp_sends_between_ranks_is_packed(tmp_path):
    seen = []

    class Planner(DefaultSavePlanner):
        def create_global_plan(self, all_plans):
            seen.extend(type(each.items) for each in all_plans)
            return super().create_global_plan(all_plans)

        def finish_plan(self, new_plan):
            seen.append(type(new_plan.items))
            return super().finish_plan(new_plan)

    class Writer(DataStatesWriter):
        def write_data(self, plan, planner):
            future = super().write_data(plan, planner)
            seen.append(type(future.value()))
            return future

    class Reader(DataStatesReader):
        def prepare_local_plan(self, plan):
            made = super().prepare_local_plan(plan)
            seen.append(type(made.items))
            return made

        def prepare_global_plan(self, plans):
            made = super().prepare_global_plan(plans)
            seen.extend(type(each.items) for each in made)
            return made

    state = {"w": torch.arange(3.0)}
    dcp.save(state, storage_writer=Writer(tmp_path / "c"), planner=Planner())
    assert seen == [PackedItems, PackedItems, PackedResults]
    seen.clear()
    dcp.load(state, storage_reader=Reader(tmp_path / "c"))
    assert seen == [PackedReads, PackedReads]
