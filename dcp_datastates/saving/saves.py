"""The saves of one writer: the newest, and those whose outcome the caller does not know yet."""

from __future__ import annotations

import threading

from dcp_datastates.saving.operation import SaveOperation

__all__ = ["Saves"]


class Saves:
    """The saves of one writer. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards what follows
        self._kept: list[SaveOperation] = []
        self._newest: SaveOperation | None = None

    @property
    def newest(self) -> SaveOperation | None:
        return self._newest

    def add(self, save: SaveOperation) -> None:
        with self._lock:
            self._newest = save
            self._kept = [other for other in self._kept if not _is_told(other)]
            self._kept.append(save)

    def wait(self) -> None:
        """Wait until every save is over. Raises the error of a failed save whose outcome the caller has not asked for.

        Only saves that this package runs raise here: for the others, DCP's future or call raises.
        """
        with self._lock:
            saves = list(self._kept)
        for save in saves:
            save.wait()
        with self._lock:
            self._kept = [save for save in self._kept if save not in saves]
        for save in saves:
            if save.call.own and not save.committed.asked:
                save.committed.result()


def _is_told(save: SaveOperation) -> bool:
    """Whether the save is over, and the caller knows its outcome or need not be told."""
    return save.over and (
        not save.call.own or save.committed.asked or save.committed.peek() is None
    )
