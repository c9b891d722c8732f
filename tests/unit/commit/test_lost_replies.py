"""The link that commits is carried out, and answered with an error: the server of a network file system was replaced,
a mount gave up, or a reply was lost and the request repeated. Then the save is committed, and says so: what is there is
read back, and compared by content.
"""

from __future__ import annotations

import errno
import os

import pytest
import torch
from support.state.checkpoints import load_everything, save

import dcp_datastates as ds
from dcp_datastates.storage import operations

ERRORS = (errno.EEXIST, errno.EIO, errno.ETIMEDOUT, errno.ESTALE)


def _state(number: int) -> dict[str, object]:
    return {"w": torch.full((1000,), float(number)), "n": number}


@pytest.fixture
def lost_reply(monkeypatch):
    """``lost_reply(number)``: the next link that makes a decision is carried out, and raises this error."""
    real = operations.link

    def arrange(number: int) -> None:
        left = [number]

        def link(source, target, phase):
            real(source, target, phase)
            if target.name == "decision" and left:
                raise OSError(left.pop(), os.strerror(number), str(target))

        monkeypatch.setattr(operations, "link", link)

    return arrange


def _saved_over(path) -> int:
    """Save again; returns the number that loads then, if that agrees with what the save has said."""
    try:
        ds.save(_state(2), path)
        told = {2}
    except ds.CommitOutcomeUnknown:
        told = {1, 2}
    except ds.DataStatesError:
        told = {1}
    found = load_everything(path)["n"]
    assert found in told, "the future tells the truth"
    return found


@pytest.mark.parametrize("number", ERRORS)
def test_a_save_whose_link_is_carried_out_is_committed(number, lost_reply, tmp_path):
    save(_state(1), tmp_path / "run")
    lost_reply(number)
    assert _saved_over(tmp_path / "run") == 2
    assert ds.latest(tmp_path) == tmp_path / "run"
