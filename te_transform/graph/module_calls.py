"""Follow the calls of modules by hooks, which are removed afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn


@contextmanager
def around_calls(
    modules: Iterable[tuple[Any, nn.Module]],
    start: Callable[..., Any],
    end: Callable[..., Any],
    raising: bool = True,
) -> Iterator[None]:
    """Run functions before and after each call of these modules, around the user's own hooks.

    Args:
        modules: keys and modules; modules of torch.jit take no hooks.
        start: called with the key, the module, args and kwargs; may return other args and kwargs.
        end: called with the key, the module, args and the output; may return another output.
        raising: True to run `end` also after a call that raised.
    """
    with ExitStack() as hooks:
        for key, module in modules:
            if not isinstance(module, torch.jit.ScriptModule):
                before, after = partial(start, key), partial(end, key)
                hooks.enter_context(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(after, always_call=raising))
        yield
