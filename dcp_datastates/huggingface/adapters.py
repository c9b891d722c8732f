"""What PEFT saves of a model with adapters: which of its parameters, and which small files beside them."""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers.utils import is_peft_available

__all__ = ["adapters_of", "placeholders", "saved_names"]

_SHARDED: Final = "_fsdp_wrapped_module."
"""What FSDP1 puts into the names of parameters."""

_PROMPTS: Final = "prompt_encoder."
"""Where prompts lie, of which PEFT saves what it makes of them."""


def adapters_of(model: torch.nn.Module) -> Any:
    """``model``, without a wrapper around it, if it is one of PEFT; else None."""
    if not is_peft_available():
        return None
    from peft import PeftModel

    return model if isinstance(model, PeftModel) else None


def placeholders(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A state of ``model`` with a single number for each tensor: for code that looks at names."""
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {
        name.replace(_SHARDED, ""): torch.empty(1, device="cpu", dtype=torch.float32)
        for name, _ in named
    }


def saved_names(model: Any) -> set[str]:
    """The names of the parameters that PEFT saves of ``model``: of all its adapters, also of those that are frozen."""
    from peft import get_peft_model_state_dict

    state = placeholders(model)
    name_of = {id(value): name for name, value in state.items()}
    names = {name for name in state if name.startswith(_PROMPTS)}
    for adapter in model.peft_config:
        saved = get_peft_model_state_dict(model, state_dict=dict(state), adapter_name=adapter)
        names.update(name_of[id(value)] for value in saved.values() if id(value) in name_of)
    return names
