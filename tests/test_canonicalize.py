"""Canonical graphs: they compute what was captured, in the ops of graph/ops.py, whatever the spelling was."""

import math
import operator
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import te_transform
from te_transform.graph import ops
from te_transform.graph.nodes import called, is_random, shape_of
from te_transform.plan.rule import stored_in
from tests.captures import BOUND, canonical, canonicalize, capture, error, named, op_counts, targets, the
from tests.rules.tables import X, linear, written

HIDDEN, HEADS, WIDTH, LENGTH, BATCH = 32, 4, 8, 6, 3


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


# Linears

LINEARS = {
    "F.linear": lambda m, x: F.linear(x, m.w, m.b),
    "matmul T": lambda m, x: x @ m.w.T + m.b,
    "matmul t": lambda m, x: torch.matmul(x, m.w.t()) + m.b,
    "bias first": lambda m, x: m.b + torch.matmul(x, m.w.transpose(0, 1)),
    "in place": lambda m, x: (x @ m.w.mT).add_(m.b),
    "addmm": lambda m, x: torch.addmm(m.b, x.view(-1, HIDDEN), m.w.t()).view(*x.shape[:-1], -1),
    "einsum": lambda m, x: torch.einsum("bsi,oi->bso", x, m.w) + m.b,
    "einsum of any rank": lambda m, x: torch.einsum("...i,oi->...o", x, m.w) + m.b,
    "einsum, weight first": lambda m, x: torch.einsum("oi,bsi->bso", m.w, x) + m.b,
}


@pytest.mark.parametrize("spelling", LINEARS.values(), ids=LINEARS)
def test_linear(spelling) -> None:
    parameters = {"w": torch.randn(20, HIDDEN), "b": torch.randn(20)}
    graph = canonical(spelling, torch.randn(2, 5, HIDDEN), **parameters)
    assert op_counts(graph) == {"linear": 1}
    x, weight, bias = the(graph, ops.linear)
    assert (x.op, named(weight), named(bias)) == ("placeholder", "w", "b")


def test_linear_with_its_weight_transposed() -> None:
    parameters = {"w": torch.randn(HIDDEN, 20), "b": torch.randn(20)}
    for spelling in (
        lambda m, x: torch.addmm(m.b, x.view(-1, HIDDEN), m.w).view(2, 5, 20),
        lambda m, x: x @ m.w + m.b,
    ):
        _, weight, _ = the(canonical(spelling, torch.randn(2, 5, HIDDEN), **parameters), ops.linear)
        assert weight.target is torch.t
        assert named(weight.args[0]) == "w"
        assert shape_of(weight) == (20, HIDDEN)


