"""One asynchronous save between the call and its last read: what the gate waits for, and who notices a tear.

States, each entered once::

    captured by stage() ─► begun (DCP's thread looked at the state) ─► reading (the job is handed over)
          │                        │                                      ─► settled (all read, none torn)
          └────────────────────────┴──────────────────────────────────────► failed

``stage()`` runs in the training thread, everything from *begun* on in DCP's thread, ``release_for``
in whichever thread steps an optimizer.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.optim import Optimizer

from dcp_datastates import step_gate
from dcp_datastates._native import SaveJob, Slab, Window, sample_words
from dcp_datastates.awaited import awaited_here
from dcp_datastates.capture import Capture, DeferredTensors
from dcp_datastates.errors import DataStatesError, SaveAbandonedError, SnapshotTornError
from dcp_datastates.ownership import STABLE, Ownership, local_tensor
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


@dataclass
class _Portion:
    """The deferred tensors of one group: read, checked and let go together."""

    group: int
    locals: list[torch.Tensor] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    names: list[tuple[str, Any]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    settled: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Guards ``settled``: the first to need the group's reads (DCP's thread or a gate) checks them."""


class _Regions:
    """Looks up which deferred memory, if any, a resolved tensor's bytes lie in."""

    def __init__(self, deferred: DeferredTensors) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._groups: list[int] = []
        spans = sorted(
            (address, address + _span(tensor), group)
            for address, tensor, group in zip(
                deferred.addresses, deferred.locals, deferred.groups, strict=True
            )
        )
        for start, end, group in spans:
            if self._ends and start < self._ends[-1]:  # one storage, hence one group
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)
                self._groups.append(group)

    def group_of(self, address: int, nbytes: int) -> int:
        position = bisect_left(self._starts, address + max(nbytes, 1)) - 1
        if position >= 0 and address < self._ends[position]:
            return self._groups[position]
        return STABLE


