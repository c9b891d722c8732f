"""``convert`` from each format to each: what the format's own library reads is what was saved."""

import itertools
import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.state.checkpoints import assert_same, save, zeros
from support.state.chunks import boxes, save_by_ranks
from support.state.roots import uncommitted
from support.state.states import filled

import dcp_datastates
from dcp_datastates import convert, verify
from dcp_datastates.storage import attempt

from .conftest import SMALL, save_stock

HOLD_ALL = ("datastates", "dcp", "torch")

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _read(path, to, state):
    """By the format's own library."""
    if to == "datastates":
        report = verify(path)
        assert report.whole, report
        return dcp_datastates.load(path)
    if to == "torch":
        mapped = torch.load(path, weights_only=True, mmap=True)
        assert_same(mapped, torch.load(path, weights_only=True))
        return mapped
    found = zeros(state)
    found["step"] = 0
    found["optimizer"]["param_groups"] = [{"lr": 0, "betas": 0, "params": 0}]
    dcp.load(found, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return found


@pytest.mark.parametrize(("source", "to"), list(itertools.product(HOLD_ALL, HOLD_ALL)))
def test_a_whole_state(source, to, sources, state, tmp_path):
    done = convert(sources[source], tmp_path / "out", to, **SMALL)
    assert_same(_read(tmp_path / "out", to, state), state)
    assert (done.path, done.target_format, done.skipped) == (tmp_path / "out", to, ())
    assert (done.tensors, done.objects) == (12, 4)


@pytest.mark.parametrize("source", HOLD_ALL)
@pytest.mark.parametrize("to", ["hf", "safetensors"])
def test_tensors_to_safetensors(source, to, sources, state, tmp_path):
    convert(sources[source], tmp_path / "out", to, part="model", **SMALL)
    file = tmp_path / "out" / "model.safetensors" if to == "hf" else tmp_path / "out"
    assert_same(load_file(file), state["model"])
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}, "transformers asks for it"
        assert_same(
            opened.get_slice("layers.0.weight")[5:9, 60:],
            state["model"]["layers.0.weight"][5:9, 60:],
        )
    assert not list(tmp_path.rglob("*.json")), "one file needs no index"


@pytest.mark.parametrize("to", HOLD_ALL)
def test_from_safetensors(to, state, tmp_path):
    save_file(state["model"], tmp_path / "model.safetensors")
    source = tmp_path / "model.safetensors"
    convert(source, tmp_path / "out", to, rename={"": "model."}, **SMALL)
    state = {"model": state["model"]}
    if to == "dcp":
        found = zeros(state)
        dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path / "out"), no_dist=True)
    else:
        found = _read(tmp_path / "out", to, state)
    assert_same(found, state)


def test_shards_and_their_index(state, tmp_path):
    save(state["model"], tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "hf", "hf", shard_size=100, **SMALL)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_bytes())
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 1
    assert files == [
        f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)
    ]
    found = {}
    for file in files:
        content = load_file(tmp_path / "hf" / file)
        assert content.keys() == {name for name, at in index["weight_map"].items() if at == file}
        assert len(content) == 1 or sum(each.nbytes for each in content.values()) <= 100
        found |= content
    assert_same(found, state["model"])
    assert index["metadata"] == {
        "total_size": sum(each.nbytes for each in found.values()),
        "total_parameters": sum(each.numel() for each in found.values()),
    }
    convert(tmp_path / "hf", tmp_path / "back", **SMALL)
    assert_same(dcp_datastates.load(tmp_path / "back"), state["model"])


def test_chunks_of_several_ranks_become_whole_tensors(tmp_path):
    """Rows, columns and blocks."""
    tensors = {
        "rows": (filled((3000, 1111), torch.float32, 1), [(1, 1500, 2999), ()]),
        "columns": (filled((999, 4003), torch.bfloat16, 2), [(), (1, 2001)]),
        "blocks": (filled((17, 301, 1999), torch.uint8, 3), [(5,), (150,), (7, 1000)]),
    }
    pieces = {name: (each, boxes(each.shape, cuts)) for name, (each, cuts) in tensors.items()}
    per_rank = [
        {name: (tensor, mine[rank::2]) for name, (tensor, mine) in pieces.items()}
        for rank in range(2)
    ]
    save_by_ranks(tmp_path / "in", per_rank)
    expected = {name: tensor for name, (tensor, _) in tensors.items()}
    for to in ("safetensors", "dcp", "datastates"):
        convert(tmp_path / "in", tmp_path / to, to, **SMALL)
    assert_same(load_file(tmp_path / "safetensors"), expected)
    assert_same(dcp_datastates.load(tmp_path / "datastates"), expected)
    convert(tmp_path / "dcp", tmp_path / "again", "safetensors", **SMALL)
    assert_same(load_file(tmp_path / "again"), expected)


