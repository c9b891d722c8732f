"""The incarnation of a job: the ranks believe only what the processes of this job have written to the store.

A store may outlive the processes that use it: torchrun's agent keeps its store when it restarts the workers, with the
same ranks and the same keys. No variable of the environment tells a job from the one before (a change of membership
does not raise ``TORCHELASTIC_RESTART_COUNT``). So rank 0 draws a name for the job, the *incarnation*, and the ranks of
a set meet once:

1. Rank 0 writes the incarnation under the key ``leader``.
2. Every other rank reads it, which may be an old one, and asks to be admitted to it, with a *nonce* of its own.
3. Rank 0 admits the first process that asks for a rank: it writes the nonce back.
4. A rank that finds its nonce knows that the incarnation's rank 0 is alive, and rank 0 knows that the rank is. A rank
   that finds none looks again who leads.

From then on all keys of the ranks contain the incarnation (``rank_set.py`` adds it), so no key of a former job is ever
read. A process of a former job that is still alive has an incarnation of its own. It does not ask again; if it is rank
0, it admits no more ranks once another incarnation leads.

One thread, ``dcp_datastates-meeting``, starts when the incarnation is first needed. It ends once all ranks have met, or
the process group is gone.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from dcp_datastates.process.futures import Worker
from dcp_datastates.ranks.connection import ANSWER_SECONDS, Client, Connection, pauses

logger = logging.getLogger(__name__)

_LINGER_SECONDS: Final = 10.0
"""How long rank 0 still admits ranks after its process group was destroyed: they may still want an answer of it."""

_LEADER: Final = "leader"


class Incarnation:
    """The incarnation of the ranks of one set, as this rank knows it. Any thread may use it.

    Args:
        prefix: of these ranks' keys in the store, in any incarnation.
        is_gone: whether the job has destroyed the process group.
    """

    def __init__(
        self, client: Client, prefix: str, rank: int, world: int, is_gone: Callable[[], bool]
    ) -> None:
        self._store = Connection(client, lambda: prefix)
        self._prefix = prefix
        self._rank, self._world = rank, world
        self._is_gone = is_gone
        self._lock = threading.RLock()  # guards _begun
        self._begun = False
        self._counts: dict[str, Iterator[int]] = {}
        self._known = threading.Event()  # the incarnation's name is known
        self._over = threading.Event()  # the thread has no more to do
        self.problem = "it has not begun"
        """Why the ranks have not met yet."""
        self.store_error: str | None = None
        """Why the store could not be asked when this rank last tried to meet rank 0."""
        self.processes: Mapping[int, str] = {}
        """The :func:`identity` of the processes that this one has met in this incarnation, by rank: on rank 0 all that
        have come, elsewhere rank 0's. It is replaced, never changed.
        """
        self.near: Mapping[int, str] = {}
        """Those of :attr:`processes` that this process can see."""
        # Written by the thread:
        self._name = self._former = ""
        self._gone_since: float | None = None
        # On rank 0:
        self._read = 0  # how many requests were read
        self._late: list[int] = []  # requests that were counted, and not there yet
        self._nonces: dict[int, str] = {}  # of the admitted ranks
        # On the others:
        self._nonce: Final = secrets.token_hex(8)
        self._asked = ""  # the incarnation that this rank last asked to be admitted to
        self._request = ""  # the key of that request

    def await_known(self, seconds: float) -> bool:
        """Wait up to ``seconds`` until this rank has met rank 0 (on rank 0: until it leads); return whether it has, so
        that a request to the store need not wait for that. The first call begins to meet it.
        """
        if not self._known.is_set():
            self._start()
            self._known.wait(seconds)
        return self._known.is_set()

    def await_all(self, seconds: float) -> bool:
        """Wait up to ``seconds`` until all ranks have met rank 0 (elsewhere: until this one has)."""
        return self._over.wait(seconds)

    def prefix(self) -> str:
        """The prefix of this incarnation's keys. Waits up to ten seconds for rank 0; then raises RuntimeError."""
        if not self.await_known(ANSWER_SECONDS):
            raise RuntimeError(f"this rank has not met rank 0 yet: {self.problem}")
        return f"{self._prefix}/{self._name}"

    def count(self, kind: str) -> int:
        """How often this was called for ``kind``. Ranks that make the same calls get the same numbers."""
        return next(self._counts.setdefault(kind, itertools.count(1)))

    def delete_of_former(self, key: str) -> None:
        """Delete a ``key`` of the incarnation before, if there was one: the keys of jobs that were killed would add up.

        Raises RuntimeError if the store fails.
        """
        if self._former:
            self._store.delete_key(f"{self._former}/{key}")

    def _start(self) -> None:
        with self._lock:
            if self._begun:
                return
            worker = Worker("dcp_datastates-meeting")
            run = functools.partial(_run, weakref.ref(self), pauses(self._world))
            self._begun = worker.post(run)
            if not self._begun:
                self.problem = worker.refusal
            worker.finish()

    # ---- the thread ----------------------------------------------------------------------------------

    def _look(self) -> bool:
        """Go a step further; return whether there are no more."""
        try:
            over = self._admit() if self._rank == 0 else self._ask()
            self.store_error = None
        except RuntimeError as error:
            self.store_error = str(error).partition("\n")[0][:200] or type(error).__name__
            self.problem = f"the store fails: {self.store_error}"
            over = False
        if over or self._has_ended():
            self._over.set()
            return True
        return False

    def _has_ended(self) -> bool:
        if not self._is_gone():
            return False
        self._gone_since = self._gone_since or time.monotonic()
        return time.monotonic() - self._gone_since > _LINGER_SECONDS

    def _admit(self) -> bool:
        if not self._name:
            former, _, _ = self._leader()
            name = secrets.token_hex(8)
            self._store.set(_LEADER, json.dumps([name, identity(), former]))
            self._name, self._former = name, former
            self.delete_of_former("asked")
            self._known.set()
        count = self._store.add(f"{self._name}/asked", 0)
        self._late += range(self._read + 1, count + 1)
        self._read = count
        if self._late:
            if self._leader()[0] != self._name:
                self.problem = "another job leads in this store"
                logger.warning("%s: rank 0 of a former job admits no more ranks", self.problem)
                return True
            self._answer()
        return len(self.processes) >= self._world - 1

    def _answer(self) -> None:
        found = self._store.find([f"{self._name}/asked/{number}" for number in self._late])
        # The client may have counted a request twice: then one number has none.
        self._late = [n for n in self._late if f"{self._name}/asked/{n}" not in found]
        answers: dict[str, str] = {}
        coming: dict[int, str] = {}
        for value in found.values():
            rank, nonce, who = json.loads(value)
            if self._nonces.setdefault(rank, nonce) == nonce:
                coming[rank] = who
                answers[f"{self._name}/admitted/{rank}"] = json.dumps([nonce, who])
        if answers:
            self._store.multi_set(answers)
        self._meet(coming)

    def _ask(self) -> bool:
        name, leader, former = self._leader()
        if not name:
            self.problem = "rank 0 has not come"
            return False
        if name != self._asked:
            if self._asked:  # a former job, which answers no more
                self._store.delete_key(self._request)
                self._store.delete_key(f"{self._asked}/asked")
            number = self._store.add(f"{name}/asked", 1)
            self._request = f"{name}/asked/{number}"
            self._store.set(self._request, json.dumps([self._rank, self._nonce, identity()]))
            self._asked = name
            return False
        answer = f"{name}/admitted/{self._rank}"
        found = self._store.find([answer])
        if not found:
            self.problem = "rank 0 has not answered"
            return False
        nonce, who = json.loads(found[answer])
        if nonce != self._nonce:
            self.problem = f"rank 0 has met another process as rank {self._rank}: {who}"
            return False
        if self._leader()[0] != name:
            return False
        self._meet({0: leader})
        with contextlib.suppress(RuntimeError):
            for key in (answer, self._request):
                self._store.delete_key(key)
        self._name, self._former = name, former
        self._known.set()
        return True

    def _meet(self, coming: Mapping[int, str]) -> None:
        self.processes = {**self.processes, **coming}
        self.near = {**self.near, **{rank: who for rank, who in coming.items() if is_near(who)}}

    def _leader(self) -> tuple[str, str, str]:
        """The incarnation that leads, the process of its rank 0, and the incarnation before."""
        found = self._store.find([_LEADER])
        try:
            name, who, former = json.loads(found[_LEADER])
        except (KeyError, ValueError):  # there is none, or another version of this package wrote it
            return "", "", ""
        return name, who, former


