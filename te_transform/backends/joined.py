"""Several parameters read as one: q, k and v, or gate and up, below each other in one piece of memory.

Each parameter stays the user's own object, with a storage of its own; where they have been laid next to each
other, the storages lie in one buffer, which `Join` hands out without a copy. Whether they still lie there is
looked up at each call, by their pointers; where they do not, they are joined by a copy.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from te_transform.backends import quantized
from te_transform.backends.op import GraphOp
from te_transform.backends.storages import is_sole_owner
from te_transform.backends.tensor_version import version_of
from te_transform.backends.tracing import compiling, recorded, transformed
from te_transform.graph import ops


class State:
    """What te_transform keeps for a parameter.

    It belongs to the parameter, not to a graph or a module, because one captured graph serves many layers. A
    copy or a pickle of the parameter starts with an empty one; in a file, which whoever has no te_transform
    may read, an empty dict stands for it.
    """

    def __init__(self) -> None:
        self.group: Group | None = None  # that the parameter was laid in
        self.stays: tuple[Any, ...] = ()  # where a group that begins with it lay when it could not be laid
        self.kernels: dict[Any, Any] = {}  # what a backend keeps for a product that begins with it
        self.in_fp8: bool | None = None  # whether such a product runs in FP8; None: as the op says
        self.told: Any = None  # the token of the converted model that has said so last: several may share it
        self.name = ""  # of the parameter in its model, which says it then
        self.saved: Any = None  # the scales that products with it begin with, see scale_rows.py
        self.steps = 0  # of optimizers that have it: fused ones write to it, and its version stays
        self.gradients: Any = None  # where its gradients are summed up for the time being, see gradients.py

    def __reduce__(self) -> tuple:
        return OrderedDict, ()  # torch.load() takes it from anybody's file, and no class of ours

    def __deepcopy__(self, memo: dict) -> State:
        return State()


class Group:
    """Parameters that were laid next to each other, and the buffer that they were laid in."""

    def __init__(self, buffer: Tensor, parameters: Sequence[Tensor]):
        self.buffer, self.members = buffer, [weakref.ref(parameter) for parameter in parameters]

    def lies(self, parameters: Sequence[Tensor]) -> bool:
        """Whether these are its parameters, in its order, each still at its place."""
        place = self.buffer.data_ptr()
        if len(parameters) != len(self.members) or parameters[0].dtype != self.buffer.dtype:
            return False
        for parameter in parameters:
            if parameter.data_ptr() != place or not parameter.is_contiguous():
                return False
            place += parameter.numel() * parameter.element_size()
        return place == self.buffer.data_ptr() + self.buffer.numel() * self.buffer.element_size()

    def has_memory_of(self, parameter: Tensor) -> bool:
        """Return True if the parameter lies in the buffer, where it was laid or elsewhere."""
        begin = self.buffer.data_ptr()
        return begin <= parameter.data_ptr() < begin + self.buffer.numel() * self.buffer.element_size()

    def intact(self) -> bool:
        """Whether all its parameters are there and lie as they were laid."""
        parameters = [member() for member in self.members]
        return None not in parameters and self.lies(parameters)


def state_of(weight: Tensor) -> State:
    """The state of a parameter; of what `Join` returned, that of the first parameter in it."""
    owner = parameters_of(weight)[0]
    state = owner.__dict__.get("_te_transform")
    if not isinstance(state, State):  # none yet, or what a file has in its place
        state = owner._te_transform = State()
    return state


def parameters_of(weight: Tensor) -> tuple[Tensor, ...]:
    """The parameters that were joined to `weight`, the one that it stands for or is a view of, or itself
    alone."""
    base = weight._base
    made_of = weight.__dict__.get("_te_transform_joined")
    if made_of is None and base is not None:
        made_of = base.__dict__.get("_te_transform_joined")
    return made_of or (base if is_stored(base) else weight,)


def standing_for(tensor: Tensor, parameter: Tensor) -> Tensor:
    """`tensor` as a weight that has the state of `parameter`, a DTensor that it was computed from;
    differentiable."""
    made = _Alias.apply(tensor)
    made._te_transform_joined = (local(parameter),)
    made._te_transform_stored = parameter
    return made


def local(tensor: Tensor) -> Tensor:
    """What a DTensor holds in this process; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def parameter_of(argument: Any) -> Tensor | None:
    """The parameter that an argument of a graph is, or stands for, as its module holds it."""
    return argument if is_stored(argument) else getattr(argument, "_te_transform_stored", None)


