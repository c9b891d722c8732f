"""FSDP2 and tensor parallelism on one mesh. The same checkpoint loads on any other mesh, and in one process.

torchrun --nproc-per-node 4 fsdp2_tp.py 20 2    # 2 x 2
torchrun --nproc-per-node 2 fsdp2_tp.py 40 2    # resumes on 1 x 2
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dcp_datastates as ds

steps, tensor_parallel = int(sys.argv[1]), int(sys.argv[2])
device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
mesh = init_device_mesh(
    device,
    (dist.get_world_size() // tensor_parallel, tensor_parallel),
    mesh_dim_names=("shards", "tensor"),
)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(model, mesh=mesh["shards"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
state = {"model": model, "optimizer": optimizer}

with ds.CheckpointManager("ckpt", every=5, keep=2) as manager:
    done = manager.restore_latest(state)
    for step in range(0 if done is None else done + 1, steps):
        batch = torch.randn(8, 256, generator=torch.Generator().manual_seed(step)).to(device)
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.6f}")
        manager.save(step, state)
dist.destroy_process_group()
