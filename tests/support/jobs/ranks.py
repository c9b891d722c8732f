"""Tests on several ranks: ``@ranks(4)`` runs a test's body on each of four.

The ranks are processes that outlive single tests (``support.jobs.processes``).

Bodies take only arguments that pickle: parameters, and the fixtures ``shared_dir`` and ``monkeypatch``. What a rank
patches by its ``monkeypatch`` is undone when its body ends.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.jobs.processes import Job, Ranks

POOL_SIZE = 4
TIMEOUT_SECONDS = 200.0


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
    ended = _pool().run(job, timeout)
    failed = [one for one in ended if one.failed]
    if failed:
        raise RankFailure(
            "\n".join(
                f"--- rank {one.rank} of {world} ---\n{one.error}\n{one.log}" for one in failed
            )
        )
    for one in ended:
        if one.skipped:
            pytest.skip(one.skipped)


_the_pool: Ranks | None = None
_directory: tempfile.TemporaryDirectory[str] | None = None


def _pool() -> Ranks:
    global _the_pool, _directory
    if _the_pool is None or _the_pool.broken:
        close_pool()
        _directory = tempfile.TemporaryDirectory(prefix="ranks-")
        _the_pool = Ranks(POOL_SIZE, Path(_directory.name))
        atexit.register(close_pool)
    return _the_pool


def close_pool() -> None:
    global _the_pool
    if _the_pool is not None:
        _the_pool.close()
        _the_pool = None
