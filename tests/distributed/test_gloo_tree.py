"""The tree of gloo groups: what it carries, and that no rank is stuck in it; ranks are threads, over one store."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from support.crashes.residue import Residue, assert_nothing_left
from support.jobs.threads import MemoryStore, rank_set, together
from support.waiting import await_that

from dcp_datastates.ranks import gloo_group, gloo_tree
from dcp_datastates.ranks.gloo_group import GlooGroup, GroupBroken, Meeting
from dcp_datastates.ranks.gloo_tree import GlooTree, places


def _trees(world, store=None, **options):
    return [GlooTree(each, "t", **options) for each in rank_set(world, store or MemoryStore())]


def _nothing():
    pass


class _Impatient:
    """A check that has had enough after so many looks."""

    def __init__(self, looks):
        self._looks = itertools.count(looks, -1)

    def __call__(self):
        if next(self._looks) <= 0:
            raise InterruptedError("no use")


def _joined(world, store=None, **options):
    trees = _trees(world, store, **options)
    assert together(trees, lambda tree, _: tree.join(_nothing)) == [True] * world
    return trees


def _greatest(tree, rank, check=_nothing):
    """Of all ranks, on all of them."""
    gathered = tree.gather(b"%d" % rank, check)
    return int(tree.broadcast(gathered and b"%d" % max(map(int, gathered)), check))


def _close(trees):
    together(trees, lambda tree, _: tree.close())


@pytest.mark.parametrize("world", [1, 2, 7, 8, 9, 17, 40, 129, 16_384])
def test_every_rank_has_its_place_in_a_tree_of_small_groups_below_the_first_rank(world):
    groups = {}
    for rank in range(world):
        mine = list(places(rank, world))
        assert [place.rank for place in mine[:-1]] == [0] * (len(mine) - 1), "only leaders go up"
        assert (rank == 0) == all(place.rank == 0 for place in mine)
        for place in mine:
            groups.setdefault((place.name, place.size), []).append(place.rank)
    for (_, size), members in groups.items():
        assert sorted(members) == list(range(size))
        assert 2 <= size <= 8
    assert sum(size - 1 for _, size in groups) == world - 1, "a tree has no other edges"
    assert sum(place.size - 1 for place in places(0, world)) <= 31


@pytest.mark.parametrize("world", [2, 8, 9, 17, 40])
def test_values_and_bytes_of_any_length_go_up_and_down(world):
    before = Residue.now()
    trees = _joined(world)
    assert not trees[0].join(_nothing), "met twice"
    parts = [bytes([rank % 251]) * (0, 1, 70_000, 3)[rank % 4] for rank in range(world)]
    gathered = together(trees, lambda tree, rank: tree.gather(parts[rank], _nothing))
    assert gathered == [parts] + [None] * (world - 1)
    for told in (b"", b"of rank 0"):
        says = [told] + [None] * (world - 1)
        heard = together(trees, lambda tree, rank, says=says: tree.broadcast(says[rank], _nothing))
        assert heard == [told] * world
    assert together(trees, lambda tree, _: tree.gather(b"", _nothing))[0] == [b""] * world
    _close(trees)
    del trees
    assert_nothing_left(before)


@pytest.mark.parametrize("world", [2, 20])
@pytest.mark.parametrize("left_by", [0, 1, -1])
def test_a_rank_that_leaves_wakes_all_others_and_they_meet_in_the_next_generation(
    world, left_by, monkeypatch
):
    monkeypatch.setattr(gloo_tree, "_LOOK_SECONDS", 1e9)  # sockets tell, and no look at the store
    before = Residue.now()
    store = MemoryStore()
    trees = _joined(world, store)
    left_by %= world
    generation = trees[0].generation

    waiting = set()

    def wait(tree, rank):
        if rank == left_by:
            await_that(lambda: len(waiting) == world - 1)
            tree.leave()
            tree.leave()  # changes nothing
            return None
        try:
            return _greatest(tree, rank, lambda: waiting.add(rank))
        finally:
            tree.leave()

    outcomes = together(trees, wait)
    assert [isinstance(each, GroupBroken) for each in outcomes] == [
        rank != left_by for rank in range(world)
    ], outcomes
    assert together(trees, lambda tree, _: tree.join(_nothing)) == [True] * world
    assert {tree.generation for tree in trees} == {generation + 1}, (
        "met twice in one, or left one out"
    )
    assert together(trees, _greatest) == [world - 1] * world
    _close(trees)
    del trees, outcomes  # the errors' tracebacks hold a tree
    assert_nothing_left(before)


def test_a_rank_that_has_left_is_not_told_what_it_says_itself():
    trees = _joined(2)
    trees[0].leave()
    for operation in (
        lambda: trees[0].gather(b"", _nothing),
        lambda: trees[0].broadcast(b"", _nothing),
    ):
        with pytest.raises(GroupBroken, match="given up"):
            operation()
    _close(trees)


def test_keys_do_not_grow_with_generations_or_operations():
    store = MemoryStore()
    trees = _joined(20, store)
    keys = store.real.num_keys()
    assert keys == 3, "more than the generation, who leads, and how many have asked to be admitted"
    for _ in range(3):
        together(trees, _greatest)
        together(trees, lambda tree, _: tree.leave())
        assert together(trees, lambda tree, _: tree.join(_nothing)) == [True] * 20
    assert store.real.num_keys() == keys
    _close(trees)


def test_building_asks_the_store_for_little():
    store = MemoryStore()
    trees = _trees(40, store)
    incarnations = [tree._rank_set.incarnation for tree in trees]
    assert together(incarnations, lambda each, _: each.await_known(30)) == [True] * 40
    assert together(incarnations, lambda each, _: each.await_all(30)) == [True] * 40
    assert store.requests < 40 * 25, "to meet"
    store.requests = 0
    assert together(trees, lambda tree, _: tree.join(_nothing)) == [True] * 40
    # Without looks for those who are late: there are a few, as threads come one after the other.
    assert store.requests < 40 * 13
    built = store.requests
    together(trees, _greatest)
    assert store.requests == built, "an operation asks the store"
    _close(trees)


def test_check_ends_a_wait_for_a_rank_that_does_not_come():
    """In a meeting, and in an operation; the others are let go, too."""
    trees = _trees(3)
    check = _Impatient(10)
    outcomes = together(trees[:2], lambda tree, _: tree.join(check))
    assert any(isinstance(each, InterruptedError) for each in outcomes)
    assert all(isinstance(each, InterruptedError | GroupBroken) for each in outcomes)
    assert together(trees, lambda tree, _: tree.join(_nothing)) == [True] * 3
    check = _Impatient(10)

    def wait(tree, _):
        try:
            _greatest(tree, 1, check)
        finally:
            tree.leave()

    outcomes = together(trees[:2], wait)
    assert not gloo_group.abandoned(), "an operation was left under way"
    assert all(isinstance(each, InterruptedError | GroupBroken) for each in outcomes), outcomes
    _close(trees)


def test_a_rank_looks_by_itself_whether_others_have_left(monkeypatch):
    monkeypatch.setattr(gloo_tree, "_LOOK_SECONDS", 0.3)
    trees = _joined(2)
    # Rank 0 counts up, and its connections stay: as where they are cut.
    trees[0]._generation += 1
    trees[0]._count_up(trees[0]._store)
    with pytest.raises(GroupBroken, match="given these connections up"):
        trees[1].gather(b"", _nothing)
    trees[1].leave()
    _close(trees)


def test_a_generation_that_could_not_be_counted_up_is_not_met_in_again():
    trees = _joined(2)
    generation = trees[0].generation
    for tree in trees:
        store, tree._store = tree._store, None  # it cannot be reached
        tree.leave()
        tree._store = store
    assert together(trees, lambda tree, _: tree.join(_nothing)) == [True] * 2
    assert {tree.generation for tree in trees} == {generation + 1}
    _close(trees)


def test_a_rank_that_comes_to_a_meeting_that_others_have_left_goes_on_to_the_next():
    trees = _trees(3)
    together(trees[:1], lambda tree, _: tree.join(_Impatient(3)))  # one comes, and goes
    assert together(trees, lambda tree, _: tree.join(_nothing)) == [True] * 3
    assert {tree.generation for tree in trees} == {1}
    _close(trees)


class _Stuck:
    """An operation that gloo has forgotten."""

    def is_completed(self):
        return False

    def wait(self, timeout=None):
        raise RuntimeError("Operation timed out!")


def test_an_operation_that_gloo_has_forgotten_keeps_no_rank(monkeypatch):
    monkeypatch.setattr(gloo_group, "_LETTING_GO_SECONDS", 0.2)
    trees = _joined(2)
    ((_, group),) = trees[0]._groups

    def check():
        raise InterruptedError("no use")

    with pytest.raises(InterruptedError):
        group._do(lambda gloo: _Stuck(), check)
    trees[0].leave()
    assert len(gloo_group._abandoned) == 1
    gloo_group._abandoned.clear()
    _close(trees)


class _PlainStore(MemoryStore):
    """Of torch's own type."""

    def clone(self):
        return self.real


