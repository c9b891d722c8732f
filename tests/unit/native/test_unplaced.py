"""Saves that the native engine reads before it is known where their files go."""

import gc
import struct
import threading
import weakref

import numpy as np
import pytest
from support.waiting import await_that

from dcp_datastates import _native

NEVER = 1000.0
CACHE = 32 << 20


class Owner:
    """Something that a job keeps alive."""


@pytest.fixture
def engine():
    engine = _native.Engine(CACHE)
    yield engine
    engine.shutdown()


def random_data(nbytes):
    return np.random.default_rng(0).integers(0, 255, nbytes, dtype=np.uint8)


def read_unplaced(engine, data, *, files=1, window=None, order=0, keepalive=None):
    content = _native.Transfer()
    content.add_buffer(0, data)
    made = [_native.SaveFile(f"unplaced-{i}", data.nbytes, content) for i in range(files)]
    return engine.save_unplaced(made, order, window or _native.Window(0), (data, keepalive))


def file_of(data):
    """The bytes of the file that ``data`` must become."""
    view = memoryview(data)
    block = _native.BLOCK_BYTES
    sums = [_native.crc32c(view[at : at + block]) for at in range(0, len(view), block)]
    table = struct.pack(f"<{len(sums)}I", *sums)
    return view.tobytes() + table + struct.pack("<I", _native.crc32c(table))


def wait_until_cache_is_free(engine):
    await_that(lambda: engine.stats().free_segments == engine.stats().total_segments)


def wait_until_cache_is_full(engine):
    await_that(lambda: engine.stats().waiting)


def test_sources_may_change_once_read_and_before_the_files_have_paths(engine, tmp_path):
    data = random_data(4 << 20)
    expected = file_of(data)
    job = read_unplaced(engine, data, files=2)
    assert job.wait_read(-1, 60)
    data[:] = 0
    assert not job.wait(0.05)
    assert job.bytes_written == 0
    assert list(tmp_path.iterdir()) == []
    paths = [tmp_path / "a", tmp_path / "b"]
    job.place([str(path) for path in paths], [str(tmp_path)])
    assert job.wait(60)
    assert job.fault is None
    assert [path.read_bytes() == expected for path in paths] == [True, True]
    wait_until_cache_is_free(engine)


def test_a_save_larger_than_the_cache_is_read_to_its_end_once_placed(engine, tmp_path):
    data = random_data(3 * CACHE // 2)
    job = read_unplaced(engine, data)
    wait_until_cache_is_full(engine)
    assert not job.wait_read(-1, 0.05)
    assert 0 < job.bytes_read < data.nbytes
    job.place([str(tmp_path / "file")], [str(tmp_path)])
    assert job.wait_read(-1, 60)
    assert job.wait(60)
    assert (tmp_path / "file").read_bytes() == file_of(data)
    wait_until_cache_is_free(engine)


def test_a_save_cancelled_before_it_is_placed_leaves_the_cache_empty(engine, tmp_path):
    job = read_unplaced(engine, random_data(12 << 20))
    assert job.wait_read(-1, 60)
    assert engine.stats().free_segments < engine.stats().total_segments
    job.cancel()
    assert job.wait(10)
    assert job.fault.kind == "cancelled"
    wait_until_cache_is_free(engine)
    job.place([str(tmp_path / "file")], [str(tmp_path)])  # does nothing
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("nbytes", [12 << 20, 2 * CACHE])
def test_a_dropped_save_that_was_never_placed_lets_go_of_all(engine, nbytes):
    owner = Owner()
    gone = weakref.ref(owner)
    job = read_unplaced(engine, random_data(nbytes), keepalive=owner)
    del owner
    job.wait_read(-1, 0.3)
    assert gone() is not None
    del job
    gc.collect()
    assert gone() is None
    wait_until_cache_is_free(engine)


def test_a_save_placed_and_read_goes_on_without_its_handle(engine, tmp_path):
    data = random_data(12 << 20)
    job = read_unplaced(engine, data)
    assert job.wait_read(-1, 60)
    job.place([str(tmp_path / "file")], [])
    del job
    wait_until_cache_is_free(engine)
    newer = read_unplaced(engine, data[:4], order=1)
    newer.place([str(tmp_path / "newer")], [])
    assert newer.wait(60)
    expected = file_of(data)
    await_that(lambda: (tmp_path / "file").stat().st_size == len(expected))  # cut at the end
    assert (tmp_path / "file").read_bytes() == expected


def test_a_save_without_files_is_done_only_when_placed(engine, tmp_path):
    job = engine.save_unplaced([], 0, _native.Window(0), None)
    assert not job.wait(0.05)
    job.place([], [str(tmp_path)])
    assert job.wait(10)
    assert job.fault is None


def test_a_path_that_cannot_be_opened_is_a_fault_that_names_it(engine, tmp_path):
    job = read_unplaced(engine, random_data(4))
    job.place([str(tmp_path / "none" / "file")], [])
    assert job.wait(10)
    assert (job.fault.errno, job.fault.operation) == (2, "open")
    assert job.fault.path == str(tmp_path / "none" / "file")


@pytest.mark.parametrize(
    "paths",
    [
        [],
        ["a"],
        ["a", "b", "c"],
        ["a", ""],
        ["a", "b\0c"],
        ["a", "a"],
    ],
)
def test_a_wrong_placement_is_a_value_error_and_may_be_put_right(engine, tmp_path, paths):
    job = read_unplaced(engine, random_data(4), files=2)
    with pytest.raises(ValueError, match=r"\S"):
        job.place(paths, [])
    assert not job.done
    job.place([str(tmp_path / "a"), str(tmp_path / "b")], [str(tmp_path)])
    assert job.wait(10)
    assert job.fault is None


def test_a_save_is_placed_once(engine, tmp_path):
    job = read_unplaced(engine, random_data(4), window=_native.Window(NEVER))
    job.place([str(tmp_path / "a")], [])
    with pytest.raises(ValueError, match="placed before"):
        job.place([str(tmp_path / "b")], [])
    ordinary = engine.save([], [], 1, _native.Window(0), None)
    with pytest.raises(ValueError, match="placed before"):
        ordinary.place([], [])


def test_an_older_save_whose_window_opens_late_is_not_held_up(engine, tmp_path):
    data = random_data(2 * CACHE)
    window = _native.Window(NEVER)
    older = read_unplaced(engine, data, window=window)
    older.place([str(tmp_path / "older")], [])
    newer = read_unplaced(engine, data, order=1)
    assert not newer.wait_read(-1, 0.1)
    assert newer.bytes_read == 0
    window.open()
    assert older.wait(60)  # so a caller may wait for it before it places the newer one
    newer.place([str(tmp_path / "newer")], [])
    assert newer.wait(60)
    assert newer.fault is None


def test_shutdown_ends_what_is_parked(tmp_path):
    engine = _native.Engine(CACHE)
    job = read_unplaced(engine, random_data(2 * CACHE))
    placing = threading.Thread(target=lambda: job.place([str(tmp_path / "file")], []))
    placing.start()
    engine.shutdown()
    placing.join()
    assert job.wait(0)
    assert job.fault is None or job.fault.kind == "shutdown"
    wait_until_cache_is_free(engine)
