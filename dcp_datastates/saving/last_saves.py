"""A process finishes its last saves before it ends, and before it destroys its process groups."""

from __future__ import annotations

import logging
import time

from dcp_datastates.process.callbacks import finish_callbacks
from dcp_datastates.process.ending import Phase, at_end
from dcp_datastates.process.waiting import WaitLog
from dcp_datastates.saving.admission import in_flight
from dcp_datastates.saving.operation import SaveOperation

__all__ = ["finish_saves"]

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_FIRST_LINE_SECONDS = 3.0
_CALLBACK_SECONDS = 10.0


def finish_saves() -> None:
    """Wait until no save is in flight, for each save at most its ``exit_timeout``, and until callbacks have run, for a
    bounded time. Callbacks may save.

    A save that is not over by then fails, which is logged. Never raises.
    """
    _finish_in_flight()
    if not finish_callbacks(_CALLBACK_SECONDS):
        logger.warning(
            "callbacks of saves still run after %g s: the process goes on without them",
            _CALLBACK_SECONDS,
        )
    _finish_in_flight()


def _finish_in_flight() -> None:
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
