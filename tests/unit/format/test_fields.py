"""Every torch: fields that DCP's dataclasses gain, and checkpoints that another torch has written."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.jobs.scripts import ranks_of_torchrun, run_program
from support.state.checkpoints import assert_same, async_save, load, load_everything, raises, save
from support.state.metadata import rewritten
from support.state.written import CHECKPOINTS, empty_state, expected_state
from support.tiers import sampled
from torch.distributed.checkpoint import FileSystemReader, HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorProperties

from dcp_datastates import CheckpointCorruptError, DataStatesReader, DataStatesSavePlanner
from dcp_datastates.dcp.tested import TESTED, tell_if_untested
from dcp_datastates.format.fields import unknown_fields

HAS_STRIDES = "strides" in unknown_fields(TensorProperties)


def _run(script: str, path: Path, *arguments: str, ranks: int = 0) -> str:
    """What a script prints, in a process of its own; or in those of ranks. Each is given its rank."""
    quiet = "import os, sys, warnings\nwarnings.filterwarnings('ignore')\n"
    preface = ranks_of_torchrun(ranks) if ranks else ""
    number = "sys.argv.insert(2, os.environ.get('RANK', '0'))\n"
    script = quiet + preface + number + textwrap.dedent(script)
    ended = run_program(script, path.parent, [str(path), *arguments], 120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("ended with 0\n") == ranks, ended.stderr
    return ended.stdout


# --- a torch that does not exist yet ------------------------------------------------------------------

IN_FUTURE = """
import sys
from support.state.future_torch import install, said_of
path, rank, *kinds = sys.argv[1:]
install(*kinds)
import torch, dcp_datastates
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_datastates import DataStatesReader, DataStatesSavePlanner, DataStatesWriter

def read():
    return DataStatesReader(path).read_metadata()

def labelled(tensor, label):
    tensor.label = label
    return tensor
"""

EVERY_WAY = """
def check(state):
    entries = read().state_dict_metadata
    for name, tensor in state.items():
        assert entries[name].properties.said == said_of(tensor), (name, entries[name])
        assert entries[name].properties.mood.name == "BETTER"
    target = {name: torch.zeros(tensor.shape) for name, tensor in state.items()}
    dcp.load(target, storage_reader=DataStatesReader(path))
    assert all(torch.equal(target[name], state[name]) for name in state)

def asynchronous(planner):
    return lambda state: dcp.async_save(
        state, storage_writer=DataStatesWriter(path), planner=planner
    ).result()

own = DataStatesSavePlanner()
ways = {
    "dcp.save": lambda state: dcp.save(state, storage_writer=DataStatesWriter(path)),
    "dcp.save, own planner": lambda state: dcp.save(
        state, storage_writer=DataStatesWriter(path), planner=own
    ),
    "dcp.async_save": asynchronous(None),
    "dcp.async_save, own planner": asynchronous(own),
    "own": lambda state: dcp_datastates.async_save(state, path).upload_completion.result(),
}
large = torch.randn(300, 400)
for way, saved in ways.items():
    # The same shapes each time: what differs is only what the new field says.
    for number in range(5):
        turned = number == 3
        check_ = {
            "same": torch.arange(12.0).reshape(3, 4),
            "turned": torch.arange(12.0).reshape(4, 3).t() if turned else torch.ones(3, 4),
            "labelled": labelled(torch.ones(3, 4), f"{way} {number // 2}"),
            "large": large.clone().t() if turned else torch.randn(400, 300),
        }
        saved(check_)
        check(check_)
"""


def test_each_tensor_keeps_its_own_value_of_a_new_property(tmp_path):
    _run(IN_FUTURE + EVERY_WAY, tmp_path, "TensorProperties")


TWO_RANKS = """
rank = int(rank)
dist.init_process_group("gloo", store=dist.FileStore(path + "-store", 2), rank=rank, world_size=2)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
mesh = init_device_mesh("cpu", (2,))
planner = DataStatesSavePlanner()
for number in range(6):
    turned = number in (2, 3)
    whole = torch.arange(20_000.0).reshape(200, 100)
    shared = torch.nn.Parameter(torch.full((1024, 1024), float(number)))
    owner = torch.optim.SGD([shared])
    dcp_datastates.track(owner)  # so that its replicas may be shared out
    state = {
        "cut": distribute_tensor(whole, mesh, [Shard(1 if turned else 0)], src_data_rank=None),
        "both": labelled(shared.detach(), f"both {number // 2}"),
        "small": labelled(torch.ones(5), f"small {number // 2}"),
    }
    by = DataStatesWriter(path, read_window="immediate", host_cache_size="64MiB")
    dcp_datastates.async_save(state, writer=by, planner=planner).upload_completion.result()
    dist.barrier()
    entries = read().state_dict_metadata
    local = state["cut"].to_local()
    said = {"cut": said_of(local), "both": said_of(state["both"]), "small": said_of(state["small"])}
    for name in state:
        assert entries[name].properties.said == said[name], (number, entries[name].properties)
    assert len(entries["both"].chunks) == 2, "replicas are shared out"
    target = {"cut": torch.zeros(200, 100), "both": torch.zeros(1024, 1024)}
    dcp.load(target, storage_reader=DataStatesReader(path))
    assert torch.equal(target["cut"], whole) and torch.equal(target["both"], state["both"])
    dist.barrier()
