"""Whether a file or directory is there is asked in one place: ``storage/presence.py``."""

import ast
from pathlib import Path

import pytest

import dcp_datastates

ROOT = Path(dcp_datastates.__file__).parent

ASKS = {"exists", "lexists", "is_file", "is_dir", "isfile", "isdir", "ismount"}
"""They take most errors of storage for "there is nothing"."""

MAY_ASK = {
    "storage/local.py": "an entry of a directory that was read",
    "storage/fsspec_adapter.py": "of fsspec, after an error that is raised otherwise",
    "huggingface/__main__.py": "the user's script",
}


def _asked(source):
    return [
        f"line {node.lineno}: {name}() (use storage/presence.py)"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, (ast.Attribute, ast.Name))
        and (name := getattr(node.func, "attr", getattr(node.func, "id", ""))) in ASKS
        and not (
            isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "presence"
        )
        # With it, an entry that was read is asked.
        and all(each.arg != "follow_symlinks" for each in node.keywords)
    ]


def test_one_place_asks_whether_something_is_there():
    found = {
        str(file.relative_to(ROOT)): asked
        for file in sorted(ROOT.rglob("*.py"))
        if (asked := _asked(file.read_text()))
    }
    assert {file: asked for file, asked in found.items() if file not in MAY_ASK} == {}
    assert set(found) == set(MAY_ASK), "who asks no more is not in the list"


@pytest.mark.parametrize("call", ["path.exists()", "os.path.lexists(path)", "isdir(path)"])
def test_who_asks_otherwise_is_found(call):
    assert len(_asked(f"if {call}: pass")) == 1
    assert _asked("presence.is_file(path)") == []
