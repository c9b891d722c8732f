"""Integration with Lightning, whose trainer saves and resumes as before.

    trainer = Trainer(strategy=DataStatesModelParallelStrategy(host_cache_size="16GiB"), ...)
    trainer.fit(model, ckpt_path="last")

Only this subpackage needs lightning (2.6).
"""

from __future__ import annotations

from dcp_datastates.manager.frameworks import needed, tell_if_untested

with needed(__name__, "lightning 2.6", "'lightning>=2.6,<2.7'"):
    import lightning.pytorch

from dcp_datastates.lightning.callback import DataStatesModelCheckpoint
from dcp_datastates.lightning.loaded import install
from dcp_datastates.lightning.strategy import (
    DataStatesDDPStrategy,
    DataStatesFSDPStrategy,
    DataStatesModelParallelStrategy,
    DataStatesSingleDeviceStrategy,
    DataStatesStrategyMixin,
)

__all__ = [
    "DataStatesDDPStrategy",
    "DataStatesFSDPStrategy",
    "DataStatesModelCheckpoint",
    "DataStatesModelParallelStrategy",
    "DataStatesSingleDeviceStrategy",
    "DataStatesStrategyMixin",
]

tell_if_untested("lightning", lightning.__version__)
install()
del install, lightning, needed
