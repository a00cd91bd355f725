"""Find arguments that a forward accepts: change them one by one, and keep each change that gets further."""

from __future__ import annotations

import contextlib
import itertools
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from te_transform.graph.fake import faked
from te_transform.graph.preserve import preserved
from te_transform.graph.tables import UNKNOWN_RESULT

Form = Callable[[int, int], Any]  # makes a value from a length and a width


@dataclass(frozen=True)
class Argument:
    """The forms that an argument may have, the likeliest first, and the sizes of its value.

    If `length` is 0, the value has the length of the argument before it, as a mask of a text has.
    """

    forms: tuple[Form, ...]
    length: int
    width: int
    is_passed: bool


Guess = dict[str, Argument]
_MOST_ATTEMPTS = 1000  # that get no further, before the search ends


@dataclass(frozen=True)
class _Attempt:
    """A run of the forward: its error, if any, and how many operations ran before it."""

    guess: Guess
    error: Exception | None
    operations: int
    shapes: tuple[tuple[int, ...], ...]  # of the tensors of the operation that failed

    @property
    def misses(self) -> bool:
        """True if the forward read None: it misses an argument, maybe several at once."""
        return "None" in str(self.error)

    @property
    def failure(self) -> tuple[str, list[int]]:
        """The text of the error, and the lines of the calls that led to it."""
        lines = [line for _, line in traceback.walk_tb(self.error.__traceback__)] if self.error else []
        return str(self.error), lines

    def is_further_than(self, other: _Attempt) -> bool:
        """Return True if the forward succeeds, or fails later and not in the same line with the same error.

        If it fails there again, the additional operations are those of an additional argument.
        """
        progress = [(each.operations, each.failure[1], not each.misses) for each in (self, other)]
        return self.error is None or (progress[0] > progress[1] and self.failure != other.failure)


class _Operations(TorchFunctionMode):
    """A mode that counts operations, and notes the shapes of one that fails."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.failed: tuple[tuple[int, ...], ...] = ()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            out = func(*args, **(kwargs or {}))
        except Exception:
            tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            self.failed = tuple(tuple(tensor.shape) for tensor in tensors)
            raise
        self.count, self.failed = self.count + 1, ()
        return out


def furthest(model: nn.Module, guess: Guess) -> dict[str, Any]:
    """Return arguments that the forward accepts, else those with which it gets furthest.

    The forward runs on fake tensors.

    Args:
        guess: The arguments in the order of the signature. Those that are not passed are passed once the
            forward gets no further without them.
    """
    with preserved(model), torch.no_grad(), faked(model, ()):
        # the first attempt fills caches, as of rotary angles, whose operations would count as progress
        _, best = _attempt(model, guess), _attempt(model, guess)
        while best.error is not None and (further := _further(model, best)) is not None:
            best = further
    return _values(best.guess)


def _further(model: nn.Module, best: _Attempt) -> _Attempt | None:
    """Return an attempt that gets further than the best so far, or None."""
    absent = [name for name, argument in best.guess.items() if not argument.is_passed]
    more = [_with_change(best.guess, name, is_passed=True) for name in absent]
    changes = more if best.misses else itertools.chain(_resized(best), _reformed(best.guess), more)
    attempts = itertools.chain((_attempt(model, each) for each in changes), _reformed_and_fitted(model, best))
    attempts = itertools.islice(attempts, _MOST_ATTEMPTS)
    further = next((attempt for attempt in attempts if attempt.is_further_than(best)), None)
    return further or (_attempt(model, more[0]) if best.misses and more else None)


def _reformed_and_fitted(model: nn.Module, best: _Attempt) -> Iterator[_Attempt]:
    """Yield attempts with another form of an argument, whose width is then fitted."""
    for each in _reformed(best.guess):
        reformed = _attempt(model, each)
        yield reformed
        yield from (_attempt(model, fitted) for fitted in _fitted(reformed))


def _with_change(guess: Guess, name: str, **change: Any) -> Guess:
    return guess | {name: replace(guess[name], **change)}


def _values(guess: Guess) -> dict[str, Any]:
    values: dict[str, Any] = {}
    length = 0
    for name, argument in guess.items():
        length = argument.length or length
        if argument.is_passed:
            values[name] = argument.forms[0](length, argument.width)
    return values


def _attempt(model: nn.Module, guess: Guess) -> _Attempt:
    """Run the forward; its result counts as success if only values can decide about it."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    operations = _Operations()
    try:
        values = tree_map_only(Tensor, lambda tensor: tensor.to(device), _values(guess))
        with contextlib.suppress(*UNKNOWN_RESULT), operations:
            model(**values)
    except Exception as error:
        return _Attempt(guess, error, operations.count, operations.failed)
    return _Attempt(guess, None, operations.count, ())


def _resized(attempt: _Attempt) -> Iterator[Guess]:
    """Yield guesses of other sizes, after the sizes in the operation that failed."""
    guess, shapes = attempt.guess, list(itertools.permutations(attempt.shapes, 2))
    fitted = _fitted(attempt)
    aligned = itertools.chain.from_iterable(
        (*zip(one, other, strict=False), *zip(one[::-1], other[::-1], strict=False)) for one, other in shapes
    )
    differences = dict.fromkeys(needed - size for size, needed in aligned if size != needed)
    yield from fitted
    for start, size in itertools.product((guess, *fitted), ("length", "width")):
        for more, name in itertools.product(differences, guess):
            old = getattr(start[name], size)
            if start[name].is_passed and old and old + more > 0:
                yield _with_change(start, name, **{size: old + more})


def _fitted(attempt: _Attempt) -> list[Guess]:
    """Return guesses of other widths, after the sizes in the operation that failed.

    Widths differ from each other and from usual sizes, so a size that is a width, or a multiple in patches of
    several numbers, identifies its argument.
    """
    shapes = itertools.permutations(attempt.shapes, 2)
    pairs = dict.fromkeys((size, needed) for one, other in shapes for size in one for needed in other)
    guesses = []
    for (size, needed), (name, argument) in itertools.product(pairs, attempt.guess.items()):
        patch, rest = divmod(size, argument.width)
        if patch and not rest and needed % patch == 0 and needed // patch not in (0, argument.width):
            guesses.append(_with_change(attempt.guess, name, width=needed // patch))
    return guesses


def _reformed(guess: Guess) -> Iterator[Guess]:
    """Yield guesses in which one argument has another form."""
    for name, argument in guess.items():
        for first in argument.forms[1:] if argument.is_passed else ():
            others = (form for form in argument.forms if form is not first)
            yield _with_change(guess, name, forms=(first, *others))
