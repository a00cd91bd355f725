"""Run a model on fake tensors, without tensor memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_map_only


def ways_to_call(model: nn.Module) -> list[Callable[[nn.Module, Any], AbstractContextManager[Any]]]:
    """Return contexts for a call: on fake tensors, and on real tensors unless a parameter is on meta.

    Fake tensors need no memory. Code that reads values needs real tensors.
    """
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    return [faked] if on_meta else [faked, lambda model, arguments: nullcontext(arguments)]


@contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Silence the tracebacks that PyTorch logs when an operation on fake tensors raises in this thread.

    The environment variable TORCH_LOGS keeps them.
    """
    logger, thread = logging.getLogger("torch._subclasses.fake_tensor"), get_ident()

    def may_log(record: logging.LogRecord) -> bool:
        return record.thread != thread or "TORCH_LOGS" in os.environ

    logger.addFilter(may_log)
    try:
        yield
    finally:
        logger.removeFilter(may_log)


@contextmanager
def faked(model: nn.Module, arguments: Any) -> Iterator[Any]:
    """Yield the arguments as fake tensors; the model has fake parameters and buffers in this context.

    A forward then computes only shapes and dtypes, without tensor memory. A model on the meta device runs as
    a model on the CPU.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return mode.from_tensor(tensor, static_shapes=True)
        with mode:
            twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        return nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin

    tensors = {name: fake(t) for name, t in (*model.named_parameters(), *model.named_buffers())}
    arguments = tree_map_only(Tensor, fake, arguments)
    # if the default device is meta too, new tensors of the forward are on the CPU like the model
    own = torch.device("cpu") if torch.get_default_device().type == "meta" else nullcontext()
    with _reparametrize_module(model, tensors, tie_weights=True), mode, own, _without_tracebacks():
        yield arguments
