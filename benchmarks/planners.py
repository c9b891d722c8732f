"""The planners of ``planning.py``, each driven as DCP drives it, without processes between.

What DCP sends is pickled and unpickled as its object collectives do: the plans that are gathered, those that are
scattered, and the metadata that its last step broadcasts.
"""

from __future__ import annotations

import gc
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from dcp_datastates.format.metadata_check import validate
from dcp_datastates.planning.balance import assign
from dcp_datastates.planning.messages import Head, LocalPlan, RankPlan
from planning_jobs import Job


@dataclass
class Cost:
    """Of one save's planning, in seconds and bytes; bytes are those of one rank."""

    steps: dict[str, float] = field(default_factory=dict)
    """The coordinator's, by step."""
    rank: float = 0.0
    """What every rank does: its own plan, and what it does with the answer."""
    gathered: int = 0
    scattered: int = 0
    broadcast: int = 0

    @property
    def coordinator(self) -> float:
        return sum(self.steps.values())

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.steps[name] = self.steps.get(name, 0.0) + time.perf_counter() - begun

    @contextmanager
    def on_rank(self) -> Iterator[None]:
        gc.freeze()  # a rank's collector has not the coordinator's millions of objects to walk
        begun = time.perf_counter()
        yield
        self.rank += time.perf_counter() - begun
        gc.unfreeze()


def stock(job: Job, caching: bool) -> list[Cost]:
    """The first save and the second, by ``DefaultSavePlanner``."""
    _forget()
    gathered = [pickle.dumps(_stock_plan(plan)) for plan in job.plans()]
    costs = []
    for save in range(2):
        cost = Cost()
        planner = DefaultSavePlanner(enable_plan_caching=caching)
        state_dict = job.state_dict()
        with cost.on_rank():
            planner.set_up_planner(state_dict)
            local = planner.create_local_plan()
            sent = pickle.dumps(local)
        if save and caching:
            gathered = [sent] * job.ranks
        _stock_coordinator(cost, gathered, planner)
        del planner
        costs.append(cost)
        gc.collect()
    _forget()
    return costs


def _stock_coordinator(cost: Cost, gathered: list[bytes], planner: DefaultSavePlanner) -> None:
    with cost.step("unpickle plans"):
        plans = list(map(pickle.loads, gathered))
    cost.gathered = len(gathered[-1])
    with cost.step("global plan"):
        final, metadata = planner.create_global_plan(plans)
    del plans
    with cost.step("pickle plans"):
        scattered = list(map(pickle.dumps, final))
    with cost.step("pickle metadata"):
        broadcast = pickle.dumps(metadata)
    cost.scattered, cost.broadcast = len(scattered[-1]), len(broadcast)
    del final, metadata
    with cost.on_rank():
        planner.finish_plan(pickle.loads(scattered[-1]))
        pickle.loads(broadcast)


def _stock_plan(plan: LocalPlan) -> SavePlan:
    return SavePlan(plan.write_items(), planner_data=plan.head.mappings)


def _forget() -> None:
    """Stock's caches belong to the class."""
    for name, value in vars(SavePlanner).items():
        if name.startswith("_cached") and isinstance(value, dict):
            value.clear()


def columns(job: Job) -> list[Cost]:
    """The first save and the second, by the plans in columns of this package.

    Nothing is broadcast by the planner. What DCP's last step broadcasts is what the writer's ``finish`` is
    given, and not in these figures.
    """
    first, decided = _first(job)
    return [first, _steady(job, decided)]


@dataclass(frozen=True)
class _Decided:
    """What the coordinator keeps of the plans: by rank, the digest of the local one and of the final one."""

    local: list[bytes]
    final: list[bytes]


def _first(job: Job) -> tuple[Cost, _Decided]:
    cost = Cost()
    heads: dict[bytes, Head] = {}
    plans = []
    for plan in job.plans():  # made and encoded here: a rank's work, measured below
        encoded = plan.encoded
        with cost.step("decode plans"):
            plans.append(LocalPlan.decode(encoded, heads))
    cost.gathered = len(encoded)
    with cost.step("assign"):
        finals, catalog = assign(plans)
    with cost.step("validate"):
        faults = validate(catalog, filled=job.ranks > 1)
    if faults:
        raise RuntimeError(faults[0])
    with cost.step("encode plans"):
        decided = _Decided([p.digest for p in plans], [final.digest for final in finals])
        scattered = [final.encoded for final in finals]
    cost.scattered = len(scattered[-1])
    local = _own_plan(cost, job)
    with cost.on_rank():
        RankPlan.decode(scattered[-1]).write_items(local)
    return cost, decided


def _own_plan(cost: Cost, job: Job) -> LocalPlan:
    """What a rank sends: stock's local plan, in columns, with its digest."""
    planner = DefaultSavePlanner()
    state_dict = job.state_dict()
    with cost.on_rank():
        planner.set_up_planner(state_dict)
        plan = planner.create_local_plan()
        local = LocalPlan.of(plan.items, plan.planner_data)
        assert local.digest
    return local


def _steady(job: Job, decided: _Decided) -> Cost:
    """The plans are as in the save before: digests go out and come back, and nothing else."""
    cost = Cost()
    known: dict[bytes, Any] = dict(zip(decided.local, decided.final, strict=True))
    gathered = [
        pickle.dumps((local, final))
        for local, final in zip(decided.local, decided.final, strict=True)
    ]
    with cost.step("look up"):
        received = list(map(pickle.loads, gathered))
        answers = [pickle.dumps((local, known[local])) for local, _ in received]
    cost.gathered, cost.scattered = len(gathered[-1]), len(answers[-1])
    _own_plan(cost, job)
    with cost.on_rank():
        pickle.loads(answers[-1])
    return cost
