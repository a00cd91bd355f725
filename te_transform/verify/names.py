"""Names in two models, the mapping between them, and the modules behind torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import nn

from te_transform.graph.keywords import ArgumentError, did_you_mean
from te_transform.plan.model import is_exported

Names = Mapping[str, str | None] | Callable[[str], str | None]
_SHOWN = 5  # the most names in a sentence
_ORIG_MOD = "_orig_mod"  # the attribute by which torch.compile holds the module


def plain_name(name: str) -> str:
    """Return the name without the parts that torch.compile adds."""
    return ".".join(part for part in name.split(".") if part != _ORIG_MOD)


def plain_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules, each once, by their plain names."""
    return ((plain_name(name), module) for name, module in model.named_modules())


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module that torch.compile() wrapped, or the model itself."""
    return getattr(model, _ORIG_MOD, model)


def call_uncompiled(model: nn.Module) -> None:
    """Make the calls of all modules run the modules' own code, where Module.compile() compiled them."""
    for module in model.modules():
        vars(module).pop("_compiled_call_impl", None)


def unlock_modes(model: nn.Module) -> None:
    """Make train() and eval() of modules of torch.export set flags, which they ignore, instead of raising."""
    for module in filter(is_exported, model.modules()):
        vars(module).pop("train", None)
        vars(module).pop("eval", None)


def renaming(names: Names | None) -> Callable[[str], str | None]:
    """Return the function from names in the first model to names in the second.

    A mapping also renames what lies below a name. Names that it does not contain stay as they are.
    """
    if names is None:
        return lambda name: name
    if not isinstance(names, Mapping):
        if not callable(names):
            raise ArgumentError(
                "expected a dict or a function from names of the first model to names of the second, got "
                f"{names!r}; leave it out if the names are the same",
                "names",
            )
        return names

    def renamed(name: str) -> str | None:
        parts = name.split(".")
        for end in range(len(parts), -1, -1):
            if (old := ".".join(parts[:end])) in names:
                new = names[old]
                return None if new is None else ".".join(filter(None, [new, *parts[end:]]))
        return name

    return renamed


def check_names(names: Names | None, first: nn.Module, second: nn.Module) -> None:
    """Raise if a mapping has names that the models do not have.

    Raises:
        ArgumentError: the message says which name.
    """
    if not isinstance(names, Mapping):
        return
    new = [name for name in names.values() if name]
    for which, model, given in (("first", first, [*names]), ("second", second, new)):
        known = {*names_in(model)}
        if wrong := next((name for name in given if name not in known), None):
            raise ArgumentError(
                f"expected a mapping from names of the first model to names of the second, got {wrong!r}, "
                f"which the {which} does not have{did_you_mean(wrong, known)}",
                "names",
            )


def names_in(model: nn.Module) -> Iterator[str]:
    """Yield the names of all weights, buffers and modules."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.state_dict().items())
    yield from (plain_name(name) for name, _ in (*tensors, *model.named_modules(remove_duplicate=False)))


def some(names: Sequence[str]) -> str:
    """Return the first names, and the number of further ones."""
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
