"""A unit is read once, and kept until its readers have it, within bounds."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.waiting import await_that

from dcp_datastates._native import BLOCK_BYTES
from dcp_datastates.sharing.assignment import Unit
from dcp_datastates.sharing.kept_units import KeptUnits


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


def _lent(units: KeptUnits, unit: Unit) -> memoryview | None:
    with units.lent(unit) as data:
        return data


def test_many_that_ask_at_once_wait_for_one_read():
    storage = _Storage()
    storage.go_on.clear()
    units = KeptUnits(storage.read, 8 * BLOCK_BYTES)
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(_lent, units, _unit(1)) for _ in range(4)]
        await_that(lambda: storage.reads == [1])
        storage.go_on.set()
        assert {each.result() for each in asked} == {bytes([1]) * BLOCK_BYTES}
    assert storage.reads == [1]


def test_a_unit_goes_when_all_readers_have_all_of_it():
    storage = _Storage()
    units = KeptUnits(storage.read, 8 * BLOCK_BYTES)
    unit = _unit(1)
    assert units.read_ahead(unit)
    units.take(unit, BLOCK_BYTES)
    units.take(unit, BLOCK_BYTES - 1)
    assert _lent(units, unit) is not None
    assert units.gone == 0
    units.take(unit, 1)
    assert units.gone == 1
    assert _lent(units, unit) is None
    assert units.read_ahead(unit)
    assert storage.reads == [1]


def test_reading_ahead_waits_for_room_and_a_request_takes_that_of_the_oldest():
    storage = _Storage()
    units = KeptUnits(storage.read, 2 * BLOCK_BYTES)
    assert units.read_ahead(_unit(1))
    assert units.read_ahead(_unit(2))
    assert not units.read_ahead(_unit(3))
    assert storage.reads == [1, 2]
    assert _lent(units, _unit(4)) == bytes([4]) * BLOCK_BYTES
    assert _lent(units, _unit(1)) is None
    assert _lent(units, _unit(2)) is not None


def test_what_is_in_use_makes_no_room():
    units = KeptUnits(_Storage().read, 2 * BLOCK_BYTES)
    with units.lent(_unit(1)), units.lent(_unit(2)):
        assert _lent(units, _unit(3)) is None
    assert _lent(units, _unit(3)) is not None
    assert _lent(units, _unit(2)) is not None


def test_what_is_being_read_makes_no_room():
    storage = _Storage()
    storage.go_on.clear()
    units = KeptUnits(storage.read, BLOCK_BYTES)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(_lent, units, _unit(1))
        await_that(lambda: storage.reads == [1])
        assert _lent(units, _unit(2)) is None
        storage.go_on.set()
        assert first.result() is not None
    assert _lent(units, _unit(2)) is not None  # it had not gone


def test_a_unit_that_cannot_be_read_is_not_kept():
    storage = _Storage()
    units = KeptUnits(storage.read, BLOCK_BYTES)
    assert _lent(units, _unit(1000)) is None
    assert units.read_ahead(_unit(1001))
    assert units.gone == 2
    assert _lent(units, _unit(1)) is not None


@pytest.mark.parametrize("begun", [False, True])
def test_after_the_end_nothing_is_kept(begun):
    storage = _Storage()
    units = KeptUnits(storage.read, 8 * BLOCK_BYTES)
    if begun:
        assert _lent(units, _unit(1)) is not None
    units.clear()
    assert _lent(units, _unit(1)) is None
    assert _lent(units, _unit(2)) is None
    assert not units.read_ahead(_unit(3))
