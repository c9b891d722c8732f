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
from itertools import accumulate, compress
from typing import Any, Final, cast

import torch
from torch.distributed.tensor import DTensor

from dcp_datastates._native import Engine, Transfer
from dcp_datastates.config import EAGER_BELOW_BYTES, Defer
from dcp_datastates.ownership import UNOWNED, Ownership
from dcp_datastates.tensors import (
    PLAIN_DTYPES,
    add_region,
    copy_unusual,
    is_unusual,
    tensor_over,
)
from dcp_datastates.walk import Columns, walk

__all__ = ["Capture", "DeferredTensors", "capture"]

_SLOT: Final = 64
"""Eager copies are aligned to this many bytes in their buffer."""

_DTYPE: Final = operator.attrgetter("dtype")
_IS_CPU: Final = operator.attrgetter("is_cpu")
_IS_NESTED: Final = operator.attrgetter("is_nested")
_LAYOUT: Final = operator.attrgetter("layout")
_NBYTES: Final = operator.attrgetter("nbytes")
_SHAPE: Final = operator.attrgetter("shape")
_JUST_TENSORS: Final = frozenset({torch.Tensor})
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
    root, columns = walk(state_dict)
    columns = _set_apart(columns, _odd_memory(columns))
    try:
        deferred, eager = _classify(columns, ownership, defer)
    except (RuntimeError, NotImplementedError):  # one without a storage: sparse
        columns = _set_apart(columns, list(map(is_unusual, columns.locals)))
        deferred, eager = _classify(columns, ownership, defer)
    eager = _set_apart(eager, _odd_values(eager))
    sizes = list(map(_NBYTES, eager.locals))
    ends = list(accumulate(size + -size % _SLOT for size in sizes))
    nbytes = ends[-1] if ends else 0
    offsets = [0, *ends[:-1]] if ends else []
    buffer = None
    if offsets:
        buffer = allocate(max(nbytes, 1))
        engine.gather(_regions(eager, offsets, sizes), buffer.data_ptr(), nbytes)
    forms = list(zip(map(_SHAPE, eager.locals), map(_DTYPE, eager.locals), strict=True))
    return Capture(root, deferred, eager, offsets, forms, buffer, nbytes)


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
) -> tuple[DeferredTensors, Columns]:
    """The deferred tensors, and those to copy."""
    if defer == "none":
        return DeferredTensors(), columns
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
    return deferred, eager


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
