"""Step 7: FSDP2 with NCCL, one rank: train, save, step, load into a new model: what is loaded is what was saved."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

import dcp_datastates
from dcp_datastates import DataStatesReader, DataStatesWriter
from gpu_first.step import Findings, NeedsGpuError, Options, main, synchronize

_ROUNDS = 3


class Sharded:
    """A model that is sharded over one rank, and its AdamW."""

    def __init__(self, options: Options, seed: int, offload: bool = False) -> None:
        torch.manual_seed(seed)
        policy = CPUOffloadPolicy() if offload else OffloadPolicy()
        self._device = options.device
        self._width = 256 if options.tiny else 4096
        mesh = init_device_mesh(options.device, (1,))
        self.model = nn.Sequential(*(nn.Linear(self._width, self._width) for _ in range(8)))
        self.model.to(options.device)
        for layer in self.model:
            fully_shard(layer, mesh=mesh, offload_policy=policy)
        fully_shard(self.model, mesh=mesh, offload_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        dcp_datastates.track(self.optimizer)

    def forward_backward(self) -> None:
        batch = torch.randn(64, self._width, device=self._device)
        self.model(batch).square().mean().backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


def measure(options: Options, findings: Findings) -> None:
    backend = "nccl" if options.device == "cuda" else "gloo"
    store = dist.FileStore(str(options.dir / "store"), 1)
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    findings.note("backend", backend)
    job = Sharded(options, seed=1)
    writer = DataStatesWriter(host_cache_size="64MiB" if options.tiny else "3GiB")
    for index in range(_ROUNDS):
        findings.note(f"round_{index}", one_round(job, options, writer, options.dir / f"{index}"))
    with findings.part("cpu_offload"):
        if options.device != "cuda":
            raise NeedsGpuError("FSDP2 offloads from a GPU")
        found = one_round(
            Sharded(options, seed=3, offload=True), options, writer, options.dir / "o", offload=True
        )
        findings.note("cpu_offload", found)
    writer.close()
    dist.destroy_process_group()


def one_round(
    job: Sharded, options: Options, writer: DataStatesWriter, path: Any, offload: bool = False
) -> dict[str, Any]:
    """Raises AssertionError with the names of what differs."""
    job.forward_backward()
    job.step()
    state = job.state()
    expected = {name: local(value).clone() for name, value in tensors(state).items()}
    synchronize(options.device)
    began = time.perf_counter()
    handle = dcp_datastates.async_save(state, path, writer=writer)
    call = time.perf_counter() - began
    job.forward_backward()
    job.step()
    handle.result()
    seconds = time.perf_counter() - began
    other = Sharded(options, seed=2, offload=offload)
    other.forward_backward()
    other.step()
    loaded = other.state()
    dcp.load(loaded, storage_reader=DataStatesReader(path))
    found = tensors(loaded)
    assert found.keys() == expected.keys()
    differing = [
        name for name, value in expected.items() if not torch.equal(local(found[name]), value)
    ]
    assert not differing, f"loaded otherwise than saved: {differing[:5]}"
    return {
        "call_seconds": call,
        "commit_seconds": seconds,
        "tensors": len(expected),
        "bytes": sum(value.nbytes for value in expected.values()),
        "equal": True,
    }


def tensors(state: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """All in a nested state, by name."""
    if isinstance(state, torch.Tensor):
        return {prefix: state}
    items = state.items() if isinstance(state, dict) else ()
    found: dict[str, torch.Tensor] = {}
    for name, value in items:
        found.update(tensors(value, f"{prefix}.{name}" if prefix else str(name)))
    return found


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


if __name__ == "__main__":
    sys.exit(main(measure))
