"""Whether chunks make up their tensors: what stock DCP finds, soon, whatever the chunks are."""

import dataclasses
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.state.checkpoints import load_everything, raises, save
from support.state.chunks import Box, boxes
from support.state.metadata import decision_of, rewritten
from support.tiers import sampled
from support.waiting import little_work
from torch.distributed.checkpoint.default_planner import _validate_global_plan
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

from dcp_datastates.errors import UnreadableMetadataError
from dcp_datastates.format.metadata import decode
from dcp_datastates.format.metadata_check import validate
from dcp_datastates.format.metadata_objects import Entries
from dcp_datastates.format.metadata_table import Catalog

quick = settings(max_examples=250)


def catalog_of(tensors):
    """From shapes and boxes by name."""
    boxes_of = [box for _, chunks in tensors.values() for box in chunks]
    flat = {
        "shapes": [size for shape, _ in tensors.values() for size in shape],
        "offsets": [value for box in boxes_of for value in box.offsets],
        "sizes": [value for box in boxes_of for value in box.sizes],
    }
    return Catalog(
        names=tuple(tensors),
        table=(TensorProperties(dtype=torch.float32),),
        properties=np.zeros(len(tensors), dtype=np.int64),
        ndims=np.array([len(shape) for shape, _ in tensors.values()], dtype=np.int64),
        counts=np.array([len(chunks) for _, chunks in tensors.values()], dtype=np.int64),
        mappings=None,
        **{name: np.array(values, dtype=np.int64) for name, values in flat.items()},
    )


@st.composite
def cut_up(draw, begin, end, depth):
    """A box cut in two, and those again: by planes through it all, as no grid need be."""
    dimension = draw(st.integers(-1, len(begin) - 1)) if depth else -1
    if dimension < 0:
        return [Box(tuple(begin), tuple(b - a for a, b in zip(begin, end, strict=True)))]
    place = draw(st.integers(begin[dimension], end[dimension]))
    middle = [place if d == dimension else value for d, value in enumerate(end)]
    other = [place if d == dimension else value for d, value in enumerate(begin)]
    return [*draw(cut_up(begin, middle, depth - 1)), *draw(cut_up(other, end, depth - 1))]


PINWHEEL = [
    Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1)), Box((1, 1), (1, 1)),
]  # fmt: skip


