"""The destination appears at once, complete, or not at all."""

import errno
import os
import resource

import pytest
import torch
from support.crashes.failing import armed, fired
from support.jobs.scripts import run_script
from support.state.checkpoints import assert_same, raises, save
from support.state.files import put_back
from support.tiers import sampled

import dcp_datastates
from dcp_datastates import convert, pin
from dcp_datastates.errors import (
    CheckpointExistsError,
    ConfigurationError,
    StorageError,
)

from .conftest import SMALL

FORMATS = ("datastates", "hf", "safetensors", "dcp", "torch")
DIRECTORIES = ("datastates", "hf", "dcp")


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    save({"a": torch.arange(9.0), "b": torch.ones(3)}, path)
    return path


def _names(path):
    return sorted(os.listdir(path))


@pytest.mark.parametrize("to", FORMATS)
def test_nothing_else_is_left_beside_it(to, source, tmp_path):
    convert(source, tmp_path / "below" / "out", to, **SMALL)
    assert _names(tmp_path / "below") == ["out"]


@pytest.mark.parametrize("to", FORMATS)
def test_what_exists_is_replaced_only_on_demand(to, source, tmp_path):
    convert(source, tmp_path / "out", to, only="a", **SMALL)
    with pytest.raises(CheckpointExistsError, match="--overwrite"):
        convert(source, tmp_path / "out", to, **SMALL)
    assert dcp_datastates.diff(source, tmp_path / "out", only="a").same
    convert(source, tmp_path / "out", to, overwrite=True, **SMALL)
    assert dcp_datastates.diff(source, tmp_path / "out").same
    assert _names(tmp_path) == ["out", "source"]


@pytest.mark.parametrize(
    ("to", "place"),
    [
        *((to, "sync_directory") for to in DIRECTORIES),
        *((to, "exchange" if to in DIRECTORIES else "rename") for to in FORMATS),
    ],
)
def test_a_failure_at_the_end_leaves_what_was_there(to, place, source, tmp_path):
    convert(source, tmp_path / "out", to, only="a", **SMALL)
    with armed(f"convert.{place}.before=error:EIO"), pytest.raises(StorageError) as caught:
        convert(source, tmp_path / "out", to, overwrite=True, **SMALL)
    assert caught.value.errno == errno.EIO
    assert dcp_datastates.diff(source, tmp_path / "out", only="a").same
    assert _names(tmp_path) == ["out", "source"]


def test_a_file_system_without_exchanges_is_found_before_the_conversion(source, tmp_path):
    """Another way would leave a moment in which nothing is at the path."""
    convert(source, tmp_path / "out", "hf", only="a", **SMALL)
    with (
        armed("trial.exchange.before=error:EINVAL;convert.write.before=error:EIO"),
        raises(ConfigurationError, "cannot be replaced in one step", "delete it first"),
    ):
        convert(source, tmp_path / "out", "hf", overwrite=True, **SMALL)
    assert dcp_datastates.diff(source, tmp_path / "out", only="a").same
    assert _names(tmp_path) == ["out", "source"]
    with armed("trial.exchange.before=error:EINVAL"):
        convert(source, tmp_path / "other", "hf", **SMALL)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("to", sampled(DIRECTORIES, keep=["dcp"]))
def test_a_kill_while_it_is_replaced_leaves_the_old_one_or_the_new_one(when, to, source, tmp_path):
    root, log = tmp_path / "root", tmp_path / "log"
    root.mkdir()
    convert(source, root / "out", to, only="a", **SMALL)
    body = f"""
        from support.crashes.failing import armed
        from pathlib import Path
        with armed("convert.exchange.{when}=kill", log=Path({str(log)!r})):
            import dcp_datastates
            dcp_datastates.convert({str(source)!r}, path, {to!r}, overwrite=True)
    """
    ended = run_script(body, root / "out")
    assert ended.returncode == -9, ended.stderr
    assert fired(log) == [f"convert.exchange.{when}"]
    assert dcp_datastates.diff(source, root / "out").same == (when == "after")
    assert dcp_datastates.diff(source, root / "out", only="a").same
    convert(source, root / "out", to, overwrite=True, **SMALL)
    assert dcp_datastates.diff(source, root / "out").same


def test_what_is_pinned_meanwhile_is_not_replaced(source, tmp_path):
    out = tmp_path / "out"
    save({"other": torch.ones(1)}, out)

    def progress(done, total):
        pin(out, "eval")

    with raises(ConfigurationError, "pinned (eval)"):
        convert(source, out, "datastates", overwrite=True, progress=progress, **SMALL)
    assert "other" in dcp_datastates.load(out)
    assert _names(tmp_path) == ["out", "source"]


