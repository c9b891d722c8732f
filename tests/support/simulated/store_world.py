"""One root in an object store, or in a directory, as processes that save, settle, delete and read there see it, in a
seeded schedule.

Each request, or file operation, is a step. A process may stop or die before it, and then a request may be carried out
all the same; or it is refused, comes late, is carried out twice, or loses its reply. A file operation fails before or
after it is carried out. What must hold is checked after each step.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dcp_datastates.commit.place import EndedPart, Place, Round
from dcp_datastates.errors import CommitOutcomeUnknown, DataStatesError, StorageError
from dcp_datastates.storage import attempt as attempt_module
from dcp_datastates.storage import attempts, claims, decisions, operations
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.claims import Claim, Neighbours
from dcp_datastates.storage.decisions import State
from dcp_datastates.storage.local_store import LocalStore
from dcp_datastates.storage.object_path import ObjectPath, stored
from dcp_datastates.storage.self_test import what_works
from support.crashes.interleaving import Schedule
from support.simulated.object_stores import Fate, MemoryStore, Request, creates_once, installed

WORLD = 3
FILES = tuple(f"r{rank:05d}-0.safetensors" for rank in range(WORLD))
Key = tuple[str, Attempt]
"""An attempt at a path."""


def metadata(attempt: Attempt) -> bytes:
    return b"\x80" + attempt.name.encode() + b"." * decisions.LONGEST_MARK


@dataclass
class Told:
    """What processes were told of one attempt."""

    committed: bool = False
    failed: bool = False


class World:
    """The store, what has been seen there, and what processes were told."""

    def __init__(
        self,
        monkeypatch: Any,
        seed: int,
        *,
        create_only: bool = True,
        directory: Path | None = None,
    ) -> None:
        self.schedule = Schedule(seed)
        self.random = self.schedule.random
        self.faults = self.random.choice([0.0, 0.02, 0.08])
        self.late: list[Callable[[], object]] = []
        self.directory = directory
        if directory is None:
            self.store = MemoryStore(create_only=create_only)
            self.late = self.store.late
            self.root = installed(monkeypatch, self.store, "run")
            assert creates_once(self.root) == create_only  # tries it here, where nothing interferes
            self.store.on_request = self._on_request
        else:
            self.root = stored(directory)
            what_works(directory)
            monkeypatch.setattr(operations, "hit", self._on_operation)
            for name in ("get", "get_range", "list"):
                monkeypatch.setattr(LocalStore, name, self._pausing(getattr(LocalStore, name)))
        self.paths = [self.root / f"step-{n}" for n in range(self.random.choice([1, 1, 2]))]
        self.working: dict[str, Key] = {}
        """By the name of an actor, the attempt that it works for."""
        self.told: dict[Key, Told] = {}
        self.doubtful: set[Key] = set()
        """A request about it has failed."""
        self.committed: set[Key] = set()
        """Seen to be committed, at any time."""
        self.deleted: set[Key] = set()
        """A process deletes it on purpose, or has done so."""
        self.empty_at: Counter[str] = Counter()
        """By path: how many steps have found nothing committed there."""
        self.counts: Counter[str] = Counter()

    # ---- what becomes of requests ------------------------------------------------------------------

    def _on_request(self, request: Request) -> Fate:
        actor = self.schedule.here
        if actor is None:
            return Fate.DONE
        self.schedule.pause(f"{request.kind} {request.key.removeprefix('run/')}")
        if request.kind == "delete" and request.key.endswith("/decision"):
            # A request that committed an attempt is not carried out once more as late as this.
            self.late[:] = [late for late in self.late if not self._is_about_deleted(late)]
        if self.random.random() >= self.faults:
            return Fate.DONE
        fates = list(Fate) if request.changes else [Fate.REFUSED]
        fate = self.random.choice(fates)
        self.schedule.trace.append(f"{actor.name}:   {fate.value}")
        if fate in (Fate.REFUSED, Fate.LOST, Fate.LATE) and actor.name in self.working:
            self.doubtful.add(self.working[actor.name])
        return fate

    def _is_about_deleted(self, late: Callable[[], object]) -> bool:
        keys = {f"{path}/{attempt.name}/decision" for path, attempt in self.deleted}
        held = [cell.cell_contents for cell in late.__closure__ or ()]
        return any(isinstance(each, str) and each in keys for each in held)

    def _on_operation(self, point: str) -> None:
        actor = self.schedule.here
        if actor is None:
            return
        if point.endswith(".before"):
            self.schedule.pause(point)
        if self.random.random() < self.faults / 4:
            self.schedule.trace.append(f"{actor.name}:   {point} fails")
            if actor.name in self.working:
                self.doubtful.add(self.working[actor.name])
            raise OSError(errno.EIO, f"failed at {point}")

    def _pausing(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def paused(store: LocalStore, key: str, *more: Any) -> Any:
            self.schedule.pause(f"{read.__name__} {key}")
            return read(store, key, *more)

        return paused

    def come_late(self) -> None:
        """A request that was held up is carried out."""
        self.late.pop(self.random.randrange(len(self.late)))()

    # ---- what must hold ------------------------------------------------------------------------------

    def decided(self) -> Iterator[tuple[Key, bytes]]:
        for path in [] if self.directory is None else self.paths:
            for file in map(Path, glob.glob(f"{path}/*/decision")):
                attempt = Attempt.parse(file.parent.name)
                if attempt is not None:
                    yield (path.key, attempt), file.read_bytes()
        if self.directory is not None:
            return
        for key, each in self.store.objects.items():
            *path, folder, name = key.split("/")
            attempt = Attempt.parse(folder)
            if name == "decision" and attempt is not None:
                yield ("/".join(path), attempt), each.data

    def committed_now(self) -> set[Key]:
        return {key for key, data in self.decided() if data == metadata(key[1])}

    def there(self, now: set[Key] | None = None) -> dict[str, Attempt]:
        """The newest of what is committed ``now``, by path."""
        return dict(sorted(self.committed_now() if now is None else now))

    def is_whole(self, key: Key) -> bool:
        path, attempt = key
        files = [f"{path}/{attempt.name}/{name}" for name in FILES]
        if self.directory is not None:
            return all(Path(f"/{file}").exists() for file in files)
        return all(file in self.store.objects for file in files)

    def superseded(self, key: Key) -> bool:
        return any(path == key[0] and other > key[1] for path, other in self.committed)

    def tell(self, round_: Round, committed: bool) -> None:
        key = key_of(round_)
        self.counts["committed" if committed else "failed"] += 1
        told = self.told.setdefault(key, Told())
        told.committed |= committed
        told.failed |= not committed
        assert not (told.committed and told.failed), f"told opposite things of {key}"

    def tell_unknown(self, key: Key) -> None:
        self.counts["unknown"] += 1
        known = key not in self.doubtful | self.deleted and not self.superseded(key)
        assert not known, f"the outcome of {key} could be known"

    def check(self) -> None:
        assert self.schedule.here is None
        now = self.committed_now()
        for key in now - self.committed:
            if key not in self.deleted:
                assert self.is_whole(key), f"{key} is committed, and not whole"
        self.committed |= now
        for key, told in self.told.items():
            assert not (told.failed and key in self.committed), (
                f"{key} has failed, and is committed"
            )
            if told.committed:
                assert key in self.committed, f"{key} is not committed, and was told to be"
                if key not in self.deleted and not self.superseded(key):
                    assert key in now, f"{key} was committed, and is gone"
        there = self.there(now)
        for path, newest in there.items():
            assert self.is_whole((path, newest)), f"{newest} is what {path} holds, and not whole"
        for path in map(str, (each.key for each in self.paths)):
            self.empty_at[path] += path not in there


def key_of(round_: Round) -> Key:
    return round_.path.key, round_.attempt


class Job:
    """Ranks: rank 0 saves; the others vote and hear of it, or are cut off and settle what became of it."""

    def __init__(self, world: World, name: str, clock: int, saves: int) -> None:
        self.world = world
        self.saves = saves
        self.current: Round | None = None
        self.votes: dict[int, Attempt] = {}
        self.cut_off: set[int] = set()
        self._clock = clock, 0
        start = world.schedule.start
        self.ranks = [start(f"{name}.0", self._save)]
        for rank in range(1, WORLD):
            self.ranks.append(start(f"{name}.{rank}", lambda rank=rank: self._follow(rank)))

    @property
    def over(self) -> bool:
        return all(rank.gone for rank in self.ranks)

    def next_attempt(self, after: Attempt | None) -> Attempt:
        """The real one, with this process's clock and count."""
        attempt_module._incarnation, attempt_module._sequence = self._clock
        found = attempt_module.next_attempt(after)
        self._clock = attempt_module._incarnation, attempt_module._sequence
        return found

    def _pause(self, what: str) -> None:
        self.world.schedule.pause(what)

    def _work_on(self, rank: int, key: Key) -> None:
        self.world.working[self.ranks[rank].name] = key

    # ---- rank 0 ----------------------------------------------------------------------------------------

    def _save(self) -> None:
        neighbours = Neighbours()
        for number in range(self.saves):
            path = self.world.paths[number % len(self.world.paths)]
            with contextlib.suppress(StorageError):  # it fails before it has a round
                self._save_to(path, neighbours)
            if self.cut_off:
                return

    def _save_to(self, path: ObjectPath, neighbours: Neighbours) -> None:
        world, place = self.world, Place(path)
        could_see = set(world.there().items())
        claim = claims.claim(path, neighbours, overwrite=True)
        for key in could_see - world.deleted:
            assert claim.attempt > key[1], "it does not count as newer"
        round_ = round_of(claim.attempt, path, claim)
        self._work_on(0, key_of(round_))
        for name in FILES:
            file = path / claim.attempt.name / name
            path.store.put(file.key, b"data")
        self.current = round_
        while not self._all_voted(claim.attempt):
            if self.cut_off:
                break
            self._pause("await the votes")
        try:
            if not self._all_voted(claim.attempt):
                raise StorageError(errno.EIO, "a rank is lost")
            place.publish(round_, metadata(claim.attempt))
        except CommitOutcomeUnknown:
            world.tell_unknown(key_of(round_))
        except DataStatesError:
            world.tell(round_, False)
            place.tidy_after_failure(round_, 0, WORLD)
        else:
            world.tell(round_, True)
            place.tidy_after_commit(round_)

    def _all_voted(self, attempt: Attempt) -> bool:
        return all(self.votes.get(rank) == attempt for rank in range(1, WORLD))

    # ---- other ranks -----------------------------------------------------------------------------------

    def _follow(self, rank: int) -> None:
        seen: Round | None = None
        while True:
            self._pause("await a save")
            given = self.current
            if given is seen or given is None:
                if self.ranks[0].gone:
                    break
                continue
            seen = given
            key = key_of(given)
            self._work_on(rank, key)
            if self._is_cut_off(rank):
                break  # it has not voted: the save fails
            self.votes[rank] = given.attempt
            while key not in self.world.told and not self.ranks[0].gone and self.current is given:
                if self._is_cut_off(rank):
                    break
                self._pause("await the outcome")
            if key in self.world.told and rank not in self.cut_off:
                self._end(given, rank, self.world.told[key].committed)
            else:
                self.cut_off.add(rank)
                self._settle(given, rank)
                break

    def _is_cut_off(self, rank: int) -> bool:
        if self.world.random.random() < 0.02:
            self.cut_off.add(rank)
        return rank in self.cut_off

    def _settle(self, round_: Round, rank: int) -> None:
        self.world.counts["settled"] += 1
        try:
            committed = Place(round_.path).settle(round_.attempt)
        except StorageError:
            committed = None
        if committed is None:
            self.world.tell_unknown(key_of(round_))
        else:
            self._end(round_, rank, committed)

    def _end(self, round_: Round, rank: int, committed: bool) -> None:
        self.world.tell(round_, committed)
        if not committed:
            mine = round_of(round_.attempt, round_.path)
            Place(round_.path).tidy_after_failure(mine, rank, WORLD)


