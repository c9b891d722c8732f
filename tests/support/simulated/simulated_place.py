"""What simulated processes do at a checkpoint's path, step by step, as the package does.

In a directory, each attempt has a folder from its claim on, without which nothing of it can be created; an object store
has none. At each ``yield`` storage may take its time, the process may die, and the request behind it may be carried out
all the same. A request that creates an object may also come late, be carried out twice, or lose its reply.
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
COMMITTED, WITHDRAWN, DELETED = "committed", "withdrawn", "deleted"


class _Doubt(Exception):
    """Storage reports an error. The request may have been carried out, or may yet be."""


class _Gone(Exception):
    """The attempt's folder is gone: nothing was created in it, nor will be."""


def _decided(outcome: Outcome) -> protocol.Decided:
    return protocol.Decided(Decision(outcome, {0: Reason("StorageError", "")}))


def _present(path: Path) -> list[Attempt]:
    there = {each for each, files in path.files.items() if files}
    return sorted(there | path.decisions.keys() | path.folders)


def _has_folder(world: World, path: Path, attempt: Attempt) -> bool:
    return world.in_store or attempt in path.folders


def _remove_folder(world: World, path: Path, attempt: Attempt) -> None:
    """In a directory, the folder of an attempt without data goes at once, with the decision in it."""
    if not world.in_store and not path.files.get(attempt):
        path.folders.discard(attempt)
        path.decisions.pop(attempt, None)
        world.index.discard((path, attempt))
        world.look_at(path)


def claim(world: World, job: Job, number: int, path: Path) -> Generator[None, None, Save]:
    """``storage/claims.py``."""
    yield
    could_see = world.newest_named()
    index = sorted(attempt for _, attempt in world.index) if world.looks_beside else []
    alone = all(other is not path for other, _ in world.index)
    older: list[Attempt] = []
    if not alone:
        yield
        older = _present(path)
    after = max([0, *index[-1:], *older])
    attempt = world.next_attempt(job, after)
    world.could_see[attempt] = could_see
    if not world.in_store:
        yield
        path.folders.add(attempt)
        world.index.add((path, attempt))
    return Save(number, attempt, path, after, tuple(older), alone)


def write(world: World, path: Path, attempt: Attempt, rank: int) -> bool:
    """A rank writes its files; False if the attempt's folder is gone."""
    if not _has_folder(world, path, attempt):
        return False
    path.files.setdefault(attempt, set()).add(rank)
    return True


def find_older(save: Save, rank: int) -> list[Attempt]:
    return list(save.older) if rank == 0 else []


def _create(world: World, save: Save | None, path: Path, attempt: Attempt, what: str) -> bool:
    """A request that creates a decision; whether it has, as far as its sender is told."""
    if not _has_folder(world, path, attempt):
        raise _Gone

    def effect() -> bool:
        if not _has_folder(world, path, attempt):  # a request that comes late
            return False
        if attempt in path.decisions and world.creates_once:
            return False
        path.decisions[attempt] = what
        if what == COMMITTED:
            assert save is not None
            world.commit(save)
        world.look_at(path)
        return True

    def later() -> Thread:
        path.held_up[attempt] += 1
        yield
        path.held_up[attempt] -= 1
        effect()

    def hold_up() -> None:
        steps = later()
        next(steps)
        world.late.append((steps, True))

    if not world.happens(0.08 * world.faults):
        return effect()
    match world.random.choice(["refused", "lost", "late", "twice", "retried"]):
        case "refused":
            raise _Doubt
        case "lost":
            effect()
            raise _Doubt
        case "late":
            hold_up()
            raise _Doubt
        case "twice":
            hold_up()
            return effect()
    effect()
    return effect()


def _withdraw(world: World, path: Path, attempt: Attempt) -> Generator[None, None, str]:
    """``decisions.withdraw``."""
    yield
    try:
        if _create(world, None, path, attempt, WITHDRAWN):
            return WITHDRAWN
    except _Gone:
        return WITHDRAWN
    except _Doubt:
        yield
        if attempt not in path.decisions:
            raise
    else:
        yield
    return path.decisions.get(attempt, WITHDRAWN)


