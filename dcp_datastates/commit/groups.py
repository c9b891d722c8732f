"""The process's commit groups: one per rank set, from the set's first save to the end of the process."""

from __future__ import annotations

import threading

from dcp_datastates.commit.group import CommitGroup
from dcp_datastates.process.ending import at_exit
from dcp_datastates.ranks.connection import end_requests
from dcp_datastates.ranks.rank_set import ALONE, RankSet, is_current

__all__ = ["commit_group"]

_groups_lock = threading.RLock()  # guards _groups
_groups: dict[tuple[int, ...], CommitGroup] = {}


def commit_group(rank_set: RankSet) -> CommitGroup:
    """The process's commit group for these ranks. Closes groups whose store is gone.

    Does not wait for the other ranks: ranks connect in the first round.
    """
    key = () if rank_set is ALONE else rank_set.ranks
    with _groups_lock:
        stale = [
            ranks
            for ranks, group in _groups.items()
            if group.rank_set is not ALONE and not is_current(group.rank_set)
        ]
        closing = [_groups.pop(ranks) for ranks in stale]
        found = _groups.get(key)
        if found is None:
            found = _groups[key] = CommitGroup(rank_set)
    # In a separate thread: an operation in progress may take long to fail.
    for group in closing:
        threading.Thread(target=group.close, name="dcp_datastates-close", daemon=True).start()
    return found


def _close_all() -> None:
    with _groups_lock:
        groups = list(_groups.values())
        _groups.clear()
    for group in groups:
        group.close()


at_exit(end_requests)  # the last one runs first
at_exit(_close_all)
