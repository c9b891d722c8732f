"""A data loader whose position in the epoch fits any number of ranks.

torchrun --nproc-per-node 2 data_loader_ranks.py 10
torchrun --nproc-per-node 3 data_loader_ranks.py 20    # goes on where the two ranks stopped
"""

import sys

import torch
import torch.distributed as dist
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import dcp_datastates as ds


class Position:
    def __init__(self, sampler):
        self.sampler, self.taken = sampler, 0  # the loop adds the samples of each batch to taken

    def state_dict(self):
        return {"epoch": self.sampler.epoch, "taken": self.taken}

    def load_state_dict(self, state_dict):
        self.sampler.set_epoch(state_dict["epoch"])
        self.taken = state_dict["taken"]
        self.sampler.load_state_dict({"yielded": self.taken})


def shared_out(states):
    taken = sum(state["taken"] for state in states)
    return {**states[0], "taken": taken // dist.get_world_size()}


dist.init_process_group("gloo")
data = torch.utils.data.TensorDataset(torch.arange(600))
sampler = StatefulDistributedSampler(data, shuffle=True, seed=1)
loader = StatefulDataLoader(data, batch_size=6, sampler=sampler)
position = Position(sampler)
state = {"position": ds.PerRank(position, merge=shared_out)}

with ds.CheckpointManager("ckpt", every=5, keep=2) as manager:
    done = manager.restore_latest(state)  # before the loader is iterated over
    step = before = -1 if done is None else done
    for step, (batch,) in enumerate(loader, before + 1):
        print(f"step {step}: samples {batch.tolist()}")  # train here
        position.taken += len(batch)
        manager.save(step, state)
        if step + 1 == int(sys.argv[1]):
            break
dist.destroy_process_group()
