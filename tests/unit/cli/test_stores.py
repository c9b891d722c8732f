"""Every command takes the URLs of a store."""

import json
import os

import pytest
import torch
from support.commands import run_cli
from support.simulated.object_stores import MemoryStore, installed
from support.state.checkpoints import save

from dcp_datastates import load

ROOT = "mem://bucket/run"


@pytest.fixture
def store(monkeypatch, tmp_path):
    """With three checkpoints; nothing of what a command writes is to land in the working directory."""
    monkeypatch.chdir(tmp_path)
    store = MemoryStore()
    installed(monkeypatch, store)
    for step in (9, 10, 11):
        save({"w": torch.full((1000,), float(step))}, f"{ROOT}/step-{step}")
    yield store
    assert [name for name in os.listdir(tmp_path) if ":" in name] == []


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["verify", f"{ROOT}/step-9"], 0, "whole"),
        (["verify", ROOT], 0, "3 checkpoints in mem://bucket/run: 3 whole"),
        (["inspect", ROOT], 0, "step-11"),
        (["inspect", f"{ROOT}/step-9", "--tensors"], 0, "1000    float32"),
        (["latest", ROOT], 0, f"{ROOT}/step-11"),
        (["latest", f"{ROOT}-none"], 1, "no such directory"),
        (["diff", f"{ROOT}/step-9", f"{ROOT}/step-9"], 0, "the same"),
        (["diff", f"{ROOT}/step-9", f"{ROOT}/step-10"], 1, "values differ"),
        (["pin", f"{ROOT}/step-9"], 0, "pinned: keep"),
        (["unpin", f"{ROOT}/step-9"], 0, "not pinned"),
        (["delete", "--dry-run", f"{ROOT}/step-9"], 0, f"would delete {ROOT}/step-9"),
        (["delete", "--yes", f"{ROOT}/step-9"], 0, f"deleted {ROOT}/step-9"),
        (["retain", ROOT, "--keep", "1"], 0, f"deleted {ROOT}/step-9"),
        (["copy", f"{ROOT}/step-9", "copied"], 0, "is copied to"),
        (["copy", f"{ROOT}/step-9", f"{ROOT}/copied"], 0, "is copied to"),
        (["convert", f"{ROOT}/step-9", "out.pt", "--to", "torch"], 0, "1 tensor"),
        (["convert", f"{ROOT}/step-9", f"{ROOT}/out", "--to", "hf"], 2, "local path"),
    ],
)
def test_a_command_takes_urls(arguments, status, words, store):
    ended = run_cli(*arguments)
    assert ended.returncode == status, ended.stderr
    assert words in ended.stdout + ended.stderr


def test_a_converted_checkpoint_is_copied_to_a_store_and_is_the_same_there(store, tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "in.pt")
    refused = run_cli("convert", "in.pt", f"{ROOT}/step-12")
    assert refused.returncode
    assert "copy" in refused.stderr
    run_cli("convert", "in.pt", "step-12")
    run_cli("copy", "step-12", f"{ROOT}/step-12")
    assert torch.equal(load(f"{ROOT}/step-12")["w"], torch.ones(3))
    ended = run_cli("diff", "in.pt", f"{ROOT}/step-12", "--json")
    document = json.loads(ended.stdout)
    assert document["same"]
    assert document["b"] == f"{ROOT}/step-12"
