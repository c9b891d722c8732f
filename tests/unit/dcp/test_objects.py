"""Python objects: which a load reads by default, which it refuses before anything changes, and the ways out."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import io
import pathlib
import random

import numpy as np
import pytest
import torch
from support.state.checkpoints import assert_same, raises, save
from support.state.checkpoints import load as load_by_dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import save as save_by_stock

import dcp_datastates as ds
from dcp_datastates import UnsafeObjectError


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Settings:
    rate: float = 0.5


class Trap:
    """Whoever unpickles it is told, by :data:`sprung`."""

    def __reduce__(self):
        return _spring, ()

    def __deepcopy__(self, memo):
        return self


sprung: list[str] = []


def _spring():
    sprung.append("code of the checkpoint ran")


def _schedule(kind, *options):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    return kind(optimizer, *options).state_dict()


_schedules = torch.optim.lr_scheduler
SAFE = {
    "none": None,
    "bool": True,
    "int": -(10**40),
    "float": float("inf"),
    "complex": 1 + 2j,
    "str": "ü\n",
    "no str": "",
    "bytes": b"\0\xff",
    "no bytes": b"",
    "bytearray": bytearray(b"ab"),
    "tuple": (1, ("a", None), ()),
    "set": {1, 2},
    "dict by int": ({1: {2.5: "x"}},),
    "ordered dict": (collections.OrderedDict(a=1),),
    "counter": (collections.Counter("aab"),),
    "tensor in tuple": (torch.ones(3), 1),
    "dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "size": torch.Size([1, 2]),
    "generator": (torch.Generator().get_state(),),
    "python's generator": random.getstate(),
    "numpy's new generator": np.random.default_rng(0).bit_generator.state,
    "optimizer": torch.optim.AdamW([torch.ones(2, requires_grad=True)]).state_dict(),
    "LambdaLR": _schedule(_schedules.LambdaLR, lambda epoch: 0.5**epoch),
    "OneCycleLR": _schedule(_schedules.OneCycleLR, 0.1, 10),
    "MultiStepLR": _schedule(_schedules.MultiStepLR, [3, 4]),
    "ReduceLROnPlateau": _schedule(_schedules.ReduceLROnPlateau),
    "scaler": torch.amp.GradScaler("cpu").state_dict(),
}
UNSAFE = {
    "numpy scalar": (np.float64(0.5), "numpy._core.multiarray.scalar, numpy.dtype"),
    "numpy array": (np.arange(3), "numpy.ndarray"),
    "numpy's old generator": (np.random.get_state(), "numpy.ndarray"),
    "enum": (Color.RED, "test_objects.Color"),
    "dataclass": (Settings(), "test_objects.Settings"),
    "datetime": (datetime.datetime(2026, 1, 1), "datetime.datetime"),
    "path": (pathlib.PurePosixPath("/a"), "pathlib.PurePosixPath"),
    "frozenset": (frozenset({1}), "builtins.frozenset"),
    "defaultdict": (collections.defaultdict(list), "collections.defaultdict"),
    "generator": (torch.Generator(), "torch"),
    "long int": (10**1000, "Unsupported operand"),
    "trap": (Trap(), "_spring"),
}


class Part:
    """An object with a state, for the manager."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def _by_dcp(path, state, **options):
    try:
        load_by_dcp(state, path, **options)
    except torch.distributed.checkpoint.CheckpointException as error:
        raise error.failures[0][0] from None


def _by_manager(path, state, **options):
    with ds.CheckpointManager(path.parent, every=1) as checkpoints:
        checkpoints.restore_latest(state, **options)


LOADS = {"load": ds.load, "dcp": _by_dcp, "manager": _by_manager}
"""By each, a value of the state; the manager, too."""

loads = pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)


def _saved(value, tmp_path):
    return save({"value": value, "w": torch.ones(1000)}, tmp_path / "step-1") or tmp_path / "step-1"


@loads
@pytest.mark.parametrize("name", SAFE)
def test_what_torch_reads_safely_is_loaded_by_default(load, name, tmp_path):
    value = SAFE[name] if SAFE[name] == b"" else (SAFE[name],)  # DCP stores a tuple as one object
    path = _saved(value, tmp_path)
    state = {"value": None, "w": torch.zeros(1000)}
    load(path, state)
    assert_same(state, {"value": value, "w": torch.ones(1000)})
    assert_same(ds.load(path, only="value"), {"value": value})


