"""Ranks keep checkpoints on the disks of nodes. These are directories here: a node that is lost comes back empty."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import shutil
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.crashes.failing import run_killing
from support.crashes.mounts import mount, tmpfs
from support.jobs.processes import run_ranks
from support.jobs.ranks import ranks, run_on_ranks
from support.state.archiving import number_in
from support.state.checkpoints import CACHE, assert_same, raises
from support.state.saving import Report, checkpoint, part, save_over, try_to_save
from support.stores.nodes import rests_below
from support.tiers import sampled
from support.waiting import await_that, lines

import dcp_datastates
from dcp_datastates import CheckpointManager
from dcp_datastates.errors import CheckpointCorruptError, ConfigurationError, StorageError
from dcp_datastates.tiers import copies
from dcp_datastates.tiers import nodes as tier
from dcp_datastates.tiers.node import OtherNode

URL = "node:///run"
ELEMENTS = 3_000_000
"""Of each rank's weight: 12 MB, two pieces."""


def configure(root: str | Path, nodes: int = 2, peers: int = 1, memory: str = "auto") -> None:
    """The ranks fill the nodes one after the other, as torchrun's do."""
    node = f"node{dist.get_rank() * nodes // dist.get_world_size()}"
    tier.MEMORY = Path(root, node)
    directory = f"{root}/{node}"
    dcp_datastates.configure_nodes(peers=peers, directory=directory, node=node, memory=memory)


def save_configured(number: int, url: str = URL) -> None:
    save_over(part(number, ELEMENTS), f"{url}/step-{number}", reads="immediate").result(60)


def save_on_nodes(root: str, number: int, nodes: int = 2, peers: int = 1) -> None:
    configure(root, nodes, peers)
    save_configured(number)
    dist.barrier()


def try_to_save_on_nodes(root: str, number: int) -> Report:
    configure(root)
    return try_to_save(f"{URL}/step-{number}", number, ELEMENTS, 60)


def find_on_nodes(root: str, number: int | None, saved_by: int, nodes: int = 2) -> None:
    """Checkpoint ``number`` of as many ranks is the newest, and whole."""
    configure(root, nodes)
    path = dcp_datastates.latest(URL)
    found = None if path is None else number_in([URL], saved_by, ELEMENTS)
    assert found == number


def go_on_on_nodes(root: str, number: int) -> None:
    """Save ``number`` and the next, and keep one checkpoint."""
    save_on_nodes(root, number)
    save_configured(number + 1)
    dcp_datastates.retain(URL, keep=1)


def files_on(root: Path, pattern: str = "*.safetensors") -> dict[str, list[str]]:
    """Of each object's name below the bucket, the nodes that have it."""
    found: dict[str, list[str]] = {}
    for path in sorted(root.glob(f"node*/run/**/{pattern}")):
        node, _, name = str(path.relative_to(root)).partition("/run/")
        if path.is_file():
            found.setdefault(name, []).append(node)
    return found


@pytest.mark.parametrize(
    ("lost", "world"), sampled(itertools.product([0, 1], [4, 2, 3]), keep=[(0, 4), (1, 2)])
)
def test_the_newest_checkpoint_outlives_a_node(tmp_path, lost, world):
    root = str(tmp_path)
    for number in (1, 2):
        run_on_ranks(4, save_on_nodes, root=root, number=number)
    shutil.rmtree(tmp_path / f"node{lost}")
    run_on_ranks(world, find_on_nodes, root=root, number=2, saved_by=4)
    run_on_ranks(world, save_on_nodes, root=root, number=3)
    run_on_ranks(4, find_on_nodes, root=root, number=3, saved_by=world)


def test_a_job_on_one_node_finds_what_two_have_saved(tmp_path):
    run_on_ranks(4, save_on_nodes, root=str(tmp_path), number=1)
    run_on_ranks(2, find_on_nodes, root=str(tmp_path), number=1, saved_by=4, nodes=1)


