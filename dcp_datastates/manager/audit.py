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

from dcp_datastates.manager.state_samples import ON_HOST, Record, Words
from dcp_datastates.process.job_log import once_per_job
from dcp_datastates.storage.object_path import Location

logger = logging.getLogger(__name__)

VARIABLE: Final = "DCP_DATASTATES_AUDIT"
"""Has the :class:`Order` for the managers of a job that ``dcp-datastates audit`` starts."""
LOSS_TOLERANCE: Final = 0.01
"""How much losses may differ, relatively, at another number of ranks."""
_ROUNDING: Final = 1e-5


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


COMPARED: Final = ("world", "step", "loss", "model", "optimizer", "generators", "loader")
_SHOWN: Final = 3


def _differing(mine: Record, former: Record) -> set[str]:
    found = {each for each in COMPARED if getattr(mine, each) != getattr(former, each)}
    if math.isnan(mine.loss) or math.isnan(former.loss):
        found.discard("loss")
    return found if None not in (mine.loader, former.loader) else found - {"loader"}


def _tensors(mine: Record, former: Record, of_optimizers: bool) -> tuple[str, ...]:
    """The names of some tensors that differ, of the models' or the optimizers'."""
    found = []
    for part, names in [*enumerate(mine.names)][of_optimizers:]:
        words = (each.tensors[part * ON_HOST :] for each in (mine, former))
        found += [name for name, one, other in zip(names, *words, strict=False) if one != other]
    return tuple(found[:_SHOWN])


@dataclass
class Comparison:
    """Compares the steps of one rank after a resume with the ``former`` records, by step. One thread calls the methods.

    ``most``: how many steps to compare; None: all.
    """

    result: Audit
    former: Mapping[int, Record]
    most: int | None = None
    has_generators: bool = True
    has_loaders: bool = True
    words: list[Words] = field(default_factory=list)
    """Of the trainable tensors, when the state was restored, and after the first step."""
    _at_restore: frozenset[str] = frozenset()
    """What differed before the first step."""
    _ended: bool = False

    def restored(self, mine: Record) -> None:
        """The state was restored, and holds ``mine``."""
        former = self.former.get(mine.step)
        if former is not None:
            self._at_restore = frozenset(_differing(mine, former))

    def add(self, mine: Record) -> None:
        """A step is done."""
        former = self.former.get(mine.step)
        if self._ended:
            return
        if former is not None:
            what, change = _differing(mine, former), abs(mine.loss - former.loss)
            relative = change / (abs(former.loss) or 1.0)
            if self.result.losses_only:
                what = {"loss"} if relative > LOSS_TOLERANCE else set()
            if what:
                shown = tuple(each for each in COMPARED if each in what)
                only_optimizer = "optimizer" in self._at_restore and "model" not in self._at_restore
                tensors = () if self.result.losses_only else _tensors(mine, former, only_optimizer)
                cause = self._cause(what, relative)
                self.result = replace(
                    self.result, step=mine.step, what=shown, tensors=tensors, cause=cause
                )
            elif not self.result.losses_only or not math.isnan(change):
                self.result = replace(self.result, steps=self.result.steps + 1, last=mine.step)
        is_last = mine.step >= max(self.former, default=0) or self.result.steps == self.most
        if self.result.what or is_last:
            self.finish()

    def finish(self) -> None:
        """There is nothing more to compare. Idempotent."""
        if not self._ended:
            level = logging.WARNING if self.result.what else once_per_job(logging.INFO)
            logger.log(level, "%s", self.result)
        self._ended = True

    def _cause(self, what: set[str], change: float) -> str:
        """What usually causes such a difference. ``change``: of the loss, relative."""
        if self.result.losses_only:
            return "The number of ranks is another: the batches may be, too"
        if "model" in self._at_restore:
            return "The restore left the model different: exclude=, missing= or cast=, or another model was saved"
        if "optimizer" in self._at_restore:
            return (
                "The optimizer's state was not restored: the optimizer must be in the state, and not be left out by "
                "exclude= or missing="
            )
        if "generators" in what and not self.has_generators:
            return "The random generators were not restored: add RngState() to the state"
        if self.result.steps and change < _ROUNDING and "generators" not in what:
            return (
                "The restore was exact. So small a difference comes from kernels that are not deterministic, or from a "
                "bit that has flipped"
            )
        if self.result.steps:
            return (
                "The restore was exact. Memory may have changed (a flipped bit), or the program did something else at "
                "this step: other data, another draw, a kernel that is not deterministic"
            )
        if "generators" in what:
            return (
                "Something draws from the generators after the restore, such as a loader that begins anew or an "
                "evaluation"
            )
        if len({tuple(words()) for words in self.words}) == 1 < len(self.words):
            return "A step does not change the model in the state, so another is trained: the state has a copy of it"
        if what == {"loss"}:
            return "The state is as before: the loss is another number, such as a mean over former steps"
        if self.has_loaders:
            return (
                "The state is as before, and the data are others: the loader's state does not have all of its place, "
                "such as the generator of its sampler"
            )
        return (
            "The state is as before, and the data are others: add the loader to the state, as PerRank(loader) or a "
            "StatefulDataLoader"
        )
