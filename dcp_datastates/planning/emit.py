"""The pickle of a checkpoint's ``Metadata``, written from columns.

What is there once (names, paths, properties, notes) Python's own pickler writes; the chunks, a million of them,
native code writes, referring to those through the unpickler's memo::

    PROTO 4
    Metadata()                                  here, the attributes as a dict:
        state_dict_metadata: (words, names, table)      a placeholder, for the memo's sake
        planner_data: ...
        storage_data: (paths,)                          another one
        storage_meta, version, dcp_datastates
        state_dict_metadata: {...}              native, from here; a key that comes again replaces its value
        storage_data: {...}
    STOP

The placeholders are gone before the unpickler gives the dict to the instance. There is no other place for
them: nothing that ``scan_pickle`` passes takes a value off the stack again.
"""

from __future__ import annotations

import io
import pickle
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, TypeAlias

import numpy as np
import torch
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
from dcp_datastates.planning.catalog import Catalog, Ints, Placement

__all__ = ["NOTE", "emit"]

NOTE: Final = "dcp_datastates"
"""The attribute of ``Metadata`` that is this package's."""

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
)
"""In order of ``Word`` in ``native/src/metadata_pickle.h``."""


def emit(
    catalog: Catalog,
    placement: Placement,
    storage_meta: StorageMeta | None,
    version: str | None,
    note: Mapping[str, Any],
) -> bytes:
    """A pickle of the ``Metadata`` that the columns describe, with ``note`` as its attribute :data:`NOTE`.

    Raises :class:`ValueError` for columns that are inconsistent, and for names and paths that
    ``metadata.decode`` would refuse. Gives the GIL up while it writes the chunks; nobody may change the arrays
    meanwhile.
    """
    _check_types("paths", placement.paths, str)
    start = _starts.get(catalog)
    if start is None:
        start = _starts[catalog] = _Start.of(catalog)
    prelude = _Prelude(start.opcodes, start.memo)
    prelude.item("storage_data", (placement.paths,))
    prelude.item("storage_meta", storage_meta)
    prelude.item("version", version)
    prelude.item(NOTE, dict(note))
    memo = prelude.memo()
    return metadata_pickle(
        prelude.opcodes(),
        len(memo),
        start.words,
        start.names,
        start.table,
        _places(memo, placement.paths),
        catalog,
        placement,
    )


_Memo: TypeAlias = dict[int, tuple[int, Any]]
"""What a pickler has put where: by its identity, the index for the unpickler, and the object."""


class _Prelude:
    """The pickle as far as Python writes it, without its PROTO; ends within a dict of attributes."""

    def __init__(self, opcodes: bytes = b"", memo: _Memo | None = None) -> None:
        self._opcodes = bytearray(opcodes)
        self._written = io.BytesIO()
        # 3 is the last protocol without frames, which would enclose the opcodes that are cut off.
        self._pickler = pickle.Pickler(self._written, protocol=3)
        if memo is not None:
            self._pickler.memo = memo

    def instance(self, of: type) -> None:
        self._value(of)
        self._opcodes += pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.EMPTY_DICT + pickle.MARK

    def item(self, key: str, value: object) -> None:
        self._value(key)
        self._value(value)

    def opcodes(self) -> bytes:
        return bytes(self._opcodes)

    def memo(self) -> _Memo:
        return self._pickler.memo.copy()

    def _value(self, value: object) -> None:
        """Its opcodes, without PROTO before and STOP behind them; the memo goes on from value to value."""
        self._pickler.dump(value)
        self._opcodes += self._written.getbuffer()[2:-1]
        self._written.seek(0)
        self._written.truncate()


@dataclass(frozen=True)
class _Start:
    """What is the same in all pickles of a catalog: the beginning, and where in the memo the unique things are."""

    opcodes: bytes
    memo: _Memo
    words: Ints
    names: Ints
    table: Ints

    @staticmethod
    def of(catalog: Catalog) -> _Start:
        _check(catalog)
        prelude = _Prelude()
        prelude.instance(Metadata)
        prelude.item("state_dict_metadata", (_WORDS, catalog.names, catalog.table))
        prelude.item("planner_data", None if catalog.mappings is None else dict(catalog.mappings))
        memo = prelude.memo()
        return _Start(
            prelude.opcodes(),
            memo,
            _places(memo, _WORDS),
            _places(memo, catalog.names),
            _places(memo, catalog.table),
        )


_starts: weakref.WeakKeyDictionary[Catalog, _Start] = weakref.WeakKeyDictionary()


def _places(memo: _Memo, objects: Sequence[object]) -> Ints:
    return np.fromiter((memo[id(each)][0] for each in objects), np.int64, len(objects))


def _check(catalog: Catalog) -> None:
    """Of what is pickled as it is given; the arrays are checked where they are read."""
    _check_types("names", catalog.names, str)
    _check_types("table", catalog.table, TensorProperties)
    if len(set(catalog.names)) != len(catalog.names):
        raise ValueError("names has a name twice")
    if catalog.mappings is not None:
        _check_types("a name in mappings", catalog.mappings, str)
        _check_types("a path in mappings", catalog.mappings.values(), tuple)
        _check_types("a path in mappings", chain.from_iterable(catalog.mappings.values()), str, int)


def _check_types(what: str, values: Iterable[object], *allowed: type) -> None:
    for kind in set(map(type, values)):
        if kind not in allowed:
            expected = " or ".join(each.__name__ for each in allowed)
            raise ValueError(f"{what} has a {kind.__name__} where it must have {expected}")
