"""Memory for tensors in passing, which goes back to the system at once.

``malloc`` keeps much of what threads allocate and free in sizes of megabytes: several times what is in use.
"""

from __future__ import annotations

import mmap
from typing import Final

import torch

__all__ = ["scratch_tensor"]

_MAPPED_FROM: Final = 256 << 10
"""Bytes from which a mapping is worth its cost."""


def scratch_tensor(count: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of ``count`` elements, (N,), on the host; its values are undefined."""
    nbytes = count * dtype.itemsize
    if nbytes < _MAPPED_FROM:
        return torch.empty(count, dtype=dtype, device="cpu")
    memory = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # a hundredth of the page faults
    return torch.frombuffer(memory, dtype=dtype)
