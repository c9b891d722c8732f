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

DENSE_BYTES: Final = 256 << 20
"""Tensors on a device that are not contiguous are made dense there up to this size at a time, if each is smaller."""


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
    """Of the buffer, all copies together."""

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


_SLOT: Final = 64


@dataclass(frozen=True)
class Expectation:
    """The deferred tensors to look at, in columns: local tensors, addresses, sizes in bytes, device numbers."""

    tensors: Sequence[torch.Tensor]
    addresses: Sequence[int]
    sizes: Sequence[int]
    devices: Sequence[int]
    audit: bool
    """Whether to expect every byte, and not only some words."""

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer that :meth:`look` needs."""
        if self.audit:
            return sum(size + -size % _SLOT for size in self.sizes)
        on_devices = len(self.devices) - self.devices.count(HOST)
        return on_devices * ExpectedBytes.MOST_WORD_BYTES

    def look(
        self, engine: Engine, seed: int, buffer: torch.Tensor, offset: int, copying: DeviceCopies
    ) -> ExpectedBytes:
        """Read the host's memory now, and make devices read theirs behind the work that their streams have received,
        into ``buffer`` from ``offset`` on. What is under way is added to ``copying``.

        Raises :class:`DeviceError`.
        """
        expected = ExpectedBytes()
        if self.audit:
            self._look_at_all(expected, engine, buffer, offset, copying)
            return expected
        for device, numbers in self._by_device():
            addresses = [self.addresses[number] for number in numbers]
            sizes = [self.sizes[number] for number in numbers]
            if device == HOST:
                expected.add_words(numbers, addresses, sizes, seed)
                continue
            base = buffer.data_ptr()
            words = expected.add_device_words(numbers, addresses, sizes, seed, base, offset, device)
            offset += len(numbers) * ExpectedBytes.MOST_WORD_BYTES
            copy_on_stream(engine, words, buffer, device, copying)
        return expected

    def _by_device(self) -> Iterator[tuple[int, Sequence[int]]]:
        if self.devices.count(HOST) == len(self.devices):
            yield HOST, list(range(len(self.devices)))
            return
        for device in sorted(set(self.devices)):
            yield device, [n for n, each in enumerate(self.devices) if each == device]

    def _look_at_all(
        self,
        expected: ExpectedBytes,
        engine: Engine,
        buffer: torch.Tensor,
        offset: int,
        copying: DeviceCopies,
    ) -> None:
        ends = accumulate((size + -size % _SLOT for size in self.sizes), initial=offset)
        offsets = list(ends)[:-1]
        copies = EagerCopies(self.tensors, offsets, self.sizes, self.devices, buffer, buffer.nbytes)
        copies.make(engine, copying)
        held = [number for number, size in enumerate(self.sizes) if size]
        expected.add_whole(
            held,
            [self.addresses[number] for number in held],
            [self.sizes[number] for number in held],
            [buffer.data_ptr() + offsets[number] for number in held],
        )


logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.1

_SMALL_BYTES: Final = 1 << 20
"""Eager copies up to this size use ordinary memory: a cache segment for each would waste space."""


class EagerBuffers:
    """Allocates one save's buffer for eager copies; ``slab`` is its memory from the host cache."""

    def __init__(self, native: Engine, order: int) -> None:
        self._engine = native
        self._order = order
        self.slab: Slab | None = None
        self.waited_seconds = 0.0
        """How long it has waited for room in the cache."""

    def allocate(self, nbytes: int, pinned: bool) -> torch.Tensor:
        """A ``uint8`` tensor of ``nbytes``: from the cache, which is pinned, unless it is small and not ``pinned``, or
        does not fit. May wait for older saves to leave the cache.
        """
        if nbytes <= _SMALL_BYTES and not pinned:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        if nbytes > self._engine.max_slab_bytes:
            logger.warning(
                "%d MiB must be copied at once and do not fit the host cache of %d MiB; using other "
                "memory, which devices copy to slowly. Call dcp_datastates.track(optimizer) before the first "
                "save, or raise host_cache_size",
                nbytes >> 20,
                self._engine.host_cache_bytes >> 20,
            )
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self.slab = self._engine.slab(nbytes, self._order, 0.0)
        began = time.monotonic()
        while self.slab is None:
            # Other saves hold the space. Start their reads: the backward pass that they wait for cannot begin before
            # this call returns.
            step_gate.open_windows()
            self.slab = self._engine.slab(nbytes, self._order, _POLL_SECONDS)
        self.waited_seconds += time.monotonic() - began
        return torch.frombuffer(self.slab, dtype=torch.uint8)

    def release(self) -> None:
        """Return the slab after staging has failed."""
        if self.slab is not None:
            self.slab.release()
