"""Classification of attention masks by their values, for the sizes and the data of each call."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import is_fake
from torch.utils.weak import WeakIdKeyDictionary

from te_transform.backends.bands import Band, Banded, Seeing, band_of, banded, kept_keys, measure
from te_transform.backends.limits import autocast_dtype, gains_from_masks, on_kernels_device
from te_transform.backends.op import GraphOp
from te_transform.backends.tensor_version import TensorVersion
from te_transform.canonicalize.attention import HIDES
from te_transform.graph import edit
from te_transform.graph.bits import same_bits
from te_transform.graph.nodes import is_bias
from te_transform.graph.state_snapshot import is_plain

CAUSAL, FULL, SEEING = "causal", "full", "seeing"
_FEW = 256  # the maximum number of cached answers; a generation needs one per length
Answer = str | Band | None


@dataclass(eq=False)
class _Looked:
    """The cached answer for a mask that was computed from a data tensor.

    Attributes:
        stamp: the version of the data.
        copy: a copy of the data, on the CPU.
        maker: the id of the MaskOp that found it.
    """

    stamp: TensorVersion
    copy: Tensor | None
    answer: Answer
    maker: int

    def is_of(self, data: Tensor) -> bool:
        """Return True if the answer is valid for the current contents of this data."""
        return self.stamp.is_of(data) and _holds(data, self.copy)


class KeptMasks(threading.local):
    """The masks of a call that several ops of a graph return: the first one computes it for all.

    Each thread has its own masks, because threads may call the graph on different CUDA streams.

    Args:
        makers: the ids of ops whose masks others return too, shared by all threads.
    """

    def __init__(self, makers: set[int]):
        self.makers = makers
        self.masks: dict[_Looked, Tensor] = {}

    def __reduce__(self) -> tuple:
        return KeptMasks, (set(),)  # a copied graph has ops and masks of its own

    def keep(self, known: _Looked, mask: Tensor) -> None:
        """Keep a mask until the last op of the graph, unless it belongs to a transform of torch.func."""
        if known.maker in self.makers and not torch._C._functorch.is_functorch_wrapped_tensor(mask):
            self.masks[known] = mask


# The cached answers by the operations that compute a mask, by data tensor, and by the keys of other inputs.
_LOOKED: dict[tuple[bool, tuple], WeakIdKeyDictionary] = defaultdict(WeakIdKeyDictionary)
# The versions of tensors of models, with a number that tensors with equal contents share.
_NUMBERS: WeakIdKeyDictionary = WeakIdKeyDictionary()
_NEW_NUMBERS, _ONE_NUMBER = count(), threading.Lock()


class MaskOp(GraphOp):
    """The op of a captured graph that computes and classifies an attention mask.

    The answer is cached as long as the inputs of the mask stay the same:

    - sizes are compared as numbers;
    - tensors of the model are compared by their contents, which are read once per TensorVersion. Layers with
      equal buffers share an answer, and a call computes their mask once. On the CPU, the mask is computed and
      compared with the last one, because writes through .data do not change the version;
    - data, which is new in each call, is evaluated once per tensor. Blocks and pieces that are captured
      separately, and get the same tensor, share the answer. If all numbers of a tensor are equal, this number
      is part of the cache key. An example is the padding mask of a batch without padding. Otherwise the mask
      is computed and classified.

    Args:
        make: the captured operations that compute the mask. The module returns a tuple of the mask and, if it
            is filled with a finite number, its fully masked rows.
        stored: for each argument, True if it is a tensor of the model.
        beside_sinks: True if the attention has sinks, see what_is().
        kept: the masks that the ops of a graph share. The last op frees them.
    """

    is_last = True  # of its graph

    def __init__(
        self,
        make: fx.GraphModule,
        stored: Sequence[bool],
        beside_sinks: bool = False,
        kept: KeptMasks | None = None,
    ):
        super().__init__()
        self.make, self.stored, self.beside_sinks = make, tuple(stored), beside_sinks
        self.kept = kept or KeptMasks(set())
        self._answers: dict[tuple, Answer] = {}
        # pieces of a forward that are captured separately often compute the same mask
        self._looked = _LOOKED[beside_sinks, _operations(make.graph)]
        self._last: tuple[list[Tensor], Answer] | None = None  # the last mask from CPU tensors of the model

    def forward(self, *arguments: Any) -> Tensor | Banded | Seeing | str:
        """Return "causal" or "full", or the mask, classified as Banded or Seeing if possible."""
        answer, mask, known = self._look(arguments)
        if answer not in (CAUSAL, FULL):
            if mask is None:
                mask = self.make.forward(*arguments)[0]
            if known is not None and known.maker == id(self):
                self.kept.keep(known, mask)
        if self.is_last:
            self.kept.masks.clear()
        return answer if answer in (CAUSAL, FULL) else _classified(mask, answer)

    def look(self, arguments: Sequence[Any]) -> Answer:
        """Classify the mask."""
        return self._look(arguments)[0]

    def _look(self, arguments: Sequence[Any]) -> tuple[Answer, Tensor | None, _Looked | None]:
        """Return the answer, the mask if it is known, and the cached answer for the data."""
        if _have_no_values(arguments):
            return None, None, None
        if any(stored and _is_on_cpu(each) for each, stored in zip(arguments, self.stored, strict=True)):
            return *self._compared(arguments), None
        # None marks the position of data: another mask with the same operations may have data elsewhere
        keys = tuple(_argument_key(*each) for each in zip(arguments, self.stored, strict=True))
        data = [argument for argument, key in zip(arguments, keys, strict=True) if key is None]
        keys += (torch.get_default_dtype(), *map(autocast_dtype, data))  # the operations compute in these
        if len(data) == 1 and not data[0].is_inference():
            return self._look_at(data[0], keys, arguments)
        return *self._find(data, keys, arguments), None

    def _look_at(
        self, data: Tensor, keys: tuple, arguments: Sequence[Any]
    ) -> tuple[Answer, Tensor | None, _Looked]:
        """Return the results of _look() for a mask that is computed from one data tensor."""
        of_data = self._looked.setdefault(data, {})
        known = of_data.get(keys)
        if known is not None and known.is_of(data):
            if known.maker != id(self):
                self.kept.makers.add(known.maker)
            mask = self.kept.masks.get(known)
            if mask is not None and mask.is_inference() != torch.is_inference_mode_enabled():
                mask = None
            return known.answer, mask, known
        # taken before the evaluation, because another thread may write to the data meanwhile
        stamp = TensorVersion.of(data)
        answer, tensor = self._find([data], keys, arguments)
        if len(of_data) >= _FEW:
            of_data.clear()
        known = of_data[keys] = _Looked(stamp, _copy_on_cpu(data), answer, id(self))
        return answer, tensor, known

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
        """Compute the mask, and classify it unless it equals the last one.

        A TensorVersion does not detect writes to model tensors through .data. Copies of these tensors may be
        much larger than the part that a call reads.
        """
        tensors = self.make.forward(*arguments)
        last = self._last  # read once, because another thread may change it
        if last is None or not all(map(_holds, tensors, last[0])):
            answer = what_is(*tensors, beside_sinks=self.beside_sinks)
            last = self._last = [tensor.detach().clone() for tensor in tensors], answer
        return last[1], tensors[0]


class LookedAt(GraphOp):
    """An op that replaces a Mask and only classifies it: it returns the answer, or the mask's operations."""

    def __init__(self, mask: MaskOp):
        super().__init__()
        self.mask = mask
        self.graphs: dict[Answer, fx.GraphModule] = {None: mask.make}

    def forward(self, *arguments: Any) -> str | fx.GraphModule:
        """Return "causal" or "full", or otherwise the operations that compute the classified mask."""
        answer = self.mask.look(arguments)
        if answer in (CAUSAL, FULL):
            return answer
        if answer not in self.graphs:
            self.graphs[answer] = edit.passed_through(self.mask.make, 0, _classified, answer)
        return self.graphs[answer]


