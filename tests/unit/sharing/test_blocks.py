"""The blocks that a load needs are those with bytes of its requests: no more, and no fewer."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_datastates.format.metadata_table import FileRecord
from dcp_datastates.io.requests import Request
from dcp_datastates.sharing import blocks as blocks_module
from dcp_datastates.sharing.blocks import Blocks, needed_blocks

BLOCK = 16
FILES = {name: FileRecord(name, 400, 390) for name in ("b", "a", "c")}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(blocks_module, "BLOCK_BYTES", BLOCK)


@st.composite
def slices(draw):
    """A chunk's shape, and a part of it."""
    shape = draw(st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple))
    while math.prod(shape) > 180:
        shape = shape[:-1]
    begins = [draw(st.integers(0, size)) for size in shape]
    return (
        shape,
        begins,
        [draw(st.integers(0, size - b)) for size, b in zip(shape, begins, strict=True)],
    )


@settings(max_examples=500, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30), slices()), max_size=4))
def test_the_blocks_are_those_with_bytes_of_a_request(parts):
    expected, requests = set(), []
    blocks = Blocks(FILES)
    for number, (file, offset, (shape, begins, lengths)) in enumerate(parts):
        request = Request(f"t{number}", file, offset, 2 * math.prod(shape), dtype=torch.int16)
        request.chunk_sizes, request.offsets, request.lengths = shape, tuple(begins), tuple(lengths)
        requests.append(request)
        elements = np.arange(math.prod(shape)).reshape(shape)
        chosen = elements[tuple(slice(b, b + n) for b, n in zip(begins, lengths, strict=True))]
        first = blocks.files[file].first
        for element in chosen.ravel().tolist():
            for byte in (offset + 2 * element, offset + 2 * element + 1):
                expected.add(first + byte // BLOCK)
    runs = needed_blocks(requests, blocks).tolist()
    assert {block for begin, end in runs for block in range(begin, end)} == expected
    assert all(begin < end for begin, end in runs)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(runs))


def test_blocks_have_the_same_numbers_on_all_ranks_and_none_lies_in_two_files():
    blocks = Blocks(FILES)
    assert Blocks(dict(sorted(FILES.items()))).files == blocks.files
    assert [each.first for _, each in sorted(blocks.files.items())] == [0, 26, 52]
    for name, file in blocks.files.items():
        assert blocks.file_of(file.first).name == name
        assert blocks.file_of(file.first + 24).name == name


def test_objects_have_the_blocks_of_their_bytes_and_an_unknown_file_has_none():
    found, empty = Request("o", "a", 15, 2), Request("e", "a", 160, 0)
    missing = Request("m", "not described", 15, 2)
    assert needed_blocks([found, empty, missing], Blocks(FILES)).tolist() == [[0, 2]]


def test_places_outside_a_file_make_no_blocks_of_another():
    request = Request("o", "a", 380, 1 << 40)
    assert needed_blocks([request], Blocks(FILES)).tolist() == [[23, 25]]
