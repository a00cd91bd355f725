"""Check that two models can be compared, and select the inputs that both accept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from te_transform.graph.errors import in_a_line, in_full
from te_transform.graph.inputs import Inputs
from te_transform.graph.keywords import ArgumentError
from te_transform.graph.names import forward_parameters
from te_transform.graph.nodes import dtype_name
from te_transform.graph.preserve import same_random, same_state
from te_transform.plan.model import is_exported
from te_transform.verify.judged import Judged
from te_transform.verify.names import uncompiled
from te_transform.verify.replay import held_values, named_tensors
from te_transform.verify.variations import EXAMPLE, LEFT_PADDED, Variation

MASK = "attention_mask"


def check_outputs(models: tuple[nn.Module, nn.Module], sample: Inputs) -> list[set[str]]:
    """Return the names of each model's held values, see held_values(), after a call of each model.

    Raises:
        ValueError: a model raises, a result has no tensors, or the tensors cannot be paired.
    """
    outputs, names = [], []
    for model in models:
        args, kwargs = sample.clone()
        try:
            model.eval()
            with same_state(model), torch.no_grad():
                result = model(*args, **kwargs)
        except Exception as error:  # the user's code may raise anything
            raise ArgumentError(
                f"expected example inputs on which both models run, got {sample}; {type(model).__name__} "
                f"raised {in_full(error)}"
            ) from error
        outputs.append(dict(named_tensors(result)))
        names.append({name for name, _ in held_values(result)})
        if not outputs[-1]:
            raise ArgumentError(
                f"expected tensors from {type(model).__name__}, got a {type(result).__name__}; return a "
                "tensor, or a tuple, dict or dataclass of tensors"
            )
    if not outputs[0].keys() & outputs[1].keys() and len(outputs[0]) != len(outputs[1]):
        one, other = (
            f"{_listed(tensors)} from {type(model).__name__}"
            for model, tensors in zip(models, outputs, strict=True)
        )
        raise ArgumentError(
            f"expected outputs with the same names or number, got {one} and {other}; wrap one model in a "
            "module that returns what the other returns"
        )
    return names


def _listed(tensors: dict[str, Tensor]) -> str:
    kinds = (f"{name or 'a tensor'} ({dtype_name(t.dtype)}{list(t.shape)})" for name, t in tensors.items())
    return ", ".join(kinds)


def check_scripted(models: Sequence[nn.Module], sample: Inputs) -> None:
    """Raise if a module of torch.jit draws random numbers, which no function mode sees.

    Raises:
        ValueError: a model with such a module draws random numbers in training.
    """
    for model in models:
        if not any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
            continue
        args, kwargs = sample.clone()
        with same_state(model), same_random(tree_leaves((args, kwargs))), torch.no_grad(), Judged() as mode:
            before = _generator_states()
            model.train()(*args, **kwargs)
            is_random = not all(map(torch.equal, before, _generator_states()))
        if is_random and not mode.drawn:
            raise ArgumentError(
                f"expected modules of torch.jit without random numbers, got a {type(model).__name__} that "
                "draws some in training; compare it before torch.jit, or set p=0 in its dropouts first"
            )


def _generator_states() -> list[Tensor]:
    return [each.get_state() for each in (torch.default_generator, *torch.cuda.default_generators)]


def accepted(sets: Sequence[Variation], second: nn.Module) -> tuple[list[Variation], list[str]]:
    """Return the sets that the second model accepts, and a sentence for each other set."""
    kept, left_out = [], []
    is_masked = any(MASK in each.inputs.kwargs for each in sets if each.label.startswith(EXAMPLE))
    takes_mask = is_masked or _takes_mask(second)
    is_fixed = any(map(is_exported, second.modules()))
    waiting = [*sets]
    while waiting:
        each = waiting.pop(0)
        if each.label.startswith(EXAMPLE):
            kept.append(each)
        elif not takes_mask and MASK in each.inputs.kwargs:
            left_out.append(f"{each.label}, the second model takes no {MASK}")
        elif is_fixed and (error := _error_on(second, each.inputs)):
            sentence = f"{each.label}, the second model raised {error}; pass dynamic_shapes= to torch.export"
            left_out += [] if each.apart else [sentence]
            waiting[:0] = each.apart
        else:
            kept += [each, _right_padded(each)] if each.label == LEFT_PADDED else [each]
    return kept, left_out


def _takes_mask(model: nn.Module) -> bool:
    parameters = forward_parameters(uncompiled(model)).values()
    return any(p.name == MASK or p.kind is p.VAR_KEYWORD for p in parameters)


def _error_on(model: nn.Module, inputs: Inputs) -> str:
    """Return the error of a model on inputs, or ""."""
    args, kwargs = inputs.clone()
    try:
        with same_state(model), torch.no_grad():
            model(*args, **kwargs)
    except Exception as error:
        return in_a_line(error)
    return ""


def _right_padded(padded: Variation) -> Variation:
    """Return the left-padded variation with the padding on the right."""
    inputs = padded.inputs
    kwargs: dict[str, Any] = {**inputs.kwargs, MASK: inputs.kwargs[MASK].flip(1)}
    return Variation("right-padded", Inputs(inputs.args, kwargs))
