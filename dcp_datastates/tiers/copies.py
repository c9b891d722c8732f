"""Makes copies again, in the background: of what is damaged on a node, or missing there.

A file is missing if a node was lost and comes back empty, or another one comes in its place, or if sending it has
failed. What is committed comes back to its number of copies: each byte of a data file is compared with its checksum on
the way. Of the nodes that have a file whole, the first sends it. While the process stores data files of a save, it
sends little.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from dcp_datastates.checkpoints.copy import checked_pieces
from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ConfigurationError,
    DataStatesError,
)
from dcp_datastates.format.metadata_table import FileRecord
from dcp_datastates.io.committed import open_committed
from dcp_datastates.process.futures import Worker
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.attempts import DELETING, INDEX_NAME, committed_attempt, rank_of
from dcp_datastates.storage.decisions import decision_path
from dcp_datastates.storage.failpoints import hit
from dcp_datastates.storage.object_path import ObjectPath
from dcp_datastates.tiers import nodes
from dcp_datastates.tiers.node_store import NodeStore
from dcp_datastates.tiers.pace import Pace

logger = logging.getLogger(__name__)

_RATE: Final = 200e6
"""Bytes per second that a process reads and sends in the background, at most."""

_SAVE_SECONDS: Final = 1.0
"""For how long a piece of 8 MiB waits for a save in flight."""

_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 60.0
"""Between two tries, in seconds."""

_PATIENCE_SECONDS: Final = 3600.0
"""How long a file is tried whose checkpoint is not committed, or that a node does not take."""

_SETTLE_SECONDS: Final = 5.0
"""After which a small object that was copied is looked at again: it may have been deleted meanwhile."""

_LOOK_SECONDS: Final = 0.05


class Copies:
    """The copies of one store, in one job. Any thread calls the methods; they do not wait. Thread:
    ``dcp_datastates-copies``, which starts with the first work.
    """

    def __init__(self, store: NodeStore, job: nodes.NodesJob) -> None:
        self.store, self._job = store, job
        store.on_loss = self.add
        self._pace = Pace(_RATE)
        self._closing = threading.Event()
        self._worker = Worker("dcp_datastates-copies")
        self._pause = _FIRST_PAUSE
        self._lock = threading.RLock()  # guards _due
        self._due: dict[str, float] = {}  # by key: until when it is tried

    def add(self, key: str) -> None:
        """A copy of this object is damaged or missing."""
        with self._lock:
            if not self._due:
                self._post(self._mend)
            self._due.setdefault(key, time.monotonic() + _PATIENCE_SECONDS)

    def look(self, key: str) -> None:
        """The job uses the checkpoint, or the checkpoints, at ``key``."""
        self._post(lambda: self._look(key))

    def close(self) -> None:
        """Stop: the next start goes on. Idempotent."""
        self._closing.set()
        self._worker.finish()

    # ---- the thread --------------------------------------------------------------------------------

    def _post(self, work: Callable[[], object]) -> None:
        def run() -> None:
            with contextlib.suppress(_Ending):
                self._wait(0)
                work()

        self._worker.post(run)

    def _mend(self) -> None:
        """Send what is due, and what is not done once more after a pause."""
        done = []
        for key, ends_at in [*self._due.items()]:
            is_done = time.monotonic() > ends_at
            with self._tried(key):
                is_done |= self._send(key)
            if is_done:
                done.append(key)
        self._pause = _FIRST_PAUSE if done else min(2 * self._pause, _LONGEST_PAUSE)
        with self._lock:
            for key in done:
                del self._due[key]
            if not self._due:
                return
        self._wait(self._pause)
        self._post(self._mend)

    def _look(self, root: str) -> None:
        """Note the data files that lack copies, of the checkpoint at ``root`` or of those below it, and copy the small
        objects that do.
        """
        while not self._job.has_met:
            self._wait(_LOOK_SECONDS)
        copied = list[str]()
        with self._tried(root):
            if not self._job.nodes().is_first:
                return
            place = self._path(root)
            names = [each[:-1] for each in self.store.held_below(root) if each.endswith("/")]
            is_one = any(Attempt.parse(name) for name in names)
            for folder in [] if is_one else [place, place / INDEX_NAME]:
                self._spread(folder, copied)
            for path in [place] if is_one else [place / name for name in names]:
                # One that is damaged on all nodes keeps no other from its copies.
                with self._tried(path.key):
                    self._spread(path, copied)
                    note = open_committed(path).note
                    self._spread(path / note.attempt.name, copied, note.files)
        if copied:
            self._post(lambda: self._settle(copied))

    def _settle(self, copied: list[str]) -> None:
        """Delete what was copied while another process deleted it."""
        self._wait(_SETTLE_SECONDS)
        with self._tried(copied[0]):
            own, name_of = self._job.own, self.store.name_of
            self.store.delete(key for key in copied if own.find(name_of(key)) is None)

    def _spread(
        self, folder: ObjectPath, copied: list[str], files: Mapping[str, FileRecord] | None = None
    ) -> None:
        """Copy the small objects in ``folder`` to the nodes that lack them, and note the data ``files`` that lack
        copies, if this node is the first that has them. Adds the keys of what is copied to ``copied``.
        """
        job = self._job.nodes()
        for name, held in self.store.held_below(folder.key).items():
            key = (folder / name).key
            if (record := (files or {}).get(f"{folder.name}/{name}")) is not None:
                whole, lacking = self.store.copies_of(key, record.nbytes, held)
                if lacking and whole and whole[0] is job.own:
                    self.add(key)
            elif (
                not (name.endswith("/") or rank_of(name) is not None or name == DELETING)
                and len(held) < len(job.ring)
                and next(iter(held)) == job.own.name
            ):
                hit("node.spread.before")
                copied.append(key)
                self.store.spread(key)

    def _send(self, key: str) -> bool:
        """Send an object to the nodes that lack it; returns whether there is no more to do."""
        file = self._path(key)
        directory = file.parent.parent
        committed = open_committed(directory)
        attempt = committed.note.attempt
        record = committed.note.files.get(f"{file.parent.name}/{file.name}")
        if record is None and key != decision_path(directory, attempt).key:
            return False
        nbytes = len(committed.data) if record is None else record.nbytes
        whole, lacking = self.store.copies_of(key, nbytes, self.store.held(key))
        if not (whole and lacking):
            return True
        hit("node.copy.before")
        try:
            pieces = checked_pieces(directory, record, self._paced) if record else [committed.data]
            self.store.put_on(lacking, key, pieces)
        except CheckpointCorruptError as error:
            if self.store.leave(key, str(error)):
                return False
            logger.error("%s is damaged on all nodes that have it: %s", file, error)
            return True
        hit("node.copy.after")
        if committed_attempt(directory) != attempt:  # deleted meanwhile
            self.store.delete([key])
            return True
        logger.info("%s lies on node %s again", file, ", ".join(each.name for each in lacking))
        return True

    def _paced(self, nbytes: int) -> None:
        ends_at = time.monotonic() + _SAVE_SECONDS
        while self.store.saves and time.monotonic() < ends_at:
            self._wait(_LOOK_SECONDS)
        self._wait(self._pace.delay(nbytes))

    def _wait(self, seconds: float) -> None:
        if self._closing.wait(seconds) or self._job.is_over():
            raise _Ending

    def _path(self, key: str) -> ObjectPath:
        return ObjectPath(self.store.url, key, store=self.store)  # of this job, whatever begins

    @contextlib.contextmanager
    def _tried(self, key: str) -> Iterator[None]:
        """What fails within is named in the log. What is not committed, or not any more, has not failed."""
        try:
            yield
        except CheckpointNotFoundError:
            pass
        except (DataStatesError, OSError) as error:
            if self._job.is_over():
                raise _Ending from None
            logger.warning("copies of %s cannot be made now: %s", self._path(key), error)


class _Ending(Exception):
    """The process ends."""


def open_nodes(root: str, key: str) -> NodeStore:
    """The store ``root``, of the nodes of this job, which uses what lies at ``key``; at the first call, this process
    takes its part in it. Does not wait.
    """
    if f"{root}{key}".split("://")[1].lstrip("/").startswith("."):
        raise ConfigurationError(f"{root}{key} cannot be opened: its name begins with a dot")
    job = nodes.current(root.partition(":")[0])
    copies = job.copies.get(root)
    if copies is None:
        copies = job.copies[root] = Copies(NodeStore(root, job.nodes), job)
    store: NodeStore = copies.store
    if key and job.own.name_path(store.name_of(key)):
        copies.look(key)
    return store
