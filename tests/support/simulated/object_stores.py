"""An object store in memory, whose requests fail as real ones do: refused, late, carried out twice, without a reply."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from typing_extensions import Buffer

from dcp_datastates.errors import StorageError
from dcp_datastates.storage import object_path
from dcp_datastates.storage.object_path import ObjectPath
from dcp_datastates.storage.object_store import (
    Listing,
    ObjectMissingError,
    StoredObject,
)
from dcp_datastates.storage.self_test import Operation, what_works

ROOT = "mem://bucket"


class Fate(Enum):
    """What becomes of a request."""

    DONE = "done"
    REFUSED = "refused"
    """Error 503: it has no effect."""
    LOST = "lost reply"
    """It has its effect, and the caller gets an error."""
    LATE = "late"
    """The caller gets an error, and the request has its effect later."""
    TWICE = "twice"
    """It has its effect now, and is carried out once more later."""
    RETRIED = "retried"
    """Its reply is lost, and the library repeats it: the caller gets the second reply."""


@dataclass(frozen=True)
class Request:
    """One call."""

    kind: str
    key: str

    @property
    def changes(self) -> bool:
        return self.kind.startswith(("put", "delete"))


@dataclass(frozen=True)
class _Object:
    data: bytes
    number: int


class MemoryStore:
    """An :class:`~dcp_datastates.storage.object_store.ObjectStore`.

    Each call first asks ``on_request``, which may wait or raise, for its fate. What is ``late`` has yet to have its
    effect: the test calls it. ``create_only=False``: creations succeed although the object exists.
    """

    url = ROOT

    def __init__(
        self,
        on_request: Callable[[Request], Fate] = lambda request: Fate.DONE,
        *,
        create_only: bool = True,
    ) -> None:
        self.objects: dict[str, _Object] = {}
        self.late: list[Callable[[], object]] = []
        self.counts: Counter[str] = Counter()
        self.on_request = on_request
        self._create_only = create_only
        self._written = 0

    def data(self, key: str) -> bytes | None:
        """The bytes of an object, without a request."""
        found = self.objects.get(key)
        return None if found is None else found.data

    def requests(self) -> int:
        return sum(self.counts.values())

    # ---- the protocol ----------------------------------------------------------------------------

    def put(self, key: str, data: Buffer) -> None:
        self._change(Request("put", key), lambda: self._store(key, data))

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        def effect() -> bool:
            if key in self.objects and self._create_only:
                return False
            return self._store(key, data)

        return bool(self._change(Request("put_if_absent", key), effect))

    def put_stream(
        self, key: str, pieces: Iterator[Buffer], *, part_bytes: int, parts_in_flight: int
    ) -> None:
        data = b"".join(bytes(piece) for piece in pieces)
        self._change(Request("put_stream", key), lambda: self._store(key, data))

    def get(self, key: str) -> bytes:
        self._read(Request("get", key))
        return self._find(key).data

    def get_range(self, key: str, begin: int, end: int) -> Buffer:
        self._read(Request("get_range", key))
        return self._find(key).data[begin:end]

    def size(self, key: str) -> int:
        self._read(Request("size", key))
        return len(self._find(key).data)

    def list(self, prefix: str) -> Listing:
        self._read(Request("list", prefix))
        beginning = f"{prefix}/" if prefix else ""
        folders, objects = set(), []
        for each in self._below(beginning):
            folder, slash, _ = each.key.removeprefix(beginning).partition("/")
            if slash:
                folders.add(folder)
            else:
                objects.append(each)
        return Listing(tuple(sorted(folders)), tuple(objects))

    def delete(self, keys: Iterable[str]) -> None:
        names = list(keys)
        if not names:
            return

        def effect() -> None:
            for name in names:
                self.objects.pop(name, None)

        self._change(Request("delete", names[0]), effect)

    # ---- within ------------------------------------------------------------------------------------

    def _store(self, key: str, data: Buffer) -> bool:
        self._written += 1
        self.objects[key] = _Object(bytes(data), self._written)
        return True

    def _find(self, key: str) -> _Object:
        if key not in self.objects:
            raise ObjectMissingError(f"{self.url}/{key}")
        return self.objects[key]

    def _below(self, beginning: str) -> list[StoredObject]:
        return [
            StoredObject(key, len(each.data), float(each.number))
            for key, each in sorted(self.objects.items())
            if key.startswith(beginning)
        ]

    def _read(self, request: Request) -> None:
        self.counts[request.kind] += 1
        if self.on_request(request) is not Fate.DONE:
            raise self._error(request)

    def _change(self, request: Request, effect: Callable[[], Any]) -> Any:
        self.counts[request.kind] += 1
        try:
            fate = self.on_request(request)
        except BaseException:  # the caller is killed: its request may be on its way
            self.late.append(effect)
            raise
        if fate is Fate.REFUSED:
            raise self._error(request)
        if fate is Fate.LATE:
            self.late.append(effect)
            raise self._error(request)
        result = effect()
        if fate is Fate.LOST:
            raise self._error(request)
        if fate is Fate.TWICE:
            self.late.append(effect)
        return effect() if fate is Fate.RETRIED else result

    def _error(self, request: Request) -> StorageError:
        return StorageError(errno.EIO, f"{request.kind} failed: 503", f"{self.url}/{request.key}")


def installed(monkeypatch: Any, store: MemoryStore, key: str = "run/step-1") -> ObjectPath:
    """Make ``store`` that of all object paths; returns one."""
    monkeypatch.setattr(object_path, "store_of", lambda root, options=None: store)
    return ObjectPath(ROOT, key)


def creates_once(root: ObjectPath) -> bool:
    """Whether one of several creations of an object succeeds in the store of ``root``, by the package's self-test."""
    return what_works(root).works(Operation.CREATE_ONCE)
