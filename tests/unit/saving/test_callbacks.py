"""Callbacks of a save may do what a program does: save, wait, load, raise. No save waits for them."""

import itertools
import threading

import pytest
import torch
from support.jobs.ranks import ranks
from support.jobs.scripts import run_script
from support.state.archiving import archived_save
from support.state.checkpoints import CACHE
from support.tiers import sampled
from support.waiting import await_that

import dcp_datastates as ds
from dcp_datastates.process import futures
from dcp_datastates.process.futures import SharedFuture, finish_callbacks, when_done

STATE = {"w": torch.arange(1000.0)}


def _wait(handle, root):
    handle.result(60)


def _save_and_wait(handle, root):
    ds.save({"best": 1}, root / "best", host_cache_size=CACHE)


def _save(handle, root):
    ds.async_save({"best": 1}, root / "best", host_cache_size=CACHE)


def _load(handle, root):
    ds.load(handle.path)


def _raise(handle, root):
    raise KeyError("a defect of the program")


DEEDS = [_wait, _save_and_wait, _save, _load, _raise]

HOOKS = {
    "committed": lambda handle, call: handle.committed.add_done_callback(call),
    "captured": lambda handle, call: handle.captured.add_done_callback(call),
    "archived": lambda handle, call: handle.archived.add_done_callback(call),
}


@pytest.mark.parametrize(
    ("hook", "deed"),
    sampled(
        itertools.product(HOOKS, DEEDS),
        keep=[
            *(("committed", deed) for deed in DEEDS),
            *(("captured", _save_and_wait), ("archived", _wait)),
        ],
    ),
)
def test_saves_go_on_whatever_a_callback_does(hook, deed, tmp_path):
    done = threading.Event()

    def call(future):
        try:
            deed(handle, tmp_path)
        finally:
            done.set()

    path = tmp_path / "fast" / "step-1"
    handle = archived_save(STATE, path, tmp_path / "slow", host_cache_size=CACHE)
    HOOKS[hook](handle, call)
    handle.result(60)
    for step in (2, 3):
        ds.save(STATE, tmp_path / "fast" / f"step-{step}", host_cache_size=CACHE)
    assert done.wait(60)


@pytest.mark.parametrize("deed", sampled(DEEDS, keep=[_wait, _save_and_wait, _raise]))
def test_saves_go_on_whatever_a_listener_does(deed, tmp_path):
    done = threading.Event()

    def listen(record):
        if record.step == 1:
            try:
                deed(handle, tmp_path)
            finally:
                done.set()

    stop = ds.on_save(listen)
    try:
        handle = ds.async_save(STATE, tmp_path / "step-1", host_cache_size=CACHE)
        handle.result(60)
        for step in (2, 3):
            ds.save(STATE, tmp_path / f"step-{step}", host_cache_size=CACHE)
        assert done.wait(60)
    finally:
        stop()


def test_a_callback_that_never_returns_holds_no_save(tmp_path):
    go = threading.Event()
    handle = ds.async_save(STATE, tmp_path / "step-1", host_cache_size=CACHE)
    handle.committed.add_done_callback(lambda _: go.wait(60))
    try:
        for step in (2, 3):
            ds.save(STATE, tmp_path / f"step-{step}", host_cache_size=CACHE)
        assert not finish_callbacks(0.01)
    finally:
        go.set()
    assert finish_callbacks(60)


def test_callbacks_run_one_after_another_in_order(tmp_path):
    order = []
    handles = [
        ds.async_save(STATE, tmp_path / f"step-{step}", host_cache_size=CACHE) for step in range(4)
    ]
    for number, handle in enumerate(handles):
        handle.result(60)
        handle.committed.add_done_callback(lambda _, number=number: order.append(number))
    await_that(lambda: len(order) == 4)
    assert order == [0, 1, 2, 3]


def test_the_callbacks_of_a_future_that_has_just_its_outcome_are_waited_for(monkeypatch):
    future, goes_on, called = SharedFuture(), threading.Event(), []
    when_done(future, lambda _: goes_on.wait(60))  # the thread that resolves it stands here
    future.add_done_callback(lambda _: called.append(True))
    thread = threading.Thread(target=future.settle, args=(None,))
    thread.start()
    future.result(60)
    monkeypatch.setattr(futures.time, "sleep", lambda seconds: goes_on.set())
    try:
        assert finish_callbacks(60)
        assert called
    finally:
        goes_on.set()
        thread.join()


def test_a_process_ends_after_its_callbacks_and_what_they_save(tmp_path):
    run_script(
        """
        import dcp_datastates as ds
        handle = ds.async_save({"w": torch.ones(1000)}, f"{path}/step-1")
        handle.committed.add_done_callback(lambda _: ds.async_save({"best": 1}, f"{path}/best"))
        """,
        tmp_path,
    ).assert_clean()
    assert ds.load(tmp_path / "best") == {"best": 1}


@ranks(2)
def test_the_callbacks_of_all_ranks_may_save_together(shared_dir):
    saved = threading.Event()

    def save(_):
        ds.save({"best": 1}, shared_dir / "best", host_cache_size=CACHE)
        saved.set()

    ds.async_save(STATE, shared_dir / "step-1", host_cache_size=CACHE).committed.add_done_callback(
        save
    )
    assert saved.wait(60)
    ds.save(STATE, shared_dir / "step-2", host_cache_size=CACHE)
