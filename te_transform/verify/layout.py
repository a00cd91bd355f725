"""The weights of one model as a function of another model's: their names, and gradients carried back.

The function is a renaming, or any differentiable function from state dict to state dict, such as the one that
converts checkpoints. If it joins q, k and v, then its derivative splits the gradient of the joined weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from te_transform.graph.keywords import did_you_mean
from te_transform.verify.compare import Row
from te_transform.verify.states import compare_weights

Names = Mapping[str, str | None] | Callable[[str], str | None]
Weights = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
_SHOWN = 5  # the most names in a sentence
_COMPILED = "_orig_mod"  # the attribute by which torch.compile holds the module


def plain_name(name: str) -> str:
    """Return the name without the parts that torch.compile adds."""
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def renaming(names: Names | None) -> Callable[[str], str | None]:
    """Return the function from names in the first model to names in the second.

    A mapping also renames what lies below a name. Names that it does not contain stay as they are.
    """
    if names is None:
        return lambda name: name
    if not isinstance(names, Mapping):
        return names

    def renamed(name: str) -> str | None:
        parts = name.split(".")
        for end in range(len(parts), -1, -1):
            if (old := ".".join(parts[:end])) in names:
                new = names[old]
                return None if new is None else ".".join(filter(None, [new, *parts[end:]]))
        return name

    return renamed


@dataclass(frozen=True, eq=False)
class Layout:
    """The weights of `second` as a function of the weights of `first`, see verify().

    Raises:
        ValueError: the weights of the two models cannot be matched; the message says what was given.
    """

    first: nn.Module
    second: nn.Module
    names: Names | None = None
    weights: Weights | None = None

    def __post_init__(self) -> None:
        self._check_mapping()
        self._check_derivative()
        known = {*_names_in(self.second), None}
        left = [name for name in self.own if self.weights is None and self.rename(name) not in known]
        if self._unmatched and (left or self.weights is not None):
            missing = f", and {_some(left)} in the first only" if left else ""
            raise ValueError(
                f"expected the same weights in both models, got {_some(self._unmatched)} in the second "
                f"only{missing}; pass names=, a mapping from names of the first to names of the second, or "
                "weights=, a function that makes the second's state dict from the first's"
            )

    @cached_property
    def rename(self) -> Callable[[str], str | None]:
        """The function from names in the first model to names in the second."""
        return renaming(self.names)

    @cached_property
    def own(self) -> dict[str, Tensor]:
        """The trained parameters of the first model; tied parameters have one name."""
        return {plain_name(name): p for name, p in self.first.named_parameters() if p.requires_grad}

    @cached_property
    def theirs(self) -> dict[str, Tensor]:
        """The trained parameters of the second model; tied parameters have one name."""
        return {plain_name(name): p for name, p in self.second.named_parameters() if p.requires_grad}

    @cached_property
    def compared(self) -> set[str]:
        """The names in `own` whose gradients are compared."""
        return {*self.pull_back({name: torch.zeros_like(p) for name, p in self.theirs.items()})}

    def pull_back(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Turn gradients of `theirs` into gradients of `own`, by the derivative of the function."""
        leaves = {name: p.detach().requires_grad_() for name, p in self.own.items()}
        with torch.enable_grad():
            made = self._made({id(p): leaves[name] for name, p in self.own.items()})
            made = {
                name: tensor for name, tensor in made.items() if tensor.requires_grad and name in gradients
            }
            given = [gradients[name].to(tensor.dtype) for name, tensor in made.items()]
            if not made:
                return {}
            found = torch.autograd.grad([*made.values()], [*leaves.values()], given, allow_unused=True)
        return {name: g for name, g in zip(leaves, found, strict=True) if g is not None}

    def rows(self) -> Iterator[Row]:
        """Yield a row for each weight with other values, and one with the number of weights."""
        with torch.no_grad():
            made = self._made({})
        state = {plain_name(name): value for name, value in self.second.state_dict().items()}
        yield from compare_weights(made, state)

    def copy(self) -> None:
        """Load the first model's weights into the second model."""
        with torch.no_grad():
            state = {plain_name(name): value for name, value in self.second.state_dict().items()}
            for name, made in self._made({}).items():
                if isinstance(state.get(name), Tensor):
                    state[name].copy_(made)

    def notes(self) -> Iterator[str]:
        """Yield a sentence for gradients that cannot be compared."""
        if left := [name for name in self.own if name not in self.compared]:
            yield f"not compared: the gradients of {_some(left)}, which the second model does not train"
        if left := self._unmatched:
            yield f"not compared: the gradients of {_some(left)}, which the first model does not have"

    @cached_property
    def _unmatched(self) -> list[str]:
        made = self._made({})
        return [name for name in self.theirs if name not in made]

    def _made(self, tensors: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """Make the second model's weights; `tensors` replace the first's parameters, by their id."""
        state = self.first.state_dict(keep_vars=True)
        more = self.first.named_parameters(remove_duplicate=False)
        given = {plain_name(name): tensors.get(id(t), t) for name, t in (*more, *state.items())}
        made = self._renamed(given) if self.weights is None else self._checked(self.weights(given))
        # of tied parameters, the second model has a gradient under the first name
        first = {id(p): plain_name(name) for name, p in self.second.named_parameters()}
        everywhere = self.second.named_parameters(remove_duplicate=False)
        tied = {plain_name(name): first[id(p)] for name, p in everywhere}
        return made | {tied[name]: tensor for name, tensor in reversed(made.items()) if name in tied}

    def _renamed(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        theirs = {plain_name(n): p for n, p in self.second.named_parameters(remove_duplicate=False)}
        made: dict[str, Tensor] = {}
        for name, tensor in given.items():
            new = self.rename(name)
            if new not in theirs or not isinstance(tensor, Tensor):
                continue
            if theirs[new].shape == tensor.shape:
                made[new] = tensor
            elif theirs[new].is_floating_point():
                raise ValueError(
                    f"expected weights of one shape, got {list(tensor.shape)} for {name} in the first model "
                    f"and {list(theirs[new].shape)} for {new} in the second; pass weights=, a function that "
                    "makes the second's state dict from the first's"
                )
        return made

    def _checked(self, made: Mapping[str, Tensor]) -> dict[str, Tensor]:
        state = {plain_name(name): value for name, value in self.second.state_dict().items()}
        for name, tensor in made.items():
            if name not in state:
                raise ValueError(
                    f"expected names of the second model from weights=, got {name!r}"
                    f"{did_you_mean(name, state)}"
                )
            if isinstance(state[name], Tensor) and tensor.shape != state[name].shape:
                raise ValueError(
                    f"expected the shape {list(state[name].shape)} for {name} from weights=, got "
                    f"{list(tensor.shape)}; return each weight as the second model holds it"
                )
        return dict(made)

    def _check_derivative(self) -> None:
        leaves = {id(p): p.detach().requires_grad_(p.is_floating_point()) for p in self.first.parameters()}
        with torch.enable_grad():
            made = self._made(leaves)
        if fixed := [name for name in self.theirs if name in made and not made[name].requires_grad]:
            raise ValueError(
                f"expected a differentiable function as weights=, got {_some(fixed)} from it without a "
                "gradient; leave out detach(), .data and torch.no_grad(), its derivative is needed"
            )

    def _check_mapping(self) -> None:
        """Raise if a mapping has names that the models do not have."""
        if not isinstance(self.names, Mapping):
            return
        for which, model, given in (
            ("first", self.first, [*self.names]),
            ("second", self.second, [name for name in self.names.values() if name]),
        ):
            known = set(_names_in(model))
            if wrong := next((name for name in given if name not in known), None):
                raise ValueError(
                    f"expected names= from names of the first model to names of the second, got {wrong!r}, "
                    f"which the {which} does not have{did_you_mean(wrong, known)}"
                )


def _names_in(model: nn.Module) -> Iterator[str]:
    tensors = (*model.named_parameters(remove_duplicate=False), *model.state_dict().items())
    yield from (plain_name(name) for name, _ in (*tensors, *model.named_modules(remove_duplicate=False)))


def _some(names: Iterable[str]) -> str:
    names = [*names]
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
