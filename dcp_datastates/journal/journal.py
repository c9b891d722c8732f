"""The journal of a loop: a small record of each step, for the run that resumes from a checkpoint of this one.

``root/.datastates-journal/<run>-<rank>`` has the records of one rank in one run, 128 bytes each. The thread of the loop
samples the state; a thread in the background appends each record with one write, so a process that is killed loses
those that wait for it; and compares it with the run before (``audit.py``). No save and no restore relies on the files.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import struct
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from dcp_datastates._native import crc32c
from dcp_datastates.checkpoints.first_rank import DEFAULT_TIMEOUT, from_first_of
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.journal.audit import VARIABLE, Audit, Comparison, Order
from dcp_datastates.journal.state_samples import ON_HOST, Record, Stale, StateSamples
from dcp_datastates.process.futures import Worker
from dcp_datastates.process.job_log import once_per_job
from dcp_datastates.ranks.rank_set import RankSet
from dcp_datastates.storage import local
from dcp_datastates.storage.object_path import Location, stored

logger = logging.getLogger(__name__)

_FOLDER: Final = ".datastates-journal"
_NAME: Final = re.compile(r"([0-9a-f]{16})-[0-9]+")
_MAGIC: Final = b"DSJ1"
_FIELDS: Final = struct.Struct(f"<4sIQdQQQQ4x{2 * ON_HOST}s")
_CHECKSUM: Final = struct.Struct("<I")
_SIZE: Final = _FIELDS.size + _CHECKSUM.size
_KEPT_RUNS: Final = 3
_MOST_BYTES: Final = 4 << 20
"""How much of a file is read, from its end."""
_MOST_WAITING: Final = 1000
"""Records that wait for storage. Further ones are lost: training waits for none."""
_PATIENCE_SECONDS: Final = 30.0
_REPLACED: Final = (KeyError, RuntimeError, TypeError, ValueError)
"""What comes of tensors that the program has replaced since they were looked up, or whose memory it has freed."""


def pack(record: Record) -> bytes:
    """The bytes of a record."""
    *others, loader, tensors, _ = record
    data = _FIELDS.pack(_MAGIC, *others, loader or 0, tensors)
    return data + _CHECKSUM.pack(crc32c(data))


def records_in(path: Path) -> dict[int, Record]:
    """The newest records of a file by step; of a step that was repeated, the last. What is no record is left out, with
    a line in the log.
    """
    try:
        file = local.open_regular(path)
    except OSError as error:
        logger.info("no journal is read: %s", error)
        return {}
    with open(file, "rb") as opened:
        length = os.fstat(file).st_size
        opened.seek(max(0, length // _SIZE - _MOST_BYTES // _SIZE) * _SIZE)
        data = opened.read(_MOST_BYTES + _SIZE)
    found = {}
    for at in range(0, len(data) - _SIZE + 1, _SIZE):
        magic, *others, loader, tensors = _FIELDS.unpack_from(data, at)
        end = at + _FIELDS.size
        if magic != _MAGIC or _CHECKSUM.unpack_from(data, end) != (crc32c(data[at:end]),):
            logger.warning("%s is no record of a journal, or damaged, from byte %d on", path, at)
            break
        record = Record(*[*others, loader or None, tensors])
        found[record.step] = record
    if len(data) % _SIZE:
        logger.warning("%s: the last record is cut, and ignored", path)
    return found


class Journal:
    """The journal of one loop on this rank. The thread of the loop calls the methods; all ranks call them alike.

    Args:
        keeps: whether records are written. Without it, there is an audit only if ``dcp-datastates audit`` orders one.

    Raises :class:`ConfigurationError` if records cannot be written at ``root``.
    """

    def __init__(self, root: Location, rank_set: RankSet, keeps: bool) -> None:
        self._rank_set = rank_set
        self._order = Order.of_process(root)
        self._is_on = keeps or self.only_audits
        self._folder = Path(stored(root).folder or "") / _FOLDER
        if self._is_on and not stored(root).is_local:
            raise ConfigurationError(
                f"journal=True needs a directory as the root: nothing can be appended in the store of {str(root)!r}. "
                f"Pass a directory as the root, and archive={str(root)!r}; or leave journal=True out"
            )
        if self.only_audits:
            text = "%s is set: this loop is audited, and saves and deletes nothing in %s"
            logger.log(once_per_job(logging.WARNING), text, VARIABLE, root)
        self._samples = StateSamples(rank_set)
        self._stale = Stale(self._samples)
        self._worker = Worker("dcp_datastates-journal")
        self._room = threading.Semaphore(_MOST_WAITING)
        self._comparison: Comparison | None = None
        self._run: str | None = None
        self._until = 0
        """The last step that the run before has."""
        self._last: int | None = None
        self._file: int | None = None
        self._audited = 0
        self._lags = False

    @property
    def only_audits(self) -> bool:
        """Whether ``dcp-datastates audit`` has started this process: then nothing is saved or deleted."""
        return self._order is not None

    def resumed(self, step: int, state: Mapping[str, Any]) -> None:
        """The state of ``step`` was restored. Before the loop's first step: compare what follows. (A loop that goes
        back later may mean to do something else.)
        """
        self._stale.before = None
        if not self._is_on or self._last is not None:
            return
        former = self._begin(step)
        rank, world = self._rank_set.rank, self._rank_set.world
        records = records_in(self._folder / f"{former}-{rank}") if former else {}
        resized = any(each.world != world for each in records.values())
        later = {number: each for number, each in records.items() if number >= step}
        audit = Audit(rank, world, step, losses_only=resized)
        comparison = self._comparison = Comparison(audit, later, self._samples)
        sample = self._sample(state, step, math.nan, False)
        if sample is not None:
            comparison.words.append(self._samples.trained(state)[1])
            self._worker.post(lambda: comparison.restored(sample()))

    def _begin(self, after: int | None) -> str | None:
        """The first rank names this run, and the run to compare with: the newest that went on after ``after``."""

        def choose() -> list[Any]:
            names = [each.name for each in self._folder.glob("*-*")]
            runs = sorted({found[1] for name in names if (found := _NAME.fullmatch(name))})
            former: tuple[float, str | None, int] = math.inf, None, 0
            for run in reversed(runs) if after is not None else ():
                steps = records_in(self._folder / f"{run}-0")
                later = [each for each in steps if each > (after or 0)]
                if later and run != self._run and min(later) < former[0]:
                    former = min(later), run, max(later)
            for run in [] if self.only_audits else runs[: 1 - _KEPT_RUNS]:
                for path in self._folder.glob(f"{run}-*"):
                    path.unlink(missing_ok=True)
            newest = int(runs[-1], 16) if runs else 0
            return [self._run or f"{max(time.time_ns(), newest + 1):016x}", *former[1:]]

        purpose = "the name of the journal"
        chosen = from_first_of(self._rank_set, choose, "journal", purpose, DEFAULT_TIMEOUT)
        former: str | None
        self._run, former, self._until = chosen
        return former

    def note(self, step: int, state: Mapping[str, Any], metrics: Mapping[str, Any] | None) -> bool:
        """A step is done. Returns whether the loop is to end, since what was ordered is compared."""
        if not self._is_on or step == self._last:  # repeated by force
            return False
        if self._run is None:
            self._begin(None)
        self._last = step
        if self._room.acquire(blocking=False):
            self._post(step, state, _loss_in(metrics))
        elif not self._lags:
            self._lags = True
            logger.warning(
                "the journal of rank %d lacks steps: storage is too slow", self._rank_set.rank
            )
        self._audited += 1
        if self._order is None or (self._audited < self._order.steps and step < self._until):
            return False
        self._report()
        return True

    def _post(self, step: int, state: Mapping[str, Any], loss: float) -> None:
        sample = self._sample(state, step, loss, True)
        if sample is None:
            return
        if self._comparison is not None and len(self._comparison.words) == 1:
            self._comparison.words.append(self._samples.trained(state)[1])
        self._worker.post(lambda: self._take(sample))

    def saving(self, step: int, state: Mapping[str, Any]) -> None:
        """The save of a step is about to begin: warn if it has a frozen copy."""
        try:
            self._stale.saving(step, state, self._worker.post)
        except _REPLACED:
            self._samples.forget()

    def _sample(
        self, state: Mapping[str, Any], step: int, loss: float, loaders: bool
    ) -> Callable[[], Record] | None:
        try:
            with contextlib.suppress(*_REPLACED):
                return self._samples.at(state, step, loss, loaders)
            self._samples.forget()
            return self._samples.at(state, step, loss, loaders)
        except Exception as error:
            self._give_up(error)
            return None

    # ---- in the background ---------------------------------------------------------------------------

    def _take(self, sample: Callable[[], Record]) -> None:
        try:
            record = sample()
            if not self.only_audits:
                self._append(pack(record))
            if self._comparison is not None:
                self._comparison.add(record)
        except OSError as error:
            self._give_up(error)
        finally:
            self._room.release()

    def _append(self, data: bytes) -> None:
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(self._folder / f"{self._run}-{self._rank_set.rank}", flags, 0o644)
        if os.write(self._file, data) < len(data):
            raise OSError("the file system is full")

    def _give_up(self, error: Exception) -> None:
        is_first, self._is_on = self._is_on, False
        if is_first:  # further records may wait
            logger.warning("rank %d: the journal ends here: %s", self._rank_set.rank, error)

    # ---- the result, and the end ---------------------------------------------------------------------

    def result(self) -> Audit | None:
        """What was compared so far; None without a resume. Waits for the records of the steps that are done."""
        if self._comparison is None:
            return None
        self._worker.wait(_PATIENCE_SECONDS)
        return self._comparison.result

    def _report(self) -> None:
        if self._order is not None and (result := self.result()) is not None:
            self._order.report_of(result)

    def close(self) -> None:
        """Write what is in the queue."""
        self._report()
        if self._worker.close(_PATIENCE_SECONDS) and self._file is not None:
            os.close(self._file)
            self._file = None
        if self._comparison is not None:
            self._comparison.finish()
        self._samples.forget()


def _loss_in(metrics: Mapping[str, Any] | None) -> float:
    loss = (metrics or {}).get("loss", math.nan)
    if isinstance(loss, torch.Tensor) and not loss.is_cpu:
        return math.nan  # to ask would wait for the device
    try:
        return float(loss)
    except (TypeError, ValueError):
        return math.nan
