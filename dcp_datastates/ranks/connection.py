"""Connections to the job's store: requests with a deadline, and a second try if the connection breaks."""

from __future__ import annotations

import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, Final

from dcp_datastates.process.futures import Worker

logger = logging.getLogger(__name__)

ANSWER_SECONDS: Final = 10.0
"""How long a request may take, connecting included. If the network is cut, torch's client waits for the answer without
a limit.
"""

_END_SECONDS: Final = 30.0
"""How long the end of the process waits for requests: longer than a connection that cannot be made takes to fail. torch
tries twice for five seconds, with a pause of some seconds between.
"""


def pauses(world: int) -> Iterator[float]:
    """How long one of ``world`` ranks that wait pauses before it asks the store again: ever longer, in seconds.

    A request takes 11.3 us of the store's only thread: 16,384 ranks, each asking every 1.2 s, take 15 % of it.
    """
    pause, longest = 0.002, max(0.1, 75e-6 * world)
    while True:
        yield pause
        pause = min(longest, 2 * pause)


class Client:
    """One connection to the store's server. Any threads may use it; requests run one at a time.

    A separate thread makes the requests, because the server may never answer one. It starts with the first request and
    ends when the client is dropped. After a request has timed out, its thread ends as soon as it can, and the next
    request starts a new connection and a new thread.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._lock = threading.RLock()  # guards what follows
        self._line: _Line | None = None

    def ask(self, request: Callable[[Any], Any]) -> Any:
        """Call ``request`` with the store and return its result. Repeats it once if the connection breaks; then raises
        RuntimeError.
        """
        try:
            return self._once(request)
        except _Overdue:  # asking again would take as long
            raise
        except RuntimeError as error:
            logger.info("the connection to the ranks' store broke, connecting again: %s", error)
            return self._once(request)

    def _once(self, request: Callable[[Any], Any]) -> Any:
        asked: Future[Any] = Future()
        if _is_ending:
            raise RuntimeError("the process is ending: it asks the ranks' store nothing more")
        with self._lock:
            if self._line is None:
                self._line = _Line(self._connect)
                self._end = weakref.finalize(self, self._line.finish)
                self._end.atexit = False
            line = self._line
            if not line.post(functools.partial(line.answer, request, asked)):
                raise RuntimeError(line.refusal)
        if not wait([asked], ANSWER_SECONDS).done:
            asked.cancel()
            with self._lock:
                if self._line is line:
                    self._line = None
                    self._end()
            raise _Overdue(f"the ranks' store has not answered for {ANSWER_SECONDS:g} s")
        try:
            return asked.result()
        finally:
            del asked, line  # an error keeps this frame


class _Overdue(RuntimeError):
    """The store did not answer in time."""


class _Line(Worker):
    """The thread of a :class:`Client`, and its connection. It must hold no reference to the client: dropping the client
    ends the thread.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        super().__init__("dcp_datastates-store")
        self._connect = connect
        self._store: Any = None
        _lines.add(self)

    def answer(self, request: Callable[[Any], Any], asked: Future[Any]) -> None:
        """In the thread: make the ``request``."""
        if not asked.set_running_or_notify_cancel():
            return
        try:
            if self._store is None:
                self._store = self._connect()
            asked.set_result(request(self._store))
        except BaseException as error:
            self._store = None  # an answer may still be on its way
            asked.set_exception(error)
            # The error keeps this frame: without a garbage collection, the store would stay.
            del self, asked


_lines: weakref.WeakSet[_Line] = weakref.WeakSet()

_is_ending = False


def end_requests() -> None:
    """At the end of the process: make no more requests, end the threads that make them, and wait for these, within a
    bound. Python before 3.14 aborts if it ends when a request returns.
    """
    global _is_ending
    _is_ending = True
    lines = list(_lines)
    for line in lines:
        line.finish()
    deadline = time.monotonic() + _END_SECONDS
    for line in lines:
        line.close(max(0.0, deadline - time.monotonic()))


class Connection:
    """This package's access to the store, under a prefix. Any thread may use it.

    Connections share a client, so a request waits for earlier requests. No request waits for a key, so none delays the
    others for long. If a connection breaks (networks drop idle connections after hours, and c10d's client does not
    reconnect), the client reconnects once per request; then the request raises RuntimeError. It also does so if the
    store does not answer within ten seconds. The client may send any request twice: never get a key that may be
    missing, and do not rely on exact counts from :meth:`add`.

    Args:
        prefix: returns the prefix of all keys; it may wait, and raise RuntimeError.
    """

    def __init__(self, client: Client, prefix: Callable[[], str]) -> None:
        self._client = client
        self._prefix = prefix

    def set(self, key: str, value: str | bytes) -> None:
        (name,) = self._names([key])
        self._client.ask(lambda store: store.set(name, value))

    def multi_set(self, values: Mapping[str, str | bytes]) -> None:
        names, contents = self._names(values), list(values.values())
        self._client.ask(lambda store: store.multi_set(names, contents))

    def get(self, key: str) -> bytes:
        (name,) = self._names([key])
        return bytes(self._client.ask(lambda store: store.get(name)))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        names = self._names(keys)
        return list(self._client.ask(lambda store: store.multi_get(names)))

    def find(self, keys: Sequence[str]) -> dict[str, bytes]:
        """The values of those ``keys`` that exist."""
        each = keys if len(keys) > 1 else ()  # of one key, the first check says all
        there = keys if self.check(keys) else [key for key in each if self.check([key])]
        return dict(zip(there, self.multi_get(there), strict=True)) if there else {}

    def check(self, keys: Sequence[str]) -> bool:
        names = self._names(keys)
        return bool(self._client.ask(lambda store: store.check(names)))

    def compare_set(self, key: str, expected: str, desired: str | bytes) -> bytes:
        (name,) = self._names([key])
        return bytes(self._client.ask(lambda store: store.compare_set(name, expected, desired)))

    def add(self, key: str, n: int) -> int:
        (name,) = self._names([key])
        return int(self._client.ask(lambda store: store.add(name, n)))

    def delete_key(self, key: str) -> bool:
        (name,) = self._names([key])
        return bool(self._client.ask(lambda store: store.delete_key(name)))

    def _names(self, keys: Iterable[str]) -> list[str]:
        prefix = self._prefix()
        return [f"{prefix}/{key}" for key in keys]
