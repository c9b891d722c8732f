"""The server that ranks are forked from: it has imported torch, which takes seconds, and nothing else of weight."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest


def fork_server() -> ForkServerContext:
    """Where to make ranks; starts the server of this process if it does not run yet."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.jobs.preload"])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with pytest.MonkeyPatch.context() as patch:
        # CPython (3.11 at least) does not hand sys.path to the server, and a preload that is not found there
        # is skipped without a word: every rank would then import torch by itself.
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
        forkserver.ensure_running()
    return context


def begin_rank(rank: int, directory: str) -> None:
    """A rank's process begins: what it prints goes to a log in ``directory``, its stacks by SIGUSR1, too."""
    log = os.open(Path(directory, f"rank{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch

    torch.set_num_threads(1)
