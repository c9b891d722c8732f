"""A simulated rank: it runs the real protocol, and all that it asks for is a model, small and hostile."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from dcp_datastates.commit import protocol
from dcp_datastates.commit.vote import Decision, Outcome, Reason
from support.simulated_parts import Attempt, Group, Path, Save, Thread

if TYPE_CHECKING:
    from support.simulation import Job

__all__ = ["Rank"]

_PATIENCE = 400
"""Looks in vain after which a rank that waits counts the others as lost (``commit_timeout``)."""


class Rank:
    """One process: its commit thread and, on the coordinator, its planning thread."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job = job
        self.world = job.world
        self.rank = rank
        self.name = f"job{job.first}.{rank}"
        self.killed = False
        self.frozen = 0
        self.is_cut = False
        self.threads: list[Thread] = [self._commit()]
        if rank == 0:
            self.threads.append(self._plan())
        self.renaming: tuple[Path, Attempt] | None = None  # under way in the file system
        # What its beats say, and what it has heard of the others' (by rank).
        self.ended = job.first - 1
        self.done = False
        self.heard: dict[int, int] = {}
        self._expected = job.first
        self._group: Group | None = None
        self._generation = 0
        self._place = 0
        self._unsaid: dict[int, Decision] = {}
        self._waited = 0
        self._older: list[Attempt] = []

    @property
    def over(self) -> bool:
        return self.killed or not self.threads

    @property
    def reaches_store(self) -> bool:
        return self.job.has_store and not self.is_cut

    def _chance(self, probability: float) -> bool:
        return self.world.random.random() < probability

    # ---- planning, on the coordinator -----------------------------------------------------------

    def _plan(self) -> Thread:
        path = self.world.path
        for index in range(self.job.saves):
            number = self.job.first + index
            while self.ended < number - 2:  # no more than two in flight
                yield
            while True:
                yield from self._storage()
                seen = path.signature
                newest = max([*path.present(), path.named or 0]) if path.files or path.named else 0
                yield from self._storage()
                attempt = self.world.next_attempt(self.job, newest)
                yield from self._storage()
                if attempt in path.files:
                    continue
                path.files[attempt] = set()  # with its slot, at once
                path.slots.add(attempt)
                yield from self._storage()
                if not self.world.looks_again or path.present()[-1:] == [attempt]:
                    break
                self.world.remove(attempt)
            self.job.tickets[number] = Save(number, attempt, seen)

    # ---- the commit thread ----------------------------------------------------------------------

    def _commit(self) -> Thread:
        for index in range(self.job.saves):
            number = self.job.first + index
            self._waited = 0
            while number not in self.job.tickets:
                yield
                self._hear()
                self._waited += 1
                if self.job.ranks[0].killed or self._waited > 4 * _PATIENCE:
                    return  # planning fails without the coordinator
            save = self.job.tickets[number]
            if self.rank and self._chance(0.05):
                continue  # its planning failed: it hears of the save only by the next
            while self._expected < number:
                yield from self._round(Save(self._expected, -1, 0), Reason("X", "no such save"))
            assert save is not None
            yield from self._round(save, None)
        self.done = True

    def _round(self, save: Save, failed: Reason | None) -> Thread:
        self._expected = save.number + 1
        steps = protocol.follow() if self.rank else protocol.lead()
        action = next(steps)
        try:
            while True:
                self._waited = 0
                if isinstance(action, protocol.MAY_RAISE) and self._chance(self.world.defects):
                    self.world.log(self, f"a defect in {action}")
                    action = steps.throw(OSError("a defect"))
                    continue
                self.world.log(self, f"{save.number}: {action}")
                event = yield from self._do(action, save, failed)
                self.world.log(self, f"{save.number}:   {event}")
                action = steps.send(event)
        except StopIteration as ended:
            decision: Decision = ended.value
        yield
        self.world.told(self, save, decision.outcome)
        self.ended = save.number
        yield from self._tidy(save, decision)

    def _do(
        self, action: protocol.Action, save: Save, failed: Reason | None
    ) -> Generator[None, None, protocol.Event]:
        yield
        match action:
            case protocol.AwaitFiles():
                return (yield from self._write(save, failed))
            case protocol.Meet():
                return (yield from self._meet(save))
            case protocol.Vote(ok):
                vote = (0 if ok else 1, save.attempt, -save.attempt, save.number, -save.number)
                found = yield from self._operate("vote", vote, save)
                if isinstance(found, protocol.Event):
                    return found
                no, attempt, negated, number, unnumber = found
                return protocol.Counted(not no and attempt == -negated and number == -unnumber)
            case protocol.Tell(decision):
                found = yield from self._operate("tell", (save.number, decision), save)
                return found if isinstance(found, protocol.Event) else protocol.Done()
            case protocol.Hear():
                found = yield from self._operate("hear", (), save)
                if isinstance(found, protocol.Event):
                    return found
                number, decision = found
                return protocol.Told(decision if number == save.number else None)
            case protocol.Publish():
                return (yield from self._publish(save))
            case protocol.Settle():
                return (yield from self._settle(save))
            case protocol.Leave():
                self._leave()
                return protocol.Done()
        return self._ask_store(action, save)

    def _ask_store(self, action: protocol.Action, save: Save) -> protocol.Event:
        store = self.job.store
        if isinstance(action, protocol.Note):
            self._unsaid[save.number] = action.decision
        if not self.reaches_store:
            return (
                protocol.Collected({})
                if isinstance(action, protocol.Collect)
                else protocol.Said(None)
            )
        match action:
            case protocol.Note():
                self._flush()
            case protocol.Explain(reason):
                store[f"reason/{save.number}/{self.rank}"] = reason
            case protocol.Collect():
                reasons = {
                    rank: reason
                    for rank in range(len(self.job.ranks))
                    if isinstance(reason := store.get(f"reason/{save.number}/{rank}"), Reason)
                }
                return protocol.Collected(reasons)
            case protocol.Look():
                return protocol.Said(self._find(save))
        return protocol.Done()

    def _find(self, save: Save) -> Decision | None:
        found = self.job.store.get(f"decision/{save.number}")
        assert found is None or isinstance(found, Decision)
        return found

    def _flush(self) -> None:
        for number, decision in self._unsaid.items():
            self.job.store[f"decision/{number}"] = decision
        self._unsaid.clear()

    # ---- waiting --------------------------------------------------------------------------------

    def _hear(self) -> None:
        """Now and then, the others' newest beats come."""
        if self.reaches_store and self._chance(0.3):
            for other in self.job.ranks if self.rank == 0 else self.job.ranks[:1]:
                if other is not self and other.reaches_store:
                    self.heard[other.rank] = other.ended

    def _interruption(
        self, save: Save, *, joining: bool = False, telling: bool = False
    ) -> protocol.Event | None:
        self._hear()
        self._waited += 1
        said = None
        if self.rank and self.heard.get(0, -1) >= save.number and self.reaches_store:
            said = protocol.Said(self._find(save))
        lost = protocol.Lost(Reason("RankLostError", "")) if self._misses() else None
        ended = [rank for rank, number in self.heard.items() if number >= save.number]
        return protocol.interruption(
            [] if self.rank else ended,
            said,
            lost,
            waits_in_vain=joining or self._chance(0.01),
            telling=telling,
        )

    def _misses(self) -> bool:
        """Whether ranks count as lost: rightly, wrongly, or because nothing has come of waiting."""
        if self._waited > _PATIENCE or self._chance(self.world.false_losses):
            return True
        watched = self.job.ranks[1:] if self.rank == 0 else self.job.ranks[:1]
        gone = any(other.killed or other.is_cut or other.frozen > 20 for other in watched)
        return (gone or not self.reaches_store) and self._chance(0.05)

    # ---- gloo -----------------------------------------------------------------------------------

    def _meet(self, save: Save) -> Generator[None, None, protocol.Event]:
        if self._group is not None:
            return protocol.Done()
        job = self.job
        connecting: int | None = None
        while True:
            yield
            if not self.reaches_store:
                event = self._interruption(save, joining=True)
                return event or protocol.Broke()
            if self.rank == 0:
                self._flush()
            if connecting is None:
                self._generation = max(self._generation, job.generation)
                ready = job.ready.setdefault(self._generation, set())
                ready.add(self.rank)
                if len(ready) == len(job.ranks):
                    connecting = self._generation
                    group = job.groups.setdefault(connecting, Group(len(job.ranks)))
                    group.begin(0, self.rank, "vote", ())  # it connects
            elif len(group.operations[0]) == len(job.ranks):
                group.operations[0] = dict.fromkeys(range(len(job.ranks)), ("vote", ()))
                self._group, self._place = group, 1
                if self.rank == 0:
                    return protocol.Done()
                found = self._find(save)
                return protocol.Done() if found is None else protocol.Said(found)
            elif self._chance(0.01) or job.generation > connecting:
                self._leave()
                return protocol.Broke()
            if (event := self._interruption(save, joining=True)) is not None:
                self._leave()
                return event

    def _leave(self) -> None:
        if self._group is not None:
            self._group.gone.add(self.rank)
            self._group = None
        self._generation += 1
        if self.reaches_store:
            self.job.generation = max(self.job.generation, self._generation)

    def _operate(
        self, kind: str, value: tuple[Any, ...], save: Save
    ) -> Generator[None, None, tuple[Any, ...] | protocol.Event]:
        group = self._group
        if group is None:
            return protocol.Broke()
        place, self._place = self._place, self._place + 1
        group.begin(place, self.rank, kind, value)
        while True:
            yield
            found = group.result(place, self.rank)
            left = group.gone or self.job.generation > self._generation
            dead = any(rank.killed for rank in self.job.ranks)
            apart = any(rank.is_cut for rank in self.job.ranks)
            if found is not None and not apart and self._chance(0.5):
                return found
            if (left or dead) and self._chance(0.3):
                return protocol.Broke()
            if self._chance(self.world.breaks):
                return protocol.Broke()
            event = self._interruption(save, telling=kind == "tell")
            if event is not None:
                return event

    # ---- storage --------------------------------------------------------------------------------

    def _storage(self) -> Thread:
        """A call of storage's, which may take its time."""
        if self._chance(self.world.stalls):
            self.frozen = self.world.random.randrange(300)
        yield

    def _write(self, save: Save, failed: Reason | None) -> Generator[None, None, protocol.Event]:
        path = self.world.path
        if failed is None:
            for _ in range(self.world.random.randrange(4)):
                yield
                if (event := self._interruption(save)) is not None:
                    return event
            if self._chance(0.04) or save.attempt not in path.files:
                failed = Reason("StorageError", "disk full")
            else:
                path.files[save.attempt].add(self.rank)
        yield
        self._older = [attempt for attempt in path.present() if attempt < save.attempt]
        return protocol.Written(failed)

    def _publish(self, save: Save) -> Generator[None, None, protocol.Event]:
        world = self.world
        failed = protocol.Decided(Decision(Outcome.FAILED, {0: Reason("StorageError", "")}))
        for _ in range(world.random.randrange(3)):  # DCP gathers the results
            yield
            if (event := self._interruption(save)) is not None:
                return event
        if self._chance(0.02):
            return failed
        while not world.lock(self):
            yield
        try:
            return (yield from self._publish_locked(save, failed))
        finally:
            world.holders.remove(self)

    def _publish_locked(
        self, save: Save, failed: protocol.Decided
    ) -> Generator[None, None, protocol.Event]:
        path, world = self.world.path, self.world
        if world.withdraws_older:
            for older in path.present():
                if older < save.attempt:
                    yield from self._storage()
                    path.slots.discard(older)
        yield from self._storage()
        if path.signature != save.seen and path.signature not in world.published_by(self.job):
            return failed
        yield from self._storage()
        if save.attempt not in path.slots:
            return failed
        self.renaming = path, save.attempt
        yield from self._storage()  # storage may hold it up, and the process may die meanwhile
        landed = world.rename(self)
        ours = path.signature
        if self._chance(0.03):  # storage says that it failed, whatever it did
            yield from self._storage()
            if world.withdraws_on_error:
                path.slots.discard(save.attempt)
                yield from self._storage()
                if path.signature != ours:
                    return protocol.Decided(Decision(Outcome.UNKNOWN, {}))
            else:
                landed = False
        if not landed:
            return failed
        yield from self._storage()
        if self._chance(0.01):  # it could not be made durable
            world.storage_failed.add(save.attempt)
            return protocol.Decided(Decision(Outcome.UNKNOWN, {}))
        return protocol.Decided(Decision(Outcome.COMMITTED))

    def _settle(self, save: Save) -> Generator[None, None, protocol.Event]:
        path = self.world.path
        for _ in range(self.world.random.randrange(3)):
            yield from self._storage()
        if self._chance(0.02):
            self.world.storage_failed.add(save.attempt)
            return protocol.Decided(Decision(Outcome.UNKNOWN, {}))
        if self.world.guesses:
            return protocol.Decided(Decision(Outcome.FAILED, {}))
        if self.world.withdraws_when_settling:
            path.slots.discard(save.attempt)
        yield from self._storage()
        if path.named == save.attempt:
            return protocol.Decided(Decision(Outcome.COMMITTED))
        newer = path.named is not None and path.named > save.attempt
        yield from self._storage()
        deleted = save.attempt in path.deleting or save.attempt not in path.files
        outcome = Outcome.UNKNOWN if newer or deleted else Outcome.FAILED
        return protocol.Decided(Decision(outcome, {}))

    def _tidy(self, save: Save, decision: Decision) -> Thread:
        path = self.world.path
        yield from self._storage()
        if decision.outcome is Outcome.COMMITTED:
            older = self._older
            if self.world.tidies_by_a_later_look:
                older = [attempt for attempt in path.present() if attempt < save.attempt]
            for attempt in older:
                yield from self._storage()
                self.world.remove(attempt, self.rank)
        elif decision.outcome is Outcome.FAILED and save.attempt >= 0:
            yield
            if self.rank == 0:
                path.slots.discard(save.attempt)
                yield
            self.world.remove(save.attempt, self.rank)
