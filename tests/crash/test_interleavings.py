"""Jobs that save, take over, settle and delete in one root, without locks and with any clocks, in seeded schedules.

Every file operation of every process is one step, and processes stop, go on late, and die before any of them. After
each step, what is named must be whole, and what was told must be so. ``INTERLEAVINGS=100000`` tries more schedules than
``make test-thorough``; ``INTERLEAVING=<seed>`` repeats one that failed.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.crashes.interleaving import Schedule
from support.tiers import tries
from torch.distributed.checkpoint.metadata import Metadata

from dcp_datastates import CommitOutcomeUnknown, DataStatesError, StorageError
from dcp_datastates.checkpoints import delete, retention
from dcp_datastates.checkpoints.listing import open_found
from dcp_datastates.checkpoints.retention import retain_here
from dcp_datastates.commit import publish
from dcp_datastates.commit.round import FailedPart, Round
from dcp_datastates.saving.document import document
from dcp_datastates.storage import attempt, attempts, claims, local, lock, operations
from dcp_datastates.storage.attempt import Attempt

ONE = os.environ.get("INTERLEAVING")
WORLD = 2
PATHS = 2
FILES = tuple(f"r{rank:05d}-0.safetensors" for rank in range(WORLD))


@dataclass
class Told:
    """What processes were told of one attempt."""

    committed: bool = False
    failed: bool = False


@dataclass
class World:
    """One root, as all processes see it, and what must hold there."""

    root: Path
    schedule: Schedule
    told: dict[tuple[Path, Attempt], Told] = field(default_factory=dict)
    settled: int = 0
    deleted: int = 0
    committed: list[Attempt] = field(default_factory=list)  # in the order in which it was told
    named: dict[bytes, Attempt] = field(default_factory=dict)
    meant: Counter[tuple[Path, Attempt]] = field(default_factory=Counter)
    """How many processes delete it, or have deleted it, on purpose."""
    stays: set[tuple[Path, Attempt]] = field(default_factory=set)
    """What was committed, and not replaced."""
    replaced: set[tuple[Path, Attempt]] = field(default_factory=set)

    def tell(self, round_: Round, committed: bool) -> None:
        assert round_.attempt is not None
        told = self.told.setdefault(_key(round_), Told())
        told.committed |= committed
        told.failed |= not committed
        assert not (told.committed and told.failed), f"told opposite things of {round_.attempt}"
        if committed:
            self.committed.append(round_.attempt)

    def there(self) -> dict[Path, Attempt]:
        """What is committed now."""
        found = {}
        for path in self.root.iterdir():
            with contextlib.suppress(FileNotFoundError):
                data = (path / local.METADATA_NAME).read_bytes()
                if data not in self.named:
                    self.named[data] = publish.published_attempt(path)
                found[path] = self.named[data]
        return found

    def check(self) -> None:
        assert self.schedule.here is None
        there = self.there()
        for path, named in there.items():
            for name in FILES:
                assert (path / named.name / name).exists(), f"{named.name} is named, {name} is gone"
            assert not self.told.get((path, named), Told()).failed, "a failed save is there"
        self.stays.update(there.items())
        for path, named in list(self.stays):
            now = there.get(path)
            if now is not None and now > named:
                self.stays.remove((path, named))
                self.replaced.add((path, named))
            else:
                is_meant = self.meant[path, named] > 0
                assert now == named or is_meant, f"{named.name} was committed, and is gone"
        newest = self.newest
        if newest is not None:
            assert there, "all is gone"
            assert max(there.values()) >= newest, "latest went back"

    @property
    def newest(self) -> Attempt | None:
        """Of those that were told to be committed, were not replaced, and that no process deletes."""
        gone = {one for (_, one), count in self.meant.items() if count}
        gone |= {one for _, one in self.replaced}
        return max((one for one in self.committed if one not in gone), default=None)


def _key(round_: Round) -> tuple[Path, Attempt]:
    assert round_.path is not None
    assert round_.attempt is not None
    return round_.path, round_.attempt


class Job:
    """Two ranks: rank 0 saves, rank 1 votes and hears of it, or is cut off and settles what became of it."""

    def __init__(self, world: World, name: str, clock: int, steps: range) -> None:
        self.world = world
        self.steps = steps
        self.current: Round | None = None  # what rank 0 has begun last
        self.vote: Attempt | None = None  # of rank 1, for this attempt
        self.cut_off = False  # rank 1 votes no more
        self.older: dict[Round, list[Attempt]] = {}
        self._clock = clock, 0
        self.first = world.schedule.start(f"{name}.0", self._save)
        self.second = world.schedule.start(f"{name}.1", self._follow)

    @property
    def over(self) -> bool:
        return self.first.gone and self.second.gone

    def next_attempt(self, after: Attempt | None) -> Attempt:
        """The real one, with this process's clock and count."""
        attempt._incarnation, attempt._sequence = self._clock
        found = attempt.next_attempt(after)
        self._clock = attempt._incarnation, attempt._sequence
        return found

    def _pause(self, what: str) -> None:
        self.world.schedule.pause(what)

    def _save(self) -> None:
        neighbours = claims.Neighbours()
        for step in self.steps:
            path = self.world.root / f"step-{step % PATHS}"
            try:
                round_ = self._begin(path, neighbours)
            except OSError:
                continue  # another job has removed it: the save fails before it has a round
            self.current = round_
            self.older[round_] = publish.find_older(round_)
            while self.vote != round_.attempt and not self.cut_off and not self.second.gone:
                self._pause("await the vote")
            if self.vote != round_.attempt:
                self._end(round_, 0, False)
                return
            try:
                publish.publish(
                    round_,
                    lambda meta, claim: document(meta, claim, Metadata({}), [], {}),
                )
            except CommitOutcomeUnknown:
                raise
            except DataStatesError:
                self._end(round_, 0, False)
            else:
                self._end(round_, 0, True)

    def _begin(self, path: Path, neighbours: claims.Neighbours) -> Round:
        local.make_directories(path)
        before = self.world.newest
        claim = claims.claim(path, neighbours)
        assert before is None or claim.attempt > before, "it does not count as newer"
        for name in FILES:
            self._pause("write data")
            (path / claim.attempt.name / name).write_bytes(b"x")
        return _round(claim.attempt, path, claim)

    def _follow(self) -> None:
        seen: Round | None = None
        while True:
            self._pause("await a save")
            of_first = self.current
            if of_first is seen or of_first is None:
                if self.first.gone:
                    return None
                continue
            seen = of_first
            assert of_first.attempt is not None
            assert of_first.path is not None
            mine = _round(of_first.attempt, of_first.path)
            self.older[mine] = publish.find_older(mine)
            self._pause("vote")
            if self._is_cut_off():
                return self._end(mine, 1, False)
            self.vote = mine.attempt
            told = self.world.told
            while _key(mine) not in told and not self.first.gone and not self._is_cut_off():
                self._pause("await the outcome")
            if _key(mine) in told and not self.cut_off:
                self._end(mine, 1, told[_key(mine)].committed)
            else:
                self.cut_off = True
                return self._settle(mine)

    def _is_cut_off(self) -> bool:
        self.cut_off = self.world.schedule.random.random() < 0.02
        return self.cut_off

    def _settle(self, round_: Round) -> None:
        """Rank 1 takes rank 0 for dead, rightly or not."""
        assert round_.path is not None
        assert round_.attempt is not None
        try:
            committed = publish.settle(round_.path, round_.attempt)
        except FileNotFoundError:
            return  # another job has deleted all of it meanwhile
        self.world.settled += 1
        if committed is None:
            others = {*self.world.there().items(), *self.world.replaced, *self.world.meant}
            replaced = any(
                path == round_.path and other >= round_.attempt for path, other in others
            )
            assert replaced, "it could be known"
        else:
            self._end(round_, 1, committed)

    def _end(self, round_: Round, rank: int, committed: bool) -> None:
        self.world.tell(round_, committed)
        if committed:
            publish.tidy_after_commit(round_, self.older[round_], rank, WORLD)
        else:
            publish.tidy_after_failure(round_, rank, WORLD)


