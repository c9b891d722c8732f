"""DDP without the manager. Each rank writes its share; all ranks stop after the same step on SIGTERM.

torchrun --nproc-per-node 2 ddp.py
"""

import signal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import dcp_datastates as ds

dist.init_process_group("gloo")
stopping = torch.zeros(1)
signal.signal(signal.SIGTERM, lambda *_: stopping.fill_(1))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(512, 512))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

step, stop = 0, torch.zeros(1)
newest = ds.latest("ddp")  # the same on all ranks
if newest:
    saved = ds.load(newest)
    set_state_dict(
        model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
    )
    step = saved["step"] + 1
    if (rng := saved.get(f"rng-{dist.get_rank()}")) is not None:  # there may be more ranks now
        torch.set_rng_state(rng)
while not stop:
    model(torch.randn(8, 512)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": step}
    state[f"rng-{dist.get_rank()}"] = torch.get_rng_state()
    handle = ds.async_save(state, f"ddp/step-{step}")
    step, stop = step + 1, stopping.clone()
    dist.all_reduce(stop)  # all ranks stop after the same step
handle.result()
dist.destroy_process_group()
