"""verl's FSDP workers save checkpoints that load at any number of ranks.

VERL_USE_EXTERNAL_MODULES=verl_datastates python -m verl.trainer.main_ppo ...    # this file is importable
"""

from verl.workers.engine.fsdp import transformer_impl

import dcp_datastates as ds


class DataStatesCheckpointManager(transformer_impl.FSDPCheckpointManager):
    @property
    def _state(self):
        state = {"model": self.model, "optimizer": self.optimizer, "rng": ds.RngState()}
        return state | ({"scheduler": self.lr_scheduler} if self.lr_scheduler else {})

    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None):
        if local_path is None:
            return
        # After a restart, verl may save a step again: the directory has its checkpoint already.
        manager = ds.CheckpointManager(local_path, every=1, max_failures=1, fresh="replace")
        with manager:
            manager.save(global_step, self._state)  # the end of the block waits for the commit
        if self.rank == 0:  # deletes older ones
            self.register_checkpoint(local_path, max_ckpt_to_keep)

    def load_checkpoint(self, local_path, hdfs_path=None, del_local_after_load=False):
        if local_path is None:
            return
        with ds.CheckpointManager(local_path, every=1, save_last=False) as manager:
            if manager.restore_latest(self._state) is None:
                raise FileNotFoundError(f"no committed checkpoint in {local_path}")


transformer_impl.FSDPCheckpointManager = DataStatesCheckpointManager
