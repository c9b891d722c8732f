"""The step gate and the read window: the two moments of training that a save must know about.

* **The gate.** Before an optimizer changes what it owns, the reads of those tensors must be done. One
  global hook before every ``Optimizer.step()`` waits for them, without holding the GIL.
* **The window.** Reads start when the next backward pass begins: seen by a hook that fires when the
  first of a few chosen parameters has its gradient accumulated.

The hooks stay registered and cost a look at an empty list when no save is in flight.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dcp_datastates.ending import at_end
from dcp_datastates.lazy.devices import capturing
from dcp_datastates.lazy.ownership import known_optimizers, never_defer, stepped

__all__ = ["Gated", "arm_backward", "gate", "open_windows", "ungate"]

_WATCHED_PER_OPTIMIZER = 4


class Gated(Protocol):
    """A snapshot whose deferred reads are not all done."""

    def open_window(self) -> None:
        """Let the reads start. Never waits."""

    def release_for(self, optimizer: Optimizer, on_host: bool) -> None:
        """Return when ``optimizer`` may change what it owns: what the calling thread gives its current streams
        from now on; if ``on_host``, what anybody does. Never raises for a failed save.
        """


_lock = threading.Lock()  # guards _gated (replaced, never mutated, so that reading needs no lock)
_gated: tuple[Gated, ...] = ()


def gate(snapshot: Gated) -> None:
    """Hold optimizers back for ``snapshot`` from now on."""
    global _gated
    with _lock:
        _gated = (*_gated, snapshot)


def ungate(snapshot: Gated) -> None:
    """All its deferred reads are done, or it failed. Idempotent."""
    global _gated
    with _lock:
        _gated = tuple(other for other in _gated if other is not snapshot)


def open_windows() -> None:
    """Start the reads of every save in flight."""
    for snapshot in _gated:
        snapshot.open_window()


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    captured = capturing()
    if captured:
        # Nothing can be inserted here, and no hook is called when this is replayed.
        never_defer(optimizer)
    else:
        stepped(optimizer)
    for snapshot in _gated:
        snapshot.release_for(optimizer, captured)


class _Watch:
    """Hooks on a few parameters of one optimizer; the first gradient opens the windows."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self._handles = [
            parameter.register_post_accumulate_grad_hook(_on_gradient)  # type: ignore[no-untyped-call]
            for parameter in parameters
        ]

    def watches(self, parameters: list[torch.nn.Parameter]) -> bool:
        return len(parameters) == len(self._parameters) and all(
            reference() is parameter
            for reference, parameter in zip(self._parameters, parameters, strict=True)
        )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


_watches: weakref.WeakKeyDictionary[Optimizer, _Watch] = weakref.WeakKeyDictionary()


def _on_gradient(_: torch.Tensor) -> None:
    if _gated:
        open_windows()


def arm_backward() -> None:
    """See to it that the next backward pass through a known optimizer's parameters opens the windows.

    Called by the training thread. Gradients come in about the reverse order of the parameters, so the
    last ones are watched, and some before them in case those get no gradient.
    """
    for optimizer in known_optimizers():
        parameters = _spread(optimizer)
        watch = _watches.get(optimizer)
        if watch is not None and watch.watches(parameters):
            continue
        if watch is not None:
            watch.remove()
        _watches[optimizer] = _Watch(parameters)


def _spread(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    chosen: list[torch.nn.Parameter] = []
    for group in reversed(optimizer.param_groups):
        parameters = group["params"]
        for position in (len(parameters) - 1, len(parameters) // 2, 0):
            if position < 0:
                continue
            parameter = parameters[position]
            if (
                parameter.requires_grad
                and parameter.is_leaf
                and not any(parameter is other for other in chosen)
            ):
                chosen.append(parameter)
            if len(chosen) == _WATCHED_PER_OPTIMIZER:
                return chosen
    return chosen


def _forget_in_child() -> None:
    global _gated, _lock
    _lock = threading.Lock()
    _gated = ()


register_optimizer_step_pre_hook(_before_step)
os.register_at_fork(after_in_child=_forget_in_child)
# At exit the interpreter waits for DCP's threads, and they for reads whose window may never open by
# itself in time.
at_end(open_windows)