@pytest.mark.parametrize(
    ("peers", "copies"), sampled([(0, 1), (1, 2), (2, 3), (9, 4)], keep=[(1, 2), (9, 4)])
)
def test_each_data_file_lies_on_its_node_and_its_peers(tmp_path, peers, copies):
    run_on_ranks(4, save_on_nodes, root=str(tmp_path), number=1, nodes=4, peers=peers)
    found = files_on(tmp_path)
    assert len(found) == 4
    for name, nodes in found.items():
        rank = int(name.rpartition("/r")[2][:5])
        assert set(nodes) == {f"node{(rank + after) % 4}" for after in range(copies)}
    for kind in ("decision", ".metadata"):
        (nodes,) = files_on(tmp_path, kind).values()
        assert len(nodes) == 4


@ranks(3)
def test_ranks_that_name_no_store_are_named(shared_dir, monkeypatch):
    monkeypatch.setattr(tier, "_MEETING_SECONDS", 0.5)
    configure(shared_dir)
    if dist.get_rank() == 0:
        with raises(StorageError, "rank 1, 2 of 3", "named no node:// path"):
            dcp_datastates.verify(f"{URL}/step-1")
    dist.barrier()


@ranks(2)
def test_two_nodes_of_one_name_are_refused(shared_dir):
    dcp_datastates.configure_nodes(directory=f"{shared_dir}/{dist.get_rank()}", node="same")
    with raises(StorageError, "several hosts", "'same'", "configure_nodes(node=...)"):
        dcp_datastates.latest(URL)
    with raises(ConfigurationError, "comes too late"):
        dcp_datastates.configure_nodes(node="other")
    dist.barrier()


def _a_node_is_full(root: str) -> None:
    configure(root, memory="5MB" if dist.get_rank() else "auto")
    with raises(dcp_datastates.errors.DataStatesError, "node1", "5000000 bytes"):
        save_configured(2, "ram://run")
    dcp_datastates.save({"small": dist.get_rank()}, "ram://run/step-3")
    dist.barrier()


def test_a_full_node_fails_the_save_and_the_next_works(tmp_path):
    run_on_ranks(2, _a_node_is_full, root=str(tmp_path))
    assert {name.split("/")[0] for name in files_on(tmp_path)} == {"step-3"}
    assert rests_below(tmp_path) == []


@ranks(2)
def test_a_full_disk_fails_the_save_and_the_next_works(shared_dir):
    disk = Path(shared_dir, "node1")
    with tmpfs(disk, "6m"):
        disk.chmod(0o700)
        configure(shared_dir)
        full = raises(dcp_datastates.errors.DataStatesError, "rank 1 of 2", "No space left")
        with lines(logging.WARNING) as said, full:
            save_configured(2)
        if dist.get_rank() == 0:
            assert any("copy on node node1 has failed" in line for line in said)
        dcp_datastates.save({"small": 1}, f"{URL}/step-3")
        assert dcp_datastates.verify(f"{URL}/step-3").whole
        dist.barrier()
        assert rests_below(Path(shared_dir)) == []


def _saves_more_than_fits(root: str, archive: str) -> None:
    configure(root, memory="40MB")
    state = {"w": torch.zeros(3_000_000), "step": 0}
    with CheckpointManager(
        "ram://run", every=1, keep=9, archive=archive, host_cache_size=CACHE
    ) as manager:
        for step in range(6):
            state["w"].fill_(step)
            state["step"] = step
            manager.save(step, state).result(60)
        manager.wait()


def test_full_memory_gives_up_what_is_archived(tmp_path):
    archive = tmp_path / "archive"
    run_on_ranks(2, _saves_more_than_fits, root=str(tmp_path), archive=str(archive))
    steps = {f"step-{number}" for number in range(6)}
    assert {path.name for path in archive.iterdir() if path.is_dir()} == steps
    in_memory = {name.split("/")[0] for name in files_on(tmp_path)}
    assert "step-5" in in_memory
    assert in_memory < steps


