"""Watch the torch calls of one step: the lines of code that wait for the GPU, loop, or pass a mask."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from te_transform.canonicalize.attention import HIDES
from te_transform.profile.ranges import Ranges

_LIBRARY_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_NOT_OF_A_FORWARD = (*dist.__path__, str(Path(__file__).parent))  # FSDP2's hooks, and the step
# Functions that make the CPU wait for the result of a GPU.
_WAITING_METHODS = {
    "item", "tolist", "numpy", "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive",
    "is_nonzero", "__bool__", "__int__", "__float__", "__index__", "equal", "allclose", "cpu", "bincount",
    "__repr__", "__format__",
}  # fmt: skip


class Line(NamedTuple):
    """A line of the user's code that calls torch: its module's label, function, file and line number."""

    label: int
    function: str
    file: str
    number: int
    called: str

    @property
    def place(self) -> str:
        """The file and line, as short as possible."""
        path = Path(self.file)
        short = os.path.relpath(path) if path.is_relative_to(Path.cwd()) else "/".join(path.parts[-2:])
        return f"{short}:{self.number}"


class Choice(NamedTuple):
    """A call of topk, argmax or max: the number of rows, of values in a row, and of chosen values per row."""

    rows: int
    among: int
    chosen: int


class Watch(TorchFunctionMode):
    """A mode that records torch calls of a forward by their lines.

    Attributes:
        most: the largest number of times that each line ran in one call of its module.
        waits: the number of calls that make the CPU wait for the GPU, by line.
        masks: what the masks of F.scaled_dot_product_attention hide, by line.
        choices: calls of topk, argmax and max, by line.
        einsums: the shapes that calls of einsum multiply, by the label of their module.
    """

    def __init__(self, ranges: Ranges):
        super().__init__()
        self.ranges = ranges
        self.waits: Counter[Line] = Counter()
        self.masks: dict[Line, set[str]] = {}
        self.choices: dict[Line, Choice] = {}
        self.einsums: dict[int, set[torch.Size]] = {}
        self._counts: Counter[tuple[int, Line]] = Counter()

    @property
    def most(self) -> Mapping[Line, int]:
        largest: dict[Line, int] = {}
        for (_, line), number in self._counts.items():
            largest[line] = max(number, largest.get(line, 0))
        return largest

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # functions that the forward compiles
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name != "__get__" and (frame := _users_frame(sys._getframe(1))) is not None:
            label, call, _ = self.ranges.running[-1] if self.ranges.running else (0, 0, None)
            code = frame.f_code
            line = Line(label, code.co_name, code.co_filename, frame.f_lineno, name)
            self._counts[call, line] += 1
            if _waits(name, args, kwargs):
                self.waits[line] += 1
            elif func is F.scaled_dot_product_attention and (hidden := _hidden_in(*args, **kwargs)):
                self.masks.setdefault(line, set()).add(hidden)
            elif name == "einsum":
                shapes = {each.shape for each in tree_leaves(args) if isinstance(each, Tensor)}
                self.einsums.setdefault(label, set()).update(shapes)
            elif name in _CHOOSING_CALLS and (choice := _CHOOSING_CALLS[name](*args, **kwargs)) is not None:
                self.choices[line] = choice
        return func(*args, **kwargs)


def _users_frame(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the user's forward that calls torch, or None if hooks of PyTorch do."""
    while frame is not None and (file := frame.f_code.co_filename).startswith(_LIBRARY_FOLDERS):
        frame = None if file.startswith(_NOT_OF_A_FORWARD) else frame.f_back
    return frame


def _waits(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if name == "where":
        return len(args) == 1
    if name in ("__getitem__", "__setitem__"):
        return any(map(_is_bool_mask, args[1] if isinstance(args[1], tuple) else args[1:2]))
    if name == "to":
        targets = [x for x in (*args[1:2], kwargs.get("device")) if isinstance(x, (str, torch.device))]
        return args[0].device.type != "cpu" and any(torch.device(x).type == "cpu" for x in targets)
    return name in _WAITING_METHODS


def _is_bool_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) and index.dim() > 0


def _choice_of(input: Tensor, k: int, *_: Any, **__: Any) -> Choice:
    return Choice(input.shape[:-1].numel(), input.shape[-1], k)


def _choice_of_one(input: Tensor, dim: Any = None, *_: Any, **__: Any) -> Choice | None:
    """Return the choice of the largest value in each row, or None for the largest of other values."""
    return _choice_of(input, 1) if isinstance(dim, int) and dim in (-1, input.dim() - 1) else None


_CHOOSING_CALLS = {"topk": _choice_of, "argmax": _choice_of_one, "max": _choice_of_one}


def _hidden_in(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any
) -> str:
    """Return "nothing", "causal" or "other", from the values of the mask, or "" without a mask."""
    if attn_mask is None:
        return ""
    if attn_mask.requires_grad:
        return "other"
    mask, rows, columns = attn_mask, query.shape[-2], key.shape[-2]
    seen = mask if mask.dtype is torch.bool else mask == 0
    if bool(seen.all()):
        return "nothing"
    is_hidden = seen | (mask <= HIDES) if mask.is_floating_point() else seen | True
    causal = torch.ones(rows, columns, dtype=torch.bool, device=mask.device).tril()
    fits = rows == columns and seen.shape[-2:] == causal.shape
    return "causal" if fits and bool(is_hidden.all()) and bool((seen == causal).all()) else "other"
