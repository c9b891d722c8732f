"""The timeline of a checkpoint's save over its ranks: as records, and as a trace for Perfetto."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from dcp_datastates.errors import DataStatesError, UnreadableMetadataError
from dcp_datastates.format import save_trace
from dcp_datastates.io.committed import open_committed
from dcp_datastates.results import SaveRecord
from dcp_datastates.storage.object_path import ObjectPath, locate


def trace_of(
    path: str | os.PathLike[str] | ObjectPath, storage_options: Mapping[str, Any] | None = None
) -> list[SaveRecord]:
    """What each rank's part of the save of the checkpoint at ``path`` cost, in the order of the ranks.

    The records end at the publication of the metadata. Times of day are those of each rank's machine.

    Raises:
        CheckpointNotFoundError, StorageError: there is no checkpoint, or it cannot be read.
        DataStatesError: it has no trace.
    """
    place = locate(path, options=storage_options)
    found = open_committed(place)
    note = found.note
    if note.trace is None:
        raise DataStatesError(f"{place} has no trace: it was converted from another format")
    try:
        return save_trace.records(note.trace, str(place), note.attempt.name, note.published_at)
    except ValueError as error:
        raise UnreadableMetadataError(f"{place}: its trace cannot be read: {error}") from error


_TRAINING: Final = 0
_SAVE: Final = 1
_LANES: Final = {_TRAINING: "training is held", _SAVE: "save"}
_CALL: Final = "held in the call"
_GATE: Final = "held at the gate"


def _spans(record: SaveRecord) -> list[tuple[int, str, float, float]]:
    """Lane, name, begin and end, in seconds from the call. The spans of a lane do not overlap."""
    spans = []
    at = 0.0
    for phase, seconds in record.phases.items():
        spans.append((_SAVE, phase, at, at + seconds))
        at += seconds
    spans.append((_TRAINING, _CALL, 0.0, record.call_seconds))
    if record.gated_after is not None:
        began = max(record.gated_after, record.call_seconds)
        spans.append((_TRAINING, _GATE, began, began + record.gate_seconds))
    return spans


def chrome_trace(records: Sequence[SaveRecord]) -> dict[str, Any]:
    """The records in Chrome's trace format, for Perfetto: a process for each rank, a thread for the save, and one for
    the waits of training. Times count from the first call.
    """
    first = min(record.began_at for record in records)
    events: list[dict[str, Any]] = []
    for record in records:
        rank = {"pid": record.rank}
        named = {"ph": "M", **rank, "name": "process_name"}
        events.append({**named, "args": {"name": f"rank {record.rank}"}})
        named = {"ph": "M", **rank, "name": "process_sort_index"}
        events.append({**named, "args": {"sort_index": record.rank}})
        for lane, name in _LANES.items():
            named = {"ph": "M", **rank, "tid": lane, "name": "thread_name"}
            events.append({**named, "args": {"name": name}})
        for lane, name, begin, end in _spans(record):
            # Whole microseconds: spans that meet must not overlap by a rounding.
            since, until = (round(1e6 * (record.began_at - first + each)) for each in (begin, end))
            if until > since:
                span = {"ph": "X", **rank, "tid": lane, "cat": _LANES[lane], "name": name}
                args = _arguments(record, name)
                events.append({**span, "ts": since, "dur": until - since, "args": args})
    about = {"path": records[0].path, "attempt": records[0].attempt, "began_at": first}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _arguments(record: SaveRecord, span: str) -> dict[str, float]:
    match span:
        case "call":
            return {"bytes": record.eager_bytes, "room_seconds": record.room_seconds}
        case "reading":
            rate = {"bytes_per_second": record.read_rate, "cache_seconds": record.cache_seconds}
            return {"bytes": record.deferred_bytes, **rate}
        case "flushing":
            return {"bytes": record.written_bytes, "bytes_per_second": record.write_rate}
    return {}
