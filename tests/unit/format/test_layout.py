"""The layout: a pure function from a plan to the bytes of valid safetensors files."""

import itertools
import json
import math
import pickle
import re
import tempfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from support.state.chunks import Box, item
from support.state.states import DTYPES
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from dcp_datastates.format import layout
from dcp_datastates.format.layout import LayoutItem, stored_form

quick = settings(max_examples=150)

names = st.one_of(
    st.sampled_from(
        ["__metadata__", "__dcp_datastates__.x", "a.b", "ü", "a/b", "", '"', "\\", "\0"]
    ),
    st.text(max_size=20).filter(lambda text: not any("\ud800" <= c <= "\udfff" for c in text)),
)


def lay_out(items, rank):
    return layout.lay_out(list(map(LayoutItem.of, items)), rank)


@st.composite
def plans(draw):
    """Write items of one rank: several chunks of some tensors, and objects."""
    items = []
    for name in draw(st.lists(names, max_size=8, unique=True)):
        if draw(st.integers(0, 4)) == 0:
            items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
            continue
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        dtype = draw(st.sampled_from(DTYPES))
        rows = range(shape[0]) if shape and draw(st.booleans()) else []
        chunks = [Box((row, *(0 for _ in shape[1:])), (1, *shape[1:])) for row in rows]
        for box in chunks or [Box(tuple(0 for _ in shape), shape)]:
            items.append(item(name, shape, box, dtype))  # noqa: PERF401
    return draw(st.permutations(items))


@st.composite
def sealed(draw):
    items = draw(plans())
    files = lay_out(items, draw(st.integers(0, 10_000)))
    sizes = [
        draw(st.lists(st.integers(0, 5000), min_size=len(f.objects), max_size=len(f.objects)))
        for f in files
    ]
    return items, [(file, size, file.seal(size)) for file, size in zip(files, sizes, strict=True)]


@quick
@given(sealed())
def test_every_item_has_exactly_one_place(plan):
    items, files = plan
    placed = [entry.item for file, _, _ in files for entry in (*file.tensors, *file.objects)]
    assert sorted(placed) == list(range(len(items)))
    for file, _, _ in files:
        for entry in file.tensors:
            data = items[entry.item].tensor_data
            assert entry.nbytes == math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


@quick
@given(sealed())
def test_nothing_overlaps_and_everything_is_aligned(plan):
    for file, sizes, seal in plan[1]:
        assert len(seal.header) == file.data_start
        assert file.data_start % 4096 == 0
        assert seal.table_offset % 4 == 0
        spans = [(entry.offset, entry.offset + entry.nbytes) for entry in file.tensors]
        spans += [(at, at + size) for at, size in zip(seal.object_offsets, sizes, strict=True)]
        assert all(end <= seal.table_offset for _, end in spans)
        ordered = sorted(span for span in spans if span[0] < span[1])
        for (_, end), (begin, _) in itertools.pairwise(ordered):
            assert end <= begin
        if ordered:
            assert ordered[0][0] >= file.data_start
        for entry in file.tensors:
            assert entry.offset % entry.dtype.itemsize == 0


@quick
@given(sealed())
def test_every_file_opens_with_safetensors(plan):
    _items, files = plan
    for file, sizes, seal in files:
        with tempfile.NamedTemporaryFile(suffix=".safetensors") as written:
            written.write(seal.header)
            written.truncate(seal.nbytes)
            written.flush()
            with safe_open(written.name, framework="pt") as opened:
                for entry in file.tensors:
                    name, shape, _ = stored_form(entry.dtype, entry.sizes, entry.offsets)
                    found = opened.get_slice(entry.key)
                    assert found.get_shape() == shape
                    assert found.get_dtype() == name
                for entry, size in zip(file.objects, sizes, strict=True):
                    assert opened.get_slice(entry.key).get_shape() == [size]
                offsets = json.loads(opened.metadata()["DCP_SHARDING_INFO"])
                assert set(offsets) == set(opened.keys())


@quick
@given(plans(), st.integers(0, 99_999))
def test_the_same_plan_gives_the_same_bytes_anywhere(items, rank):
    again = pickle.loads(pickle.dumps(items))  # as it comes from the coordinator
    first, second = lay_out(items, rank), lay_out(again, rank)
    assert first == second
    for one, other in zip(first, second, strict=True):
        sizes = [7] * len(one.objects)
        assert one.seal(sizes) == other.seal(sizes)


@quick
@given(plans(), st.data())
def test_the_sizes_of_objects_move_no_tensor(items, data):
    for file in lay_out(items, 0):
        count = len(file.objects)
        sizes = st.lists(st.integers(0, 10**12), min_size=count, max_size=count)
        for chosen in (data.draw(sizes), [0] * count, [10**12] * count):
            seal = file.seal(chosen)
            assert len(seal.header) == file.data_start


@quick
@given(plans())
def test_one_file_holds_one_chunk_per_name(items):
    for file in lay_out(items, 3):
        keys = [entry.key for entry in (*file.tensors, *file.objects)]
        assert len(keys) == len(set(keys))
        assert "__metadata__" not in keys


@given(st.integers(0, 1 << 45))
def test_the_checksum_table_has_a_word_per_mebibyte_and_one_for_itself(nbytes):
    only = item("w", (nbytes,), Box((0,), (nbytes,)), torch.uint8)
    (file,) = lay_out([only], 0)
    seal = file.seal([])
    words = -(-seal.table_offset // (1 << 20)) + 1
    assert seal.nbytes == seal.table_offset + 4 * words


def test_no_items_no_files():
    assert lay_out([], 0) == ()


def test_files_are_named_by_rank_and_number():
    items = [item("w", (4,), Box((at,), (2,)), torch.uint8) for at in (0, 2)]
    names = [file.name for file in lay_out(items, 3)]
    assert names == ["r00003-0.safetensors", "r00003-1.safetensors"]


def test_more_names_than_a_header_can_hold_are_refused():
    items = [item(f"{n}" + "x" * 1_000_000, (1,), Box((0,), (1,)), torch.uint8) for n in range(100)]
    with pytest.raises(ValueError, match="header"):
        lay_out(items, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stored_form_keeps_the_number_of_bytes(dtype):
    for sizes in ((), (0,), (3,), (2, 5), (4, 0, 2)):
        offsets = tuple(range(len(sizes)))
        name, shape, _ = stored_form(dtype, sizes, offsets)
        bits = 8 if name == "BOOL" else int(re.search(r"\d+", name)[0])
        assert math.prod(shape) * bits == math.prod(sizes) * dtype.itemsize * 8
