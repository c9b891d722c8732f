"""The garbage collector does not run where many objects are made, and runs again afterwards."""

import gc
import os
import threading

import pytest
import torch

import dcp_datastates
from dcp_datastates.process.garbage import collection_paused


@pytest.fixture(autouse=True)
def collecting():
    gc.enable()
    yield
    gc.enable()


def test_it_is_off_within_and_as_before_afterwards():
    with collection_paused():
        assert not gc.isenabled()
        with collection_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    with collection_paused():
        pass
    assert not gc.isenabled()


def test_an_error_does_not_leave_it_off():
    with pytest.raises(KeyError), collection_paused():
        raise KeyError
    assert gc.isenabled()


def test_the_last_of_several_threads_turns_it_on():
    first_is_in, first_may_go = threading.Event(), threading.Event()

    def first():
        with collection_paused():
            first_is_in.set()
            first_may_go.wait(30)

    thread = threading.Thread(target=first)
    thread.start()
    first_is_in.wait(30)
    with collection_paused():
        first_may_go.set()
        thread.join(30)
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_child_that_is_forked_within_collects():
    with collection_paused():
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_saves_of_many_tensors_make_no_full_collection_due(tmp_path):
    """From stage to commit, in whatever thread: it would hold the GIL, and with it the training."""
    parameters = [torch.nn.Parameter(torch.ones(8)) for _ in range(10_000)]
    torch.optim.SGD(parameters).step()
    state = {f"layers.{n}.weight": parameter.detach() for n, parameter in enumerate(parameters)}
    full = []

    def note(phase, info):
        if phase == "start" and info["generation"] == 2:
            full.append(threading.current_thread().name)

    dcp_datastates.async_save(state, tmp_path / "0").result(60)
    gc.collect()
    gc.callbacks.append(note)
    try:
        for number in range(1, 6):
            dcp_datastates.async_save(state, tmp_path / str(number)).result(60)
    finally:
        gc.callbacks.remove(note)
    assert len(full) <= 1, full  # there were two for each save
