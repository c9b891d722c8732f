"""One asynchronous save between the call and its last read: what the gate waits for, and who notices a tear.

States, each entered once::

    captured by stage() ─► begun (DCP's thread looked at the state) ─► reading (the job is handed over)
          │                        │                                      ─► settled (all read, none torn)
          └────────────────────────┴──────────────────────────────────────► failed

``stage()`` runs in the training thread, everything from *begun* on in DCP's thread, ``release_for``
in whichever thread steps an optimizer.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final

from torch.optim import Optimizer

from dcp_datastates._native import DeviceEvent, SaveJob, Slab, Window
from dcp_datastates.dcp.awaited import awaited_here
from dcp_datastates.errors import DataStatesError, DeviceError, SaveAbandonedError
from dcp_datastates.lazy import step_gate
from dcp_datastates.lazy.capture import Capture, DeferredTensors
from dcp_datastates.lazy.devices import follow, stream
from dcp_datastates.lazy.ownership import STABLE, Ownership
from dcp_datastates.lazy.tear import Portion, Regions, check_memory, portions
from dcp_datastates.stats import SaveStats

__all__ = ["Snapshot"]

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.1
"""How often a waiting gate looks whether the thread it waits for still exists."""

_AWAITED_SECONDS: Final = 0.01
"""How often a save with a closed window looks whether somebody waits for its future."""

_YIELD_SECONDS: Final = 0.002
"""How long DCP's thread leaves the GIL to the training thread before it begins to plan."""

_BEGIN_SECONDS: Final = 60.0
"""A snapshot that no thread has begun to save for this long is given up."""


def _without_traceback(error: BaseException) -> BaseException:
    """A copy that keeps no frames alive: they would hold the state's tensors, in a cycle with this."""
    try:
        return copy.copy(error)
    except Exception:
        return DataStatesError(f"{type(error).__name__}: {error}")


def _stop(job: SaveJob) -> None:
    job.cancel()
    while not job.wait_read(-1, _POLL_SECONDS):
        pass


_not_submitted_lock = threading.Lock()  # guards _not_submitted
_not_submitted: set[int] = set()
"""Orders of the snapshots whose reads no native job has."""


def _submitted(snapshot: Snapshot) -> None:
    with _not_submitted_lock:
        _not_submitted.discard(snapshot.order)


