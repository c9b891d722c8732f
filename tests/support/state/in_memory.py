"""Numbered checkpoints in the memory of nodes, which are directories. Bodies of jobs on ranks."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

import dcp_datastates
from dcp_datastates import CheckpointManager
from support.state.archiving import number_in
from support.state.checkpoints import CACHE
from support.state.saving import Report, part, save_over, try_to_save

__all__ = [
    "URL",
    "configure",
    "files_on",
    "find_in_memory",
    "go_on_in_memory",
    "loop_in_memory",
    "save_configured",
    "save_in_memory",
    "try_to_save_in_memory",
]

URL = "ram://run"
ELEMENTS = 3_000_000
"""Of each rank's weight: 12 MB, two pieces."""


def configure(root: str, nodes: int = 2, peers: int = 1) -> None:
    """The ranks fill the nodes one after the other, as torchrun's do."""
    node = f"node{dist.get_rank() * nodes // dist.get_world_size()}"
    dcp_datastates.configure_ram(peers=peers, directory=f"{root}/{node}", node=node)


def save_configured(number: int) -> None:
    save_over(part(number, ELEMENTS), f"{URL}/step-{number}", read_window="immediate").result(60)


def save_in_memory(root: str, number: int, nodes: int = 2, peers: int = 1) -> None:
    configure(root, nodes, peers)
    save_configured(number)
    dist.barrier()


def try_to_save_in_memory(root: str, number: int) -> Report:
    configure(root)
    return try_to_save(f"{URL}/step-{number}", number, ELEMENTS, 60)


def find_in_memory(root: str, number: int | None, saved_by: int, nodes: int = 2) -> None:
    """Checkpoint ``number`` of as many ranks is the newest, and whole."""
    configure(root, nodes)
    path = dcp_datastates.latest(URL)
    found = None if path is None else number_in([URL], saved_by, ELEMENTS)
    assert found == number


def go_on_in_memory(root: str, number: int) -> None:
    """Save ``number`` and the next, and keep one checkpoint."""
    save_in_memory(root, number)
    save_configured(number + 1)
    dcp_datastates.retain(URL, keep=1)


def loop_in_memory(
    root: str, archive: str, first: int, last: int, resumes: int | None, nodes: int = 2
) -> None:
    """A training loop with both tiers."""
    configure(root, nodes)
    state = {"w": torch.full((300_000,), -1.0), "step": -1}
    with CheckpointManager(
        URL, every=1, keep=2, archive=archive, archive_every=2, host_cache_size=CACHE
    ) as manager:
        assert manager.restore_latest(state) == resumes
        if resumes is not None:
            assert state["step"] == resumes
            assert bool((state["w"] == resumes).all())
        for step in range(first, last):
            state["w"].fill_(step)
            state["step"] = step
            manager.save(step, state)


def files_on(root: Path, pattern: str = "*.safetensors") -> dict[str, list[str]]:
    """Of each object's name below the bucket, the nodes that have it."""
    found: dict[str, list[str]] = {}
    for path in sorted(root.glob(f"node*/run/**/{pattern}")):
        node, _, name = str(path.relative_to(root)).partition("/run/")
        if path.is_file():
            found.setdefault(name, []).append(node)
    return found
