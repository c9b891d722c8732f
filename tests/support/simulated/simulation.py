"""A simulated world for the commit protocol: ranks, their store, gloo, storage, heartbeats, and a seeded scheduler.

The ranks run the real ``commit/protocol.py``. All else is a model, small and hostile: any step of a process may be its
last, or come late; storage may hold a request up and carry it out after its caller died; connections break, networks
are cut, stores end, jobs restart on one store, ranks take others for lost that are not. Jobs save to several paths, and
delete. After each step, :meth:`World.check` says what must hold; at the end, a job that nothing disturbs must commit.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from dcp_datastates.commit.vote import Outcome
from support.simulated import simulated_place
from support.simulated.simulated_parts import Attempt, Broken, Path, Save, Thread, Tree
from support.simulated.simulated_rank import Rank

__all__ = ["Broken", "Job", "World"]

_STORES = 2
"""Every so many seeds, the world's storage is an object store; else it is a directory."""

_JOBS = 10
"""At most, in one world. The last digit of an attempt's number is its job's; deletions have the last one."""


class Job:
    """A set of ranks; a job that restarts has the store of the one before."""

    def __init__(
        self, world: World, name: int, ranks: int, saves: int, clock: int, store: dict[str, object]
    ) -> None:
        self.world = world
        self.name = name
        self.size = ranks
        self.saves = saves
        self.clock = clock
        self.store = store
        self.has_store = True
        self.generation = 0
        self.ready: dict[int, set[int]] = {}
        self.trees: dict[int, Tree] = {}
        self.tickets: dict[int, Save] = {}
        self.ranks = [Rank(self, rank) for rank in range(ranks)]

    @property
    def over(self) -> bool:
        return all(rank.over for rank in self.ranks)