dist.destroy_process_group()
"""


def test_a_new_property_goes_from_rank_to_rank(tmp_path):
    _run(IN_FUTURE + TWO_RANKS, tmp_path / "c", "TensorProperties", ranks=2)


OTHER_CLASSES = """
planner = DataStatesSavePlanner()
for number in range(3):
    state = {"w": torch.full((3, 4), float(number)), "v": torch.ones(number + 2), "o": {"x": "text"}}
    dcp_datastates.async_save(state, path, planner=planner).upload_completion.result()
    found = read()
    for name in ("w", "v"):
        entry = found.state_dict_metadata[name]
        (chunk,) = entry.chunks
        (index,) = [index for index in found.storage_data if index.fqn == name]
        if "ChunkStorageMetadata" in kinds:
            assert (chunk.note, chunk.mood.name) == (f"a chunk of {name}", "BETTER")
        if "MetadataIndex" in kinds:
            assert index.note == f"a place of {name}"
        if "TensorStorageMetadata" in kinds:
            assert entry.notes == ["new"]
    if "Metadata" in kinds:
        assert found.notes == {"made": "now"}
    target = {"w": torch.zeros(3, 4), "o": {"x": ""}}
    dcp.load(target, storage_reader=DataStatesReader(path))
    assert torch.equal(target["w"], state["w"]) and target["o"]["x"] == "text"
"""

OTHERS = ["ChunkStorageMetadata", "MetadataIndex", "TensorStorageMetadata", "Metadata"]


@pytest.mark.parametrize(
    "kinds", sampled(["MetadataIndex", " ".join(OTHERS)], keep=[" ".join(OTHERS)])
)
def test_a_new_field_of_another_class_is_kept(kinds, tmp_path):
    """And one line says why saves are planned more slowly."""
    logged = "import logging; logging.basicConfig(stream=__import__('sys').stdout)\n"
    said = _run(logged + IN_FUTURE + OTHER_CLASSES, tmp_path, *kinds.split())
    (line,) = [line for line in said.splitlines() if "slower" in line]
    assert all(f"{kind}.note" in line for kind in kinds.split())


SAVED = """
dcp.save(
    {"w": torch.arange(12.0).reshape(3, 4).t(), "o": "an object"},
    storage_writer=DataStatesWriter(path),
    planner=DataStatesSavePlanner(),
)
"""


ALL = " ".join(["TensorProperties", *OTHERS])


@pytest.mark.parametrize(
    "kinds",
    sampled(["TensorProperties", ALL, "MetadataIndex TensorStorageMetadata Metadata"], keep=[ALL]),
)
def test_this_torch_loads_what_a_newer_one_has_written(kinds, tmp_path):
    """Also values of a type that it does not have."""
    _run(IN_FUTURE + SAVED, tmp_path, *kinds.split())
    target = {"w": torch.zeros(4, 3), "o": ""}
    load(target, tmp_path)
    assert torch.equal(target["w"], torch.arange(12.0).reshape(3, 4).t())
    assert target["o"] == "an object"
    found = DataStatesReader(tmp_path).read_metadata()
    said = vars(found.state_dict_metadata["w"].properties).get("said")
    assert said == ([[4, 3], [1, 4], ""] if "TensorProperties" in kinds else None)
    (attempt,) = (path for path in tmp_path.iterdir() if path.is_dir())
    target = {"w": torch.zeros(4, 3)}
    dcp.load(target, storage_reader=HuggingFaceStorageReader(str(attempt)), no_dist=True)
    assert torch.equal(target["w"], torch.arange(12.0).reshape(3, 4).t())
    FileSystemReader(tmp_path).read_metadata()


LOADED = """
from torch.distributed.checkpoint import FileSystemReader
for planned in ("own", "stock"):
    path = f"{sys.argv[1]}/{planned}"
    for found in (read(), FileSystemReader(path).read_metadata()):
        entry = found.state_dict_metadata["w"]
        assert entry.properties.said is None and entry.chunks[0].note is None
    assert read().state_dict_metadata["w"].notes == ["new"] and read().notes == {"made": "now"}
    target = {"w": torch.zeros(3, 4)}
    dcp.load(target, storage_reader=DataStatesReader(path))
    assert torch.equal(target["w"], torch.arange(12.0).reshape(3, 4))
