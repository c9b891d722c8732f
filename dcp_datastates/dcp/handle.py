"""The handle that ``async_save`` returns."""

from __future__ import annotations

from concurrent.futures import Future

from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from dcp_datastates.errors import ConfigurationError
from dcp_datastates.process.forks import public, refuse_in_child
from dcp_datastates.results import SaveRecord, SaveStats
from dcp_datastates.saving.operation import SaveOperation
from dcp_datastates.storage.object_path import Location


class SaveHandle(AsyncSaveResponse):
    """A save in progress. Any thread may use the handle at any time. The log has the outcome in any case.

    DCP's names work, too: ``staging_completion`` is :attr:`captured`, ``upload_completion`` is :attr:`committed`.
    Waiting for either starts the save's reads immediately, because the waiting thread will not start a backward pass.
    """

    def __init__(self, save: SaveOperation) -> None:
        super().__init__(save.reads.captured, save.committed)
        self._save = save

    @property
    def captured(self) -> Future[None]:
        """A future, done when all tensors have been read and the state may be changed freely.

        ``optimizer.step()`` needs no such wait: the step gate makes it. ``result()`` raises if the save failed before.
        """
        return self.staging_completion

    @property
    def committed(self) -> Future[None]:
        """A future, done when the outcome is known.

        ``result()`` returns if the checkpoint is committed on all ranks, and raises the save's error otherwise.
        """
        return self.upload_completion

    @property
    def archived(self) -> Future[None]:
        """A future, done when the copy of the checkpoint in the archive is committed on all ranks.

        ``result()`` raises if the save has failed, or if it can never be archived (another checkpoint is there, say).
        What storage refuses is tried again, so it may take long. Raises :class:`ConfigurationError` without an archive.
        """
        if self._save.archived is None:
            raise ConfigurationError(
                f"the save to {str(self._save.path)!r} is not archived: CheckpointManager(archive=…) does that, for "
                f"each save or every few (archive_every)"
            )
        return self._save.archived

    @property
    def path(self) -> Location:
        """The checkpoint's directory: a :class:`~pathlib.Path`; of a URL, an object whose ``str()`` is the URL."""
        return self._save.directory()

    @property
    def stats(self) -> SaveStats:
        """The save's statistics on this rank; complete once it is committed."""
        return self._save.stats

    @property
    def record(self) -> SaveRecord | None:
        """What came of the save on this rank, and what it cost; None until the outcome is known."""
        return self._save.record

    @public("SaveHandle.result()")
    def result(self, timeout: float | None = None) -> None:
        """Return when the checkpoint is committed on all ranks.

        Args:
            timeout: Seconds to wait. None: until the outcome is known.

        Raises:
            DataStatesError: the error that failed the save, of the same type on every rank.
            TimeoutError: the outcome is not known after ``timeout`` seconds. The save continues.
        """
        self._save.committed.result(timeout)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the outcome, for at most ``timeout`` seconds; return whether it is known.

        Does not raise the save's error.
        """
        return self._save.committed.wait(timeout)

    def give_up(self, why: str) -> None:
        """Wait no longer for the save: it fails on this rank, as :class:`SaveAbandonedError`, or, where the ranks may
        have decided already, as :class:`CommitOutcomeUnknown`. No effect once the outcome is known.
        """
        refuse_in_child("SaveHandle.give_up()")
        self._save.give_up(why)

    @property
    def doing(self) -> str:
        """What the save is doing or waiting for, or what came of it, in words; for people."""
        return self._save.doing

    def __repr__(self) -> str:
        return f"SaveHandle({str(self._save.path)!r}, {self.doing})"
