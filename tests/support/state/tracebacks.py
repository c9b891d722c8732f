"""What Python prints of an error: how many frames of the package are in it."""

from __future__ import annotations

import traceback
from pathlib import Path

import dcp_datastates


def frames_in(error: BaseException | None) -> int:
    """The frames of the package in the tracebacks of ``error``, and of what led to it."""
    count, here = 0, Path(dcp_datastates.__file__).parent
    while error is not None:
        frames = traceback.extract_tb(error.__traceback__)
        count += sum(Path(each.filename).is_relative_to(here) for each in frames)
        hidden = error.__suppress_context__
        error = error.__cause__ or (None if hidden else error.__context__)
    return count
