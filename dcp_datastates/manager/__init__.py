"""Checkpoints for a training loop: when to save, what to keep, when to stop, where to go on."""

from dcp_datastates.manager.interval import AutoInterval
from dcp_datastates.manager.manager import CheckpointManager
from dcp_datastates.manager.per_rank import PerRank, RngState
from dcp_datastates.manager.trainable import Trainable

__all__ = ["AutoInterval", "CheckpointManager", "PerRank", "RngState", "Trainable"]