@pytest.mark.parametrize("to", ["hf", "torch"])
def test_what_comes_to_be_there_meanwhile_is_not_replaced(to, source, tmp_path):
    out = tmp_path / "out"

    def progress(done, total):
        if not out.exists():
            save({"other": torch.ones(1)}, out) if to == "hf" else out.write_text("x")

    with pytest.raises(CheckpointExistsError):
        convert(source, out, to, progress=progress, **SMALL)
    assert out.read_text() == "x" if to == "torch" else "other" in dcp_datastates.load(out)
    assert _names(tmp_path) == ["out", "source"]


def test_a_failing_progress_call_ends_it(source, tmp_path):
    def progress(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", "hf", progress=progress, **SMALL)
    assert _names(tmp_path) == ["source"]


@pytest.mark.parametrize("to", sampled(FORMATS, keep=["datastates", "safetensors"]))
def test_a_kill_leaves_nothing_at_the_path(to, source, tmp_path):
    log = tmp_path / "log"
    body = f"""
        from support.crashes.failing import armed
        from pathlib import Path
        with armed("convert.rename.before=kill", log=Path({str(log)!r})):
            import dcp_datastates
            dcp_datastates.convert({str(source)!r}, path, {to!r})
    """
    (tmp_path / "root").mkdir()
    ended = run_script(body, tmp_path / "root" / "out")
    assert ended.returncode == -9, ended.stderr
    assert fired(log) == ["convert.rename.before"]
    assert [name[:15] for name in _names(tmp_path / "root")] == [".out.converting"]
    assert dcp_datastates.latest(tmp_path / "root") is None, "what is left is no checkpoint"
    convert(source, tmp_path / "root" / "out", to, **SMALL)


def test_paths_that_must_not_be_replaced(source, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("source")
    for target, to, words in [
        ("mine", "hf", "holds no checkpoint"),
        ("file", "hf", "is a file"),
        ("mine", "torch", "is a directory"),
        ("link", "hf", "is the source"),
        ("source", "hf", "is the source"),
        (".", "hf", "or they lie in each other"),
        ("file/below", "hf", "is a file"),
    ]:
        with put_back(tmp_path), pytest.raises(ConfigurationError, match=words):
            convert(source, tmp_path / target, to, overwrite=True, **SMALL)
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to("source")


def test_a_link_is_not_replaced(source, tmp_path):
    convert(source, tmp_path / "real", "hf", **SMALL)
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(ConfigurationError, match="symbolic link"):
        convert(source, tmp_path / "link", "hf", overwrite=True, **SMALL)


def test_an_empty_directory_may_be_there(source, tmp_path):
    (tmp_path / "out").mkdir()
    convert(source, tmp_path / "out", "hf", **SMALL)
    assert dcp_datastates.diff(source, tmp_path / "out").same


def test_a_full_disk_is_reported_with_the_size(source, tmp_path):
    with (
        armed("convert.write.before=error:ENOSPC"),
        pytest.raises(StorageError, match="were to be written"),
    ):
        convert(source, tmp_path / "out", **SMALL, to="datastates")
    assert _names(tmp_path) == ["source"]


@pytest.mark.parametrize("most", [100, 64 << 10, 1 << 20])
def test_a_file_that_can_grow_no_more_in_a_tensor_is_named(most, tmp_path):
    """torch.save says neither which file it is nor why, wherever in its archive it happens."""
    save({"w": torch.ones(1 << 20)}, tmp_path / "source")
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, unlimited[1]))
    try:
        with pytest.raises(StorageError, match=r"__0_0\.distcp") as caught:
            convert(tmp_path / "source", tmp_path / "out", to="dcp", **SMALL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert caught.value.errno == errno.EFBIG
    assert _names(tmp_path) == ["source"]


def test_the_source_stays_as_it_is(source, tmp_path):
    before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    for to in FORMATS:
        convert(source, tmp_path / to, to, **SMALL)
    assert {path: path.read_bytes() for path in source.rglob("*") if path.is_file()} == before
    assert_same(dcp_datastates.load(source), {"a": torch.arange(9.0), "b": torch.ones(3)})


def test_what_is_pinned_or_holds_checkpoints_is_not_replaced(tmp_path):
    save({"w": torch.ones(2)}, tmp_path / "in")
    save({"w": torch.ones(2)}, tmp_path / "out")
    pin(tmp_path / "out", "eval")
    with raises(ConfigurationError, "pinned (eval)"):
        convert(tmp_path / "in", tmp_path / "out", "datastates", overwrite=True)
    folder = tmp_path / "run"
    convert(tmp_path / "in", folder, "hf")
    save({"w": torch.ones(2)}, folder / "checkpoint-500")
    with raises(ConfigurationError, "checkpoint-500"):
        convert(tmp_path / "in", folder, "hf", overwrite=True)
    with raises(ConfigurationError, "lie in each other"):
        convert(tmp_path / "in", tmp_path / "in" / ".metadata", "torch", overwrite=True)