HEAD_WEIGHTS = {  # an einsum, and the shape of its weight
    "heads of outputs": ("bsi,hki->bshk", (4, 5, HIDDEN)),
    "heads of outputs, inputs first": ("bsi,ihk->bshk", (HIDDEN, 4, 5)),
    "heads in front": ("hki,bsi->bhsk", (4, 5, HIDDEN)),
    "heads of inputs": ("bshk,ohk->bso", (20, 4, HIDDEN // 4)),
    "heads of inputs, outputs last": ("bhsk,hko->bso", (4, HIDDEN // 4, 20)),
    "heads of both": ("bshk,xyhk->bysx", (4, 5, 4, HIDDEN // 4)),
    "any rank": ("...i,hki->...hk", (4, 5, HIDDEN)),
}


@pytest.mark.parametrize(("equation", "shape"), HEAD_WEIGHTS.values(), ids=HEAD_WEIGHTS)
def test_einsum_whose_weight_has_heads_is_a_linear(equation: str, shape: tuple[int, ...]) -> None:
    heads = {"bshk": (2, 5, 4, HIDDEN // 4), "bhsk": (2, 4, 5, HIDDEN // 4)}
    x = torch.randn(heads.get(equation.partition(",")[0], (2, 5, HIDDEN)))
    graph = canonical(lambda m, x: _einsum(equation, x, m.w), x, w=torch.randn(shape))
    _, weight, _ = the(graph, ops.linear)
    (whole,) = stored_in(weight)
    assert named(whole) == "w"
    assert torch.einsum not in targets(graph)


def _einsum(equation: str, x: Tensor, weight: Tensor) -> Tensor:
    is_first = equation.startswith("hki,")
    return torch.einsum(equation, *((weight, x) if is_first else (x, weight)))


OTHER_EINSUMS = {
    "a weight for each head": ("bshk,hko->bsho", (4, HIDDEN // 4, 5)),
    "a sum over columns": ("bsi,ihk->bsh", (HIDDEN, 4, 5)),
    "a sum over rows": ("bsi,ihk->bhk", (HIDDEN, 4, 5)),
    "a broadcast input": ("bshk,hko->bso", (1, HIDDEN // 4, 20)),
    "no sum": ("bs,hk->bshk", (4, 5)),
}


@pytest.mark.parametrize(("equation", "shape"), OTHER_EINSUMS.values(), ids=OTHER_EINSUMS)
def test_other_einsums_are_no_linear(equation: str, shape: tuple[int, ...]) -> None:
    sizes = {"bs": (2, 5), "bsi": (2, 5, HIDDEN), "bshk": (2, 5, 4, HIDDEN // 4)}
    x = torch.randn(sizes[equation.partition(",")[0]])
    graph = canonical(lambda m, x: torch.einsum(equation, x, m.w), x, w=torch.randn(shape))
    assert ops.linear not in targets(graph)


def test_a_linear_says_that_its_weight_is_computed() -> None:
    graph = canonical(lambda m, x: F.linear(x, m.w * 2), torch.randn(2, 5, HIDDEN), w=torch.randn(20, HIDDEN))
    _, weight, _ = the(graph, ops.linear)
    assert weight.target is torch.mul


@pytest.mark.parametrize("factors", [{"alpha": 2}, {"beta": 0.5, "alpha": 2.0}, {"beta": 0}, {"beta": 0.5}])
def test_addmm_with_factors_is_a_linear_of_a_scaled_weight(factors: dict[str, float]) -> None:
    parameters = {"w": torch.randn(HIDDEN, HIDDEN), "b": torch.randn(HIDDEN)}
    graph = canonical(
        lambda m, x: torch.addmm(m.b, x[0], m.w, **factors), torch.randn(2, 5, HIDDEN), **parameters
    )
    _, weight, bias = the(graph, ops.linear)
    assert (weight.args[0].target is torch.mul) == ("alpha" in factors)
    assert (bias is None) == (factors.get("beta") == 0)


NOT_LINEARS = {
    "a product with a computed weight": lambda m, x: x @ (m.w * 2),
    "the weight is an input": lambda m, x: x @ x.mT,
    "addmm of inputs scales": lambda m, x: torch.addmm(m.b, x[0], x[1].T @ x[0], alpha=2),
    "a tensordot of inputs": lambda m, x: torch.tensordot(x, x, dims=([1], [1])),
    "a tensordot of whole tensors": lambda m, x: torch.tensordot(x[0] @ x[1].T @ x[0], x[0]),
}


@pytest.mark.parametrize("spelling", NOT_LINEARS.values(), ids=NOT_LINEARS)
def test_not_a_linear(spelling) -> None:
    graph = canonical(
        spelling, torch.randn(2, 5, HIDDEN), w=torch.randn(HIDDEN, HIDDEN), b=torch.randn(HIDDEN)
    )
    assert ops.linear not in targets(graph)


def test_no_bias_that_is_not_one_number_per_column() -> None:
    graph = canonical(
        lambda m, x: x @ m.w.T + m.b, torch.randn(2, 5, HIDDEN), w=torch.randn(5, HIDDEN), b=torch.randn(5, 5)
    )
    assert op_counts(graph) == {"linear": 1}
    assert torch.add in targets(graph)
    read_twice = canonical(
        lambda m, x: (y := x @ m.w.T) * (y + m.b),
        torch.randn(2, HIDDEN),
        w=torch.randn(5, HIDDEN),
        b=torch.randn(5),
    )
    assert the(read_twice, ops.linear)[2] is None


# Norms


def _inverse(x: Tensor, eps: float = 1e-6) -> Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


RMS_NORMS = {
    "llama": lambda m, x: m.w * (x.float() * _inverse(x.float())).to(x.dtype),
    "t5": lambda m, x: m.w * (x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + 1e-6)),
    "meta": lambda m, x: (x.float() * _inverse(x.float())).type_as(x) * m.w,
    "litgpt": lambda m, x: (
        x.float() * torch.rsqrt(torch.mean(x.float() * x.float(), dim=-1, keepdim=True) + 1e-6) * m.w.float()
    ).to(x.dtype),
    "torchtune": lambda m, x: F.rms_norm(x.float(), m.w.shape, weight=m.w.float(), eps=1e-6).to(x.dtype),
    "F.rms_norm": lambda m, x: F.rms_norm(x, m.w.shape, m.w, 1e-6),
    "sqrt": lambda m, x: x / torch.sqrt(x.square().mean(-1, True) + 1e-6) * m.w,
    "one over sqrt": lambda m, x: m.w * (x * (1 / (x**2).mean(dim=(-1,), keepdim=True).add(1e-6).sqrt())),
    "pow": lambda m, x: x * (1e-6 + torch.mean(x * x, -1, True)) ** -0.5 * m.w,
    "a sum over the columns": lambda m, x: m.w * (x * torch.rsqrt(x.square().sum(-1, True) / HIDDEN + 1e-6)),
    "a sum, times a factor": lambda m, x: m.w * x * (1 / HIDDEN * (x * x).sum(-1, True) + 1e-6).rsqrt(),
    "a squared length": lambda m, x: (
        m.w * (x / torch.sqrt(x.norm(2, dim=-1, keepdim=True) ** 2 / x.shape[-1] + 1e-6))
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spelling", RMS_NORMS.values(), ids=RMS_NORMS)
def test_rms_norm(spelling, dtype: torch.dtype) -> None:
    if dtype is torch.bfloat16 and spelling is RMS_NORMS["t5"]:
        pytest.skip("rounds to bf16 in a cast that T5 has beside")
    x, w = torch.randn(2, 5, HIDDEN, dtype=dtype), torch.randn(HIDDEN, dtype=dtype)
    graph = canonical(spelling, x, w=w, bound=BOUND if dtype is torch.float32 else 0.02)
    assert targets(graph) == {ops.rms_norm}
    x, weight, eps, centered = the(graph, ops.rms_norm)
    assert (x.op, named(weight), eps, centered) == ("placeholder", "w", 1e-6, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_with_zero_centered_gamma(dtype: torch.dtype) -> None:
    x, w = torch.randn(2, 5, HIDDEN, dtype=dtype), torch.randn(HIDDEN, dtype=dtype)
    for spelling in (
        lambda m, x: (x.float() * _inverse(x.float()) * (1.0 + m.w.float())).type_as(x),
        lambda m, x: ((m.w.float() + 1) * (x.float() * _inverse(x.float()))).to(x.dtype),
    ):
        graph = canonical(spelling, x, w=w, bound=BOUND if dtype is torch.float32 else 0.02)
        assert targets(graph) == {ops.rms_norm}
        assert the(graph, ops.rms_norm)[2:] == (1e-6, True)


def test_rms_norm_without_eps_has_that_of_its_arithmetic() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = 1e-3 * torch.randn(4, HIDDEN, dtype=dtype)
        w = torch.randn(HIDDEN, dtype=dtype)
        assert op_counts(canonical(lambda m, x: F.rms_norm(x, (HIDDEN,), m.w), x, w=w)) == {"rms_norm": 1}


NOT_RMS_NORMS = {
    "no eps": lambda m, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) * m.w,
    "a unit vector": lambda m, x: F.normalize(x, dim=-1) * m.w,
    "scaled by something else": lambda m, x: F.normalize(x, dim=-1) * HIDDEN * m.w,
    "a sum of magnitudes": lambda m, x: F.normalize(x, p=1.0, dim=-1) * HIDDEN**0.5 * m.w,
    "unit columns": lambda m, x: F.normalize(x, dim=-2) * HIDDEN**0.5 * m.w,
    "another dimension": lambda m, x: x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + 1e-6) * m.w,
    "a cube": lambda m, x: x * torch.rsqrt(x.pow(3).abs().mean(-1, keepdim=True) + 1e-6) * m.w,
    "of something else": lambda m, x: x * _inverse(x + 1) * m.w,
    "two plus the weight": lambda m, x: x * _inverse(x) * (2 + m.w),
    "the weight is computed": lambda m, x: x * _inverse(x) * (m.w * 2),
    "a unit vector, of what is not short": lambda m, x: F.normalize(x, dim=-1, eps=1e-4) * HIDDEN**0.5 * m.w,
    "the sum": lambda m, x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) * m.w,
    "a sum over another number": lambda m, x: (
        m.w * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / (HIDDEN - 1) + 1e-6))
    ),
    "a sum over a number, times it": lambda m, x: (
        x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) * HIDDEN + 1e-6) * m.w
    ),
    "a sum in fp16": lambda m, x: (
        (y := x.half()) * torch.rsqrt(y.pow(2).sum(-1, keepdim=True) / HIDDEN + 1e-6) * m.w.half()
    ),
    "a unit vector, of what may be 0": lambda m, x: F.normalize(x, dim=-1, eps=1e-22) * HIDDEN**0.5 * m.w,
    "in fp64": lambda m, x: (x.double() * _inverse(x.double())).to(x.dtype) * m.w,
}


@pytest.mark.parametrize("spelling", NOT_RMS_NORMS.values(), ids=NOT_RMS_NORMS)
def test_not_an_rms_norm(spelling) -> None:
    assert op_counts(canonical(spelling, torch.randn(2, HIDDEN, HIDDEN), w=torch.randn(HIDDEN))) == {}


NORMALIZE = {
    "x-transformers": (lambda m, x: F.normalize(x, dim=-1) * HIDDEN**0.5 * (m.w + 0.0), "w", False),
    "around zero": (lambda m, x: F.normalize(x, dim=-1) * HIDDEN**0.5 * (m.w + 1.0), "w", True),
    "lucidrains": (lambda m, x: m.w * HIDDEN**0.5 * F.normalize(x, dim=-1), "w", False),
    "without a scale": (lambda m, x: F.normalize(x, dim=-1) * HIDDEN**0.5, None, False),
    "in fp32": (lambda m, x: (F.normalize(x.float(), dim=-1) * HIDDEN**0.5).to(x.dtype) * m.w, "w", False),
    "over a length": (
        lambda m, x: x / x.norm(dim=-1, keepdim=True).clamp(min=1e-12) * HIDDEN**0.5 * m.w,
        "w",
        False,
    ),
    "by clamp_min": (
        lambda m, x: x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12) * HIDDEN**0.5 * m.w,
        "w",
        False,
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("spelling", "weight", "centered"), NORMALIZE.values(), ids=NORMALIZE)
def test_a_unit_vector_times_the_root_of_its_width_is_an_rms_norm(
    spelling, weight: str | None, centered: bool, dtype: torch.dtype
) -> None:
    x, w = torch.randn(2, 5, HIDDEN, dtype=dtype), torch.randn(HIDDEN, dtype=dtype)
    graph = canonical(spelling, x, w=w, bound=BOUND if dtype is torch.float32 else 0.02)
    assert targets(graph) == {ops.rms_norm}
    _, found, eps, zero_centered = the(graph, ops.rms_norm)
    assert (named(found), eps, zero_centered) == (weight, 1e-24 / HIDDEN, centered)


OVER_LENGTH = {
    "Tensor.norm": lambda m, x: x / x.norm(dim=-1, keepdim=True) * HIDDEN**0.5 * m.w,
    "torch.norm": lambda m, x: m.w * (HIDDEN**0.5 * (x / torch.norm(x, 2, -1, True))),
    "torch.linalg.norm": lambda m, x: x / torch.linalg.norm(x, dim=-1, keepdim=True) * HIDDEN**0.5 * m.w,
    "vector_norm": lambda m, x: (
        ((y := x.float()) / torch.linalg.vector_norm(y, dim=(-1,), keepdim=True) * HIDDEN**0.5).to(x.dtype)
        * m.w
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spelling", OVER_LENGTH.values(), ids=OVER_LENGTH)
def test_a_vector_over_its_length_is_an_rms_norm_without_eps(spelling, dtype: torch.dtype) -> None:
    x, w = torch.randn(2, 5, HIDDEN, dtype=dtype), torch.randn(HIDDEN, dtype=dtype)
    graph = canonical(spelling, x, w=w, bound=BOUND if dtype is torch.float32 else 0.02)
    assert targets(graph) == {ops.rms_norm}
    assert the(graph, ops.rms_norm)[2:] == (0.0, False)


@pytest.mark.parametrize("length", [1e-12, 1.0, 1e12])
def test_a_vector_over_its_length_has_the_gradients_of_that_norm(length: float) -> None:
    x = (length * torch.randn(4, HIDDEN)).requires_grad_()
    wide, w, noise = x.detach().double().requires_grad_(), torch.randn(HIDDEN), torch.randn(4, HIDDEN)
    outs = ops.rms_norm(x, w, 0.0), wide / wide.norm(dim=-1, keepdim=True) * HIDDEN**0.5 * w
    grads = [
        torch.autograd.grad(out, at, noise.to(out.dtype))[0] for out, at in zip(outs, (x, wide), strict=True)
    ]
    assert error([outs[0], grads[0]], [outs[1], grads[1]]) <= BOUND
    nothing = torch.zeros(1, HIDDEN)  # 0 / 0
    assert (nothing / nothing.norm(dim=-1, keepdim=True)).isnan().all()
    assert ops.rms_norm(nothing, w, 0.0).isnan().all()


NOT_OVER_LENGTH = {
    "the sum of absolutes": lambda m, x: x / x.norm(1, dim=-1, keepdim=True) * HIDDEN**0.5,
    "of all": lambda m, x: x / x.norm() * HIDDEN**0.5,
    "of the length": lambda m, x: x / x.norm(dim=1, keepdim=True) * HIDDEN**0.5,
    "of something else": lambda m, x: x / (x + 1).norm(dim=-1, keepdim=True) * HIDDEN**0.5,
    "another factor": lambda m, x: x / x.norm(dim=-1, keepdim=True) * 2.0,
    "with an eps of its own": lambda m, x: x / (x.norm(dim=-1, keepdim=True) + 1e-3) * HIDDEN**0.5,
    "in fp16": lambda m, x: x.half() / x.half().norm(dim=-1, keepdim=True) * HIDDEN**0.5,
}


@pytest.mark.parametrize("spelling", NOT_OVER_LENGTH.values(), ids=NOT_OVER_LENGTH)
def test_not_a_vector_over_its_length(spelling) -> None:
    assert ops.rms_norm not in targets(canonical(spelling, torch.randn(2, 5, HIDDEN)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [0.0, 1e-15, 1e-9, 1e9])
def test_the_rms_norm_of_a_unit_vector_has_its_limits(length: float, dtype: torch.dtype) -> None:
    x = (length * F.normalize(torch.randn(4, HIDDEN), dim=-1)).to(dtype).requires_grad_()
    w, noise = torch.randn(HIDDEN, dtype=dtype), torch.randn(4, HIDDEN, dtype=dtype)
    outs = F.normalize(x, dim=-1) * HIDDEN**0.5 * w, ops.rms_norm(x, w, 1e-24 / HIDDEN)
    grads = [torch.autograd.grad(out, x, noise)[0] for out in outs]
    bound = 1e-5 if dtype is torch.float32 else 0.03
    for one, other in (outs, grads):
        assert (one - other).double().norm() <= bound * one.double().norm()


def test_a_normalized_zero_vector_stays_nan_in_fp16() -> None:
    x, w = torch.randn(4, HIDDEN).half(), torch.randn(HIDDEN).half()
    graph = canonical(NORMALIZE["x-transformers"][0], x, w=w)
    assert op_counts(graph) == {}


SCALED = {
    "layer norm": (lambda m, x: F.layer_norm(x, (HIDDEN,)) * m.w, (None, 1e-5, False)),
    "layer norm, around zero": (lambda m, x: F.layer_norm(x, (HIDDEN,)) * (m.w + 1.0), (None, 1e-5, True)),
    "layer norm, shifted": (lambda m, x: m.b + m.w * F.layer_norm(x, (HIDDEN,)), ("b", 1e-5, False)),
    "rms norm": (lambda m, x: F.rms_norm(x, (HIDDEN,), None, 1e-6) * m.w, (1e-6, False)),
    "rms norm, around zero": (lambda m, x: (1 + m.w) * F.rms_norm(x, (HIDDEN,), None, 1e-6), (1e-6, True)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("spelling", "rest"), SCALED.values(), ids=SCALED)
def test_a_factor_behind_a_norm_without_scale_is_its_scale(spelling, rest: tuple, dtype: torch.dtype) -> None:
    x, w, b = (torch.randn(*s, HIDDEN, dtype=dtype) for s in ((2, 5), (), ()))
    graph = canonical(spelling, x, w=w, b=b, bound=BOUND if dtype is torch.float32 else 0.02)
    (op,) = targets(graph)
    assert tuple(map(named, the(graph, op)[1:])) == ("w", *rest)


def test_a_cast_behind_a_norm_stays_if_it_widens() -> None:
    x, w = torch.randn(4, HIDDEN).bfloat16(), torch.randn(HIDDEN).bfloat16()
    graph = canonical(lambda m, x: RMS_NORMS["llama"](m, x).float(), x, w=w, bound=0.02)
    assert targets(graph) == {ops.rms_norm, ops.cast}


def test_layer_norm() -> None:
    x, w, b = torch.randn(2, 5, HIDDEN), torch.randn(HIDDEN), torch.randn(HIDDEN)
    for spelling, found in (
        (lambda m, x: F.layer_norm(x, (HIDDEN,), m.w, m.b, 1e-6), ("w", "b", 1e-6, False)),
        (lambda m, x: F.layer_norm(x, [HIDDEN]), (None, None, 1e-5, False)),
        (lambda m, x: torch.layer_norm(x, (HIDDEN,), m.w), ("w", None, 1e-5, False)),
        (lambda m, x: F.layer_norm(x, (HIDDEN,), 1 + m.w, m.b), ("w", "b", 1e-5, True)),
    ):
        args = the(canonical(spelling, x, w=w, b=b), ops.layer_norm)[1:]
        assert tuple(map(named, args)) == found


def test_not_a_layer_norm_of_the_last_dimension() -> None:
    x = torch.randn(2, 5, HIDDEN)
    for spelling in (
        lambda m, x: F.layer_norm(x, (5, HIDDEN), m.w),
        lambda m, x: F.layer_norm(x, x.shape[1:]),  # a node, where the length is symbolic
    ):
        assert targets(canonical(spelling, x, w=torch.randn(5, HIDDEN))) == {F.layer_norm}


def test_layer_norm_in_fp32() -> None:
    x, w, b = (torch.randn(*s, HIDDEN, dtype=torch.bfloat16) for s in ((2, 5), (), ()))
    graph = canonical(
        lambda m, x: F.layer_norm(x.float(), (HIDDEN,), m.w.float(), m.b.float()).type_as(x),
        x,
        w=w,
        b=b,
        bound=0.02,
    )
    assert targets(graph) == {ops.layer_norm}


def _centered(x: Tensor) -> Tensor:
    return x - torch.mean(x, -1, keepdim=True)


def _by_hand(x: Tensor, eps: float = 1e-6) -> Tensor:
    return _centered(x) * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + eps)


def _by_var_mean(m, x):
    variance, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)
    return m.w * (x - mean) * torch.rsqrt(variance + 1e-6) + m.b


def _cohere(m, x):
    dtype, x = x.dtype, x.to(torch.float32)
    mean = x.mean(-1, keepdim=True)
    x = (x - mean) * torch.rsqrt((x - mean).pow(2).mean(-1, keepdim=True) + 1e-6)
    return (m.w.to(torch.float32) * x).to(dtype)


WRITTEN_LAYER_NORMS = {
    "cohere": (_cohere, None),
    "torch.var_mean": (_by_var_mean, "b"),
    "variance": (lambda m, x: m.w * _by_hand(x) + m.b, "b"),
    "torch.var": (
        lambda m, x: m.w * _centered(x) / (torch.var(x, -1, correction=0, keepdim=True) + 1e-6).sqrt(),
        None,
    ),
    "squares": (
        lambda m, x: m.b + m.w * (d := _centered(x)) / (d.square().mean(-1, True) + 1e-6).sqrt(),
        "b",
    ),
    "product": (lambda m, x: (d := _centered(x)) * ((d * d).mean(-1, True) + 1e-6) ** -0.5 * m.w, None),
    "scaled first": (lambda m, x: (m.w * _centered(x)) * (x.var(-1, False, True) + 1e-6).rsqrt() + m.b, "b"),
    "sums": (
        lambda m, x: (
            m.w
            * (d := x - x.sum(-1, True) / HIDDEN)
            * torch.rsqrt((d * d).sum(-1, keepdim=True) / HIDDEN + 1e-6)
        ),
        None,
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("spelling", "bias"), WRITTEN_LAYER_NORMS.values(), ids=WRITTEN_LAYER_NORMS)
def test_layer_norm_written_out(spelling, bias: str | None, dtype: torch.dtype) -> None:
    x, w, b = (torch.randn(*s, HIDDEN, dtype=dtype) for s in ((2, 5), (), ()))
    graph = canonical(spelling, x, w=w, b=b, bound=BOUND if dtype is torch.float32 else 0.03)
    assert targets(graph) == {ops.layer_norm}
    assert tuple(map(named, the(graph, ops.layer_norm)[1:])) == ("w", bias, 1e-6, False)


NOT_LAYER_NORMS = {
    "annotated transformer": lambda m, x: m.w * _centered(x) / (x.std(-1, keepdim=True) + 1e-6) + m.b,
    "unbiased": lambda m, x: m.w * _centered(x) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-6),
    "another mean": lambda m, x: m.w * (x - x.mean(-2, True)) * torch.rsqrt(x.var(-1, False, True) + 1e-6),
    "not centered": lambda m, x: m.w * x * torch.rsqrt(x.var(-1, False, True) + 1e-6),
    "of all numbers": lambda m, x: m.w * (x - (pair := torch.var_mean(x))[1]) * torch.rsqrt(pair[0] + 1e-6),
    "in fp64": lambda m, x: F.layer_norm(x.double(), (HIDDEN,), m.w.double(), m.b.double()).to(x.dtype),
}


@pytest.mark.parametrize("spelling", NOT_LAYER_NORMS.values(), ids=NOT_LAYER_NORMS)
def test_not_a_layer_norm(spelling) -> None:
    parameters = {"w": torch.randn(HIDDEN), "b": torch.randn(HIDDEN)}
    assert op_counts(canonical(spelling, torch.randn(2, HIDDEN, HIDDEN), **parameters)) == {}


def test_casts_of_weights_that_change_nothing_hide_nothing() -> None:
    def cast(m, x):
        x = F.layer_norm(x.float(), (HIDDEN,), m.w.float(), m.b.float()).type(x.dtype)
        return F.linear(x, m.v.to(x.dtype), m.b.to(x.dtype))

    parameters = {"w": torch.randn(HIDDEN), "b": torch.randn(HIDDEN), "v": torch.randn(HIDDEN, HIDDEN)}
    graph = canonical(cast, torch.randn(2, 5, HIDDEN), **parameters)
    assert targets(graph) == {ops.layer_norm, ops.linear}
    assert named(the(graph, ops.linear)[1]) == "v"


# Activations

_TANH = math.sqrt(2 / math.pi)
GELUS_TANH = {
    "F.gelu": lambda m, x: F.gelu(x, approximate="tanh"),
    "gpt2": lambda m, x: 0.5 * x * (1.0 + torch.tanh(_TANH * (x + 0.044715 * torch.pow(x, 3.0)))),
    "fast": lambda m, x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
    "bloom": lambda m, x: x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))),
    "products": lambda m, x: (1 + torch.tanh((0.044715 * x * x * x + x) * _TANH)) * (x * 0.5),
    "halved": lambda m, x: x * (1 + torch.tanh(_TANH * (x + x**3 * 0.044715))) / 2,
}
GELUS = {
    "F.gelu": lambda m, x: F.gelu(x),
    "esm": lambda m, x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "bert": lambda m, x: 0.5 * (x * (torch.erf(x * 0.7071067811865475) + 1)),
    "erfc": lambda m, x: 0.5 * x * torch.erfc(-x / math.sqrt(2)),
    "erfc of a negative multiple": lambda m, x: x * 0.5 * torch.special.erfc(x * -math.sqrt(0.5)),
    "ndtr": lambda m, x: x * torch.special.ndtr(x),
}
OTHERS = {
    "quick_gelu": [lambda m, x: x * torch.sigmoid(1.702 * x), lambda m, x: (x * 1.702).sigmoid() * x],
    "silu": [
        lambda m, x: F.silu(x),
        lambda m, x: x * x.sigmoid(),
        lambda m, x: F.sigmoid(x) * x,
        lambda m, x: x * torch.special.expit(x),
        lambda m, x: x / (1 + torch.exp(-x)),
        lambda m, x: x * (1 / (1 + (-x).exp())),
    ],
    "sigmoid": [lambda m, x: 1 / (1.0 + torch.exp(-x)), lambda m, x: (torch.exp(-x) + 1).reciprocal()],
    "squared_relu": [
        lambda m, x: F.relu(x).square(),
        lambda m, x: torch.relu(x) ** 2,
        lambda m, x: (y := F.relu(x)) * y,
    ],
    "relu": [lambda m, x: F.relu(x), lambda m, x: torch.relu(x), lambda m, x: (x + 1).relu_()],
    "dropout": [lambda m, x: F.dropout(x, 0.1, True), lambda m, x: torch.dropout(x, 0.1, True)],
}
SPELLINGS = {("gelu_tanh", k): v for k, v in GELUS_TANH.items()} | {("gelu", k): v for k, v in GELUS.items()}
SPELLINGS |= {(word, str(i)): s for word, spellings in OTHERS.items() for i, s in enumerate(spellings)}


@pytest.mark.parametrize("root", [1.4142, 1.41421])
def test_a_constant_of_few_digits_is_precise_in_16_bits_only(root: float) -> None:
    """NVIDIA's BERT has 1.41421."""
    gelu = lambda m, x: x * 0.5 * (1.0 + torch.erf(x / root))  # noqa: E731
    assert op_counts(canonical(gelu, torch.randn(2, 5, HIDDEN))) == {}
    assert op_counts(canonical(gelu, torch.randn(2, 5, HIDDEN).bfloat16(), bound=0.01)) == {"gelu": 1}


@pytest.mark.parametrize(
    ("word", "spelling"), [(k[0], v) for k, v in SPELLINGS.items()], ids=map(" ".join, SPELLINGS)
)
def test_activation(word: str, spelling) -> None:
    graph = canonical(spelling, torch.randn(2, 5, HIDDEN))
    assert op_counts(graph) == {word: 1}
    assert not targets(graph) & {torch.mul, torch.tanh, torch.erf, torch.erfc}


NOT_ACTIVATIONS = {
    "the cube": lambda m, x: 0.5 * x * (1.0 + torch.tanh(_TANH * (x + 0.0447 * torch.pow(x, 3.0)))),
    "the square": lambda m, x: 0.5 * x * (1.0 + torch.tanh(_TANH * (x + 0.044715 * torch.pow(x, 2.0)))),
    "the root": lambda m, x: 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3.0)))),
    "the half": lambda m, x: 0.6 * x * (1.0 + torch.erf(x / math.sqrt(2))),
    "the sign": lambda m, x: 0.5 * x * (1.0 - torch.erf(x / math.sqrt(2))),
    "the input": lambda m, x: 0.5 * (x + 1) * (1.0 + torch.erf(x / math.sqrt(2))),
    "another denominator": lambda m, x: x / (2 + torch.exp(-x)),
    "the sign of the exponent": lambda m, x: x / (1 + torch.exp(x)),
    "the sign of erfc": lambda m, x: 0.5 * x * torch.erfc(x / math.sqrt(2)),
    "the input of ndtr": lambda m, x: x * torch.special.ndtr(2 * x),
    "not over root two": lambda m, x: 0.5 * x * (1.0 + torch.erf(x / 1.5)),
}


@pytest.mark.parametrize("spelling", NOT_ACTIVATIONS.values(), ids=NOT_ACTIVATIONS)
def test_not_an_activation(spelling) -> None:
    assert op_counts(canonical(spelling, torch.randn(2, 5, HIDDEN))) == {}


def test_glu_is_a_half_times_the_sigmoid_of_the_other() -> None:
    for spelling in (lambda m, x: F.glu(x), lambda m, x: F.glu(x, dim=2)):
        graph = canonical(spelling, torch.randn(2, 5, HIDDEN))
        assert op_counts(graph) == {"sigmoid": 1}
        assert F.glu not in targets(graph)
    assert F.glu in targets(canonical(lambda m, x: F.glu(x, 0), torch.randn(2, 5, HIDDEN)))


def test_gates_come_first() -> None:
    def gated(m, x):
        up, gate = (x @ m.w.T).chunk(2, -1)
        return up * F.silu(gate)

    graph = canonical(gated, torch.randn(2, 5, HIDDEN), w=torch.randn(16, HIDDEN))
    gate, up = the(graph, torch.mul)
    assert (gate.target, up.target, up.args[1:]) == (ops.silu, ops.columns, (0, 8))


SPLITS = {
    "the function": lambda x: torch.split(x, split_size_or_sections=4, dim=-1),
    "the function, all by name": lambda x: torch.split(tensor=x, split_size_or_sections=[4, 4], dim=2),
    "the method": lambda x: x.split(split_size=4, dim=-1),
    "the method, of sections": lambda x: x.split([4, 4], dim=-1),
    "a chunk": lambda x: torch.chunk(input=x, chunks=2, dim=-1),
    "a split in two": lambda x: x.tensor_split(2, dim=-1),
    "unbound": lambda x: x.unflatten(-1, (2, -1)).unbind(-2),
    "rows": lambda x: ((y := x.view(*x.shape[:-1], 2, 4))[..., 0, :], y[:, :, -1]),
    "selected": lambda x: [x.reshape(2, 5, 2, 4).select(-2, i) for i in range(2)],
}


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_pieces_are_columns_however_their_arguments_are_given(split) -> None:
    def gated(m, x):
        up, gate = split(x)
        return up * F.silu(gate)

    graph = canonical(gated, torch.randn(2, 5, 8))
    gate, up = the(graph, torch.mul)
    assert (gate.target, up.target, up.args[1:]) == (ops.silu, ops.columns, (0, 4))


NO_PIECES = {
    "every other": lambda x: x.view(2, 5, 4, 2).unbind(-1),
    "of the length": lambda x: x.view(2, 2, 5, 4).unbind(1),
    "parts of two lengths": lambda x: [part[..., :1] for part in x.tensor_split([2], -1)],
    "rows of another shape": lambda x: x.view(2, 2, 20).unbind(-2),
    "written in between": lambda x: (y := (x + 1).view(2, 5, 2, 4), y.mul_(2), y.unbind(-2))[-1],
}


@pytest.mark.parametrize("split", NO_PIECES.values(), ids=NO_PIECES)
def test_splits_of_other_dimensions_stay(split) -> None:
    """canonical() compares; columns of something else would be other numbers."""
    graph = canonical(lambda m, x: torch.mul(*split(x)), torch.randn(2, 5, 8))
    assert ops.columns not in targets(graph) or "tensor_split" in targets(graph)


# Rotary

QUERY = torch.randn(BATCH, HEADS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


def _rotate_half(x: Tensor) -> Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def _rotate_chunks(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def test_rope() -> None:
    cos, sin = torch.randn(2, 1, 1, LENGTH, WIDTH)
    for spelling in (
        lambda m, x, cos, sin: x * cos + _rotate_half(x) * sin,
        lambda m, x, cos, sin: sin * _rotate_chunks(x) + cos * x,
    ):
        assert targets(canonical(spelling, QUERY, cos, sin)) == {ops.rope}


def test_not_rope() -> None:
    cos, sin = torch.randn(2, 1, 1, LENGTH, WIDTH)
    for spelling in (
        lambda m, x, cos, sin: x * cos - _rotate_half(x) * sin,
        lambda m, x, cos, sin: x * cos + torch.cat((x[..., 4:], -x[..., :4]), -1) * sin,
        lambda m, x, cos, sin: x * cos + torch.cat((-x[..., 6:], x[..., :6]), -1) * sin,
        lambda m, x, cos, sin: x * cos + _rotate_half(x + 1) * sin,
    ):
        assert ops.rope not in targets(canonical(spelling, QUERY, cos, sin))


def _halves(combine):
    """A rotation of each half by itself: `combine(first, second, cos, sin)` returns both."""
    return lambda m, x, cos, sin: torch.cat(combine(*x.chunk(2, -1), cos, sin), -1)


HALVES = {
    "plus": lambda a, b, cos, sin: (a * cos - b * sin, b * cos + a * sin),
    "minus": lambda a, b, cos, sin: (a * cos + b * sin, a * (-sin) + b * cos),
    "any order": lambda a, b, cos, sin: (-(sin * b) + cos * a, sin * a - (-b) * cos),
    "a sine of minus the angle": lambda a, b, cos, sin: (
        cos.cos() * a - b * (-cos).sin(),
        b * cos.cos() + a * (-cos).sin(),
    ),
    "a cosine in the place of the sine": lambda a, b, cos, sin: (
        a * sin.cos() + b * cos.cos(),
        b * sin.cos() - a * cos.cos(),
    ),
    "of angles that are written to": lambda a, b, cos, sin: (
        (angles := cos * 2),
        (cosines := angles.cos()),
        (sines := angles.sin()),
        angles.mul_(2),
        (a * cosines + b * sines, b * cosines - a * sines),
    )[-1],
}


@pytest.mark.parametrize("combine", HALVES.values(), ids=HALVES)
def test_rope_half_by_half(combine) -> None:
    cos, sin = torch.randn(2, 1, 1, LENGTH, WIDTH // 2)
    assert ops.rope in targets(canonical(_halves(combine), QUERY, cos, sin))


NOT_HALVES = {
    "a reflection": lambda a, b, cos, sin: (a * cos + b * sin, b * cos + a * sin),
    "minus both": lambda a, b, cos, sin: (-(a * cos - b * sin), -(b * cos + a * sin)),
    "halves that are swapped": lambda a, b, cos, sin: (b * cos - a * sin, a * cos + b * sin),
    "two cosines": lambda a, b, cos, sin: (a * cos - b * sin, b * (cos + 1) + a * sin),
    "one half twice": lambda a, b, cos, sin: (a * cos - a * sin, b * cos + b * sin),
    "a bias": lambda a, b, cos, sin: (a * cos - b * sin + 1, b * cos + a * sin),
    "a sum with a factor": lambda a, b, cos, sin: (a * cos - b * sin, torch.add(b * cos, a * sin, alpha=2)),
    "a difference with a factor": lambda a, b, cos, sin: (
        torch.sub(a * cos, b * sin, alpha=2),
        b * cos + a * sin,
    ),
    "a summand more": lambda a, b, cos, sin: (a * cos - b * sin + a * sin, b * cos + a * sin),
}


@pytest.mark.parametrize("combine", NOT_HALVES.values(), ids=NOT_HALVES)
def test_not_rope_half_by_half(combine) -> None:
    cos, sin = torch.randn(2, 1, 1, LENGTH, WIDTH // 2)
    assert ops.rope not in targets(canonical(_halves(combine), QUERY, cos, sin))


LAYOUTS = {
    "sections": lambda part: torch.cat([m[i] for i, m in enumerate(part.split([1, 2, 5], -1))], -1),
    "of neighbors": lambda part: torch.stack((part[0], part[1]), -1).flatten(-2)[..., 2:10],
    "scaled between": lambda part: torch.cat((part[0, ..., :4], part[1, ..., 4:]), -1).mul(1.5).float(),
    "unsqueezed between": lambda part: torch.cat((part[0][:, None, :, :4], part[2][:, None, :, :4]), -1)[
        :, 0
    ],
    "moved": lambda part: part.transpose(0, 1)[:, 1].repeat_interleave(2, -1)[..., :8],
}


@pytest.mark.parametrize("join", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_of_cosines_become_layouts_of_angles(join) -> None:
    def rope(m, x, angles, sign=1):
        cos, sin = join(angles.cos())[:, None], join(angles.sin())[:, None]
        return x * cos + _rotate_half(x) * (sin if sign > 0 else -sin)

    angles = torch.randn(3, BATCH, LENGTH, WIDTH)
    for sign in (1, -1):
        graph = canonical(lambda m, x, angles, sign=sign: rope(m, x, angles, sign), QUERY, angles)
        _, cos, sin, *_ = the(graph, ops.rope)
        turns = {node.target: node.args[0] for node in graph.nodes if node.target in (torch.cos, torch.sin)}
        assert turns.keys() == {torch.cos, torch.sin}
        assert turns[torch.cos] is turns[torch.sin]
        for node in (cos, sin):
            while node.target not in turns:
                assert node.target in (torch.unsqueeze, torch.mul, ops.cast)
                node = node.args[0]


def test_layouts_of_other_values_stay() -> None:
    def rope(m, x, angles):
        cos, sin = angles.cos(), angles.sin()
        mixed = torch.cat((cos[0, ..., :4], sin[0, ..., 4:]), -1)[:, None]
        return x * mixed + _rotate_half(x) * torch.cat((sin[0, ..., :4], sin[1, ..., 4:]), -1)[:, None]

    graph = canonical(rope, QUERY, torch.randn(3, BATCH, LENGTH, WIDTH))
    _, cos, sin, *_ = the(graph, ops.rope)
    assert [node.args[0].target for node in (cos, sin)] == [torch.cat, torch.cat]


def test_a_sine_that_is_negated_twice_keeps_its_sign() -> None:
    def rope(m, x, angles):
        return x * angles.cos() + _rotate_half(x) * -((-angles.sin()).float() * 1.0)

    canonical(rope, QUERY, torch.randn(LENGTH, WIDTH))


ARGUMENTS = {
    "add, with a factor": lambda m, x, y: torch.add(x, y, alpha=2),
    "sub, with a factor": lambda m, x, y: torch.sub(x, y, alpha=2),
    "div, rounded": lambda m, x, y: torch.div(x, y, rounding_mode="floor"),
    "var, with two fewer": lambda m, x, y: torch.var(x, -1, correction=2),
    "hardtanh": lambda m, x, y: F.hardtanh(x, -0.5, 0.25),
    "addcmul": lambda m, x, y: torch.addcmul(x, y, y),
    "addcmul, with a factor": lambda m, x, y: torch.addcmul(x, y, y, value=2),
    "baddbmm, with factors": lambda m, x, y: torch.baddbmm(x, x @ y.mT, y, beta=0.5, alpha=2.0),
    "an einsum of one vector for each batch": lambda m, x, y: torch.einsum("bk,bkn->bn", x[..., 0], y),
    "a softmax of a narrower difference": lambda m, x, y: (x - x.amax(-1, True)).bfloat16().softmax(-1),
}


@pytest.mark.parametrize("call", ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_that_change_the_result_are_not_lost(call) -> None:
    canonical(call, *torch.randn(2, 3, LENGTH, 8))


WITHOUT_A_FORM = {
    "add, with a factor": (ARGUMENTS["add, with a factor"], torch.add),
    "div, rounded": (ARGUMENTS["div, rounded"], torch.div),
    "var, with two fewer": (ARGUMENTS["var, with two fewer"], torch.var),
    "sum, in another dtype": (lambda m, x, y: torch.sum(x, -1, dtype=torch.float64), torch.sum),
    "max, of two tensors": (lambda m, x, y: torch.max(x, y), torch.max),
}


@pytest.mark.parametrize(("call", "target"), WITHOUT_A_FORM.values(), ids=WITHOUT_A_FORM)
def test_a_call_without_a_form_has_no_canonical_target(call, target) -> None:
    """Readers of canonical calls know what each position means, and read no names."""
    graph = canonical(call, *torch.randn(2, 3, LENGTH, 8))
    assert target not in targets(graph)
    assert target.__name__ in map(called, graph.nodes)


ALIASES = {
    "mean, by an axis": (lambda m, x, y: x.mean(axis=-1, keepdims=True), torch.mean),
    "cat, by an axis": (lambda m, x, y: torch.cat((x, y), axis=-1), torch.cat),
    "softmax, by an axis": (lambda m, x, y: torch.softmax(x, axis=-1), torch.softmax),
    "multiply": (lambda m, x, y: torch.multiply(x, y), torch.mul),
    "subtract": (lambda m, x, y: torch.subtract(x, y), torch.sub),
    "divide": (lambda m, x, y: torch.divide(x, y), torch.div),
    "true_divide": (lambda m, x, y: torch.true_divide(x, y), torch.div),
    "clip": (lambda m, x, y: torch.clip(x, -1.0, 1.0), torch.clamp),
    "mm": (lambda m, x, y: torch.mm(x[0], y[0].mT), torch.matmul),
    "concat": (lambda m, x, y: torch.concat((x, y)), torch.cat),
    "swapaxes": (lambda m, x, y: torch.swapaxes(x, 0, 1), torch.transpose),
    "swapdims": (lambda m, x, y: torch.swapdims(x, 0, 1), torch.transpose),
    "bitwise_not": (lambda m, x, y: torch.bitwise_not(x > y), torch.logical_not),
}


@pytest.mark.parametrize(("call", "target"), ALIASES.values(), ids=ALIASES)
def test_aliases_of_a_function_have_one_form(call, target) -> None:
    assert target in targets(canonical(call, *torch.randn(2, 3, LENGTH, 8)))


def test_an_index_of_several_nones_is_an_unsqueeze_for_each() -> None:
    for index in (
        lambda x: x[None, None],
        lambda x: x[None, :, None],
        lambda x: x[None, ..., None, :],
        lambda x: x[None, :3, None, 2:4],
        lambda x: x[..., None, None],
    ):
        graph = canonical(lambda m, x, index=index: index(x) * 2, torch.randn(5, 8))
        assert torch.unsqueeze in targets(graph)


# Noise and writes in place


def test_noise_goes() -> None:
    def noisy(m, x):
        x = x.to(x.dtype).mT.contiguous().contiguous().view(10) + 0
        x = F.dropout(x * 1.0, 0.0, True).view(x.shape).expand(x.shape).float()
        return F.dropout(x, 0.5, False).reshape(5, 2).reshape(x.shape)

    graph = canonical(noisy, torch.randn(2, 5))
    assert targets(graph) == {torch.t, torch.reshape}


def test_transposes_that_cancel_are_noise() -> None:
    x = torch.randn(2, 5, HIDDEN)
    assert targets(canonical(lambda m, x: x.mT.permute(0, 2, 1).relu(), x)) == {ops.relu}
    assert targets(canonical(lambda m, x: x[0].t().T.relu(), x)) == {operator.getitem, ops.relu}
    assert torch.transpose in targets(canonical(lambda m, x: x.mT.transpose(0, 1).relu(), x))
    written = canonical(lambda m, x: (y := x * 2).mT.mul_(3).mT.relu() + y, x)
    assert targets(written) >= {"mul_"} or torch.transpose in targets(written)


def test_an_empty_cache_and_a_whole_slice_are_noise() -> None:
    empty = torch.tensor([])
    x = torch.randn(2, 5, HIDDEN)
    graph = canonical(lambda m, x, e: torch.cat((e, x), -2)[:, 0:, :].relu(), x, empty)
    assert targets(graph) == {ops.relu}
    graph = canonical(lambda m, x: torch.cat((x[:, :2], x), -2).relu(), x)
    assert torch.cat in targets(graph)


def test_expand_before_broadcasting_is_removed() -> None:
    x, row, number = torch.randn(2, 5), torch.randn(5), torch.tensor(2.0, dtype=torch.float64)
    assert targets(canonical(lambda m, x, row: x + row.expand_as(x), x, row)) == {torch.add}
    assert targets(canonical(lambda m, x, row: row.expand(2, -1) * x, x, row)) == {torch.mul}
    # without another operand of that shape, or where the sum is in fp64 for it alone
    for spelling, other in (
        (lambda m, x, row: row.expand_as(x) + row, row),
        (lambda m, x, row: row.expand_as(x), row),
        (lambda m, x, number: x + number.expand_as(x), number),
    ):
        found = targets(canonical(spelling, x, other))
        assert found & {torch.Tensor.expand, torch.Tensor.expand_as}


def test_operations_with_an_effect_stay() -> None:
    graph = canonical(lambda m, x: x[:, :] * F.dropout(x, 0.5, True), torch.randn(2, 5))
    assert targets(graph) == {ops.dropout, torch.mul}
    integers = torch.arange(6)
    assert torch.mul in targets(canonical(lambda m, x: x * 1.0, integers))
    assert torch.reshape in targets(canonical(lambda m, x: x.reshape(2, 3), torch.randn(6)))


def test_random_numbers_are_told_by_the_whole_name() -> None:
    drawing = (F.dropout2d, F.feature_alpha_dropout, torch.rrelu, torch.randn_like, torch.Tensor.random_)
    others = F.normalize, F.poisson_nll_loss
    assert all(is_random(fx.Graph().call_function(function)) for function in drawing)
    assert not any(is_random(fx.Graph().call_function(function)) for function in others)


def _written_base(m, x):
    y = x + 1
    y.view(-1).mul_(2)
    return y


def _written_view(m, x):
    y = x + 1
    first = y[0]
    y.mul_(2)
    return first * y


def _written_copy(m, x):
    y = x + 1
    z = y.t().contiguous()  # a copy here, which it need not be
    y.mul_(2)
    return z.t() + y


def _read_before(m, x):
    y = x + 1
    z = y * 3
    y.mul_(2)
    return y + z


def _accumulated(m, x):
    y = x + 1
    y += x
    y *= 2
    y.sub_(1)
    return F.relu(y, inplace=True)


def _set(m, x):
    y = x + 1
    y[0] = 0
    return y * 2


def _cached(m, x):
    m.cache[:, :2] = x[:, :2]
    return m.cache[:, :4] * x[:, :4]


def _written_through(view):
    """A write to what `view` hands out, while nothing but the name of the call says whether that is y."""

    def function(m, x):
        y = x + 1
        view(y).mul_(2)
        return y

    return function


def _put(m, x):
    y = torch.zeros(5) + 1
    y[torch.arange(2)] = x[0, :2]
    return y * 2


def _put_into_a_row(m, x):
    y = x + 1
    y[0][torch.arange(2)] = x[0, :2]
    return y * 2


# Who implements it returns the argument, which neither the schema nor the fake says.
_LIBRARY = torch.library.Library("te_transform_tests", "FRAGMENT")
_LIBRARY.define("same(Tensor x) -> Tensor")
_LIBRARY.impl("same", lambda x: x, "CPU")
_LIBRARY.impl("same", torch.empty_like, "Meta")


@pytest.mark.parametrize(
    ("function", "stays"),
    [
        (_written_base, True),
        (_written_through(torch.atleast_3d), True),
        (_written_through(lambda y: torch.einsum("ij->ji", y)), True),
        (_written_through(lambda y: torch.broadcast_tensors(y, y[:1])[0]), True),
        (_written_through(lambda y: F.alpha_dropout(y, 0.1, False)), True),
        (_written_through(lambda y: torch.ops.aten.dropout(y, 0.1, False)), True),
        (_written_through(lambda y: torch.ops.aten.dropout.default(y, 0.1, False)), True),
        (_written_through(lambda y: torch.ops.te_transform_tests.same(y)), True),
        (_put, False),
        (_put_into_a_row, True),
        (_written_view, True),
        (_written_copy, True),
        (_read_before, False),
        (_accumulated, False),
        (_set, True),
        (_cached, True),
    ],
)
def test_writes_in_place_become_values_only_unseen(function, stays: bool) -> None:
    graph = canonical(function, torch.randn(2, 5), cache=torch.zeros(2, 5))
    names = {getattr(target, "__name__", target) for target in targets(graph)}
    assert any(name in names for name in ("mul_", "setitem", "index_put_")) is stays


def _sections(m, x):
    """As Qwen 3 VL: columns of other rows are written into the first row."""
    both = x.cos() * 1.5
    first = both[0]
    for row in (1, 2):
        first[..., row:5:3] = both[row, ..., row:5:3]
    return first * both[1]


def _one_row(write, x):
    """What is read after `write(first, both)`, in which both is [3, 6] and first its first row."""
    both = x.sin()
    first = both[0]
    read = write(first, both)
    return first + (0 if read is None else read)


def _columns(first, values, at=slice(2)):
    first[..., at] = values


COLUMNS = {
    "of other rows": (_sections, False),
    "of all columns": (lambda f, b: _columns(f, b[1], slice(None)), False),
    "another row is read": (lambda f, b: (_columns(f, b[1, :2]), b[2])[1], False),
    "a row is read that may be the same": (lambda f, b: (_columns(f, b[1, :2]), b[-1])[1], True),
    "the whole is read": (lambda f, b: (_columns(f, b[1, :2]), b)[1], True),
    "a view is read": (lambda f, b: ((v := f[1:]), _columns(f, b[1, :2]), v.sum())[-1], True),
    "one value for all": (lambda f, b: _columns(f, b[1, :1]), True),
    "a number": (lambda f, b: _columns(f, 0.5), True),
    "another dtype": (lambda f, b: _columns(f, b[1, :2].double()), True),
    "rows": (lambda f, b: b.__setitem__((slice(1), ...), b[1:2]), True),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_of_cosines_and_sines_are_not_written_to(name: str) -> None:
    function, stays = COLUMNS[name]
    whole = function if function is _sections else lambda m, x: _one_row(function, x)
    graph = canonical(whole, torch.randn(3, 6))
    assert (operator.setitem in targets(graph)) is stays
    assert (torch.slice_scatter in targets(graph)) is not stays


def test_cosines_that_need_gradients_are_written_to() -> None:
    """The backward of the original may raise, and so has to that of the copy."""
    model = written(lambda m, x: _sections(m, x * m.w), w=lambda: torch.nn.Parameter(torch.ones(6)))()
    (captured,) = capture(model, (torch.randn(3, 6),))
    assert operator.setitem in targets(canonicalize(captured.module.graph))


@torch.library.custom_op("te_transform_tests::double", mutates_args={"y"})
def double(x: Tensor, y: Tensor) -> None:
    y.mul_(2 * x[0, 0] / x[0, 0])


WRITES = {
    "where a tensor of one number says": lambda y, x, place: y[place].mul_(2),
    "by an op that says which argument": lambda y, x, place: torch.ops.te_transform_tests.double.default(
        x, y
    ),
    "by an op": lambda y, x, place: torch.ops.te_transform_tests.double(x, y),
    "to two tensors": lambda y, x, place: torch.topk(x, 2, out=(y, torch.empty(2, 2, dtype=torch.long))),
}


@pytest.mark.parametrize("name", WRITES)
def test_nothing_moves_over_a_write_to_a_later_argument(name: str) -> None:
    def read_before(m, x, place):
        y = x[:, :2] + 1
        z = F.layer_norm(y, (2,))
        WRITES[name](y, x, place)
        return F.linear(z, m.w)

    graph = canonical(read_before, torch.randn(2, 5), torch.tensor(1), w=torch.randn(2, 2))
    regions = {node.target: node.meta["region"] for node in graph.nodes}
    assert regions[ops.layer_norm] != regions[ops.linear]


def test_a_word_does_not_move_over_a_write() -> None:
    def written_between(m, x):
        y = x + 1
        gate = torch.sigmoid(y)
        view = y[0]
        y.mul_(2)
        return gate * y + view

    canonical(written_between, torch.randn(2, 5))


def test_nothing_moves_over_a_write() -> None:
    def read_before(m, x):
        y = x + m.b  # autograd saves it for the norm
        z = F.layer_norm(y, (HIDDEN,))
        y += x
        return F.linear(z, m.w) + y

    x, w = torch.randn(2, 5, HIDDEN), torch.randn(HIDDEN, HIDDEN)
    graph = canonical(read_before, x, w=w, b=torch.randn(HIDDEN))
    regions = {node.target: node.meta["region"] for node in graph.nodes}
    assert regions[ops.layer_norm] != regions[ops.linear]
    apart = canonical(lambda m, x: (x @ m.w).add_(1) @ m.w, x, w=w)
    assert {node.meta["region"] for node in apart.nodes} == {0}


def normalized(y: Tensor) -> Tensor:
    y /= y.sum(-1, keepdim=True)
    return y


def of_chosen(y: Tensor) -> Tensor:
    """Return the sum of the chosen values, divided in place, as routers of mixtures do."""
    chosen = y.gather(-1, y.topk(2, -1).indices)
    chosen /= chosen.sum(-1, keepdim=True) + 1e-20
    return chosen.sum(-1, keepdim=True)


def added(y: Tensor) -> Tensor:
    less = y - 2
    return y.add_(less, alpha=2)


def of_half(y: Tensor) -> Tensor:
    half = (y - 1).half() - 1
    half /= y.sum()  # rounded to half, and not float32 like the quotient
    return half.float() + half.sum()


def seen_by_a_view(y: Tensor) -> Tensor:
    first = y[0]
    y /= y.sum(-1, keepdim=True)
    return y + first


def saved_as_input(y: Tensor) -> Tensor:
    y /= y.square().sum(-1, keepdim=True)
    return y


def saved_as_result(y: Tensor) -> Tensor:
    weights = y.sigmoid()
    weights /= weights.sum(-1, keepdim=True)
    return weights


ARITHMETIC = (normalized, of_chosen, added, of_half, seen_by_a_view, saved_as_input, saved_as_result)


@pytest.mark.parametrize("arithmetic", ARITHMETIC, ids=lambda function: function.__name__)
def test_arithmetic_in_place_has_a_new_result_if_only_that_is_read_later(
    arithmetic: Callable[[Tensor], Tensor],
) -> None:
    """A read before the write, such as the sum of the weights, keeps nothing from moving past it."""

    def forward(m, x, needs_gradient):
        z = F.layer_norm(x, (HIDDEN,))
        y = arithmetic(x + (m.b if needs_gradient else 1))
        return F.linear(z, m.w) + y

    for needs_gradient in (True, False):
        weights = {"w": torch.randn(HIDDEN, HIDDEN), "b": torch.rand(HIDDEN)}
        graph = canonical(
            partial(forward, needs_gradient=needs_gradient), torch.rand(2, 5, HIDDEN), **weights
        )
        regions = {node.meta["region"] for node in graph.nodes if node.target in (ops.layer_norm, ops.linear)}
        is_saved = needs_gradient and arithmetic in (saved_as_input, saved_as_result)
        assert len(regions) == (2 if is_saved or arithmetic is seen_by_a_view else 1)


@pytest.mark.parametrize("arithmetic", [saved_as_input, saved_as_result])
def test_a_backward_that_raises_after_a_write_still_raises(arithmetic: Callable[[Tensor], Tensor]) -> None:
    model = written(lambda m, x: m.linear(arithmetic(m.linear(x) + 1)), linear=linear())()
    for each in (model, te_transform.convert(model, X)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            each(X).sum().backward()
