"""Stores: one small protocol, which :mod:`local_store`, :mod:`obstore_adapter` and :mod:`fsspec_adapter` implement.

A store has keys and objects. An object appears whole or not at all, and cannot be renamed. Every call is atomic, and
consistent with all calls that returned before it began, as S3, GCS and Azure promise. Retries are the library's.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, runtime_checkable

from typing_extensions import Buffer

from dcp_datastates.errors import StorageError


class StoredObject(NamedTuple):
    """An object, as a listing shows it."""

    key: str
    nbytes: int
    modified_at: float
    """By the store's clock, in seconds since the epoch."""

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]


@dataclass(frozen=True)
class Listing:
    """What lies directly below a prefix, or in a directory."""

    folders: tuple[str, ...]
    """The names below which there are more objects, without slashes, in order."""
    objects: tuple[StoredObject, ...]
    links: tuple[str, ...] = ()
    """The names of symbolic links to folders, in order. Only a file system has them."""

    @property
    def names(self) -> list[str]:
        return [*self.folders, *self.links, *(each.name for each in self.objects)]


class ObjectMissingError(StorageError, FileNotFoundError):
    """There is no such object."""

    def __init__(self, url: str) -> None:
        super().__init__(errno.ENOENT, "there is no such object", url)


class NotStoredError(StorageError):
    """Nothing was stored, and nothing will be by this call."""


class NotDurableError(StorageError):
    """The object is there, and may be gone after a crash."""


class ObjectStore(Protocol):
    """One bucket, or what corresponds to it. Any thread; calls wait without the GIL.

    Keys have no slash at their beginning or end. When the library has given up, every method raises
    :class:`StorageError` with the object's URL and the cause, without credentials; :class:`ObjectMissingError` if there
    is no such object (in a file system, also if the folder for a new one is missing).
    """

    @property
    def url(self) -> str:
        """``s3://bucket``, for messages."""

    def put(self, key: str, data: Buffer) -> None:
        """Store an object, in place of any that is there."""

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        """Store an object unless there is one; returns whether this call did. False after a retry may be wrong: the
        first try may have stored it. The caller reads it back (:mod:`decisions`).
        """

    def put_stream(
        self, key: str, pieces: Iterator[Buffer], *, part_bytes: int, parts_in_flight: int
    ) -> None:
        """Store an object of ``pieces``, which are sent as parts of ``part_bytes`` (the last may be smaller).

        Holds each piece until its part is sent, ``parts_in_flight`` parts at most and the one that fills. The object
        appears when all are sent. If ``pieces`` or a part raises, no object appears, and the parts are removed.
        """

    def get(self, key: str) -> bytes:
        """The object's bytes."""

    def get_range(self, key: str, begin: int, end: int) -> Buffer:
        """The bytes ``[begin, end)``; fewer if the object ends before. Never more, whatever the server sends."""

    def size(self, key: str) -> int:
        """The object's size in bytes."""

    def list(self, prefix: str) -> Listing:
        """What lies directly below ``prefix`` (``""``: the bucket); one request for each 1,000 entries."""

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; ones that are missing are no error."""


@runtime_checkable
class CopiedStore(Protocol):
    """A store that has copies of an object on several nodes. Raises as :class:`ObjectStore`."""

    def leave(self, key: str, why: str, node: str | None = None) -> bool:
        """The copy on ``node`` (None: the one that is read) is damaged: read another one from now on, and replace it.
        False: there is no other.
        """

    def places(self, prefix: str) -> dict[str, Sequence[str]]:
        """The nodes that have each object or folder directly below ``prefix``; a folder's name ends in a slash."""

    def elsewhere(self) -> dict[str, ObjectStore]:
        """By the names of the other nodes, the store as if each of these were alone."""


PART_BYTES: Final = 8 << 20
"""The smallest part of a large object: a segment of the host cache."""

MOST_PARTS: Final = 10_000
"""Of one object, in S3 and GCS. (Azure takes 50,000.)"""


def part_bytes(nbytes: int) -> int:
    """The size of the parts in which an object of ``nbytes`` is sent: a multiple of :data:`PART_BYTES`."""
    return max(1, -(-nbytes // (MOST_PARTS * PART_BYTES))) * PART_BYTES


def put_pieces(
    store: ObjectStore, key: str, nbytes: int, pieces: Iterator[Buffer], parts_in_flight: int
) -> None:
    """Store an object of ``nbytes`` bytes, in one request if it is one part. ``pieces`` may come from a store.

    Raises :class:`StorageError`, and what ``pieces`` raises.
    """
    part = part_bytes(nbytes)
    if nbytes <= part:
        store.put(key, b"".join(pieces))
    else:
        stream = _made_elsewhere(pieces)
        store.put_stream(key, stream, part_bytes=part, parts_in_flight=parts_in_flight)


def _made_elsewhere(pieces: Iterator[Buffer]) -> Iterator[Buffer]:
    """``pieces``, made in a thread of their own: obstore asks for them within a call, and cannot be called there."""
    with ThreadPoolExecutor(1) as executor:
        while (piece := executor.submit(next, pieces, None).result()) is not None:
            yield piece
