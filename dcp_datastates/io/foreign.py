"""Recognizes what other programs have written where a checkpoint was expected."""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Final

__all__ = ["is_complete_pickle", "is_stock", "kind_of_file", "kind_of_folder"]

_CONVERTS: Final = "dcp-datastates convert makes a checkpoint of this package of it"

_KINDS_OF_FILES: Final = {
    ".safetensors": f"a safetensors file; {_CONVERTS}",
    ".pt": f"a file, perhaps of torch.save; {_CONVERTS}",
    ".pth": f"a file, perhaps of torch.save; {_CONVERTS}",
    ".ckpt": f"a file, perhaps of Lightning; {_CONVERTS}",
}
_KINDS_OF_FOLDERS: Final = {
    "adapter_config.json": "a folder of PEFT, with an adapter",
    "*.safetensors": f"a folder of safetensors files, such as Hugging Face's; {_CONVERTS}",
    "pytorch_model*.bin*": "a Hugging Face folder with files of torch.save, which save_pretrained() converts",
    "global_step*": "a directory of DeepSpeed's; its tags are below it",
    "zero_pp_rank_*": "a tag that DeepSpeed itself has saved",
    "*_model_states.pt": "a tag that DeepSpeed itself has saved",
}
"""By the ending of a file's name, and by the names in a folder: what it is, and what to do."""


def kind_of_file(suffix: str) -> str:
    """What a file whose name ends with ``suffix`` is, in words."""
    return _KINDS_OF_FILES.get(suffix, "a file")


def kind_of_folder(names: Iterable[str]) -> str | None:
    """What a folder with these ``names`` in it is, in words; None if that is unknown."""
    inside = list(names)
    for pattern, what in _KINDS_OF_FOLDERS.items():
        if any(fnmatchcase(name, pattern) for name in inside):
            return what
    return None


def is_stock(data: bytes) -> bool:
    """Whether a ``.metadata`` that ``decode`` refuses is most likely stock DCP's, rather than a damaged one of this
    package. (:func:`is_complete_pickle` is certain, and slow.)
    """
    return (
        data.endswith(pickle.STOP)
        and b"torch.distributed.checkpoint.metadata" in data
        and b"dcp_datastates" not in data  # begins every .metadata of this package (refusal.py)
    )


def is_complete_pickle(data: bytes) -> bool:
    """Whether ``data`` is exactly one complete pickle. Slow; runs no code from it."""
    try:
        *_, (_, _, last) = pickletools.genops(data)
    except ValueError:
        return False
    return last is not None and last + 1 == len(data)
