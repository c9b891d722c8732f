"""The checkpoints in torchtitan's checkpoint folder: finds the one to resume from, and deletes old ones.

torchtitan counts directories by their names. Here a checkpoint counts if it is committed and intact. A folder may
contain checkpoints of several formats, from before this package was used; their contents show the format.
"""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import Final

from dcp_datastates.checkpoints.find import Verification, flaw
from dcp_datastates.checkpoints.formats import HUGGING_FACE_INDEX, Format, format_of
from dcp_datastates.checkpoints.listing import checkpoints, directories, newest_first
from dcp_datastates.checkpoints.retention import retain_here
from dcp_datastates.errors import DataStatesError
from dcp_datastates.storage import local

__all__ = ["delete_old", "newest_step"]

logger = logging.getLogger(__name__)

_STEP: Final = re.compile(r"step-([0-9]+)")


def newest_step(folder: Path, verify: Verification) -> int:
    """The step to resume from; -1 if there is none.

    The step of the newest checkpoint of this package that passes ``verify``; or that of a checkpoint of another format,
    if it is higher. Other formats count as in torchtitan.
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
    """Delete checkpoints older than the ``keep`` newest good ones of this package; returns the deleted ones.

    Treats this package's checkpoints as :func:`~dcp_datastates.retain` does. Stock and Hugging Face checkpoints are
    deleted by their step, and only once there are ``keep`` good ones: a failed save evicts no checkpoint. Only
    directories named ``step-N`` count.

    Raises :class:`StorageError`, or OSError.
    """
    retained = retain_here(
        folder, keep=keep, verify=verify, among=lambda path: _step(path) is not None
    )
    deleted = list(retained.deleted)
    if retained.newest == keep:
        oldest = min(_step(path) or 0 for path in retained.kept[:keep])
        for step, path in _steps(folder):
            if step < oldest and _format(path) in (Format.STOCK, Format.HUGGING_FACE):
                # First .metadata: if this is interrupted, the rest is not a checkpoint any more.
                (path / local.METADATA_NAME).unlink(missing_ok=True)
                (path / HUGGING_FACE_INDEX).unlink(missing_ok=True)
                shutil.rmtree(path)
                deleted.append(path)
    return deleted


def _steps(folder: Path) -> list[tuple[int, Path]]:
    """The directories named ``step-N``, without symbolic links."""
    found = [(_step(path), path) for path in directories(folder) if not path.is_symlink()]
    return [(step, path) for step, path in found if step is not None]


def _format(path: Path) -> Format:
    try:
        return format_of(path)
    except DataStatesError:  # a save of this package: uncommitted or damaged
        return Format.DATASTATES


def _step(path: Path) -> int | None:
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None
