"""``dcp-datastates``: answers before torch is there, and ``latest``, ``retain`` and ``delete`` do what they say.

What ``verify`` and ``inspect`` print is tested beside the functions that they call.
"""

import ast
import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from support.commands import run_cli, run_python
from support.state.checkpoints import save
from support.state.files import data_files, flip_bit
from support.state.roots import committed_names, damage_metadata, save_stock

import dcp_datastates

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def root(tmp_path):
    """Three checkpoints of ours, and one of stock DCP."""
    root = tmp_path / "ckpt"
    for step in (9, 10, 11):
        save({"w": torch.full((1000,), float(step))}, root / f"step-{step}")
    save_stock(root / "z")
    return root


def _lines(root, *lines):
    return [line.replace("ROOT", str(root)) for line in lines]


# --- what needs no torch --------------------------------------------------------------------------


def _entry_point():
    script = re.search(r'^dcp-datastates = "(.+):(.+)"$', _pyproject(), re.MULTILINE)
    return script[1], script[2]


def _pyproject():
    return (REPOSITORY / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--help"], 0, "retain"),
        (["verify", "--help"], 0, "--threads"),
        (["--version"], 0, dcp_datastates.__version__),
        ([], 2, "COMMAND"),
        (["frobnicate"], 2, "frobnicate"),
        (["retain", "ckpt"], 2, "--keep"),
        (["retain", "ckpt", "--keep", "two"], 2, "two"),
        (["latest", "ckpt", "--verify", "some"], 2, "structure"),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, list) else "",
)
def test_help_and_usage_errors_import_nothing_heavy(arguments, status, words):
    module, function = _entry_point()
    code = f"""
import atexit, sys
from {module} import {function}
atexit.register(lambda: print("IMPORTED", sorted({{"torch", "numpy", "rich"}} & set(sys.modules))))
sys.exit({function}({arguments!r}))
"""
    ended = run_python("-c", code)
    assert ended.returncode == status, ended.stderr
    assert words in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stdout.endswith("IMPORTED []\n")


def test_without_a_terminal_no_command_imports_rich(root):
    module, function = _entry_point()
    checkpoint = str(root / "step-9")
    commands = [
        ["inspect", "--json", checkpoint],
        ["inspect", checkpoint],
        ["verify", checkpoint],
        ["latest", str(root)],
        ["trace", checkpoint],
    ]
    code = f"""
import sys
from {module} import {function}
for command in {commands!r}:
    assert {function}(command) == 0
    assert not {{"rich", "matplotlib"}} & set(sys.modules), command
"""
    ended = run_python("-c", code)
    assert ended.returncode == 0, ended


def test_importing_the_package_registers_the_step_hook():
    """Whatever the command line puts off: a program that imports the package has its optimizers learnt."""
    ended = run_python(
        "-c",
        """
import dcp_datastates
import torch
parameter = torch.nn.Parameter(torch.ones(100_000))
optimizer = torch.optim.SGD([parameter])
parameter.grad = torch.ones_like(parameter)
optimizer.step()
from dcp_datastates.staging.ownership import known_optimizers
print([known is optimizer for known in known_optimizers()])
""",
    )
    assert ended.stdout == "[True]\n", ended.stderr


EXTRAS = {"torchtitan", "deepspeed", "lightning", "huggingface", "megatron"}
"""Packages whose users have what they import; everybody else need not."""


def test_runtime_dependencies_are_those_that_are_imported():
    listed = re.search(r"^dependencies = (\[.*?\])$", _pyproject(), re.MULTILINE | re.DOTALL)
    declared = {re.match(r"[\w-]+", line)[0] for line in ast.literal_eval(listed[1])}
    imported = set()
    for package in ("dcp_datastates", "dcp_datastates_cli"):
        for path in (REPOSITORY / package).rglob("*.py"):
            if not EXTRAS.intersection(path.parts):
                imported |= _imports(ast.parse(path.read_text()))
    third_party = imported - set(sys.stdlib_module_names) - {"dcp_datastates", "dcp_datastates_cli"}
    # A folder is opened where transformers is; the others are in the extras cloud, metrics and weights.
    optional = {"fsspec", "obstore", "prometheus_client", "transformers", "zstandard"}
    assert third_party - optional == declared


def _imports(tree):
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module.partition(".")[0])
    return names


# --- latest ---------------------------------------------------------------------------------------


def test_latest_prints_the_path_and_nothing_else(root):
    ended = run_cli("latest", root)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"{root / 'step-11'}\n", "")


def test_latest_says_what_it_leaves_out_and_why(root):
    data_files(root / "step-11")[0].unlink()
    ended = run_cli("latest", root)
    assert (ended.returncode, ended.stdout) == (0, f"{root / 'step-10'}\n")
    (line,) = ended.stderr.splitlines()
    assert "step-11" in line
    assert "missing" in line


