"""Compare graphs by their operations: layers of a model often differ only in tensor values."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

_PLAIN_CONSTANTS = (int, float, str, type(None), torch.dtype)


def structure(module: fx.GraphModule) -> tuple:
    """Return a key that is equal for graphs with equal operations.

    Ops are equal if their class and settings are equal. An op with incomparable settings equals only itself.
    """
    numbers = {node: number for number, node in enumerate(module.graph.nodes)}

    def named(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return "node", numbers[argument]
        return type(argument), repr(argument)

    return tuple(
        (
            node.op,
            _target(module, node),
            repr(fx.node.map_aggregate((node.args, dict(node.kwargs)), named)),
        )
        for node in module.graph.nodes
    )


def _target(module: fx.GraphModule, node: fx.Node) -> Any:
    if node.op == "placeholder":
        return None
    if node.op != "call_module":
        return id(getattr(module, node.target)) if node.op == "get_attr" else node.target
    op: nn.Module = module.get_submodule(node.target)
    settings = {k: v for k, v in vars(op).items() if k[0] != "_" and k not in ("training", "plain_calls")}
    inner = {k: repr(structure(v)) if isinstance(v, fx.GraphModule) else v for k, v in op.named_children()}
    settings |= {**inner, **dict(op.named_parameters()), **dict(op.named_buffers())}
    known = all(isinstance(each, _PLAIN_CONSTANTS) for each in tree_leaves(settings))
    return (type(op), repr(settings)) if known else id(op)
