"""What a former job has left in the store is not believed, whether its processes are gone or alive."""

import threading

import pytest
from support.jobs.threads import MemoryStore, rank_set, together
from support.waiting import await_that

from dcp_datastates.ranks import incarnation as incarnation_module

NAME = "dcp_datastates-meeting"


def _meetings(world, store):
    return [each.incarnation for each in rank_set(world, store)]


def _met(incarnations):
    assert together(incarnations, lambda each, _: each.await_known(20)) == [True] * len(
        incarnations
    )
    (prefix,) = {each.prefix() for each in incarnations}
    return prefix


@pytest.mark.parametrize("world", [1, 2, 9])
def test_the_ranks_of_one_job_have_one_incarnation_and_the_next_job_another(world):
    store = MemoryStore()
    first = _met(_meetings(world, store))
    assert _met(_meetings(world, store)) != first


def test_ranks_may_come_in_any_order():
    store = MemoryStore()
    _met(_meetings(3, store))  # a former job, whose leader the ranks find first
    meetings = _meetings(3, store)
    assert not meetings[2].await_known(0.05)
    assert not meetings[1].await_known(0.05)
    assert meetings[0].await_known(20)
    _met(meetings)


def test_each_rank_knows_the_processes_that_it_has_met_and_no_other():
    store = MemoryStore()
    meetings = _meetings(3, store)
    assert [each.processes for each in meetings] == [{}] * 3
    _met(meetings)
    await_that(lambda: sorted(meetings[0].processes) == [1, 2])
    assert [sorted(each.processes) for each in meetings[1:]] == [[0], [0]]


def test_a_rank_that_died_before_it_met_rank_0_is_not_taken_for_the_new_one():
    store = MemoryStore()
    old, new = rank_set(2, store), rank_set(2, store)
    assert not old[1].incarnation.await_known(0.05)  # asks nobody, and is gone
    old.clear()
    assert _met([each.incarnation for each in new])


def test_a_living_rank_0_of_a_former_job_admits_no_rank_of_the_next():
    """It has not met all its ranks when the next job begins."""
    store = MemoryStore()
    old, new = _meetings(2, store), _meetings(2, store)
    assert old[0].await_known(20)
    assert new[0].await_known(20)
    assert new[1].await_known(20)
    assert new[1].prefix() == new[0].prefix() != old[0].prefix()
    assert old[0].processes == {}


def test_a_late_rank_of_a_former_job_does_not_take_the_place_of_the_new_one():
    store = MemoryStore()
    old, new = _meetings(2, store), _meetings(2, store)
    prefix = _met(new)
    assert not old[1].await_known(0.3)
    assert new[0].prefix() == prefix
    with pytest.raises(RuntimeError, match="has not met rank 0"):
        _with_seconds(0.01, old[1].prefix)


def _with_seconds(seconds, call):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(incarnation_module, "ANSWER_SECONDS", seconds)
        return call()


def test_a_rank_whose_place_is_taken_is_not_admitted():
    """Two processes ask as the same rank while rank 0 still waits for another."""
    store = MemoryStore()
    ranks, twin = _meetings(3, store), _meetings(3, store)[1]
    assert ranks[0].await_known(20)
    assert ranks[1].await_known(20)
    assert not twin.await_known(0.05)
    _met(ranks)
    assert not twin.await_known(0.05)
    assert list(ranks[0].processes) == [1, 2]


def test_a_request_that_was_counted_twice_holds_up_no_rank(monkeypatch):
    """The client repeats a request whose connection broke."""
    store = MemoryStore()
    meetings = _meetings(2, store)
    add = type(store.real).add

    def twice(key, n):
        if n:
            add(store.real, key, n)
        return add(store.real, key, n)

    monkeypatch.setattr(store, "add", twice, raising=False)
    _met(meetings)


def test_a_store_that_fails_for_a_while_is_asked_again():
    store = MemoryStore()
    meetings = _meetings(2, store)
    failing = threading.Event()
    failing.set()

    def check(keys):
        if failing.is_set():
            raise RuntimeError("Connection reset by peer\nand a backtrace")
        return store.real.check(keys)

    store.check = check
    assert not meetings[1].await_known(0.05)
    await_that(lambda: meetings[1].store_error == "Connection reset by peer")
    failing.clear()
    _met(meetings)
    assert meetings[1].store_error is None


def test_the_thread_ends_when_all_have_met_or_the_rank_set_is_dropped():
    others = set(threading.enumerate())  # another test's, which wait for ranks that do not come

    def threads():
        return [
            thread
            for thread in threading.enumerate()
            if thread.name == NAME and thread not in others
        ]

    ranks = rank_set(3, MemoryStore())
    _met([each.incarnation for each in ranks])
    assert all(each.incarnation.await_all(20) for each in ranks)
    await_that(lambda: not threads())
    alone = rank_set(2, MemoryStore())[:1]
    assert alone[0].incarnation.await_known(20)
    assert threads()
    alone.clear()
    await_that(lambda: not threads())


def test_a_leader_of_another_version_of_this_package_is_none():
    store = MemoryStore()
    prefix = _met(_meetings(2, store)).rpartition("/")[0]
    for left in ("[]", "no JSON", '["a name", "a process"]'):
        store.real.set(f"{prefix}/leader", left)
        _met(_meetings(2, store))


def test_numbers_of_calls_begin_anew_with_each_incarnation():
    store = MemoryStore()
    (first, _), (second, _) = _meetings(2, store), _meetings(2, store)
    assert [first.count("a"), first.count("a"), first.count("b"), second.count("a")] == [1, 2, 1, 1]
