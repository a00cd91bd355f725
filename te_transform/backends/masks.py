"""What an attention mask is, found out for the sizes and the data at hand by evaluating it, never
extrapolated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import is_fake
from torch.utils.weak import WeakIdKeyDictionary

from te_transform.backends.bands import Band, Banded, Seeing, band_of, banded, kept, measure
from te_transform.backends.limits import gains_from_masks, on_kernels_device
from te_transform.backends.op import GraphOp
from te_transform.backends.tensor_version import TensorVersion
from te_transform.canonicalize.attention import HIDES
from te_transform.graph import edit
from te_transform.graph.nodes import is_bias

CAUSAL, FULL, SEEING = "causal", "full", "seeing"
_FEW = 256  # answers that are kept: one for each length that a generation goes through
Answer = str | Band | None


class _Looked(NamedTuple):
    """A look at the data that a mask is made of."""

    stamp: TensorVersion
    others: tuple  # what else the mask is made of
    held: Tensor | None  # the contents, on the CPU
    answer: Answer

    def is_of(self, data: Tensor, others: tuple) -> bool:
        """Whether the answer is that for this data, as it is now."""
        return self.others == others and self.stamp.is_of(data) and _holds(data, self.held)


# By the operations that make a mask, for each tensor that was looked at.
_LOOKED: dict[tuple[bool, str], WeakIdKeyDictionary] = defaultdict(WeakIdKeyDictionary)


class Mask(GraphOp):
    """The op of a captured graph that makes an attention mask, and says what it is where that is known.

    The answer is remembered for as long as what the mask is made of stays the same. Sizes are numbers, and
    model tensors have a stamp; on the CPU the mask is made, and compared with the last one. Data, new at each
    call, is looked at, once for each tensor, so that blocks and pieces that are captured alone and get the
    same mask share one look: where a tensor holds one value throughout, as the padding mask of a batch that
    has no padding does, that value is part of what an answer is remembered by; otherwise the mask itself is
    looked at.

    Args:
        make: the captured operations that make the mask, as a module that returns a tuple of it and, where
            it was filled with a finite number, of the rows that it hides everywhere.
        stored: for each argument whether it is a tensor of the model.
        beside_sinks: whether the attention is one beside sinks, see what_is().
    """

    def __init__(self, make: fx.GraphModule, stored: Sequence[bool], beside_sinks: bool = False):
        super().__init__()
        self.make, self.stored, self.beside_sinks = make, tuple(stored), beside_sinks
        self._answers: dict[tuple, Answer] = {}
        # a forward that is captured in pieces makes the same mask in many of them
        alike = beside_sinks, _operations(make.graph)
        self._looked = WeakIdKeyDictionary() if any(stored) else _LOOKED[alike]
        self._last: tuple[list[Tensor], Answer] | None = None  # what was made of model tensors on the CPU

    def forward(self, *arguments: Any) -> Tensor | Banded | Seeing | str:
        """The mask, as a band or one under which every query sees a key where it is that; "causal" or "full"
        where it is that."""
        answer, made = self.look(arguments)
        if answer in (CAUSAL, FULL):
            return answer
        return _known_as(self.make.forward(*arguments)[0] if made is None else made, answer)

    def look(self, arguments: Sequence[Any]) -> tuple[Answer, Tensor | None]:
        """What the mask is; and the mask, where it has been made to find that out."""
        if _have_no_numbers(arguments):
            return None, None
        if any(stored and _is_on_cpu(each) for each, stored in zip(arguments, self.stored, strict=True)):
            return self._compared(arguments)
        # data keeps its place among them: another mask of the same operations may have it elsewhere
        keys = tuple(_key(*each) for each in zip(arguments, self.stored, strict=True))
        data = [argument for argument, key in zip(arguments, keys, strict=True) if key is None]
        alone = len(data) == 1 and not data[0].is_inference()
        known = self._looked.get(data[0]) if alone else None
        if known is not None and known.is_of(data[0], keys):
            return known.answer, None
        stamp = (
            TensorVersion.of(data[0]) if alone else None
        )  # as it was looked at, whoever writes to it meanwhile
        answer, made = self._find(data, keys, arguments)
        if stamp is not None:
            self._looked[data[0]] = _Looked(stamp, keys, _held(data[0]), answer)
        return answer, made

    def _find(
        self, data: Sequence[Tensor], keys: tuple, arguments: Sequence[Any]
    ) -> tuple[Answer, Tensor | None]:
        values = [_only_value(tensor) for tensor in data]
        key = (keys, *values)
        if None not in values and key in self._answers:
            return self._answers[key], None
        mask, *hidden = self.make.forward(*arguments)
        answer = what_is(mask, *hidden, beside_sinks=self.beside_sinks)
        if None not in values:
            if len(self._answers) >= _FEW:
                self._answers.clear()
            self._answers[key] = answer
        return answer, mask

    def _compared(self, arguments: Sequence[Any]) -> tuple[Answer, Tensor]:
        """What the mask is now that it has been made: model tensors may be written to through .data, which no
        stamp shows, and may be much larger than the part of them that a call reads."""
        made = self.make.forward(*arguments)
        last = self._last  # which another thread may change
        if last is None or not all(map(_holds, made, last[0])):
            answer = what_is(*made, beside_sinks=self.beside_sinks)
            last = self._last = [tensor.detach().clone() for tensor in made], answer
        return last[1], made[0]


class LookedAt(GraphOp):
    """A mask's look in its place: what the mask is, or what makes it."""

    def __init__(self, mask: Mask):
        super().__init__()
        self.mask = mask
        self.made: dict[Answer, fx.GraphModule] = {None: mask.make}

    def forward(self, *arguments: Any) -> str | fx.GraphModule:
        """ "causal" or "full"; the operations where it is neither."""
        answer, _ = self.mask.look(arguments)
        if answer in (CAUSAL, FULL):
            return answer
        if answer not in self.made:
            self.made[answer] = edit.passed_through(self.mask.make, 0, _known_as, answer)
        return self.made[answer]


