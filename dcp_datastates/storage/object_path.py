"""Places in stores, as paths; places as users name them; and the stores that this process has opened."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from dcp_datastates.errors import ConfigurationError
from dcp_datastates.storage import local
from dcp_datastates.storage.local_store import LocalStore
from dcp_datastates.storage.object_store import CopiedStore, ObjectStore

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)/*(.*)", re.DOTALL)
_CREDENTIALS: Final = re.compile(r"(?i)\?.*(token|secret|passw|sig|key|credential)\w*=")


Options = Mapping[str, Any] | None
"""fsspec's ``storage_options`` of a store."""


def url_of(root: str, key: str) -> str:
    """The URL of an object in the store at ``root``, which has no bucket if it is ``memory://``."""
    return f"{root}/{key}" if key and not root.endswith("/") else root + key


class ObjectPath:
    """A key, or a prefix of keys, in a store: what :class:`~pathlib.Path` is in a file system. Users see it for object
    stores; :func:`stored` makes one for a directory, too.

    Two are equal if their URLs are. The text has no credentials: these come from the environment, or from ``options``,
    which are never shown.
    """

    __slots__ = ("_options", "_store", "_url", "key", "root")

    def __init__(
        self, root: str, key: str, options: Options = None, store: ObjectStore | None = None
    ) -> None:
        self.root: Final = root
        """``s3://bucket``; ``""`` is the file system."""
        self.key: Final = key
        """Without slashes at its ends; ``""`` is the bucket itself."""
        self._options: Final = options
        self._store: Final = store
        """If it is not the one that this process opens at ``root``."""
        self._url: Final = url_of(root, key)

    @property
    def store(self) -> ObjectStore:
        """The store, opened on first use. Raises :class:`ConfigurationError` if its library is missing."""
        if self._store is not None:
            return self._store
        return _FILES if self.is_local else store_of(self.root, self._options)

    @property
    def is_local(self) -> bool:
        """Whether it is a directory, or a file in one."""
        return not self.root

    @property
    def location(self) -> Location:
        """The place as users name it: a :class:`~pathlib.Path` in the file system."""
        return self.folder or self

    @property
    def folder(self) -> Path | None:
        """The place in the file system; None in another store."""
        return Path(self._url) if self.is_local else None

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return Path(self.name).suffix

    @property
    def parent(self) -> ObjectPath:
        return ObjectPath(self.root, self.key.rpartition("/")[0], self._options, self._store)

    def __truediv__(self, below: str | os.PathLike[str]) -> ObjectPath:
        text = os.fspath(below)
        key = f"{self.key}/{text}" if self.key else text
        return ObjectPath(self.root, key, self._options, self._store)

    def is_symlink(self) -> bool:
        return False

    def __str__(self) -> str:
        return self._url

    def __reduce__(self) -> tuple[type[ObjectPath], tuple[str, str]]:
        """Pickled without the options, which may be secret."""
        return ObjectPath, (self.root, self.key)

    def __repr__(self) -> str:
        return f"ObjectPath({self._url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectPath) and self._url == other._url

    def __lt__(self, other: ObjectPath) -> bool:
        return self._url < other._url

    def __hash__(self) -> int:
        return hash(self._url)


Location = Path | ObjectPath
"""Where a checkpoint lies, or a directory of checkpoints."""

_FILES: Final = LocalStore()


def stored(location: Location) -> ObjectPath:
    """The place in its store; a directory is one, too (:mod:`local_store`)."""
    if isinstance(location, ObjectPath):
        return location
    return ObjectPath("", str(location.absolute()).lstrip("/"))


AnyPath = str | os.PathLike[str] | ObjectPath
"""A place as users name it."""


def is_url(path: object) -> bool:
    """Whether ``path`` has a scheme other than ``file``."""
    return isinstance(path, str) and "://" in path and not path.startswith("file://")


def locate(path: AnyPath, below: str | None = None, options: Options = None) -> Location:
    """The place that ``path`` names: a URL's in its store, anything else in the file system (:func:`local.local_path`).

    Opens nothing but stores of registered schemes (:func:`register`).

    Raises :class:`ConfigurationError`: the URL has no bucket, has credentials, or a segment that no key can have; or
    there are ``options`` for a path that is no URL.
    """
    if isinstance(path, ObjectPath):
        return path
    if options is not None and not isinstance(options, Mapping):
        raise ConfigurationError(
            f"storage_options is a {type(options).__name__}; pass a dict of fsspec's options, or None"
        )
    if not isinstance(path, str) or "://" not in path:
        if options:
            raise ConfigurationError(f"path={path!r} is a local path: storage_options are for URLs")
        return local.local_path(path, below)
    match = _URL.fullmatch(path)
    if match is None:
        raise ConfigurationError(f"path={path!r} is no URL; write one as s3://bucket/run/step-100")
    scheme, bucket, key = match[1].lower(), match[2], match[3].rstrip("/")
    if scheme == "file":
        return local.local_path("/" + key, below)
    if scheme == "node":
        if bucket:
            raise ConfigurationError(f"path={path!r} names no directory; write node:///{bucket}/…")
        bucket = "/"
    if not bucket and scheme != "memory":
        raise ConfigurationError(f"path={path!r} names no bucket; write s3://bucket/run/step-100")
    if scheme == "memory" and bucket:
        bucket, key = "", f"{bucket}/{key}".rstrip("/")
    is_user = "@" in bucket and scheme not in ("abfs", "abfss")
    if is_user or _CREDENTIALS.search(key):
        raise ConfigurationError(
            f"path has credentials in it ({scheme}://{'…@…' if is_user else '…?…=…'}): names of checkpoints appear in "
            f"logs and files; give credentials by the environment, or by storage_options"
        )
    for segment in key.split("/") if key else ():
        # Azure takes a backslash for a slash.
        if segment in ("", ".", "..") or any(
            letter in "\\\x7f" or ord(letter) < 32 for letter in segment
        ):
            raise ConfigurationError(
                f"path={path!r} has the segment {segment!r}, which names no place in a store"
            )
    root = f"{scheme}://{bucket}"
    if scheme in _openers:
        store_of(root)
        _openers[scheme](root, key)  # who only names such a store has a part in it, too
    return ObjectPath(root, key, options)


