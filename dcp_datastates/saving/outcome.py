"""The line of the log that every save ends with."""

from __future__ import annotations

import logging
import time

from dcp_datastates.errors import CheckpointSkipped
from dcp_datastates.saving.call import SaveCall
from dcp_datastates.stats import SaveStats
from dcp_datastates.storage.object_path import Location

__all__ = ["log_outcome"]

logger = logging.getLogger(__name__)


def log_outcome(
    call: SaveCall, path: Location | None, stats: SaveStats, error: BaseException | None
) -> None:
    """Log the outcome of the save to ``path``: committed, or failed with ``error``."""
    seconds = time.monotonic() - call.began
    if error is None:
        level = logging.INFO if call.group.is_coordinator else logging.DEBUG
        logger.log(level, "%s", _committed(call, path, stats, seconds))
        return
    text = str(error) or type(error).__name__
    if not text.startswith("the save to "):
        text = f"the save to {str(path)!r} failed: {text}"
    level = logging.WARNING if isinstance(error, CheckpointSkipped) else logging.ERROR
    logger.log(level, "%s (%s, %.1f s after the call)", text, type(error).__name__, seconds)


def _committed(call: SaveCall, path: Location | None, stats: SaveStats, seconds: float) -> str:
    nbytes = stats.bytes_written or 0
    rate = nbytes / stats.total_seconds / 1e9 if stats.total_seconds else 0.0
    linked = f", linked {stats.bytes_linked / 2**20:.1f} MiB" if stats.bytes_linked else ""
    world = call.group.rank_set.world
    of = f" of {world} ranks" if world > 1 else ""
    stall = 1e3 * (stats.stage_seconds + stats.gate_seconds)
    waited = f", training waited {stall:.1f} ms" if call.asynchronous else ""
    return (
        f"committed {str(path)!r}{of} in {seconds:.2f} s; this rank wrote {nbytes / 2**20:.1f} MiB "
        f"({rate:.2f} GB/s){linked}{waited}"
    )
