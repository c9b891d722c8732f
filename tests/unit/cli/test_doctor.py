"""``doctor`` says what storage at a root can do, what is missing, and what helps."""

import errno
import json
import os
import threading

import pytest
import torch
from support.commands import run_cli
from support.crashes.mounts import fill, mounted, remount
from support.simulated.object_stores import Fate, MemoryStore, installed
from support.state.checkpoints import assert_same, load, save
from support.stores.kinds import new_store, objects_below
from support.stores.server import bucket_behind, strict_endpoint

from dcp_datastates.errors import StorageError
from dcp_datastates.storage import object_path
from dcp_datastates.storage.obstore_adapter import ObstoreStore
from dcp_datastates.storage.self_test import Operation
from dcp_datastates_cli import doctor


def operations(ended):
    """Whether each works, as the JSON document says."""
    document = json.loads(ended.stdout)
    return {each["operation"]: each["works"] for each in document["operations"]}


@pytest.mark.parametrize("kind", ["tmpfs", "ext4", "xfs", "btrfs"])
def test_common_file_systems_can_do_all_and_saves_work_there(kind, tmp_path):
    with mounted(kind, tmp_path) as root:
        before = sorted(os.listdir(root))
        ended = run_cli("doctor", root, "--json")
        assert ended.returncode == 0
        assert set(operations(ended).values()) == {True}
        assert sorted(os.listdir(root)) == before
        state = {"w": torch.arange(1000.0)}
        save(state, root / "step-1")
        assert_same(load({"w": torch.zeros(1000)}, root / "step-1"), state)


@pytest.mark.parametrize("kind", ["memory", "moto", "azurite"])
def test_stores_can_do_what_saves_need_and_are_left_as_they_were(monkeypatch, kind):
    store = (
        ObstoreStore(bucket_behind(strict_endpoint(), strict_endpoint()))
        if kind == "moto"
        else new_store(kind)
    )
    monkeypatch.setattr(object_path, "store_of", lambda root, options=None: store)
    ended = run_cli("doctor", f"{store.url}/run", "--json")
    assert ended.returncode == 0
    assert set(operations(ended).values()) == {True}
    assert objects_below(store) == []


def test_the_table_says_what_is_missing_and_what_helps(monkeypatch):
    def refuse(request):
        if request.kind == "delete":
            raise StorageError(errno.EACCES, "AccessDenied", request.key)
        return Fate.DONE

    installed(monkeypatch, MemoryStore(refuse))
    ended = run_cli("doctor", "mem://bucket/run")
    assert ended.returncode == 0
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert ["list", "yes"] in lines
    assert ["delete", "no", "AccessDenied"] in lines
    assert "s3:DeleteObject" in ended.stdout
    assert "saves work there" in ended.stdout


def test_a_missing_operation_that_saves_need_is_status_1(monkeypatch, tmp_path):
    def refuse(old, new):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), new)

    monkeypatch.setattr(os, "rename", refuse)
    ended = run_cli("doctor", tmp_path)
    assert ended.returncode == 1
    assert "permission to write" in ended.stdout
    assert "no save works there" in ended.stdout
    ended = run_cli("doctor", tmp_path, "--json")
    assert (ended.returncode, json.loads(ended.stdout)["saves_work"]) == (1, False)
    assert [name for name, works in operations(ended).items() if not works] == [Operation.PUT.value]
    assert os.listdir(tmp_path) == []


def test_storage_that_fails_or_is_not_there_is_status_2(monkeypatch, tmp_path):
    ended = run_cli("doctor", tmp_path / "none" / "below")
    assert ended.returncode == 2
    assert f"name {str(tmp_path)!r}" in ended.stderr
    installed(monkeypatch, MemoryStore(lambda request: Fate.REFUSED))
    ended = run_cli("doctor", "mem://bucket/run")
    assert ended.returncode == 2
    assert "503" in ended.stderr


def test_a_full_or_read_only_disk_and_one_that_hangs_are_said_with_a_way_out(monkeypatch, tmp_path):
    with mounted("tmpfs", tmp_path) as root:
        filler = fill(root, 0)
        ended = run_cli("doctor", root)
        assert ended.returncode == 2
        assert "No space left on device" in ended.stderr
        assert "0 B are free there now" in ended.stderr
        assert "delete checkpoints (dcp-datastates retain, or delete)" in ended.stderr
        filler.unlink()
        remount(root, "ro")
        assert "mounted read-only" in run_cli("doctor", root).stderr
    answers = threading.Event()
    monkeypatch.setattr(doctor, "_SECONDS", 0.2)
    monkeypatch.setattr(doctor, "examine", lambda root: answers.wait())
    ended = run_cli("doctor", tmp_path)
    answers.set()
    assert ended.returncode == 2
    assert "trying what storage can do has not returned" in ended.stderr
