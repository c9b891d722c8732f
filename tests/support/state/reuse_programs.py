"""Random programs that train, save with ``reuse="unchanged"``, fail, and delete, move and copy what they have saved.

The oracle is a clone of the whole state at each call. After each step, every committed checkpoint must load as its
clone, bit for bit. Of several ranks, all run the same program; the state is of them all.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dcp_datastates as ds
from support.crashes.failing import armed
from support.state.checkpoints import CACHE, assert_same, clone, load_everything

__all__ = ["Outcome", "run_program"]

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int64)
MOST_BYTES = 120_000

FAULTS = ("publish.write.before=error:ENOSPC", "plan.after=error:EIO", "vote.before=error:EIO")
NO_LINKS = ("reuse.link.before=error:EXDEV", "reuse.link.after=error:EPERM")


@dataclass
class Outcome:
    """What a program came to, for a test to see that it asked something."""

    saves: int = 0
    failed: int = 0
    linked: int = 0
    """Saves that linked some bytes on this rank."""
    steps: set[str] = field(default_factory=set)


@dataclass
class _Value:
    tensor: torch.Tensor
    owner: int
    """The rank that has it; -1: sharded over all, -2: replicated."""


class _Program:
    def __init__(self, root: Path, seed: int, rank: int, world: int) -> None:
        self.root, self.rank, self.world = root, rank, world
        self.chance = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.mesh = DeviceMesh("cpu", list(range(world))) if world > 1 else None
        self.values: dict[str, _Value] = {}
        self.committed: dict[Path, dict[str, torch.Tensor]] = {}
        self.outcome = Outcome()
        self.count = 0
        for _ in range(6):
            self.add()

    # ---- what changes a state ------------------------------------------------------------------

    def _fresh(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=self.generator)
        return raw.view(dtype).view(shape)

    def _name(self) -> str | None:
        return self.chance.choice(sorted(self.values)) if self.values else None

    def add(self) -> None:
        self.count += 1
        dtype = self.chance.choice(DTYPES)
        most = MOST_BYTES // dtype.itemsize
        rows = self.chance.choice([0, 1, self.chance.randint(1, 50), self.chance.randint(1, most)])
        owner = self.chance.randrange(-2 if self.world > 1 else 0, self.world)
        self.values[f"t{self.count}"] = _Value(self._fresh((rows,), dtype), owner)

    def remove(self) -> None:
        if len(self.values) > 3:
            del self.values[str(self._name())]

    def train(self) -> None:
        for value in self.values.values():
            if value.tensor.numel() and self.chance.random() < 0.3:
                place = self.chance.randrange(value.tensor.nbytes)
                value.tensor.view(torch.uint8)[place] ^= 1 << self.chance.randrange(8)

    def replace(self) -> None:
        value = self.values[str(self._name())]
        equal = self.chance.random() < 0.5
        value.tensor = (
            value.tensor.clone()
            if equal
            else self._fresh(tuple(value.tensor.shape), value.tensor.dtype)
        )

    def resize(self) -> None:
        value = self.values[str(self._name())]
        rows = self.chance.randint(0, 2 * value.tensor.shape[0] + 1)
        fresh = self._fresh((rows,), value.tensor.dtype)
        kept = min(rows, value.tensor.shape[0])
        fresh[:kept] = value.tensor[:kept]
        value.tensor = fresh

    def rename(self) -> None:
        self.count += 1
        self.values[f"t{self.count}"] = self.values.pop(str(self._name()))

    def exchange(self) -> None:
        one, other = self.values[str(self._name())], self.values[str(self._name())]
        one.tensor, other.tensor = other.tensor, one.tensor

    def retype(self) -> None:
        value = self.values[str(self._name())]
        value.tensor = value.tensor.view(torch.uint8).clone()

    def move(self) -> None:
        value = self.values[str(self._name())]
        value.owner = self.chance.randrange(-2 if self.world > 1 else 0, self.world)

    # ---- what saves, and what is done to checkpoints -------------------------------------------

    def _state(self) -> dict[str, Any]:
        """This rank's."""
        state: dict[str, Any] = {"step": self.count}
        for name, value in self.values.items():
            if value.owner < 0:
                placement = Shard(0) if value.owner == -1 else Replicate()
                assert self.mesh is not None
                state[name] = distribute_tensor(value.tensor.clone(), self.mesh, [placement])
            elif value.owner == self.rank:
                state[name] = value.tensor
        return state

    def _expected(self) -> dict[str, Any]:
        tensors = {name: value.tensor for name, value in self.values.items()}
        return {"step": self.count, **clone(tensors)}

    def _path(self) -> Path:
        if self.committed and self.chance.random() < 0.3:
            return self.chance.choice(sorted(self.committed))
        self.count += 1
        return self.root / f"step-{self.count}"

    def save(self) -> None:
        self._save("")

    def save_failing(self) -> None:
        self._save(self.chance.choice(FAULTS))

    def save_without_links(self) -> None:
        self._save(self.chance.choice(NO_LINKS))

    def _save(self, fault: str) -> None:
        path, victim = self._path(), self.chance.randrange(self.world)
        if fault.startswith("publish"):
            victim = 0
        way = self.chance.choice(["save", "async_save", "dcp.save", "stock"])
        options: dict[str, Any] = {"host_cache_size": CACHE, "reuse": "unchanged"}
        if self.chance.random() < 0.1:
            options["reuse"] = "none"
        expected = self._expected()
        faulty = armed(fault) if fault and self.rank == victim else contextlib.nullcontext()
        failed = False
        with faulty:
            try:
                stats = _save_by(way, self._state(), path, options, self.train)
            except (OSError, ds.DataStatesError, dcp.api.CheckpointException):
                failed = True
        if self.world > 1:
            dist.barrier()
        assert failed == (fault in FAULTS), (fault, failed)
        self.outcome.saves += 1
        self.outcome.failed += failed
        if not failed:
            self.outcome.linked += bool(stats.bytes_linked)
            self.committed[path] = expected

    def several_in_flight(self) -> None:
        handles = []
        for _ in range(3):
            path = self._path()
            options = {"host_cache_size": CACHE, "reuse": "unchanged", "defer": "none"}
            handles.append(ds.async_save(self._state(), path, **options))
            self.committed[path] = self._expected()
            self.train()
        for handle in handles:
            handle.result()

    def _on_storage(self) -> Path | None:
        return self.chance.choice(sorted(self.committed)) if len(self.committed) > 2 else None

    def delete(self) -> None:
        if (path := self._on_storage()) is not None:
            self._once(lambda: ds.delete(path))
            del self.committed[path]

    def remove_tree(self) -> None:
        if (path := self._on_storage()) is not None:
            self._once(lambda: shutil.rmtree(path))
            del self.committed[path]

    def rename_directory(self) -> None:
        if (path := self._on_storage()) is not None:
            self.count += 1
            target = self.root / f"moved-{self.count}"
            self._once(lambda: path.rename(target))
            self.committed[target] = self.committed.pop(path)

    def copy(self) -> None:
        if (path := self._on_storage()) is not None:
            self.count += 1
            target = self.root / f"copy-{self.count}"
            self._once(lambda: ds.copy(path, target))
            self.committed[target] = self.committed[path]

    def convert(self) -> None:
        if (path := self._on_storage()) is not None:
            self.count += 1
            target = self.root / f"converted-{self.count}"
            self._once(lambda: ds.convert(path, target, to="datastates"))
            self.committed[target] = self.committed[path]

    def retain(self) -> None:
        deleted = ds.retain(self.root, keep=3)
        for path in deleted:
            del self.committed[Path(path)]

    def _once(self, function: Any) -> None:
        if self.rank == 0:
            function()
        if self.world > 1:
            dist.barrier()

    # ---- the check -----------------------------------------------------------------------------

    def check(self, step: str) -> None:
        if self.rank == 0:
            there = {path.parent for path in self.root.glob("*/.metadata")}
            assert there == set(self.committed), f"after {step}"
            for path, expected in self.committed.items():
                assert_same(load_everything(path), expected, f"{path.name} after {step}")
            for path in sorted(self.committed)[-1:]:
                assert ds.verify(path).whole, f"{path.name} after {step}"
        if self.world > 1:
            dist.barrier()


