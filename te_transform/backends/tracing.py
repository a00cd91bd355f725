"""Who runs a call: a compiler or a tracer, which record what it computes, or a function transform."""

from __future__ import annotations

from contextvars import ContextVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import forward_ad

compiling: ContextVar[bool] = ContextVar("compiling", default=False)
"""A captured graph is being compiled: what ops compute is recorded, on tensors without memory."""


def traced() -> bool:
    """Whether a compiler, a tracer or a function transform runs the call: they understand plain PyTorch
    best."""
    return compiling.get() or torch.compiler.is_compiling() or torch.jit.is_tracing() or transformed()


def check_index(is_known: Tensor, message: str) -> None:
    """Raise what PyTorch raises for an id or a target out of range.

    That is an IndexError on the CPU. A GPU is not waited for: the assertion fails there, some time later.

    Raises:
        IndexError: `is_known` is false.
    """
    if is_known.device.type != "cpu" or traced() or is_fake(is_known):
        torch._assert_async(is_known, message)
    elif not is_known:
        raise IndexError(message)


def recorded() -> bool:
    """Whether the call becomes a part of a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def in_backward() -> bool:
    """Whether the call is made from within a backward, as a checkpoint repeats a forward."""
    return torch._C._current_graph_task_id() != -1


def saving_hooks() -> bool:
    """Whether hooks take what autograd saves, as those of a checkpoint that will repeat this forward."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def transformed() -> bool:
    """Whether a function transform of torch.func or forward-mode differentiation is on.

    Views into memory and hand-made backwards have no meaning in there.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def batches_gradients() -> bool:
    """Whether a backward is for several gradients at once, as torch.autograd.grad(is_grads_batched=True) has
    them."""
    return torch._C._dispatch_tls_is_dispatch_key_included("VmapMode")
