"""A state as DCP's default planner flattens it, with that planner's items for it, and the data of these items.

A DTensor declares that its replicas are equal. A plain tensor declares nothing about other ranks' tensors of the same
name: batch-norm statistics and other per-rank state have the same names on all ranks. But data-parallel training keeps
tensors equal that an optimizer owns, so these count as declared equal, too (:func:`declared`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Hashable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from dcp_datastates.errors import DataStatesError, UnsupportedStateError
from dcp_datastates.format.key_paths import typed_paths
from dcp_datastates.io.tensor_memory import check_storable, holds_shards, local_tensor, shard_with


def chunk_of(value: Any, name: str, chunk: ChunkStorageMetadata) -> torch.Tensor:
    """The live tensor of ``value``, which has this name in the flattened state, or those of its rows that ``chunk``
    names.

    Raises :class:`DataStatesError` for a chunk that this rank does not hold.
    """
    if isinstance(value, ShardedTensor) or holds_shards(value):
        tensor, begin = _shard_with(value, chunk.offsets)
    else:
        tensor, begin = value.to_local() if isinstance(value, DTensor) else value, 0
        if tensor.shape != chunk.sizes and tensor.dim():
            begin = chunk.offsets[0] - _first_row(value, name, chunk.offsets)
    if tensor.shape != chunk.sizes and tensor.dim() and tensor.numel():
        tensor = tensor.narrow(0, begin, chunk.sizes[0])
    return tensor


def _first_row(value: Any, name: str, offsets: torch.Size) -> int:
    """The first row, in the full tensor, of this rank's chunk that contains the row ``offsets[0]``."""
    for item in create_default_local_save_plan({name: value}, True).items:
        if item.tensor_data is not None:
            held = item.tensor_data.chunk
            if (
                held.offsets[0] <= offsets[0] < held.offsets[0] + held.sizes[0]
                and held.offsets[1:] == offsets[1:]
            ):
                return int(held.offsets[0])
    raise DataStatesError(f"this rank does not hold row {offsets[0]} of {name!r}")


def _shard_with(
    tensor: ShardedTensor | torch.Tensor, offsets: torch.Size
) -> tuple[torch.Tensor, int]:
    """The shard that contains the chunk at ``offsets``, and the chunk's first row in the shard."""
    if not isinstance(tensor, ShardedTensor):
        found = shard_with(tensor, offsets)
        if found is not None:
            return found
        raise DataStatesError(f"this rank holds no shard at {tuple(offsets)}")
    for shard in tensor.local_shards():
        starts, sizes = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        if tuple(starts) == tuple(offsets):
            return shard.tensor, 0
        if (
            starts
            and tuple(starts[1:]) == tuple(offsets[1:])
            and starts[0] <= offsets[0] < starts[0] + sizes[0]
        ):
            return shard.tensor, int(offsets[0] - starts[0])
    raise DataStatesError(f"this rank holds no shard at {tuple(offsets)}")


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
            raise _explained(error) from None
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


def declared(items: Sequence[WriteItem], owned: Container[str]) -> list[WriteItem]:
    """``items`` of a default planner, with the plain tensors of names that are ``owned`` by an optimizer turned into
    items of type SHARD: chunks, whose replicas are equal.
    """
    return [
        dataclasses.replace(each, type=WriteItemType.SHARD)
        if each.type is WriteItemType.TENSOR and each.index.fqn in owned
        else each
        for each in items
    ]
