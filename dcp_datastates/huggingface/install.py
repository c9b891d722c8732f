"""This package's classes in place of Accelerate's and transformers', for programs that name those.

``python -m dcp_datastates.huggingface`` does it for a script or a module that somebody else has written.
"""

from __future__ import annotations

import sys

from dcp_datastates.errors import ConfigurationError

__all__ = ["NAMES", "install"]

NAMES = ("accelerate", "trainer")


def install(*names: str) -> None:
    """Replace classes of Accelerate and transformers for later imports. A module that has imported one keeps it.

    Args:
        names: ``"accelerate"``: ``Accelerator`` becomes :class:`DataStatesAccelerator`. ``"trainer"``: the ``Trainer``
            of transformers becomes :class:`DataStatesTrainer`, also as the base of trainers that are defined later.
            Default: both.

    Raises:
        ConfigurationError: an unknown name.
    """
    chosen = names or NAMES
    for name in chosen:
        if name not in NAMES:
            raise ConfigurationError(f"install({name!r}): choose of {', '.join(NAMES)}")
    if "trainer" in chosen:  # first: the Trainer's own accelerator stays Accelerate's
        import transformers
        import transformers.trainer

        from dcp_datastates.huggingface.trainer import DataStatesTrainer

        DataStatesTrainer.__name__ = "Trainer"
        transformers.Trainer = transformers.trainer.Trainer = DataStatesTrainer
    if "accelerate" in chosen:
        import accelerate

        from dcp_datastates.huggingface.accelerator import DataStatesAccelerator

        accelerate.Accelerator = DataStatesAccelerator
        sys.modules["accelerate.accelerator"].Accelerator = DataStatesAccelerator  # type: ignore[attr-defined]
