"""Downloads: threads that fetch what a streamed restore reads."""

import threading

import numpy as np
import pytest
from support.state.objects import Objects, restore, save, sources
from support.waiting import await_that

from dcp_datastates import _native
from dcp_datastates.errors import StorageError
from dcp_datastates.io.streams import fetch
from dcp_datastates.process.garbage import collection_paused

SEGMENT = _native.SEGMENT_BYTES


@pytest.fixture
def engine():
    engine = _native.Engine(24 * SEGMENT)
    yield engine
    engine.shutdown()


def saved(engine, *sizes):
    objects, data = Objects(), sources(*sizes)
    job, names = save(engine, data)
    for file, name in enumerate(names):
        objects.put_stream(name, job.stream(file))
        job.stored(file)
    assert job.wait(60)
    return objects, names, data


def check_nothing_left(engine):
    await_that(lambda: engine.stats().free_segments == engine.stats().total_segments)
    assert [
        each for each in threading.enumerate() if each.name.startswith("dcp_datastates-work")
    ] == []


def check_restores(engine, objects, names, data):
    found = [np.zeros_like(each) for each in data]
    job = restore(engine, objects, names, found)
    fetch(job, objects.read_range)
    assert job.wait(0)
    assert job.fault is None
    assert all(map(np.array_equal, found, data))
    check_nothing_left(engine)


def test_all_is_fetched_in_ranges_of_at_most_a_segment(engine):
    objects, names, data = saved(engine, 5 * SEGMENT + 12, 4, SEGMENT)
    check_restores(engine, objects, names, data)
    assert max(end - begin for _, begin, end in objects.ranges) == SEGMENT


def test_many_ranges_are_fetched_at_once(engine):
    objects, names, data = saved(engine, 16 * SEGMENT)
    together = threading.Barrier(16, timeout=60)

    def meet(name, begin):
        if begin < 16 * SEGMENT:  # not the table
            together.wait()

    objects.meanwhile = meet
    check_restores(engine, objects, names, data)


@pytest.mark.parametrize(("part", "errors"), [(SEGMENT, 8), (12 * SEGMENT, 1)])
def test_an_error_fails_the_restore_and_leaves_nothing(engine, part, errors):
    objects, names, data = saved(engine, 12 * SEGMENT)
    together = threading.Barrier(errors, timeout=60)

    def fail(name, begin):
        if part <= begin < part + 8 * SEGMENT:
            together.wait()
            kept = OSError(5, "the store refuses")  # with its frames, until a garbage collection
            raise kept

    objects.meanwhile = fail
    job = restore(engine, objects, names, [np.zeros_like(each) for each in data])
    with collection_paused():
        with pytest.raises(OSError, match="the store refuses"):
            fetch(job, objects.read_range)
        assert job.wait(60)
        check_nothing_left(engine)
    assert job.fault is not None
    assert (job.fault.kind, job.fault.errno, job.fault.path) == ("io", 5, names[0])
    objects.meanwhile = lambda name, begin: None
    check_restores(engine, objects, names, data)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda whole, begin, end: whole[begin : end - 1],
        lambda whole, begin, end: whole[begin : end + 1],
        lambda whole, begin, end: b"",
        lambda whole, begin, end: whole,
    ],
    ids=["short", "long", "empty", "whole"],
)
def test_a_range_of_a_wrong_length_is_an_error_that_names_it(engine, wrong):
    objects, names, data = saved(engine, 2 * SEGMENT)
    whole = objects.stored[names[0]] + b"!"
    job = restore(engine, objects, names, [np.zeros_like(each) for each in data])
    with pytest.raises(StorageError, match=r"'s3://bucket/0': the store returned \d+ bytes"):
        fetch(job, lambda name, begin, end: wrong(whole, begin, end))
    assert job.wait(60)
    assert job.fault is not None
    assert "for the range from" in job.fault.message
    check_nothing_left(engine)


def test_a_cancelled_restore_is_done_while_the_store_hangs(engine):
    objects, names, data = saved(engine, 4 * SEGMENT)
    hangs, released = threading.Event(), threading.Event()

    def hang(name, begin):
        hangs.set()
        assert released.wait(60)

    objects.meanwhile = hang
    job = restore(engine, objects, names, [np.zeros_like(each) for each in data])
    fetching = threading.Thread(target=fetch, args=(job, objects.read_range))
    fetching.start()
    assert hangs.wait(60)
    job.cancel()
    assert job.wait(60)
    released.set()
    fetching.join(60)
    check_nothing_left(engine)