def parts_of(argument: Any) -> tuple[Any, ...]:
    """Return what Join joined to an argument of a graph, or the argument alone."""
    return getattr(argument, "_te_transform_parts", (argument,))


class _Alias(torch.autograd.Function):
    """The same memory as a tensor that is no view: views of it lead back to it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def share_state(parameter: Tensor, *others: Tensor) -> None:
    """Let other tensors that hold a parameter, or stand in its place, have its state."""
    state = state_of(parameter)
    for other in others:
        other._te_transform = state


@dataclass(frozen=True)
class Source:
    """The parameters that a weight was made of, and whether they are stored transposed.

    `state` is a weak reference to that of the first of them.
    """

    references: tuple[weakref.ref, ...]
    state: weakref.ref[State]
    transposed: bool

    @classmethod
    def of(cls, weight: Tensor) -> Source:
        """Those of a weight [out, in]; none where they are held in FP8 alone, which module.to() moves in a
        way that knows no references to them."""
        parameters = parameters_of(weight)
        transposed = len(parameters) == 1 and parameters[0] is not weight and not weight.is_contiguous()
        held = quantized.is_quantized(parameters[0])
        references = () if held else tuple(map(weakref.ref, parameters))
        return cls(references, weakref.ref(state_of(weight)), transposed)

    def parameters(self) -> tuple[Tensor, ...]:
        """The parameters; none where one of them is gone."""
        found = tuple(reference() for reference in self.references)
        return () if None in found else found


def is_stored(weight: Any) -> bool:
    """Whether it is a parameter as a module holds it."""
    return isinstance(weight, nn.Parameter)


class Join(GraphOp):
    """The op of a captured graph that joins parameters [rows, ...] below each other.

    Args:
        scattered: where groups of parameters that had to be copied are noted, as weak references; the
            converted model lays its own next to each other before its next call.
    """

    def __init__(self, scattered: list[tuple[weakref.ref, ...]]):
        super().__init__()
        self.scattered = scattered

    def forward(self, *parts: Tensor | int) -> Tensor:
        """Parameters of shapes [n_i, ...] -> [sum of n_i, ...]; the gradients are slices of the result's.

        A number stands for so many zeros, see ops.join.
        """
        parameters = tuple(part for part in parts if isinstance(part, Tensor))
        has_zeros, held = len(parameters) < len(parts), tuple(map(_held, parameters))
        if None in held or transformed():
            # DTensors, tensors of a function transform, torch.func's stand-ins; and weights in FP8, which may
            # lie next to each other in their own way
            whole = None if has_zeros else _whole(parameters)
            if whole is None:
                return ops.join(*parts)
            whole._te_transform_joined = parameters
            return whole
        buffer = None if has_zeros else adjacent(parameters)
        if buffer is None:
            if not has_zeros:
                self._note(parameters, held)
            buffer = ops.join(*(part.detach() if isinstance(part, Tensor) else part for part in parts))
        joined = buffer.detach()
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters):
            used: list[bool] = []
            reads: list[bool] = []
            joined = _Joined.apply(buffer, used, reads, *parts)
            joined._te_transform_used, joined._te_transform_reads = used, reads
            joined._te_transform_parts = parts
        joined._te_transform_joined = held
        return joined

    def _note(self, parameters: Sequence[Tensor], held: Sequence[Tensor]) -> None:
        places, state = _pointers(held), state_of(held[0])
        if recorded():  # which reads them there from now on
            state.stays = places
        # a share that a call has computed lies elsewhere, and would next time
        if state.stays != places and _pointers(parameters) == places:
            self.scattered.append(tuple(map(weakref.ref, held)))


def _whole(parameters: Sequence[Tensor]) -> Tensor | None:
    """What parameters that are held in FP8 alone are the rows of. Copies lie apart at first: module.to() and
    pickle know one at a time."""
    whole = quantized.joined(parameters)
    if whole is not None or transformed() or recorded():
        return whole
    if not all(is_stored(p) and quantized.has_bytes(p) for p in parameters):
        return None
    state, places = state_of(parameters[0]), tuple(quantized.addresses(parameters))
    if state.stays == places:  # a look at scales waits for the GPU
        return None
    state.stays = places
    return quantized.make_quantized_adjacent(parameters)


def _held(part: Tensor) -> Tensor | None:
    """What holds the numbers of the parameter that a part is, or stands for, in this process; None where it
    is no parameter's."""
    if type(part) is nn.Parameter:
        return part
    stored = part.__dict__.get("_te_transform_stored")
    return None if stored is None else local(stored)


