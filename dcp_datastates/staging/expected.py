"""What deferred tensors hold at the call, for the engine to compare with the bytes that it copies.

By default that is some words from all over each tensor (:class:`ExpectedBytes` says how many): a second line of
defence, against writes that move no version counter. An audit expects every byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import torch

from dcp_datastates._native import Engine, ExpectedBytes
from dcp_datastates.io.device_copies import DeviceCopies
from dcp_datastates.io.devices import HOST
from dcp_datastates.staging.eager_copies import EagerCopies, copy_on_stream

__all__ = ["Expectation"]

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
