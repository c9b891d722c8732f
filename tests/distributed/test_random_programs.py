"""Random programs that save, train and load while saves run: a save has what there was at its call, a load what was
stored.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.jobs.groups import own_group
from support.jobs.ranks import ranks
from support.state import checkpoints
from support.state.checkpoints import assert_same, causes, clone, writer, zeros
from support.state.loops import manager
from support.tiers import tries
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from dcp_datastates import async_save, load, save, track
from dcp_datastates.errors import CheckpointReplacedError

WAITING = {"reads": 600}
"""Nothing but what needs the memory makes a save read it."""


@dataclass(eq=False)
class Saved:
    """One save, and copies of what there was at its call."""

    expected: dict[str, Any]
    handle: Any = None
    """Has ``captured`` and ``committed``; None if it was committed at the call's end."""
    committed: bool = False
    """Whether that is known."""


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """With whole tensors; collective."""
    return clone({n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in state.items()})


class Program:
    """Ranks that draw the same operations on one state."""

    def __init__(self, seed: int, root: Path) -> None:
        self.chance, self.root = random.Random(seed), root
        self.group, self.manager = own_group(), manager(root, **WAITING)
        torch.manual_seed(seed)
        whole = distribute_tensor(torch.rand(400, 128), init_device_mesh("cpu", (2,)), [Shard(0)])
        sharded, mine = torch.nn.Parameter(whole), torch.nn.Parameter(torch.rand(200, 128))
        self.optimizer = torch.optim.SGD([sharded, mine], lr=0.1)
        track(self.optimizer)
        self.state: dict[str, Any] = {
            "sharded": sharded,
            f"mine{dist.get_rank()}": mine,
            "unowned": torch.rand(200, 128),
            "number": 0,
        }
        self.at: list[list[Saved]] = []
        """By step, what may be there: the newest save that is known to be committed, and those after it."""
        self.saves: list[Saved] = []
        self.overwrote = 0
        """How many loads overwrote what a save had still to read."""

    def path(self, step: int) -> Path:
        return self.root / f"step-{step}"

    def train(self) -> None:
        self.state["unowned"] += 1
        for value in self.optimizer.param_groups[0]["params"]:
            value.grad = torch.ones_like(value)
        self.optimizer.step()

    def save(self) -> None:
        """At a new step, or over the newest."""
        how = self.chance.choice(list(SAVES))
        if not self.at or how == "manager" or self.chance.random() < 0.5:
            self.at.append([])
        self.state["number"] += 1
        saved = Saved(_copied(self.state))
        self.saves.append(saved)
        self.at[-1].append(saved)
        saved.handle = SAVES[how](self, len(self.at) - 1)
        if saved.handle is None:
            self._is_committed(self.at[-1], saved)

    def wait(self) -> None:
        """For one save in flight."""
        if waiting := [(at, saved) for at in self.at for saved in at if not saved.committed]:
            at, saved = self.chance.choice(waiting)
            saved.handle.committed.result(60)
            self._is_committed(at, saved)

    def _is_committed(self, at: list[Saved], saved: Saved) -> None:
        saved.committed = True
        del at[: at.index(saved)]

    def load(self) -> None:
        """What is at the newest step that has something, or at one before, into the state or another one."""
        there = [step for step, at in enumerate(self.at) if at[0].committed]
        if not there:
            return
        step, how = self.chance.choice(there[-2:]), self.chance.choice(list(LOADS))
        live = how != "load, no state" and self.chance.random() < 0.5
        state = self.state if live else {**zeros(self.state), "number": -1}
        self.overwrote += live and any(
            s.handle and not s.handle.captured.done() for s in self.saves
        )
        while True:
            try:
                found = LOADS[how](self, step, state)
                break
            except (Exception, CheckpointException) as error:  # a commit has replaced it meanwhile
                if not all(isinstance(cause, CheckpointReplacedError) for cause in causes(error)):
                    raise
        by_number = {saved.expected["number"]: saved for saved in self.at[step]}
        assert found["number"] in by_number, "an older checkpoint came back"
        saved = by_number[found["number"]]
        self._is_committed(self.at[step], saved)
        assert_same(_copied({name: found[name] for name in self.state}), saved.expected)

    def end(self) -> None:
        for saved in self.saves:
            if saved.handle is not None:
                saved.handle.committed.result(60)
        self.manager.close()
        for step, at in enumerate(self.at):
            found, expected = load(self.path(step)), at[-1].expected
            assert_same({name: found[name] for name in expected}, expected)


def _by_dcp(program: Program, path: Path) -> Any:
    ours = writer(path, **WAITING)
    checkpoints.async_save(program.state, None, by=ours, group=program.group)
    return ours


SAVES: dict[str, Callable[[Program, int], Any]] = {
    "save": lambda p, step: save(p.state, p.path(step), writer=writer()) and None,
    "async_save": lambda p, step: async_save(p.state, p.path(step), writer=writer(**WAITING)),
    "dcp.save": lambda p, step: checkpoints.save(p.state, p.path(step)),
    "dcp.async_save": lambda p, step: _by_dcp(p, p.path(step)),
    "manager": lambda p, step: p.manager.save(step, p.state),
}
"""Each returns the handle; None: it is committed."""

LOADS: dict[str, Callable[[Program, int, dict[str, Any]], dict[str, Any]]] = {
    "load": lambda p, step, state: load(p.path(step), state),
    "load, no state": lambda p, step, _: load(p.path(step)),
    "dcp.load": lambda p, step, state: checkpoints.load(state, p.path(step)),
    "manager": lambda p, step, state: (p.manager.restore(step, state), state)[1],
}


@ranks(2)
@pytest.mark.parametrize("programs", tries(6, 80, "LOAD_PROGRAMS"))
def test_loads_while_saves_run(programs, shared_dir):
    overwrote = 0
    for seed in range(programs):
        program = Program(seed, shared_dir / f"{seed}")
        try:
            for _ in range(program.chance.randrange(5, 25)):
                act = ("train", "save", "save", "wait", "load", "load")
                getattr(program, program.chance.choice(act))()
            program.end()
        except BaseException as error:
            error.add_note(f"program {seed}")
            raise
        overwrote += program.overwrote
    assert overwrote, "no load overwrote what a save had still to read, so this shows little"
