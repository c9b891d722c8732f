"""Messages, their sections and columns of integers as bytes: they come back, and damaged ones are refused."""

import dataclasses

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dcp_datastates.planning.messages import Answer, Offer, RankPlan, RankReport, Report
from dcp_datastates.planning.packing import pack_ints, unpack_ints

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
FILES = st.lists(st.tuples(st.text(max_size=8), st.integers(0, 1 << 62), st.integers(0, 1 << 62)))


@st.composite
def columns(draw, *groups):
    """Groups of so many columns, whose columns have one length."""
    found = []
    for count in groups:
        length = draw(st.integers(0, 9))
        each = st.lists(INTS, min_size=length, max_size=length)
        found += [np.array(draw(each), np.int64) for _ in range(count)]
    return found


MESSAGES = st.one_of(
    st.builds(Offer, st.binary(), st.binary(), st.binary()),
    st.builds(Answer, st.binary(), st.binary(), st.binary()),
    st.builds(RankReport, st.binary(), st.binary(), st.binary()),
    st.builds(lambda files, each: Report(tuple(files), *each), FILES, columns(3)),
    st.builds(lambda each: RankPlan(*each), columns(4, 2)),
)


def fields(message):
    found = [getattr(message, field.name) for field in dataclasses.fields(message)]
    return [each.tolist() if isinstance(each, np.ndarray) else each for each in found]


@given(MESSAGES)
def test_a_message_comes_back(message):
    found = type(message).decode(message.encode())
    assert fields(found) == fields(message)
    assert found.encode() == message.encode()
    if hasattr(message, "digest"):
        assert found.digest == message.digest


@given(st.builds(lambda each: RankPlan(*each), columns(4, 2)), st.data())
def test_digests_are_equal_if_and_only_if_the_messages_are(one, data):
    other = (
        RankPlan(*data.draw(columns(4, 2)))
        if data.draw(st.booleans())
        else RankPlan(*vars(one).values())
    )
    assert (one.digest == other.digest) == (fields(one) == fields(other))


@given(MESSAGES, st.data())
def test_a_message_that_is_cut_longer_or_of_another_kind_is_refused(message, data):
    encoded = message.encode()
    for damaged in (
        encoded[: data.draw(st.integers(0, len(encoded) - 1))],
        encoded + b"x",
        bytes([encoded[0] ^ 1]) + encoded[1:],
    ):
        with pytest.raises(ValueError):
            type(message).decode(damaged)


@pytest.mark.parametrize("kind", [Report, RankPlan])
def test_columns_of_different_lengths_are_refused(kind):
    files = [((),)] if kind is Report else []
    counts = [3] * 3 if kind is Report else [3] * 4 + [2] * 2
    for number in range(len(counts)):
        lengths = [count + (number == at) for at, count in enumerate(counts)]
        with pytest.raises(ValueError, match="different lengths"):
            kind(*files, *map(np.zeros, lengths))


def test_values_that_open_to_too_much_are_refused(monkeypatch):
    monkeypatch.setattr("dcp_datastates.planning.packing._MOST_TEXT_BYTES", 100)
    report = Report((("f" * 2000, 1, 2),), *(np.arange(3) for _ in range(3)))
    with pytest.raises(ValueError, match="longer than 100 bytes"):
        Report.decode(report.encode())


@given(COLUMNS)
@example([0, 1, 5, 3])  # nearly a progression
def test_a_column_comes_back(values):
    found = unpack_ints(memoryview(pack_ints(np.array(values, np.int64))))
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
def test_a_column_that_is_cut_is_refused(values, data):
    packed = memoryview(pack_ints(np.array(values, np.int64)))
    with pytest.raises(ValueError):
        unpack_ints(packed[: data.draw(st.integers(0, len(packed) - 1))])


@pytest.mark.parametrize("count", [1 << 62, 1 << 27])
def test_a_damaged_length_allocates_nothing(count):
    damaged = b"s" + count.to_bytes(8, "little") + bytes(16)
    with pytest.raises(ValueError, match=f"a column has {count} values"):
        unpack_ints(memoryview(damaged))