"""


def test_a_newer_torch_loads_what_this_one_has_written(tmp_path):
    save({"w": torch.arange(12.0).reshape(3, 4)}, tmp_path / "stock")
    save({"w": torch.arange(12.0).reshape(3, 4)}, tmp_path / "own", planner=DataStatesSavePlanner())
    _run(IN_FUTURE + LOADED, tmp_path, "TensorProperties", *OTHERS)


# --- torches that do exist ----------------------------------------------------------------------------


def test_there_are_checkpoints_of_all_torches_tested():
    assert {path.name.split("-")[1] for path in CHECKPOINTS} == set(TESTED)


@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: path.name)
def test_what_another_torch_has_written_loads(path):
    state = empty_state()
    load(state, path)
    assert_same(state, expected_state())
    assert_same(load_everything(path), expected_state())
    properties = DataStatesReader(path).read_metadata().state_dict_metadata["weight"].properties
    strides = (1, 6) if "2.15" in path.name else None
    assert getattr(properties, "strides", None) == strides


@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: path.name)
def test_stock_readers_open_what_another_torch_has_written(path):
    ours, stock = DataStatesReader(path).read_metadata(), FileSystemReader(path).read_metadata()
    places = [
        {
            index: (info.relative_path, info.offset, info.length)
            for index, info in each.storage_data.items()
        }
        for each in (ours, stock)
    ]  # without the sentence for stock readers, which may change
    assert places[0] == places[1]
    assert ours.planner_data == stock.planner_data
    assert list(ours.state_dict_metadata) == list(stock.state_dict_metadata)
    assert stock.state_dict_metadata["weight"].properties.dtype == torch.float32
    (attempt,) = (entry for entry in path.iterdir() if entry.is_dir())
    state = {"weight": torch.zeros(6, 4), "half": torch.zeros(5, dtype=torch.bfloat16)}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(attempt)), no_dist=True)
    assert torch.equal(state["weight"], expected_state()["weight"])
    assert torch.equal(state["half"], expected_state()["half"])


@pytest.mark.skipif(not HAS_STRIDES, reason="this torch's metadata have no strides")
@pytest.mark.parametrize("planner", [None, DataStatesSavePlanner])
@pytest.mark.parametrize("how", ["save", "async_save"])
def test_strides_are_those_of_the_tensors(how, planner, tmp_path):
    kept = planner and planner()
    for number in range(4):
        state = {
            "turned": torch.ones(3, 4) if number == 2 else torch.ones(4, 3).t(),
            "large": torch.ones(300, 400).t(),
            "gaps": torch.ones(10, 10)[:, ::3],
            "expanded": torch.ones(1, 5).expand(4, 5),
            "nothing": torch.ones(0, 3),
            "number": torch.tensor(1),
        }
        if how == "save":
            save(state, tmp_path, planner=kept)
        else:
            async_save(state, tmp_path, planner=kept).result(60)
        found = DataStatesReader(tmp_path).read_metadata().state_dict_metadata
        for name, tensor in state.items():
            assert found[name].properties.strides == tensor.stride(), name
        assert_same(load_everything(tmp_path), state)


# --- a torch that was not tested ----------------------------------------------------------------------

FIRST_IMPORT = """
import logging, sys, torch
logging.basicConfig(stream=sys.stdout)
torch.__version__ = "2.99.0"
import dcp_datastates
import dcp_datastates.format.fields
"""


def test_a_first_import_on_a_newer_torch_works_and_says_so_once(tmp_path):
    said = _run(FIRST_IMPORT, tmp_path)
    (line,) = said.splitlines()
    assert line.startswith("WARNING:dcp_datastates:")
    assert "2.99.0" in line
    assert all(version in line for version in TESTED)


@pytest.mark.parametrize(
    ("version", "lines"),
    [
        *[(version, 0) for version in TESTED],
        ("2.12.1", 0),
        (f"{TESTED[-1]}+cu132", 0),
        ("2.99.0", 1),
        ("2.100.0.dev20301231+cpu", 1),
        ("3.0.0a0+git1234567", 1),
        ("unknown", 0),
    ],
)
def test_only_a_newer_torch_is_spoken_of(version, lines, caplog):
    with caplog.at_level("INFO", logger="dcp_datastates"):
        tell_if_untested(version)
    assert len(caplog.records) == lines


# --- what a file says of new fields, as of all else, is not believed ----------------------------------


def _property(name, value):
    def change(parts):
        for each in parts.document["properties"]:
            each[name] = value

    return change


def _further(*content):
    return lambda parts: parts.document["further"].append(list(content))


WRONG = {
    "entry a list": lambda parts: parts.document.update(properties=[["said"]]),
    "name of a method": _property("__setstate__", 1),
    "name of the class": _property("__class__", 1),
    "name of none": _property("a b", 1),
    "a known one of another type": _property("pin_memory", 1),
    "a known one that cannot be": _property("dtype", {"dtype": "Tensor"}),
    "column of three": _further("MetadataIndex", "said", [1]),
    "column of a known field": _further("MetadataIndex", "fqn", ["x"], [0]),
    "column of a method": _further("ChunkStorageMetadata", "__init__", [1], [0]),
    "column of another class": _further("Path", "said", [1], [0]),
    "column too short": _further("ChunkStorageMetadata", "said", [1], []),
    "value that is not there": _further("ChunkStorageMetadata", "said", [1], [1]),
    "value before all": _further("ChunkStorageMetadata", "said", [1], [-2]),
    "value that is true": _further("ChunkStorageMetadata", "said", [1, 2], [True]),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_malformed_fields_are_refused(wrong, tmp_path):
    save({"w": torch.ones(3)}, tmp_path)

    def good(parts):
        _property("said", 1)(parts)
        _further("ChunkStorageMetadata", "said", ["x", 2], [1])(parts)

    rewritten(tmp_path, good)
    found = DataStatesReader(tmp_path).read_metadata().state_dict_metadata["w"]
    assert vars(found.properties)["said"] == 1
    assert vars(found.chunks[0])["said"] == 2
    rewritten(tmp_path, WRONG[wrong])
    with raises(CheckpointCorruptError, "decision"):
        load_everything(tmp_path)


def test_a_value_that_this_torch_cannot_make_is_left_out(tmp_path):
    save({"w": torch.ones(3)}, tmp_path)

    def change(parts):
        _property("said", {"enum": ["Mood", "GOOD"]})(parts)
        _property("more", {"tuple": [1, 2]})(parts)
        _further("ChunkStorageMetadata", "said", [{"of the future": 1}], [0])(parts)

    rewritten(tmp_path, change)
    found = DataStatesReader(tmp_path).read_metadata().state_dict_metadata["w"]
    assert "said" not in vars(found.properties)
    assert vars(found.properties)["more"] == (1, 2)
    assert "said" not in vars(found.chunks[0])
    assert_same(load_everything(tmp_path), {"w": torch.ones(3)})


LOST = """
logged = logging.getLogger("dcp_datastates")
from torch.distributed.checkpoint.metadata import TensorProperties
create = TensorProperties.create_from_tensor

def strange(tensor):
    made = create(tensor)
    made.said = object
    return made

TensorProperties.create_from_tensor = staticmethod(strange)
for number in range(2):
    dcp.save({"w": torch.arange(3.0), "v": torch.ones(2)}, storage_writer=DataStatesWriter(path))
assert read().state_dict_metadata["w"].properties.said is None
target = {"w": torch.zeros(3)}
dcp.load(target, storage_reader=DataStatesReader(path))
assert torch.equal(target["w"], torch.arange(3.0))
"""


def test_a_new_field_whose_value_has_no_place_is_left_out_and_one_line_says_so(tmp_path):
    logged = "import logging; logging.basicConfig(stream=__import__('sys').stdout)\n"
    said = _run(logged + IN_FUTURE + LOST, tmp_path, "TensorProperties")
    (line,) = [line for line in said.splitlines() if "left out" in line]
    assert line.startswith("WARNING:dcp_datastates")
    assert "TensorProperties.said" in line
