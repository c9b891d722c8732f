"""Weights for `from_pretrained` in bfloat16, a checkpoint to begin from, and what the cast has changed.

python export.py ckpt/step-1000 weights start
"""

import sys

import dcp_datastates as ds

checkpoint, weights, start = sys.argv[1:]
ds.convert(checkpoint, weights, "hf", part="model", dtype="bfloat16", shard_size="5GB")
ds.convert(weights, start, rename={"": "model."})
print(ds.diff(checkpoint, start, only="model"))  # the error of the cast to bfloat16
