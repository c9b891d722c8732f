"""Boxes of tensors, in which all tensors are read."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_datastates.conversion.selection import Selected
from dcp_datastates.conversion.source import as_bytes, batches, boxes
from dcp_datastates.conversion.torch_file import TorchSource

shapes = st.lists(st.integers(0, 5), max_size=4)  # also of scalars, and without elements


@settings(max_examples=200)
@given(shapes, st.integers(1, 200))
def test_boxes_are_a_tensor_in_order(shape, most):
    whole = torch.arange(math.prod(shape)).view(shape)
    parts = [box.of(whole) for box in boxes("x", shape, most)]
    assert [n for part in parts for n in part.reshape(-1).tolist()] == list(range(whole.numel()))
    assert all(part.is_contiguous() for part in parts), "a reader reads one run"
    assert max((part.numel() for part in parts), default=0) <= most
    assert [tuple(part.shape) for part in parts] == [box.sizes for box in boxes("x", shape, most)]


@settings(max_examples=50, deadline=None)
@given(st.lists(shapes, max_size=6), st.integers(8, 2000))
def test_batches_are_all_tensors_in_order_and_bounded(tmp_path_factory, all_shapes, most):
    state = {
        f"t{number}": torch.arange(math.prod(shape)).view(shape)
        for number, shape in enumerate(all_shapes)
    }
    path = tmp_path_factory.mktemp("batches") / "in"
    torch.save(state, path)
    source = Selected(TorchSource(path, False), {name: name for name in state})
    found = [
        list(zip(batch, source.read(batch), strict=True)) for batch in batches(source, state, most)
    ]
    assert all(sum(tensor.nbytes for _, tensor in batch) <= most for batch in found)
    flat = itertools.chain.from_iterable(found)
    for name, pairs in itertools.groupby(flat, lambda pair: pair[0].name):
        data = b"".join(as_bytes(tensor) for _, tensor in pairs)
        assert data == as_bytes(state[name]).tobytes()
