"""The package uses the field's words for its own things: names that were replaced do not come back."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import dcp_datastates

ROOT = Path(dcp_datastates.__file__).parent

REPLACED = {
    "Agreement": "ConsistencyCheck, StepConsensus",
    "Companion": "AttachedContext",
    "Coordinator": "PlanCache",
    "FinalPlan": "RankPlan",
    "Image": "OutputFile",
    "ImageWriter": "write_outputs",
    "Outcomes": "SaveTracker",
    "RankMemory": "RankPlanCache",
    "Said": "DecisionFound",
    "TakenUp": "PlanningInput",
    "Told": "RankReport, DecisionReceived",
    "Way": "SaveOrigin",
    "Whole": "GlobalPlan",
    "_Presence": "_PeerWatch",
    "appearing": "atomic_output",
    "blame": "record_error",
    "companion": "attached",
    "further_fields": "unknown_fields",
    "further_of": "packed_unknown_values",
    "go_to": "set_path",
    "introduce": "register",
    "passing_tensor": "scratch_tensor",
    "quicken": "save_started",
    "rank_memory": "rank_plan_cache",
    "take_options": "pop_writer_options",
    "take_up": "begin_planning",
    "vouch": "set_sending",
}
"""Of each former name the one in its place."""


def _names(source: str) -> Iterator[tuple[int, str]]:
    """All that is defined, imported or looked up, with its line; not what strings and comments say."""
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield line, name
            case ast.keyword(arg=str(name)):
                yield line, name
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                yield line, name
            case ast.AsyncFunctionDef(name=name):
                yield line, name
            case ast.ImportFrom(module=str(name)):
                yield from ((line, part) for part in name.split("."))
            case ast.alias(name=name, asname=other):
                yield from ((line, part) for part in (*name.split("."), other or ""))


def _replaced(source: str) -> list[str]:
    return [
        f"line {line}: {name} (now {REPLACED[name]})"
        for line, name in _names(source)
        if name in REPLACED
    ]


@pytest.mark.parametrize("room", sorted(each.name for each in ROOT.iterdir() if each.is_dir()))
def test_replaced_names_do_not_come_back(room):
    found = {
        str(file.relative_to(ROOT)): names
        for file in sorted((ROOT / room).rglob("*.py"))
        if (names := _replaced(file.read_text()))
    }
    assert found == {}


ASKS = {"exists", "lexists", "is_file", "is_dir", "isfile", "isdir", "ismount"}
"""They take most errors of storage for "there is nothing"."""

MAY_ASK = {
    "storage/local.py": "an entry of a directory that was read",
    "storage/fsspec_adapter.py": "of fsspec, after an error that is raised otherwise",
    "huggingface/__main__.py": "the user's script",
}


def _asked(source: str) -> list[str]:
    return [
        f"line {node.lineno}: {name}() (use storage/presence.py)"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, (ast.Attribute, ast.Name))
        and (name := getattr(node.func, "attr", getattr(node.func, "id", ""))) in ASKS
        and not (
            isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "presence"
        )
        and all(
            each.arg != "follow_symlinks" for each in node.keywords
        )  # of an entry that was read
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


@pytest.mark.parametrize(
    "source",
    [
        "class Told: pass",
        "def blame(): pass",
        "save.go_to(path)",
        "from dcp_datastates.planning.rank_memory import Share",
        "from here import Other as Whole",
        "def go(*, companion): pass",
        "go(companion=1)",
    ],
)
def test_a_replaced_name_is_found(source):
    assert len(_replaced(source)) == 1
    assert _replaced(f'"""{source}"""  # {source}') == []
