"""The fused ops on NVIDIA Transformer Engine: the only file that imports it.

Products run in TE's own modules, built on meta and without parameters; each call puts the weights that it was given
in their place. The modules, which hold what FP8 needs from one step to the next, belong to the parameters, as
joined.py says. Where TE has no kernel for a call (another device, float32), or none that is faster (few tokens),
the op runs in plain PyTorch, and `plain_calls` counts why.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch  # before TE, which loads libraries that come with it
import torch.nn.functional as F
import transformer_engine.pytorch as te
from torch import Tensor, nn
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb
from transformer_engine.pytorch.module import layernorm_mlp

from te_transform.backends import plain
from te_transform.backends.cudnn import DotProductAttention
from te_transform.backends.gradients import Gradients, gradients_of
from te_transform.backends.joined import state_of, watched
from te_transform.backends.limits import (
    too_small,
    traced,
    without_cross_entropy,
    without_kernel,
    without_rotary,
)
from te_transform.backends.plain import ACTIVATIONS, GATED_ACTIVATIONS
from te_transform.backends.quantized import exact, is_quantized
from te_transform.backends.scales import Amax, Seen
from te_transform.backends.twice import differentiable_once, differentiable_twice
from te_transform.backends.weight_cache import is_evaluating, stamp_of

try:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as _State
except ImportError:  # TE before 2.8
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager as _State

__all__ = [
    "ACTIVATIONS", "GATED_ACTIVATIONS", "GATES", "HAS_BIAS", "HAS_KERNELS", "HAS_RECIPES", "HOLDS_FP8", "NAME",
    "CrossEntropy", "DotProductAttention", "LayerNormLinear", "LayerNormMLP", "Linear", "Rotary", "autocast",
    "is_delayed", "multiple", "quantized", "recipe_of",
]  # fmt: skip

NAME = "te"
HAS_KERNELS = True
HAS_RECIPES = True
HAS_BIAS = False
GATES = ("no", "first half")
HOLDS_FP8 = hasattr(te.Linear, "_get_weight_quantizers")  # whether quantized() runs with this TE

_RECIPES = {
    # each process scales by what it has seen itself: a reduction would wait for products that others do not run
    "fp8-delayed": lambda: recipes.DelayedScaling(reduce_amax=False),
    "fp8-current": recipes.Float8CurrentScaling,
    "fp8-block": recipes.Float8BlockScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
}
_AVAILABLE = {
    recipes.Float8BlockScaling: "is_fp8_block_scaling_available",
    recipes.MXFP8BlockScaling: "is_mxfp8_available",
}
_CALIBRATING = "a first call in FP8, from which delayed scaling takes its scales"


def recipe_of(asked: Any) -> Any:
    """TE's recipe of this name, or the recipe object itself.

    Raises:
        ValueError: it is neither, or this GPU has no kernels for it; the message says what is missing.
    """
    if isinstance(asked, str):
        asked = _RECIPES[asked]()
    if not isinstance(asked, recipes.Recipe):
        raise ValueError(f"a {type(asked).__name__} is no TE recipe, one of {', '.join(_RECIPES)} is")
    available = getattr(te, _AVAILABLE.get(type(asked), "is_fp8_available"))
    runs, why = available(return_reason=True)
    if not runs:
        raise ValueError(f"{type(asked).__name__} does not run on this GPU: {why}")
    return asked


def is_delayed(recipe: Any) -> bool:
    """Whether the recipe scales by what was seen in earlier steps."""
    return isinstance(recipe, recipes.DelayedScaling)


def multiple(recipe: Any) -> int:
    """What the rows and columns of a product have to be a multiple of."""
    return 32 if isinstance(recipe, recipes.MXFP8BlockScaling) else 16


def autocast(recipe: Any, enabled: bool = True) -> contextlib.AbstractContextManager:
    """Run TE's modules in the recipe's precision."""
    if hasattr(te, "autocast"):
        return te.autocast(enabled=enabled, recipe=recipe)
    return te.fp8_autocast(enabled=enabled, fp8_recipe=recipe)  # TE before 2.8


class _Kernel:
    """TE's module for the products that begin with one parameter, and what it keeps for them."""

    def __init__(self, make: Callable[[], nn.Module], names: Sequence[str], products: Sequence[str]):
        self.make, self.names, self.products = make, names, products
        self.made: nn.Module | None = None
        self.seen = Seen([Amax() for _ in products])
        self.ran_in_fp8 = False  # in the last call
        self.scales: Tensor | None = None  # of delayed scaling, in the last call that may be made again
        self.stamp: Any = None  # of the quantized weights that are kept

    @property
    def module(self) -> nn.Module:
        """The module, made when it first runs."""
        if self.made is None:
            self.made = self.make()
            self.made._parameters.clear()
        return self.made

    def __call__(self, x: Tensor, tensors: Sequence[Tensor | None], gradients: Gradients | None, **how: Any) -> Tensor:
        """Run the module with these tensors in the place of its parameters."""
        own = vars(self.module)
        own.update(zip(self.names, tensors, strict=True), fuse_wgrad_accumulation=gradients is not None)
        try:
            return self.module.forward(x, **how)
        finally:
            own.update(dict.fromkeys(self.names))

    def may_use_kept(self, weights: Sequence[Tensor]) -> bool:
        """Whether weights that an earlier call has quantized, or this one quantizes, are to be kept and used."""
        stamp = None if any(map(is_quantized, weights)) else stamp_of(weights)
        if stamp is None or stamp != self.stamp:
            self.forget_weights()
        self.stamp = stamp
        return stamp is not None

    def forget_weights(self) -> None:
        """Free the quantized weights that are kept; the next call makes them anew."""
        self.stamp = None
        if self.made is not None:
            self.made._fp8_workspaces.clear()

    def prepare(self, recipe: Any) -> Any:
        """Let the module have its scales, within the recipe; returns TE's state of the forward."""
        self.module.init_fp8_metadata(num_gemms=len(self.products))
        return self.module.fp8_meta["scaling_fwd"]

    def give_scales(self, recipe: Any, gradients: bool) -> None:
        """Give the module the scales of delayed scaling that what was seen calls for: max / amax / 2^margin.

        That is TE's own formula, in TE's own order: input, weight, output of each product forward, gradient of the
        output and of the input of each product backward.
        """
        limits, products = recipe.fp8_format.value, self.seen.products
        if "forward" not in self.seen.given:
            self.seen.given.add("forward")
            amaxes = {3 * i + j: a for i, p in enumerate(products) for j, a in enumerate((p.input, p.weight))}
            _set_scales(self.prepare(recipe), amaxes, limits.max_fwd, recipe)
        if gradients and "backward" not in self.seen.given:
            self.seen.given.add("backward")
            state = self.module.fp8_meta["scaling_bwd"]
            _set_scales(state, {2 * i: p.grad for i, p in enumerate(products)}, limits.max_bwd, recipe)

    def note_scales(self) -> None:
        """Note the scales of this call, which a checkpoint may make again."""
        state = self.module.fp8_meta.get("scaling_fwd")
        if hasattr(state, "amax_history"):
            self.scales = state.scale.clone()

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        """In the recipe, with the scales that this step's forward had, and as a part of that step."""
        recipe, state = self.module.fp8_meta["recipe"], self.module.fp8_meta.get("scaling_fwd")
        now = None if self.scales is None else state.scale.clone()
        try:
            if now is not None:
                state.scale.copy_(self.scales)
            with _no_new_step(), autocast(recipe):
                yield
        finally:
            if now is not None:
                state.scale.copy_(now)


