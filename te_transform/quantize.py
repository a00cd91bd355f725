"""Weights in FP8 alone: one byte a number, where a conversion in FP8 keeps the original beside a cast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from te_transform.backends.joined import is_stored, state_of
from te_transform.backends.limits import on_kernels_device
from te_transform.backends.quantized import exact, is_quantized, quantize
from te_transform.backends.running import forget_weights
from te_transform.execution.runner import is_divided
from te_transform.plan.model import check_module


class QuantizationError(ValueError):
    """The weights of this model cannot be quantized."""


@dataclass(frozen=True)
class Quantized:
    """The names of the weights that are held in FP8 alone, and of the others, with the reasons."""

    names: tuple[str, ...]
    left_out: dict[str, str]


def quantize_weights(model: nn.Module) -> Quantized:
    """Hold the frozen weights of every product that runs in FP8 in FP8 alone, for inference or adapters.

        te_transform.quantize_weights(converted.eval().requires_grad_(False))

    Parameters that hold them so take their place in the modules. What they were before is gone: state
    dicts, revert() and calls in plain PyTorch have the rounded values, in the dtype and under the names
    that the weights had; load_state_dict() quantizes what it loads, a joined weight once for each part.
    requires_grad_(True) raises. A product whose input needs a gradient keeps the transpose too, from its
    first backward on: two bytes a number.

    Args:
        model: what te_transform.convert(recipe=...) returned, on a GPU, or something that contains it.
            Products are known by what has run: where the model is a copy, call it once before.

    Returns:
        Which weights are in FP8 now, and why the others are not.

    Raises:
        QuantizationError: nothing in `model` has run in FP8, or it is divided among ranks.
        te_transform.ModelError: `model` is no module.
    """
    check_module(model, "quantize_weights")
    if is_divided(model):
        raise QuantizationError(
            "the model is divided among ranks, its weights are DTensors, plain ones are needed: quantize the "
            "weights of a model that is not"
        )
    reasons: dict[int, str] = {}
    holders = Counter(id(parameter) for _, _, parameter in _places(model))
    groups = list(_groups(model))
    if not groups and not any(map(is_quantized, model.parameters())):
        raise QuantizationError(
            f"no product of this {type(model).__name__} has run in FP8, a call of what "
            "te_transform.convert(model, recipe=...) returns shows which do"
        )
    for group, why_its_product in groups:
        whys = [_reason(parameter, holders) or why_its_product for parameter in group]
        why = next((why for why in whys if why is not None), None)
        if why is None:
            _hold(model, group)
        else:
            reasons |= {id(parameter): own or f"it is joined with a weight that stays: {why}"
                        for parameter, own in zip(group, whys, strict=True)}  # fmt: skip
    forget_weights(model.parameters())  # casts of what is in FP8 itself now
    named = dict(model.named_parameters(remove_duplicate=False))
    names = tuple(name for name, parameter in named.items() if is_quantized(parameter))
    left_out = {name: reasons.get(id(p), _unread(p)) for name, p in named.items() if not is_quantized(p)}
    return Quantized(names, left_out)


def dequantize_weights(model: nn.Module) -> None:
    """Let plain parameters take the place of those that are held in FP8 alone, with their values."""
    made: dict[int, nn.Parameter] = {}
    for module, name, parameter in list(_places(model)):
        if not is_quantized(parameter):
            continue
        if id(parameter) not in made:
            with torch.inference_mode(False), torch.no_grad():  # else they could not be trained
                held = nn.Parameter(exact(parameter), requires_grad=parameter.requires_grad)
            made[id(parameter)] = held
        module._parameters[name] = made[id(parameter)]
    for module in model.modules():
        for key, hook in list(module._state_dict_hooks.items()):
            if hook is _save_exact:
                del module._state_dict_hooks[key]


def _groups(model: nn.Module) -> Iterator[tuple[tuple[nn.Parameter, ...], str | None]]:
    """The weights of each product that has run in FP8, several where they are joined, and why that product
    could not read them in FP8, if it could not."""
    seen: set[int] = set()
    for parameter in list(model.parameters()):
        for kernel in list(state_of(parameter).kernels.values()):
            for weight in kernel.weights if kernel.ran_in_recipe else ():
                group = weight.parameters()
                if group and not any(id(p) in seen or is_quantized(p) for p in group):
                    seen |= set(map(id, group))
                    is_matrix = all(p.dim() == 2 for p in group)
                    yield group, _why_unreadable(weight.transposed, is_matrix, kernel.scales_by_blocks)


def _why_unreadable(transposed: bool, is_matrix: bool, scales_by_blocks: bool) -> str | None:
    if scales_by_blocks:
        return "its recipe has a scale for each block, weights are held with one scale: use 'fp8-current'"
    if not is_matrix:
        return "it is stored in another shape, TE's kernels read rows of outputs"
    return "it is stored transposed, TE's kernels read rows of outputs" if transposed else None


def _reason(parameter: Tensor, holders: Counter[int]) -> str | None:
    if parameter.requires_grad:
        return "it is trained, an optimizer needs it as it is: requires_grad_(False) freezes it"
    if not on_kernels_device(parameter):
        return "it is not on the GPU, TE has no kernel for it there: move the model first"
    if holders[id(parameter)] > 1:
        return "another module has it too, which would keep it as it is: untie it"
    if not is_stored(parameter) or not holders[id(parameter)]:
        return "it is no parameter of the model as it is stored"
    return None


def _unread(parameter: Tensor) -> str:
    state = state_of(parameter)
    if state.kernels or state.in_fp8 is False:
        return "its product does not run in FP8, the report of the conversion says why"
    return "no fused product reads it"


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield module, name, parameter


def _hold(model: nn.Module, group: Iterable[nn.Parameter]) -> None:
    """Let parameters that hold the weights in FP8 take the place of these."""
    group = list(group)
    made = dict(zip(map(id, group), quantize(group), strict=True))
    for module, name, parameter in list(_places(model)):
        held = made.get(id(parameter))
        if held is not None:
            state = state_of(parameter)
            state.group = None
            held._te_transform = state  # its kernels go on
            module._parameters[name] = held
            if _save_exact not in module._state_dict_hooks.values():
                module.register_state_dict_post_hook(_save_exact)


def _save_exact(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name in module._parameters:
        if prefix + name in state:
            state[prefix + name] = exact(state[prefix + name])
