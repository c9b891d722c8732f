"""Jobs for tests and benchmarks: torchtitan's debug Llama on a few CPU ranks, by a launcher that lives on."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cpu import FLAGS
from inputs import make_inputs

HERE = Path(__file__).parent
OVERRIDE = "dcp_datastates.torchtitan.datastates"


@dataclass(frozen=True)
class Mesh:
    """How the ranks of a job share the model."""

    fsdp: int = 1
    tp: int = 1

    @property
    def ranks(self) -> int:
        return self.fsdp * self.tp

    def flags(self) -> list[str]:
        return [
            f"--parallelism.data_parallel_shard_degree={self.fsdp}",
            f"--parallelism.tensor_parallel_degree={self.tp}",
        ]

    def __str__(self) -> str:
        parts = [f"{name}{size}" for name, size in (("fsdp", self.fsdp), ("tp", self.tp))]
        return "x".join(part for part in parts if not part.endswith("1")) or "alone"


@dataclass(frozen=True)
class Ended:
    """What became of a job."""

    codes: list[int]
    """Exit codes of the ranks; minus the signal that ended one."""
    logs: list[str]

    @property
    def losses(self) -> dict[int, str]:
        """Loss by step, with all the digits that torchtitan prints."""
        plain = re.sub(r"\x1b\[[0-9;]*m", "", self.logs[0])
        found = re.findall(r"step:\s*(\d+)\s+loss:\s*([0-9.eE+-]+)", plain)
        return {int(step): loss for step, loss in found}

    def check(self) -> Ended:
        """Itself; AssertionError with the logs unless all ranks ended well."""
        if any(self.codes):
            tails = "\n".join(
                f"--- rank {rank} ---\n{log[-5000:]}" for rank, log in enumerate(self.logs)
            )
            raise AssertionError(f"exit codes {self.codes}\n{tails}")
        return self


@dataclass(frozen=True)
class Trial:
    """A training job; its checkpoints go to ``folder/checkpoint``."""

    folder: Path
    mesh: Mesh
    steps: int
    mode: str = "async"
    """torchtitan's ``async_mode``."""
    stock: bool = False
    """Whether torchtitan saves by itself."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the override."""
    flags: Sequence[str] = ()
    """More of torchtitan's."""
    tokens: int = 32
    """In a sequence; there is one for each rank."""
    interval: int = 1
    """Steps from one checkpoint to the next."""
    environment: dict[str, str] = field(default_factory=dict)
    hook: str = ""
    hook_options: dict[str, Any] = field(default_factory=dict)

    def arguments(self, tokenizer: Path, text: Path) -> list[str]:
        override = (
            [] if self.stock else ["--override.imports", f"{OVERRIDE}={json.dumps(self.options)}"]
        )
        return [
            *("--module", "llama3", "--config", "llama3_debugmodel"),
            *FLAGS,
            *self.mesh.flags(),
            f"--hf_assets_path={tokenizer}",
            "--dataloader.dataset=c4_test",
            f"--dataloader.dataset_path={text}",
            f"--training.seq_len={self.tokens}",
            "--training.local_batch_size=1",
            "--training.mixed_precision_param=float32",
            f"--training.steps={self.steps}",
            "--debug.seed=7",
            f"--dump_folder={self.folder}",
            "--checkpoint.enable",
            f"--checkpoint.async_mode={self.mode}",
            f"--checkpoint.interval={self.interval}",
            "--checkpoint.keep_latest_k=0",
            "--debug.no-enable-structured-logging",
            *self.flags,
            *override,
            "activation-checkpoint:none",
        ]


class Launcher:
    """A process that has imported torchtitan; its inputs lie in ``directory``. Close it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.tokenizer, self.text = make_inputs(directory)
        self._jobs = 0
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        paths = [str(HERE), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        with (directory / "launcher.log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "launch.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                cwd=directory,
            )

    def run(self, trial: Trial, *, seconds: int = 200) -> Ended:
        """Run a job to its end; ranks that run for longer than ``seconds`` show their stacks and end."""
        self._jobs += 1
        log = self._directory / f"job-{self._jobs}.log"
        job = {
            "ranks": trial.mesh.ranks,
            "arguments": trial.arguments(self.tokenizer, self.text),
            "log": str(log),
            "environment": trial.environment,
            "hook": trial.hook,
            "options": trial.hook_options,
            "seconds": seconds,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise AssertionError((self._directory / "launcher.log").read_text()[-5000:])
        logs = [
            Path(f"{log}.{rank}").read_text(errors="replace") for rank in range(trial.mesh.ranks)
        ]
        return Ended(ast.literal_eval(answer), logs)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
