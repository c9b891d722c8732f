"""Look into a checkpoint, and read single tensors of it, in a notebook or in any process.

python notebook.py    # beside the folder ckpt of quick_start.py
"""

from pathlib import Path

from safetensors import safe_open

import dcp_datastates as ds

path = ds.latest("ckpt")
assert isinstance(path, Path), "run quick_start.py first"
print(ds.inspect(path))
part = ds.load(path, only="model.0.weight")  # nothing else is read
print(part["model"]["0.weight"].std())

file = next(path.glob("*/r00000-0.safetensors"))  # rank 0's part, without this package
with safe_open(file, "pt") as tensors:
    print(list(tensors.keys()))
