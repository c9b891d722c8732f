"""Megatron's save strategy over this package: its sharded tensors as DCP's chunks, saved by the package's writer.

From outside, three functions of Megatron are wrapped:

* ``AsyncCallsQueue.schedule_async_request``: a save of this package runs already. It gets a caller that asks for the
  commit, where Megatron's own would fork a process, or wait.
* ``_get_filesystem_reader``: for a checkpoint of this package it returns this package's reader. So Megatron's
  ``TorchDistLoadShardedStrategy`` loads both kinds, and reads the metadata of both.
* ``register_default_torch_strategies``, for :func:`use_by_default`.

Requests and checkpoints of Megatron's own strategies are not affected.
"""

from __future__ import annotations

import functools
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
from megatron.core.dist_checkpointing.strategies import torch as strategies
from megatron.core.dist_checkpointing.strategies.async_utils import (
    AsyncCaller,
    AsyncCallsQueue,
    AsyncRequest,
    _ActiveAsyncRequest,
)
from megatron.core.dist_checkpointing.strategies.base import (
    AsyncSaveShardedStrategy,
    StrategyAction,
    register_default_strategy,
)
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
from dcp_datastates.dcp.async_save import SaveHandle, async_save, save
from dcp_datastates.dcp.reader import DataStatesReader
from dcp_datastates.manager.frameworks import is_ours_here
from dcp_datastates.planning.column_planning import serialize
from dcp_datastates.storage import local


class DataStatesSaveStrategy(AsyncSaveShardedStrategy):  # type: ignore[misc]
    """Saves Megatron's sharded state dicts through this package.

    It may be the base of a ``FullyParallelSaveStrategyWrapper``. Stored are main replicas, as with Megatron's own
    strategy, under the same names and in the same chunks.

    Args:
        options: those of :class:`~dcp_datastates.DataStatesWriter` (``host_cache_size``, ``reads``, ``commit_timeout``,
            ``exit_timeout``, ``max_in_flight``, ``when_behind``, ``audit``).

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
            state[name] = serialize([each.data])  # the list of this rank's objects of that name
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


def install() -> None:
    """Wrap the queue and the reader; called once, at the import."""
    stock_schedule = AsyncCallsQueue.schedule_async_request
    stock_reader = strategies._get_filesystem_reader

    @functools.wraps(stock_schedule)
    def schedule_async_request(self: AsyncCallsQueue, async_request: AsyncRequest) -> int:
        handle = getattr(async_request.async_fn, "__self__", None)
        if not isinstance(handle, SaveHandle):
            return int(stock_schedule(self, async_request))
        self.call_idx += 1
        call = _ActiveAsyncRequest(self.call_idx, _Commit(handle), async_request.freeze())
        self.async_calls.append(call)
        return int(call.idx)

    @functools.wraps(stock_reader)
    def reader(checkpoint_dir: Any, *args: Any, **keywords: Any) -> Any:
        if DataStatesReader.validate_checkpoint_id(checkpoint_dir) and is_ours_here(checkpoint_dir):
            # As Megatron: its own checks find names that are missing or unexpected, it loads into other dtypes, and it
            # unpickles the states of NumPy's generators, which are no safe types.
            return DataStatesReader(
                checkpoint_dir, allow_objects=True, cast=True, unexpected="ignore"
            )
        return stock_reader(checkpoint_dir, *args, **keywords)

    AsyncCallsQueue.schedule_async_request = schedule_async_request
    strategies._get_filesystem_reader = reader


def use_by_default(**options: Unpack[BackgroundOptions]) -> None:
    """Make a :class:`DataStatesSaveStrategy` Megatron's choice for the format ``torch_dist``, from now on: for programs
    that choose by the format's name, such as Megatron-LM's ``pretrain``.

    Args:
        options: those of :class:`DataStatesSaveStrategy`.

    Raises :class:`ConfigurationError` for an option that cannot work.
    """
    strategy = DataStatesSaveStrategy(**options)
    stock = strategies.register_default_torch_strategies

    @functools.wraps(stock)
    def register() -> None:
        stock()  # each time that a default is asked for
        register_default_strategy(
            StrategyAction.SAVE_SHARDED, strategy.backend, strategy.version, strategy
        )

    strategies.register_default_torch_strategies = register


class _Commit(AsyncCaller):  # type: ignore[misc]
    """Megatron's view of a save in flight."""

    def __init__(self, handle: SaveHandle) -> None:
        self._handle = handle

    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        raise NotImplementedError("the save runs already")

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Whether the outcome is known, on all ranks unless ``no_dist``; with ``blocking``, waits for it."""
        if blocking:
            self._handle.wait()
        running = not self._handle.committed.done()
        return not running if no_dist else bool(self.sync_all_async_calls(int(running)))

    def close(self, abort: bool = False) -> None:
        """Nothing: the package itself ends its saves with the process."""

    def __del__(self) -> None:
        """Megatron's base class demands it."""