def _round(mine: Attempt, path: Path, claim: claims.Claim | None = None) -> Round:
    part = FailedPart(StorageError(errno.EIO, ""))
    return Round(0, mine, path, part, path=path, claim=claim, timeout=5)


def _play(world: World) -> None:
    random = world.schedule.random
    jobs: list[Job] = []
    names = itertools.count()

    def begin() -> None:
        number = next(names)
        jobs.append(Job(world, f"job{number}", random.randrange(10**9), range(number, number + 4)))

    def retain() -> None:
        for _ in range(6):
            world.schedule.pause("retain")
            with contextlib.suppress(OSError):
                world.deleted += len(retain_here(world.root, keep=1).deleted)

    def delete_one() -> None:
        for _ in range(12):
            world.schedule.pause("delete")
            with contextlib.suppress(OSError):
                found = open_found(world.root / f"step-{random.randrange(PATHS)}")
                if found is not None:
                    retention.delete_committed(found)
                    world.deleted += 1

    begin()
    begin()
    for name, body in (("retain", retain), ("delete", delete_one), ("delete too", delete_one)):
        world.schedule.start(name, body)

    def check() -> None:
        world.check()
        if len(jobs) < 4 and any(job.over for job in jobs[-2:]):
            begin()

    world.schedule.run(check, kill=0.004, freeze=0.02)


