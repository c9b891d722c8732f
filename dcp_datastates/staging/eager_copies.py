"""What a call copies at once, by the host or by devices, into one buffer.

* **Eager copies**: the tensors that cannot be read later.
* **Expectations**: what deferred tensors hold at the call, for the engine to compare with the bytes that it copies. By
  default that is some words from all over each tensor (:class:`ExpectedBytes` says how many): a second line of defence,
  against writes that move no version counter. An audit expects every byte.
* **The buffer**: a slab of the host cache, so that ``host_cache_size`` bounds it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import torch

from dcp_datastates._native import Engine, ExpectedBytes, Slab, Transfer
from dcp_datastates.errors import DeviceError
from dcp_datastates.io.devices import HOST, DeviceCopies, accelerator
from dcp_datastates.io.tensor_memory import add_region
from dcp_datastates.staging import step_gate
from dcp_datastates.staging.ownership import STABLE
from dcp_datastates.staging.traverse import DeferredTensors

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.1

_SMALL_BYTES: Final = 1 << 20
"""Eager copies up to this size use ordinary memory: a cache segment for each would waste space."""

_SLOT: Final = 64
"""Copies are aligned to this many bytes in their buffer."""

DENSE_BYTES: Final = 256 << 20
"""Tensors on a device that are not contiguous are made dense there up to this size at a time, if each is smaller."""


def slots(sizes: Sequence[int], begin: int = 0) -> tuple[list[int], int]:
    """Where copies of these sizes go in a buffer, from ``begin`` on; and where the last one ends."""
    ends = list(accumulate((size + -size % _SLOT for size in sizes), initial=begin))
    return ends[:-1], ends[-1]


@dataclass(frozen=True)
class EagerCopies:
    """Tensors (local ones), and where each goes in ``buffer``: offsets and sizes in bytes."""

    tensors: Sequence[torch.Tensor]
    offsets: Sequence[int]
    sizes: Sequence[int]
    devices: Sequence[int]
    """Each tensor's device number."""
    buffer: torch.Tensor
    nbytes: int
    """How much of the buffer the engine may write to."""

    def make(self, engine: Engine, copying: DeviceCopies) -> None:
        """Copy the tensors on the host, and enqueue the copies of the others; what is under way is added to
        ``copying``.

        Raises :class:`DeviceError` if the driver refuses; some copies may be under way then, too.
        """
        places = self._places(HOST)
        content = self._content(places, [self.tensors[place] for place in places], HOST)
        engine.gather(content, self.buffer.data_ptr(), self.nbytes)
        for device in set(self.devices) - {HOST}:
            for batch in self._batches(self._places(device)):
                # Kept until their copies are enqueued: then torch may reuse what was made dense, in the stream's order.
                tensors = [accelerator.dense(self.tensors[place]) for place in batch]
                content = self._content(batch, tensors, device)
                copy_on_stream(engine, content, self.buffer, device, copying)

    def _places(self, device: int) -> list[int]:
        return [
            place
            for place, (number, nbytes) in enumerate(zip(self.devices, self.sizes, strict=True))
            if number == device and nbytes
        ]

    def _batches(self, places: list[int]) -> Iterator[list[int]]:
        """The places in batches whose dense copies take bounded memory."""
        batch: list[int] = []
        copied = 0
        for place in places:
            more = 0 if self.tensors[place].is_contiguous() else self.sizes[place]
            if more and copied + more > DENSE_BYTES and copied:
                yield batch
                batch, copied = [], 0
            batch.append(place)
            copied += more
        if batch:
            yield batch

    def _content(self, places: list[int], tensors: list[torch.Tensor], device: int) -> Transfer:
        content = Transfer()
        offsets = [self.offsets[place] for place in places]
        sizes = [self.sizes[place] for place in places]
        if all(map(torch.Tensor.is_contiguous, tensors)):
            addresses = list(map(torch.Tensor.data_ptr, tensors))
            devices = None if device == HOST else [device] * len(sizes)
            content.add_many(offsets, sizes, addresses, [STABLE] * len(sizes), devices)
        else:
            for tensor, offset, nbytes in zip(tensors, offsets, sizes, strict=True):
                add_region(content, offset, tensor, nbytes, STABLE, device)
        return content


