"""The files of a node: what forked children hold, and requests that the server refuses."""

from __future__ import annotations

import contextlib

import pytest
from support.jobs.scripts import run_script
from support.stores.asking import asked
from support.stores.nodes import Cluster

from dcp_datastates.tiers import node_files
from dcp_datastates.tiers.node_files import NodeFiles
from dcp_datastates.wire.line import RefusedError, connect


def test_a_forked_child_holds_no_lock_and_no_bytes(tmp_path):
    ended = run_script(
        """
        from pathlib import Path
        from dcp_datastates.tiers.node_files import NodeFiles
        files = NodeFiles("a", Path(path), 1 << 20)
        new = files.unpublished("run/x")
        new.write(b"x" * 1000)
        def held():
            found = [os.readlink(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd") if
                     os.path.islink(f"/proc/self/fd/{each}")]
            return [each for each in found if each.startswith(path)]
        assert len(held()) == 1, held()
        come, go = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(go)
            nothing = held() == []
            os.read(come, 1)
            os._exit(0 if nothing else 1)
        new.close()
        os.write(go, b"x")
        assert os.waitpid(child, 0)[1] == 0
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
        ["publish", 1, True],
        ["find"],
        ["find", 3],
        ["find", ["x"]],
        ["read", "x", "0", 9],
        ["read", "x", -5, 9],
        ["list", None],
        ["delete", "x"],
        ["delete", [1]],
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
        asked(line, ["publish", 1, False])


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
