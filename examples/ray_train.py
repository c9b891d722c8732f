"""Ray Train: if a worker fails, Ray starts all again, and they go on from the newest committed checkpoint.

python ray_train.py
"""

import os

import ray.train.torch
import torch
from ray.train import Checkpoint, CheckpointUploadMode, FailureConfig, RunConfig, ScalingConfig

import dcp_datastates as ds

STORAGE = os.path.abspath("storage")  # one that all nodes share
RUN = "run-1"


def train():
    torch.manual_seed(ray.train.get_context().get_world_rank())
    model = ray.train.torch.prepare_model(torch.nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer, "rng": ds.RngState()}
    keep = ds.Keep(last=3)
    with ds.CheckpointManager(f"{STORAGE}/{RUN}/steps", every=1, keep=keep) as manager:
        done = manager.restore_latest(state)
        for step in range(0 if done is None else done + 1, 6):
            loss = model(torch.randn(8, 64)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step}: loss {loss.item()}")
            manager.save(step, state)
            ray.train.report({"loss": loss.item()})
        manager.wait()
        newest = manager.latest_step
        assert newest is not None  # the last save is committed
        ray.train.report(
            {"step": newest},
            checkpoint=Checkpoint(manager.path(newest)),
            checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
        )


if __name__ == "__main__":
    trainer = ray.train.torch.TorchTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name=RUN, storage_path=STORAGE, failure_config=FailureConfig(max_failures=1)
        ),
    )
    print("ended with", trainer.fit().checkpoint.path)