class _Product(plain.FusedOp):
    """What ops with matrix products do beside TE: no call that TE refuses, and nothing lost where it has none."""

    any_size = False  # whether calls that gain nothing from FP8 run in it too

    def forward(self, x: Tensor, *tensors: Tensor | None) -> Tensor:
        """x [..., in] -> [..., out]."""
        if traced():
            return self._plainly(plain.product, x, *tensors)
        weights = [tensors[place - 1] for place in self.PRODUCTS]
        kernel = self._kernel(x, tensors, weights)
        enabled = _State.is_fp8_enabled()
        # torch.utils.checkpoint runs a forward again from within the backward, where no autocast is on
        again = kernel.ran_in_fp8 and not enabled and torch._C._current_graph_task_id() != -1
        in_fp8 = again or (enabled and self._is_within(weights))
        gradients = gradients_of(weights)
        why = self._why_plain(x, weights, in_fp8, gradients)
        kernel.ran_in_fp8 = in_fp8 and not why
        if why:
            self.plain_calls[why] += 1
            return self._plainly(plain.product, x, *tensors)
        if not in_fp8:
            return self._in_its_dtype(kernel, gradients, x, tensors, enabled)
        with kernel.as_before() if again else contextlib.nullcontext():
            return self._in_fp8(kernel, gradients, x, tensors, again)

    def _plainly(self, product: plain.Product, x: Tensor, *tensors: Tensor | None) -> Tensor:
        return self.plain(product, x, *(None if tensor is None else exact(tensor) for tensor in tensors))

    def _is_within(self, weights: Sequence[Tensor]) -> bool:
        """Whether the precision plan has these products in the recipe."""
        own = state_of(weights[0]).in_fp8
        return self.in_fp8 if own is None else own

    def _why_plain(
        self, x: Tensor, weights: Sequence[Tensor], in_fp8: bool, gradients: Gradients | None
    ) -> str | None:
        """Why a call with this input runs in plain PyTorch, or None."""
        for weight in weights:
            if why := without_kernel(x, weight):
                return why
        if in_fp8 and any(size % multiple(_recipe()) for weight in weights for size in weight.shape):
            return f"weights whose sizes are no multiples of {multiple(_recipe())}"
        # plain calls would have to dequantize weights held in FP8 alone, and know nothing of sums of gradients
        if (in_fp8 and self.any_size) or any(map(is_quantized, weights)) or gradients is not None:
            return None
        return too_small(x.shape[:-1].numel(), min(weights[0].shape), in_fp8)

    def _in_its_dtype(
        self,
        kernel: _Kernel,
        gradients: Gradients | None,
        x: Tensor,
        tensors: Sequence[Tensor | None],
        enabled: bool,
    ) -> Tensor:
        def run(x: Tensor, *given: Tensor | None) -> Tensor:
            given = self._as_stored(tensors, given, gradients)
            with autocast(None, enabled=False) if enabled else contextlib.nullcontext():
                return self._run(kernel, x, given, gradients)

        def plainly(*arguments: Any) -> Tensor:
            return self.plain(plain.product, *arguments)

        out = differentiable_twice(run, plainly, (x, *tensors), once=True)
        return self._watched(out, tensors)

    def _in_fp8(
        self,
        kernel: _Kernel,
        gradients: Gradients | None,
        x: Tensor,
        tensors: Sequence[Tensor | None],
        again: bool,
    ) -> Tensor:
        recipe = _recipe()
        if is_delayed(recipe) and not again:
            trained = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *tensors))
            if not kernel.seen.knows(trained):
                self.plain_calls[_CALIBRATING] += 1
                kernel.ran_in_fp8 = False
                return self._plainly(kernel.seen.product(), x, *tensors)
            kernel.give_scales(recipe, trained)
        if _saving_hooks() or not (torch.is_grad_enabled() or is_evaluating()):
            kernel.note_scales()  # for a checkpoint, from which this call will be made again
        return self._watched(self._padded(kernel, gradients, x, tensors), tensors)

    def _padded(
        self, kernel: _Kernel, gradients: Gradients | None, x: Tensor, tensors: Sequence[Tensor | None]
    ) -> Tensor:
        """A call in the recipe, of a number of rows that its kernels take."""
        weights = [tensors[place - 1] for place in self.PRODUCTS]
        # never True, which would also have this call's gradient overwrite those before it
        how = {"is_first_microbatch": False if kernel.may_use_kept(weights) else None}
        rows = x.shape[:-1].numel()
        missing = -rows % multiple(_recipe())
        if missing:
            # the last row once more, and again: no number in the product is larger for it, its gradient is zero
            flat = x.reshape(rows, -1)
            padded = torch.cat([flat, flat[-1:].expand(missing, -1)])
        given = self._as_stored(tensors, tensors, gradients)
        _give_quantizers(kernel, given)
        out = self._run(kernel, padded if missing else x, given, gradients, **how)
        if out.grad_fn is not None:
            differentiable_once(out.grad_fn, _ONCE)
        return out[:rows].reshape(*x.shape[:-1], -1) if missing else out

    def _as_stored(
        self,
        tensors: Sequence[Tensor | None],
        given: Sequence[Tensor | None],
        gradients: Gradients | None,
    ) -> list[Tensor | None]:
        """What the kernel gets of `given`: weights row by row, which know where their gradients are summed up."""
        stored = list(given)
        for place in (place - 1 for place in self.PRODUCTS):
            weight = given[place].contiguous()
            if gradients is not None:
                weight = weight.view_as(weight)  # a tensor of this call's own: parameters stay as they are
                weight.main_grad = gradients.of(tensors[place])
            stored[place] = weight
        return stored

    def _watched(self, out: Tensor, tensors: Sequence[Tensor | None]) -> Tensor:
        for place in self.PRODUCTS:
            out = watched(out, tensors[place - 1])
        return out

    def _kernel(self, x: Tensor, tensors: Sequence[Tensor | None], weights: Sequence[Tensor]) -> _Kernel:
        """The kernel that belongs to the first weight, for products of this form."""
        sizes = tuple((*weight.shape, weight.storage_offset()) for weight in weights)
        form = (*self.form, weights[0].dtype, tensors[-1] is not None, sizes)
        kernels = state_of(weights[0]).kernels
        if form not in kernels:
            kernels[form] = self._make(weights, bias=tensors[-1] is not None)
        return kernels[form]

    def _run(
        self, kernel: _Kernel, x: Tensor, tensors: Sequence[Tensor | None], gradients: Gradients | None, **how: Any
    ) -> Tensor:
        return kernel(x, tensors, gradients, **how)

    @property
    def form(self) -> tuple[Any, ...]:
        """What kernels of one parameter differ in, beside the sizes."""
        raise NotImplementedError

    def _make(self, weights: Sequence[Tensor], bias: bool) -> _Kernel:
        raise NotImplementedError


_ONCE = (
    "the backward of a product in FP8 is run again or is itself recorded, its kernels keep nothing for a second time: "
    "convert the model without a recipe, or keep this product out of FP8 by a te_transform.PrecisionPlan"
)


class Linear(_Product, plain.Linear):
    """y = x W^T + b; weight [out, in]."""

    form = ("Linear",)

    def _why_plain(
        self, x: Tensor, weights: Sequence[Tensor], in_fp8: bool, gradients: Gradients | None
    ) -> str | None:
        return super()._why_plain(x, weights, in_fp8, gradients)

    def _in_its_dtype(self, kernel: _Kernel, gradients: Gradients | None, x: Tensor, tensors: Any, enabled: bool) -> Tensor:
        if gradients is None:  # one product in its own dtype: no kernel is faster
            return self._plainly(plain.product, x, *tensors)
        return super()._in_its_dtype(kernel, gradients, x, tensors, enabled)

    def _make(self, weights: Sequence[Tensor], bias: bool) -> _Kernel:
        outs, ins = weights[0].shape
        how = {"bias": bias, "params_dtype": weights[0].dtype, "device": "meta", "name": "linear"}
        return _Kernel(lambda: te.Linear(ins, outs, **how), ("weight", "bias"), ("weight",))
