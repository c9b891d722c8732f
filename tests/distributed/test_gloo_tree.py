"""The tree of gloo groups: what it carries, and that no rank is stuck in it; ranks are threads, over one store."""

from __future__ import annotations

import gc
import os
import threading
from datetime import timedelta

import pytest
from support.crashes.residue import Residue, assert_nothing_left
from support.jobs.threads import Impatient, MemoryStore, rank_set, together
from support.waiting import await_that

from dcp_datastates.ranks import gloo_group, meetings
from dcp_datastates.ranks.gloo_group import GlooGroup, GroupBroken, Place, Rendezvous
from dcp_datastates.ranks.gloo_tree import GlooTree, places


def _trees(world, store=None, **options):
    return [GlooTree(each, "t", **options) for each in rank_set(world, store or MemoryStore())]


def _nothing():
    pass


def _impatient(looks):
    return Impatient(looks, InterruptedError("no use"))


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
def test_a_rank_that_leaves_wakes_all_others_and_they_meet_in_the_next_generation(world, left_by):
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


def test_keys_do_not_grow_with_generations_or_operations(monkeypatch):
    monkeypatch.setattr(meetings, "_KEPT", 2)
    store = MemoryStore()
    trees = _joined(20, store)
    counts = []
    for _ in range(6):
        together(trees, _greatest)
        together(trees, lambda tree, _: tree.leave())
        assert together(trees, lambda tree, _: tree.join(_nothing)) == [True] * 20
        counts.append(store.real.num_keys())
    assert counts[-1] == counts[2] < 10
    _close(trees)


def test_building_asks_the_store_for_little():
    counts = [_requests_of_building() for _ in range(3)]
    # The fewest: on a busy machine, those who come first look again and again for those who are late.
    assert min(met for met, _ in counts) < 40 * 25
    assert min(built for _, built in counts) < 40 * 30


def _requests_of_building():
    """Of 40 ranks, to meet and to build the tree; an operation asks for nothing."""
    store = MemoryStore()
    trees = _trees(40, store)
    incarnations = [tree._rank_set.incarnation for tree in trees]
    assert together(incarnations, lambda each, _: each.await_known(60)) == [True] * 40
    assert together(incarnations, lambda each, _: each.await_all(60)) == [True] * 40
    met = store.requests
    assert together(trees, lambda tree, _: tree.join(_nothing)) == [True] * 40
    both = store.requests
    together(trees, _greatest)
    assert store.requests == both, "an operation asks the store"
    _close(trees)
    return met, both - met


def test_check_ends_a_wait_for_a_rank_that_does_not_come(monkeypatch):
    """In a meeting, and in an operation; the others are let go, too."""
    monkeypatch.setattr(gloo_group, "_LETTING_GO_SECONDS", 60.0)
    trees = _trees(3)
    check = _impatient(10)
    outcomes = together(trees[:2], lambda tree, _: tree.join(check))
    assert any(isinstance(each, InterruptedError) for each in outcomes)
    assert all(isinstance(each, InterruptedError | GroupBroken) for each in outcomes)
    assert together(trees, lambda tree, _: tree.join(_nothing)) == [True] * 3
    check = _impatient(10)

    def wait(tree, _):
        try:
            _greatest(tree, 1, check)
        finally:
            tree.leave()

    outcomes = together(trees[:2], wait)
    assert not gloo_group.abandoned, "an operation was left under way"
    assert all(isinstance(each, InterruptedError | GroupBroken) for each in outcomes), outcomes
    _close(trees)


def test_a_rank_hears_by_beats_that_others_have_left():
    newest = [0]
    trees = _joined(2, newest=lambda: newest[0])
    newest[0] = 2  # rank 0 says that it has left, and its connections stay: as where they are cut
    with pytest.raises(GroupBroken, match="given these connections up"):
        _greatest(trees[1], 1)
    _close(trees)


def test_a_rank_that_comes_to_a_meeting_that_others_have_left_goes_on_to_the_next():
    trees = _trees(3)
    together(trees[:1], lambda tree, _: tree.join(_impatient(3)))  # one comes, and goes
    assert together(trees, lambda tree, _: tree.join(_nothing)) == [True] * 3
    assert {tree.generation for tree in trees} == {2}
    _close(trees)


def test_a_rank_that_was_stopped_while_the_others_met_often_finds_them(monkeypatch):
    monkeypatch.setattr(meetings, "_KEPT", 2)
    trees = []
    trees += _joined(3, newest=lambda: trees[0].generation if trees else 0)
    for tree in trees:
        tree.leave()
    for _ in range(8):  # in vain
        together(trees[:2], lambda tree, _: tree.join(_impatient(2)))
    assert together(trees, lambda tree, _: tree.join(_nothing)) == [True] * 3
    assert len({tree.generation for tree in trees}) == 1
    assert trees[0].generation > 5
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
    assert len(gloo_group.abandoned) == 1
    gloo_group.abandoned.clear()
    _close(trees)


class _PlainStore(MemoryStore):
    """Of torch's own type."""

    def clone(self):
        return self.real


def test_a_release_of_torch_that_asks_for_more_meets_by_its_own_rendezvous(monkeypatch):
    def lacking(self, key):
        raise RuntimeError('Tried to call pure virtual function "Store::get"')

    monkeypatch.setattr(Rendezvous, "get", lacking)
    trees = _joined(3, _PlainStore())
    assert together(trees, _greatest) == [2] * 3
    _close(trees)


def _groups(world, check=_nothing, store=None):
    """A function for each rank, which makes its group of all of them."""
    store = store or MemoryStore()

    ranks = rank_set(world, store)
    return [
        lambda each=each: GlooGroup(
            Place("0", each.rank, world),
            Rendezvous(each.connect("t"), "0", world, check),
            lambda: None,
            lambda: "127.0.0.1",
        )
        for each in ranks
    ]


def test_a_member_that_has_died_since_it_came_breaks_the_group(monkeypatch):
    """Its address stands in the store, and its sockets are closed."""
    monkeypatch.setattr(gloo_group, "_CONNECT_TIMEOUT", timedelta(seconds=1))
    monkeypatch.setattr(gloo_group, "_LETTING_GO_SECONDS", 0.2)
    first, second = _groups(2)
    get = Rendezvous.get
    dies = threading.local()

    def told_and_died(rendezvous, key):
        if getattr(dies, "now", False):
            raise InterruptedError("dies")
        return get(rendezvous, key)

    monkeypatch.setattr(Rendezvous, "get", told_and_died)

    def use(make, rank):
        dies.now = rank == 0
        group = make()
        try:
            return group.gather(b"", _nothing)  # the system may have accepted for the other one
        finally:
            group.leave()

    outcomes = together([first, second], use)
    assert all(isinstance(each, GroupBroken) for each in outcomes), outcomes


def test_check_ends_a_wait_for_the_address_of_a_rank_that_has_died():
    first, _ = _groups(2, _impatient(5))
    with pytest.raises(InterruptedError):
        first()


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


def test_a_forked_child_that_drops_its_parents_groups_ends_as_any_other():
    groups = together(_groups(2), lambda make, _: make())
    assert all(isinstance(group, GlooGroup) for group in groups), groups
    child = os.fork()
    if child == 0:
        del groups  # gloo's destructor crashes where its threads are missing
        gc.collect()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for group in groups:
        group.leave()
