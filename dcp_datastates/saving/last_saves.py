"""A process finishes its last saves before it ends, and before it destroys its process groups."""

from __future__ import annotations

import logging
import time

from dcp_datastates.process.ending import Phase, at_end
from dcp_datastates.process.waiting import WaitLog
from dcp_datastates.saving.admission import in_flight
from dcp_datastates.saving.operation import SaveOperation

__all__ = ["finish_saves"]

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_FIRST_LINE_SECONDS = 3.0


def finish_saves() -> None:
    """Wait until no save is in flight, for each save at most its ``exit_timeout``.

    A save that is not over by then fails, which is logged. Never raises.
    """
    began = time.monotonic()
    log = WaitLog(logger, "the end of this process", _FIRST_LINE_SECONDS)
    while saves := in_flight():
        oldest = saves[0]
        waited = time.monotonic() - began
        if waited >= oldest.exit_timeout:
            oldest.give_up(f"the process ends, and has waited for {waited:.0f} s: {oldest.doing}")
            continue
        oldest.wait_briefly(min(_POLL_SECONDS, oldest.exit_timeout - waited))
        log.look("; ".join(f"{_named(save)} ({save.doing})" for save in saves[:3]))


def _named(save: SaveOperation) -> str:
    return f"the save to {str(save.path)!r}"


at_end(finish_saves, Phase.FINISH)
