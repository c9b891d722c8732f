"""A program that used DCP with its `FileSystemWriter`. Writer and reader change; the old checkpoint still loads.

python from_stock_dcp.py old_checkpoint new_checkpoint
"""

import sys

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from dcp_datastates import DataStatesReader, DataStatesWriter, track

old, new = sys.argv[1:]
model = torch.nn.Linear(512, 512)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
track(optimizer)  # its tensors are read later, during the next backward pass


def state():
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def load(reader):
    target = state()
    dcp.load(target, storage_reader=reader)
    set_state_dict(
        model, optimizer, model_state_dict=target["model"], optim_state_dict=target["optimizer"]
    )


load(dcp.FileSystemReader(old))  # what DCP's own writer has saved
for _ in range(3):
    # Before: storage_writer=dcp.FileSystemWriter(path)
    writer = DataStatesWriter(new)
    dcp.async_save(state(), storage_writer=writer)
    model(torch.randn(8, 512)).square().mean().backward()
    optimizer.step()  # waits only if a tensor has not been read yet
    optimizer.zero_grad()
    writer.committed.result()

load(DataStatesReader(new))
print("loaded", new)