@pytest.fixture
def interleaved(monkeypatch):
    """Makes a world whose processes hand over at each file operation; no locks reach from one to another."""
    current: list[World] = []
    monkeypatch.setattr(lock, "_try", lambda descriptor, how: None)
    monkeypatch.setattr(publish, "_remember", lambda directory, mine: None)

    def pause(what: str) -> None:
        if current and current[0].schedule.here is not None:
            current[0].schedule.pause(what)

    def hit(name: str) -> None:
        if name.endswith(".before"):
            pause(name)

    def pausing(module, name):
        real = getattr(module, name)

        def function(*arguments):
            pause(name)
            return real(*arguments)

        monkeypatch.setattr(module, name, function)

    def next_attempt(after):
        job = current[0].schedule.here._body.__self__
        return job.next_attempt(after)

    @contextlib.contextmanager
    def exclusive(directory, *_):
        directory.stat()
        yield

    monkeypatch.setattr(lock, "exclusive", exclusive)

    def delete_committed(victim, **more):
        meant, key = current[0].meant, (victim.path, victim.attempt)
        meant[key] += 1
        try:
            delete.delete_committed(victim, **more)
        except delete.NotDeleted:
            meant[key] -= 1
            raise

    monkeypatch.setattr(retention, "delete_committed", delete_committed)
    for module in (operations, publish):
        monkeypatch.setattr(module, "hit", hit)
    for module, name in (
        (attempts, "present"),
        (local, "signature"),
        (publish, "published_attempt"),
    ):
        pausing(module, name)
    monkeypatch.setattr(claims, "next_attempt", next_attempt)
    monkeypatch.setattr(attempt, "time", SimpleNamespace(time_ns=lambda: 0))
    dice = SimpleNamespace(randbits=lambda n: current[0].schedule.random.getrandbits(n))
    monkeypatch.setattr(attempt, "secrets", dice)

    def make(root: Path, seed: int) -> World:
        current[:] = [World(root, Schedule(seed))]
        return current[0]

    return make


@pytest.mark.parametrize("schedules", tries(30, 200, "INTERLEAVINGS"))
def test_whatever_comes_late_what_is_named_is_whole(schedules, interleaved, tmp_path):
    settled = committed = failed = deleted = 0
    for seed in [int(ONE)] if ONE else range(schedules):
        root = tmp_path / str(seed)
        root.mkdir()
        world = interleaved(root, seed)
        try:
            _play(world)
        except BaseException:
            print(f"INTERLEAVING={seed}", *world.schedule.trace[-80:], sep="\n")
            raise
        settled += world.settled
        deleted += world.deleted
        committed += sum(told.committed for told in world.told.values())
        failed += sum(told.failed for told in world.told.values())
        shutil.rmtree(root)
    print(
        f"{committed} commits, {failed} failures, {settled} settled by survivors, {deleted} deleted"
    )
    if not ONE:
        assert committed > schedules
        assert failed > schedules / 10
        assert settled > schedules / 10
        assert deleted > schedules / 4
