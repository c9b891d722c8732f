"""Torch operations that other Python threads are running: whether they have ended.

An operation that writes in place increments its tensor's version counter *after* it has written. So a counter that has
not moved says nothing about an operation that is still running. This module tells when those have ended that were
running at some moment.

A thread is in an operation if its innermost frame waits for a call into C. The call has ended once the frame has gone
on to another instruction, or has returned. Frames are compared by identity and instruction only: a thread that repeats
one instruction in a loop seems to stand still, so this may wait too long.

Frames further out are not looked at: ``f_back`` of another thread's frame crashes Python 3.11 now and then. They matter
only to an operation that torch carries out in Python (``__torch_dispatch__``: some tensor subclasses). It consists of
operations on inner tensors, each with a counter of its own, and those count as well.

A thread that sleeps may wait for anything, so it is not waited for long. It may also have done its part of an operation
and wait for torch's worker threads, which Python does not know, on a machine that gives these no processor. So a thread
that sleeps is waited for as long as such threads can run, within bounds: some libraries have threads that never rest.

Beside a thread that wrote to the saved tensor at a random moment of each save (a scattered sum, a row, three sums in
turn), no save of 600 was committed with wrong bytes. Without this module 18 were: neither counters nor words saw them.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from types import CodeType
from typing import Final

from dcp_datastates.process.garbage import collection_paused

Places = dict[int, tuple[int, int]]
"""For each thread (``threading.get_ident()``) that may be in an operation, its innermost frame and instruction."""

_LIBRARY: Final = Path(os.__file__).parent
_WAITS: Final = frozenset(
    str(_LIBRARY / name)
    for name in (
        "queue.py",
        "selectors.py",
        "socket.py",
        "ssl.py",
        "subprocess.py",
        "threading.py",
        "concurrent/futures/_base.py",
        "multiprocessing/connection.py",
        "multiprocessing/queues.py",
        "multiprocessing/synchronize.py",
    )
)
"""Files of the standard library whose functions wait, and call nothing that they were given, but for ``run``."""

_PACKAGE: Final = str(Path(__file__).parent.parent) + os.sep

_ASLEEP_SECONDS: Final = 0.1
"""A thread that sleeps at every look for so long waits for something else than the threads of an operation."""

_UNKNOWN_SECONDS: Final = 1.0
"""The same for threads of which the system's state is unknown: those that were not started by ``threading``."""

_WORKERS_SECONDS: Final = 5.0
"""The same while worker threads can run."""

_TASKS: Final = Path("/proc/self/task")

_ENGINE: Final = b"ds-"
"""How the names of the engine's threads begin."""


class RunningCalls:
    """The calls that other threads may be running when this is constructed."""

    def __init__(self, idle: Places | None = None) -> None:
        """``idle``: :func:`places` at an earlier moment. A thread that sleeps where it was then is not waited for."""
        idle = {} if idle is None else idle
        self._running = {
            thread: place
            for thread, place in places().items()
            if place != idle.get(thread) or _is_asleep(thread) is False
        }
        self._awake_at = self._workers_at = time.monotonic()

    def ended(self) -> bool:
        """Whether all of them have ended."""
        if not self._running:
            return True
        places_now = places()
        self._running = {
            thread: place
            for thread, place in self._running.items()
            if places_now.get(thread) == place
        }
        asleep = set(map(_is_asleep, self._running))
        now = time.monotonic()
        if False in asleep:
            self._awake_at = now
        elif self._running and _workers_can_run():
            self._workers_at = now
        patience = _UNKNOWN_SECONDS if None in asleep else _ASLEEP_SECONDS
        still = now - max(self._awake_at, self._workers_at)
        if still > patience or now - self._awake_at > _WORKERS_SECONDS:
            self._running = {}
        return not self._running


def places() -> Places:
    """Where all other threads may be in an operation."""
    me = threading.get_ident()
    # Python 3.11 holds a lock while it lists the frames, and a thread that ends waits for this lock with the GIL. If a
    # collection ran a finalizer here, it might let go of the GIL: neither thread would ever go on.
    with collection_paused():
        return {
            thread: (id(innermost), innermost.f_lasti)
            for thread, innermost in sys._current_frames().items()
            if thread != me and not _never_operates(innermost.f_code)
        }


def _never_operates(code: CodeType) -> bool:
    """Whether this function calls no operation of torch: it waits for a lock or a file, say."""
    file = code.co_filename
    return (file in _WAITS and code.co_name != "run") or file.startswith((_PACKAGE, "<frozen "))


def _is_asleep(thread: int) -> bool | None:
    """Whether the system says that a thread waits, and neither runs nor could run. None if it is unknown."""
    # Not threading.enumerate(): that takes a lock, which a frame that a signal handler interrupts may hold.
    known = getattr(threading, "_active", {}).get(thread)
    number = None if known is None else known.native_id
    state = None if number is None else _name_and_state(number)
    return None if state is None else state[1] == b"S"


def _workers_can_run() -> bool:
    """Whether a thread that neither Python nor the engine has started runs or could run."""
    known = {thread.native_id for thread in list(getattr(threading, "_active", {}).values())}
    for task in os.listdir(_TASKS):
        state = None if int(task) in known else _name_and_state(int(task))
        if state and state[1] == b"R" and not state[0].startswith(_ENGINE):
            return True
    return False


def _name_and_state(number: int) -> tuple[bytes, bytes] | None:
    """A thread's name and state ("R" if it runs or could run, "S" if it sleeps). None if the thread is gone."""
    try:
        before, _, after = (_TASKS / str(number) / "stat").read_bytes().rpartition(b")")
    except OSError:
        return None
    return before.partition(b"(")[2], after.split(None, 1)[0]
