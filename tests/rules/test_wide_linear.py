"""Linears in fp32 of 16-bit inputs and weights, as routers have them: one product of 16-bit numbers."""

from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_transform
from te_transform.backends import limits
from tests.rules.tables import Make, Written, sites, written
from tests.zoo import seeded

BF16, WIDTH = torch.bfloat16, 2 * limits.WIDE_TERMS
X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0)).to(BF16)


def router(model: Written, x: Tensor) -> Tensor:
    """Compute a router as in DeepSeek V3 and GLM 4.5."""
    return F.linear(x.view(-1, WIDTH).type(torch.float32), model.weight.type(torch.float32)).softmax(-1)


def biased(model: Written, x: Tensor) -> Tensor:
    return F.linear(x.float(), model.weight.float(), model.bias.float())


def read_twice(model: Written, x: Tensor) -> Tensor:
    """The cast input has another reader."""
    wide = x.float()
    return F.linear(wide, model.weight.float()).sum(-1, keepdim=True) * wide


def cast_to_16_bits(model: Written, x: Tensor) -> Tensor:
    return F.linear(x.half(), model.weight.half())


def of_a_wide_input(model: Written, x: Tensor) -> Tensor:
    return F.linear(x.float() / 3, model.weight.float())


def computed(model: Written, x: Tensor) -> Tensor:
    return F.linear(x.float(), (model.weight * 2).float())


def of(function) -> Make:
    sizes = {"weight": (4, WIDTH), "bias": (4,)}
    parts = {name: lambda size=size: nn.Parameter(torch.zeros(size)) for name, size in sizes.items()}
    return lambda: written(function, **parts)().to(BF16)


@pytest.mark.parametrize("function", [router, biased])
def test_fuses(function, te: ModuleType) -> None:
    model = seeded(of(function))
    converted = te_transform.convert(model, X, backend="te")
    te_transform.report(converted).expect(wide_linear=1)
    with limits.ignore_size_limits:  # as where the kernel runs
        found = outputs_and_gradients(converted)
    for actual, expected in zip(found, outputs_and_gradients(model), strict=True):
        assert actual.dtype == expected.dtype
        rounding = 2**-7 if actual.dtype is BF16 else 1e-5  # gradients are in bfloat16, outputs in float32
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=rounding)


def outputs_and_gradients(model: nn.Module) -> list[Tensor]:
    x = X.clone().requires_grad_()
    out = model(x)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    grads = torch.autograd.grad(out, (x, *model.parameters()), weights, allow_unused=True)
    return [out, *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize("function", [cast_to_16_bits, of_a_wide_input, computed, read_twice])
def test_other_linears_stay(function) -> None:
    assert sites(of(function), X, backend="te").counts["wide_linear"] == 0


def test_a_gradient_keeps_16_bits(te: ModuleType) -> None:
    """The gradient of the result is rounded to two numbers in bfloat16, not to one."""
    x, weight = X.clone().requires_grad_(), torch.randn(4, WIDTH).to(BF16).requires_grad_()
    op = te.WideLinear()
    with limits.ignore_size_limits:
        out = op(x, weight, None)
    assert not op.plain_calls
    grad = 1 + torch.rand(out.shape) * 2**-9  # bfloat16 rounds these to 1
    found = torch.autograd.grad(out, (x, weight), grad)
    wide = grad.double()
    wanted = wide @ weight.double(), wide.flatten(0, 1).mT @ x.double().flatten(0, 1)
    for actual, expected in zip(found, wanted, strict=True):
        assert (actual - expected).norm() <= 1.2 * (expected.to(BF16) - expected).norm()


def test_it_can_be_differentiated_twice(te: ModuleType) -> None:
    x, weight = X.clone().requires_grad_(), torch.randn(4, WIDTH).to(BF16).requires_grad_()
    with limits.ignore_size_limits:
        out = te.WideLinear()(x, weight, None)
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    (again,) = torch.autograd.grad(grad.float().square().sum(), weight)
    assert again.abs().sum() > 0


def test_sums_of_an_odd_number_of_terms_stay_in_pytorch(te: ModuleType) -> None:
    op = te.WideLinear()
    with limits.ignore_size_limits:
        op(X[..., :-1], torch.randn(4, WIDTH - 1).to(BF16), None)
    assert sum(op.plain_calls.values()) == 1


def test_plain_pytorch_has_no_kernel_for_it() -> None:
    report = sites(of(router), X, backend="torch")
    assert not any(site.rule == "wide_linear" for site in report.sites)
