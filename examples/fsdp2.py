"""FSDP2 with a scheduler, averaged weights, a validation, a position in the data, and the best checkpoint kept.

torchrun --nproc-per-node 2 fsdp2.py 100    # start it again at any time, on any number of ranks
"""

import signal
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import dcp_datastates as ds


class Batches:
    """This rank's share of each batch. All ranks have the same position, so it fits any number of ranks."""

    def __init__(self, batch_size):
        self.batch_size, self.taken = batch_size, 0

    def next(self):
        generator = torch.Generator().manual_seed(self.taken)
        samples = torch.randn(self.batch_size, 256, generator=generator)
        self.taken += self.batch_size
        return samples[dist.get_rank() :: dist.get_world_size()].to(device)

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["taken"]


def sharded_model():
    layers = torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256)
    model = torch.nn.Sequential(*layers)
    for layer in (*model, model):
        fully_shard(layer)
    return model


def loss_of(model, batch):
    return (model(batch) - batch.flip(1)).square().mean()


def validate(model):
    batch = torch.randn(64, 256, generator=torch.Generator().manual_seed(2**40))  # on all ranks
    with torch.no_grad():
        return loss_of(model, batch.to(device)).item()


device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
torch.manual_seed(0)
model, average = sharded_model(), sharded_model()
average.requires_grad_(False).load_state_dict(model.state_dict())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
batches = Batches(24)
state = {"model": model, "average": average, "optimizer": optimizer, "scheduler": scheduler}
state |= {"batches": batches, "rng": ds.RngState()}

keep = ds.Keep(last=2, best=("validation", "min"))
with ds.CheckpointManager("ckpt", every=5, keep=keep, on_signal=(signal.SIGTERM,)) as manager:
    done = manager.restore_latest(state)
    step = before = -1 if done is None else done
    for step in range(before + 1, int(sys.argv[1])):
        loss_of(model, batches.next()).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        for mean, now in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(now.detach(), 0.1)
        metrics = {"validation": validate(average)} if manager.should_save(step) else {}
        manager.save(step, state, metrics=metrics)
        if manager.stopping:
            break
print(f"rank {dist.get_rank()}: step {step}, validation {validate(average):.6f}")
dist.destroy_process_group()
