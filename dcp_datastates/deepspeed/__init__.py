"""Integration with DeepSpeed, whose configuration and source stay as they are.

DeepSpeed imports ``CheckpointEngine`` from a module named ``datastates`` if its configuration has ``datastates_ckpt``.
The small distribution in ``integration/deepspeed`` is such a module. To do without it::

    import dcp_datastates.deepspeed  # before deepspeed.initialize()

**A checkpoint** is one tag: one directory, one checkpoint of this package, one vote of all ranks. DeepSpeed calls
``save`` on a rank once for each of its files, and not at all on some ranks. Each call notes the file's tensors and
pickles the rest (``files.py``). When ``save_checkpoint`` is about to return, every rank hands its files to one
``async_save``, under the names ``<file>.tensors.<name>`` and ``<file>.structure``. Nothing changes between these calls.

**Deferred** are the tensors that change only in the inner optimizer's step or right after it: the fp32 partitions, the
optimizer's state, and the trainable parameters that ZeRO copies from them. The gate before the inner optimizer's step
covers them (``hooks.py``). All others are copied at the call.

**Committed** means that all ranks have voted, as for every save of this package. Then rank 0 writes a placeholder under
the name of each file, since DeepSpeed looks for these names, and last ``latest`` (``engine.py``). No step waits for it;
``save_checkpoint`` does, where a framework deletes older checkpoints as soon as it returns.

Only this subpackage needs DeepSpeed (0.19).
"""

from __future__ import annotations

import sys

from dcp_datastates.manager.frameworks import needed, tell_if_untested

with needed(__name__, "DeepSpeed 0.19", "'deepspeed>=0.19.8,<0.20'"):
    import deepspeed

from dcp_datastates.deepspeed.engine import CheckpointEngine
from dcp_datastates.deepspeed.export import export
from dcp_datastates.deepspeed.hooks import install

__all__ = ["CheckpointEngine", "export"]

tell_if_untested("deepspeed", deepspeed.__version__)
install()
# DeepSpeed's name for this module. One that is imported already, of whatever distribution, stays.
sys.modules.setdefault("datastates", sys.modules[__name__])
