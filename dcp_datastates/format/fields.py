"""The fields of DCP's dataclasses that this package carries: those of torch 2.11 to 2.15.

A newer torch may add fields. Checkpoints leave these out, and one line of the log says so (``dcp/tested.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

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
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
)

from dcp_datastates.format import values
from dcp_datastates.format.values import ValueRefused, described

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


# ---- as JSON ----


def fields_to_json(instance: Any) -> dict[str, Any]:
    """The fields of a ``TensorProperties`` or ``StorageMeta``, by name."""
    kind = TensorProperties if isinstance(instance, TensorProperties) else StorageMeta
    return {name: values.to_json(getattr(instance, name)) for name in carried(kind)}


def fields_from_json(found: Any, kind: type) -> dict[str, Any]:
    """The fields of an instance of one of DCP's classes that this torch has, too."""
    if type(found) is not dict:
        raise ValueRefused(f"{kind.__name__} is {described(found)}")
    return {name: values.from_json(found[name]) for name in carried(kind) if name in found}


_PROPERTY_TYPES: Final[Mapping[str, type]] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "requires_grad": bool,
    "memory_format": torch.memory_format,
    "pin_memory": bool,
}


def properties_from_json(found: Any) -> TensorProperties:
    """What :func:`fields_to_json` made of properties. Raises :class:`ValueRefused`."""
    fields = fields_from_json(found, TensorProperties)
    for name, kind in _PROPERTY_TYPES.items():
        if type(fields.get(name)) is not kind:
            raise ValueRefused(f"{name} of a tensor is {described(fields.get(name))}")
    strides = fields.get("strides")
    if strides is not None and (type(strides) is not tuple or not set(map(type, strides)) <= {int}):
        raise ValueRefused(f"strides of a tensor is {described(strides)}")
    return TensorProperties(**fields)