def _classified(mask: Tensor, answer: Answer) -> Tensor | Banded | Seeing:
    """Return the mask with its classification, for the attention op."""
    if answer == SEEING:
        return Seeing(mask)
    return mask if answer is None else banded(mask, answer)


def _argument_key(argument: Any, stored: bool) -> tuple | None:
    """Return the cache key of an argument, or None for data, whose values must be evaluated."""
    if not isinstance(argument, Tensor):
        return type(argument), argument
    return (argument.shape, argument.dtype, argument.device, _number_of(argument)) if stored else None


def _number_of(tensor: Tensor) -> int:
    """Return a number for the contents of a tensor, which tensors with equal contents share."""
    with _ONE_NUMBER:
        known = _NUMBERS.get(tensor)
        if known is not None and known[0].is_of(tensor):
            return known[1]
        if not is_plain(tensor) or tensor.is_inference():
            return next(_NEW_NUMBERS)  # no version detects all writes
        stamp = TensorVersion.of(tensor)
        alike = (
            number
            for other, (version, number) in _NUMBERS.items()
            if other is not tensor and version.is_of(other) and _are_equal(other, tensor)
        )
        number = next(alike, None)
        _NUMBERS[tensor] = stamp, next(_NEW_NUMBERS) if number is None else number
        return _NUMBERS[tensor][1]


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors are alike in all that a mask could read of them, even by as_strided()."""
    same = one.stride() == other.stride() and one.device == other.device and same_bits(one, other)
    return same and all(each.untyped_storage().nbytes() == each.nbytes for each in (one, other))


def _is_on_cpu(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.device.type == "cpu"


def _operations(graph: fx.Graph) -> tuple[tuple[str, Any, str], ...]:
    """Return the operations of a graph, regardless of the names and the order of its nodes."""
    numbers = {node: number for number, node in enumerate(graph.find_nodes(op="placeholder"))}
    operations, pending = [], graph.find_nodes(op="output")
    while pending:
        node = pending[-1]
        unnumbered = [read for read in node.all_input_nodes if read not in numbers]
        if unnumbered:
            pending.append(unnumbered[0])
            continue
        # nodes become sets, because no other argument does; as text, because 1 == True
        read = fx.map_arg((node.args, node.kwargs), lambda read: {numbers[read]})
        operations.append((node.op, node.target, str(read)))
        numbers[pending.pop()] = len(numbers)
    return tuple(operations)


def _only_value(tensor: Tensor) -> tuple | None:
    """Return the value of a tensor as a cache key if all of its numbers are equal, or None."""
    about = (tensor.shape, tensor.dtype, tensor.device)
    if tensor.numel() == 0:
        return about
    low, high = tensor.aminmax() if tensor.dtype != torch.bool else (tensor.all(), tensor.any())
    # one transfer for both numbers, and so one synchronization
    low, high = torch.stack((low, high)).tolist()
    return (*about, low) if low == high else None


def _copy_on_cpu(tensor: Tensor) -> Tensor | None:
    """Return a copy of a CPU tensor, which detects writes that a TensorVersion misses, or None."""
    return tensor.detach().clone() if _is_on_cpu(tensor) else None


def _holds(tensor: Tensor, last: Tensor | None) -> bool:
    return last is None or (last.shape == tensor.shape and torch.equal(last, tensor))


def _have_no_values(arguments: Sequence[Any]) -> bool:
    """Return True if the call only propagates shapes, on fake tensors or on the meta device."""
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    if any(tensor.is_meta or is_fake(tensor) for tensor in tensors):
        return True
    return torch._C._len_torch_dispatch_stack() > 0 and active_fake_mode() is not None


def what_is(mask: Tensor, hidden_rows: Tensor | None = None, beside_sinks: bool = False) -> Answer:
    """Classify a mask by its values.

    In a boolean mask, True keeps a key. In a floating-point mask, 0 keeps a key. The value of a masked key is
    so low that its probability is zero beside any other score.

    Args:
        mask: [..., queries, keys].
        hidden_rows: the rows whose keys are all masked by a finite number, see ops.hidden_rows(). Attention
            keeps all keys of these rows, but not their scores. A mask with such a row is not FULL, CAUSAL or
            a Band.
        beside_sinks: True if the attention has sinks.

    Returns:
        The first of these that is true, or None:

        - FULL: the mask keeps all keys.
        - CAUSAL: the mask keeps the keys up to the query's position.
        - a Band: the mask keeps this band of keys, and kernels support it.
        - SEEING: the mask is floating-point, and every query sees a key. A bias that differs between heads
          gets no other answer.
    """
    with torch.no_grad():
        facts = _MaskFacts.of(mask, hidden_rows)
    if facts.is_exact:
        if facts.keeps_all:
            return FULL
        if facts.is_causal:
            return CAUSAL
        band = band_of(facts.measured, *mask.shape[-2:]) if facts.measured else None
        # a row that a floating-point mask masks fully is uniform or NaN, but zero if the attention has sinks
        if band is not None and (not band.blind or beside_sinks or mask.dtype is torch.bool):
            return band
    return SEEING if facts.sees else None


class _MaskFacts(NamedTuple):
    """The facts about the values of a mask that classify it.

    Attributes:
        sees: True if every query sees a key of a floating-point mask.
        is_exact: True if the mask only keeps and masks keys, and masks no row by a finite number.
        keeps_all: True if the mask keeps all keys.
        is_causal: True if the mask keeps the keys up to the query's position.
        measured: see bands.measure(); empty if no kernel for bands exists.
    """

    sees: bool
    is_exact: bool = False
    keeps_all: bool = False
    is_causal: bool = False
    measured: Sequence[int] = ()

    @classmethod
    def of(cls, mask: Tensor, hidden_rows: Tensor | None) -> _MaskFacts:
        """Read all facts with one synchronization."""
        sees = _every_query_sees(mask)
        if is_bias(mask):
            return cls(bool(sees))
        keep, (queries, keys) = kept_keys(mask), mask.shape[-2:]
        is_exact = keep.new_ones(()) if hidden_rows is None else ~hidden_rows.any()
        if mask.dtype is not torch.bool:
            is_exact = is_exact & (keep | (mask <= torch.finfo(mask.dtype).min)).all()
        is_causal = keep.new_zeros(())
        if queries == keys:
            causal = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril()
            is_causal = (keep == causal).all()
        facts = torch.stack([sees, is_exact, keep.all(), is_causal]).long()
        if _may_be_banded(mask):
            facts = torch.cat([facts, measure(keep)])
        sees, is_exact, keeps_all, is_causal, *measured = facts.tolist()
        return cls(sees, is_exact, keeps_all, is_causal, measured)


def _every_query_sees(mask: Tensor) -> Tensor:
    """Return True, as a tensor, if a floating-point mask lets every query see a key.

    The gradients of kernels then equal those of the model's operations, see plain.DotProductAttention.
    """
    if mask.dtype is torch.bool or not mask.numel():
        return mask.new_zeros((), dtype=torch.bool)
    return (mask.amax(-1) > HIDES).all()


def _may_be_banded(mask: Tensor) -> bool:
    """Return True if kernels for bands exist for the mask's device and size.

    They need one mask for all heads of a sequence.
    """
    one = mask.dim() <= 4 and mask.shape[-3:-2] in ((), (1,)) and mask.numel() > 0
    return one and on_kernels_device(mask) and gains_from_masks(mask.shape[-1])
