"""The checkpoints in torchtitan's checkpoint folder: which one to resume from, and which ones are no longer needed.

torchtitan counts directories by their names. Here a checkpoint counts when it is committed and whole. A folder
may hold checkpoints of several formats, from before this package was used: each is recognised by what it holds.
"""

from __future__ import annotations

import enum
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Final

from dcp_datastates.checkpoints.find import Verification, flaw
from dcp_datastates.checkpoints.listing import checkpoints, directories, newest_first, open_found
from dcp_datastates.checkpoints.retention import retain_here
from dcp_datastates.errors import CheckpointNotFoundError, DataStatesError, ForeignCheckpointError
from dcp_datastates.io.committed import open_committed
from dcp_datastates.storage import attempts, local

__all__ = ["Format", "delete_old", "format_of", "newest_step"]

logger = logging.getLogger(__name__)

_STEP: Final = re.compile(r"step-([0-9]+)")
_HUGGING_FACE_INDEX: Final = "model.safetensors.index.json"


class Format(enum.Enum):
    """Who wrote what is committed at a path."""

    DATASTATES = "dcp_datastates"
    STOCK = "stock DCP"
    HUGGING_FACE = "Hugging Face safetensors"
    UNKNOWN = "unknown"
    """There are metadata, and they are neither this package's nor readable as stock DCP's."""
    NONE = "none"


def format_of(path: str | os.PathLike[str]) -> Format:
    """The format of the checkpoint at ``path``, told by its metadata; nothing in them is executed.

    A save of this package that was not committed, and damage to its metadata, are errors: raises
    :class:`CheckpointNotFoundError` or :class:`CheckpointCorruptError`; :class:`StorageError` if it cannot be read.
    """
    directory = local.local_path(path)
    try:
        open_committed(directory)
    except ForeignCheckpointError:
        return Format.STOCK
    except CheckpointNotFoundError:
        if attempts.present(directory):
            raise
        indexed = (directory / _HUGGING_FACE_INDEX).is_file()
        return Format.HUGGING_FACE if indexed else Format.NONE
    except DataStatesError:
        if open_found(directory) is not None:  # it is this package's
            raise
        return Format.UNKNOWN
    return Format.DATASTATES


def newest_step(folder: Path, verify: Verification) -> int:
    """The step to resume from; -1 if there is none.

    Of this package's checkpoints, the one that was saved last and passes ``verify``; if there is a checkpoint of
    another format with a higher step, that. What is not this package's counts as torchtitan counts it.
    """
    newest = -1
    for found in newest_first(path for path in checkpoints(folder) if _step(path) is not None):
        problem = flaw(found, verify)
        if problem is None:
            newest = _step(found.path) or 0
            break
        logger.warning("leaving out checkpoint %s: %s", found.path, problem)
    for step, path in sorted(_steps(folder), reverse=True):
        if step > newest and _format(path) not in (Format.DATASTATES, Format.NONE):
            return step
    return newest


def delete_old(folder: Path, keep: int, verify: Verification) -> list[Path]:
    """Delete what is older than the ``keep`` newest good checkpoints of this package; says what that was.

    Of this package's as :func:`~dcp_datastates.retain` does it. Stock and Hugging Face ones go by their step, and
    only once there are ``keep`` good ones: a save that failed evicts nothing. Only directories named ``step-N`` count.

    Raises :class:`StorageError`, or OSError.
    """
    retained = retain_here(
        folder, keep=keep, verify=verify, among=lambda path: _step(path) is not None
    )
    deleted = list(retained.deleted)
    if len(retained.kept) == keep:
        oldest = min(_step(path) or 0 for path in retained.kept)
        for step, path in _steps(folder):
            if step < oldest and _format(path) in (Format.STOCK, Format.HUGGING_FACE):
                # First what makes it a checkpoint: what is left when this is cut off is none.
                (path / local.METADATA_NAME).unlink(missing_ok=True)
                (path / _HUGGING_FACE_INDEX).unlink(missing_ok=True)
                shutil.rmtree(path)
                deleted.append(path)
    return deleted


def _steps(folder: Path) -> list[tuple[int, Path]]:
    """The directories named ``step-N``, links apart."""
    found = [(_step(path), path) for path in directories(folder) if not path.is_symlink()]
    return [(step, path) for step, path in found if step is not None]


def _format(path: Path) -> Format:
    try:
        return format_of(path)
    except DataStatesError:  # of this package: not committed, or damaged
        return Format.DATASTATES


def _step(path: Path) -> int | None:
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None
