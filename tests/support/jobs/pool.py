"""A pool of rank processes that outlives single tests, because importing torch takes seconds.

Ranks are forked from a server that has imported torch and nothing else of weight. Each job gets a
process group of its own, met through a file, so pools of parallel test runners never collide. After a crash
or a timeout the pool kills what is left; its owner makes a new one. So it does after a job that has left work behind,
such as an upload that a store's library still tries: the next test would find its memory taken.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import os
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

from support.jobs.server import begin_rank, fork_server

GRACE_SECONDS = 20.0
"""How long the others may take to notice that one rank has failed."""

COLLECTIVE_TIMEOUT_SECONDS = 60.0

STACKS_SECONDS = 45.0
"""When a rank prints its stacks: before a collective times out, so that all ranks show where they wait."""


@dataclass(frozen=True)
class Job:
    """A function by name (it is imported in the rank), with arguments that pickle."""

    module: str
    file: str
    name: str
    world: int
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a rank ended; ``text`` has the traceback or the reason."""

    rank: int
    kind: str  # "passed", "failed" or "skipped"
    text: str = ""
    at_work: bool = False
    """Whether the rank still holds a part of the host cache."""


def _module(job: Job) -> ModuleType:
    module = sys.modules.get(job.module)
    if module is None:
        spec = importlib.util.spec_from_file_location(job.module, job.file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[job.module] = module
        spec.loader.exec_module(module)
    return module


def call_on_rank(job: Job, rank: int, store: Any) -> Outcome:
    """Run ``job`` as ``rank`` of a fresh default process group that meets at ``store``."""
    import pytest
    import torch.distributed as dist

    from support.jobs.groups import destroy, initialize

    try:
        initialize(store, rank, job.world, COLLECTIVE_TIMEOUT_SECONDS)
        function = getattr(_module(job), job.name)
        getattr(function, "rank_body", function)(**job.kwargs)
        dist.barrier()  # no rank leaves while a peer still needs its sockets
    except pytest.skip.Exception as skipped:
        return Outcome(rank, "skipped", str(skipped))
    except BaseException:
        return Outcome(rank, "failed", traceback.format_exc())
    finally:
        destroy()
        for argument in job.kwargs.values():
            if isinstance(argument, pytest.MonkeyPatch):  # the rank's own: pytest undoes the test's
                argument.undo()
    return Outcome(rank, "passed")


def _serve(rank: int, pipe: Connection, directory: str) -> None:
    begin_rank(rank, directory)
    import torch.distributed as dist

    while True:
        try:
            number, job = pipe.recv()
        except (EOFError, OSError):
            return
        store = dist.FileStore(str(Path(directory, f"store{number}")), job.world)
        faulthandler.dump_traceback_later(STACKS_SECONDS)
        outcome = call_on_rank(job, rank, store)
        faulthandler.cancel_dump_traceback_later()
        pipe.send(replace(outcome, at_work=_is_at_work()))


def _is_at_work() -> bool:
    from support.waiting import await_free_host_cache

    try:
        await_free_host_cache(1.0)
    except AssertionError:
        return True
    return False


class RankPool:
    """``size`` ranks. ``run`` may be called by one thread at a time; a broken pool stays broken."""

    def __init__(self, size: int) -> None:
        context = fork_server()
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-")
        self._jobs = 0
        self.broken = False
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, theirs, self._directory.name),
                name=f"rank{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def size(self) -> int:
        return len(self._processes)

    def run(self, job: Job, timeout: float) -> list[Outcome]:
        """Run ``job`` on ranks ``0 .. job.world - 1``; one outcome for each, whatever happens."""
        self._jobs += 1
        pending = {}
        for rank in range(job.world):
            self._pipes[rank].send((self._jobs, job))
            pending[self._pipes[rank]] = rank
        outcomes: list[Outcome] = []
        deadline = time.monotonic() + timeout
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                outcomes += self._give_up_on(list(pending.values()), timeout)
                break
            for pipe in ready:
                rank = pending.pop(pipe)  # type: ignore[call-overload]
                try:
                    outcome = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    outcome = self._dead(rank)
                else:
                    if outcome.kind == "failed":
                        outcome = replace(outcome, text=f"{outcome.text}\n{self._log(rank)}")
                outcomes.append(outcome)
                self.broken = self.broken or outcome.at_work
                if outcome.kind != "passed":
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return sorted(outcomes, key=lambda outcome: outcome.rank)

    def _dead(self, rank: int) -> Outcome:
        self.broken = True
        process = self._processes[rank]
        process.join(5)
        return Outcome(
            rank, "failed", f"process ended with exit code {process.exitcode}\n{self._log(rank)}"
        )

    def _give_up_on(self, ranks: list[int], timeout: float) -> list[Outcome]:
        self.broken = True
        for rank in ranks:
            with contextlib.suppress(OSError, TypeError):
                os.kill(self._processes[rank].pid, signal.SIGUSR1)  # type: ignore[arg-type]
        time.sleep(1.0)
        outcomes = [
            Outcome(
                rank,
                "failed",
                f"still running (limit {timeout:g} s, {GRACE_SECONDS:g} s after another rank "
                f"failed); its stacks:\n{self._log(rank)}",
            )
            for rank in ranks
        ]
        self.close()
        return outcomes

    def _log(self, rank: int) -> str:
        try:
            text = Path(self._directory.name, f"rank{rank}.log").read_text(errors="replace")
        except OSError as error:
            return f"(no log: {error})"
        return text[-8000:]

    def close(self) -> None:
        """End all ranks; those that do not go are killed."""
        self.broken = True
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + 2.0
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(5)
        self._directory.cleanup()
