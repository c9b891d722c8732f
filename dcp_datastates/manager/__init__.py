"""Checkpoints for a training loop: when to save, what to keep, when to stop, where to go on."""

from dcp_datastates.manager.manager import CheckpointManager
from dcp_datastates.manager.schedule import AutoInterval
from dcp_datastates.training.models import Trainable
from dcp_datastates.training.per_rank import PerRank, RngState

__all__ = ["AutoInterval", "CheckpointManager", "PerRank", "RngState", "Trainable"]
