"""The engine compares what it has copied with what was expected, not with the memory as it is afterwards."""

import numpy as np
import pytest

from dcp_datastates import _native

CHANGING = 2
"""A group of memory that the program may change."""


@pytest.fixture
def engine():
    made = _native.Engine(32 << 20)
    yield made
    made.shutdown()


@pytest.fixture
def data():
    return np.random.default_rng(0).integers(0, 255, 20 << 20, dtype=np.uint8)  # three segments


def expecting(data, *, whole=None):
    expected = _native.ExpectedBytes()
    if whole is None:
        expected.add_words([7], [data.ctypes.data], [data.nbytes], 1)
    else:
        expected.add_whole([7], [data.ctypes.data], [data.nbytes], [whole.ctypes.data])
    return expected


def save(engine, data, path, expected):
    """A save in two files, whose content begins at an odd place of the stream."""
    half = data.nbytes // 2 - 3
    files = []
    for number, (begin, end) in enumerate([(0, half), (half, data.nbytes)]):
        content = _native.Transfer()
        content.add(5, end - begin, data.ctypes.data + begin, CHANGING)
        table = 5 + end - begin
        files.append(_native.SaveFile(str(path / str(number)), table + -table % 4, content))
    job = engine.save(files, [], 0, _native.Window(0), data, (), expected)
    while not job.wait_read(-1, 1.0):
        pass
    return job


def test_memory_as_expected_is_saved(engine, data, tmp_path):
    job = save(engine, data, tmp_path, expecting(data))
    assert job.wait(60)
    assert job.fault is None
    assert job.difference is None


def test_what_was_changed_back_after_it_was_read_is_seen(engine, data, tmp_path):
    expected = expecting(data)
    data ^= 1
    job = save(engine, data, tmp_path, expected)
    data ^= 1
    assert job.fault is not None
    assert job.fault.kind == "torn"
    assert job.difference is not None
    assert job.difference[0] == 7


@pytest.mark.parametrize("at", [0, (8 << 20) - 6, (10 << 20) - 3, (20 << 20) - 1])
def test_one_byte_is_seen_if_all_are_expected(engine, data, at, tmp_path):
    """At the edges of segments, of files, and of the tensor."""
    whole = data.copy()
    data[at] ^= 1
    job = save(engine, data, tmp_path, expecting(data, whole=whole))
    assert job.difference == (7, at, at + 1)


def test_columns_that_do_not_fit_are_refused():
    expected = _native.ExpectedBytes()
    with pytest.raises(ValueError, match="tensors, addresses and sizes have 1, 2 and 1 entries"):
        expected.add_words([0], [1, 2], [3], 0)
    with pytest.raises(ValueError, match="null address"):
        expected.add_words([0], [0], [3], 0)
    with pytest.raises(ValueError, match="copies has 0 entries for 1 tensors"):
        expected.add_whole([0], [64], [3], [])
