"""What every rank imports, once, in the server that ranks are forked from. No threads start here."""

import gc

import pytest  # noqa: F401
import torch
import torch._dynamo  # the first optimizer of a process would import it
import torch.distributed.checkpoint
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # noqa: F401

# Ranks collect garbage after each job. What all have from here is none, and going through it copies its memory.
gc.collect()
gc.freeze()
