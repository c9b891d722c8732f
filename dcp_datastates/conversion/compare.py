"""``diff``: compares two checkpoints of any format, tensor by tensor."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import torch

from dcp_datastates.checkpoints.listing import natural_order
from dcp_datastates.conversion.convert import open_source
from dcp_datastates.conversion.source import PIECE_BYTES, Source, as_bytes, select
from dcp_datastates.errors import UnsafeObjectError
from dcp_datastates.format.stored_names import NamePatterns, Rename
from dcp_datastates.process.forks import public
from dcp_datastates.process.work import Done, Progress, thread_count, work
from dcp_datastates.storage.object_path import Location, ObjectPath, locate
from dcp_datastates.text import count, size

_PIECE_ELEMENTS: Final = 256 << 10
"""Elements that a thread compares at a time: with copies in float64, some 20 MiB."""

_SHOWN: Final = 20

Problem = Literal["only in a", "only in b", "kind", "shape", "dtype", "values", "object"]


@dataclass(frozen=True)
class Difference:
    """One name whose values differ.

    ``problem`` is "only in a", "only in b", "kind" (a tensor in one, an object in the other), "shape", "dtype" (the
    values may differ, too), "values" (tensors of the same shape and dtype), or "object".
    """

    name: str
    problem: Problem
    a: str | None
    """What is in ``a``: dtype and shape, or "object"; None: nothing."""
    b: str | None
    elements: int | None = None
    """The number of elements that were compared; None if none could be."""
    differing: int | None = None
    """How many of them differ: in their bytes; if the dtypes differ, in their values."""
    largest: float | None = None
    """The largest absolute difference; infinite where only one is NaN or infinite. None if torch cannot compute it."""
    relative: float | None = None
    """The largest of the absolute differences divided by the larger absolute value."""
    nans: int | None = None
    """How many elements are NaN in only one of the two."""

    def __str__(self) -> str:
        """One line."""
        if self.problem in ("only in a", "only in b"):
            return f"{self.name}: {self.problem} ({self.a or self.b})"
        line = f"{self.name}: {self.problem} differ"
        if self.problem != "values":
            line = f"{self.name}: {self.problem} differs: {self.a}, {self.b}"
        if self.differing is not None:
            line += f"; {self.differing} of {count(self.elements or 0, 'element')}"
        if self.largest is not None:
            line += f", largest difference {self.largest:.3g} (relative {self.relative or 0:.3g})"
        return f"{line}, {self.nans} NaN in one only" if self.nans else line


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`diff`."""

    a: Location
    b: Location
    tensors: int
    """Tensors with the same name and shape in both, whose values were compared."""
    objects: int
    """Objects with the same name in both."""
    nbytes: int
    """Bytes of tensors that were read of both."""
    differences: tuple[Difference, ...]
    """All differences, worst first: what is in one only, kinds, shapes, then by the largest difference."""
    seconds: float

    @property
    def same(self) -> bool:
        """Whether names, shapes, dtypes, bytes and objects are the same."""
        return not self.differences

    def __repr__(self) -> str:
        return f"Comparison({str(self).splitlines()[0]})"

    def __str__(self) -> str:
        """The verdict, the extent of the comparison, and the worst differences, one line each."""
        number = len(self.differences)
        verdict = "1 name differs" if number == 1 else f"{number} names differ"
        extent = f"{count(self.tensors, 'tensor')} and {count(self.objects, 'object')}"
        lines = [
            f"{self.a} and {self.b}: {verdict if number else 'the same'}",
            f"  compared {extent}, {size(self.nbytes)} in {self.seconds:.1f} s",
            *map("  {}".format, self.differences[:_SHOWN]),
        ]
        if number > _SHOWN:
            lines.append(f"  … and {number - _SHOWN} more")
        return "\n".join(lines)


