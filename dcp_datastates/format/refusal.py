"""The message of a stock reader that is given a checkpoint of this package.

``FileSystemReader`` expects files of ``torch.save``, and would advise to switch ``weights_only`` off. But first it
looks up the extensions that the metadata name for each piece of data, and raises ``ValueError: Unknown extension
name='...'`` for an unknown one. So the extension's name is a helpful sentence.
"""

from __future__ import annotations

from typing import Final

__all__ = ["TRANSFORM_DESCRIPTORS"]

TRANSFORM_DESCRIPTORS: Final = (
    (
        "this is a checkpoint of dcp_datastates: load it with dcp_datastates.load(path), or with "
        "storage_reader=dcp_datastates.DataStatesReader(path); `dcp-datastates convert PATH OUT --to dcp` makes one of "
        "stock DCP"
    ),
)
"""For ``_StorageInfo.transform_descriptors``. It contains no slash: text after a slash is a version, and is not
printed. This package's reader ignores it, and reads checkpoints without it.
"""