@loads
@pytest.mark.parametrize("name", UNSAFE)
def test_what_needs_a_pickle_is_refused_by_name_and_changes_nothing(load, name, tmp_path):
    value, needs = UNSAFE[name]
    path = _saved((value,), tmp_path)
    before = {"value": "as it was", "w": torch.zeros(1000)}
    state = dict(before)
    ways_out = "exclude it", "add_safe_globals", "allow_objects=True"
    with raises(UnsafeObjectError, "'value'", needs, *ways_out):
        load(path, state)
    assert_same(state, before)
    assert sprung == []
    if load is not _by_dcp:
        load(path, state, exclude="value")
        assert_same(state, {"value": "as it was", "w": torch.ones(1000)})


@loads
def test_what_the_user_calls_safe_is_loaded(load, tmp_path):
    path = _saved(Settings(0.25), tmp_path)
    state = {"value": None, "w": torch.zeros(1000)}
    with torch.serialization.safe_globals([Settings]):
        load(path, state)
    assert state["value"] == Settings(0.25)


@loads
def test_all_is_loaded_of_a_checkpoint_that_is_trusted(load, tmp_path):
    path = _saved((Settings(0.25), frozenset("ab"), np.float64(0.5)), tmp_path)
    state = {"value": None, "w": torch.zeros(1000)}
    load(path, state, allow_objects=True)
    assert state["value"] == (Settings(0.25), frozenset("ab"), np.float64(0.5))


@pytest.mark.parametrize("mark", [lambda part: part, ds.PerRank], ids=["object", "per rank"])
@pytest.mark.parametrize("state", [{1: Settings()}, {"a": Settings(), "b": {}}], ids=str)
def test_a_state_that_is_stored_with_its_types_is_refused_before_anything_changes(
    state, mark, tmp_path
):
    with ds.CheckpointManager(tmp_path, every=1) as checkpoints:
        checkpoints.save(1, {"part": mark(Part(state)), "w": torch.ones(9)})
    part, w = Part({"as it": "was"}), torch.zeros(9)
    with ds.CheckpointManager(tmp_path, every=1) as checkpoints:
        with raises(UnsafeObjectError, "'part.", "test_objects.Settings"):
            checkpoints.restore_latest({"part": mark(part), "w": w})
        assert (part.state, w.any()) == ({"as it": "was"}, False)
        checkpoints.save(2, {"part": mark(part), "w": w}).result(60)  # it is no mixture
        checkpoints.restore(1, {"part": mark(part), "w": w}, allow_objects=True)
    assert (part.state, w.all()) == (state, True)


@pytest.mark.parametrize("missing", ["warn", "ignore"])
def test_a_part_that_the_checkpoint_lacks_stays_as_it_is(missing, tmp_path):
    parts = {"part": Part({1: 2}), "own": ds.PerRank(Part({1: 2})), "rng": ds.RngState()}
    with ds.CheckpointManager(tmp_path, every=1) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(9)})
        checkpoints.restore_latest({"w": torch.zeros(9), **parts}, missing=missing)
    assert parts["part"].state == parts["own"].wrapped.state == {1: 2}


def test_objects_of_a_stock_checkpoint_are_converted_and_refused_alike(tmp_path):
    state = {"value": Trap(), "w": torch.ones(3)}
    save_by_stock(state, storage_writer=FileSystemWriter(tmp_path / "stock"), no_dist=True)
    ds.convert(tmp_path / "stock", tmp_path / "ours")
    with raises(UnsafeObjectError, "'value'", "_spring"):
        ds.load(tmp_path / "ours")
    assert sprung == []


def test_dcps_planner_is_given_no_bytes_that_were_not_read_safely_before(tmp_path):
    """It unpickles with ``weights_only=False``: the same bytes, of which each is read once with safe types."""
    path = _saved(("a", 1), tmp_path)
    given = []

    class Planner(torch.distributed.checkpoint.DefaultLoadPlanner):
        def load_bytes(self, read_item, value: io.BytesIO) -> None:
            given.append(torch.load(io.BytesIO(value.getvalue()), weights_only=True))
            super().load_bytes(read_item, value)

    state = {"value": None, "w": torch.zeros(1000)}
    _by_dcp(path, state, planner=Planner())
    assert given == [state["value"]] == [("a", 1)]