def test_a_release_of_torch_that_asks_for_more_meets_by_its_own_rendezvous(monkeypatch):
    def lacking(self, keys, timeout=None):
        raise RuntimeError('Tried to call pure virtual function "Store::wait"')

    monkeypatch.setattr(gloo_group.Meeting, "wait", lacking)
    trees = _joined(3, _PlainStore())
    assert together(trees, _greatest) == [2] * 3
    _close(trees)


def test_a_member_that_has_died_since_it_came_breaks_the_group(monkeypatch):
    """Its address stands in the store, and its sockets are closed."""
    monkeypatch.setattr(gloo_group, "_CONNECT_TIMEOUT", timedelta(seconds=2))
    store = MemoryStore()
    meetings = [
        Meeting(each.connect("t"), "0", each.rank, 2, 0.1, _nothing) for each in rank_set(2, store)
    ]
    exchange = Meeting._exchange

    def told_and_died(meeting):
        exchange(meeting)
        if meeting is meetings[0]:
            raise InterruptedError("dies")

    monkeypatch.setattr(Meeting, "_exchange", told_and_died)

    def use(meeting, _):
        group = GlooGroup(meeting, lambda: None)
        try:
            return group.gather(b"", _nothing)  # the system may have accepted for the other one
        finally:
            group.leave()

    outcomes = together(meetings, use)
    assert isinstance(outcomes[0], InterruptedError), outcomes
    assert isinstance(outcomes[1], GroupBroken), outcomes


