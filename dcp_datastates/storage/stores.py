"""The stores that this process has opened: one for each bucket and options."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from dcp_datastates.errors import ConfigurationError
from dcp_datastates.storage.object_store import ObjectStore

_OBSTORE_SCHEMES: Final = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss")

_lock = threading.RLock()  # guards what follows
_opened: dict[tuple[str, str], ObjectStore] = {}
_openers: dict[str, Callable[[str], ObjectStore]] = {}


def register(scheme: str, opener: Callable[[str], ObjectStore]) -> None:
    """Let ``opener`` open the stores of ``scheme``: for stores of rooms above this one.

    It is called each time that such a store is named or used, and returns the same object for the same root. It must
    not wait.
    """
    _openers[scheme] = opener


def name_root(root: str) -> None:
    """Open the store at ``root`` if its scheme is registered: the processes of a job that only name such a store have
    a part in it, too. Raises as :func:`store_of`.
    """
    if root.partition("://")[0] in _openers:
        store_of(root)


def store_of(root: str, options: Mapping[str, Any] | None = None) -> ObjectStore:
    """The store at ``root``, such as ``s3://bucket``: through obstore, as :func:`register` says, or through fsspec for
    other schemes and if there are ``options`` (fsspec's ``storage_options``). Any thread.

    Raises :class:`ConfigurationError` if the library is not installed or refuses the options.
    """
    by_options = repr(sorted(options.items())) if options else ""
    with _lock:
        scheme = root.partition("://")[0]
        if scheme in _openers and not options:
            _opened[root, by_options] = _openers[scheme](root)
        elif (root, by_options) not in _opened:
            _opened[root, by_options] = _open(root, options)
        return _opened[root, by_options]


def _open(root: str, options: Mapping[str, Any] | None) -> ObjectStore:
    scheme = root.partition("://")[0]
    # Imported here: the libraries are in the extra "cloud".
    if scheme in _OBSTORE_SCHEMES and not options:
        try:
            from dcp_datastates.storage.obstore_adapter import ObstoreStore
        except ImportError as error:
            raise _missing(root, "obstore", error) from error
        return ObstoreStore(root)
    try:
        from dcp_datastates.storage.fsspec_adapter import FsspecStore
    except ImportError as error:
        raise _missing(root, "fsspec", error) from error
    return FsspecStore(root, options)


def _missing(root: str, library: str, error: ImportError) -> ConfigurationError:
    return ConfigurationError(
        f"{root} needs the package {library} ({error}): pip install 'dcp_datastates[cloud]'"
    )
