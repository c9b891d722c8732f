"""Functions that ``torch.compile`` leaves alone."""

from __future__ import annotations

__all__ = ["untraced"]

try:
    # Imports dynamo with the first call, not here.
    from torch._compile import _disable_dynamo as untraced
except ImportError:  # a torch that has moved it
    from torch.compiler import disable as untraced  # type: ignore[no-redef]
