"""How much work something takes, by the processor's time and not by the clock: a busy machine is no failure."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

__all__ = ["little_work"]


@contextlib.contextmanager
def little_work(seconds: float) -> Iterator[None]:
    """The block takes at most so many seconds of this process's processor time, in all of its threads."""
    started = time.process_time()
    yield
    taken = time.process_time() - started
    assert taken < seconds, f"{taken:.1f} s of work, of which {seconds:g} are allowed"
