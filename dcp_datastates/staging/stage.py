"""Stages a state dict at the call of ``async_save``: lists the tensors to read later, and copies the rest.

Each tensor is *deferred* (an optimizer owns it, so the step gate can hold its change back) or *eager* (copied now).
This runs in the training thread, so it must be fast. It works by columns: a C-level call per tensor and attribute costs
half of what it costs in a Python loop.

What a call copies immediately, by the host or by devices, goes into one buffer:

* **Eager copies**: the tensors that cannot be read later.
* **Expectations**: what deferred tensors hold at the call, for the engine to compare with the bytes that it copies. By
  default that is some words from all over each tensor (:class:`ExpectedBytes` says how many): a second line of defence,
  against writes that move no version counter. An audit expects every byte.
* **The buffer**: a slab of the host cache, so that ``host_cache_size`` bounds it.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress
from typing import Any, Final, cast

import torch

from dcp_datastates._native import Engine, ExpectedBytes, Slab, Transfer
from dcp_datastates.config import EAGER_BELOW_BYTES, Reads
from dcp_datastates.errors import DeviceError
from dcp_datastates.format.values import HAS_STRIDES
from dcp_datastates.io.devices import (
    HOST,
    THROUGH_TORCH,
    DeviceCopies,
    accelerator,
    fences,
    numbers,
    report,
)
from dcp_datastates.io.tensor_memory import (
    PLAIN_DTYPES,
    add_region,
    any_hold_shards,
    are_unusual,
    copy_unusual,
    is_unusual,
)
from dcp_datastates.staging import step_gate
from dcp_datastates.staging.ownership import STABLE, UNOWNED, Ownership
from dcp_datastates.staging.staged_state import Columns, DeferredTensors, StagedState, traverse

logger = logging.getLogger(__name__)

_DTYPE: Final = operator.attrgetter("dtype")
_IS_INFERENCE: Final = torch.Tensor.is_inference
_NBYTES: Final = operator.attrgetter("nbytes")
_SHAPE: Final = operator.attrgetter("shape")
_JUST_TENSORS: Final = frozenset({torch.Tensor})


def stage_state(
    state_dict: Mapping[str, Any],
    ownership: Ownership,
    reads: Reads,
    engine: Engine,
    order: int,
    audit: bool,
) -> StagedState:
    """Classify every leaf of ``state_dict``, and copy those that cannot be read later.

    Args:
        order: the save's. It determines which words of the deferred tensors are noted, for comparison with what is
            read.
        audit: whether to note all of their bytes.

    May wait for older saves to leave the host cache. Raises :class:`~dcp_datastates.errors.UnsupportedTensorError`
    naming a tensor that cannot be stored, or :class:`~dcp_datastates.errors.DeviceError`.
    """
    root, traversal = traverse(state_dict)
    everything = traversal.columns
    devices = numbers(engine, everything.locals)
    columns, devices = _copied(everything, devices, _no_address(everything, devices))
    classified = None
    with contextlib.suppress(RuntimeError, NotImplementedError):  # one has no storage: sparse
        classified = _classify(columns, devices, ownership, reads)
    if classified is None:
        columns, devices = _copied(columns, devices, list(map(is_unusual, columns.locals)))
        classified = _classify(columns, devices, ownership, reads)
    deferred, eager, eager_devices, is_deferred = classified
    plain, eager_devices = _copied(eager, eager_devices, are_unusual(eager.locals))
    is_cacheable = (
        columns is everything and plain is eager and not any_hold_shards(everything.locals)
    )
    sizes = list(map(_NBYTES, plain.locals))
    offsets, nbytes = slots(sizes)
    made = StagedState(
        root, traversal, is_cacheable, is_deferred, ownership, _strides(everything.locals)
    )
    made.deferred, made.eager, made.offsets = deferred, plain, offsets
    made.shapes = list(map(_SHAPE, plain.locals))
    made.dtypes = list(map(_DTYPE, plain.locals))
    made.eager_bytes = nbytes
    expectation = Expectation(deferred, audit)
    is_pinned = bool({*compress(eager_devices, sizes), *deferred.devices} - {HOST})
    try:
        memory = allocate(engine, order, nbytes + expectation.nbytes, is_pinned)
        made.buffer, made.slab, made.cache_seconds = memory
        copies = EagerCopies(plain.locals, offsets, sizes, eager_devices, made.buffer, nbytes)
        copies.make(engine, made.copying)
        if ownership.distrusted:
            # Perhaps a stream of its own writes to them, which does not wait for the copies.
            made.copying.wait()
        if deferred.sizes:
            made.expected = expectation.look(engine, order, made.buffer, nbytes, made.looking)
        made.fences = fences(engine, devices)
    except BaseException:
        with contextlib.suppress(DeviceError):
            made.await_copies()  # the buffer is about to be freed
        made.free()
        raise
    if made.fences:
        report(engine)
    made.call_events = accelerator.mark(devices)
    return made


def _strides(tensors: list[torch.Tensor]) -> list[tuple[int, ...]]:
    """See :attr:`StagedState.strides`."""
    if not HAS_STRIDES:
        return []
    try:
        return list(map(torch.Tensor.stride, tensors))
    except (RuntimeError, NotImplementedError):
        return []  # one has none: planning refuses it


def _no_address(columns: Columns, devices: list[int]) -> Sequence[bool]:
    """Marks tensors whose memory cannot be read by address. Empty if there are none."""
    locals_ = columns.locals
    if set(map(type, locals_)) <= _JUST_TENSORS and THROUGH_TORCH not in devices:
        return ()
    return [
        device == THROUGH_TORCH or is_unusual(local)
        for device, local in zip(devices, locals_, strict=True)
    ]


def _copied(
    columns: Columns, devices: list[int], marked: Sequence[bool]
) -> tuple[Columns, list[int]]:
    """Copies the ``marked`` tensors one by one into their places; returns the others, with their devices."""
    if not any(marked):
        return columns, devices
    chosen = columns.where(marked)
    for position, (container, key) in enumerate(zip(chosen.containers, chosen.keys, strict=True)):
        tensor, local = chosen.tensors[position], chosen.locals[position]
        container[key] = copy_unusual(tensor, local, chosen.name(position))
    others = list(map(operator.not_, marked))
    return columns.where(others), list(compress(devices, others))


def _classify(
    columns: Columns, devices: list[int], ownership: Ownership, reads: Reads
) -> tuple[DeferredTensors, Columns, list[int], list[bool]]:
    """Returns the deferred tensors; the eager tensors, and their devices; and for each tensor whether it is
    deferred.
    """
    if reads == "blocking":
        return DeferredTensors(), columns, devices, [False] * len(columns.tensors)
    sizes = list(map(_NBYTES, columns.locals))
    storages = list(map(torch.Tensor.untyped_storage, columns.locals))
    owners = ownership.groups(storages)
    if reads == "all":
        owners = [UNOWNED if group is None else group for group in owners]
    # Writes to an inference tensor move no version counter: no check could see them.
    for tensors in (columns.locals, columns.tensors):
        if any(map(_IS_INFERENCE, tensors)):
            owners = [
                None if tensor.is_inference() else group
                for tensor, group in zip(tensors, owners, strict=True)
            ]
    # Copy tensors that are not dense now: reading them later takes many pieces, which is slow on a device, and on the
    # host, where each piece is guarded against being unmapped.
    contiguous = list(map(torch.Tensor.is_contiguous, columns.locals))
    is_deferred = [
        group is not None and nbytes >= EAGER_BELOW_BYTES and dense
        for group, nbytes, dense in zip(owners, sizes, contiguous, strict=True)
    ]
    if not {HOST}.issuperset(devices):
        is_deferred = _deferred_on_devices(columns, owners, sizes, devices, contiguous, is_deferred)
    chosen = columns if all(is_deferred) else columns.where(is_deferred)
    deferred = DeferredTensors(
        chosen,
        cast("list[int]", list(compress(owners, is_deferred))),
        list(map(torch.Tensor.data_ptr, chosen.locals)),
        list(compress(sizes, is_deferred)),
        list(compress(devices, is_deferred)),
        list(compress(storages, is_deferred)),
    )
    early = list(map(operator.not_, is_deferred))
    eager = Columns() if chosen is columns else columns.where(early)
    return deferred, eager, list(compress(devices, early)), is_deferred


def _deferred_on_devices(
    columns: Columns,
    owners: list[int | None],
    sizes: list[int],
    devices: list[int],
    dense: list[bool],
    is_deferred: list[bool],
) -> list[bool]:
    """Defer small tensors on devices, too: enqueueing the copy takes the caller as long as deferring it."""
    locals_ = columns.locals
    if not set(map(_DTYPE, locals_)) <= PLAIN_DTYPES or any(map(torch.Tensor.is_neg, locals_)):
        plain = (local.dtype in PLAIN_DTYPES and not local.is_neg() for local in locals_)
        dense = list(map(operator.and_, dense, plain))
    return [
        before if device == HOST else contiguous and group is not None and nbytes > 0
        for before, group, nbytes, device, contiguous in zip(
            is_deferred, owners, sizes, devices, dense, strict=True
        )
    ]


# ---- the buffer ---------------------------------------------------------------------------------

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
            "%d MiB must be copied immediately and do not fit the host cache of %d MiB; using other "
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
