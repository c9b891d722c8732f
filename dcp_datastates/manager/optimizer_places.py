"""Places for the stored tensors of an optimizer: its own where they fit, and new ones as they were stored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import empty as empty_sharded

from dcp_datastates.errors import IncompatibleStateError
from dcp_datastates.format.stored_names import prefixes_of
from dcp_datastates.loading.stored import Described, Stored
from dcp_datastates.manager.live_optimizer import LiveOptimizer
from dcp_datastates.manager.models import device_of, empty_like
from dcp_datastates.manager.structure import Structure, put_together, taken_apart


def placements_of(
    tensor: torch.Tensor, *, like: torch.Tensor | None
) -> tuple[int | None, ...] | None:
    """The placements of a DTensor of another shape than its parameter: the dimension of each shard, and None for a
    replica. None for any other tensor.
    """
    if not isinstance(tensor, DTensor) or like is None or tensor.shape == like.shape:
        return None
    return tuple(each.dim if isinstance(each, Shard) else None for each in tensor.placements)


class Places:
    """Makes the places.

    Args:
        live: The optimizer as it is.
        names: The stored names to load, by the program's.
        stored: What is stored, by its names.
        nested: The structures of states that are not flat.
    """

    def __init__(
        self,
        live: LiveOptimizer,
        names: Mapping[str, str],
        stored: Stored,
        nested: Mapping[str, Structure],
    ) -> None:
        self._live = live
        self._stored_as = {
            name: stored.get(names.get(full, full)) for name, full in live.in_model.items()
        }
        self._parameters = {**live.elsewhere, **live.parameters}
        self._tensors: dict[str, dict[str, torch.Tensor]] = {}
        self._placements: dict[str, dict[str, tuple[int | None, ...] | None]] = defaultdict(dict)
        for name, structure in nested.items():
            noted = self._placements[name]
            put_together(structure, lambda path, note=None, to=noted: to.update({path: note}))

    def split(self, name: str) -> tuple[str | None, str]:
        """The parameter to which the part of its state with this name belongs, and the rest of the name."""
        for prefix in sorted(prefixes_of(name), key=len, reverse=True):
            if prefix in self._parameters and prefix != name:
                return prefix, name[len(prefix) + 1 :]
        return None, name

    def of_state(self, parameter: str, path: str, entry: Described | None) -> Any:
        """The place of a tensor of a parameter's state."""
        held = self._held(parameter).get(path)
        like = self._parameters[parameter]
        if entry is None:  # a wrapper, stored as its parts
            return self._wrapper(parameter, path, like) if held is None else held
        if held is not None and held.shape == entry.size:
            return held
        if like is None:
            return self.plain(entry)
        dtype = entry.dtype
        saved = self._stored_as.get(parameter)
        if saved is not None and saved.size == entry.size:
            # It is as the parameter, which may have changed: then the load says so.
            dtype = like.dtype if dtype == saved.dtype else dtype
            return empty_like(like, dtype)
        if like.shape == entry.size:
            return empty_like(like, dtype)
        note = self._placements[parameter].get(path) if parameter in self._placements else None
        if note is not None and isinstance(like, DTensor) and len(note) == like.device_mesh.ndim:
            placements = [Replicate() if each is None else Shard(each) for each in note]
            return empty_sharded(
                *entry.size, dtype=dtype, device_mesh=like.device_mesh, placements=placements
            )
        return torch.empty(entry.size, dtype=dtype, device=self._device(path, like))

    @staticmethod
    def plain(entry: Described | None) -> torch.Tensor | None:
        """The place of any other tensor; None for a value."""
        if entry is None:
            return None
        return torch.empty(entry.size, dtype=entry.dtype, device="cpu")

    def _held(self, parameter: str) -> dict[str, torch.Tensor]:
        if parameter not in self._tensors:
            state = self._live.states.get(parameter)
            self._tensors[parameter] = taken_apart(state)[0] if isinstance(state, Mapping) else {}
        return self._tensors[parameter]

    def _device(self, path: str, like: torch.Tensor) -> torch.device:
        """As torch's ``load_state_dict()`` has it: a step is read by the host, unless the optimizer says otherwise."""
        on_device = any(
            settings.get(each)
            for _, settings in self._live.groups
            for each in ("capturable", "fused")
        )
        return device_of(like) if path != "step" or on_device else torch.device("cpu")

    def _wrapper(self, parameter: str, path: str, like: torch.Tensor | None) -> torch.Tensor:
        """A new wrapper subclass, such as torchao's: only the optimizer can make one. A copy of it, which has nothing
        else, takes a step with a parameter of zeros.
        """
        made = None
        if like is not None:
            stand_in = torch.nn.Parameter(torch.zeros_like(like))
            stand_in.grad = torch.zeros_like(stand_in)
            clone: Any = object.__new__(type(self._live.optimizer))
            vars(clone).update(
                vars(self._live.optimizer)
            )  # copy.copy() loses attributes of subclasses
            clone.state = defaultdict(dict)
            settings = self._live.groups[0][1]
            clone.param_groups = [{**settings, "params": [stand_in]}]
            step = type(clone).step
            getattr(step, "__wrapped__", step)(clone)  # without the hooks
            made = taken_apart(dict(clone.state.get(stand_in, {})))[0].get(path)
        if made is None:
            raise IncompatibleStateError(
                f"{path!r} of the parameter {parameter!r} was saved as a tensor subclass, which "
                f"{type(self._live.optimizer).__qualname__} does not make; load it as plain tensors with load()"
            )
        return made
