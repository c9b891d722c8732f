"""Objects as ``torch.save`` writes them: unpickled with safe types alone, unless the user trusts them.

Safe are torch's own, what the program has added (``torch.serialization.add_safe_globals``), and plain values of NumPy
and of Python's library, which training states have. None runs code of the pickle's choice.
"""

from __future__ import annotations

import argparse
import datetime
import decimal
import functools
import io
import pathlib
import pickle
import threading
import types
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import IO, Any, ClassVar, Final

import numpy as np
import torch

from dcp_datastates.errors import UnsafeObjectError

_MOST_TUPLES: Final = 500
"""So many cannot nest too deeply, and need no second look."""

# Held while torch knows further types, which it does for the whole process.
_lock = threading.RLock()


def unpickled(
    file: str | IO[bytes],
    said: str,
    allow_objects: bool,
    *,
    device: str | None = None,
    way_out: str = "exclude it",
    mapped: bool = False,
) -> Any:
    """The value in ``file``, which is ``said`` to people.

    Args:
        allow_objects: whether it may need more than safe types.
        device: where its tensors go; None: where they were.
        mapped: whether its tensors are mapped from the file.

    Raises :class:`UnsafeObjectError` for one that needs more, unless ``allow_objects``; and what ``torch.load`` and
    :func:`check_nesting` raise.
    """
    if allow_objects:
        return torch.load(file, device, weights_only=False, mmap=mapped)
    if not isinstance(file, io.BytesIO) or _tuples(file) > _MOST_TUPLES:
        with open(file, "rb") if isinstance(file, str) else nullcontext(file) as stream:
            try:
                check_nesting(stream)
            except ValueError as error:
                raise UnsafeObjectError(f"{said}: {error}; {way_out}") from error
    begin = 0 if isinstance(file, str) else file.tell()
    with suppress(pickle.UnpicklingError):
        return torch.load(file, device, weights_only=True, mmap=mapped)
    if not isinstance(file, str):
        file.seek(begin)
    try:
        with _further_safe_types():
            return torch.load(file, device, weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        ways = f"{way_out}, allow what it needs with torch.serialization.add_safe_globals([…])"
        raise unsafe(said, _needs(file, error), ways) from error


def _tuples(file: io.BytesIO) -> int:
    """How many tuples the pickles in ``file`` may have at most."""
    codes = (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)
    data = file.getvalue()
    if len(data) > 1 << 20:  # to count them would take longer than the second look
        return len(data)
    return sum(map(data.count, codes))


@contextmanager
def _further_safe_types() -> Iterator[None]:
    """Torch reads plain values of NumPy and of Python's library, too. What the program has added stays.

    Those whose constructors may take long are not among them: ``Fraction("1e1000000000")`` does not end.
    """
    with _lock:
        known = torch.serialization.get_safe_globals()
        with torch.serialization.safe_globals([each for each in _further() if each not in known]):
            yield


@functools.cache
def _further() -> tuple[Any, ...]:
    reconstruct, scalar = np.zeros(0).__reduce__()[0], np.float64(0).__reduce__()[0]
    former = "numpy.core.multiarray"  # as NumPy 1 has written them
    return (
        *(
            reconstruct,
            (reconstruct, f"{former}._reconstruct"),
            scalar,
            (scalar, f"{former}.scalar"),
        ),
        *(np.ndarray, np.dtype, *{type(np.dtype(code)) for code in np.typecodes["All"]}),
        *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
        *(pathlib.PurePosixPath, pathlib.PosixPath, frozenset, decimal.Decimal),
        *(argparse.Namespace, types.SimpleNamespace, (_no_bytes, "builtins.bytes")),
    )


def _no_bytes() -> bytes:
    """What ``b""`` is to a pickle. Other bytes are written as such, and need no call."""
    return b""


def unsafe(said: str, needs: str, way_out: str) -> UnsafeObjectError:
    """The error for a pickle that needs more than safe types."""
    return UnsafeObjectError(
        f"{said} is pickled Python that may run code (it needs {needs[:200]}); {way_out}, or trust the checkpoint with "
        f"allow_objects=True (--allow-objects)"
    )


def _needs(file: str | IO[bytes], error: pickle.UnpicklingError) -> str:
    """The classes and functions that a refused pickle needs; torch's own reason, if torch names none."""
    if not isinstance(file, str):
        file.seek(0)
    with suppress(Exception):  # a file of an old torch, or what no torch has written
        if names := torch.serialization.get_unsafe_globals_in_checkpoint(file):
            return ", ".join(sorted(names))
    lines = str(error).partition("WeightsUnpickler error:")[2].splitlines()
    return next(filter(None, map(str.strip, lines)), "more than safe types")


# ---- tuples that nest too deeply -----------------------------------------------------------------
# C code hashes a key of a dict by recursion, and a megabyte of pickle would end the process. So pickles are read in
# Python first, and tuples that nest deeply are refused.


_LEGACY_PICKLES: Final = 4
"""Of a file of torch before 1.6: a number, the protocol, sizes of types, and the value. (Names of storages follow.)"""


class BoundedUnpickler(pickle._Unpickler):  # the one in C cannot check what it builds
    """Raises ValueError for tuples that nest deeper than ``deepest``: stock DCP's metadata have two levels."""

    deepest: ClassVar[int] = 8
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def _load_tuple(self, load: Any) -> None:
        load(self)
        made = self.stack[-1]  # type: ignore[attr-defined]
        depths = vars(self).setdefault("depths", {})  # with the tuple, so that its id stays its own
        depth = 1 + max((depths.get(id(each), (0,))[0] for each in made), default=0)
        if depth > self.deepest:
            raise ValueError(f"it nests tuples too deeply; {self.deepest} levels are allowed")
        depths[id(made)] = depth, made

    for _code in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3):
        dispatch[_code[0]] = partial(lambda load, self: self._load_tuple(load), dispatch[_code[0]])


class _Anything:
    """Stands for an instance of a class that is not called."""

    def __new__(cls, *_args: object, **_kwargs: object) -> _Anything:
        return super().__new__(cls)

    def _ignore(self, *_args: object) -> None:
        pass

    __init__ = __setstate__ = __setitem__ = append = extend = add = _ignore


class _Dry(BoundedUnpickler):
    deepest = 500  # flattening a deeper state would exceed Python's own limit

    def find_class(self, module: str, name: str) -> Any:
        return _Anything

    def persistent_load(self, pid: Any) -> Any:
        return _Anything()


def check_nesting(stream: IO[bytes]) -> None:
    """Raise an exception if the pickles that ``torch.save`` has written to ``stream`` cannot be read, or nest tuples
    too deeply. Leaves the stream where it was.
    """
    begin = stream.tell()
    is_archive = stream.read(4) == b"PK\x03\x04"
    stream.seek(begin)
    if is_archive:
        with zipfile.ZipFile(stream) as archive:
            for entry in archive.infolist():
                if entry.filename.endswith("/data.pkl"):
                    _Dry(io.BytesIO(archive.read(entry))).load()
    else:
        for _ in range(_LEGACY_PICKLES):
            _Dry(stream).load()
    stream.seek(begin)
