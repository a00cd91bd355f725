"""The ops with matrix products, computed by TE's modules."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import transformer_engine.pytorch as te
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from te_transform.backends import few_rows, plain
from te_transform.backends.double_backward import Out, differentiable_once, differentiable_twice
from te_transform.backends.fp8.checkpointed_calls import NotedCall
from te_transform.backends.fp8.current_model import in_recipe, is_evaluating
from te_transform.backends.fp8.fp8_only import exact, is_fp8_only
from te_transform.backends.fp8.gradient_sums import GradientSums, gradient_sums_of
from te_transform.backends.fp8.products import ProductState, Scaling, with_full_rows
from te_transform.backends.fp8.registry import state_of
from te_transform.backends.joined import watched
from te_transform.backends.limits import ignore_size_limits, too_small, without_kernel
from te_transform.backends.plain.products import EXACT_GELU, MatrixProduct
from te_transform.backends.te.activations import (
    Mlp,
    activation_and_limits,
    activation_of,
    with_limits,
    with_own_activations,
)
from te_transform.backends.te.kernel import Kernel
from te_transform.backends.te.recipes import (
    FP8GlobalStateManager,
    autocast,
    is_delayed,
    multiple,
    scaling_of,
)
from te_transform.backends.tensor_version import writable
from te_transform.backends.tracing import (
    in_backward,
    needs_gradient,
    recorded,
    saving_hooks,
    traced,
    transformed,
)


class _KernelCall(NamedTuple):
    """A call of an op, for one of TE's modules.

    Attributes:
        kernel: the module.
        x: the input.
        tensors: the other arguments of the op.
        gradients: the gradient sums of accumulate(), or None.
    """

    kernel: Kernel
    x: Tensor
    tensors: Sequence[Tensor | None]
    gradients: GradientSums | None


class _TEProduct(MatrixProduct):
    """An op with matrix products. Calls that TE refuses run in plain PyTorch."""

    def forward(self, x: Tensor, *tensors: Tensor | None, state: ProductState | None = None) -> Out:
        """Compute x [..., in] -> [..., out]; with a `state`, in FP8 for a compiler, see state_for()."""
        if state is not None and not transformed():
            return self._for_compiler(scaling_of(FP8GlobalStateManager.get_fp8_recipe()), state, x, tensors)
        if traced():
            return self.plain(plain.product, x, *tensors)
        weights, is_on = self._weights(tensors), FP8GlobalStateManager.is_fp8_enabled()
        kernel = self._kernel(weights, tensors[-1] is not None)
        call = _KernelCall(kernel, x, tensors, gradient_sums_of(weights))
        # torch.utils.checkpoint repeats a forward within the backward, where no autocast is active
        noted = kernel.call_again() if not is_on and in_backward() else None
        if noted is not None:
            return self._repeat(call, noted)
        in_fp8 = is_on and in_recipe(weights[0], self.in_fp8)
        if not (in_fp8 or call.gradients or self._may_gain()):
            return self.plain(plain.product, x, *tensors)
        why = self._prepare(call, in_fp8)
        if why is not None:
            self.plain_calls[why] += 1
            return self._calibrated(call) if kernel.in_recipe else self.plain(plain.product, x, *tensors)
        return self._in_fp8(call) if in_fp8 else self._in_its_dtype(call)

    def _prepare(self, call: _KernelCall, in_fp8: bool) -> str | None:
        """Set the mode of the kernel for a call. Return why the call runs in plain PyTorch, or None."""
        kernel, x, tensors, gradients = call
        weights = self._weights(tensors)
        why = self._why_plain(x, weights, in_fp8, gradients is not None)
        kernel.in_recipe = in_fp8 and why is None
        kernel.in_fp8 = kernel.in_recipe and self._has_scales(
            kernel, FP8GlobalStateManager.get_fp8_recipe(), weights, self._trained(x, *tensors)
        )
        if _may_be_repeated() and (FP8GlobalStateManager.is_fp8_enabled() or kernel.calls.noted):
            kernel.note_call()
        return _CALIBRATING if kernel.in_recipe and not kernel.in_fp8 else why

    def _may_gain(self) -> bool:
        """Return True if TE's module runs in the weights' own dtype too, because it gains or is verified."""
        return self.gains or bool(ignore_size_limits)

    def _for_compiler(
        self, scaling: Scaling, state: ProductState, x: Tensor, tensors: Sequence[Tensor | None]
    ) -> Out:
        """Compute a call in FP8 by operations that a compiler records."""
        return self.plain(scaling.product(state), x, *tensors)

    def _weights(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        return [tensors[position - 1] for position in self.PRODUCTS]  # x is the first argument

    def _why_plain(
        self, x: Tensor, weights: Sequence[Tensor], in_fp8: bool, adds_gradients: bool
    ) -> str | None:
        """Return why a call with this input runs in plain PyTorch, or None."""
        for weight in weights:
            if why := without_kernel(x, weight, in_fp8):
                return why
        factor = multiple(FP8GlobalStateManager.get_fp8_recipe()) if in_fp8 else 1
        if any(size % factor for weight in weights for size in weight.shape):
            return f"weights whose sizes are no multiples of {factor}"
        only_fp8 = in_fp8 and any(map(is_fp8_only, weights))
        if only_fp8 and all(few_rows.takes(x, weight) for weight in weights) and not torch.is_grad_enabled():
            return "few rows, whose products read weights that are held in FP8 alone"
        # other plain calls would dequantize such weights, and do not add to main_grad
        if adds_gradients or only_fp8:
            return None
        return too_small(x.shape[:-1].numel(), min(weights[0].shape), in_fp8)

    def _repeat(self, call: _KernelCall, noted: NotedCall) -> Out:
        """Repeat a noted call of a forward, for a checkpoint."""
        kernel, x, tensors, _ = call
        recipe = kernel.module.fp8_meta["recipe"] if noted.in_fp8 else None
        weights, trained = self._weights(tensors), self._trained(x, *tensors)
        if recipe is None or not self._has_scales(kernel, recipe, weights, trained):
            return self.plain(kernel.seen.product(), x, *tensors)
        with kernel.as_before(noted, recipe):
            return self._in_fp8(call)

    def refuse_recipe(self, x: Tensor, weights: Sequence[Tensor]) -> str | None:
        """Return why the active recipe cannot run with these weights and an input like `x`, maybe a fake."""
        in_fp8, adds_gradients = True, False
        return self._why_plain(x, weights, in_fp8, adds_gradients)

    def state_for(
        self, weights: Sequence[Tensor], bias: bool, trained: Sequence[bool]
    ) -> ProductState | None:
        """Return the `state` of a compiled call in the active recipe, or None if the call cannot be compiled.

        It cannot be before there are scales, if gradients are added to main_grad, and with FP8-only weights.

        Args:
            weights: the weights of its products.
            bias: True if it has a bias.
            trained: for each product, True if its output needs a gradient.
        """
        recipe, kernel = FP8GlobalStateManager.get_fp8_recipe(), self._kernel(weights, bias)
        if gradient_sums_of(weights) is not None or any(map(is_fp8_only, weights)):
            return None
        if not self._has_scales(kernel, recipe, weights, trained):
            return None
        kernel.in_recipe = kernel.in_fp8 = True
        if _may_be_repeated():
            kernel.note_call()
        return kernel.state(recipe, weights)

    def state_again(self, weights: Sequence[Tensor], bias: bool) -> ProductState | None:
        """Return the `state` of a compiled call that a checkpoint repeats, or None if it had no recipe."""
        kernel = self._kernel(weights, bias)
        call = kernel.call_again()
        return None if call is None else kernel.state_again(call)

    def _trained(self, *arguments: Tensor | None) -> list[bool]:
        return self.trained_products([needs_gradient(argument) for argument in arguments])

    def _has_scales(
        self, kernel: Kernel, recipe: Any, weights: Sequence[Tensor], trained: Sequence[bool]
    ) -> bool:
        """Return True if the kernel has scales for a call; compute the first scales if it can."""
        are_new = kernel.look_at(weights)
        if not is_delayed(recipe):
            return True
        kernel.notice_other_recipe()
        kernel.note_forward(recipe)
        kernel.take_saved()
        if kernel.seen.knows(trained):
            kernel.give_scales(recipe, trained)
        if are_new and is_evaluating() and not recorded():
            kernel.fit(recipe, weights)  # the scales may belong to earlier weights
        return kernel.seen.knows(trained)

    def _calibrated(self, call: _KernelCall) -> Out:
        """Compute a call in plain PyTorch, and record amax.

        The backward of the first call repeats its norm and its activation. The first step would otherwise
        need more memory than all later steps, because plain PyTorch saves more tensors than FP8 kernels.
        """
        kernel, x, tensors, _ = call

        def compute(x: Tensor, *tensors: Tensor | None) -> Out:
            return self.plain(kernel.seen.product(), x, *tensors)

        is_first = all(amax.input is None for amax in kernel.seen.products)
        keeps_more = self.PRODUCTS != plain.Linear.PRODUCTS and needs_gradient(x, *tensors)
        if not (is_first and keeps_more) or saving_hooks() is not None:
            return compute(x, *tensors)
        return checkpoint(compute, x, *tensors, use_reentrant=False, preserve_rng_state=False)

    def _in_its_dtype(self, call: _KernelCall) -> Out:
        """Compute a call in the dtype of the weights, even if a recipe is active."""
        kernel, x, tensors, gradients = call

        def run(x: Tensor, *given: Tensor | None) -> Out:
            given = self._kernel_arguments(call, given)
            if not FP8GlobalStateManager.is_fp8_enabled():
                return kernel.run(x, given, gradients is not None)
            with autocast(None, enabled=False):
                return kernel.run(x, given, gradients is not None)

        plain_tensors = (None if tensor is None else exact(tensor) for tensor in tensors)
        plainly = partial(self.plain, plain.product)
        out = differentiable_twice(run, plainly, (x, *plain_tensors))
        return self._watched(out, call)

    def _in_fp8(self, call: _KernelCall) -> Out:
        """Compute a call in the active recipe, with padded rows."""
        kernel, x, tensors, gradients = call
        given = self._kernel_arguments(call, tensors)

        def run(x: Tensor) -> Out:
            return differentiable_once(kernel.run(x, given, gradients is not None, kernel.keeps), _ONCE)

        out = with_full_rows(run, x, multiple(FP8GlobalStateManager.get_fp8_recipe()))
        return self._watched(out, call)

    def _kernel_arguments(self, call: _KernelCall, given: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the arguments of a kernel: contiguous weights, with their main_grad.

        Args:
            call: its tensors own the gradient sums.
            given: the tensors of the call, as differentiable_twice() passes them.
        """
        arguments = list(given)
        for number, position in enumerate(self.PRODUCTS):  # among the arguments, of which x is the first
            index = position - 1
            weight = given[index]
            if is_fp8_only(weight):
                arguments[index] = call.kernel.tensor_of(number, weight)
                continue
            weight = weight.contiguous()
            if call.gradients is not None and torch.is_grad_enabled():
                weight = weight.view_as(weight)  # parameters stay as they are
                weight.main_grad = call.gradients.of(call.tensors[index])
            arguments[index] = weight
        return arguments

    def _watched(self, out: Out, call: _KernelCall) -> Out:
        """Return a kernel's output, and the norm's output without a gradient if the norm has none."""
        _, x, tensors, gradients = call
        first, *others = out if isinstance(out, tuple) else (out,)
        if gradients is not None:
            gradients.watch(first, self._weights(tensors))
        first = writable(first)
        for weight in self._weights(tensors):
            first = watched(first, weight)
        if not needs_gradient(x, *tensors[: self.PRODUCTS[0] - 1]):  # autograd marks all outputs of a kernel
            others = [norm.detach() if norm.requires_grad else norm for norm in others]
        return (first, *others) if others else first

    def _kernel(self, weights: Sequence[Tensor], bias: bool) -> Kernel:
        """Return the kernel of the first weight's parameter for calls of this form."""
        first = weights[0]
        form = (*self.form, bias, first.dtype, *map(_slice_of, weights))
        kernels = state_of(first).kernels
        if form not in kernels:
            kernels[form] = self._make_kernel(weights, bias=bias, params_dtype=first.dtype)
        return kernels[form]

    @property
    def form(self) -> tuple[Any, ...]:
        """The key of a kernel among those of one parameter, beside dtype and sizes."""
        raise NotImplementedError

    def _make_kernel(self, weights: Sequence[Tensor], **options: Any) -> Kernel:
        raise NotImplementedError


