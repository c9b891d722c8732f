"""Jobs that torchrun restarts over one store: what their ranks do, and what they write down of it.

The script is what torchrun runs; :class:`Job` starts it, and reads what its processes wrote. torch's own default group
is a fake one: gloo meets under keys that a restart leaves in the store, and fails by a race. What the package does in
the store is the same with NCCL, which needs GPUs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FAILPOINTS = (
    *("stage.before", "plan.before", "plan.after", "read.before", "flush.write.after"),
    *("sync.data.before", "vote.before", "vote.after", "outcome.before", "outcome.after"),
    *("cleanup.before", "publish.create.after", "publish.link.before", "publish.link.after"),
)
"""Where a rank may be killed in a save; the names that begin with ``publish`` are passed by rank 0 only."""


@dataclass(frozen=True)
class Plan:
    """What the processes do.

    Attributes:
        saves: so many steps; a restarted job goes on after the newest.
        kills: for each start of the workers, the rank that dies, and where: "start", "latest", "restore", or a
            failpoint ("vote.before@2": the second time).
        wait: save until there is a file ``end`` in the root. A process whose agent was killed goes on saving.
    """

    root: str
    saves: int = 4
    kills: Sequence[tuple[int, str]] = ()
    wait: bool = False


@dataclass(frozen=True)
class Line:
    """One event of one process: ``what`` is "started", "latest", "restored", "saved" or "failed"."""

    pid: int
    start: int
    rank: int
    world: int
    what: str
    value: Any
    seconds: float = 0.0


class Job:
    """One or several agents of torchrun that run this script on ``plan``. A context manager that ends them."""

    def __init__(self, plan: Plan, scratch: Path) -> None:
        self._plan = plan
        self._scratch = scratch
        self._notes = scratch / "notes"
        self._notes.mkdir()
        self.agents: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                agent.kill()
                agent.wait()
        for pid in self.workers():  # orphans
            os.kill(pid, signal.SIGKILL)

    def start(
        self, *options: str, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start an agent with torchrun's ``options``."""
        script = [__file__, json.dumps(asdict(self._plan)), str(self._notes)]
        with (self._scratch / "log").open("ab") as log:
            agent = subprocess.Popen(
                [sys.executable, "-W", "ignore", __file__, "agent", *options, *script],
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
                stdout=log,
                stderr=log,
            )
        self.agents.append(agent)
        return agent

    def lines(self) -> list[Line]:
        """What all processes wrote, in the order of time within each."""
        return [
            Line(**json.loads(text))
            for path in sorted(self._notes.iterdir())
            for text in path.read_text().splitlines()
            if text.endswith("}")  # it may be just being written
        ]

    def await_saves(self, world: int, since: Sequence[Line], seconds: float = 120.0) -> list[Line]:
        """Wait until each of ``world`` processes, none of them in ``since``, has made three saves; return all lines."""
        before = {line.pid for line in since}
        deadline = time.monotonic() + seconds
        while True:
            lines = self.lines()
            new = [line for line in lines if line.pid not in before and line.world == world]
            saves = Counter(line.pid for line in new if line.what == "saved")
            if sum(count >= 3 for count in saves.values()) >= world:
                return lines
            assert time.monotonic() < deadline, f"{new[-8:]}\n{self.log}"
            time.sleep(0.1)

    def workers(self) -> set[int]:
        """The workers that are alive, by process."""
        return {pid for pid in {line.pid for line in self.lines()} if _is_worker(pid)}

    @property
    def log(self) -> str:
        return (self._scratch / "log").read_text(errors="replace")[-8000:]


def _is_worker(pid: int) -> bool:
    try:
        return __file__ in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


# --- on a rank ------------------------------------------------------------------------------------


