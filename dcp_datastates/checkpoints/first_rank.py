"""One rank computes an answer, and the others receive it through the store of the job's default group.

No collective runs on any of the job's process groups, so this works under NCCL, before the first collective, and while
other collectives are running. The ranks number their calls, and each call has a separate key, which the last rank to
read it deletes. The keys belong to the incarnation of the job (``ranks/incarnation.py``): no rank takes an answer that
a former job has left in the store.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
import weakref
from collections.abc import Callable
from dataclasses import astuple
from typing import Any, Final, TypeVar

import torch.distributed as dist

from dcp_datastates.commit.vote import Reason
from dcp_datastates.errors import ConfigurationError, NoAnswerError, RankLostError
from dcp_datastates.process.ending import Phase, at_end
from dcp_datastates.process.forks import enter
from dcp_datastates.process.waiting import Wait
from dcp_datastates.ranks.connection import Connection
from dcp_datastates.ranks.failure_detector import FailureDetector
from dcp_datastates.ranks.incarnation import Incarnation
from dcp_datastates.ranks.meetings import poll
from dcp_datastates.ranks.rank_set import RankSet, rank_set_of

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT: Final = 300.0
"""Seconds."""

_KNOWN_PAUSE: Final = 0.1

_FILE_SECONDS: Final = 10.0
"""How long the first answer waits for the other ranks at a file: nothing admits them after the group is destroyed."""

_LINGER_SECONDS: Final = 5.0
"""How long the first rank's process waits at its end for ranks that have not met it: they cannot read its answers."""

T = TypeVar("T")


_answered: weakref.WeakSet[Incarnation] = weakref.WeakSet()
"""The incarnations in which this process has answered."""


def from_first_rank(
    compute: Callable[[], T],
    key: str,
    purpose: str,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> T:
    """Call ``compute()`` on the first rank of ``process_group``, and return its result on every rank.

    Like a collective: every rank of the group calls this with the same ``key``, and makes the calls of one key in the
    same order. The first rank does not wait for the others. If ``compute`` raises, every rank raises its error (of the
    same type, if it is one of Python or of this package). Without ``torch.distributed``, or in a group of one, this
    only calls ``compute``.

    Args:
        compute: Called on the first rank only. Its result is a JSON value: None, a bool, number, string, or a list or
            dict of such (tuples become lists).
        key: Names the question in the store, in a word. It must not depend on the rank: no path, which ranks may spell
            differently.
        purpose: What is asked for, for error messages: "the latest checkpoint".
        process_group: Any group that this rank is in; None for all ranks.
        timeout: Seconds that the other ranks wait.

    Raises:
        NoAnswerError: the first rank did not answer in time, or the store was lost.
        ConfigurationError: this rank is not in ``process_group``.
    """
    enter("from_first_rank()")
    if not timeout > 0:
        raise ConfigurationError(f"timeout={timeout!r} must be a number of seconds above 0")
    return from_first_of(rank_set_of(process_group), compute, key, purpose, timeout)


def from_first_of(
    rank_set: RankSet,
    compute: Callable[[], T],
    key: str,
    purpose: str,
    timeout: float,
    detector: FailureDetector | None = None,
) -> T:
    """:func:`from_first_rank`, of a set of ranks. Any thread; the calls of one key come from one thread.

    With a ``detector``, raises :class:`RankLostError` as soon as it finds that the first rank is lost.
    """
    if rank_set.world == 1:
        return compute()
    number = f"{key}/{rank_set.incarnation.count(f'answers/{key}')}"
    store = rank_set.connect("answers")
    if rank_set.rank == 0:
        _answered.add(rank_set.incarnation)
        try:
            return _answer(compute, store, number)
        finally:
            if rank_set.meets_at_file:
                rank_set.incarnation.await_all(_FILE_SECONDS)
    first = rank_set.ranks[0]
    try:
        found = _found(rank_set, store, number, purpose, timeout, detector)
        if store.add(f"{number}/read", 1) == rank_set.world - 1:
            store.delete_key(number)
            store.delete_key(f"{number}/read")
    except RuntimeError as lost:
        raise NoAnswerError(
            f"waiting for rank {first} to tell {purpose}: the job's store was lost ({lost}); has the rank "
            f"that hosts it ended?"
        ) from lost
    value: T = _told(found, first, purpose)
    return value


def _answer(compute: Callable[[], T], store: Connection, number: str) -> T:
    try:
        packed = json.dumps([compute(), None])
    except BaseException as error:
        with contextlib.suppress(RuntimeError):  # the store is lost: the other ranks will notice
            store.set(number, json.dumps([None, astuple(Reason.of(error, whole=True))]))
        raise
    store.set(number, packed)
    value: T = json.loads(packed)[0]  # as the other ranks get it
    return value


def _told(found: bytes, first: int, purpose: str) -> Any:
    """The value in an answer; raises the error in it, or, for what is no answer, :class:`NoAnswerError`."""
    try:
        value, error = json.loads(found)
        told = None if error is None else Reason(*error).error(f"rank {first}")
    except Exception as unreadable:
        raise NoAnswerError(
            f"rank {first} did not tell {purpose}: what the job's store has in place of it is no answer "
            f"({unreadable}); does another program write to that store (MASTER_ADDR, MASTER_PORT)?"
        ) from unreadable
    if told is not None:
        raise told
    return value


def _found(
    rank_set: RankSet,
    store: Connection,
    number: str,
    purpose: str,
    timeout: float,
    detector: FailureDetector | None,
) -> bytes:
    log = Wait(logger, "this rank")
    deadline = time.monotonic() + timeout
    first, incarnation = rank_set.ranks[0], rank_set.incarnation
    missing = f"rank {first} has not told {purpose}"

    def check_time() -> None:
        log.look(missing)
        if time.monotonic() > deadline:
            why = "it has not answered" if incarnation.await_known(0.0) else incarnation.problem
            raise NoAnswerError(
                f"rank {first} did not tell {purpose} within {timeout:g} s ({why}); is it still looking, or did "
                f"it not make this call? A longer timeout= may help"
            )

    while not incarnation.await_known(min(_KNOWN_PAUSE, max(0.0, deadline - time.monotonic()))):
        if incarnation.store_error is not None:
            raise RuntimeError(incarnation.store_error)
        check_time()

    def check() -> None:
        lost = None if detector is None else detector.lost_coordinator
        if lost is not None and not store.check([number]):  # it may have answered, and ended
            raise RankLostError(f"{missing}: {lost}")
        check_time()

    poll(lambda: store.check([number]), check, rank_set.world)
    return store.get(number)


def _linger() -> None:
    deadline = time.monotonic() + _LINGER_SECONDS
    for incarnation in list(_answered):
        incarnation.await_all(max(0.0, deadline - time.monotonic()))


at_end(_linger, Phase.FINISH)
