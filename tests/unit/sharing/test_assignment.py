"""Every block that several ranks need is read by one of these. The blocks that a load needs are those with bytes of its
requests: no more, and no fewer.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.state.chunks import reads_of_rows
from support.waiting import little_work

from dcp_datastates.format.metadata_table import FileRecord
from dcp_datastates.sharing import assignment
from dcp_datastates.sharing.assignment import (
    MOST_READERS,
    UNIT_BLOCKS,
    Offer,
    Share,
    assign,
    blocks_of,
    needed_blocks,
)

BLOCKS = 120


@pytest.fixture(autouse=True)
def _share_however_little(monkeypatch):
    monkeypatch.setattr(assignment, "LEAST_REPEATED", 0.0)


def _offer(rank, needed):
    edges = [b for b in range(BLOCKS + 1) if (b in needed) != (b - 1 in needed)]
    return Offer(("host", rank, bytes(16)), np.array(edges, np.int64))


def _shares(needed):
    shares = assign({rank: _offer(rank, blocks) for rank, blocks in needed.items()})
    return {rank: Share.decode(share.encode()) for rank, share in shares.items()}


runs = st.lists(st.tuples(st.integers(0, BLOCKS - 1), st.integers(1, 60)), max_size=4)
needs = st.lists(runs, min_size=1, max_size=6).map(
    lambda ranks: {
        # ranks 1, 3, 5 ...: some of the job share no reads
        2 * number + 1: {b for begin, n in of for b in range(begin, min(begin + n, BLOCKS))}
        for number, of in enumerate(ranks)
    }
)


def _units(share, needed):
    """By block: the unit, as this rank sees it."""
    found = {}
    for begin, end in _offer(0, needed).runs.tolist():
        at = begin
        for low, high, unit in share.pieces(begin, end) if share else ():
            assert low == at < high <= end
            at = high
            found.update(dict.fromkeys(range(low, high), unit))
        assert share is None or at == end
    return {block: unit for block, unit in found.items() if unit is not None}


@settings(max_examples=300, deadline=None)
@given(needs)
def test_a_block_that_several_ranks_need_has_one_owner_which_is_one_of_these(needed):
    shares = _shares(needed)
    seen = {rank: _units(shares.get(rank), blocks) for rank, blocks in needed.items()}
    for block in range(BLOCKS):
        readers = {rank for rank, blocks in needed.items() if block in blocks}
        units = {seen[rank].get(block) for rank in readers}
        if len(readers) < 2:
            assert units <= {None}
            continue
        (unit,) = units
        assert unit.owner in readers
        assert unit.readers == len(readers)
        assert unit.begin <= block < unit.end <= unit.begin + UNIT_BLOCKS
        assert all(set(range(unit.begin, unit.end)) <= needed[rank] for rank in readers)
        assert all(unit.owner in {rank, *shares[rank].addresses} for rank in readers)


@settings(max_examples=300, deadline=None)
@given(needs)
def test_units_are_spread_evenly_over_the_ranks_that_need_them(needed):
    counts = {}
    shares = _shares(needed)
    for rank, blocks in needed.items():
        for block, unit in _units(shares.get(rank), blocks).items():
            readers = frozenset(each for each, other in needed.items() if block in other)
            owned = counts.setdefault(readers, {each: set() for each in readers})
            owned[unit.owner].add(unit.begin)
    for owned in counts.values():
        numbers = [len(each) for each in owned.values()]
        assert max(numbers) - min(numbers) <= 1


@settings(max_examples=100, deadline=None)
@given(needs, runs)
def test_a_rank_knows_its_own_units(needed, asked):
    shares = _shares(needed)
    for rank, share in shares.items():
        wanted = {b for begin, n in asked for b in range(begin, min(begin + n, BLOCKS))}
        units = _units(share, wanted & needed[rank])
        own = sorted({unit for unit in units.values() if unit.owner == rank})
        assert list(share.own_units(_offer(0, wanted & needed[rank]).runs)) == own


def test_many_readers_share_in_groups():
    needed = {rank: {3, 4} for rank in range(2 * MOST_READERS + 1)}
    shares = _shares(needed)
    owners = {unit.owner for share in shares.values() for unit in _units(share, {3, 4}).values()}
    assert len(owners) == 3
    assert max(len(share.addresses) for share in shares.values()) < MOST_READERS
    for rank, share in shares.items():
        (unit,) = set(_units(share, {3, 4}).values())
        assert unit.owner in {rank, *share.addresses}


@pytest.mark.parametrize("needed", [{}, {0: set()}, {0: {1}, 1: {2}}, {4: {1, 2}}])
def test_ranks_that_need_nothing_in_common_share_nothing(needed):
    assert _shares(needed) == {}


@pytest.mark.parametrize(("common", "expected"), [(2, {}), (12, {0, 1})])
def test_ranks_share_if_that_saves_a_part_of_their_reads(monkeypatch, common, expected):
    monkeypatch.setattr(assignment, "LEAST_REPEATED", 0.1)
    needed = {0: set(range(50)), 1: set(range(50 - common, 100 - common))}
    assert set(_shares(needed)) == set(expected)


def test_a_large_job_is_assigned_quickly_and_briefly():
    ranks, runs = 512, 500
    begins = np.arange(runs) * 40
    every = np.stack([begins, begins + 30], axis=1)
    address = ("10.0.0.1", 1, bytes(16))
    offers = {rank: Offer(address, (every + rank % 8).ravel()) for rank in range(ranks)}
    with little_work(10.0):
        shares = assign(offers)
    assert len(shares[5].encode()) < 500_000


# ---- which blocks a load needs -----------------------------------------------------------------------

BLOCK = 16
FILES = {name: FileRecord(name, 400, 390) for name in ("b", "a", "c")}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(assignment, "BLOCK_BYTES", BLOCK)


@st.composite
def slices(draw):
    """A chunk's shape, and a part of it."""
    shape = draw(st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple))
    while math.prod(shape) > 180:
        shape = shape[:-1]
    begins = [draw(st.integers(0, size)) for size in shape]
    return (
        shape,
        begins,
        [draw(st.integers(0, size - b)) for size, b in zip(shape, begins, strict=True)],
    )


