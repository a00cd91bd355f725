"""The weights of one model as a function of another model's: their names, and gradients carried back.

The function is a renaming, or any differentiable function from state dict to state dict, such as the one that
converts checkpoints. If it joins q, k and v, then its derivative splits the gradient of the joined weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from te_transform.graph.errors import in_a_line, raised_at
from te_transform.graph.grouped import grouped
from te_transform.graph.keywords import ArgumentError, did_you_mean
from te_transform.verify.compare import Row
from te_transform.verify.names import Names, check_names, names_in, plain_name, renaming, some
from te_transform.verify.states import compare_weights

Weights = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]


@dataclass(frozen=True, eq=False)
class Layout:
    """The weights of `second` as a function of the weights of `first`, see verify().

    Raises:
        ArgumentError: the weights of the two models cannot be matched; the message says what was given.
    """

    first: nn.Module
    second: nn.Module
    names: Names | None = None
    weights: Weights | None = None

    def __post_init__(self) -> None:
        check_names(self.names, self.first, self.second)
        self._check_derivative()
        known = {*names_in(self.second), None}
        left = [name for name in self.own if self.weights is None and self.rename(name) not in known]
        if self._unmatched and (left or self.weights is not None):
            missing = f", and {some(left)} in the first only" if left else ""
            raise ArgumentError(
                f"expected the same weights in both models, got {some(self._unmatched)} in the second "
                f"only{missing}; pass names, which map the first's names to the second's, or weights, a "
                "function that makes the second's state dict",
                "names",
                "weights",
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
            weights = self._second_weights({id(p): leaves[name] for name, p in self.own.items()})
            weights = {
                name: tensor for name, tensor in weights.items() if tensor.requires_grad and name in gradients
            }
            given = [gradients[name].to(tensor.dtype) for name, tensor in weights.items()]
            if not weights:
                return {}
            grads = torch.autograd.grad([*weights.values()], [*leaves.values()], given, allow_unused=True)
        return {name: g for name, g in zip(leaves, grads, strict=True) if g is not None}

    def rows(self) -> Iterator[Row]:
        """Yield a row for each weight with other values, and one with the number of weights."""
        with torch.no_grad():
            weights = self._second_weights({})
        yield from compare_weights(weights, self._state)

    def copy(self) -> None:
        """Load the first model's weights into the second model."""
        with torch.no_grad():
            state = self._state
            for name, weight in self._second_weights({}).items():
                if isinstance(state.get(name), Tensor):
                    state[name].copy_(weight)

    def notes(self) -> Iterator[str]:
        """Yield a sentence for gradients that cannot be compared."""
        if left := [name for name in self.own if name not in self.compared]:
            yield f"not compared: the gradients of {some(left)}, which the second model does not train"
        if left := self._unmatched:
            yield f"not compared: the gradients of {some(left)}, which the first model does not have"
        for names in self._untied() if self.weights is None else ():
            yield (
                f"{some(names)} are one parameter in the first model: the sum of their gradients is "
                "compared, but an optimizer moves them apart; tie them before training"
            )

    def _untied(self) -> Iterator[list[str]]:
        """Yield the names of several trained parameters of the second model that are one in the first."""
        first = {plain_name(n): p for n, p in self.first.named_parameters(remove_duplicate=False)}
        renamed = ((id(parameter), self.rename(name)) for name, parameter in first.items())
        groups = grouped((key, name) for key, name in renamed if name in self.theirs)
        yield from (names for names in groups.values() if len({*names}) > 1)

    @property
    def _state(self) -> dict[str, Any]:
        """The second model's state dict."""
        return {plain_name(name): value for name, value in self.second.state_dict().items()}

    @cached_property
    def _unmatched(self) -> list[str]:
        weights = self._second_weights({})
        return [name for name in self.theirs if name not in weights]

    def _second_weights(self, tensors: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """Make the second model's weights; `tensors` replace the first's parameters, by their id."""
        state = self.first.state_dict(keep_vars=True)
        more = self.first.named_parameters(remove_duplicate=False)
        given = {plain_name(name): tensors.get(id(t), t) for name, t in (*more, *state.items())}
        weights = self._renamed(given) if self.weights is None else self._checked(given)
        # of tied parameters, the second model has a gradient under the first name
        first = {id(p): plain_name(name) for name, p in self.second.named_parameters()}
        everywhere = self.second.named_parameters(remove_duplicate=False)
        tied = {plain_name(name): first[id(p)] for name, p in everywhere}
        return weights | {tied[name]: tensor for name, tensor in reversed(weights.items()) if name in tied}

    def _renamed(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        theirs = {plain_name(n): p for n, p in self.second.named_parameters(remove_duplicate=False)}
        renamed: dict[str, Tensor] = {}
        for name, tensor in given.items():
            new = self.rename(name)
            if new not in theirs or not isinstance(tensor, Tensor):
                continue
            if theirs[new].shape == tensor.shape:
                renamed[new] = tensor
            elif theirs[new].is_floating_point():
                raise ArgumentError(
                    f"expected weights of one shape, got {list(tensor.shape)} for {name} in the first model "
                    f"and {list(theirs[new].shape)} for {new} in the second; pass weights, a function that "
                    "makes the second's state dict",
                    "weights",
                )
        return renamed

    def _checked(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights that the user's function makes, if the second model has weights like them."""
        try:
            weights = dict(self.weights(given))
        except Exception as error:  # the user's code may raise anything
            raise ArgumentError(
                "expected weights as a function from state dict to state dict, got an error from it "
                f"({in_a_line(error)}){raised_at(error)}",
                "weights",
            ) from error
        state = self._state
        for name, tensor in weights.items():
            if name not in state:
                raise ArgumentError(
                    f"expected names of the second model from the function for weights, got {name!r}"
                    f"{did_you_mean(name, state)}",
                    "weights",
                )
            if isinstance(state[name], Tensor) and tensor.shape != state[name].shape:
                raise ArgumentError(
                    f"expected the shape {list(state[name].shape)} for {name} from the function for weights, "
                    f"got {list(tensor.shape)}; return each weight as the second model holds it",
                    "weights",
                )
        return weights

    def _check_derivative(self) -> None:
        leaves = {
            id(p): p.detach().requires_grad_(p.is_floating_point() or p.is_complex())
            for p in self.first.parameters()
        }
        with torch.enable_grad():
            weights = self._second_weights(leaves)
        if fixed := [name for name in self.theirs if name in weights and not weights[name].requires_grad]:
            raise ArgumentError(
                f"expected a differentiable function for weights, got {some(fixed)} from it without a "
                "gradient; leave out detach(), .data and torch.no_grad()",
                "weights",
            )
