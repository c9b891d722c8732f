"""``CheckpointManager`` in one process: what is saved, kept and restored, and what an error does."""

import itertools
import logging
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from support.crashes.failing import armed
from support.state.checkpoints import assert_same, raises
from support.state.files import data_files, flip_bit
from support.state.loops import Loop, manager
from support.state.roots import committed_names, save_stock

import dcp_datastates as ds
from dcp_datastates import AutoInterval, Keep
from dcp_datastates.errors import (
    CheckpointCorruptError,
    ConfigurationError,
    ForeignCheckpointError,
)


def test_a_loop_goes_on_where_its_checkpoint_was_taken(tmp_path):
    random.seed(1), np.random.seed(1)
    loop, losses = Loop(), []
    with manager(tmp_path, every=4, save_last=False) as checkpoints:
        assert checkpoints.restore_latest(loop.state) is None
        for step in range(1, 8):
            losses.append(loop.step())
            checkpoints.save(step, loop.state)
    assert committed_names(tmp_path) == ["step-4"]

    random.seed(2), np.random.seed(2)
    again = Loop(seed=5)
    with manager(tmp_path, every=4) as checkpoints:
        assert checkpoints.restore_latest(again.state) == 4
        assert [again.step() for _ in range(3)] == losses[4:]
    assert again.state["seen"] == loop.state["seen"]
    assert_same(again.model.state_dict(), loop.model.state_dict())
    assert torch.equal(again.state["average"], loop.state["average"])


def test_steps_that_are_a_multiple_are_saved_and_others_by_force(tmp_path):
    with manager(tmp_path, every=3) as checkpoints:
        for step in range(1, 8):
            due = checkpoints.should_save(step)
            assert due == checkpoints.should_save(step) == (step % 3 == 0)
            assert (checkpoints.save(step, {"step": step}) is not None) == due
        for ask in (checkpoints.should_save, lambda step: checkpoints.save(step, {})):
            with raises(ConfigurationError, "step=3", "comes after"):
                ask(3)
        handle = checkpoints.save(7, {"step": 7}, force=True)
        assert checkpoints.save(7, {"step": 7}, force=True) is handle
        assert handle.path == checkpoints.path(7)
    assert committed_names(tmp_path) == ["step-3", "step-6", "step-7"]


def test_old_checkpoints_go_by_the_rules_and_pinned_ones_stay(tmp_path):
    with manager(tmp_path, keep=Keep(last=1, every=4, best=("loss", "min"))) as checkpoints:
        for step in range(1, 8):
            checkpoints.save(step, {"step": step}, metrics={"loss": abs(step - 5)})
            checkpoints.save(step, {"step": step}, force=True).result()
            if step == 2:
                ds.pin(checkpoints.path(step), "eval")
    assert committed_names(tmp_path) == ["step-2", "step-4", "step-5", "step-7"]
    with manager(tmp_path, keep=1) as checkpoints:
        ds.unpin(checkpoints.path(2), "eval")
        checkpoints.save(8, {"step": 8})
    assert committed_names(tmp_path) == ["step-8"]


def test_a_damaged_checkpoint_is_left_out_and_the_next_older_one_restored(tmp_path, caplog):
    with manager(tmp_path) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"w": torch.full((1000,), float(step))})
    data_files(tmp_path / "step-3")[0].unlink()  # seen when looked for
    flip_bit(data_files(tmp_path / "step-2")[0], 5000)  # seen only when read
    state = {"w": torch.zeros(1000)}
    with manager(tmp_path) as checkpoints:
        assert checkpoints.restore_latest(state) == 1
    assert state["w"].eq(1).all()
    assert "step-2" in caplog.text
    assert "step-3" in caplog.text


def test_a_loop_does_not_begin_anew_beside_checkpoints_that_are_all_damaged(tmp_path):
    with manager(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(1000)})
    flip_bit(data_files(tmp_path / "step-1")[0], 5000)
    with manager(tmp_path) as checkpoints, raises(CheckpointCorruptError, "none of the 1"):
        checkpoints.restore_latest({"w": torch.zeros(1000)})


def test_a_loop_may_go_back_and_what_it_saves_then_is_the_newest(tmp_path):
    weights = torch.nn.Parameter(torch.zeros(100_000))
    optimizer = torch.optim.SGD([weights], lr=1.0)
    ds.track(optimizer)
    with manager(tmp_path, reads=600.0) as checkpoints:
        for step in range(1, 5):
            with torch.no_grad():
                weights.fill_(step)
            handle = checkpoints.save(step, {"w": weights})
            handle.captured.result() if step < 4 else None
        state = {"w": weights}
        assert checkpoints.restore(2, state) == 2  # while step 4 is in flight
        assert handle.committed.done()
        assert weights.eq(2).all()
        assert ds.load(tmp_path / "step-4")["w"].eq(4).all()
        checkpoints.save(4, {"w": weights})
    assert ds.load(tmp_path / "step-4")["w"].eq(2).all()


