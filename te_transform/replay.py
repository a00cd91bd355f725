"""Run a module forward and backward, or its copy in fp64, so that numbers can be compared; leave no trace."""

from __future__ import annotations

import contextlib
import copy
import inspect
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_with_path

from te_transform.autocast import AutocastSlot
from te_transform.inputs import Inputs
from te_transform.originals import Original, fusions
from te_transform.rotary import carry
from te_transform.slots import Fusion
from te_transform.trace import _without_dispatch


@dataclass(frozen=True, eq=False)
class Run:
    """What a forward and a backward of sum(output * cotangent) gave, by name."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    cotangents: dict[str, Tensor]


def run(
    module: nn.Module,
    inputs: Inputs,
    parameters: Mapping[str, Original],
    *,
    training: bool,
    cotangents: Mapping[str, Tensor] | None = None,
    double: bool = False,
    rounding: int | None = None,
) -> Run:
    """Run `module` with its dropouts off, forward and backward; only its training flags are changed.

    Args:
        module: what is called with `inputs`; random numbers come from the state that the generators are in.
        inputs: the arguments; those floating tensors that require a gradient get one.
        parameters: whose gradients are wanted, by the names they are to have; frozen ones are passed over.
        training: the mode, of the module and of all in it.
        cotangents: those of the run that this one will be compared to, None for the first.
        double: run in fp64, whatever dtypes the forward asks for (of a module that is in fp64).
        rounding: a seed; every result that a gradient flows through is put off by a random half ulp at most.
    """
    module.train(training)
    args, kwargs, leaves = _given(inputs, double)
    trained = {name: original for name, original in parameters.items() if original.held.requires_grad}
    mode = _Judged(double, None if rounding is None else torch.Generator().manual_seed(rounding))
    with _same_random(module), torch.enable_grad(), _undropped_cores(module), _default(double), mode:
        outputs = dict(_named(module(*args, **kwargs)))
        if cotangents is None:
            cotangents = _cotangents(outputs)
        gradients = _gradients(outputs, cotangents, trained, leaves)
    return Run({name: out.detach() for name, out in outputs.items()}, gradients, dict(cotangents))


def in_double(module: nn.Module) -> nn.Module:
    """A copy of `module` in fp64, on its original modules, in no recipe."""
    report = module.__dict__.get("_te_transform")
    with unquantised(module):
        twin = copy.deepcopy(module, {id(report): report})  # its graphs hold the model's tensors
    for fusion in fusions(twin):
        fusion.enabled = False
        fusion.fused.double()  # its host may lie outside
    return twin.double()


@contextlib.contextmanager
def only(enabled: Iterable[Fusion], among: Iterable[Fusion]) -> Iterator[None]:
    """Of the fusions `among`, let those in `enabled` run and no other; afterwards all is as it was."""
    before = [(fusion, fusion.enabled, fusion.runs) for fusion in among]
    chosen = set(enabled)
    try:
        for fusion, *_ in before:
            fusion.enabled = fusion in chosen
        yield
    finally:
        for fusion, was, runs in before:
            fusion.enabled, fusion.runs, fusion.shared = was, runs, None


@contextlib.contextmanager
def unquantised(module: nn.Module) -> Iterator[None]:
    """Let the converted models in `module` run in no recipe, if they were in one."""
    inside = [(m, type(m)) for m in module.modules() if isinstance(m, AutocastSlot)]
    try:
        for model, kind in inside:
            model.__class__ = kind._te_transform_made_of[0]
        yield
    finally:
        for model, kind in inside:
            model.__class__ = kind


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
            copies[id(tensor)] = carry(tensor, leaf.clone())  # no leaf, so that a forward may write into it
        return copies[id(tensor)]

    args, kwargs = tree_map_with_path(own, (inputs.args, inputs.kwargs))
    return *copy.deepcopy((args, kwargs), {id(t): t for t in copies.values()}), leaves


def _named(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of an output, named by the way to them; key-value caches are passed over."""
    if isinstance(value, Tensor):
        # a Deferred is read here, as a user would
        yield name, value + 0 if type(value) is not Tensor else value
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
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)
        for name, out in outputs.items()
        if out.is_floating_point()
    }


def _gradients(
    outputs: dict[str, Tensor],
    cotangents: Mapping[str, Tensor],
    parameters: Mapping[str, Original],
    leaves: dict[str, Tensor],
) -> dict[str, Tensor]:
    used = [name for name, out in outputs.items() if out.requires_grad and name in cotangents]
    held = list(dict.fromkeys(original.held for original in parameters.values()))
    sources = [*held, *leaves.values()]
    if not used or not sources:
        return {}
    given = torch.autograd.grad(
        [outputs[name] for name in used],
        sources,
        [cotangents[name].to(outputs[name]) for name in used],
        allow_unused=True,
    )
    given = [torch.zeros_like(s) if g is None else g for s, g in zip(sources, given, strict=True)]
    of = dict(zip(held, given, strict=False))
    return {name: original.part(of[original.held]) for name, original in parameters.items()} | dict(
        zip(leaves, given[len(held) :], strict=True)
    )


