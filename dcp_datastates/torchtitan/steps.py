"""The checkpoints in torchtitan's checkpoint folder: finds the one to resume from, and deletes old ones.

torchtitan counts directories by their names. Here a checkpoint counts if it is committed and intact. A folder may
contain checkpoints of several formats, from before this package was used; their contents show the format.
"""

from __future__ import annotations

from typing import Final

from dcp_datastates.checkpoints.find import Verification
from dcp_datastates.checkpoints.formats import HUGGING_FACE_INDEX, Format, format_of
from dcp_datastates.checkpoints.inventory import remove_all
from dcp_datastates.checkpoints.listing import directories
from dcp_datastates.checkpoints.retention import retain_here
from dcp_datastates.errors import DataStatesError
from dcp_datastates.manager.step_directories import newest_numbered, number_of
from dcp_datastates.storage import local
from dcp_datastates.storage.object_path import Location

__all__ = ["delete_old", "newest_step"]

_PREFIX: Final = "step-"


def newest_step(folder: Location, verify: Verification) -> int:
    """The step to resume from, the same on every rank; -1 if there is none.

    The step of the newest checkpoint of this package that passes ``verify``; or that of a checkpoint of another format,
    if it is higher. Other formats count as in torchtitan.
    """
    found = newest_numbered(folder, _PREFIX, _is_stock, verify)
    return -1 if found is None else number_of(found, _PREFIX)


def delete_old(folder: Location, keep: int, verify: Verification) -> list[Location]:
    """Delete checkpoints older than the ``keep`` newest good ones of this package; returns the deleted ones.

    Treats this package's checkpoints as :func:`~dcp_datastates.retain` does. Stock and Hugging Face checkpoints are
    deleted by their step, and only once there are ``keep`` good ones: a failed save evicts no checkpoint. Only
    directories named ``step-N`` count.

    Raises :class:`StorageError`, or OSError.
    """
    retained = retain_here(
        folder, keep=keep, verify=verify, among=lambda path: number_of(path, _PREFIX) >= 0
    )
    deleted = list(retained.deleted)
    if retained.newest == keep:
        oldest = min(number_of(path, _PREFIX) for path in retained.kept[:keep])
        for path in directories(folder):
            if 0 <= number_of(path, _PREFIX) < oldest and _format(path) in (
                Format.STOCK,
                Format.HUGGING_FACE,
            ):
                remove_all(path, first=(local.METADATA_NAME, HUGGING_FACE_INDEX))
                deleted.append(path)
    return deleted


def _is_stock(path: Location) -> bool:
    return _format(path) not in (Format.DATASTATES, Format.NONE)


def _format(path: Location) -> Format:
    if path.is_symlink():
        return Format.NONE
    try:
        return format_of(path)
    except DataStatesError:  # a save of this package: uncommitted or damaged
        return Format.DATASTATES
