"""Several ranks save to an S3 server and load from it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from support.jobs.groups import own_group
from support.jobs.ranks import run_on_ranks
from support.state.checkpoints import (
    CACHE,
    assert_same,
    async_save,
    load,
    load_everything,
    save,
    writer,
)
from support.stores.server import BUCKET, Bucket, endpoint, use
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import dcp_datastates

WHOLE = torch.arange(4096 * 1024, dtype=torch.float32).view(4096, 1024)
"""16 MiB."""


def _sharded(full: torch.Tensor) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = full.shape[0] // mesh.size()
    return DTensor.from_local(full[mesh.get_rank() * rows :][:rows].clone(), mesh, [Shard(0)])


def _state(factor: float = 1.0) -> dict:
    return {"w": _sharded(WHOLE * factor), "step": int(factor)}


def _save(url: str, root: str) -> None:
    use(url)
    group = own_group()
    ours = writer(process_group=group)
    async_save(_state(), None, by=ours, group=group, checkpoint_id=f"{root}/step-1").result(60)
    save(_state(2.0), f"{root}/step-2", planner=DefaultSavePlanner())
    dcp_datastates.save(_state(3.0), f"{root}/step-3", host_cache_size=CACHE)
    ours.close()


def _load(url: str, root: str) -> None:
    use(url)
    for number in (1, 2, 3):
        state = {"w": _sharded(torch.zeros_like(WHOLE)), "step": 0}
        load(state, f"{root}/step-{number}")
        assert_same(state, _state(float(number)))


def _prefix(root: str) -> str:
    """Other tests leave objects, and uploads of killed processes, at the same server."""
    return root.removeprefix(f"s3://{BUCKET}/")


def test_four_ranks_save_and_two_load(s3_root):
    run_on_ranks(4, _save, url=endpoint(), root=s3_root)
    run_on_ranks(2, _load, url=endpoint(), root=s3_root)
    for number in (1, 2, 3):
        found = load_everything(f"{s3_root}/step-{number}")
        assert_same(found, {"w": WHOLE * number, "step": number})
    assert Bucket(endpoint()).uploads(_prefix(s3_root)) == []
