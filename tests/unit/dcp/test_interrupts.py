"""An interrupt stays an interrupt: a program that catches ``Exception`` to start afresh must not catch Ctrl-C."""

import inspect
import random
import sys

import pytest
import torch
import torch.distributed as dist
from support.jobs.ranks import ranks
from support.state.checkpoints import CACHE, raises
from support.tiers import tries

import dcp_datastates as ds
from dcp_datastates.io.restore import Restore


class _Interrupts:
    """Raises KeyboardInterrupt in this thread, as a signal would: at one call of a function of this package or torch.

    Not within generators: what an interrupt leaves there stays for the tests after this one.
    """

    def __init__(self, at):
        self._at = at
        self.count = 0

    def __call__(self, frame, event, arg):
        code = frame.f_code
        ours = any(part in code.co_filename for part in ("dcp_datastates/", "/torch/"))
        held = code.co_flags & inspect.CO_GENERATOR
        if event != "call" or not ours or held:
            return
        self.count += 1
        if self.count == self._at:
            raise KeyboardInterrupt

    def __enter__(self):
        sys.setprofile(self)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)


def _state():
    return {"x": {f"w{number}": torch.arange(1000.0) for number in range(3)}}


def _restore(root):
    with ds.CheckpointManager(root, every=1, save_last=False, host_cache_size=CACHE) as manager:
        return manager.restore_latest(_state())


APIS = {
    "load": lambda root: ds.load(root / "step-2"),
    "load into": lambda root: ds.load(root / "step-2", _state()),
    "restore_latest": _restore,
    "latest": lambda root: ds.latest(root, verify="full"),
    "verify": lambda root: ds.verify(root / "step-2"),
    "convert": lambda root: ds.convert(root / "step-2", root / "out.pt", to="torch"),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    for step in (1, 2):
        ds.save(_state(), root / f"step-{step}", host_cache_size=CACHE)
    return root


@pytest.mark.parametrize("number", tries(10, 100))
@pytest.mark.parametrize("api", APIS)
def test_an_interrupt_anywhere_comes_out_as_one(api, number, root):
    call = APIS[api]
    out = root / "out.pt"
    call(root)
    out.unlink(missing_ok=True)
    with _Interrupts(None) as counted:
        call(root)
    out.unlink(missing_ok=True)
    points, came = random.Random(number), 0
    for _ in range(number):
        try:
            with _Interrupts(points.randrange(1, counted.count)):
                call(root)
        except KeyboardInterrupt:
            came += 1
        assert torch.is_grad_enabled()  # the program goes on with its mode
        out.unlink(missing_ok=True)
    assert came > number / 2  # Python drops what is raised in destructors


@ranks(2)
def test_the_other_ranks_of_an_interrupted_one_are_told_by_an_ordinary_error(
    shared_dir, monkeypatch
):
    ds.save(_state(), shared_dir / "c", host_cache_size=CACHE)
    if dist.get_rank() == 1:
        monkeypatch.setattr(Restore, "read", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            ds.load(shared_dir / "c", _state())
    else:
        with raises(ds.errors.DataStatesError, "rank 1: KeyboardInterrupt"):
            ds.load(shared_dir / "c", _state())


def _interrupt(*arguments):
    raise KeyboardInterrupt
