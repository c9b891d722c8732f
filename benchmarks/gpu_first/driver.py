"""The CUDA driver's own calls, by ctypes: for what torch does not offer, and to see what the driver has."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any

__all__ = ["BATCH_SINCE", "Copy", "Driver"]

BATCH_SINCE = 12080
"""The version of CUDA that has ``cuMemcpyBatchAsync`` first."""

_IN_STREAM_ORDER = 1

Copy = tuple[int, int, int]
"""To, from, bytes."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """``CUmemcpyAttributes``."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", _Location),
        ("destination_hint", _Location),
        ("flags", ctypes.c_uint),
    )


_Addresses = ctypes.POINTER(ctypes.c_uint64)
_Sizes = ctypes.POINTER(ctypes.c_size_t)
_BatchCall = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *(_Addresses, _Addresses, _Sizes, ctypes.c_size_t),
    *(ctypes.POINTER(_Attributes), _Sizes, ctypes.c_size_t),
    *(_Sizes, ctypes.c_size_t),
)


class Driver:
    """Raises :class:`OSError` if there is no driver, and if it does not start."""

    def __init__(self) -> None:
        name = os.environ.get("DCP_DATASTATES_CUDA_LIBRARY") or "libcuda.so.1"
        self._library = ctypes.CDLL(name)
        self._check("cuInit", self._library.cuInit(0))

    @property
    def version(self) -> int:
        """The newest CUDA that it drives: 12080 is 12.8."""
        found = ctypes.c_int()
        self._check("cuDriverGetVersion", self._library.cuDriverGetVersion(ctypes.byref(found)))
        return found.value

    def find(self, name: str, version: int) -> int | None:
        """The address of a function as ``version`` of CUDA has it."""
        found = ctypes.c_void_p()
        status = ctypes.c_int()
        code = self._library.cuGetProcAddress_v2(
            name.encode(),
            ctypes.byref(found),
            ctypes.c_int(version),
            ctypes.c_uint64(0),
            ctypes.byref(status),
        )
        return found.value if code == 0 else None

    def copy_batch(self, copies: Sequence[Copy], stream: int) -> None:
        """Have ``stream``, which is not the default one, make all ``copies``; one call of the driver.

        Raises :class:`OSError`, also where the driver has no such call.
        """
        address = self.find("cuMemcpyBatchAsync", BATCH_SINCE)
        if address is None:
            raise OSError("the driver has no cuMemcpyBatchAsync")
        call: Any = _BatchCall(address)
        to, source, nbytes = zip(*copies, strict=True)
        count = len(copies)
        attributes = _Attributes(source_access_order=_IN_STREAM_ORDER)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        code = call(
            (ctypes.c_uint64 * count)(*to),
            (ctypes.c_uint64 * count)(*source),
            (ctypes.c_size_t * count)(*nbytes),
            count,
            ctypes.byref(attributes),
            ctypes.byref(first),
            1,
            ctypes.byref(failed),
            stream,
        )
        self._check("cuMemcpyBatchAsync", code)

    def _check(self, call: str, code: int) -> None:
        if code != 0:
            raise OSError(f"{call} returned {code}")
