"""Being told when a job calls ``destroy_process_group()``, so that its saves in flight are finished first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["DestroyHook"]


class DestroyHook(dist.ProcessGroup):
    """A process group that connects nothing and does nothing but this: when the job destroys its process groups, torch
    shuts down those in its books, by name from the last, so this one before the default group.

    A release of torch that keeps other books does not call it: then only the end of the process waits for the saves.

    Args:
        name: of this group in torch's books; the default group's is a number.
        on_destroy: called by ``destroy_process_group()``, with all of the job's groups still there.
    """

    def __init__(self, name: str, on_destroy: Callable[[], None]) -> None:
        # torch's stubs lack the one constructor that a subclass may call.
        super().__init__(0, 1)  # type: ignore[call-arg]
        self._on_destroy = on_destroy
        with contextlib.suppress(AttributeError):
            _books()[self] = name

    def shutdown(self) -> None:
        self._on_destroy()

    def close(self) -> None:
        """Take it out of torch's books. Idempotent."""
        with contextlib.suppress(AttributeError):
            _books().pop(self, None)


def _books() -> Any:
    world: Any = distributed_c10d._world
    return world.pg_names
