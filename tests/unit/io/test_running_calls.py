"""Whether the operations that other threads run have ended."""

import _thread
import functools
import gc
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest
import torch
from support.waiting import await_that

from dcp_datastates.io import running_calls
from dcp_datastates.io.running_calls import RunningCalls, places


@contextmanager
def running(work):
    thread = threading.Thread(target=work)
    thread.start()
    yield thread
    thread.join()


def test_threads_that_wait_in_the_standard_library_run_no_operation():
    wanted = threading.Event()
    with running(wanted.wait) as thread:
        await_that(lambda: thread.ident is not None and thread.ident not in places())
        wanted.set()


def test_an_operation_is_waited_for_until_its_thread_goes_on():
    tensor, index = torch.zeros(1 << 20), torch.randint(0, 1 << 20, (1 << 23,))
    values = torch.ones(1 << 23)
    written = []

    def write():
        tensor[index] = values
        written.append(tensor._version)

    with running(write):
        await_that(lambda: bool((tensor > 0).any()) or bool(written))
        calls = RunningCalls()
        await_that(calls.ended)
        assert tensor._version == 1


def _by_a_thread_pool(call):
    with ThreadPool(1) as pool:
        pool.apply_async(call).get()


def _by_an_exit_stack(call):
    with ExitStack() as stack:
        stack.callback(call)


def _by_a_dispatcher(call):
    functools.singledispatch(lambda _: call())(0)


def _by_an_executor(call):
    with ThreadPoolExecutor(1) as executor:
        executor.submit(call).result()


@pytest.mark.parametrize(
    "by", [_by_a_thread_pool, _by_an_exit_stack, _by_a_dispatcher, _by_an_executor]
)
def test_an_operation_that_the_standard_library_calls_is_waited_for(by):
    """Directly, so that the innermost frame is the standard library's."""
    tensor, index = torch.zeros(1 << 20), torch.randint(0, 1 << 20, (1 << 23,))
    call = functools.partial(tensor.index_put_, (index,), torch.ones(1 << 23))
    with running(lambda: by(call)):
        await_that(lambda: bool((tensor > 0).any()))
        calls = RunningCalls()
        await_that(calls.ended)
        assert tensor._version == 1


@pytest.mark.parametrize("beside", ["none", "threads that never rest"])
def test_a_thread_that_sleeps_is_not_waited_for_long(beside, monkeypatch):
    if beside != "none":
        monkeypatch.setattr(running_calls, "_WORKERS_SECONDS", 0.3)
        monkeypatch.setattr(running_calls, "_workers_can_run", lambda: True)
    held = threading.Lock()
    held.acquire()
    with running(lambda: held.acquire(timeout=60)) as thread:
        await_that(lambda: thread.ident in places())
        calls = RunningCalls()
        await_that(calls.ended)
        assert thread.is_alive()
        held.release()


def test_a_thread_that_sleeps_where_it_was_before_is_not_waited_for():
    held = threading.Lock()
    held.acquire()
    with running(lambda: held.acquire(timeout=60)) as thread:
        await_that(lambda: thread.ident in places())
        idle = places()
        await_that(lambda: RunningCalls(idle).ended())
        assert thread.is_alive()
        held.release()


def test_threads_that_the_threading_module_does_not_know_are_not_waited_for_long(monkeypatch):
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


@contextmanager
def busy(processor):
    """A process that keeps this processor busy."""
    program = (
        f"import os; os.sched_setaffinity(0, {{{processor}}}); print(flush=True)\nwhile True: pass"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout
            process.stdout.readline()
            yield
        finally:
            process.kill()


def _tasks():
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


def test_an_operation_whose_worker_gets_little_of_a_processor_is_waited_for():
    """The thread has done its half, and sleeps until its worker has done the other half."""
    processor = max(os.sched_getaffinity(0))
    tensor = torch.full((1 << 24,), 0.5)
    versions = []
    threads = torch.get_num_threads()
    torch.set_num_threads(2)

    def write():
        before = _tasks()
        tensor.erfinv_()  # this starts the worker
        for worker in _tasks() - before:
            os.sched_setaffinity(worker, {processor})
            os.setpriority(os.PRIO_PROCESS, worker, 10)
        versions.append(tensor._version)
        tensor.erfinv_()
        versions.append(tensor._version)

    try:
        with busy(processor), running(write):
            await_that(lambda: bool(versions))
            calls = RunningCalls()
            await_that(calls.ended)
            assert tensor._version > versions[0]
    finally:
        torch.set_num_threads(threads)


def test_no_collection_runs_while_frames_are_listed(monkeypatch):
    """It could let go of the GIL, under a lock that a thread which ends waits for with the GIL."""
    frames, enabled = sys._current_frames, []

    def listed():
        enabled.append(gc.isenabled())
        return frames()

    assert gc.isenabled()
    monkeypatch.setattr(sys, "_current_frames", listed)
    running_calls.places()
    assert enabled == [False]
    assert gc.isenabled()
