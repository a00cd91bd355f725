"""Kernels whose backward runs once have every derivative, as often as somebody asks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from te_transform.backends import plain
from te_transform.backends.double_backward import differentiable_once, differentiable_twice
from te_transform.graph import ops


class Kernel(torch.autograd.Function):
    """sin(x) * w, with a backward that runs once and is never recorded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.kept = x.detach(), w.detach()
        return x.sin() * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (x, w), ctx.kept = ctx.kept, None
        return grad * x.cos() * w, grad * x.sin()


def exact(x: Tensor, w: Tensor) -> Tensor:
    return x.sin() * w


def fused(x: Tensor, w: Tensor) -> Tensor:
    return differentiable_twice(Kernel.apply, exact, (x, w))


def leaves(*sizes: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in sizes]


def test_the_usual_backward_is_the_kernels() -> None:
    x, w = leaves(3, 3)
    runs = []

    def counted(*given: Tensor) -> Tensor:
        runs.append(True)
        return exact(*given)

    out = differentiable_twice(Kernel.apply, counted, (x, w))
    for found, wanted in zip(
        torch.autograd.grad(out.sum(), (x, w)), torch.autograd.grad(exact(x, w).sum(), (x, w)), strict=True
    ):
        assert torch.equal(found, wanted)
    assert not runs


def test_a_recorded_backward_can_be_differentiated() -> None:
    assert torch.autograd.gradcheck(fused, leaves(3, 3))
    assert torch.autograd.gradgradcheck(fused, leaves(3, 3))


def test_a_backward_can_be_repeated() -> None:
    x, w = leaves(3, 3)
    out = fused(x, w).sum()
    first = torch.autograd.grad(out, (x, w), retain_graph=True)
    for _ in range(2):
        again = torch.autograd.grad(out, (x, w), retain_graph=True)
        assert all(map(torch.equal, first, again))
    assert not again[0].requires_grad


def test_only_what_needs_a_gradient_gets_one() -> None:
    x, w = leaves(3, 3)
    for trained in ((x,), (w,)):
        for tensor in (x, w):
            tensor.requires_grad_(any(tensor is one for one in trained))
        out = fused(x, w).sum()
        (grad,) = torch.autograd.grad(out, trained, create_graph=True)
        (wanted,) = torch.autograd.grad(exact(x, w).sum(), trained)
        assert torch.equal(grad, wanted)
    assert fused(x.detach(), w.detach()).grad_fn is None


def test_one_argument_may_be_computed_from_another() -> None:
    (x,) = leaves(3)
    (found,) = torch.autograd.grad(fused(x, x * 2).sum(), x, create_graph=True)
    (wanted,) = torch.autograd.grad(exact(x, x * 2).sum(), x, create_graph=True)
    torch.testing.assert_close(found, wanted)


def test_linear_ops_save_nothing_and_have_every_derivative() -> None:
    turn = torch.randn(3, 3, dtype=torch.float64)

    class Turned(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, turn: Tensor) -> Tensor:
            ctx.turn = turn
            return x @ turn

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            turn, ctx.turn = ctx.turn, None
            return grad @ turn.T, None

    def turned(x: Tensor) -> Tensor:
        return differentiable_twice(Turned.apply, torch.matmul, (x, turn), linear=True)

    (x,) = leaves(3)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t.detach(), lambda t: t):
        turned(x)
    assert [one.shape for one in kept] == [turn.shape]
    assert torch.autograd.gradcheck(turned, (x,))
    assert torch.autograd.gradgradcheck(turned, (x,))


def test_a_kernel_that_has_no_other_backward_says_so() -> None:
    for recorded in (False, True):
        x, w = leaves(3, 3)
        out = differentiable_once(Kernel.apply(x, w), "no second backward").sum()
        if not recorded:
            torch.autograd.grad(out, (x, w), retain_graph=True)
        with pytest.raises(RuntimeError, match="no second backward"):
            torch.autograd.grad(out, (x, w), create_graph=recorded)


def test_a_call_that_nobody_runs_backward_is_freed() -> None:
    x, w = leaves(3, 3)
    freed = []

    class Watched(Kernel):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.flag = Flag(freed)
            return Kernel.forward(ctx, x, w)

    out = differentiable_twice(Watched.apply, exact, (x, w))
    del out
    assert freed == [True]


class Flag:
    def __init__(self, freed: list[bool]):
        self.freed = freed

    def __del__(self) -> None:
        self.freed.append(True)


# Attention


def written_out(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    return torch.softmax(scores if mask is None else scores + mask, -1) @ value


CAUSAL = torch.zeros(4, 4, dtype=torch.float64).masked_fill(~torch.ones(4, 4).tril().bool(), -torch.inf)
MASKS = {
    "none": (None, None),
    "full": ("full", None),
    "causal": ("causal", CAUSAL),
    "kept": (CAUSAL == 0, CAUSAL),
}


def queries() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (2, 2, 4, 3)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3)
    ]


@pytest.mark.parametrize("mask", MASKS)
def test_attention_has_every_derivative(mask: str) -> None:
    given, added = MASKS[mask]
    core, inputs = plain.DotProductAttention(), queries()
    torch.testing.assert_close(core(*inputs, given), written_out(*inputs, added))
    assert torch.autograd.gradgradcheck(lambda *x: core(*x, given), inputs)


TRANSFORMS: dict[str, Callable[[Callable, Tensor], Any]] = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x.cos(),)),
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, x.sin()])),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).sum())(x),
    "forward mode": lambda f, x: torch.autograd.functional.jvp(f, x, x.cos()),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_attention_can_be_transformed(name: str) -> None:
    query, key, value = (x.detach() for x in queries())
    core, run = plain.DotProductAttention(), TRANSFORMS[name]
    found = run(lambda x: core(x, key, value, "causal"), query)
    torch.testing.assert_close(found, run(lambda x: written_out(x, key, value, CAUSAL), query))


def test_attention_takes_three_dimensions() -> None:
    query, key, value = (x[0].detach() for x in queries())
    torch.testing.assert_close(
        plain.DotProductAttention()(query, key, value), written_out(query, key, value, None)
    )


def test_rows_that_are_hidden_everywhere_are_uniform_where_the_mask_stays() -> None:
    query, key, value = (x.detach() for x in queries())
    hidden = torch.zeros(4, 4, dtype=torch.bool)
    hidden[0], hidden[1, 2] = True, True
    core = plain.DotProductAttention()
    filled = (query @ key.mT / 3**0.5).masked_fill(hidden, -1e9).softmax(-1) @ value
    rows = ops.hidden_rows(hidden)
    found = core(query, key, value, ops.kept(hidden, rows), 0.0, False, None, False, hidden=rows)
    torch.testing.assert_close(found, filled)
    causal = core(query, key, value, "causal", 0.0, False, None, False, hidden=rows)
    torch.testing.assert_close(causal, written_out(query, key, value, CAUSAL))
