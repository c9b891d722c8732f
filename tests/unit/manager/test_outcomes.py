"""What the loop learns of its saves: steps, hooks, failures in a row, metrics that never come."""

import shutil
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from support.crashes.failing import armed

from dcp_datastates import CheckpointManager, Keep, on_save
from dcp_datastates.errors import ConfigurationError, DataStatesError
from dcp_datastates.process.futures import finish_callbacks

STATE = {"w": torch.arange(10.0)}


def _save(manager, step, fails=False):
    """A save whose outcome is known when this returns."""
    with armed("publish.write.before=error:ENOSPC") if fails else nullcontext():
        handle = manager.save(step, STATE)
        assert handle.wait(60)


def test_the_last_step_is_saved_if_only_steps_that_are_due_have_metrics(tmp_path):
    for first in (0, 5):  # and in a job that goes on
        keep = Keep(last=2, best=("loss", "min"))
        with CheckpointManager(tmp_path, every=10, keep=keep, host_cache_size="64MiB") as manager:
            manager.restore_latest({"w": torch.zeros(3)})
            for step in range(first, first + 5):
                metrics = {"loss": 1.0} if manager.should_save(step) else None
                manager.save(step, {"w": torch.zeros(3)}, metrics)
    assert (tmp_path / "step-9" / ".metadata").exists()


def test_steps_are_those_that_are_committed_and_the_latest_is_the_newest(tmp_path):
    keep = Keep(last=9, best=("loss", "min"))
    with CheckpointManager(tmp_path / "run", every=5, keep=keep) as manager:
        assert (manager.steps(), manager.latest_step, manager.best_step) == ([], None, None)
        for step in range(21):
            manager.save(step, STATE, metrics={"loss": abs(step - 9)})
        manager.wait()
        assert (manager.steps(), manager.latest_step) == ([0, 5, 10, 15, 20], 20)
        assert manager.best_step == 10
        manager.restore(5, dict(STATE))
        manager.save(6, STATE, metrics={"loss": 9.0}, force=True).result()
        assert (manager.steps(), manager.latest_step) == ([0, 5, 6, 10, 15, 20], 6)
    shutil.rmtree(tmp_path / "run" / "step-6")
    reader = CheckpointManager(tmp_path / "run", every=1)  # an evaluator: it saves nothing
    assert (reader.steps(), reader.latest_step, reader.best_step) == ([0, 5, 10, 15, 20], 20, None)
    reader.close()


@pytest.mark.parametrize("step", [np.int64(3), np.uint8(3), torch.tensor(3)])
def test_whole_numbers_of_other_libraries_are_steps(step, tmp_path):
    with CheckpointManager(tmp_path, every=1) as manager:
        manager.save(step, STATE)
    assert (tmp_path / "step-3" / ".metadata").exists()


@pytest.mark.parametrize("step", [True, -1, 1.0, "1", None, np.float32(1)])
def test_other_steps_are_refused(step, tmp_path):
    with (
        CheckpointManager(tmp_path, every=1) as manager,
        pytest.raises(ConfigurationError, match="step="),
    ):
        manager.save(step, STATE)


def test_so_many_failures_in_a_row_end_the_loop_and_one_commit_forgives_them(tmp_path):
    with CheckpointManager(tmp_path, every=1, max_failures=3) as manager:
        for step in range(7):
            _save(manager, step, fails=step in (1, 2, 4, 5, 6))
        with pytest.raises(DataStatesError):
            manager.save(7, STATE)
    assert manager.failures == 5
    assert manager.steps() == [0, 3]


@pytest.mark.parametrize("in_flight", [1, 4, 8])
def test_a_loop_whose_saves_all_fail_does_not_end_as_if_all_were_well(in_flight, tmp_path, caplog):
    manager = CheckpointManager(tmp_path, every=1, max_in_flight=in_flight)
    most = max(5, in_flight + 1)
    _save(manager, 0)
    for step in range(1, most + 1):
        _save(manager, step, fails=True)
    with pytest.raises(DataStatesError, match="No space left"):
        manager.close()
    (line,) = [each for each in caplog.messages if each.startswith("closed")]
    assert f"1 saves committed, {most} failed" in line
    assert str(tmp_path / "step-0") in line


def test_a_healthy_loop_with_many_saves_in_flight_waits_for_none(tmp_path):
    with CheckpointManager(tmp_path, every=1, max_in_flight=8) as manager:
        with armed("publish.link.before=sleep:0.5"):
            handles = [manager.save(step, STATE) for step in range(6)]
            assert not handles[0].committed.done()
        assert manager.failures == 0


def test_an_error_that_was_raised_is_not_raised_again(tmp_path):
    with CheckpointManager(tmp_path, every=1, max_failures=1) as manager:
        _save(manager, 0, fails=True)
        with pytest.raises(DataStatesError):
            manager.wait()
        manager.save(1, STATE)
    assert manager.steps() == [1]


@pytest.mark.parametrize("metrics", [None, {}, {"Loss": 1.0}])
def test_a_metric_that_keep_wants_and_that_does_not_come_is_an_error_at_the_first_save(
    metrics, tmp_path
):
    with CheckpointManager(tmp_path, every=2, keep=Keep(best=("loss", "min"))) as manager:
        with pytest.raises(ConfigurationError, match="'loss'"):
            manager.save(0, STATE, metrics)
        manager.save(1, STATE)  # none is due
        manager.save(2, STATE, {"loss": 1.0})
    assert manager.steps() == [2]


@pytest.mark.parametrize(
    ("calls", "options", "expected"),
    [
        (range(8), {}, [0, 5, 7]),
        (range(6), {}, [0, 5]),
        (range(8), {"save_last": False}, [0, 5]),
        (range(1, 4), {}, [3]),
        ((), {}, []),
    ],
)
@pytest.mark.parametrize("closes", [True, False])
def test_the_last_step_is_saved_at_the_end_of_the_loop(calls, options, expected, closes, tmp_path):
    manager = CheckpointManager(tmp_path, every=5, **options)
    state = {"w": torch.zeros(1)}
    with nullcontext() if closes else manager:
        for step in calls:
            state["w"] += 1
            manager.save(step, state)
    manager.close()
    assert manager.steps() == expected
    if expected:
        found = {"w": torch.zeros(1)}
        manager = CheckpointManager(tmp_path, every=5)
        manager.restore_latest(found)
        manager.close()
        assert found["w"].item() == expected[-1] - min(calls) + 1


def test_a_loop_that_an_error_ends_does_not_save_its_last_step(tmp_path):
    manager = CheckpointManager(tmp_path, every=5)

    def loop():
        with manager:
            manager.save(0, STATE)
            manager.save(1, STATE)
            raise KeyError

    with pytest.raises(KeyError):
        loop()
    assert manager.steps() == [0]


def test_after_a_restore_there_is_no_last_step(tmp_path):
    with CheckpointManager(tmp_path, every=5) as manager:
        manager.save(5, STATE)
        manager.save(6, STATE)
        manager.restore_latest(dict(STATE))
    assert manager.steps() == [5]


def test_every_save_has_its_record_with_the_step_whatever_came_of_it(tmp_path):
    told, outcomes = [], ["committed", "failed", "committed", "failed"]
    stop = on_save(lambda record: told.append((record.step, record.outcome)))
    with CheckpointManager(tmp_path, every=1) as manager:
        for step in range(3):
            _save(manager, step, fails=step == 1)
        with armed("stage.after=error:EIO"):
            assert manager.save(3, STATE) is None  # the call itself failed
    assert finish_callbacks(60)
    stop()
    assert told == list(enumerate(outcomes))