def test_a_tree_that_another_thread_closes_tells_no_rank_what_it_says_itself():
    trees = _joined(2)
    seen = []

    class Leaving:
        def leave(self):  # takes its time
            with pytest.raises(GroupBroken):
                trees[0].join(_nothing)
            with pytest.raises(GroupBroken):
                trees[0].gather(b"", _nothing)
            seen.append(True)
            raise MemoryError

    place, group = trees[0]._groups[0]
    trees[0]._groups = [(place, Leaving())]
    trees[0].close()
    assert seen
    with pytest.raises(GroupBroken, match="closed"):
        trees[0].join(_nothing)
    group.leave()
    trees[1].leave()
    _close(trees)


def test_who_gives_up_while_it_connects_leaves_no_address_to_connect_to(monkeypatch):
    """Else the other rank would try to for 20 s, in gloo's code, where nobody can tell it."""
    first, second = _trees(2)
    incarnations = [tree._rank_set.incarnation for tree in (first, second)]
    assert together(incarnations, lambda each, _: each.await_known(30)) == [True] * 2
    inside, left = threading.Event(), threading.Event()

    def slow(host):
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            left.wait(30)
        return "127.0.0.1"

    monkeypatch.setattr(gloo_tree, "own_address", slow)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(second.join, _nothing)
        assert inside.wait(30)
        with pytest.raises(InterruptedError):
            first.join(_Impatient(5))
        left.set()
        with pytest.raises(GroupBroken, match="another rank has given these connections up"):
            joining.result(60)
    _close([first, second])


def _met(store, checks, monkeypatch, found):
    """Two meetings of one group; ``found(meeting)`` runs when one finds the keys of both."""
    monkeypatch.setattr(gloo_group, "_CONNECT_TIMEOUT", timedelta(seconds=2))
    are_there = Meeting._are_there

    def looks(meeting, keys):
        there = are_there(meeting, keys)
        if there:
            found(meeting)
        return there

    monkeypatch.setattr(Meeting, "_are_there", looks)
    return [
        Meeting(each.connect("t"), "0", each.rank, 2, 0.01, check)
        for each, check in zip(rank_set(2, store), checks, strict=True)
    ]


