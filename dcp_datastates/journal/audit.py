"""Whether a loop that was resumed goes on as the run before it: its steps are compared with the journal of that run.

A job that has died had gone past its last checkpoint, so its journal has the steps that the next run repeats.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Final

from dcp_datastates.journal.state_samples import ON_HOST, Record, StateSamples, Words
from dcp_datastates.process.job_log import once_per_job
from dcp_datastates.storage.object_path import Location

logger = logging.getLogger(__name__)

VARIABLE: Final = "DCP_DATASTATES_AUDIT"
"""Has the :class:`Order` for the managers of a job that ``dcp-datastates audit`` starts."""
LOSS_TOLERANCE: Final = 0.01
"""How much losses may differ, relatively, at another number of ranks."""
COMPARED: Final = ("world", "step", "loss", "model", "optimizer", "generators", "loader")
_SHOWN: Final = 3


@dataclass(frozen=True)
class Audit:
    """How the steps of a rank after a resume compare with those of the run before it."""

    rank: int
    world: int
    """The number of ranks."""
    after: int
    """The step that was restored."""
    losses_only: bool = False
    """The number of ranks is another: losses alone were compared, to a relative 1 %."""
    steps: int = 0
    """How many steps were compared, and are equal."""
    last: int | None = None
    """The last of them."""
    step: int | None = None
    """The first step that differs; None: none does, so far."""
    what: tuple[str, ...] = ()
    """What differs there: ``loss``, ``model``, ``optimizer``, ``generators``, ``loader``."""
    tensors: tuple[str, ...] = ()
    """Some of the tensors that differ, of those that were sampled at that step: of the models, or of the optimizers if
    these were not restored.
    """
    cause: str = ""
    """What usually causes that."""

    @property
    def outcome(self) -> str:
        """``"different"``, ``"equal"``, or ``"not compared"``: the journal has no step after the restored one."""
        return "different" if self.what else "equal" if self.steps else "not compared"

    def __str__(self) -> str:
        kind = f" in the loss, to {LOSS_TOLERANCE:.0%}" if self.losses_only else ""
        if self.what:
            what = ", ".join(self.what) + "".join(f", {name!r}" for name in self.tensors)
            text = f"the resume of step {self.after} is not exact: step {self.step} differs in: {what}. {self.cause}"
        elif self.steps:
            text = (
                f"steps {self.after + 1} to {self.last} after the resume equal those before{kind}"
            )
        else:
            text = f"the journal has no steps after {self.after} to compare the resume with"
        return f"rank {self.rank}: {text}"


@dataclass(frozen=True)
class Order:
    """What ``dcp-datastates audit`` asks of the managers on a root."""

    root: str
    steps: int
    report: str
    """The path of each rank's report, before the rank's number."""

    @staticmethod
    def of_process(root: Location) -> Order | None:
        """The order of this process, if it is for ``root``."""
        text = os.environ.get(VARIABLE)
        order = None if text is None else Order(**json.loads(text))
        return order if order is not None and order.root == str(root) else None

    def report_of(self, result: Audit) -> None:
        """Leave the result for the command. Raises OSError."""
        path = f"{self.report}{result.rank}"
        with open(f"{path}.new", "w") as file:
            json.dump({**asdict(result), "outcome": result.outcome, "text": str(result)}, file)
        os.replace(f"{path}.new", path)


@dataclass
class Comparison:
    """Compares the steps of one rank after a resume with the ``former`` records, by step. One thread calls the methods.

    ``samples``: of the state that was restored.
    """

    result: Audit
    former: Mapping[int, Record]
    samples: StateSamples
    words: list[Words] = field(default_factory=list)
    """Of the trainable tensors, when the state was restored, and after the first step."""
    _at_restore: frozenset[str] = frozenset()
    """What differed before the first step."""
    _ended: bool = False

    def restored(self, mine: Record) -> None:
        """The state was restored, and holds ``mine``."""
        if mine.step in self.former:
            self._at_restore = _differing(mine, self.former[mine.step])

    def add(self, mine: Record) -> None:
        """A step is done."""
        if self._ended:
            return
        if (former := self.former.get(mine.step)) is not None:
            self._compare(mine, former)
        if self.result.what or mine.step >= max(self.former, default=0):
            self.finish()

    def _compare(self, mine: Record, former: Record) -> None:
        what, tensors = _differing(mine, former), tuple[str, ...]()
        if self.result.losses_only:
            change = abs(mine.loss - former.loss) / (abs(former.loss) or 1.0)
            if math.isnan(change):
                return
            what = frozenset({"loss"} if change > LOSS_TOLERANCE else ())
        elif what:
            tensors = _tensors(mine, former, self._lacks("optimizer"))
        if not what:
            self.result = replace(self.result, steps=self.result.steps + 1, last=mine.step)
            return
        shown = tuple(each for each in COMPARED if each in what)
        self.result = replace(
            self.result, step=mine.step, what=shown, tensors=tensors, cause=self._cause(what)
        )

    def finish(self) -> None:
        """There is nothing more to compare. Idempotent."""
        if not self._ended:
            level = logging.WARNING if self.result.what else once_per_job(logging.INFO)
            logger.log(level, "%s", self.result)
        self._ended = True

    def _lacks(self, part: str) -> bool:
        """Whether ``part`` of the state was not restored, though the parts before it were."""
        return next((each for each in COMPARED if each in self._at_restore), None) == part

    def _cause(self, what: frozenset[str]) -> str:
        """What usually causes such a difference."""
        if self.result.losses_only:
            return "The number of ranks is another: the batches may be, too"
        if self._lacks("model"):
            return "The restore left the model different: exclude=, missing= or cast=, or another model was saved"
        if self._lacks("optimizer"):
            return (
                "The optimizer's state was not restored: the optimizer must be in the state, and not be left out by "
                "exclude= or missing="
            )
        if "generators" in what and not self.samples.has_generators:
            return "The random generators were not restored: add RngState() to the state"
        if self.result.steps:
            return (
                "The restore was exact. Then the program did something else: another learning rate (is the scheduler "
                "in the state?), other data, another draw, a kernel that is not deterministic. Or memory has changed"
            )
        if "generators" in what:
            return "Something draws from the generators after the restore: a loader that begins anew, an evaluation"
        if len({tuple(words()) for words in self.words}) == 1 < len(self.words):
            return "A step does not change the model in the state, so another is trained: the state has a copy of it"
        if what == {"loss"}:
            return "The state is as before: the loss is another number, such as a mean over former steps"
        way_out = "add the loader to the state, as PerRank(loader) or a StatefulDataLoader"
        if self.samples.has_loaders:
            way_out = "the loader's state does not have all of its place, such as the generator of its sampler"
        return f"The state is as before, and the data are others: {way_out}"


def _differing(mine: Record, former: Record) -> frozenset[str]:
    """What differs, of what both records have."""
    found = {each for each in COMPARED if getattr(mine, each) != getattr(former, each)}
    unknown = {"loss"} if math.isnan(mine.loss) or math.isnan(former.loss) else set()
    if None in (mine.loader, former.loader):
        unknown.add("loader")
    return frozenset(found - unknown)


def _tensors(mine: Record, former: Record, of_optimizers: bool) -> tuple[str, ...]:
    """The names of some tensors that differ, of the models' or the optimizers'."""
    found = []
    for part, names in [*enumerate(mine.names)][of_optimizers:]:
        words = (each.tensors[part * ON_HOST :] for each in (mine, former))
        found += [name for name, one, other in zip(names, *words, strict=False) if one != other]
    return tuple(found[:_SHOWN])