class _Rank:
    def __init__(self, plan: Plan, notes: str) -> None:
        self.plan = plan
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        self._notes = Path(notes, f"{time.time_ns()}-{os.getpid()}")
        self._agent = os.getppid()
        rank, self.place = plan.kills[self.start] if self.start < len(plan.kills) else (-1, "")
        self.dies = rank == self.rank

    def note(self, what: str, value: Any, began: float) -> None:
        seconds = time.monotonic() - began
        line = Line(os.getpid(), self.start, self.rank, self.world, what, value, seconds)
        with self._notes.open("a") as file:
            print(json.dumps(asdict(line)), file=file)

    def pass_by(self, place: str) -> None:
        if self.dies and self.place == place:
            os.kill(os.getpid(), signal.SIGKILL)

    def arm(self) -> None:
        """Before the package reads the environment."""
        where = "restore.read.before" if self.place == "restore" else self.place
        if self.dies and "." in where:
            os.environ["DCP_DATASTATES_FAILPOINTS"] = f"{where}=kill"

    def run(self) -> None:
        import torch.distributed.checkpoint as dcp

        import dcp_datastates

        root = self.plan.root
        began = time.monotonic()
        self.note("started", None, began)
        self.pass_by("start")
        if self.rank:
            self.pass_by("latest")
        elif self.dies and self.place == "latest":
            sys.modules["dcp_datastates.checkpoints.find"].newest_whole = lambda *_: self.pass_by(
                "latest"
            )
        newest = dcp_datastates.latest(root, timeout=60)
        self.note("latest", None if newest is None else newest.name, began)
        step = 0
        if newest is not None:
            state: dict[str, Any] = {"step": -1}
            dcp.load(state, storage_reader=dcp_datastates.DataStatesReader(newest), no_dist=True)
            step = state["step"] + 1
            self.note("restored", state["step"], began)
        while step < self.plan.saves or (self.plan.wait and not Path(root, "end").exists()):
            try:
                self._save(f"{root}/step-{step}", step)
            except dcp_datastates.errors.DataStatesError:
                if not self.plan.wait or os.getppid() == self._agent:
                    raise
            step += 1
            time.sleep(0.02 if self.plan.wait else 0.0)

    def _save(self, path: str, step: int) -> None:
        import torch

        import dcp_datastates

        began = time.monotonic()
        state = {f"w{self.rank}": torch.full((1000,), float(step)), "step": step}
        try:
            dcp_datastates.async_save(state, path, host_cache_size="64MiB").result(90)
        except Exception as error:
            self.note("failed", f"{type(error).__name__}: {error}", began)
            raise
        self.note("saved", step, began)


def _meet() -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend)

    store, rank, world = next(dist.rendezvous("env://"))
    dist.init_process_group("fake", store=store, rank=rank, world_size=world)


def _run_agent() -> None:
    """Run torchrun. In torch 2.13, the agent with the workers' store tells its address only once, and the others ask
    for it only once. So a node that joins later is not told; and one that was alone for a round, because the other took
    long to stop its workers, goes on with its own store. Here each round tells and asks again.
    """
    import torch.distributed.run
    import torch.multiprocessing as mp
    from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    meet = DynamicRendezvousHandler.next_rendezvous

    def meet_and_tell(self: Any) -> Any:
        met = meet(self)
        if met.rank == 0:
            met.store.set("MASTER_ADDR", met.bootstrap_store_info.master_addr)
            met.store.set("MASTER_PORT", str(met.bootstrap_store_info.master_port))
            return met
        told = RendezvousStoreInfo.build(met.rank, met.store, None)
        return RendezvousInfo(met.store, met.rank, met.world_size, told)

    DynamicRendezvousHandler.next_rendezvous = meet_and_tell  # type: ignore[method-assign]
    mp.set_forkserver_preload(["torch.distributed.checkpoint"])  # it takes each worker seconds
    torch.distributed.run.main(sys.argv[2:])


def _main() -> None:
    if sys.argv[1] == "agent":
        _run_agent()
        return
    plan = json.loads(sys.argv[1])
    me = _Rank(Plan(**plan), sys.argv[2])
    me.arm()
    _meet()
    me.run()


if __name__ == "__main__":
    _main()
