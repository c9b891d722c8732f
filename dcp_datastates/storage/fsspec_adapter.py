"""Every other store that fsspec knows, and any store with options in fsspec's words.

fsspec promises less than the protocol asks for. Whether a creation succeeds once is tried before anything relies on it
(:mod:`self_test`). Some file systems show an object while it is written, and a process that dies then leaves part of
it: only data files are written in parts, and no attempt is committed before they are whole.
"""

from __future__ import annotations

import contextlib
import errno
import functools
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, TypeVar

import fsspec
from typing_extensions import Buffer

from dcp_datastates.errors import ConfigurationError, StorageError
from dcp_datastates.storage.object_path import url_of
from dcp_datastates.storage.object_store import Listing, ObjectMissingError, StoredObject
from dcp_datastates.storage.store_calls import LibraryStore

T = TypeVar("T")


class FsspecStore(LibraryStore):
    """An :class:`~dcp_datastates.storage.object_store.ObjectStore`."""

    def __init__(self, url: str, options: Mapping[str, Any] | None) -> None:
        super().__init__(url, options)
        self._root = str(self._client._strip_protocol(url)).strip("/")

    def _open(self) -> Any:
        scheme = self.url.partition("://")[0]
        try:
            kind: Any = fsspec.get_filesystem_class(scheme)
            # the host, for example
            given = {**kind._get_kwargs_from_urls(self.url), **self._options}
            files = kind(skip_instance_cache=True, **given)
        except Exception as error:  # libraries have errors of their own
            raise ConfigurationError(
                f"{self.url} cannot be opened by fsspec: {self._said(error)}"
            ) from None
        # Another process may change what a cache holds. (As an option, some would pass it on to their library.)
        files.dircache.use_listings_cache = False
        return files

    def put(self, key: str, data: Buffer) -> None:
        self._ask("storing", key, lambda: self._pipe(key, data, "overwrite"))

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        def put() -> bool:
            try:
                self._pipe(key, data, "create")
            except FileExistsError:
                return False
            return True

        return self._ask("storing", key, put)

    def put_stream(
        self, key: str, pieces: Iterator[Buffer], *, part_bytes: int, parts_in_flight: int
    ) -> None:
        def begin() -> Any:
            # Without autocommit=False: it keeps each file for good, in the list of an unused transaction.
            return self._client.open(self._path(key), "wb", block_size=part_bytes)

        file = self._ask("storing", key, lambda: self._in_directory(key, begin))
        try:
            for piece in pieces:  # its errors are the caller's own
                with self._explained("storing", key):
                    file.write(piece)
            with self._explained("storing", key):
                file.close()
        except BaseException:
            self._give_up(file, key)
            raise

    def _give_up(self, file: Any, key: str) -> None:
        # Many file systems publish what they have when a file is closed, and a file that is dropped closes itself.
        with contextlib.suppress(AttributeError):
            file.closed = True
        with contextlib.suppress(Exception):
            file.discard()
        with contextlib.suppress(StorageError):  # the upload's own error counts
            self.delete([key])

    def get(self, key: str) -> bytes:
        return self._ask("reading", key, lambda: bytes(self._client.cat_file(self._path(key))))

    def get_range(self, key: str, begin: int, end: int) -> Buffer:
        if end <= begin:
            return b""
        data = memoryview(
            self._ask(
                "reading", key, lambda: self._client.cat_file(self._path(key), start=begin, end=end)
            )
        )
        if len(data) > end - begin:
            raise StorageError(
                errno.EIO,
                f"{len(data)} bytes came where {end - begin} were asked for: does the server know ranges?",
                self._url(key),
            )
        return data

    def size(self, key: str) -> int:
        about = self._ask("looking at", key, lambda: self._client.info(self._path(key)))
        if about["type"] == "directory":
            raise ObjectMissingError(self._url(key))
        return int(about["size"])

    def list(self, prefix: str) -> Listing:
        try:
            found = self._ask(
                "listing", prefix, lambda: self._client.ls(self._path(prefix), detail=True)
            )
        except ObjectMissingError:
            return Listing((), ())
        folders, objects = [], []
        for about in found:
            key = self._key(about["name"])
            if key == prefix:
                continue
            if about["type"] == "directory":
                folders.append(key.rpartition("/")[2])
            else:
                nbytes = int(about.get("size") or 0)
                objects.append(StoredObject(key, nbytes, _modified_at(about)))
        objects.sort(key=lambda each: each.key)
        return Listing(tuple(sorted(folders)), tuple(objects))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            with contextlib.suppress(ObjectMissingError):
                self._ask("deleting", key, functools.partial(self._remove, key))

    def _remove(self, key: str) -> None:
        self._client.rm_file(self._path(key))

    def _pipe(self, key: str, data: Buffer, mode: str) -> None:
        content = bytes(data)
        self._in_directory(key, lambda: self._client.pipe_file(self._path(key), content, mode=mode))

    def _in_directory(self, key: str, store: Any) -> Any:
        """``store()``; once more with the key's directory, if the file system has such and it was missing."""
        try:
            return store()
        except FileNotFoundError:
            # Below a bucket that is missing, some would make the bucket.
            if not self._client.exists(self._path("")):
                raise
            self._client.makedirs(self._path(key.rpartition("/")[0]), exist_ok=True)
            return store()

    def _path(self, key: str) -> str:
        return str(self._client._strip_protocol(self._url(key)))

    def _key(self, name: str) -> str:
        return str(name).strip("/").removeprefix(self._root).strip("/")

    def _url(self, key: str) -> str:
        return url_of(self.url, key)

    def _storage_error(self, error: Exception, doing: str, url: str) -> StorageError:
        if isinstance(error, FileNotFoundError):
            return ObjectMissingError(url)
        if isinstance(error, NotImplementedError):
            return StorageError(
                errno.EOPNOTSUPP, f"{doing} failed: fsspec cannot do that here", url
            )
        return self._failed(error, doing, getattr(error, "errno", None) or errno.EIO, url)


def _modified_at(about: Mapping[str, Any]) -> float:
    for name in ("LastModified", "last_modified", "mtime", "updated", "created"):
        value = about.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return 0.0