def _slice_of(weight: Tensor) -> tuple[Any, ...]:
    """Return what distinguishes the slices of one parameter, and a parameter from its transpose."""
    return weight.shape, weight.stride(), 0 if weight._base is None else weight.storage_offset()


def _may_be_repeated() -> bool:
    """Return True if a checkpoint may repeat the call; a reentrant one runs it without gradients."""
    return (saving_hooks() or not (torch.is_grad_enabled() or is_evaluating())) and not in_backward()


_CALIBRATING = "a first call in FP8, from which delayed scaling takes its scales"
_ONCE = (
    "the backward of an FP8 product is recorded or repeated, but its kernels keep nothing for a second time: "
    "convert without a recipe, or exclude the product by te_transform.PrecisionPlan"
)


class Linear(_TEProduct, plain.Linear):
    """The op y = x W^T + b; weight [out, in]."""

    form = ("Linear",)

    def _may_gain(self) -> bool:
        return False

    def _make_kernel(self, weights: Sequence[Tensor], **options: Any) -> Kernel:
        outs, ins = weights[0].shape
        return Kernel(lambda: te.Linear(ins, outs, device="meta", **options), ("weight", "bias"), weights)


class PaddedLinear(Linear, plain.PaddedLinear):
    """A linear whose weight gets rows of zeros in plain PyTorch."""


