"""Fetches what a streamed restore reads from a store.

The engine knows no network: Python threads fetch ranges by ``read_range``, several at a time, and hand the bytes to the
engine, which verifies their checksums and copies them into tensors, in the same threads, without the GIL.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from typing_extensions import Buffer

from dcp_datastates._native import ReadRequest, RestoreJob
from dcp_datastates.errors import StorageError, release_frames
from dcp_datastates.io.engine import fail
from dcp_datastates.process.work import Done, Unit, work

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
        job.cancel()  # does nothing if it is done; after an interrupt, nobody fetches the rest


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