def test_tensors_that_share_memory_or_are_strided(tmp_path):
    base = filled((40, 30), torch.float32)
    views = {"base": base, "rows": base[7:9], "turned": base.t(), "every": base[:, ::3]}
    torch.save(views, tmp_path / "in")
    save_stock({"turned": base.t()}, tmp_path / "stock")
    convert(tmp_path / "in", tmp_path / "out", "safetensors", **SMALL)
    assert_same(
        load_file(tmp_path / "out"), {name: each.contiguous() for name, each in views.items()}
    )
    convert(tmp_path / "stock", tmp_path / "turned", "safetensors", **SMALL)
    assert_same(load_file(tmp_path / "turned"), {"turned": base.t().contiguous()})


def test_dtype_concerns_floating_point_tensors_only(sources, state, tmp_path):
    convert(
        sources["datastates"],
        tmp_path / "out",
        "safetensors",
        part="model",
        dtype="float32",
        **SMALL,
    )
    expected = {
        name: each.float() if each.is_floating_point() else each
        for name, each in state["model"].items()
    }
    assert_same(load_file(tmp_path / "out"), expected)


@pytest.mark.parametrize("to", HOLD_ALL)
def test_a_state_without_values(to, tmp_path):
    save({}, tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out", to, **SMALL)
    if to == "torch":
        assert torch.load(tmp_path / "out") == {}
    else:
        convert(tmp_path / "out", tmp_path / "back", "torch", **SMALL)
        assert torch.load(tmp_path / "back") == {}


def test_a_tuple_with_tensors_in_it_is_an_object_as_in_a_save(tmp_path):
    state = {"pair": (filled((3,), torch.float32, 1), 3), "w": torch.zeros(2)}
    torch.save(state, tmp_path / "in")
    save(state, tmp_path / "saved")
    done = convert(tmp_path / "in", tmp_path / "out", **SMALL)
    assert (done.tensors, done.objects) == (1, 1)
    assert dcp_datastates.diff(tmp_path / "saved", tmp_path / "out").same
    assert_same(dcp_datastates.load(tmp_path / "out"), state)


def test_a_dtype_that_only_torch_has(tmp_path):
    wide = filled((5, 3), torch.complex128)
    save({"wide": wide}, tmp_path / "in")
    for to in HOLD_ALL:
        convert(tmp_path / "in", tmp_path / to, to, **SMALL)
    assert_same(dcp_datastates.load(tmp_path / "datastates"), {"wide": wide})
    assert_same(torch.load(tmp_path / "torch"), {"wide": wide})
    with pytest.raises(
        dcp_datastates.errors.ConfigurationError, match=r"'wide' is torch\.complex128"
    ):
        convert(tmp_path / "in", tmp_path / "hf", "hf", **SMALL)
    assert not (tmp_path / "hf").exists()


def test_the_new_checkpoint_is_newer_than_those_beside_it(tmp_path, monkeypatch):
    """Also than one of a machine whose clock is ahead."""
    monkeypatch.setattr(attempt, "_incarnation", attempt._incarnation)  # put back after the test
    for step in (1, 2):
        save({"w": torch.full((3,), float(step))}, tmp_path / "root" / f"step-{step}")
    save_file({"w": torch.zeros(3)}, tmp_path / "w")
    uncommitted(tmp_path / "root" / "step-2")
    convert(tmp_path / "w", tmp_path / "root" / "imported", **SMALL)
    assert dcp_datastates.latest(tmp_path / "root") == tmp_path / "root" / "imported"
    found = dcp_datastates.inspect(tmp_path / "root" / "imported").attempt
    there = (tmp_path / "root" / "step-2").glob("*-*")
    assert found > max(path.name for path in there)


def test_progress_is_of_all_bytes(sources, tmp_path):
    told = []
    done = convert(
        sources["dcp"], tmp_path / "out", "dcp", progress=lambda *each: told.append(each), **SMALL
    )
    assert told[-1] == (done.nbytes, done.nbytes)
    assert [each for each, _ in told] == sorted(each for each, _ in told)
