"""FSDP2 by Lightning. Only the strategy's class differs from a program that uses Lightning's own.

torchrun --nproc-per-node 2 lightning_fsdp.py 100
torchrun --nproc-per-node 3 lightning_fsdp.py 200    # goes on from step 100, on three ranks
"""

import os
import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.fsdp import fully_shard

import dcp_datastates as ds
from dcp_datastates.lightning import DataStatesModelParallelStrategy


class Module(pl.LightningModule):
    def configure_model(self):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256)
        )
        assert self.device_mesh is not None  # made by the strategy
        for layer in self.model:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        loss = (self.model(batch) - batch.flip(1)).square().mean()
        print(f"step {self.global_step + 1}: loss {loss.item():.6f}")
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Batches:
    """This rank's share of each batch. All ranks have the same position, so it fits any number of ranks."""

    def __init__(self):
        self.taken = 0

    def __len__(self):
        return 100_000  # of an epoch

    def __iter__(self):
        while self.taken < len(self):
            batch = torch.randn(24, 256, generator=torch.Generator().manual_seed(self.taken))
            self.taken += 1
            yield batch[rank::world]

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["taken"]


rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
trainer = pl.Trainer(
    strategy=DataStatesModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1),
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    callbacks=[ModelCheckpoint("ckpt", every_n_train_steps=5, save_top_k=0, save_last=True)],
    max_steps=int(sys.argv[1]),
    logger=False,
    use_distributed_sampler=False,
)
newest = ds.latest("ckpt")  # None at the first start
trainer.fit(Module(), Batches(), ckpt_path=str(newest) if newest else None)
