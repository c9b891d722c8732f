"""Streamed saves and restores as Python sees them: buffers, forks, garbage, the end of the engine."""

import gc
import os
import weakref

import numpy as np
import pytest
from support.jobs.scripts import run_script
from support.state.objects import Objects, restore, save, sources
from support.waiting import await_that

from dcp_datastates import _native

CACHE = _native.MIN_HOST_CACHE_BYTES
SEGMENT = _native.SEGMENT_BYTES


@pytest.fixture
def engine():
    engine = _native.Engine(CACHE)
    yield engine
    engine.shutdown()


def wait_until_cache_is_free(engine):
    await_that(lambda: engine.stats().free_segments == engine.stats().total_segments)


def send(job, names, objects):
    """In this thread, file by file."""
    for file, name in enumerate(names):
        objects.put_stream(name, job.stream(file))
        job.stored(file)


def fetch(job, objects):
    for request in job.requests():
        begin = request.offset
        request.fill(objects.read_range(request.path, begin, begin + request.nbytes))


def test_a_segment_is_a_read_only_buffer_whose_views_keep_its_memory(engine):
    (data,) = sources(SEGMENT + 4)
    job, _ = save(engine, [data])
    stream = job.stream(0)
    segment = next(stream)
    assert segment.nbytes == SEGMENT
    view = memoryview(segment)
    assert view.readonly
    assert view == memoryview(data)[:SEGMENT]
    rest = next(stream)
    assert rest.nbytes == 4 + 4 * 10
    with pytest.raises(StopIteration):
        next(stream)
    job.stored(0)
    assert job.wait(0)
    free = engine.stats().free_segments
    part = view[100:200]
    del segment, view, rest
    assert engine.stats().free_segments == free + 1
    assert job.bytes_written == 4 + 4 * 10
    del part
    assert engine.stats().free_segments == free + 2
    assert job.bytes_written == SEGMENT + 4 + 4 * 10


@pytest.mark.parametrize(
    ("message", "shown"), [("a\0b", "a\0b"), ("\udc80 \ud800", "\\udc80 \\ud800"), ("", "")]
)
def test_any_message_fails_a_job(engine, message, shown):
    job, names = save(engine, sources(4))
    job.fail(message, 0, names[0])
    assert job.wait(60)
    assert job.fault.message == f"transfer of 's3://bucket/0' failed: {shown}"


def test_streams_are_refused_for_files_that_are_not_there(engine, tmp_path):
    job, _ = save(engine, sources(4))
    with pytest.raises(ValueError, match="file=1 is not one of the save's 1"):
        next(job.stream(1))
    with pytest.raises(ValueError, match="not taken to its end"):
        job.stored(0)
    local = engine.save([], [], 0, _native.Window(0), None)
    with pytest.raises(ValueError, match="writes its files itself"):
        local.stored(0)


def test_a_forked_child_is_refused_and_may_drop_all_it_inherited(engine):
    data = sources(2 * SEGMENT)
    job, names = save(engine, data)
    stream = job.stream(0)
    segment = next(stream)
    objects = Objects()
    objects.stored[names[0]] = bytes(2 * SEGMENT + 4 * 17)
    read = restore(engine, objects, names, data)
    requests = read.requests()
    request = next(requests)
    child = os.fork()
    if child == 0:
        refused = 0
        for use in (
            lambda: next(stream),
            lambda: job.stored(0),
            lambda: next(requests),
            lambda: request.fill(bytes(request.nbytes)),
            lambda: memoryview(segment),
        ):
            try:
                use()
            except (RuntimeError, BufferError):
                refused += 1
        del stream, segment, request, requests, job, read
        gc.collect()
        os._exit(0 if refused == 5 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert len(memoryview(segment)) == SEGMENT


class Owner:
    """Something that a job keeps alive."""


def test_a_cycle_through_a_job_and_its_stream_is_collected(engine):
    for verb in ("save", "restore"):
        owner = Owner()
        gone = weakref.ref(owner)
        if verb == "save":
            file = _native.SaveFile("s3://a", 4, _native.Transfer())
            owner.job = engine.save_streamed([file], 0, _native.Window(0), owner)
            owner.stream = owner.job.stream(0)
            owner.segment = next(owner.stream)
        else:
            plan = _native.RestorePlan()
            plan.add_file("s3://a", 12, 4, _native.Transfer())
            owner.job = engine.restore_streamed(plan, owner)
            owner.stream = owner.job.requests()
            owner.segment = next(owner.stream)
        del owner
        gc.collect()
        assert gone() is None
    wait_until_cache_is_free(engine)


def test_an_interpreter_that_ends_while_daemon_threads_hold_all_ends_cleanly(tmp_path):
    run_script(
        """
        import contextlib, threading
        from dcp_datastates import _native
        from dcp_datastates.io import engine

        native = engine.engine(32 << 20)
        content = _native.Transfer()
        content.add_buffer(0, memory := bytearray(40 << 20))
        file = _native.SaveFile("s3://a", len(memory), content)
        save = native.save_streamed([file], 0, _native.Window(0.0), memory)
        plan = _native.RestorePlan()
        plan.add_file("s3://a", file.nbytes, len(memory), content)
        restore = native.restore_streamed(plan, memory)

        def take(items):
            held = []
            with contextlib.suppress(RuntimeError):  # the engine is shut down
                for item in items:
                    held.append(item)

        for items in (save.stream(0), restore.requests(), restore.requests()):
            threading.Thread(target=take, args=(items,), daemon=True).start()
        time.sleep(0.2)
        """,
        tmp_path / "file",
    ).assert_clean()


def test_a_request_is_filled_once_with_what_it_asks_for(engine):
    data = sources(SEGMENT)
    objects = Objects()
    job, names = save(engine, data)
    send(job, names, objects)
    found = [np.zeros_like(each) for each in data]
    read = restore(engine, objects, names, found)
    requests = read.requests()
    request = next(requests)
    assert request.path == names[0]
    assert (request.offset, request.nbytes) == (SEGMENT, 4 * 9)
    with pytest.raises(ValueError, match="35 bytes instead of 36"):
        request.fill(bytes(35))
    request.fill(objects.read_range(names[0], SEGMENT, SEGMENT + 36))
    with pytest.raises(RuntimeError, match="filled before"):
        request.fill(bytes(36))
    fetch(read, objects)
    assert read.wait(60)
    assert read.fault is None
    assert np.array_equal(found[0], data[0])
