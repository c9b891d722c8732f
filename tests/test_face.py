"""What ``import dcp_datastates`` gives, and what it imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dcp_datastates as ds

MOST_MODULES = 135
"""Of the package, that its import brings."""

WHEN_USED = ("checkpoints", "cli", "conversion", "deepspeed", "huggingface", "lightning", "manager")
WHEN_USED += ("megatron", "monitoring", "sharing", "tiers", "torchtitan")


@pytest.mark.parametrize("name", ds.__all__)
def test_each_public_name_is_there(name):
    assert getattr(ds, name) is not None
    assert name in dir(ds)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'lastest'"):
        ds.lastest  # noqa: B018
    assert not hasattr(ds, "__wrapped__")


def test_type_checkers_see_what_is_imported_when_used():
    (block,) = [
        node
        for node in ast.parse(Path(ds.__file__).read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    seen = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    public = {name: place for name, place in seen.items() if not name.startswith("_")}
    assert public == {name: f"dcp_datastates.{place}" for name, place in ds._PLACES.items()}


def test_an_import_brings_what_saves_need():
    code = (
        "import sys, dcp_datastates; print(*(m for m in sys.modules if m.startswith('dcp_datas')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = done.stdout.split()
    rooms = {each.split(".")[1] for each in modules if "." in each}
    assert rooms.isdisjoint(WHEN_USED)
    assert len(modules) <= MOST_MODULES
