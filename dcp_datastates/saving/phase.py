"""The phases of a save on one rank (``operation.py``)."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Phase"]


class Phase(IntEnum):
    """The phases of a save on this rank."""

    STAGED = 0
    """The call has returned; the save waits for its turn to be planned."""
    PLANNING = 1
    """The ranks are planning the save."""
    AGREED = 2
    """The coordinator's ticket has arrived: all ranks will vote on the save."""
    COMMITTING = 3
    """The commit thread has this rank's part: its files, or the reason why it failed."""
