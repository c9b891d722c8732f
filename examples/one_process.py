"""Without the manager, in one process: `async_save`, `load` and `latest`, and a last save on SIGTERM.

python one_process.py
"""

import logging
import signal
import threading

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import dcp_datastates as ds

logging.basicConfig(level=logging.INFO)  # one line for each save: committed, or why not
stopping = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stopping.set())

model = torch.nn.Linear(512, 512)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ds.track(optimizer)
state: dict = {"step": -1}
newest = ds.latest("one")
if newest:
    state = ds.load(newest)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    torch.set_rng_state(state["rng"])

for step in range(state["step"] + 1, 100):
    model(torch.randn(8, 512)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": step}
    state["rng"] = torch.get_rng_state()
    ds.async_save(state, f"one/step-{step}", when_behind="skip")  # as often as storage allows
    if stopping.is_set():
        break
ds.save(state, "one/end")  # returns when it is committed
