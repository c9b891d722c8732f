"""Whether a store lets only one of several creations of an object succeed, on which the commit relies.

Some stores ignore the condition of a request, or check it before they store the object, so that two requests at once
may both succeed. Each process tries it once for each store, with requests that race.
"""

from __future__ import annotations

import errno
import logging
import secrets
import threading
import weakref
from typing import Final

from dcp_datastates.errors import StorageError
from dcp_datastates.process.forks import ProcessLock, after_fork
from dcp_datastates.storage.object_path import ObjectPath
from dcp_datastates.storage.object_store import ObjectMissingError, ObjectStore
from dcp_datastates.storage.store_index import INDEX_NAME

__all__ = ["creates_once"]

logger = logging.getLogger(__name__)

_THREADS: Final = 8

_lock = ProcessLock()  # guards what follows
_known: weakref.WeakKeyDictionary[ObjectStore, bool] = weakref.WeakKeyDictionary()


def creates_once(root: ObjectPath) -> bool:
    """Whether the store of ``root`` lets one creation of an object succeed. The first call for a store tries it, with
    an object below ``root`` that it deletes again.

    Raises :class:`StorageError` if the store does not answer. Any thread.
    """
    store = root.store
    with _lock:
        known = _known.get(store)
    if known is None:
        known = _try(root)
        with _lock:
            new = store not in _known
            _known[store] = known
        if new and not known:
            logger.warning(
                "%s lets two processes create the same object, so this package cannot tell which of two saves to one "
                "path came first: use each path from one job at a time, and see docs/stores.md for what is not "
                "promised there",
                store.url,
            )
    return known


def _try(root: ObjectPath) -> bool:
    path = root / INDEX_NAME / f"probe.{secrets.token_hex(8)}"
    store = path.store
    results: list[bool | StorageError] = []
    together = threading.Barrier(_THREADS)

    def create(number: int) -> None:
        together.wait()
        try:
            results.append(store.put_if_absent(path.key, b"%d" % number))
        except StorageError as error:
            results.append(error)

    threads = [
        threading.Thread(target=create, args=(number,), name="dcp_datastates-probe", daemon=True)
        for number in range(_THREADS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failures = [each for each in results if isinstance(each, StorageError)]
    try:
        if any(each.errno == errno.EOPNOTSUPP for each in failures):
            return False
        if failures and True not in results:
            raise failures[0]
        # None may have won, by its own account: if the reply to the winner's request was lost.
        return results.count(True) <= 1 and bool(store.get(path.key)[0])
    except ObjectMissingError:
        return False
    finally:
        store.delete([path.key])


@after_fork
def _forget_in_child() -> None:
    _known.clear()
