"""Whatever linear is left: in plain PyTorch it stays what it was, in a recipe its product runs in FP8."""

from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import remove_parametrizations

import te_transform
from te_transform.backends import limits
from tests.rules.tables import H, Make, X, fused, linear, reasons, sequential, written
from tests.zoo import seeded


class Conv1D(nn.Module):
    """GPT-2's: its weight is stored [in, out]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(H, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, H), self.weight).view(*x.shape[:-1], 8)


def banked(function) -> Make:
    """A model with the weights of three linears in one parameter, as modded-nanogpt has q, k and v."""
    return written(function, bank=lambda: nn.Parameter(torch.randn(3, H, H)))


def added(function) -> Make:
    """A model with a weight that is stored [in, out], and a bias."""
    return written(
        function, w=lambda: nn.Parameter(torch.randn(H, H)), b=lambda: nn.Parameter(torch.randn(H))
    )


FLATTENED = banked(lambda m, x: F.linear(x, m.bank.flatten(end_dim=1)))
OUTPUTS_FIRST = banked(lambda m, x: torch.einsum("...d,hkd->...hk", x, m.bank))
INPUTS_FIRST = banked(lambda m, x: torch.einsum("...k,khd->...hd", x[..., :3], m.bank))
FUSES = {
    "a sum with factors of one": added(lambda m, x: torch.addmm(m.b, x[0], m.w, beta=1, alpha=1.0)),
    "a sum with a computed bias": added(lambda m, x: torch.addmm(m.b.exp(), x[0], m.w)),
    "a tensordot": banked(lambda m, x: torch.tensordot(x, m.bank.flatten(end_dim=1), dims=([2], [1]))),
    "a tensordot of the last dimensions": added(lambda m, x: torch.tensordot(x, m.w, 1)),
    "a bank that is flattened": FLATTENED,
    "an einsum with a bank": OUTPUTS_FIRST,
    "an einsum with a bank whose inputs come first": INPUTS_FIRST,
    "a bank in another view": banked(lambda m, x: F.linear(x, m.bank.view(-1, H).type_as(x))),
    "a product with a bank": banked(lambda m, x: x @ m.bank.reshape(3 * H, H).T),
    "a parameter of another shape": written(
        lambda m, x: F.linear(x, m.inner.weight.squeeze(-1)), inner=lambda: nn.Conv1d(H, H, 1)
    ),
    "a Linear": sequential(linear(), nn.Tanh),
    "without a bias": sequential(linear(bias=False), nn.Tanh),
    "a product": written(lambda m, x: x @ m.inner.weight.T + m.inner.bias, inner=linear()),
    "a Conv1D": Conv1D,
    "a weight that is cast": written(lambda m, x: F.linear(x, m.inner.weight.to(x.dtype)), inner=linear()),
    "a bias that is computed": written(
        lambda m, x: F.linear(x, m.inner.weight, m.inner.bias.exp()), inner=linear()
    ),
    "a function": written(lambda m, x: m.inner(x), inner=lambda: nn.Sequential(linear()())),
}


@pytest.mark.parametrize("name", FUSES)
def test_fuses(name: str) -> None:
    assert fused(FUSES[name]).counts == {"linear": 1}


def test_one_called_twice_is_two_products() -> None:
    assert fused(written(lambda m, x: m.inner(m.inner(x)), inner=linear())).counts == {"linear": 2}


def test_a_bank_runs_in_a_recipe_as_a_linear_does(te: ModuleType) -> None:
    bank = seeded(banked(lambda m, x: torch.tanh(F.linear(x, m.bank.flatten(end_dim=1))))).bfloat16()
    whole = nn.Parameter(bank.bank.detach().flatten(end_dim=1).clone())
    plain = written(lambda m, x: torch.tanh(F.linear(x, m.whole)), whole=lambda: whole)()
    x, found = torch.randn(16, H, dtype=torch.bfloat16), []
    for model in (bank, plain):
        converted = te_transform.convert(model, x, backend="te", recipe="fp8-delayed")
        te_transform.report(converted).expect(linear=1)
        with limits.ignore_size_limits:
            for _ in range(2):  # the first call has no scales yet
                out = converted(x)
                out.sum().backward()
        found.append((out, next(converted.parameters()).grad.view(3 * H, H)))
    assert torch.equal(*(out for out, _ in found))
    assert torch.equal(*(grad for _, grad in found))


@pytest.mark.parametrize("make", [FLATTENED, OUTPUTS_FIRST, INPUTS_FIRST])
def test_gradients_of_a_bank_are_summed_up_in_its_shape(make: Make, te: ModuleType) -> None:
    model = seeded(sequential(make, nn.Tanh))
    converted, x = te_transform.convert(model, X, backend="te"), X.flatten(0, 1)
    with limits.ignore_size_limits, te_transform.accumulate(converted, steps=2):
        for _ in range(2):
            converted(x).sum().backward()
    (2 * model(x).sum()).backward()
    torch.testing.assert_close(converted[0].bank.grad, model[0].bank.grad)


class Int8(nn.Module):
    """A weight of bytes, with a scale for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Buffer(torch.randint(-9, 9, (8, H), dtype=torch.int8))
        self.scale = nn.Parameter(torch.rand(8, 1))

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) * self.scale)


