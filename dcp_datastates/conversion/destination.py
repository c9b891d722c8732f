"""What a conversion writes: files, and the path at which a file or a directory appears at once, complete and durable.

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
from typing import NamedTuple

import torch
from typing_extensions import Buffer

from dcp_datastates._native import BLOCK_BYTES, crc32c
from dcp_datastates.checkpoints.inventory import is_committed
from dcp_datastates.checkpoints.listing import committed_among, directories
from dcp_datastates.checkpoints.pins import pins
from dcp_datastates.conversion.source import PIECE_BYTES, Source, as_bytes
from dcp_datastates.errors import CheckpointExistsError, ConfigurationError
from dcp_datastates.process.work import Done, Unit
from dcp_datastates.storage import local, operations, presence
from dcp_datastates.storage.local import explained
from dcp_datastates.storage.object_path import Location, resolved


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
    if not overwrite:
        raise _exists(target)
    if not is_directory:
        return
    _check_replaceable(target, target)
    if not (is_committed(target) or any(target.glob("*.safetensors"))):
        raise ConfigurationError(
            f"{str(target)!r} is not empty and holds no checkpoint; it is not replaced: choose another path"
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


def _is_taken(target: Path) -> bool:
    """Whether there is anything but an empty directory."""
    if presence.is_directory(target):
        return bool(presence.names_in(target))
    return presence.is_there(target)


def _exists(target: Path) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"{str(target)!r} exists; choose another path, or pass overwrite=True (--overwrite) to replace it"
    )


@contextlib.contextmanager
def atomic_output(target: Path, overwrite: bool) -> Iterator[Path]:
    """A path to write to, whose file or directory appears at ``target`` when the block ends.

    All files below must have been synced; the directories are synced here. If the block raises, all is removed.
    Raises :class:`CheckpointExistsError` if something has come to be at ``target`` meanwhile, unless ``overwrite``;
    :class:`ConfigurationError` for a directory that the file system cannot replace in one step.
    """
    local.make_directories(target.parent, "convert")
    work = target.parent / f".{target.name}.converting-{secrets.token_hex(4)}"
    with local.explained("creating directory", work):
        operations.make_directory(work, "convert")
    try:
        if presence.is_directory(target) and _is_taken(target):
            _check_exchanges(work, target)
        yield work / "new"
        with local.explained("publishing", target):
            _publish(work / "new", target, overwrite)
        for directory in local.sync_directories(target.parent):
            with local.explained("syncing", directory):
                operations.sync_directory(directory, "convert")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _check_exchanges(work: Path, target: Path) -> None:
    """Raise :class:`ConfigurationError` if the file system cannot exchange directories, as NFS cannot: before the
    tensors are converted.
    """
    with local.explained("trying to exchange directories in", work):
        for name in ("one", "other"):
            operations.make_directory(work / name, "trial")
        try:
            operations.exchange(work / "one", work / "other", "trial")
        except OSError as error:
            if error.errno not in operations.NO_RENAME_FLAGS:
                raise
            raise ConfigurationError(
                f"{str(target)!r} cannot be replaced in one step: its file system cannot exchange two directories; "
                f"choose another path, or delete it first"
            ) from error


def _publish(new: Path, target: Path, overwrite: bool) -> None:
    if not overwrite and _is_taken(target):
        raise _exists(target)
    if not presence.is_directory(new):
        operations.rename(new, target, "convert")
        return
    for folder, _, _ in os.walk(new, topdown=False):
        operations.sync_directory(Path(folder), "convert")
    if not _is_taken(target):
        operations.rename(new, target, "convert")
        return
    operations.exchange(new, target, "convert")
    try:
        _check_replaceable(new, target)
    except ConfigurationError:
        operations.exchange(new, target, "convert")
        raise


class Output(NamedTuple):
    """What a target consists of."""

    units: Sequence[Unit]
    """Each writes one file with tensors."""
    finish: Callable[[], None] = lambda: None
    """Completes the target when the files are written."""


def write_file(
    source: Source,
    path: Path,
    header: bytes,
    names: Sequence[str],
    done: Done,
    *,
    objects: Iterable[bytes] = (),
    table_offset: int | None = None,
) -> None:
    """Write a file: a header, the tensors of these ``names``, objects and, with ``table_offset``, the checksums of all
    that. Its bytes are durable when this returns.
    """

    def content() -> Iterator[Buffer]:
        yield header
        for group in source.groups(names, PIECE_BYTES):
            yield from _pieces(source.read(group), done)
        yield from objects

    pieces = content() if table_offset is None else _with_checksums(content(), table_offset)
    with explained("writing", path, source.nbytes):
        operations.write_new_file(path, pieces, "convert")


def _pieces(tensors: list[torch.Tensor], done: Done) -> Iterator[Buffer]:
    """The bytes of ``tensors``. A function of its own: when it ends, their memory is free for the next ones."""
    for tensor in tensors:
        data = as_bytes(tensor)
        for begin in range(0, len(data), PIECE_BYTES):
            piece = data[begin : begin + PIECE_BYTES]
            yield piece
            done(len(piece))


def _with_checksums(pieces: Iterator[Buffer], table_offset: int) -> Iterator[Buffer]:
    """``pieces``, zeros up to ``table_offset``, and the table (``format/layout.py``)."""
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


def write_small_file(path: Path, data: bytes) -> None:
    """Write a new file at once. Its bytes are durable when this returns."""
    with explained("writing", path, len(data)):
        operations.write_new_file(path, [data], "convert")
