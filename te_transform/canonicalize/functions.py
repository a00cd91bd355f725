"""Recognize activations that models write as autograd.Functions with a custom backward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from te_transform.canonicalize import inplace
from te_transform.graph import edit, ops
from te_transform.graph.nodes import is_tensor_node
from te_transform.graph.preserve import hidden_from_checkpoints

_APPLY = torch.ops.higher_order.autograd_function_apply
_LARGE_INPUTS = torch.logspace(1, 4, 13, dtype=torch.float64, device="cpu")
_SAMPLE_INPUTS = torch.cat(
    (-_LARGE_INPUTS.flip(0), torch.linspace(-6, 6, 97, dtype=torch.float64, device="cpu"), _LARGE_INPUTS)
)
_GRADIENTS = torch.linspace(1, 2, len(_SAMPLE_INPUTS), dtype=torch.float64, device="cpu")
_SCALES = (1.0, 1e-30, -1e30)  # these reveal a backward that rounds or clips its gradient
_CLOSE = 1e-5  # such functions write their constants with seven digits


def spell_functions(
    graph: fx.Graph, owner: nn.Module | None, canonicalize: Callable[[fx.Graph], fx.Graph]
) -> None:
    """Rewrite autograd.Functions whose forward and gradient equal an activation's as that activation."""
    for node in list(graph.nodes):
        if node.target is not _APPLY or owner is None or any(user.args[1:] != (0,) for user in node.users):
            continue  # only output 0 may be read: PyTorch 2.11 also returns what the forward saves
        (forward, backward), values = (getattr(owner, body.target) for body in node.args[:2]), node.args[2:]
        tensors = [value for value in values if is_tensor_node(value)]  # without symbolic sizes
        op = _first_activation(canonicalize(forward.graph)) if len(tensors) == 1 else None
        samples = [_SAMPLE_INPUTS if value in tensors else 1 for value in values]
        if op is not None and _is_gradient(op, forward, backward, samples):
            for user in list(node.users):
                user.meta["spelled"] = edit.spelled((user, node))
                edit.set_target(user, op, tuple(tensors))
            edit.erase_unread([node])


def write_to_what_they_are_given(captured: fx.GraphModule) -> bool:
    """Return True if an autograd.Function in a graph writes in place to its arguments."""
    applied = [node for node in captured.graph.nodes if node.target is _APPLY]
    bodies = (captured.get_submodule(node.args[0].target).graph for node in applied)
    return any(node.op == "placeholder" for body in bodies for node in inplace.written(body))


def _first_activation(body: fx.Graph) -> Callable | None:
    """Return the activation that a forward of one tensor returns first, or None.

    The forward also returns the tensors that it saves for the backward.
    """
    (result, *_), _ = body.output_node().args[0]
    known = isinstance(result, fx.Node) and result.target in ops.ACTIVATION_OPS
    return result.target if known and result.args[0].op == "placeholder" else None


def _is_gradient(op: Callable, forward: nn.Module, backward: nn.Module, samples: list) -> bool:
    """Return True if the backward computes the activation's gradient, for incoming gradients of any scale."""
    with (
        unset_fake_temporarily(),
        torch.inference_mode(False),
        torch.enable_grad(),
        hidden_from_checkpoints(),
    ):
        x = _SAMPLE_INPUTS.clone().requires_grad_()
        (expected,) = torch.autograd.grad(op(x), x, _GRADIENTS)
        try:
            computed = [_scaled_gradient(forward, backward, samples, scale) for scale in _SCALES]
        except Exception:  # the function does not accept samples of this shape and dtype
            return False
    return all(
        grad is not None and torch.allclose(grad, expected, rtol=_CLOSE, atol=_CLOSE) for grad in computed
    )


def _scaled_gradient(forward: nn.Module, backward: nn.Module, samples: list, scale: float) -> Tensor | None:
    """Run the backward on a scaled incoming gradient; return the tensor's gradient without the scale."""
    (_, *unread), saved = forward(*samples)
    gradients = backward(_GRADIENTS * scale, *map(torch.zeros_like, unread), *saved)
    gradients = gradients if isinstance(gradients, (tuple, list)) else (gradients,)
    tensors = [gradient for gradient in gradients if isinstance(gradient, Tensor)]
    return tensors[0].double() / scale if len(tensors) == 1 else None
