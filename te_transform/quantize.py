"""Weights in FP8 alone: one byte a number, where a conversion in FP8 keeps the original beside a cast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from te_transform.autocast import precisions
from te_transform.emit import hold
from te_transform.originals import fusions, holders, original_parameters
from te_transform.slots import Fusion
from te_transform.weights import is_quantised


class QuantizationError(ValueError):
    """The weights of this model cannot be quantized."""


@dataclass(frozen=True)
class Quantized:
    """The original names of the weights that are held in FP8 alone, and of the others, with the reasons."""

    names: tuple[str, ...]
    left_out: dict[str, str]


def quantize_weights(model: nn.Module) -> Quantized:
    """Hold the frozen weights of every product that runs in FP8 in FP8 alone, for inference or adapters.

        te_transform.quantize_weights(converted.eval().requires_grad_(False))

    TE's tensors take their place, as in its quantized_model_init. What they were before is gone: state dicts,
    revert() and calls in plain PyTorch have the dequantised values, in the dtype and under the names that the
    weights had; load_state_dict() quantises what it loads, a joined weight once for each part. A product
    whose input needs a gradient keeps the transpose too, from its first backward on: two bytes a number.

    Args:
        model: what te_transform.convert(recipe=...) returned, on a GPU, or something that contains it.

    Returns:
        Which weights are in FP8 now, and why the others are not.

    Raises:
        QuantizationError: nothing in `model` runs in FP8, or this release of TE is too old.
    """
    inside = precisions(model).values()
    recipes = {fused: precision.recipe for precision in inside for fused in precision.modules}
    if not recipes:
        raise QuantizationError(
            f"nothing in this {type(model).__name__} runs in FP8, te_transform.convert(model, recipe=...) "
            "returns a model in which something does"
        )
    from te_transform.backends import te

    if not te.HOLDS_FP8:
        raise QuantizationError(
            "this release of Transformer Engine has modules whose weights cannot be quantized afterwards, "
            "a later one is needed: 2.20 is known to do"
        )
    held = holders(model)
    reasons: dict[int, str] = {}
    for fusion, target in _weights(model):
        weight = getattr(fusion.fused, target)
        why = _reason(weight, fusion, recipes, held)
        if why is None:
            hold(fusion, target, te.quantised(fusion.fused, target, recipes[fusion.fused]))
        else:
            reasons[id(weight)] = why
    for precision in inside:
        precision.forget()  # casts of what is in FP8 itself now
    originals = {name: original.held for name, original in original_parameters(model).items()}
    names = tuple(name for name, weight in originals.items() if is_quantised(weight))
    rest = {name: weight for name, weight in originals.items() if not is_quantised(weight)}
    left_out = {name: reasons.get(id(weight), "no fused product reads it") for name, weight in rest.items()}
    return Quantized(names, left_out)


def _weights(model: nn.Module) -> Iterator[tuple[Fusion, str]]:
    """Each fused weight that is not in FP8 yet."""
    for fusion in fusions(model):
        for name in getattr(fusion.fused, "weight_names", ()):
            if not is_quantised(getattr(fusion.fused, name)):
                yield fusion, name


def _reason(weight: Tensor, fusion: Fusion, recipes: dict, held: Counter[int]) -> str | None:
    if fusion.fused not in recipes:
        return "its product does not run in FP8, the report of the conversion says why"
    if weight.requires_grad:
        return "it is trained, an optimizer needs it as it is: requires_grad_(False) freezes it"
    if not _on_gpu(weight):
        return "it is not on the GPU, TE has no kernel for it there: move the model first"
    if held[id(weight)] > 1:
        return "another module has it too, which would keep it as it is: untie it"
    return None


def _on_gpu(weight: Tensor) -> bool:
    return weight.is_cuda
