"""The garbage collector, paused while many objects are made."""

from __future__ import annotations

import gc

__all__ = ["CollectionPaused"]


class CollectionPaused:
    """A context in which Python does not look for garbage.

    The collector would search thousands of new objects for cycles, again and again, and at times all others of the
    process. That takes most of the time that it takes to make a million chunks. For short work only: other threads'
    garbage stays, too.
    """

    def __enter__(self) -> None:
        self._enabled = gc.isenabled()
        gc.disable()

    def __exit__(self, *error: object) -> None:
        if self._enabled:
            gc.enable()
