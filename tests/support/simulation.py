"""A simulated world for the commit protocol: ranks, their store, gloo, storage, heartbeats, and a seeded scheduler.

The ranks run the real ``commit/protocol.py``. All else is a model, small and hostile: any step of a process may be its
last, or come late; storage may hold a rename up and carry it out after its caller died; connections break, networks are
cut, stores end, ranks take others for lost that are not. After each step, :meth:`World.check` says what must hold.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from dcp_datastates.commit.vote import Outcome
from support.simulated_parts import Attempt, Broken, Group, Path, Save, Thread
from support.simulated_rank import Rank

__all__ = ["Broken", "Job", "World"]

_JOBS = 10
"""At most, in one world."""


class Job:
    """A set of ranks with a store of its own."""

    def __init__(self, world: World, ranks: int, saves: int, first: int, clock: int) -> None:
        self.world = world
        self.saves = saves
        self.first = first
        self.clock = clock
        self.store: dict[str, object] = {}
        self.has_store = True
        self.generation = 0
        self.ready: dict[int, set[int]] = {}
        self.groups: dict[int, Group] = {}
        self.tickets: dict[int, Save | None] = {}
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
        self.deletes = self.random.choice([0.0, 0.003])

        self.looks_again = True
        self.withdraws_older = True
        self.withdraws_on_error = True
        self.withdraws_when_settling = True
        self.tidies_by_a_later_look = False
        self.orders_by_clocks = False
        self.marks_deletions = True
        self.guesses = False
        self.keeps_one_store = False

        self.path = Path()
        self.jobs: list[Job] = []
        self.outcomes: dict[Attempt, set[Outcome]] = {}
        self.published: list[Attempt] = []
        self.storage_failed: set[Attempt] = set()
        self.deleted: set[Attempt] = set()
        self.zombies: list[tuple[Path, Attempt]] = []
        self.holders: list[
            Rank
        ] = []  # of the path's lock, which keeps publications and deletions apart
        self.deleting: Thread | None = None
        self.trace: list[str] = []
        self.counts = dict.fromkeys(Outcome, 0)
        self._owner: dict[Attempt, Job] = {}
        self._signatures: dict[int, Attempt] = {}

    def start_job(self) -> Job:
        first = 0 if self.keeps_one_store else 100 * len(self.jobs)
        ranks, saves = self.random.choice([2, 2, 3, 4]), self.random.randrange(1, 4)
        job = Job(self, ranks, saves, first, clock=self.random.randrange(1, 1000))
        if self.keeps_one_store and self.jobs:
            job.store = self.jobs[0].store
        self.jobs.append(job)
        return job

    def log(self, rank: Rank | None, text: str) -> None:
        self.trace.append(f"{rank.name if rank else 'world'}: {text}")

    def next_attempt(self, job: Job, newest: Attempt) -> Attempt:
        """Newer than ``newest``, and no other job's."""
        job.clock += 1
        if not self.orders_by_clocks:
            job.clock = max(job.clock, newest // _JOBS + 1)
        attempt = _JOBS * job.clock + self.jobs.index(job)
        self._owner[attempt] = job
        return attempt

    def lock(self, rank: Rank) -> bool:
        """Whether ``rank`` may publish: no deletion is under way. Publications are not kept apart."""
        if self.deleting is not None:
            return False
        self.holders.append(rank)
        return True

    def _delete(self) -> Thread:
        """A user deletes the checkpoint, and all attempts that he finds there."""
        path = self.path
        found = path.present()
        self.log(None, f"{found} are deleted")
        path.slots.difference_update(found)
        yield
        self.deleted.update(found)
        if path.named in found:
            if self.marks_deletions:
                path.deleting.add(path.named)
                yield
            path.named = None
            path.signature += 1
        for attempt in found:
            yield
            self.remove(attempt)

    def published_by(self, job: Job) -> set[int]:
        return {
            signature
            for signature, attempt in self._signatures.items()
            if self._owner[attempt] is job
        }

    def rename(self, rank: Rank) -> bool:
        """The rename takes place; False if the slot is gone."""
        assert rank.renaming is not None
        path, attempt = rank.renaming
        rank.renaming = None
        return self._land(path, attempt)

    def _land(self, path: Path, attempt: Attempt) -> bool:
        if attempt not in path.slots:
            return False
        self.log(None, f"{attempt} is published")
        path.slots.discard(attempt)
        if path.named is not None and attempt < path.named:
            raise Broken(f"latest went back from {path.named} to {attempt}")
        path.named = attempt
        path.signature += 1
        self._signatures[path.signature] = attempt
        self.published.append(attempt)
        return True

    def remove(self, attempt: Attempt, rank: int | None = None) -> None:
        """Remove an attempt's files: those of one rank, or all. Ranks of a smaller world remove more."""
        files = self.path.files.get(attempt)
        if files is None:
            return
        if rank is None:
            files.clear()
        else:
            files.discard(rank)
        if not files and attempt not in self.path.slots:
            del self.path.files[attempt]
        elif rank is None:
            self.path.slots.discard(attempt)
            del self.path.files[attempt]

    def told(self, rank: Rank, save: Save, outcome: Outcome) -> None:
        """A rank's user is told an outcome."""
        self.log(rank, f"{save.number} ({save.attempt}): {outcome.value}")
        if save.attempt < 0:
            if outcome is not Outcome.FAILED:
                raise Broken(f"{rank.name} has no such save, and was told {outcome}")
            return
        self.counts[outcome] += 1
        if outcome is Outcome.UNKNOWN:
            newer = any(other > save.attempt for other in self.published)
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
        named = self.path.named
        if named is not None:
            ranks = len(self._owner[named].ranks)
            if self.path.files.get(named, set()) != set(range(ranks)):
                raise Broken(
                    f"{named} is named, and of its files only {self.path.files.get(named)} are there"
                )

    def run(self, jobs: int = 3, steps: int = 60_000) -> None:
        """Play the schedule. Raises :class:`Broken`."""
        for _ in range(self.random.choice([1, 1, 2])):
            self.start_job()
        for step in range(steps):
            if len(self.jobs) < jobs and (self.jobs[-1].over or self._is(0.0005)):
                self.start_job()
            calm = step > 3000
            ranks = [rank for job in self.jobs for rank in job.ranks if not rank.over]
            if not ranks:
                break
            rank = self.random.choice(ranks)
            if calm:
                rank.frozen = 0
                self._calm()
            elif not self._disturb(rank):
                continue
            self._step(rank)
            self.check()
        else:
            raise Broken(f"these have not ended: {[rank.name for rank in ranks]}")
        for path, attempt in self.zombies:
            self._land(path, attempt)
            self.check()

    def _is(self, probability: float) -> bool:
        return self.random.random() < probability

    def _calm(self) -> None:
        self.breaks = self.false_losses = self.defects = self.stalls = 0.0
        while self.deleting is not None:
            self._go_on_deleting()

    def _go_on_deleting(self) -> None:
        assert self.deleting is not None
        try:
            next(self.deleting)
        except StopIteration:
            self.deleting = None

    def _disturb(self, rank: Rank) -> bool:
        """Whether the rank may take its step all the same."""
        if self.deleting is not None:
            if self._is(0.2):
                self._go_on_deleting()
        elif self._is(self.deletes) and not any(not holder.over for holder in self.holders):
            self.deleting = self._delete()
        if self.zombies and self._is(0.01):
            self._land(*self.zombies.pop())
        if rank.frozen:
            rank.frozen -= 1
            return False
        if self._is(self.kills) or (rank.renaming and self._is(10 * self.kills)):
            self.log(rank, "killed")
            rank.killed = True
            if rank.renaming is not None:
                self.zombies.append(rank.renaming)
            return False
        if self._is(self.freezes):
            rank.frozen = self.random.randrange(200)
            return False
        if self._is(self.cuts):
            self.log(rank, "cut" if not rank.is_cut else "back")
            rank.is_cut = not rank.is_cut
        if self._is(self.store_ends):
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
