"""Which models can be converted at all, said before anything is touched."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from te_transform.plan.quantized_modules import quantized_modules

CONVERTED = "_te_transform"  # in the __dict__ of each module that knows of its conversion


class ModelError(TypeError):
    """What was given is no model that convert() can take; the message says what to pass instead."""


def check_model(model: Any, function: str) -> None:
    """Raise unless what `function` was given is a plain, initialised, unwrapped module with parameters.

    Raises:
        ModelError: what was given, what is needed, what to do.
    """
    check_module(model, function)
    kind = type(model).__name__
    for path, module in model.named_modules():
        where = f"its part {path} ({type(module).__name__})" if path else kind
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(
                f"{where} is a ScriptModule, a Python module is needed: convert before torch.jit.script"
            )
        if is_compiled(module):
            raise ModelError(
                f"{where} is a compiled module, the plain one is needed: convert its _orig_mod, with "
                "compile=True"
            )
        if module._compiled_call_impl is not None or _is_compiled(module.forward):
            raise ModelError(
                f"{where} is compiled, the plain module is needed: leave that out, and convert it with "
                "compile=True"
            )
    if wrapped := wrapped_by(model):
        raise ModelError(
            f"the model is wrapped by {wrapped}, the plain model is needed: convert first, then wrap"
        )
    if any(CONVERTED in vars(module) for module in model.modules()):
        raise ModelError(
            f"{kind} is converted already, an original model is needed: te_transform.revert() it first"
        )
    if any(nn.parameter.is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        raise ModelError(
            f"{kind} has lazy tensors without a shape, real ones are needed: run it once on real inputs"
        )
    if getattr(model.forward, "__func__", None) is nn.Module.forward:
        raise ModelError(f"{kind} has no forward, it cannot be called: pass the model that calls its parts")
    if next(model.parameters(), None) is None:
        if quantized := quantized_modules(model):
            raise ModelError(
                f"expected floating point weights, got a {kind} with quantized ones "
                f"({', '.join(quantized)}); dequantize them first"
            )
        raise ModelError(f"{kind} has no parameters, there is nothing to convert: pass a model with weights")


def check_module(model: Any, function: str) -> None:
    """Raise unless the model that `function` was given is a module.

    Raises:
        ModelError: what was given, what is needed, what to do.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"{function}() was given a {type(model).__name__}, a torch.nn.Module is needed: pass the model "
            "itself"
        )


def is_compiled(module: nn.Module) -> bool:
    """Whether it is what torch.compile(model) returned."""
    from torch._dynamo.eval_frame import OptimizedModule

    return isinstance(module, OptimizedModule)


def _is_compiled(forward: Any) -> bool:
    """Whether torch.compile has wrapped it; torch.compiler.disable leaves the same mark, and one of its
    own."""
    return hasattr(forward, "_torchdynamo_orig_callable") and not getattr(
        forward, "_torchdynamo_disable", False
    )


def is_sharded(module: nn.Module | None) -> bool:
    """Whether fully_shard() has been applied to it: FSDP fills the memory of its parameters anew in each
    call, of which their versions tell nothing, and its hooks cut a capture of a whole model into pieces."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)  # which imports nothing


def wrapped_by(model: nn.Module) -> str | None:
    """The name of the distributed wrapper around the model or a part of it."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel, FullyShardedDataParallel, FSDPModule)
    for module in model.modules():
        if isinstance(module, wrappers):
            named = next(w.__name__ for w in wrappers if isinstance(module, w))
            return "fully_shard (FSDP2)" if named == "FSDPModule" else named
    return None
