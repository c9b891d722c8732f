"""Other torches: :func:`install` gives DCP's dataclasses the field of torch 2.15, and fields that no release has.

In place, in a process of its own, and before ``dcp_datastates`` is imported.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)


def install(*kinds: str) -> None:
    """Add fields: ``"strides"``, as in torch 2.15; to the class of a name, ``note``; ``"required"``: one without a
    default.
    """
    for kind in kinds:
        _INSTALL[kind]()


def _extended(kind: type, name: str, **field: Any) -> None:
    """Have ``dataclass`` look at the class again."""
    made = dataclasses.make_dataclass("Made", [(name, Any, dataclasses.field(**field))])
    if "default" in field:
        setattr(kind, name, field["default"])
    kind.__dataclass_fields__[name] = made.__dataclass_fields__[name]  # type: ignore[attr-defined]
    init = kind.__init__  # type: ignore[misc]

    def extended(self: Any, *args: Any, **kwargs: Any) -> None:
        value = kwargs.pop(name) if "default" not in field else kwargs.pop(name, field["default"])
        init(self, *args, **kwargs)
        object.__setattr__(self, name, value)

    kind.__init__ = extended  # type: ignore[misc]


def _strides() -> None:
    if "strides" in TensorProperties.__dataclass_fields__:
        return
    _extended(TensorProperties, "strides", default=None)
    get, set_ = TensorProperties.__getstate__, TensorProperties.__setstate__
    create = TensorProperties.create_from_tensor

    def getstate(self: TensorProperties) -> Any:
        return (*get(self), self.strides)  # type: ignore[attr-defined]

    def setstate(self: TensorProperties, state: Any) -> None:
        set_(self, state[:5])
        self.strides = state[5] if len(state) > 5 else None  # type: ignore[attr-defined]

    def create_from_tensor(tensor: torch.Tensor) -> TensorProperties:
        made = create(tensor)
        made.strides = tensor.stride()  # type: ignore[attr-defined]
        return made

    TensorProperties.__getstate__ = getstate  # type: ignore[method-assign]
    TensorProperties.__setstate__ = setstate  # type: ignore[method-assign]
    TensorProperties.create_from_tensor = staticmethod(create_from_tensor)  # type: ignore[method-assign]


_INSTALL = {
    "strides": _strides,
    **{
        kind.__name__: lambda kind=kind: _extended(kind, "note", default="a note")
        for kind in (
            *(TensorProperties, TensorStorageMetadata, ChunkStorageMetadata),
            *(MetadataIndex, Metadata),
        )
    },
    "required": lambda: _extended(ChunkStorageMetadata, "must"),
}
