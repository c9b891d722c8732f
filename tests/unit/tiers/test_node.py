"""The files of a node: what forked children hold, and requests that the server refuses."""

import contextlib
import os
from pathlib import Path

import pytest
from support.jobs.scripts import run_script
from support.stores.asking import asked
from support.stores.nodes import Cluster

from dcp_datastates.tiers import node_files
from dcp_datastates.tiers.node import serve
from dcp_datastates.tiers.node_files import NodeFiles
from dcp_datastates.wire.line import RefusedError, connect


def test_a_forked_child_holds_no_lock_and_no_bytes(tmp_path):
    ended = run_script(
        """
        from pathlib import Path
        from dcp_datastates.storage import local
        from dcp_datastates.tiers.node_files import NodeFiles
        files = NodeFiles("a", Path(path), 1 << 20)
        Path(path, "read").write_bytes(b"x")
        new = files.unpublished("run/x")
        new.write(b"x" * 1000)
        def held():
            found = [os.readlink(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd") if
                     os.path.islink(f"/proc/self/fd/{each}")]
            return [each for each in found if each.startswith(path)]
        assert len(held()) == 1, held()
        def fork(*given, explained=local.explained):
            assert len(held()) == 2, held()
            if (child := os.fork()) == 0:
                os._exit(len(held()))
            assert os.waitpid(child, 0)[1] == 0
            return explained(*given)
        local.explained = fork
        files.read("read", 0, 1)
        new.close()
        """,
        tmp_path / "node",
    )
    ended.assert_clean()


@pytest.fixture
def line(tmp_path):
    cluster = Cluster(tmp_path, 1)
    with contextlib.closing(connect(cluster.address("a"))) as made:
        yield made
    assert cluster.has("x") == []
    cluster.close()


@pytest.mark.parametrize(
    "words",
    [
        None,
        "piece",
        ["publish", True],
        *(["find", *rest] for rest in ([], [3], [["x"]])),
        *(["read", "x", begin, 9] for begin in ("0", -5)),
        ["list", None],
        *(["delete", keys] for keys in ("x", [1])),
        ["put", None],
        ["left", 1],
        ["eval", "1"],
        {"find": "x"},
    ],
)
def test_a_request_that_is_none_is_refused_and_the_next_answered(line, words):
    with pytest.raises(RefusedError):
        asked(line, words)
    assert asked(line, ["find", "run/x"]) == (None, b"")


def test_after_a_piece_that_was_refused_an_object_cannot_be_published(line):
    assert asked(line, ["put", "run/x"])[0] is None
    line.send("piece", b"first")
    line.result()
    with pytest.raises(RefusedError):
        asked(line, ["find"])
    with pytest.raises(RefusedError):
        asked(line, ["publish", False])


def test_of_the_whole_file_system_other_nodes_reach_what_the_process_has_named(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(node_files, "_NAMING_SECONDS", 0.05)
    files = NodeFiles("a", Path("/"))
    server = serve(files, "127.0.0.1")
    run, secret = tmp_path / "run", tmp_path / "secret"
    for path in (run / "step-1/x/decision", run / ".attempts/entry", secret):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"data")
    files.name_path(str(run / "step-1")[1:])
    with contextlib.closing(connect(server.address)) as line:
        for path in (run / "step-1/x/decision", run / ".attempts/entry"):
            line.send(["read", str(path)[1:], 0, 9])
            assert line.result(9)[1] == b"data"
        for path in (secret, run / "step-10/x/decision", run / "step-1/../../secret"):
            name = str(path)[1:]
            for words in (["find", name], ["read", name, 0, 9], ["delete", [name]], ["put", name]):
                with pytest.raises(RefusedError, match=r"not named the path|is no key"):
                    asked(line, words)
    assert secret.read_bytes() == b"data"
    server.close()


def test_in_the_whole_file_system_only_a_users_own_directory_is_written_to(tmp_path, monkeypatch):
    directory = tmp_path / "of another user"
    directory.mkdir()
    if os.getuid() == 0:
        os.chown(directory, 12345, -1)
    else:
        monkeypatch.setattr(node_files.os, "getuid", lambda: 12345)
    with pytest.raises(PermissionError, match="this user's"):
        NodeFiles("a", Path("/")).unpublished(f"{str(directory)[1:]}/run/step-1/decision")
    assert [*directory.iterdir()] == []


@pytest.mark.timeout(20)
def test_what_is_no_file_is_no_object_and_holds_nobody_up(tmp_path):
    files, run = NodeFiles("a", tmp_path), tmp_path / "run"
    (run / "folder").mkdir(parents=True)
    os.mkfifo(run / "pipe")
    (run / "link").symlink_to(__file__)
    for name in ("pipe", "link", "folder", "missing", "pipe/below"):
        assert (files.find(f"run/{name}"), files.read(f"run/{name}", 0, 9)) == (None, None)
    assert files.list("run") == []


@pytest.mark.parametrize("sync", [True, False])
def test_a_disk_has_a_file_and_its_name_before_it_counts_as_stored(sync, tmp_path, monkeypatch):
    order = []
    for name in ("fsync", "rename"):
        call = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *a, name=name, call=call: order.append(name) or call(*a)
        )
    with contextlib.closing(NodeFiles("a", tmp_path, sync=sync).unpublished("run/x/file")) as new:
        new.write(b"data")
        assert new.publish(if_absent=False)
    assert order[:2] == (["fsync", "rename"] if sync else ["rename"])
    assert order[2:].count("fsync") == (len(order) - 2 if sync else 0)
    assert len(order[2:]) >= 3 * sync  # the folder of the file, and those around it


@pytest.mark.parametrize("by", ["another user", "mode 0777", "a link"])
def test_a_directory_that_others_may_have_made_is_refused_and_nothing_is_written(
    by, tmp_path, monkeypatch
):
    directory, target = tmp_path / "node", tmp_path / "target"
    target.mkdir(0o700)
    if by == "a link":
        directory.symlink_to(target)
    else:
        directory.mkdir(0o700)
    if by == "mode 0777":
        directory.chmod(0o777)
    if by == "another user":
        monkeypatch.setattr(node_files.os, "getuid", lambda: 12345)
    with pytest.raises(OSError, match="Not a directory" if by == "a link" else "this user's"):
        NodeFiles("a", directory, 1 << 20)
    assert [*directory.iterdir(), *target.iterdir()] == []
