"""What changes in Megatron, from outside: three of its functions are wrapped.

* ``AsyncCallsQueue.schedule_async_request``: a save of this package runs already. It gets a caller that asks for the
  commit, where Megatron's own would fork a process, or wait.
* ``_get_filesystem_reader``: for a checkpoint of this package it returns this package's reader. So Megatron's
  ``TorchDistLoadShardedStrategy`` loads both kinds, and reads the metadata of both.
* ``register_default_torch_strategies``, for :func:`use_by_default`.

Requests and checkpoints of Megatron's own strategies are not affected.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron.core.dist_checkpointing.strategies import torch as strategies
from megatron.core.dist_checkpointing.strategies.async_utils import (
    AsyncCaller,
    AsyncCallsQueue,
    AsyncRequest,
    _ActiveAsyncRequest,
)
from megatron.core.dist_checkpointing.strategies.base import (
    StrategyAction,
    register_default_strategy,
)
from typing_extensions import Unpack

from dcp_datastates.config import BackgroundOptions
from dcp_datastates.dcp.handle import SaveHandle
from dcp_datastates.dcp.reader import DataStatesReader
from dcp_datastates.manager.frameworks import is_ours_here
from dcp_datastates.megatron.strategy import DataStatesSaveStrategy


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