@pytest.mark.parametrize(
    ("point", "victim"),
    sampled(
        itertools.product(
            ["node.piece.before@2", "node.publish.before", "node.publish.after"], [0, 3]
        ),
        keep=[("node.piece.before@2", 3)],
    ),
)
def test_a_rank_is_killed_in_the_middle_of_a_save(tmp_path, point, victim):
    root, body = str(tmp_path), f"{__name__}:try_to_save_on_nodes"
    run_on_ranks(4, save_on_nodes, root=root, number=1)
    for rank in run_killing(point, victim, body, 4, tmp_path, root=root, number=2):
        assert not rank.result().committed
        assert rank.result().ours, rank.result().text
    run_on_ranks(4, find_on_nodes, root=root, number=1, saved_by=4)
    # Processes that are older than those that were killed would leave a newer attempt alone.
    body = f"{__name__}:go_on_on_nodes"
    for rank in run_ranks(body, 4, tmp_path, root=root, number=2):
        rank.result()
    run_on_ranks(4, find_on_nodes, root=root, number=3, saved_by=4)
    assert rests_below(tmp_path) == []
    (attempt,) = {name.rpartition("/")[0] for name in files_on(tmp_path)}
    assert attempt.startswith("step-3/")


# ---- copies that are damaged or lost ---------------------------------------------------------------


def objects_on(root: Path) -> dict[str, dict[str, bytes]]:
    """Of each object's name below the run, its bytes on each node that has it."""
    return {
        name: {node: (root / node / "run" / name).read_bytes() for node in there}
        for name, there in files_on(root, "*").items()
        if not (name.endswith("~") or ".self-test." in name)
    }


def assert_still_there(root: Path, whole: dict[str, dict[str, bytes]]) -> None:
    """The objects ``whole`` lie on all nodes."""
    found = objects_on(root)
    assert [name for name in whole if found.get(name) != whole[name]] == []


def await_copies(root: str, nodes: int = 2) -> None:
    """Until every object of a committed attempt lies on ``nodes`` nodes, the same on all."""
    differing = [""]

    def are_same() -> bool:
        with contextlib.suppress(FileNotFoundError):  # it was published a moment ago
            found = objects_on(Path(root))
            differing[:] = [
                f"{name} on {[*on]}"
                for name, on in found.items()
                if f"{name.rpartition('/')[0]}/decision" in found
                and (len(on) < nodes or len({*on.values()}) > 1)
            ]
        return not differing

    try:
        await_that(are_same)
    except AssertionError:
        raise AssertionError(f"objects without a copy, or with another one: {differing}") from None
    dist.barrier()


