"""What each rank's part of a save cost, in the metadata of the checkpoint: 88 bytes for each rank.

A rank packs its :class:`~dcp_datastates.results.SaveRecord` when it votes, so the entry ends with its files on stable
storage. The coordinator adds when it had counted the votes. The metadata have the time of their publication. What comes
later is in no checkpoint: the publication itself, and how the ranks learn of it.

In the document of ``.metadata``, ``trace`` is a dict of ``version`` (2), ``counted_at`` (seconds since the epoch, by
the coordinator's clock) and ``ranks``: the entries of all ranks in order, in base64. An entry is little-endian:

====== ======== =========================================================================
bytes
====== ======== =========================================================================
8      double   time of the call, in seconds since the epoch by the rank's clock
28     7 float  seconds of the first seven phases of ``PHASES``
16     4 float  seconds in the call, at the gate, waiting for room, waiting for the cache
4      float    seconds from the call to the first wait at the gate; NaN if there was none
8      2 float  bytes per second that were read and written
24     3 int64  bytes copied at the call, read later, written
====== ======== =========================================================================
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
from collections.abc import Sequence
from typing import Any, Final

from dcp_datastates.results import PHASES, SaveRecord
from dcp_datastates.text import step_of

_VERSION: Final = 2
_ENTRY: Final = struct.Struct("<d14f3q")
_PACKED: Final = tuple(PHASES)[:7]
_COSTS: Final = (
    *("call_seconds", "gate_seconds", "room_seconds", "cache_seconds", "gated_after"),
    *("read_rate", "write_rate", "eager_bytes", "deferred_bytes", "written_bytes"),
)
"""The attributes of a record that an entry has after the phases."""
ENTRY_BYTES: Final = _ENTRY.size


def pack(record: SaveRecord) -> bytes:
    """A rank's entry."""
    costs = [getattr(record, name) for name in _COSTS]
    return _ENTRY.pack(
        record.began_at,
        *(record.phases.get(phase, 0.0) for phase in _PACKED),
        *(math.nan if cost is None else cost for cost in costs),
    )


def join(entries: Sequence[bytes], counted_at: float) -> dict[str, Any] | None:
    """The value in the document, of all ranks' entries; None if a rank has sent none."""
    if {len(entry) for entry in entries} != {ENTRY_BYTES}:
        return None
    ranks = base64.b64encode(b"".join(entries)).decode()
    return {"version": _VERSION, "counted_at": counted_at, "ranks": ranks}


def records(trace: Any, path: str, attempt: str, published_at: float) -> list[SaveRecord]:
    """All ranks' records, up to the publication. ValueError: ``trace`` is not from :func:`join`."""
    if not isinstance(trace, dict) or trace.get("version") != _VERSION:
        raise ValueError("it is of another version")
    counted_at, encoded = trace.get("counted_at"), trace.get("ranks")
    if not isinstance(counted_at, float) or not isinstance(encoded, str):
        raise ValueError("a part is missing")
    try:
        packed = base64.b64decode(encoded, validate=True)
        entries = list(_ENTRY.iter_unpack(packed))
    except (binascii.Error, struct.error) as error:
        raise ValueError(str(error)) from None
    found = []
    for rank, (began_at, *numbers) in enumerate(entries):
        phases = dict(zip(_PACKED, numbers, strict=False))
        costs: dict[str, Any] = dict(zip(_COSTS, numbers[len(_PACKED) :], strict=True))
        if math.isnan(costs["gated_after"]):
            costs["gated_after"] = None
        # Clocks of several machines differ: no phase is negative for that.
        last = _PACKED[-1]
        so_far = sum(phases.values()) - phases[last]
        phases[last] = max(phases[last], counted_at - began_at - so_far)
        phases["publishing"] = max(0.0, published_at - counted_at)
        found.append(
            SaveRecord(
                path=path,
                step=step_of(path),
                rank=rank,
                world=len(entries),
                api="",
                attempt=attempt,
                outcome="committed",
                error=None,
                began_at=began_at,
                seconds=sum(phases.values()),
                phases=phases,
                **costs,
            )
        )
    return found
