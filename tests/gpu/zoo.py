"""Models of the zoo on a GPU, their inputs and gradients."""

import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import te_transform
from te_transform.backends import limits
from tests.conversions import ALL, Pair, cast
from tests.zoo import Inputs, tensors, zero_dropout


def sample(name: str, batch: int = 2, seq: int = 16, **options: object) -> Inputs:
    inputs = cast(ALL[name].sample(batch, seq, **options), torch.bfloat16)
    moved = {id(tensor): tensor.cuda() for tensor in inputs.values()}
    return {key: moved[id(tensor)] for key, tensor in inputs.items()}


@cache
def converted(name: str, recipe: str | None = None) -> Pair:
    """Return a model without dropout, in bf16, on the GPU."""
    model = zero_dropout(ALL[name].build()).to("cuda", torch.bfloat16)
    return Pair(ALL[name], model, te_transform.convert(model, sample(name), backend="te", recipe=recipe))


def model_of(name: str) -> nn.Module:
    return zero_dropout(ALL[name].build()).to("cuda", torch.bfloat16)


def error(actual: list[Tensor], exact: list[Tensor]) -> float:
    return sum(((a.double() - e) ** 2).sum() for a, e in zip(actual, exact, strict=True)).sqrt().item()


def gradients(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """Return the gradients of a loss that is large enough for bf16."""
    outputs = [output for output in tensors(model.train()(**inputs)) if output.requires_grad]
    loss = sum(output.double().square().sum() for output in outputs)
    found = torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)
    return [grad.clone() for grad in found if grad is not None]


def overwrite_free_memory() -> None:
    """Fill free memory, so that reads of freed memory show."""
    held = [torch.full((2**size,), torch.nan, device="cuda") for size in range(8, 22) for _ in range(8)]
    torch.cuda.synchronize()
    del held


def hold_in_fp8(name: str, recipe: str, **how: Any) -> None:
    """Converted in some way, a model is as exact as it is without, in training and in evaluation.

    Over several inputs: on one alone the errors of two ways to round differ by a sixth.
    """
    model = model_of(name)
    batches = [sample(name, seq=64, seed=seed) for seed in range(7)]
    options = {"backend": "te", "recipe": recipe, "verify": False}
    with limits.small_calls_in_fp8:
        eager = te_transform.convert(model, batches[0], **options)
        converted = te_transform.convert(model, batches[0], **how, **options)
        wide = copy.deepcopy(model).double()
        for act in (gradients, outputs):
            found, own = 0.0, 0.0
            for batch in batches:  # delayed scaling calibrates, CUDA graphs are warmed up, recorded, replayed
                exact = act(wide, batch)
                found += error(act(converted, batch), exact)
                own += error(act(eager, batch), exact)
            assert found <= 1.1 * own, act.__name__
    assert not any("a graph runs" in note for note in te_transform.report(converted).notes)


def outputs(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """Return the outputs in evaluation; a model in evaluation mode keeps its quantized weights."""
    with torch.no_grad():
        return [out.clone() for out in tensors((model.eval() if model.training else model)(**inputs))]
