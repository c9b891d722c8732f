"""The process's native engine: construction, host cache and shutdown.

Writers and readers share it. The first use constructs it; its cache grows when a writer asks for more; it ends at
interpreter exit.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import os
import threading
from collections.abc import Callable, Hashable
from typing import Final

from dcp_datastates._native import (
    MIN_HOST_CACHE_BYTES,
    SEGMENT_BYTES,
    CacheStats,
    Engine,
    RestoreJob,
    SaveJob,
)
from dcp_datastates.config import EngineConfig, IoPriority
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.process.ending import at_end, at_exit
from dcp_datastates.process.forks import public, refuse_in_child
from dcp_datastates.process.job_log import once_per_job
from dcp_datastates.process.memory_limit import memory_limit
from dcp_datastates.storage import failpoints, operations

logger = logging.getLogger(__name__)

DEFAULT_HOST_CACHE_BYTES: Final = 64 << 20
"""Host cache of a process that only restores: restores may use only a few segments."""

_SPARE_BYTES: Final = MIN_HOST_CACHE_BYTES
"""What a cache has beside a state that fits it: for the loads' share, and for copies at the call."""

_INTERVENTIONS: Final = (
    failpoints.VARIABLE,
    failpoints.LOG_VARIABLE,
    operations.TRACE_VARIABLE,
    "DCP_DATASTATES_CUDA_LIBRARY",
)

_lock = threading.RLock()  # guards _engine
_engine: Engine | None = None
_config = EngineConfig()
_too_small = False  # the log says so
orders: Final = itertools.count(1)
"""The sequence numbers of this process's saves. Older saves get cache segments first."""


@public()
def configure_engine(
    *,
    copy_threads: int = 2,
    flush_threads: int = 4,
    restore_threads: int = 4,
    copy_rate: int | str | None = None,
    write_rate: int | str | None = None,
    io_priority: IoPriority = "normal",
) -> None:
    """Set the options of this process's native engine. Call it before the first writer, reader, save or load.

    Args:
        copy_threads: Threads that copy host tensors into the cache, and enqueue those from devices: more if cores idle.
        flush_threads: Threads that compute checksums and write files: more if storage takes more than they write.
        restore_threads: Threads that read files: the same. Half as many more verify and copy what came from the disk.
        copy_rate: The most bytes per second that saves copy from each device, as a number or a string such as
            ``"8GB"``; at least 64 MiB. It leaves bandwidth to training's own copies, and makes the next step wait
            longer. None: no limit.
        write_rate: The most bytes per second that this process's saves write, together, to files or to a store; at
            least 1 MiB. It leaves storage to others. What does not fit in the host cache waits, and with it the next
            step. None: no limit.
        io_priority: Whom the system serves first, of those that use the disk: ``"low"``, this process's saves after
            all others; ``"idle"``, only while the disk has nothing else to do. It works for local disks whose I/O
            scheduler knows priorities (BFQ, mq-deadline).

    Raises:
        ConfigurationError: an option has a value that cannot work, or the engine exists already with other options.
    """
    refuse_in_child("configure_engine()")
    global _config
    chosen = EngineConfig.checked(
        copy_threads=copy_threads,
        flush_threads=flush_threads,
        restore_threads=restore_threads,
        copy_rate=copy_rate,
        write_rate=write_rate,
        io_priority=io_priority,
    )
    with _lock:
        if _engine is not None and chosen != _config:
            raise ConfigurationError(
                "configure_engine() comes too late: this process's engine has its threads already; call it before the "
                "first writer, reader, save or load"
            )
        _config = chosen


