"""Several parameters read as one matrix: the rows of q, k and v, or of gate and up, adjacent in memory.

Each parameter stays the user's object, with its own storage. After make_adjacent(), these storages lie in one
buffer, which `Join` returns without a copy. Each call compares the addresses; parameters that have moved are
joined by a copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from te_transform.backends.fp8 import fp8_only
from te_transform.backends.library import LIBRARY, registered_ops
from te_transform.backends.op import GraphOp
from te_transform.backends.storages import is_sole_owner
from te_transform.backends.tensor_registry import TensorRegistry
from te_transform.backends.tensor_version import version_of
from te_transform.backends.tracing import compiling, needs_gradient, recorded, transformed
from te_transform.graph import ops


class Group:
    """Parameters that are adjacent in memory, and their buffer."""

    def __init__(self, buffer: Tensor, parameters: Sequence[Tensor]):
        self.buffer, self.members = buffer, [weakref.ref(parameter) for parameter in parameters]

    def contains(self, parameters: Sequence[Tensor]) -> bool:
        """Return True if these are its parameters, in its order, and none of them has moved."""
        address = self.buffer.data_ptr()
        if len(parameters) != len(self.members) or parameters[0].dtype != self.buffer.dtype:
            return False
        for parameter in parameters:
            if parameter.data_ptr() != address or not parameter.is_contiguous():
                return False
            address += parameter.numel() * parameter.element_size()
        return address == self.buffer.data_ptr() + self.buffer.numel() * self.buffer.element_size()

    def has_memory_of(self, parameter: Tensor) -> bool:
        """Return True if the parameter lies in the buffer, at its first address or another one."""
        begin = self.buffer.data_ptr()
        return begin <= parameter.data_ptr() < begin + self.buffer.numel() * self.buffer.element_size()

    def is_intact(self) -> bool:
        """Return True if none of its parameters has moved or been freed."""
        return self.contains([parameter for member in self.members if (parameter := member()) is not None])


@dataclass
class MemoryLayout:
    """The place of a parameter in memory.

    Attributes:
        group: the group that the parameter belongs to.
        scattered_at: the addresses of a group that begins with the parameter, if it cannot be made adjacent.
    """

    group: Group | None = None
    scattered_at: tuple[Any, ...] = ()


@dataclass
class Origin:
    """The origin of a tensor that stands for parameters in a graph.

    Attributes:
        parameters: the local parameters that it consists of.
        stored: the parameter that the user's module holds, if it is another tensor, such as a DTensor.
        parts: the tensors and numbers of zero rows that `Join` joined.
        used: whether each part gets a gradient, as `Split` has seen in the backward.
        reads: whether each product with it reads its values in the backward.
    """

    parameters: tuple[Tensor, ...] = ()
    stored: Tensor | None = None
    parts: tuple[Any, ...] = ()
    used: list[bool] = field(default_factory=list)
    reads: list[bool] = field(default_factory=list)


_MEMORY_LAYOUTS: TensorRegistry[MemoryLayout] = TensorRegistry()
_ORIGINS: TensorRegistry[Origin] = TensorRegistry()


def _layout_of(parameter: Tensor) -> MemoryLayout:
    return _MEMORY_LAYOUTS.get(parameter) or _MEMORY_LAYOUTS.set(parameter, MemoryLayout())


def _group_of(parameter: Tensor) -> Group | None:
    layout = _MEMORY_LAYOUTS.get(parameter)
    return None if layout is None else layout.group


def parameters_of(weight: Tensor) -> tuple[Tensor, ...]:
    """Return the parameters that a weight consists of, stands for or is a view of, or the weight alone."""
    if isinstance(weight, fp8_only.FP8Only) and weight.rows:
        return weight.rows
    base, origin = weight._base, _ORIGINS.get(weight)
    if base is not None and (origin is None or not origin.parameters):
        origin = _ORIGINS.get(base)
    if origin is not None and origin.parameters:
        return origin.parameters
    return (base if isinstance(base, nn.Parameter) else weight,)


def used_of(weight: Tensor) -> list[bool]:
    """Return the list of which parts of a weight get a gradient; `Split` fills it in the backward."""
    origin = _ORIGINS.get(weight)
    return [] if origin is None else origin.used


def standing_for(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return an alias of `tensor` that counts as a DTensor parameter which it was computed from.

    The alias is differentiable.
    """
    alias = _Alias.apply(tensor)
    _ORIGINS.set(alias, Origin(parameters=(local(parameter),), stored=parameter))
    return alias


