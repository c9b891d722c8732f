"""The pickle at the beginning of ``.metadata``, for programs that know DCP only: names, shapes and dtypes.

It is a ``Metadata`` of DCP in which each tensor is one chunk. Its storage entries name no data: stock DCP's reader
refuses each of them, with a message that says what to do (``refusal.py``). This package never reads the pickle. It
depends on the catalog alone, so a save whose structure is unchanged does not make it again.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import weakref
from enum import Enum
from typing import Any, Final

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_datastates.format.chunk_table import Catalog
from dcp_datastates.format.fields import IN_COLUMNS, known_fields, portable, unknown_fields
from dcp_datastates.format.refusal import TRANSFORM_DESCRIPTORS
from dcp_datastates.storage.local import METADATA_NAME

__all__ = ["stub_of"]

_PROTOCOL: Final = 4

_NOWHERE: Final = _StorageInfo(METADATA_NAME, 0, 0, TRANSFORM_DESCRIPTORS)
"""A file that exists: stock DCP opens it before it refuses the entry."""

_stubs: weakref.WeakKeyDictionary[Catalog, tuple[str | None, bytes]] = weakref.WeakKeyDictionary()


def stub_of(catalog: Catalog, version: str | None) -> bytes:
    """The pickle for a catalog that ``metadata_check`` has accepted; ``version`` is ``Metadata.version``.

    The same catalog and torch give the same bytes.
    """
    known = _stubs.get(catalog)
    if known is None or known[0] != version:
        known = _stubs[catalog] = version, _pickled(_stub(catalog, version))
    return known[1]


def _stub(catalog: Catalog, version: str | None) -> Metadata:
    entries: dict[str, STORAGE_TYPES] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    # Few are different, and the pickle has each once. An entry is its tensor's own: programs change its size.
    alike: dict[tuple[int, ...], tuple[torch.Size, ChunkStorageMetadata]] = {}
    columns = (catalog.names, catalog.properties.tolist(), catalog.tensor_shapes())
    for name, kind, shape in zip(*columns, strict=True):
        if kind < 0:
            entries[name] = BytesStorageMetadata()
            places[MetadataIndex(name)] = _NOWHERE
            continue
        if shape not in alike:
            size, begin = torch.Size(shape), torch.Size([0] * len(shape))
            alike[shape] = size, ChunkStorageMetadata(begin, size)
        size, chunk = alike[shape]
        entries[name] = TensorStorageMetadata(catalog.table[kind], size, [chunk])
        places[MetadataIndex(name, chunk.offsets)] = _NOWHERE
    return Metadata(entries, storage_data=places, version=version)


def _pickled(metadata: Metadata) -> bytes:
    """Without fields that only some releases of torch have: others could not read them."""
    written = io.BytesIO()
    pickler = pickle.Pickler(written, _PROTOCOL)
    pickler.dispatch_table = copyreg.dispatch_table | _REDUCERS
    pickler.dump(metadata)
    return written.getvalue()


def _known(instance: object) -> tuple[Any, ...]:
    kind: Any = type(instance)
    known = known_fields(kind)
    own = {name: value for name, value in vars(instance).items() if name in known}
    return copyreg.__newobj__, (kind,), own  # type: ignore[attr-defined]


def _by_value(member: Enum) -> tuple[type[Enum], tuple[Any]]:
    return type(member), (member.value,)


# Python 3.11.0 to 3.11.3 pickle an enum member as a call of getattr, which a safe reader must refuse.
_REDUCERS: Final[dict[type, Any]] = {
    **{
        each: _by_value
        for each in vars(dcp_metadata).values()
        if isinstance(each, type) and issubclass(each, Enum) and each is not Enum
    },
    **{kind: _known for kind in IN_COLUMNS.values() if unknown_fields(kind)},
    TensorProperties: portable,
}
