"""Python objects: which a load reads by default, which it refuses before anything changes, and the ways out."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import fractions
import io
import pathlib
import random
import re
import types
import zipfile

import numpy as np
import pytest
import torch
from support.state.checkpoints import assert_same, raises, save
from support.state.checkpoints import load as load_by_dcp

import dcp_datastates as ds
from dcp_datastates.errors import UnsafeObjectError
from dcp_datastates.io.unpickling import unpickled


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
    "NumPy's scalars": (np.float64(0.5), np.int8(3), np.bool_(True)),
    "dates": (datetime.datetime(2026, 1, 1), datetime.timedelta(3), datetime.timezone.utc),
    "paths": (pathlib.PurePosixPath("/a"), pathlib.PosixPath("b/c")),
    "frozenset": frozenset({1}),
    "decimal": decimal.Decimal("0.1"),
    "namespaces": (argparse.Namespace(rate=0.5), types.SimpleNamespace(a=[1])),
    "scaler": torch.amp.GradScaler("cpu").state_dict(),
}
UNSAFE = {
    "fraction": (fractions.Fraction(1, 3), "fractions.Fraction"),
    "enum": (re.IGNORECASE, "re.RegexFlag"),
    "dataclass": (Settings(), "test_objects.Settings"),
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
def test_arrays_of_numpy_are_loaded_by_default(load, path):
    arrays = (np.arange(3), np.array(["a", "bc"]), np.zeros((2, 0), np.complex64))
    save({"arrays": arrays, "generator": np.random.get_state()}, path)
    state = {"arrays": None, "generator": None}
    load(path, state)
    np.testing.assert_equal(state, {"arrays": arrays, "generator": np.random.get_state()})


@loads
@pytest.mark.parametrize("name", UNSAFE)
def test_what_needs_more_is_refused_by_name_and_changes_nothing(load, name, path):
    value, needs = UNSAFE[name]
    save({"value": (value,), "step": 1, "w": torch.ones(1000)}, path)
    state = {"value": "as it was", "step": 0, "w": torch.zeros(1000)}
    with raises(UnsafeObjectError, "'value'", needs, "exclude it", "add_safe_globals", "=True"):
        load(path, state)
    assert_same(state, {"value": "as it was", "step": 0, "w": torch.zeros(1000)})


def test_an_object_that_nests_deeply_is_refused_and_does_not_end_the_process():
    """C code hashes a tuple by recursion, and a dict's key is one."""
    depth = 20_000
    hostile = b"\x80\x02}" + b")" + b"\x85" * depth + b"K\x01s."
    file = io.BytesIO()
    torch.save("x" * len(hostile), file)
    pickled = next(each for each in zipfile.ZipFile(file).namelist() if each.endswith("/data.pkl"))
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(pickled, hostile)
        archive.writestr(pickled.replace("data.pkl", "version"), "3")
    with raises(UnsafeObjectError, "it: ", "too deeply", "exclude it"):
        unpickled(io.BytesIO(file.getvalue()), "it", allow_objects=False)


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
