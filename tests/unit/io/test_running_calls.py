"""Whether the operations that other threads run have ended."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from support.waiting import await_that

from dcp_datastates.io import running_calls
from dcp_datastates.io.running_calls import RunningCalls, places


@contextmanager
def running(work: Callable[[], object]) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=work)
    thread.start()
    yield thread
    thread.join()


def test_threads_that_wait_in_the_standard_library_run_no_operation() -> None:
    wanted = threading.Event()
    with running(wanted.wait) as thread:
        await_that(lambda: thread.ident is not None and thread.ident not in places())
        wanted.set()


def test_an_operation_is_waited_for_until_its_thread_goes_on() -> None:
    tensor, index = torch.zeros(1 << 20), torch.randint(0, 1 << 20, (1 << 23,))
    values = torch.ones(1 << 23)
    written = []

    def write() -> None:
        tensor[index] = values
        written.append(tensor._version)

    with running(write):
        await_that(lambda: bool((tensor > 0).any()) or bool(written))
        calls = RunningCalls()
        await_that(calls.ended)
        assert tensor._version == 1


def test_a_thread_that_sleeps_is_not_waited_for_long() -> None:
    held = threading.Lock()
    held.acquire()
    with running(lambda: held.acquire(timeout=60)) as thread:
        await_that(lambda: thread.ident in places())
        calls = RunningCalls()
        await_that(calls.ended)
        assert thread.is_alive()
        held.release()


def test_a_thread_that_sleeps_where_it_was_before_is_not_waited_for() -> None:
    held = threading.Lock()
    held.acquire()
    with running(lambda: held.acquire(timeout=60)) as thread:
        await_that(lambda: thread.ident in places())
        idle = places()
        await_that(lambda: RunningCalls(idle).ended())
        assert thread.is_alive()
        held.release()


def test_threads_that_the_threading_module_does_not_know_are_not_waited_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of execnet, say, and of C++ code that calls Python."""
    monkeypatch.setattr(running_calls, "_UNKNOWN_SECONDS", 0.05)
    held = threading.Lock()
    held.acquire()
    thread = _thread.start_new_thread(lambda: held.acquire(timeout=60), ())
    await_that(lambda: thread in places())
    calls = RunningCalls()
    assert not calls.ended()
    await_that(calls.ended)
    assert thread in places()
    held.release()
