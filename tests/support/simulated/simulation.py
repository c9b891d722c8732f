"""A simulated world for the commit protocol: ranks, their store, gloo, storage, heartbeats, and a seeded scheduler.

The ranks run the real ``commit/protocol.py``. All else is a model, small and hostile: any step of a process may be its
last, or come late; storage may hold a request up and carry it out after its caller died; connections break, networks
are cut, stores end, jobs restart on one store, ranks take others for lost that are not, another job replaces a save.
After each step, :meth:`World.check` says what must hold; at the end, a job that nothing disturbs must commit.

Of storage the model has what the protocol builds on: of several requests that create an attempt's decision, the first
one counts. That the package keeps this in a directory and in an object store, ``store_world.py`` shows with its code.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator

from dcp_datastates.commit.vote import Decision, Outcome, Reason
from support.simulated.simulated_rank import Broken, Rank, Save, Thread, Tree

Steps = Generator[None, None, Decision]
COMMITTED, WITHDRAWN, DELETED = "committed", "withdrawn", "deleted"


class _Doubt(Exception):
    """Storage reports an error. The request may have been carried out, or may yet be."""


class Job:
    """A set of ranks; a job that restarts has the store of the one before."""

    def __init__(
        self, world: World, name: int, ranks: int, saves: int, store: dict[str, object]
    ) -> None:
        self.world = world
        self.name = name
        self.size = ranks
        self.saves = saves
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
    """All of it. The first attributes say how hostile it is; ``defect`` is one of ``test_simulation.DEFECTS``.

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
        self.replaces = self.random.choice([0.0, 0.0, 0.003])
        self.hangs = self.random.choice([0.0, 0.0, 0.02])
        self.restarts = self.random.choice([0.0, 0.5, 1.0])
        self.faults = 1.0

        self.defect = ""

        self.jobs: list[Job] = []
        self.saves: list[Save] = []
        self.outcomes: dict[int, set[Outcome]] = {}
        self.published: set[int] = set()
        self.late: list[tuple[Thread, bool]] = []
        """Calls into storage that their callers do not wait for, and whether nothing comes after them."""
        self.trace: list[str] = []
        self.counts = dict.fromkeys(Outcome, 0)

    def start_job(self) -> Job:
        ranks, saves = self.random.choice([2, 2, 3, 4, 6]), self.random.randrange(1, 4)
        before = self.jobs[-1].store if self.jobs and self.happens(self.restarts) else {}
        job = Job(self, len(self.jobs), ranks, saves, before)
        self.jobs.append(job)
        return job

    def log(self, rank: Rank | None, text: str) -> None:
        self.trace.append(f"{rank.name if rank else 'world'}: {text}")

    # ---- storage ------------------------------------------------------------------------------------
    #
    # At each ``yield`` storage may take its time, the process may die, and the request behind it may be carried out all
    # the same.

    def claim(self, number: int, ranks: int) -> Generator[None, None, Save]:
        yield
        save = Save(number, len(self.saves), ranks)
        self.saves.append(save)
        yield
        return save

    def publish(self, save: Save) -> Steps:
        yield
        try:
            if self._create(save, COMMITTED):
                return _decided(Outcome.COMMITTED)
        except _Doubt:
            pass
        if self.defect == "believes the reply to a commit":
            return _decided(Outcome.FAILED)
        return (yield from self._withdraw(save))

    def settle(self, save: Save) -> Steps:
        for _ in range(self.random.randrange(3)):
            yield
        if self.defect == "guesses":
            return _decided(Outcome.FAILED)
        return (yield from self._withdraw(save))

    def _withdraw(self, save: Save) -> Steps:
        """Withdraw the attempt, unless it is decided; what it is then, as far as files tell."""
        yield
        if self.defect != "settles by reading alone":
            try:
                self._create(save, WITHDRAWN)
            except _Doubt:
                yield
                if save.decision is None:
                    save.in_doubt = True
                    return _decided(Outcome.UNKNOWN)
        yield
        if save.decision == COMMITTED:
            return _decided(Outcome.COMMITTED)
        return _decided(Outcome.FAILED if save.files else Outcome.UNKNOWN)

    def _create(self, save: Save, what: str) -> bool:
        """A request that creates the decision; whether it has, as far as its sender is told. It may also come late, be
        carried out twice, or lose its reply.
        """

        def effect() -> bool:
            if save.decision is not None:
                return False
            save.decision = what
            if what == COMMITTED:
                self._committed(save)
            return True

        def later() -> Thread:
            yield
            effect()

        def hold_up() -> None:
            steps = later()
            next(steps)
            self.late.append((steps, True))

        if not self.happens(0.08 * self.faults):
            return effect()
        match self.random.choice(["refused", "lost", "late", "twice", "retried"]):
            case "lost":
                effect()
            case "late":
                hold_up()
            case "twice":
                hold_up()
                return effect()
            case "retried":
                effect()
                return effect()
        raise _Doubt

    def _committed(self, save: Save) -> None:
        self.log(None, f"{save.attempt} is committed")
        if save.files != set(range(save.ranks)):
            raise Broken(f"{save.attempt} is committed, and only {save.files} of its files")
        self.published.add(save.attempt)

    def _replace(self, save: Save) -> None:
        """Another job saves at the same path: it has withdrawn the attempt, or its cleanup removes it."""
        if save.decision is None:
            save.decision = WITHDRAWN
        else:
            save.decision = DELETED
            save.files.clear()
            save.in_doubt = True

    # ---- what must hold -----------------------------------------------------------------------------

    def told(self, rank: Rank, save: Save, outcome: Outcome) -> None:
        """A rank's user is told an outcome."""
        self.log(rank, f"{save.number} ({save.attempt}): {outcome.value}")
        if save.attempt < 0:
            if outcome is not Outcome.FAILED:
                raise Broken(f"{rank.name} has no such save, and was told {outcome}")
            return
        self.counts[outcome] += 1
        if outcome is not Outcome.UNKNOWN:
            self.outcomes.setdefault(save.attempt, set()).add(outcome)
        elif not save.in_doubt:
            raise Broken(f"the outcome of {save.attempt} could be known")

    def check(self) -> None:
        """What must hold at every instant."""
        for attempt, outcomes in self.outcomes.items():
            if len(outcomes) > 1:
                raise Broken(f"ranks were told opposite things of {attempt}")
            if (attempt in self.published) != (Outcome.COMMITTED in outcomes):
                raise Broken(
                    f"{attempt} was told to be {outcomes}, and published: {self.published}"
                )

    # ---- the schedule -------------------------------------------------------------------------------

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
            ranks = [rank for job in self.jobs for rank in job.ranks if not rank.over]
            if not ranks and last is not None:
                break
            if calm := step > 3000 or last is not None or not ranks:
                self._calm()
            if not ranks:
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
        while self.late:
            self._come_late()

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
        if self.saves and self.happens(self.replaces):
            self._replace(self.random.choice(self.saves))
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


def _decided(outcome: Outcome) -> Decision:
    return Decision(outcome, {0: Reason("StorageError", "")})


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
