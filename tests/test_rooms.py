"""The packages ("rooms") of ``dcp_datastates`` and the folders of ``native/src``: imports and includes point one way.

Each package says what it is for, and files are short.
"""

import ast
import itertools
import re
from pathlib import Path

import pytest

import dcp_datastates

ROOT = Path(dcp_datastates.__file__).parent

BELOW = {
    "torchtitan": ("manager",),
    "deepspeed": ("manager",),
    "lightning": ("manager",),
    "huggingface": ("manager",),
    "megatron": ("manager",),
    "monitoring": ("loading",),
    "manager": ("dcp", "journal", "weights"),
    "journal": ("training",),
    "weights": ("conversion", "training"),
    "training": ("loading",),
    "conversion": ("loading",),
    "dcp": ("loading",),
    "loading": ("sharing", "tiers"),
    "sharing": ("planning", "wire"),
    "tiers": ("checkpoints", "saving", "wire"),
    "saving": ("commit", "planning", "staging"),
    "planning": ("ranks", "staging"),
    "checkpoints": ("commit", "io"),
    "staging": ("io",),
    "commit": ("ranks", "format"),
    "ranks": ("process",),
    "io": ("format",),
    "format": ("storage",),
    "storage": ("process",),
    "wire": ("process",),
    "process": (),
}
"""Of each room those that it may import directly. What these may import, it may, too; and all may import the files of
the package's own folder (errors, configuration)."""

BUDGETS = {
    "": 1_514,
    "checkpoints": 2_515,
    "cli": 1_004,
    "commit": 1_581,
    "conversion": 2_054,
    "dcp": 1_948,
    "deepspeed": 729,
    "format": 3_111,
    "huggingface": 1_118,
    "io": 2_426,
    "journal": 840,
    "lightning": 721,
    "loading": 1_739,
    "manager": 2_133,
    "megatron": 287,
    "monitoring": 224,
    "planning": 2_771,
    "process": 857,
    "ranks": 2_078,
    "saving": 1_969,
    "sharing": 697,
    "staging": 1_911,
    "storage": 3_459,
    "tiers": 2_121,
    "torchtitan": 471,
    "training": 1_325,
    "weights": 920,
    "wire": 644,
}
"""The most lines that each room may have; "" is the package's own folder, with the native module's stub. A change that
does not fit makes room first, and one that removes lines lowers the number."""

BUDGETS_BESIDE = {"native/src": 9_783, "native/tests": 10_078, "tests": 51_586}
"""The same of the engine, of its own tests, and of the package's tests."""

NATIVE = Path(__file__).parents[1] / "native" / "src"
NATIVE_BELOW = {
    "python": ("pipeline",),
    "pipeline": ("device", "files"),
    "device": ("memory",),
    "memory": ("base",),
    "files": ("base",),
    "base": (),
}
"""The same of the folders of the native engine's sources."""

MOST_FILES_AT_THE_ROOT = 8
MOST_LINES = 450
MOST_PARAMETERS = 7
"""Without those that can only be given by name: users' options are in the signature, where editors find them."""


def _all_below(room, below):
    """The room itself, too."""
    found = {room}
    for each in below[room]:
        found |= _all_below(each, below)
    return found


def _imports(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)


def _room_of(name):
    parts = name.split(".")
    if parts[0] != "dcp_datastates" or len(parts) < 2:
        return None
    return parts[1] if (ROOT / parts[1]).is_dir() else None


def turned_round(room, folder):
    """The imports of a room's files that point the wrong way."""
    allowed = _all_below(room, BELOW)
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
        "from dcp_datastates.errors import StorageError\nfrom dcp_datastates.commit import place\n"
    )
    assert turned_round("storage", folder) == [
        "storage/local.py:2 imports dcp_datastates.commit.place"
    ]


def includes_turned_round(room, folder):
    """The includes of a native folder's files that point the wrong way."""
    allowed = _all_below(room, NATIVE_BELOW)
    return [
        f"{file.relative_to(folder.parent)}:{line} includes {include[1]}"
        for file in sorted(folder.iterdir())
        for line, text in enumerate(file.read_text().splitlines(), start=1)
        if (include := re.match(r'#include "(.+)"', text))
        and include[1].split("/")[0] not in allowed
    ]


def test_every_native_folder_has_its_place():
    assert {each.name for each in NATIVE.iterdir()} == set(NATIVE_BELOW)


@pytest.mark.parametrize("room", NATIVE_BELOW)
def test_includes_point_down(room):
    assert includes_turned_round(room, NATIVE / room) == []


def test_an_include_that_is_turned_round_is_found(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "file.h").write_text(
        '#include <map>\n#include "base/fault.h"\n#include "memory/copies.h"\n'
    )
    assert includes_turned_round("files", folder) == ["files/file.h:3 includes memory/copies.h"]


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


@pytest.mark.parametrize("folder", BUDGETS_BESIDE)
def test_the_engine_and_the_tests_keep_theirs(folder):
    endings = {".py", ".cpp", ".h"}
    files = [each for each in (NATIVE.parents[1] / folder).rglob("*") if each.suffix in endings]
    assert sum(len(file.read_text().splitlines()) for file in files) <= BUDGETS_BESIDE[folder]


@pytest.mark.parametrize("room", BUDGETS)
def test_every_room_keeps_its_budget(room):
    assert lines_of(room) <= BUDGETS[room]


@pytest.mark.parametrize("room", BUDGETS)
def test_no_budget_has_room_for_what_is_not_there(room):
    assert BUDGETS[room] - lines_of(room) < 50 + BUDGETS[room] // 20


def test_every_room_has_a_budget():
    assert BUDGETS.keys() == {*BELOW, "", "cli"}


def lines_of(room):
    folder = ROOT.parent / "dcp_datastates_cli" if room == "cli" else ROOT / room
    files = itertools.chain(
        folder.rglob("*.py") if room else folder.glob("*.py"), folder.glob("*.pyi")
    )
    return sum(len(file.read_text().splitlines()) for file in files)


def test_no_function_has_many_parameters():
    many = {
        f"{file.relative_to(ROOT)}:{function.name}"
        for file in ROOT.rglob("*.py")
        for function in ast.walk(ast.parse(file.read_text()))
        if isinstance(function, ast.FunctionDef) and _parameters(function) > MOST_PARAMETERS
    }
    assert many == set()


def _parameters(function):
    names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    return len(names) - (names[:1] in (["self"], ["cls"]))