def round_of(mine: Attempt | None, path: ObjectPath, claim: Claim | None = None) -> Round:
    part = EndedPart(StorageError(errno.EIO, ""))
    return Round(0, mine, path, part, path=path, claim=claim, timeout=5)


def delete(world: World, path: ObjectPath) -> None:
    """Delete the checkpoint at ``path``, with the attempts that are older."""
    found = attempts.newest_committed(path)
    if found is None:
        return
    victim, _ = found
    there = attempts.survey(path)
    newer = {attempt for attempt in there if attempt > victim}
    entries = [] if path.is_local else attempts.entries(path.parent)
    registered = {each.attempt for each in entries if each.name == path.name}
    if path.is_local:
        registered = {attempt for attempt in newer if there[attempt].decision is None}
    if any(there[each].is_committed for each in newer) or newer & registered:
        return  # a save may be in flight
    older = {attempt: there[attempt] for attempt in sorted(there) if attempt <= victim}
    states = {attempt: decisions.withdraw(path, attempt) for attempt in older}
    gone = [attempt for attempt, state in states.items() if state is State.COMMITTED]
    world.deleted.update((path.key, attempt) for attempt in gone)
    attempts.remove(path, older, states)
    world.counts["deleted"] += len(gone)


def look(world: World, path: ObjectPath) -> None:
    """A reader finds the newest checkpoint, or one that is committed meanwhile."""
    before, empty = world.there().get(path.key), world.empty_at[path.key]
    found = attempts.newest_committed(path)
    if found is None:
        assert world.empty_at[path.key] > empty, "a checkpoint was there all the time"
    elif before is not None and (path.key, before) not in world.deleted:
        assert found[0] >= before, f"{before} was committed, and a reader found {found[0]}"


