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
