"""A gloo process group for DCP's collectives, under a name of its own, whose waits can be left.

``dist.new_group`` does not give one. With ``use_local_synchronization`` it names a group after its ranks and the number
of groups that there are, so that a group made in place of another meets at the other's keys in the store, finds the
addresses of connections that are closed, and waits for ever; without, all ranks of the job must call it. And
whoever waits in a gloo operation waits until gloo's timeout, however useless that has become: here, all who wait
look about, and leave.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from dcp_datastates.commit.lane import let_go, poll
from dcp_datastates.commit.peers import Peers

__all__ = ["DcpGroup"]

_PAUSE_SECONDS: Final = 0.02
"""Longest pause between two looks whether an operation has completed."""

_NO_TIMEOUT: Final = timedelta(0)


class DcpGroup(dist.ProcessGroup):
    """Collective: every rank makes one. The collectives that DCP uses, on tensors in host memory.

    :meth:`close` takes it out of torch's books. Raises RuntimeError if the ranks have not connected within
    ``connecting``.

    Args:
        peers: its ranks.
        name: never used before among these ranks.
        connecting: how long to wait for the others.
        operation: its timeout.
        check: called by what waits in an operation, now and then; raises the way out, if there is one.
        on_destroy: called when the job destroys its process groups, before torch forgets this one.
    """

    def __init__(
        self,
        peers: Peers,
        name: str,
        *,
        connecting: timedelta,
        operation: timedelta,
        check: Callable[[], None],
        on_destroy: Callable[[], None] = lambda: None,
    ) -> None:
        # torch's stubs lack the one constructor that a subclass may call.
        super().__init__(peers.rank, peers.world)  # type: ignore[call-arg]
        self._peers = peers
        self._check = check
        self._on_destroy = on_destroy
        self._cut = threading.Event()  # set when nobody may wait here any more
        store = peers.raw_store(f"group/{name}")
        self._gloo: Any = dist.ProcessGroupGloo(store, peers.rank, peers.world, connecting)
        self._gloo.set_timeout(operation)
        private: Any = dist.ProcessGroup
        device = torch.device("cpu")
        self._register_backend(device, private.BackendType.GLOO, self._gloo)
        self._enter_books(store, f"dcp_datastates/{peers.digest}/{name}")

    # ---- any thread --------------------------------------------------------------------------

    @property
    def is_cut(self) -> bool:
        """Whether the group is of no use any more."""
        return self._cut.is_set()

    def cut(self) -> None:
        """Have everybody who waits in this process raise RuntimeError, now and in future."""
        self._cut.set()

    def close(self) -> None:
        """Take it out of torch's books; it goes when nobody holds it. Idempotent."""
        self._cut.set()
        world: Any = distributed_c10d._world
        for book in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
            book.pop(self, None)

    def shutdown(self) -> None:
        """Called by ``destroy_process_group()``, with all of torch's process groups still there."""
        self._on_destroy()

    # ---- what DCP calls, by torch.distributed's functions: see the end of this file ---------------

    def _started(
        self, start: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dist.Work:
        self._look()
        return _Work(self, start(*args, **kwargs))

    def _look(self) -> None:
        if self._cut.is_set():
            raise RuntimeError("this process group was given up")
        self._check()

    def _await(self, work: Any) -> None:
        try:
            poll(work.is_completed, self._look, _PAUSE_SECONDS)
        except BaseException:
            self._cut.set()
            let_go(self._gloo, work, self._peers)
            raise
        work.wait()  # raises what it failed with; returns at once

    def _enter_books(self, store: Any, name: str) -> None:
        world: Any = distributed_c10d._world
        world.pg_map[self] = ("gloo", store)
        world.pg_names[self] = name
        world.pg_backend_config[self] = "cpu:gloo"
        world.pg_group_ranks[self] = {
            global_rank: rank for rank, global_rank in enumerate(self._peers.ranks)
        }


class _Work(dist.Work):
    """An operation under way."""

    def __init__(self, group: DcpGroup, work: Any) -> None:
        super().__init__()
        self._group = group
        self._work = work

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Return when the operation has completed; raise if it failed, or nobody may wait for it any more."""
        self._group._await(self._work)
        return True


def _collectives() -> Iterator[str]:
    """The collectives of this torch, whatever it calls them (2.15 has new names for some): what returns a ``Work``."""
    for name in dir(dist.ProcessGroup):
        if (
            not name.startswith("_")
            and hasattr(dist.ProcessGroupGloo, name)
            and "Work" in (getattr(dist.ProcessGroup, name).__doc__ or "")
        ):
            yield name


def _of_gloo(name: str) -> Callable[..., dist.Work]:
    def collective(self: DcpGroup, *args: Any, **kwargs: Any) -> dist.Work:
        return self._started(getattr(self._gloo, name), args, kwargs)

    return collective


for _name in _collectives():
    setattr(DcpGroup, _name, _of_gloo(_name))
