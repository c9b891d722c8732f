"""The server that ranks are forked from: it has imported torch, which takes seconds, and nothing else of weight."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path


def fork_server() -> ForkServerContext:
    """Where to make ranks; starts the server of this process if it does not run yet."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.jobs.preload"])
    before = os.environ.get("PYTHONPATH")
    # CPython (3.11 at least) does not hand sys.path to the server, and a preload that is not found there
    # is skipped without a word: every rank would then import torch by itself.
    paths = [str(Path(__file__).parents[2]), *([before] if before else [])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context
