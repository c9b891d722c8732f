"""What becomes known at the end of a load: its record, which goes to the log and to listeners; and a progress bar."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Final

from dcp_datastates.process.futures import Listeners
from dcp_datastates.process.job_log import once_per_job
from dcp_datastates.process.progress_bar import progress_bar
from dcp_datastates.ranks.rank_set import RankSet
from dcp_datastates.results import LOAD_PHASES, LoadRecord, Timeline
from dcp_datastates.storage.object_path import Location
from dcp_datastates.text import step_of

logger = logging.getLogger(__name__)

_BAR_SECONDS: Final = 1.0
"""A load that takes less shows no bar."""
_NO_BAR: Final = "DCP_DATASTATES_NO_PROGRESS"
"""The environment variable that turns bars off."""

listeners: Final[Listeners[LoadRecord]] = Listeners()


def on_load(listener: Callable[[LoadRecord], object]) -> Callable[[], None]:
    """Call ``listener`` with the :class:`LoadRecord` of each load of this process, after its end. As :func:`on_save`.

    Returns:
        A function that ends this.
    """
    return listeners.add_of_user(listener)


class Account:
    """What one load has done on this rank so far. The loading thread uses it."""

    def __init__(self, path: Location, verb: str, rank_set: RankSet) -> None:
        self.timeline: Final = Timeline(phases=LOAD_PHASES)
        self.attempt: str | None = None
        self.asked_bytes = 0
        """What is to be read, once that is known."""
        self._path, self._verb, self._rank_set = path, verb, rank_set
        self._read_bytes = 0
        self._shown = contextlib.ExitStack()

    def count(self, nbytes: int) -> None:
        """So many bytes more have been read."""
        self._read_bytes += nbytes
        if self.timeline.seconds >= _BAR_SECONDS and self._bar is not None:
            self._bar(self._read_bytes, self.asked_bytes)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Makes the record of the load within, at its end."""
        error: BaseException | None = None
        try:
            with self._shown:
                yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            self.timeline.end()
            if error is not None or self.attempt is not None:  # else nothing was there to load
                self._conclude(error)

    @functools.cached_property
    def _bar(self) -> Callable[[int, int], None] | None:
        quiet = self._rank_set.rank != 0 or bool(os.environ.get(_NO_BAR))
        return self._shown.enter_context(progress_bar("loading", self._path.name, quiet))

    def _conclude(self, error: BaseException | None) -> None:
        path, timeline = str(self._path), self.timeline
        phases = timeline.phases()
        record = LoadRecord(
            path=path,
            step=step_of(path),
            rank=self._rank_set.rank,
            world=self._rank_set.world,
            api=self._verb,
            attempt=self.attempt,
            error=None if error is None else f"{type(error).__name__}: {error}",
            began_at=timeline.began_at,
            seconds=timeline.seconds,
            phases=phases,
            read_bytes=self._read_bytes,
            read_rate=self._read_bytes / phases["read"] if phases.get("read") else 0.0,
        )
        # The caller has the error.
        is_said = error is None and record.rank == 0
        level = once_per_job(logging.INFO) if is_said else logging.DEBUG
        logger.log(level, "%s", _described(record), extra={"load_record": record})
        listeners.tell(record)


def _described(record: LoadRecord) -> str:
    if record.error is not None:
        return f"{record.api} of {record.path} failed after {record.seconds:.2f} s: {record.error}"
    done = "loaded" if record.api == "load()" else "restored"
    of = f" on {record.world} ranks" if record.world > 1 else ""
    phases = {phase: s for phase, s in record.phases.items() if not phase.startswith("wait_")}
    if record.world > 1:
        phases["waiting"] = record.wait_seconds
    spent = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in phases.items())
    return (
        f"{done} {record.path}{of} in {record.seconds:.2f} s; this rank read {record.read_bytes / 2**20:.1f} MiB "
        f"({record.read_rate / 1e9:.2f} GB/s): {spent}"
    )
