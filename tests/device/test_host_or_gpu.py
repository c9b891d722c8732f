"""Questions that are asked of a GPU where there is one (``make gpu-test``), and of the host elsewhere."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.tiers import sampled
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

import dcp_datastates as ds

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
WIDTH = 4096 if ON_GPU else 128


def flat(state: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """This rank's tensors, by name."""
    found: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}.")
        elif isinstance(value, torch.Tensor):
            local = value.to_local() if isinstance(value, DTensor) else value
            found[f"{prefix}{name}"] = local.detach()
    return found


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl" if ON_GPU else "gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Sharded:
    """A model that is sharded over one rank, its AdamW, and one iteration after another."""

    def __init__(self, seed: int, policy: OffloadPolicy) -> None:
        torch.manual_seed(seed)
        mesh = init_device_mesh(DEVICE, (1,))
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8))).to(DEVICE)
        for layer in (*self.model, self.model):
            fully_shard(layer, mesh=mesh, offload_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.iterate()

    def iterate(self) -> None:
        self.model(torch.randn(64, WIDTH, device=DEVICE)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize(
    "policy",
    [
        OffloadPolicy(),
        pytest.param(
            CPUOffloadPolicy(),
            marks=pytest.mark.skipif(not ON_GPU, reason="FSDP2 offloads from a GPU"),
        ),
    ],
    ids=["resident", "offloaded"],
)
def test_fsdp2(group: None, tmp_path: Path, policy: OffloadPolicy) -> None:
    job = Sharded(1, policy)
    for index in range(3):
        state = job.state()
        expected = {name: value.clone() for name, value in flat(state).items()}
        handle = ds.async_save(state, tmp_path / f"{index}")
        job.iterate()
        handle.result()
        loaded = Sharded(2, policy).state()
        dcp.load(loaded, storage_reader=ds.DataStatesReader(tmp_path / f"{index}"))
        found = flat(loaded)
        assert found.keys() == expected.keys()
        assert [name for name in found if not torch.equal(found[name], expected[name])] == []
        job.iterate()


def test_while_training_allocates_and_frees(tmp_path: Path) -> None:
    """``make gpu-first`` asks this with the allocators that PYTORCH_ALLOC_CONF can name, too."""
    # Larger than the pieces of physical memory that expandable segments are mapped from, and odd.
    scale = 1 if ON_GPU else 16
    sizes = ((256 << 20) // scale, (20 << 20) // scale + 4, (3 << 20) // scale, 1028, 4)
    parameters = [nn.Parameter(torch.randn(nbytes // 4, device=DEVICE)) for nbytes in sizes]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)

    def step() -> None:
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.5) * 2
        if ON_GPU:
            torch.cuda.empty_cache()
        optimizer.step()
        optimizer.zero_grad()

    step()
    for index in range(4):
        state = {f"{number}": parameter for number, parameter in enumerate(parameters)}
        for number, parameter in enumerate(parameters):
            for slot, value in optimizer.state[parameter].items():
                state[f"{number}.{slot}"] = value
        expected = {name: value.detach().clone() for name, value in state.items()}
        handle = ds.async_save(state, tmp_path / f"{index}")
        step()
        handle.result()
        found = {name: torch.empty_like(value) for name, value in expected.items()}
        dcp.load(found, storage_reader=ds.DataStatesReader(tmp_path / f"{index}"))
        assert [name for name in found if not torch.equal(found[name], expected[name])] == []


class Job:
    """What a user's loop has: dropout, running statistics, mixed precision, a schedule, random numbers."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        layers = (nn.Linear(64, 512), nn.Dropout(0.2), nn.BatchNorm1d(512), nn.Linear(512, 10))
        model = nn.Sequential(*layers).to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0, growth_interval=3)
        self.parts = model, optimizer, schedule, scaler
        names = ("model", "optimizer", "schedule", "scaler", "rng", "step")
        self.state = dict(zip(names, (*self.parts, ds.RngState(), -1), strict=True))

    def train(self, root: Path, steps: int) -> dict[str, Any]:
        model, optimizer, schedule, scaler = self.parts
        with ds.CheckpointManager(root, every=2) as manager:
            manager.restore_latest(self.state)
            for step in range(self.state["step"] + 1, steps):
                inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
                with torch.autocast(DEVICE, torch.float16 if ON_GPU else torch.bfloat16):
                    loss = model(inputs.to(DEVICE)).square().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                schedule.step()
                self.state["step"] = step
                manager.save(step, self.state)
        return {"model": model.state_dict(), "scaler": scaler.state_dict()}


def test_a_job_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    whole = Job(0).train(tmp_path / "whole", 16)
    Job(0).train(tmp_path / "stopped", 9)  # the newest checkpoint is that of step 8
    resumed = Job(1).train(tmp_path / "stopped", 16)
    assert resumed["scaler"] == whole["scaler"]
    torch.testing.assert_close(resumed["model"], whole["model"], rtol=0, atol=0)


DIES = """
import sys, time, torch, dcp_datastates as ds
path, device, during = sys.argv[1:]
state = {f"{n}": torch.ones(((64 << 20) if device == "cuda" else (1 << 20)), device=device) for n in range(8)}
writer = ds.DataStatesWriter(reads="all")
ds.async_save(state, path + "/first", writer=writer).result()
small = torch.zeros(16, device=device)
def index(at):
    small[torch.full((1,), at, device=device)]
    for _ in range(4000):  # a launch queue that is full
        small.add_(1)
    if device == "cuda":
        torch.cuda.synchronize()
index(0)  # what is loaded lazily is loaded now
if device == "cuda":
    torch.cuda._sleep(600_000_000)
if during == "save":  # reads behind the long kernel, beside the assert
    ds.async_save(state, path + "/second", writer=writer)
try:
    index(1 << 20)
finally:
    print("FAILED AT", time.monotonic(), flush=True)
"""


@pytest.mark.parametrize("during", sampled(["save", "nothing"], keep=["save"]))
def test_an_error_of_the_device_ends_the_process(tmp_path: Path, during: str) -> None:
    """A device assert (on the host, an exception) that nobody catches: a save in flight does not hold up the end."""
    command = [sys.executable, "-c", DIES, str(tmp_path), DEVICE, during]
    ended = subprocess.run(command, timeout=200, capture_output=True, text=True)
    seconds = time.monotonic() - float(ended.stdout.split()[-1])
    print(f"ended after {seconds:.2f} s, {during} in flight")
    assert ended.returncode == 1, ended.stderr
    assert "index" in ended.stderr or "assert" in ended.stderr
    assert seconds < 20