def _save_by(
    way: str, state: dict[str, Any], path: Path, options: dict[str, Any], train: Any
) -> ds.SaveStats:
    if way == "save":
        return ds.save(state, path, **options)
    if way == "async_save":
        handle = ds.async_save(state, path, defer="none", **options)
        train()  # all is copied
        handle.result()
        return handle.stats
    writer = ds.DataStatesWriter(path, **options)
    planner = dcp.DefaultSavePlanner() if way == "stock" else ds.DataStatesSavePlanner()
    with _quiet():
        dcp.save(state, storage_writer=writer, planner=planner)
    assert writer.last_save is not None
    return writer.last_save


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


_STATES = ("add", "remove", "replace", "resize", "rename", "exchange", "retype", "move", "train")
_SAVES = ("save", "save", "save", "save_failing", "save_without_links", "several_in_flight")
_STORED = (
    *("delete", "remove_tree", "rename_directory", "copy", "convert", "retain"),
    *("delete", "remove_tree"),
)


def run_program(root: Path, seed: int, steps: int, rank: int = 0, world: int = 1) -> Outcome:
    """Run the program of ``seed``. AssertionError if a checkpoint is not what was saved."""
    program = _Program(root, seed, rank, world)
    for _ in range(steps):
        kind = program.chance.choices((_STATES, _SAVES, _STORED), (4, 4, 1))[0]
        step = program.chance.choice(kind)
        getattr(program, step)()
        program.outcome.steps.add(step)
        if kind is not _STATES:
            program.check(f"{step} (seed {seed}, pid {os.getpid()})")
    return program.outcome
