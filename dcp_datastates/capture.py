"""What a state dict holds at the call of ``async_save``: tensors to read later, and copies of the rest.

Each tensor is *deferred* (an optimizer owns it, so the step gate can hold its change back) or *eager*
(copied now). Speed matters here and nowhere else in this package's Python: this runs in the training
thread. So it works by columns: a call per tensor and attribute from C costs half of what it costs in a
Python loop.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, chain, compress
from typing import Any, Final, cast

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from dcp_datastates._native import Engine, Transfer
from dcp_datastates.config import EAGER_BELOW_BYTES, Defer
from dcp_datastates.ownership import STABLE, UNOWNED, Ownership
from dcp_datastates.planning.catalog import Ints
from dcp_datastates.planning.fingerprint import Fingerprint, fingerprint
from dcp_datastates.tensors import (
    PLAIN_DTYPES,
    add_region,
    copy_unusual,
    is_unusual,
    tensor_over,
)
from dcp_datastates.walk import Columns, Staged, walk

__all__ = ["Capture", "DeferredTensors", "capture", "look"]

_SLOT: Final = 64
"""Eager copies are aligned to this many bytes in their buffer."""

_DTYPE: Final = operator.attrgetter("dtype")
_IS_CPU: Final = operator.attrgetter("is_cpu")
_IS_NESTED: Final = operator.attrgetter("is_nested")
_LAYOUT: Final = operator.attrgetter("layout")
_NBYTES: Final = operator.attrgetter("nbytes")
_SHAPE: Final = operator.attrgetter("shape")
_JUST_TENSORS: Final = frozenset({torch.Tensor})
_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter, DTensor})
_JUST_STRIDED: Final = frozenset({torch.strided})


@dataclass
class DeferredTensors:
    """The deferred tensors, and columns about them."""

    columns: Columns = field(default_factory=Columns)
    groups: list[int] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Bytes, if contiguous; else one element's."""

    def where(self, mask: list[bool]) -> DeferredTensors:
        """The entries for which ``mask`` is true."""
        return DeferredTensors(
            self.columns.where(mask),
            list(compress(self.groups, mask)),
            list(compress(self.addresses, mask)),
            list(compress(self.sizes, mask)),
        )


