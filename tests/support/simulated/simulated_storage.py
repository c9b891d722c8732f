"""What simulated processes do at a checkpoint's path: claim, publish, settle, clean up, delete; step by step, as the
package does. At each ``yield`` storage may take its time, the process may die, and whoever waits may go on without it.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

from dcp_datastates.commit import protocol
from dcp_datastates.commit.vote import Decision, Outcome, Reason
from support.simulated.simulated_parts import Attempt, Path, Save, Thread

if TYPE_CHECKING:
    from support.simulated.simulation import Job, World

__all__ = ["claim", "delete", "find_older", "publish", "retain", "settle", "tidy", "write"]

Steps = Generator[None, None, protocol.Event]


def _decided(outcome: Outcome) -> protocol.Decided:
    return protocol.Decided(Decision(outcome, {0: Reason("StorageError", "")}))


def claim(world: World, job: Job, number: int, path: Path) -> Generator[None, None, Save]:
    """``storage/claims.py``."""
    while True:
        yield
        seen, could_see = path.signature, world.newest_named()
        beside = could_see if world.looks_beside else 0
        yield
        after = max([*path.present(), beside])
        attempt = world.next_attempt(job, after)
        world.could_see[attempt] = could_see
        yield
        if attempt in path.files:
            continue
        path.files[attempt] = set()  # with its slot, at once
        path.slots.add(attempt)
        yield
        if not world.looks_again or path.present()[-1:] == [attempt]:
            return Save(number, attempt, seen, path, after)
        world.remove(path, attempt)


def write(path: Path, attempt: Attempt, rank: int) -> bool:
    """A rank writes its files; False if the attempt's directory is gone."""
    if attempt not in path.files:
        return False
    path.files[attempt].add(rank)
    return True


def find_older(save: Save, rank: int) -> list[Attempt]:
    """``publish.find_older``."""
    return [attempt for attempt in save.path.present() if attempt < save.attempt]


def publish(world: World, job: Job, save: Save) -> Steps:
    """``commit/publish.py`` and ``attempts.publish``."""
    path, attempt = save.path, save.attempt
    if world.withdraws_older:
        for older in path.present():
            if older < attempt:
                yield
                path.slots.discard(older)
    yield
    if path.signature != save.seen and path.signature not in world.published_by(job):
        return _decided(Outcome.FAILED)
    yield
    if attempt not in path.slots:
        return _decided(Outcome.FAILED)
    yield
    landed = world.land(save)
    ours = path.signature
    if world.happens(0.03 * world.faults):  # storage says that it failed, whatever it did
        yield
        if world.withdraws_on_error:
            path.slots.discard(attempt)
            yield
            if path.signature != ours:
                return _decided(Outcome.UNKNOWN)
        else:
            landed = False
    if not landed:
        return _decided(Outcome.FAILED)
    yield
    if world.happens(0.01 * world.faults):  # it could not be made durable
        world.storage_failed.add(attempt)
        return _decided(Outcome.UNKNOWN)
    return _decided(Outcome.COMMITTED)


def settle(world: World, save: Save) -> Steps:
    """``publish.settle``."""
    path = save.path
    for _ in range(world.random.randrange(3)):
        yield
    if world.happens(0.02 * world.faults):
        world.storage_failed.add(save.attempt)
        return _decided(Outcome.UNKNOWN)
    if world.guesses:
        return _decided(Outcome.FAILED)
    if world.withdraws_when_settling:
        path.slots.discard(save.attempt)
    yield
    if path.named == save.attempt:
        return _decided(Outcome.COMMITTED)
    newer = path.named is not None and path.named > save.attempt
    yield
    deleted = save.attempt in path.deleting or save.attempt not in path.files
    return _decided(Outcome.UNKNOWN if newer or deleted else Outcome.FAILED)


def tidy(world: World, rank: int, save: Save, older: list[Attempt], outcome: Outcome) -> Thread:
    """``publish.tidy_after_commit`` and ``tidy_after_failure``."""
    path = save.path
    yield
    if outcome is Outcome.COMMITTED:
        if world.tidies_by_a_later_look:
            older = [attempt for attempt in path.present() if attempt < save.attempt]
        for attempt in older:
            yield
            world.remove(path, attempt, rank)
    elif outcome is Outcome.FAILED and save.attempt >= 0:
        yield
        if rank == 0:
            path.slots.discard(save.attempt)
            yield
        world.remove(path, save.attempt, rank)


def retain(world: World, save: Save) -> Thread:
    """``checkpoints/retention.py`` with ``keep=1``, after a commit."""
    named = sorted((path for path in world.paths if path.named), key=lambda path: path.named or 0)
    newest = save.path if world.retains_in_doubt else named[-1] if named else None
    for path in named:
        yield
        if newest is None or path is newest or path.named is None:
            continue
        if world.retains_in_doubt or path.named <= newest.after:
            yield from delete(world, path, path.named, kept=newest)


def delete(world: World, path: Path, victim: Attempt, kept: Path | None = None) -> Thread:
    """``checkpoints/delete.py``: the checkpoint ``victim``, without locks. ``kept``: why it may go."""
    seen = path.signature
    if path.named != victim or any(attempt > victim for attempt in path.present()):
        return
    yield
    deletion = world.next_deletion(max([*path.present(), victim]))
    yield
    if deletion in path.files:
        return
    path.files[deletion] = set()
    path.slots.add(deletion)
    yield
    found = path.present()
    if any(attempt > victim and attempt != deletion for attempt in found):
        world.remove(path, deletion)
        return
    for attempt in found:
        yield
        if attempt != deletion:
            path.slots.discard(attempt)
            world.deleted.add(attempt)
    yield
    if path.signature != seen:
        world.remove(path, deletion)
        return
    marked = found if world.marks_older else [victim]
    if not world.marks_deletions:
        marked = []
    for attempt in marked:
        if attempt != deletion:
            path.deleting.add(attempt)
            yield
    yield from _slowly(world)
    if world.moves_aside and deletion not in path.slots:
        world.remove(path, deletion)
        return
    world.unname(path, victim, kept)
    for attempt in found:
        yield from _slowly(world)
        world.remove(path, attempt)


def _slowly(world: World) -> Thread:
    """One call that may take its time: a save may begin and commit meanwhile."""
    for _ in range(world.random.randrange(300) if world.happens(world.stalls) else 1):
        yield
