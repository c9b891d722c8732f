"""The items of a load plan come out of a pickle as they were, and take fewer bytes."""

from __future__ import annotations

import pickle
from dataclasses import replace

import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_datastates import DataStatesReader, DataStatesWriter
from dcp_datastates.dcp.packed_reads import PackedReads

names = st.text(max_size=3)
sizes = st.lists(st.integers(0, 2**40), max_size=3).map(tuple)
hints = st.none() | st.integers(0, 5)
indices = st.builds(MetadataIndex, names, st.none() | sizes, hints)
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


class OwnRead(ReadItem):
    """An item of another planner."""


def _travelled(values):
    return pickle.loads(pickle.dumps(PackedReads(values)))


def _with_hints(items):
    return [(item, item.dest_index.index, item.storage_index.index) for item in items]


@settings(max_examples=300)
@given(st.lists(reads, max_size=8), st.booleans())
def test_items_come_as_they_were(given_reads, same_names):
    if same_names:
        given_reads = [replace(each, storage_index=each.dest_index) for each in given_reads]
    found = _travelled(given_reads)
    assert type(found) is list
    assert _with_hints(found) == _with_hints(given_reads)


@given(st.lists(reads, max_size=3), reads)
def test_items_of_other_planners_are_left_as_they_are(given_reads, odd):
    odd = replace(odd, lengths=[3])
    found = _travelled([*given_reads, odd])
    assert found[-1].lengths == [3]
    assert found == [*given_reads, odd]
    derived = OwnRead(**vars(odd))
    assert type(_travelled([*given_reads, derived])[-1]) is OwnRead


def test_what_cannot_be_looked_at_is_left_as_it_is():
    odd = ReadItem("a type", *[None] * 5)
    assert _travelled([odd]) == [odd]


def test_many_items_take_a_quarter_of_the_bytes():
    def index(number):
        return MetadataIndex(f"layers.{number}.weight", size())

    def size():
        return torch.Size([64, 32])

    many = [
        ReadItem(LoadItemType.TENSOR, index(n), size(), index(n), size(), size())
        for n in range(1000)
    ]
    assert len(pickle.dumps(PackedReads(many))) < len(pickle.dumps(many)) / 4


def test_what_dcp_sends_between_ranks_is_packed(tmp_path):
    seen = []

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
    dcp.save(state, storage_writer=DataStatesWriter(tmp_path / "c"))
    dcp.load(state, storage_reader=Reader(tmp_path / "c"))
    assert seen == [PackedReads, PackedReads]
