"""Save into a bucket, and resume from it on another machine. Saves stream: there is no local copy.

    python object_store.py s3://bucket/run 20    # gs://, az:// and directories, too

Credentials, region and endpoint come from the environment: AWS_ACCESS_KEY_ID, AWS_REGION, AWS_ENDPOINT_URL, ...
"""

import sys

import torch

import dcp_datastates as ds

root, steps = sys.argv[1], int(sys.argv[2])
model = torch.nn.Linear(256, 256)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
state = {"model": model, "optimizer": optimizer, "rng": ds.RngState()}

# "skip": if the store has not finished the save before, this one is left out, and training does not wait.
with ds.CheckpointManager(root, every=5, keep=2, when_behind="skip") as manager:
    done = manager.restore_latest(state)
    for step in range(0 if done is None else done + 1, steps):
        model(torch.randn(8, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        manager.save(step, state)
print(f"{root} holds {manager.steps()}")  # the end of the block has awaited the last save
