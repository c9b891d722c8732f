"""Publish a model's weights from each checkpoint, and follow them in another program, such as one that serves it.

python publish_weights.py train weights &    # writes weights/weight_v000001, and so on
python publish_weights.py serve weights      # has each version in its model, then ends

Each version is a Hugging Face folder: transformers, vLLM and SGLang load it by its path.
"""

import sys

import torch

import dcp_datastates as ds

role, root = sys.argv[1:]
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
STEPS = 50


def train() -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    publish = ds.Weights(root, part="model", dtype="bfloat16", keep=5)
    with ds.CheckpointManager("ckpt", every=10, keep=2, publish=publish) as manager:
        manager.restore_latest(state)
        for step in range(1, STEPS + 1):
            loss = model(torch.randn(32, 64)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            manager.save(step, state)


def serve() -> None:
    for version in ds.follow(root, newest=True, poll=0.1):  # waits for each
        version.load_into(model)  # verified before anything changes; bfloat16 becomes float32 here
        print(
            f"version {version.number}, step {version.step}: {model(torch.ones(64)).sum().item():.6f}"
        )
        if version.step == STEPS:
            break


train() if role == "train" else serve()
