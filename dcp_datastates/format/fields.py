"""The fields of DCP's dataclasses that this package carries: those of torch 2.11 to 2.15.

A newer torch may add fields. Checkpoints leave these out, and one line of the log says so (``dcp/tested.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

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
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
)

_FIELDS: Final[Mapping[Any, tuple[str, ...]]] = {
    TensorProperties: (
        *("dtype", "layout", "requires_grad", "memory_format", "pin_memory"),
        "strides",  # since 2.15
    ),
    ChunkStorageMetadata: ("offsets", "sizes"),
    TensorStorageMetadata: ("properties", "size", "chunks"),
    BytesStorageMetadata: (),
    MetadataIndex: ("fqn", "offset", "index"),
    Metadata: ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"),
    StorageMeta: ("checkpoint_id", "save_id", "load_id", "modules"),
    _StorageInfo: ("relative_path", "offset", "length", "transform_descriptors"),
    TensorWriteData: ("chunk", "properties", "size"),
    WriteItem: ("index", "type", "bytes_io_data", "tensor_data"),
    SavePlan: ("items", "storage_data", "planner_data", "usable"),
    ReadItem: (
        *("type", "dest_index", "dest_offsets", "storage_index", "storage_offsets", "lengths"),
    ),
    LoadPlan: ("items", "storage_data", "planner_data"),
}

HAS_STRIDES: Final = "strides" in TensorProperties.__dataclass_fields__
"""Whether the installed torch is 2.15 or newer: properties have the strides of a tensor's memory."""


def carried(kind: type) -> tuple[str, ...]:
    """The fields of one of DCP's classes that are carried, if the installed torch has them."""
    return tuple([name for name in _FIELDS[kind] if name in kind.__dataclass_fields__])  # type: ignore[attr-defined]


def new_fields() -> dict[str, bool]:
    """The fields of the installed torch that are not carried, such as ``"WriteItem.type"``; for each, whether an
    instance can be made without it.
    """
    return {
        f"{kind.__name__}.{field.name}": (field.default, field.default_factory)
        != (dataclasses.MISSING, dataclasses.MISSING)
        for kind, known in _FIELDS.items()
        for field in dataclasses.fields(kind)
        if field.name not in known
    }
