"""Host memory for eager copies: a slab of the host cache, so that ``host_cache_size`` bounds it."""

from __future__ import annotations

import logging
import time
from typing import Final

import torch

from dcp_datastates._native import Engine, Slab
from dcp_datastates.staging import step_gate

__all__ = ["EagerBuffers"]

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.1

_SMALL_BYTES: Final = 1 << 20
"""Eager copies up to this size use ordinary memory: a cache segment for each would waste space."""


class EagerBuffers:
    """Allocates one save's buffer for eager copies; ``slab`` is its memory from the host cache."""

    def __init__(self, native: Engine, order: int) -> None:
        self._engine = native
        self._order = order
        self.slab: Slab | None = None
        self.waited_seconds = 0.0
        """How long it has waited for room in the cache."""

    def allocate(self, nbytes: int, pinned: bool) -> torch.Tensor:
        """A ``uint8`` tensor of ``nbytes``: from the cache, which is pinned, unless it is small and not ``pinned``, or
        does not fit. May wait for older saves to leave the cache.
        """
        if nbytes <= _SMALL_BYTES and not pinned:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        if nbytes > self._engine.max_slab_bytes:
            logger.warning(
                "%d MiB must be copied at once and do not fit the host cache of %d MiB; using other "
                "memory, which devices copy to slowly. Call dcp_datastates.track(optimizer) before the first "
                "save, or raise host_cache_size",
                nbytes >> 20,
                self._engine.host_cache_bytes >> 20,
            )
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self.slab = self._engine.slab(nbytes, self._order, 0.0)
        began = time.monotonic()
        while self.slab is None:
            # Other saves hold the space. Start their reads: the backward pass that they wait for cannot begin before
            # this call returns.
            step_gate.open_windows()
            self.slab = self._engine.slab(nbytes, self._order, _POLL_SECONDS)
        self.waited_seconds += time.monotonic() - began
        return torch.frombuffer(self.slab, dtype=torch.uint8)

    def release(self) -> None:
        """Return the slab after staging has failed."""
        if self.slab is not None:
            self.slab.release()
