"""Tests on several ranks: ``@ranks(4)`` runs a test's body on each of four.

The ranks are processes of a pool (``support.jobs.pool``).

Bodies take only arguments that pickle: parameters, and the fixtures ``shared_dir`` and ``monkeypatch``. What a rank
patches by its ``monkeypatch`` is undone when its body ends.
"""

from __future__ import annotations

import atexit
import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from support.jobs.pool import Job, RankPool

POOL_SIZE = 4
TIMEOUT_SECONDS = 120.0


class RankFailure(AssertionError):
    """One rank or more failed; the message has the traceback of each."""


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
    outcomes = _pool().run(job, timeout)
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
