"""``latest`` finds the newest checkpoint that is whole."""

import logging
import os
import shutil

import pytest
from support.state.checkpoints import assert_same, load_everything, raises, save
from support.state.files import data_files, flip_bit
from support.state.roots import (
    NEWER,
    OLDER,
    STRUCTURAL,
    cut,
    damage_metadata,
    grow,
    lose,
    lose_all,
    save_stock,
    state_of,
    uncommitted,
)

from dcp_datastates import latest
from dcp_datastates.checkpoints import listing
from dcp_datastates.checkpoints.listing import natural_order
from dcp_datastates.errors import CheckpointCorruptError, ConfigurationError
from dcp_datastates.text import step_of


def test_the_newest_is_found(root):
    assert latest(root) == root / "step-11"
    assert latest(str(root)) == root / "step-11"
    assert_same(load_everything(latest(root)), state_of(11))


def test_newest_is_what_was_saved_last_whatever_it_is_called(root):
    save(state_of(9), root / "step-9")
    assert latest(root) == root / "step-9"


def test_copies_are_told_apart_by_name_in_natural_order(tmp_path):
    save(state_of(1), tmp_path / "step-9")
    for name in ("step-10", "step-8"):
        shutil.copytree(tmp_path / "step-9", tmp_path / name)
    assert latest(tmp_path) == tmp_path / "step-10"


def test_a_link_to_a_checkpoint_gives_way_to_the_checkpoint(root):
    (root / "zz-current").symlink_to("step-11")
    assert latest(root) == root / "step-11"


def test_natural_order_and_steps():
    names = ["step-10", "step-9", "a", "step-9b", "", "10", "9", "step-010"]
    ordered = sorted(names, key=natural_order)
    assert ordered.index("step-9") < ordered.index("step-9b") < ordered.index("step-10")
    assert ordered.index("9") < ordered.index("10")
    steps = [step_of(name) for name in ("step-12", "12", "best", "step-3-best")]
    assert steps == [12, 12, None, None]


def test_nothing_there_is_none(tmp_path, caplog):
    assert latest(tmp_path / "nowhere") is None
    assert latest(tmp_path) is None
    (tmp_path / "empty").mkdir()
    uncommitted(tmp_path / "step-1", OLDER)
    save_stock(tmp_path / "stock")
    assert latest(tmp_path) is None
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("notes.txt", {}, ["file"]),
        ("step-9", {}, ["itself a checkpoint", "ckpt"]),
        *(("", {"verify": verify}, ["structure"]) for verify in ("", "all", True, None)),
        *(("", {"timeout": timeout}, ["timeout"]) for timeout in (0, -1, float("nan"))),
    ],
)
def test_what_cannot_be_searched_is_refused(name, options, words, root):
    with raises(ConfigurationError, *words):
        latest(root / name, **options)


def test_a_root_that_is_a_checkpoint_too_is_searched_with_a_warning(root, caplog):
    save(state_of(1), root)
    assert latest(root) == root / "step-11"
    assert "itself a checkpoint" in caplog.text


@pytest.mark.parametrize("damage", STRUCTURAL, ids=lambda damage: damage.__name__)
def test_a_broken_one_is_left_out_with_a_warning_that_says_why(damage, root, caplog):
    damage(root / "step-11")
    assert latest(root) == root / "step-10"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "step-11" in record.getMessage()
    words = {lose: "missing", lose_all: "missing", cut: "cut", grow: "long"}
    assert words.get(damage, "decision") in record.getMessage()


def test_several_broken_ones_and_none_left(root):
    lose(root / "step-11")
    cut(root / "step-10")
    assert latest(root) == root / "step-9"
    damage_metadata(root / "step-9")
    with raises(CheckpointCorruptError, "none of the 3", "step-11", "step-10", "step-9"):
        latest(root)


def test_what_is_verified_is_what_was_asked_for(root):
    (file,) = data_files(root / "step-11")
    flip_bit(file, file.stat().st_size // 2)
    assert latest(root) == root / "step-11", "the structure is whole"
    assert latest(root, verify="full") == root / "step-10"
    lose(root / "step-11")
    assert latest(root, verify="metadata") == root / "step-11"


def test_an_uncommitted_newer_save_is_not_it(root):
    uncommitted(root / "step-12", NEWER)
    uncommitted(root / "step-9", NEWER)
    assert latest(root) == root / "step-11"


def test_only_what_is_needed_is_opened(root, monkeypatch):
    opened = []
    real = listing.open_committed

    def counting(path):
        opened.append(path.name)
        return real(path)

    monkeypatch.setattr(listing, "open_committed", counting)
    assert latest(root) == root / "step-11"
    assert opened == ["step-11"]


def test_one_that_is_replaced_while_it_is_looked_at_is_looked_at_again(root, monkeypatch, caplog):
    real, calls = os.stat, []

    def stat(path, *arguments, **options):
        if str(path).endswith(".safetensors") and not calls:
            calls.append(path)
            save(state_of(12), root / "step-11")
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", stat)
    assert latest(root) == root / "step-11"
    assert calls
    assert not caplog.records
