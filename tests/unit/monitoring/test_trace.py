"""The timeline of a checkpoint's save: read from its metadata, as a trace for Perfetto."""

import json

import pytest
import torch
from support.state.checkpoints import CACHE, raises, save
from support.state.metadata import rewritten

import dcp_datastates
from dcp_datastates.errors import CheckpointNotFoundError, DataStatesError, UnreadableMetadataError
from dcp_datastates.monitoring import chrome_trace, trace_of
from dcp_datastates.results import PHASES, SaveRecord

STATE = {"w": torch.arange(100_000.0)}


def _record(rank, began_at=0.0, **fields):
    phases = dict.fromkeys(list(PHASES)[:8], 0.5)
    return SaveRecord(
        *("/ckpt/step-9", 9, rank, 3, "", "a-1", "committed", None, 1e9 + began_at, 4.0, phases),
        **fields,
    )


def test_the_trace_of_a_checkpoint_is_its_record_up_to_the_publication(tmp_path):
    handle = dcp_datastates.async_save(STATE, tmp_path / "step-4", host_cache_size=CACHE)
    handle.result()
    (found,) = trace_of(tmp_path / "step-4")
    record = handle.record
    assert (found.path, found.step, found.rank, found.world) == (record.path, 4, 0, 1)
    assert (found.attempt, found.began_at) == (record.attempt, record.began_at)
    assert list(found.phases) == list(PHASES)[:8]
    for phase in list(PHASES)[:6]:
        assert found.phases[phase] == pytest.approx(record.phases[phase], rel=1e-6)
    assert found.seconds <= record.seconds + 0.1
    assert found.written_bytes == record.written_bytes
    assert found.write_rate == pytest.approx(record.write_rate)


def test_a_copy_has_the_trace_of_the_original(tmp_path):
    save(STATE, tmp_path / "a")
    dcp_datastates.copy(tmp_path / "a", tmp_path / "b")
    (first,), (second,) = trace_of(tmp_path / "a"), trace_of(tmp_path / "b")
    assert (first.phases, first.began_at) == (second.phases, second.began_at)


def test_where_there_is_none_the_error_says_so(tmp_path):
    with pytest.raises(CheckpointNotFoundError):
        trace_of(tmp_path / "c")
    save(STATE, tmp_path / "c")
    rewritten(tmp_path / "c", lambda parts: parts.document.update(trace=None))
    with raises(DataStatesError, "has no trace", "converted"):
        trace_of(tmp_path / "c")


def test_a_trace_of_another_version_spoils_only_the_trace(tmp_path):
    save(STATE, tmp_path / "c")
    rewritten(tmp_path / "c", lambda parts: parts.document["trace"].update(version=1))
    with pytest.raises(UnreadableMetadataError, match="trace"):
        trace_of(tmp_path / "c")
    state = {"w": torch.zeros(100_000)}
    dcp_datastates.load(tmp_path / "c", state)
    assert torch.equal(state["w"], STATE["w"])


def _spans(trace, rank, lane):
    """Name, begin and end of one lane's spans, in the order of their time."""
    spans = [
        (each["name"], each["ts"], each["ts"] + each["dur"])
        for each in trace["traceEvents"]
        if each["ph"] == "X" and (each["pid"], each["tid"]) == (rank, lane)
    ]
    return sorted(spans, key=lambda span: span[1])


def test_perfetto_gets_a_process_for_each_rank_and_spans_that_meet():
    records = [
        _record(0, 0.25, call_seconds=0.5, gate_seconds=1.0, gated_after=2.0),
        _record(1, 0.0, deferred_bytes=7, read_rate=3.5, written_bytes=9),
    ]
    trace = json.loads(json.dumps(chrome_trace(records)))
    names = {
        (each["pid"], each.get("tid"), each["name"]): each["args"]
        for each in trace["traceEvents"]
        if each["ph"] == "M"
    }
    assert names[1, None, "process_name"] == {"name": "rank 1"}
    assert names[1, None, "process_sort_index"] == {"sort_index": 1}
    assert names[0, 1, "thread_name"] == {"name": "save"}
    for rank, start in ((0, 250_000), (1, 0)):
        spans = _spans(trace, rank, lane=1)
        assert [name for name, _, _ in spans] == list(PHASES)[:8]
        assert (spans[0][1], spans[-1][2]) == (start, start + 4_000_000)
        assert [end for _, _, end in spans[:-1]] == [begin for _, begin, _ in spans[1:]]
    assert _spans(trace, 0, lane=0) == [
        ("held in the call", 250_000, 750_000),
        ("held at the gate", 2_250_000, 3_250_000),
    ]
    (reading,) = (
        each["args"]
        for each in trace["traceEvents"]
        if each["name"] == "reading" and each["pid"] == 1
    )
    assert reading == {"bytes": 7, "bytes_per_second": 3.5, "cache_seconds": 0.0}
    assert trace["otherData"] == {"path": "/ckpt/step-9", "attempt": "a-1", "began_at": 1e9}


def test_every_number_is_whole_so_that_no_span_overlaps_by_a_rounding():
    phases = {phase: 1 / 3e6 + number / 7e5 for number, phase in enumerate(list(PHASES)[:8])}
    record = SaveRecord(
        *("c", None, 0, 1, "", "a", "committed", None, 1e9, sum(phases.values()), phases)
    )
    spans = _spans(chrome_trace([record]), 0, lane=1)
    assert all(isinstance(time, int) for _, *times in spans for time in times)
    assert [end for _, _, end in spans[:-1]] == [begin for _, begin, _ in spans[1:]]