def play(
    monkeypatch: Any, seed: int, *, create_only: bool = True, directory: Path | None = None
) -> World:
    """One schedule. Raises AssertionError if something does not hold."""
    world = World(monkeypatch, seed, create_only=create_only, directory=directory)
    random, jobs, names = world.random, [], itertools.count()
    monkeypatch.setattr(attempt_module, "time", SimpleNamespace(time_ns=lambda: 0))
    dice = SimpleNamespace(randbits=random.getrandbits)
    monkeypatch.setattr(attempt_module, "secrets", dice)

    def next_attempt(after: Attempt | None) -> Attempt:
        actor = world.schedule.here
        job = next(job for job in jobs if actor in job.ranks)
        return job.next_attempt(after)

    monkeypatch.setattr(claims, "next_attempt", next_attempt)

    def begin(saves: int = 3) -> Job:
        jobs.append(Job(world, f"job{next(names)}", random.randrange(10**9), saves))
        return jobs[-1]

    def often(times: int, function: Callable[[World, ObjectPath], None]) -> Callable[[], None]:
        def body() -> None:
            for _ in range(times):
                for _ in range(random.randrange(10)):
                    world.schedule.pause("wait")
                with contextlib.suppress(StorageError):
                    function(world, random.choice(world.paths))

        return body

    def check() -> None:
        if world.late and random.random() < 0.05:
            world.come_late()
        world.check()
        if len(jobs) < 4 and any(job.over for job in jobs[-2:]):
            begin()

    begin()
    begin()
    # In a directory, a save shows from its claim on, and a deletion leaves it alone.
    tries = 3 if directory is None else 40
    world.schedule.start("deletes", often(tries, delete))
    world.schedule.start("deletes too", often(tries, delete))
    world.schedule.start("reads", often(10, look))
    try:
        world.schedule.run(check, kill=0.003, freeze=0.02)
        world.faults = 0.0
        while world.late:
            world.come_late()
            world.check()
        _end_calmly(world, begin)
    except BaseException as error:
        error.add_note("\n".join([f"seed {seed}", *world.schedule.trace[-120:]]))
        raise
    return world


def _end_calmly(world: World, begin: Callable[[int], Job]) -> None:
    """A job that nothing disturbs saves twice to each path, and leaves what it has committed, and marks."""
    world.schedule.actors.clear()
    monkey = world.random
    job = begin(2 * len(world.paths))
    world.random = _Calm()
    try:
        world.schedule.run(world.check, kill=0.0, freeze=0.0)
    finally:
        world.random = monkey
    for path in world.paths:
        (newest, _) = attempts.newest_committed(path) or (None, None)
        assert newest is not None, "nothing disturbed the last job, and it has not committed"
        assert world.told[path.key, newest].committed
        for attempt, contents in attempts.survey(path).items():
            assert attempt == newest or not (contents.data or contents.is_committed), "it is left"
        assert path.store.get((path / ".metadata").key) == metadata(newest)
        if world.directory is not None:
            left = {each.name for each in Path(str(path)).iterdir()}
            assert left == {newest.name, ".metadata"}
    assert job.over


class _Calm:
    """No chance comes true."""

    def random(self) -> float:
        return 1.0
