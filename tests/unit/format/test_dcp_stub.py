"""The pickle in ``.metadata``: what programs that know DCP only see of a checkpoint."""

import pickle
import pickletools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import example, given, settings
from support.state.checkpoints import raises, save
from support.state.metadata_examples import Example, Object, Tensor, examples, sharded
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_datastates import DataStatesSavePlanner
from dcp_datastates.format import metadata as metadata_file
from dcp_datastates.format.metadata import stub_of


def _assert_shows(found, case):
    assert list(found.state_dict_metadata) == list(case.entries)
    keys = []
    for name, entry in case.entries.items():
        if isinstance(entry, Object):
            assert found.state_dict_metadata[name] == BytesStorageMetadata()
            keys.append(MetadataIndex(name))
            continue
        zeros = torch.Size([0] * len(entry.shape))
        whole = ChunkStorageMetadata(zeros, torch.Size(entry.shape))
        properties = case.table[entry.properties]
        assert found.state_dict_metadata[name] == TensorStorageMetadata(
            properties, torch.Size(entry.shape), [whole]
        )
        keys.append(MetadataIndex(name, zeros))
    assert list(found.storage_data) == keys
    assert found.version == "1.0.0"


@settings(max_examples=300)
@given(examples())
@example(Example({}, (), (), None))
@example(sharded(3, 1001))
def test_it_shows_names_shapes_and_properties(case):
    _assert_shows(pickle.loads(stub_of(case.columns()[0])), case)


def test_its_length_does_not_depend_on_the_number_of_chunks():
    few, many = sharded(2, 50), sharded(1000, 50)
    assert len(stub_of(many.columns()[0])) < 1.1 * len(stub_of(few.columns()[0]))


def test_it_is_made_once_for_a_catalog(monkeypatch):
    catalog, _ = sharded(5, 2).columns()
    first = stub_of(catalog)
    monkeypatch.setattr(metadata_file, "_pickled", lambda metadata: b"again")
    assert stub_of(catalog) is first


def test_it_has_no_field_that_only_this_torch_has():
    case = Example(
        {"w": Tensor(0, (2,), ()), "o": Object((0, 0, 0))}, (TensorProperties(),), (), None
    )
    stub = stub_of(case.columns()[0])
    words = {arg for _, arg, _ in pickletools.genops(stub) if isinstance(arg, str)}
    fields = {"fqn", "offset", "index", "properties", "size", "chunks", "offsets", "sizes"}
    fields |= {"relative_path", "length", "transform_descriptors"}
    fields |= {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"}
    assert words & {"strides", "dtype"} == set()
    assert fields <= words


@pytest.mark.parametrize("planner", [None, DataStatesSavePlanner])
def test_stock_dcp_sees_what_is_there_and_says_what_to_do(planner, tmp_path):
    state = {"w": torch.arange(12.0).reshape(3, 4), "n": {"step": 3, "empty": torch.empty(0)}}
    save(state, tmp_path, planner=planner and planner())
    reader = dcp.FileSystemReader(tmp_path)
    found = reader.read_metadata().state_dict_metadata
    assert found["w"].size == (3, 4)
    assert found["w"].properties.dtype == torch.float32
    assert isinstance(found["n.step"], BytesStorageMetadata)
    for state in ({"w": torch.zeros(3, 4)}, {"n": {"step": 0}}):
        with raises(ValueError, "dcp_datastates.load(path)", "DataStatesReader(path)"):
            dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path))
    with raises(ValueError, "`dcp-datastates convert PATH OUT --to dcp`"):
        dcp_to_torch_save(tmp_path, tmp_path / "c.pt")


def test_a_program_may_change_one_entry(tmp_path):
    save({"a": torch.zeros(3, 4), "b": torch.zeros(3, 4)}, tmp_path)
    found = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    found["a"].size = torch.Size((12,))
    found["a"].chunks.clear()
    assert found["b"].size == (3, 4)
    assert len(found["b"].chunks) == 1
