"""A program that used `torch.save` goes on from its last file, and saves in the background from then on.

python from_torch_save.py checkpoint.pt 100
"""

import sys

import torch

import dcp_datastates as ds

model = torch.nn.Linear(512, 512)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
state = {"model": model, "optimizer": optimizer}

with ds.CheckpointManager("ckpt", every=10, keep=3) as manager:
    done = manager.restore_latest(state)
    if done is None:  # the first start of the changed program
        old = torch.load(sys.argv[1], weights_only=True)
        model.load_state_dict(old["model"])
        optimizer.load_state_dict(old["optimizer"])
        done = old["step"]
    for step in range(done + 1, int(sys.argv[2])):
        model(torch.randn(8, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        # Before: torch.save({"model": model.state_dict(), "optimizer": ..., "step": step}, path)
        manager.save(step, state)

newest = ds.latest("ckpt")
assert newest is not None
print(f"{newest} holds step {manager.latest_step}")
# And the way back, for programs that read such files:
ds.convert(newest, "newest.pt", to="torch", overwrite=True)
