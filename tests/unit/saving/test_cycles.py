"""A save that is over is freed without the garbage collector, which large jobs turn off."""

import gc

import pytest
import torch
from support.state.checkpoints import CACHE, async_save, save
from support.waiting import await_that

import dcp_datastates as ds
from dcp_datastates.saving.operation import SaveOperation

STATE = {"w": torch.arange(1000.0)}


def _manager(root):
    with ds.CheckpointManager(root, every=1, keep=2, host_cache_size=CACHE) as manager:
        for step in range(3):
            manager.save(step, STATE)


APIS = {
    "async_save": lambda root: ds.async_save(STATE, root / "c", host_cache_size=CACHE).result(60),
    "save": lambda root: ds.save(STATE, root / "c", host_cache_size=CACHE),
    "dcp.save": lambda root: save(STATE, root / "c"),
    "dcp.async_save": lambda root: async_save(STATE, root / "c").result(60),
    "manager": _manager,
}


def _alive():
    return sum(type(each) is SaveOperation for each in gc.get_objects())


@pytest.mark.parametrize("api", APIS)
def test_no_save_is_left_to_the_garbage_collector(api, tmp_path):
    gc.collect()
    gc.disable()
    try:
        before = _alive()
        for number in range(6):
            APIS[api](tmp_path / str(number))
        # The threads' last frames may still refer to those of the newest call.
        await_that(lambda: _alive() <= before + 3)
    finally:
        gc.enable()
