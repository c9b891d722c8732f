"""Ranks that live for one job: forked anew each time, each with an environment of its own, free to die.

The pool's ranks (``support.jobs.pool``) outlive their jobs and must not be killed. These are for jobs that kill
ranks, or that set what the package reads once per process. They are forked from the same server, so a
rank costs what importing the package and meeting the others costs, and not the seconds of importing torch.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from support.jobs.server import begin_rank, fork_server

_LOG_TAIL = 6000


@dataclass
class Ended:
    """What became of one rank."""

    rank: int
    value: Any = None
    """What its function returned."""
    error: str = ""
    """The traceback, if its function raised."""
    exit_code: int | None = None
    """0, minus the signal that ended it, or None: it was still there at the end of the time."""
    ended_at: float = 0.0
    """time.monotonic(), the same clock in all processes."""
    log: str = ""
    """The end of what it printed."""
    elsewhere: str = ""
    """The errors of the other ranks: this one's may be their consequence."""

    @property
    def killed(self) -> bool:
        return self.exit_code == -signal.SIGKILL

    def result(self) -> Any:
        """Its value; AssertionError with all that is known unless it ended well."""
        if self.error or self.exit_code != 0:
            raise AssertionError(
                f"rank {self.rank} ended with exit code {self.exit_code}\n{self.error}\n{self.log}\n{self.elsewhere}"
            )
        return self.value


_jobs = itertools.count(1)


def run_ranks(
    function: str,
    world: int,
    scratch: Path,
    /,
    *,
    environments: Sequence[Mapping[str, str]] = (),
    seconds: float = 60.0,
    **arguments: Any,
) -> list[Ended]:
    """Run ``module:name`` on ``world`` new ranks with a default process group; one :class:`Ended` each.

    The module is imported after the rank's environment is set. Ranks that are still there after
    ``seconds`` have their stacks printed and are killed.
    """
    context = fork_server()
    directory = scratch / f"ranks-{os.getpid()}-{next(_jobs)}"
    directory.mkdir(parents=True)
    pipes: list[Connection] = []
    processes: list[Any] = []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        environment = environments[rank] if environments else {}
        process = context.Process(
            target=_enter,
            args=(function, rank, world, theirs, str(directory), dict(environment), arguments),
            name=f"rank{rank}",
            daemon=True,
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    ended = [Ended(rank) for rank in range(world)]
    _follow(ended, pipes, processes, time.monotonic() + seconds)
    late = [process for process in processes if process.is_alive()]
    for process in late:
        with contextlib.suppress(OSError):
            os.kill(process.pid, signal.SIGUSR1)
    if late:
        time.sleep(0.5)
    for process in late:
        process.kill()
        process.join()
    for one in ended:
        log = directory / f"rank{one.rank}.log"
        one.log = log.read_text(errors="replace")[-_LOG_TAIL:] if log.exists() else ""
        one.elsewhere = "\n".join(
            f"rank {other.rank}: {other.error}"
            for other in ended
            if other is not one and other.error
        )
    return ended


def _follow(
    ended: list[Ended], pipes: list[Connection], processes: list[Any], deadline: float
) -> None:
    """Take in what the ranks send, and when they end, until all have ended or it is too late."""
    talking = {pipe: rank for rank, pipe in enumerate(pipes)}
    living = {process.sentinel: rank for rank, process in enumerate(processes)}
    while living:
        left = deadline - time.monotonic()
        ready = wait([*talking, *living], max(0.0, left))
        if not ready:
            return
        for what in ready:
            if isinstance(what, int):
                rank = living.pop(what)
                processes[rank].join()
                ended[rank].exit_code = processes[rank].exitcode
                ended[rank].ended_at = time.monotonic()
                continue
            rank = talking[what]  # type: ignore[index]
            try:
                ended[rank].value, ended[rank].error = what.recv()  # type: ignore[union-attr]
            except (EOFError, OSError):
                del talking[what]  # type: ignore[arg-type]
    for pipe, rank in talking.items():
        with contextlib.suppress(EOFError, OSError):
            while pipe.poll():
                ended[rank].value, ended[rank].error = pipe.recv()


def _enter(
    function: str,
    rank: int,
    world: int,
    pipe: Connection,
    directory: str,
    environment: dict[str, str],
    arguments: dict[str, Any],
) -> None:
    os.environ.update(environment)
    begin_rank(rank, directory)
    import torch.distributed as dist

    from support.jobs.groups import destroy, initialize

    value, error = None, ""
    try:
        initialize(dist.FileStore(str(Path(directory, "store")), world), rank, world, 60.0)
        module, _, name = function.partition(":")
        value = getattr(importlib.import_module(module), name)(**arguments)
    except BaseException:
        error = traceback.format_exc()
    pipe.send((value, error))
    with contextlib.suppress(Exception):
        destroy()
