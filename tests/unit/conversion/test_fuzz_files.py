"""Files of other programs, and small files beside checkpoints, changed at random: this package's errors, soon."""

import json
import os
import random

import pytest
import torch
from safetensors.torch import save_file
from support.state.checkpoints import save
from support.state.files import mutated
from support.state.metadata import decision_of, process_wide
from support.state.roots import save_stock
from support.tiers import tries
from support.waiting import little_work

import dcp_datastates
from dcp_datastates.conversion.dcp_checkpoints import StockSource
from dcp_datastates.conversion.hugging_face import weights_in
from dcp_datastates.conversion.torch_file import torch_source
from dcp_datastates.errors import DataStatesError
from dcp_datastates.tiers.run_identity import IDENTITY_NAME, check_one_run

SEED = int(os.environ.get("FUZZ_SEED", "20241121")) + 5
SECONDS_PER_TRY = 2.0


@pytest.fixture(autouse=True)
def _nothing_shared_changes():
    before = process_wide()
    yield
    assert process_wide() == before


def _torch_file(folder, is_archive):
    state = {"w": torch.arange(6.0).view(2, 3).t(), "o": {"lr": 0.1, "betas": (0.9, 1)}, "n": [3]}
    torch.save(state, folder / "file", _use_new_zipfile_serialization=is_archive)
    return folder / "file"


def _stock(folder):
    save_stock(folder)
    return folder / ".metadata"


def _index(folder):
    save_file({"a": torch.ones(2)}, folder / "m-1.safetensors")
    index = {"metadata": {"total_size": 8}, "weight_map": {"a": "m-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder / "model.safetensors.index.json"


def _decision(folder):
    save({"w": torch.ones(2)}, folder / "step-1")
    return decision_of(folder / "step-1")


def _identity(folder):
    (folder / "fast").mkdir()
    check_one_run(folder / "fast", folder / "slow")
    return folder / "fast" / IDENTITY_NAME


READERS = {
    "torch": (lambda folder: _torch_file(folder, True), lambda _, file: torch_source(file, False)),
    "legacy": (
        lambda folder: _torch_file(folder, False),
        lambda _, file: torch_source(file, False),
    ),
    "stock": (_stock, lambda folder, _: StockSource(folder, False)),
    "index": (_index, lambda folder, _: weights_in(folder)),
    "decision": (_decision, lambda folder, _: dcp_datastates.latest(folder)),
    "identity": (_identity, lambda folder, _: check_one_run(folder / "fast", folder / "slow")),
}


@pytest.mark.parametrize("changes", tries(150, 5000))
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.filterwarnings("ignore")
def test_changed_files_are_read_or_refused(reader, changes, tmp_path):
    """Nothing but this package's errors, soon."""
    make, read = READERS[reader]
    path = make(tmp_path)
    good, chance = path.read_bytes(), random.Random(SEED)
    read(tmp_path, path)
    for number in range(changes):
        path.write_bytes(mutated(good, chance))
        with little_work(SECONDS_PER_TRY):
            try:
                read(tmp_path, path)
            except DataStatesError:
                pass
            except Exception as error:
                error.add_note(f"seed {SEED}, change {number}")
                raise
