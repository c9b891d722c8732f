"""The messages of planning, as bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_datastates.planning.exchange import Answer, Offer, RankReport, Report

INTS = st.lists(st.integers(0, 1 << 62), max_size=20)
FILES = st.lists(st.tuples(st.text(max_size=8), st.integers(0, 1 << 62), st.integers(0, 1 << 62)))


@given(files=FILES, numbers=INTS, data=st.data())
def test_a_report_comes_back(files, numbers, data):
    same = st.lists(st.integers(0, 1 << 62), min_size=len(numbers), max_size=len(numbers))
    columns = [np.array(each, np.int64) for each in (numbers, data.draw(same), data.draw(same))]
    report = Report(tuple(files), *columns)
    found = Report.decode(report.encode())
    assert found.files == report.files
    for name in ("numbers", "offsets", "lengths"):
        assert getattr(found, name).tolist() == getattr(report, name).tolist()
    assert found.digest == report.digest


DIGESTS = st.binary(min_size=16, max_size=16)
IN_FULL = st.none() | st.binary()
MESSAGES = st.one_of(
    st.builds(Offer, DIGESTS, st.binary(), IN_FULL, st.lists(DIGESTS, max_size=4).map(tuple)),
    st.builds(Answer, st.binary(), DIGESTS, IN_FULL),
    st.builds(RankReport, DIGESTS, IN_FULL, st.binary()),
)


@given(message=MESSAGES)
def test_a_message_comes_back_in_full_or_by_digest(message):
    assert type(message).decode(message.encode()) == message


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: data + b"x", lambda data: b"no" + data]
)
def test_damaged_bytes_are_refused(damage):
    report = Report((("f", 1, 2),), *(np.arange(3) for _ in range(3))).encode()
    for decode, data in (
        (Report.decode, report),
        (RankReport.decode, RankReport(b"d" * 16, report).encode()),
    ):
        with pytest.raises(ValueError):
            decode(damage(data))