@st.composite
def catalogs(draw):
    """Tensors cut into boxes; some of them with a box moved, resized, repeated or lost."""
    tensors = {}
    for number in range(draw(st.integers(0, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        kind = draw(st.integers(0, 3))
        if kind == 0:
            cuts = [draw(st.lists(st.integers(0, max(size, 1)), max_size=4)) for size in shape]
            chunks = boxes(shape, cuts)
        elif kind == 1:
            shape, chunks = (3, 3), list(PINWHEEL)
        else:
            chunks = draw(cut_up([0] * len(shape), list(shape), 4))
        chunks = draw(st.permutations(chunks))
        for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
            at = draw(st.integers(0, len(chunks) - 1)) if chunks else 0
            change = draw(st.integers(0, 3))
            if not chunks or (change == 0 and len(chunks) == 1):
                continue
            if change == 0:
                del chunks[at]
            elif change == 1:
                chunks.append(chunks[at])
            else:
                corner = list(chunks[at].offsets if change == 2 else chunks[at].sizes)
                if corner:
                    corner[draw(st.integers(0, len(corner) - 1))] += draw(st.integers(-2, 2))
                field = "offsets" if change == 2 else "sizes"
                chunks[at] = dataclasses.replace(chunks[at], **{field: tuple(corner)})
        tensors[f"t{number}"] = (shape, chunks)
    return catalog_of(tensors)


def faults(messages):
    """Which tensors have which kind of fault."""
    kinds = ("out of bounds", "overlapping", "invalid fill")
    return {(m.split()[0], next(kind for kind in kinds if kind in m)) for m in messages}


@pytest.mark.parametrize("_run", sampled(range(8), keep=[0]))
@quick
@given(catalogs(), st.booleans())
def test_validation_finds_what_stock_finds(_run, catalog, filled):
    stock = Metadata(dict(Entries(catalog)))
    expected = _validate_global_plan([None] * (2 if filled else 1), stock)
    messages = validate(catalog, filled=filled)
    assert len(messages) == len(faults(messages))
    assert [m.split()[0] for m in messages] == sorted(m.split()[0] for m in messages)
    if isinstance(expected, bool):  # up to torch 2.11 it says no more
        assert expected == (messages == [])
        return
    assert faults(messages) == faults(expected)
    for message in messages:
        if "out of bounds" in message:
            assert message in expected


def test_a_pinwheel_is_sound_and_what_overlaps_is_named():
    sound = catalog_of({"a.b": ((3, 3), PINWHEEL)})
    assert validate(sound, filled=True) == []
    broken = catalog_of({"a.b": ((3, 3), [*PINWHEEL, Box((1, 1), (2, 2))])})
    overlap, fill = validate(broken, filled=True)
    assert "key:a.b has overlapping chunks: ChunkStorageMetadata(" in overlap
    assert "offsets=torch.Size([1, 1])" in overlap
    assert fill == "key:a.b invalid fill tensor-volume: 9 chunks-volume: 13"


def test_far_ends_do_not_overflow():
    far = 1 << 61
    chunks = [Box((number * (far // 2),), (far // 2,)) for number in range(4)]
    assert validate(catalog_of({"t": ((2 * far - 4,), chunks[:3])}), filled=False) == []
    wrong = [*chunks[:3], Box((5,), (7,))]
    (message,) = validate(catalog_of({"t": ((2 * far - 4,), wrong)}), filled=False)
    assert "overlapping" in message


def test_validation_takes_no_pairs_of_a_fine_grid():
    """300 x 300 chunks, cut in rows that do not meet: pairs would be 4 billion."""
    chunks = [
        Box((row * 10 + column % 10, column), (10, 1))
        for column in range(300)
        for row in range(300)
    ]
    catalog = catalog_of({"t": ((3010, 300), chunks)})
    with little_work(20):
        assert validate(catalog, filled=False) == []


PATH = Path("c/.metadata")


# --- in metadata that are read ----------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path):
    save({"w": torch.ones(3)}, tmp_path)
    return tmp_path


def _grid(parts, shape, begins, sizes):
    """Make all of the metadata one tensor of these chunks, in a file that is as long as they need."""
    lengths = sizes.prod(axis=1)
    table = 4096 + int(lengths.sum() + 3) // 4 * 4
    name = parts.document["files"][0][0]
    parts.document.update(
        names=["w"],
        properties=[{**parts.document["properties"][0], "dtype": {"dtype": "uint8"}}],
        planner_data=None,
        files=[[name, table + 4 * (-(-table // (1 << 20)) + 1), table]],
    )
    parts.columns = {
        "properties": [0],
        "ndims": [len(shape)],
        "shapes": list(shape),
        "counts": [len(begins)],
        "offsets": begins.ravel().tolist(),
        "sizes": sizes.ravel().tolist(),
        "files": [0] * len(begins),
        "begins": (4096 + np.cumsum(lengths) - lengths).tolist(),
        "lengths": lengths.tolist(),
    }


def _crossing_bars(count):
    """Bars along three axes that touch nowhere, and that no plane separates."""
    begins, sizes = [], []
    for axis in range(3):
        for number in range(count):
            begin = [0, 0, 0]
            begin[(axis + 1) % 3] = 2 * number
            begin[(axis + 2) % 3] = 2 * number + 1
            size = [1, 1, 1]
            size[axis] = 2 * count + 2
            begins.append(begin)
            sizes.append(size)
    return (2 * count + 2,) * 3, np.array(begins), np.array(sizes)


def _spiral(count):
    """Each cut separates one chunk from all others, along the other dimension than the last."""
    begins, sizes = [], []
    rows = columns = 2 * count
    top = left = 0
    for number in range(count):
        begins.append([top, left])
        if number % 2:
            sizes.append([rows, 1])
            left, columns = left + 1, columns - 1
        else:
            sizes.append([1, columns])
            top, rows = top + 1, rows - 1
    return (2 * count, 2 * count), np.array(begins), np.array(sizes)


@pytest.mark.parametrize("shapes", [_crossing_bars, _spiral], ids=["bars", "spiral"])
def test_chunks_that_would_take_for_ever_to_compare_are_refused_soon(shapes, checkpoint):
    few = shapes(20)
    rewritten(checkpoint, lambda parts: _grid(parts, *few))
    if shapes is _spiral:
        assert len(decode(decision_of(checkpoint).read_bytes(), PATH).catalog.offsets) == 40
    rewritten(checkpoint, lambda parts: _grid(parts, *shapes(20_000)))
    with little_work(10), raises(UnreadableMetadataError, "entangled"):
        load_everything(checkpoint)


def test_memory_is_in_proportion_to_the_file(checkpoint):
    count = 100_000
    begins = np.stack([np.arange(count), np.zeros(count, np.int64)], axis=1)
    rewritten(
        checkpoint, lambda parts: _grid(parts, (count, 1), begins, np.ones((count, 2), np.int64))
    )
    data = decision_of(checkpoint).read_bytes()
    tracemalloc.start()
    try:
        decode(data, PATH)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 40 * len(data), (most, len(data))
