"""Integration with Accelerate and the Trainer of transformers.

    accelerator = DataStatesAccelerator(fsdp_plugin=..., host_cache_size="16GiB")
    trainer = DataStatesTrainer(model=model, args=args, train_dataset=data, host_cache_size="16GiB")

Only this subpackage needs accelerate (1.15); the trainer also needs transformers (5).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dcp_datastates.manager.frameworks import needed, tell_if_untested

with needed(__name__, "accelerate 1.15", "'accelerate>=1.15,<1.16' 'transformers>=5'"):
    import accelerate

from dcp_datastates.huggingface.accelerator import DataStatesAccelerator
from dcp_datastates.huggingface.install import install

if TYPE_CHECKING:
    from dcp_datastates.huggingface.trainer import DataStatesTrainer, DataStatesTrainerMixin

__all__ = ["DataStatesAccelerator", "DataStatesTrainer", "DataStatesTrainerMixin", "install"]

tell_if_untested("accelerate", accelerate.__version__)
del accelerate


def __getattr__(name: str) -> Any:
    if name not in ("DataStatesTrainer", "DataStatesTrainerMixin"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needed(__name__, "transformers 5", "'accelerate>=1.15,<1.16' 'transformers>=5'"):
        from dcp_datastates.huggingface import trainer  # importing transformers takes seconds

    return getattr(trainer, name)
