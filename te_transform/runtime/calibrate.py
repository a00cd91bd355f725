"""Put a converted model into its precision, with the scales that its example inputs call for.

Delayed scaling quantises with the scales of earlier steps, and has none at first: numbers beyond 448 and
gradients below 1e-5, which is most of them, are lost in the first steps. So the original modules run once
on the example inputs, and what goes through their products gives the first scales.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from te_transform.autocast import Amax, Precision
from te_transform.check import place
from te_transform.emit import Emitted, enter_precision
from te_transform.inputs import Inputs
from te_transform.originals import fusions, sources
from te_transform.precision import PrecisionPlan
from te_transform.preserve import preserved
from te_transform.replay import only

log = logging.getLogger(__name__)


def quantise(
    model: nn.Module,
    emitted: Sequence[Emitted],
    plan: PrecisionPlan,
    backend: ModuleType,
    samples: Sequence[Inputs],
) -> None:
    """Let the sites that `plan` names run in its recipe; delayed scaling is calibrated on `samples`."""
    recipe = backend.recipe_of(plan.recipe)
    within = [site for site in emitted if plan.sites.get(place(site.fusion), "no product") is None]
    on_gpu = all(parameter.is_cuda for parameter in model.parameters())
    if backend.is_delayed(recipe) and on_gpu:
        seen = _seen(model, within, samples)
        for site in within:
            backend.calibrate(site.fusion.fused, recipe, seen.get(site, []))
    enter_precision(model, Precision(recipe, [site.fusion.fused for site in within]), plan.small_calls)


def _seen(model: nn.Module, sites: Sequence[Emitted], samples: Sequence[Inputs]) -> dict[Emitted, list[Amax]]:
    """The products of each site, in their order, as the original modules compute them on `samples`."""
    products = {site: list(_products(model, site)) for site in sites}
    with contextlib.ExitStack() as stack:
        stack.enter_context(preserved(model))
        stack.enter_context(only((), fusions(model)))
        for found in products.values():
            for product, modules in found:
                for module in modules:
                    stack.enter_context(_watched(module, product))
        for sample in samples:
            _run(model, sample)
    return {
        site: [product for product, _ in found]
        for site, found in products.items()
        if all(product.input is not None for product, _ in found)
    }


def _products(model: nn.Module, site: Emitted) -> Iterator[tuple[Amax, list[nn.Module]]]:
    """Each product of a fused module with the modules that computed it, in parts."""
    fused = site.fusion.fused
    for name in fused.weight_names:
        modules = [model.get_submodule(path) for path, _ in sources(model, site.fusion, name)]
        yield Amax(None, getattr(fused, name).detach().abs().amax().float()), modules


@contextlib.contextmanager
def _watched(module: nn.Module, product: Amax) -> Iterator[None]:
    def grad(gradient: Tensor) -> None:
        product.grad = _larger(product.grad, gradient)

    def seen(module: nn.Module, args: tuple, kwargs: dict[str, Any], out: Tensor) -> None:
        product.input = _larger(product.input, next(iter((*args, *kwargs.values()))))
        if out.requires_grad:
            out.register_hook(grad)

    hook = module.register_forward_hook(seen, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _larger(amax: Tensor | None, seen: Tensor) -> Tensor | None:
    if not seen.numel():  # an expert that no token went to
        return amax
    new = seen.detach().abs().amax().float()
    return new if amax is None else torch.maximum(amax, new)


def _run(model: nn.Module, sample: Inputs) -> None:
    """Forward in training mode, and backward from the loss if the model returns one; no gradient is kept."""
    for module in model.modules():
        module.training = True
    args, kwargs = sample.clone()
    with torch.enable_grad():
        out = model(*args, **kwargs)
        loss = _loss(out)
        trained = [p for p in model.parameters() if p.requires_grad]
        if loss is not None and trained:
            _backward(loss, trained)


def _backward(loss: Tensor, trained: list[nn.Parameter]) -> None:
    try:  # not backward(), which would call what waits for gradients: optimizers step in there
        torch.autograd.grad(loss, trained, allow_unused=True)
    except RuntimeError as error:
        if "checkpoint" not in str(error):
            raise
        log.warning("gradients are not calibrated: reentrant checkpoints cannot be run for a calibration")


def _loss(out: Any) -> Tensor | None:
    """The one number among a model's outputs, which is its loss."""
    if isinstance(out, dict):
        out = tuple(out.values())
    found = [x for x in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(x, Tensor)]
    losses = [x for x in found if x.dim() == 0 and x.requires_grad]
    return losses[0] if losses else None
