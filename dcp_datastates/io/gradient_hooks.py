"""Hooks that torch calls when a parameter's gradient has been accumulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["hooked", "on_gradient"]


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
