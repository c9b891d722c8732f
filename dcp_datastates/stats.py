"""What one save cost, as measured on this rank."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SaveStats"]


@dataclass
class SaveStats:
    """Statistics of one save on this rank. Times are in seconds, sizes in bytes; None means not known yet.

    Attributes:
        stage_seconds: Time in the call of ``async_save`` (0 for a synchronous save that DCP runs).
        gate_seconds: Time for which ``optimizer.step()`` waited for this save's reads.
        eager_bytes: Bytes copied at the call.
        deferred_bytes: Bytes read after the call.
        bytes_written: The size of this rank's files.
        bytes_linked: With ``reuse="unchanged"``: bytes of tensors that a former checkpoint's files hold, and which were
            not written.
        read_seconds: Time from the opening of the read window to the last read.
        total_seconds: Time from the opening of the read window to durable files.
        direct: Whether all files were written past the page cache (O_DIRECT).
        steady: Whether the save used a cached plan and layout (:class:`DataStatesSavePlanner`).
    """

    stage_seconds: float = 0.0
    gate_seconds: float = 0.0
    eager_bytes: int = 0
    deferred_bytes: int = 0
    bytes_written: int | None = None
    bytes_linked: int = 0
    read_seconds: float | None = None
    total_seconds: float | None = None
    direct: bool | None = None
    steady: bool | None = None
