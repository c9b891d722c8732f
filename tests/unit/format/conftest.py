"""One checkpoint for all tests that damage it."""

import pytest
import torch
from support.state.checkpoints import save
from support.state.files import put_back
from support.state.states import filled


@pytest.fixture(scope="session")
def state():
    """What is saved in :func:`checkpoint`."""
    return {
        "w": filled((300, 20), torch.float32, 1),
        "list": [filled((3,), torch.int64, 2), {"deep": filled((), torch.bfloat16, 3)}],
        "object": {"text": "some text"},
    }


@pytest.fixture(scope="module")
def saved(state, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    save(state, path)
    return path


@pytest.fixture
def checkpoint(saved):
    """The same for all tests: what one does to its files is undone."""
    with put_back(saved):
        yield saved
