"""Uploads: threads that send the files of a streamed save."""

import threading

import pytest
from support.state.objects import Objects, save, sources
from support.waiting import await_that

from dcp_datastates import _native
from dcp_datastates.io.streams import Upload

SEGMENT = _native.SEGMENT_BYTES
NAME = "dcp_datastates-upload"


@pytest.fixture
def engine():
    engine = _native.Engine(_native.MIN_HOST_CACHE_BYTES)
    yield engine
    engine.shutdown()


def threads():
    return [each for each in threading.enumerate() if each.name == NAME]


def check_nothing_left(engine):
    await_that(lambda: engine.stats().free_segments == engine.stats().total_segments)
    assert threads() == []


def check_next_save(engine):
    objects = Objects()
    job, names = save(engine, data := sources(3 * SEGMENT), 1)
    upload = Upload(job, names, objects.put_stream)
    assert job.wait(60)
    upload.join()
    assert objects.stored[names[0]][: 3 * SEGMENT] == data[0].tobytes()
    check_nothing_left(engine)


@pytest.mark.parametrize("files_at_once", [1, 2, 9])
def test_all_files_are_stored_through_the_smallest_cache(engine, files_at_once):
    data = sources(4 * SEGMENT, 3 * SEGMENT + 4, 4, SEGMENT, 5 * SEGMENT)
    objects = Objects()
    job, names = save(engine, data)
    upload = Upload(job, names, objects.put_stream, files_at_once)
    assert job.wait(60)
    assert job.fault is None
    upload.join()
    for name, each in zip(names, data, strict=True):
        assert objects.stored[name][: each.nbytes] == each.tobytes()
    check_nothing_left(engine)


def test_a_save_without_files_is_done(engine):
    job, names = save(engine, [])
    Upload(job, names, Objects().put_stream).join()
    assert job.wait(60)
    assert job.fault is None


@pytest.mark.parametrize("part", [0, SEGMENT, 4 * SEGMENT])
def test_an_error_fails_the_save_and_leaves_nothing(engine, part):
    def fail(name, at):
        if name.endswith("1") and at == part:
            raise OSError(5, "the store refuses")

    objects = Objects(fail)
    job, names = save(engine, sources(2 * SEGMENT, 4 * SEGMENT, 4 * SEGMENT))
    upload = Upload(job, names, objects.put_stream, 2)
    assert job.wait(60)
    upload.join()
    assert (job.fault.kind, job.fault.errno, job.fault.path) == ("io", 5, names[1])
    assert "the store refuses" in job.fault.message
    assert names[1] not in objects.stored
    del job
    check_nothing_left(engine)
    check_next_save(engine)


def test_a_store_that_takes_too_little_fails_the_save(engine):
    job, names = save(engine, sources(2 * SEGMENT))
    upload = Upload(job, names, lambda name, pieces: None)
    assert job.wait(60)
    upload.join()
    assert "not taken to its end" in job.fault.message


def test_a_cancelled_save_ends_its_threads(engine):
    job, names = save(engine, sources(5 * SEGMENT))
    begun = threading.Event()
    objects = Objects(lambda name, at: begun.set())
    upload = Upload(job, names, objects.put_stream)
    assert begun.wait(60)
    job.cancel()
    assert job.wait(60)
    upload.join()
    assert job.fault is None or job.fault.kind == "cancelled"
    check_nothing_left(engine)


def test_a_store_that_hangs_is_not_waited_for(engine):
    hangs, released = threading.Event(), threading.Event()

    def hang(name, at):
        hangs.set()
        assert released.wait(60)

    job, names = save(engine, sources(5 * SEGMENT))
    upload = Upload(job, names, Objects(hang).put_stream)
    assert hangs.wait(60)
    job.cancel()
    assert job.wait(60)
    upload.join(0.05)
    assert len(threads()) == 1
    released.set()
    upload.join()
    check_nothing_left(engine)
    check_next_save(engine)