def with_buffer() -> nn.Module:
    model = nn.Sequential(linear()(), linear()())
    weight = model[1].weight.detach()
    del model[1].weight
    model[1].weight = nn.Buffer(weight)
    return model


def complex_numbers() -> nn.Module:
    return written(
        lambda m, x: m.inner(x.to(torch.complex64)).real, inner=lambda: nn.Linear(H, H, dtype=torch.complex64)
    )()


def untrained() -> nn.Module:
    model = sequential(linear(bias=False), nn.Tanh, linear())()
    model[0].weight.requires_grad_(False)
    return model


def wide() -> nn.Module:
    return nn.Linear(H, H, bias=False, dtype=torch.float64)


COMPUTED = (
    "the linear's weight is computed at every call, but kernels need a parameter: compute it once and store "
    "it, if you can retrain"
)
STACK = (
    "the product has a stack of matrices [3, 16, 16], one for each head, group or token, but the fused "
    "linear has one matrix: no kernel supports several"
)
CHANNELS = (
    "the convolution has a kernel of one element, but the fused linear reads channels from the last "
    "dimension: call F.linear on [..., length, channels] with weight.flatten(1)"
)
REFUSES = {
    "a product with a factor": (added(lambda m, x: torch.addmm(m.b, x[0], m.w, alpha=2.0)), COMPUTED),
    "a product with a factor, without its bias": (
        added(lambda m, x: torch.addmm(m.b, x[0], m.w, beta=0, alpha=2.0)),
        COMPUTED,
    ),
    "a sum with a bias for each row": (
        added(lambda m, x: torch.addmm(x[1], x[0], m.w)),
        "the linear's bias is [5, 16], but kernels need one element per row (16): add it after the product",
    ),
    "a matrix for each head": (
        written(
            lambda m, x: torch.einsum("bthd,hde->bthe", x.unflatten(-1, (4, 4)), m.w),
            w=lambda: nn.Parameter(torch.randn(4, 4, 4)),
        ),
        "the product has a stack of matrices [4, 4, 4], one for each head, group or token, but the fused "
        "linear has one matrix: no kernel supports several",
    ),
    "a parameter on the left": (
        added(lambda m, x: m.w @ x.mT),
        "the product has its parameter on the left, but the fused linear needs it on the right: call "
        "F.linear(x.mT, weight).mT",
    ),
    "a matrix for each token": (
        banked(lambda m, x: torch.einsum("bti,btij->btj", x, m.bank[x[..., 0].long() % 3])),
        STACK,
    ),
    "a product with a matrix for each token": (
        banked(lambda m, x: m.bank.index_select(0, x[0, :, 0].long() % 3) @ x[..., None]),
        STACK,
    ),
    "a matrix that is looked up for each token": (
        banked(
            lambda m, x: (
                x[..., None, :]
                @ F.embedding(weight=m.bank.flatten(1), input=x[..., 0].long() % 3).unflatten(-1, (H, H))
            )
        ),
        STACK,
    ),
    "a convolution of one pixel": (
        written(lambda m, x: m.inner(x.mT.unflatten(-1, (1, -1))), inner=lambda: nn.Conv2d(H, H, 1)),
        CHANNELS,
    ),
    "a convolution of one element": (
        written(lambda m, x: m.inner(x.mT), inner=lambda: nn.Conv1d(H, H, 1)),
        CHANNELS,
    ),
    "a convolution of a norm": (
        written(lambda m, x: m.inner(F.layer_norm(x, (H,)).mT), inner=lambda: nn.Conv1d(H, H, 3)),
        "the conv1d of a norm has a kernel of several elements, but the fused linear multiplies single rows: "
        "no kernel supports several",
    ),
    "a norm and computed matrices": (
        written(
            lambda m, x: torch.bmm(F.layer_norm(x, (H,)), m.inner(x.mean(1)).unflatten(-1, (H, 4))),
            inner=linear(H, 4 * H),
        ),
        "the bmm multiplies a norm by a computed matrix, but the fused linear needs a parameter: compute the "
        "matrix once and store it, if you can retrain",
    ),
    "computed": (
        written(lambda m, x: F.linear(x, m.inner.weight * 2), inner=linear()),
        COMPUTED,
    ),
    "rows of a parameter": (
        written(lambda m, x: F.linear(x, m.inner.weight.chunk(2)[1]), inner=linear()),
        "the linear's weight [8, 16] is a view of a parameter [16, 16], but kernels need a whole parameter: "
        "store it as a parameter of its own",
    ),
    "a part of a bank": (
        banked(lambda m, x: F.linear(x, m.bank[:2].flatten(end_dim=1))),
        "the linear's weight [32, 16] is a view of a parameter [3, 16, 16], but kernels need a whole "
        "parameter: store it as a parameter of its own",
    ),
    "an einsum with the inputs in the middle": (
        banked(lambda m, x: torch.einsum("bnd,hdk->bnhk", x, m.bank)),
        "the linear's weight [48, 16] is a view of a parameter [3, 16, 16], but kernels need a whole "
        "parameter: store it as a parameter of its own",
    ),
    "one of a bank": (
        banked(lambda m, x: F.linear(x, m.bank[1])),
        "the linear's weight [16, 16] is a view of a parameter [3, 16, 16], but kernels need a whole "
        "parameter: store it as a parameter of its own",
    ),
    "a bank that is cast": (
        banked(lambda m, x: F.linear(x.double(), m.bank.double().flatten(end_dim=1))),
        "the linear's weight is cast to float64 at every call, but kernels need a parameter: store it in "
        "float64",
    ),
    "int8": (
        Int8,
        COMPUTED,
    ),
    "cast": (
        written(lambda m, x: F.linear(x.double(), m.inner.weight.double()), inner=linear(bias=False)),
        "the linear's weight is cast to float64 at every call, but kernels need a parameter: store it in "
        "float64",
    ),
    "a bias for all rows": (
        written(lambda m, x: F.linear(x, m.inner.weight, m.inner.bias[:1]), inner=linear()),
        "the linear's bias is [1], but kernels need one element per row (16): add it after the product",
    ),
    "a buffer": (
        with_buffer,
        "the linear's weight is a buffer, but kernels need a parameter: store it as an "
        "nn.Parameter, with requires_grad=False if it is not trained",
    ),
    "complex numbers": (
        complex_numbers,
        "the linear's weight is complex64, but kernels need a floating-point parameter: no kernel supports "
        "another dtype",
    ),
}


