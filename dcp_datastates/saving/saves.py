"""The saves of one writer: the newest one, and those whose outcome is not known or not told yet."""

from __future__ import annotations

from dcp_datastates.process.forks import ProcessLock
from dcp_datastates.saving.operation import SaveOperation

__all__ = ["Saves"]


class Saves:
    """See the module. Any thread."""

    def __init__(self) -> None:
        self._lock = ProcessLock()  # guards what follows
        self._kept: list[SaveOperation] = []
        self._newest: SaveOperation | None = None

    @property
    def newest(self) -> SaveOperation | None:
        """The one that was added last."""
        return self._newest

    def add(self, save: SaveOperation) -> None:
        """``save`` was called for."""
        with self._lock:
            self._newest = save
            self._kept = [other for other in self._kept if not _is_told(other)]
            self._kept.append(save)

    def wait(self) -> None:
        """Return when the outcome of each is known. Raises what a save failed with that its caller did not ask about.

        That is so only of saves that a thread need not wait for (``commit="background"``).
        """
        with self._lock:
            saves = list(self._kept)
        for save in saves:
            save.wait()
        with self._lock:
            self._kept = [save for save in self._kept if save not in saves]
        for save in saves:
            if save.call.background and not save.committed.asked:
                save.committed.result()


def _is_told(save: SaveOperation) -> bool:
    """Whether the save's outcome is known, and was told if it must be."""
    return save.over and (
        not save.call.background or save.committed.asked or save.committed.peek() is None
    )
