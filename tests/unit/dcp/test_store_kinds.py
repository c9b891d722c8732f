"""Checkpoints in stores of each kind: saved, replaced, found, loaded and deleted."""

import pytest
import torch
from support.state.checkpoints import assert_same
from support.stores.kinds import new_store, objects_below

import dcp_datastates
from dcp_datastates.errors import CheckpointNotFoundError

CACHE = "64MiB"


def _state(factor):
    return {"w": torch.arange(1 << 20, dtype=torch.float32) * factor, "step": factor}


@pytest.mark.parametrize("kind", ["memory", "moto", "azurite"])
def test_a_checkpoint_is_saved_replaced_found_loaded_and_deleted(kind):
    store = new_store(kind)
    run = f"{store.url}/run"
    for step, factor in ((1, 1), (2, 2), (2, 3)):
        dcp_datastates.save(_state(factor), f"{run}/step-{step}", host_cache_size=CACHE)
    assert str(dcp_datastates.latest(run)) == f"{run}/step-2"
    assert_same(dcp_datastates.load(f"{run}/step-2"), _state(3))
    assert_same(dcp_datastates.load(f"{run}/step-1"), _state(1))
    dcp_datastates.verify(f"{run}/step-2")
    dcp_datastates.delete(f"{run}/step-2")
    assert str(dcp_datastates.latest(run)) == f"{run}/step-1"
    dcp_datastates.delete(f"{run}/step-1")
    assert dcp_datastates.latest(run) is None
    assert objects_below(store) == []
    with pytest.raises(CheckpointNotFoundError):
        dcp_datastates.load(f"{run}/step-1")
