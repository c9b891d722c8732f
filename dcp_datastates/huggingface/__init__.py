"""Integration with Accelerate and the Trainer of transformers.

    accelerator = DataStatesAccelerator(fsdp_plugin=..., host_cache_size="16GiB")
    trainer = DataStatesTrainer(model=model, args=args, train_dataset=data, host_cache_size="16GiB")

Only this subpackage needs accelerate (1.15); the trainer also needs transformers (5).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    import accelerate
except ImportError as error:
    raise ImportError(
        f"dcp_datastates.huggingface needs accelerate 1.15 ({error}): "
        f"pip install 'accelerate>=1.15,<1.16' 'transformers>=5'"
    ) from error

from dcp_datastates.huggingface.accelerator import DataStatesAccelerator
from dcp_datastates.huggingface.install import install
from dcp_datastates.manager.frameworks import tell_if_untested

if TYPE_CHECKING:
    from dcp_datastates.huggingface.trainer import DataStatesTrainer, DataStatesTrainerMixin

__all__ = ["DataStatesAccelerator", "DataStatesTrainer", "DataStatesTrainerMixin", "install"]

tell_if_untested("accelerate", accelerate.__version__)
del accelerate


def __getattr__(name: str) -> Any:
    if name not in ("DataStatesTrainer", "DataStatesTrainerMixin"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from dcp_datastates.huggingface import trainer  # importing transformers takes seconds
    except ImportError as error:
        raise ImportError(
            f"dcp_datastates.huggingface.{name} needs transformers 5 ({error}): "
            f"pip install 'accelerate>=1.15,<1.16' 'transformers>=5'"
        ) from error
    return getattr(trainer, name)
