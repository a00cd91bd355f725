"""FP8-only weights: one byte per element; a plain FP8 conversion keeps the original next to its FP8 copy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from te_transform.backends.fp8.fp8_only import is_fp8_only
from te_transform.backends.fp8.registry import forget_weights, read_state, share_state
from te_transform.backends.limits import on_kernels_device
from te_transform.execution.attach import is_divided
from te_transform.execution.fp8_only import parameters_in, replace_by_fp8_only
from te_transform.fp8_only.weights import quantize_together
from te_transform.plan.model import check_module


class QuantizationError(ValueError):
    """The error for a model whose weights cannot be quantized."""


@dataclass(frozen=True)
class Quantized:
    """The names of the weights that are stored only in FP8, and of the others, with the reasons."""

    names: tuple[str, ...]
    left_out: dict[str, str]


def quantize_weights(model: nn.Module) -> Quantized:
    """Store the frozen weights of every FP8 product only in FP8, for inference or adapters.

        te_transform.quantize_weights(converted.eval().requires_grad_(False))

    FP8 parameters replace the original parameters in the modules; the original values are lost. State dicts,
    revert() and calls in plain PyTorch have the rounded values, with the original dtypes and names.
    load_state_dict() quantizes the loaded weights, and the parts of a joined weight separately.
    requires_grad_(True) raises. If the input of a product needs a gradient, the transpose is stored too, from
    the first backward on: two bytes per element.

    Args:
        model: A model returned by te_transform.convert(recipe=...), on a GPU, or a module that contains it. A
            product counts as FP8 once it has run in FP8: call a copied model once before.

    Returns:
        The names of the weights that are now in FP8, and the reasons for the others.

    Raises:
        QuantizationError: no product of `model` has run in FP8, or the model is divided among ranks.
        te_transform.ModelError: `model` is not a module.
    """
    check_module(model, "quantize_weights")
    if is_divided(model):
        raise QuantizationError(
            "expected plain tensors as weights, got a model divided among ranks, whose weights are DTensors; "
            "quantize the weights of an undivided model"
        )
    reasons: dict[int, str] = {}
    holders = Counter(id(parameter) for _, _, parameter in parameters_in(model))
    groups = list(_product_weights(model))
    if not groups and not any(map(is_fp8_only, model.parameters())):
        raise QuantizationError(
            f"expected a model with products that have run in FP8, got a {type(model).__name__} without; "
            "first call the model that te_transform.convert(model, recipe=...) returns"
        )
    for group, why_its_product in groups:
        whys = [_why_not_quantized(parameter, holders) or why_its_product for parameter in group]
        why = next((why for why in whys if why is not None), None)
        if why is None:
            _hold(model, group)
        else:
            reasons |= {id(parameter): own or f"it is joined with a weight that stays: {why}"
                        for parameter, own in zip(group, whys, strict=True)}  # fmt: skip
    forget_weights(model.parameters())  # drop cached FP8 copies of weights that are in FP8 now
    named = dict(model.named_parameters(remove_duplicate=False))
    names = tuple(name for name, parameter in named.items() if is_fp8_only(parameter))
    left_out = {name: reasons.get(id(p), _unread(p)) for name, p in named.items() if not is_fp8_only(p)}
    return Quantized(names, left_out)


def _product_weights(model: nn.Module) -> Iterator[tuple[tuple[nn.Parameter, ...], str | None]]:
    """Yield the weights of each product that has run in FP8, several if they are joined.

    The second item says why the product cannot read FP8-only weights, or is None.
    """
    seen: set[int] = set()
    for parameter in list(model.parameters()):
        for kernel in list(read_state(parameter).kernels.values()):
            for weight in kernel.weights if kernel.in_recipe else ():
                group = weight.parameters()
                if group and not any(id(p) in seen or is_fp8_only(p) for p in group):
                    seen |= set(map(id, group))
                    is_matrix = all(p.dim() == 2 for p in group)
                    yield group, _why_unreadable(weight.transposed, is_matrix, kernel.scales_by_blocks)


def _why_unreadable(transposed: bool, is_matrix: bool, scales_by_blocks: bool) -> str | None:
    if scales_by_blocks:
        return "its recipe has a scale per block, but FP8-only weights have one scale: use 'fp8-current'"
    if not is_matrix:
        return "it is not a matrix, but TE's kernels need [out, in]"
    return "it is stored transposed, but TE's kernels need [out, in]" if transposed else None


def _why_not_quantized(parameter: Tensor, holders: Counter[int]) -> str | None:
    if parameter.requires_grad:
        return "it is trained, and an optimizer needs the original values: freeze it by requires_grad_(False)"
    if not on_kernels_device(parameter):
        return "it is not on the GPU, where TE has its kernels: move the model first"
    if holders[id(parameter)] > 1:
        return "it is tied to another module, which would keep the original: untie it"
    if not isinstance(parameter, nn.Parameter) or not holders[id(parameter)]:
        return "it is not a stored parameter of the model"
    return None


def _unread(parameter: Tensor) -> str:
    state = read_state(parameter)
    if state.kernels or state.in_fp8 is False:
        return "its product does not run in FP8, the report of the conversion says why"
    return "no fused product reads it"


def _hold(model: nn.Module, group: Sequence[nn.Parameter]) -> None:
    """Replace the parameters of a group by FP8-only ones, which keep their kernels and scales."""
    replacements = dict(zip(group, quantize_together(group), strict=True))
    for parameter, replacement in replacements.items():
        share_state(parameter, replacement)
    replace_by_fp8_only(model, replacements)
