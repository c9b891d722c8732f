"""Every torch: the fields of DCP's dataclasses that only some have, and checkpoints that another torch has written."""

import textwrap

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.jobs.scripts import ranks_of_torchrun, run_program
from support.state.checkpoints import assert_same, load, load_everything, save
from support.state.metadata import parts_of, rewritten
from support.state.written import CHECKPOINTS, empty_state, expected_state
from torch.distributed.checkpoint import FileSystemReader, HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorProperties

from dcp_datastates import DataStatesReader, DataStatesSavePlanner
from dcp_datastates.dcp.tested import TESTED, tell_if_untested
from dcp_datastates.format.values import HAS_STRIDES, new_fields


def _run(script, path, *arguments, ranks=0, fails=False):
    """What a script prints, in a process of its own, or in those of ranks, each of which is given its rank; its errors,
    if it ``fails``.
    """
    quiet = "import logging, os, sys, warnings\nwarnings.filterwarnings('ignore')\n"
    preface = ranks_of_torchrun(ranks) if ranks else ""
    number = (
        "sys.argv.insert(2, os.environ.get('RANK', '0'))\nlogging.basicConfig(stream=sys.stdout)\n"
    )
    script = quiet + preface + number + textwrap.dedent(script)
    ended = run_program(script, path.parent, [str(path), *arguments], 120)
    assert bool(ended.returncode) == fails, ended.stderr
    assert ended.stdout.count("ended with 0\n") == ranks, ended.stderr
    return ended.stderr if fails else ended.stdout


def test_all_fields_of_this_torch_are_known():
    assert new_fields() == {}


# --- strides, which properties have since torch 2.15 ------------------------------------------------------

IN_ANOTHER = """
from support.state.future_torch import install
path, rank, *kinds = sys.argv[1:]
install(*kinds)
import torch, dcp_datastates
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_datastates import DataStatesReader, DataStatesSavePlanner, DataStatesWriter

def read():
    return DataStatesReader(path).read_metadata()
"""

EVERY_WAY = """
def check(state):
    entries = read().state_dict_metadata
    for name, tensor in state.items():
        assert entries[name].properties.strides == tensor.stride(), (name, entries[name])
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
for saved in ways.values():
    # The same shapes each time: what differs is only the strides.
    for number in range(4):
        turned = number == 2
        state = {
            "turned": torch.arange(12.0).reshape(4, 3).t() if turned else torch.ones(3, 4),
            "large": large.clone().t() if turned else torch.randn(400, 300),
            "gaps": torch.ones(10, 10)[:, ::3],
            "expanded": torch.ones(1, 5).expand(4, 5),
            "nothing": torch.ones(0, 3),
            "number": torch.tensor(1.0),
        }
        saved(state)
        check(state)
"""


def test_strides_are_those_of_the_tensors_at_the_call(tmp_path):
    _run(IN_ANOTHER + EVERY_WAY, tmp_path, "strides")


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
    shared = torch.nn.Parameter(torch.full((1024, 512), float(number)).t())
    owner = torch.optim.SGD([shared])
    dcp_datastates.track(owner)  # so that its replicas may be shared out
    state = {
        "cut": distribute_tensor(whole, mesh, [Shard(1 if turned else 0)], src_data_rank=None),
        "both": shared.detach(),
        "small": torch.ones(5, 2).t() if turned else torch.ones(2, 5),
    }
    by = DataStatesWriter(path, reads="immediate", host_cache_size="64MiB")
    dcp_datastates.async_save(state, writer=by, planner=planner).upload_completion.result()
    dist.barrier()
    entries = read().state_dict_metadata
    local = {**state, "cut": state["cut"].to_local()}
    for name in state:
        assert entries[name].properties.strides == local[name].stride(), (number, entries[name])
    assert len(entries["both"].chunks) == 2, "replicas are shared out"
    target = {"cut": torch.zeros(200, 100), "both": torch.zeros(512, 1024)}
    dcp.load(target, storage_reader=DataStatesReader(path))
    assert torch.equal(target["cut"], whole) and torch.equal(target["both"], state["both"])
    dist.barrier()
