"""Whether a thread waits for the save that the current thread runs.

DCP keeps the future of an asynchronous save to itself and its caller. A caller that blocks in
``future.result()`` right after ``async_save`` will run no backward pass meanwhile, so reads that wait for
one should start. The future is the one that ``concurrent.futures`` resolves when this thread's work
item ends, and it knows who waits. Read-only, and where a future Python hides it, nothing is found: then
``read_deadline`` opens the window as ever.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

__all__ = ["is_awaited", "work_item_here"]


def is_awaited(work: Any) -> bool:
    """Whether a thread waits for this :func:`work_item_here`. Any thread may ask."""
    condition = getattr(work, "_condition", None)
    return bool(getattr(condition, "_waiters", None) or getattr(work, "_waiters", None))


def work_item_here() -> Any:
    """The future of the executor's work item that the calling thread runs; None if it runs none, or hides it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "run" and frame.f_globals.get("__name__") == (
            "concurrent.futures.thread"
        ):
            return getattr(_local_variable(frame, "self"), "future", None)
        frame = frame.f_back
    return None


def _local_variable(frame: FrameType, name: str) -> Any:
    """The value of ``name`` in a frame that runs; None if it has no such variable.

    Up to Python 3.12, asking for a frame's variables makes a copy of them, which the frame keeps: an exception
    that passed through it would then keep all of them, whatever becomes of the variables. So the copy is emptied.
    """
    variables = frame.f_locals
    value = variables.get(name)
    if type(variables) is dict:
        variables.clear()
    return value
