"""Every error this package raises on purpose.

All derive from :class:`DataStatesError`; each also derives from the built-in exception that Python
programs expect for its cause. Inside DCP's collectives they arrive wrapped in DCP's own
``CheckpointException``, whose ``failures`` maps each failed rank to the original.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterable, Mapping

from dcp_datastates.text import printable


class DataStatesError(Exception):
    """Base of all errors of this package. Its text has escapes for control characters in names."""

    remark = ""
    """What was added to the text: how it concerns the other ranks."""

    def __str__(self) -> str:
        text = super().__str__()
        return printable(f"{text}; {self.remark}" if self.remark else text)


class ConfigurationError(DataStatesError, ValueError):
    """An option has a value that cannot work, or options contradict each other."""


class DeviceError(DataStatesError, RuntimeError):
    """An accelerator's driver refused an operation; the message contains the driver's."""


class ForkedProcessError(DataStatesError, RuntimeError):
    """The call came from a forked child of a process that uses this package; the message names the call."""


class StorageError(DataStatesError, OSError):
    """The file system refused an operation. ``errno`` and ``filename`` are set where known."""


class CheckpointExistsError(DataStatesError, FileExistsError):
    """A committed checkpoint is at the path and ``overwrite=False``."""


class CheckpointNotFoundError(DataStatesError, FileNotFoundError):
    """No committed checkpoint is at the path; the message says what is there instead."""


class ForeignCheckpointError(CheckpointNotFoundError):
    """The checkpoint at the path was written by something else, such as stock DCP."""


class CheckpointCorruptError(DataStatesError):
    """Stored bytes differ from those that were written (checksum, size or structure)."""


class UnreadableMetadataError(CheckpointCorruptError):
    """The checksum of ``.metadata`` is right, but this release cannot read its contents.

    A release with another format wrote it, or it was forged.
    """


class CheckpointReplacedError(DataStatesError):
    """The checkpoint at the path was replaced, or removed, while it was being loaded; load again."""


class UnsafeObjectError(DataStatesError):
    """A Python object needs more than safe types: unpickling it may run code, and ``allow_objects`` is False."""


class IncompatibleStateError(DataStatesError, ValueError):
    """The state does not fit the checkpoint. The error has all names that differ.

    Attributes:
        missing: Names in the state that the checkpoint lacks.
        unexpected: Names in the checkpoint that the state lacks.
        unfit: For each name, how a value of the state differs from the stored one: in shape, dtype or kind.
    """

    def __init__(
        self,
        *args: object,
        missing: Iterable[str] = (),
        unexpected: Iterable[str] = (),
        unfit: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(*args)
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.unfit = dict(unfit or {})


class UnsupportedTensorError(DataStatesError, TypeError):
    """A tensor without dense bytes in memory (sparse, quantized, masked, meta, fake, lazy) cannot be stored."""


class UnsupportedStateError(DataStatesError, TypeError):
    """The state is not a mapping, or holds an object that cannot be stored; the message names it."""


class SnapshotTornError(DataStatesError):
    """A deferred tensor changed before it was read; the save is not committed."""


class SaveStalledError(DataStatesError, TimeoutError):
    """Training, or the next save, waited for a save that made no progress for ``commit_timeout``."""


class SaveAbandonedError(DataStatesError):
    """DCP ended a save before its data were written: another rank or the planner failed."""


class SaveFailedError(DataStatesError):
    """A save failed on at least one rank, and so on all. An older checkpoint at the path is intact.

    The message names rank and cause. If the cause is an error of this package, its own type is raised
    instead.
    """


class RankLostError(SaveFailedError):
    """A rank died, was cut off, or made no progress for too long; the message names it."""


class ReplicasDifferError(SaveFailedError):
    """Ranks that share in writing a tensor hold different values of it; the message names it."""


class CheckpointSupersededError(SaveFailedError):
    """Another job committed a checkpoint at the path during this save."""


class CheckpointSkipped(SaveFailedError):
    """All ranks left this save out, because earlier saves are behind (``when_behind``)."""


class CommitOutcomeUnknown(DataStatesError):
    """This rank cannot tell whether the save was committed; the message says how to find out."""


class NoAnswerError(DataStatesError, TimeoutError):
    """The rank that reads storage for all ranks did not answer; the message has the question and the cause."""


def release_frames(error: BaseException) -> None:
    """Let go of what the frames that ``error``, or what led to it, came through hold: a state dict, a process group.

    For errors that are handed to callers, who may keep them. Their tracebacks can still be printed. Frames that are
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


def brief(error: DataStatesError) -> DataStatesError:
    """``error``, to be raised again from a call of the API: without the frames that it came through, and without what
    led to it if its text says that. The log has the whole traceback, at the level DEBUG.
    """
    logging.getLogger(__name__).debug("a call raised", exc_info=error)
    led = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    same = isinstance(led, OSError) and led.errno == getattr(error, "errno", None)
    if same or (isinstance(led, (DataStatesError, OSError)) and str(led) in str(error)):
        error.__cause__, error.__suppress_context__ = None, True
    return error.with_traceback(None)