class Snapshot:
    """A capture, its read window, and the promise that nothing in it is read late or torn.

    Args:
        ownership: which optimizers gate which groups, as of the capture.
        window: opens when the deferred reads may start.
        order: the save's sequence number.
        stats: where the time that gates waited is added up.
    """

    def __init__(self, ownership: Ownership, window: Window, order: int, stats: SaveStats) -> None:
        self.order = order
        self.captured: Future[None] = Future()
        self._stats = stats
        self._ownership = ownership
        self._window = window
        self._capture: Capture | None = None
        self._slab: Slab | None = None
        self._fences: list[DeviceEvent] = []
        self._readers: list[DeviceEvent] = []
        self._keep: list[Any] = []
        self._portions: list[Portion] = []
        self._deferred: DeferredTensors | None = None
        self._regions: Regions | None = None
        self._thread: threading.Thread | None = None
        self._awaited: Callable[[], bool] | None = None
        self._created = time.monotonic()
        self._lock = threading.Lock()  # guards _job, _failure, _settled, _capture, _slab
        self._job: SaveJob | None = None
        self._foreseen: SaveJob | None = None
        self._failure: BaseException | None = None
        self._settled = False
        self._wanted = threading.Event()  # set when somebody waits for the reads
        self._handed_over = threading.Event()  # set when _job or _failure is
        self.captured.set_running_or_notify_cancel()

    # ---- training thread, in stage() -------------------------------------------------------

    def hold(self, capture: Capture, slab: Slab | None) -> None:
        """Take over a finished capture and hold the optimizers that own its deferred tensors back."""
        self._capture = capture
        self._fences = capture.fences
        self._slab = slab
        with _not_submitted_lock:
            _not_submitted.add(self.order)
        self._portions = portions(capture.deferred, self.order)
        if self._portions:
            step_gate.gate(self)
        else:
            self._window.open()
            self._resolve_captured(None)

    # ---- any thread --------------------------------------------------------------------------

    def open_window(self) -> None:
        """Let the deferred reads start. Never waits."""
        self._window.open()
        self._wanted.set()

    @property
    def ownership(self) -> Ownership:
        """Which optimizers gate what, as of the capture."""
        return self._ownership

    @property
    def window(self) -> Window:
        """The read window, for the native job."""
        return self._window

    @property
    def failure(self) -> BaseException | None:
        """Why this save cannot be committed; None so far."""
        return self._failure

    def fail(self, error: BaseException) -> None:
        """Give the save up: wake the gate, free its memory. The first reason stands; idempotent.

        Changes nothing once all has been read. Returns when no native thread reads the deferred tensors any more.
        """
        with self._lock:
            if self._settled:
                return
            if self._failure is None:
                self._failure = _without_traceback(error)
            jobs = [job for job in (self._job, self._foreseen) if job is not None]
            self._handed_over.set()
        for job in jobs:
            _stop(job)
        with contextlib.suppress(DeviceError):  # one failure is enough
            self._await_copies()
        self._let_go()
        self._resolve_captured(self._failure)

    def _resolve_captured(self, error: BaseException | None) -> None:
        try:
            if error is None:
                self.captured.set_result(None)
            else:
                self.captured.set_exception(error)
        except Exception:  # resolved before: the first outcome stands
            logger.debug("captured was resolved already")

    def _let_go(self) -> None:
        """Drop what kept sources alive. The eager copies' cache segments are free from here on."""
        step_gate.ungate(self)
        _submitted(self)
        self._foreseen = None
        self._portions = []
        self._ownership = Ownership(())
        self._deferred = None
        self._keep = []
        self._fences = []
        self._readers = []
        with self._lock:
            capture, self._capture = self._capture, None
            slab, self._slab = self._slab, None
        if slab is not None and capture is not None and capture.copying.abandoned:
            slab.abandon()
        elif slab is not None:
            slab.release()

    # ---- the thread that steps an optimizer ----------------------------------------------------

    def release_for(self, optimizer: Optimizer, on_host: bool) -> None:
        """Return when ``optimizer`` may change what it owns; the GIL is free meanwhile.

        Of memory on a device: when its copies are enqueued, and the calling thread's current stream there waits
        for them; ``on_host``: when they are done. A failed or torn save lets go at once: its future tells.
        """
        portions = [
            portion
            for portion in self._portions
            if (portion.on_device or not portion.settled)
            and self._ownership.is_gated_by(portion.group, optimizer)
        ]
        if not portions:
            return
        began = time.perf_counter()
        self.open_window()
        self._await_hand_over()
        try:
            for portion in portions:
                if portion.on_device:
                    self._let_pass(portion, optimizer, on_host)
                else:
                    self._settle(portion)
        except DataStatesError as error:
            self.fail(error)
        self._stats.gate_seconds += time.perf_counter() - began

    def _await_hand_over(self) -> None:
        while not self._handed_over.wait(_POLL_SECONDS):
            thread = self._thread
            if thread is None:
                if time.monotonic() - self._created > _BEGIN_SECONDS:
                    self.fail(SaveAbandonedError("no thread began to save the staged state"))
            elif thread is threading.current_thread() or not thread.is_alive():
                self.fail(SaveAbandonedError("DCP ended this save before its data were written"))

    def _settle(self, portion: Portion) -> None:
        """Wait for the group's reads, then check that it is whole. Raises :class:`SnapshotTornError`."""
        with portion.lock:
            job = self._job
            # If the save has failed nothing will be read, so there is nothing to wait for.
            if job is None or self._failure is not None or portion.settled:
                return
            while not job.wait_read(portion.group, _POLL_SECONDS):
                pass
            if job.fault is not None:
                return  # the writer reports the fault
            portion.check()
            portion.settled = True

    def _let_pass(self, portion: Portion, optimizer: Optimizer, on_host: bool) -> None:
        """Of a group on devices: what the calling thread's current streams are given from now on comes after its
        reads, which the host need not have seen the end of. Until the first who may change it passes, it must be whole.

        Raises :class:`SnapshotTornError`, and :class:`DeviceError` if the driver refuses.
        """
        with portion.lock:
            job = self._job
            if job is None or self._failure is not None:
                return
            wait = job.wait_read if on_host else job.wait_queued
            while not wait(portion.group, _POLL_SECONDS):
                pass
            if job.fault is not None:
                return
            if not portion.settled:
                portion.check()
            if not on_host:
                self._hold(job, portion.group)
            portion.settled = portion.settled or self._ownership.may_change(
                optimizer, portion.group, portion.deferred.columns.locals
            )

    def _hold(self, job: SaveJob, group: int) -> None:
        try:
            for event in (*job.events(group), *self._readers):
                event.hold(stream(event.device))
        except RuntimeError as error:
            raise DeviceError(str(error)) from error

    # ---- DCP's thread ----------------------------------------------------------------------------

    def begin(self) -> None:
        """The current thread becomes the one that saves the state."""
        self._thread = threading.current_thread()
        self._awaited = awaited_here()
        # DCP's planning would hold the GIL for a whole switch interval (5 ms) as soon as this thread
        # starts, inside the caller's async_save. Let the caller return first, unless it is waiting.
        self._wanted.wait(_YIELD_SECONDS)
        capture = self.capture
        self._deferred = capture.deferred
        # Streams are a thread's own: what a planner makes of tensors on devices is made in this one's.
        follow(capture.moment)

    @property
    def capture(self) -> Capture:
        """What is saved. Raises :class:`SaveAbandonedError` if this snapshot was given up."""
        capture = self._capture
        if capture is None:
            raise SaveAbandonedError("this snapshot was given up before DCP began to save it")
        return capture

    def state(self) -> dict[Any, Any]:
        """The state at the call, with all tensors in it. Once."""
        capture = self.capture
        self._regions = Regions(capture.deferred)
        capture.copying.wait()
        return capture.materialize()

    def group_of(self, address: int, nbytes: int) -> int:
        """The group whose gate covers these bytes; ``STABLE`` for copies that nobody changes."""
        return self._regions.group_of(address, nbytes) if self._regions is not None else STABLE

    def hand_over(
        self, start: Callable[[Window], SaveJob], readers: Sequence[DeviceEvent] = ()
    ) -> SaveJob:
        """Start the native job with this snapshot's window. Gates let go behind ``readers``, too: what this thread
        had devices make of deferred tensors.

        Raises what :meth:`fail` was told, or :class:`SnapshotTornError` if a deferred tensor has other
        memory now than at the capture.
        """
        if self._deferred is not None:
            self._keep = check_memory(self._deferred)
        self._await_copies()
        self._readers = list(readers)
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._job = start(self._window)
            self._handed_over.set()
        _submitted(self)
        return self._job

    def foresee(self, start: Callable[[Window], SaveJob]) -> SaveJob | None:
        """Begin to read by a plan that is not agreed on yet. The gate still waits for :meth:`adopt`.

        None, and nothing is started, while an older snapshot is not being read by a plan that was agreed on: this
        one's reads would take the cache that the older one needs to go on.
        """
        assert self._deferred is not None, "begin() comes first"
        with _not_submitted_lock:
            if _not_submitted and min(_not_submitted) < self.order:
                return None
        keep = check_memory(self._deferred)
        self._await_copies()
        with self._lock:
            if self._failure is not None:
                return None
            self._keep = keep
            self._foreseen = start(self._window)
            return self._foreseen

    def _await_copies(self) -> None:
        capture = self._capture
        if capture is not None:
            capture.copying.wait()

    @property
    def fences(self) -> list[DeviceEvent]:
        """What copies by devices come after: all that the streams had been given at the call."""
        return self._fences

    def adopt(self) -> SaveJob:
        """The plan that :meth:`foresee` went by is the one that was agreed on."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            assert self._foreseen is not None, "foresee() comes first"
            self._job, self._foreseen = self._foreseen, None
            self._handed_over.set()
        _submitted(self)
        return self._job

    def discard(self) -> None:
        """It is not. Returns when nothing is read by it any more."""
        with self._lock:
            job, self._foreseen = self._foreseen, None
        if job is not None:
            _stop(job)

    def settle(self) -> None:
        """Wait until all is read and found whole; then the state may change freely.

        Raises :class:`SnapshotTornError`; does not raise for a job that failed (it says so itself).
        """
        job = self._job
        assert job is not None, "hand_over() comes first"
        while not (self._window.is_open or job.wait_read(-1, _AWAITED_SECONDS)):
            if self._awaited is not None and self._awaited():
                self.open_window()
        portions = self._portions
        for portion in portions:
            if not portion.on_device:
                self._settle(portion)
        while not job.wait_read(-1, _POLL_SECONDS):
            pass
        for portion in portions:  # now: a gate may want the lock while devices read
            self._settle(portion)
        with self._lock:
            if job.fault is not None or self._failure is not None:
                return
            self._settled = True
        self._let_go()
        self._resolve_captured(None)
