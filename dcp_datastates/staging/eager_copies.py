"""Eager copies: the tensors that a call copies into one buffer, by the host or by their devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from dcp_datastates._native import Engine, Transfer
from dcp_datastates.errors import DeviceError
from dcp_datastates.io.device_copies import DeviceCopies
from dcp_datastates.io.devices import HOST, dense, stream
from dcp_datastates.io.tensor_memory import add_region
from dcp_datastates.staging.ownership import STABLE

__all__ = ["EagerCopies", "copy_on_stream"]

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
                tensors = [dense(self.tensors[place]) for place in batch]
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
            content, buffer.data_ptr(), buffer.nbytes, device, stream(device)
        )
    except RuntimeError as error:
        raise DeviceError(str(error)) from error
    if event is not None:
        copying.add(event)
    if fault is not None:
        raise DeviceError(fault.message)
