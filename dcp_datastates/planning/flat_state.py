"""A state as DCP's default planner flattens it, with that planner's items for it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Final

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from dcp_datastates.errors import UnsupportedStateError
from dcp_datastates.format.key_paths import typed_paths
from dcp_datastates.io.tensor_memory import check_storable, local_tensor
from dcp_datastates.planning.local_chunks import chunk_of

__all__ = ["FlatState"]

_DUPLICATED: Final = "duplicated flatten key "


class FlatState:
    """``state``, flattened. It must not change as long as this object is used.

    Args:
        flatten: whether nested containers are flattened.
        flatten_shards: whether ``ShardedTensor`` objects within shards are.
        is_coordinator: whether this rank's items include the values that all ranks hold.
    """

    def __init__(
        self, state: dict[str, Any], *, flatten: bool, flatten_shards: bool, is_coordinator: bool
    ) -> None:
        self._planner = DefaultSavePlanner(
            flatten_state_dict=flatten, flatten_sharded_tensors=flatten_shards
        )
        try:
            self._planner.set_up_planner(state, None, is_coordinator)
            paths = typed_paths(state, self._planner.mappings) if flatten else None
        except ValueError as error:
            raise _explained(error) from error
        self.values: dict[str, Any] = self._planner.state_dict
        if paths is not None and (elsewhere := set(filter(self._is_elsewhere, paths))):
            paths = {name: path for name, path in paths.items() if name not in elsewhere}
        self.mappings: Mapping[str, tuple[Any, ...]] | None = paths
        self._is_coordinator = is_coordinator

    def _is_elsewhere(self, name: str) -> bool:
        """Whether the value is a DTensor of which this rank has nothing, because it is outside the mesh."""
        value = self.values.get(name)
        return isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None

    def items(self) -> list[WriteItem]:
        """DCP's default items. Raises :class:`UnsupportedTensorError`, with the tensor's name, where DCP names none.

        Items of tensors that look alike differ in their names alone, so DCP makes one of each.
        """
        made: list[WriteItem] = []
        known: dict[Hashable, list[WriteItem]] = {}
        for name, value in self.values.items():
            try:
                look = _look(value)
                alike = None if look is None else known.get(look)
                if alike is None:
                    plan = create_default_local_save_plan({name: value}, self._is_coordinator)
                    made += plan.items
                    if look is not None:
                        known[look] = plan.items
                    continue
            except (RuntimeError, TypeError, ValueError):
                if isinstance(value, torch.Tensor):
                    check_storable(local_tensor(value), name)
                raise
            for item in alike:
                index = MetadataIndex(name, item.index.offset)
                made.append(WriteItem(index, item.type, None, item.tensor_data))
        return made

    def tensor(self, item: WriteItem) -> torch.Tensor:
        """The tensor of an item, or the slice that it names."""
        assert item.tensor_data is not None
        name = item.index.fqn
        return chunk_of(self.values[name], name, item.tensor_data.chunk)

    def object(self, index: MetadataIndex) -> Any:
        """The object at ``index``."""
        return (
            self.values[index.fqn] if index.offset is None else self._planner.lookup_object(index)
        )


def _explained(error: ValueError) -> Exception:
    """``error``, which DCP raises for two values with one name, with a way out."""
    said = str(error)
    if not said.startswith(_DUPLICATED):
        return error
    return UnsupportedStateError(
        f"two values of the state have the name {said.removeprefix(_DUPLICATED)!r}. A name is the keys on the way, "
        f"joined by dots: 1 and '1' are alike, and so are {{'a.b': …}} and {{'a': {{'b': …}}}}. Give one another key"
    )


def _look(value: Any) -> Hashable:
    """All that DCP's items have of a tensor, but for its name; None for what DCP should look at itself."""
    if type(value) is DTensor:
        local, place = value.to_local(), (value.device_mesh, value.placements)
    elif type(value) in (torch.Tensor, torch.nn.Parameter):
        local, place = value, None
    else:
        return None
    if type(local) not in (torch.Tensor, torch.nn.Parameter) or local.layout is not torch.strided:
        return None
    return (
        value.shape,
        place,
        local.shape,
        local.stride(),
        local.dtype,
        local.requires_grad,
        local.is_pinned(),
    )
