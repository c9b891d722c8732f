"""The pickle in ``.metadata``, written from columns: what stock DCP would have pickled from objects."""

from __future__ import annotations

import dataclasses
import pickle
import pickletools
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.checkpoints import raises
from support.metadata_examples import (
    META,
    NUMBERS,
    Chunk,
    Example,
    Object,
    Tensor,
    assert_identical,
    examples,
    sharded,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

from dcp_datastates.format.chunk_table import Catalog, Placement
from dcp_datastates.format.metadata_pickle import emit


@settings(max_examples=300, deadline=None)
@given(examples())
@example(Example({}, (), (), None))
@example(Example({}, (), (), {}))
@example(sharded(1000, 2))  # as many chunks as a batch takes
@example(sharded(1001, 3))  # and one more; several frames
@example(sharded(1, 1001))
def test_emitted_is_what_objects_would_be(case: Example) -> None:
    data = emit(*case.columns(), META, "1.0.0")
    found = pickle.loads(data)
    assert_identical(found, case.metadata())
    assert list(vars(found)) == [field.name for field in dataclasses.fields(Metadata)]
    assert_identical(pickle._loads(data), case.metadata())  # frames and all, in Python's own words


def test_many_different_sizes() -> None:
    """More than the writer remembers; the memo outgrows two bytes."""
    chunks = [Chunk((i * i, i), (2 * i + 1, 1), (0, i, 1)) for i in range(70_000)]
    tensor = Tensor(0, (70_000 * 70_000, 70_000), tuple(chunks))
    case = Example({"w": tensor, "again": tensor}, (TensorProperties(),), ("f",), None)
    assert_identical(pickle.loads(emit(*case.columns(), META, "1.0.0")), case.metadata())


def test_equal_sizes_are_one_object() -> None:
    found = pickle.loads(emit(*sharded(4, 2).columns(), META, "1.0.0"))
    first, second = found.state_dict_metadata.values()
    assert first.chunks[1].sizes is second.chunks[3].sizes
    assert first.chunks[1].offsets is second.chunks[1].offsets
    assert first.chunks[1].offsets is list(found.storage_data)[1].offset


def test_frames_hold_all_and_end_between_items() -> None:
    data = emit(*sharded(1001, 3).columns(), META, "1.0.0")
    opcodes = [(op.name, arg, at) for op, arg, at in pickletools.genops(data)]
    frames = [(at + 9, at + 9 + length) for name, length, at in opcodes if name == "FRAME"]
    assert frames[0][0] == 2 + 9
    assert [end for _, end in frames] == [*(begin - 9 for begin, _ in frames[1:]), len(data)]
    assert all(1 << 16 <= end - begin < (1 << 16) + 200 for begin, end in frames[1:-1])


def test_the_file_is_smaller_than_stock() -> None:
    case = sharded(1000, 10)
    assert len(emit(*case.columns(), META, "1.0.0")) < len(pickle.dumps(case.metadata()))


ARRAYS = [
    *((0, name) for name in ("properties", "ndims", "shapes", "counts", "offsets", "sizes")),
    *((1, name) for name in ("chunk_files", "chunk_offsets", "chunk_lengths")),
    *((1, name) for name in ("object_files", "object_offsets", "object_lengths")),
]

SMALL = Example(
    {
        "w": Tensor(
            0, (4, 3), (Chunk((0, 0), (1, 3), (0, 0, 9)), Chunk((1, 0), (3, 3), (1, 0, 9)))
        ),
        "o": Object((0, 9, 9)),
        "scalar": Tensor(1, (), (Chunk((), (), (1, 9, 4)),)),
    },
    (TensorProperties(), TensorProperties(torch.int8)),
    ("a", "b"),
    None,
)


def _with(which: int, name: str, value: Any) -> tuple[Catalog, Placement]:
    columns: list[Any] = list(SMALL.columns())
    columns[which] = dataclasses.replace(columns[which], **{name: value})
    return tuple(columns)


def _emit(columns: tuple[Catalog, Placement]) -> bytes:
    return emit(*columns, META, "1.0.0")


@pytest.mark.parametrize(("which", "name"), ARRAYS)
def test_wrong_lengths_and_types_are_refused(which: int, name: str) -> None:
    array = getattr(SMALL.columns()[which], name)
    for wrong in (array[:-1], np.append(array, 0), np.append(array, array)):
        with raises(ValueError, "values"):
            _emit(_with(which, name, wrong))
    strided = np.stack([array, array], axis=1)
    unaligned = np.frombuffer(b"\0" + array.tobytes(), np.uint8)[1:].view(np.int64)
    for wrong in (
        array.astype(np.int32),
        array.astype(np.float64),
        array.astype(np.uint64),
        array.astype(">i8"),
        strided,
        strided[:, 0] if len(array) > 1 else strided,
        unaligned,
        array.tolist(),
        None,
    ):
        with raises(ValueError, name, "is no C-contiguous one-dimensional array of int64"):
            _emit(_with(which, name, wrong))


@pytest.mark.parametrize(("which", "name"), ARRAYS)
@pytest.mark.parametrize("wrong", [-1, -2, -(1 << 63), (1 << 63) - 1])
def test_impossible_values_are_refused(which: int, name: str, wrong: int) -> None:
    array = getattr(SMALL.columns()[which], name)
    for i in range(len(array)):
        changed = array.copy()
        changed[i] = wrong
        if np.array_equal(changed, array) or (name == "shapes" and wrong > 0):
            continue
        with pytest.raises(ValueError, match=r"\[|values"):
            _emit(_with(which, name, changed))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("names", ("w", "o"), ["properties has 3 values where 2 are needed"]),
        ("table", (TensorProperties(),), ["properties[2]=1 is not below 1"]),
        ("offsets", np.array([0, 0, 2, 0]), ["offsets[2]=2", "outside"]),
        ("ndims", np.array([65, 0, 0]), ["ndims[0]=65"]),
    ],
)
def test_malformed_catalogs_are_refused(name: str, value: Any, words: list[str]) -> None:
    with raises(ValueError, *words):
        _emit(_with(0, name, value))


def test_paths_that_are_not_there_are_refused() -> None:
    with raises(ValueError, "chunk_files[1]=1 is not below 1"):
        _emit(_with(1, "paths", ("a",)))


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_whatever_the_columns_hold_it_is_refused_or_loads(data: Any) -> None:
    columns: list[Any] = list(SMALL.columns())
    for which, name in data.draw(st.lists(st.sampled_from(ARRAYS), min_size=1, max_size=4)):
        array = getattr(columns[which], name).tolist()
        edits = st.tuples(st.integers(0, len(array)), st.integers(-2, 5) | NUMBERS)
        for at, value in data.draw(st.lists(edits, max_size=3)):
            array[at : at + data.draw(st.integers(0, 2))] = [value]
        changed = np.array(array, np.int64)
        columns[which] = dataclasses.replace(columns[which], **{name: changed})
    try:
        pickled = _emit(tuple(columns))
    except ValueError:
        return
    catalog = columns[0]
    found = pickle.loads(pickled)
    starts = [0, *accumulate(catalog.counts.tolist())]
    chunks = [len(getattr(e, "chunks", ())) for e in found.state_dict_metadata.values()]
    assert [0, *accumulate(chunks)] == starts
