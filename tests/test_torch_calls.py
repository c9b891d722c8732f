"""How the package calls torch: no default of a program moves its tensors, and it refers weakly to none."""

import ast
from pathlib import Path

import pytest
import torch.utils._device

import dcp_datastates

ROOT = Path(dcp_datastates.__file__).parent
FILES = sorted(
    each for folder in (ROOT, ROOT.parent / "dcp_datastates_cli") for each in folder.rglob("*.py")
)

FACTORIES = {each.__name__ for each in torch.utils._device._device_constructors()}
"""Of torch; they use the default device, unless they are given one."""

WEAK = {
    "saving/write.py": "uploads, whose segments are the host cache's",
    "checkpoints/retention.py": "lists of deletions",
    "checkpoints/first_rank.py": "incarnations",
    "ranks/connection.py": "connections and threads",
    "ranks/incarnation.py": "incarnations",
    "ranks/gloo_group.py": "groups",
    "ranks/rank_set.py": "stores",
    "format/metadata_table.py": "catalogs",
    "storage/readable.py": "open files",
    "training/live_optimizer.py": "optimizers",
    "journal/state_samples.py": "optimizers",
    "staging/ownership.py": "optimizers",
    "staging/step_gate.py": "optimizers",
    "process/forks.py": "sockets and files",
    "weights/publish.py": "publishers",
}
"""The files with weak references, and what they refer to. Never to tensors: torch does not swap tensors that have weak
references, so ``Module.to`` would fail under FSDP2."""


def undecided(source):
    """The lines with a factory call that does not say its device, or its dtype."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "torch"
            and node.func.attr in FACTORIES
            and not {"device", "dtype"} <= {each.arg for each in node.keywords}
        ):
            yield node.lineno


def weak_names(source):
    """The names in which "weak" occurs: imported, called, or looked up."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {each.name for each in node.names} | {getattr(node, "module", None) or ""}
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Name):
            names.add(node.id)
    return {each for each in names if "weak" in each.lower()}


def test_every_factory_call_says_its_device_and_dtype():
    found = [
        f"{file.relative_to(ROOT.parent)}:{line}"
        for file in FILES
        for line in undecided(file.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    ("call", "decided"),
    [
        ("torch.empty(3, dtype=torch.uint8)", False),
        ("torch.tensor([1], device='cpu')", False),
        ("torch.zeros(3, dtype=torch.uint8, device='cpu')", True),
        ("numpy.zeros(3)", True),
        ("torch.frombuffer(data, dtype=torch.uint8)", True),
    ],
)
def test_a_factory_call_that_leaves_it_open_is_found(call, decided):
    assert list(undecided(f"x = 1\ny = [{call}]\n")) == ([] if decided else [2])


def test_torch_is_imported_by_its_name():
    """Else calls would not be found."""
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "torch":
                assert not {each.name for each in node.names} & FACTORIES, file
            elif isinstance(node, ast.Import):
                assert ("torch", None) in [("torch", e.asname) for e in node.names] or not any(
                    e.name == "torch" for e in node.names
                ), file


def test_only_what_is_no_tensor_is_referred_to_weakly():
    found = {file for file in FILES if weak_names(file.read_text())}
    assert {str(each.relative_to(ROOT)) for each in found} == set(WEAK)


@pytest.mark.parametrize(
    "line",
    [
        "import weakref",
        "from weakref import ref",
        "from torch.utils.weak import WeakTensorKeyDictionary",
        "torch.multiprocessing.reductions.StorageWeakRef(storage)",
    ],
)
def test_a_weak_reference_is_found(line):
    assert weak_names(line)
