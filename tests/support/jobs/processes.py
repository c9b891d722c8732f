"""Ranks: processes that are forked from a server that has imported torch (which takes seconds), and nothing else of
weight.

:class:`Ranks` outlive single tests: each job gets a process group of its own, met through a file, so ranks of parallel
test runners never collide. They must not be killed. :func:`run_ranks` is for jobs that kill ranks, or that set what the
package reads once per process: its ranks live for one job, each with an environment of its own.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import itertools
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

from support.jobs.server import begin_rank, fork_server

GRACE_SECONDS = 20.0
"""How long the others of a pool may take to notice that one rank has failed."""

COLLECTIVE_TIMEOUT_SECONDS = 150.0

STACKS_SECONDS = 120.0
"""When a rank prints its stacks: before a collective times out, so that all ranks show where they wait."""


@dataclass(frozen=True)
class Job:
    """A function by name (it is imported in the rank), with arguments that pickle."""

    module: str
    file: str | None
    """None: the module is found by its name."""
    name: str
    world: int
    kwargs: dict[str, Any] = field(default_factory=dict)
    is_last: bool = False
    """Whether the ranks end with it."""


@dataclass
class Ended:
    """What became of one rank's job."""

    rank: int
    value: Any = None
    """What its function returned."""
    error: str = ""
    """The traceback, if its function raised."""
    skipped: str = ""
    """Why it has skipped the test."""
    at_work: bool = False
    """Whether the rank still holds a part of the host cache."""
    exit_code: int | None = None
    """0, minus the signal that ended it, or None: it was still there at the end of the time, or of the job."""
    ended_at: float = 0.0
    """time.monotonic(), the same clock in all processes."""
    log: str = ""
    """The end of what it printed, if it failed, or ended with the job."""
    elsewhere: str = ""
    """The errors of the other ranks: this one's may be their consequence."""

    @property
    def killed(self) -> bool:
        return self.exit_code == -signal.SIGKILL

    @property
    def failed(self) -> bool:
        """Whether its function raised, or its process ended otherwise than well."""
        return bool(self.error or self.exit_code)

    def result(self) -> Any:
        """Its value; AssertionError with all that is known unless it ended well."""
        if self.error or self.exit_code != 0:
            raise AssertionError(
                f"rank {self.rank} ended with exit code {self.exit_code}\n{self.error}\n{self.log}\n{self.elsewhere}"
            )
        return self.value


# --- on a rank ------------------------------------------------------------------------------------


