"""The devices that the native engine copies from and to, the current streams on them, and copies under way into memory
that must not be freed or reused before they are done.

Torch copies tensors on other kinds of accelerators, whole and at the call (:mod:`dcp_datastates.io.tensor_memory`).
"""

from __future__ import annotations

import contextlib
import logging
import operator
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch

from dcp_datastates._native import DeviceEvent, Engine
from dcp_datastates.errors import DeviceError
from dcp_datastates.process.ending import patience_is_over

logger = logging.getLogger(__name__)

HOST: Final = -1
"""The number that stands for the host in place of a device's number."""

THROUGH_TORCH: Final = -2
"""The number that stands for all devices whose driver the native engine does not know."""

_KNOWS_CONTEXTS: Final = hasattr(torch._C, "_cuda_hasPrimaryContext")
"""Torch builds without CUDA cannot say which devices have a context."""

_DEVICE: Final = operator.attrgetter("device")
_IS_CPU: Final = operator.attrgetter("is_cpu")


class Cuda:
    """CUDA as torch sees it. Torch numbers devices as the driver does."""

    def numbers(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """For each tensor: :data:`HOST`, the driver's number of its device, or :data:`THROUGH_TORCH`."""
        if all(map(_IS_CPU, tensors)):  # fast path: this runs in the training thread at every save
            return [HOST] * len(tensors)
        devices = list(map(_DEVICE, tensors))
        number = {device: self._number(device) for device in set(devices)}
        return [number[device] for device in devices]

    def _number(self, device: torch.device) -> int:
        if device.type == "cpu":
            return HOST
        if device.type == "cuda" and torch.version.hip is None and device.index is not None:
            return device.index
        return THROUGH_TORCH

    def used(self) -> list[int]:
        """The driver's numbers of the devices that this process uses already. Creates no context."""
        if torch.version.hip is not None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return []
        if not _KNOWS_CONTEXTS:
            return []  # they are opened when the first tensor on them is saved
        return list(filter(_has_context, range(torch.cuda.device_count())))

    def stream(self, device: int) -> int:
        """Handle of the calling thread's current stream on ``device``."""
        return int(torch.cuda.current_stream(device).cuda_stream)

    def dense(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, or a contiguous copy that the calling thread's current stream makes. Torch reuses the copy's
        memory in the order of that stream.
        """
        return tensor.contiguous()

    def mark(self, devices: Iterable[int]) -> list[Any]:
        """Record the present point on the calling thread's current streams of ``devices``, and of the current device if
        the process uses it, for :meth:`follow` in another thread. Negative numbers are ignored.
        """
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return []
        used = {each for each in devices if each >= 0}
        used.update(filter(_has_context, (torch.cuda.current_device(),)))
        streams = [torch.cuda.current_stream(device) for device in used]
        return [(each, each.record_event()) for each in streams]

    def follow(self, events: list[Any]) -> None:
        """Make the torch work that the calling thread enqueues from now on wait for ``events``."""
        for before, event in events:
            now = torch.cuda.current_stream(before.device)
            if now != before:
                now.wait_event(event)

    def capturing(self) -> bool:
        """Whether the calling thread's current stream is being captured into a graph."""
        return (
            torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            and _has_context(torch.cuda.current_device())
            and torch.cuda.is_current_stream_capturing()
        )


def _has_context(device: int) -> bool:
    """Whether the process has a context on a CUDA device. Where it has none, nearly every call to the runtime would
    create one, which takes hundreds of MiB: on device 0, for each rank that uses another one.
    """
    return not _KNOWS_CONTEXTS or bool(torch._C._cuda_hasPrimaryContext(device))  # type: ignore[attr-defined]


accelerator = Cuda()
"""Tests replace its methods."""

_refused: set[int] = set()
_reported: set[str] = set()


def numbers(engine: Engine, tensors: Sequence[torch.Tensor]) -> list[int]:
    """Each (local) tensor's device number. Opens devices that are new to ``engine``."""
    found = accelerator.numbers(tensors)
    closed = {device for device in set(found) if device >= 0 and not _opened(engine, device)}
    if closed:
        return [THROUGH_TORCH if device in closed else device for device in found]
    return found


def _opened(engine: Engine, device: int) -> bool:
    try:
        engine.open_device(device)
    except RuntimeError as error:
        if device not in _refused:
            _refused.add(device)
            logger.warning(
                "device %d cannot be used directly (%s); its tensors are copied through torch, at the call",
                device,
                error,
            )
        return False
    return True


def open_used(engine: Engine) -> None:
    """Open the devices that this process uses already, so that the host cache is pinned before the first save."""
    for device in accelerator.used():
        _opened(engine, device)


def report(engine: Engine) -> None:
    """Log, once, that the host cache could not be pinned in the background, or not near the device."""
    node = engine.node_fault
    if node is not None and node.message not in _reported:
        logger.info("pages of the host cache may be far from the device (%s)", node.message)
        _reported.add(node.message)
    pinning = engine.pin_fault
    if pinning is not None and pinning.message not in _reported:
        logger.warning(
            "the host cache cannot be pinned (%s): copies from devices are slow, and wait for them",
            pinning.message,
        )
        _reported.add(pinning.message)


def record(engine: Engine, device: int) -> DeviceEvent:
    """An event behind all work that the calling thread's current stream on ``device`` has received.

    Raises :class:`DeviceError` with the driver's message.
    """
    try:
        return engine.record_event(device, accelerator.stream(device))
    except RuntimeError as error:
        raise DeviceError(str(error)) from error


def fences(engine: Engine, devices: Iterable[int]) -> list[DeviceEvent]:
    """One event of :func:`record` per device; other numbers in ``devices`` are ignored."""
    return [record(engine, device) for device in sorted(set(devices)) if device >= 0]


_POLL_SECONDS: Final = 0.1


class DeviceCopies:
    """The device copies of one save. Any thread may wait for them, several at once."""

    def __init__(self) -> None:
        self._events: list[DeviceEvent] = []
        self._failure: Exception | None = None
        self.abandoned = False
        """The process is ending, and a device may still write: the memory must never be freed."""

    def add(self, event: DeviceEvent) -> None:
        """Add copies that are done at ``event``."""
        self._events.append(event)

    def wait(self) -> None:
        """Return when no device uses the memory any more.

        Then raises :class:`DeviceError` if a copy has failed (every call does, since the copies are incomplete), or if
        a device hangs at the end of the process.
        """
        began = time.monotonic()
        # No lock: a signal handler may interrupt a thread that waits here, and wait too.
        for event in self._events.copy():
            while not (self.abandoned or self._is_over(event)):
                self.abandoned = patience_is_over(began)
        if self.abandoned:
            raise DeviceError("a device did not do what it was given before the process ended")
        if self._failure is not None:
            raise DeviceError(str(self._failure)) from self._failure

    def _is_over(self, event: DeviceEvent) -> bool:
        try:
            if not event.wait(_POLL_SECONDS):
                return False
        except RuntimeError as error:
            self._failure = self._failure or error
        with contextlib.suppress(ValueError):  # another thread has removed it
            self._events.remove(event)
        return True