def test_a_rank_that_leaves_before_the_others_connect_stops_all_of_them(monkeypatch):
    """They have found its address already."""
    found, left = threading.Event(), threading.Event()

    def leaves():
        if found.is_set():
            raise InterruptedError("leaves")

    def waits(meeting):
        if meeting.rank == 1:
            found.set()
            left.wait(30)
        else:
            found.wait(30)
            meeting._check()

    store = MemoryStore()
    meetings = _met(store, [leaves, _nothing], monkeypatch, waits)

    def use(meeting, rank):
        try:
            return GlooGroup(meeting, lambda: None)
        finally:
            if rank == 0:
                left.set()

    left_, stopped = together(meetings, use)
    assert isinstance(left_, InterruptedError), left_
    assert isinstance(stopped, GroupBroken), stopped
    assert "given these connections up" in str(stopped)


def test_a_rank_that_would_leave_when_the_others_connect_already_connects_first(monkeypatch):
    going = threading.Event()

    def leaves():
        if going.is_set():
            raise InterruptedError("leaves")

    def late(meeting):
        if meeting.rank == 0:
            going.wait(30)
            meeting._check()

    decide = Meeting._decide

    def tells(meeting, word):
        first = decide(meeting, word)
        if meeting.rank == 1:
            going.set()
        return first

    monkeypatch.setattr(Meeting, "_decide", tells)
    store = MemoryStore()
    meetings = _met(store, [leaves, _nothing], monkeypatch, late)
    groups = together(meetings, lambda meeting, _: GlooGroup(meeting, lambda: None))
    assert all(isinstance(group, GlooGroup) for group in groups), groups
    for group in groups:
        group.leave()


def test_a_forked_child_that_drops_its_parents_groups_ends_as_any_other():
    store = MemoryStore()
    meetings = [
        Meeting(each.connect("t"), "0", each.rank, 2, 0.1, _nothing) for each in rank_set(2, store)
    ]
    groups = together(meetings, lambda meeting, _: GlooGroup(meeting, lambda: None))
    assert all(isinstance(group, GlooGroup) for group in groups), groups
    child = os.fork()
    if child == 0:
        del groups  # gloo's destructor crashes where its threads are missing
        gc.collect()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for group in groups:
        group.leave()


def test_ranks_that_give_up_wait_until_a_slow_one_is_connected(monkeypatch):
    """Else it would try to connect for 20 s per rank that has left, in gloo's code, where nobody can tell it."""
    monkeypatch.setattr(gloo_group, "_CONNECT_TIMEOUT", timedelta(seconds=10))
    trees = _trees(4)
    given_up = threading.Event()
    exchange = Meeting._exchange

    def slow(meeting):
        exchange(meeting)
        if meeting.rank == 3:
            given_up.wait(2)  # which may need this rank: then all give up later
            time.sleep(0.5)

    monkeypatch.setattr(Meeting, "_exchange", slow)

    def give_up(data, check):
        given_up.set()
        raise InterruptedError("no use")

    for tree in trees[:3]:
        tree.gather = give_up
    *others, last = together(trees, lambda tree, _: tree.join(_nothing))
    assert all(isinstance(each, InterruptedError) for each in others), others
    assert isinstance(last, GroupBroken)
    assert "could not connect" not in str(last)
    monkeypatch.undo()
    for tree in trees[:3]:
        del tree.gather
    assert together(trees, lambda tree, _: tree.join(_nothing)) == [True] * 4
    _close(trees)


@pytest.mark.parametrize("ends", ["all are connected", "the leader has cleaned up", "closed"])
def test_ranks_that_give_up_wait_for_nobody_in_vain(ends):
    store = MemoryStore()
    tree, _ = _trees(2, store)
    connection = tree._rank_set.connect("t")
    meeting = Meeting(connection, "0", 0, 2, 0.01, _nothing)
    meeting.count_in()
    asked = itertools.count()
    if ends == "all are connected":
        connection.add(meeting.count_key, 1)
    elif ends == "the leader has cleaned up":
        connection.delete_key(meeting.count_key)
    keys = store.real.num_keys()
    meeting.await_others(lambda: next(asked) > 3)
    assert next(asked) == (5 if ends == "closed" else 1), "it has waited"
    assert store.real.num_keys() == keys
    _close([tree])
