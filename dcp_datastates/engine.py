"""The process's one native engine: its threads, its host cache, its end.

Writers and readers share it. It is made at first use and grows when a writer asks for more; it ends at
interpreter exit. A forked child starts without one and makes its own at first use.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import threading
from typing import Final

from dcp_datastates._native import CacheStats, Engine
from dcp_datastates.ending import at_end
from dcp_datastates.errors import ConfigurationError

__all__ = ["engine", "next_order", "stats"]

logger = logging.getLogger(__name__)

DEFAULT_HOST_CACHE_BYTES: Final = 64 << 20
"""Host cache of a process that only restores: what restores may use is a few segments."""

_lock = threading.Lock()  # guards _engine
_engine: Engine | None = None
_orders = itertools.count(1)


def engine(host_cache_bytes: int = DEFAULT_HOST_CACHE_BYTES) -> Engine:
    """The process's engine, with a host cache of at least ``host_cache_bytes``.

    Raises :class:`ConfigurationError` saying what was asked for if the memory cannot be had; an engine
    that exists is as it was.
    """
    global _engine
    with _lock:
        if _engine is not None and host_cache_bytes <= _engine.host_cache_bytes:
            return _engine
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if host_cache_bytes > memory:
            raise ConfigurationError(
                f"host_cache_size={host_cache_bytes} is more than this machine's memory of {memory} "
                f"bytes; a checkpoint may be larger than the cache, so ask for less"
            )
        try:
            if _engine is None:
                _engine = Engine(host_cache_bytes)
            else:
                _engine.grow(host_cache_bytes)
                logger.info("host cache grown to %d MiB", host_cache_bytes >> 20)
        except MemoryError as error:
            raise ConfigurationError(
                f"host_cache_size={host_cache_bytes}: the system gives this process no such memory "
                f"({error}); a checkpoint may be larger than the cache, so ask for less"
            ) from error
        return _engine


def stats() -> CacheStats | None:
    """What the host cache holds right now; None before the engine exists."""
    with _lock:
        return None if _engine is None else _engine.stats()


def next_order() -> int:
    """Sequence number of the next save of this process; older saves get cache segments first."""
    return next(_orders)


def _limit_patience() -> None:
    with _lock:
        if _engine is not None:
            _engine.limit_patience()


def _shut_down() -> None:
    global _engine
    with _lock:
        if _engine is not None:
            _engine.shutdown()
            _engine = None


def _forget_in_child() -> None:
    # The parent's threads do not exist here and its lock may be held: start anew, touch neither.
    global _engine, _lock
    _lock = threading.Lock()
    _engine = None


atexit.register(_shut_down)
at_end(_limit_patience)
os.register_at_fork(after_in_child=_forget_in_child)