def test_a_loop_does_not_begin_anew_over_checkpoints_of_another_program(tmp_path):
    save_stock(tmp_path / "step-100")
    with manager(tmp_path) as checkpoints:
        with raises(ForeignCheckpointError, "step-100"):
            checkpoints.restore_latest({"w": torch.zeros(1)})
        checkpoints.save(200, {"w": torch.ones(1)})
    state = {"w": torch.zeros(1)}
    with manager(tmp_path) as checkpoints:
        assert checkpoints.restore_latest(state) == 200


# --- failures ------------------------------------------------------------------------------------------


FULL = "publish.write.before=error:ENOSPC"


def test_a_save_that_fails_at_the_call_is_counted_too(tmp_path, caplog):
    with manager(tmp_path) as checkpoints:
        with armed("stage.before=error:EIO"):
            assert checkpoints.save(1, {"w": torch.ones(10)}) is None
        assert checkpoints.save(2, {"w": torch.ones(10)}) is not None
    assert checkpoints.failures == 1
    assert "step 1" in caplog.text


def test_after_a_save_that_failed_at_the_call_the_automatic_interval_goes_on(tmp_path):
    saved = []
    with manager(tmp_path, every="auto") as checkpoints, armed("stage.before@1=error:EIO"):
        for step in range(1, 200):
            if checkpoints.save(step, {"w": torch.ones(10)}):
                saved.append(step)
                break
    assert checkpoints.failures == 1
    assert saved


def test_a_forced_save_is_neither_left_out_nor_taken_for_saved(tmp_path):
    options = {"every": 1, "max_in_flight": 1, "when_behind": "skip"}
    with manager(tmp_path, **options) as checkpoints:
        with armed("publish.link.before@1=sleep:0.5"):
            checkpoints.save(1, {"w": torch.ones(10)})
            checkpoints.save(2, {"w": torch.ones(10)})  # is left out
            checkpoints.save(2, {"w": torch.ones(10)}, force=True).wait()
        with armed(FULL):
            checkpoints.save(3, {"w": torch.ones(10)}).wait()
        checkpoints.save(3, {"w": torch.ones(10)}, force=True)
    assert committed_names(tmp_path) == ["step-1", "step-2", "step-3"]
    assert checkpoints.failures == 1


def test_a_signal_while_storage_is_behind_saves_all_the_same(tmp_path):
    options = {
        "every": 1,
        "max_in_flight": 1,
        "when_behind": "skip",
        "on_signal": (signal.SIGUSR1,),
    }
    with manager(tmp_path, **options) as checkpoints, armed("publish.link.before@1=sleep:0.5"):
        for step in (1, 2, 3, 4):
            checkpoints.save(step, {"w": torch.ones(10)})
            if checkpoints.stopping:
                break
            signal.raise_signal(signal.SIGUSR1)
    assert step < 4
    assert f"step-{step}" in committed_names(tmp_path)


def test_an_error_of_the_loop_is_not_hidden_by_one_of_a_save(tmp_path, caplog):
    checkpoints = manager(tmp_path, max_failures=1)

    def loop():
        with checkpoints, armed(FULL):
            checkpoints.save(1, {"w": torch.ones(10)}).wait()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert "No space left" in caplog.text
    with raises(ConfigurationError, "closed"):
        checkpoints.save(2, {})


@pytest.mark.parametrize(
    "options",
    [
        {"every": 0},
        {"keep": 0},
        {"verify": "much"},
        *({"max_failures": most} for most in (0, -1, True, 1.5, "3")),
        *({"fresh": "yes"}, {"missing": "no"}, {"rename": 3}),
        *({"archive_every": 0}, {"archive_rate": "fast"}, {"archive_keep": -1}),
        *({"archive_keep": 3, "archive": None}, {"archive_every": 2, "archive": None}),
        {"deadline": "25s"},
        {"save_last": "no"},
        {"on_signal": ("TERM",)},
        {"on_signal": (signal.SIGKILL,)},
        {"host_cache_size": 1},
        {"publish": "weights"},
        {"color": "red"},
    ],
    ids=str,
)
def test_an_option_that_cannot_work_is_refused_at_once(options, tmp_path):
    name = next(iter(options))
    if name.startswith("archive") and "archive" not in options:
        options, name = {"archive": tmp_path / "slow", **options}, str(options[name])
    with pytest.raises((ConfigurationError, TypeError), match=name):
        manager(tmp_path, **options)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