def local(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, or any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def parameter_of(argument: Any) -> Tensor | None:
    """Return the parameter of the user's module that an argument of a graph is or stands for, or None."""
    if isinstance(argument, nn.Parameter):
        return argument
    origin = _ORIGINS.get(argument) if isinstance(argument, Tensor) else None
    return None if origin is None else origin.stored


def parts_of(argument: Any) -> tuple[Any, ...]:
    """Return the parts that `Join` joined, or any other argument of a graph itself."""
    origin = _ORIGINS.get(argument) if isinstance(argument, Tensor) else None
    return origin.parts if origin is not None and origin.parts else (argument,)


class _Alias(torch.autograd.Function):
    """An alias of a tensor that is not a view of it, so views of the alias have the alias as their base."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Join(GraphOp):
    """The op that joins parameters [rows, ...] along their rows.

    Args:
        scattered: a list that collects groups of parameters which had to be copied, as weak references. The
            runner makes the parameters of its model adjacent before the next call.
    """

    def __init__(self, scattered: list[tuple[weakref.ref, ...]]):
        super().__init__()
        self.scattered = scattered

    def forward(self, *parts: Tensor | int) -> Tensor:
        """Join tensors [n_i, ...] to [sum of n_i, ...]; a number adds as many rows of zeros, see ops.join.

        The gradient of a part is a slice of the result's gradient.
        """
        parameters = tuple(part for part in parts if isinstance(part, Tensor))
        has_zeros, tensors = len(parameters) < len(parts), tuple(map(_local_parameter, parameters))
        if any(tensor is None for tensor in tensors) or transformed():
            # DTensors, tensors of a function transform and torch.func's replacements; and FP8-only weights,
            # which are adjacent in their own way
            whole = None if has_zeros else _joined_fp8_only(parameters)
            if whole is None:
                return ops.join(*parts)
            whole.rows = parameters
            return whole
        buffer = None if has_zeros else adjacent(parameters)
        if buffer is None:
            if not has_zeros:
                self._note(parameters, tensors)
            buffer = ops.join(*(part.detach() if isinstance(part, Tensor) else part for part in parts))
        if needs_gradient(*parameters):
            return _join_buffer(buffer, Origin(parameters=tensors, parts=parts))
        joined = buffer.detach()
        _ORIGINS.set(joined, Origin(parameters=tensors))
        return joined

    def _note(self, parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        addresses, layout = _addresses(tensors), _layout_of(tensors[0])
        if recorded():  # a CUDA graph reads these addresses from now on
            layout.scattered_at = addresses
        # a share that a call has computed has another address in the next call
        if layout.scattered_at != addresses and _addresses(parameters) == addresses:
            self.scattered.append(tuple(map(weakref.ref, tensors)))


def _join_buffer(buffer: Tensor, origin: Origin) -> Tensor:
    joined = _Joined.apply(buffer, origin, *origin.parts)
    _ORIGINS.set(joined, origin)
    return joined


def _joined_fp8_only(parameters: Sequence[Tensor]) -> fp8_only.FP8Only | None:
    """Return the tensor whose rows these FP8-only parameters are, or None.

    Copies lie apart at first, because module.to() and pickle copy one parameter at a time.
    """
    whole = fp8_only.joined(parameters)
    if whole is not None or transformed() or recorded():
        return whole
    if not all(isinstance(p, nn.Parameter) and fp8_only.has_bytes(p) for p in parameters):
        return None
    layout, addresses = _layout_of(parameters[0]), tuple(fp8_only.addresses(parameters))
    if layout.scattered_at == addresses:  # comparing scales waits for the GPU
        return None
    layout.scattered_at = addresses
    return fp8_only.join_copies(parameters)


def _local_parameter(part: Tensor) -> Tensor | None:
    """Return the local tensor of the parameter that a part is or stands for, or None."""
    if type(part) is nn.Parameter:
        return part
    origin = _ORIGINS.get(part)
    return None if origin is None or origin.stored is None else local(origin.stored)


def joined_anew(weight: Any) -> Any:
    """Repeat `Join` at this point of a forward for its result; return any other argument unchanged.

    A backward runs in the reverse order of the forward. Parameters that are joined long before their product
    get their gradients as long after the gradient of the product.
    """
    origin = _ORIGINS.get(weight) if isinstance(weight, Tensor) else None
    return weight if origin is None or not origin.parts else _join_buffer(weight.detach(), origin)


def copy_origin(tensor: Tensor, other: Tensor) -> None:
    """Give `tensor`, which replaces `other`, the origin of `other`, except that gradients end at `tensor`."""
    if (origin := _ORIGINS.get(other)) is not None:
        _ORIGINS.set(tensor, replace(origin, parts=()))


class Split(GraphOp):
    """The op that splits a product with joined weights into one part for each weight."""

    def __init__(self, sizes: Sequence[int]):
        super().__init__()
        self.sizes = list(sizes)

    def forward(self, product: Tensor, *joined: Tensor) -> tuple[Tensor, ...]:
        """Split [..., sum of sizes] into [..., size] each.

        Args:
            product: the product.
            joined: the joined weight and bias. They learn which parts get a gradient. The gradient of a
                projection that the loss does not use is None, because an optimizer steps on zeros.
        """
        if transformed() or not needs_gradient(product):
            return product.split(self.sizes, -1)
        return _Split.apply(product, self.sizes, [*map(used_of, joined)])


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
        whole = registered_ops.cat(parts) if compiling.get() else torch.cat(parts, -1)
        return whole, None, None


def _cat_columns(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts, -1)


# Inductor would fuse torch.cat with the computation of the parts into one kernel. It evaluates every part for
# each element, which takes 0.66 ms per layer of an 8B model on an H100. It cannot look into this operation.
LIBRARY.define("cat(Tensor[] parts) -> Tensor")
LIBRARY.impl("cat", _cat_columns, "CompositeExplicitAutograd")
torch.library.register_fake("te_transform::cat", _cat_columns, lib=LIBRARY)


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: Tensor, origin: Origin, *parts: Tensor | int) -> Tensor:
        ctx.rows = [part if isinstance(part, int) else len(part) for part in parts]
        ctx.seen = versions_of([part for part in parts if isinstance(part, Tensor)])
        ctx.used, ctx.reads = origin.used, origin.reads
        ctx.set_materialize_grads(False)  # None if a kernel has added the gradient to a buffer
        return buffer.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if not ctx.reads or any(ctx.reads):
            check_unwritten(ctx.seen)
        if grad is None:
            return (None,) * (2 + len(ctx.rows))
        used = ctx.used or [True] * len(ctx.rows)  # empty if a fused op reads the joined weight unsplit
        parts = zip(grad.split(ctx.rows), ctx.needs_input_grad[2:], used, strict=True)
        return (None, None, *(part if needed and got else None for part, needed, got in parts))


def note_reads(weight: Tensor, reads: bool) -> None:
    """Note whether the backward of an op reads this weight or bias.

    Weights that no backward reads may be written to before the backward. Compiled graphs decide by themselves
    what a backward reads.
    """
    if not compiling.get() and (origin := _ORIGINS.get(weight)) is not None:
        origin.reads.append(reads)


def watched(product: Tensor, weight: Tensor) -> Tensor:
    """Return `product`; its backward raises if joined frozen parameters were written to in the meantime.

    Autograd notices a write to a tensor that a backward needs, but the joined buffer does not count writes to
    its parameters. For trained parameters, the backward of `Join` checks.
    """
    note_reads(weight, True)
    origin = _ORIGINS.get(weight)
    if origin is None or not origin.parameters or weight.requires_grad or not product.requires_grad:
        return product
    return _Watched.apply(product, versions_of(origin.parameters))


class _Watched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: Tensor, seen: list[tuple[Tensor, int]]) -> Tensor:
        ctx.seen = seen
        return product.view_as(product)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        check_unwritten(ctx.seen)
        return grad, None


def versions_of(parameters: Sequence[Tensor]) -> list[tuple[Tensor, int]]:
    """Return each parameter with its version, for check_unwritten()."""
    return [(p, version_of(p)) for p in parameters]


def check_unwritten(seen: list[tuple[Tensor, int]]) -> None:
    """Raise autograd's error if one of the parameters has been written to since."""
    for parameter, version in seen:
        if not parameter.is_inference() and parameter._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: a tensor of shape {list(parameter.shape)} is at version "
                f"{parameter._version}, version {version} is needed"
            )


