"""A data loader that resumes in the middle of an epoch, with the same order and the same dropout.

python data_loader.py 100    # start it again at any time
"""

import sys

import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

import dcp_datastates as ds

samples = torch.randn(100, 64, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(samples)
order, draws = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
sampler = RandomSampler(data, generator=order)
loader = StatefulDataLoader(data, batch_size=4, sampler=sampler, generator=draws)

torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
state = {"model": model, "optimizer": optimizer, "loader": loader, "rng": ds.RngState()}

with ds.CheckpointManager("ckpt", every=5, keep=2) as manager:
    done = manager.restore_latest(state)
    step = 0 if done is None else done + 1
    while step < int(sys.argv[1]):
        for (batch,) in loader:  # after a restore, the rest of the epoch
            loss = (model(batch) - batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step}: loss {loss.item()}")
            manager.save(step, state)
            step += 1
            if step == int(sys.argv[1]):
                break
