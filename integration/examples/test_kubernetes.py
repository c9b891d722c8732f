"""The job for Kubernetes: what it says is consistent, and its pods' command runs here, with other paths."""

from __future__ import annotations

import contextlib
import inspect
import re
import shlex
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from support.commands import ROOT, started
from support.state.checkpoints import committed
from support.waiting import await_that

import dcp_datastates as ds

yaml = pytest.importorskip("yaml")

TEXT = (ROOT / "examples/kubernetes.yaml").read_text()
SERVICE, JOB = yaml.safe_load_all(TEXT)
POD = JOB["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
PLAIN = {each["name"]: each["value"] for each in CONTAINER["env"] if "value" in each}


def test_the_grace_time_is_enough_for_the_last_saves() -> None:
    manager = inspect.signature(ds.DataStatesWriter).parameters["exit_timeout"].default
    ranks = int(PLAIN["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    assert POD["terminationGracePeriodSeconds"] > ranks > manager


def test_the_pods_find_each_other_and_their_disks() -> None:
    (command,) = CONTAINER["args"]
    assert command.startswith("exec "), "a shell in between would keep SIGTERM for itself"
    name = JOB["metadata"]["name"]
    assert POD["subdomain"] == SERVICE["metadata"]["name"]
    assert SERVICE["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert f"--master-addr {name}-0.{POD['subdomain']} " in command
    assert JOB["spec"]["completions"] == JOB["spec"]["parallelism"]
    assert f"--nnodes {JOB['spec']['completions']} " in command
    gpus = CONTAINER["resources"]["limits"]["nvidia.com/gpu"]
    assert f"--nproc-per-node {gpus} " in command
    mounted = {each["name"]: each["mountPath"] for each in CONTAINER["volumeMounts"]}
    assert set(mounted) == {each["name"] for each in POD["volumes"]}
    for path in mounted.values():
        assert f" {path}/" in command


class Cluster:
    """Pods as processes of this machine. Each node has a directory for its disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "shared").mkdir()
        (root / "bin").mkdir()
        torchrun = root / "bin/torchrun"
        torchrun.write_text(
            f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m torch.distributed.run "$@"\n'
        )
        torchrun.chmod(0o755)

    def disk(self, node: int) -> Path:
        return self.root / f"node-{node}"

    def run(self, steps: int, signal_at: Path | None = None) -> list[tuple[int, str]]:
        """All pods to their end: exit status, and what was printed. The first pod gets SIGTERM, as by an eviction, when
        this checkpoint is committed.
        """
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        ended = []
        with contextlib.ExitStack() as stack:
            pods = [
                stack.enter_context(self._started(node, port, steps))
                for node in range(JOB["spec"]["completions"])
            ]
            if signal_at is not None:
                await_that(lambda: committed(signal_at) or pods[0].poll() is not None, 120)
                pods[0].send_signal(signal.SIGTERM)
            for pod in pods:
                out, errors = pod.communicate(timeout=120)
                ended.append((pod.returncode, out + errors))
        return ended

    def _started(self, node: int, port: int, steps: int) -> Any:
        here = {
            "train-0.train": "127.0.0.1",
            "29500": str(port),
            "--nproc-per-node 8": "--nproc-per-node 1",
            "/app/node_disks.py": str(ROOT / "examples/node_disks.py"),
            "/nvme/": f"{self.disk(node)}/",
            "/shared/": f"{self.root / 'shared'}/",
            "100000": str(steps),
        }
        (command,) = CONTAINER["args"]
        assert [part for part in here if part not in command] == []
        for part, instead in here.items():
            command = command.replace(part, instead)
        environment = {
            **PLAIN,
            "PATH": f"{self.root / 'bin'}:/usr/bin:/bin",
            "JOB_COMPLETION_INDEX": str(node),
            "NODE_NAME": f"node-{node}",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        return started([*CONTAINER["command"], command], self.root, **environment)


def test_an_evicted_job_goes_on_with_what_the_other_node_has(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    archived = tmp_path / "shared/run/step-10"
    stopped = cluster.run(100_000, signal_at=archived)
    assert all(code != 0 for code, _ in stopped), (
        "a pod counts as complete, and is not started again"
    )
    (last,) = {
        int(step) for _, text in stopped for step in re.findall(r"ended with step (\d+)", text)
    }
    assert last > 10

    shutil.rmtree(cluster.disk(0))  # the pod comes to another node
    resumed = cluster.run(last + 3)
    assert [code for code, _ in resumed] == [0, 0], resumed
    for _, text in resumed:
        assert f"began after step {last}, ended with step {last + 2}" in text
