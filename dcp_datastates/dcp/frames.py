"""Frames keep what their variables hold: reading a caller's without that, and letting go of those of an error."""

from __future__ import annotations

import traceback
from types import FrameType
from typing import Any

__all__ = ["local_variable", "release_frames"]


def local_variable(frame: FrameType, name: str) -> Any:
    """The value of ``name`` in a frame that runs; None if it has no such variable.

    Up to Python 3.12, asking for a frame's variables makes a copy of them, which the frame keeps: whoever then keeps
    an exception that passed through it keeps all of them, whatever becomes of the variables. So the copy is emptied.
    """
    variables = frame.f_locals
    value = variables.get(name)
    if type(variables) is dict:
        variables.clear()
    return value


def release_frames(error: BaseException) -> None:
    """Let go of what the frames that ``error``, or what led to it, came through hold: a state dict, a process group.

    For errors that are handed to somebody who may keep them. Their tracebacks can still be printed. Frames that are
    still running are left alone.
    """
    seen: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        each = chain.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        traceback.clear_frames(each.__traceback__)
        chain += [each.__cause__, each.__context__]
