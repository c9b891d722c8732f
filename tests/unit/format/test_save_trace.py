"""The ranks' times in the metadata: packed, joined, read again."""

import dataclasses
import json

import pytest

from dcp_datastates.format.save_trace import ENTRY_BYTES, join, pack, records
from dcp_datastates.results import PHASES, SaveRecord

PACKED = list(PHASES)[:7]


def _record(rank, **fields):
    phases = {phase: 0.25 * (1 + number) for number, phase in enumerate(PACKED)}
    return SaveRecord(
        path="/ckpt/step-9",
        step=9,
        rank=rank,
        world=2,
        api="",
        attempt="a-1",
        outcome="committed",
        error=None,
        began_at=1e9 + rank,
        seconds=sum(phases.values()),
        phases=phases,
        **fields,
    )


def _read(entries, counted_at=1e9 + 10, published_at=1e9 + 12):
    return records(join(entries, counted_at), "/ckpt/step-9", "a-1", published_at)


def test_an_entry_is_small_whatever_it_holds():
    assert len(pack(_record(0, written_bytes=2**62, gated_after=1e9))) == ENTRY_BYTES < 256


def test_what_was_packed_comes_back_with_what_the_coordinator_knows():
    given = _record(
        1,
        call_seconds=0.5,
        gate_seconds=0.125,
        gated_after=4.0,
        room_seconds=0.25,
        cache_seconds=3.0,
        eager_bytes=1,
        deferred_bytes=2**40,
        written_bytes=2**41,
        read_rate=2.0**30,
        write_rate=2.0**29,
    )
    first, second = _read([pack(_record(0)), pack(given)])
    flushed = sum(given.phases.values()) - given.phases["voting"]
    expected = {**given.phases, "voting": 10 - 1 - flushed, "publishing": 2.0}
    assert second == dataclasses.replace(given, phases=expected, seconds=12.0 - 1.0)
    assert first.gated_after is None
    assert first.began_at + first.seconds == second.began_at + second.seconds == 1e9 + 12


def test_clocks_that_differ_make_no_phase_negative():
    (ahead,) = _read([pack(_record(0))], counted_at=1e9 - 5, published_at=1e9 - 6)
    assert ahead.phases["voting"] == 0.25 * len(PACKED)
    assert ahead.phases["publishing"] == 0
    assert sum(ahead.phases.values()) == ahead.seconds


def test_the_joined_entries_are_plain_json_and_grow_by_their_size_in_base64():
    one, many = (json.dumps(join([pack(_record(0))] * count, 1.0)) for count in (300, 3300))
    assert len(many) - len(one) == 3000 * ENTRY_BYTES * 4 / 3


def test_without_all_ranks_there_is_none():
    assert join([], 1.0) is None
    assert join([pack(_record(0)), b""], 1.0) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda trace: None,
        lambda trace: [trace],
        lambda trace: {**trace, "version": 1},
        lambda trace: {**trace, "ranks": 3},
        lambda trace: {**trace, "ranks": trace["ranks"][:-4]},
        lambda trace: {**trace, "ranks": "§" + trace["ranks"][1:]},
        lambda trace: {key: value for key, value in trace.items() if key != "counted_at"},
    ],
)
def test_what_it_has_not_written_is_refused(damage):
    with pytest.raises(
        ValueError,
        match=r"version|missing|unpack|base64|Incorrect|buffer|padding|multiple|ASCII|string",
    ):
        records(damage(join([pack(_record(0))], 1.0)), "c", "a", 1.0)
