"""Small programs run in a process of their own, as its main program: for exits, forks and first uses.

The process is forked from one that has imported torch, which takes seconds, and nothing of this package. The program
runs in its ``__main__``, by its main thread, and ends as any interpreter ends.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PREAMBLE = """
import os, signal, sys, time, warnings
warnings.filterwarnings("ignore")
import torch
import torch.distributed.checkpoint as dcp
from dcp_datastates import DataStatesReader, DataStatesWriter, track
path = sys.argv[1]

def writer(where=path, **options):
    return DataStatesWriter(where, **{"host_cache_size": "64MiB", **options})

def number_at(where=path):
    target = {"w": torch.zeros(1_000_000)}
    dcp.load(target, storage_reader=DataStatesReader(where), no_dist=True)
    (number,) = target["w"].unique().tolist()
    return number

def owned(number):
    parameter = torch.nn.Parameter(torch.full((1_000_000,), float(number)))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    track(optimizer)
    parameter.grad = torch.ones_like(parameter)
    return {"w": parameter}, optimizer
"""

HASTY_END = """
from dcp_datastates.commit import group
from dcp_datastates.io.engine import Engine
from dcp_datastates.process import ending
group._CANCEL_SECONDS = ending._PATIENCE_SECONDS = 1.0
shut_down = Engine.shutdown
Engine.shutdown = lambda engine: shut_down(engine, 1.0)
"""
"""The first lines of a program whose failed saves, and whose end, wait one second for storage that hangs, not ten."""


def free_port() -> int:
    """A port of 127.0.0.1 that nothing else on this machine comes to use before the caller does: none of those that the
    system gives to sockets that ask for any, and of each process its own sixteen.
    """
    for port in itertools.count(10_000 + 16 * (os.getpid() % 1_250)):
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            return port
    raise AssertionError


def ranks_of_torchrun(world: int) -> str:
    """The first lines of a program that goes on as ``world`` processes, with the variables that torchrun sets.

    The parent prints how they ended.
    """
    return f"""
import os, sys
from support.jobs.scripts import free_port

os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE="{world}")
children = []
for rank in range({world}):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    children.append(os.fork())
    if children[-1] == 0:
        break
else:
    for child in children:
        print("ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    sys.exit()
"""


TWO_RANKS = (
    ranks_of_torchrun(2)
    + """
import torch.distributed as dist
import dcp_datastates as ds

dist.init_process_group("gloo")
"""
)
"""The first lines of a program of two ranks with a process group."""


class Ended(subprocess.CompletedProcess[str]):
    """How the script ended; ``assert_clean`` shows all of it if it did not end well."""

    def assert_clean(self) -> None:
        said = f"exit code {self.returncode}\n{self.stdout}\n{self.stderr}"
        assert self.returncode == 0, said
        assert "Traceback" not in self.stderr, said
        assert "terminate" not in self.stderr, said

    def assert_ended_by_errors(self, count: int, processes: int) -> None:
        """``count`` of the script's ``processes``, which it prints as "ended with", ended by an exception of Python's,
        the others well.
        """
        said = f"exit code {self.returncode}\n{self.stdout}\n{self.stderr}"
        ended = sorted(line.removeprefix("ended with ") for line in self.stdout.splitlines())
        assert ended == ["0"] * (processes - count) + ["1"] * count, said
        assert self.stderr.count("Traceback (most recent call last)") >= count, said
        for sign in ("terminate", "Fatal Python error", "Aborted"):
            assert sign not in self.stderr, said


_FORKING = """
import faulthandler, gc, json, os, signal, sys
requests, replies = os.fdopen(int(sys.argv[1])), os.fdopen(int(sys.argv[2]), "w")
import torch
import torch._dynamo  # the first optimizer of a process would import it
import torch.distributed.checkpoint
gc.collect()
gc.freeze()  # a program that ends would go through all of it, and copy its memory, in a second
for line in requests:
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    print(child, file=replies, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=replies, flush=True)
else:
    sys.exit()
os.setsid()
os.chdir(request["directory"])
os.environ.clear()
os.environ.update(request["environment"])
for stream in (1, 2):
    os.dup2(os.open(request["streams"][stream - 1], os.O_WRONLY | os.O_APPEND), stream)
faulthandler.enable()
faulthandler.register(signal.SIGUSR1, all_threads=True)  # a watchdog thread would not survive fork
sys.argv[1:] = request["arguments"]
script = request["script"]
del requests, replies, line, child, stream, request, faulthandler, gc, json, os, signal, sys, torch
exec(compile(script, "<script>", "exec"))
"""


class _Forking:
    """The process that programs are forked from. It ends with this one."""

    def __init__(self, environment: dict[str, str]) -> None:
        read, self._requests = os.pipe()
        self._replies, write = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _FORKING, str(read), str(write)],
            env=environment,
            pass_fds=(read, write),
        )
        os.close(read)
        os.close(write)

    def start(self, **request: Any) -> int:
        """The process that runs the program; it leads a group of its own."""
        os.write(self._requests, json.dumps(request).encode() + b"\n")
        child = self._reply(150)
        assert child is not None, "no process was forked"
        return child

    def wait(self, seconds: float) -> int | None:
        """The exit code of the process; None if it has not ended after ``seconds``."""
        return self._reply(seconds)

    def _reply(self, seconds: float) -> int | None:
        if not select.select([self._replies], [], [], seconds)[0]:
            return None
        reply = b""
        while not reply.endswith(b"\n"):
            byte = os.read(self._replies, 1)
            assert byte, "the process that programs are forked from has ended"
            reply += byte
        return int(reply)


_the_forking: dict[int, _Forking] = {}
"""By process: a forked one makes its own."""


def environment_of_python(**more: str) -> dict[str, str]:
    """Of a Python that finds what this one finds, with ``more``."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        "OMP_NUM_THREADS": "1",
        **more,
    }


def run_script(body: str, path: Path, timeout: float = 120, preface: str = "") -> Ended:
    """Run ``preface`` and ``body`` behind a few helpers, as :func:`run_program` does."""
    script = PREAMBLE + preface + textwrap.dedent(body)
    return run_program(script, path.parent, [str(path)], timeout)


def run_program(
    script: str,
    directory: Path,
    arguments: Sequence[str] = (),
    timeout: float = 120,
    **environment: str,
) -> Ended:
    """Run ``script`` in ``directory``, with more of an environment; it is killed, stacks printed, after ``timeout``
    seconds.
    """
    # A line that is printed in pieces mixes with another rank's.
    environment = environment_of_python(**{"PYTHONUNBUFFERED": "", **environment})
    forking = _the_forking.get(os.getpid())
    if forking is None:
        forking = _the_forking[os.getpid()] = _Forking(environment)
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        child = forking.start(
            script=script,
            arguments=list(arguments),
            environment=environment,
            directory=str(directory),
            streams=[out.name, err.name],
        )
        code = forking.wait(timeout)
        if code is None:
            os.killpg(child, signal.SIGUSR1)
            time.sleep(1)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # its children too
        if code is None:
            code = forking.wait(timeout)
        return Ended([script], -signal.SIGKILL if code is None else code, out.read(), err.read())
