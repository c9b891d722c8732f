"""Sends one rank's files of one save to an object store, each as one object, part by part.

A part is a segment of the host cache, or several if a file would otherwise have more parts than a store accepts. So
what is on its way to the store lies in the host cache, and nowhere else. A file that fits in one part is one request.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from typing import Final

from dcp_datastates._native import SEGMENT_BYTES, Engine, SaveJob, Segment
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.io.upload import MOST_FILES_AT_ONCE, Upload
from dcp_datastates.planning.save_planning import WriteJob
from dcp_datastates.process.ending import Phase, at_end
from dcp_datastates.storage.failpoints import hit
from dcp_datastates.storage.object_path import ObjectPath
from dcp_datastates.storage.object_store import MOST_PARTS, part_bytes
from dcp_datastates.text import size as show_size

__all__ = ["StoreUpload", "check_fits"]

PARTS_IN_FLIGHT: Final = 16
"""Of all files that are sent at once."""

_ABORT_SECONDS: Final = 3.0
"""How long a failed save waits until its parts are removed, before it reports the failure."""

_LAST_SECONDS: Final = 10.0
"""How long the end of the process waits for that."""


def check_fits(job: WriteJob, engine: Engine) -> None:
    """Raise :class:`ConfigurationError` unless the host cache has room for the parts of the largest file."""
    largest = max((file.nbytes for file in job.sealed), default=0)
    part = part_bytes(largest)
    if part > SEGMENT_BYTES and 4 * part > engine.host_cache_bytes:
        raise ConfigurationError(
            f"a file of {show_size(largest)} goes to a store in {MOST_PARTS} parts of {show_size(part)}, and the host "
            f"cache of {show_size(engine.host_cache_bytes)} has no room for four of them: give "
            f"host_cache_size={show_size(4 * part)!r}, at least"
        )


class StoreUpload:
    """The upload of a streamed ``job``, which has begun. Its threads end with the job.

    Args:
        folder: the prefix of the objects.
        content: what the job writes.
    """

    def __init__(self, job: SaveJob, folder: ObjectPath, content: WriteJob) -> None:
        names = [layout.name for layout in content.layouts]
        self._folder = folder
        self._store = folder.store
        self._sizes = dict(zip(names, (file.nbytes for file in content.sealed), strict=True))
        many = all(part_bytes(nbytes) == SEGMENT_BYTES for nbytes in self._sizes.values())
        # A file whose parts take several segments must not wait for those that another file's parts hold.
        self._at_once = max(1, min(len(names), MOST_FILES_AT_ONCE)) if many else 1
        self._job = job
        self._failure: BaseException | None = None
        self._gives_up_at: float | None = None
        self._upload = Upload(job, names, self._put, self._at_once)
        _uploads.add(self)

    @property
    def failure(self) -> BaseException | None:
        """The store's first error; None if there is none so far."""
        return self._failure

    def is_over(self, seconds: float) -> bool:
        """For a job that has failed: wait up to ``seconds`` until nothing is sent any more, and unfinished parts are
        removed; return whether that is so. True, too, if the store has not answered for some seconds.
        """
        now = time.monotonic()
        if self._gives_up_at is None:
            self._gives_up_at = now + _ABORT_SECONDS
        return self._upload.join(max(0.0, min(seconds, self._gives_up_at - now))) or (
            time.monotonic() >= self._gives_up_at
        )

    def abort(self, until: float) -> None:
        """Cancel the job; wait until nothing is sent any more, or the monotonic clock says ``until``."""
        self._job.cancel()
        self._upload.join(max(0.0, until - time.monotonic()))

    def _put(self, name: str, pieces: Iterator[Segment]) -> None:
        """Store one file. Its pieces are segments, held by the library alone."""
        key = (self._folder / name).key
        nbytes = self._sizes[name]
        part = part_bytes(nbytes)
        try:
            hit("upload.before")
            if nbytes <= part:
                self._store.put(key, next(pieces))
                next(pieces, None)
            else:
                in_flight = max(1, PARTS_IN_FLIGHT // self._at_once)
                self._store.put_stream(key, pieces, part_bytes=part, parts_in_flight=in_flight)
            if self._job.fault is not None:
                # All was sent before the job failed. Whoever cleans up may have done so.
                self._store.delete([key])
            hit("upload.after")
        except BaseException as error:
            self._failure = self._failure or error
            raise


_uploads: weakref.WeakSet[StoreUpload] = weakref.WeakSet()


def _abort_all() -> None:
    """At the end of the process, when it has waited for its saves: a thread in a store's library must not outlive the
    interpreter, and parts that nobody completes cost money.
    """
    until = time.monotonic() + _LAST_SECONDS
    for upload in list(_uploads):
        upload.abort(until)


at_end(_abort_all, Phase.GIVE_UP)
