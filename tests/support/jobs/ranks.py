"""Tests on several ranks: ``@ranks(4)`` runs a test's body on each of four.

By default the ranks are processes of a pool (``support.jobs.pool``). Under ``torchrun`` the pytest processes
are themselves the ranks: all run the same tests in the same order, agree on each outcome through
torchrun's store, and a test that wants fewer ranks leaves the others waiting for its outcome.

Bodies take only arguments that pickle: parameters, and the fixtures ``shared_dir`` and ``monkeypatch``. What a rank
patches by its ``monkeypatch`` is undone when its body ends.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import inspect
import os
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from support.jobs.pool import GRACE_SECONDS, Job, Outcome, RankPool, call_on_rank

__all__ = ["RankFailure", "agree", "close_pool", "ranks", "run_on_ranks", "under_torchrun"]

POOL_SIZE = 4
TIMEOUT_SECONDS = 120.0


class RankFailure(AssertionError):
    """One rank or more failed; the message has the traceback of each."""


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ or (
        "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ
    )


def ranks(world: int, *, timeout: float = TIMEOUT_SECONDS) -> Callable[..., Any]:
    """Run the decorated test on ``world`` ranks; it passes when all do, within ``timeout`` seconds."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**kwargs: Any) -> None:
            run_on_ranks(world, test, timeout=timeout, **kwargs)

        test.rank_body = body  # type: ignore[attr-defined]
        return test

    return decorate


def run_on_ranks(
    world: int, function: Callable[..., Any], *, timeout: float = TIMEOUT_SECONDS, **kwargs: Any
) -> None:
    """Run a module-level function on ``world`` ranks; raise :class:`RankFailure` unless all pass."""
    body = inspect.unwrap(getattr(function, "rank_body", function))  # decorators are from elsewhere
    code = body.__code__
    job = Job(function.__module__, code.co_filename, function.__name__, world, kwargs)
    outcomes = _torchrun().run(job, timeout) if under_torchrun() else _pool().run(job, timeout)
    failed = [outcome for outcome in outcomes if outcome.kind == "failed"]
    if failed:
        raise RankFailure(
            "\n".join(
                f"--- rank {outcome.rank} of {world} ---\n{outcome.text}" for outcome in failed
            )
        )
    skipped = [outcome for outcome in outcomes if outcome.kind == "skipped"]
    if skipped:
        pytest.skip(skipped[0].text)


_the_pool: RankPool | None = None


def _pool() -> RankPool:
    global _the_pool
    if _the_pool is None or _the_pool.broken:
        close_pool()
        _the_pool = RankPool(POOL_SIZE)
        atexit.register(close_pool)
    return _the_pool


def close_pool() -> None:
    global _the_pool
    if _the_pool is not None:
        _the_pool.close()
        _the_pool = None


class _Torchrun:
    """The ranks that torchrun started, of which this process is one."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.store, self.rank, self.world = next(dist.rendezvous("env://"))
        self._calls = 0

    def agree(self, value: Any) -> Any:
        """Rank 0's ``value``, on every rank."""
        self._calls += 1
        key = f"agree/{self._calls}"
        if self.rank == 0:
            self.store.set(key, pickle.dumps(value))
        return pickle.loads(self.store.get(key))

    def run(self, job: Job, timeout: float) -> list[Outcome]:
        import torch.distributed as dist

        if job.world > self.world:
            pytest.skip(f"needs {job.world} ranks, torchrun started {self.world}")
        self._calls += 1
        prefix = f"run/{self._calls}"
        faulthandler.dump_traceback_later(timeout + GRACE_SECONDS, exit=True)
        try:
            if self.rank < job.world:
                store = dist.PrefixStore(f"{prefix}/group", self.store)
                outcome = call_on_rank(job, self.rank, store)
                self.store.set(f"{prefix}/{self.rank}", pickle.dumps(outcome))
            keys = [f"{prefix}/{rank}" for rank in range(job.world)]
            self.store.wait(keys, timedelta(seconds=timeout))
            return [pickle.loads(self.store.get(key)) for key in keys]
        finally:
            faulthandler.cancel_dump_traceback_later()


@functools.cache
def _torchrun() -> _Torchrun:
    return _Torchrun()


def agree(value: Any) -> Any:
    """Rank 0's ``value`` on every rank of torchrun; ``value`` itself where this process runs all."""
    return _torchrun().agree(value) if under_torchrun() else value