@contextlib.contextmanager
def _same_random(module: nn.Module) -> Iterator[None]:
    """Every run draws the same random numbers, and none of those that the user's code would draw next."""
    devices = {p.device.index or 0 for p in module.parameters() if p.device.type not in ("cpu", "meta")}
    python = random.getstate()
    try:
        with torch.random.fork_rng(devices=sorted(devices)):
            yield
    finally:
        random.setstate(python)


_DROPOUTS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    torch.dropout, torch.dropout_, torch.alpha_dropout, torch.alpha_dropout_,
    torch.feature_dropout, torch.feature_dropout_, torch.feature_alpha_dropout, torch.feature_alpha_dropout_,
}  # fmt: skip
_ATTENTIONS = {  # where they take dropout_p
    F.scaled_dot_product_attention: 4,
    F.multi_head_attention_forward: list(inspect.signature(F.multi_head_attention_forward).parameters).index(
        "dropout_p"
    ),
}


class _Judged(TorchFunctionMode):
    """Dropout does nothing, in training mode too, and no module is touched for it: two runs can be compared.

    With `double`, a forward that asks for a narrower dtype (a norm's float()) gets fp64, rounding to no less.
    With a `generator`, results are rounded at random.
    """

    def __init__(self, double: bool, generator: torch.Generator | None):
        super().__init__()
        self.double, self.generator = double, generator

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad:
            with self:  # checkpoints run their forward again in there
                return _without_dispatch(func)(*args, **kwargs)
        if func in _DROPOUTS:
            return torch.dropout(args[0] if args else kwargs["input"], 0.0, False)
        if func in _ATTENTIONS:
            place = _ATTENTIONS[func]
            args = (*args[:place], 0.0, *args[place + 1 :]) if len(args) > place else args
            kwargs = {key: 0.0 if key == "dropout_p" else value for key, value in kwargs.items()}
        if self.double:
            func = _DOUBLE.get(func, func)
            args, kwargs = tuple(map(_wide, args)), {key: _wide(value) for key, value in kwargs.items()}
        out = func(*args, **kwargs)
        return out if self.generator is None else self._rounded(out, tree_leaves((args, kwargs)))

    def _rounded(self, out: Any, given: list[Any]) -> Any:
        if type(out) in (tuple, list):
            return type(out)(self._rounded(item, given) for item in out)
        if type(out) is not Tensor or not out.is_floating_point() or not out.requires_grad:
            return out  # positions and masks: an index made of one may not jump
        storage = out.untyped_storage()._cdata
        if any(isinstance(t, Tensor) and t.untyped_storage()._cdata == storage for t in given):
            return out  # a view, nothing was computed
        dtype = torch.finfo(out.dtype)
        noise = torch.rand(out.shape, generator=self.generator, dtype=torch.float64).to(out.device) - 0.5
        noisy = (out.double() * (1 + dtype.eps * noise)).to(out.dtype)
        # a masked score is all mask, no rounding shows
        return torch.where(out.abs() < dtype.max / 2, noisy, out)


def _grouped_mm(x: Tensor, weight: Tensor, offs: Tensor, **_: Any) -> Tensor:
    """torch's grouped_mm of rows [rows, in] by experts [experts, in, out], which it has in no fp64."""
    ends = offs.tolist()
    products = [x[start:stop] @ expert for start, stop, expert in zip([0, *ends], ends, weight, strict=False)]
    rest = x.new_zeros(x.shape[0] - ends[-1], weight.shape[-1])
    return torch.cat([*products, rest])


_DOUBLE = {
    Tensor.float: Tensor.double,
    Tensor.half: Tensor.double,
    Tensor.bfloat16: Tensor.double,
    torch._grouped_mm: _grouped_mm,  # what F.grouped_mm calls
}


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


@contextlib.contextmanager
def _default(double: bool) -> Iterator[None]:
    """The dtype of tensors that a forward makes without naming one."""
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64 if double else before)
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _undropped_cores(module: nn.Module) -> Iterator[None]:
    """Fused attention cores are told, by a hook: what their kernels drop no mode sees."""
    cores = [f.fused for f in fusions(module) if "dropout_p" in inspect.signature(f.fused.forward).parameters]
    hooks = [core.register_forward_pre_hook(_without_dropout, with_kwargs=True) for core in cores]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _without_dropout(core: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    bound = inspect.signature(core.forward).bind(*args, **kwargs)
    bound.arguments["dropout_p"] = 0.0
    return bound.args, bound.kwargs
