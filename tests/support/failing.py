"""Failpoints armed for the length of a block, in this process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from dcp_datastates import failpoints

__all__ = ["armed"]


@contextlib.contextmanager
def armed(entries: str) -> Iterator[None]:
    """``entries`` as in ``DCP_DATASTATES_FAILPOINTS``; Python's failpoints only, as the engine runs already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, failpoints.VARIABLE, entries)
        failpoints.reload()
        try:
            yield
        finally:
            patch.undo()
            failpoints.reload()
