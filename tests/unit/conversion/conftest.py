import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.state.checkpoints import save
from support.state.states import filled

from dcp_datastates import convert

SMALL = {"threads": 2}


def make_state():
    """A training state: tensors of many kinds, nested, and objects."""
    model = {
        "layers.0.weight": filled((33, 65), torch.float32, 1),
        "layers.0.bias": filled((33,), torch.bfloat16, 2),
        "layers.1.weight": filled((3, 4, 5), torch.float16, 3),
        "eight": filled((7,), torch.float8_e4m3fn, 4),
        "five": filled((3,), torch.float8_e5m2, 5),
        "count": filled((4,), torch.int64, 6),
        "byte": filled((5,), torch.uint8, 7),
        "mask": filled((6,), torch.bool, 8),
        "scale": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
    }
    slots = {0: {"step": torch.tensor(3.0), "exp_avg": filled((33, 65), torch.float32, 9)}}
    groups = [{"lr": 1e-3, "betas": (0.9, 0.95), "params": [0, 1]}]
    return {"model": model, "optimizer": {"state": slots, "param_groups": groups}, "step": 7}


def save_stock(state, path):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)


class Ran(Exception):
    """Code from a file has run."""


class Trap:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return _spring, ()


def _spring():
    raise Ran


def refused(source, kind, words, tmp_path, to="safetensors", **options):
    with pytest.raises(kind, match=words) as caught:
        convert(source, tmp_path / "out", to, **SMALL, **options)
    left = [each.name for each in tmp_path.iterdir() if "out" in each.name]
    assert left == [], "a conversion that fails leaves nothing"
    return caught.value


@pytest.fixture
def state():
    return make_state()


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
    """One state in each format that holds all of it. Tests leave them as they are."""
    root = tmp_path_factory.mktemp("sources")
    state = make_state()
    save(state, root / "datastates")
    save_stock(state, root / "dcp")
    torch.save(state, root / "torch")
    return {name: root / name for name in ("datastates", "dcp", "torch")}
