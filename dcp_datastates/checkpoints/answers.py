"""One rank computes an answer, and the others receive it through the store of the job's default group.

No collective runs on any of the job's process groups, so this works under NCCL, before the first collective, and while
other collectives are running. Each call has a separate key, which the last rank to read it deletes.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import pickle
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d

from dcp_datastates.errors import ConfigurationError, DataStatesError, NoAnswerError
from dcp_datastates.process.forks import ProcessLock

__all__ = ["DEFAULT_TIMEOUT", "from_first_rank"]

DEFAULT_TIMEOUT: Final = 300.0
"""How long the other ranks wait, in seconds."""

T = TypeVar("T")

_lock = ProcessLock()  # guards _calls
# By default group: if a job creates another default group, it has another store, and the counts start anew.
_calls: WeakKeyDictionary[dist.ProcessGroup, dict[str, Iterator[int]]] = WeakKeyDictionary()


def from_first_rank(
    compute: Callable[[], T],
    purpose: str,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> T:
    """Call ``compute()`` on the first rank of ``process_group``, and return its result on every rank.

    Like a collective: every rank of the group calls this with the same ``purpose``, and makes the calls of one purpose
    in the same order. The first rank does not wait for the others. If ``compute`` raises, every rank raises its error
    (of the same type, if it can be pickled). Without ``torch.distributed``, or in a group of one, this only calls
    ``compute``.

    Args:
        compute: Called on the first rank only. Its result must be picklable.
        purpose: The name of the answer, for the key and for error messages: "the latest checkpoint".
        process_group: Any group that this rank is in; None for all ranks.
        timeout: Seconds that the other ranks wait.

    Raises:
        NoAnswerError: the first rank did not answer in time, or the store was lost.
        ConfigurationError: this rank is not in ``process_group``.
    """
    if not timeout > 0:
        raise ConfigurationError(f"timeout={timeout!r} must be a number of seconds above 0")
    if not (dist.is_available() and dist.is_initialized()):
        return compute()
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise ConfigurationError(
            f"process_group={process_group!r} is no group that this rank is in; only its members take part"
        )
    ranks = dist.get_process_group_ranks(process_group)
    if len(ranks) == 1:
        return compute()
    name = f"dcp_datastates/{purpose}/{hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}"
    key = str(_count(name))
    # A clone has a separate connection: waiting on it does not block other threads' requests.
    job_store: Any = distributed_c10d._get_default_store()
    store: Any = PrefixStore(name, job_store.clone())
    if dist.get_rank() == ranks[0]:
        return _answer(compute, store, key)
    value: T = _await(store, key, purpose, ranks[0], len(ranks) - 1, timeout)
    return value


def _count(name: str) -> int:
    default = distributed_c10d._get_default_group()
    with _lock:
        return next(_calls.setdefault(default, {}).setdefault(name, itertools.count(1)))


def _answer(compute: Callable[[], T], store: Any, key: str) -> T:
    try:
        value = compute()
        packed = pickle.dumps((value, None))
    except BaseException as error:
        with contextlib.suppress(RuntimeError):  # the store is lost: the other ranks will notice
            store.set(key, _packed(error))
        raise
    store.set(key, packed)
    return value


def _packed(error: BaseException) -> bytes:
    if isinstance(error, Exception):
        with contextlib.suppress(Exception):
            data = pickle.dumps((None, error))
            if type(pickle.loads(data)[1]) is type(error):
                return data
    rank = dist.get_rank()
    return pickle.dumps((None, DataStatesError(f"rank {rank}: {type(error).__name__}: {error}")))


def _await(store: Any, key: str, purpose: str, first: int, readers: int, timeout: float) -> Any:
    try:
        store.wait([key], timedelta(seconds=timeout))
        value, error = pickle.loads(store.get(key))
        if store.add(f"{key}/read", 1) == readers:
            store.delete_key(key)
            store.delete_key(f"{key}/read")
    except dist.DistNetworkError as lost:
        raise NoAnswerError(
            f"waiting for rank {first} to tell {purpose}: the job's store was lost ({lost}); has the rank "
            f"that hosts it ended?"
        ) from lost
    except RuntimeError as late:
        raise NoAnswerError(
            f"rank {first} did not tell {purpose} within {timeout:g} s ({late}); is it still looking, or did "
            f"it not make this call? A longer timeout= may help"
        ) from late
    if error is not None:
        raise error
    return value
