"""What a planner resolves the items of its plan to: data as planned, or an error that names the item."""

import io
import pickle

import pytest
import torch
from support.state.checkpoints import CACHE
from support.state.plans import item, thing

from dcp_datastates.config import parse_size
from dcp_datastates.errors import DataStatesError, UnsupportedStateError, UnsupportedTensorError
from dcp_datastates.io import engine
from dcp_datastates.planning.part_files import PartFiles
from dcp_datastates.results import SaveStats
from dcp_datastates.saving.write import Content
from dcp_datastates.staging.deferred_reads import DeferredReads


class _Planning:
    """Resolves each item to the data of its name; raises what is an error."""

    def __init__(self, *items, **data):
        self.items = items
        self._data = data

    def files(self, rank):
        return PartFiles.of(self.items, rank)

    def compared(self):
        return {}

    def resolve_data(self, write_item):
        data = self._data[write_item.index.fqn]
        if isinstance(data, Exception):
            raise data
        return data


def _job(tmp_path, *items, **data):
    """What goes to the engine."""
    native = engine.engine(parse_size(CACHE))
    reads = DeferredReads(0, SaveStats(), 60.0)  # of no state
    return Content(native, _Planning(*items, **data), reads, tmp_path, 0)


@pytest.mark.parametrize(
    "error", [pickle.PicklingError("no"), TypeError("no"), AttributeError("no")]
)
def test_an_object_that_does_not_pickle_is_named(error, tmp_path):
    with pytest.raises(
        UnsupportedStateError, match=f"'o' .* cannot be stored: {type(error).__name__}: no"
    ):
        _job(tmp_path, thing("o"), o=error)


def test_another_error_of_the_planner_stays_as_it_is(tmp_path):
    with pytest.raises(ZeroDivisionError):
        _job(tmp_path, thing("o"), o=ZeroDivisionError())


@pytest.mark.parametrize(
    ("planned", "data", "says"),
    [
        (thing("x"), torch.ones(2), "'x' to a Tensor; its plan says BYTE_IO"),
        (item("x", (2,)), io.BytesIO(), "'x' to a BytesIO; its plan says tensor"),
        (
            item("x", (2,)),
            torch.ones(2).half(),
            r"torch.float16 \(2,\); its plan says torch.float32",
        ),
        (item("x", (2, 3)), torch.ones(3, 2), r"\(3, 2\); its plan says torch.float32 \(2, 3\)"),
    ],
)
def test_data_that_are_not_as_planned_are_refused(planned, data, says, tmp_path):
    with pytest.raises(DataStatesError, match=says):
        _job(tmp_path, planned, x=data)


def test_a_tensor_without_memory_is_refused_by_name(tmp_path):
    with pytest.raises(UnsupportedTensorError, match="'x'"):
        _job(tmp_path, item("x", (2,)), x=torch.ones(2, device="meta"))


def test_an_empty_tensor_may_have_another_shape(tmp_path):
    _job(tmp_path, item("x", (0, 3)), x=torch.zeros(0))
