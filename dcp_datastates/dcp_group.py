"""A gloo process group that DCP can use, under a name that no other group of the job has had.

``dist.new_group`` does not give one: with ``use_local_synchronization`` it names a group after its ranks and the number
of groups that there are, so that a group made in place of another meets at the other's keys in the store, finds the
addresses of connections that are closed, and waits for ever. Without, all ranks of the job must call it.
So this does what ``new_group`` does in torch 2.1 to 2.13, with another name.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from dcp_datastates.peers import Peers

__all__ = ["make_dcp_group"]


def make_dcp_group(
    peers: Peers, name: str, connecting: timedelta, operation: timedelta
) -> dist.ProcessGroup:
    """Collective. Raises RuntimeError if the ranks have not connected within ``connecting``.

    Args:
        peers: its ranks.
        name: never used before among these ranks.
        connecting: how long to wait for the others.
        operation: the group's timeout.
    """
    store = peers.raw_store(f"group/{name}")
    private: Any = distributed_c10d
    group, _ = private._new_process_group_helper(
        peers.world,
        peers.rank,
        list(peers.ranks),
        dist.Backend("gloo"),
        store,
        group_name=f"dcp_datastates/{peers.digest}/{name}",
        timeout=connecting,
        group_desc="dcp_datastates",
    )
    assert isinstance(group, dist.ProcessGroup)
    private._world.pg_group_ranks[group] = {
        global_rank: rank for rank, global_rank in enumerate(peers.ranks)
    }
    group._get_backend(torch.device("cpu")).set_timeout(operation)
    return group
