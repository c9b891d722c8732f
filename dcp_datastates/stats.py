"""What one save cost, as measured on this rank."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SaveStats"]


@dataclass
class SaveStats:
    """Times in seconds, sizes in bytes; all of this rank only. What is not known yet is None.

    Attributes:
        stage_seconds: spent in ``stage()``, that is, in ``async_save`` (0 for a synchronous save).
        gate_seconds: that ``optimizer.step()`` waited for this save's reads.
        eager_bytes: copied inside ``stage()``.
        deferred_bytes: read later.
        bytes_written: sizes of this rank's files.
        read_seconds: from the opening of the read window to the last read.
        total_seconds: from the opening of the read window to durable files.
        direct: whether all files were written past the page cache (O_DIRECT).
        steady: whether all was laid out as in an earlier save, without planning (:class:`DataStatesSavePlanner`).
    """

    stage_seconds: float = 0.0
    gate_seconds: float = 0.0
    eager_bytes: int = 0
    deferred_bytes: int = 0
    bytes_written: int | None = None
    read_seconds: float | None = None
    total_seconds: float | None = None
    direct: bool | None = None
    steady: bool | None = None
