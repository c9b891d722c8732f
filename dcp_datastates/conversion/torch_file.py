"""Files of ``torch.save``, which torch itself reads and writes. Their tensors are mapped."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

import torch

from dcp_datastates.conversion.source import Source, loaded, local_file
from dcp_datastates.errors import (
    CheckpointCorruptError,
    ForeignCheckpointError,
    IncompatibleStateError,
    UnsupportedStateError,
)
from dcp_datastates.format.key_paths import flatten, nested
from dcp_datastates.process.work import Done
from dcp_datastates.storage.local import explained
from dcp_datastates.storage.object_path import Location

_ZIP: Final = b"PK\x03\x04"
BEGINNINGS: Final = (_ZIP, b"\x80\x02")
"""How files of ``torch.save`` may begin: an archive or, from torch before 1.6, a pickle."""


def torch_source(path: Location, allow_objects: bool) -> Source:
    """A file of ``torch.save``: a dict of tensors and objects, nested to any depth.

    Raises :class:`IncompatibleStateError` for another value, and what :func:`loaded` raises.
    """
    state = _load(path, allow_objects)
    if not isinstance(state, Mapping):
        kind = "Tensor" if isinstance(state, torch.Tensor) else type(state).__name__
        raise IncompatibleStateError(
            f"{path} holds a {kind}; only a dict with strings as keys can be converted"
        )
    try:
        values, paths = flatten(state)
    except RecursionError:
        raise IncompatibleStateError(
            f"{path} nests dicts and lists too deeply; load it with torch.load, make it flatter, save it again"
        ) from None
    except ValueError as error:
        name = str(error).rpartition(" ")[2]
        raise IncompatibleStateError(f"{path} has two values with the name {name!r}") from None
    if "" in values or "" in paths:
        raise IncompatibleStateError(
            f"{path} has a value under the empty key ''; load it with torch.load, name the value, and save it again"
        )
    tensors = {name: each for name, each in values.items() if isinstance(each, torch.Tensor)}
    others = ((name, each) for name, each in values.items() if name not in tensors)
    objects = {name: partial(_saved, path, name, each) for name, each in others}
    return Source(path, "torch.save", tensors, objects, paths)


def _saved(path: Location, name: str, value: Any) -> bytes:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as error:
        raise UnsupportedStateError(
            f"{path}: object {name!r} cannot be stored: {type(error).__name__}: {error}"
        ) from error
    return buffer.getvalue()


def _load(path: Location, allow_objects: bool) -> Any:
    with local_file(path) as file:
        with explained("reading", path), file.open("rb") as stream:
            is_archive = stream.read(4) == _ZIP
            if is_archive:
                _check_archive(stream, path)
        way_out = "load it with torch.load, make its values plain, save it again"
        return loaded(str(file), str(path), allow_objects, way_out, is_archive)


def _check_archive(stream: IO[bytes], path: Location) -> None:
    """Refuse an archive that is a program, or whose tensors are packed: torch would map the packed bytes."""
    try:
        entries = zipfile.ZipFile(stream).infolist()
    # A name may be no UTF-8, which is a ValueError.
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise CheckpointCorruptError(f"{path}: torch cannot read it: {error}") from error
    if any(entry.filename.endswith("/constants.pkl") for entry in entries):
        raise ForeignCheckpointError(
            f"{path} is a TorchScript archive, which is a program; convert a file of its weights: "
            f"torch.save(torch.jit.load(PATH).state_dict(), FILE)"
        )
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise IncompatibleStateError(
            f"{path} is compressed: another program has packed the archive; load it with torch.load, and save it again"
        )


def write_torch(
    source: Source,
    target: Path,
    allow_objects: bool,
    done: Done,
    *,
    make: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> None:
    """Write one file with what ``make`` makes of the nested state of all tensors and objects. The state is in memory,
    but for mapped tensors.

    Raises :class:`UnsafeObjectError` for an object that only an unpickler of anything can read, unless
    ``allow_objects``.
    """
    values: dict[str, Any] = {name: own(each) for name, each in source.each(source.tensors)}
    values |= {name: source.value(name, allow_objects) for name in source.objects}
    state = make(nested(values, source.paths))
    with explained("writing", target, source.nbytes), target.open("xb") as file:
        save_to(state, _Counted(file, source.nbytes, done))
        os.fsync(file.fileno())


def own(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; a copy, if it is a part of more memory: ``torch.save`` writes all of it."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def save_to(value: Any, stream: Any) -> None:
    """``torch.save``. Raises OSError if a write fails."""
    try:
        torch.save(value, stream)
    except RuntimeError as error:  # torch's own words for a full disk do not name it
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


class _Counted:
    """A file that tells how many bytes were written to it, up to ``total``."""

    def __init__(self, file: IO[bytes], total: int, done: Callable[[int], None]) -> None:
        self._file, self._left, self._done = file, total, done
        self.flush = file.flush

    def write(self, data: Any) -> int:
        written = self._file.write(data)
        counted = min(written, self._left)
        self._left -= counted
        self._done(counted)
        return written
