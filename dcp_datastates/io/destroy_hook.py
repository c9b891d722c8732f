"""A hook on ``destroy_process_group()``, so that a job's saves in flight are finished first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from dcp_datastates.process.forks import in_child


class DestroyHook(dist.ProcessGroup):
    """A process group without connections, whose only use is its shutdown: when the job destroys its process groups,
    torch shuts down all registered groups in descending order of their names, so this group before the default group.

    If a release of torch registers groups in another way, it does not call the hook: then only the end of the process
    waits for the saves.

    Args:
        name: the group's registered name; the default group's is a number.
        on_destroy: ``destroy_process_group()`` calls it while all of the job's groups still exist.
    """

    def __init__(self, name: str, on_destroy: Callable[[], None]) -> None:
        # torch's stubs lack the only constructor that a subclass may call.
        super().__init__(0, 1)  # type: ignore[call-arg]
        self._on_destroy = on_destroy
        with contextlib.suppress(AttributeError):
            _books()[self] = name

    def shutdown(self) -> None:
        if not in_child():
            self._on_destroy()

    def close(self) -> None:
        """Unregister the group from torch. Idempotent."""
        with contextlib.suppress(AttributeError):
            _books().pop(self, None)


def _books() -> Any:
    world: Any = distributed_c10d._world
    return world.pg_names
