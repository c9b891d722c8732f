"""Options that calls pass on to the writer: the same names everywhere, and a misspelled one is named."""

import inspect

import pytest
import torch

import dcp_datastates as ds
from dcp_datastates.config import WriterOptions
from dcp_datastates.loading.fit import Fit, FitOptions, LoadOptions

STATE = {"w": torch.ones(3)}


def test_the_options_that_are_passed_on_are_those_of_the_writer():
    parameters = inspect.signature(ds.DataStatesWriter.__init__).parameters
    passed = set(parameters) - {"self", "path", "process_group"}
    assert passed == set(WriterOptions.__annotations__)


def test_the_options_of_a_load_are_those_that_are_checked():
    checked = {each for each in Fit.__dataclass_fields__ if each != "only"}
    assert set(FitOptions.__annotations__) == checked
    assert set(LoadOptions.__annotations__) == {*checked, "only", "allow_objects", "share_reads"}


@pytest.mark.parametrize(
    ("call", "option", "meant"),
    [
        (lambda path, **o: ds.async_save(STATE, path, **o), "host_cach_size", "host_cache_size"),
        (lambda path, **o: ds.save(STATE, path, **o), "read", "reads"),
        (
            lambda path, **o: ds.CheckpointManager(path, every=1, **o),
            "max_in_fligt",
            "max_in_flight",
        ),
        (lambda path, **o: ds.load(path, **o), "renames", "rename"),
        (lambda path, **o: ds.load(path, **o), "allow_casts", None),
    ],
)
def test_a_misspelled_option_is_named_with_the_one_that_was_meant(call, option, meant, tmp_path):
    with pytest.raises(ds.errors.ConfigurationError) as refused:
        call(tmp_path / "c", **{option: 1})
    assert repr(option) in str(refused.value)
    assert meant is None or f"did you mean {meant!r}" in str(refused.value)
    assert not (tmp_path / "c").exists()