def test_latest_reads_every_byte_if_asked_to(root):
    file = data_files(root / "step-11")[0]
    flip_bit(file, file.stat().st_size // 2)
    assert run_cli("latest", root).stdout == f"{root / 'step-11'}\n"
    assert run_cli("latest", root, "--verify", "full").stdout == f"{root / 'step-10'}\n"


@pytest.mark.parametrize(("name", "words"), [("nowhere", "no such"), ("empty", "no whole")])
def test_latest_of_nothing_is_status_1(name, words, tmp_path):
    (tmp_path / "empty").mkdir()
    ended = run_cli("latest", tmp_path / name)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert words in ended.stderr
    document = json.loads(run_cli("latest", "--json", tmp_path / name).stdout)
    assert document == {"root": str(tmp_path / name), "latest": None, "step": None}


def test_latest_as_json(root):
    document = json.loads(run_cli("latest", "--json", root).stdout)
    assert document == {"root": str(root), "latest": str(root / "step-11"), "step": 11}


# --- retain ---------------------------------------------------------------------------------------


def test_retain_says_what_it_would_delete_and_deletes_nothing(root):
    leftover = root / "step-3" / "0000000000000001-00000001"  # of a deletion that was cut off
    leftover.mkdir(parents=True)
    before = sorted(root.rglob("*"))
    ended = run_cli("retain", root, "--keep", 1, "--dry-run")
    assert ended.returncode == 0
    assert ended.stdout.splitlines() == _lines(
        root,
        "would keep ROOT/step-11",
        "would delete ROOT/step-10",
        "would delete ROOT/step-9",
        "would delete ROOT/step-3",
    )
    assert sorted(root.rglob("*")) == before
    really = run_cli("retain", root, "--keep", 1)
    said = really.stdout.replace("kept", "would keep").replace("deleted", "would delete")
    assert (really.returncode, said, really.stderr) == (0, ended.stdout, "")
    assert committed_names(root) == ["step-11", "z"]
    assert not leftover.parent.exists()


def test_retain_as_json(root):
    for dry_run in (["--dry-run"], []):
        document = json.loads(run_cli("retain", root, "--keep", 2, "--json", *dry_run).stdout)
        assert document == {
            "root": str(root),
            "dry_run": bool(dry_run),
            "kept": _lines(root, "ROOT/step-11", "ROOT/step-10"),
            "deleted": _lines(root, "ROOT/step-9"),
        }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["ckpt", "--keep", "0"], "keep=0"), (["nowhere", "--keep", "1"], "nowhere")],
)
def test_retain_that_cannot_work_is_status_2(arguments, words, root):
    ended = run_cli("retain", root.parent / arguments[0], *arguments[1:])
    assert (ended.returncode, ended.stdout) == (2, "")
    assert words in ended.stderr
    assert len(committed_names(root)) == 4


# --- delete ---------------------------------------------------------------------------------------


def test_rm_deletes_what_is_named(root):
    (root / "step-10" / "notes.txt").write_text("x")
    ended = run_cli("delete", "--yes", root / "step-9", root / "step-10", root / "step-9")
    assert ended.returncode == 0
    (line,) = ended.stderr.splitlines()
    assert "step-10" in line
    assert "notes.txt" in line
    first, second = ended.stdout.splitlines()
    assert first.startswith(f"deleted {root / 'step-9'} (committed ")
    assert second.startswith(f"deleted {root / 'step-10'} (committed ")
    assert committed_names(root) == ["step-11", "z"]
    assert os.listdir(root / "step-10") == ["notes.txt"], "foreign files stay"


def test_rm_deletes_damaged_checkpoints(root):
    damage_metadata(root / "step-9")
    data_files(root / "step-10")[0].unlink()
    assert "damaged" in run_cli("delete", "-n", root / "step-9").stdout
    assert run_cli("delete", "-y", root / "step-9", root / "step-10").returncode == 0
    assert committed_names(root) == ["step-11", "z"]


def test_rm_deletes_what_a_failed_save_left_and_nothing_that_may_be_in_flight(root):
    save({"w": torch.ones(3)}, root / "step-13")
    for name in ("step-12", "step-13"):
        (root / name / "1fffffffffffffff-00000001").mkdir(parents=True)
    ended = run_cli("delete", "--yes", "--json", root / "step-12", root / "step-13")
    assert ended.returncode == 2
    document = json.loads(ended.stdout)
    assert document["deleted"] == [str(root / "step-12")]
    (failure,) = document["failed"]
    assert failure["path"] == str(root / "step-13")
    assert "in flight" in failure["problem"]
    assert "in flight" in ended.stderr
    assert not (root / "step-12").exists()
    assert (root / "step-13").exists()


@pytest.mark.parametrize("other", ["nowhere", "z", ".", "link"])
def test_rm_deletes_nothing_if_one_of_the_paths_is_no_checkpoint(other, root):
    (root / "link").symlink_to("step-11")
    ended = run_cli("delete", "--yes", root / "step-9", root / other)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert str((root / other).resolve()) in ended.stderr
    assert {"step-9", "step-10", "step-11", "z"} <= set(committed_names(root))


def test_rm_without_a_terminal_deletes_only_what_it_is_told_to(root):
    ended = run_cli("delete", root / "step-9")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "--yes" in ended.stderr
    assert "step-9" in committed_names(root)


@pytest.mark.parametrize(
    ("answer", "status", "left"),
    [("y\n", 0, False), ("YES\n", 0, False), ("n\n", 1, True), ("\n", 1, True), ("", 1, True)],
)
def test_rm_asks_on_a_terminal(answer, status, left, root):
    ended = run_cli("delete", root / "step-9", answer=answer)
    assert ended.returncode == status
    assert f"{root / 'step-9'} (committed " in ended.stderr
    assert "Delete 1 checkpoint? [y/N]" in ended.stderr
    assert (root / "step-9").exists() is left
    assert ("deleted" in ended.stdout) is not left


def test_rm_as_json(root):
    document = json.loads(run_cli("delete", "--json", "--dry-run", root / "step-9").stdout)
    assert document == {"dry_run": True, "deleted": [str(root / "step-9")], "failed": []}
    document = json.loads(run_cli("delete", "--json", "--yes", root / "step-9").stdout)
    assert document == {"dry_run": False, "deleted": [str(root / "step-9")], "failed": []}
    assert not (root / "step-9").exists()
