"""Activations that models write as autograd.Functions, with a backward of their own."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from te_transform.graph import edit, ops
from te_transform.graph.nodes import is_tensor_node

_APPLY = torch.ops.higher_order.autograd_function_apply
_SAMPLES = torch.linspace(-6, 6, 97, dtype=torch.float64)
_CLOSE = 1e-5  # the constants of such functions are written down in seven digits


def spell_functions(
    graph: fx.Graph, owner: nn.Module | None, canonicalize: Callable[[fx.Graph], fx.Graph]
) -> None:
    """Rewrite a custom autograd.Function whose forward and gradient are those of an activation."""
    for node in list(graph.nodes):
        if node.target is not _APPLY or owner is None:
            continue
        (forward, backward), values = (getattr(owner, body.target) for body in node.args[:2]), node.args[2:]
        tensors = [value for value in values if is_tensor_node(value)]  # beside symbolic sizes
        op = _activation(canonicalize(forward.graph)) if len(tensors) == 1 else None
        samples = [_SAMPLES if value in tensors else 1 for value in values]
        if op is not None and _is_gradient(op, forward, backward, samples):
            for user in [user for user in node.users if user.target is operator.getitem]:
                edit.set_target(user, op, tuple(tensors))


def _activation(body: fx.Graph) -> Callable | None:
    """The activation that a forward of one tensor returns; it returns what it saves for backward as well."""
    outputs, _ = body.output_node().args[0]
    result = outputs[0] if len(outputs) == 1 else None
    known = isinstance(result, fx.Node) and result.target in ops.ACTIVATIONS
    return result.target if known and result.args[0].op == "placeholder" else None


def _is_gradient(op: Callable, forward: nn.Module, backward: nn.Module, samples: list) -> bool:
    with unset_fake_temporarily(), torch.inference_mode(False), torch.enable_grad():
        x = _SAMPLES.clone().requires_grad_()
        (expected,) = torch.autograd.grad(op(x).sum(), x)
        _, saved = forward(*samples)
        gradients = backward(torch.ones_like(_SAMPLES), *saved)
    gradients = gradients if isinstance(gradients, (tuple, list)) else (gradients,)
    found = [gradient for gradient in gradients if isinstance(gradient, Tensor)]
    return len(found) == 1 and torch.allclose(found[0], expected, rtol=_CLOSE, atol=_CLOSE)