dist.destroy_process_group()
"""


def test_strides_go_from_rank_to_rank(tmp_path):
    _run(IN_ANOTHER + TWO_RANKS, tmp_path / "c", "strides", ranks=2)


# --- a torch that does not exist yet ------------------------------------------------------------------

NEW = (
    "TensorProperties",
    "TensorStorageMetadata",
    "ChunkStorageMetadata",
    "MetadataIndex",
    "Metadata",
)

SAVED = """
state = {"w": torch.arange(12.0).reshape(3, 4).t(), "o": "an object"}
dcp.save(state, storage_writer=DataStatesWriter(path), planner=DataStatesSavePlanner())
dcp.save(state, storage_writer=DataStatesWriter(path))
target = {"w": torch.zeros(4, 3), "o": ""}
dcp.load(target, storage_reader=DataStatesReader(path))
assert torch.equal(target["w"], state["w"]) and target["o"] == "an object"
assert read().state_dict_metadata["w"].chunks[0].note == "a note"
"""


def test_new_fields_are_left_out_and_one_line_says_so(tmp_path):
    said = _run(IN_ANOTHER + SAVED, tmp_path, "strides", *NEW)
    (line,) = [line for line in said.splitlines() if "does not know" in line]
    assert line.startswith("WARNING:dcp_datastates")
    assert all(f"{kind}.note" in line for kind in NEW)
    assert "note" not in str(parts_of(tmp_path).document)
    target = {"w": torch.zeros(4, 3), "o": ""}
    load(target, tmp_path)
    assert torch.equal(target["w"], torch.arange(12.0).reshape(3, 4).t())
    assert target["o"] == "an object"
    (attempt,) = (path for path in tmp_path.iterdir() if path.is_dir())
    target = {"w": torch.zeros(4, 3)}
    dcp.load(target, storage_reader=HuggingFaceStorageReader(str(attempt)), no_dist=True)
    assert torch.equal(target["w"], torch.arange(12.0).reshape(3, 4).t())
    FileSystemReader(tmp_path).read_metadata()


LOADED = """
for planned in ("own", "stock"):
    path = f"{sys.argv[1]}/{planned}"
    for found in (read(), dcp.FileSystemReader(path).read_metadata()):
        entry = found.state_dict_metadata["w"]
        assert entry.properties.strides is None and entry.chunks[0].note == "a note"
    target = {"w": torch.zeros(3, 4)}
    dcp.load(target, storage_reader=DataStatesReader(path))
    assert torch.equal(target["w"], torch.arange(12.0).reshape(3, 4))
"""


@pytest.mark.skipif(HAS_STRIDES, reason="this torch writes strides")
def test_a_newer_torch_loads_what_this_one_has_written(tmp_path):
    save({"w": torch.arange(12.0).reshape(3, 4)}, tmp_path / "stock")
    save({"w": torch.arange(12.0).reshape(3, 4)}, tmp_path / "own", planner=DataStatesSavePlanner())
    _run(IN_ANOTHER + LOADED, tmp_path, "strides", *NEW)


def test_a_new_field_without_a_default_is_refused_by_name(tmp_path):
    said = _run(IN_ANOTHER, tmp_path, "required", fails=True).splitlines()[-1]
    assert "ConfigurationError" in said
    assert "ChunkStorageMetadata.must" in said
    assert all(version in said for version in TESTED)


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
    strides = (1, 6) if HAS_STRIDES and "2.15" in path.name else None
    assert getattr(properties, "strides", None) == strides


@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: path.name)
def test_stock_readers_open_what_another_torch_has_written(path):
    ours, stock = DataStatesReader(path).read_metadata(), FileSystemReader(path).read_metadata()
    assert ours.planner_data == stock.planner_data
    assert list(ours.state_dict_metadata) == list(stock.state_dict_metadata)
    assert stock.state_dict_metadata["weight"].properties.dtype == torch.float32
    (attempt,) = (entry for entry in path.iterdir() if entry.is_dir())
    state = {"weight": torch.zeros(6, 4), "half": torch.zeros(5, dtype=torch.bfloat16)}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(attempt)), no_dist=True)
    assert torch.equal(state["weight"], expected_state()["weight"])
    assert torch.equal(state["half"], expected_state()["half"])


# --- a torch that was not tested ----------------------------------------------------------------------

FIRST_IMPORT = """
import logging, sys, torch
logging.basicConfig(stream=sys.stdout)
torch.__version__ = "2.99.0"
import dcp_datastates
import dcp_datastates.format.values
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


# --- fields in a file that are not known ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["said", "__setstate__", "__class__", "a b"])
def test_a_field_that_is_not_known_is_not_looked_at(name, tmp_path):
    save({"w": torch.ones(3)}, tmp_path)
    expected = DataStatesReader(tmp_path).read_metadata().state_dict_metadata["w"].properties

    def change(parts):
        parts.document["properties"][0][name] = {"of the future": 1}
        parts.document[name] = {"of the future": 1}

    rewritten(tmp_path, change)
    found = DataStatesReader(tmp_path).read_metadata().state_dict_metadata["w"].properties
    assert type(found) is TensorProperties
    assert vars(found) == vars(expected)
    assert_same(load_everything(tmp_path), {"w": torch.ones(3)})
