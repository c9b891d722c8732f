"""Ranges of elements: as boxes of a tensor, and as parts of its stored chunks."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.state.chunks import boxes as grid

from dcp_datastates.conversion.source import Want, boxes, parts

shapes = st.lists(st.integers(1, 5), max_size=4)


@st.composite
def ranges(draw):
    shape = draw(shapes)
    begin = draw(st.integers(0, math.prod(shape)))
    return shape, begin, draw(st.integers(begin, math.prod(shape)))


@settings(max_examples=200)
@given(ranges())
def test_boxes_are_the_elements_of_a_range_in_order(asked):
    shape, begin, end = asked
    whole = torch.arange(math.prod(shape)).view(shape)
    found = []
    for offsets, sizes in boxes(shape, begin, end):
        for dimension, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            whole_part = whole if dimension == 0 else whole_part  # noqa: F821
            whole_part = whole_part.narrow(dimension, offset, size)
        found += (whole_part if offsets else whole).reshape(-1).tolist()
    assert found == list(range(begin, end))
    assert sum(1 for _ in boxes(shape, begin, end)) <= max(1, 2 * len(shape))


@settings(max_examples=200)
@given(ranges(), st.data())
def test_parts_of_chunks_make_up_the_range(asked, data):
    shape, begin, end = asked
    whole = torch.arange(math.prod(shape)).view(shape)
    cuts = [data.draw(st.lists(st.integers(1, size), max_size=2)) for size in shape]
    chunks = grid(shape, cuts)
    into = torch.full((end - begin,), -1)
    for part in parts(shape, chunks, Want("x", begin, end, into)):
        stored = chunks[part.chunk].of(whole).contiguous()
        for dimension, (offset, size) in enumerate(zip(part.offsets, part.sizes, strict=True)):
            stored = stored.narrow(dimension, offset, size)
        assert stored.is_contiguous(), "a reader reads one run"
        part.into.copy_(stored)
    assert into.tolist() == list(range(begin, end))
