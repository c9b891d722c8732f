"""Deferred reads: one asynchronous save from the call to its last read.

States, each entered once::

    captured by stage() ─► begun (DCP's thread looked at the state) ─► reading (the job is handed over)
          │                        │                                      ─► settled (all read, none torn)
          └────────────────────────┴──────────────────────────────────────► failed

``stage()`` runs in the training thread; everything from *begun* on runs in the thread that plans the save (DCP's, or
the planning thread); ``release_for`` in the thread that steps an optimizer; ``release_memory`` in a thread that moves a
tensor's memory.

This module uses no lock. A signal handler may interrupt the training thread anywhere and start a save, which waits for
the thread of this save; that thread must not wait for a lock that the interrupted frame holds. Where two threads may
race, each first sets its own flag and then reads the other's.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch.optim import Optimizer

from dcp_datastates._native import DeviceEvent, SaveJob, Window
from dcp_datastates.errors import DataStatesError, DeviceError, SaveAbandonedError, SaveStalledError
from dcp_datastates.io.devices import accelerator
from dcp_datastates.io.engine import moved
from dcp_datastates.io.running_calls import Places, places
from dcp_datastates.process.futures import SharedFuture, without_traceback
from dcp_datastates.process.waiting import Wait
from dcp_datastates.results import SaveStats
from dcp_datastates.staging import step_gate
from dcp_datastates.staging.change_detection import Portion, Regions, portions, raise_change
from dcp_datastates.staging.ownership import STABLE
from dcp_datastates.staging.staged_state import StagedState

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.1
"""How often a waiting gate checks that the thread that plans the save is alive."""

_YIELD_SECONDS: Final = 0.002
"""How long the thread that plans leaves the GIL to the training thread before it begins."""


def _stop(job: SaveJob) -> None:
    job.cancel()
    while not job.wait_read(-1, _POLL_SECONDS):
        pass


class DeferredReads:
    """A staged state and its read window. Guarantees that no tensor is read late, or after it has changed.

    Until :meth:`capture`, and if staging fails, it is of no state.

    Args:
        order: the save's sequence number.
        stats: the statistics to which the gates' waits are added.
        timeout: seconds without progress after which a gate no longer waits, and the save fails.
    """

    def __init__(self, order: int, stats: SaveStats, timeout: float) -> None:
        self.order = order
        self.captured = SharedFuture(step_gate.open_windows)
        self._timeout = timeout
        self._stats = stats
        self._window = Window(0.0)
        self.kept: StagedState | None = None
        """The staged state; None if there is none, or no longer."""
        self._readers: list[DeviceEvent] = []
        self._portions: list[Portion] = []
        self._regions: Regions | None = None
        self._thread: threading.Thread | None = None
        self._job: SaveJob | None = None
        self._idle: Places = {}  # where other threads were at the call
        self._end: dict[None, BaseException | None] = {}
        """How the reads ended: settled (None) or failed. ``setdefault`` is atomic: the first entry counts."""
        self._wanted = False  # whether a thread waits for the reads
        self._gate_since: float | None = None  # when a gate began to wait until the save is planned
        self._handed_over: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Not empty once there is a job or a failure. An event has a lock, which the frame that a signal handler
        interrupts may hold.
        """

    def capture(self, staged: StagedState, window: Window) -> None:
        """The training thread, in the call: from now on the step gate holds optimizers that own deferred tensors of
        ``staged``. Their reads may start when the ``window`` opens.
        """
        self.kept, self._window = staged, window
        try:
            self._portions = portions(staged)
            self._idle = places()
            self.raise_failure()
            if self._portions:
                step_gate.gate(self)
            else:
                window.open()
                self.captured.settle(None)
        except BaseException as error:  # an interrupt, say
            self.fail(error)
            raise

    # ---- any thread --------------------------------------------------------------------------

    def open_window(self) -> None:
        """Let the deferred reads start. Never waits."""
        self._wanted = True
        self._window.open()

    @property
    def failure(self) -> BaseException | None:
        """The error for which this save cannot be committed; None if there is none so far."""
        return self._end.get(None)

    @property
    def gate_waits(self) -> float:
        """For how many seconds a gate has waited until the save is planned; 0 if none waits."""
        return 0.0 if self._gate_since is None else time.monotonic() - self._gate_since

    def fail(self, error: BaseException) -> None:
        """Give the save up: wake waiting gates and free its memory. The first error counts; idempotent.

        No effect once all data are read. Returns when no native thread reads the deferred tensors any more.
        """
        failure = self._end.setdefault(None, without_traceback(error))
        if failure is None:
            return
        # A thread that starts a job checks for a failure afterwards, so either this thread or that one stops the job.
        if self._job is not None:
            _stop(self._job)
        self._handed_over.put(None)
        if (staged := self.kept) is not None:
            with contextlib.suppress(DeviceError):  # one failure is enough
                staged.await_copies()
        self._let_go()
        self.captured.settle(failure)

    def _let_go(self) -> None:
        """Drop the references to source tensors, and free the eager copies' cache segments."""
        step_gate.ungate(self)
        self._portions = []
        self._readers = []
        staged, self.kept = self.kept, None
        if staged is not None:
            staged.free()

    # ---- the thread that steps an optimizer, or moves memory ------------------------------------

    def release_for(self, optimizer: Optimizer, on_host: bool) -> None:
        """Return when ``optimizer`` may change the tensors that it owns; waits without the GIL.

        For tensors on a device, returns when their copies are enqueued, and the calling thread's current stream there
        waits for the copies; with ``on_host``, when the copies are done. Returns immediately if the save has failed or
        is torn: its future raises. A save whose reads make no progress for the timeout fails.
        """
        self._release(
            [
                portion
                for portion in self._portions
                if (portion.on_device or not portion.settled)
                and portion.ownership.is_gated_by(portion.group, optimizer)
            ],
            "optimizer.step()",
            optimizer,
            on_host,
        )

    def release_memory(self, storages: Iterable[torch.UntypedStorage], what: str) -> None:
        """Return when no native thread reads the memory of ``storages``, like :meth:`release_for`. Device copies must
        be done, not only enqueued: freed device memory may get another owner.
        """
        storages = set(storages)
        self._release(
            [
                portion
                for portion in self._portions
                if not (portion.read or storages.isdisjoint(portion.storages))
            ],
            what,
        )

    def _release(
        self,
        portions: list[Portion],
        what: str,
        optimizer: Optimizer | None = None,
        on_host: bool = True,
    ) -> None:
        """``optimizer``: the one that may change what devices read, as soon as its stream waits for them."""
        if not portions:
            return
        began = time.perf_counter()
        self.open_window()
        waiting = Wait(logger, f"{what}, which needs what save {self.order} reads,", self._timeout)
        try:
            self._await_hand_over(waiting)
            for portion in portions:
                if optimizer is not None and portion.on_device:
                    self._let_pass(portion, optimizer, on_host, waiting)
                else:
                    self._settle(portion, waiting)
        except DataStatesError as error:
            if isinstance(error, SaveStalledError):
                logger.error("save %d is given up, and training goes on: %s", self.order, error)
            self.fail(error)
        waited = time.perf_counter() - began
        self._stats.gate_seconds += waited
        self._stats.timeline.gated(waited)

    def _await_hand_over(self, waiting: Wait) -> None:
        if self._job is None:
            self._gate_since = time.monotonic()
        while self._job is None and not self._end:
            with contextlib.suppress(queue.Empty):
                self._handed_over.get(timeout=_POLL_SECONDS)
                self._handed_over.put(None)  # for other gates
            thread = self._thread
            if thread is threading.current_thread() or (thread and not thread.is_alive()):
                raise SaveAbandonedError("DCP ended this save before its data were written")
            waiting.look("its plan, which all ranks take part in", moved(None))
        self._gate_since = None

    def _settle(self, portion: Portion, waiting: Wait) -> None:
        """Wait for the group's reads, then check that its tensors are unchanged. Raises :class:`SnapshotTornError`."""
        job = self._job
        # After a failure there are no reads to wait for.
        if job is None or self.failure is not None or portion.read:
            return
        await_reads(job, portion.group, waiting)
        if job.fault is not None:
            raise_change(job, portion, self.staged)
            return  # the writer reports the fault
        portion.check_memory()
        portion.check_when_quiet(self._idle, waiting)
        portion.settled = portion.read = True

    def _let_pass(
        self, portion: Portion, optimizer: Optimizer, on_host: bool, waiting: Wait
    ) -> None:
        """Let an optimizer pass the gate of a group on devices: make the calling thread's current streams wait for the
        group's reads, without waiting for their end on the host. The group must be unchanged until the first optimizer
        that may change it passes.

        Raises :class:`SnapshotTornError`, and :class:`DeviceError` if the driver refuses.
        """
        job = self._job
        if job is None or self.failure is not None:
            return
        await_reads(job, portion.group, waiting, queued=not on_host)
        if job.fault is not None:
            raise_change(job, portion, self.staged)
            return
        portion.check_when_quiet(self._idle, waiting)
        if not on_host:
            self._hold(job, portion.group)
        portion.settled = portion.settled or portion.ownership.may_change(
            optimizer, portion.group, portion.deferred.columns.locals
        )

    def _hold(self, job: SaveJob, group: int) -> None:
        try:
            for event in (*job.events(group), *self._readers):
                event.hold(accelerator.stream(event.device))
        except RuntimeError as error:
            raise DeviceError(str(error)) from error

    # ---- DCP's thread ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Make the current thread the one that plans the save."""
        self._thread = threading.current_thread()
        # Planning would hold the GIL for a whole switch interval (5 ms) while the caller is still inside async_save.
        # Let the caller return first, unless it waits for the reads.
        if not self._wanted:
            time.sleep(_YIELD_SECONDS)
        # Current streams are per thread: kernels that a planner launches run on this thread's streams.
        accelerator.follow(self.staged.call_events)

    @property
    def staged(self) -> StagedState:
        """The staged state. Raises :class:`SaveAbandonedError` if this save was given up."""
        staged = self.kept
        if staged is None:
            raise self.failure or SaveAbandonedError("this save was given up before it was planned")
        return staged

    def state(self) -> dict[Any, Any]:
        """Build the state at the call, with all its tensors. Callable once."""
        staged = self.staged
        self._regions = Regions(staged.deferred)
        staged.copying.wait()
        return staged.materialize()

    def group_of(self, address: int, nbytes: int) -> int:
        """The group whose gate covers these bytes; ``STABLE`` for copies, which do not change."""
        return self._regions.group_of(address, nbytes) if self._regions is not None else STABLE

    def prepare(self, readers: Sequence[DeviceEvent] = ()) -> Window:
        """The save's window, for its native job, which is about to start. Gates wait for ``readers``, too: kernels that
        this thread has launched on deferred tensors.

        Raises the error of :meth:`fail`, or :class:`SnapshotTornError` if a deferred tensor's memory is not that of the
        call.
        """
        self._readers = list(readers)
        for portion in self._portions:
            portion.pin()
        if (staged := self.kept) is not None:
            staged.copying.wait()
        self.raise_failure()
        return self._window

    def hand_over(self, job: SaveJob) -> None:
        """The native ``job`` has started: from now on gates wait for its reads. Raises the error of :meth:`fail`."""
        self._job = job
        if self._end:
            _stop(job)
        self._handed_over.put(None)
        self.raise_failure()

    def check_unchanged(self) -> None:
        """Raise :class:`SnapshotTornError` if torch has written to a deferred tensor."""
        for portion in self._portions:
            portion.check()

    def raise_failure(self) -> None:
        if (failure := self.failure) is not None:
            raise failure

    def settle(self, patience: float) -> None:
        """Wait until all data are read, and check that they are unchanged; then the state may change freely. The reads
        may begin only after ``patience`` seconds.

        Raises :class:`SaveStalledError` if they make no progress, and :class:`SnapshotTornError`, but
        :meth:`raise_failure` comes first: a gate that found a tear has let its optimizer write. Does not raise for a
        failed job: the caller reads ``job.fault``.
        """
        job = self._job
        assert job is not None, "hand_over() comes first"
        portions = self._portions
        waiting = Wait(logger, f"save {self.order}", self._timeout, patience=patience)
        for portion in portions:
            if not portion.on_device:
                self._settle(portion, waiting)
        await_reads(job, -1, waiting)
        for portion in portions:  # only now: gates may pass while devices read
            self._settle(portion, waiting)
        if job.fault is not None:
            return
        if (staged := self.kept) is not None:
            staged.await_copies()  # done, since the reads are: their memory goes
        if self._end.setdefault(None, None) is not None:
            return
        self._let_go()
        self.captured.settle(None)


def await_reads(job: SaveJob, group: int, waiting: Wait, *, queued: bool = False) -> None:
    """Wait until the reads of a ``group`` (-1: of all) are done, or only ``queued`` on a device.

    Raises :class:`SaveStalledError` when neither the job nor the saves that hold the cache make progress.
    """
    wait = job.wait_queued if queued else job.wait_read
    while not wait(group, _POLL_SECONDS):
        done = f"{job.bytes_read >> 20} MiB are done; the rest may wait for room in the host cache"
        what = f"its reads ({done}, and so for storage)"
        waiting.look(what, moved(job), storage=True)
