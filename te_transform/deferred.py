"""A norm's output before anybody has read it.

The norm's slot hands one out; a fused module that does the norm itself takes its source instead. Whoever else
reads it, on whatever path, in whatever mode, below autograd or above, gets the normalised tensor and its
gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only


class Norm(Protocol):
    """What a Deferred needs of the norm that it stands for."""

    def now(self, x: Tensor) -> Tensor:
        """The normalised tensor, computed."""

    def own_parameters(self) -> list[Tensor]:
        """The parameters that the computation reads."""


class Deferred(Tensor):
    """A norm's output before anybody has read it: its shape is known, its values are computed on first use.

    A fused module reads `source` instead, and does the norm itself.
    """

    source: Tensor
    norm: Norm
    value: Tensor | None
    history: Any  # the autograd node that `value` stands for
    stamp: tuple  # of the source and the norm's parameters, when the norm was called
    saving: Any  # the saved tensors hooks of that moment
    taken: bool  # whether a fused module has taken the norm over
    version: int  # of `value` when it was computed

    @staticmethod
    def __new__(cls, source: Tensor, norm: Norm, dtype: torch.dtype) -> Deferred:
        deferred = torch.Tensor._make_wrapper_subclass(
            cls, source.shape, strides=source.stride(), dtype=dtype, device=source.device
        )
        deferred.source, deferred.norm, deferred.value, deferred.taken = source, norm, None, False
        return deferred

    def now(self) -> Tensor:
        """The normalised tensor; computed once, as it would have been when the norm was called."""
        if self.value is None:
            self._compute()
        # code below autograd has had it: the graph knows this tensor alone
        if self.history is not _node(self):
            with _as_when(self), torch.enable_grad():
                self.value = _Reread.apply(self)
            self.history, self.version = _node(self), version(self.value)
        return self.value

    def below(self) -> Tensor:
        """As now(), for code below autograd, where what is computed gets no graph."""
        if self.value is None:
            self._compute()
            self.history = Deferred  # none that autograd knows
        return self.value

    def _compute(self) -> None:
        if self.stamp[0] != stamp(self.source, *self.norm.own_parameters())[0]:
            raise RuntimeError(
                f"{type(self.norm).__name__}'s input or parameters were changed in place before its output "
                "was read, te_transform had put the computation off: convert with skip= for this norm, or "
                "read its output earlier"
            )
        with _as_when(self):
            self.value = self.norm.now(self.source)
        self.version = version(self.value)

    def unread(self) -> bool:
        """Whether a fused module may take the norm over: nobody read it, or one did before, and nothing has
        changed."""
        if self.value is not None and not (self.taken and version(self.value) == self.version >= 0):
            return False
        return self.stamp == stamp(self.source, *self.norm.own_parameters())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _SHAPE_ONLY:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if args and func in _HANDING_ON and _HANDING_ON[func](*args, **kwargs):
            return args[0]  # as PyTorch does, and nobody has read it
        if func in _WATCHING:
            _check_watched(args[0] if func is not torch.autograd.grad else [*args, kwargs.get("inputs")][1])
        given, kwargs = read((args, kwargs))
        out = func(*given, **kwargs)
        unmoved = bool(args) and isinstance(args[0], Deferred) and out is args[0].value
        return args[0] if unmoved else out  # x.mul_(2) is x

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        args, kwargs = tree_map_only(Deferred, Deferred.below, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:
        return repr(self.now())


_SHAPE_ONLY = {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point, Tensor.shape.__get__,
    Tensor.ndim.__get__, Tensor.device.__get__, Tensor.dtype.__get__, Tensor.is_cuda.__get__,
    Tensor.layout.__get__, Tensor.is_sparse.__get__, Tensor.is_nested.__get__,
}  # fmt: skip


def _is_idle(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **other: Any) -> bool:
    return p == 0 or not other.get("train", training)  # torch.dropout's name for it


def _is_own_dtype(x: Tensor, *to: Any, **options: Any) -> bool:
    return (*to, *options.items()) in ((x.dtype,), (("dtype", x.dtype),))


# calls that return the very tensor which they were given, and when they do
_HANDING_ON = {F.dropout: _is_idle, torch.dropout: _is_idle, Tensor.to: _is_own_dtype}
_WATCHING = {Tensor.register_hook, Tensor.retain_grad, torch.autograd.grad}


def _check_watched(tensors: Any) -> None:
    for tensor in tensors if isinstance(tensors, (tuple, list)) else (tensors,):
        if isinstance(tensor, Deferred) and tensor.taken:
            raise RuntimeError(
                f"{type(tensor.norm).__name__}'s output was taken over by a fused module, its whole gradient "
                "is not computed: ask for it before the output is used, or convert with skip= for this norm"
            )


def defer(x: Tensor, norm: Norm, dtype: torch.dtype) -> Tensor:
    """The norm of `x`, unread, which will be of `dtype`; code that looks behind PyTorch's back (an
    autograd.Function) gets its gradients too."""
    parameters = norm.own_parameters()
    trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *parameters))
    deferred = _Defer.apply(norm, dtype, x, *parameters) if trained else Deferred(x, norm, dtype)
    deferred.stamp, deferred.history = stamp(x, *parameters), _node(deferred)
    deferred.saving = saving_hooks()
    return deferred


def _node(tensor: Tensor) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.grad_fn


def saving_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


@contextlib.contextmanager
def _as_when(deferred: Deferred) -> Iterator[None]:
    """The modes that were on when the norm was called; a checkpoint begun since does not count what is
    saved."""
    _, grad, inference, cast = deferred.stamp
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(inference))
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(_autocasting(deferred.source, cast))
        if saving_hooks() != deferred.saving:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_itself, _itself))
        yield


@contextlib.contextmanager
def _autocasting(x: Tensor, dtype: torch.dtype | None) -> Iterator[None]:
    """Under torch.autocast to `dtype`, or under none."""
    if autocast(x) == dtype:
        yield
    else:
        with torch.autocast(x.device.type, dtype=dtype, enabled=dtype is not None):
            yield


def _itself(saved: Tensor) -> Tensor:
    return saved


class _Defer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, norm: Norm, dtype: torch.dtype, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.norm, ctx.parameters, ctx.autocast = norm, parameters, autocast(x)
        ctx.save_for_backward(x, *parameters)  # the parameters, so that autograd sees if they are changed
        return Deferred(x, norm, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        x, *_ = ctx.saved_tensors
        again = torch.is_grad_enabled()
        with torch.enable_grad(), _autocasting(x, ctx.autocast):
            x = x.view_as(x) if x.requires_grad else x.detach()
            sources = (x, *ctx.parameters)
            trained = [tensor for tensor in sources if tensor.requires_grad]
            grads = iter(torch.autograd.grad(ctx.norm.now(x), trained, grad, create_graph=again))
        return (None, None, *(next(grads) if tensor.requires_grad else None for tensor in sources))


class _Reread(torch.autograd.Function):
    """A Deferred's value, with the history that autograd has of the Deferred itself."""

    @staticmethod
    def forward(ctx: Any, deferred: Deferred) -> Tensor:
        return deferred.value.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def read(value: Any) -> Any:
    """`value` with every Deferred in it computed."""
    if isinstance(value, Deferred):
        return value.now()
    if isinstance(value, (tuple, list)):
        items = [read(item) for item in value]
        named = hasattr(value, "_fields")  # a named tuple takes its fields one by one
        return type(value)(*items) if named else type(value)(items)
    if isinstance(value, dict):
        return {key: read(item) for key, item in value.items()}
    return value


def unversioned(x: Tensor) -> bool:
    """Whether PyTorch does not count the writes into `x`: nothing may then be put off or shared."""
    return not isinstance(x, Deferred) and x.is_inference()


def version(x: Tensor) -> int:
    return -1 if x.is_inference() else x._version


def stamp(*tensors: Tensor) -> tuple:
    """What a result computed from `tensors` now depends on: what they hold, and the modes."""
    held = [(id(tensor), -1 if tensor.is_inference() else tensor._version) for tensor in tensors]
    return held, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast(tensors[0])


def autocast(x: Tensor) -> torch.dtype | None:
    """What torch.autocast computes in on the device of `x`, None where it is off."""
    if not torch._C._is_any_autocast_enabled():  # which is all that most calls need to know
        return None
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None
