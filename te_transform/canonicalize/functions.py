"""Activations that models write as autograd.Functions, with a backward of their own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from te_transform.canonicalize import inplace
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
        if node.target is not _APPLY or owner is None or any(user.args[1:] != (0,) for user in node.users):
            continue  # one of several outputs is read, PyTorch 2.11 returns all that the forward computes
        (forward, backward), values = (getattr(owner, body.target) for body in node.args[:2]), node.args[2:]
        tensors = [value for value in values if is_tensor_node(value)]  # beside symbolic sizes
        op = _activation(canonicalize(forward.graph)) if len(tensors) == 1 else None
        samples = [_SAMPLES if value in tensors else 1 for value in values]
        if op is not None and _is_gradient(op, forward, backward, samples):
            for user in list(node.users):
                edit.set_target(user, op, tuple(tensors))


def write_to_what_they_are_given(captured: fx.GraphModule) -> bool:
    """Whether autograd.Functions in a graph write in place to their arguments."""
    applied = [node for node in captured.graph.nodes if node.target is _APPLY]
    bodies = (captured.get_submodule(node.args[0].target).graph for node in applied)
    return any(node.op == "placeholder" for body in bodies for node in inplace.written(body))


def _activation(body: fx.Graph) -> Callable | None:
    """The activation that a forward of one tensor returns first; it returns what it saves as well."""
    (result, *_), _ = body.output_node().args[0]
    known = isinstance(result, fx.Node) and result.target in ops.ACTIVATIONS
    return result.target if known and result.args[0].op == "placeholder" else None


def _is_gradient(op: Callable, forward: nn.Module, backward: nn.Module, samples: list) -> bool:
    with unset_fake_temporarily(), torch.inference_mode(False), torch.enable_grad():
        x = _SAMPLES.clone().requires_grad_()
        (expected,) = torch.autograd.grad(op(x).sum(), x)
        (_, *unread), saved = forward(*samples)
        gradients = backward(torch.ones_like(_SAMPLES), *map(torch.zeros_like, unread), *saved)
    gradients = gradients if isinstance(gradients, (tuple, list)) else (gradients,)
    found = [gradient for gradient in gradients if isinstance(gradient, Tensor)]
    return len(found) == 1 and torch.allclose(found[0], expected, rtol=_CLOSE, atol=_CLOSE)
