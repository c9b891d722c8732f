"""A program follows the versions of a model's weights, and never has half a version, or a wrong one."""

from __future__ import annotations

import itertools
import json
import threading
import time

import pytest
import torch
from support.state.files import flip_bit
from support.state.loops import Loop, manager

from dcp_datastates import Weights, follow
from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ConfigurationError,
    DataStatesError,
    IncompatibleStateError,
)
from dcp_datastates.weights import version


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A root with three versions, of steps 0 to 2, and the model of the last."""
    path, loop = tmp_path_factory.mktemp("published"), Loop()
    with manager(path / "run", publish=Weights(path / "w")) as saves:
        for step in range(3):
            loop.step()
            saves.save(step, loop.state)
            saves.wait()
    return path / "w", loop.model


def _zeros(model):
    with torch.no_grad():
        for each in (loop := Loop()).model.state_dict().values():
            each.zero_()
    return loop.model


@pytest.mark.parametrize(
    ("options", "numbers"),
    [({}, [1, 2, 3]), ({"after": 1}, [2, 3]), ({"newest": True}, [3]), ({"after": 3}, [])],
)
def test_each_version_comes_once_in_order(options, numbers, published):
    assert [each.number for each in follow(published[0], timeout=0, **options)] == numbers


def test_a_version_fills_a_model_in_place(published):
    root, model = published
    target = _zeros(model)
    target.register_state_dict_post_hook(  # quantized layers have names that are no attributes
        lambda _, state, *rest: state.update({"0.weight.bits": 4})
    )
    places = [each.data_ptr() for each in target.parameters()]
    newest = next(follow(root, newest=True))
    newest.load_into(target)
    assert places == [each.data_ptr() for each in target.parameters()]
    for name, tensor in model.state_dict().items():
        assert torch.equal(target.state_dict()[name], tensor)
    assert newest.names == sorted(model.state_dict())
    assert newest.step == 2
    assert abs(newest.published_at - time.time()) < 600


def test_a_model_without_memory_is_refused(published):
    model = _zeros(published[1]).to("meta")
    with pytest.raises(ConfigurationError, match="meta device"):
        next(follow(published[0], newest=True)).load_into(model)


def test_tensors_of_another_dtype_are_converted(published):
    root, model = published
    target = {name: each.double() * 0 for name, each in model.state_dict().items()}
    next(follow(root, newest=True)).load_into(target)
    for name, tensor in model.state_dict().items():
        assert torch.equal(target[name], tensor.double())


@pytest.mark.parametrize("change", ["more", "fewer", "shape"])
def test_what_does_not_fit_stays_as_it_is(change, published):
    root, model = published
    target = {name: torch.zeros_like(each) for name, each in model.state_dict().items()}
    first = min(target)
    if change == "more":
        target["other"] = torch.zeros(3)
    elif change == "fewer":
        del target[first]
    else:
        target[first] = torch.zeros(5)
    newest = next(follow(root, newest=True))
    with pytest.raises(IncompatibleStateError, match="other" if change == "more" else first):
        newest.load_into(target)
    assert not any(each.any() for each in target.values())
    if change != "shape":
        newest.load_into(target, strict=False)
        assert all(each.any() for name, each in target.items() if name != "other")


def test_a_damaged_byte_is_seen_before_anything_changes(published, tmp_path):
    loop = Loop()
    with manager(tmp_path / "run", publish=Weights(tmp_path / "w")) as saves:
        saves.save(0, loop.state)
    found = next(follow(tmp_path / "w"))
    (file,) = found.path.glob("*.safetensors")
    flip_bit(file, file.stat().st_size - 3)
    target = _zeros(loop.model)
    with pytest.raises(CheckpointCorruptError, match="checksum in the index"):
        found.load_into(target)
    assert not any(each.any() for each in target.state_dict().values())


def test_a_version_that_is_removed_is_not_found_and_the_next_one_comes(tmp_path):
    loop = Loop()
    with manager(tmp_path / "run", publish=Weights(tmp_path / "w", keep=None)) as saves:
        for step in range(3):
            saves.save(step, loop.state)
            saves.wait()
    versions = follow(tmp_path / "w", timeout=0)
    first = next(versions)
    version.remove(tmp_path / "w", [1, 2])
    with pytest.raises(CheckpointNotFoundError):
        first.read()
    assert [each.number for each in versions] == [3]


def test_a_follower_that_comes_first_waits_for_the_root(tmp_path):
    loop = Loop()
    found = []

    def run() -> None:
        versions = follow(tmp_path / "w", poll=0.01)
        found.extend(each.step for each in itertools.islice(versions, 3))

    thread = threading.Thread(target=run)
    thread.start()
    with manager(tmp_path / "run", publish=Weights(tmp_path / "w", keep=None)) as saves:
        for step in range(3):
            saves.save(step, loop.state)
            saves.wait()
    thread.join(60)
    assert found == [0, 1, 2]


@pytest.mark.parametrize(
    "index",
    [
        b"",
        b"[" * 100_000,
        b"7",
        b'{"metadata": 7, "weight_map": {}}',
        b'{"metadata": {}, "weight_map": {"w": "../../etc/passwd"}}',
        b'{"metadata": {}, "weight_map": {"w": 7}}',
        b'{"metadata": {"step": 7}, "weight_map": {}}',
        b'{"metadata": {"published_at": "never"}, "weight_map": {}}',
    ],
)
def test_a_hostile_index_is_a_damaged_one(index, tmp_path):
    (tmp_path / "weight_v000001").mkdir()
    (tmp_path / "weight_v000001" / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(CheckpointCorruptError):
        next(follow(tmp_path))


@pytest.mark.parametrize("base", ["000002", "000009", "-1", "x", 7, None])
def test_a_delta_of_itself_or_of_nothing_ends_in_an_error(base, tmp_path):
    about = {"delta_encoding": "xor", "base_version": base}
    content = {"metadata": about, "weight_map": {}, "checksums": {}}
    (tmp_path / "weight_v000002").mkdir()
    (tmp_path / "weight_v000002" / "model.safetensors.index.json").write_text(json.dumps(content))
    with pytest.raises(DataStatesError):
        next(follow(tmp_path)).read()


def test_other_names_beside_the_versions_are_no_versions_and_the_highest_number_is_told(tmp_path):
    for name in ("weight_v1", "weight_v0000000000000001", "weight_vx", "weights"):
        (tmp_path / name).mkdir()
    (tmp_path / "weight_v000003").write_bytes(b"a file")
    assert version.numbers_below(tmp_path) == []
    (tmp_path / "weight_v999999999").mkdir()
    with pytest.raises(ConfigurationError, match="weight_v999999999"):
        version.claim(tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"after": -1}, "after"),
        ({"poll": 0}, "poll"),
        *(({"timeout": each}, "timeout") for each in ("x", "")),
        ({"newest": 1}, "newest"),
    ],
)
def test_an_argument_that_cannot_work_is_refused_at_the_call(options, said, tmp_path):
    with pytest.raises(ConfigurationError, match=said):
        follow(tmp_path, **options)