def copy_on_stream(
    engine: Engine, content: Transfer, buffer: torch.Tensor, device: int, copying: DeviceCopies
) -> None:
    """Enqueue the copies of ``content`` into ``buffer`` on the current stream of ``device``, in order with the stream's
    other work: so the training thread need not wait. What is under way is added to ``copying``.

    Raises :class:`DeviceError` if the driver refuses; some copies may be under way then, too.
    """
    try:
        event, fault = engine.copy_to_host(
            content, buffer.data_ptr(), buffer.nbytes, device, accelerator.stream(device)
        )
    except RuntimeError as error:
        raise DeviceError(str(error)) from error
    if event is not None:
        copying.add(event)
    if fault is not None:
        raise DeviceError(fault.message)


@dataclass(frozen=True)
class Expectation:
    """What to note of the deferred tensors: some words, or in an ``audit`` every byte."""

    deferred: DeferredTensors
    audit: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer that :meth:`look` needs."""
        if self.audit:
            return slots(self.deferred.sizes)[1]
        devices = self.deferred.devices
        return (len(devices) - devices.count(HOST)) * ExpectedBytes.MOST_WORD_BYTES

    def look(
        self, engine: Engine, seed: int, buffer: torch.Tensor, offset: int, copying: DeviceCopies
    ) -> ExpectedBytes:
        """Read the host's memory now, and make devices read theirs behind the work that their streams have received,
        into ``buffer`` from ``offset`` on. What is under way is added to ``copying``.

        Raises :class:`DeviceError`.
        """
        expected, columns = ExpectedBytes(), self.deferred
        if self.audit:
            offsets, end = slots(columns.sizes, offset)
            tensors = columns.columns.locals
            copies = EagerCopies(tensors, offsets, columns.sizes, columns.devices, buffer, end)
            copies.make(engine, copying)
            places = [buffer.data_ptr() + at for at in offsets]
            expected.add_whole(range(len(places)), columns.addresses, columns.sizes, places)
            return expected
        kinds = set(columns.devices)
        for device in sorted(kinds):
            numbers: Sequence[int] = range(len(columns.devices))
            addresses, sizes = columns.addresses, columns.sizes
            if len(kinds) > 1:
                numbers = [n for n, each in enumerate(columns.devices) if each == device]
                addresses = [addresses[number] for number in numbers]
                sizes = [sizes[number] for number in numbers]
            if device == HOST:
                expected.add_words(numbers, addresses, sizes, seed)
                continue
            base = buffer.data_ptr()
            words = expected.add_device_words(numbers, addresses, sizes, seed, base, offset, device)
            offset += len(numbers) * ExpectedBytes.MOST_WORD_BYTES
            copy_on_stream(engine, words, buffer, device, copying)
        return expected


def allocate(
    native: Engine, order: int, nbytes: int, is_pinned: bool
) -> tuple[torch.Tensor, Slab | None, float]:
    """The buffer of a save, a ``uint8`` tensor of ``nbytes``; its memory of the cache; and for how many seconds it has
    waited for older saves to leave the cache.

    It is from the cache, which is pinned, unless it is small and not ``is_pinned``, or does not fit.
    """
    if nbytes <= _SMALL_BYTES and not is_pinned:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu"), None, 0.0
    if nbytes > native.max_slab_bytes:
        logger.warning(
            "%d MiB must be copied at once and do not fit the host cache of %d MiB; using other "
            "memory, which devices copy to slowly. Call dcp_datastates.track(optimizer) before the first "
            "save, or raise host_cache_size",
            nbytes >> 20,
            native.host_cache_bytes >> 20,
        )
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu"), None, 0.0
    began = time.monotonic()
    slab = native.slab(nbytes, order, 0.0)
    while slab is None:
        # Other saves hold the space. Start their reads: the backward pass that they wait for cannot begin before this
        # call returns.
        step_gate.open_windows()
        slab = native.slab(nbytes, order, _POLL_SECONDS)
    return torch.frombuffer(slab, dtype=torch.uint8), slab, time.monotonic() - began
