"""What a conversion writes: files, and the path at which one, or a directory of them, appears complete and durable.

It is written below a temporary directory beside the path, so that a killed conversion leaves nothing at the path, and
nothing that a list of checkpoints would show. A directory at the path is exchanged for the new one. The directory of a
killed conversion, ``.NAME.converting-…``, may be deleted.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from typing_extensions import Buffer

from dcp_datastates._native import BLOCK_BYTES, crc32c
from dcp_datastates.checkpoints.listing import committed_among, directories
from dcp_datastates.checkpoints.pins import pins
from dcp_datastates.conversion.source import PIECE_BYTES, Source, as_bytes
from dcp_datastates.errors import CheckpointExistsError, ConfigurationError
from dcp_datastates.process.work import Done, Unit
from dcp_datastates.storage import attempts, local, operations, presence
from dcp_datastates.storage.local import explained
from dcp_datastates.storage.object_path import Location, resolved

Run = Callable[[Sequence[Unit]], None]
"""Does units that each write one file with tensors, in several threads; returns when all are written."""


def check_destination(source: Location, target: Path, is_directory: bool, overwrite: bool) -> None:
    """Raise :class:`CheckpointExistsError` or :class:`ConfigurationError` unless ``target`` may be written."""
    real, real_source = resolved(target), resolved(source)
    is_above = f"{real_source}/".startswith(f"{real}/")
    is_below = f"{real}/".startswith(f"{real_source}/")
    if is_above or (is_below and presence.is_there(target)):
        raise ConfigurationError(
            f"the destination {str(target)!r} is the source, or they lie in each other; choose another place"
        )
    if presence.is_link(target):
        raise ConfigurationError(
            f"{str(target)!r} is a symbolic link; name the path that it points to: {str(real)!r}"
        )
    local.check_writable(target.parent)
    if not _is_taken(target):
        return
    is_folder = presence.is_directory(target)
    if is_directory != is_folder:
        there, made = ("directory", "file") if is_folder else ("file", "directory")
        raise ConfigurationError(
            f"{str(target)!r} is a {there}, and this conversion writes a {made}; choose another path"
        )
    _check_free(target, overwrite)
    if is_directory:
        _check_replaceable(target, target)
        if not (attempts.is_taken(target) or any(target.glob("*.safetensors"))):
            raise ConfigurationError(
                f"{str(target)!r} is not empty and holds no checkpoint; it is not replaced: choose another path"
            )


def _is_taken(target: Path) -> bool:
    """Whether there is anything but an empty directory."""
    if presence.is_directory(target):
        return bool(presence.names_in(target))
    return presence.is_there(target)


def _check_free(target: Path, overwrite: bool) -> None:
    if not overwrite and _is_taken(target):
        raise CheckpointExistsError(
            f"{str(target)!r} exists; choose another path, or pass overwrite=True (--overwrite) to replace it"
        )


def _check_replaceable(there: Path, target: Path) -> None:
    """Raise :class:`ConfigurationError` unless what is, or was, at ``target``, and is now at ``there``, may go."""
    if names := pins(there):
        raise ConfigurationError(
            f"the checkpoint {str(target)!r} is pinned ({', '.join(names)}); dcp_datastates.unpin first"
        )
    if below := committed_among(directories(there)):
        raise ConfigurationError(
            f"{str(target)!r} holds checkpoints, such as {below[-1].name!r}, which would be lost; choose another path"
        )


@contextlib.contextmanager
def atomic_output(target: Path, is_directory: bool, overwrite: bool) -> Iterator[Path]:
    """A path to write to, whose file or directory appears at ``target`` when the block ends. A directory is there.

    All files below must have been synced; the directories are synced here. If the block raises, all is removed.
    Raises :class:`CheckpointExistsError` if something has come to be at ``target`` meanwhile, unless ``overwrite``;
    :class:`ConfigurationError` for a directory that the file system cannot replace in one step.
    """
    local.make_directories(target.parent, "convert")
    work = target.parent / f".{target.name}.converting-{secrets.token_hex(4)}"
    new = work / "new"
    with explained("creating directory", work):
        operations.make_directory(work, "convert")
    try:
        if is_directory:
            with explained("creating directory", new):
                operations.make_directory(new, "convert")
            if _is_taken(target):
                _check_exchanges(new, target)
        yield new
        with explained("publishing", target):
            _publish(new, target, overwrite)
        for directory in local.sync_directories(target.parent):
            with explained("syncing", directory):
                operations.sync_directory(directory, "convert")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _check_exchanges(new: Path, target: Path) -> None:
    """Raise :class:`ConfigurationError` if the file system cannot exchange directories, as NFS cannot: before the
    tensors are converted.
    """
    other = new.with_name("other")
    with explained("trying to exchange directories in", new.parent):
        operations.make_directory(other, "trial")
        try:
            operations.exchange(new, other, "trial")
        except OSError as error:
            if error.errno not in operations.NO_RENAME_FLAGS:
                raise
            raise ConfigurationError(
                f"{str(target)!r} cannot be replaced in one step: its file system cannot exchange two directories; "
                f"choose another path, or delete it first"
            ) from error


def _publish(new: Path, target: Path, overwrite: bool) -> None:
    _check_free(target, overwrite)
    is_directory = presence.is_directory(new)
    if is_directory:
        for folder, _, _ in os.walk(new, topdown=False):
            operations.sync_directory(Path(folder), "convert")
    if not (is_directory and _is_taken(target)):
        operations.rename(new, target, "convert")
        return
    operations.exchange(new, target, "convert")
    try:
        _check_replaceable(new, target)
    except ConfigurationError:
        operations.exchange(new, target, "convert")
        raise


# ---- files -----------------------------------------------------------------------------------------


def write_file(path: Path, pieces: Iterable[Buffer], nbytes: int = 0) -> None:
    """Write a new file. Its bytes are durable when this returns. ``nbytes``: what is to be written, for errors."""
    with explained("writing", path, nbytes):
        operations.write_new_file(path, pieces, "convert")


def contents(source: Source, names: Iterable[str], done: Done) -> Iterator[Buffer]:
    """The bytes of the tensors of these ``names``, one after another."""
    for _, tensor in source.each(names):
        data = as_bytes(tensor)
        del tensor
        for begin in range(0, len(data), PIECE_BYTES):
            yield data[begin : begin + PIECE_BYTES]
            done(min(PIECE_BYTES, len(data) - begin))
        del data


def with_checksums(pieces: Iterable[Buffer], table_offset: int) -> Iterator[Buffer]:
    """``pieces``, zeros up to ``table_offset``, and the table of their checksums (``format/layout.py``)."""
    table = bytearray()
    crc, at = 0, 0

    def add(piece: Buffer) -> Buffer:
        nonlocal crc, at
        left = memoryview(piece).cast("B")
        while left:
            block = left[: BLOCK_BYTES - at % BLOCK_BYTES]
            crc, at, left = crc32c(block, crc), at + len(block), left[len(block) :]
            if at % BLOCK_BYTES == 0:
                table.extend(crc.to_bytes(4, "little"))
                crc = 0
        return piece

    yield from map(add, pieces)
    yield add(bytes(table_offset - at))
    if at % BLOCK_BYTES:
        table += crc.to_bytes(4, "little")
    yield bytes(table) + crc32c(table).to_bytes(4, "little")
