"""Ranks keep checkpoints on the disks of nodes. These are directories here: a node that is lost comes back empty."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.crashes.failing import variables
from support.jobs.processes import run_ranks
from support.jobs.ranks import run_on_ranks
from support.state.archiving import archived_loop, number_in
from support.state.checkpoints import CACHE, raises
from support.state.saving import Report, part, save_over, try_to_save
from support.stores.nodes import rests_below
from support.tiers import sampled

import dcp_datastates
from dcp_datastates import CheckpointManager, ConfigurationError, StorageError
from dcp_datastates.tiers import nodes as tier

URL = "node:///run"
ELEMENTS = 3_000_000
"""Of each rank's weight: 12 MB, two pieces."""


def configure(root: str, nodes: int = 2, peers: int = 1, memory: str = "auto") -> None:
    """The ranks fill the nodes one after the other, as torchrun's do."""
    node = f"node{dist.get_rank() * nodes // dist.get_world_size()}"
    tier.MEMORY = Path(root, node)
    directory = f"{root}/{node}"
    dcp_datastates.configure_nodes(peers=peers, directory=directory, node=node, memory=memory)


def save_configured(number: int, url: str = URL) -> None:
    save_over(part(number, ELEMENTS), f"{url}/step-{number}", read_window="immediate").result(60)


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


def loop_on_nodes(
    root: str, archive: str, first: int, last: int, resumes: int | None, nodes: int = 2
) -> None:
    """A training loop with both tiers."""
    configure(root, nodes)
    archived_loop(URL, archive, first, last, resumes, elements=300_000, keep=2)


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


def _some_name_no_store(root: str) -> None:
    tier._MEETING_SECONDS = 0.5  # type: ignore[misc]
    try:
        configure(root)
        if dist.get_rank() == 0:
            with raises(StorageError, "rank 1, 2 of 3", "named no node:// path"):
                dcp_datastates.verify(f"{URL}/step-1")
        dist.barrier()
    finally:
        tier._MEETING_SECONDS = 60.0  # type: ignore[misc]


def test_ranks_that_name_no_store_are_named(tmp_path):
    run_on_ranks(3, _some_name_no_store, root=str(tmp_path))


def _one_name_for_two_nodes(root: str) -> None:
    dcp_datastates.configure_nodes(directory=f"{root}/{dist.get_rank()}", node="same")
    with raises(StorageError, "several hosts", "'same'", "configure_nodes(node=...)"):
        dcp_datastates.latest(URL)
    with raises(ConfigurationError, "comes too late"):
        dcp_datastates.configure_nodes(node="other")
    dist.barrier()


def test_two_nodes_of_one_name_are_refused(tmp_path):
    run_on_ranks(2, _one_name_for_two_nodes, root=str(tmp_path))


def _a_node_is_full(root: str) -> None:
    configure(root, memory="5MB" if dist.get_rank() else "auto")
    with raises(dcp_datastates.DataStatesError, "node1", "5000000 bytes"):
        save_configured(2, "ram://run")
    dcp_datastates.save({"small": dist.get_rank()}, "ram://run/step-3")
    dist.barrier()


def test_a_full_node_fails_the_save_and_the_next_works(tmp_path):
    run_on_ranks(2, _a_node_is_full, root=str(tmp_path))
    assert {name.split("/")[0] for name in files_on(tmp_path)} == {"step-3"}
    assert rests_below(tmp_path) == []


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
    root, fired = str(tmp_path), tmp_path / "fired"
    run_on_ranks(4, save_on_nodes, root=root, number=1)
    environments = [
        variables(f"{point}=kill", fired) if rank == victim else {} for rank in range(4)
    ]
    body = f"{__name__}:try_to_save_on_nodes"
    ended = run_ranks(body, 4, tmp_path, environments=environments, root=root, number=2)
    assert fired.read_text()
    assert ended[victim].killed
    for rank in ended:
        if rank.rank != victim:
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


def test_a_loop_goes_on_from_memory_or_from_the_archive(tmp_path):
    root, archive = str(tmp_path), str(tmp_path / "archive")
    run_on_ranks(4, loop_on_nodes, root=root, archive=archive, first=0, last=5, resumes=None)
    assert len({name.split("/")[0] for name in files_on(tmp_path)}) == 2
    shutil.rmtree(tmp_path / "node1")
    run_on_ranks(4, loop_on_nodes, root=root, archive=archive, first=5, last=6, resumes=4)
    for node in ("node0", "node1"):
        shutil.rmtree(tmp_path / node)
    run_on_ranks(2, loop_on_nodes, root=root, archive=archive, first=6, last=7, resumes=5)