def publish(world: World, job: Job, save: Save) -> Steps:
    """``place.Place.publish``."""
    path, attempt = save.path, save.attempt
    if not save.alone and world.withdraws_older:
        yield
        there, decided = _present(path), dict(path.decisions)
        if any(other > attempt and decided.get(other) == COMMITTED for other in there):
            return _decided(Outcome.FAILED)
        for older in there:
            if older < attempt and older not in decided:
                try:
                    yield from _withdraw(world, path, older)
                except _Doubt:
                    return _decided(Outcome.FAILED)
    yield
    if world.in_store:
        world.index.add((path, attempt))
    yield
    try:
        if _create(world, save, path, attempt, COMMITTED):
            return _decided(Outcome.COMMITTED)
    except _Gone:
        return _decided(Outcome.FAILED)
    except _Doubt:
        pass
    if not world.withdraws_on_error:
        return _decided(Outcome.FAILED)
    try:
        state = yield from _withdraw(world, path, attempt)
    except _Doubt:
        world.storage_failed.add(attempt)
        return _decided(Outcome.UNKNOWN)
    if state != WITHDRAWN:
        return _decided(Outcome.COMMITTED)
    yield
    return _decided(Outcome.FAILED if path.files.get(attempt) else Outcome.UNKNOWN)


def settle(world: World, save: Save) -> Steps:
    """``place.Place.settle``."""
    path, attempt = save.path, save.attempt
    for _ in range(world.random.randrange(3)):
        yield
    if world.guesses:
        return _decided(Outcome.FAILED)
    if world.withdraws_when_settling:
        try:
            state = yield from _withdraw(world, path, attempt)
        except _Doubt:
            world.storage_failed.add(attempt)
            return _decided(Outcome.UNKNOWN)
    else:
        yield
        state = path.decisions.get(attempt, WITHDRAWN)
    if state == COMMITTED:
        return _decided(Outcome.COMMITTED)
    yield
    known = state == WITHDRAWN and (path.files.get(attempt) or not world.looks_for_data)
    return _decided(Outcome.FAILED if known else Outcome.UNKNOWN)


def tidy(world: World, rank: int, save: Save, older: list[Attempt], outcome: Outcome) -> Thread:
    """``place.Place.tidy_after_commit`` and ``tidy_after_failure``."""
    path, attempt = save.path, save.attempt
    yield
    if outcome is Outcome.COMMITTED and rank == 0:
        path.pointer = attempt
        world.look_at(path)
        yield
        replaced = [each for each in older if path.decisions.get(each) == COMMITTED]
        for each in replaced:
            yield
            path.decisions[each] = DELETED
            world.look_at(path)
        for each in older:
            yield
            path.files.pop(each, None)
            if world.in_store:
                world.index.discard((path, each))
        for each in replaced if world.keeps_marks else older:
            yield
            path.decisions.pop(each, None)
        for each in older:
            yield
            _remove_folder(world, path, each)
    elif outcome is Outcome.FAILED and attempt >= 0:
        path.files.get(attempt, set()).discard(rank)
        yield
        _remove_folder(world, path, attempt)


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
    """A deletion of the checkpoint ``victim``. ``kept``: why it may go."""
    yield
    there, decided = _present(path), dict(path.decisions)
    if path.named != victim or any(
        each > victim and (decided.get(each) == COMMITTED or (path, each) in world.index)
        for each in there
    ):
        return
    gone = []
    for attempt in there:
        if attempt > victim:
            continue
        try:
            state = yield from _withdraw(world, path, attempt)
        except _Doubt:
            return
        if state != COMMITTED:
            continue
        yield
        world.check_kept(attempt, kept)
        world.deleted.add(attempt)
        path.decisions[attempt] = DELETED
        world.look_at(path)
        gone.append(attempt)
    for attempt in there:
        if attempt <= victim:
            for _ in range(world.random.randrange(300) if world.happens(world.stalls) else 1):
                yield
            path.files.pop(attempt, None)
            if world.in_store:
                world.index.discard((path, attempt))
    for attempt in gone if world.in_store else there:
        yield
        if not world.in_store and attempt <= victim:
            _remove_folder(world, path, attempt)
        elif attempt in gone and not path.held_up[attempt]:  # no request is as late as this
            path.decisions.pop(attempt, None)
