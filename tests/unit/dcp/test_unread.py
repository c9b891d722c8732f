"""A load that leaves stored tensors unread says so; ``unexpected="error"`` makes it an error."""

import logging

import pytest
import torch
from support.state.checkpoints import load as load_by_dcp
from support.state.checkpoints import raises, save
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from dcp_datastates import CheckpointManager, load
from dcp_datastates.errors import IncompatibleStateError
from dcp_datastates.format import metadata_objects


def _trained():
    torch.manual_seed(0)
    model = torch.nn.Linear(30, 20)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(30)).sum().backward()
    optimizer.step()
    return model, optimizer


def _state(model, optimizer):
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return {**states, "empty": torch.empty(0, 3), "step": 3}


@pytest.fixture
def path(tmp_path):
    save(_state(*_trained()), tmp_path / "c")
    return tmp_path / "c"


def _fresh():
    """What a resume has before its first step."""
    model = torch.nn.Linear(30, 20)
    return _state(model, torch.optim.AdamW(model.parameters()))


def _said(caplog):
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("dcp_datastates") and record.levelno == logging.WARNING
    ]


def test_a_resume_that_forgets_the_optimizers_state_is_told(path, caplog):
    load_by_dcp(_fresh(), path)
    (said,) = _said(caplog)
    assert "6 of the" in said, "two parameters with three tensors each"
    assert "'optimizer.state.0.step'" in said
    assert "3 more" in said
    assert str(path) in said
    assert "get_optimizer_state_dict" in said


def test_what_the_manager_saved_of_an_optimizer_needs_no_function_of_torchs(tmp_path, caplog):
    model, optimizer = _trained()
    with CheckpointManager(tmp_path, every=1) as manager:
        manager.save(0, {"model": model, "optimizer": optimizer})
    load(tmp_path / "step-0", {"model": model.state_dict()})
    (said,) = _said(caplog)
    assert "'optimizer.state.weight.step'" in said
    assert "get_optimizer_state_dict" not in said


def test_strict_makes_it_an_error_before_anything_is_read(path):
    target = _fresh()
    before = target["model"]["weight"].clone()
    with raises(IncompatibleStateError, "optimizer.state.0.step", "only="):
        load_by_dcp(target, path, unexpected="error")
    assert torch.equal(target["model"]["weight"], before)
    with pytest.raises(IncompatibleStateError, match=r"optimizer\.state"):
        load(path, _fresh(), unexpected="error")


def test_a_load_of_everything_is_quiet_and_passes_strictly(path, caplog):
    model, optimizer = _trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 0}
    load_by_dcp(state, path, unexpected="error")  # without "empty", which has no bytes
    assert _said(caplog) == []


def test_the_way_out_that_the_message_names_works(tmp_path, caplog):
    model, optimizer = _trained()
    save({"optimizer": get_optimizer_state_dict(model, optimizer)}, tmp_path)
    fresh = torch.nn.Linear(30, 20)
    load_by_dcp(
        {"optimizer": get_optimizer_state_dict(fresh, torch.optim.AdamW(fresh.parameters()))},
        tmp_path,
        unexpected="error",
    )
    assert _said(caplog) == []


def test_forgotten_objects_count(path, caplog):
    model, optimizer = _trained()
    load_by_dcp({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    (said,) = _said(caplog)
    assert "1 of the" in said
    assert "'step'" in said


@pytest.mark.parametrize("unexpected", ["warn", "error"])
def test_what_is_left_on_purpose_does_not_count(path, unexpected, caplog):
    load(path, {"model": _fresh()["model"]}, only="model", unexpected=unexpected)
    load(path, only="optimizer", unexpected=unexpected)
    load_by_dcp(
        {"model": _fresh()["model"]},
        path,
        unexpected=unexpected,
        exclude=["optimizer", "step", "not there"],
    )
    assert _said(caplog) == []


def test_what_keys_choose_and_the_state_lacks_does_count(path, caplog):
    load(path, {"model": {"weight": torch.zeros(20, 30)}}, only="model")
    (said,) = _said(caplog)
    assert "'model.bias'" in said
    assert "optimizer.state.0" not in said
    with pytest.raises(IncompatibleStateError, match=r"model\.bias"):
        load(path, {"model": {"weight": torch.zeros(20, 30)}}, only="model", unexpected="error")


@pytest.mark.parametrize("options", [{}, {"exclude": "model"}, {"unexpected": "ignore"}])
def test_a_load_of_one_tensor_makes_no_metadata_of_the_others(options, tmp_path, monkeypatch):
    save({"model": {f"w{i}": torch.ones(4, 4) for i in range(100)}}, tmp_path / "c")
    made = []

    def counted(*args):
        made.append(args)
        return ChunkStorageMetadata(*args)

    monkeypatch.setattr(metadata_objects, "ChunkStorageMetadata", counted)
    target = {"model": {"w7": torch.zeros(4, 4)}}
    load_by_dcp(target, tmp_path / "c", **options)
    assert target["model"]["w7"].all()
    load(tmp_path / "c", target, only="model.w7")
    assert len(made) == 1, "by DCP's planner; load() makes none"
