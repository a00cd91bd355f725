"""Norms, linears and gated products written by hand, whose eps, scale, casts or branches change later."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_transform
from tests.attacks import Block, Pair, X, odd, with_input_gradient
from tests.bitwise import untouched
from tests.models.tiny import MLP, WIDTH
from tests.zoo import seeded

pytestmark = pytest.mark.usefixtures("at_any_size")


class Norm(nn.Module):
    """The common base of the norms below, each of which has its own forward."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.eps, self.scale, self.upcast, self.centered = 1e-5, 1.0, True, False
        self.config = SimpleNamespace(eps=1e-5)
        self.register_buffer("floor", torch.tensor(1e-5))


def rms(self: Any, x: Tensor, eps: Any = None) -> Tensor:
    y = x.float() if self.upcast else x
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + (self.eps if eps is None else eps))
    return self.weight * y.to(x.dtype)


def layer(self: Any, x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    var = x.var(-1, keepdim=True, unbiased=self.centered)
    return self.weight * (x - mean) / torch.sqrt(var + self.eps) + self.bias


def zero_centered(self: Any, x: Tensor) -> Tensor:
    y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
    return (y * ((1.0 + self.weight.float()) if self.centered else self.weight.float())).type_as(x)


def scaled(self: Any, x: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,), self.weight, self.bias, self.eps) * self.scale


def normalized(self: Any, x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1) * WIDTH**0.5 * self.weight * self.scale


def clamped(self: Any, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True).clamp(min=self.eps)) * self.weight


def branching(self: Any, x: Tensor) -> Tensor:
    if self.upcast:
        return F.rms_norm(x, (WIDTH,), self.weight, self.eps)
    return F.layer_norm(x, (WIDTH,), self.weight, self.bias, self.eps)


def put(**values: Any) -> Callable[[nn.Module], None]:
    return lambda norm: [setattr(norm, name, value) for name, value in values.items()]


# How each computes, and what changes

NORMS: dict[str, tuple[Callable, Callable]] = {
    "eps": (rms, put(eps=1.0)),
    "eps, a tensor": (rms, put(eps=torch.tensor(1.0))),
    "eps of a config": (lambda s, x: rms(s, x, s.config.eps), lambda norm: put(eps=1.0)(norm.config)),
    "eps in a buffer": (lambda s, x: rms(s, x, s.floor), lambda norm: norm.floor.fill_(1.0)),
    "eps of a layer norm": (layer, put(eps=1.0)),
    "unbiased": (layer, put(centered=True)),
    "zero-centered": (zero_centered, put(centered=True)),
    "scale of a normalization": (normalized, put(scale=2.0)),
    "a branch": (branching, put(upcast=False)),
    "weight written to": (rms, lambda norm: norm.weight.data.mul_(2)),
}


UNKNOWN = {"eps, a tensor", "eps in a buffer", "eps as a floor", "eps of the function", "unbiased", "scale"}
UNKNOWN |= {"scale of a normalization"}


def with_norm(make: Callable[[], nn.Module]) -> nn.Module:
    def build() -> nn.Module:
        model = odd(Block.forward)
        model.odd.norm = make()
        return model

    return seeded(build)


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_may_change(name: str) -> None:
    forward, change = NORMS[name]
    model = with_norm(lambda: type("Norm", (Norm,), {"forward": forward})())
    rules = "layernorm_mlp" if name in UNKNOWN else "layernorm_mlp layernorm_mlp"
    Pair.of(model, rules=rules).attack(lambda model: change(model.odd.norm), with_input_gradient)


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "times one": lambda x: x * 1.0,
    "plus nothing": lambda x: x + 0,
    "less nothing": lambda x: x - 0.0,
    "over one": lambda x: x / 1,
    "joined to nothing": lambda x: torch.cat([x], -1),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_what_is_written_to_before_the_norm(name: str) -> None:
    """The residual is copied, also by a factor of one or a cast, and written to in place."""

    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.mlp(x)
        kept = COPIES[name](x)
        x += 1
        return x + self.mlp(self.norm(kept))

    model = odd(forward)
    model.odd.norm = type("Norm", (Norm,), {"forward": rms})()
    Pair.of(model).agree(with_input_gradient)