@dataclass
class Capture:
    """All that was captured. ``buffer`` holds the eager copies, at ``offsets``."""

    root: dict[Any, Any]
    deferred: DeferredTensors
    eager: Columns
    offsets: list[int]
    forms: list[tuple[torch.Size, torch.dtype]]
    """Shapes and dtypes at the call: the tensors themselves may have others by now."""
    buffer: torch.Tensor | None
    eager_bytes: int
    regular: bool
    """Whether all tensors are plain ones on the host: else plans for this state are not kept."""
    late: list[bool]
    """Which of all tensors are deferred, in the order of the walk."""
    staged: Staged

    def fingerprint(self) -> Fingerprint | None:
        """What the state looks like; None if it is not :attr:`regular`."""
        columns = self.staged.columns
        if not self.regular or not _are_plain(self.staged.structure, columns):
            return None
        return fingerprint(self.staged.structure, columns.tensors, columns.locals)

    def bases(self) -> tuple[Ints, Ints]:
        """Address of the first byte, and group, of all tensors in the order of the walk. Before :meth:`materialize`."""
        addresses = np.empty(len(self.late), np.int64)
        groups = np.full(len(self.late), STABLE, np.int64)
        late = np.array(self.late, bool)
        addresses[late] = self.deferred.addresses
        groups[late] = self.deferred.groups
        if self.buffer is not None:
            addresses[~late] = np.array(self.offsets, np.int64) + self.buffer.data_ptr()
        return addresses, groups

    def materialize(self) -> dict[Any, Any]:
        """Put tensors over the eager copies in their places; the state dict as it was at the call."""
        eager = self.eager
        for container, key, tensor, offset, (shape, dtype) in zip(
            eager.containers, eager.keys, eager.tensors, self.offsets, self.forms, strict=True
        ):
            assert self.buffer is not None
            copied = tensor_over(self.buffer, offset, shape, dtype)
            if isinstance(tensor, DTensor):
                copied = DTensor(copied, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
            container[key] = copied
        self.eager, self.offsets, self.forms, self.buffer = Columns(), [], [], None
        root, self.root = self.root, {}
        return root


def capture(
    state_dict: Mapping[str, Any],
    ownership: Ownership,
    defer: Defer,
    engine: Engine,
    allocate: Callable[[int], torch.Tensor],
) -> Capture:
    """Classify every leaf of ``state_dict`` and copy what cannot be read later.

    ``allocate`` gives a ``uint8`` host buffer of the size asked for; it is called at most once. Raises
    :class:`~dcp_datastates.errors.UnsupportedTensorError` naming a tensor that cannot be stored.
    """
    root, staged = walk(state_dict)
    everything = staged.columns
    columns = _set_apart(everything, _odd_memory(everything))
    try:
        deferred, eager, late = _classify(columns, ownership, defer)
    except (RuntimeError, NotImplementedError):  # one without a storage: sparse
        columns = _set_apart(columns, list(map(is_unusual, columns.locals)))
        deferred, eager, late = _classify(columns, ownership, defer)
    usual = _set_apart(eager, _odd_values(eager))
    regular = columns is everything and usual is eager
    eager = usual
    sizes = list(map(_NBYTES, eager.locals))
    ends = list(accumulate(size + -size % _SLOT for size in sizes))
    nbytes = ends[-1] if ends else 0
    offsets = [0, *ends[:-1]] if ends else []
    buffer = None
    if offsets:
        buffer = allocate(max(nbytes, 1))
        engine.gather(_regions(eager, offsets, sizes), buffer.data_ptr(), nbytes)
    forms = list(zip(map(_SHAPE, eager.locals), map(_DTYPE, eager.locals), strict=True))
    return Capture(root, deferred, eager, offsets, forms, buffer, nbytes, regular, late, staged)


def look(state_dict: Mapping[str, Any]) -> Capture:
    """A capture for planning alone: nothing is copied, and the tensors are those of the state."""
    root, staged = walk(state_dict)
    regular = _odd_memory(staged.columns) is None
    late = [True] * len(staged.columns.tensors)
    return Capture(root, DeferredTensors(), Columns(), [], [], None, 0, regular, late, staged)


def _is_peculiar(kind: type) -> bool:
    """Whether DCP may make of such a value what the walk does not see."""
    return kind not in _PLAIN and (
        issubclass(kind, torch.Tensor)
        or (issubclass(kind, list) and kind is not list)
        or hasattr(kind, "__create_write_items__")
    )


def _are_plain(structure: list[tuple[Any, tuple[type, ...]]], columns: Columns) -> bool:
    """Whether every tensor that DCP will see is one of ``columns``."""
    kinds = list(chain.from_iterable(types for _, types in structure))
    if any(map(_is_peculiar, set(kinds))):
        return False
    return sum(map(_PLAIN.__contains__, kinds)) == len(columns.tensors)


def _odd_memory(columns: Columns) -> list[bool] | None:
    """Marks tensors whose memory cannot be had by address; None if there are none."""
    locals_ = columns.locals
    if set(map(type, locals_)) <= _JUST_TENSORS and all(map(_IS_CPU, locals_)):
        return None
    return list(map(is_unusual, locals_))


def _odd_values(columns: Columns) -> list[bool] | None:
    """Marks tensors whose memory is not simply the value; None if there are none."""
    locals_ = columns.locals
    if (
        set(map(_DTYPE, locals_)) <= PLAIN_DTYPES
        and set(map(_LAYOUT, locals_)) <= _JUST_STRIDED
        and not any(map(torch.Tensor.is_neg, locals_))
        and not any(map(_IS_NESTED, locals_))
    ):
        return None
    return list(map(is_unusual, locals_))


def _set_apart(columns: Columns, odd: list[bool] | None) -> Columns:
    """Copies the odd ones, each by itself, into their places; returns the others."""
    if odd is None:
        return columns
    strange = columns.where(odd)
    for position, (container, key) in enumerate(zip(strange.containers, strange.keys, strict=True)):
        tensor, local = strange.tensors[position], strange.locals[position]
        container[key] = copy_unusual(tensor, local, strange.name(position))
    return columns.where(map(operator.not_, odd))


def _classify(
    columns: Columns, ownership: Ownership, defer: Defer
) -> tuple[DeferredTensors, Columns, list[bool]]:
    """The deferred tensors, those to copy, and which are which."""
    if defer == "none":
        return DeferredTensors(), columns, [False] * len(columns.tensors)
    sizes = list(map(_NBYTES, columns.locals))
    owners = ownership.groups(columns.locals)
    if defer == "all":
        owners = [UNOWNED if group is None else group for group in owners]
    late = [
        group is not None and nbytes >= EAGER_BELOW_BYTES
        for group, nbytes in zip(owners, sizes, strict=True)
    ]
    chosen = columns if all(late) else columns.where(late)
    sizes = list(compress(sizes, late))
    for position, dense in enumerate(map(torch.Tensor.is_contiguous, chosen.locals)):
        if not dense:
            sizes[position] = chosen.locals[position].element_size()
    deferred = DeferredTensors(
        chosen,
        cast("list[int]", list(compress(owners, late))),
        list(map(torch.Tensor.data_ptr, chosen.locals)),
        sizes,
    )
    eager = Columns() if chosen is columns else columns.where(map(operator.not_, late))
    return deferred, eager, late


def _regions(eager: Columns, offsets: list[int], sizes: list[int]) -> Transfer:
    content = Transfer()
    if all(map(torch.Tensor.is_contiguous, eager.locals)) and all(sizes):
        addresses = list(map(torch.Tensor.data_ptr, eager.locals))
        content.add_many(offsets, sizes, addresses, [0] * len(sizes))
    else:
        for local, offset, nbytes in zip(eager.locals, offsets, sizes, strict=True):
            if nbytes:
                add_region(content, offset, local, nbytes, 0)
    return content
