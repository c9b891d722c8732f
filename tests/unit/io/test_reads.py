"""Reads: rows are taken and joined as they are."""

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.state.chunks import reads_of_rows

from dcp_datastates.io.reads import Reads


@st.composite
def rows_of_reads(draw):
    """Rows of a few files: parts of chunks, and objects."""
    rows = []
    for number in range(draw(st.integers(0, 6))):
        place = f"t{number}", draw(st.sampled_from("abc")), draw(st.integers(0, 99))
        shape = draw(st.lists(st.integers(0, 3), max_size=3).map(tuple))
        if draw(st.booleans()):
            rows.append(
                (*place, 4 * math.prod(shape), torch.float32, shape, (0,) * len(shape), shape)
            )
        else:
            rows.append((*place, number))
    return rows


def _rows(reads):
    paths = [reads.paths[file] for file in reads.files.tolist()]
    ragged = map(reads.sizes, (reads.chunk_sizes, reads.offsets, reads.lengths))
    columns = paths, reads.begins.tolist(), reads.stored.tolist(), reads.dtypes, *ragged
    return list(zip(reads.names, *columns, strict=True))


@settings(max_examples=200, deadline=None)
@given(rows_of_reads(), st.data())
def test_rows_are_taken_and_joined_as_they_are(given_rows, data):
    reads = reads_of_rows(*given_rows)
    rows = _rows(reads)
    assert len(reads) == len(rows) == len(given_rows)
    chosen = data.draw(st.lists(st.integers(0, max(len(rows) - 1, 0)), max_size=len(rows)))
    taken = reads.take(np.array(chosen, np.int64))
    assert _rows(taken) == [rows[number] for number in chosen]
    assert _rows(Reads.joined([taken, reads])) == [*_rows(taken), *rows]
    files = data.draw(st.sets(st.sampled_from("abc")))
    assert _rows(reads.of_files(files)) == [row for row in rows if row[1] in files]
    assert reads.nbytes.tolist() == [row[3] for row in rows]
    assert reads.objects == [number for number, row in enumerate(rows) if row[4] is None]
    assert reads.are_whole.all()
