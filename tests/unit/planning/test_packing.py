"""Sections and columns of integers as bytes: they come back, and damaged ones are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dcp_datastates.planning.packing import pack, pack_ints, unpack, unpack_ints

INTS = st.integers(-(1 << 62), 1 << 62)
COLUMNS = st.one_of(
    st.lists(INTS, max_size=20),
    st.lists(st.integers(0, 300), max_size=20),
    st.builds(
        lambda first, step, count: [first + step * at for at in range(count)],
        st.integers(-(1 << 40), 1 << 40),
        st.integers(-(1 << 20), 1 << 20),
        st.integers(0, 50),
    ),
)
MAGIC = b"dsxx\x01"


@given(COLUMNS)
@example([0, 1, 5, 3])  # nearly a progression
def test_a_column_comes_back(values):
    packed = memoryview(pack_ints(np.array(values, np.int64)))
    for count in (len(values), -1):
        found = unpack_ints(packed, count)
        assert found.dtype == np.int64
        assert found.tolist() == values


@pytest.mark.parametrize(
    ("values", "nbytes"),
    [
        (np.arange(10**6), 25),
        (np.full(10**6, 7), 25),
        (np.arange(10**6)[::-1], 25),
        (np.array([0, 2, 255]), 9 + 3),
        (np.array([0, 2, 256]), 9 + 6),
        (np.array([0, 2, -1]), 9 + 24),
    ],
)
def test_a_column_is_as_short_as_its_values_allow(values, nbytes):
    assert len(pack_ints(values)) == nbytes


@given(COLUMNS, st.data())
def test_a_column_that_is_cut_or_has_another_length_is_refused(values, data):
    packed = memoryview(pack_ints(np.array(values, np.int64)))
    with pytest.raises(ValueError):
        unpack_ints(packed[: data.draw(st.integers(0, len(packed) - 1))], -1)
    with pytest.raises(
        ValueError, match=f"has {len(values)} values where {len(values) + 1} belong"
    ):
        unpack_ints(packed, len(values) + 1)


def test_a_damaged_length_allocates_nothing():
    damaged = b"s" + (1 << 62).to_bytes(8, "little") + bytes(16)
    with pytest.raises(ValueError, match="a column has 4611686018427387904 values"):
        unpack_ints(memoryview(damaged), -1)


@given(st.lists(st.binary(max_size=9), max_size=5))
def test_sections_come_back(sections):
    packed = pack(MAGIC, sections)
    assert list(map(bytes, unpack(MAGIC, len(sections), packed))) == sections


@given(st.lists(st.binary(max_size=9), min_size=1, max_size=5), st.data())
def test_sections_that_are_cut_longer_or_of_another_message_are_refused(sections, data):
    packed = pack(MAGIC, sections)
    for damaged in (packed[: data.draw(st.integers(0, len(packed) - 1))], packed + b"x"):
        with pytest.raises(ValueError):
            unpack(MAGIC, len(sections), damaged)
    with pytest.raises(ValueError, match="do not begin with"):
        unpack(b"other", len(sections), packed)
