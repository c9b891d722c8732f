"""A path at which a file or a directory appears at once, complete and durable.

It is written below a temporary directory beside the path, so that a killed conversion leaves nothing at the path, and
nothing that a list of checkpoints would show. The directory of a killed conversion, ``.NAME.converting-…``, may be
deleted.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from dcp_datastates.checkpoints.listing import committed_in, is_committed
from dcp_datastates.checkpoints.pins import pins
from dcp_datastates.errors import CheckpointExistsError, ConfigurationError
from dcp_datastates.storage import local, operations

__all__ = ["appearing", "check_destination"]


def check_destination(source: Path, target: Path, is_directory: bool, overwrite: bool) -> None:
    """Raise :class:`CheckpointExistsError` or :class:`ConfigurationError` unless ``target`` may be written."""
    real, real_source = Path(os.path.realpath(target)), Path(os.path.realpath(source))
    if (
        real == real_source
        or real in real_source.parents
        or (real_source in real.parents and target.exists())
    ):
        raise ConfigurationError(
            f"the destination {str(target)!r} is the source, or they lie in each other; choose another place"
        )
    if target.is_symlink():
        raise ConfigurationError(
            f"{str(target)!r} is a symbolic link; name the path that it points to: {str(real)!r}"
        )
    local.check_writable(target.parent)
    if not _is_taken(target):
        return
    if is_directory != target.is_dir():
        there, made = ("directory", "file") if target.is_dir() else ("file", "directory")
        raise ConfigurationError(
            f"{str(target)!r} is a {there}, and this conversion writes a {made}; choose another path"
        )
    if not overwrite:
        raise _exists(target)
    if is_directory:
        _check_replaceable(target)
    if is_directory and not (is_committed(target) or any(target.glob("*.safetensors"))):
        raise ConfigurationError(
            f"{str(target)!r} is not empty and holds no checkpoint; it is not replaced: choose another path"
        )


def _check_replaceable(target: Path) -> None:
    if names := pins(target):
        raise ConfigurationError(
            f"the checkpoint {str(target)!r} is pinned ({', '.join(names)}); dcp_datastates.unpin first"
        )
    if below := committed_in(target):
        raise ConfigurationError(
            f"{str(target)!r} holds checkpoints, such as {below[-1].name!r}, which would be lost; choose another path"
        )


def _is_taken(target: Path) -> bool:
    """Whether there is anything but an empty directory."""
    return target.exists() and not (target.is_dir() and not os.listdir(target))


def _exists(target: Path) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"{str(target)!r} exists; choose another path, or pass overwrite=True (--overwrite) to replace it"
    )


@contextlib.contextmanager
def appearing(target: Path, overwrite: bool) -> Iterator[Path]:
    """A path to write to, whose file or directory appears at ``target`` when the block ends.

    All files below must have been synced; the directories are synced here. If the block raises, all is removed.
    Raises :class:`CheckpointExistsError` if something has come to be at ``target`` meanwhile, unless ``overwrite``.
    """
    local.make_directories(target.parent, "convert")
    work = target.parent / f".{target.name}.converting-{secrets.token_hex(4)}"
    with local.explained("creating directory", work):
        operations.make_directory(work, "convert")
    try:
        yield work / "new"
        with local.explained("publishing", target):
            _publish(work, target, overwrite)
        for directory in local.sync_directories(target.parent):
            with local.explained("syncing", directory):
                operations.sync_directory(directory, "convert")
    finally:
        if target.exists() or not (work / "old").exists():
            shutil.rmtree(work, ignore_errors=True)


def _publish(work: Path, target: Path, overwrite: bool) -> None:
    new, old = work / "new", work / "old"
    if not overwrite and _is_taken(target):
        raise _exists(target)
    if new.is_dir():
        for folder, _, _ in os.walk(new, topdown=False):
            operations.sync_directory(Path(folder), "convert")
    is_directory = new.is_dir()
    try:
        if is_directory and _is_taken(target):
            # A directory that is not empty cannot be replaced in one step.
            operations.rename(target, old, "convert")
        operations.rename(new, target, "convert")
    except BaseException:  # an interrupt, too
        if old.exists() and not target.exists():
            operations.rename(old, target, "convert")
        raise
