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
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import IO, Any, Final

import numpy as np
import torch

from dcp_datastates.errors import UnsafeObjectError
from dcp_datastates.io.bounded_unpickler import check_nesting

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
    :func:`~dcp_datastates.io.bounded_unpickler.check_nesting` raise.
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