class World:
    """All of it. The attributes before the last group say how hostile it is; those after it put defects back.

    Args:
        seed: of the schedule.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.kills = self.random.choice([0.0, 0.0005, 0.003])
        self.freezes = self.random.choice([0.0, 0.005, 0.02])
        self.cuts = self.random.choice([0.0, 0.0, 0.002])
        self.store_ends = self.random.choice([0.0, 0.0, 0.001])
        self.breaks = self.random.choice([0.0, 0.002, 0.02])
        self.false_losses = self.random.choice([0.0, 0.0005, 0.005])
        self.defects = self.random.choice([0.0, 0.0, 0.005])
        self.stalls = self.random.choice([0.0, 0.05, 0.2])
        self.deletes = self.random.choice([0.0, 0.0, 0.003])
        self.hangs = self.random.choice([0.0, 0.0, 0.02])
        self.restarts = self.random.choice([0.0, 0.5, 1.0])
        self.retains = self.random.choice([False, True])
        self.faults = 1.0
        # Not drawn: the schedules of the other seeds stay as they are.
        self.in_store = seed % _STORES == _STORES - 1

        self.looks_beside = True
        self.withdraws_older = True
        self.withdraws_on_error = True
        self.withdraws_when_settling = True
        self.settles_what_hangs = True
        self.orders_by_clocks = False
        self.retains_in_doubt = False
        self.guesses = False
        self.believes_former_jobs = False
        self.creates_once = True
        self.looks_for_data = True
        self.keeps_marks = True
        self.trusts_the_pointer = False

        self.paths = [Path() for _ in range(self.random.choice([1, 1, 2, 3]))]
        self.index: set[tuple[Path, Attempt]] = set()
        """The attempts that were about to be committed; in a directory, those that have a folder."""
        self.jobs: list[Job] = []
        self.outcomes: dict[Attempt, set[Outcome]] = {}
        self.published: set[Attempt] = set()
        self.could_see: dict[Attempt, Attempt] = {}
        """By attempt: the newest one that was committed when it was claimed."""
        self.storage_failed: set[Attempt] = set()
        self.deleted: set[Attempt] = set()
        self.late: list[tuple[Thread, bool]] = []
        """Calls into storage that their callers do not wait for, and whether nothing comes after them."""
        self.deleting: Thread | None = None
        self.trace: list[str] = []
        self.counts = dict.fromkeys(Outcome, 0)
        self._owner: dict[Attempt, Job] = {}
        self._afters: dict[Attempt, Attempt] = {}
        self._signatures: dict[tuple[Path, int], Attempt] = {}

    def start_job(self) -> Job:
        ranks, saves = self.random.choice([2, 2, 3, 4, 6]), self.random.randrange(1, 4)
        clock = self.random.randrange(1, 1000)
        before = self.jobs[-1].store if self.jobs and self.happens(self.restarts) else {}
        job = Job(self, len(self.jobs), ranks, saves, clock, before)
        self.jobs.append(job)
        return job

    def path_of(self, number: int) -> Path:
        """Where a job's save with this ``number`` goes."""
        return self.paths[number % len(self.paths)]

    def newest_named(self) -> Attempt:
        """What ``latest`` finds; 0 for nothing."""
        return max(path.named or 0 for path in self.paths)

    def log(self, rank: Rank | None, text: str) -> None:
        self.trace.append(f"{rank.name if rank else 'world'}: {text}")

    def next_attempt(self, job: Job, newest: Attempt) -> Attempt:
        """Newer than ``newest``, and no other job's."""
        job.clock += 1
        if not self.orders_by_clocks:
            job.clock = max(job.clock, newest // _JOBS + 1)
        attempt = _JOBS * job.clock + job.name
        self._owner[attempt] = job
        return attempt

    def commit(self, save: Save) -> None:
        """The attempt is committed, perhaps once more."""
        path, attempt = save.path, save.attempt
        self.log(None, f"{attempt} is committed")
        if attempt < self.could_see[attempt]:
            raise Broken(f"{attempt} is committed, and could see {self.could_see[attempt]} before")
        files = path.files.get(attempt, set())
        if attempt not in self.published and files != set(range(self._owner[attempt].size)):
            raise Broken(f"{attempt} is committed, and only {files} of its files are there")
        path.signature += 1
        self._signatures[path, path.signature] = attempt
        self._afters[attempt] = save.after
        self.published.add(attempt)

    def look_at(self, path: Path) -> None:
        """Find out what is committed at a path."""
        there = [each for each, what in path.decisions.items() if what == "committed"]
        path.named = max(there, default=None)
        if self.trusts_the_pointer and path.named is not None and path.pointer is not None:
            path.named = path.pointer
        if path.named is not None:
            path.after = self._afters[path.named]

    def check_kept(self, victim: Attempt, kept: Path | None) -> None:
        """A checkpoint is deleted as older than that at ``kept``."""
        if kept is not None and kept.named is not None and kept.named < victim:
            raise Broken(f"LOST: {victim} is deleted as older than {kept.named}")

    def told(self, rank: Rank, save: Save, outcome: Outcome) -> None:
        """A rank's user is told an outcome."""
        self.log(rank, f"{save.number} ({save.attempt}): {outcome.value}")
        if save.attempt < 0:
            if outcome is not Outcome.FAILED:
                raise Broken(f"{rank.name} has no such save, and was told {outcome}")
            return
        self.counts[outcome] += 1
        if outcome is Outcome.UNKNOWN:
            newer = any(
                other > save.attempt
                for (path, _), other in self._signatures.items()
                if path is save.path
            )
            if not newer and save.attempt not in self.storage_failed | self.deleted:
                raise Broken(f"the outcome of {save.attempt} could be known")
            return
        self.outcomes.setdefault(save.attempt, set()).add(outcome)

    def check(self) -> None:
        """What must hold at every instant."""
        for attempt, outcomes in self.outcomes.items():
            if len(outcomes) > 1:
                raise Broken(f"ranks were told opposite things of {attempt}")
            if (attempt in self.published) != (Outcome.COMMITTED in outcomes):
                raise Broken(
                    f"{attempt} was told to be {outcomes}, and published: {self.published}"
                )
        for path in self.paths:
            named = path.named
            if named is not None and path.files.get(named, set()) != set(
                range(self._owner[named].size)
            ):
                raise Broken(f"{named} is named, and only {path.files.get(named)} of its files")

    def run(self, jobs: int = 3, steps: int = 60_000) -> None:
        """Play the schedule. Raises :class:`Broken`."""
        for _ in range(self.random.choice([1, 1, 2])):
            self.start_job()
        last: Job | None = None
        for step in range(steps):
            if (
                last is None
                and len(self.jobs) < jobs
                and (self.jobs[-1].over or self.happens(0.0005))
            ):
                self.start_job()
            calm = step > 3000 or last is not None
            ranks = [rank for job in self.jobs for rank in job.ranks if not rank.over]
            if not ranks and last is not None:
                break
            if calm:
                self._calm()
            if not ranks:
                self._calm()
                self.retains = (
                    False  # what a job deletes while it saves there, too, fails that save
                )
                last = self.start_job()
                continue
            rank = self.random.choice(ranks)
            if calm:
                rank.frozen = 0
            elif not self._disturb(rank):
                continue
            self._step(rank)
            self.check()
        else:
            raise Broken(f"these have not ended: {[rank.name for rank in ranks]}")
        self._calm()
        self.check()
        if not self._has_committed(last):
            raise Broken("nothing disturbed the last job, and it has not committed")

    def _has_committed(self, job: Job) -> bool:
        committed = {Outcome.COMMITTED}
        return len(job.tickets) == job.saves and all(
            self.outcomes.get(save.attempt) == committed for save in job.tickets.values()
        )

    def happens(self, probability: float) -> bool:
        return self.random.random() < probability

    def _calm(self) -> None:
        self.breaks = self.false_losses = self.defects = self.stalls = self.hangs = self.faults = (
            0.0
        )
        while self.deleting is not None:
            self._go_on_deleting()
        while self.late:
            self._come_late()

    def _go_on_deleting(self) -> None:
        assert self.deleting is not None
        try:
            next(self.deleting)
        except StopIteration:
            self.deleting = None

    def _come_late(self) -> None:
        """A call into storage returns whose caller has died, or has gone on."""
        steps, is_last = self.late.pop(self.random.randrange(len(self.late)))
        try:
            next(steps)
        except StopIteration:
            return
        if is_last:
            steps.close()
        else:
            self.late.append((steps, is_last))

    def _disturb(self, rank: Rank) -> bool:
        """Whether the rank may take its step all the same."""
        if self.deleting is not None:
            if self.happens(0.2):
                self._go_on_deleting()
        elif self.happens(self.deletes):
            path = self.random.choice(self.paths)
            if path.named is not None:
                self.deleting = simulated_place.delete(self, path, path.named)
        if self.late and self.happens(0.02):
            self._come_late()
        if rank.frozen:
            rank.frozen -= 1
            return False
        if self.happens(self.kills):
            self.log(rank, "killed")
            rank.die()
            return False
        if self.happens(self.freezes):
            rank.frozen = self.random.randrange(200)
            return False
        if self.happens(self.cuts):
            self.log(rank, "cut" if not rank.is_cut else "back")
            rank.is_cut = not rank.is_cut
        if self.happens(self.store_ends):
            self.log(rank, "its store ends")
            rank.job.has_store = False
        return True

    def _step(self, rank: Rank) -> None:
        thread = self.random.choice(rank.threads)
        try:
            next(thread)
        except StopIteration:
            rank.threads.remove(thread)


def play(seed: int, prepare: Callable[[World], None] = lambda world: None) -> World:
    """One schedule, by its seed; ``prepare`` may put a defect back. An error carries what happened."""
    world = World(seed)
    prepare(world)
    try:
        world.run()
    except Exception as error:
        error.add_note("\n".join([f"seed {seed}", *world.trace[-120:]]))
        raise
    return world
