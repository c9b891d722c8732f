"""The module that DeepSpeed imports if its configuration has ``datastates_ckpt``."""

from dcp_datastates.deepspeed import CheckpointEngine

__all__ = ["CheckpointEngine"]