def _module(job: Job) -> ModuleType:
    if job.file is None:
        return importlib.import_module(job.module)
    module = sys.modules.get(job.module)
    if module is None:
        spec = importlib.util.spec_from_file_location(job.module, job.file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[job.module] = module
        spec.loader.exec_module(module)
    return module


def _do(job: Job, rank: int, store: str) -> Ended:
    """Run ``job`` as ``rank`` of a fresh default process group that meets at the file ``store``."""
    import pytest
    import torch.distributed as dist

    from support.jobs.groups import initialize

    ended = Ended(rank)
    try:
        met = dist.FileStore(store, job.world)
        initialize(met, rank, job.world, COLLECTIVE_TIMEOUT_SECONDS)
        function = getattr(_module(job), job.name)
        ended.value = getattr(function, "rank_body", function)(**job.kwargs)
        if not job.is_last:
            dist.barrier()  # no rank leaves while a peer still needs its sockets
    except pytest.skip.Exception as skipped:
        ended.skipped = str(skipped)
    except BaseException:
        ended.error = traceback.format_exc()
    for argument in job.kwargs.values():
        if isinstance(argument, pytest.MonkeyPatch):  # the rank's own: pytest undoes the test's
            argument.undo()
    return ended


def _serve(rank: int, pipe: Connection, directory: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    begin_rank(rank, directory)
    from support.jobs.groups import destroy

    while True:
        try:
            number, job = pipe.recv()
        except (EOFError, OSError):
            return
        faulthandler.dump_traceback_later(STACKS_SECONDS)
        ended = _do(job, rank, str(Path(directory, f"store{number}")))
        faulthandler.cancel_dump_traceback_later()
        if job.is_last:
            pipe.send(ended)
            with contextlib.suppress(Exception):  # others may have been killed
                destroy()
            return
        destroy()
        pipe.send(replace(ended, value=None, at_work=_is_at_work()))


def _is_at_work() -> bool:
    from support.waiting import await_free_host_cache

    try:
        await_free_host_cache(1.0)
    except AssertionError:
        return True
    return False


# --- in the test ----------------------------------------------------------------------------------


class Ranks:
    """Processes, each with what ``environments`` adds for it. ``run`` may be called by one thread at a time.

    After a crash or a timeout it kills what is left, and is ``broken``: its owner makes a new one. So it is after a job
    that has left work behind, such as an upload that a store's library still tries: the next test would find its
    memory taken.
    """

    def __init__(
        self, size: int, directory: Path, environments: Sequence[Mapping[str, str]] = ()
    ) -> None:
        context = fork_server()
        self._directory = directory
        self._jobs = 0
        self.broken = False
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            environment = dict(environments[rank]) if environments else {}
            process = context.Process(
                target=_serve,
                args=(rank, theirs, str(directory), environment),
                name=f"rank{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, job: Job, seconds: float) -> list[Ended]:
        """Run ``job`` on ranks ``0 .. job.world - 1``; what became of each, whatever happens."""
        self._jobs += 1
        ended = [Ended(rank) for rank in range(job.world)]
        pending: dict[Connection | int, int] = {}
        for rank in range(job.world):
            self._pipes[rank].send((self._jobs, job))
            pending |= {self._pipes[rank]: rank, self._processes[rank].sentinel: rank}
        deadline = time.monotonic() + seconds
        while pending:
            ready = wait([*pending], max(0.0, deadline - time.monotonic()))
            if not ready:
                self._give_up_on([ended[rank] for rank in {*pending.values()}], seconds)
                break
            for what in ready:
                rank = pending.pop(what, -1)  # type: ignore[arg-type]
                if rank < 0:
                    continue
                one = ended[rank] = self._heard(ended[rank], what)
                if not job.is_last:
                    if one.exit_code is not None:
                        one.error = f"its process ended with exit code {one.exit_code}"
                    pending = {each: other for each, other in pending.items() if other != rank}
                    if one.failed or one.skipped:
                        deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        for one in ended:
            self.broken = self.broken or one.at_work or one.exit_code is not None
            if one.failed or job.is_last:
                one.log = self._log(one.rank)
            others = (other for other in ended if other is not one and other.error)
            one.elsewhere = "\n".join(f"rank {other.rank}: {other.error}" for other in others)
        return ended

    def _heard(self, one: Ended, what: Any) -> Ended:
        """What is known of a rank that has said something, or whose process has ended."""
        pipe, process = self._pipes[one.rank], self._processes[one.rank]
        try:
            if what is pipe or pipe.poll():
                one = pipe.recv()
            if what is pipe:
                return one
        except (EOFError, OSError):
            pass
        process.join()
        return replace(one, exit_code=process.exitcode, ended_at=time.monotonic())

    def _give_up_on(self, late: list[Ended], seconds: float) -> None:
        """Have them print their stacks, and kill all."""
        for one in late:
            before = self._log(one.rank, most=None)
            with contextlib.suppress(OSError, TypeError):
                os.kill(self._processes[one.rank].pid, signal.SIGUSR1)
            deadline = time.monotonic() + 10
            while self._log(one.rank, most=None) == before and time.monotonic() < deadline:
                time.sleep(0.1)
            one.error += (
                f"still running (limit {seconds:g} s, {GRACE_SECONDS:g} s after another failed)"
            )
        time.sleep(0.5)  # the stacks are being written
        self.close(0.0)

    def _log(self, rank: int, most: int | None = 8000) -> str:
        """The end of what it has printed; None: all."""
        file = self._directory / f"rank{rank}.log"
        return file.read_text(errors="replace")[-(most or 0) :] if file.exists() else ""

    def close(self, seconds: float = 2.0) -> None:
        """End all ranks; those that do not go within ``seconds`` are killed."""
        self.broken = True
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + seconds
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


_runs = itertools.count(1)


def run_ranks(
    function: str,
    world: int,
    scratch: Path,
    /,
    *,
    environments: Sequence[Mapping[str, str]] = (),
    seconds: float = 150.0,
    **arguments: Any,
) -> list[Ended]:
    """Run ``module:name`` on ``world`` new ranks with a default process group; one :class:`Ended` each.

    The module is imported after the rank's environment is set. Ranks that are still there after
    ``seconds`` have their stacks printed and are killed.
    """
    directory = scratch / f"ranks-{os.getpid()}-{next(_runs)}"
    directory.mkdir(parents=True)
    module, _, name = function.partition(":")
    ranks = Ranks(world, directory, environments)
    ended = ranks.run(Job(module, None, name, world, arguments, is_last=True), seconds)
    ranks.close()
    return ended
