"""A unit is read once, and kept until its readers have it, within bounds."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.waiting import await_that

from dcp_datastates._native import BLOCK_BYTES
from dcp_datastates.sharing.assignment import Unit
from dcp_datastates.sharing.own_units import OwnUnits


class _Storage:
    def __init__(self) -> None:
        self.reads: list[int] = []
        self.go_on = threading.Event()
        self.go_on.set()

    def read(self, unit: Unit) -> bytes:
        self.reads.append(unit.begin)
        assert self.go_on.wait(30)
        if unit.begin >= 1000:
            raise OSError("damaged")
        return bytes([unit.begin]) * ((unit.end - unit.begin) * BLOCK_BYTES)


def _unit(begin: int, readers: int = 2) -> Unit:
    return Unit(begin, begin + 1, 0, readers)


def _units(storage: _Storage, blocks: int, count: int = 9) -> OwnUnits:
    """Units, of which so many ``blocks`` are kept."""
    return OwnUnits(storage.read, count, blocks * BLOCK_BYTES)


def _taken(units: OwnUnits, unit: Unit, nbytes: int = BLOCK_BYTES) -> memoryview | None:
    with units.taken(unit, 0, nbytes) as data:
        return data


def test_many_that_ask_at_once_wait_for_one_read():
    storage = _Storage()
    storage.go_on.clear()
    units = _units(storage, 8)
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(_taken, units, _unit(1, 5)) for _ in range(4)]
        await_that(lambda: storage.reads == [1])
        storage.go_on.set()
        assert {each.result() for each in asked} == {bytes([1]) * BLOCK_BYTES}
    assert storage.reads == [1]


def test_a_unit_goes_when_all_readers_have_all_of_it():
    storage = _Storage()
    units = _units(storage, 8, count=1)
    unit = _unit(1)
    assert units.read_ahead(unit)
    assert _taken(units, unit) is not None
    assert _taken(units, unit, BLOCK_BYTES - 1) is not None
    assert not units.are_gone.is_set()
    with units.taken(unit, BLOCK_BYTES - 1, BLOCK_BYTES) as data:
        assert data == bytes([1])
        assert not units.are_gone.is_set()
    assert units.are_gone.is_set()
    assert _taken(units, unit) is None
    assert units.read_ahead(unit)
    assert storage.reads == [1]


@pytest.mark.parametrize(
    ("begin", "end"), [(0, BLOCK_BYTES + 1), (5, 5), (9, 5), (-5, 5), (0, 1 << 70)]
)
def test_bytes_that_a_unit_does_not_have_are_not_taken(begin, end):
    units = _units(_Storage(), 8, count=1)
    for _ in range(3):
        with units.taken(_unit(1), begin, end) as data:
            assert data is None
    assert _taken(units, _unit(1)) is not None


def test_reading_ahead_waits_for_room_and_a_request_takes_that_of_the_oldest():
    storage = _Storage()
    units = _units(storage, 2)
    assert units.read_ahead(_unit(1))
    assert units.read_ahead(_unit(2))
    assert not units.read_ahead(_unit(3))
    assert storage.reads == [1, 2]
    assert _taken(units, _unit(4)) == bytes([4]) * BLOCK_BYTES
    assert _taken(units, _unit(1)) is None
    assert _taken(units, _unit(2)) is not None


def test_what_is_in_use_makes_no_room():
    units = _units(_Storage(), 2)
    with units.taken(_unit(1), 0, 1), units.taken(_unit(2), 0, 1):
        assert _taken(units, _unit(3)) is None
    assert _taken(units, _unit(3)) is not None
    assert _taken(units, _unit(2)) is not None


def test_what_is_being_read_makes_no_room():
    storage = _Storage()
    storage.go_on.clear()
    units = _units(storage, 1)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(_taken, units, _unit(1))
        await_that(lambda: storage.reads == [1])
        assert _taken(units, _unit(2)) is None
        storage.go_on.set()
        assert first.result() is not None
    assert _taken(units, _unit(2)) is not None  # it had not gone


def test_a_unit_that_cannot_be_read_is_not_kept():
    storage = _Storage()
    units = _units(storage, 1, count=2)
    assert _taken(units, _unit(1000)) is None
    assert not units.are_gone.is_set()
    assert units.read_ahead(_unit(1001))
    assert units.are_gone.is_set()
    assert _taken(units, _unit(1)) is not None


@pytest.mark.parametrize("begun", [False, True])
def test_after_the_end_nothing_is_kept(begun):
    storage = _Storage()
    units = _units(storage, 8)
    if begun:
        assert _taken(units, _unit(1)) is not None
    units.close()
    assert _taken(units, _unit(1)) is None
    assert _taken(units, _unit(2)) is None
    assert not units.read_ahead(_unit(3))


def test_a_rank_without_units_keeps_nothing():
    assert _units(_Storage(), 8, count=0).are_gone.is_set()