def joined_anew(weight: Any) -> Any:
    """What `Join` returned, joined once more at this point of a forward; anything else as it is.

    A backward goes through what a forward computed from the last to the first. Parameters that are joined
    long before their product get their gradients as long after it.
    """
    parts = getattr(weight, "_te_transform_parts", None)
    if parts is None:
        return weight
    again = _Joined.apply(weight.detach(), weight._te_transform_used, weight._te_transform_reads, *parts)
    again.__dict__.update(weight.__dict__)
    return again


def known_as(tensor: Tensor, other: Tensor) -> Tensor:
    """`tensor`, that stands for `other`, as a weight that was made of the same parameters; its gradient goes
    to whom it stands for."""
    for name, told in other.__dict__.items():
        if name.startswith("_te_transform") and name != "_te_transform_parts":
            setattr(tensor, name, told)
    return tensor


class Split(GraphOp):
    """The op of a captured graph that takes a product with joined weights apart again, a part for each of
    them."""

    def __init__(self, sizes: Sequence[int]):
        super().__init__()
        self.sizes = list(sizes)

    def forward(self, product: Tensor, *joined: Tensor) -> tuple[Tensor, ...]:
        """[..., sum of sizes] -> [..., size] each.

        The joined weight and bias are given to tell them which parts got a gradient: a projection that the
        loss does not go through has none, not one of zeros, with which an optimizer would take a step.
        """
        if transformed() or not (torch.is_grad_enabled() and product.requires_grad):
            return product.split(self.sizes, -1)
        used = [weight.__dict__.setdefault("_te_transform_used", []) for weight in joined]
        return _Split.apply(product, self.sizes, used)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: Tensor, sizes: list[int], used: list[list[bool]]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.sizes, ctx.used = sizes, used
        return product.split(sizes, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        for used in ctx.used:
            used[:] = [grad is not None for grad in grads]
        known = next((grad for grad in grads if grad is not None), None)
        if known is None:
            return None, None, None
        parts = [
            known.new_zeros(*known.shape[:-1], size) if grad is None else grad
            for grad, size in zip(grads, ctx.sizes, strict=True)
        ]
        whole = torch.ops.te_transform.cat(parts) if compiling.get() else torch.cat(parts, -1)
        return whole, None, None


def _cat(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts, -1)


# One operation for a compiler. It would make one kernel of the joining and of what computes the parts, which
# computes each number in the way of each part, rotations too: 0.66 ms a layer of 8B shape on an H100.
_LIBRARY = torch.library.Library("te_transform", "FRAGMENT")
_LIBRARY.define("cat(Tensor[] parts) -> Tensor")
_LIBRARY.impl("cat", _cat, "CompositeExplicitAutograd")
torch.library.register_fake("te_transform::cat", _cat, lib=_LIBRARY)


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, buffer: Tensor, used: list[bool], reads: list[bool], *parts: Tensor | int
    ) -> Tensor:
        ctx.rows = [part if isinstance(part, int) else len(part) for part in parts]
        ctx.seen, ctx.used = versions([part for part in parts if isinstance(part, Tensor)]), used
        ctx.reads = reads
        ctx.set_materialize_grads(False)  # there is none where a kernel has added it to a buffer
        return buffer.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if not ctx.reads or any(ctx.reads):
            check_unwritten(ctx.seen)
        if grad is None:
            return (None,) * (3 + len(ctx.rows))
        used = ctx.used or [True] * len(ctx.rows)  # as Split has seen, or a fused op took it whole
        parts = zip(grad.split(ctx.rows), ctx.needs_input_grad[3:], used, strict=True)
        return (None, None, None, *(part if needed and got else None for part, needed, got in parts))


def note_reads(weight: Tensor, reads: bool) -> None:
    """Note whether the backward of an op reads this weight or bias: what none of them reads may be written to
    before the backward. A compiler decides by itself what a backward reads."""
    if not compiling.get():
        weight.__dict__.get("_te_transform_reads", []).append(reads)


