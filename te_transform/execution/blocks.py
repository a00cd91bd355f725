"""The blocks of a transformer, and the modules that hold them."""

from __future__ import annotations

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

from te_transform.backends.ranks import is_sharded
from te_transform.execution.classes import user_class_behind
from te_transform.plan.options import skipped_by


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a transformer: the modules in the outermost lists of one class.

    A module in the wrapper of checkpoint_wrapper() or offload_wrapper() is a block, its wrapper is not.
    """
    return [*{id(block): block for block in _blocks(model).values()}.values()]


def first_in_list(model: nn.Module) -> tuple[nn.Module, str] | None:
    """Return the list that holds the first block, and the block's name there; None without blocks."""
    path = next(iter(_blocks(model)), None)
    if path is None:
        return None
    holder, _, name = path.rpartition(".")
    return model.get_submodule(holder), name


def parts(model: nn.Module) -> list[nn.Module]:
    """Return the modules between the model and its blocks: a backbone, an encoder, a decoder."""
    holders_by_id: dict[int, nn.Module] = {}
    for path in _blocks(model):
        names = path.split(".")[:-1]
        holders = (model.get_submodule(".".join(names[:last])) for last in range(1, len(names)))
        holders_by_id |= {id(holder): holder for holder in holders}
    return [part for part in holders_by_id.values() if type(part).forward is not nn.Module.forward]


def are_held_by_parts(model: nn.Module) -> bool:
    """Return True if a part, such as a backbone, holds every block."""
    inside = {id(module) for part in parts(model) for module in part.modules()}
    return all(id(block) in inside for block in blocks(model))


def skipped_inside(model: nn.Module, globs: tuple[str, ...]) -> dict[int, frozenset[str]]:
    """Return the skipped paths inside of each block, by the block's id."""
    skipped = {}
    for path, layer in _blocks(model).items() if globs else ():
        inside = (name for name, _ in layer.named_modules())
        skipped[id(layer)] = frozenset(n for n in inside if skipped_by(f"{path}.{n}".strip("."), globs))
    return skipped


def _blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks by path, without nested lists and other modules that are never called.

    The paths are those without wrappers, which skip= was given for.
    """
    by_path: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{block}.") for block in by_path)
        if _is_list(module) and not inside:
            layers = {name: unwrapped(child) for name, child in module.named_children()}  # never None
            alike = len({_user_class(layer) for layer in layers.values()}) == 1
            if alike and any(True for _ in next(iter(layers.values())).children()):
                by_path |= {f"{path}.{name}": layer for name, layer in layers.items()}
    return {path: block for path, block in by_path.items() if type(block).forward is not nn.Module.forward}


def _user_class(layer: nn.Module) -> type:
    """Return the class of a layer before convert() and fully_shard(), which may shard a wrapper instead."""
    kind = user_class_behind(type(layer))
    return kind.__bases__[-1] if kind is type(layer) and is_sharded(layer) else kind


def _is_list(module: nn.Module) -> bool:
    """Return True if a module is a list, or a dict with numbers as keys, as torchtitan's models have it."""
    numbered = isinstance(module, nn.ModuleDict) and all(map(str.isdigit, module))
    return numbered or isinstance(module, nn.ModuleList)


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside of PyTorch's wrappers for activations."""
    while isinstance(module, ActivationWrapper):
        module = module._checkpoint_wrapped_module
    return module
