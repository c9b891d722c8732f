"""Every error this package raises on purpose.

All derive from :class:`DataStatesError`; each also derives from the built-in exception that Python
programs expect for its cause. Inside DCP's collectives they arrive wrapped in DCP's own
``CheckpointException``, whose ``failures`` maps each failed rank to the original.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping

from dcp_datastates.text import printable

__all__ = [
    "CheckpointCorruptError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CheckpointReplacedError",
    "CheckpointSkipped",
    "CheckpointSupersededError",
    "CommitOutcomeUnknown",
    "ConfigurationError",
    "DataStatesError",
    "DeviceError",
    "ForeignCheckpointError",
    "IncompatibleStateError",
    "NoAnswerError",
    "RankLostError",
    "ReplicasDifferError",
    "SaveAbandonedError",
    "SaveFailedError",
    "SaveStalledError",
    "SnapshotTornError",
    "StorageError",
    "UnreadableMetadataError",
    "UnsafeObjectError",
    "UnsupportedStateError",
    "UnsupportedTensorError",
]


class DataStatesError(Exception):
    """Base of all errors of this package. Its text has escapes for control characters in names."""

    def __str__(self) -> str:
        return printable(super().__str__())


class ConfigurationError(DataStatesError, ValueError):
    """An option has a value that cannot work, or options contradict each other."""


class DeviceError(DataStatesError, RuntimeError):
    """An accelerator's driver refused an operation; the message has its words."""


class StorageError(DataStatesError, OSError):
    """The file system refused an operation. ``errno`` and ``filename`` are set where known."""


class CheckpointExistsError(DataStatesError, FileExistsError):
    """A committed checkpoint is at the path and ``overwrite=False``."""


class CheckpointNotFoundError(DataStatesError, FileNotFoundError):
    """No committed checkpoint is at the path; the message says what is there instead."""


class ForeignCheckpointError(CheckpointNotFoundError):
    """The checkpoint at the path was written by something else, such as stock DCP."""


class CheckpointCorruptError(DataStatesError):
    """Stored bytes are not those that were written (checksum, size or structure)."""


class UnreadableMetadataError(CheckpointCorruptError):
    """The checksum of ``.metadata`` holds, but this release does not take what is in it.

    A release with another format wrote it, or it was made up.
    """


class CheckpointReplacedError(DataStatesError):
    """The checkpoint at the path was replaced, or removed, while it was being loaded; load again."""


class UnsafeObjectError(DataStatesError):
    """The state holds pickled Python objects and the reader was told ``allow_objects=False``."""


class IncompatibleStateError(DataStatesError, ValueError):
    """What a load asks for does not fit what was saved. Where names decide that, the error has all of them.

    Attributes:
        missing: names in the state that the checkpoint lacks.
        unexpected: names in the checkpoint that the state lacks.
        unfit: by name, in what a value of the state and the stored one differ: shape, dtype or kind.
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
    """A save failed on at least one rank, so on all; the checkpoint that was there before still is.

    Raised as this where the cause is no error of this package; else as the cause's own type, with
    rank and cause in the message.
    """


class RankLostError(SaveFailedError):
    """A rank died, was cut off, or made no progress for too long; the message names it."""


class ReplicasDifferError(SaveFailedError):
    """Ranks that share in writing a tensor hold different values of it; the message names it."""


class CheckpointSupersededError(SaveFailedError):
    """Another job committed a checkpoint at the path while this save was under way."""


class CheckpointSkipped(SaveFailedError):
    """All ranks agreed to leave this save out, because those before it are late (``when_behind``)."""


class CommitOutcomeUnknown(DataStatesError):
    """This rank cannot tell whether the save was committed; the message says how to find out."""


class NoAnswerError(DataStatesError, TimeoutError):
    """The one rank that looks on behalf of all gave no answer; the message says to what, and why."""


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
