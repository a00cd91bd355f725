"""Replace parameters of the user's model by FP8-only ones, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from te_transform.backends.fp8.fp8_only import exact, is_fp8_only


def parameters_in(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield each parameter once for every module and name that hold it."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield module, name, parameter


def replace_by_fp8_only(model: nn.Module, replacements: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Replace parameters by FP8-only ones; state dicts then have their dequantized values."""
    for module, name, parameter in list(parameters_in(model)):
        if (replacement := replacements.get(parameter)) is not None:
            module._parameters[name] = replacement
            if _save_exact not in module._state_dict_hooks.values():
                module.register_state_dict_post_hook(_save_exact)


def dequantize_weights(model: nn.Module) -> None:
    """Replace FP8-only parameters by plain parameters with the same values."""
    plain: dict[nn.Parameter, nn.Parameter] = {}
    for module, name, parameter in list(parameters_in(model)):
        if not is_fp8_only(parameter):
            continue
        if parameter not in plain:
            with torch.inference_mode(False), torch.no_grad():  # inference tensors could not be trained
                plain[parameter] = nn.Parameter(exact(parameter), requires_grad=parameter.requires_grad)
        module._parameters[name] = plain[parameter]
    for module in model.modules():
        for key, hook in list(module._state_dict_hooks.items()):
            if hook is _save_exact:
                del module._state_dict_hooks[key]


def _save_exact(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name in module._parameters:
        if prefix + name in state:
            state[prefix + name] = exact(state[prefix + name])
