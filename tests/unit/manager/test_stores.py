"""A manager whose checkpoints lie in an object store."""

from __future__ import annotations

import torch
from support.simulated.object_stores import MemoryStore, installed

from dcp_datastates import CheckpointManager


def _run(root: str, steps: range) -> tuple[int | None, torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "step": -1}
    with CheckpointManager(root, every=1, keep=2) as manager:
        resumed = manager.restore_latest(state)
        for step in steps:
            loss = model(torch.ones(1, 300)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            state["step"] = step
            manager.save(step, state)
        manager.wait()
        kept = manager.steps()
    assert kept[-1] == steps[-1]
    return resumed, model.weight.detach().clone()


def test_a_run_goes_on_from_a_store_as_if_it_had_not_ended(monkeypatch):
    store = MemoryStore()
    root = str(installed(monkeypatch, store).parent)
    _, whole = _run(f"{root}/whole", range(6))
    assert _run(f"{root}/parts", range(4))[0] is None
    resumed, weights = _run(f"{root}/parts", range(4, 6))
    assert resumed == 3
    assert torch.equal(weights, whole)
    kept = {key.split("/")[2] for key in store.objects if key.startswith("run/parts/step-")}
    assert kept == {"step-4", "step-5"}