def adjacent(parameters: Sequence[Tensor]) -> Tensor | None:
    """Return the buffer that consists of these parameters, or ranks' shares of them, in this order."""
    group = _group_of(parameters_of(parameters[0])[0])
    return group.buffer if group is not None and group.contains(parameters) else None


def make_adjacent(parameters: Sequence[Tensor]) -> bool:
    """Move parameters, or the local tensors of DTensors, next to each other; the values stay the same.

    Each parameter gets its own storage over its rows. Safetensors and accelerate treat parameters that share
    one storage as tied, and save only one of them.

    Returns:
        True if they are adjacent. They are never moved if other code holds the memory of one of them (see
        storages.py), or if one belongs to another group. They are not moved while a CUDA graph is recorded
        either, because the graph reads their addresses.
    """
    if adjacent(parameters) is not None:
        return True
    if recorded() or not _can_be_moved(parameters):
        _layout_of(parameters[0]).scattered_at = _addresses(parameters)
        return False
    # parameters with inference-mode memory could not be trained
    with torch.inference_mode(False), torch.no_grad():
        buffer = torch.cat([parameter.detach() for parameter in parameters])
        for parameter, part in zip(parameters, buffer.split([len(p) for p in parameters]), strict=True):
            parameter.data = torch.from_dlpack(part)
    note_adjacent(parameters, buffer)
    return True