def _known_as(mask: Tensor, answer: Answer) -> Tensor | Banded | Seeing:
    """The mask with what is known of it, for the op that it goes to."""
    if answer == SEEING:
        return Seeing(mask)
    return mask if answer is None else banded(mask, answer)


def _key(argument: Any, stored: bool) -> tuple | None:
    """What the argument is, as part of a key; None for data, which has to be looked at."""
    if not isinstance(argument, Tensor):
        return (argument,)
    return (argument.shape, argument.dtype, argument.device, TensorVersion.of(argument)) if stored else None


def _is_on_cpu(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.device.type == "cpu"


def _operations(graph: fx.Graph) -> str:
    """The operations of a graph, whatever its nodes are called."""
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    lines = (
        f"{'' if node.op == 'placeholder' else node.target} "
        f"{fx.map_arg((node.args, node.kwargs), lambda read: f'%{numbers[read]}')}"
        for node in graph.nodes
    )
    return "\n".join(lines)


def _only_value(tensor: Tensor) -> tuple | None:
    """The one number that a tensor holds throughout, as part of a key; None where it holds several."""
    about = (tensor.shape, tensor.dtype, tensor.device)
    if tensor.numel() == 0:
        return about
    low, high = tensor.aminmax() if tensor.dtype != torch.bool else (tensor.all(), tensor.any())
    # the two numbers in one transfer: the GPU is waited for once
    low, high = torch.stack((low, high)).tolist()
    return (*about, low) if low == high else None


def _held(tensor: Tensor) -> Tensor | None:
    """What tells of a write that a stamp misses, on the CPU: the contents."""
    return tensor.detach().clone() if _is_on_cpu(tensor) else None


def _holds(tensor: Tensor, held: Tensor | None) -> bool:
    return held is None or (held.shape == tensor.shape and torch.equal(held, tensor))


def _have_no_numbers(arguments: Sequence[Any]) -> bool:
    """Whether the call is one of shapes alone, on fake tensors or on the meta device."""
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    if any(tensor.is_meta or is_fake(tensor) for tensor in tensors):
        return True
    return torch._C._len_torch_dispatch_stack() > 0 and active_fake_mode() is not None


def what_is(mask: Tensor, hidden_rows: Tensor | None = None, beside_sinks: bool = False) -> Answer:
    """Whether a mask [..., queries, keys] hides nothing, or just what lies ahead; or which band of keys it
    keeps, where there are kernels for bands; or whether every query sees a key under a floating one.

    True keeps in a boolean mask; a floating one is added to the scores, so that 0 keeps, and what hides is so
    low that beside any other score its probability is zero. Hidden rows are kept as a whole, see
    ops.hidden_rows, but not with the scores that they had: a mask with such a row is neither. Of a bias that
    differs from head to head only the last is asked.
    """
    with torch.no_grad():
        sees = _every_query_sees(mask)
        if is_bias(mask):
            return SEEING if sees else None
        keep, (queries, keys) = kept(mask), mask.shape[-2:]
        well = keep.new_ones(()) if hidden_rows is None else ~hidden_rows.any()
        if mask.dtype is not torch.bool:
            well = well & (keep | (mask <= torch.finfo(mask.dtype).min)).all()
        found = {FULL: keep.all()}
        if queries == keys:
            causal = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril()
            found[CAUSAL] = (keep == causal).all()
        facts = torch.stack([sees, well, *found.values()]).long()
        if _may_be_banded(mask):
            facts = torch.cat([facts, measure(keep)])
        sees, is_well, *facts = facts.tolist()  # the GPU is waited for once
        otherwise = SEEING if sees else None
        if not is_well:
            return otherwise
        answer, measured = next(compress(found, facts), None), facts[len(found) :]
        if answer or not measured:
            return answer or otherwise
        band = band_of(measured, queries, keys)
        # a row that a floating mask hides as a whole is uniform, or NaN; zero where there is a sink to go to
        is_zero = beside_sinks or mask.dtype is torch.bool
        return otherwise if band is None or (band.blind and not is_zero) else band


def _every_query_sees(mask: Tensor) -> Tensor:
    """Whether a floating mask leaves every query a score that is not so low that it hides; the gradients of
    kernels are those of the model's operations then, see plain.DotProductAttention."""
    if mask.dtype is torch.bool or not mask.numel():
        return mask.new_zeros((), dtype=torch.bool)
    return (mask.amax(-1) > HIDES).all()


def _may_be_banded(mask: Tensor) -> bool:
    """Whether there are kernels for bands where the mask is, and of its size; they take one for all heads of
    a sequence."""
    one = mask.dim() <= 4 and mask.shape[-3:-2] in ((), (1,)) and mask.numel() > 0
    return one and on_kernels_device(mask) and gains_from_masks(mask.shape[-1])
