"""Verifies a committed checkpoint: every stored byte, and that its parts agree."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dcp_datastates.checkpoints.examine import examine, examine_copies
from dcp_datastates.errors import CheckpointCorruptError
from dcp_datastates.format.contents import Damage
from dcp_datastates.io.committed import open_committed, replacement
from dcp_datastates.process.forks import public
from dcp_datastates.process.work import Progress, thread_count
from dcp_datastates.storage import attempts, local
from dcp_datastates.storage.object_path import AnyPath, Location, locate, stored
from dcp_datastates.text import count, size


@dataclass(frozen=True)
class Report:
    """The result of :func:`verify`. Sizes are bytes."""

    path: Location
    attempt: str | None
    """The committed attempt; None if the metadata are damaged."""
    files: int
    nbytes: int
    """The expected size of ``.metadata`` and all data files."""
    tensors: int
    objects: int
    seconds: float
    damages: tuple[Damage, ...]
    """All damages, by file and offset; neighbouring blocks form one damage."""

    @property
    def whole(self) -> bool:
        return not self.damages

    def __repr__(self) -> str:
        return f"Report({str(self).splitlines()[0]})"

    def __str__(self) -> str:
        """The verdict, the extent of the check, and each damage, one line each."""
        verdict = "whole" if self.whole else f"damaged in {count(len(self.damages), 'place')}"
        lines = [f"{self.path}: {verdict}"]
        if self.attempt is not None:
            lines.append(
                f"  {count(self.files, 'file')}, {count(self.tensors, 'tensor')}, "
                f"{count(self.objects, 'object')}: {size(self.nbytes)} in {self.seconds:.1f} s"
            )
            if self.whole and self.seconds > 0:
                lines[-1] += f" ({size(self.nbytes / self.seconds)}/s)"
        return "\n".join([*lines, *(f"  {damage}" for damage in self.damages)])


@public("verify()")
def verify(
    path: AnyPath,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Report:
    """Check every stored byte of the checkpoint committed at ``path``, and that its parts agree.

    Args:
        path: Directory of the checkpoint, or its URL.
        threads: How many threads read and compute checksums; None for one per core, at most 8.
        progress: Called in the calling thread, about ten times per second and once at the end, with the bytes done and
            the total bytes.
        storage_options: fsspec's options for a URL.

    Returns:
        A report with all damage. Damage does not raise. On nodes (``node://``, ``ram://``), every copy of each file is
        read. Damage that another copy mends is in the log, and not in the report.

    Raises:
        CheckpointNotFoundError: no checkpoint is there (:class:`ForeignCheckpointError`: one of stock DCP is).
        StorageError: it cannot be read, for example without permission.
        CheckpointReplacedError: another save committed there meanwhile.
        ConfigurationError: an argument cannot work.
    """
    directory = locate(path, options=storage_options)
    threads = thread_count(threads)
    began = time.monotonic()
    try:
        committed = open_committed(directory)
    except CheckpointCorruptError as error:
        return _unopened(directory, error, time.monotonic() - began)
    damages = examine(directory, committed, threads, progress)
    if damages and (replaced := replacement(directory, committed.note.attempt, "verify")):
        raise replaced  # the damage seen is not real
    if not damages:
        examine_copies(directory, committed, threads)
    tensors = int((committed.table.catalog.properties >= 0).sum())
    return Report(
        path=directory,
        attempt=committed.note.attempt.name,
        files=len(committed.note.files),
        nbytes=committed.nbytes,
        tensors=tensors,
        objects=len(committed.table.catalog.names) - tensors,
        seconds=time.monotonic() - began,
        damages=tuple(damages),
    )


def _unopened(directory: Location, error: CheckpointCorruptError, seconds: float) -> Report:
    problem = f"{error}; which data files belong to the checkpoint is unknown, so none was checked"
    damage = Damage(local.METADATA_NAME, None, None, problem, ())
    nbytes = 0
    with contextlib.suppress(OSError):
        found = attempts.newest_committed(stored(directory))
        nbytes = 0 if found is None else len(found[1])
    return Report(directory, None, 0, nbytes, 0, 0, seconds, (damage,))
