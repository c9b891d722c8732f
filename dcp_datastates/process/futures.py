"""Threads that run functions in order, and the futures of a save, which users have, too: waiting starts the reads.
Users' functions, of futures and of listeners, run in one thread that no save waits for.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from typing import Any, Final, Generic, TypeVar

from dcp_datastates.errors import DataStatesError
from dcp_datastates.process.forks import enter, public, refuse_in_child

logger = logging.getLogger(__name__)

ENDING: Final = "the process is ending"


class Worker:
    """A thread that starts with the first function posted and ends with :meth:`close`.

    A daemon thread rather than a ``ThreadPoolExecutor``: while the interpreter joins DCP's threads at exit, these may
    still post work, which an executor would refuse. The owner closes it at exit.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.RLock()  # guards _thread, and that no thread starts after _closed
        self._thread: threading.Thread | None = None
        self._closed = False
        self._ended = False
        """The thread runs no more than what is in the queue now."""
        self._refusal = ENDING
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()

    def post(self, work: Callable[[], object]) -> bool:
        """Run ``work`` after all earlier posts. Returns False after :meth:`close`, or if the thread cannot start:
        :attr:`refusal` then says which. Any thread may call it.
        """
        enter(f"work for {self._name}")
        if self._closed or not (self._thread is not None or self._start()):
            return False
        # Without the lock: a signal handler that comes now may wait for what another thread posts here.
        self._work.put(work)
        if self._ended:  # a close has come in between, and the thread may be gone
            self._run_rest()
        return True

    @property
    def refusal(self) -> str:
        """Why :meth:`post` returned False, in words."""
        return ENDING if self._closed else self._refusal

    def _start(self) -> bool:
        with self._lock:
            if self._closed:
                return False
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    thread.start()
                except (RuntimeError, MemoryError) as error:
                    logger.warning("%s cannot start: %s", self._name, error)
                    if not sys.is_finalizing() and "shutdown" not in str(error):
                        self._refusal = (
                            f"the system starts no more threads ({error}): raise the limit on processes "
                            f"(ulimit -u, or pids.max of the container), or start fewer threads"
                        )
                    return False
                self._thread = thread
        return True

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until all that was posted before is done, for at most ``seconds``; return whether it is. After
        :meth:`close`, True immediately.
        """
        done = threading.Event()
        return not self.post(done.set) or done.wait(seconds)

    def finish(self) -> None:
        """Accept no more work. The thread ends when all posted work is done. Idempotent; does not wait."""
        with self._lock:
            self._closed = True
        self._work.put(None)

    def close(self, seconds: float | None = None) -> bool:
        """Call :meth:`finish`, and wait until the thread has ended, or for ``seconds``. Returns whether it has ended.
        Idempotent.
        """
        self.finish()
        thread = self._thread
        if thread is None:
            return True
        thread.join(seconds)
        return not thread.is_alive()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            self._call(work)
            del work  # release what it holds while waiting for the next
        self._ended = True
        self._run_rest()

    def _run_rest(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                if (work := self._work.get_nowait()) is not None:
                    self._call(work)
                del work

    def _call(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException:
            logger.exception("unexpected error in %s", self._name)
        finally:
            del work  # an error that a program keeps may keep this frame


# ---- futures, and functions of users -------------------------------------------------------------


_NAME: Final = "dcp_datastates-callbacks"

_worker = Worker(_NAME)
_resolving: Final[dict[object, None]] = {}
"""Futures with an outcome, whose callbacks come. No lock: single dict operations are atomic."""


def call_back(function: Callable[[], object]) -> None:
    """Call ``function`` in the callbacks' thread, after those of earlier calls. Never waits. What it raises is logged.

    The function may save, and may wait for saves: the threads that commit go on meanwhile.
    """
    if not _worker.post(functools.partial(_call, function)):
        _call(function)  # no thread can start any more, so no save can begin that it could wait for


Record = TypeVar("Record")


class Listeners(Generic[Record]):
    """Functions that are told each record. No lock: single dict operations are atomic."""

    def __init__(self) -> None:
        self._functions: Final[dict[object, Callable[[Record], object]]] = {}

    def add(self, function: Callable[[Record], object]) -> Callable[[], None]:
        """Tell ``function``, in the thread that has the record: it must be quick, and never wait. Returns what ends
        this.
        """
        key = object()
        self._functions[key] = function
        return lambda: self._drop(key)

    def add_of_user(self, function: Callable[[Record], object]) -> Callable[[], None]:
        """:meth:`add`, of a function that may do anything: it runs in the callbacks' thread."""
        return self.add(lambda record: call_back(functools.partial(function, record)))

    def tell(self, record: Record) -> None:
        """What a function raises is logged: the outcome stands, and the others are told."""
        for function in list(self._functions.values()):
            try:
                function(record)
            except Exception:
                logger.exception("a listener raised")

    def _drop(self, key: object) -> None:
        self._functions.pop(key, None)


