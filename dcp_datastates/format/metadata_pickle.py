"""The pickle of a checkpoint's ``Metadata``, written from columns.

Python's pickler writes the unique values (names, paths, properties); native code writes the chunks, perhaps a million,
which refer to the unique values through the unpickler's memo::

    PROTO 4
    Metadata()                                  here, the attributes as a dict:
        state_dict_metadata: (words, names, table)      a placeholder, which fills the memo
        planner_data: ...
        storage_data: (paths,)                          another one
        storage_meta, version
        state_dict_metadata: {...}              native, from here; a key that comes again replaces its value
        storage_data: {...}
    STOP

The dict has replaced the placeholders before the unpickler passes it to the instance. Fields that only some releases of
torch have are not in the pickle: older releases could not open it.
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
"""The last protocol without frames, which would contain the opcodes that are cut off."""

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
    """A pickle of the ``Metadata`` that the columns describe. ``metadata_check`` must have accepted the columns.

    Raises :class:`ValueError` for columns that are inconsistent. Releases the GIL while it writes the chunks; the
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
    """Opcodes that put nothing in the memo: only :class:`_Start` and :func:`_listed` do that."""
    written = io.BytesIO()
    pickler = _pickler(written)
    pickler.fast = True
    pickler.dump(value)
    return _without_ends(written)


def _listed(strings: Sequence[str], first: int) -> bytes:
    """A tuple that contains a tuple of strings, which get the memo indices from ``first`` on."""
    opcodes = bytearray(pickle.MARK)
    for place, string in enumerate(strings, first):
        encoded = string.encode("utf-8", "surrogatepass")
        opcodes += pickle.BINUNICODE + struct.pack("<I", len(encoded)) + encoded
        opcodes += pickle.LONG_BINPUT + struct.pack("<I", place)
    return bytes(opcodes + pickle.TUPLE + pickle.TUPLE1)


def _without_ends(written: io.BytesIO) -> bytes:
    """The pickle without the leading PROTO and the final STOP."""
    return bytes(written.getbuffer()[2:-1])


_Memo: TypeAlias = dict[int, tuple[int, Any]]
"""A pickler's memo: by identity of the object, its index in the unpickler's memo, and the object."""


@dataclass(frozen=True)
class _Start:
    """The parts that all pickles of a catalog share: the beginning, and the memo indices of the unique values."""

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
            """Pickle ``value`` with the memo of the previous values."""
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


# Python 3.11.0 to 3.11.3 pickle an enum member as a call of getattr, which a safe reader must refuse.
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
    """A pickler whose output is the same in every Python, and which writes tensor properties so that every torch can
    read them.
    """
    pickler = pickle.Pickler(file, _PROTOCOL)
    pickler.dispatch_table = copyreg.dispatch_table | _REDUCERS
    return pickler
