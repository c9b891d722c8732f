"""Jobs of torchtitan on CPU ranks: one process imports it, and forks the ranks of one job after the other.

    python launch.py --ranks 4 --log run.log -- --module llama3 --config llama3_debugmodel ...

runs one job. Without arguments it reads jobs from standard input, one JSON document per line (:class:`Job`), and
answers each with a line, the list of its ranks' exit codes: importing torchtitan takes longer than most test jobs.

The store is hosted here, as torchrun's agent does it, so that it outlives every rank.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from cpu import use_cpu, use_dense_attention, use_plain_staging

_STORE_SECONDS = 120


@dataclass
class Job:
    """What to run."""

    ranks: int
    arguments: list[str]
    """Of torchtitan's command line."""
    log: str
    """A file for what the ranks print; ``.N`` is appended for rank N."""
    environment: dict[str, str] = field(default_factory=dict)
    """For all ranks."""
    hook: str = ""
    """``module:function``, called in each rank before torchtitan's main, with the job's ``options``."""
    options: dict[str, Any] = field(default_factory=dict)
    seconds: int = 120
    """Ranks that still run then print their stacks and end."""


def run(job: Job) -> list[int]:
    """Run a job; each rank's exit code, or minus the signal that ended it.

    When one rank fails, the others are killed, as torchrun does it.
    """
    store = dist.TCPStore(
        "127.0.0.1",
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=_STORE_SECONDS),
    )
    sys.stdout.flush()
    sys.stderr.flush()
    pids = {}
    for rank in range(job.ranks):
        pid = os.fork()
        if pid == 0:
            _enter(job, rank, store.port)
        pids[pid] = rank
    codes = [0] * job.ranks
    while pids:
        pid, status = os.wait()
        rank = pids.pop(pid)
        codes[rank] = os.waitstatus_to_exitcode(status)
        if codes[rank]:
            for other in pids:
                os.kill(other, signal.SIGKILL)
    return codes


def _enter(job: Job, rank: int, port: int) -> None:
    """The life of a rank, in the forked process; never returns."""
    code = 1
    try:
        file = os.open(f"{job.log}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        faulthandler.dump_traceback_later(job.seconds, exit=True)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(job.ranks),
            LOCAL_WORLD_SIZE=str(job.ranks),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            TORCHELASTIC_USE_AGENT_STORE="True",
            **job.environment,
        )
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        sys.argv = ["torchtitan", *job.arguments]
        if job.hook:
            module, _, name = job.hook.partition(":")
            getattr(importlib.import_module(module), name)(**job.options)
        import torchtitan.train

        torchtitan.train.main()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if code == 0:
            code = _leave()
        os._exit(code)


def _leave() -> int:
    """Run what the interpreter would run at exit; it cannot itself, inside a fork of a running loop."""
    import atexit
    import threading

    try:
        gc.collect()
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _prepare() -> None:
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling a mask takes longer than any job
    os.environ.setdefault("WANDB_MODE", "disabled")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    use_cpu()
    import torchtitan.models.llama3.config_registry
    import torchtitan.train  # noqa: F401

    import dcp_datastates  # noqa: F401

    use_dense_attention()
    use_plain_staging()
    gc.collect()
    gc.freeze()  # else each rank's garbage collection copies all of this


def main() -> int:
    parser = argparse.ArgumentParser(description="Run torchtitan on CPU ranks.")
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--log", default="torchtitan.log")
    parser.add_argument("arguments", nargs="*", help="torchtitan's, after --")
    given = parser.parse_args()
    if given.ranks is None:
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what the libraries print must not be taken for an answer
        _prepare()
        with contextlib.suppress(KeyboardInterrupt):
            for line in sys.stdin:
                print(json.dumps(run(Job(**json.loads(line)))), file=answers, flush=True)
        return 0
    _prepare()
    codes = run(Job(given.ranks, given.arguments, given.log, seconds=24 * 3600))
    print(f"exit codes of the ranks: {codes}; they printed to {given.log}.N")
    return max(map(abs, codes))


if __name__ == "__main__":
    sys.exit(main())
