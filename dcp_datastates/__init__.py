"""Lazy asynchronous checkpointing for ``torch.distributed.checkpoint``, after DataStates-LLM.

``DataStatesWriter`` and ``DataStatesReader`` are a storage backend for DCP. Importing the package
registers one hook before every ``Optimizer.step()``, which costs nothing while no save is in flight.
What a save does not need (loads, checkpoints, the manager, conversion, tiers) is imported when it is first used.
"""

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from dcp_datastates.config import parse_size
from dcp_datastates.dcp.async_save import async_save, prime, save
from dcp_datastates.dcp.handle import SaveHandle
from dcp_datastates.dcp.planner import DataStatesSavePlanner
from dcp_datastates.dcp.writer import DataStatesWriter
from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    CheckpointSkipped,
    CheckpointSupersededError,
    CommitOutcomeUnknown,
    ConfigurationError,
    DataStatesError,
    ForeignCheckpointError,
    ForkedProcessError,
    IncompatibleStateError,
    NoAnswerError,
    RankLostError,
    ReplicasDifferError,
    SaveAbandonedError,
    SaveFailedError,
    SaveStalledError,
    SnapshotTornError,
    StorageError,
    UnreadableMetadataError,
    UnsafeObjectError,
    UnsupportedStateError,
    UnsupportedTensorError,
)
from dcp_datastates.io.engine import configure_engine
from dcp_datastates.saving.outcome import on_save
from dcp_datastates.staging.ownership import track
from dcp_datastates.stats import LoadRecord, SaveRecord, SaveStats
from dcp_datastates.storage.object_path import register as _register

if TYPE_CHECKING:
    from dcp_datastates.checkpoints.copy import copy
    from dcp_datastates.checkpoints.delete import delete
    from dcp_datastates.checkpoints.describe import describe as inspect
    from dcp_datastates.checkpoints.find import latest
    from dcp_datastates.checkpoints.keep import Keep
    from dcp_datastates.checkpoints.pins import pin, unpin
    from dcp_datastates.checkpoints.retention import retain
    from dcp_datastates.checkpoints.verify import Damage, Report, verify
    from dcp_datastates.conversion.compare import Comparison, Difference, diff
    from dcp_datastates.conversion.convert import Conversion, convert
    from dcp_datastates.dcp.reader import DataStatesReader
    from dcp_datastates.loading.load import load
    from dcp_datastates.loading.record import on_load
    from dcp_datastates.manager import AutoInterval, CheckpointManager, PerRank, RngState, Trainable
    from dcp_datastates.storage.object_store import ObjectStore as _ObjectStore
    from dcp_datastates.tiers.nodes import configure_nodes

__all__ = [
    "AutoInterval",
    "CheckpointCorruptError",
    "CheckpointExistsError",
    "CheckpointManager",
    "CheckpointNotFoundError",
    "CheckpointReplacedError",
    "CheckpointSkipped",
    "CheckpointSupersededError",
    "CommitOutcomeUnknown",
    "Comparison",
    "ConfigurationError",
    "Conversion",
    "Damage",
    "DataStatesError",
    "DataStatesReader",
    "DataStatesSavePlanner",
    "DataStatesWriter",
    "Difference",
    "ForeignCheckpointError",
    "ForkedProcessError",
    "IncompatibleStateError",
    "Keep",
    "LoadRecord",
    "NoAnswerError",
    "PerRank",
    "RankLostError",
    "ReplicasDifferError",
    "Report",
    "RngState",
    "SaveAbandonedError",
    "SaveFailedError",
    "SaveHandle",
    "SaveRecord",
    "SaveStalledError",
    "SaveStats",
    "SnapshotTornError",
    "StorageError",
    "Trainable",
    "UnreadableMetadataError",
    "UnsafeObjectError",
    "UnsupportedStateError",
    "UnsupportedTensorError",
    "async_save",
    "configure_engine",
    "configure_nodes",
    "convert",
    "copy",
    "delete",
    "diff",
    "inspect",
    "latest",
    "load",
    "on_load",
    "on_save",
    "parse_size",
    "pin",
    "prime",
    "retain",
    "save",
    "track",
    "unpin",
    "verify",
]

_PLACES = {
    "AutoInterval": "manager.AutoInterval",
    "CheckpointManager": "manager.CheckpointManager",
    "Comparison": "conversion.compare.Comparison",
    "Conversion": "conversion.convert.Conversion",
    "DataStatesReader": "dcp.reader.DataStatesReader",
    "Damage": "checkpoints.verify.Damage",
    "Difference": "conversion.compare.Difference",
    "Keep": "checkpoints.keep.Keep",
    "PerRank": "manager.PerRank",
    "Report": "checkpoints.verify.Report",
    "RngState": "manager.RngState",
    "Trainable": "manager.Trainable",
    "configure_nodes": "tiers.nodes.configure_nodes",
    "convert": "conversion.convert.convert",
    "copy": "checkpoints.copy.copy",
    "delete": "checkpoints.delete.delete",
    "diff": "conversion.compare.diff",
    "inspect": "checkpoints.describe.describe",
    "latest": "checkpoints.find.latest",
    "load": "loading.load.load",
    "on_load": "loading.record.on_load",
    "pin": "checkpoints.pins.pin",
    "retain": "checkpoints.retention.retain",
    "unpin": "checkpoints.pins.unpin",
    "verify": "checkpoints.verify.verify",
}


def __getattr__(name: str) -> Any:
    module, _, attribute = _PLACES.get(name, "").rpartition(".")
    if not module:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})


def _nodes_store(root: str, key: str) -> "_ObjectStore":
    from dcp_datastates.tiers.copies import open_nodes

    return open_nodes(root, key)


_register("ram", _nodes_store)
_register("node", _nodes_store)

try:
    __version__ = version("dcp_datastates")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+unknown"