PLAIN: dict[str, tuple[Callable[[], nn.Module], Callable]] = {
    "RMSNorm's eps, None at first": (lambda: nn.RMSNorm(WIDTH), put(eps=1.0)),
    "LayerNorm's bias": (lambda: nn.LayerNorm(WIDTH), put(bias=None)),
    "LayerNorm's weight, None at first": (
        lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
        lambda norm: put(weight=nn.Parameter(torch.full((WIDTH,), 2.0)))(norm),
    ),
    "LayerNorm's class": (
        lambda: nn.LayerNorm(WIDTH),
        put(__class__=type("Own", (nn.LayerNorm,), {"forward": rms}), upcast=False),
    ),
    "LayerNorm's dimensions": (lambda: nn.LayerNorm((5, WIDTH)), put(eps=1.0)),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_norm_of_torch_may_change(name: str) -> None:
    make, change = PLAIN[name]
    Pair.of(with_norm(make)).attack(lambda model: change(model.odd.norm), with_input_gradient)


def machine_eps(self: Any, x: Tensor) -> Tensor:
    return rms(self, x, torch.finfo(x.dtype).eps)


def function_without_eps(self: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, (WIDTH,), self.weight)


@pytest.mark.parametrize(
    "dtype", [torch.float64, pytest.param(torch.bfloat16, marks=pytest.mark.integration)]
)
@pytest.mark.parametrize(
    "norm", [rms, machine_eps, function_without_eps, nn.RMSNorm], ids=lambda n: n.__name__
)
def test_a_dtype_that_a_norm_goes_by_may_change(norm: Callable, dtype: torch.dtype) -> None:
    """Its eps is that of its input's dtype, or it computes in fp32 in any: small inputs show it."""
    own = norm is nn.RMSNorm
    model = with_norm(lambda: nn.RMSNorm(WIDTH) if own else type("Norm", (Norm,), {"forward": norm})())
    pair = Pair.of(model, 1e-4 * X)
    for model in pair.models:
        model.to(dtype)
    exact = 1e-12 if norm in (function_without_eps, nn.RMSNorm) else 1e-6
    pair.agree(lambda model, x: model(x.to(dtype)), atol=exact if dtype is torch.float64 else 2e-2)


# Linears


class Linear(nn.Linear):
    """The common base of the linears below, each of which has its own forward."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.scale, self.step, self.merged, self.width = 1.0, 0.0, True, None
        self.down, self.up = (nn.Parameter(torch.ones(shape)) for shape in ((2, args[0]), (args[1], 2)))


def adapted(self: Any, x: Tensor) -> Tensor:
    y = F.linear(x, self.weight, self.bias)
    return y if self.merged else y + F.linear(F.linear(x, self.down), self.up)


def rounded(self: Any, x: Tensor) -> Tensor:
    weight = torch.round(self.weight / self.step) * self.step if self.step else self.weight
    return F.linear(x, weight, self.bias)


def cast(self: Any, x: Tensor) -> Tensor:
    return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


LINEARS: dict[str, tuple[Callable, Callable]] = {
    "scale of the weight": (lambda s, x: F.linear(x, s.weight * s.scale, s.bias), put(scale=2.0)),
    "a branch": (adapted, put(merged=False)),
    "a rounded weight": (rounded, put(step=0.25)),
    "rows": (
        lambda s, x: F.pad(F.linear(x, s.weight[: s.width]), (0, len(s.weight) - (s.width or len(s.weight)))),
        put(width=8),
    ),
    "no bias": (cast, put(bias=None)),
    "addmm": (
        lambda s, x: torch.addmm(s.bias, x.flatten(0, 1), s.weight.t(), alpha=s.scale).unflatten(
            0, x.shape[:2]
        ),
        put(scale=2.0),
    ),
}


@pytest.mark.parametrize("name", LINEARS)
def test_a_linear_may_change(name: str) -> None:
    forward, change = LINEARS[name]

    def build() -> nn.Module:
        model = odd(Block.forward)
        model.odd.mlp.fc1 = type("Linear", (Linear,), {"forward": forward})(WIDTH, 2 * WIDTH)
        return model

    Pair.of(seeded(build)).attack(lambda model: change(model.odd.mlp.fc1), with_input_gradient)


def test_linears_that_cast_their_weights_take_inputs_of_any_dtype() -> None:
    """openai/whisper and nanochat have linears that cast their weights."""

    def build() -> nn.Module:
        mlp = MLP()
        mlp.fc1, mlp.fc2 = (type("Linear", (Linear,), {"forward": cast})(*s) for s in ((16, 32), (32, 16)))
        return nn.Sequential(seeded(Block), mlp)

    pair = Pair.of(seeded(build))
    pair.agree(lambda model, x: model[1](x.bfloat16()), atol=3e-2)
    pair.agree(lambda model, x: model[1](x.double()), atol=1e-10)


# Gated products


GATED: dict[str, Callable[[Tensor], Tensor]] = {
    "gate first": lambda y: F.silu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1],
    "columns left out": lambda y: F.silu(y[..., :16]) * y[..., 16:32],
    "columns in both": lambda y: F.silu(y[..., :32]) * y[..., 16:],
    "unequal": lambda y: (F.silu(y[..., :12]).repeat(1, 1, 3) * y[..., 12:])[..., :24],
    "one beside the gate": lambda y: F.silu(y[..., :24]) * y[..., 24:25],
    "one in the gate": lambda y: y[..., :24] * F.silu(y[..., 24:25]),
    "one for all": lambda y: torch.sigmoid(y[..., :1]) * y[..., 1:],
    "every other": lambda y: F.silu(y[..., ::2]) * y[..., 1::2],
    "three": lambda y: F.silu(y.chunk(3, -1)[0]) * y.chunk(3, -1)[1] + y.chunk(3, -1)[2],
    "clamped": lambda y: F.silu(y[..., :24].clamp(max=0.5)) * (y[..., 24:].clamp(-0.5, 0.5) + 1),
    "read again": lambda y: F.silu(y[..., :24]) * y[..., 24:] + y[..., :24],
}


class Gated(nn.Module):
    def __init__(self, gate: Callable[[Tensor], Tensor]):
        super().__init__()
        self.gate, columns = gate, gate(torch.zeros(2, 5, 48)).shape[-1]
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48), nn.Linear(columns, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate(self.up(self.norm(x))))


@pytest.mark.parametrize("name", GATED)
def test_a_gated_product_takes_the_columns_that_it_takes(name: str) -> None:
    Pair.of(seeded(lambda: nn.Sequential(Block(), Gated(GATED[name])))).agree()


@pytest.mark.parametrize("order", ["gate first", "gate second", "the same twice"])
def test_two_linears_of_a_gated_product_may_change_places(order: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.norm(x)
        one, other = (self.up, self.gate) if order == "gate second" else (self.gate, self.up)
        return self.down(F.silu(one(y)) * (one if order == "the same twice" else other)(y))

    def build() -> nn.Module:
        model = type("Gated", (Block,), {"forward": forward})()
        model.gate, model.up, model.down = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
        return model

    def change_places(model: Any) -> None:
        model.gate, model.up = model.up, model.gate

    Pair.of(seeded(build)).attack(change_places, with_input_gradient)


# Activations with a backward of their own, which is that of the activation only for some numbers


class Clipped(torch.autograd.Function):
    """A ReLU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.relu(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (grad * (x > 0)).clamp(-1.5, 1.5)


class Rounded(Clipped):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad.bfloat16().float() * (x > 0)


class Saturated(Clipped):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * ((x > 0) & (x < 8))


@pytest.mark.parametrize("function", [Clipped, Rounded, Saturated])
def test_a_gradient_that_is_changed_on_its_way_is_no_activations(function: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.mlp.fc2(function.apply(8 * self.mlp.fc1(self.norm(x))))

    Pair.of(odd(forward)).agree(lambda model, x: [3 * out for out in model(x)])


# What is quantized on its way by a cast

QUANTIZED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a norm": lambda m, x: m.normed(x).to(torch.int8).float() * m.norm.weight,
    "its weight": lambda m, x: m.normed(x) * (m.norm.weight).to(torch.int32).float(),
    "a norm, in eight bits": lambda m, x: m.normed(x).to(torch.float8_e5m2).float() * m.norm.weight,
    "a norm, in 16 bits": lambda m, x: m.normed(x).bfloat16().float() * m.norm.weight,
    "what a norm reads, in 16 bits": lambda m, x: m.normed(x.bfloat16().float()) * m.norm.weight,
    "its weight, in 16 bits": lambda m, x: m.normed(x) * (m.norm.weight + 1e-3).half().float(),
    "scores, in 16 bits": lambda m, x: (x @ x.mT).bfloat16().float().softmax(-1) @ x,
    "queries, in 16 bits": lambda m, x: (x.bfloat16().float() @ x.mT).softmax(-1) @ x,
    "a softmax in 16 bits": lambda m, x: (x @ x.mT).softmax(-1, dtype=torch.bfloat16).float() @ x,
    "scores": lambda m, x: (9 * x @ x.mT).to(torch.int32).float().softmax(-1) @ x,
    "scores, in eight bits": lambda m, x: (x @ x.mT).to(torch.float8_e4m3fn).float().softmax(-1) @ x,
    "probabilities": lambda m, x: (99 * x @ x.mT).softmax(-1).to(torch.uint8).float() @ x,
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_cast_that_quantizes_is_none_that_is_looked_through(name: str) -> None:
    class Quantizes(Block):
        def normed(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(QUANTIZED[name](self, x))

    Pair.of(seeded(lambda: nn.Sequential(Block(), Quantizes()))).agree()


# Modules that a function holds: minGPT's MLP


class Lambda(nn.Module):
    """A block whose forward calls its MLP through a function: a copy's would call the original's modules."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), MLP()
        mlp = self.mlp
        self.call = lambda x: mlp.fc2(mlp.act(mlp.fc1(x)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.call(self.norm(x))


def test_a_copy_that_reads_parameters_of_the_original_is_refused() -> None:
    model = seeded(Lambda)
    with untouched(model), pytest.raises(te_transform.ModelError, match="pass inplace=True"):
        te_transform.convert(model, X, verify=False)


def test_a_function_that_holds_modules_is_fused_in_place() -> None:
    model, reference = seeded(Lambda), seeded(Lambda)
    assert te_transform.convert(model, X, inplace=True, verify=False) is model
    assert te_transform.report(model).counts["layernorm_mlp"] == 1
    pair = Pair(reference, model, X)
    for trained in pair.models:
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        trained(X).square().mean().backward()
        optimizer.step()
    pair.agree(with_input_gradient)


def test_a_sparse_buffer_stays() -> None:
    """openai/whisper has a sparse buffer."""

    def build() -> nn.Module:
        model = seeded(Block)
        model.register_buffer("heads", torch.eye(4).to_sparse(), persistent=False)
        return model

    for verify in (True, False):
        model = te_transform.convert(build(), X, verify=verify)
        assert te_transform.report(model).fused
        assert torch.equal(copy.deepcopy(model).heads.to_dense(), torch.eye(4))
        torch.testing.assert_close(model(X), build()(X))
