"""The model of a crash, on traces so small that what may be left can be listed by hand."""

from __future__ import annotations

import itertools

import pytest
from support.crashes.crash_states import Tree, crash_states
from support.crashes.traces import Record, RecordError, in_order, in_place, without


def _frozen(tree: Tree) -> frozenset[tuple[str, bytes | None]]:
    return frozenset(tree.items())


def _left(start: Tree, *records: Record) -> set[frozenset[tuple[str, bytes | None]]]:
    """What a crash after the last record may leave."""
    return {
        _frozen(state.tree) for state in crash_states(start, records) if state.point == len(records)
    }


def _trees(*trees: Tree) -> set[frozenset[tuple[str, bytes | None]]]:
    return {_frozen(tree) for tree in trees}


_sync_ids = itertools.count()


def _sync(path: str) -> tuple[Record, Record]:
    number = str(next(_sync_ids))
    return Record("sync_begin", path, id=number), Record("sync", path, id=number)


def test_a_directory_is_there_for_certain_only_after_a_sync_of_its_parent():
    assert _left({}, Record("mkdir", "d")) == _trees({}, {"d": None})
    assert _left({}, Record("mkdir", "d"), *_sync("d")) == _trees({}, {"d": None})
    assert _left({}, Record("mkdir", "d"), *_sync("")) == _trees({"d": None})


def test_a_sync_that_has_not_ended_or_began_too_early_promises_nothing():
    begin, end = _sync("")
    mkdir = Record("mkdir", "d")
    assert _left({}, mkdir, begin, Record("told", "")) == _trees({}, {"d": None})
    assert _left({}, begin, mkdir, end) == _trees({}, {"d": None})
    assert _left({}, mkdir, begin, end) == _trees({"d": None})


def test_a_child_needs_its_parent():
    assert _left({}, Record("mkdir", "a"), Record("mkdir", "a/b")) == _trees(
        {}, {"a": None}, {"a": None, "a/b": None}
    )
    assert _left({}, Record("mkdir", "a"), Record("mkdir", "a/b"), *_sync("a")) == _trees(
        {}, {"a": None, "a/b": None}
    )


def test_names_come_independently_of_the_order_in_which_they_were_made():
    assert _left({}, Record("mkdir", "a"), Record("mkdir", "b")) == _trees(
        {}, {"a": None}, {"b": None}, {"a": None, "b": None}
    )


def test_a_write_is_there_or_not_or_half_or_only_its_length():
    start = {"f": b""}
    write = Record("write", "f", data=b"abcd")
    assert _left(start, write) == _trees(
        {"f": b""}, {"f": b"\0\0\0\0"}, {"f": b"ab\0\0"}, {"f": b"\0\0cd"}, {"f": b"abcd"}
    )
    assert _left(start, write, *_sync("f")) == _trees({"f": b"abcd"})


def test_writes_persist_in_any_combination():
    start = {"f": b"...."}
    first = Record("write", "f", offset=0, data=b"ab")
    second = Record("write", "f", offset=2, data=b"cd")
    left = {content for tree in _left(start, first, second) for _, content in tree}
    assert left == {
        one + two for one in (b"..", b"a.", b".b", b"ab") for two in (b"..", b"c.", b".d", b"cd")
    }
    synced = {content for tree in _left(start, first, *_sync("f"), second) for _, content in tree}
    assert synced == {b"ab..", b"abc.", b"ab.d", b"abcd"}


def test_sizes_change_or_not():
    assert _left({"f": b"abcd"}, Record("truncate", "f", size=2)) == _trees(
        {"f": b"abcd"}, {"f": b"ab"}
    )
    assert _left({"f": b"ab"}, Record("allocate", "f", size=3)) == _trees(
        {"f": b"ab"}, {"f": b"ab\0"}
    )
    assert _left({"f": b"abcd"}, Record("allocate", "f", size=3)) == _trees({"f": b"abcd"})


def test_a_synced_file_may_still_have_no_name():
    records = (Record("create", "f"), Record("write", "f", data=b"x"), *_sync("f"))
    assert _left({}, *records) == _trees({}, {"f": b"x"})
    assert _left({}, *records, *_sync("")) == _trees({"f": b"x"})


