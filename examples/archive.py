"""A fast place for all checkpoints, and an archive for every second one, copied in the background.

python archive.py /nvme/run s3://bucket/run 40    # the archive may be a directory, too
"""

import sys

import torch

import dcp_datastates as ds

fast, archive, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
model = torch.nn.Linear(256, 256)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
state = {"model": model, "optimizer": optimizer}

with ds.CheckpointManager(
    fast,
    every=10,
    keep=2,
    archive=archive,
    archive_every=2,  # every second checkpoint
    archive_keep=ds.Keep(last=5),
    archive_rate="500MB/s",  # of each rank
) as manager:
    done = manager.restore_latest(state)  # the newest of both
    for step in range(0 if done is None else done + 1, steps):
        model(torch.randn(8, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        manager.save(step, state)

places = ds.latest([fast, archive])  # the newest that can be read completely
assert places is not None
ds.load(places, {"model": model}, only="model")  # each file from the nearest undamaged copy
print(f"the archive's newest: {ds.latest(archive)}")
