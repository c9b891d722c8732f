"""What ``torch.compile`` traces: functions that it leaves alone, and whether it traces backward passes."""

from __future__ import annotations

import sys

__all__ = ["compiles_backward", "untraced"]

try:
    # Imports dynamo with the first call, not here.
    from torch._compile import _disable_dynamo as untraced
except ImportError:  # a torch that has moved it
    from torch.compiler import disable as untraced  # type: ignore[no-redef]


def compiles_backward() -> bool:
    """Whether compiled autograd is known to be on. It compiles a backward pass anew if a parameter has got a hook."""
    config = sys.modules.get("torch._dynamo.config")  # not imported: compiled autograd is off
    running = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(
        getattr(config, "compiled_autograd", False)
        or getattr(running, "compiled_autograd_enabled", False)
    )
