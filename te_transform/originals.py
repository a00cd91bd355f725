"""The original parameters of a model, converted or not, under their original names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from te_transform.slots import Borrower, Fusion, SlotModule, View
from te_transform.weights import Piece


@dataclass(frozen=True, eq=False)
class Original:
    """A parameter of the original model: `held`, or that piece of it which `view` names."""

    held: nn.Parameter  # what autograd and optimizers know
    view: View | None = None

    def part(self, tensor: Tensor) -> Tensor:
        """The original's share of anything shaped like `held`: its gradient, an optimizer's moment."""
        return self.view.layout.part(tensor, self.view.name) if self.view else tensor


def original_parameters(model: nn.Module, prefix: str = "") -> dict[str, Original]:
    """Every parameter by its original name and in the original order, as named_parameters() gave them.

    A tied parameter comes once, under its first name. `prefix` is the path of `model` in what contains it.
    """
    found: dict[tuple[int, str], tuple[str, Original]] = {}
    for path, module in _original_modules(model, prefix):
        for attribute, original in _held_by(module):
            key = (id(original.held), original.view.name if original.view else "")
            found.setdefault(key, (f"{path}.{attribute}".lstrip("."), original))
    return dict(found.values())


def fusions(model: nn.Module) -> list[Fusion]:
    """The fusions in `model`, and those that modules of it have a part in, in the order of the modules."""
    found: dict[Fusion, None] = {}
    for module in model.modules():
        if isinstance(module, SlotModule):
            slot = module._te_transform_slot
            found.update(dict.fromkeys(view.fusion for view in slot.views.values()))
            if slot.fusion is not None:
                found[slot.fusion] = None
        elif isinstance(module, Borrower):
            found[module._te_transform_fusion] = None
    return list(found)


def sources(model: nn.Module, fusion: Fusion, target: str) -> Iterator[tuple[str, Piece]]:
    """Each piece of a fused parameter, and the path in `model` of the module that computes with it.

    A tied parameter has the name that another module gives it, perhaps an embedding: the loan knows better.
    """
    layout, loan = fusion.layouts[target], fusion.fused._te_transform_borrowed.get(target)
    for piece in layout.pieces:
        if loan is None:
            yield piece.name.rpartition(".")[0], piece
        else:
            yield next(path for path, module in model.named_modules() if module is loan.module), piece


def holders(model: nn.Module) -> Counter[int]:
    """How many modules of `model` hold each parameter, by its id."""
    return Counter(id(p) for module in model.modules() for p in module._parameters.values())


def plain_calls(model: nn.Module) -> list[Counter[str]]:
    """What counts why fused modules of `model`, and its loss, ran in plain PyTorch: calls that their own
    kernels do not take."""
    counting = [*(fusion.fused for fusion in fusions(model)), vars(model).get("_loss_function")]
    return [one.plain_calls for one in counting if hasattr(one, "plain_calls")]


def _original_modules(model: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    added = {module for fusion in fusions(model) for module in fusion.fused.modules()}
    for path, module in model.named_modules(prefix=prefix):
        if module not in added:
            yield path, module


def _held_by(module: nn.Module) -> Iterator[tuple[str, Original]]:
    slot = module._te_transform_slot if isinstance(module, SlotModule) else None
    for attribute in slot.order if slot else module._parameters:
        view = slot.views.get(attribute) if slot else None
        held = view.held if view else module._parameters.get(attribute)
        if held is not None:
            yield attribute, Original(held, view)
