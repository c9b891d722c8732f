"""The record of a save: one for each, whatever comes of it, and with every API."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from support.crashes.failing import armed
from support.state.checkpoints import CACHE, async_save, save, writer
from support.state.loops import owned
from support.state.metadata import parts_of
from support.waiting import await_that

import dcp_datastates
from dcp_datastates import CheckpointManager
from dcp_datastates.commit.group import commit_group
from dcp_datastates.config import WriterConfig
from dcp_datastates.errors import (
    CommitOutcomeUnknown,
    StorageError,
)
from dcp_datastates.process.futures import finish_callbacks
from dcp_datastates.ranks.rank_set import ALONE
from dcp_datastates.results import PHASES, SaveStats, Timeline
from dcp_datastates.saving import start
from dcp_datastates.saving.operation import SaveOperation
from dcp_datastates.saving.outcome import SaveOrigin

STATE = {"w": torch.arange(100_000.0)}


@contextmanager
def recorded():
    """The records of the saves meanwhile: all of them, after the block."""
    records = []
    stop = dcp_datastates.on_save(records.append)
    try:
        yield records
        assert finish_callbacks(30)
    finally:
        stop()


def _by_package(path):
    dcp_datastates.async_save(STATE, path, host_cache_size=CACHE).result()


def _by_manager(path):
    with CheckpointManager(path.parent, every=1, host_cache_size=CACHE) as manager:
        manager.save(7, STATE)


APIS = {
    "async_save": ("dcp_datastates.async_save", _by_package),
    "dcp.save": ("dcp.save", lambda path: save(STATE, path)),
    "dcp.async_save": ("dcp.async_save", lambda path: async_save(STATE, path).result(60)),
    "manager": ("dcp_datastates.async_save", _by_manager),
}


@pytest.mark.parametrize("name", APIS)
def test_each_api_leaves_one_record_whose_phases_add_up(name, tmp_path):
    api, call = APIS[name]
    with recorded() as records:
        call(tmp_path / "step-7")
        await_that(lambda: records)
    (record,) = records
    assert (record.path, record.step) == (str(tmp_path / "step-7"), 7)
    assert (record.rank, record.world, record.api) == (0, 1, api)
    assert (record.outcome, record.error) == ("committed", None)
    assert (tmp_path / "step-7" / record.attempt).is_dir()
    assert list(record.phases) == list(PHASES)
    assert min(record.phases.values()) >= 0
    assert sum(record.phases.values()) == pytest.approx(record.seconds, rel=1e-9)
    assert record.written_bytes > 400_000
    assert record.eager_bytes + record.deferred_bytes == 400_000
    assert record.write_rate > 0
    assert record.read_rate > 0
    held = record.seconds if name == "dcp.save" else record.phases["call"]
    assert record.call_seconds == pytest.approx(held, abs=0.01)
    assert record.stall_seconds == record.call_seconds


def test_the_wait_at_the_gate_is_in_the_record(tmp_path):
    state, optimizer = owned()
    handle = dcp_datastates.async_save(state, tmp_path / "c", reads=3600, host_cache_size=CACHE)
    assert handle.record is None
    optimizer.step()
    handle.result()
    record = handle.record
    assert record.gate_seconds > 0
    assert record.gated_after >= record.call_seconds
    assert record.stall_seconds == record.call_seconds + record.gate_seconds
    assert record.deferred_bytes == 4_000_000


def test_the_wait_for_the_window_is_not_taken_for_reading(tmp_path):
    state, _optimizer = owned()
    handle = dcp_datastates.async_save(state, tmp_path / "c", reads=3600, host_cache_size=CACHE)
    await_that(lambda: "reading" in repr(handle))
    handle.result()  # opens it
    assert handle.record.phases["reading"] == pytest.approx(handle.stats.read_seconds, abs=1e-3)
    assert handle.record.phases["window"] > 0


def test_a_cache_that_is_smaller_than_the_state_shows_in_the_record(tmp_path):
    """The copies wait for the writes."""
    state, _optimizer = owned()
    with armed("flush.write.before=sleep:0.1", natively=True):
        handle = dcp_datastates.async_save(
            {str(number): torch.ones(16 << 20) for number in range(2)} | state,
            tmp_path / "c",
            host_cache_size="32MiB",
            reads="all",
        )
        handle.result()
    assert handle.record.cache_seconds > 0.01


def test_a_failed_save_has_a_record_with_its_error(tmp_path):
    with recorded() as records, armed("publish.write.before=error:ENOSPC"):
        handle = dcp_datastates.async_save(STATE, tmp_path / "step-3", host_cache_size=CACHE)
        with pytest.raises(StorageError):
            handle.result()
        await_that(lambda: records)
    (record,) = records
    assert record is handle.record
    assert record.outcome == "failed"
    assert record.error.startswith("StorageError: ")
    assert record.step == 3
    assert sum(record.phases.values()) == pytest.approx(record.seconds, rel=1e-9)


def test_a_call_that_waits_for_earlier_saves_says_for_how_long(tmp_path):
    state, _optimizer = owned()
    by = writer(reads=3600, max_in_flight=1)
    dcp_datastates.async_save(state, tmp_path / "a", writer=by)
    handle = dcp_datastates.async_save(state, tmp_path / "b", writer=by)
    handle.result()
    assert 0 < handle.record.room_seconds <= handle.record.call_seconds


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        (lambda save: save.give_up("enough"), "abandoned"),
        (lambda save: save.end(), "abandoned"),
        (lambda save: save.fail(CommitOutcomeUnknown("who knows")), "unknown"),
        (lambda save: save.fail(KeyboardInterrupt()), "failed"),
    ],
)
def test_a_save_that_ends_early_has_one_record(end, outcome, tmp_path):
    with recorded() as records:
        config, path = WriterConfig(64 << 20), tmp_path / "a"
        group, stats = commit_group(ALONE), SaveStats()
        ended = SaveOperation(group, config, SaveOrigin.DCP, path, stats, {})
        ended.begin()
        end(ended)
        ended.end()
        ended.give_up("once more")
    assert [record.outcome for record in records] == [outcome]
    assert ended.record is records[0]


class _Failing:
    def state_dict(self):
        raise KeyError("not now")

    def load_state_dict(self, state):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("call", "state", "options", "error"),
    [
        (dcp_datastates.async_save, STATE, {"overwrite": False}, "CheckpointExistsError"),
        (dcp_datastates.async_save, {"o": _Failing()}, {}, "KeyError"),
        (dcp_datastates.async_save, STATE, {"no_such": 1}, "ConfigurationError"),
        (async_save, STATE, {"overwrite": False}, "CheckpointExistsError"),
    ],
)
def test_a_call_that_raises_leaves_one_record(call, state, options, error, tmp_path, caplog):
    save(STATE, tmp_path / "c")
    with (
        recorded() as records,
        caplog.at_level(logging.DEBUG, "dcp_datastates.saving.outcome"),
        pytest.raises(Exception, match=r"overwrite|not now|no_such") as raised,
    ):
        call(state, tmp_path / "c", **options).result()
    assert type(raised.value).__name__ == error
    (record,) = records
    assert record.outcome == "failed"
    assert record.api.startswith("dcp.") == (call is async_save)
    assert record.error.startswith(error)
    (line,) = (each for each in caplog.records if each.name.startswith("dcp_datastates"))
    assert line.save_record is record


def test_a_call_that_is_interrupted_when_its_save_has_begun_leaves_one_record(
    tmp_path, monkeypatch
):
    def interrupt(save):
        raise KeyboardInterrupt

    monkeypatch.setattr(start, "enter", interrupt)
    with recorded() as records, pytest.raises(KeyboardInterrupt):
        dcp_datastates.async_save(STATE, tmp_path / "c", host_cache_size=CACHE)
    assert [record.error for record in records] == ["KeyboardInterrupt: "]


def test_a_listener_that_raises_hides_no_record_from_the_others(tmp_path, caplog):
    def refuse(record):
        raise KeyError(record.step)

    stop = dcp_datastates.on_save(refuse)
    try:
        with recorded() as records:
            for step in range(3):
                dcp_datastates.save(STATE, tmp_path / f"step-{step}", host_cache_size=CACHE)
            await_that(lambda: len(records) == 3)
    finally:
        stop()
    assert [record.step for record in records] == [0, 1, 2]
    assert sum("a callback" in line.getMessage() for line in caplog.records) == 3
    with recorded() as records:
        dcp_datastates.save(STATE, tmp_path / "step-3", host_cache_size=CACHE)
        await_that(lambda: records)
    assert sum("a callback" in line.getMessage() for line in caplog.records) == 3


def test_the_record_is_there_when_the_result_is(tmp_path):
    """Whichever thread comes first makes it, once."""
    for number in range(5):
        handle = dcp_datastates.async_save(STATE, tmp_path / str(number), host_cache_size=CACHE)
        handle.result()
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _, handle=handle: handle.record, range(4)))
        assert {id(each) for each in found} == {id(handle.record)}


def test_a_record_costs_the_same_whatever_the_number_of_tensors(tmp_path, monkeypatch):
    """A phase is noted once, and the checkpoint's trace has one size."""
    noted = []
    begin = Timeline.begin
    monkeypatch.setattr(
        Timeline, "begin", lambda *given, **named: noted.append(given[1]) or begin(*given, **named)
    )
    counts, sizes = [], []
    for number in (1, 500):
        noted.clear()
        state = {str(each): torch.ones(10) for each in range(number)}
        dcp_datastates.save(state, tmp_path / str(number), host_cache_size=CACHE)
        counts.append(len(noted))
        sizes.append(len(json.dumps(parts_of(tmp_path / str(number)).document["trace"])))
    assert counts[0] == counts[1] <= 2 * len(PHASES)
    assert abs(sizes[0] - sizes[1]) < 10  # a number may have fewer digits
    assert max(sizes) < 400
