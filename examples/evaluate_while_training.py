"""Evaluate the newest checkpoint of a running job, again and again, in a process that is no part of the job.

A checkpoint that comes and goes during an evaluation is left out.

python evaluate_while_training.py ckpt 3    # evaluates three checkpoints, then ends
"""

import sys
import time

import torch

import dcp_datastates as ds

root, count = sys.argv[1], int(sys.argv[2])
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
batch = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
seen = None

while count:
    path = ds.latest(root)  # committed checkpoints only
    if path is None or path == seen:
        time.sleep(0.1)
        continue
    try:
        ds.pin(path, "evaluation")  # the run's retention does not delete it now
        ds.load(path, {"model": model}, only="model")  # the model alone: the optimizer is not read
    except ds.errors.CheckpointNotFoundError:
        continue  # the run has deleted it in between
    finally:
        ds.unpin(path, "evaluation")
    with torch.no_grad():
        print(f"{path.name}: mean output {model(batch).mean().item():.6f}", flush=True)
    seen, count = path, count - 1
