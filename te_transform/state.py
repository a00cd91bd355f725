"""State dicts of converted modules: joined parameters are saved and loaded as their own, as they were."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from te_transform.weights import is_quantised

if TYPE_CHECKING:
    from te_transform.slots import Slot


@contextlib.contextmanager
def separated(module: nn.Module, write: bool = False) -> Iterator[None]:
    """The module's original parameters in its own dictionary again, for as long as nn.Module's code reads
    them."""
    slot: Slot = module._te_transform_slot
    own = dict(module._parameters)
    with torch.no_grad() if write else contextlib.nullcontext():
        views = {name: view.read() for name, view in slot.views.items()}
    names = dict.fromkeys((*slot.order, *own))
    module._parameters.clear()
    module._parameters.update({name: views.get(name, own.get(name)) for name in names})
    try:
        yield
        if write:
            own.update({name: module._parameters[name] for name in own})
            _write_back(slot, views, module._parameters)
    finally:
        module._parameters.clear()
        module._parameters.update(own)


def _write_back(slot: Slot, views: dict[str, Tensor], now: dict[str, Tensor | None]) -> None:
    for name, view in slot.views.items():
        value = now[name]
        if value is not views[name] or view.layout.order is not None or is_quantised(view.held):
            if (value.dtype, value.device) != (views[name].dtype, views[name].device):
                raise RuntimeError(
                    f"{name!r} is {views[name].dtype} on {views[name].device} and joined with others, "
                    "load_state_dict(assign=True) cannot make it another: move the model first, by to() or "
                    "to_empty()"
                )
            with torch.no_grad():
                view.write(value)


def hide(fused: nn.Module) -> None:
    """Keep a fused module out of state dicts: the modules whose parameters it holds save and load them."""
    fused._save_to_state_dict = _nothing
    fused._load_from_state_dict = _nothing


def _nothing(*_: Any) -> None:
    pass
