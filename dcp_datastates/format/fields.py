"""The fields of DCP's dataclasses: those that this package knows, and those that it only carries through.

A release of torch may add a field; 2.15 added ``TensorProperties.strides``. Its values belong to the checkpoint:

- A new field of ``TensorProperties`` is carried wherever the properties go: plans in columns, digests and metadata.
- With a new field of any other class, DCP plans the save itself, in objects: that is slower, but loses no data.
- In ``.metadata``, the table contains new fields as plain values (``format/values.py``). They are not in the pickle:
  older releases could not open it. A value that is not plain is left out, with one warning.

All ranks of a job run the same torch, so a class has the same fields on all of them.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final, cast

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
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem

__all__ = [
    "IN_COLUMNS",
    "is_field_name",
    "known_fields",
    "pack_value",
    "packed_unknown_values",
    "plans_in_objects",
    "portable",
    "set_unknown_values",
    "unknown_fields",
    "unknown_values",
    "with_unknown_values",
]

_WHOLE: Final[Mapping[type, tuple[str, ...]]] = {
    TensorProperties: ("dtype", "layout", "requires_grad", "memory_format", "pin_memory"),
    StorageMeta: ("checkpoint_id", "save_id", "load_id", "modules"),
}
"""Of classes whose instances this package stores and sends whole, with any further fields."""

_IN_COLUMNS: Final[Mapping[type, tuple[str, ...]]] = {
    TensorStorageMetadata: ("properties", "size", "chunks"),
    BytesStorageMetadata: (),
    ChunkStorageMetadata: ("offsets", "sizes"),
    MetadataIndex: ("fqn", "offset", "index"),
    Metadata: ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"),
    _StorageInfo: ("relative_path", "offset", "length", "transform_descriptors"),
}
_OF_PLANS: Final[Mapping[type, tuple[str, ...]]] = {
    TensorWriteData: ("chunk", "properties", "size"),
    WriteItem: ("index", "type", "bytes_io_data", "tensor_data"),
    SavePlan: ("items", "storage_data", "planner_data", "usable"),
}
_KNOWN: Final = {**_WHOLE, **_IN_COLUMNS, **_OF_PLANS}

IN_COLUMNS: Final[Mapping[str, type]] = {kind.__name__: kind for kind in _IN_COLUMNS}
"""The classes whose instances are in columns, by their names."""


@cache
def known_fields(kind: type) -> frozenset[str]:
    """The fields of one of DCP's classes that this package knows."""
    return frozenset(_KNOWN[kind])


def unknown_fields(kind: type) -> tuple[str, ...]:
    """The fields of one of DCP's classes in the installed torch that this package does not know."""
    return tuple([field for field in kind.__dataclass_fields__ if field not in _KNOWN[kind]])  # type: ignore[attr-defined]


def plans_in_objects() -> tuple[str, ...]:
    """The classes, with their new fields, that the columns cannot represent. If there are any, DCP must plan."""
    return tuple(
        f"{kind.__name__}.{name}"
        for kind in (*_IN_COLUMNS, *_OF_PLANS)
        for name in unknown_fields(kind)
    )


def is_field_name(kind: type, name: object) -> bool:
    """Whether a file may set an attribute ``name`` on instances of ``kind``: a possible field of the class in some
    torch.

    False for attributes that the class has for another purpose: a file must not replace these.
    """
    return (
        type(name) is str
        and name.isidentifier()
        and not name.startswith("_")
        and (name in kind.__dataclass_fields__ or not hasattr(kind, name))  # type: ignore[attr-defined]
    )


# --- properties of tensors ----------------------------------------------------------------------------


def unknown_values(tensors: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
    """For each tensor, the values of :func:`unknown_fields` of its ``TensorProperties``; empty if there are no such
    fields.

    ``tensors`` are those with the memory: for a ``DTensor``, the local tensor.
    """
    names = unknown_fields(TensorProperties)
    if not names:
        return []
    try:
        if names == ("strides",):  # a fast C-level path: this runs in the training thread
            return list(zip(map(torch.Tensor.stride, tensors), strict=True))
        made = map(TensorProperties.create_from_tensor, tensors)
        return [tuple([getattr(each, name) for name in names]) for each in made]
    except (RuntimeError, NotImplementedError):
        return []  # a tensor without the field; planning refuses it


def packed_unknown_values(properties: TensorProperties) -> dict[str, bytes]:
    """The values of :func:`unknown_fields`, pickled: equal bytes for equal values.

    Values that cannot be pickled are left out: DCP itself must know how to send them.
    """
    packed = {}
    for name in unknown_fields(TensorProperties):
        try:
            packed[name] = pack_value(getattr(properties, name))
        except Exception:  # pickle may raise anything
            continue
    return packed


def with_unknown_values(properties: TensorProperties, values: Sequence[Any]) -> TensorProperties:
    """A copy of the properties with these values of :func:`unknown_fields`."""
    named = dict(zip(unknown_fields(TensorProperties), values, strict=True))
    if all(getattr(properties, name) == value for name, value in named.items()):
        return properties
    return dataclasses.replace(properties, **named)


def set_unknown_values(instance: object, values: Mapping[str, Any]) -> None:
    """Set these values on an instance of one of DCP's classes, also for fields that this torch does not have."""
    vars(instance).update(values)


def pack_value(value: Any) -> bytes:
    """A pickle without a memo, so that equal values give equal bytes, whether or not they are the same objects."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=4)
    pickler.fast = True
    pickler.dump(value)
    return file.getvalue()


def portable(properties: TensorProperties) -> tuple[Any, ...]:
    """The reduce value (as of ``__reduce_ex__``) with which a pickler writes properties so that every torch can read
    them.

    The class pickles itself as a tuple. Releases before 2.15 accept only a tuple of the first five fields; later
    releases accept that, too, because they read older checkpoints. So further fields must be stored elsewhere.
    """
    make, arguments, own = cast("tuple[Any, Any, Any]", properties.__reduce_ex__(2)[:3])
    count = len(_KNOWN[TensorProperties])
    if type(own) is tuple and len(own) > count:
        read = TensorProperties.__new__(TensorProperties)
        try:
            read.__setstate__(own[:count])  # type: ignore[no-untyped-call]
            same = all(
                getattr(read, name) == getattr(properties, name)
                for name in _KNOWN[TensorProperties]
            )
        except Exception:  # a later torch may raise anything
            same = False
        if same:
            own = own[:count]
    return make, arguments, own
