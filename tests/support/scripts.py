"""Small programs run in an interpreter of their own: for exits, forks and first uses."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

__all__ = ["Ended", "run_script"]

PREAMBLE = """
import faulthandler, os, signal, sys, time, warnings
faulthandler.enable()
faulthandler.register(signal.SIGUSR1, all_threads=True)  # a watchdog thread would not survive fork
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


class Ended(subprocess.CompletedProcess[str]):
    """How the script ended; ``assert_clean`` shows all of it if it did not end well."""

    def assert_clean(self) -> None:
        said = f"exit code {self.returncode}\n{self.stdout}\n{self.stderr}"
        assert self.returncode == 0, said
        assert "Traceback" not in self.stderr, said
        assert "terminate" not in self.stderr, said


def run_script(body: str, path: Path, timeout: float = 40) -> Ended:
    """Run ``body`` behind a few helpers; it is killed, stacks printed, after ``timeout`` seconds."""
    script = PREAMBLE + textwrap.dedent(body)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(path)],
            stdout=out,
            stderr=err,
            env=environment,
            cwd=path.parent,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
            os.killpg(process.pid, signal.SIGUSR1)
            time.sleep(1)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its children too
            process.wait()
        out.seek(0)
        err.seek(0)
        return Ended(process.args, code, out.read(), err.read())
