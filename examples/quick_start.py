"""Save at every iteration, resume from the newest checkpoint, take a last checkpoint on SIGTERM.

python quick_start.py 100
torchrun --nproc-per-node 2 quick_start.py 200    # goes on from step 99, on two ranks
"""

import os
import signal
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F

import dcp_datastates as ds

model: torch.nn.Module = torch.nn.Sequential(
    torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)
)
rank, world = 0, 1
if "RANK" in os.environ:  # started by torchrun
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def forward_backward(step: int) -> torch.Tensor:
    data = torch.Generator().manual_seed(step * world + rank)
    inputs = torch.randn(32, 64, generator=data)
    labels = torch.randint(10, (32,), generator=data)
    loss = F.cross_entropy(model(inputs), labels)
    loss.backward()
    return loss


state = {"model": model, "optimizer": optimizer}
with ds.CheckpointManager("ckpt", every=1, keep=3, on_signal=(signal.SIGTERM,)) as manager:
    done = manager.restore_latest(state)  # at any number of ranks; None: there is no checkpoint
    for step in range(0 if done is None else done + 1, int(sys.argv[1])):
        loss = forward_backward(step)  # meanwhile, the previous save's tensors are read
        optimizer.step()  # waits only if one of them has not been read yet
        optimizer.zero_grad()
        manager.save(step, state)  # returns immediately
        if manager.stopping:  # a rank got SIGTERM; this step is being saved
            break
        if step % 20 == 0 and rank == 0:
            print(f"step {step}: loss {loss.item():.3f}, checkpoints of {manager.steps()}")
print(f"rank {rank} began after step {done}")  # the end of the block has awaited the last save
if dist.is_initialized():
    dist.destroy_process_group()
