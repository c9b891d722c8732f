"""The script for Slurm, run by bash as it lies there; stand-ins for ``srun`` and ``scontrol`` start processes here."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import ROOT, started
from support.state.checkpoints import committed
from support.waiting import await_that

import dcp_datastates as ds

SCRIPT = ROOT / "examples/slurm.sh"
FIRST_PORT = 20_000
"""Of the script's, which counts on from there by the number of the job."""

PROGRAMS = {
    "srun": """
for node in $(seq "$SLURM_NNODES"); do
    "$@" & echo $! >>tasks
done
status=0
for task in $(cat tasks); do
    wait "$task" || status=$?
done
rm tasks
exit $status""",
    "scontrol": """
case "$1" in
    show) echo localhost; echo elsewhere ;;
    requeue) echo "$2" >>requeued ;;
esac""",
    "torchrun": f'exec {shlex.quote(sys.executable)} -m torch.distributed.run "$@"',
    "dcp-datastates": f"""
exec {shlex.quote(sys.executable)} -c \
    'import sys; from dcp_datastates_cli.main import main; sys.exit(main())' "$@" """,
}


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """A directory that a job runs in, with the commands of a cluster in ``bin``."""
    (tmp_path / "bin").mkdir()
    for name, text in PROGRAMS.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    shutil.copy(ROOT / "examples/fsdp2.py", tmp_path / "train.py")
    return tmp_path


def number_of_job() -> int:
    """One whose port is free."""
    for number in range(os.getpid() % 5000, 10_000):
        with socket.socket() as probe:
            if probe.connect_ex(("localhost", FIRST_PORT + number)) != 0:
                return number
    raise AssertionError("no port is free")


def job(cluster: Path, *arguments: str, signal_at: Path | None = None) -> tuple[int, str]:
    """Run a job of two nodes to its end; all of its tasks get SIGTERM when this checkpoint is committed.

    Returns the exit status, and what was printed.
    """
    environment = {
        "PATH": f"{cluster / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(number_of_job()),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with started(["bash", str(SCRIPT), *arguments], cluster, **environment) as process:
        if signal_at is not None:
            await_that(lambda: committed(signal_at) or process.poll() is not None, 120)
            assert process.poll() is None, process.communicate()
            for task in (cluster / "tasks").read_text().split():
                os.kill(int(task), signal.SIGTERM)
        out, errors = process.communicate(timeout=120)
    return process.returncode, out + errors


def test_a_job_that_is_stopped_is_queued_again_and_goes_on(cluster: Path) -> None:
    status, printed = job(cluster, "train.py", "100000", signal_at=cluster / "ckpt/step-10")
    assert status == 0, printed
    assert (cluster / "requeued").read_text().split() != [], printed
    newest = ds.latest(cluster / "ckpt")
    assert newest is not None
    stopped = int(newest.name.removeprefix("step-"))
    assert f"rank 1: step {stopped}" in printed, "the step of the signal was not saved"

    (cluster / "requeued").unlink()
    status, printed = job(cluster, "train.py", str(stopped + 3))
    assert status == 0, printed
    assert not (cluster / "requeued").exists(), "a job that is done was queued again"
    assert ds.latest(cluster / "ckpt") == cluster / "ckpt" / f"step-{stopped + 2}"


def test_a_job_that_saves_nothing_is_not_queued_again(cluster: Path) -> None:
    (cluster / "train.py").write_text("import sys\nsys.exit(3)\n")
    status, printed = job(cluster, "train.py")
    assert status != 0
    assert "no new checkpoint: not queued again" in printed
    assert not (cluster / "requeued").exists()


def test_its_deadlines_are_in_order() -> None:
    text = SCRIPT.read_text()
    (before_the_limit,) = re.findall(r"^#SBATCH --signal=TERM@(\d+)$", text, re.MULTILINE)
    (for_ranks,) = re.findall(r"TORCH_ELASTIC_SHUTDOWN_TIMEOUT=(\d+)", text)
    assert int(before_the_limit) > int(for_ranks) > 30, "30 s is torchrun's own"
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
