"""The packages ("rooms") of ``dcp_datastates``: imports point one way, each says what it is for, files are short."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import dcp_datastates

ROOT = Path(dcp_datastates.__file__).parent

BELOW = {
    "torchtitan": ("manager",),
    "deepspeed": ("manager", "conversion"),
    "lightning": ("manager",),
    "huggingface": ("manager",),
    "megatron": ("manager",),
    "manager": ("dcp", "checkpoints"),
    "conversion": ("dcp", "checkpoints"),
    "dcp": ("saving", "commit", "planning", "staging"),
    "saving": ("commit", "planning", "staging"),
    "planning": ("ranks", "staging"),
    "checkpoints": ("commit", "io"),
    "staging": ("io",),
    "commit": ("ranks", "format"),
    "ranks": ("process",),
    "io": ("format",),
    "format": ("storage",),
    "storage": ("process",),
    "process": (),
}
"""Of each room those that it may import directly. What these may import, it may, too; and all may import the files of
the package's own folder (errors, configuration)."""

MOST_FILES_AT_THE_ROOT = 8
MOST_LINES = 450
MOST_PARAMETERS = 7
"""Without those that can only be given by name: users' options are in the signature, where editors find them."""


def _may_import(room: str) -> set[str]:
    found = {room}
    for below in BELOW[room]:
        found |= _may_import(below)
    return found


def _imports(file: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)


def _room_of(name: str) -> str | None:
    parts = name.split(".")
    if parts[0] != "dcp_datastates" or len(parts) < 2:
        return None
    return parts[1] if (ROOT / parts[1]).is_dir() else None


def turned_round(room: str, folder: Path) -> list[str]:
    """The imports of a room's files that point the wrong way."""
    allowed = _may_import(room)
    return [
        f"{file.relative_to(folder.parent)}:{line} imports {name}"
        for file in sorted(folder.rglob("*.py"))
        for line, name in _imports(file)
        if (other := _room_of(name)) is not None and other not in allowed
    ]


def test_every_package_has_its_place():
    rooms = {each.parent.name for each in ROOT.glob("*/__init__.py")}
    assert rooms == set(BELOW)


@pytest.mark.parametrize("room", BELOW)
def test_imports_point_down(room):
    assert turned_round(room, ROOT / room) == []


def test_an_import_that_is_turned_round_is_found(tmp_path):
    folder = tmp_path / "storage"
    folder.mkdir()
    (folder / "local.py").write_text(
        "from dcp_datastates.errors import StorageError\nfrom dcp_datastates.commit import publish\n"
    )
    assert turned_round("storage", folder) == [
        "storage/local.py:2 imports dcp_datastates.commit.publish"
    ]


@pytest.mark.parametrize("room", BELOW)
def test_every_package_says_what_it_is_for(room):
    said = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text()))
    assert said, f"{room}/__init__.py has no docstring"


def test_few_files_lie_at_the_root():
    files = [each.name for each in ROOT.iterdir() if each.is_file() and each.suffix != ".so"]
    assert len(files) <= MOST_FILES_AT_THE_ROOT, files


def test_no_file_is_long():
    lines = {each: len(each.read_text().splitlines()) for each in ROOT.rglob("*.py")}
    assert [each for each, count in lines.items() if count > MOST_LINES] == []


def test_no_function_has_many_parameters():
    many = {
        f"{file.relative_to(ROOT)}:{function.name}"
        for file in ROOT.rglob("*.py")
        for function in ast.walk(ast.parse(file.read_text()))
        if isinstance(function, ast.FunctionDef) and _parameters(function) > MOST_PARAMETERS
    }
    assert many == set()


def _parameters(function: ast.FunctionDef) -> int:
    names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    return len(names) - (names[:1] in (["self"], ["cls"]))