def locate_all(paths: AnyPath | Sequence[AnyPath], options: Options = None) -> tuple[Location, ...]:
    """The places that ``paths`` names, one or several tiers, the nearest first. ``options`` are those of the URLs.

    Raises as :func:`locate` and :func:`check_opens`, and :class:`ConfigurationError` if there is none.
    """
    if not isinstance(paths, list | tuple):
        places = [locate(paths, options=options)]  # type: ignore[arg-type]
    elif not paths:
        raise ConfigurationError(
            f"path={paths!r} names no place; pass a path, a URL, or a list of them"
        )
    elif options and not any(isinstance(path, ObjectPath) or is_url(path) for path in paths):
        raise ConfigurationError(
            f"path={paths!r} has local paths only: storage_options are for URLs"
        )
    else:
        places = [locate(path, options=options if is_url(path) else None) for path in paths]
    for place in places:
        check_opens(place)
    return tuple(places)


def leave_copy(location: Location, why: object, node: str | None = None) -> bool:
    """:meth:`CopiedStore.leave`; False if the store has one copy of each object."""
    path = stored(location)
    return isinstance(path.store, CopiedStore) and path.store.leave(path.key, str(why), node)


def copies_in(folder: Location) -> dict[str, Sequence[str]]:
    """:meth:`CopiedStore.places` of the objects in the folder; none if its store has one copy of each."""
    path = stored(folder)
    return path.store.places(path.key) if isinstance(path.store, CopiedStore) else {}


def copies_elsewhere(folder: Location) -> dict[str, ObjectPath]:
    """The folder in each store of :meth:`CopiedStore.elsewhere`; none if its store has one copy of each object."""
    path = stored(folder)
    stores = path.store.elsewhere() if isinstance(path.store, CopiedStore) else {}
    return {node: ObjectPath(path.root, path.key, None, store) for node, store in stores.items()}


def check_opens(location: Location) -> None:
    """Raise :class:`ConfigurationError` if the location's store cannot be opened. Asks no server."""
    if isinstance(location, ObjectPath):
        _ = location.store


def check_prefix(path: ObjectPath) -> None:
    """:func:`check_opens`; the bucket itself is an error, too."""
    if not path.key:
        raise ConfigurationError(
            f"path={str(path)!r} is a bucket: a checkpoint needs a prefix, such as {path / 'run/step-100'}"
        )
    check_opens(path)


def resolved(location: Location) -> Location:
    """The location with symbolic links resolved; a store has none."""
    return location if isinstance(location, ObjectPath) else Path(os.path.realpath(location))


# ---- one store for each bucket and options ---------------------------------------------------------


_OBSTORE_SCHEMES: Final = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss")

_lock = threading.RLock()  # guards what follows
_opened: dict[tuple[str, str], ObjectStore] = {}
_openers: dict[str, Callable[[str, str], ObjectStore]] = {}


def register(scheme: str, opener: Callable[[str, str], ObjectStore]) -> None:
    """Let ``opener`` open the stores of ``scheme``: for stores of rooms above this one.

    It is called with a root, and the key that a user names or "" (the store is used). It must not wait.
    """
    _openers[scheme] = opener


def store_of(root: str, options: Options = None) -> ObjectStore:
    """The store at ``root``, such as ``s3://bucket``: through obstore, as :func:`register` says, or through fsspec for
    other schemes and if there are ``options``. Any thread.

    Raises :class:`ConfigurationError` if the library is not installed or refuses the options.
    """
    by_options = repr(sorted(options.items())) if options else ""
    with _lock:
        scheme = root.partition("://")[0]
        if scheme in _openers and not options:
            _opened[root, by_options] = _openers[scheme](root, "")
        elif (root, by_options) not in _opened:
            _opened[root, by_options] = _open(root, options)
        return _opened[root, by_options]


def _open(root: str, options: Options) -> ObjectStore:
    by_obstore = root.partition("://")[0] in _OBSTORE_SCHEMES and not options
    library = "obstore" if by_obstore else "fsspec"
    try:  # the libraries are in the extra "cloud"
        if by_obstore:
            from dcp_datastates.storage.obstore_adapter import ObstoreStore

            return ObstoreStore(root)
        from dcp_datastates.storage.fsspec_adapter import FsspecStore

        return FsspecStore(root, options)
    except ImportError as error:
        raise ConfigurationError(
            f"{root} needs the package {library} ({error}): pip install 'dcp_datastates[cloud]'"
        ) from error
