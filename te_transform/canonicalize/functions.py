"""Activations that models write as autograd.Functions, with a backward of their own."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from te_transform.graph import edit, ops

_APPLY = torch.ops.higher_order.autograd_function_apply
_SAMPLES = torch.linspace(-6, 6, 97, dtype=torch.float64)
_CLOSE = 1e-5  # the constants of such functions are written down in seven digits


def spell_functions(
    graph: fx.Graph, owner: nn.Module | None, canonicalize: Callable[[fx.Graph], fx.Graph]
) -> None:
    """Rewrite a custom autograd.Function whose forward and gradient are those of an activation."""
    for node in list(graph.nodes):
        if node.target is not _APPLY or owner is None or len(node.args) != 3:
            continue
        forward, backward = (getattr(owner, body.target) for body in node.args[:2])
        op = _activation(canonicalize(forward.graph))
        if op is not None and _is_gradient(op, forward, backward):
            for user in [user for user in node.users if user.target is operator.getitem]:
                edit.set_target(user, op, (node.args[2],))


def _activation(body: fx.Graph) -> Callable | None:
    """The activation that a forward of one tensor returns; it returns what it saves for backward as well."""
    (outputs, _), inputs = body.output_node().args[0], body.find_nodes(op="placeholder")
    result = outputs[0] if len(outputs) == 1 else None
    known = isinstance(result, fx.Node) and result.target in ops.ACTIVATIONS
    return result.target if known and list(result.args) == inputs else None


def _is_gradient(op: Callable, forward: nn.Module, backward: nn.Module) -> bool:
    with unset_fake_temporarily(), torch.enable_grad():
        x = _SAMPLES.clone().requires_grad_()
        (expected,) = torch.autograd.grad(op(x).sum(), x)
        _, saved = forward(_SAMPLES)
        gradients = backward(torch.ones_like(_SAMPLES), *saved)
    found = gradients[0] if isinstance(gradients, (tuple, list)) else gradients
    return isinstance(found, Tensor) and torch.allclose(found, expected, rtol=_CLOSE, atol=_CLOSE)
