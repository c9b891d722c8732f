"""Hooks that torch calls when a parameter's gradient has been accumulated, and what ``torch.compile`` makes of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["compiles_backward", "hooked", "on_gradient", "untraced"]


def on_gradient(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """Call ``hook`` in each backward pass that gives ``parameter`` a gradient, until ``remove()`` of the result."""
    return parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def hooked(parameter: torch.Tensor, handle: Any) -> bool:
    """Whether ``handle``, a result of :func:`on_gradient`, is of ``parameter``; if so, torch calls its hook.

    A parameter whose tensor torch has swapped (``swap_tensors``) still lists its hooks, but torch does not call them.
    Assigning the list makes torch call them again.
    """
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
    if not hooks or handle.id not in hooks:
        return False
    parameter._post_accumulate_grad_hooks = hooks
    return True


# ---- what torch.compile traces -------------------------------------------------------------------


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
