"""Actors whose file operations interleave as a seed says: each step of each is one operation, and any may be its last.

An actor is a function in a thread of its own that runs only while the schedule lets it: at every operation it hands
over. So a schedule repeats exactly, and a step can be looked at from outside while nothing moves.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable


class _Killed(BaseException):
    pass


class Actor:
    """One process, as far as a file system sees it."""

    def __init__(self, schedule: Schedule, name: str, body: Callable[[], None]) -> None:
        self.name = name
        self.over = False
        self.killed = False
        self.frozen = 0
        self.error: BaseException | None = None
        self._schedule = schedule
        self._body = body
        self._go = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self.killed:
                self._body()
        except _Killed:
            pass
        except BaseException as error:
            self.error = error
        self.over = True
        self._schedule.back.release()

    @property
    def gone(self) -> bool:
        """Whether it does nothing any more."""
        return self.over or self.killed

    def pause(self) -> None:
        """Called by the actor itself, before an operation."""
        self._schedule.back.release()
        self._go.acquire()
        if self.killed:
            raise _Killed

    def step(self) -> None:
        self._go.release()
        self._schedule.back.acquire()

    def end(self) -> None:
        """Unwind the thread of an actor that was killed."""
        while not self.over:
            self.killed = True
            self.step()
        self._thread.join()


class Schedule:
    """Which actor takes the next step. ``here`` is the one that runs."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.back = threading.Semaphore(0)
        self.actors: list[Actor] = []
        self.here: Actor | None = None
        self.trace: list[str] = []

    def start(self, name: str, body: Callable[[], None]) -> Actor:
        actor = Actor(self, name, body)
        self.actors.append(actor)
        return actor

    def pause(self, what: str) -> None:
        """The running actor is about to do ``what``."""
        actor = self.here
        if actor is not None and not actor.killed:
            self.trace.append(f"{actor.name}: {what}")
            actor.pause()

    def run(self, check: Callable[[], None], *, kill: float, freeze: float) -> None:
        """Until all actors are over or killed; ``check`` is called after each step."""
        try:
            while runnable := [one for one in self.actors if not one.gone]:
                actor = self.random.choice(runnable)
                if actor.frozen and len(runnable) > 1:
                    actor.frozen -= 1
                    continue
                chance = self.random.random()
                if chance < kill:
                    actor.killed = True
                    self.trace.append(f"{actor.name}: killed")
                    continue
                if chance < kill + freeze:
                    actor.frozen = self.random.randrange(60)
                    continue
                self.here = actor
                actor.step()
                self.here = None
                if actor.error is not None:
                    raise actor.error
                check()
        finally:
            self.here = None
            for actor in self.actors:
                actor.end()
