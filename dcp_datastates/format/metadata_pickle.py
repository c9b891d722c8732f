"""The pickle of a checkpoint's ``Metadata``, written from columns.

What is there once (names, paths, properties) Python's own pickler writes; the chunks, a million of them,
native code writes, referring to those through the unpickler's memo::

    PROTO 4
    Metadata()                                  here, the attributes as a dict:
        state_dict_metadata: (words, names, table)      a placeholder, for the memo's sake
        planner_data: ...
        storage_data: (paths,)                          another one
        storage_meta, version
        state_dict_metadata: {...}              native, from here; a key that comes again replaces its value
        storage_data: {...}
    STOP

The placeholders are gone before the unpickler gives the dict to the instance. Fields that only some releases of torch
have are not in the pickle: in the properties of tensors they would keep older releases from opening it.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import struct
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import IO, Any, Final, TypeAlias

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_datastates._native import metadata_pickle
from dcp_datastates.format.chunk_table import Catalog, Ints, Placement
from dcp_datastates.format.fields import portable
from dcp_datastates.format.refusal import TRANSFORM_DESCRIPTORS

__all__ = ["emit"]

_PROTOCOL: Final = 3
"""The last one without frames, which would enclose opcodes that are cut off."""

_WORDS: Final = (
    TensorStorageMetadata,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    _StorageInfo,
    torch.Size,
    "properties",
    "size",
    "chunks",
    "offsets",
    "sizes",
    "fqn",
    "index",
    "offset",
    "relative_path",
    "length",
    "state_dict_metadata",
    "storage_data",
    "transform_descriptors",
    TRANSFORM_DESCRIPTORS,
)
"""In order of ``Word`` in ``native/src/metadata/metadata_pickle.h``."""


def emit(
    catalog: Catalog,
    placement: Placement,
    storage_meta: StorageMeta | None,
    version: str | None,
) -> bytes:
    """A pickle of the ``Metadata`` that the columns describe, which ``metadata_check`` has found to be sound.

    Raises :class:`ValueError` for columns that are inconsistent. Gives the GIL up while it writes the chunks; the
    arrays must not change meanwhile.
    """
    start = _starts.get(catalog)
    if start is None:
        start = _starts[catalog] = _Start.of(catalog)
    first = start.memo_size
    opcodes = b"".join(
        (
            start.opcodes,
            _attribute("storage_data", _listed(placement.paths, first)),
            _attribute("storage_meta", _pickled(storage_meta)),
            _attribute("version", _pickled(version)),
        )
    )
    paths = np.arange(first, first + len(placement.paths), dtype=np.int64)
    return metadata_pickle(
        opcodes,
        first + len(placement.paths),
        start.words,
        start.names,
        start.table,
        paths,
        catalog,
        placement,
    )


def _attribute(name: str, value: bytes) -> bytes:
    return _pickled(name) + value


def _pickled(value: object) -> bytes:
    """Opcodes that put nothing in the memo: what goes there is for :class:`_Start` and :func:`_listed` to say."""
    written = io.BytesIO()
    pickler = _pickler(written)
    pickler.fast = True
    pickler.dump(value)
    return _without_ends(written)


def _listed(strings: Sequence[str], first: int) -> bytes:
    """A tuple of one tuple of strings, which are in the memo from ``first`` on."""
    opcodes = bytearray(pickle.MARK)
    for place, string in enumerate(strings, first):
        encoded = string.encode("utf-8", "surrogatepass")
        opcodes += pickle.BINUNICODE + struct.pack("<I", len(encoded)) + encoded
        opcodes += pickle.LONG_BINPUT + struct.pack("<I", place)
    return bytes(opcodes + pickle.TUPLE + pickle.TUPLE1)


def _without_ends(written: io.BytesIO) -> bytes:
    """Without PROTO before and STOP behind."""
    return bytes(written.getbuffer()[2:-1])


_Memo: TypeAlias = dict[int, tuple[int, Any]]
"""What a pickler has put where: by its identity, the index for the unpickler, and the object."""


@dataclass(frozen=True)
class _Start:
    """What is the same in all pickles of a catalog: the beginning, and where in the memo the unique things are."""

    opcodes: bytes
    memo_size: int
    words: Ints
    names: Ints
    table: Ints

    @staticmethod
    def of(catalog: Catalog) -> _Start:
        written = io.BytesIO()
        pickler = _pickler(written)
        opcodes = b""

        def put(value: object) -> None:
            """The memo goes on from value to value."""
            nonlocal opcodes
            written.seek(0)
            written.truncate()
            pickler.dump(value)
            opcodes += _without_ends(written)

        put(Metadata)
        opcodes += pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.EMPTY_DICT + pickle.MARK
        put("state_dict_metadata")
        put((_WORDS, catalog.names, catalog.table))
        put("planner_data")
        put(catalog.mappings)
        memo = pickler.memo.copy()
        return _Start(
            opcodes,
            len(memo),
            _places(memo, _WORDS),
            _places(memo, catalog.names),
            _places(memo, catalog.table),
        )


_starts: weakref.WeakKeyDictionary[Catalog, _Start] = weakref.WeakKeyDictionary()


def _places(memo: _Memo, objects: Sequence[object]) -> Ints:
    return np.fromiter((memo[id(each)][0] for each in objects), np.int64, len(objects))


def _by_value(member: Enum) -> tuple[type[Enum], tuple[Any]]:
    return type(member), (member.value,)


# Python 3.11.0 to 3.11.3 pickle a member as a call of getattr, which no reader of untrusted files may allow.
_ENUMS: Final = [
    each
    for each in vars(dcp_metadata).values()
    if isinstance(each, type) and issubclass(each, Enum) and each is not Enum
]
_REDUCERS: Final[dict[type, Any]] = {
    **dict.fromkeys(_ENUMS, _by_value),
    TensorProperties: portable,
}


def _pickler(file: IO[bytes]) -> pickle.Pickler:
    """A pickler that writes the same from every Python, and properties of tensors so that every torch can read them."""
    pickler = pickle.Pickler(file, _PROTOCOL)
    pickler.dispatch_table = copyreg.dispatch_table | _REDUCERS
    return pickler
