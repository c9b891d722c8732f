"""A state as DCP's default planner flattens it, with that planner's items for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from dcp_datastates.io.tensor_memory import check_storable, local_tensor
from dcp_datastates.planning.local_chunks import LocalChunks

__all__ = ["FlatState"]


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
        self._planner.set_up_planner(state, None, is_coordinator)
        self.values: dict[str, Any] = self._planner.state_dict
        self.mappings: Mapping[str, tuple[Any, ...]] | None = (
            self._planner.mappings if flatten else None
        )
        self._is_coordinator = is_coordinator
        self._chunks = LocalChunks(self.values, is_coordinator)

    def items(self) -> list[WriteItem]:
        """DCP's default items. Raises :class:`UnsupportedTensorError`, with the tensor's name, where DCP names none."""
        try:
            plan = create_default_local_save_plan(self.values, self._is_coordinator)
        except (RuntimeError, TypeError, ValueError):
            for name, value in self.values.items():
                if isinstance(value, torch.Tensor):
                    check_storable(local_tensor(value), name)
            raise
        items: list[WriteItem] = plan.items
        return items

    def tensor(self, item: WriteItem) -> torch.Tensor:
        """The tensor of an item, or the slice that it names."""
        assert item.tensor_data is not None
        return self._chunks.tensor(item.index.fqn, item.tensor_data.chunk)

    def object(self, index: MetadataIndex) -> Any:
        """The object at ``index``."""
        return (
            self.values[index.fqn] if index.offset is None else self._planner.lookup_object(index)
        )
