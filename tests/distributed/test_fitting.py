"""Options of a load on several ranks: what one rank cannot load no rank loads, and shards come by their new names."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.jobs.ranks import ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_datastates
from dcp_datastates.errors import IncompatibleStateError


def _sharded(full):
    return distribute_tensor(full, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])


MISFITS = {
    "a name": ({"new": torch.zeros(1)}, "'new'"),
    "a shape": ({"of rank 1": torch.zeros(4)}, r"saved with \(3,\), here \(4,\)"),
    "a shape of what all ranks have": ({"all": torch.zeros(4)}, r"saved with \(3,\), here \(4,\)"),
    "a dtype": ({"of rank 1": torch.zeros(3, dtype=torch.int64)}, "cast"),
    "a wider dtype": ({"of rank 1": torch.zeros(3, dtype=torch.float64)}, "cast"),
}


@ranks(3)
@pytest.mark.parametrize("misfit", MISFITS)
def test_what_one_rank_cannot_load_no_rank_loads(misfit, shared_dir):
    path, mine = shared_dir / "c", f"of rank {dist.get_rank()}"
    state = {"w": _sharded(torch.ones(8, 4)), mine: torch.ones(3), "all": torch.ones(3), "n": 5}
    dcp_datastates.save(state, path)
    fits = {"w": _sharded(torch.zeros(8, 4)), mine: torch.zeros(3), "all": torch.zeros(3), "n": 0}
    other, said = MISFITS[misfit]
    into = {**fits, **other} if dist.get_rank() == 1 else fits
    with pytest.raises(IncompatibleStateError, match=said) as refused:
        dcp_datastates.load(path, into)
    assert ("new" in refused.value.missing) == (misfit == "a name")
    assert set(refused.value.unfit) == (set(other) if misfit != "a name" else set())
    assert into["n"] == 0
    assert not into["w"].to_local().any()
    assert not into[mine].any()
    assert not into["all"].any()
    dcp_datastates.load(path, fits)
    assert fits[mine].all()


@ranks(2)
def test_shards_are_loaded_by_their_new_names_and_parts_are_left_out(shared_dir):
    path = shared_dir / "c"
    full = torch.arange(40.0).view(10, 4)
    dcp_datastates.save({"old": {"a": _sharded(full), "b": _sharded(full + 1)}, "n": 3}, path)
    into = {"new": {"a": _sharded(torch.zeros(10, 4)), "b": _sharded(torch.zeros(10, 4))}, "n": 0}
    dcp_datastates.load(path, into, rename={"old.*": "new.*"}, exclude="*.b", unexpected="error")
    assert torch.equal(into["new"]["a"].full_tensor(), full)
    assert not into["new"]["b"].to_local().any()
    assert into["n"] == 3
