"""Checkpoints on the nodes' own disks, each file on two nodes; every second one goes to shared storage, too.

torchrun ... node_disks.py /nvme/run /shared/run 1000    # kubernetes.yaml starts it
"""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import dcp_datastates as ds

disk, shared, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
ds.configure_nodes(directory=disk, node=os.environ.get("NODE_NAME"))  # None: the host's name

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
state = {"model": model, "optimizer": optimizer}

with ds.CheckpointManager(
    "node:///run",  # below the directory
    every=5,
    keep=2,
    archive=shared,
    archive_every=2,
    on_signal=(signal.SIGTERM,),
) as manager:
    done = manager.restore_latest(state)  # the newest of both
    step = before = -1 if done is None else done
    for step in range(before + 1, steps):
        batch = torch.randn(24, 256, generator=torch.Generator().manual_seed(step))
        mine = batch[dist.get_rank() :: dist.get_world_size()].to(device)
        loss = (model(mine) - mine.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        manager.save(step, state)
        if manager.stopping:  # a rank got the signal: this step is being saved
            break
print(f"rank {dist.get_rank()}: began after step {done}, ended with step {step}", flush=True)
dist.destroy_process_group()
if manager.stopping:
    sys.exit(1)  # not done: all pods are to start again
