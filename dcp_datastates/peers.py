"""Which ranks commit together, and the store that they meet at.

Nothing here runs a collective or makes a process group: the ranks are those of the group that the user
named (or all), and the store is the one that the default group was made with, behind a prefix.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from dcp_datastates.errors import ConfigurationError

__all__ = ["ALONE", "Peers", "current_store", "peers_of"]

_STORE_SECONDS: Final = 30.0
"""How long one request to the store may take before its server counts as gone."""


@dataclass(frozen=True)
class Peers:
    """The ranks that commit together.

    Attributes:
        rank: this process's rank among them; the coordinator is 0.
        ranks: their ranks in the default group, in order.
        base: the default group's store; None for a process alone.
    """

    rank: int
    ranks: tuple[int, ...]
    base: Any

    @property
    def world(self) -> int:
        """How many they are."""
        return len(self.ranks)

    @property
    def digest(self) -> str:
        """Short, and other ranks have another."""
        return hashlib.sha1(repr(self.ranks).encode()).hexdigest()[:16]

    def store(self, purpose: str) -> Any:
        """A connection of its own to the store, under a prefix for these ranks and ``purpose``.

        A request on one connection waits for the one before it, so each thread has its own.
        """
        store = self.base.clone()
        store.set_timeout(timedelta(seconds=_STORE_SECONDS))
        return dist.PrefixStore(  # type: ignore[attr-defined]
            f"dcp_datastates/{self.digest}/{purpose}", store
        )


ALONE: Final = Peers(0, (0,), None)


def peers_of(process_group: Any) -> Peers:
    """The ranks of ``process_group`` (None: all), or :data:`ALONE` without ``torch.distributed``.

    Raises :class:`ConfigurationError` if this process is not one of them.
    """
    if not dist.is_available() or not dist.is_initialized():
        return ALONE
    me = dist.get_rank()
    if process_group is None:
        ranks = tuple(range(dist.get_world_size()))
    elif process_group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigurationError(
            f"process_group does not contain this process (rank {me}): only its members save to it"
        )
    else:
        ranks = tuple(dist.get_process_group_ranks(process_group))
    if me not in ranks:
        raise ConfigurationError(
            f"process_group has ranks {list(ranks)}, and not this process's rank {me}"
        )
    if len(ranks) == 1:
        return ALONE
    return Peers(ranks.index(me), ranks, current_store())


def current_store() -> Any:
    """The store of the default process group; None if there is none."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    return dist.distributed_c10d._get_default_store()
