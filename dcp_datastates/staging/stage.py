"""Stages a state dict at the call of ``async_save``: lists the tensors to read later, and copies the rest.

Each tensor is *deferred* (an optimizer owns it, so the step gate can hold its change back) or *eager* (copied now).
This runs in the training thread, so it must be fast. It works by columns: a C-level call per tensor and attribute costs
half of what it costs in a Python loop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import Any, Final, cast

import numpy as np
import torch
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from dcp_datastates._native import DeviceEvent, Engine, ExpectedBytes, Slab
from dcp_datastates.config import EAGER_BELOW_BYTES, Reads
from dcp_datastates.errors import DeviceError, UnsupportedTensorError
from dcp_datastates.format.ragged import Ints
from dcp_datastates.format.stored_names import WRAPPER
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
    any_hold_shards,
    are_unusual,
    copy_unusual,
    is_unusual,
    take_shards_of,
    tensors_over,
)
from dcp_datastates.staging.eager_copies import EagerCopies, Expectation, allocate, slots
from dcp_datastates.staging.ownership import STABLE, UNOWNED, Ownership
from dcp_datastates.staging.traverse import (
    Columns,
    DeferredTensors,
    Fingerprint,
    Traversal,
    traverse,
)

_DTYPE: Final = operator.attrgetter("dtype")
_IS_INFERENCE: Final = torch.Tensor.is_inference
_NBYTES: Final = operator.attrgetter("nbytes")
_REQUIRES_GRAD: Final = operator.attrgetter("requires_grad")
_SHAPE: Final = operator.attrgetter("shape")
_JUST_TENSORS: Final = frozenset({torch.Tensor})
_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter, DTensor})
_NOTHING: Final = torch.empty(0, dtype=torch.uint8, device="cpu")


@dataclass
class StagedState:
    """A staged state. ``buffer`` holds the eager copies, at ``offsets``."""

    root: dict[Any, Any]
    traversal: Traversal
    is_cacheable: bool
    """Whether plans for this state may be cached: all tensors are plain, in memory that the engine can
    read.
    """
    is_deferred: list[bool]
    """For each tensor, in the order of the traversal: whether it is deferred."""
    ownership: Ownership
    """The optimizers' tensors at the call."""
    strides: list[tuple[int, ...]]
    """Of the memory of all tensors at the call, if plans have them: copies may have others."""
    at_call: Fingerprint | None = None
    """The fingerprint at the call; None if plans for this state are not cached."""
    deferred: DeferredTensors = field(default_factory=DeferredTensors)
    eager: Columns = field(default_factory=Columns)
    offsets: list[int] = field(default_factory=list)
    shapes: list[torch.Size] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    """Shapes and dtypes of the eager tensors at the call: their own may have changed since."""
    buffer: torch.Tensor = _NOTHING
    slab: Slab | None = None
    """The host cache's memory that ``buffer`` is in."""
    eager_bytes: int = 0
    cache_seconds: float = 0.0
    """How long staging has waited for room in the host cache."""
    fences: list[DeviceEvent] = field(default_factory=list)
    """One event per device, behind all work that its streams had received at the call, eager copies included."""
    call_events: list[Any] = field(default_factory=list)
    """Events of the call, which work that another thread gives to devices must wait for."""
    copying: DeviceCopies = field(default_factory=DeviceCopies)
    """The eager copies that devices are making. Before the host reads ``buffer``, wait for them."""
    looking: DeviceCopies = field(default_factory=DeviceCopies)
    """What devices are copying into ``buffer`` for ``expected``. It is there when any deferred read is done: ``fences``
    come after it.
    """
    expected: ExpectedBytes | None = None
    """What the deferred tensors hold at the call; None if there are none."""

    def await_copies(self) -> None:
        """Return when no device uses ``buffer`` any more.

        Raises :class:`DeviceError` if a copy has failed.
        """
        try:
            self.copying.wait()
        finally:
            self.looking.wait()

    def free(self) -> None:
        """Give the memory of ``buffer`` back; never, if a device may still write to it. Idempotent."""
        slab, self.slab = self.slab, None
        if slab is not None and (self.copying.abandoned or self.looking.abandoned):
            slab.abandon()
        elif slab is not None:
            slab.release()

    def owned(self) -> tuple[bool, ...]:
        """For each tensor, in the order of the traversal: whether an optimizer owns it."""
        return self.ownership.owns(self.traversal.columns.locals)

    def fingerprint(self) -> Fingerprint | None:
        """The state's fingerprint; None if it is not :attr:`is_cacheable`."""
        columns, structure = self.traversal.columns, self.traversal.structure
        if not self.is_cacheable:
            return None
        kinds = list(chain.from_iterable(types for _, types in structure))
        all_seen = sum(map(_PLAIN.__contains__, kinds)) == len(columns.tensors)
        if not all_seen or any(map(_is_peculiar, set(kinds))):
            return None  # DCP will see tensors that are not in the columns
        forms = (
            tuple(map(_SHAPE, columns.locals)),
            tuple(map(_DTYPE, columns.locals)),
            tuple(
                map(_REQUIRES_GRAD, columns.tensors)
            ),  # the DTensor's: its local tensor's may differ
            tuple(self.strides),
        )
        specs = tuple([each._spec for each in columns.tensors if type(each) is DTensor])
        return Fingerprint(tuple(structure), forms, specs)

    def as_captured(self, items: list[WriteItem]) -> list[WriteItem]:
        """The items of a plan for this state, with the strides of its tensors as they were at the call.

        Raises :class:`UnsupportedTensorError` if the plan stores the parts of a wrapper as an object.
        """
        columns = self.traversal.columns
        _check_parts_planned(columns, items)
        if not self.strides or not items:
            return items
        position = {columns.name(number): number for number in range(len(columns.keys))}
        changed = []
        for item in items:
            at = position.get(item.index.fqn)
            data = item.tensor_data
            if (
                data is not None
                and at is not None
                and data.chunk.sizes == columns.locals[at].shape
                and data.properties.strides != self.strides[at]  # type: ignore[attr-defined]
            ):
                properties = dataclasses.replace(data.properties, strides=self.strides[at])  # type: ignore[call-arg]
                data = dataclasses.replace(data, properties=properties)
                item = dataclasses.replace(item, tensor_data=data)
            changed.append(item)
        return changed

    def is_plain(self) -> bool:
        """Whether every tensor's memory holds the bytes as they are to be written."""
        deferred = self.deferred.columns.locals
        return all(map(torch.Tensor.is_contiguous, deferred)) and not (
            any(map(torch.Tensor.is_neg, deferred)) or any(map(torch.Tensor.is_conj, deferred))
        )

    def bases(self) -> tuple[Ints, Ints, Ints | None]:
        """Address, group and device (None: all on the host) of all tensors, in the order of the traversal."""
        addresses = np.empty(len(self.is_deferred), np.int64)
        groups = np.full(len(self.is_deferred), STABLE, np.int64)
        is_deferred = np.array(self.is_deferred, bool)
        addresses[is_deferred] = self.deferred.addresses
        groups[is_deferred] = self.deferred.groups
        addresses[~is_deferred] = np.array(self.offsets, np.int64) + self.buffer.data_ptr()
        if not self.fences:
            return addresses, groups, None
        devices = np.full(len(self.is_deferred), HOST, np.int64)
        devices[is_deferred] = self.deferred.devices
        return addresses, groups, devices

    def materialize(self) -> dict[Any, Any]:
        """Build the state dict as it was at the call: puts tensors over the eager copies in their places. Callable
        once.
        """
        eager = self.eager
        copies = tensors_over(self.buffer, self.offsets, self.shapes, self.dtypes)
        for container, key, tensor, copied in zip(
            eager.containers, eager.keys, eager.tensors, copies, strict=True
        ):
            take_shards_of(tensor, copied)
            if isinstance(tensor, DTensor):
                copied = DTensor(copied, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
            container[key] = copied
        self.eager, self.shapes, self.dtypes = Columns(), [], []
        return self.root


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


def _check_parts_planned(columns: Columns, items: list[WriteItem]) -> None:
    """A planner that does not flatten plans an object for each nested dict, and so for the parts of a wrapper. No load
    would put them into the wrapper.
    """
    if WRAPPER not in columns.keys or not items:
        return
    planned = {item.index.fqn for item in items}
    for position, (key, prefix) in enumerate(zip(columns.keys, columns.prefixes, strict=True)):
        if key == WRAPPER and columns.name(position) not in planned:
            raise UnsupportedTensorError(
                f"tensor {prefix[:-1]!r} cannot be stored: it wraps other tensors, and the planner does not plan them; "
                f"pass a planner with flatten_state_dict=True"
            )


def _is_peculiar(kind: type) -> bool:
    """Whether DCP may plan tensors inside a value of this type that the traversal does not see."""
    return kind not in _PLAIN and (
        issubclass(kind, torch.Tensor)
        or (issubclass(kind, list) and kind is not list)
        or hasattr(kind, "__create_write_items__")
    )


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
