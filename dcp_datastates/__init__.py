"""Saves PyTorch's training state in the background: a storage backend for ``torch.distributed.checkpoint`` (DCP).

Save and load
    async_save              save while training continues; returns a results.SaveHandle
    save                    save, and return when the checkpoint is committed
    load                    fill a state in place, or return all that was saved
    track                   name an optimizer before its first step

Training loops
    CheckpointManager       saves when one is due, deletes, stops at signals, resumes
    Keep                    the rules by which it and retain() keep checkpoints
    AutoInterval            saves as often as the costs of a save allow
    PerRank, RngState       values that differ between ranks
    Trainable               a model of which only the trained parameters are saved
    Weights                 where a loop publishes its model's weights
    follow                  each version of them, as it comes

Checkpoints
    latest                  the newest one below a directory that can be loaded
    inspect, verify         describe what is there; check every byte
    retain, delete          delete old ones; delete one
    pin, unpin              keep one from deletion
    copy, convert, diff     copy; change the format; compare two

Within DCP's own functions
    DataStatesWriter        storage_writer= of its save() and async_save()
    DataStatesReader        storage_reader= of its load()
    DataStatesSavePlanner   planner= of its save() and async_save()

The process
    errors                  the module of all errors: errors.DataStatesError is the base
    on_save, on_load        call a function with the record of each save or load
    configure_engine        threads, and limits of their rates
    configure_nodes         the nodes' memory and disks: ram:// and node://

``help(dcp_datastates.save)``, and so on, has the arguments. What functions return is in ``dcp_datastates.results``.

Importing the package registers one hook before every ``Optimizer.step()``, which costs nothing while no save is in
flight. What a save does not need is imported when it is first used.
"""

import importlib as _importlib
import typing as _typing
from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version
from types import ModuleType as _ModuleType

from dcp_datastates import errors as errors
from dcp_datastates.dcp.async_save import async_save as async_save
from dcp_datastates.dcp.async_save import save as save
from dcp_datastates.dcp.planner import DataStatesSavePlanner as DataStatesSavePlanner
from dcp_datastates.dcp.writer import DataStatesWriter as DataStatesWriter
from dcp_datastates.io.engine import configure_engine as configure_engine
from dcp_datastates.saving.outcome import on_save as on_save
from dcp_datastates.staging.ownership import track as track
from dcp_datastates.storage.object_path import register as _register

if _typing.TYPE_CHECKING:
    from dcp_datastates.checkpoints.copy import copy as copy
    from dcp_datastates.checkpoints.delete import delete as delete
    from dcp_datastates.checkpoints.describe import inspect as inspect
    from dcp_datastates.checkpoints.find import latest as latest
    from dcp_datastates.checkpoints.keep import Keep as Keep
    from dcp_datastates.checkpoints.pins import pin as pin
    from dcp_datastates.checkpoints.pins import unpin as unpin
    from dcp_datastates.checkpoints.retention import retain as retain
    from dcp_datastates.checkpoints.verify import verify as verify
    from dcp_datastates.conversion.compare import diff as diff
    from dcp_datastates.conversion.convert import convert as convert
    from dcp_datastates.dcp.reader import DataStatesReader as DataStatesReader
    from dcp_datastates.loading.load import load as load
    from dcp_datastates.loading.session import on_load as on_load
    from dcp_datastates.manager import AutoInterval as AutoInterval
    from dcp_datastates.manager import CheckpointManager as CheckpointManager
    from dcp_datastates.manager import PerRank as PerRank
    from dcp_datastates.manager import RngState as RngState
    from dcp_datastates.manager import Trainable as Trainable
    from dcp_datastates.storage.object_store import ObjectStore as _ObjectStore
    from dcp_datastates.tiers.nodes import configure_nodes as configure_nodes
    from dcp_datastates.weights.follow import follow as follow
    from dcp_datastates.weights.publish import Weights as Weights

_PLACES = {
    "AutoInterval": "manager.AutoInterval",
    "CheckpointManager": "manager.CheckpointManager",
    "DataStatesReader": "dcp.reader.DataStatesReader",
    "Keep": "checkpoints.keep.Keep",
    "PerRank": "manager.PerRank",
    "RngState": "manager.RngState",
    "Trainable": "manager.Trainable",
    "Weights": "weights.publish.Weights",
    "configure_nodes": "tiers.nodes.configure_nodes",
    "convert": "conversion.convert.convert",
    "copy": "checkpoints.copy.copy",
    "delete": "checkpoints.delete.delete",
    "diff": "conversion.compare.diff",
    "follow": "weights.follow.follow",
    "inspect": "checkpoints.describe.inspect",
    "latest": "checkpoints.find.latest",
    "load": "loading.load.load",
    "on_load": "loading.session.on_load",
    "pin": "checkpoints.pins.pin",
    "retain": "checkpoints.retention.retain",
    "unpin": "checkpoints.pins.unpin",
    "verify": "checkpoints.verify.verify",
}
"""Of what is imported when it is first used. There is no ``__all__``: ``help()`` would print each object of it."""


if not _typing.TYPE_CHECKING:  # which would take any name for one that is there

    def __getattr__(name: str) -> _typing.Any:
        module, _, attribute = _PLACES.get(name, "").rpartition(".")
        if not module:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(_importlib.import_module(f"{__name__}.{module}"), attribute)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    modules = {name for name, each in globals().items() if isinstance(each, _ModuleType)}
    public = {name for name in {*globals(), *_PLACES} - modules if not name.startswith("_")}
    return sorted({*public, "errors", "__doc__", "__file__", "__path__", "__version__"})


def _nodes_store(root: str, key: str) -> "_ObjectStore":
    from dcp_datastates.tiers.copies import open_nodes

    return open_nodes(root, key)


_register("ram", _nodes_store)
_register("node", _nodes_store)

try:
    __version__ = _version("dcp_datastates")
except _PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+unknown"