FOLLOWED = {  # what the sentences advise
    "call F.linear(x.mT, weight).mT": (added(lambda m, x: F.linear(x, m.w).mT), 1),
    "call F.linear with weight.flatten(1)": (
        written(
            lambda m, x: F.linear(x, m.inner.weight.flatten(1), m.inner.bias).mT,
            inner=lambda: nn.Conv1d(H, H, 1),
        ),
        1,
    ),
    "compute it once and store it": (lambda: remove_parametrizations(weight_norm(linear()()), "weight"), 1),
    "store it in float64": (written(lambda m, x: F.linear(x.double(), m.inner.weight), inner=wide), 1),
    "add it after the product": (
        written(lambda m, x: F.linear(x, m.inner.weight) + m.inner.bias[:1], inner=linear()),
        1,
    ),
    "store it as an nn.Parameter": (untrained, 2),
    "store it as a parameter of its own": (
        written(lambda m, x: F.linear(x, m.whole), whole=lambda: nn.Parameter(torch.randn(8, H))),
        1,
    ),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_the_advised_spelling_is_fused(name: str) -> None:
    make, count = FOLLOWED[name]
    report = fused(make)
    report.expect(linear=count)
    assert not report.refused


@pytest.mark.parametrize("name", REFUSES)
def test_refuses(name: str) -> None:
    make, sentence = REFUSES[name]
    assert sentence in reasons(fused(make), "linear")


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: torch.einsum("bti,hti->bthi", x, m.bank[:, :5]),
        lambda m, x: torch.einsum("bti,hij->bt", x, m.bank),
        lambda m, x: F.conv1d(x, m.bank[:, :5]),
        lambda m, x: F.conv1d(F.rms_norm(x, (H,)).mT, m.bank[0, :, None, :3], groups=H),  # depthwise
    ],
)
def test_other_products_are_no_linears(function) -> None:
    assert not reasons(fused(banked(function)), "linear")


def test_scores_of_normalized_queries_are_no_linear() -> None:
    scores = written(lambda m, x: F.rms_norm(m.q(x), (H,)) @ m.k(x).mT, q=linear(), k=linear())
    assert not reasons(fused(scores), "linear")


def test_a_compiled_model_is_not_told_to_compile() -> None:
    models = [  # the rules are those of linears and of attention
        written(lambda m, x: m.inner(torch.tanh(F.layer_norm(x, (H,)))), inner=linear()),
        written(lambda m, x: F.relu(m.inner(x) @ x.mT) @ x, inner=linear()),
    ]
    for make in models:
        reports = [te_transform.inspect(seeded(make), X, compile=compiled) for compiled in (False, True)]
        assert all(
            "compile=True joins" in report.refused[0].reasons[0] for report in reports
        )  # a fact for both
        assert not any("compile=True" in note for note in reports[1].notes)


def test_refuses_integers() -> None:
    model = linear(bias=False)()
    model.weight = nn.Parameter(torch.randint(-3, 3, (H, H)), requires_grad=False)
    report = te_transform.inspect(nn.Sequential(linear()(), Casting(), model), X)
    assert reasons(report, "linear") == {
        "the linear's weight is int64, but kernels need a floating-point parameter: no kernel supports "
        "another dtype"
    }


class Casting(nn.Module):
    def forward(self, x):
        return x.long()