class LayerNormLinear(_TEProduct, plain.LayerNormLinear):
    """A linear of the output of a LayerNorm or RMSNorm."""

    @property
    def form(self) -> tuple[Any, ...]:
        return "LayerNormLinear", *self._norm.values()

    @property
    def _norm(self) -> dict[str, Any]:
        norm = {
            "eps": self.eps,
            "normalization": self.normalization,
            "zero_centered_gamma": self.zero_centered_gamma,
        }
        return norm | {"return_layernorm_output": True} if self.returns_norm else norm

    def _kernel_arguments(self, call: _KernelCall, given: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Add constant vectors for a missing scale or bias, because TE's norms always have both."""
        scale, bias, weight, *others = super()._kernel_arguments(call, given)
        if scale is None:
            scale = call.kernel.vector(0.0 if self.zero_centered_gamma else 1.0, weight)
        if bias is None and self.normalization == "LayerNorm":
            bias = call.kernel.vector(0.0, weight)
        return [scale, bias, weight, *others]

    def _make_kernel(self, weights: Sequence[Tensor], **options: Any) -> Kernel:
        (outs, ins), options = weights[0].shape, {**options, **self._norm}
        names = ("layer_norm_weight", "layer_norm_bias", "weight", "bias")
        return Kernel(lambda: te.LayerNormLinear(ins, outs, device="meta", **options), names, weights)


class LayerNormMLP(LayerNormLinear, plain.LayerNormMLP):
    """The op fc2(activation(fc1(norm(x)))); fc1_weight [ffn, hidden], [2 ffn, hidden] if it is gated."""

    @property
    def form(self) -> tuple[Any, ...]:
        return "LayerNormMLP", self.activation, *self._norm.values()

    def _for_compiler(
        self, scaling: Scaling, state: ProductState, x: Tensor, tensors: Sequence[Tensor | None]
    ) -> Out:
        norm_weight, norm_bias, *rest = tensors
        _, fc1_bias, *_ = rest
        # TE has no kernels for the exact GELU, or for the gradient of a bias before a gated activation
        has_kernels = self.activation != EXACT_GELU and (self.gated == "no" or fc1_bias is None)
        has_kernels = has_kernels and (plain.clamp_of(self.activation) is None or with_limits())
        if not has_kernels or not scaling.delayed or not with_own_activations():
            return super()._for_compiler(scaling, state, x, tensors)
        normed = self.norm(x, norm_weight, norm_bias)
        return self._with_norm(scaling.mlp(state, self.activation, normed, *rest), normed)

    def _why_plain(self, *call: Any) -> str | None:
        if self.activation == EXACT_GELU and not with_own_activations():
            return "the exact GELU, which this version of TE cannot be told of"
        if plain.clamp_of(self.activation) is not None and not with_limits():
            return "a clamped gate, whose parameters this version of TE does not have"
        return super()._why_plain(*call)

    def _make_kernel(self, weights: Sequence[Tensor], **options: Any) -> Kernel:
        hidden, inner = weights[1].shape
        name, limits = activation_and_limits(self.activation)
        options |= {**self._norm, "activation": activation_of(name, options["bias"])}
        options |= {"activation_params": limits} if limits else {}
        names = ("layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")
        return Kernel(lambda: Mlp(hidden, inner, device="meta", **options), names, weights)
