"""Sends the files of a streamed save to a store, and fetches what a streamed restore reads from one.

The engine knows no network. Of a save, native threads copy tensors into segments of the host cache and compute
checksums, and Python threads hand the segments to ``put_stream``, file by file. A segment goes back to the cache when
``put_stream`` has let go of it, so a save needs no more memory than the cache, and a slow store slows down the reads.
Of a restore, Python threads fetch ranges by ``read_range``, several at a time, and hand the bytes to the engine, which
verifies their checksums and copies them into tensors, in the same threads, without the GIL.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from typing_extensions import Buffer

from dcp_datastates._native import ReadRequest, RestoreJob, SaveJob, Segment
from dcp_datastates.errors import StorageError, release_frames
from dcp_datastates.io.engine import fail
from dcp_datastates.process.futures import Worker
from dcp_datastates.process.work import Done, Unit, work

MOST_FILES_AT_ONCE: Final = 4

PutStream = Callable[[str, Iterator[Segment]], None]
"""Stores the bytes of an iterator under a name, and returns when they are durable; raises if they are not.

It must send a segment, and drop all references to it, without waiting for more than the next one. If the iterator
raises, the save has failed: it must not complete the file, and raise, too.
"""


class Upload:
    """The threads that send the files of one save. They end with the save.

    A file that could not be sent fails the job, with an ``io`` fault that has the ``errno`` and the message of the
    error. When all files are stored, the job is done.
    """

    def __init__(
        self,
        job: SaveJob,
        names: Sequence[str],
        put_stream: PutStream,
        files_at_once: int = MOST_FILES_AT_ONCE,
    ) -> None:
        """Start the threads. ``names`` are those of the job's files, in their order. Returns immediately."""
        files: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        for file in enumerate(names):
            files.put(file)
        self._workers = [
            Worker("dcp_datastates-upload") for _ in range(min(len(names), files_at_once))
        ]
        for worker in self._workers:
            if not worker.post(lambda: _send_files(job, files, put_stream)):
                job.fail("no thread could be started to send it", 0, names[0])
            worker.finish()

    def join(self, seconds: float | None = None) -> bool:
        """Wait until all threads have ended, or for ``seconds`` for each; return whether they have. A thread is a
        daemon: one that ``put_stream`` never returns to does not keep the process from its end.
        """
        return all(worker.close(seconds) for worker in self._workers)


def _send_files(
    job: SaveJob, files: queue.SimpleQueue[tuple[int, str]], put_stream: PutStream
) -> None:
    # In the job's order: its oldest files get cache segments first.
    while job.fault is None:
        try:
            file, name = files.get_nowait()
        except queue.Empty:
            return
        try:
            put_stream(name, job.stream(file))
            job.stored(file)
        except BaseException as error:
            fail(job, error, name)
            release_frames(error)  # they hold segments


THREADS: Final = 16

ReadRange = Callable[[str, int, int], Buffer]
"""Returns the bytes [begin, end) of the file at a path. Any thread."""


def fetch(job: RestoreJob, read_range: ReadRange, threads: int = THREADS) -> None:
    """Fetch all that ``job`` reads. Returns when the job has ended, and all threads have.

    The first error of ``read_range`` fails the job, with an ``io`` fault that has its ``errno`` and its message, and is
    raised. The job's other faults, such as a checksum that does not match, are not raised.

    Raises:
        StorageError: ``read_range`` has returned more bytes, or fewer, than asked for.
    """
    try:
        work(map(partial(_unit, job, read_range), job.requests()), 0, threads, None)
    except BaseException as error:
        release_frames(error)  # they hold requests, and so segments
        raise
    finally:
        job.cancel()  # does nothing if it is done; after an interrupt, no thread fetches the rest


def _unit(job: RestoreJob, read_range: ReadRange, request: ReadRequest) -> Unit:
    def run(done: Done) -> None:
        nonlocal request
        begin, end = request.offset, request.offset + request.nbytes
        try:
            data = read_range(request.path, begin, end)
            if (nbytes := memoryview(data).nbytes) != request.nbytes:
                raise StorageError(
                    f"'{request.path}': the store returned {nbytes} bytes for the range from {begin} to {end}, "
                    f"which has {request.nbytes}"
                )
            request.fill(data)
        except BaseException as error:
            fail(job, error, request.path)
            # The error may keep this frame until a garbage collection, and loads would wait for the request's segment.
            del request
            raise

    return run
