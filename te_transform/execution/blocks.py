"""The layers of a transformer, and what holds them."""

from __future__ import annotations

from torch import nn

from te_transform.execution.classes import made_of
from te_transform.plan.options import skipped_by


def blocks(model: nn.Module) -> list[nn.Module]:
    """The layers of a transformer: what stands in the outermost lists of modules of one class."""
    return [*{id(block): block for block in _blocks(model).values()}.values()]


def parts(model: nn.Module) -> list[nn.Module]:
    """What holds the layers, and what holds that: a backbone, an encoder and a decoder; not the model."""
    found: dict[int, nn.Module] = {}
    for path in _blocks(model):
        names = path.split(".")[:-1]
        holders = (model.get_submodule(".".join(names[:last])) for last in range(1, len(names)))
        found |= {id(holder): holder for holder in holders}
    return [part for part in found.values() if type(part).forward is not nn.Module.forward]


def are_held_by_parts(model: nn.Module) -> bool:
    """Whether the model itself calls none of its layers: a backbone does."""
    held = {id(module) for part in parts(model) for module in part.modules()}
    return all(id(block) in held for block in blocks(model))


def skipped_inside(model: nn.Module, globs: tuple[str, ...]) -> dict[int, frozenset[str]]:
    """What skip= leaves alone in each of the layers, by their ids: the paths below the layer."""
    found = {}
    for path, layer in _blocks(model).items() if globs else ():
        inside = (name for name, _ in layer.named_modules())
        found[id(layer)] = frozenset(n for n in inside if skipped_by(f"{path}.{n}".strip("."), globs))
    return found


def _blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The layers by their names; a list in a list is none, and neither is what it holds: nobody calls it."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{block}.") for block in found)
        if isinstance(module, nn.ModuleList) and not inside:
            layers = [layer for layer in module if layer is not None]  # a list may have places left empty
            alike = len({made_of(type(layer)) for layer in layers}) == 1
            if alike and any(True for _ in layers[0].children()):
                found |= {f"{path}.{name}": child for name, child in module.named_children()}
    return {path: block for path, block in found.items() if type(block).forward is not nn.Module.forward}
