"""Run a callable forward and backward for a comparison, optionally in fp64, without side effects."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.convert_frame import compile_lock
from torch.utils._pytree import tree_leaves, tree_map_with_path

from te_transform.backends.fp8.fp8_only import exact
from te_transform.execution.attach import original_forward
from te_transform.graph.bits import dense_parts
from te_transform.graph.inputs import Inputs
from te_transform.graph.preserve import same_random, same_state
from te_transform.verify.judged import Judged, Noise, wide_dtype

Context = Callable[[], contextlib.AbstractContextManager]


@dataclass(frozen=True)
class Subject:
    """The callable to run, its parameters by name, and a context for both forward and backward.

    `pull_back` turns gradients of these parameters into gradients of the parameters to compare. No function
    mode sees a subject with `is_compiled`, so its dropouts stay on.
    """

    call: Callable[..., Any]
    parameters: Callable[[], Iterable[tuple[str, Tensor]]]
    within: Context = contextlib.nullcontext
    pull_back: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict
    is_compiled: bool = False

    @classmethod
    def of(cls, model: nn.Module, within: Context = contextlib.nullcontext) -> Subject:
        """Return the subject of a model; each run begins with the same state."""

        @contextlib.contextmanager
        def within_the_same() -> Iterator[None]:
            with same_state(model), within():
                yield

        return cls(model, model.named_parameters, within_the_same)


@dataclass(frozen=True, eq=False)
class Run:
    """The outputs and gradients, by name, of a forward and the backward of sum(output * cotangent).

    `drawn` has the random numbers of both. `drops` is True if a dropout of the forward would be on.
    """

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    cotangents: dict[str, Tensor]
    drawn: Sequence[Tensor] = ()
    drops: bool = False


def run(
    subject: Subject,
    inputs: Inputs,
    *,
    cotangents: Mapping[str, Tensor] | None = None,
    double: bool = False,
    rounding: int | None = None,
    drawn: Iterable[Tensor] | None = None,
) -> Run:
    """Run `subject` forward and, if gradients are enabled, backward, with dropout off.

    Args:
        subject: The callable to run. Its parameters get gradients, except frozen ones.
        inputs: The arguments. Floating-point tensors that require a gradient get one.
        cotangents: The cotangents of the run to compare with; None for the first run.
        double: True to run in fp64, regardless of casts in the forward. The tensors that `subject` reads must
            be in fp64.
        rounding: A seed to perturb every result that requires a gradient by at most a random half ulp.
        drawn: The random numbers of another run, in place of new ones.
    """
    args, kwargs, leaves = _copies_and_leaves(inputs, double)
    judged = Judged(double, rounding, drawn)
    mode = contextlib.nullcontext() if subject.is_compiled else judged
    with subject.within(), _default_dtype(double), same_random(tree_leaves((args, kwargs))):
        trained = {name: tensor for name, tensor in subject.parameters() if tensor.requires_grad}
        with mode:
            result = subject.call(*args, **kwargs)
        outputs = dict((*named_tensors(result), *held_values(result)))
        cotangents = _cotangents(outputs) if cotangents is None else cotangents
        with mode:  # the backward of checkpoints reruns their forward
            gradients = (
                _source_gradients(outputs, cotangents, trained | leaves) if torch.is_grad_enabled() else {}
            )
        own = {name: gradient for name, gradient in gradients.items() if name in trained}
        gradients = subject.pull_back(own) | {n: g for n, g in gradients.items() if n not in trained}
        gradients = {name: _as_real(gradient) for name, gradient in gradients.items()}
    detached = {name: out.detach() for name, out in outputs.items()}
    return Run(detached, gradients, dict(cotangents), judged.drawn, judged.drops)


@contextlib.contextmanager
def original_code(model: nn.Module, double: bool = False) -> Iterator[None]:
    """Run the user's own code of `model`, in fp64 if `double`."""
    with original_forward(model), in_double(model) if double else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def in_double(model: nn.Module) -> Iterator[None]:
    """Run `model` in fp64, by replacing its parameters and buffers with copies in fp64.

    A copy of the model would not do, because it might refer to parameters of the original.
    """
    copies: dict[int, Tensor] = {}
    own = [
        (module, name, tensor)
        for module in model.modules()
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None and (tensor.is_floating_point() or tensor.is_complex())
    ]
    try:
        for module, name, tensor in own:  # a tied tensor stays one tensor
            copies[id(tensor)] = copies[id(tensor)] if id(tensor) in copies else widened(tensor)
            setattr(module, name, copies[id(tensor)])
        yield
    finally:
        for module, name, tensor in own:
            setattr(module, name, tensor)


