"""``datastates_ckpt`` in DeepSpeed's configuration, and the module that DeepSpeed imports."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import dcp_datastates.deepspeed
from dcp_datastates import ConfigurationError
from dcp_datastates.deepspeed import CheckpointEngine
from dcp_datastates.deepspeed.options import writer_options


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ({"host_cache_size": 16}, 16 << 30),
        ({"host_cache_size": 0.5}, 512 << 20),
        ({"host_cache_size": "512MiB"}, "512MiB"),
        ({}, "auto"),
        (None, "auto"),
        (True, "auto"),
    ],
)
def test_the_host_cache_is_given_in_gib(given: object, size: object) -> None:
    assert writer_options(given)["host_cache_size"] == size


def test_options_of_the_writer_are_passed_on() -> None:
    given = {"host_cache_size": 1, "commit_timeout": 60, "when_behind": "skip"}
    assert writer_options(given) == {**given, "host_cache_size": 1 << 30}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"host_cache_size": -1}, "host_cache_size"),
        ({"host_cache_size": 0.001}, "below the minimum"),
        ({"host_cache_size": float("nan")}, "host_cache_size"),
        ({"host_cache_size": True}, "host_cache_size"),
        ({"host_cache_size": "much"}, "much"),
        ({"when_behind": "run"}, "when_behind"),
        ({"host_cache": 16}, "datastates_ckpt.host_cache is not an option"),
        ({"defer": "all"}, "datastates_ckpt.defer is not an option"),
        (16, "table"),
    ],
)
def test_a_value_that_cannot_work_is_named(given: object, named: str) -> None:
    config = types.SimpleNamespace(datastates_config=types.SimpleNamespace(config=given))
    with pytest.raises(ConfigurationError, match=named):
        CheckpointEngine(config, 0)


def test_the_module_of_the_small_distribution() -> None:
    found = importlib.util.spec_from_file_location(
        "datastates_of_the_distribution", Path(__file__).parent / "datastates.py"
    )
    assert found is not None
    assert found.loader is not None
    module: Any = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    assert module.CheckpointEngine is CheckpointEngine


def test_an_import_registers_the_module() -> None:
    assert sys.modules["datastates"].CheckpointEngine is dcp_datastates.deepspeed.CheckpointEngine
