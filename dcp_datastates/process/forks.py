"""Forks. A child of a process that uses this package does not save, load or ask: the threads that would do the work do
not exist in it, and may have held any lock when it was forked.

Each call of the API is :func:`public`, and refuses in such a child. What the child runs without a call (hooks
of optimizers, handlers of signals, destructors, the end of the process) asks :func:`in_child` before it takes a lock.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

from dcp_datastates.errors import DataStatesError, ForkedProcessError, brief


class _Closes(Protocol):
    def close(self) -> None: ...


P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T", bound=_Closes)

_closed_in_children: weakref.WeakSet[_Closes] = weakref.WeakSet()
"""What holds sockets or locks, and has none in a child."""

_used_by = 0  # the process that uses this package: this one, or one that this one descends from
_in_child = False


def in_child() -> bool:
    """Whether this process was forked from one that uses this package."""
    return _in_child


def refuse_in_child(call: str) -> None:
    """Raise :class:`ForkedProcessError` in such a process. ``call`` is the call that is refused, for the message."""
    if _in_child:
        raise ForkedProcessError(
            f"{call} is not possible in process {os.getpid()}: it was forked from process {_used_by} after that had "
            f"used dcp_datastates, whose threads and connections do not exist here. Make the call in process "
            f"{_used_by}, or start this process by 'spawn' or 'forkserver' (multiprocessing.get_context('spawn'))"
        )


def enter(call: str) -> None:
    """Begin a call of the API: :func:`refuse_in_child`, and refuse later calls in children that this process forks."""
    global _used_by
    refuse_in_child(call)
    _used_by = _used_by or os.getpid()


def public(call: str = "") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function the ``call`` of the API: :func:`enter` comes first (without a name, a child may make the call),
    and the traceback of an error of this package ends here.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def entered(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                if call:
                    enter(call)
                return function(*args, **kwargs)
            except DataStatesError as error:
                raise brief(error)  # noqa: B904

        return entered

    return decorated


def closed_in_children(each: T) -> T:
    """Have children close ``each``, a socket or an open file. In a child that holds it, too, a connection would not end
    with this process, a lock would not be given back, and a deleted file would keep its bytes.
    """
    _closed_in_children.add(each)
    return each


def _note_child() -> None:
    global _in_child
    _in_child = _used_by != 0
    for each in list(_closed_in_children):
        each.close()


os.register_at_fork(after_in_child=_note_child)
