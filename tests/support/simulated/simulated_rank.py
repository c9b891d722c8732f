"""A simulated rank: it runs the real protocol, and all that it asks for is a model, small and hostile."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections import defaultdict
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dcp_datastates.commit import protocol
from dcp_datastates.commit.vote import Decision, Outcome, Reason
from dcp_datastates.ranks import gloo_tree
from dcp_datastates.ranks.gloo_group import Place
from dcp_datastates.ranks.gloo_tree import places

if TYPE_CHECKING:
    from support.simulated.simulation import Job

Thread = Generator[None, None, None]

_PATIENCE = 400
"""Looks in vain after which a rank that waits counts the others as lost (``commit_timeout``)."""


class Broken(AssertionError):
    """Something that must always hold does not."""


class Hung(Exception):
    """A call into storage is waited for no more."""


@dataclass(eq=False)
class Save:
    """One save of one job, as its coordinator has claimed it, and what storage has of it."""

    number: int
    attempt: int
    ranks: int = 0
    files: set[int] = field(default_factory=set)
    """The ranks whose files are there."""
    decision: str | None = None
    in_doubt: bool = False
    """Its outcome need not be known: storage has failed, or it was replaced."""


class Tree:
    """Connections between all ranks of a job: the k-th operation of each member of a group meets the k-th of the
    others.
    """

    def __init__(self) -> None:
        self.connected: set[int] = set()
        self.gone: set[int] = set()
        self._operations: dict[tuple[str, int], dict[int, tuple[str, Any]]] = {}

    def begin(self, place: Place, at: int, kind: str, value: Any) -> None:
        given = self._operations.setdefault((place.name, at), {})
        given[place.rank] = kind, value
        if len({kind for kind, _ in given.values()}) > 1:
            raise Broken(f"operations that do not belong together met: {given}")

    def result(self, place: Place, at: int) -> Any:
        """What it gives to this member; None as long as it gives nothing."""
        given = self._operations[place.name, at]
        kind, mine = given[place.rank]
        if kind != "gather":  # the group's first rank waits for no other, and each other for it
            return given[0][1] if 0 in given else None
        if place.rank:
            return mine
        if len(given) < place.size:
            return None
        return tuple(
            max(column) for column in zip(*(each for _, each in given.values()), strict=True)
        )


class Rank:
    """One process: its commit thread and, on the coordinator, its planning thread."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job = job
        self.world = job.world
        self.rank = rank
        self.name = f"job{job.name}.{rank}"
        self.killed = False
        self.frozen = 0
        self.is_cut = False
        self.threads: list[Thread] = [self._commit()]
        if rank == 0:
            self.threads += [self._plan(), self._admit()]
        # What its beats say, and what it has heard of the others' (by rank).
        self.ended = -1
        self.heard: dict[int, int] = {}
        self._incarnation: str | None = None
        self._expected = 0
        self._tree: Tree | None = None
        self._places: list[Place] = list(places(rank, job.size))
        self._at: dict[str, int] = defaultdict(int)
        self._generation = 0
        self._unsaid: dict[int, Decision] = {}
        self._waited = 0
        self._done = False
        self._calling: Thread | None = None  # a call into storage that is under way

    def die(self) -> None:
        """The process is killed. A call into storage may yet be carried out."""
        self.killed = True
        if self._calling is not None:
            self.world.late.append((self._calling, True))

    @property
    def over(self) -> bool:
        return self.killed or not self.threads

    @property
    def reaches_store(self) -> bool:
        return self.job.has_store and not self.is_cut

    def _chance(self, probability: float) -> bool:
        return self.world.happens(probability)

    # ---- which job the store's keys belong to (ranks/incarnation.py) ---------------------------

    def _meet_job(self) -> Generator[None, None, bool]:
        """Whether this rank has learnt the incarnation of its job."""
        store, nonce = self.job.store, object()
        believes_all = self.world.defect == "believes what a former job left in the store"
        for _ in range(4 * _PATIENCE):
            yield
            if not self.reaches_store:
                continue
            if self.rank == 0:
                self._incarnation = f"job{self.job.name}"
                store["leader"] = self._incarnation
                return True
            leader = store.get("leader")
            if leader is None:
                continue
            store.setdefault(f"{leader}/asks/{self.rank}", nonce)
            if believes_all or store.get(f"{leader}/admitted/{self.rank}") is nonce:
                self._incarnation = str(leader)
                # A rank that is admitted to a job that came after its own takes part there; here it ends.
                return believes_all or leader == f"job{self.job.name}"
        return False

    def _admit(self) -> Thread:
        """Rank 0: write the nonces back."""
        store, waiting = self.job.store, set(range(1, self.job.size))
        for _ in range(4 * _PATIENCE):
            yield
            mine = self._incarnation
            if mine is None or not self.reaches_store or store.get("leader") != mine:
                continue
            for rank in sorted(waiting):
                if (nonce := store.get(f"{mine}/asks/{rank}")) is not None:
                    store[f"{mine}/admitted/{rank}"] = nonce
                    waiting.discard(rank)
            if not waiting:
                return

    def _key(self, key: str) -> str:
        return f"{self._incarnation}/{key}"

    # ---- planning, on the coordinator -----------------------------------------------------------

    def _plan(self) -> Thread:
        for number in range(self.job.saves):
            while self.ended < number - 2:  # no more than two in flight
                yield
                if self._done:
                    return
            while number not in self.job.tickets:
                with contextlib.suppress(Hung):  # the next call saves again
                    claim = self.world.claim(number, self.job.size)
                    self.job.tickets[number] = yield from self._slowly(claim)

    # ---- the commit thread ----------------------------------------------------------------------

    def _commit(self) -> Thread:
        if (yield from self._meet_job()):
            yield from self._rounds()
        self._done = True

    def _rounds(self) -> Thread:
        for number in range(self.job.saves):
            self._waited = 0
            while number not in self.job.tickets:
                yield
                self._hear_beats()
                self._waited += 1
                if self.job.ranks[0].killed or self._waited > 4 * _PATIENCE:
                    return  # planning fails without the coordinator
            if self.rank and self._chance(0.05 * self.world.faults):
                continue  # its planning failed: it hears of the save only by the next
            while self._expected < number:
                yield from self._round(Save(self._expected, -1))
            yield from self._round(self.job.tickets[number])

    def _round(self, save: Save) -> Thread:
        self._expected = save.number + 1
        steps = protocol.follow if self.rank else protocol.lead
        decision: Decision = yield from steps(_Actions(self, save)).__await__()
        yield
        self.world.told(self, save, decision.outcome)
        self.ended = save.number
        if decision.outcome is Outcome.FAILED:
            yield from self._slowly(self._tidy(save), abandons=False)

    # ---- the actions: those that wait for others; in the store; in storage -----------------------

    def _vote(self, save: Save, why: Reason | None) -> Generator[None, None, Decision | None]:
        vote = (0 if why is None else 1, save.attempt, -save.attempt, save.number, -save.number)
        no, attempt, negated, number, unnumber = yield from self._collective("voted", vote, save)
        unanimous = not no and attempt == -negated and number == -unnumber
        return None if unanimous else Decision(Outcome.FAILED)

    def _tell(self, save: Save, decision: Decision) -> Thread:
        told = (save.number, decision)
        return self._collective("decision", told, save, telling=True)

    def _hear(self, save: Save) -> Generator[None, None, Decision | None]:
        number, decision = yield from self._collective("decision", None, save)
        return decision if number == save.number else None

    def _note(self, save: Save, decision: Decision) -> None:
        self._unsaid[save.number] = decision
        self._flush()

    def _give_up(self, save: Save, why: Reason) -> None:
        """Its beat says that it has ended the round."""

    def _settle(self, save: Save, why: Reason) -> Generator[None, None, Decision]:
        try:
            decision: Decision = yield from self._slowly(self.world.settle(save))
            return decision
        except Hung:
            save.in_doubt = True
            return Decision(Outcome.UNKNOWN)

    def _look(self, save: Save) -> Decision | None:
        if not self.reaches_store:
            return None
        found = self.job.store.get(self._key(f"decision/{save.number}"))
        assert found is None or isinstance(found, Decision)
        return found

    def _flush(self) -> None:
        if not self.reaches_store:
            return
        for number, decision in self._unsaid.items():
            self.job.store[self._key(f"decision/{number}")] = decision
        self._unsaid.clear()

    # ---- waiting --------------------------------------------------------------------------------

    def _hear_beats(self) -> None:
        """Now and then, the others' newest beats come."""
        if self.reaches_store and self._chance(0.3):
            self.job.store[self._key(f"beat/{self.rank}")] = self.ended
            for other in range(len(self.job.ranks)) if self.rank == 0 else (0,):
                beat = self.job.store.get(self._key(f"beat/{other}"))
                if other != self.rank and isinstance(beat, int):
                    self.heard[other] = beat

    def _await(self, save: Save, *, joining: bool = False, telling: bool = False) -> None:
        self._hear_beats()
        self._waited += 1
        found = None
        if self.rank and self.heard.get(0, -1) >= save.number and self.reaches_store:
            found = protocol.DecisionFound(self._look(save))
        lost = protocol.Lost(Reason("RankLostError", "")) if self._misses() else None
        ended = {rank: "" for rank, number in self.heard.items() if number >= save.number}
        in_vain = joining or self._chance(0.01)
        event = protocol.interruption(
            {} if self.rank else ended, found, lost, waits_in_vain=in_vain, telling=telling
        )
        if event is not None:
            raise event

    def _misses(self) -> bool:
        """Whether ranks count as lost: rightly, wrongly, or because nothing has come of waiting."""
        if self._waited > _PATIENCE or self._chance(self.world.false_losses):
            return True
        watched = self.job.ranks[1:] if self.rank == 0 else self.job.ranks[:1]
        gone = any(other.killed or other.is_cut or other.frozen > 20 for other in watched)
        return (gone or not self.reaches_store) and self._chance(0.05)

    # ---- gloo: the groups of the real tree --------------------------------------------------------

    def _meet(self, save: Save) -> Thread:
        if self._tree is not None:
            return
        job = self.job
        connecting: Tree | None = None
        while True:
            yield
            if not self.reaches_store:
                self._await(save, joining=True)
                raise protocol.Broke
            if self.rank == 0:
                self._flush()
            if connecting is None:
                self._generation = max(self._generation, job.generation)
                ready = job.ready.setdefault(self._generation, set())
                ready.add(self.rank)
                if len(ready) == len(job.ranks):
                    connecting = job.trees.setdefault(self._generation, Tree())
                    connecting.connected.add(self.rank)
            elif len(connecting.connected) == len(job.ranks):
                self._tree = connecting
                self._at.clear()
                found = self._look(save) if self.rank else None
                if found is not None:
                    raise protocol.DecisionFound(found)
                return
            try:
                if connecting and (self._chance(0.01) or job.generation > self._generation):
                    raise protocol.Broke
                self._await(save, joining=True)
            except protocol.Interruption:
                self._go_on()
                raise

    def _leave(self, save: Save) -> None:
        if self._tree is not None:
            self._tree.gone.add(self.rank)
            self._tree = None
            self._go_on()

    def _go_on(self) -> None:
        """To the next generation."""
        self._generation += 1
        if self.reaches_store:
            self.job.generation = max(self.job.generation, self._generation)

    def _collective(
        self, kind: str, value: Any, save: Save, *, telling: bool = False
    ) -> Generator[None, None, Any]:
        """As ``GlooTree`` does it: votes go up the tree, and what they come to goes down."""
        for place in self._places if kind == "voted" else ():
            value = yield from self._in_group(place, "gather", value, save, telling)
        for place in reversed(self._places):
            value = yield from self._in_group(place, kind, value, save, telling)
        return value

    def _in_group(
        self, place: Place, kind: str, value: Any, save: Save, telling: bool
    ) -> Generator[None, None, Any]:
        tree = self._tree
        if tree is None:
            raise protocol.Broke
        at, self._at[place.name] = self._at[place.name], self._at[place.name] + 1
        tree.begin(place, at, kind, value)
        span = gloo_tree._WIDTH ** int(place.name.partition(".")[0])  # of each member
        near = [self.rank + (member - place.rank) * span for member in range(place.size)]
        while True:
            yield
            found = tree.result(place, at)
            apart = any(self.job.ranks[rank].is_cut for rank in near)
            if found is not None and not apart and self._chance(0.5):
                return found
            left = tree.gone.intersection(near) or self.job.generation > self._generation
            dead = any(self.job.ranks[rank].killed for rank in near)
            if (left or dead) and self._chance(0.3):
                raise protocol.Broke
            if self._chance(self.world.breaks):
                raise protocol.Broke
            self._await(save, telling=telling)

    # ---- storage --------------------------------------------------------------------------------

    def _slowly(
        self, steps: Generator[None, None, Any], *, abandons: bool = True
    ) -> Generator[None, None, Any]:
        """Make the calls into storage, each of which may take its time, or hang: then this rank goes on without it
        (``storage/bounded.py``). ``abandons``: whether the calls behind it are not made then.
        """
        try:
            while True:
                next(steps)  # up to the next call
                if self._chance(self.world.stalls):
                    self.frozen = self.world.random.randrange(300)
                self._calling = steps
                yield
                if self._chance(self.world.hangs):
                    self.world.log(self, "a call into storage hangs")
                    self.world.late.append((steps, abandons))
                    if abandons:
                        raise Hung
                    return None
                self._calling = None
        except StopIteration as ended:
            self._calling = None
            return ended.value

    def _await_files(self, save: Save) -> Generator[None, None, Reason | None]:
        failed = Reason("X", "no such save") if save.attempt < 0 else None
        if failed is None:
            for _ in range(self.world.random.randrange(4)):
                yield
                self._await(save)
            if self._chance(0.04 * self.world.faults):
                failed = Reason("StorageError", "disk full")
            else:
                save.files.add(self.rank)
        yield
        return failed

    def _tidy(self, save: Save) -> Thread:
        yield
        save.files.discard(self.rank)

    def _publish(self, save: Save) -> Generator[None, None, Decision]:
        failed = Decision(Outcome.FAILED, {0: Reason("StorageError", "")})
        for _ in range(self.world.random.randrange(3)):  # it makes the metadata
            yield
        if self._chance(0.02 * self.world.faults):
            return failed
        try:
            decision: Decision = yield from self._slowly(self.world.publish(save))
        except Hung:
            if self.world.defect == "takes a publication that hangs for failed":
                return failed
            raise
        return decision


_MAY_FAIL = {"await_files", "meet", "vote", "publish", "tell", "hear"}


class _Actions:
    """What the protocol awaits of a rank in one round. The rank may be stopped before each action, and those that wait
    may fail because of a defect.
    """

    def __init__(self, rank: Rank, save: Save) -> None:
        self._rank = rank
        self._save = save

    def failed(self, error: Exception) -> None:
        self._log(repr(error))

    def _log(self, what: str) -> None:
        self._rank.world.log(self._rank, f"{self._save.number}: {what}")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        rank, save = self._rank, self._save

        @types.coroutine
        def act(*said: Any) -> Generator[None, None, Any]:
            rank._waited = 0
            self._log(f"{name} {said or ''}")
            if name in _MAY_FAIL and rank._chance(rank.world.defects):
                raise OSError("a defect")
            yield
            result = getattr(rank, f"_{name}")(save, *said)
            if inspect.isgenerator(result):
                result = yield from result
            self._log(f"  {result}")
            return result

        return act