def test_a_rename_is_atomic_and_brings_the_same_file():
    start = {"new": b"n", "old": b"o"}
    assert _left(start, Record("rename", "new", to="old")) == _trees(start, {"old": b"n"})
    unsynced = _left(
        {"old": b"o"},
        Record("create", "new"),
        Record("write", "new", data=b"n"),
        Record("rename", "new", to="old"),
    )
    contents = (b"", b"\0", b"n")
    assert unsynced == _trees(
        {"old": b"o"},
        *({"old": b"o", "new": content} for content in contents),
        *({"old": content} for content in contents),
    )


def test_a_rename_between_directories_may_be_half_done():
    start = {"a": None, "a/f": b"x", "b": None}
    there, arrived = {**start}, {"a": None, "b": None, "b/f": b"x"}
    rename = Record("rename", "a/f", to="b/f")
    assert _left(start, rename) == _trees(
        there, arrived, {**there, "b/f": b"x"}, {"a": None, "b": None}
    )
    assert _left(start, rename, *_sync("b")) == _trees(arrived, {**there, "b/f": b"x"})


def test_what_was_removed_may_come_back_until_the_directory_is_synced():
    start = {"d": None, "d/f": b"x"}
    removed = (Record("unlink", "d/f"), Record("rmdir", "d"))
    assert _left(start, *removed) == _trees(start, {"d": None}, {})
    assert _left(start, *removed, *_sync("")) == _trees({})


def test_every_prefix_of_the_trace_is_a_crash_point():
    records = [Record("mkdir", "a"), *_sync(""), Record("told", "", attempt="7")]
    found = {(state.point, state.told, _frozen(state.tree)) for state in crash_states({}, records)}
    no, yes = _frozen({}), _frozen({"a": None})
    assert found == {
        (0, (), no),
        *((1, (), tree) for tree in (no, yes)),
        (3, (), yes),
        (4, ("7",), yes),
    }


def test_many_changes_are_sampled_with_each_one_alone_left_out_and_alone_let_in():
    names = [f"d{number:02}" for number in range(20)]
    left = _left({}, *(Record("mkdir", name) for name in names))
    everything = frozenset((name, None) for name in names)
    assert everything in left
    assert frozenset() in left
    for place, name in enumerate(names):
        assert everything - {(name, None)} in left
        assert frozenset({(name, None)}) in left
        assert frozenset((other, None) for other in names[:place]) in left
        assert frozenset((other, None) for other in names[place:]) in left
    assert len(left) > 300


def test_a_trace_with_a_hole_is_refused():
    for record in (
        Record("write", "f", data=b"x"),
        Record("rename", "f", to="g"),
        Record("unlink", "f"),
        Record("mkdir", "a/b"),
        Record("sync_begin", "f", id="1"),
        Record("sync", "", id="1"),
    ):
        with pytest.raises(RecordError):
            list(crash_states({}, [record]))
    with pytest.raises(RecordError, match="exists"):
        list(crash_states({"f": b""}, [Record("create", "f")]))


def test_a_trace_spoilt_by_leaving_out_a_sync_or_by_writing_in_place():
    begin, end = _sync("f")
    rename = Record("rename", "f", to="g")
    records = [Record("create", "f"), Record("write", "f", data=b"x"), begin, end, rename]
    assert without(records, {begin.id}) == [*records[:2], rename]
    left = _left({"g": b"o"}, *in_place(records, rename, b"o"), *_sync(""))
    assert left == _trees({"g": b"x"})
    on_the_way = {
        _frozen(state.tree) for state in crash_states({"g": b"o"}, in_place(records, rename, b"o"))
    }
    assert _frozen({"f": b"x", "g": b""}) in on_the_way


def test_a_directory_comes_before_what_is_in_it_and_goes_after_it_whatever_the_trace_says():
    parent, child = Record("mkdir", "a"), Record("mkdir", "a/b")
    file, gone, empty = Record("create", "a/b/f"), Record("unlink", "a/b/f"), Record("rmdir", "a/b")
    begin, end = _sync("a")
    late = [Record("told", ""), child, begin, parent, file, empty, gone, end]
    assert in_order(late) == [late[0], parent, child, begin, file, gone, empty, end]
    assert in_order(in_order(late)) == in_order(late)
