"""Damage that no random one is likely to be: cuts where something ends, other files' pickles, paths, formats."""

import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.state.checkpoints import Malice, assert_same, load_everything, raises, save
from support.state.files import data_files, put_back
from support.state.metadata import decision_of, file_of, parts_of
from support.state.states import filled

from dcp_datastates.errors import CheckpointCorruptError, CheckpointNotFoundError

STATE = {
    "a": filled((700_000,), torch.float32, 1),
    "b": filled((33, 17), torch.bfloat16, 2),
    "c": filled((3_000_001,), torch.uint8, 3),
    "scalar": filled((), torch.float64, 4),
}
OBJECT = {"object": {"text": "t" * 50_000}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    save({**STATE, **OBJECT}, path)
    assert_same(load_everything(path), {**STATE, **OBJECT})
    return path


@pytest.fixture
def checkpoint(saved):
    """The same for all tests: what one does to its files is undone."""
    with put_back(saved):
        yield saved


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 4095, 4096, 1 << 20, -1, -4, -5, -4096])
def test_a_data_file_that_was_cut_short_is_seen(keep, checkpoint):
    (path,) = data_files(checkpoint)
    os.truncate(path, keep if keep >= 0 else path.stat().st_size + keep)
    with raises(CheckpointCorruptError, path.name):
        load_everything(checkpoint)


def test_metadata_without_their_table_are_damaged_and_not_taken_for_stock_dcp(checkpoint):
    path = decision_of(checkpoint)
    path.write_bytes(parts_of(path).pickled)
    dcp.FileSystemReader(checkpoint).read_metadata()
    with raises(CheckpointCorruptError, "no checksums at its end"):
        load_everything(checkpoint)


@pytest.mark.parametrize("with_table", [False, True])
def test_a_malicious_pickle_runs_nothing(with_table, checkpoint, tmp_path_factory):
    """It is not even looked at: with a table behind it that is whole, the checkpoint loads."""
    victim = tmp_path_factory.mktemp("victim") / "created"
    malicious = pickle.dumps(Malice(victim))
    pickle.loads(malicious)
    assert victim.exists(), "the pickle must be able to do harm, or this test shows nothing"
    victim.rmdir()
    path = decision_of(checkpoint)
    if with_table:
        expected = load_everything(checkpoint)
        parts = parts_of(path)
        parts.pickled = malicious
        path.write_bytes(file_of(parts))
        assert_same(load_everything(checkpoint), expected)
    else:
        path.write_bytes(malicious)
        with raises((CheckpointCorruptError, CheckpointNotFoundError)):
            load_everything(checkpoint)
    assert not victim.exists()
