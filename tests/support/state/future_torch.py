"""A torch that does not exist yet: :func:`install` gives DCP's dataclasses fields that no release has.

In place, in a process of its own, and before ``dcp_datastates`` is imported.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import torch
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

__all__ = ["install", "said_of"]


class Mood(enum.Enum):
    """A type that the metadata of no release have."""

    GOOD = 1
    BETTER = 2


def said_of(tensor: torch.Tensor) -> list[Any]:
    """The value of ``TensorProperties.said``: no two layouts have the same, and it cannot be hashed."""
    return [list(tensor.shape), list(tensor.stride()), getattr(tensor, "label", "")]


def install(*kinds: str) -> None:
    """Add fields to the classes of these names, and have DCP's planning fill them in."""
    Mood.__module__, Mood.__qualname__ = dcp_metadata.__name__, "Mood"
    dcp_metadata.Mood = Mood  # type: ignore[attr-defined]
    for kind in kinds:
        _INSTALL[kind]()


def _extended(kind: type, name: str, default: Any, *, frozen: bool = False) -> None:
    """Have ``dataclass`` look at the class again."""
    for field in dataclasses.fields(kind):
        if field.default_factory is not dataclasses.MISSING:
            setattr(kind, field.name, dataclasses.field(default_factory=field.default_factory))
        elif not (field.hash is None and field.compare):
            setattr(kind, field.name, dataclasses.field(default=field.default, compare=False))
    kind.__annotations__ = {**kind.__annotations__, name: "object"}
    setattr(kind, name, default)
    generated = ["__eq__", "__repr__", "__match_args__"]
    if kind is not MetadataIndex:
        generated += ["__init__", "__hash__"]
    else:
        generated += ["__hash__", "__setattr__", "__delattr__"]
    for method in generated:
        if method in vars(kind):
            delattr(kind, method)
    dataclasses.dataclass(frozen=frozen)(kind)


def _properties() -> None:
    names = [field.name for field in dataclasses.fields(TensorProperties)]
    _extended(TensorProperties, "said", None)
    _extended(TensorProperties, "mood", Mood.GOOD)
    get, set_, create = (
        TensorProperties.__getstate__,
        TensorProperties.__setstate__,
        TensorProperties.create_from_tensor,
    )

    def getstate(self: TensorProperties) -> Any:
        return (*get(self), self.said, self.mood)

    def setstate(self: TensorProperties, state: Any) -> None:
        mine = len(names) + 2
        set_(self, state[: len(names)] if len(state) == mine else state)
        self.said, self.mood = state[len(names) :] if len(state) == mine else (None, Mood.GOOD)

    def create_from_tensor(tensor: torch.Tensor) -> TensorProperties:
        made = create(tensor)
        made.said, made.mood = said_of(tensor), Mood.BETTER
        return made

    TensorProperties.__getstate__ = getstate  # type: ignore[method-assign]
    TensorProperties.__setstate__ = setstate  # type: ignore[method-assign]
    TensorProperties.create_from_tensor = staticmethod(create_from_tensor)  # type: ignore[method-assign]


def _chunks() -> None:
    _extended(ChunkStorageMetadata, "note", None)
    _extended(ChunkStorageMetadata, "mood", Mood.GOOD)
    of_items = default_planner._create_write_items

    def create(fqn: str, value: Any) -> Any:
        items = of_items(fqn, value)
        for item in items:
            if item.tensor_data is not None:
                chunk = item.tensor_data.chunk
                chunk.note, chunk.mood = f"a chunk of {fqn}", Mood.BETTER
        return items

    default_planner._create_write_items = create


def _indices() -> None:
    init = MetadataIndex.__init__

    def extended(self: MetadataIndex, *args: Any, note: Any = None, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        object.__setattr__(self, "note", note if note is not None else f"a place of {self.fqn}")

    not_compared = dataclasses.field(default=None, compare=False)  # as its index
    _extended(MetadataIndex, "note", not_compared, frozen=True)
    MetadataIndex.__init__ = extended  # type: ignore[method-assign]


def _tensors() -> None:
    _extended(TensorStorageMetadata, "notes", dataclasses.field(default_factory=lambda: ["new"]))


def _whole() -> None:
    _extended(Metadata, "notes", dataclasses.field(default_factory=lambda: {"made": "now"}))


_INSTALL = {
    "TensorProperties": _properties,
    "ChunkStorageMetadata": _chunks,
    "MetadataIndex": _indices,
    "TensorStorageMetadata": _tensors,
    "Metadata": _whole,
}