def watched(product: Tensor, weight: Tensor) -> Tensor:
    """`product`, whose backward raises if joined parameters that need no gradient were written to by then.

    Autograd itself notices a write to a tensor that a backward needs, but the joined buffer does not count
    the writes to its parameters. Where they need a gradient, the backward of `Join` looks.
    """
    note_reads(weight, True)
    joined = weight.__dict__.get("_te_transform_joined")
    if joined is None or weight.requires_grad or not product.requires_grad:
        return product
    return _Watched.apply(product, versions(joined))


class _Watched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: Tensor, seen: list[tuple[Tensor, int]]) -> Tensor:
        ctx.seen = seen
        return product.view_as(product)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        check_unwritten(ctx.seen)
        return grad, None


def versions(parameters: Sequence[Tensor]) -> list[tuple[Tensor, int]]:
    """How often each of them has been written to, for check_unwritten()."""
    return [(p, version_of(p)) for p in parameters]


def check_unwritten(seen: list[tuple[Tensor, int]]) -> None:
    """Raise what autograd raises, where one of them has been written to since."""
    for parameter, version in seen:
        if not parameter.is_inference() and parameter._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: a tensor of shape {list(parameter.shape)} is at version "
                f"{parameter._version}, version {version} is needed"
            )


def adjacent(parameters: Sequence[Tensor]) -> Tensor | None:
    """The buffer that all the parameters, or ranks' shares of them, lie in, in this order, if they do."""
    state = parameters_of(parameters[0])[0].__dict__.get("_te_transform")
    group = state.group if isinstance(state, State) else None
    return group.buffer if group is not None and group.lies(parameters) else None


def make_adjacent(parameters: Sequence[Tensor]) -> bool:
    """Lay the parameters, or what DTensors hold of them, next to each other, in this order; the numbers stay
    bitwise the same.

    Each gets a storage of its own over its rows: savers such as safetensors and accelerate take parameters
    whose storages are one for shared tensors, and lose all but one.

    Returns:
        True if they lie so now. They stay where they are, for good, if something else holds the memory of
        one of them (see storages.py), if one belongs to another group already, and while a CUDA graph is
        recorded: whoever records graphs of their own relies on it.
    """
    if adjacent(parameters) is not None:
        return True
    if recorded() or not _can_be_laid(parameters):
        state_of(parameters[0]).stays = _pointers(parameters)
        return False
    # with memory that was made in inference mode, parameters could not be trained any more
    with torch.inference_mode(False), torch.no_grad():
        buffer = torch.cat([parameter.detach() for parameter in parameters])
        group = Group(buffer, parameters)
        for parameter, part in zip(parameters, buffer.split([len(p) for p in parameters]), strict=True):
            parameter.data = torch.from_dlpack(part)
            state_of(parameter).group = group
    return True


def _pointers(parameters: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(parameter.data_ptr() for parameter in parameters)


def _can_be_laid(parameters: Sequence[Tensor]) -> bool:
    # two groups that share a parameter would take it from each other at each call
    is_free = not any(map(_is_laid, parameters))
    return _are_alike(parameters) and is_free and not held_elsewhere(parameters)


def _are_alike(parameters: Sequence[Tensor]) -> bool:
    first = parameters[0]
    plain = all(
        type(p) in (nn.Parameter, Tensor) and type(p.data) is Tensor
        and not is_traceable_wrapper_subclass(p.data)
        and p.dtype == first.dtype and p.device == first.device and p.shape[1:] == first.shape[1:]
        and p.device.type != "meta" and p.is_contiguous() and p.numel() and not p.is_inference()
        for p in parameters
    )  # fmt: skip
    return plain and len(set(map(id, parameters))) == len(parameters)


def _is_laid(parameter: Tensor) -> bool:
    group = state_of(parameter).group
    return group is not None and group.intact()


def held_elsewhere(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the parameters of a group that could be laid, but for the memory, which something else holds."""
    if not _are_alike(parameters):
        return []
    return [p for p in parameters if not (_is_laid(p) or is_sole_owner(p, imported=_is_ours(p)))]


def _is_ours(parameter: Tensor) -> bool:
    """Return True if the memory is that of a buffer of ours.

    An array of numpy that reads such a parameter while it needs no gradient is not noticed.
    """
    group = state_of(parameter).group
    return group is not None and group.has_memory_of(parameter)
