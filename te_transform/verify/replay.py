"""Run a callable forward and backward, or in fp64, so that numbers can be compared; leave no trace."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.convert_frame import compile_lock
from torch.utils._pytree import tree_leaves, tree_map_with_path

from te_transform.backends.quantized import exact
from te_transform.graph.inputs import Inputs
from te_transform.graph.preserve import same_buffers, same_random
from te_transform.verify.judged import Judged, Noise

Context = Callable[[], contextlib.AbstractContextManager]


@dataclass(frozen=True)
class Subject:
    """What is run: a callable, its parameters by name, and what both the forward and the backward run in."""

    call: Callable[..., Any]
    parameters: Callable[[], Iterable[tuple[str, Tensor]]]
    within: Context = contextlib.nullcontext

    @classmethod
    def of(cls, model: nn.Module, within: Context = contextlib.nullcontext) -> Subject:
        """A model, each run of which begins with the same buffers."""

        @contextlib.contextmanager
        def within_the_same() -> Iterator[None]:
            with same_buffers(model), within():
                yield

        return cls(model, model.named_parameters, within_the_same)


@dataclass(frozen=True, eq=False)
class Run:
    """What a forward and a backward of sum(output * cotangent) gave, by name."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    cotangents: dict[str, Tensor]


def run(
    subject: Subject,
    inputs: Inputs,
    *,
    cotangents: Mapping[str, Tensor] | None = None,
    double: bool = False,
    rounding: int | None = None,
) -> Run:
    """Run `subject` forward and, where gradients are enabled, backward, with its dropouts off.

    Args:
        subject: its parameters get gradients, frozen ones are passed over.
        inputs: the arguments; those floating tensors that require a gradient get one.
        cotangents: those of the run that this one will be compared to, None for the first.
        double: run in fp64, whatever dtypes the forward asks for; what `subject` reads has to be in fp64.
        rounding: a seed; every result that a gradient flows through is put off by a random half ulp at most.
    """
    args, kwargs, leaves = _given(inputs, double)
    mode = Judged(double, rounding)
    with subject.within(), _default_dtype(double), same_random(tree_leaves((args, kwargs))):
        trained = {name: tensor for name, tensor in subject.parameters() if tensor.requires_grad}
        with mode:
            outputs = dict(_named(subject.call(*args, **kwargs)))
        cotangents = _cotangents(outputs) if cotangents is None else cotangents
        with mode:  # checkpoints run their forward again in there
            gradients = _gradients(outputs, cotangents, trained | leaves) if torch.is_grad_enabled() else {}
    return Run({name: out.detach() for name, out in outputs.items()}, gradients, dict(cotangents))


@contextlib.contextmanager
def in_double(model: nn.Module) -> Iterator[None]:
    """Let `model` compute in fp64, with copies of its parameters and buffers in the place of its own.

    The model itself runs, not a copy of it, which might reach for the original's parameters.
    """
    copies: dict[int, Tensor] = {}
    held = [
        (module, name, tensor)
        for module in model.modules()
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None and tensor.is_floating_point()
    ]
    try:
        for module, name, tensor in held:  # a tied tensor stays one tensor
            copies[id(tensor)] = copies[id(tensor)] if id(tensor) in copies else widened(tensor)
            setattr(module, name, copies[id(tensor)])
        yield
    finally:
        for module, name, tensor in held:
            setattr(module, name, tensor)


def widened(tensor: Tensor) -> Tensor:
    """A copy in fp64, of a parameter another parameter, with its hooks."""
    wide = exact(tensor.detach()).to(torch.float64, copy=True)
    if not isinstance(tensor, nn.Parameter):
        return wide
    parameter = nn.Parameter(wide, tensor.requires_grad)
    for hook in (tensor._backward_hooks or {}).values():
        parameter.register_hook(hook)
    return parameter


def _given(inputs: Inputs, double: bool) -> tuple[tuple, dict[str, Any], dict[str, Tensor]]:
    """The arguments in tensors of their own, and the leaves among them that want a gradient, by name."""
    copies: dict[int, Tensor] = {}
    leaves: dict[str, Tensor] = {}

    def own(path: tuple, tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        if id(tensor) not in copies:
            leaf = tensor.detach().clone()
            leaf = leaf.double() if double and leaf.is_floating_point() else leaf
            if tensor.requires_grad:
                keys = (str(getattr(key, "key", getattr(key, "idx", key))) for key in path[1:])
                leaves[f"input {'.'.join(keys)}"] = leaf.requires_grad_()
            copies[id(tensor)] = leaf.clone()  # no leaf, so that a forward may write into it
        return copies[id(tensor)]

    args, kwargs = tree_map_with_path(own, (inputs.args, inputs.kwargs))
    return *copy.deepcopy((args, kwargs), {id(t): t for t in copies.values()}), leaves


def _named(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of an output, named by the way to them; key-value caches are passed over."""
    if isinstance(value, Tensor):
        yield name, value
        return
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (tuple, list)):
        items = enumerate(value)
    elif is_dataclass(value):
        items = ((field.name, getattr(value, field.name)) for field in fields(value))
    else:
        return
    for key, item in items:
        yield from _named(item, f"{name}.{key}".lstrip("."))


def _cotangents(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    noise = Noise(0)
    return {
        name: noise.of(torch.randn, out).to(out) for name, out in outputs.items() if out.is_floating_point()
    }


def _gradients(
    outputs: dict[str, Tensor], cotangents: Mapping[str, Tensor], sources: dict[str, Tensor]
) -> dict[str, Tensor]:
    used = [name for name, out in outputs.items() if out.requires_grad and name in cotangents]
    if not used or not sources:
        return {}
    # what torch.autograd.grad calls; that function itself would be handed to the mode, and run outside of it
    given = torch.autograd.Variable._execution_engine.run_backward(
        tuple(outputs[name] for name in used),
        tuple(cotangents[name].to(outputs[name]) for name in used),
        keep_graph=False,
        create_graph=False,
        inputs=tuple(sources.values()),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    pairs = zip(sources.items(), given, strict=True)
    return {name: torch.zeros_like(source) if grad is None else grad for (name, source), grad in pairs}


@contextlib.contextmanager
def _default_dtype(double: bool) -> Iterator[None]:
    """The dtype of tensors that a forward makes without naming one.

    All threads have one default. Dynamo puts back, after each compilation, the one that it found: nobody
    compiles in another thread while it is fp64.
    """
    if not double:
        yield
        return
    with compile_lock:
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(torch.float64)
            yield
        finally:
            torch.set_default_dtype(before)
