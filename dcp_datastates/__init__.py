"""Lazy asynchronous checkpointing for ``torch.distributed.checkpoint``, after DataStates-LLM.

``DataStatesWriter`` and ``DataStatesReader`` are a storage backend for DCP. Importing the package
registers one hook before every ``Optimizer.step()``, which costs nothing while no save is in flight.
"""

from importlib.metadata import PackageNotFoundError, version

from dcp_datastates.checkpoints.copy import copy
from dcp_datastates.checkpoints.delete import delete
from dcp_datastates.checkpoints.describe import describe as inspect
from dcp_datastates.checkpoints.find import latest
from dcp_datastates.checkpoints.keep import Keep
from dcp_datastates.checkpoints.pins import pin, unpin
from dcp_datastates.checkpoints.retention import retain
from dcp_datastates.checkpoints.verify import Damage, Report, verify
from dcp_datastates.config import parse_size
from dcp_datastates.conversion.compare import Comparison, Difference, diff
from dcp_datastates.conversion.convert import Conversion, convert
from dcp_datastates.dcp.async_save import async_save, save
from dcp_datastates.dcp.handle import SaveHandle
from dcp_datastates.dcp.loading import load
from dcp_datastates.dcp.plan_ahead import prime
from dcp_datastates.dcp.planner import DataStatesSavePlanner
from dcp_datastates.dcp.reader import DataStatesReader
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
from dcp_datastates.manager import AutoInterval, CheckpointManager, PerRank, RngState, Trainable
from dcp_datastates.saving.outcome import on_save
from dcp_datastates.staging.ownership import track
from dcp_datastates.stats import SaveRecord, SaveStats
from dcp_datastates.tiers.ram_nodes import configure_ram
from dcp_datastates.tiers.ram_store import RamStore as _RamStore  # noqa: F401  (registers ram://)

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
    "IncompatibleStateError",
    "Keep",
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
    "configure_ram",
    "convert",
    "copy",
    "delete",
    "diff",
    "inspect",
    "latest",
    "load",
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

try:
    __version__ = version("dcp_datastates")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+unknown"
