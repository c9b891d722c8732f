"""Python objects: which a load reads by default, which it refuses before anything changes, and the ways out."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import pathlib
import random
import re

import numpy as np
import pytest
import torch
from support.state.checkpoints import assert_same, raises, save
from support.state.checkpoints import load as load_by_dcp

import dcp_datastates as ds
from dcp_datastates import UnsafeObjectError


@dataclasses.dataclass
class Settings:
    rate: float = 0.5


def _schedule(kind, *options):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    return kind(optimizer, *options).state_dict()


_schedules = torch.optim.lr_scheduler
SAFE = {
    "none": None,
    "numbers": (True, -(10**40), float("inf"), 1 + 2j),
    "texts": ("", "ü\n", b"\0\xff", bytearray(b"ab")),
    "containers": ([1, [()]], {1, 2}, {1: {2.5: "x"}}, collections.OrderedDict(a=1)),
    "counter": collections.Counter("aab"),
    "torch's": (torch.bfloat16, torch.device("cpu"), torch.Size([1, 2]), torch.ones(3)),
    "torch's generator": torch.Generator().get_state(),
    "Python's generator": random.getstate(),
    "NumPy's new generator": np.random.default_rng(0).bit_generator.state,
    "optimizer": torch.optim.AdamW([torch.ones(2, requires_grad=True)]).state_dict(),
    "LambdaLR": _schedule(_schedules.LambdaLR, lambda epoch: 0.5**epoch),
    "OneCycleLR": _schedule(_schedules.OneCycleLR, 0.1, 10),
    "MultiStepLR": _schedule(_schedules.MultiStepLR, [3, 4]),
    "ReduceLROnPlateau": _schedule(_schedules.ReduceLROnPlateau),
    "scaler": torch.amp.GradScaler("cpu").state_dict(),
}
UNSAFE = {
    "numpy scalar": (np.float64(0.5), "multiarray.scalar, numpy.dtype"),
    "numpy array": (np.arange(3), "numpy.ndarray"),
    "numpy's old generator": (np.random.get_state(), "numpy.ndarray"),
    "enum": (re.IGNORECASE, "re.RegexFlag"),
    "dataclass": (Settings(), "test_objects.Settings"),
    "datetime": (datetime.datetime(2026, 1, 1), "datetime.datetime"),
    "path": (pathlib.PurePosixPath("/a"), "pathlib.PurePosixPath"),
    "frozenset": (frozenset({1}), "builtins.frozenset"),
    "defaultdict": (collections.defaultdict(list), "collections.defaultdict"),
    "generator": (torch.Generator(), "torch"),
    "long int": (10**1000, "Unsupported operand"),
    "call": (re.compile("a"), "re._compile"),
}


def _by_manager(path, state, **options):
    with ds.CheckpointManager(path.parent, every=1) as checkpoints:
        checkpoints.restore_latest(state, **options)


LOADS = {
    "load": ds.load,
    "dcp": lambda path, state, **options: load_by_dcp(state, path, **options),
    "manager": _by_manager,
}
loads = pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "step-1"


@loads
def test_what_torch_reads_safely_is_loaded_by_default(load, path):
    values = {name: (value,) for name, value in SAFE.items()}  # DCP stores a tuple as one object
    values["no bytes"] = b""
    save(values, path)
    state = dict.fromkeys(values)
    load(path, state)
    assert_same(state, values)
    assert_same(ds.load(path), values)


@loads
@pytest.mark.parametrize("name", UNSAFE)
def test_what_needs_more_is_refused_by_name_and_changes_nothing(load, name, path):
    value, needs = UNSAFE[name]
    save({"value": (value,), "step": 1, "w": torch.ones(1000)}, path)
    state = {"value": "as it was", "step": 0, "w": torch.zeros(1000)}
    with raises(UnsafeObjectError, "'value'", needs, "exclude it", "add_safe_globals", "=True"):
        load(path, state)
    assert_same(state, {"value": "as it was", "step": 0, "w": torch.zeros(1000)})


@loads
def test_the_ways_out_work(load, path):
    save({"value": Settings(0.25)}, path)
    state = {"value": None}
    with torch.serialization.safe_globals([Settings]):
        load(path, state)
    assert state["value"] == Settings(0.25)
    state["value"] = None
    load(path, state, allow_objects=True)
    assert state["value"] == Settings(0.25)