def harm(root: Path, node: str, name: str, how: str) -> None:
    """Damage the copies of objects ``name`` on ``node``."""
    paths = sorted(root.glob(f"{node}/run/step-1/*/{name}"))
    assert paths
    for path in paths:
        data = bytearray(path.read_bytes())
        if how == "a bit":
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        elif how == "cut short":
            path.write_bytes(data[: len(data) // 3])
        else:
            path.unlink()


def find_damaged(root: str, how: str, by: str, harmed: dict[str, str]) -> None:
    """What was damaged on one node is read from the other, and written there again."""
    with lines(logging.WARNING) as said:
        configure(root)
        if by == "load":
            assert number_in([URL], 2, ELEMENTS) == 1
        elif by == "verify" and dist.get_rank() == 0:
            assert dcp_datastates.verify(f"{URL}/step-1").whole
        elif by == "verify":
            dcp_datastates.inspect(f"{URL}/step-1")
        else:
            assert dcp_datastates.latest(URL, verify="full") is not None
        await_copies(root)
    if how != "missing" and by != "latest" and dist.get_rank() == 0:
        for name, node in harmed.items():
            assert any(name in line and f"node {node} is damaged" in line for line in said), said


@pytest.mark.parametrize(
    ("how", "by"),
    sampled(
        itertools.product(["a bit", "cut short", "missing"], ["load", "verify", "latest"]),
        keep=[("a bit", "load"), ("a bit", "verify"), ("cut short", "load")],
    ),
)
def test_a_damaged_copy_is_read_from_the_other_node_and_written_again(tmp_path, how, by):
    run_on_ranks(2, save_on_nodes, root=str(tmp_path), number=1)
    whole = objects_on(tmp_path)
    harmed = dict.fromkeys(("decision", "r00000-0.safetensors", "r00001-0.safetensors"), "node0")
    if by == "verify":  # which reads the copies on other nodes, too
        harmed["r00001-0.safetensors"] = "node1"
    for name, node in harmed.items():
        harm(tmp_path, node, name, how)
    run_on_ranks(2, find_damaged, root=str(tmp_path), how=how, by=by, harmed=harmed)
    assert objects_on(tmp_path) == whole


def find_copies_again(root: str, nodes: int = 2, peers: int = 1) -> None:
    """Only name the run: what is committed gets its copies back, while saves go on."""
    configure(root, nodes, peers)
    dcp_datastates.latest(URL)
    save_configured(2)
    await_copies(root, nodes)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_that_comes_back_empty_gets_all_copies_again(tmp_path, lost):
    run_on_ranks(2, save_on_nodes, root=str(tmp_path), number=1)
    whole = objects_on(tmp_path)
    shutil.rmtree(tmp_path / f"node{lost}")
    run_on_ranks(2, find_copies_again, root=str(tmp_path))
    assert_still_there(tmp_path, whole)
    # So the other node may be lost, too.
    shutil.rmtree(tmp_path / f"node{1 - lost}")
    run_on_ranks(2, find_on_nodes, root=str(tmp_path), number=2, saved_by=2)


def test_one_that_is_damaged_on_all_nodes_keeps_no_other_from_its_copies(tmp_path):
    for number in (1, 3, 4):
        run_on_ranks(2, save_on_nodes, root=str(tmp_path), number=number)
    for path in tmp_path.glob("node*/run/step-[14]/*/decision"):
        path.write_bytes(bytes(1000))
    shutil.rmtree(tmp_path / "node1/run/step-3")
    run_on_ranks(2, find_copies_again, root=str(tmp_path))


def test_a_node_is_lost_with_its_process(tmp_path):
    root, body = str(tmp_path), f"{__name__}:try_to_save_on_nodes"
    run_on_ranks(2, save_on_nodes, root=root, number=1)
    whole = objects_on(tmp_path)
    (rank,) = run_killing("node.publish.before", 1, body, 2, tmp_path, root=root, number=2)
    assert not rank.result().committed
    shutil.rmtree(tmp_path / "node1")
    run_on_ranks(2, find_on_nodes, root=root, number=1, saved_by=2)
    for rank in run_ranks(f"{__name__}:find_copies_again", 2, tmp_path, root=root):
        rank.result()
    assert_still_there(tmp_path, whole)


def find_no_whole_copy(root: str, archive: str) -> None:
    configure(root)
    with raises(CheckpointCorruptError, "r00000-0.safetensors", "checksum"):
        dcp_datastates.load(f"{URL}/step-1")
    assert not dcp_datastates.verify(f"{URL}/step-1").whole
    state = checkpoint(1, 2, ELEMENTS)
    assert_same(dcp_datastates.load([f"{URL}/step-1", f"{archive}/step-1"]), state)


def test_if_both_copies_are_damaged_a_load_says_so_or_takes_the_archive(tmp_path):
    run_on_ranks(2, save_on_nodes, root=str(tmp_path), number=1)
    shutil.copytree(tmp_path / "node0" / "run", tmp_path / "archive")
    for node in ("node0", "node1"):
        harm(tmp_path, node, "r00000-0.safetensors", "a bit")
    run_on_ranks(2, find_no_whole_copy, root=str(tmp_path), archive=str(tmp_path / "archive"))


@ranks(2)
def test_a_copy_that_fails_fails_no_save_and_is_made_later(shared_dir):
    """The first copy of rank 0's data file fails; the save goes on, and the copy is made later."""
    configure(shared_dir)
    with pytest.MonkeyPatch.context() as patch, lines(logging.WARNING) as said:
        patch.setattr(copies, "_FIRST_PAUSE", 0.05)
        if dist.get_rank() == 0:
            begin, left = OtherNode.unpublished, [OSError(errno.ENOSPC, "No space left on device")]

            def fails_once(node: OtherNode, key: str, *limit: float) -> object:
                if "safetensors" in key and left:
                    raise left.pop()
                return begin(node, key, *limit)

            patch.setattr(OtherNode, "unpublished", fails_once)
        save_configured(1)
        await_copies(shared_dir)
    named = [line for line in said if "the copy on node node1 has failed" in line]
    assert len(named) == (dist.get_rank() == 0)
    assert all("r00000-0.safetensors" in line and "No space left" in line for line in named)


@pytest.mark.parametrize(
    "point",
    sampled(
        ["node.spread.before@2", "node.copy.before", "node.piece.before@2", "node.copy.after"],
        keep=["node.piece.before@2"],
    ),
)
def test_a_process_is_killed_while_it_makes_copies_again(tmp_path, point):
    root = str(tmp_path)
    run_on_ranks(2, save_on_nodes, root=root, number=1)
    whole = objects_on(tmp_path)
    shutil.rmtree(tmp_path / "node1")
    run_killing(point, 0, f"{__name__}:name_the_run", 2, tmp_path, root=root)
    run_on_ranks(2, find_copies_again, root=root)
    assert rests_below(tmp_path) == []
    assert_still_there(tmp_path, whole)


def name_the_run(root: str) -> None:
    """Until the process is killed that makes copies."""
    configure(root)
    dcp_datastates.latest(URL)
    if dist.get_rank() == 0:
        time.sleep(60)
    dist.barrier()


# ---- memory, disks and a store ---------------------------------------------------------------------


def loop_in_three_tiers(root: str, first: int, last: int, resumes: int | None) -> None:
    """Every third checkpoint is archived, on the disks and in the store."""
    configure(root)
    tiers = ["ram://run", "node:///disk", f"{root}/store"]
    state = {"w": torch.full((300_000,), -1.0), "step": -1}
    with CheckpointManager(
        tiers[0], every=1, keep=2, archive=tiers[1:], archive_every=3, host_cache_size=CACHE
    ) as manager:
        assert manager.restore_latest(state) == resumes
        assert state["step"] == (-1 if resumes is None else resumes)
        assert bool((state["w"] == state["step"]).all())
        for step in range(first, last):
            state["w"].fill_(step)
            state["step"] = step
            manager.save(step, state)
        manager.wait()
        newest = [f"{tier}/step-{last - 1}" for tier in tiers]
        is_archived = (last - 1 - first) % 3 == 0
        assert [*map(str, dcp_datastates.latest(tiers) or [])] == newest[: 3 if is_archived else 1]
    dist.barrier()


def test_a_loop_goes_on_from_memory_from_the_disks_or_from_the_store(tmp_path):
    root, loop = str(tmp_path), loop_in_three_tiers
    run_on_ranks(2, loop, root=root, first=0, last=6, resumes=None)
    for tier_of in ("node0/disk", "node1/disk", "store"):
        assert {path.name for path in tmp_path.glob(f"{tier_of}/step-*")} == {"step-0", "step-3"}
    run_on_ranks(2, loop, root=root, first=6, last=7, resumes=5)
    for node in ("node0", "node1"):  # a reboot of both
        shutil.rmtree(tmp_path / node / "run")
    run_on_ranks(2, loop, root=root, first=7, last=9, resumes=6)
    for node in ("node0", "node1"):
        shutil.rmtree(tmp_path / node)
    # The archives are behind by one step: 7 was archived, and 8 not.
    run_on_ranks(2, loop, root=root, first=8, last=9, resumes=7)


# ---- hosts with file systems of their own ----------------------------------------------------------


def save_on_own_disk(root: str, number: int, resumes: int | None) -> None:
    """Each rank has another file system mounted at one path."""
    mount(root, f"host{dist.get_rank()}", "disk")
    dcp_datastates.configure_nodes(node=f"host{dist.get_rank()}")
    url = f"node://{root}/disk/run"
    assert number_in([url], 2, ELEMENTS) == resumes
    save_configured(number, url)
    checkpoint = dcp_datastates.inspect(f"{url}/step-{number}")
    assert {file.nodes for file in checkpoint.files} == {("host0", "host1")}
    dist.barrier()


def test_one_path_on_the_disk_of_each_host(tmp_path):
    for name in ("host0", "host1", "disk"):
        (tmp_path / name).mkdir()
    body = f"{__name__}:save_on_own_disk"
    for number in (1, 2):
        for rank in run_ranks(
            body, 2, tmp_path, root=str(tmp_path), number=number, resumes=(number - 1) or None
        ):
            rank.result()
        shutil.rmtree(tmp_path / f"host{number % 2}" / "run")
    assert [*(tmp_path / "disk").iterdir()] == []
    assert len([*tmp_path.glob("host1/run/step-2/*/*.safetensors")]) == 2