def note_adjacent(parameters: Sequence[Tensor], buffer: Tensor) -> None:
    """Note that parameters, whose memory is that of `buffer` in this order, are adjacent."""
    group = Group(buffer, parameters)
    for parameter in parameters:
        _layout_of(parameter).group = group


def _addresses(parameters: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(parameter.data_ptr() for parameter in parameters)


def _can_be_moved(parameters: Sequence[Tensor]) -> bool:
    # two groups that share a parameter would take it from each other at each call
    is_free = not any(map(_is_grouped, parameters))
    return are_alike(parameters) and is_free and not held_elsewhere(parameters)


def are_alike(parameters: Sequence[Tensor]) -> bool:
    """Return True if these are plain contiguous tensors whose rows may be joined."""
    first = parameters[0]
    plain = all(
        type(p) in (nn.Parameter, Tensor) and type(p.data) is Tensor
        and not is_traceable_wrapper_subclass(p.data)
        and p.dtype == first.dtype and p.device == first.device and p.shape[1:] == first.shape[1:]
        and p.device.type != "meta" and p.is_contiguous() and p.numel() and not p.is_inference()
        for p in parameters
    )  # fmt: skip
    return plain and len(set(map(id, parameters))) == len(parameters)


def _is_grouped(parameter: Tensor) -> bool:
    group = _group_of(parameter)
    return group is not None and group.is_intact()


def held_elsewhere(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the parameters that cannot be moved only because something else holds their memory."""
    if not are_alike(parameters):
        return []
    return [p for p in parameters if not (_is_grouped(p) or is_sole_owner(p, imported=_is_ours(p)))]


def _is_ours(parameter: Tensor) -> bool:
    """Return True if the memory belongs to the buffer of a group."""
    group = _group_of(parameter)
    return group is not None and group.has_memory_of(parameter)
