"""What ``async_save`` returns."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from dcp_datastates.saving.operation import SaveOperation
from dcp_datastates.stats import SaveStats

__all__ = ["SaveHandle"]


class SaveHandle(AsyncSaveResponse):
    """One save under way. Any thread may ask, at any time; a process that does not ask finds the outcome in the log.

    DCP's names stand for the same futures: ``staging_completion`` is :attr:`captured`, ``upload_completion``
    :attr:`committed`. Whatever is asked for, the save's reads start at once: no backward pass comes while one waits.
    """

    def __init__(self, save: SaveOperation) -> None:
        assert save.reads is not None
        super().__init__(save.reads.captured, save.committed)
        self._save = save

    @property
    def captured(self) -> Future[None]:
        """Done when all is read and the state may be changed freely. (``optimizer.step()`` need not wait for it.)"""
        return self.staging_completion

    @property
    def committed(self) -> Future[None]:
        """Done when the checkpoint is committed on all ranks; raises from ``result()`` what failed the save."""
        return self.upload_completion

    @property
    def path(self) -> Path:
        """The checkpoint's directory."""
        return self._save.directory()

    @property
    def stats(self) -> SaveStats:
        """What the save cost on this rank; complete when it is committed."""
        return self._save.stats

    def result(self, timeout: float | None = None) -> None:
        """Return when the checkpoint is committed on all ranks.

        Raises this package's error that failed the save, the same kind on every rank; TimeoutError after
        ``timeout`` seconds, with the save still under way.
        """
        self._save.committed.result(timeout)

    def wait(self, timeout: float | None = None) -> bool:
        """Whether the outcome is known within ``timeout`` seconds. Does not raise it."""
        return self._save.committed.wait(timeout)

    def __repr__(self) -> str:
        return f"SaveHandle({str(self._save.path)!r}, {self._save.doing})"
