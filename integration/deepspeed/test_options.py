"""``datastates_ckpt`` in DeepSpeed's configuration, and the module that DeepSpeed imports."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
from deepspeed.runtime.checkpoint_engine import DataStatesCheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine

import dcp_datastates.deepspeed
from dcp_datastates.deepspeed import CheckpointEngine
from dcp_datastates.deepspeed.engine import called_by_framework, options_of
from dcp_datastates.errors import ConfigurationError


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
    assert options_of(given)[0]["host_cache_size"] == size


def test_options_of_the_writer_are_passed_on() -> None:
    given = {"host_cache_size": 1, "commit_timeout": 60, "when_behind": "skip"}
    assert options_of(given)[0] == {**given, "host_cache_size": 1 << 30}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"host_cache_size": -1}, "host_cache_size"),
        ({"host_cache_size": 0.001}, "below the minimum"),
        ({"host_cache_size": float("nan")}, "host_cache_size"),
        ({"host_cache_size": True}, "host_cache_size"),
        ({"host_cache_size": "much"}, "much"),
        ({"when_behind": "run"}, "when_behind"),
        (
            {"host_cache": 16},
            "datastates_ckpt has no option .host_cache.; did you mean .host_cache_size",
        ),
        ({"reads": "all"}, "datastates_ckpt has no option .reads."),
        (16, "table"),
    ],
)
def test_a_value_that_cannot_work_is_named(given: object, named: str) -> None:
    config = types.SimpleNamespace(datastates_config=types.SimpleNamespace(config=given))
    with pytest.raises(ConfigurationError, match=named):
        CheckpointEngine(config, 0)


@pytest.mark.parametrize(
    ("given", "waits"),
    [
        ({}, None),
        ({"wait": "auto"}, None),
        ({"wait": True}, True),
        ({"wait": False}, False),
        (None, None),
    ],
)
def test_whether_a_save_waits_is_an_option(given: object, waits: bool | None) -> None:
    options, wait = options_of(given)
    assert wait is waits
    assert "wait" not in options


def test_a_wait_that_is_neither_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"datastates_ckpt\.wait='yes'"):
        options_of({"wait": "yes"})


@pytest.mark.parametrize(
    ("module", "rotates"),
    [
        ("transformers.trainer", True),
        ("accelerate.accelerator", True),
        ("lightning.pytorch.trainer", True),
        ("transformers_of_mine", False),
        ("__main__", False),
    ],
)
def test_a_framework_that_deletes_older_checkpoints_is_known(module: str, rotates: bool) -> None:
    names = {"__name__": module, "called_by_framework": called_by_framework}
    exec("def save():\n    return called_by_framework()\nfound = save()", names)
    assert names["found"] is rotates


def adapter(given: object = None) -> DataStatesCheckpointEngine:
    """What DeepSpeed makes if its configuration has ``datastates_ckpt``."""
    config = types.SimpleNamespace(datastates_config=types.SimpleNamespace(config=given or {}))
    return DataStatesCheckpointEngine(config, 0)


def test_deepspeed_imports_the_module_of_the_small_distribution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = Path(__file__).parent
    monkeypatch.delitem(sys.modules, "datastates")
    monkeypatch.syspath_prepend(folder)
    made = adapter()
    assert sys.modules["datastates"].__file__ == str(folder / "datastates.py")
    assert type(made.ckpt_engine) is CheckpointEngine
    for _ in range(2):  # destroy(), and the garbage collection after it
        made.cleanup()


def test_deepspeed_passes_on_what_is_wrong_with_a_value() -> None:
    with pytest.raises(RuntimeError, match=r"datastates_ckpt has no option .host_cache."):
        adapter({"host_cache": 16})


def test_state_offloaded_to_nvme_is_refused() -> None:
    engine = types.SimpleNamespace(
        checkpoint_engine=adapter(), zero_nvme_offload_optimizer=lambda: True
    )
    with pytest.raises(ConfigurationError, match="NVMe"):
        DeepSpeedEngine.save_checkpoint(engine, "anywhere")


def test_an_import_registers_the_module() -> None:
    assert sys.modules["datastates"].CheckpointEngine is dcp_datastates.deepspeed.CheckpointEngine


@pytest.mark.parametrize("given", ["s3://bucket/run", Path("s3://bucket/run")])
def test_a_url_is_refused_before_a_directory_is_made_of_it(
    given: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    engine = types.SimpleNamespace(checkpoint_engine=adapter())
    with pytest.raises(ConfigurationError, match="save_dir='s3:/"):
        DeepSpeedEngine.save_checkpoint(engine, given, tag="tag")
    with pytest.raises(ConfigurationError, match="save_dir='s3:/"):
        DeepSpeedEngine.save_checkpoint(engine, save_dir=given)
    with pytest.raises(ConfigurationError, match="load_dir='s3:/"):
        DeepSpeedEngine.load_checkpoint(engine, given)
    with pytest.raises(ConfigurationError, match="output='s3:/"):
        dcp_datastates.deepspeed.export(tmp_path, given, "tag")
    assert list(tmp_path.iterdir()) == []