# --- signals -------------------------------------------------------------------------------------------


def test_a_signal_saves_the_next_step_and_stops_the_loop(tmp_path, caplog):
    with manager(tmp_path, every=100, on_signal=(signal.SIGTERM,)) as checkpoints:
        for step in range(1, 50):
            checkpoints.save(step, {"step": step})
            if checkpoints.stopping:
                break
            if step == 5:
                os.kill(os.getpid(), signal.SIGTERM)
    assert step == 6
    assert committed_names(tmp_path) == [f"step-{step}"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert "signal" in caplog.text


def test_a_poll_sees_a_signal_that_comes_in_an_evaluation(tmp_path):
    with manager(tmp_path, every=100, on_signal=(signal.SIGTERM,)) as checkpoints:
        assert not checkpoints.poll()
        os.kill(os.getpid(), signal.SIGTERM)
        assert checkpoints.poll()
        assert not checkpoints.stopping
        checkpoints.save(1, {"step": 1})
        assert checkpoints.stopping
        assert checkpoints.poll()
    assert committed_names(tmp_path) == ["step-1"]


def test_the_last_save_fails_by_name_if_it_is_not_committed_by_the_deadline(tmp_path, caplog):
    loop = manager(tmp_path, every=100, on_signal=(signal.SIGTERM,), deadline=0.2)
    with armed("publish.link.before=sleep:3"):
        os.kill(os.getpid(), signal.SIGTERM)
        handle = loop.save(1, {"step": 1})
        began = time.monotonic()
        loop.close()
        assert time.monotonic() - began < 2.5, "the save takes 3 s"
    assert isinstance(handle.committed.exception(0), ds.errors.DataStatesError)
    assert loop.failures == 1
    assert "deadline" in caplog.text
    assert "step-1" in caplog.text


def test_a_deadline_that_is_kept_changes_nothing(tmp_path):
    with manager(tmp_path, on_signal=(signal.SIGTERM,), deadline="60s") as loop:
        os.kill(os.getpid(), signal.SIGTERM)
        loop.save(1, {"step": 1})
    assert loop.failures == 0
    assert committed_names(tmp_path) == ["step-1"]


def test_a_handler_that_was_there_is_called_and_put_back(tmp_path):
    came = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))
    mine = signal.getsignal(signal.SIGUSR1)
    try:
        with manager(tmp_path, on_signal=(signal.SIGUSR1,)):
            os.kill(os.getpid(), signal.SIGUSR1)
        assert came == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is mine
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_second_interrupt_is_one(tmp_path):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    try:
        with manager(tmp_path, on_signal=(signal.SIGINT,)):
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_forked_child_ends_as_it_would_without(tmp_path):
    with manager(tmp_path, on_signal=(signal.SIGTERM, signal.SIGTERM)):
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM


def test_signals_need_the_main_thread(tmp_path):
    with ThreadPoolExecutor(1) as threads, raises(ConfigurationError, "main thread"):
        threads.submit(manager, tmp_path, on_signal=(signal.SIGTERM,)).result()


# --- times and costs -------------------------------------------------------------------------------------


class Clock:
    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr("dcp_datastates.manager.schedule.time.monotonic", lambda: self.now)


def test_a_time_makes_the_next_step_save(tmp_path, monkeypatch):
    with manager(tmp_path, every="10min") as checkpoints:
        clock = Clock(monkeypatch)
        checkpoints._schedule._saved_at = clock.now
        saved = []
        for step in range(1, 40):
            clock.now += 60
            if checkpoints.save(step, {"step": step}):
                saved.append(step)
        monkeypatch.undo()
    assert len(saved) == 3, saved
    assert all(10 <= later - earlier <= 11 for earlier, later in itertools.pairwise(saved))


def test_auto_saves_when_it_has_measured_and_says_why(tmp_path, caplog):
    caplog.set_level(logging.INFO, "dcp_datastates")
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    rule = AutoInterval(stall_budget=0.5)
    with manager(tmp_path, every=rule, keep=1, save_last=False) as checkpoints:
        assert "measured" in checkpoints.interval
        for step in range(1, 2000):
            model(torch.randn(256, 64)).sum().backward()
            optimizer.step()
            checkpoints.save(step, {"model": model, "optimizer": optimizer})
            if "a step takes" in checkpoints.interval:
                break
    assert checkpoints.interval.startswith("every ")
    assert f"saving {checkpoints.interval}" in caplog.text
    assert len(committed_names(tmp_path)) == 1
