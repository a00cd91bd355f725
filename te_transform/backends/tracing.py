"""Detection of compilers, tracers, CUDA graph recording, backwards, saved-tensor hooks and transforms."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import forward_ad

compiling: ContextVar[bool] = ContextVar("compiling", default=False)
"""True while a captured graph is compiled: operations are recorded, on tensors without memory."""


def traced() -> bool:
    """Return True if a compiler, a tracer or a function transform runs the call.

    Ops then run in plain PyTorch, which these tools support best.
    """
    return compiling.get() or torch.compiler.is_compiling() or torch.jit.is_tracing() or transformed()


def check_index(is_known: Tensor, message: str) -> None:
    """Raise unless `is_known`, as PyTorch does for an id or a target out of range.

    On a GPU, a device-side assertion fails later instead, without a synchronization.

    Raises:
        IndexError: `is_known` is False, on the CPU.
    """
    if is_known.device.type != "cpu" or traced() or is_fake(is_known):
        torch._assert_async(is_known, message)
    elif not is_known:
        raise IndexError(message)


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Return True if autograd records operations on these tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def recorded() -> bool:
    """Return True if a CUDA graph is recording the call."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def in_backward() -> bool:
    """Return True within a backward, in which a checkpoint repeats a forward."""
    return torch._C._current_graph_task_id() != -1


def saving_hooks() -> tuple[Any, Any] | None:
    """Return the hooks that receive the tensors that autograd saves, or None. Checkpoints have such hooks."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def of_checkpoint(hooks: tuple[Any, Any] | None) -> tuple[Any, Any] | None:
    """Return these hooks if a non-reentrant checkpoint made them, else None."""
    return hooks if _pack_name(hooks).startswith("_checkpoint_hook.") else None


def recomputes() -> bool:
    """Return True while a non-reentrant checkpoint repeats a forward, outside of checkpoints within it."""
    return _pack_name(saving_hooks()).startswith("_recomputation_hook.")


def _pack_name(hooks: tuple[Any, Any] | None) -> str:
    return getattr(hooks and hooks[0], "__qualname__", "")


def transformed() -> bool:
    """Return True if a function transform of torch.func or forward-mode differentiation is active.

    They do not support pointers to memory or custom backwards.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def batches_gradients() -> bool:
    """Return True in a backward of several gradients, by torch.autograd.grad(is_grads_batched=True)."""
    return torch._C._dispatch_tls_is_dispatch_key_included("VmapMode")
