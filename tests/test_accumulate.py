"""accumulate() hands the sums of kernels over as gradients, and lists what takes no part in that."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_transform
from te_transform.originals import fusions, original_parameters
from tests.conftest import only_joined
from tests.models.tiny import WIDTH, Attention

accumulating = sys.modules[te_transform.accumulate.__module__]
X = [torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


class Product(torch.autograd.Function):
    """x W^T, whose gradient for W goes into W.main_grad, as TE's kernels have it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        ctx.weight.main_grad += (grad.flatten(0, -2).t() @ x.flatten(0, -2)).to(ctx.weight.main_grad.dtype)
        return grad @ ctx.weight, None


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """Converted, its fused modules with such kernels, on the CPU."""
    converted = te_transform.convert(Attention(), X[0])
    for fusion in fusions(converted):
        fused = fusion.fused
        fused.fuse_wgrad_accumulation, fused.weight_names = False, ("weight",)
        monkeypatch.setattr(fused, "forward", _forward(fused))
    monkeypatch.setattr(accumulating, "_takes_part", lambda weight: weight.requires_grad)
    return converted


def _forward(fused: nn.Module) -> Any:
    own = fused.forward

    def forward(x: Tensor) -> Tensor:
        if not fused.fuse_wgrad_accumulation:
            return own(x)
        out = Product.apply(x, fused.weight)
        return out if fused.bias is None else out + fused.bias

    return forward


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = original_parameters(model).items()
    return {name: original.part(original.held.grad).clone() for name, original in found}


def train(model: nn.Module, batches: list[Tensor]) -> None:
    for x in batches:
        model(x).square().mean().backward()


@only_joined
def test_the_sums_are_the_gradients(model: nn.Module) -> None:
    train(model, X)
    expected = gradients(model)
    model.zero_grad()
    with te_transform.accumulate(model, steps=3) as accumulation:
        train(model, X)
        assert all(fusion.fused.weight.grad is None for fusion in fusions(model))
    assert accumulation.taken == 3
    actual = gradients(model)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(actual[name], gradient, atol=1e-6), name
        assert actual[name].dtype == gradient.dtype


@only_joined
def test_gradients_that_were_there_are_added_to(model: nn.Module) -> None:
    train(model, X)
    expected = gradients(model)
    model.zero_grad()
    train(model, X[:1])
    with te_transform.accumulate(model, steps=4):  # the last batches of an epoch are fewer
        train(model, X[1:])
    for name, gradient in gradients(model).items():
        assert torch.allclose(gradient, expected[name], atol=1e-6), name


@only_joined
def test_every_parameter_is_named_once(model: nn.Module) -> None:
    with te_transform.accumulate(model, steps=1) as accumulation:
        names = [*accumulation.fused, *accumulation.left_out]
    assert sorted(names) == sorted(original_parameters(model))
    assert all(name.endswith("weight") for name in accumulation.fused)
    assert all(name.endswith("bias") and reason for name, reason in accumulation.left_out.items())


@only_joined
def test_a_fault_leaves_nothing_behind(model: nn.Module) -> None:
    with pytest.raises(ZeroDivisionError), te_transform.accumulate(model, steps=2):
        _train_and_fail(model)
    assert not any(hasattr(parameter, "main_grad") for parameter in model.parameters())
    assert not any(getattr(f.fused, "fuse_wgrad_accumulation", False) for f in fusions(model))
    assert not model._forward_pre_hooks
    train(model, X)  # as if nothing had been


def _train_and_fail(model: nn.Module) -> None:
    train(model, X[:1])
    raise ZeroDivisionError


@only_joined
def test_what_is_wrong_is_said(model: nn.Module) -> None:
    for steps in (0, -1, 2.5, None):
        with pytest.raises(te_transform.AccumulationError, match=r"a number of forward passes from 1 on"):
            te_transform.accumulate(model, steps=steps).__enter__()
    with te_transform.accumulate(model, steps=1):
        train(model, X[:1])
        with pytest.raises(te_transform.AccumulationError, match=r"forward pass 2 of accumulate\(steps=1\)"):
            model(X[1])
        with pytest.raises(te_transform.AccumulationError, match="has a main_grad already"):
            te_transform.accumulate(model, steps=1).__enter__()
        with torch.no_grad():
            model(X[1])  # no step of training


def test_ddp_is_refused(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(te_transform.convert(Attention(), X[0]))
        with pytest.raises(te_transform.AccumulationError, match="DistributedDataParallel"):
            te_transform.accumulate(wrapped, steps=1).__enter__()
    finally:
        torch.distributed.destroy_process_group()


def test_in_plain_pytorch_all_is_as_always() -> None:
    model = te_transform.convert(Attention(), X[0])
    train(model, X)
    expected = gradients(model)
    model.zero_grad()
    with te_transform.accumulate(model, steps=3) as accumulation:
        train(model, X)
    assert not accumulation.fused
    assert set(accumulation.left_out) == set(original_parameters(model))
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients(model).items())
