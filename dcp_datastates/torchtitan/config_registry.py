"""Every config function of torchtitan, with this package's checkpoint manager, for ``--module``.

``--module dcp_datastates.torchtitan --config llama3.llama3_debugmodel`` is the config function ``llama3_debugmodel`` of
``--module llama3``. The part before the last dot is a module as for ``--module``: the short name of a torchtitan
module, or the full name of any module. The manager's options are passed on the command line, as
``--checkpoint.host_cache_size 16GiB``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

from dcp_datastates.errors import ConfigurationError
from dcp_datastates.torchtitan.choose import with_datastates

_PACKAGES = ("torchtitan.models", "torchtitan.experiments", "torchtitan.experiments.rl.examples")
"""The packages that contain torchtitan's modules with short names."""


def __getattr__(name: str) -> Callable[[], Any]:
    module, dot, function = name.rpartition(".")
    if not dot:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    registry = _registry(module)
    found = getattr(registry, function, None)
    if not callable(found):
        raise ConfigurationError(
            f"--config {name}: {registry.__name__} has no config function {function!r}"
        )

    @functools.wraps(found)
    def config() -> Any:
        return with_datastates(found())

    return config


def _registry(module: str) -> ModuleType:
    """The module in which ``--module`` finds config functions: ``module.config_registry`` if it exists, else
    ``module``.
    """
    names = [module] if "." in module else [f"{package}.{module}" for package in _PACKAGES]
    for name in names if "." in module else [*names, module]:
        for candidate in (f"{name}.config_registry", name):
            if _exists(candidate):
                return importlib.import_module(candidate)
    raise ConfigurationError(
        f"--config {module}.…: there is no module {module!r}; name one as --module takes it, such as "
        f"llama3, or by its full name"
    )


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is missing, or is not a package
        return False
