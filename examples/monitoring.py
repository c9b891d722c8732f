"""What each save cost: in the log as lines of JSON, by a callback, and for Prometheus.

python monitoring.py
"""

import dataclasses
import json
import logging

import prometheus_client
import torch

import dcp_datastates as ds
from dcp_datastates.monitoring import register_metrics


class JsonLines(logging.Formatter):
    def format(self, record):
        save = getattr(record, "save_record", None)
        return json.dumps(dataclasses.asdict(save)) if save else super().format(record)


handler = logging.StreamHandler()
handler.setFormatter(JsonLines())
logger = logging.getLogger("dcp_datastates")
logger.addHandler(handler)
logger.setLevel(logging.INFO)  # DEBUG: commits on all ranks, not only on the first

register_metrics()
# In a job: prometheus_client.start_http_server(9400 + int(os.environ["LOCAL_RANK"]))


def log(record):
    print(record.step, record.outcome, record.stall_seconds)  # or wandb.log(...), for example


stop = ds.on_save(log)
model = torch.nn.Linear(256, 256)
with ds.CheckpointManager("ckpt", every=1, keep=2, max_failures=3) as manager:
    for step in range(3):
        manager.save(step, {"model": model})
    manager.wait()  # the outcomes are known, and old checkpoints are deleted
    print(manager.steps(), manager.latest_step)  # reads the directory; call it on one rank

handle = ds.async_save({"w": torch.ones(1000)}, "run/step-7")
handle.result()
record = handle.record
assert record is not None  # the outcome is known
print(f"{record.seconds:.3f} s, of it {record.phases['flushing']:.3f} s flushing")
stop()

print(prometheus_client.generate_latest().decode())
