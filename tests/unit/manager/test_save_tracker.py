"""The tracker of saves by itself: what it keeps of saves that failed, and which work waits for which commit."""

from concurrent.futures import Future

import pytest
from support.waiting import little_work

from dcp_datastates.errors import ReplicasDifferError
from dcp_datastates.manager.save_tracker import SaveTracker

FAILURE = OSError("broken")


class Handle:
    """A save in flight."""

    def __init__(self):
        self.committed = Future()
        self.record = "what came of it"

    def wait(self, timeout=None):
        self.committed.exception(timeout)
        return True


def begin(tracker, path):
    return tracker.begin(path, Handle)


def fail(tracker, path, how):
    """A save that fails before, or after, its deletions are known; or at the call."""
    if how == "at the call":
        with pytest.raises(OSError, match="broken"):
            tracker.begin(path, _refuse)
        tracker.failed(path, FAILURE)
    else:
        begin(tracker, path).committed.set_exception(FAILURE)


def _refuse():
    raise FAILURE


def kept(tracker):
    """The length of all that the tracker has."""
    values = [*vars(tracker).values(), *vars(tracker.deletions).values()]
    return sum(len(each) for each in values if hasattr(each, "__len__"))


@pytest.mark.parametrize("limit", [None, 10**6])
@pytest.mark.parametrize("how", ["at the call", "at once", "later"])
def test_a_thousand_failed_saves_leave_nothing_behind(how, limit, tmp_path):
    called = []
    tracker = SaveTracker(limit)
    before = tmp_path / "good"
    begin(tracker, before).committed.set_result(None)
    with little_work(30):
        for number in range(1000):
            path = tmp_path / str(number)
            tracker.check()
            handle = begin(tracker, path) if how == "later" else fail(tracker, path, how)
            tracker.when_committed(lambda: called.append("rule"))
            tracker.when_committed(lambda: called.append("good"), deletes=before)
            if handle is not None:
                handle.committed.set_exception(FAILURE)
            before = path
        tracker.wait()
    assert tracker.failures == 1000
    assert called == []
    assert kept(tracker) == 1, "the deletion of the good one"
    last = begin(tracker, tmp_path / "last")
    tracker.when_committed(lambda: called.append("last"), deletes=before)
    last.committed.set_result(None)
    tracker.wait()
    assert called == ["good"]
    assert kept(tracker) == 0


def test_what_a_failed_save_left_goes_only_if_it_is_empty(tmp_path):
    tracker = SaveTracker()
    begin(tracker, tmp_path / "good")
    for name in ("empty", "full"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "of another").touch()
    before = tmp_path / "good"
    for name in ("empty", "full", "next"):
        begin(tracker, tmp_path / name).committed.set_exception(FAILURE)
        tracker.when_committed(pytest.fail, deletes=before)
        before = tmp_path / name
    tracker.deletions.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


@pytest.mark.parametrize("order", ["fails first", "fails late"])
def test_what_a_failed_save_was_to_replace_goes_with_the_next_commit(order, tmp_path):
    tracker, called = SaveTracker(), []
    begin(tracker, tmp_path / "1").committed.set_result(None)
    second = begin(tracker, tmp_path / "2")
    tracker.when_committed(lambda: called.append(1), deletes=tmp_path / "1")
    if order == "fails first":
        second.committed.set_exception(FAILURE)
    third = begin(tracker, tmp_path / "3")
    tracker.when_committed(lambda: called.append(2), deletes=tmp_path / "2")
    if order == "fails late":
        second.committed.set_exception(FAILURE)
    tracker.deletions.wait()
    assert called == []
    third.committed.set_result(None)
    tracker.wait()
    assert called == [1]
    assert kept(tracker) == 0


def test_a_later_save_to_a_path_cancels_also_a_deletion_that_a_failure_put_off(tmp_path):
    tracker, called = SaveTracker(), []
    old, new, third = (tmp_path / name for name in ("old", "new", "third"))
    begin(tracker, new).committed.set_exception(FAILURE)
    tracker.when_committed(lambda: called.append("old"), deletes=old)
    begin(tracker, old).committed.set_result(None)
    begin(tracker, third).committed.set_result(None)
    tracker.when_committed(lambda: None, deletes=new)
    tracker.wait()
    assert called == []


def test_a_save_in_flight_holds_up_only_the_work_that_waits_for_it(tmp_path):
    tracker, called = SaveTracker(), []
    first = begin(tracker, tmp_path / "1")
    tracker.when_committed(lambda: called.append(1))
    second = begin(tracker, tmp_path / "2")
    tracker.when_committed(lambda: called.append(2))
    assert tracker.in_flight() == [first, second]
    assert tracker.in_flight(tmp_path / "2") == [second]
    first.committed.set_result(None)
    tracker.deletions.wait()
    assert called == [1]
    second.committed.set_result(None)
    tracker.wait()
    assert called == [1, 2]
    assert tracker.in_flight() == []


@pytest.mark.parametrize("error", [FAILURE, ReplicasDifferError("a message")])
def test_a_commit_forgets_failures_unless_replicas_differed(error, tmp_path):
    """The save that is committed has compared another part of them, or another state."""
    tracker = SaveTracker(2)
    for number, outcome in enumerate([error, None, error]):
        tracker.check()
        committed = begin(tracker, tmp_path / str(number)).committed
        committed.set_exception(outcome) if outcome else committed.set_result(None)
        tracker.take()
    if error is FAILURE:
        tracker.check()
    else:
        with pytest.raises(ReplicasDifferError):
            tracker.check()