@settings(max_examples=500, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30), slices()), max_size=4))
def test_the_blocks_are_those_with_bytes_of_a_request(parts):
    expected, rows = set(), []
    blocks = blocks_of(FILES)
    for number, (file, offset, (shape, begins, lengths)) in enumerate(parts):
        place = f"t{number}", file, offset, 2 * math.prod(shape)
        rows.append((*place, torch.int16, shape, tuple(begins), tuple(lengths)))
        elements = np.arange(math.prod(shape)).reshape(shape)
        chosen = elements[tuple(slice(b, b + n) for b, n in zip(begins, lengths, strict=True))]
        first = blocks[file].first
        for element in chosen.ravel().tolist():
            for byte in (offset + 2 * element, offset + 2 * element + 1):
                expected.add(first + byte // BLOCK)
    runs = needed_blocks(reads_of_rows(*rows), blocks).tolist()
    assert {block for begin, end in runs for block in range(begin, end)} == expected
    assert all(begin < end for begin, end in runs)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(runs))


def test_blocks_have_the_same_numbers_on_all_ranks_and_none_lies_in_two_files():
    blocks = blocks_of(FILES)
    assert blocks_of(dict(sorted(FILES.items()))) == blocks
    assert [(each.name, each.first) for each in blocks.values()] == [("a", 0), ("b", 26), ("c", 52)]
    assert all(-(-each.nbytes // BLOCK) < 26 for each in blocks.values())


def test_objects_have_the_blocks_of_their_bytes_and_an_unknown_file_has_none():
    found, empty, missing = ("o", "a", 15, 2), ("e", "a", 160, 0), ("m", "not described", 15, 2)
    reads = reads_of_rows(found, empty, missing)
    assert needed_blocks(reads, blocks_of(FILES)).tolist() == [[0, 2]]


def test_places_outside_a_file_make_no_blocks_of_another():
    reads = reads_of_rows(("o", "a", 380, 1 << 40))
    assert needed_blocks(reads, blocks_of(FILES)).tolist() == [[23, 25]]
