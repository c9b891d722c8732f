"""This package's classes in place of Accelerate's and transformers', for programs that name those.

``python -m dcp_datastates.huggingface`` does it for a script or a module of another author.
"""

from __future__ import annotations

import sys
from typing import Any

from dcp_datastates.errors import ConfigurationError
from dcp_datastates.manager.continuing import parse_fresh
from dcp_datastates.manager.frameworks import pop_options
from dcp_datastates.manager.save_tracker import most_failures

NAMES = ("accelerate", "trainer")


def install(*names: str, **options: Any) -> None:
    """Replace classes of Accelerate and transformers for later imports. A module that has imported one keeps it.

    Args:
        names: ``"accelerate"``: ``Accelerator`` becomes :class:`DataStatesAccelerator`. ``"trainer"``: the ``Trainer``
            of transformers becomes :class:`DataStatesTrainer`, also as the base of trainers that are defined later.
            Default: both.
        options: of each object that the program makes of them, such as ``missing="warn"``: see
            :class:`DataStatesTrainerMixin` and :class:`DataStatesAccelerator`.

    Raises:
        ConfigurationError: an unknown name, or an option that cannot work.
    """
    chosen = names or NAMES
    for name in chosen:
        if name not in NAMES:
            raise ConfigurationError(f"install({name!r}): choose of {', '.join(NAMES)}")
    fresh = parse_fresh(options.pop("fresh", "refuse"))
    _check(options)
    if "trainer" in chosen:  # first: the Trainer's own accelerator stays Accelerate's
        import transformers
        import transformers.trainer

        from dcp_datastates.huggingface.trainer import DataStatesTrainer

        DataStatesTrainer.defaults, DataStatesTrainer.fresh = options, fresh
        DataStatesTrainer.__name__ = "Trainer"
        transformers.Trainer = transformers.trainer.Trainer = DataStatesTrainer
    if "accelerate" in chosen:
        import accelerate

        from dcp_datastates.huggingface.accelerator import DataStatesAccelerator

        DataStatesAccelerator.defaults = options
        accelerate.Accelerator = DataStatesAccelerator
        sys.modules["accelerate.accelerator"].Accelerator = DataStatesAccelerator  # type: ignore[attr-defined]


def _check(options: dict[str, Any]) -> None:
    left = dict(options)
    pop_options(left)
    most_failures(left.pop("max_failures", "auto"), 1)
    for name in left:
        raise ConfigurationError(f"install({name}=…): there is no such option")
