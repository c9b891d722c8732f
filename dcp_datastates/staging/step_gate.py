"""The step gate and the read window: hooks into training that stop and start a save's reads.

* **The gate.** Before an optimizer changes its tensors, their reads must be done. One global hook before every
  ``Optimizer.step()`` waits for the reads, without holding the GIL. The methods of ``torch.UntypedStorage`` that free
  or replace memory in place (a resize, a move to shared memory) wait in the same way.
* **The window.** Reads start when the next backward pass begins: a hook on a few chosen parameters fires when the first
  of them has its gradient accumulated. Where no such hook fires, reads start immediately.

The hooks stay installed. While no save is in flight, they only check an empty dict.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dcp_datastates.io.devices import accelerator
from dcp_datastates.io.gradient_hooks import compiles_backward, hooked, on_gradient, untraced
from dcp_datastates.process.ending import at_end
from dcp_datastates.staging.ownership import known_optimizers, never_defer, stepped

if TYPE_CHECKING:
    from dcp_datastates.staging.deferred_reads import DeferredReads

_WATCHED_PER_OPTIMIZER = 4

_MOVES_MEMORY: Final = (
    "resize_",
    "_resize_with_addr_",
    "_set_from_file",
    "_share_fd_cpu_",
    "_share_filename_cpu_",
    "_swap_data_ptr_",
)
"""Methods of ``torch.UntypedStorage``; a torch release may lack some. ``share_memory_()`` and ``torch.multiprocessing``
call two of them.
"""


# No lock: a signal handler or a garbage collection may call this code at any point. Single dict operations, including
# copy(), are atomic.
_gated: dict[DeferredReads, None] = {}


def gate(reads: DeferredReads) -> None:
    """Make optimizers wait for ``reads`` from now on."""
    _gated[reads] = None


def ungate(reads: DeferredReads) -> None:
    """Stop holding optimizers for ``reads``: they are done, or have failed. Idempotent."""
    _gated.pop(reads, None)


def open_windows() -> None:
    """Start the reads of every save in flight."""
    for reads in _gated.copy():
        reads.open_window()


# torch.compile would trace the gate of every new save. The first optimizer of a process has imported dynamo already.
@untraced
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if (watch := _watches.get(optimizer)) is not None:
        watch.stepped()
    captured = accelerator.capturing()
    if captured:
        # A capture cannot wait for events, and no hook is called on replay.
        never_defer(optimizer)
    else:
        stepped(optimizer)
    for reads in _gated.copy():
        reads.release_for(optimizer, captured)


def release_memory(storages: Iterable[torch.UntypedStorage], what: str) -> None:
    """Return when no save reads the memory of ``storages`` any more. ``what`` needs them, for the log."""
    if gated := _gated.copy():
        storages = list(storages)
        for reads in gated:
            reads.release_memory(storages, what)


def _gate_moves(name: str) -> None:
    """Make a method of ``torch.UntypedStorage`` wait until the memory that it moves has been read."""
    move = getattr(torch.UntypedStorage, name)

    @functools.wraps(move)
    def gated(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        storages = (each for each in (self, *args) if isinstance(each, torch.UntypedStorage))
        release_memory(storages, "a storage whose memory moves (a resize, share_memory_())")
        return move(self, *args, **kwargs)

    setattr(torch.UntypedStorage, name, gated)


class _Watch:
    """Hooks on a few parameters of one optimizer; the first gradient opens the windows. The hooks are removed with this
    object, which lives as long as the optimizer.

    It refers to no parameter: torch does not swap tensors that have weak references (``swap_tensors``).
    """

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.fires = bool(parameters)
        """Whether to expect a gradient before the next step. The replay of a captured graph calls no hook, say."""
        self.armed_at: int | None = None
        self._handles: list[Any] = []
        for parameter in parameters:
            self._handles.append(on_gradient(parameter, _on_gradient))

    def watches(self, parameters: list[torch.nn.Parameter]) -> bool:
        return len(parameters) == len(self._handles) and all(
            hooked(parameter, handle)
            for handle, parameter in zip(self._handles, parameters, strict=True)
        )

    def stepped(self) -> None:
        if self.armed_at is not None:
            self.fires = _gradients != self.armed_at
            self.armed_at = None

    def __del__(self) -> None:
        for handle in self._handles:
            handle.remove()


_watches: weakref.WeakKeyDictionary[Optimizer, _Watch] = weakref.WeakKeyDictionary()

_gradients = 0
"""How many times the hooks were called. Threads may race; what matters is whether it changes."""


def _on_gradient(_: torch.Tensor) -> None:
    if torch.compiler.is_compiling():  # compiled autograd; it would compile this anew for each save
        return
    global _gradients
    _gradients += 1
    open_windows()


def arm_backward() -> bool:
    """Let the next backward pass through a known optimizer's parameters open the windows. Returns False if no gradient
    can be expected to do so: then the caller opens its window immediately.

    The training thread calls this. Gradients arrive in about the reverse order of the parameters, so this watches the
    last parameters, and some earlier ones in case the last get no gradient.
    """
    if compiles_backward():
        return False
    expected = False
    for optimizer in known_optimizers():
        parameters = _spread(optimizer)
        watch = _watches.get(optimizer)
        if watch is None or not watch.watches(parameters):
            watch = _watches[optimizer] = _Watch(parameters)
        watch.armed_at = _gradients
        expected = expected or watch.fires
    return expected


def _spread(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    chosen: dict[int, torch.nn.Parameter] = {}  # by id: tensors compare by their elements
    for group in reversed(optimizer.param_groups):
        parameters = group["params"]
        for position in (len(parameters) - 1, len(parameters) // 2, 0):
            if not 0 <= position < len(parameters):  # a group may be empty
                continue
            parameter = parameters[position]
            if parameter.requires_grad and parameter.is_leaf and not _offloaded(parameter):
                chosen[id(parameter)] = parameter
            if len(chosen) == _WATCHED_PER_OPTIMIZER:
                return list(chosen.values())
    return list(chosen.values())


def _offloaded(parameter: torch.Tensor) -> bool:
    """Whether FSDP2 keeps this parameter on the host (``CPUOffloadPolicy``).

    If such a parameter has a hook, FSDP2 waits for the copy of its gradient to the host. Without a hook the copy runs
    behind the backward pass. FSDP2 runs no other hook of the parameter. On a CPU mesh there is no copy.
    """
    return (
        isinstance(parameter, DTensor)
        and parameter.is_cpu
        and parameter.device_mesh.device_type != "cpu"
    )


# The hooks run in children, too (a DataLoader's worker moves its batches to shared memory), and must not wait there.
os.register_at_fork(after_in_child=_gated.clear)
register_optimizer_step_pre_hook(_before_step)
for _name in _MOVES_MEMORY:
    if hasattr(torch.UntypedStorage, _name):
        _gate_moves(_name)
# At exit the interpreter waits for DCP's threads, which wait for reads whose window may not open in time by itself.
at_end(open_windows)
