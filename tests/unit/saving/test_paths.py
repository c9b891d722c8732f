"""Checks of a checkpoint's directory before anything is written there."""

from __future__ import annotations

import pytest

from dcp_datastates import ConfigurationError
from dcp_datastates.config import WriterConfig
from dcp_datastates.saving.paths import directories_to_sync, writable

CONFIG = WriterConfig(64 << 20)


def test_a_relative_path_is_below_the_directory_of_the_call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert writable("c", CONFIG, alone=True) == tmp_path / "c"
    assert writable("c", CONFIG, alone=True, below="/elsewhere") == tmp_path.__class__(
        "/elsewhere/c"
    )
    assert not (tmp_path / "c").exists(), "nothing is made"


def test_a_process_alone_is_told_at_once_and_ranks_are_told_together_later(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="is a file"):
        writable(tmp_path / "file" / "c", CONFIG, alone=True)
    assert writable(tmp_path / "file" / "c", CONFIG, alone=False) == tmp_path / "file" / "c"


def test_what_is_no_path_is_refused_whoever_asks():
    for alone in (True, False):
        with pytest.raises(ConfigurationError, match="names no bucket"):
            writable("s3:///c", CONFIG, alone)


def test_a_folder_that_the_coordinator_has_made_is_shared(tmp_path):
    assert str(tmp_path) in directories_to_sync(tmp_path, rank=1)


def test_a_folder_that_this_rank_does_not_see_is_refused_and_nothing_is_left_of_it(tmp_path):
    folder = tmp_path / "c" / "attempt"
    with pytest.raises(ConfigurationError, match=r"rank 3 on .* does not see .*attempt"):
        directories_to_sync(folder, rank=3)
    assert list(tmp_path.iterdir()) == []
