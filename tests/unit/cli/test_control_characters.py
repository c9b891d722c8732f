"""Nothing that a name on storage says is obeyed by a terminal: control characters are printed as escapes."""

import os

import pytest
import torch
from support.commands import run_cli
from support.state.checkpoints import save

import dcp_datastates as ds
from dcp_datastates.text import printable

EVIL = "\x1b[2J\x1b]0;owned\x07\x9b\u202e"
STRANGE = os.fsdecode(b"\xff") + EVIL


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("control") / f"root{STRANGE}"
    save({f"w{EVIL}": torch.ones(10), f"o{EVIL}": {1}}, root / f"a{STRANGE}")
    save({f"v{EVIL}": torch.ones(10)}, root / f"b{STRANGE}")
    (root / f"c{STRANGE}").mkdir()
    os.mkfifo(root / f"c{STRANGE}" / ".metadata")
    return root


def _is_clean(text):
    return all(character.isprintable() or character in "\n " for character in text)


A, B, C = f"a{STRANGE}", f"b{STRANGE}", f"c{STRANGE}"


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", ""],
        ["inspect", A],
        ["inspect", A, "--tensors"],
        ["inspect", C],
        ["verify", ""],
        ["verify", A],
        ["verify", C],
        ["diff", A, B],
        ["diff", A, B, "--quiet"],
        ["diff", A, C],
        ["convert", A, f"new{STRANGE}", "--to", "torch"],
        ["convert", C, f"new{STRANGE}", "--to", "torch"],
        ["retain", "", "--keep", "1", "--dry-run"],
        ["delete", A, "--dry-run"],
        ["delete", C, "--yes"],
        ["pin", A],
        ["latest", C],
        *([word, A, "--json"] for word in ("inspect", "verify")),
    ],
    ids=lambda words: printable(" ".join(words[:1])),
)
def test_no_command_prints_a_control_character(words, root):
    paths = [
        str(root / word) if word in ("", A, B, C) or word[:3] == "new" else word for word in words
    ]
    done = run_cli(*paths)
    assert _is_clean(done.stdout), repr(done.stdout)
    assert _is_clean(done.stderr), repr(done.stderr)
    assert done.stdout + done.stderr


def test_an_error_holds_none(root):
    with pytest.raises(ds.errors.CheckpointNotFoundError, match="x1b") as caught:
        ds.load(root / f"nowhere{STRANGE}")
    assert _is_clean(str(caught.value))


def test_what_people_can_read_stays():
    for text in ("step-1", "模型/重み", "é", "a b", "two\nlines", "a\u3000b"):
        assert printable(text) == text
    assert printable("a\tb\rc") == "a\\tb\\rc"