@public("diff()")
def diff(
    a: str | os.PathLike[str] | ObjectPath,
    b: str | os.PathLike[str] | ObjectPath,
    *,
    only: str | Iterable[str] | None = None,
    rename: Rename | None = None,
    allow_objects: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Compare the checkpoints at ``a`` and ``b``, of any format that :func:`~dcp_datastates.convert` reads.

    Tensors are equal if their dtypes, shapes and bytes are: how they are sharded does not matter. NaNs in the same
    places are no difference of values, but count as differing if their bytes differ; so do 0.0 and -0.0. Objects are
    equal if their bytes are, or if they are equal as Python values. A thread holds a tensor of each at a time,
    and some 20 MiB.

    Args:
        a: A checkpoint: a file or directory, or its URL.
        b: Another.
        only: Compare only the values under these names: full names, or prefixes that end before a dot.
        rename: For names of ``a`` to be found in ``b``: a dict from old prefixes to new ones, or a function of a name.
            ``only`` are names after this.
        allow_objects: Whether Python objects may be unpickled that may run code; only for sources you trust. Other
            objects that differ in their bytes count as different.
        threads: How many compare; default: one per core, at most 8.
        progress: Called in the calling thread, about ten times per second and at the end, with the bytes done and the
            total bytes.

    Raises:
        ConfigurationError: an option cannot work.
        CheckpointNotFoundError, CheckpointCorruptError, UnsafeObjectError, StorageError: a checkpoint cannot be read.
        IncompatibleStateError: a key fits nothing in either.
    """
    began = time.monotonic()
    threads = thread_count(threads)
    path_a, path_b = locate(a), locate(b)
    wanted = None if only is None else NamePatterns("only", only)
    one = select(open_source(path_a, allow_objects), rename=rename)
    other = select(open_source(path_b, allow_objects))
    names = list(dict.fromkeys([*one.names(), *other.names()]))
    if wanted is not None:
        names = wanted.choose(names)
    found = [each for name in names if (each := _by_kind(one, other, name)) is not None]
    alike = set(names) - {each.name for each in found}
    tensors = [name for name in names if name in alike and name in one.tensors]
    objects = [name for name in names if name in alike and name in one.objects]
    total = sum(one.tensors[name].nbytes + other.tensors[name].nbytes for name in tensors)
    groups = one.groups(tensors, PIECE_BYTES)
    units = [partial(_compare_tensors, one, other, group, found) for group in groups]
    work(units, total, threads, progress)
    found += [
        Difference(name, "object", "object", "object")
        for name in objects
        if not _same_object(one, other, name, allow_objects)
    ]
    return Comparison(
        a=path_a,
        b=path_b,
        tensors=len(tensors),
        objects=len(objects),
        nbytes=total,
        differences=tuple(sorted(found, key=_badness)),
        seconds=time.monotonic() - began,
    )


_ORDER: Final[dict[Problem, int]] = {
    "kind": 0, "shape": 1, "only in a": 2, "only in b": 3, "dtype": 4, "values": 4, "object": 5
}  # fmt: skip


def _badness(difference: Difference) -> tuple[Any, ...]:
    largest = math.inf if difference.largest is None else difference.largest
    return _ORDER[difference.problem], -largest, natural_order(difference.name)


def _said(source: Source, name: str) -> str | None:
    """What is under the name, in words; None: nothing."""
    shaped = source.tensors.get(name)
    if shaped is not None:
        return f"{str(shaped.dtype).removeprefix('torch.')} {list(shaped.shape)}"
    return "object" if name in source.objects else None


def _by_kind(one: Source, other: Source, name: str) -> Difference | None:
    """The difference that is seen without reading values."""
    a, b = _said(one, name), _said(other, name)
    if a is None or b is None:
        return Difference(name, "only in b" if a is None else "only in a", a, b)
    x, y = one.tensors.get(name), other.tensors.get(name)
    if x is None or y is None:
        return None if x is y else Difference(name, "kind", a, b)
    return Difference(name, "shape", a, b) if x.shape != y.shape else None


def _compare_tensors(
    one: Source, other: Source, names: Sequence[str], found: list[Difference], done: Done
) -> None:
    """Add the differences of values to ``found``."""
    for name, a, b in zip(names, one.read(names), other.read(names), strict=True):
        pieces = (torch.split(each.reshape(-1), _PIECE_ELEMENTS) for each in (a, b))
        apart = [_apart(x.contiguous(), y.contiguous()) for x, y in zip(*pieces, strict=True)]
        differing, largest, relative, nans = zip(*apart, strict=True)
        if a.dtype != b.dtype or any(differing):
            difference = Difference(
                name,
                "values" if a.dtype == b.dtype else "dtype",
                _said(one, name),
                _said(other, name),
                a.numel(),
                sum(differing),
                None if None in largest else max(largest),
                None if None in relative else max(relative),
                sum(nans),
            )
            found.append(difference)
        done(a.nbytes + b.nbytes)


def _apart(a: torch.Tensor, b: torch.Tensor) -> tuple[int, float | None, float | None, int]:
    """How far elements, of shape (N,), are apart: the last fields of :class:`Difference`."""
    is_same = a.dtype == b.dtype
    if not a.numel() or (is_same and torch.equal(a.view(torch.uint8), b.view(torch.uint8))):
        return 0, 0.0, 0.0, 0
    differs = torch.ones_like(a, dtype=torch.bool)
    if is_same:
        differs = (a.view(torch.uint8) != b.view(torch.uint8)).view(len(a), -1).any(dim=1)
    try:
        x, y = (
            each.to(torch.complex128 if each.is_complex() else torch.float64) for each in (a, b)
        )
    except (RuntimeError, NotImplementedError):  # a dtype of which torch knows only the bytes
        return int(differs.sum()), None, None, 0
    difference = (x - y).abs()
    x_nan, y_nan = x.isnan(), y.isnan()
    difference[(x == y) | (x_nan & y_nan)] = 0  # equal infinities, too
    difference[difference.isnan()] = math.inf
    if not any(each.is_floating_point() or each.is_complex() for each in (a, b)):
        # Integers above 2^53 are not exact in float64. Where they are close, so is their difference in int64.
        exact = (a.to(torch.int64) - b.to(torch.int64)).abs().to(torch.float64)
        difference = torch.where(difference < 2.0**53, exact, difference)
    relative = torch.where(difference > 0, difference / torch.maximum(x.abs(), y.abs()), 0.0)
    relative[difference.isinf()] = math.inf
    differing = int((differs if is_same else difference > 0).sum())
    return differing, float(difference.max()), float(relative.max()), int((x_nan ^ y_nan).sum())


# --- objects ------------------------------------------------------------------------------------


def _same_object(one: Source, other: Source, name: str, allow_objects: bool) -> bool:
    if one.objects[name]() == other.objects[name]():
        return True
    try:
        return _equal(one.value(name, allow_objects), other.value(name, allow_objects))
    except UnsafeObjectError:
        return False


def _equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and as_bytes(a) == as_bytes(b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    try:
        return bool(a == b)
    except Exception:  # an object's own comparison may raise anything
        return False
