"""Megatron's save strategy over this package: its sharded tensors as DCP's chunks, saved by the package's writer."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CONFIG_FNAME
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    is_main_replica,
)
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.base import AsyncSaveShardedStrategy
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from typing_extensions import Unpack

from dcp_datastates.config import BackgroundOptions, WriterConfig, check_options
from dcp_datastates.dcp.async_save import async_save, save
from dcp_datastates.manager.per_rank import packed
from dcp_datastates.storage import local


class DataStatesSaveStrategy(AsyncSaveShardedStrategy):  # type: ignore[misc]
    """Saves Megatron's sharded state dicts through this package.

    It may be the base of a ``FullyParallelSaveStrategyWrapper``. Stored are main replicas, as with Megatron's own
    strategy, under the same names and in the same chunks.

    Args:
        options: those of :class:`~dcp_datastates.DataStatesWriter` (``host_cache_size``, ``read_window``,
            ``read_deadline``, ``defer``, ``commit_timeout``, ``exit_timeout``, ``max_in_flight``, ``when_behind``,
            ``audit``).

    Raises :class:`ConfigurationError` for an option that cannot work.

    Threads: Megatron's training thread calls the methods, on all ranks, in the same order.
    """

    def __init__(self, **options: Unpack[BackgroundOptions]) -> None:
        super().__init__("torch_dist", 1)
        check_options("DataStatesSaveStrategy", options, BackgroundOptions)
        WriterConfig.checked(**options)
        self._options = options

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> AsyncRequest:
        """Start the save. The state may change once this has returned, as after :func:`~dcp_datastates.async_save`.

        Returns a request whose function waits for the outcome, and whose first finalize function raises the save's
        error, if it failed: the same on all ranks. Then Megatron calls no further one, and there is no
        ``metadata.json``.
        """
        _invalidate(checkpoint_dir)
        state, planner = _state_and_planner(sharded_state_dict)
        handle = async_save(state, checkpoint_dir, planner=planner, **self._options)
        return AsyncRequest(handle.wait, (), [handle.result])

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Save, and return when it is committed on all ranks. Raises the error that failed the save."""
        _invalidate(checkpoint_dir)
        state, planner = _state_and_planner(sharded_state_dict)
        save(state, checkpoint_dir, planner=planner, **self._options)


def _invalidate(checkpoint_dir: str | Path) -> None:
    """Megatron has just replaced ``common.pt``: an older checkpoint at this place is not complete any more.

    Raises :class:`ConfigurationError` for a URL: Megatron's own files are local.
    """
    local.local_path(checkpoint_dir, name="checkpoint_dir")
    if dist.get_rank() == 0:
        Path(checkpoint_dir, CONFIG_FNAME).unlink(missing_ok=True)


def _state_and_planner(
    sharded_state_dict: ShardedStateDict,
) -> tuple[dict[str, Any], DefaultSavePlanner]:
    """The values that this rank saves, by names that are unique on it; and the planner that knows their places."""
    state: dict[str, Any] = {}
    items: dict[str, WriteItem] = {}
    for each in nested_values(sharded_state_dict):
        if not is_main_replica(each.replica_id):
            continue
        if isinstance(each, ShardedTensor):
            name = f"{each.key} at {each.global_offset}"
            tensor, item = _chunk(each)
            if name not in state or tensor.numel():  # an empty chunk may have the same offset
                state[name], items[name] = tensor, item
        else:
            assert isinstance(each, ShardedObject)
            name = each.unique_key
            state[name] = packed([each.data])  # the list of this rank's objects of that name
            items[name] = WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)
    return state, _Planner(items)


def _chunk(sharded: ShardedTensor) -> tuple[torch.Tensor, WriteItem]:
    tensor = sharded.data.detach()
    tensor = tensor.view((1,) * sharded.prepend_axis_num + tuple(tensor.shape))
    offsets = torch.Size(sharded.global_offset)
    return tensor, WriteItem(
        MetadataIndex(sharded.key, offsets),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(offsets, tensor.shape),
            TensorProperties.create_from_tensor(tensor),
            torch.Size(sharded.global_shape),
        ),
    )


class _Planner(DefaultSavePlanner):
    """Plans the given items: DCP itself knows no values that are chunks of tensors, but DTensors.

    Args:
        items: this rank's write items, by the names of their values in the state.
    """

    def __init__(self, items: dict[str, WriteItem]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._items = list(items.values())
        self._names = {item.index: name for name, item in items.items()}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(self._items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[self._names[index]]

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002
        return io.BytesIO(object) if write_item.type == WriteItemType.BYTE_IO else object