def engine(host_cache_bytes: int = DEFAULT_HOST_CACHE_BYTES) -> Engine:
    """The process's engine, with a host cache of at least ``host_cache_bytes``.

    Raises :class:`ConfigurationError` with the requested size if the memory cannot be allocated; an existing engine
    then stays unchanged.
    """
    global _engine
    native = _engine
    if native is not None and host_cache_bytes <= native.host_cache_bytes:
        return native
    with _lock:
        if _engine is not None and host_cache_bytes <= _engine.host_cache_bytes:
            return _engine
        limit = memory_limit()
        if host_cache_bytes > limit.nbytes:
            raise ConfigurationError(
                f"host_cache_size={host_cache_bytes} is more than the {limit.nbytes} bytes that this process may "
                f"use ({limit.source}); a checkpoint may be larger than the cache, so ask for less"
            )
        try:
            if _engine is None:
                _engine = Engine(
                    host_cache_bytes,
                    **dataclasses.asdict(_config),
                    failpoints=failpoints.current(),
                    trace_path=os.environ.get(operations.TRACE_VARIABLE, ""),
                )
                _name_interventions()
            else:
                before = _engine.host_cache_bytes
                _engine.grow(host_cache_bytes)
                if (now := _engine.host_cache_bytes) > before:  # it consists of whole blocks
                    logger.log(once_per_job(logging.INFO), "host cache grown to %d MiB", now >> 20)
        except MemoryError as error:
            raise ConfigurationError(
                f"host_cache_size={host_cache_bytes}: the system gives this process no such memory "
                f"({error}); a checkpoint may be larger than the cache, so ask for less"
            ) from error
        return _engine


def _name_interventions() -> None:
    """Name the variables by which the environment decides what is done to storage, and which driver is loaded."""
    given = [f"{each}={os.environ[each]!r}" for each in _INTERVENTIONS if os.environ.get(each)]
    if given:
        logger.log(
            once_per_job(logging.INFO),
            "the environment intervenes in saves and loads, as for tests: %s",
            ", ".join(given),
        )


def fit_cache(nbytes: int, most: int) -> None:
    """Grow the cache, up to ``most`` bytes, for a state of which this rank writes ``nbytes`` from devices. Says once if
    the state is larger than the cache all the same.

    It grows with the first plan, not with the engine: only then is it known how much of the state this rank writes.
    """
    global _too_small
    native = engine(MIN_HOST_CACHE_BYTES)  # that which there is
    wanted = -(-nbytes // SEGMENT_BYTES) * SEGMENT_BYTES + _SPARE_BYTES
    fault = ""
    if native.host_cache_bytes < min(wanted, most):
        try:
            native = engine(min(wanted, most))
        except ConfigurationError as error:  # as before, saves go through a smaller cache
            fault = f" ({error})"
    if nbytes > native.host_cache_bytes and not _too_small:
        _too_small = True
        logger.info(
            "this rank writes %d MiB, more than its host cache of %d MiB holds%s: reads from the device wait for "
            "storage, and the next step for the reads; give host_cache_size=... if there is memory to spare",
            nbytes >> 20,
            native.host_cache_bytes >> 20,
            fault,
        )


def stats() -> CacheStats | None:
    """The present contents of the host cache; None if there is no engine yet."""
    native = _engine  # no lock: a signal handler may call this while the interrupted frame holds it
    return None if native is None else native.stats()


def moved(job: SaveJob | None) -> Hashable:
    """A value that changes while the engine makes progress with ``job``, or with saves that hold the cache."""
    cache = stats()
    return (
        None if job is None else (job.bytes_read, job.bytes_written),
        None if cache is None else cache.returned_segments,
    )


def fail(job: SaveJob | RestoreJob, error: BaseException, path: str) -> None:
    """Fail a streamed ``job``: the file at ``path`` could not be sent, or fetched."""
    number = getattr(error, "errno", None)
    job.fail(str(error) or repr(error), number if isinstance(number, int) else 0, path)


def _tell(call: Callable[[Engine], None]) -> None:
    with _lock:
        if _engine is not None:
            call(_engine)


def _shut_down() -> None:
    global _engine
    with _lock:
        if _engine is None:
            return
        for path in _engine.shutdown():
            logger.error(
                "the process ends without waiting for storage any longer: a file operation for %r does not return",
                path,
            )
        _engine = None


def _at_exit() -> None:
    _tell(Engine.keep_memory)
    _shut_down()


at_exit(_at_exit)
at_end(functools.partial(_tell, Engine.limit_patience))