def widened(tensor: Tensor) -> Tensor:
    """Return a copy in fp64; a parameter stays a parameter, with its hooks."""
    wide = exact(tensor.detach()).to(wide_dtype(tensor.dtype), copy=True)
    if not isinstance(tensor, nn.Parameter):
        return wide
    parameter = nn.Parameter(wide, tensor.requires_grad)
    for hook in (tensor._backward_hooks or {}).values():
        parameter.register_hook(hook)
    return parameter


def _copies_and_leaves(inputs: Inputs, double: bool) -> tuple[tuple, dict[str, Any], dict[str, Tensor]]:
    """Return copies of the arguments, and the leaves that require a gradient, by name."""
    copies: dict[int, Tensor] = {}
    leaves: dict[str, Tensor] = {}

    def own(path: tuple, tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        if id(tensor) not in copies:
            leaf = tensor.detach().clone()
            leaf = leaf.to(wide_dtype(leaf.dtype)) if double else leaf
            if tensor.requires_grad:
                keys = (str(getattr(key, "key", getattr(key, "idx", key))) for key in path[1:])
                leaves[f"input {'.'.join(keys)}"] = leaf.requires_grad_()
            copies[id(tensor)] = leaf.clone()  # not a leaf: a forward may write to it
        return copies[id(tensor)]

    args, kwargs = tree_map_with_path(own, (inputs.args, inputs.kwargs))
    return *copy.deepcopy((args, kwargs), {id(t): t for t in copies.values()}), leaves


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in an output, named by their paths in it; see held_values() for objects."""
    if isinstance(value, Tensor) and not value.is_nested:
        yield from ((name, _as_real(part)) for part in dense_parts(value))
        return
    for key, item in _items(value) or ():
        yield from named_tensors(item, f"{name}.{key}".lstrip("."))


def held_values(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the numbers in an output, and the tensors in its objects, such as key-value caches, detached."""
    if isinstance(value, (int, float)):
        yield name, torch.tensor(value, dtype=torch.float64, device="cpu")
    elif (items := _items(value)) is not None:
        for key, item in items:
            yield from held_values(item, f"{name}.{key}".lstrip("."))
    elif not isinstance(value, Tensor):
        yield from _held_by(value, name, set())


def _held_by(holder: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that an object holds, in its attributes and their containers."""
    if isinstance(holder, Tensor):
        yield from ((path, tensor.detach()) for path, tensor in named_tensors(holder, name))
        return
    is_code = isinstance(holder, nn.Module) or callable(holder)
    items = _items(holder) or getattr(holder, "__dict__", {}).items()
    if is_code or id(holder) in seen:
        return
    seen.add(id(holder))
    for key, item in items:
        yield from _held_by(item, f"{name}.{key}", seen)


def _items(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the entries of a container by their keys, or None for anything else."""
    if isinstance(value, Tensor):
        return enumerate(dense_parts(value)) if value.is_nested else None
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, (tuple, list)):
        return enumerate(value)
    if is_dataclass(value):
        return ((field.name, getattr(value, field.name)) for field in fields(value))
    return None


def _as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as pairs of real numbers, and any other tensor as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _cotangents(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    noise = Noise(0)
    return {
        name: noise.of(torch.randn, out).to(out) for name, out in outputs.items() if out.is_floating_point()
    }


def _source_gradients(
    outputs: dict[str, Tensor], cotangents: Mapping[str, Tensor], sources: dict[str, Tensor]
) -> dict[str, Tensor]:
    used = [n for n, out in outputs.items() if out.requires_grad and _fits_output(cotangents.get(n), out)]
    if not used or not sources:
        return {}
    # torch.autograd.grad calls this; torch.autograd.grad itself would be intercepted by the function mode,
    # and its backward would run outside of the mode
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


def _fits_output(cotangent: Tensor | None, out: Tensor) -> bool:
    return cotangent is not None and cotangent.shape == out.shape


@contextlib.contextmanager
def _default_dtype(double: bool) -> Iterator[None]:
    """Set the default dtype to fp64 if `double`.

    The default is shared by all threads, and dynamo restores the default that it found after each
    compilation. The compile lock keeps other threads from compiling while the default is fp64.
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
