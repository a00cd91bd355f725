"""Run a model and leave it bitwise as it was."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake

_CONTAINERS = (dict, list, set)


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Put back every attribute, buffer, training flag and random state of `model`, whatever the body does.

    Parameters are not copied (they may not fit twice): a forward that writes into its own parameters raises.
    """
    attributes = [(m, {k: _shallow(v) for k, v in m.__dict__.items()}) for m in model.modules()]
    buffers = [(b, b.detach().clone()) for b in model.buffers() if not (b.is_meta or is_fake(b))]
    versions = [(name, p, p._version) for name, p in model.named_parameters() if not p.is_inference()]
    devices = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
    python_random = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_random = numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices=sorted({d.index or 0 for d in devices})):
            yield
    finally:
        random.setstate(python_random)
        if numpy:
            numpy.random.set_state(numpy_random)
        for module, before in attributes:
            _restore(module.__dict__, before)
        with torch.no_grad():
            for buffer, before in buffers:
                if buffer.is_inference() or not torch.equal(buffer, before):
                    buffer.copy_(before)
    written = [name for name, p, version in versions if p._version != version]
    if written:
        raise RuntimeError(
            f"the model's forward writes into its own parameters {written}, convert() needs them unchanged"
        )


def _shallow(value: Any) -> tuple[Any, Any]:
    """The object and, for a plain container, a copy of what it holds."""
    return value, (value.copy() if isinstance(value, _CONTAINERS) else None)


def _restore(attributes: dict[str, Any], before: dict[str, tuple[Any, Any]]) -> None:
    attributes.clear()
    for name, (value, content) in before.items():
        if content is not None:
            value.clear()
            value.extend(content) if isinstance(value, list) else value.update(content)
        attributes[name] = value