def _span(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    extent = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (extent + 1) * tensor.element_size()


def _without_traceback(error: BaseException) -> BaseException:
    """A copy that keeps no frames alive: they would hold the state's tensors, in a cycle with this."""
    try:
        return copy.copy(error)
    except Exception:
        return DataStatesError(f"{type(error).__name__}: {error}")


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


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
        self._seed = order
        self._capture: Capture | None = None
        self._slab: Slab | None = None
        self._keep: list[Any] = []
        self._portions: dict[int, _Portion] = {}
        self._deferred: DeferredTensors | None = None
        self._regions: _Regions | None = None
        self._thread: threading.Thread | None = None
        self._awaited: Callable[[], bool] | None = None
        self._created = time.monotonic()
        self._lock = threading.Lock()  # guards _job, _failure, _settled
        self._job: SaveJob | None = None
        self._failure: BaseException | None = None
        self._settled = False
        self._wanted = threading.Event()  # set when somebody waits for the reads
        self._handed_over = threading.Event()  # set when _job or _failure is
        self.captured.set_running_or_notify_cancel()

    # ---- training thread, in stage() -------------------------------------------------------

    def hold(self, capture: Capture, slab: Slab | None) -> None:
        """Take over a finished capture and hold the optimizers that own its deferred tensors back."""
        self._capture = capture
        self._slab = slab
        deferred = capture.deferred
        self._split(deferred)
        if self._portions:
            step_gate.gate(self)
        else:
            self._window.open()
            self._resolve_captured(None)

    def _split(self, deferred: DeferredTensors) -> None:
        groups = set(deferred.groups)
        for group in groups:
            if len(groups) == 1:
                portion = _Portion(
                    group, deferred.locals, deferred.addresses, deferred.sizes, deferred.names
                )
            else:
                chosen = [i for i, other in enumerate(deferred.groups) if other == group]
                portion = _Portion(
                    group,
                    [deferred.locals[i] for i in chosen],
                    [deferred.addresses[i] for i in chosen],
                    [deferred.sizes[i] for i in chosen],
                    [deferred.names[i] for i in chosen],
                )
            try:
                portion.versions = [tensor._version for tensor in portion.locals]
            except RuntimeError:  # an inference tensor among them
                portion.versions = [_version(tensor) for tensor in portion.locals]
            portion.samples = sample_words(portion.addresses, portion.sizes, self._seed)
            self._portions[group] = portion

    # ---- any thread --------------------------------------------------------------------------

    def open_window(self) -> None:
        """Let the deferred reads start. Never waits."""
        self._window.open()
        self._wanted.set()

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
            job = self._job
            self._handed_over.set()
        if job is not None:
            job.cancel()
            while not job.wait_read(-1, _POLL_SECONDS):
                pass
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
        self._portions = {}
        self._ownership = Ownership(())
        self._capture = None
        self._deferred = None
        self._keep = []
        slab, self._slab = self._slab, None
        if slab is not None:
            slab.release()

    # ---- the thread that steps an optimizer ----------------------------------------------------

    def release_for(self, optimizer: Optimizer) -> None:
        """Return when ``optimizer`` may change what it owns; the GIL is free meanwhile.

        A failed or torn save lets go at once: its future tells.
        """
        portions = [
            portion
            for portion in self._portions.values()
            if not portion.settled and self._ownership.is_gated_by(portion.group, optimizer)
        ]
        if not portions:
            return
        began = time.perf_counter()
        self.open_window()
        self._await_hand_over()
        try:
            for portion in portions:
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

    def _settle(self, portion: _Portion) -> None:
        """Wait for the group's reads, then check that it is whole. Raises :class:`SnapshotTornError`."""
        with portion.lock:
            if portion.settled:
                return
            job = self._job
            if job is None or self._failure is not None:
                return  # failed: nothing will be read, so there is nothing to wait for
            while not job.wait_read(portion.group, _POLL_SECONDS):
                pass
            if job.fault is not None:
                return  # the writer reports the fault
            torn = self._torn(portion)
            if torn:
                prefix, key = torn[0]
                raise SnapshotTornError(
                    f"{len(torn)} deferred tensor(s) changed before they were read, '{prefix}{key}' first: "
                    f"something other than a known optimizer's step() writes to them. Wait for "
                    f'writer.captured before such writes, or use defer="none"'
                )
            portion.settled = True
            portion.locals = []

    def _torn(self, portion: _Portion) -> list[tuple[str, Any]]:
        samples = sample_words(portion.addresses, portion.sizes, self._seed)
        if samples == portion.samples and portion.versions == [
            _version(tensor) for tensor in portion.locals
        ]:
            return []
        return [
            name
            for name, tensor, version, then, now in zip(
                portion.names,
                portion.locals,
                portion.versions,
                portion.samples,
                samples,
                strict=True,
            )
            if then != now or _version(tensor) != version
        ]

    # ---- DCP's thread ----------------------------------------------------------------------------

    def begin(self) -> dict[Any, Any]:
        """The state at the call; the current thread becomes the one that saves it."""
        self._thread = threading.current_thread()
        self._awaited = awaited_here()
        # DCP's planning would hold the GIL for a whole switch interval (5 ms) as soon as this thread
        # starts, inside the caller's async_save. Let the caller return first, unless it is waiting.
        self._wanted.wait(_YIELD_SECONDS)
        capture = self._capture
        if capture is None:
            raise SaveAbandonedError("this snapshot was given up before DCP began to save it")
        self._regions = _Regions(capture.deferred)
        self._deferred = capture.deferred
        root = capture.materialize()
        capture.root = {}
        return root

    def group_of(self, address: int, nbytes: int) -> int:
        """The group whose gate covers these bytes; ``STABLE`` for copies that nobody changes."""
        return self._regions.group_of(address, nbytes) if self._regions is not None else STABLE

    def hand_over(self, start: Callable[[Window], SaveJob]) -> SaveJob:
        """Start the native job with this snapshot's window.

        Raises what :meth:`fail` was told, or :class:`SnapshotTornError` if a deferred tensor has other
        memory now than at the capture, so that the planner may have resolved the wrong bytes.
        """
        moved = self._moved()
        if moved is not None:
            raise SnapshotTornError(
                f"the memory of deferred tensor {moved!r} was replaced (tensor.data = …) before it was "
                f'read; wait for writer.captured before that, or use defer="none"'
            )
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._job = start(self._window)
            self._handed_over.set()
            return self._job

    def _moved(self) -> str | None:
        deferred = self._deferred
        if deferred is None:
            return None
        # From here on the memory itself is kept, also when somebody replaces a tensor's.
        self._keep = [tensor.untyped_storage() for tensor in deferred.locals]
        for tensor, local, address, (prefix, key) in zip(
            deferred.tensors, deferred.locals, deferred.addresses, deferred.names, strict=True
        ):
            if local.data_ptr() != address or (
                tensor is not local and local_tensor(tensor) is not local
            ):
                return f"{prefix}{key}"
        return None

    def settle(self) -> None:
        """Wait until all is read and found whole; then the state may change freely.

        Raises :class:`SnapshotTornError`; does not raise for a job that failed (it says so itself).
        """
        job = self._job
        assert job is not None, "hand_over() comes first"
        while not (self._window.is_open or job.wait_read(-1, _AWAITED_SECONDS)):
            if self._awaited is not None and self._awaited():
                self.open_window()
        for portion in self._portions.values():
            self._settle(portion)
        while not job.wait_read(-1, _POLL_SECONDS):
            pass
        with self._lock:
            if job.fault is not None or self._failure is not None:
                return
            self._settled = True
        self._let_go()
        self._resolve_captured(None)