def _run(incarnation: weakref.ref[Incarnation], pause: Iterator[float]) -> None:
    """The thread. While it sleeps, it holds no reference: dropping the incarnation ends it."""
    while (this := incarnation()) is not None and not this._look():
        del this
        time.sleep(next(pause))


# ---- the identity of a process -----------------------------------------------------------------------


@functools.cache
def _boot() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """The start time of the process, in the kernel's ticks; None if the process is gone, or a zombie.

    Raises OSError if the time cannot be read (too many open files, say).
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in ("Z", "X") else fields[19]


def identity() -> str:
    """Machine, process and start time: enough for a rank on the same machine to see that the process is gone."""
    try:
        return f"{socket.gethostname()}|{_boot()}|{os.getpid()}|{_started(os.getpid())}"
    except OSError:  # then no rank can see the process
        return f"{socket.gethostname()}||{os.getpid()}|"


def is_gone(who: str) -> bool:
    """Whether the process with the :func:`identity` ``who`` has certainly ended. False if this process cannot
    see it.
    """
    _, _, pid, started = who.split("|")
    try:
        return is_near(who) and _started(int(pid)) != started
    except OSError:
        return False


def is_near(who: str) -> bool:
    """Whether this process could see the process ``who``: same boot of the same machine, same PID namespace.

    Machines that were copied while they ran may share the rest; so the host's name must be the same, too.
    """
    host, boot, _, _ = who.split("|")
    return boot == _boot() != "" and host == socket.gethostname()
