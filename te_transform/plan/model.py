"""Check that a model can be converted, before anything is changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from te_transform.plan.quantized_modules import quantized_modules

CONVERTED = "_te_transform"  # key in the __dict__ of each converted module


class ModelError(TypeError):
    """The error for a model that a function does not accept; the message says what to pass instead."""


def check_model(model: Any, function: str) -> None:
    """Raise unless the model given to `function` is a plain, initialized, unwrapped module with parameters.

    Raises:
        ModelError: the model is something else; the message says what to do.
    """
    check_module(model, function)
    kind = type(model).__name__
    for path, module in model.named_modules():
        _check_part(path, module)
    if wrapped := wrapped_by(model):
        raise ModelError(
            f"expected the plain model, got a model wrapped by {wrapped}; convert first, then wrap"
        )
    if any(CONVERTED in vars(module) for module in model.modules()):
        raise ModelError(
            f"expected an original model, got a converted {kind}; call te_transform.revert() first"
        )
    if getattr(model.forward, "__func__", None) is nn.Module.forward:
        raise ModelError(
            f"expected a model with a forward, got a {kind} without; pass the model that calls it"
        )
    if next(model.parameters(), None) is None:
        if quantized := quantized_modules(model):
            raise ModelError(
                f"expected floating point weights, got a {kind} with quantized ones "
                f"({', '.join(quantized)}); dequantize them first"
            )
        raise ModelError(f"expected a model with parameters, got a {kind} without; pass a model with weights")


def _check_part(path: str, module: nn.Module) -> None:
    where = _named_part(path, module)
    if isinstance(module, torch.jit.ScriptModule):
        raise ModelError(
            f"expected a Python module, got a ScriptModule: {where}; convert before torch.jit.script"
        )
    if is_exported(module):
        raise ModelError(
            f"expected a Python module, got a module of torch.export: {where}; convert the module that "
            "was exported"
        )
    if is_compiled(module):
        raise ModelError(
            f"expected a plain module, got a compiled one: {where}; convert _orig_mod with compile=True"
        )
    if module._compiled_call_impl is not None or _is_compiled(module.forward):
        raise ModelError(
            f"expected an uncompiled module, got a compiled one: {where}; do not compile it, and convert "
            "it with compile=True"
        )


def check_module(model: Any, function: str) -> None:
    """Raise unless the model given to `function` is a torch.nn.Module with initialized parts and tensors.

    Raises:
        ModelError: the model is something else; the message says what to do.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"expected a torch.nn.Module for {function}(), got a {type(model).__name__}; pass the model "
            "itself"
        )
    for path, module in model.named_modules():
        if not hasattr(module, "_modules"):
            raise ModelError(
                f"expected initialized modules, got {_named_part(path, module)}, whose __init__ does not "
                "call super().__init__(); call it there"
            )
    if any(nn.parameter.is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        raise ModelError(
            f"expected tensors with shapes, got a {type(model).__name__} with lazy ones; run it once on real "
            "inputs"
        )


def _named_part(path: str, module: nn.Module) -> str:
    kind = type(module).__name__
    return f"its part {path} ({kind})" if path else kind


def is_exported(module: nn.Module) -> bool:
    """Return True if torch.export made this module: by ExportedProgram.module(), or by unflatten()."""
    from torch.export import UnflattenedModule
    from torch.export._unlift import _StatefulGraphModule

    return isinstance(module, (UnflattenedModule, _StatefulGraphModule))


def is_compiled(module: nn.Module) -> bool:
    """Return True if torch.compile(model) returned this module."""
    from torch._dynamo.eval_frame import OptimizedModule

    return isinstance(module, OptimizedModule)


def _is_compiled(forward: Any) -> bool:
    """Return True if torch.compile wrapped `forward`.

    torch.compiler.disable sets the same attribute, and a second one.
    """
    return hasattr(forward, "_torchdynamo_orig_callable") and not getattr(
        forward, "_torchdynamo_disable", False
    )


def wrapped_by(model: nn.Module) -> str | None:
    """Return the name of the distributed wrapper around the model or a submodule, or None."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel, FullyShardedDataParallel, FSDPModule)
    for module in model.modules():
        if isinstance(module, wrappers):
            named = next(w.__name__ for w in wrappers if isinstance(module, w))
            return "fully_shard (FSDP2)" if named == "FSDPModule" else named
    return None
