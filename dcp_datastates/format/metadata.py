"""The ``.metadata`` file: DCP's own pickle, with a checksum behind it, read without running any of it.

The pickle is what stock DCP writes (``Metadata`` with ``_StorageInfo`` entries and relative paths),
so DCP's tools read it. Behind the pickle's end, where stock readers stop, stands a trailer::

    magic, 8 bytes · length of the pickle, u64 · CRC32C of the pickle, u32 · CRC32C of these 20 bytes, u32

What this package needs beyond stock is one plain dict in the ``Metadata`` object's ``__dict__``,
under ``dcp_datastates``. Fields of ``TensorProperties`` that not every torch has are there too: in the
properties themselves they would keep older releases from opening the file.

A checksum shows damage, not intent, so the pickle is opened in three steps: its opcodes are
scanned without running them (``scan_pickle``), the unpickler finds only allow-listed names, and what comes
out is checked for types and ranges (:mod:`dcp_datastates.format.metadata_check`).
"""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import pickle
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import (
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_datastates._native import BLOCK_BYTES, crc32c, scan_pickle
from dcp_datastates.attempt import Attempt
from dcp_datastates.dcp.fields import further_of, is_field_name, known_fields, set_further
from dcp_datastates.errors import (
    CheckpointCorruptError,
    ConfigurationError,
    UnreadableMetadataError,
)
from dcp_datastates.format.metadata_check import (
    MAX_BYTES,
    MetadataError,
    check,
    check_columns,
    described,
)
from dcp_datastates.format.metadata_pickle import NOTE, emit
from dcp_datastates.format.pickling import metadata_pickler

from .chunk_table import Catalog, Placement

__all__ = ["FileRecord", "Note", "decode", "encode", "encode_columns", "read_note"]

logger = logging.getLogger(__name__)

FORMAT_VERSION: Final = 1
_MAGIC: Final = b"DCPDST\x00\x01"
_TRAILER: Final = struct.Struct("<8sQII")

_FURTHER: Final = "properties"
"""In the notes: of each entry the fields of TensorProperties that not every torch has, each value pickled by itself."""

_PROPERTIES: Final = known_fields(TensorProperties)
_UNOPENED: Final = object()

_DTYPES: Final = {
    name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}
# What DCP's default planners and this package put into a Metadata pickle, and nothing else.
_ALLOWED: Final[Mapping[str, frozenset[str]]] = {
    dcp_metadata.__name__: frozenset(
        {
            name
            for name, value in vars(dcp_metadata).items()
            if isinstance(value, type)
            and value.__module__ == dcp_metadata.__name__
            and (is_dataclass(value) or issubclass(value, Enum))
        }
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo"}),
    "torch": frozenset({"Size", *_DTYPES}),
    "torch.serialization": frozenset({"_get_layout"}),
    "collections": frozenset({"OrderedDict"}),
}


@dataclass(frozen=True)
class FileRecord:
    """One data file of a checkpoint: what a reader must know before opening it. Sizes in bytes."""

    relative_path: str
    nbytes: int
    table_offset: int


@dataclass(frozen=True)
class Note:
    """What this package notes in the metadata of a checkpoint.

    ``after``: the newest attempt that was there, or beside it, when this one was claimed; None if that is not known.
    """

    attempt: Attempt
    files: Mapping[str, FileRecord]
    after: Attempt | None = None


class _OfAnotherTorch:
    """Stands for a value of a type that DCP's metadata have in another release of torch: it keeps nothing."""

    def __init__(self, *arguments: object) -> None:
        pass


class _AllowListedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == dcp_metadata.__name__ and name not in vars(dcp_metadata) and "." not in name:
            return _OfAnotherTorch
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which checkpoint metadata never does"
        )


def encode(metadata: Metadata, note: Note) -> bytes:
    """The bytes of a ``.metadata`` file.

    Raises :class:`ConfigurationError` if ``metadata`` holds what :func:`decode` would refuse (a planner's
    objects, say): a checkpoint that cannot be opened must not be committed.
    """
    table, places = _properties_of(metadata)
    vars(metadata)[NOTE] = _noted(note, table, places)
    written = io.BytesIO()
    metadata_pickler(written).dump(metadata)
    data = written.getvalue()
    try:
        _open(data)
    except MetadataError as error:
        raise _unreadable(error) from error
    return _with_trailer(data)


def encode_columns(
    catalog: Catalog,
    placement: Placement,
    storage_meta: StorageMeta | None,
    version: str | None,
    note: Note,
) -> bytes:
    """The bytes of a ``.metadata`` file, as :func:`encode` makes them of objects; those are never made.

    What was written is not opened again, which would take seconds: that the columns are consistent, and within
    :func:`decode`'s limits, is checked; that the files in ``note`` are those of ``placement`` and long enough is
    the caller's to see to. Raises :class:`ConfigurationError` as :func:`encode` does, and :class:`ValueError` for
    columns that are malformed.
    """
    try:
        check_columns(catalog, _limits(note.files))
    except MetadataError as error:
        raise _unreadable(error) from error
    noted = _noted(note, catalog.table, catalog.properties.tolist())
    return _with_trailer(emit(catalog, placement, storage_meta, version, noted))


def decode(data: bytes, path: Path) -> Metadata:
    """The Metadata object in the bytes of the ``.metadata`` file at ``path``, well-formed in all that DCP
    and this package rely on.

    Raises :class:`CheckpointCorruptError` if the bytes are not whole, :class:`UnreadableMetadataError` if they
    hold anything but the DCP metadata that this release knows; nothing that they name is run. Time and
    memory are linear in the length.
    """
    if len(data) < _TRAILER.size or data[-_TRAILER.size :][:8] != _MAGIC:
        raise CheckpointCorruptError(
            f"{path}: no checksum trailer; the file is cut short, damaged, or was not written by "
            f"dcp_datastates (torch.distributed.checkpoint.FileSystemReader loads stock checkpoints)"
        )
    trailer = data[-_TRAILER.size :]
    _, length, checksum, own = _TRAILER.unpack(trailer)
    body = memoryview(data)[: -_TRAILER.size]
    if crc32c(trailer[:-4]) != own or length != len(body) or crc32c(body) != checksum:
        raise CheckpointCorruptError(f"{path}: checksum mismatch; the metadata file is damaged")
    try:
        return _open(body)
    except MetadataError as error:
        raise UnreadableMetadataError(f"{path}: not checkpoint metadata: {error}") from error


def read_note(metadata: Metadata, path: Path) -> Note:
    """What this package noted in ``metadata``; :class:`CheckpointCorruptError` if that is malformed."""
    try:
        return _note(metadata)
    except MetadataError as error:
        raise CheckpointCorruptError(
            f"{path}: malformed notes of dcp_datastates: {error}"
        ) from error


def _unreadable(error: MetadataError) -> ConfigurationError:
    return ConfigurationError(
        f"the checkpoint's metadata could not be opened again: {error}; a planner must keep its planner_data to "
        f"plain dicts, lists, tuples, strings and numbers, and the ranks that hold a tensor must save together"
    )


def _limits(files: Mapping[str, FileRecord]) -> dict[str, int]:
    """How far into each file bytes of tensors and objects may lie."""
    return {name: record.table_offset for name, record in files.items()}


def _with_trailer(pickled: bytes) -> bytes:
    head = _TRAILER.pack(_MAGIC, len(pickled), crc32c(pickled), 0)[:-4]
    return b"".join((pickled, head, struct.pack("<I", crc32c(head))))


def _open(pickled: bytes | memoryview) -> Metadata:
    """The metadata in a pickle, or :class:`MetadataError`."""
    with _no_garbage_collection():
        metadata = _unpickled(pickled)
        if type(metadata) is not Metadata:
            raise MetadataError(f"it holds {described(metadata)}, not Metadata")
        check(metadata, _limits(_note(metadata).files))
        _restore_further(metadata)
    return metadata


def _unpickled(pickled: bytes | memoryview) -> Any:
    """What is in a pickle, or :class:`MetadataError`; runs none of it."""
    reason = scan_pickle(pickled)
    if reason is not None:
        raise MetadataError(reason)
    try:
        return _AllowListedUnpickler(io.BytesIO(pickled)).load()
    except Exception as error:  # a crafted pickle can raise anything
        raise MetadataError(str(error)[:1000]) from error


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Millions of new objects, none of them in a cycle, would be searched for cycles again and again:
    two thirds of the time that a million chunks take to open.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _noted(note: Note, table: Sequence[TensorProperties], places: Sequence[int]) -> dict[str, Any]:
    """With the properties of each entry, by their places in ``table`` (-1: it is an object)."""
    further = [further_of(each) for each in table]
    return {
        **({_FURTHER: (further, list(places))} if any(further) else {}),
        "version": FORMAT_VERSION,
        "attempt": note.attempt.name,
        **({} if note.after is None else {"after": note.after.name}),
        "files": {
            record.relative_path: (record.nbytes, record.table_offset)
            for record in note.files.values()
        },
    }


def _properties_of(metadata: Metadata) -> tuple[list[TensorProperties], list[int]]:
    """The properties of all entries, each object once; and for each entry, which one it has (-1: it is no tensor)."""
    table: list[TensorProperties] = []
    seen: dict[int, int] = {}
    places = []
    for entry in metadata.state_dict_metadata.values():
        if isinstance(entry, TensorStorageMetadata) and isinstance(
            entry.properties, TensorProperties
        ):
            places.append(seen.setdefault(id(entry.properties), len(table)))
            if places[-1] == len(table):
                table.append(entry.properties)
        else:
            places.append(-1)
    return table, places


def _restore_further(metadata: Metadata) -> None:
    """Give the properties of tensors the fields that are only in the notes, whether this torch has them or not.

    A value that this release cannot open (of a type of another torch, say) is left out: nothing here relies on any.
    """
    noted = vars(metadata)[NOTE].get(_FURTHER)
    if noted is None:
        return
    if type(noted) is not tuple or list(map(type, noted)) != [list, list]:
        raise MetadataError(f"the further properties of tensors are {described(noted)}")
    table, places = noted
    opened: dict[bytes, Any] = {}
    values = [_further(each, opened) for each in table]
    entries = metadata.state_dict_metadata.values()
    if len(places) != len(entries):
        raise MetadataError(f"there are further properties of {len(places)} tensors and objects")
    for entry, place in zip(entries, places, strict=True):
        if isinstance(entry, TensorStorageMetadata):
            if type(place) is not int or not 0 <= place < len(values):
                raise MetadataError("a tensor's further properties are not there")
            set_further(entry.properties, values[place])


def _further(noted: object, opened: dict[bytes, Any]) -> dict[str, Any]:
    """``opened``: the values known already, by their pickles."""
    if type(noted) is not dict:
        raise MetadataError(f"the further properties of a tensor are {described(noted)}")
    values = {}
    for name, pickled in noted.items():
        if not is_field_name(TensorProperties, name) or name in _PROPERTIES:
            raise MetadataError(f"a property of a tensor is called {described(name)}")
        if type(pickled) is not bytes:
            raise MetadataError(f"a tensor's {name} are {described(pickled)}")
        if pickled not in opened:
            try:
                opened[pickled] = _unpickled(pickled)
            except MetadataError as error:
                logger.info(
                    "a tensor's property %s cannot be opened, and is left out: %s", name, error
                )
                opened[pickled] = _UNOPENED
        if opened[pickled] is not _UNOPENED:
            values[name] = opened[pickled]
    return values


def _note(metadata: Metadata) -> Note:
    note = vars(metadata).get(NOTE)
    if type(note) is not dict:
        raise MetadataError("there are none")
    version, name = note.get("version"), note.get("attempt")
    attempt = Attempt.parse(name) if type(name) is str else None
    if type(version) is not int or version != FORMAT_VERSION or attempt is None:
        raise MetadataError(
            f"format version {described(version)}, attempt {described(name)}; this release reads "
            f"version {FORMAT_VERSION}: a newer dcp_datastates may be needed"
        )
    files = note.get("files")
    if type(files) is not dict:
        raise MetadataError(f"files is {described(files)}")
    after = note.get("after")
    return Note(
        attempt,
        {name: _record(name, sizes) for name, sizes in files.items()},
        Attempt.parse(after) if type(after) is str else None,
    )


def _record(name: object, sizes: object) -> FileRecord:
    if type(name) is not str or "\0" in name or not name.isprintable():
        raise MetadataError(f"a data file is called {described(name)}")
    if name.startswith("/") or not {"", ".", ".."}.isdisjoint(name.split("/")):
        raise MetadataError(f"data file {described(name)} lies outside the checkpoint")
    if type(sizes) is not tuple or list(map(type, sizes)) != [int, int]:
        raise MetadataError(f"the sizes of data file {described(name)} are no two integers")
    nbytes, table_offset = sizes
    # The layout of a file: docs of dcp_datastates.layout.
    words = -(-table_offset // BLOCK_BYTES) + 1
    if not 0 <= table_offset < nbytes <= MAX_BYTES or nbytes != table_offset + 4 * words:
        raise MetadataError(
            f"data file {described(name)} cannot be {nbytes} bytes long with its checksums at {table_offset}"
        )
    return FileRecord(name, nbytes, table_offset)