def finish_callbacks(seconds: float) -> bool:
    """Wait until all functions have run that were given before, or belong to a future that has its outcome, for at most
    ``seconds``. Returns whether they have.

    Returns immediately in the callbacks' thread, which cannot wait for itself.
    """
    if threading.current_thread().name == _NAME:
        return True
    until = time.monotonic() + seconds
    while _resolving and time.monotonic() < until:
        time.sleep(0.01)
    return _worker.wait(max(0.0, until - time.monotonic()))


def _call(function: Callable[[], object]) -> None:
    try:
        function()
    except Exception:
        logger.exception("a callback of a save raised")


_ASKING: Final = "asking for the outcome of a save"


class SharedFuture(Future[None]):
    """A future that users have, and cannot cancel. Their callbacks may wait for saves, so they never run in a thread
    that saves need.

    Args:
        start: the thread that asks for the result or the error, or waits, calls it, unless the future is done; it must
            not wait. It starts the reads of all saves in flight: a thread that waits for a save cannot start the
            backward pass.
    """

    def __init__(self, start: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._start = start
        self.asked = False
        """Whether a caller has asked for the result or the error."""
        self.set_running_or_notify_cancel()

    @public(_ASKING)
    def result(self, timeout: float | None = None) -> None:
        self._ask()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._ask()
        return super().exception(timeout)

    def done(self) -> bool:
        refuse_in_child(_ASKING)
        return super().done()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds; return whether the future is done. Never raises, and does not count as
        asking.
        """
        if not self.done():
            self._start()
        return bool(wait([self], timeout).done)

    def peek(self) -> BaseException | None:
        """The error, if the future is done and has one. Does not count as asking, and starts nothing."""
        return super().exception(0) if self.done() else None

    def _ask(self) -> None:
        self.asked = True
        if not self.done():
            self._start()

    def settle(self, error: BaseException | None) -> None:
        """Resolve the future: with ``error``, if there is one. Of several threads' calls, the first counts."""
        _resolving[self] = None  # others may see the outcome before the callbacks come
        try:
            with contextlib.suppress(InvalidStateError):
                if error is None:
                    self.set_result(None)
                else:
                    self.set_exception(error)
        finally:
            _resolving.pop(self, None)

    def add_done_callback(self, fn: Callable[[Future[None]], object]) -> None:
        """Call ``fn`` with this future when it is done, in the thread of callbacks, one after another."""
        refuse_in_child(_ASKING)
        super().add_done_callback(lambda done: call_back(functools.partial(fn, done)))

    def _invoke_callbacks(self) -> None:  # type: ignore[misc, unused-ignore]
        # The library's, which keeps callbacks for ever: a callback refers to its save, and the save to this future.
        super()._invoke_callbacks()  # type: ignore[misc]
        self._done_callbacks.clear()  # type: ignore[attr-defined]


def when_done(future: Future[Any], function: Callable[[Future[Any]], object]) -> None:
    """Call ``function`` in the thread that resolves ``future``. For this package: it must be quick, and never wait."""
    Future.add_done_callback(future, function)


def resolved() -> Future[None]:
    """A future that is done, without an error."""
    future: Future[None] = Future()
    future.set_result(None)
    return future


def without_traceback(error: BaseException) -> BaseException:
    """A copy without traceback: its frames would retain the state's tensors, in a reference cycle."""
    try:
        return copy.copy(error)
    except Exception:
        return DataStatesError(f"{type(error).__name__}: {error}")
